#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/setting_form.hpp"

namespace cudasched::forms {
namespace {

// As a number or a word; "-" where it is refused.
std::string read(const Form& form, const std::string& text) {
  try {
    const Value value = parse(form, text);
    if (const auto* const word = std::get_if<Word>(&value)) return std::string(form.words[word->place]);
    if (const auto* const number = std::get_if<double>(&value)) return std::to_string(*number);
    if (const auto* const number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
    return std::get<bool>(value) ? "true" : "false";
  } catch (const Refusal&) {
    return "-";
  }
}

TEST(SettingForm, ValuesUpToTheBoundsAreTaken) {
  const Form time = ms(0.001).or_words("auto");
  for (const char* const text : {"0.0009", "3600000.5", "nan", "inf", "1e400", "5ms", " 1", "0x10", "", "automatic"}) {
    EXPECT_EQ(read(time, text), "-") << text;
  }
  EXPECT_EQ(read(time, "0.001"), "0.001000");
  EXPECT_EQ(read(time, "3.6e6"), "3600000.000000");
  EXPECT_EQ(read(time, "+5"), "5.000000");
  EXPECT_EQ(read(time, "auto"), "auto");
  for (const char* const text : {"-9", "9", "1.5", "99999999999999999999", "+-1"}) {
    EXPECT_EQ(read(integer(-8, 8), text), "-") << text;
  }
  EXPECT_EQ(read(integer(-8, 8), "-8"), "-8");
}

TEST(SettingForm, ASizeHasAUnit) {
  constexpr std::pair<const char*, const char*> kSizes[] = {{"none", "0"},
                                                            {"0", "0"},
                                                            {"20GiB", "21474836480"},
                                                            {"20Gi", "21474836480"},
                                                            {"512Mi", "536870912"},
                                                            {"1.5 GB", "1500000000"},
                                                            {"1e7", "10000000"},
                                                            {".5GiB", "536870912"},
                                                            {"1048576", "1048576"},
                                                            {"9007199254740993", "9007199254740993"},  // no double
                                                            {"1152921504606846976", "1152921504606846976"},
                                                            {"1152921504606846977", "-"},
                                                            {"1048575", "-"},
                                                            {"20gib", "-"},
                                                            {"20GiBs", "-"},
                                                            {"20gi", "-"},
                                                            {"-1GiB", "-"},
                                                            {"+1GiB", "-"},
                                                            {"inf", "-"},
                                                            {"1e400", "-"}};
  for (const auto& [text, bytes] : kSizes) EXPECT_EQ(read(kSize, text), bytes) << text;
}

TEST(SettingForm, WordsAndSwitches) {
  const Form word = one_of("normal", "best_effort");
  EXPECT_EQ(read(word, "best-effort"), "best_effort");
  EXPECT_EQ(read(word, "Normal"), "-");
  EXPECT_EQ(read(word, ""), "-");
  EXPECT_EQ(read(kSwitch, "YES"), "true");
  EXPECT_EQ(read(kSwitch, "maybe"), "-");
}

TEST(SettingForm, ARefusalSaysWhatIsTaken) {
  EXPECT_EQ(wanted(us(0).or_words("auto")), "auto or a number of us, from 0 to 3600000000");
  EXPECT_EQ(wanted(integer(1, 9, "us").or_words("auto", "off")), "auto, off or an integer of us, from 1 to 9");
  EXPECT_EQ(wanted(integer(-8, 8)), "an integer from -8 to 8");
  EXPECT_EQ(wanted(one_of("a", "b", "c")), "'a', 'b' or 'c'");
}

// What a wrong line of a table is stopped by.
static_assert(!fits<int>(ms(1), 1'000'000 - 1) && fits<int>(ms(1), 1'000'000));
static_assert(!fits<bool>(integer(0, 1), true) && !fits<int>(kSwitch, 1) && !fits<std::string>(one_of("a"), "b"));
static_assert(!fits<std::optional<int>>(ms(0), std::nullopt) && !fits<double>(kSize, 0));

}  // namespace
}  // namespace cudasched::forms
