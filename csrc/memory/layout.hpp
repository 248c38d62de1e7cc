// A pool's address space: one reserved range, the chunks of physical memory that are mapped in it, and the blocks that
// a program has of it. Decides where a block goes and which chunks move there; makes no call of the driver.
//
// A block is a multiple of 512 bytes. A freed block stays mapped, and answers the next allocation of its size and
// stream by two look-ups. Otherwise the best fit of the free mapped ranges answers. Where none fits, plan() says which
// free chunks are to be mapped side by side, and how much must be created. So an allocation is refused by the limit
// alone, never because free memory is scattered: free chunks join wherever they lie.
//
// A chunk is at most `chunk_bytes`, and no block takes a whole free chunk larger than itself (and than a page). Large
// blocks have few chunks, because the driver's time goes by the chunk, and small blocks hold no large ones back. Blocks
// of whole pages begin at a page. So less than two pages of free memory beside each block of another size cannot move.
//
// Free memory belongs to the stream on which it was freed: work of that stream may still use it. A block goes to the
// same stream at once, to another one after passed(), and only then do its chunks move.
//
// Addresses are offsets in the range. Threads: one at a time; the pool's lock is held (pool.hpp).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace cudasched::memory {

using Bytes = std::uint64_t;
using Stream = std::uint64_t;  // the driver's number of it
using Chunk = std::uint64_t;   // the driver's handle

inline constexpr Stream kIdle = 0;  // of free memory that no work can use any more; of an allocation: takes such alone
inline constexpr Bytes kBlockUnit = 512;

// In bytes but for the last three.
struct Statistics {
  Bytes reserved = 0;      // of the GPU, in chunks
  Bytes allocated = 0;     // of it, in blocks
  Bytes largest_free = 0;  // the largest block that free memory can become
  Bytes peak_reserved = 0;
  Bytes peak_allocated = 0;
  std::uint64_t blocks = 0;
  std::uint64_t created = 0;  // chunks, since the beginning
  std::uint64_t moved = 0;    // chunks that were mapped again

  Bytes free() const noexcept { return reserved - allocated; }
  // The part of free memory that no single block can have, 0 to 1.
  double fragmentation() const noexcept {
    return free() == 0 ? 0.0 : 1.0 - static_cast<double>(largest_free) / static_cast<double>(free());
  }
};

struct Span {
  Bytes at = 0;
  Bytes bytes = 0;
};

// How a block that nothing fits can be had, in this order; each step is reported as it is done. A plan that stops
// half-way leaves all chunks known.
struct Plan {
  std::vector<Span> unmap;     // whole chunks, side by side in each span
  std::vector<Chunk> release;  // a chunk that is too large, for a smaller one
  std::vector<Bytes> create;   // sizes of new chunks
  std::vector<Bytes> map;      // sizes of unmapped chunks, which go side by side to `at`
  Bytes at = 0;
  Bytes begin = 0;  // of the block
  // Free memory would do that work may still use: passed() for its streams, and plan() again.
  bool wait = false;
  // Not within the limit (or, at the end of the range, for want of addresses).
  bool refused = false;
};

class Layout {
 public:
  // All in whole pages; a limit of 0 is none.
  Layout(Bytes range_bytes, Bytes page_bytes, Bytes chunk_bytes, Bytes limit_bytes);

  // From mapped memory; nothing where none fits.
  std::optional<Bytes> allocate(Bytes bytes, Stream stream);
  // The block that a plan has made room for.
  Bytes allocate_at(Bytes begin, Bytes bytes);
  enum class Freed : std::uint8_t { kDone, kTwice, kUnknown };
  Freed free(Bytes at, Stream stream);
  // Whatever was freed on this stream is used no more.
  void passed(Stream stream);

  // For a block that allocate() has not found.
  Plan plan(Bytes bytes, Stream stream);
  // Chunks to give back so that at most `keep` bytes are reserved: `unmap` and `release` of it.
  Plan plan_trim(Bytes keep);

  // ---- steps that the driver has done
  void created(Chunk chunk, Bytes bytes);
  void released(Chunk chunk);
  void unmapped(const Span& span);
  // Another chunk of the same size is mapped there.
  void replaced(Bytes at, Chunk chunk);
  // `chunks` went side by side to `at`, and are free.
  void mapped(Bytes at, const std::vector<Chunk>& chunks);
  // Unmapped chunks of these sizes, one each, in their order.
  std::vector<Chunk> spares(const std::vector<Bytes>& sizes) const;

  Statistics statistics() const;
  bool has_pending() const;  // free memory that work may still use
  Bytes limit() const noexcept { return limit_; }
  Bytes page() const noexcept { return page_; }
  static constexpr Bytes rounded(Bytes bytes, Bytes unit) noexcept { return (bytes + unit - 1) / unit * unit; }

  // The contents, for observers: mapped chunks by address, unmapped chunks, blocks in use by address.
  struct Piece {
    Chunk chunk = 0;
    Bytes bytes = 0;
    bool was_mapped = false;
  };
  const std::map<Bytes, Piece>& chunks() const noexcept { return mapped_; }
  const std::vector<Piece>& spares() const noexcept { return spare_; }
  std::vector<Span> blocks() const;

 private:
  // kKept: freed, and kept as it is for the next block of its size.
  enum class State : std::uint8_t { kHole, kFree, kKept, kUsed };
  // A part of the range; all of them are one list by address.
  struct Part {
    Bytes at = 0;
    Bytes bytes = 0;
    Stream stream = kIdle;
    State state = State::kHole;
    Part* previous = nullptr;
    Part* next = nullptr;
    Bytes end() const noexcept { return at + bytes; }
  };
  struct BySize {
    bool operator()(const Part* a, const Part* b) const noexcept {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->at < b->at;
    }
  };
  using Parts = std::set<Part*, BySize>;
  struct OfStream {
    Parts free;
    std::unordered_map<Bytes, std::vector<Part*>> kept;  // by size
  };
  struct Room {
    Part* part = nullptr;
    Bytes begin = 0;
  };

  Part* make(const Part& part);
  void split(Part* part, Bytes at);
  void join_next(Part* part);
  void add(Part* part);
  Part* cut(Part* part, Bytes begin, Bytes end, State state);
  Part* part_at(Bytes at) const;
  Parts& set_of(const Part& part);
  void settle();
  Room best_fit(Parts& parts, Bytes bytes) const;
  std::optional<Bytes> place(const Part& part, Bytes bytes) const;
  Bytes take(Part* part, Bytes begin, Bytes bytes);
  void count(Bytes bytes) noexcept;
  static std::vector<Span> joined(std::vector<Span> spans);
  Bytes aligned(Bytes at, Bytes bytes) const noexcept { return bytes % page_ == 0 ? rounded(at, page_) : at; }
  // Those that are wholly in the part, from an address on.
  void for_each_chunk(const Part& part, Bytes from, auto&& call) const;
  void find_room(Plan& plan, Bytes bytes, Stream stream) const;

  Bytes page_;
  Bytes chunk_;
  Bytes limit_;
  Statistics statistics_;
  std::deque<Part> store_;
  std::vector<Part*> unused_;
  Part* first_ = nullptr;
  Parts holes_;
  std::unordered_map<Stream, OfStream> streams_;
  std::unordered_map<Bytes, Part*> by_address_;  // used and kept
  std::uint64_t kept_ = 0;
  std::map<Bytes, Piece> mapped_;  // by address
  std::vector<Piece> spare_;       // mapped nowhere
};

}  // namespace cudasched::memory
