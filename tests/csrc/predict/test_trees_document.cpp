// The two readers: what they read, what they refuse, and that no mutation of a model harms them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "predict/trees/document.hpp"
#include "predict/trees/evaluator.hpp"
#include "predict/trees_support.hpp"

namespace cudasched::predict::trees {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& read) {
  try {
    read();
  } catch (const ModelError& error) {
    return error.what();
  }
  return "accepted";
}

std::string json_refusal(const std::string& text) {
  return refusal([&] { read_json(text); });
}

std::string ubjson_refusal(const std::string& bytes) {
  return refusal([&] { read_ubjson(bytes); });
}

// Bytes with zeros among them.
template <std::size_t kSize>
std::string bytes(const char (&text)[kSize]) {
  return {text, kSize - 1};
}

TEST(Json, ReadsEveryKindOfValue) {
  const Value value = read_json(R"( {"a" : [1, -2.5e1, 0], "b":["x",null,true,false,{}], "c":3, "d":[]} )");
  const auto& object = std::get<Object>(value.content);
  ASSERT_EQ(object.size(), 4U);
  const auto& numbers = std::get<Numbers>(object[0].value.content);
  ASSERT_EQ(numbers.size(), 3U);
  EXPECT_EQ(numbers[1].value, -25);
  EXPECT_EQ(numbers[1].real, -25.0F);
  const auto& items = std::get<Array>(object[1].value.content);
  ASSERT_EQ(items.size(), 5U);
  EXPECT_EQ(std::get<std::string>(items[0].content), "x");
  EXPECT_TRUE(std::holds_alternative<std::monostate>(items[1].content));
  EXPECT_TRUE(std::get<bool>(items[2].content));
  EXPECT_FALSE(std::get<bool>(items[3].content));
  EXPECT_EQ(std::get<Number>(object[2].value.content).value, 3);
}

TEST(Json, Strings) {
  EXPECT_EQ(std::get<std::string>(read_json(R"("\"\\\/\b\f\n\r\t\u0041\u00e9\u4e16\ud83d\ude00")").content),
            "\"\\/\b\f\n\r\tA\u00e9\u4e16\U0001f600");
}

// Nearest to the text, not to the double that is nearest to the text: these lie just above the middle of two floats.
TEST(Json, FloatsAreRoundedOnce) {
  const Value value = read_json("[1.00000005960464477540, 9.8E-45, -0.0, 3.4028235E38]");
  const auto& numbers = std::get<Numbers>(value.content);
  EXPECT_EQ(bits_of(numbers[0].real), bits_of(1.0F) + 1);
  EXPECT_EQ(bits_of(static_cast<float>(numbers[0].value)), bits_of(1.0F));
  EXPECT_EQ(bits_of(numbers[1].real), 7U);
  EXPECT_EQ(bits_of(numbers[2].real), 0x80000000U);
  EXPECT_EQ(numbers[3].real, std::numeric_limits<float>::max());
}

TEST(Json, NumbersThatAreNotFinite) {
  const Value value = read_json("[NaN,Infinity,-Infinity]");
  const auto& numbers = std::get<Numbers>(value.content);
  EXPECT_TRUE(std::isnan(numbers[0].real));
  EXPECT_EQ(numbers[1].real, std::numeric_limits<float>::infinity());
  EXPECT_EQ(numbers[2].value, -std::numeric_limits<double>::infinity());
}

TEST(Json, RefusesWhatIsNone) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1,",
                           "[1,]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "[1 2]",
                           "01",
                           "+1",
                           "1.",
                           ".5",
                           "1e",
                           "-",
                           "--1",
                           "nul",
                           "nulL",
                           "tru",
                           "True",
                           "nan",
                           "-Inf",
                           "-NaN",
                           "\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\n\"",
                           "[1,\"a\"]",
                           "[\"a\",1]",
                           "1 2",
                           "{} {}",
                           "\xEF\xBB\xBF{}",
                           "'a'",
                           "1e999",
                           "0x10",
                           "\"\\u+123\""}) {
    EXPECT_THAT(json_refusal(text), HasSubstr("JSON, byte ")) << text;
  }
}

TEST(Json, IsBounded) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(json_refusal(nested(kMaxNesting)), "accepted");
  EXPECT_THAT(json_refusal(nested(kMaxNesting + 1)), HasSubstr("nested deeper"));
  EXPECT_THAT(json_refusal(nested(1'000'000)), HasSubstr("nested deeper"));
  std::string many = "[";
  for (std::size_t i = 0; i <= kMaxValues; ++i) many += "[],";
  EXPECT_THAT(json_refusal(many), HasSubstr("values"));
  std::string keys = "{";
  for (std::size_t i = 0; i <= kMaxKeys; ++i) keys += "\"" + std::to_string(i) + "\":0,";
  EXPECT_THAT(json_refusal(keys), HasSubstr("keys"));
  EXPECT_THAT(json_refusal(std::string(kMaxDocumentBytes + 1, ' ')), HasSubstr("more than"));
}

