#include <bit>
#include <cmath>
#include <limits>

#include "predict/trees/document.hpp"

namespace cudasched::predict::trees {
namespace {

constexpr std::int64_t kExactInDouble = std::int64_t{1} << 53;

constexpr int bytes_of_number(char type) noexcept {
  switch (type) {
    case 'i':
    case 'U':
      return 1;
    case 'I':
      return 2;
    case 'l':
    case 'd':
      return 4;
    case 'L':
    case 'D':
      return 8;
    default:
      return 0;  // no number
  }
}

class UbjsonReader {
 public:
  explicit UbjsonReader(std::string_view bytes) : in_(bytes, "UBJSON") {}

  Value document() {
    Value read = value(type());
    if (!in_.at_end()) in_.fail("something follows the value");
    return read;
  }

 private:
  // No-ops (N) stand for nothing.
  char type() {
    char c = in_.take();
    while (c == 'N') c = in_.take();
    return c;
  }

  Value value(char type) {
    in_.count_value();
    if (bytes_of_number(type) > 0) return {number(type)};
    switch (type) {
      case '{':
        return {object()};
      case '[':
        return array();
      case 'S':
        return {std::string(in_.take(length()))};
      case 'T':
        return {true};
      case 'F':
        return {false};
      case 'Z':
        return {std::monostate{}};
      default:
        in_.fail_at(in_.position() - 1, "type " + name(type) + " is not supported");
    }
  }

  static std::string name(char type) {
    const bool is_printable = type > ' ' && type <= '~';
    return is_printable ? std::string("'") + type + "'" : std::to_string(static_cast<unsigned char>(type));
  }

  std::uint64_t big_endian(int bytes) {
    std::uint64_t read = 0;
    for (const char byte : in_.take(static_cast<std::uint64_t>(bytes))) {
      read = read << 8 | static_cast<unsigned char>(byte);
    }
    return read;
  }

  std::int64_t integer(char type) {
    const int bytes = bytes_of_number(type);
    const std::uint64_t read = big_endian(bytes);
    if (type == 'U') return static_cast<std::int64_t>(read);
    const int unused_bits = 64 - 8 * bytes;
    return static_cast<std::int64_t>(read << unused_bits) >> unused_bits;
  }

  Number number(char type) {
    if (type == 'd') {
      const auto real = std::bit_cast<float>(static_cast<std::uint32_t>(big_endian(4)));
      return {real, real};
    }
    if (type == 'D') {
      const auto value = std::bit_cast<double>(big_endian(8));
      if (std::isfinite(value) && std::fabs(value) > std::numeric_limits<float>::max()) {
        in_.fail_at(in_.position() - 8, "a number that is out of float32's range");
      }
      return {value, static_cast<float>(value)};
    }
    const std::int64_t value = integer(type);
    if (value > kExactInDouble || value < -kExactInDouble) {
      in_.fail_at(in_.position() - 8, "integer " + std::to_string(value) + " is beyond 2^53");
    }
    return {static_cast<double>(value), static_cast<float>(value)};
  }

  std::uint64_t length() {
    const char kind = type();
    if (bytes_of_number(kind) == 0 || kind == 'd' || kind == 'D') {
      in_.fail_at(in_.position() - 1, "a length of type " + name(kind));
    }
    const std::int64_t read = integer(kind);
    if (read < 0) in_.fail("a length below 0");
    return static_cast<std::uint64_t>(read);
  }

  Object object() {
    in_.enter();
    Object members;
    for (;;) {
      while (in_.peek() == 'N') in_.take();
      if (in_.peek() == '}') break;
      if (in_.peek() == '$' || in_.peek() == '#') in_.fail("an object with a type or a count is not supported");
      std::string key(in_.take(length()));
      Value member = value(type());
      in_.add(members, std::move(key), std::move(member));
    }
    in_.take();
    in_.leave();
    return members;
  }

  Value array() {
    in_.enter();
    Value read;
    if (in_.peek() == '$') {
      read.content = typed_numbers();
    } else if (in_.peek() == '#') {
      in_.take();
      const std::uint64_t count = length();
      for (std::uint64_t i = 0; i < count; ++i) append(read, type());
    } else {
      for (char next = type(); next != ']'; next = type()) append(read, next);
    }
    if (std::holds_alternative<std::monostate>(read.content)) read.content = Array{};
    in_.leave();
    return read;
  }

  // To an array, which has no kind yet before its first value.
  void append(Value& array, char type) {
    const bool is_number = bytes_of_number(type) > 0;
    if (std::holds_alternative<std::monostate>(array.content)) {
      if (is_number) {
        array.content = Numbers{};
      } else {
        array.content = Array{};
      }
    }
    if (is_number != std::holds_alternative<Numbers>(array.content)) in_.fail("numbers and other things in one array");
    if (is_number) {
      in_.count_numbers(1);
      std::get<Numbers>(array.content).push_back(number(type));
    } else {
      std::get<Array>(array.content).push_back(value(type));
    }
  }

  Numbers typed_numbers() {
    in_.take();
    const char kind = in_.take();
    const int bytes = bytes_of_number(kind);
    if (bytes == 0) in_.fail_at(in_.position() - 1, "an array of type " + name(kind) + " is not supported");
    if (in_.take() != '#') in_.fail_at(in_.position() - 1, "expected '#' after an array's type");
    const std::uint64_t count = length();
    if (count > in_.remaining() / static_cast<std::uint64_t>(bytes)) {
      in_.fail("the file ends early: " + std::to_string(count) + " numbers expected");
    }
    in_.count_numbers(count);
    Numbers read;
    read.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) read.push_back(number(kind));
    return read;
  }

  Cursor in_;
};

}  // namespace

Value read_ubjson(std::string_view bytes) { return UbjsonReader(bytes).document(); }

}  // namespace cudasched::predict::trees
