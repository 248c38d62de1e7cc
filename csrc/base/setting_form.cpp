#include "base/setting_form.hpp"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/switch.h"

namespace cudasched::forms {
namespace {

template <typename T>
std::optional<T> read(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  T result{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(result) : std::nullopt;
}

// "20GiB", "20Gi" (as Kubernetes writes it), "1.5 GB" or a number of bytes; "none" and "0" are 0.
std::optional<std::int64_t> size(const Form& form, std::string_view text) {
  if (text == "none" || text == "0") return 0;
  const char* const last = text.data() + text.size();
  std::int64_t whole = 0;  // to the byte, which a double has no room for
  auto parsed = std::from_chars(text.data(), last, whole);
  const bool is_whole = parsed.ec == std::errc() &&
                        (parsed.ptr == last || std::string_view(".eE").find(*parsed.ptr) == std::string_view::npos);
  double amount = static_cast<double>(whole);
  if (!is_whole) parsed = std::from_chars(text.data(), last, amount);
  if (parsed.ec != std::errc() || !std::isfinite(amount)) return std::nullopt;
  std::string_view unit(parsed.ptr, static_cast<std::size_t>(last - parsed.ptr));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {{"", 1},
                                                                  {"B", 1},
                                                                  {"KB", 1'000},
                                                                  {"MB", 1'000'000},
                                                                  {"GB", 1'000'000'000},
                                                                  {"TB", 1'000'000'000'000},
                                                                  {"KiB", 1LL << 10},
                                                                  {"Ki", 1LL << 10},
                                                                  {"MiB", 1LL << 20},
                                                                  {"Mi", 1LL << 20},
                                                                  {"GiB", 1LL << 30},
                                                                  {"Gi", 1LL << 30},
                                                                  {"TiB", 1LL << 40},
                                                                  {"Ti", 1LL << 40}};
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    const double bytes = amount * static_cast<double>(factor);
    const bool beyond = is_whole && whole > static_cast<std::int64_t>(form.most) / factor;
    if (bytes < form.least || bytes > form.most || beyond) return std::nullopt;
    return is_whole ? whole * factor : static_cast<std::int64_t>(bytes);
  }
  return std::nullopt;
}

std::string listed(const Form& form, const char* quote) {
  std::string text;
  for (std::size_t i = 0; i < form.words.size() && !form.words[i].empty(); ++i) {
    const bool is_last = i + 1 == form.words.size() || form.words[i + 1].empty();
    text += i == 0 ? "" : is_last && form.kind == Kind::kWord ? " or " : ", ";
    text += quote + std::string(form.words[i]) + quote;
  }
  return text;
}

}  // namespace

std::string wanted(const Form& form) {
  switch (form.kind) {
    case Kind::kWord:
      return listed(form, "'");
    case Kind::kSwitch:
      return "on or off (or 1 and 0, true and false, yes and no)";
    case Kind::kSize:
      return "a size of at least 1 MiB, such as 20GiB, 500MB or a number of bytes, or none";
    case Kind::kText:
    case Kind::kPath:
      return "text, and not empty";
    case Kind::kInteger:
    case Kind::kNumber:
      break;
  }
  std::array<char, 64> bounds{};
  std::snprintf(bounds.data(), bounds.size(), " from %.10g to %.10g", form.least, form.most);
  const bool is_integer = form.kind == Kind::kInteger;
  const std::string words = listed(form, "");
  return words + (words.empty() ? "" : " or ") + (is_integer ? "an integer" : "a number") +
         (form.unit.empty() ? "" : " of " + std::string(form.unit)) + (is_integer && form.unit.empty() ? "" : ",") +
         bounds.data();
}

Value parse(const Form& form, std::string_view text) {
  std::string word(text);
  for (char& letter : word) letter = letter == '-' ? '_' : letter;  // best-effort
  if (const int at = place(form, form.kind == Kind::kWord ? word : text); at >= 0) {
    return Word{static_cast<std::size_t>(at)};
  }
  if (form.kind >= Kind::kText) return std::string(text);
  if (form.kind == Kind::kSwitch) {
    if (const int value = cudasched_switch(std::string(text).c_str()); value >= 0) return value == 1;
  } else if (form.kind == Kind::kSize) {
    if (const auto value = size(form, text)) return *value;
  } else if (form.kind == Kind::kInteger) {
    const auto value = read<std::int64_t>(text);
    if (value && double(*value) >= form.least && double(*value) <= form.most) return *value;
  } else if (form.kind == Kind::kNumber) {
    const auto value = read<double>(text);
    if (value && *value >= form.least && *value <= form.most) return *value;
  }
  throw Refusal{wanted(form)};
}

}  // namespace cudasched::forms