TEST(Ubjson, ReadsEveryKindOfValue) {
  const Value value =
      read_ubjson(bytes("{i\x01"
                        "a[$d#i\x02\x3f\x80\x00\x00\xbf\x80\x00\x00"
                        "i\x01"
                        "b[#i\x03i\xffU\xffI\xff\xfe"
                        "i\x01"
                        "c[SU\x01xTFZ]"
                        "i\x01"
                        "dD\x3f\xf0\x00\x00\x00\x00\x00\x00"
                        "i\x01"
                        "e[$L#l\x00\x00\x00\x01\xff\xff\xff\xff\xff\xff\xff\xfe}"));
  const auto& object = std::get<Object>(value.content);
  ASSERT_EQ(object.size(), 5U);
  EXPECT_EQ(std::get<Numbers>(object[0].value.content)[1].real, -1.0F);
  const auto& integers = std::get<Numbers>(object[1].value.content);
  ASSERT_EQ(integers.size(), 3U);
  EXPECT_EQ(integers[0].value, -1);
  EXPECT_EQ(integers[1].value, 255);
  EXPECT_EQ(integers[2].value, -2);
  EXPECT_EQ(std::get<Array>(object[2].value.content).size(), 4U);
  EXPECT_EQ(std::get<Number>(object[3].value.content).real, 1.0F);
  EXPECT_EQ(std::get<Numbers>(object[4].value.content)[0].value, -2);
}

TEST(Ubjson, RefusesWhatIsNone) {
  const std::string cases[] = {
      "",
      "{",
      "[",
      "x",
      "C",
      "H",
      bytes("{i\x01"),
      bytes("{i\xff"
            "aT}"),
      bytes("{d\x00\x00\x00\x00T}"),
      bytes("{$i#i\x01"),
      bytes("[$d#L\x7f\xff\xff\xff\xff\xff\xff\xff"),
      bytes("[$T#i\x05"),
      bytes("[$S#i\x01"),
      bytes("[$d\x01"),
      bytes("[#L\x7f\xff\xff\xff\xff\xff\xff\xff"),
      bytes("[#i\xff"),
      bytes("SL\x7f\xff\xff\xff\xff\xff\xff\xff"),
      bytes("[i\x01T]"),
      bytes("[Ti\x01]"),
      bytes("D\x7e\x37\xe4\x3c\x88\x00\x75\x9c"),
      bytes("L\x7f\xff\xff\xff\xff\xff\xff\xff"),
      "TT",
      bytes("{i\x01"
            "aTi\x01"
            "aT}"),
  };
  for (const std::string& one : cases) {
    EXPECT_THAT(ubjson_refusal(one), HasSubstr("UBJSON, byte ")) << ::testing::PrintToString(one);
  }
}

TEST(Ubjson, IsBounded) {
  EXPECT_THAT(ubjson_refusal(std::string(1'000'000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(ubjson_refusal("[" + std::string(kMaxValues + 1, 'Z')), HasSubstr("values"));
  EXPECT_EQ(ubjson_refusal(std::string(10, 'N') + "T"), "accepted");
}

// Bytes flipped, replaced, cut out, doubled and spliced: every outcome is a ModelError or a model that can be walked.
void mutate(std::string& bytes, std::mt19937_64& random) {
  constexpr std::string_view kTelling = "{}[]\",:#$dDiUIlLSTFZN0123456789-eE\\\x00\x7f\xff";
  const auto place = [&] { return static_cast<std::size_t>(random() % bytes.size()); };
  for (std::uint64_t changes = 1 + random() % 4; changes > 0 && !bytes.empty(); --changes) {
    const std::size_t at = place();
    const std::size_t length = 1 + random() % 24;
    switch (random() % 6) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        break;
      case 1:
        bytes[at] = kTelling[random() % kTelling.size()];
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(at, bytes.substr(place(), length));
        break;
      case 4:
        bytes.insert(at, 1, kTelling[random() % kTelling.size()]);
        break;
      default:
        bytes.resize(random() % 8 == 0 ? at : bytes.size());
        if (!bytes.empty()) bytes[place()] = static_cast<char>(random());
        break;
    }
  }
}

class FuzzTest : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Formats, FuzzTest, ::testing::Values("json", "ubj"),
                         [](const auto& format) { return std::string(format.param); });

TEST_P(FuzzTest, MutatedModelsAreRefusedOrWalked) {
  constexpr int kRounds = 25'000;
  const std::string extension = std::string(".") + GetParam();
  std::vector<std::string> seeds;
  for (const std::string& version : kVersions) {
    for (const char* name : {"leaves", "huber", "refused/categorical", "refused/dart"}) {
      seeds.push_back(read_file(model_path(version, name + extension)));
    }
  }
  const std::vector<float> row = fixture_rows(1, 1, kMaxFeatures);
  std::mt19937_64 random(20'240'229);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = seeds[random() % seeds.size()];
    mutate(bytes, random);
    try {
      const SavedModel saved = import_model(bytes, "mutation");
      const float expected = reference_margin(saved.model, row.data());
      ASSERT_EQ(bits_of(make_evaluator(saved.model)->margin(row.data())), bits_of(expected)) << round;
      ++accepted;
    } catch (const ModelError&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, kRounds / 100);
  EXPECT_GT(refused, kRounds / 4);
}

}  // namespace
}  // namespace cudasched::predict::trees
