// The pool's plans, against a model of the range: chunks by page and blocks by byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "memory/layout.hpp"

namespace cudasched::memory {
namespace {

constexpr Bytes kPage = 4096;
constexpr Bytes kChunk = 16 * kPage;

// Does what a plan says, as a driver that refuses nothing would, and holds the layout to what a driver demands.
class Driven {
 public:
  explicit Driven(Bytes limit, Bytes range = 1 << 24) : layout(range, kPage, kChunk, limit) {}

  // Nothing: refused, with all work done.
  std::optional<Bytes> allocate(Bytes bytes, Stream stream = 1) {
    for (;;) {
      if (const auto at = layout.allocate(bytes, stream)) return took(*at, bytes, stream);
      const Plan plan = layout.plan(bytes, stream);
      if (plan.refused) return std::nullopt;
      if (plan.wait) {
        EXPECT_TRUE(layout.has_pending());
        all_passed();
        continue;
      }
      carry_out(plan);
      return took(layout.allocate_at(plan.begin, bytes), bytes, stream);
    }
  }

  void free(Bytes at, Stream stream = 1) {
    ASSERT_EQ(layout.free(at, stream), Layout::Freed::kDone);
    used_bytes_ -= used.at(at);
    works_.push_back({at, at + used.at(at), stream});
    used.erase(at);
  }

  void passed(Stream stream) {
    layout.passed(stream);
    std::erase_if(works_, [&](const Work& work) { return work.stream == stream; });
  }

  void all_passed() {
    for (Stream stream = 1; stream <= 4; ++stream) passed(stream);
  }

  void trim(Bytes keep) { carry_out(layout.plan_trim(keep)); }

  void check() {
    Bytes reserved = 0;
    for (const auto& [at, chunk] : mapped_) reserved += chunk.bytes;
    for (const auto& [chunk, bytes] : spare_) reserved += bytes;
    const Statistics now = layout.statistics();
    ASSERT_EQ(now.reserved, reserved);
    ASSERT_EQ(now.allocated, used_bytes_);
    ASSERT_EQ(now.blocks, used.size());
    ASSERT_LE(now.largest_free, now.free());
    ASSERT_GE(now.peak_reserved, reserved);
    ASSERT_GE(now.peak_allocated, used_bytes_);
    ASSERT_TRUE(layout.limit() == 0 || reserved <= layout.limit());
    std::map<Bytes, Bytes> blocks;
    for (const Span& span : layout.blocks()) blocks.emplace(span.at, span.bytes);
    ASSERT_EQ(blocks, used);
    ASSERT_EQ(layout.chunks().size(), mapped_.size());
    for (const auto& [at, piece] : layout.chunks()) ASSERT_EQ(mapped_.at(at).chunk, piece.chunk);
    ASSERT_EQ(layout.spares().size(), spare_.size());
  }

  // Bytes of the chunks that a block holds.
  Bytes held() const {
    Bytes bytes = 0;
    for (const auto& [at, chunk] : mapped_) bytes += is_used(at, chunk.bytes) ? chunk.bytes : 0;
    return bytes;
  }

  Layout layout;
  std::map<Bytes, Bytes> used;

 private:
  struct Mapped {
    Chunk chunk = 0;
    Bytes bytes = 0;
  };
  // On a stream, that may still use these bytes, which are free.
  struct Work {
    Bytes begin = 0;
    Bytes end = 0;
    Stream stream = kIdle;
  };

  bool is_used(Bytes at, Bytes bytes) const {
    auto next = used.lower_bound(at + bytes);
    return next != used.begin() && std::prev(next)->first + std::prev(next)->second > at;
  }

  bool is_worked_on(Bytes at, Bytes bytes) const {
    return std::any_of(works_.begin(), works_.end(),
                       [&](const Work& work) { return work.begin < at + bytes && at < work.end; });
  }

  // The block is behind the work of its stream, and there is none of another one.
  Bytes took(Bytes at, Bytes bytes, Stream stream) {
    const Bytes size = Layout::rounded(bytes, kBlockUnit);
    EXPECT_FALSE(is_used(at, size));
    Bytes covered = at;
    for (const auto& [chunk_at, chunk] : mapped_) {
      if (chunk_at <= covered && covered < chunk_at + chunk.bytes) covered = chunk_at + chunk.bytes;
    }
    EXPECT_GE(covered, at + size) << "a block on unmapped memory";
    EXPECT_EQ(size % kPage == 0 ? at % kPage : 0, 0U);
    std::vector<Work> rest;
    for (const Work& work : works_) {
      EXPECT_TRUE(work.begin >= at + size || at >= work.end || work.stream == stream);
      if (work.begin < at) rest.push_back({work.begin, std::min(work.end, at), work.stream});
      if (work.end > at + size) rest.push_back({std::max(work.begin, at + size), work.end, work.stream});
    }
    works_ = rest;
    used.emplace(at, size);
    used_bytes_ += size;
    return at;
  }

