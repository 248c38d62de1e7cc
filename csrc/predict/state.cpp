#include "predict/state.hpp"

#include <string>
#include <utility>

#include "base/hash.hpp"

namespace cudasched::predict {
namespace {

constexpr std::size_t kHeaderBytes = 8 + 4 + 4;
constexpr std::size_t kChecksumBytes = 8;

// Each step is a bijection of the hash and of the word: one changed word always changes the end.
std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  std::uint64_t hash = mix(kStateMagic, bytes.size());
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t step = bytes.size() < sizeof(word) ? bytes.size() : sizeof(word);
    std::memcpy(&word, bytes.data(), step);
    hash = mix(hash, word);
    bytes = bytes.subspan(step);
  }
  return hash;
}

[[noreturn]] void refuse(const std::string& problem) {
  throw StateError("the predictor's saved state " + problem + "; it is not used, and learning starts anew");
}

}  // namespace

StateWriter::StateWriter() {
  put(kStateMagic);
  put(kStateVersion);
  put(std::uint32_t{0});  // the length, known at the end
}

std::vector<std::byte> StateWriter::finish() && {
  const auto length = static_cast<std::uint32_t>(bytes_.size() + kChecksumBytes);
  std::memcpy(bytes_.data() + 12, &length, sizeof(length));
  put(checksum(bytes_));
  return std::move(bytes_);
}

StateReader::StateReader(std::span<const std::byte> state) {
  const std::string size = std::to_string(state.size()) + " bytes";
  if (state.size() < kHeaderBytes + kChecksumBytes) refuse("is cut short: it has " + size);
  if (state.size() > kMaxStateBytes) refuse("is too large: it has " + size);
  bytes_ = state.first(state.size() - kChecksumBytes);
  std::uint64_t sum = 0;
  std::memcpy(&sum, state.data() + bytes_.size(), sizeof(sum));
  const std::uint64_t expected = checksum(bytes_);
  if (raw<std::uint64_t>("magic") != kStateMagic) refuse("is no state of cudasched");
  const auto version = raw<std::uint32_t>("version");
  if (version != kStateVersion) {
    refuse("has version " + std::to_string(version) + " where this one reads " + std::to_string(kStateVersion));
  }
  const auto length = raw<std::uint32_t>("length");
  if (length > state.size()) refuse("is cut short: it has " + size + " of " + std::to_string(length));
  if (length < state.size())
    refuse("is longer than it says: it has " + size + " in place of " + std::to_string(length));
  if (sum != expected) refuse("is corrupt: its checksum is wrong");
}

void StateReader::finish() const {
  if (!bytes_.empty()) refuse("has " + std::to_string(bytes_.size()) + " bytes too many");
}

void StateReader::fail(const char* what, const char* problem) {
  refuse("is corrupt: " + std::string(what) + " " + problem);
}

}  // namespace cudasched::predict
