#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "schedule/memory_turns.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kNow = 1'000'000 * kMs;

MemoryClient runs(std::uint64_t movable, std::int64_t turn_until_ns) {
  return {.takes_turns = true, .turn_until_ns = turn_until_ns, .movable = movable};
}
MemoryClient waits(std::uint64_t lacks, std::int64_t since_ns, std::uint64_t movable = 0) {
  return {.takes_turns = true, .lacks = lacks, .since_ns = since_ns, .turn_until_ns = 1, .movable = movable};
}

class MemoryTurns : public ::testing::Test {
 protected:
  MemoryView view(std::uint64_t free) const { return {clients_, free, kNow, false}; }
  std::vector<std::uint64_t> given(std::uint64_t free) const {
    std::vector<std::uint64_t> bytes;
    for (int i = 0; i < static_cast<int>(clients_.size()); ++i) bytes.push_back(gives_memory(view(free), i));
    return bytes;
  }
  std::vector<MemoryClient> clients_;
};

TEST_F(MemoryTurns, NobodyMovesWhileNobodyWaits) {
  clients_ = {runs(50 * kGiB, 1), runs(50 * kGiB, 1)};
  EXPECT_EQ(next_for_memory(view(0)), -1);
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0}));
}

TEST_F(MemoryTurns, TheLongestWaiterIsNextAndGetsTheMissingBytesAndSomeMore) {
  clients_ = {runs(75 * kGiB, 1), waits(50 * kGiB, 9), waits(50 * kGiB, 8)};
  EXPECT_EQ(next_for_memory(view(10 * kGiB)), 2);
  EXPECT_EQ(given(10 * kGiB), (std::vector<std::uint64_t>{40 * kGiB + kSpareBytes, 0, 0}));
  EXPECT_TRUE(has_memory(view(50 * kGiB), 2));
  EXPECT_FALSE(has_memory(view(50 * kGiB), 1)) << "in its turn";
  EXPECT_EQ(given(50 * kGiB), (std::vector<std::uint64_t>{0, 0, 0}));
}

TEST_F(MemoryTurns, AClientThatRunsKeepsItsMemoryForItsTurn) {
  clients_ = {runs(75 * kGiB, kNow + 1), waits(50 * kGiB, 8)};
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0}));
  clients_[0].turn_until_ns = kNow;
  EXPECT_EQ(given(0)[0], 50 * kGiB + kSpareBytes);
  clients_[0].turn_until_ns = kNow + 2 * kLongestTurnNs;
  EXPECT_EQ(given(0)[0], 50 * kGiB + kSpareBytes) << "of a damaged table";
}

TEST_F(MemoryTurns, AWaitHasAReasonWhileATurnLastsThatItNeeds) {
  clients_ = {runs(75 * kGiB, kNow + 1), waits(50 * kGiB, 8)};
  EXPECT_TRUE(waits_for_turn(view(0), 1));
  clients_[0].turn_until_ns = kNow;
  EXPECT_FALSE(waits_for_turn(view(0), 1)) << "it is to give now";
  clients_[0].since_ns = kStopsNs;
  EXPECT_FALSE(waits_for_turn(view(0), 1)) << "and may try in vain";
  clients_[0].since_ns = kPinsNs;
  EXPECT_TRUE(waits_for_turn(view(0), 1));
  clients_[0].since_ns = 0;
  clients_.push_back(runs(20 * kGiB, kNow + 1));
  EXPECT_FALSE(waits_for_turn(view(0), 1)) << "the other's turn changes nothing";
  clients_[0].movable = 40 * kGiB;
  EXPECT_TRUE(waits_for_turn(view(0), 1));
  clients_[2].movable = 5 * kGiB;
  EXPECT_FALSE(waits_for_turn(view(0), 1)) << "not enough";
  EXPECT_TRUE(waits_for_turn({clients_, 5 * kGiB, kNow, true}, 1)) << "latency work asks";
}

TEST_F(MemoryTurns, ThoseThatWaitGiveFirstAndThenTheOldestTurn) {
  clients_ = {runs(30 * kGiB, 9), waits(10 * kGiB, 8), waits(10 * kGiB, 9, 20 * kGiB), runs(30 * kGiB, 8)};
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0, 10 * kGiB + kSpareBytes, 0}));
  clients_[1].lacks = 40 * kGiB;
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0, 20 * kGiB, 20 * kGiB + kSpareBytes}));
}

