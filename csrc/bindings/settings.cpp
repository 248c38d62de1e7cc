// `_core.settings` and `_core.parse_setting`: the table of runtime/settings.inc, for cudasched.config.
#include "runtime/slices/settings.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/class.hpp"
#include "base/clock.hpp"
#include "base/setting_form.hpp"
#include "bindings/bindings.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using forms::Form;
using forms::Kind;
using When = runtime::SliceSettings::When;

// A default, as Config has it.
template <typename T>
py::object python(const Form& form, const T& initial) {
  if constexpr (std::is_convertible_v<T, std::string_view>) {
    return std::string_view(initial).empty() ? py::object(py::none()) : py::str(initial);
  } else if constexpr (std::is_same_v<T, std::nullopt_t>) {
    return py::cast(form.words[0]);
  } else {
    if (form.kind == Kind::kSwitch) return py::bool_(initial != T{});
    if (form.kind == Kind::kWord) return py::cast(form.words[static_cast<std::size_t>(initial)]);
    if (form.may_lack && initial == T{} && form.kind != Kind::kSize) return py::none();
    const double value = static_cast<double>(initial) / form.scale;
    return form.kind == Kind::kNumber ? py::cast(value) : py::cast(static_cast<std::int64_t>(value));
  }
}

// A name that stands in two lines is none of an enumeration.
enum class Names : std::uint8_t {
#define SETTING(type, member, initial, NAME, form) k##NAME,
#define SLICE_SETTING SETTING
#define ELSEWHERE(NAME, form) k##NAME,
#include "runtime/settings.inc"
};

struct Setting {
  const char* name;
  Form form;
  py::object (*initial)(const Form& form);
};

constexpr Setting kSettings[] = {
#define SETTING(type, member, initial, NAME, form) {#NAME, form, [](const Form& f) { return python(f, initial); }},
#define SLICE_SETTING SETTING
#define ELSEWHERE(NAME, form) {#NAME, form, [](const Form&) -> py::object { return py::none(); }},
#include "runtime/settings.inc"
};

// Kind, words, default and bounds of each.
py::dict settings() {
  constexpr const char* kKinds[] = {"word", "switch", "integer", "number", "size", "text", "path"};
  py::dict all;
  for (const Setting& setting : kSettings) {
    py::list words;
    for (const std::string_view word : setting.form.words) {
      if (!word.empty()) words.append(word);
    }
    all[setting.name] = py::make_tuple(kKinds[static_cast<std::size_t>(setting.form.kind)], py::tuple(words),
                                       setting.initial(setting.form), setting.form.least, setting.form.most);
  }
  return all;
}

py::object parse_setting(std::string_view name, std::string_view text) {
  for (const Setting& setting : kSettings) {
    if (name != setting.name) continue;
    try {
      return std::visit(
          [&](const auto& of) -> py::object {
            if constexpr (std::is_same_v<std::decay_t<decltype(of)>, forms::Word>) {
              return py::cast(setting.form.words[of.place]);
            } else {
              return py::cast(of);
            }
          },
          forms::parse(setting.form, text));
    } catch (const forms::Refusal& refusal) {
      throw py::value_error(refusal.wanted);
    }
  }
  throw py::key_error(std::string(name));
}

}  // namespace

void bind_settings(py::module_& module) {
  module.def("settings", &settings);
  module.def("parse_setting", &parse_setting, py::arg("name"), py::arg("text"));
}

}  // namespace cudasched::bindings
