// A JSON or UBJSON document as a tree of values, read whole and strictly, within hard bounds on size and depth.
//
// JSON is RFC 8259 without a byte order mark, with NaN, Infinity and -Infinity as numbers, because XGBoost writes them.
// The user of a number checks that it is finite. UBJSON is the part that XGBoost writes: arrays with a count, with a
// type or with an end mark, objects with an end mark. Both refuse, with the byte's offset: input that ends early or
// goes on after the value, a key that comes twice, a decimal number beyond float32's range. Also arrays that mix
// numbers and other values, and input beyond the bounds below. Memory follows the bytes read, never a count in the
// input.
//
// Cold: runs once, when a model is loaded. Throws ModelError and std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.hpp"

namespace cudasched::predict::trees {

inline constexpr std::size_t kMaxDocumentBytes = std::size_t{64} << 20;
inline constexpr std::size_t kMaxNumbers = std::size_t{16} << 20;
inline constexpr std::size_t kMaxValues = std::size_t{1} << 20;  // other than numbers in an array of numbers
inline constexpr std::size_t kMaxKeys = 1024;                    // of one object
inline constexpr int kMaxNesting = 24;

// `real` is the text's nearest float32, which is not always that of `value`: rounding twice can differ.
struct Number {
  double value = 0;
  float real = 0;
};

struct Value;
struct Member;
using Numbers = std::vector<Number>;
using Array = std::vector<Value>;
using Object = std::vector<Member>;

// An empty array is an Array without values, unless its type is one of numbers.
struct Value {
  std::variant<std::monostate, bool, Number, std::string, Numbers, Array, Object> content;
};

struct Member {
  std::string key;
  Value value;
};

Value read_json(std::string_view text);
Value read_ubjson(std::string_view bytes);

// Tells the two apart: after `{`, UBJSON as XGBoost writes it has a length's type, JSON a quote, a brace or a blank.
// Refuses what is no object.
Value read_document(std::string_view bytes);

// The shared part of the two readers: the position, the bounds and the text of a refusal.
class Cursor {
 public:
  Cursor(std::string_view bytes, const char* format);

  bool at_end() const noexcept { return position_ == bytes_.size(); }
  std::size_t remaining() const noexcept { return bytes_.size() - position_; }
  std::size_t position() const noexcept { return position_; }
  std::string_view since(std::size_t start) const noexcept { return bytes_.substr(start, position_ - start); }
  char peek() const;
  char take();
  std::string_view take(std::uint64_t count);

  void enter();
  void leave() noexcept { --nesting_; }
  void count_value();
  void count_numbers(std::uint64_t count);
  void add(Object& object, std::string key, Value value) const;

  [[noreturn]] void fail(const std::string& problem) const { fail_at(position_, problem); }
  [[noreturn]] void fail_at(std::size_t position, const std::string& problem) const;

 private:
  std::string_view bytes_;
  const char* format_;
  std::size_t position_ = 0;
  std::size_t values_ = 0;
  std::size_t numbers_ = 0;
  int nesting_ = 0;
};

}  // namespace cudasched::predict::trees