TEST_F(MemoryTurns, ASmallClientWithoutWhichItIsEnoughRunsOn) {
  clients_ = {runs(20 * kGiB, 8), runs(75 * kGiB, 9), waits(70 * kGiB, 8)};
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 70 * kGiB + kSpareBytes, 0}));
}

TEST_F(MemoryTurns, NobodyGivesBeforeItIsEnough) {
  clients_ = {runs(40 * kGiB, 8), runs(40 * kGiB, kNow + 1), waits(70 * kGiB, 8)};
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0, 0}));
  clients_[1].turn_until_ns = kNow;
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{40 * kGiB, 30 * kGiB + kSpareBytes, 0}));
}

TEST_F(MemoryTurns, AClientThatGrowsInItsTurnIsNext) {
  clients_ = {waits(50 * kGiB, 5, 20 * kGiB), waits(2 * kGiB, 8, 60 * kGiB)};
  EXPECT_EQ(next_for_memory(view(0)), 0);
  clients_[1].turn_until_ns = kNow + 1;
  EXPECT_EQ(next_for_memory(view(0)), 1);
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{2 * kGiB + kSpareBytes, 0}));
}

TEST_F(MemoryTurns, AWaitBehindAnotherHasTheReasonOfThatOne) {
  clients_ = {runs(60 * kGiB, kNow + 1), waits(50 * kGiB, 5, 20 * kGiB), waits(22 * kGiB, 8)};
  EXPECT_EQ(next_for_memory(view(20 * kGiB)), 1);
  EXPECT_TRUE(waits_for_turn(view(20 * kGiB), 1));
  EXPECT_TRUE(waits_for_turn(view(20 * kGiB), 2)) << "what the one before it could give is enough, and it does not";
  clients_[0].turn_until_ns = kNow;
  EXPECT_FALSE(waits_for_turn(view(20 * kGiB), 2));
}

TEST_F(MemoryTurns, NobodyGivesForAClientThatIsTakingItsMemory) {
  clients_ = {waits(50 * kGiB, kTakesNs, 20 * kGiB), runs(40 * kGiB, 1), waits(10 * kGiB, 8)};
  clients_[0].turn_until_ns = kNow + 1;
  EXPECT_EQ(next_for_memory(view(0)), 0) << "although the others do not have as much any more";
  EXPECT_EQ(given(0), (std::vector<std::uint64_t>{0, 0, 0}));
  EXPECT_FALSE(has_memory(view(20 * kGiB), 2));
  EXPECT_TRUE(waits_for_turn(view(0), 2));
  clients_[0].takes_turns = false;
  EXPECT_EQ(given(0)[1], 10 * kGiB + kSpareBytes) << "it has died in that";
}

TEST_F(MemoryTurns, AClientThatWantsTheImpossibleKeepsItsMemoryForItsTurn) {
  clients_ = {waits(40 * kGiB, 5, 70 * kGiB), waits(30 * kGiB, 8, 20 * kGiB)};
  clients_[0].turn_until_ns = kNow + 1;
  EXPECT_EQ(given(10 * kGiB), (std::vector<std::uint64_t>{0, 0}));
  clients_[0].turn_until_ns = kNow;
  EXPECT_EQ(given(10 * kGiB), (std::vector<std::uint64_t>{20 * kGiB + kSpareBytes, 0}));
}

TEST_F(MemoryTurns, AClientIsPassedOverThatCannotHaveItsMemory) {
  clients_ = {waits(90 * kGiB, 5), runs(75 * kGiB, 1), waits(50 * kGiB, 8), runs(75 * kGiB, 1)};
  clients_[3].takes_turns = false;
  EXPECT_FALSE(may_have_memory(view(10 * kGiB), 0));
  EXPECT_EQ(next_for_memory(view(10 * kGiB)), 2);
  EXPECT_TRUE(may_have_memory(view(15 * kGiB), 0));
  EXPECT_EQ(next_for_memory(view(15 * kGiB)), 0);
}