  void carry_out(const Plan& plan) {
    for (const Span& span : plan.unmap) {
      Bytes at = span.at;
      while (at < span.at + span.bytes) {
        const auto found = mapped_.find(at);
        ASSERT_NE(found, mapped_.end()) << "part of a chunk is unmapped";
        ASSERT_FALSE(is_used(at, found->second.bytes)) << "a block is unmapped";
        ASSERT_FALSE(is_worked_on(at, found->second.bytes)) << "work may still use it";
        spare_.emplace(found->second.chunk, found->second.bytes);
        at += found->second.bytes;
        mapped_.erase(found);
      }
      ASSERT_EQ(at, span.at + span.bytes);
      layout.unmapped(span);
    }
    for (const Chunk chunk : plan.release) {
      ASSERT_EQ(spare_.erase(chunk), 1U);
      layout.released(chunk);
    }
    for (const Bytes bytes : plan.create) {
      ASSERT_EQ(bytes % kPage, 0U);
      ASSERT_LE(bytes, kChunk);
      spare_.emplace(++last_, bytes);
      layout.created(last_, bytes);
    }
    const std::vector<Chunk> chunks = layout.spares(plan.map);
    ASSERT_EQ(chunks.size(), plan.map.size());
    Bytes at = plan.at;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const auto found = spare_.find(chunks[i]);
      ASSERT_NE(found, spare_.end()) << "a chunk is mapped twice";
      ASSERT_EQ(found->second, plan.map[i]);
      const auto next = mapped_.lower_bound(at + plan.map[i]);
      ASSERT_TRUE(next == mapped_.begin() || std::prev(next)->first + std::prev(next)->second.bytes <= at);
      mapped_.emplace(at, Mapped{found->first, found->second});
      at += found->second;
      spare_.erase(found);
    }
    if (!chunks.empty()) layout.mapped(plan.at, chunks);
  }

