#include <charconv>
#include <limits>
#include <system_error>

#include "predict/trees/document.hpp"

namespace cudasched::predict::trees {
namespace {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : in_(text, "JSON") {}

  Value document() {
    Value read = value();
    skip_blanks();
    if (!in_.at_end()) in_.fail("something follows the value");
    return read;
  }

 private:
  static bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }
  static bool starts_number(char c) noexcept { return c == '-' || c == 'N' || c == 'I' || is_digit(c); }

  void skip_blanks() {
    while (!in_.at_end()) {
      const char c = in_.peek();
      if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
      in_.take();
    }
  }

  char next() {
    skip_blanks();
    return in_.peek();
  }

  void expect(char wanted) {
    if (next() != wanted) in_.fail(std::string("expected '") + wanted + "'");
    in_.take();
  }

  // After an element: true if another one follows, false at the end.
  bool more(char end) {
    const char c = next();
    if (c != ',' && c != end) in_.fail(std::string("expected ',' or '") + end + "'");
    in_.take();
    return c == ',';
  }

  Value value() {
    in_.count_value();
    const char c = next();
    if (c == '{') return {object()};
    if (c == '[') return array();
    if (c == '"') return {string()};
    if (starts_number(c)) return {number()};
    return word();
  }

  bool is_word(std::string_view wanted) {
    if (in_.remaining() < wanted.size() || in_.peek() != wanted[0]) return false;
    const std::size_t start = in_.position();
    in_.take(std::uint64_t{wanted.size()});
    if (in_.since(start) != wanted) in_.fail_at(start, "no JSON value");
    return true;
  }

  Value word() {
    if (is_word("true")) return {true};
    if (is_word("false")) return {false};
    if (is_word("null")) return {std::monostate{}};
    in_.fail("no JSON value");
  }

  Object object() {
    in_.enter();
    in_.take();
    Object members;
    if (next() == '}') {
      in_.take();
    } else {
      do {
        if (next() != '"') in_.fail("expected a key in quotes");
        std::string key = string();
        expect(':');
        Value member = value();
        in_.add(members, std::move(key), std::move(member));
      } while (more('}'));
    }
    in_.leave();
    return members;
  }

  Value array() {
    in_.enter();
    in_.take();
    Value read;
    const char first = next();
    if (starts_number(first)) {
      read.content = numbers();
    } else {
      Array items;
      if (first == ']') {
        in_.take();
      } else {
        do {
          if (starts_number(next())) in_.fail("a number in an array of other things");
          items.push_back(value());
        } while (more(']'));
      }
      read.content = std::move(items);
    }
    in_.leave();
    return read;
  }

  Numbers numbers() {
    Numbers read;
    do {
      if (!starts_number(next())) in_.fail("something else in an array of numbers");
      in_.count_numbers(1);
      read.push_back(number());
    } while (more(']'));
    return read;
  }

  void digits() {
    if (!is_digit(in_.peek())) in_.fail("expected a digit");
    while (!in_.at_end() && is_digit(in_.peek())) in_.take();
  }

  static Number not_finite(float real) noexcept { return {real, real}; }

  Number number() {
    const std::size_t start = in_.position();
    const auto follows = [this](std::string_view any) {
      return !in_.at_end() && any.find(in_.peek()) != std::string_view::npos;
    };
    if (follows("N") && is_word("NaN")) return not_finite(std::numeric_limits<float>::quiet_NaN());
    const bool is_negative = follows("-");
    if (is_negative) in_.take();
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (follows("I") && is_word("Infinity")) return not_finite(is_negative ? -kInfinity : kInfinity);
    if (follows("0")) {
      in_.take();
    } else {
      digits();
    }
    if (follows(".")) {
      in_.take();
      digits();
    }
    if (follows("eE")) {
      in_.take();
      if (follows("+-")) in_.take();
      digits();
    }
    const std::string_view text = in_.since(start);
    Number read;
    const char* end = text.data() + text.size();
    if (std::from_chars(text.data(), end, read.value).ec != std::errc{} ||
        std::from_chars(text.data(), end, read.real).ec != std::errc{}) {
      in_.fail_at(start, std::string(text.substr(0, 40)) + " is out of float32's range");
    }
    return read;
  }

  std::string string() {
    in_.take();
    std::string read;
    for (;;) {
      const char c = in_.take();
      if (c == '"') return read;
      if (static_cast<unsigned char>(c) < 0x20) in_.fail("a control character in a string");
      if (c == '\\') {
        escape(read);
      } else {
        read.push_back(c);
      }
    }
  }

  void escape(std::string& read) {
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const char c = in_.take();
    if (c == 'u') {
      append_utf8(read, code_point());
    } else if (const std::size_t at = kNames.find(c); at != std::string_view::npos) {
      read.push_back(kMeanings[at]);
    } else {
      in_.fail("no such escape");
    }
  }

  std::uint32_t code_point() {
    const std::uint32_t first = hex4();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || in_.take() != '\\' || in_.take() != 'u') in_.fail("half of a surrogate pair");
    const std::uint32_t second = hex4();
    if (second < 0xDC00 || second > 0xDFFF) in_.fail("half of a surrogate pair");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  std::uint32_t hex4() {
    const std::string_view text = in_.take(std::uint64_t{4});
    std::uint32_t code = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + 4, code, 16);
    if (error != std::errc{} || end != text.data() + 4) in_.fail("\\u wants four hexadecimal digits");
    return code;
  }

  static void append_utf8(std::string& out, std::uint32_t code) {
    const auto tail = [&](int shift) { out.push_back(static_cast<char>(0x80 | (code >> shift & 0x3F))); };
    if (code < 0x80) {
      out.push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      out.push_back(static_cast<char>(0xC0 | code >> 6));
      tail(0);
    } else if (code < 0x10000) {
      out.push_back(static_cast<char>(0xE0 | code >> 12));
      tail(6);
      tail(0);
    } else {
      out.push_back(static_cast<char>(0xF0 | code >> 18));
      tail(12);
      tail(6);
      tail(0);
    }
  }

  Cursor in_;
};

}  // namespace

Value read_json(std::string_view text) { return JsonReader(text).document(); }

}  // namespace cudasched::predict::trees
