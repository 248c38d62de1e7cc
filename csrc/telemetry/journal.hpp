// The file into which a process writes its launches while they are collected: append-only, so that a killed process's
// file is whole up to its last block. docs/dataset.md has the format; python/cudasched/collect/_journal.py reads it.
// All numbers are little-endian.
//
// One thread writes. Nothing here throws but the constructor: a disk that is full ends the journal, and says so once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "telemetry/block_file.hpp"

namespace cudasched::telemetry {

// One launch. Times are CLOCK_MONOTONIC.
struct Row {
  std::uint64_t launch = 0;
  std::uint64_t identity = 0;
  std::int64_t submitted_ns = 0;
  std::int64_t start_ns = 0;
  std::int64_t duration_ns = -1;  // -1: not timed, and start_ns has no meaning
  std::uint32_t thread = 0;
  std::uint32_t stream = 0;
  std::uint32_t function = 0;  // number of its name among the texts
  std::uint32_t graph = 0;
  std::uint32_t label = 0;  // likewise
  std::uint32_t grid[3] = {0, 0, 0};
  std::uint32_t block[3] = {0, 0, 0};
  std::uint32_t cluster[3] = {0, 0, 0};
  std::uint32_t dynamic_shared_bytes = 0;
  std::uint32_t static_shared_bytes = 0;
  std::uint32_t local_bytes = 0;
  std::uint32_t parameter_bytes = 0;
  std::uint32_t word_count = 0;
  std::uint32_t pointer_count = 0;
  float waves = 0;
  std::uint16_t registers = 0;
  std::uint16_t max_threads = 0;
  std::uint16_t blocks_per_sm = 0;
  std::uint16_t sm_clock_mhz = 0;
  std::uint8_t device = 0;
  std::uint8_t is_graph = 0;
  std::uint8_t overlapped = 0;
  std::uint8_t padding = 0;
};
static_assert(sizeof(Row) == 136);

class Journal {
 public:
  // kElapsed: for each row of the next block of rows, the time between two events around the launch (i64, ns; -1:
  // none).
  enum class Block : std::uint32_t { kMeta = 1, kTexts = 2, kRows = 3, kEnd = 4, kElapsed = 5 };
  static constexpr std::uint32_t kVersion = 1;

  // Makes a file of its own in `directory`. Throws Error.
  explicit Journal(const std::string& directory);

  // Appends one block, made of the parts. False, and no more is written ever, if that cannot be done.
  bool append(Block type, std::uint32_t rows, std::initializer_list<std::span<const std::byte>> parts) noexcept;

  const std::string& path() const noexcept { return path_; }
  bool failed() const noexcept { return failed_; }

 private:
  std::string path_;
  BlockFile file_;
  bool failed_ = false;
};

}  // namespace cudasched::telemetry