  std::map<Bytes, Mapped> mapped_;
  std::map<Chunk, Bytes> spare_;
  std::vector<Work> works_;
  Chunk last_ = 0;
  Bytes used_bytes_ = 0;
};

TEST(PoolLayout, AFreedBlockIsUsedAgainOnItsStream) {
  Driven pool(0);
  const auto first = pool.allocate(3 * kPage, 1);
  pool.free(*first, 1);
  EXPECT_EQ(pool.layout.allocate(3 * kPage, 1), first);
}

TEST(PoolLayout, AnotherStreamWaitsForTheWorkBefore) {
  Driven pool(0);
  const auto first = pool.allocate(3 * kPage, 1);
  pool.free(*first, 1);
  EXPECT_EQ(pool.layout.allocate(3 * kPage, 2), std::nullopt);
  EXPECT_TRUE(pool.layout.has_pending());
  EXPECT_TRUE(pool.layout.plan(3 * kPage, 2).wait);
  EXPECT_FALSE(pool.layout.plan(4 * kPage, 2).wait);
  pool.passed(1);
  EXPECT_FALSE(pool.layout.has_pending());
  EXPECT_EQ(pool.layout.allocate(3 * kPage, 2), first);
}

TEST(PoolLayout, ObserversLeaveTheKeptBlocksToTheirStream) {
  Driven pool(4 * kPage);
  const Bytes first = *pool.allocate(kPage, 1);
  const Bytes second = *pool.allocate(kPage, 1);
  pool.free(first, 1);
  pool.free(second, 1);
  EXPECT_EQ(pool.layout.statistics().largest_free, 2 * kPage);
  EXPECT_EQ(pool.layout.allocate(kPage, 1), second) << "the last one freed";
}

// Every second of a hundred blocks is freed, and one block of all that is free fits.
TEST(PoolLayout, FreeMemoryIsOneBlockWhereverItLies) {
  Driven pool(100 * kPage);
  std::vector<Bytes> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(*pool.allocate(kPage));
  EXPECT_EQ(pool.allocate(kPage), std::nullopt);
  for (std::size_t i = 0; i < blocks.size(); i += 2) pool.free(blocks[i]);
  Statistics before = pool.layout.statistics();
  EXPECT_EQ(before.largest_free, 50 * kPage);
  EXPECT_EQ(before.fragmentation(), 0);
  ASSERT_NE(pool.allocate(50 * kPage), std::nullopt);
  pool.check();
  EXPECT_EQ(pool.layout.statistics().created, 100U);
  EXPECT_EQ(pool.layout.statistics().moved, 50U);
}

// A large chunk is given back for small ones, and the limit holds.
TEST(PoolLayout, LargeChunksBecomeSmallOnes) {
  Driven pool(4 * kChunk);
  const auto large = pool.allocate(4 * kChunk);
  pool.free(*large);
  pool.all_passed();
  std::vector<Bytes> blocks;
  for (Bytes i = 0; i < 4 * kChunk / kPage; ++i) {
    const auto at = pool.allocate(kPage);
    ASSERT_NE(at, std::nullopt) << i;
    blocks.push_back(*at);
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) pool.free(blocks[i]);
  EXPECT_NE(pool.allocate(2 * kChunk), std::nullopt);
  pool.check();
}

TEST(PoolLayout, BlocksShareAPage) {
  Driven pool(kPage);
  for (int i = 0; i < 8; ++i) EXPECT_NE(pool.allocate(kBlockUnit - 100), std::nullopt);
  EXPECT_EQ(pool.allocate(1), std::nullopt);
  pool.check();
}

// The page that two blocks share is a chunk of its own.
TEST(PoolLayout, ANeighbourHoldsBackOnePage) {
  Driven pool(32 * kPage);
  const auto first = pool.allocate(10 * kPage + kPage / 2);
  ASSERT_NE(pool.allocate(10 * kPage + kPage / 2), std::nullopt);
  pool.free(*first);
  EXPECT_NE(pool.allocate(20 * kPage), std::nullopt);
}

TEST(PoolLayout, TrimKeepsWhatItIsAskedTo) {
  Driven pool(0);
  const auto kept = pool.allocate(kChunk);
  const auto freed = pool.allocate(8 * kChunk);
  pool.free(*freed);
  EXPECT_TRUE(pool.layout.plan_trim(0).wait);
  pool.all_passed();
  pool.trim(4 * kChunk);
  EXPECT_EQ(pool.layout.statistics().reserved, 4 * kChunk);
  pool.trim(0);
  EXPECT_EQ(pool.layout.statistics().reserved, kChunk);
  pool.free(*kept);
  pool.check();
}

TEST(PoolLayout, FreesOfNoBlockChangeNothing) {
  Driven pool(0);
  const auto at = pool.allocate(kPage);
  EXPECT_EQ(pool.layout.free(*at + 512, 1), Layout::Freed::kUnknown);
  pool.free(*at);
  EXPECT_EQ(pool.layout.free(*at, 1), Layout::Freed::kTwice);
  pool.check();
}

// A refusal is the limit's: the chunks that blocks hold leave no room for the block's pages.
TEST(PoolLayout, RandomHistoriesAgreeWithTheModel) {
  for (unsigned seed = 0; seed < 10'000; ++seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](unsigned most) { return std::uniform_int_distribution<unsigned>(0, most)(random); };
    const bool whole_pages = up_to(3) == 0;
    const Bytes limit = up_to(1) == 0 ? (1 + up_to(200)) * kPage : 0;
    Driven pool(limit, up_to(9) == 0 ? 256 * kPage : 1 << 26);
    for (int step = 0; step < 60; ++step) {
      const unsigned what = up_to(19);
      const Stream stream = 1 + up_to(2);
      if (what < 10) {
        const Bytes pages = up_to(3) == 0 ? up_to(40) : up_to(5);
        const Bytes bytes = whole_pages ? (1 + pages) * kPage : 1 + pages * kPage + up_to(kPage);
        const Bytes held = pool.held();
        if (pool.allocate(bytes, up_to(9) == 0 ? kIdle : stream) == std::nullopt && pool.layout.limit() != 0 &&
            pool.layout.plan(bytes, stream).refused) {
          ASSERT_GT(std::max(held, pool.held()) + Layout::rounded(bytes, kPage), limit) << "seed " << seed;
        }
      } else if (what < 17 && !pool.used.empty()) {
        pool.free(std::next(pool.used.begin(), up_to(static_cast<unsigned>(pool.used.size()) - 1))->first, stream);
      } else if (what < 19) {
        pool.passed(stream);
      } else {
        pool.trim(up_to(50) * kPage);
      }
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", step " << step;
      if (step % 10 == 9) pool.check();
    }
    pool.check();
    while (!pool.used.empty()) pool.free(pool.used.begin()->first);
    pool.all_passed();
    pool.trim(0);
    pool.check();
    ASSERT_EQ(pool.layout.statistics().reserved, 0U) << "seed " << seed;
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace cudasched::memory
