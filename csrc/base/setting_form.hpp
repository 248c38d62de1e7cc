// The values that a setting may have, and how they are written as text. Pure; any thread; parse() throws a Refusal.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace cudasched::forms {

enum class Kind : std::uint8_t { kWord, kSwitch, kInteger, kNumber, kSize, kText, kPath };

struct Form {
  Kind kind;
  double least = 0;
  double most = 0;
  std::string_view unit = {};
  double scale = 1;                            // of the member's unit, of which a `unit` has so many
  bool may_lack = false;                       // a default of 0 stands for none
  std::array<std::string_view, 4> words = {};  // all of a kWord, or words in the place of a number

  constexpr Form or_none() const {
    Form form = *this;
    form.may_lack = true;
    return form;
  }
  // Of a std::optional: the first word is an empty one, the second a 0.
  constexpr Form or_words(std::string_view empty, std::string_view zero = {}) const {
    Form form = *this;
    form.words = {empty, zero};
    return form;
  }
};

inline constexpr double kHourUs = 3'600e6;
inline constexpr Form kSwitch{Kind::kSwitch};
inline constexpr Form kSize = Form{Kind::kSize, 0x1p20, 0x1p60}.or_none();
inline constexpr Form kText = Form{Kind::kText};
inline constexpr Form kPath = Form{Kind::kPath};
constexpr Form number(double least, double most, std::string_view unit = {}, double scale = 1) {
  return {Kind::kNumber, least, most, unit, scale};
}
// Of a member in nanoseconds; an hour at most.
constexpr Form us(double least) { return number(least, kHourUs, "us", 1e3); }
constexpr Form ms(double least, double most = kHourUs / 1e3) { return number(least, most, "ms", 1e6); }
constexpr Form integer(int least, int most, std::string_view unit = {}) {
  return {Kind::kInteger, double(least), double(most), unit};
}
// In the order of the member's enumerators.
constexpr Form one_of(std::same_as<const char*> auto... words) { return {.kind = Kind::kWord, .words = {words...}}; }

constexpr int place(const Form& form, std::string_view word) {
  for (std::size_t i = 0; i < form.words.size() && !word.empty(); ++i) {
    if (form.words[i] == word) return static_cast<int>(i);
  }
  return -1;
}

// Whether a member of this type can have the form's values, and its default is one of them.
template <typename Member, typename Initial>
constexpr bool fits(const Form& form, const Initial& initial) {
  if constexpr (std::same_as<Initial, std::nullopt_t>) {
    using Inner = typename Member::value_type;
    return !form.words[0].empty() && fits<Inner>(form, static_cast<Inner>(form.least * form.scale));
  } else if constexpr (std::same_as<Member, std::string>) {
    return form.kind >= Kind::kText || (form.kind == Kind::kWord && place(form, initial) >= 0);
  } else if constexpr (std::is_enum_v<Member> || std::same_as<Member, bool>) {
    if (form.kind == Kind::kSwitch) return std::same_as<Member, bool>;
    const auto at = static_cast<std::size_t>(initial);
    return form.kind == Kind::kWord && at < form.words.size() && !form.words[at].empty();
  } else {
    const double value = static_cast<double>(initial) / form.scale;
    return form.kind >= Kind::kInteger && form.kind <= Kind::kSize &&
           (std::floating_point<Member> ? form.kind == Kind::kNumber : form.kind != Kind::kNumber || form.scale > 1) &&
           ((form.may_lack && value == 0) || (value >= form.least && value <= form.most));
  }
}

struct Word {
  std::size_t place;
};
using Value = std::variant<Word, bool, std::int64_t, double, std::string>;

// How a value must be written instead.
struct Refusal {
  std::string wanted;
};

std::string wanted(const Form& form);
Value parse(const Form& form, std::string_view text);

}  // namespace cudasched::forms
