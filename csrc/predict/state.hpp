// The format of the predictor's state for the next run: a few fixed-size fields in the machine's byte order. A magic
// number, a version, the length and a checksum that any changed byte changes frame the fields.
//
// Cold. A fault in a state throws StateError. The whole frame is checked before any value is used, and each value is
// checked against its bounds when read.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/error.hpp"

namespace cudasched::predict {

inline constexpr std::uint64_t kStateMagic = 0x7473'6465'7270'7363ULL;  // "csprdst"
inline constexpr std::uint32_t kStateVersion = 3;
inline constexpr std::size_t kMaxStateBytes = std::size_t{2} << 20;

class StateWriter {
 public:
  StateWriter();

  template <typename T>
    requires std::is_arithmetic_v<T>
  void put(T value) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof(T));
  }

  // Closes the frame.
  std::vector<std::byte> finish() &&;

 private:
  std::vector<std::byte> bytes_;
};

class StateReader {
 public:
  // Checks the frame.
  explicit StateReader(std::span<const std::byte> state);

  template <typename T>
    requires std::is_integral_v<T>
  T take(const char* what, std::uint64_t most = ~std::uint64_t{0}) {
    const T value = raw<T>(what);
    if (static_cast<std::uint64_t>(value) > most) fail(what, "is out of range");
    return value;
  }

  float take_real(const char* what, float least, float most) {
    const float value = raw<float>(what);
    if (!(value >= least && value <= most)) fail(what, "is out of range");
    return value;
  }

  // That nothing is left.
  void finish() const;

 private:
  template <typename T>
  T raw(const char* what) {
    if (bytes_.size() < sizeof(T)) fail(what, "is missing");
    T value{};
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }

  [[noreturn]] static void fail(const char* what, const char* problem);

  std::span<const std::byte> bytes_;
};

}  // namespace cudasched::predict
