#include "runtime/settings.hpp"

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdio>
#include <iterator>
#include <type_traits>
#include <variant>

#include "base/error.hpp"
#include "base/setting_form.hpp"

namespace cudasched::runtime {
namespace {

std::string_view base_name(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

template <typename T>
void assign(T& member, const forms::Form& form, const forms::Value& value) {
  if (const auto* const word = std::get_if<forms::Word>(&value)) {
    if constexpr (std::same_as<T, std::string>) member = form.words[word->place];
    if constexpr (std::is_enum_v<T> || std::same_as<T, bool>) member = static_cast<T>(word->place);
  } else if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
    member = std::get<T>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    const auto* const number = std::get_if<double>(&value);
    member = static_cast<T>(number == nullptr ? std::get<std::int64_t>(value) : *number * form.scale);
  }
}

template <typename T>
void assign(std::optional<T>& member, const forms::Form& form, const forms::Value& value) {
  const auto* const word = std::get_if<forms::Word>(&value);
  T inner{0};
  if (word == nullptr) assign(inner, form, value);
  member = word != nullptr && word->place == 0 ? std::nullopt : std::optional(inner);
}

struct Variable {
  const char* name;
  forms::Form form;
  void (*assign)(Settings& settings, const forms::Form& form, const forms::Value& value);
};

using When = SliceSettings::When;
#define SETTING(type, member, initial, NAME, form) \
  static_assert(forms::fits<type>(form, initial), #NAME ": the type or the default is not of the setting's form");
#define SLICE_SETTING SETTING
#define ELSEWHERE(...)
#include "runtime/settings.inc"

constexpr Variable kVariables[] = {
#define SETTING(type, member, initial, NAME, form) \
  {"CUDASCHED_" #NAME, form, [](Settings& s, const forms::Form& f, const forms::Value& v) { assign(s.member, f, v); }},
#define SLICE_SETTING(type, member, initial, NAME, form) SETTING(type, slices.member, initial, NAME, form)
#define ELSEWHERE(...)
#include "runtime/settings.inc"
};

}  // namespace

void Settings::set(std::string_view variable, const std::string& value) {
  const auto known =
      std::find_if(std::begin(kVariables), std::end(kVariables), [&](const Variable& v) { return variable == v.name; });
  if (known == std::end(kVariables)) throw ConfigError("there is no setting " + std::string(variable));
  try {
    known->assign(*this, known->form, forms::parse(known->form, value));
  } catch (const forms::Refusal& refusal) {
    throw ConfigError(std::string(variable) + "=" + value + " has no meaning: it takes " + refusal.wanted);
  }
}

Settings Settings::read(const Lookup& lookup, std::vector<std::string>& complaints) {
  Settings settings;
  for (const Variable& variable : kVariables) {
    const char* const value = lookup(variable.name);
    if (value == nullptr || *value == '\0') continue;
    try {
      settings.set(variable.name, value);
    } catch (const ConfigError& error) {
      complaints.push_back(std::string(error.what()) + "; the default is used");
    }
  }
  return settings;
}

std::string program_name() {
  std::array<char, 4096> line{};
  std::size_t bytes = 0;
  if (std::FILE* file = std::fopen("/proc/self/cmdline", "re")) {
    bytes = std::fread(line.data(), 1, line.size() - 1, file);
    std::fclose(file);
  }
  const std::string_view program = line.data();
  std::string name(base_name(program));
  // An interpreter says little; the script it runs says more.
  const std::size_t second = program.size() + 1;
  if (second < bytes && line[second] != '-') name += " " + std::string(base_name(line.data() + second));
  return name.empty() ? "unknown" : name;
}

}  // namespace cudasched::runtime
