// Where a process's trace is: files of bounded size in a directory, the oldest of which go when all together would be
// over their limit. `<directory>/trace-<pid>-<turn>-<number>.records`, each complete in itself: a header, and blocks
// that are whole or not there. It is read by python/cudasched/observe/trace/_file.py.
//
//   file    "CSDTRACE", version, bytes of a record; then blocks
//   block   "TBLK", kind, bytes that follow, records in them, their CRC-32
//   kMeta     JSON: the process and its clocks. The first block of a file
//   kTexts    text after text: its space, number, bytes, and the text:
//               0  a kernel: its name; behind a zero the file that it is from, empty if that is not known; behind
//                  another its registers, local and static shared bytes, and the most threads of a block
//               1  a region: its class and, behind a zero, its name
//               2  the shape of a kernel's launch: grid, block, cluster (three numbers each), dynamic shared bytes
//               3  a GPU, by its ordinal: compute capability (two numbers), SMs, threads that an SM holds
//   kRecords  TraceRecord after TraceRecord
//   kDropped  records that were dropped so far, for want of room in memory: 8 bytes
//   kEnd      JSON: the counts. The last block of a process that came to its end
//
// Used by one thread. Nothing here is on the launch path.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <span>
#include <string>

#include "telemetry/block_file.hpp"

namespace cudasched::telemetry {

class TraceFile {
 public:
  static constexpr std::uint32_t kVersion = 2;
  static constexpr std::uint64_t kFiles = 8;  // at most, of one process
  static constexpr std::uint64_t kRecordBytes = 40;
  static constexpr std::uint64_t kLeastRecords = 1024;  // whatever the limit is

  enum class Block : std::uint32_t { kMeta = 1, kTexts = 2, kRecords = 3, kDropped = 4, kEnd = 5 };

  // Makes the first file. Throws Error.
  TraceFile(std::string directory, std::uint64_t limit_bytes);

  // Appends one block, made of the parts. False, and nothing more is written ever, if that cannot be done: earlier
  // blocks stay.
  bool append(Block kind, std::uint32_t records, std::initializer_list<std::span<const std::byte>> parts) noexcept;

  // How many records the file has room for. 0: the next one should be begun. A file holds kLeastRecords at least.
  std::size_t room() const noexcept {
    const std::uint64_t end = file_.bytes() + 64;
    const std::uint64_t by_bytes = end < file_bytes_ ? (file_bytes_ - end) / kRecordBytes : 0;
    return std::max(by_bytes, kLeastRecords - std::min(records_, kLeastRecords));
  }
  // Begins the next file, and deletes the oldest where there are kFiles. False: as append().
  bool rotate() noexcept;

  // The first file's path, less its number and suffix: that of all of them.
  const std::string& base() const noexcept { return base_; }
  bool failed() const noexcept { return failed_; }
  std::uint64_t rotated_away() const noexcept { return rotated_away_; }  // records that were in deleted files

 private:
  struct Past {
    std::string path;
    std::uint64_t records = 0;
  };

  std::string path_of(std::uint64_t number) const;
  void fail(const char* why) noexcept;

  std::string directory_;
  std::string base_;
  std::string path_;
  std::uint64_t file_bytes_;
  std::deque<Past> past_;
  BlockFile file_;
  std::uint64_t number_ = 0;
  std::uint64_t records_ = 0;  // in this file
  std::uint64_t rotated_away_ = 0;
  bool failed_ = false;
};

}  // namespace cudasched::telemetry
