#include "predict/trees/document.hpp"

#include <algorithm>

namespace cudasched::predict::trees {

Cursor::Cursor(std::string_view bytes, const char* format) : bytes_(bytes), format_(format) {
  if (bytes.size() > kMaxDocumentBytes) {
    fail(std::to_string(bytes.size()) + " bytes are more than the " + std::to_string(kMaxDocumentBytes) +
         " that are read");
  }
}

char Cursor::peek() const {
  if (at_end()) fail("the file ends early");
  return bytes_[position_];
}

char Cursor::take() {
  const char byte = peek();
  ++position_;
  return byte;
}

std::string_view Cursor::take(std::uint64_t count) {
  if (count > remaining()) {
    fail("the file ends early: " + std::to_string(count) + " bytes expected, " + std::to_string(remaining()) + " left");
  }
  const std::string_view taken = bytes_.substr(position_, count);
  position_ += count;
  return taken;
}

void Cursor::enter() {
  if (++nesting_ > kMaxNesting) fail("nested deeper than " + std::to_string(kMaxNesting));
}

void Cursor::count_value() {
  if (++values_ > kMaxValues) fail("more than " + std::to_string(kMaxValues) + " values");
}

void Cursor::count_numbers(std::uint64_t count) {
  if (count > kMaxNumbers - numbers_) fail("more than " + std::to_string(kMaxNumbers) + " numbers");
  numbers_ += count;
}

void Cursor::add(Object& object, std::string key, Value value) const {
  if (object.size() == kMaxKeys) fail("more than " + std::to_string(kMaxKeys) + " keys in an object");
  if (std::any_of(object.begin(), object.end(), [&](const Member& member) { return member.key == key; })) {
    fail("key '" + key.substr(0, 80) + "' comes twice in an object");
  }
  object.push_back({std::move(key), std::move(value)});
}

void Cursor::fail_at(std::size_t position, const std::string& problem) const {
  throw ModelError(std::string(format_) + ", byte " + std::to_string(position) + ": " + problem);
}

Value read_document(std::string_view bytes) {
  constexpr std::string_view kLengthTypes = "iUIlL";
  const std::size_t first = bytes.find_first_not_of(" \t\n\r");
  if (first == std::string_view::npos || bytes[first] != '{') {
    throw ModelError(
        "no model of XGBoost, which is an object in JSON or UBJSON (cudasched.predictor.Model.from_onnx reads ONNX)");
  }
  const bool is_ubjson = bytes.size() > 1 && bytes[0] == '{' && kLengthTypes.find(bytes[1]) != std::string_view::npos;
  return is_ubjson ? read_ubjson(bytes) : read_json(bytes);
}

}  // namespace cudasched::predict::trees