TEST_F(MemoryTurns, LatencyWorkGoesFirst) {
  clients_ = {runs(75 * kGiB, 1), waits(50 * kGiB, 8)};
  MemoryView asked = view(60 * kGiB);
  EXPECT_TRUE(has_memory(asked, 1));
  asked.asked = true;
  EXPECT_FALSE(has_memory(asked, 1));
  asked.free = 0;
  EXPECT_EQ(gives_memory(asked, 0), 0U);
}

// Programs that grow, shrink, end, stop and are killed at random on one GPU, each with its own look at the others, as
// runtime/memory/pager.cpp has it. A move takes its time, and nobody sees its bytes before it is over.
class Gpu {
 public:
  static constexpr std::uint64_t kBytes = 100 * kGiB;
  static constexpr std::int64_t kTurnNs = 5'000 * kMs;
  static constexpr std::int64_t kLookNs = 20 * kMs;
  static constexpr std::int64_t move_ns(std::uint64_t bytes) { return static_cast<std::int64_t>(bytes / 45); }

  Gpu(unsigned seed, int clients, std::uint64_t most, std::int64_t turn_ns = kTurnNs)
      : random_(seed), most_(most), turn_ns_(turn_ns), programs_(clients) {
    for (int i = 0; i < clients; ++i) words_[static_cast<std::size_t>(i)] = {.takes_turns = true, .turn_until_ns = 1};
  }

  void run(int looks) {
    std::vector<int> order(programs_.size());
    std::iota(order.begin(), order.end(), 0);
    for (int i = 0; i < looks && !::testing::Test::HasFailure(); ++i) {
      now_ += kLookNs;
      if (asked_ ? random_() % 50 == 0 : random_() % 2000 == 0) asked_ = !asked_;
      std::ranges::shuffle(order, random_);
      for (const int each : order) look(each);
    }
  }
  int moves() const { return moves_; }
  std::int64_t longest_wait_ns() const { return longest_wait_ns_; }
  std::uint64_t turns() const { return turns_; }

 private:
  struct Program {
    std::uint64_t resident = 0, away = 0, wanted = 0;
    std::int64_t since_ns = 0, moves_until_ns = 0, impossible_ns = 0, waited_ns = 0;
    std::uint64_t leaves = 0;  // bytes of the move under way, out of the GPU
    bool takes = false;        // what was away is on its way back
    bool stopped = false;
  };

  std::uint64_t free() const {
    std::uint64_t used = 0;
    for (const Program& program : programs_) used += program.resident;
    EXPECT_LE(used, kBytes) << "more than the GPU has";
    return kBytes - std::min(used, kBytes);
  }
  MemoryView view() const { return {std::span(words_).first(programs_.size()), free(), now_, asked_}; }
  bool happens(unsigned times) { return random_() % times == 0; }

