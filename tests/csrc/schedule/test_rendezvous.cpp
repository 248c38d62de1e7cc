// When the collectives of a job's members go: together, bounded, and never deadlocked by members that have others.
#include <deque>
#include <random>
#include <vector>

#include "base/clock.hpp"
#include "schedule/rendezvous.hpp"

namespace cudasched::schedule {
namespace {

using Verdict = Rendezvous::Verdict;
constexpr std::int64_t kBegin = 5 * kNsPerSecond;

JobProgress progress(std::initializer_list<const Rendezvous*> members) {
  JobProgress all;
  for (const Rendezvous* const member : members) all.add(member->word());
  return all;
}

TEST(Rendezvous, TheFirstWaitsForTheOthersAndAllGoTogether) {
  Rendezvous first, second, third;
  first.arrive(kBegin);
  EXPECT_EQ(first.look(progress({&second, &third}), kBegin), Verdict::kWait);
  second.arrive(kBegin);
  EXPECT_EQ(first.look(progress({&second, &third}), kBegin), Verdict::kWait);
  third.arrive(kBegin);
  EXPECT_EQ(first.look(progress({&second, &third}), kBegin), Verdict::kPolicy);
  EXPECT_EQ(third.look(progress({&first, &second}), kBegin), Verdict::kPolicy);
}

TEST(Rendezvous, OnceOneIsSubmittedTheOthersFollowAtOnce) {
  Rendezvous first, second;
  first.arrive(kBegin);
  second.arrive(kBegin);
  EXPECT_FALSE(first.submitted(kBegin));
  EXPECT_EQ(second.look(progress({&first}), kBegin), Verdict::kNow);
  EXPECT_FALSE(second.submitted(kBegin));
  second.arrive(kBegin);
  EXPECT_EQ(second.look(progress({&first}), kBegin), Verdict::kWait);
}

TEST(Rendezvous, AMemberThatIsFarBehindIsWaitedForAndPassesAtOnce) {
  Rendezvous ahead, behind;
  for (int i = 0; i < 5; ++i) ahead.submitted(kBegin);
  for (int i = 0; i < 5; ++i) {
    behind.arrive(kBegin);
    EXPECT_EQ(behind.look(progress({&ahead}), kBegin), Verdict::kNow);
    ahead.arrive(kBegin);
    EXPECT_EQ(ahead.look(progress({&behind}), kBegin), Verdict::kWait);
    behind.submitted(kBegin);
  }
  behind.arrive(kBegin);
  EXPECT_EQ(ahead.look(progress({&behind}), kBegin), Verdict::kPolicy);
}

TEST(Rendezvous, AMemberThatDoesNotComeIsWaitedForLessAndLess) {
  Rendezvous self;
  const Rendezvous other;
  std::int64_t now = kBegin;
  std::int64_t waited = 0;
  int missed = 0;
  while (now < kBegin + 60 * kNsPerSecond) {
    self.arrive(now);
    while (self.look(progress({&other}), now) == Verdict::kWait) {
      now += 100'000;
      waited += 100'000;
    }
    missed += self.submitted(now);
    now += kNsPerMs;
  }
  EXPECT_GE(missed, Rendezvous::kMissesInARow);
  EXPECT_LE(missed, 16);
  EXPECT_LE(waited, missed * (Rendezvous::kLongestNs + kNsPerMs));
}

TEST(Rendezvous, AMemberThatIsLateNowAndThenIsStillWaitedFor) {
  Rendezvous self, other;
  std::int64_t now = kBegin;
  for (int i = 0; i < 100; ++i) {
    self.arrive(now);
    if (i % 3 != 0) now += Rendezvous::kLongestNs;  // twice in a row
    if (i % 3 == 0) other.arrive(now);
    EXPECT_EQ(self.look(progress({&other}), now), Verdict::kPolicy);
    EXPECT_EQ(self.submitted(now), i % 3 != 0);
    if (i % 3 != 0) {
      other.arrive(now);
      EXPECT_EQ(other.look(progress({&self}), now), Verdict::kNow);
    }
    other.submitted(now);
  }
  self.arrive(now);
  EXPECT_EQ(self.look(progress({&other}), now), Verdict::kWait);
}

TEST(Rendezvous, DamagedWordsHoldNothingForLong) {
  std::mt19937_64 random(7);
  Rendezvous self;
  std::int64_t now = kBegin;
  for (int i = 0; i < 1000; ++i) {
    self.arrive(now);
    const std::int64_t began = now;
    for (;;) {
      JobProgress others;
      others.add(random() >> (random() % 64));
      if (self.look(others, now) != Verdict::kWait) break;
      now += kNsPerMs;
    }
    EXPECT_LE(now - began, Rendezvous::kLongestNs);
    self.submitted(now);
  }
}

// Random jobs: members with delays of their own and gates that close at random for all at once. No collective that was
// submitted waits for a member longer than that member takes to reach it.
class RendezvousTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(RendezvousTest, ASubmittedCollectiveWaitsForNoClosedGate) {
  std::mt19937 random(GetParam());
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  constexpr std::int64_t kStepNs = 20'000;
  struct Member {
    Rendezvous rendezvous;
    std::int64_t ready_ns = kBegin;  // when the next collective reaches its gate
    bool at_gate = false;
    int submitted = 0;
  };
  std::vector<Member> members(static_cast<std::size_t>(2 + below(3)));
  std::int64_t now = kBegin;
  std::int64_t gate_changes_ns = now;
  bool closed = false;
  constexpr int kCollectives = 200;
  for (int step = 0; step < 2'000'000; ++step) {
    now += kStepNs;
    if (now >= gate_changes_ns) {
      closed = !closed;
      gate_changes_ns = now + (closed ? 1 + below(100) : 1 + below(400)) * kStepNs;
    }
    bool all = true;
    for (Member& member : members) {
      if (member.submitted == kCollectives) continue;
      all = false;
      if (!member.at_gate && now >= member.ready_ns) {
        member.at_gate = true;
        member.rendezvous.arrive(now);
      }
      if (!member.at_gate) continue;
      JobProgress others;
      for (const Member& other : members) {
        if (&other != &member) others.add(other.rendezvous.word());
      }
      const Verdict verdict = member.rendezvous.look(others, now);
      if (verdict == Verdict::kWait || (verdict == Verdict::kPolicy && closed)) continue;
      if (verdict == Verdict::kPolicy) {
        for (const Member& other : members) {
          ASSERT_TRUE(other.at_gate || other.submitted > member.submitted) << "submitted before another one is there";
        }
      }
      EXPECT_FALSE(member.rendezvous.submitted(now));
      ++member.submitted;
      member.at_gate = false;
      member.ready_ns = now + (1 + below(500)) * kStepNs;  // 10 ms, less than is waited for
    }
    // Nobody is left at a closed gate with a collective that another member has on its GPU.
    for (const Member& member : members) {
      for (const Member& other : members) ASSERT_LE(member.submitted, other.submitted + 1);
    }
    if (all) break;
  }
  for (const Member& member : members) EXPECT_EQ(member.submitted, kCollectives);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RendezvousTest, ::testing::Range(1u, 20u));

}  // namespace
}  // namespace cudasched::schedule