  void look(int self) {
    Program& program = programs_[static_cast<std::size_t>(self)];
    MemoryClient& words = words_[static_cast<std::size_t>(self)];
    if (happens(20'000)) {  // killed at any time, in a move, too; another one comes
      program = {};
      words = {.takes_turns = true, .turn_until_ns = 1};
      return;
    }
    if (happens(program.stopped ? 200 : 5'000)) program.stopped = !program.stopped;
    words.takes_turns = !program.stopped;  // by its heartbeat
    if (program.stopped || now_ < program.moves_until_ns) return;
    program.resident -= program.leaves;
    program.away += std::exchange(program.leaves, 0);
    if (std::exchange(program.takes, false)) program.away = 0;
    const std::uint64_t mine = program.resident + program.away + program.wanted;
    if (words.lacks == 0 && happens(300)) {
      const std::uint64_t more = kGiB * (1 + random_() % 20);
      const bool fits = more <= free();
      if (mine + more <= most_) (fits ? program.resident : program.wanted) += more;
    } else if (words.lacks == 0 && happens(1'000)) {
      program.resident /= 2;
    }
    publish(self);
    act(self);
    publish(self);
    measure(self);
  }

  void publish(int self) {
    Program& program = programs_[static_cast<std::size_t>(self)];
    MemoryClient& words = words_[static_cast<std::size_t>(self)];
    words.movable = program.resident;
    const bool waited = words.lacks != 0;
    words.lacks = program.away != 0 ? program.away : program.wanted;
    if (!waited && words.lacks != 0) program.since_ns = now_;
    words.since_ns = program.takes ? kTakesNs : program.leaves != 0 ? kStopsNs : program.since_ns;
  }

  void act(int self) {
    Program& program = programs_[static_cast<std::size_t>(self)];
    MemoryClient& words = words_[static_cast<std::size_t>(self)];
    if (has_memory(view(), self)) {
      EXPECT_FALSE(asked_);
      if (words.turn_until_ns <= now_) {
        words.turn_until_ns = now_ + move_ns(program.away) + turn_ns_;
        ++turns_;
      }
      move(program, program.away);
      program.resident += words.lacks;
      program.takes = program.away != 0;
      if (!program.takes) program.wanted = 0;
    } else if (const std::uint64_t bytes = gives_memory(view(), self); bytes != 0) {
      EXPECT_FALSE(asked_);
      EXPECT_FALSE(programs_[static_cast<std::size_t>(next_for_memory(view()))].takes) << "it has what it lacked";
      EXPECT_TRUE(words.lacks != 0 || words.turn_until_ns <= now_) << "it runs, and its turn is not over";
      ASSERT_LE(bytes, program.resident);
      move(program, bytes);
      program.leaves = bytes;
    }
  }

  void move(Program& program, std::uint64_t bytes) {
    if (bytes == 0) return;
    ++moves_;
    program.moves_until_ns = now_ + move_ns(bytes);
  }

  // How long it has waited while it could have had the memory, and no latency work asked.
  void measure(int self) {
    Program& program = programs_[static_cast<std::size_t>(self)];
    const bool waits = words_[static_cast<std::size_t>(self)].lacks != 0;
    const bool possible = may_have_memory(view(), self);
    program.impossible_ns = possible || !waits ? 0 : program.impossible_ns + kLookNs;
    if (program.impossible_ns > 3'000 * kMs) program.wanted = 0;
    if (!waits) program.waited_ns = 0;
    if (waits && possible && !asked_) program.waited_ns += kLookNs;
    longest_wait_ns_ = std::max(longest_wait_ns_, program.waited_ns);
  }

  std::mt19937 random_;
  std::uint64_t most_;  // of one program
  std::int64_t turn_ns_;
  std::int64_t now_ = kNow;
  bool asked_ = false;
  std::vector<Program> programs_;
  std::array<MemoryClient, 64> words_{};
  int moves_ = 0;
  std::uint64_t turns_ = 0;
  std::int64_t longest_wait_ns_ = 0;
};

// A client waits for the turns of those before it, each with a move out and one in.
TEST(MemoryTurnsOfPrograms, NobodyStarvesAndNoTurnIsCutShort) {
  for (unsigned seed = 0; seed < 40 && !::testing::Test::HasFailure(); ++seed) {
    const int clients = 2 + static_cast<int>(seed % 5);
    constexpr std::uint64_t kMost = 90 * kGiB;
    Gpu gpu(seed, clients, kMost);
    gpu.run(30'000);
    EXPECT_GT(gpu.turns(), 20U) << seed;
    EXPECT_LT(gpu.longest_wait_ns(), clients * (Gpu::kTurnNs + 2 * Gpu::move_ns(kMost))) << seed;
  }
}

// Each has its memory back and what it wants beside that, although the others' way out outlasts the turn.
TEST(MemoryTurnsOfPrograms, GetOnInTurnsThatAreShorterThanAMove) {
  for (unsigned seed = 0; seed < 40 && !::testing::Test::HasFailure(); ++seed) {
    const int clients = 2 + static_cast<int>(seed % 5);
    constexpr std::uint64_t kMost = 90 * kGiB;
    Gpu gpu(seed, clients, kMost, 5 * Gpu::kLookNs);
    gpu.run(30'000);
    EXPECT_LT(gpu.longest_wait_ns(), 4 * clients * Gpu::move_ns(kMost)) << seed;
  }
}

TEST(MemoryTurnsOfPrograms, ThatFitTogetherNeverMove) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    Gpu gpu(seed, 4, 24 * kGiB);
    gpu.run(10'000);
    EXPECT_EQ(gpu.moves(), 0) << seed;
  }
}

}  // namespace
}  // namespace cudasched::schedule
