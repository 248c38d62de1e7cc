// The property of docs/order.md over millions of random schedules: no latency thread ever waits, directly or through
// another thread, for an operation behind a closed gate; no schedule gets stuck; and what the driver sees is a valid
// order of what the program asked for.
//
// Threads of one process, the interpreter's lock (GIL), an allocator's mutex, a ring of a few places, a launcher and a
// gate that is closed as long as a latency region is open (no backstop helps it). Positions come from the product's
// Order and who opens the gate from its may_wait_behind_the_gate(); what a call truly depends on is found by looking at
// everything in the ring. Each rule can be broken; then the same search must find a counterexample.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <string>

#include "queue/order.hpp"

namespace cudasched::queue {
namespace {

struct Broken {
  bool latency_drains_wait = false;     // a latency thread's drain leaves the gate as it is
  bool gil_holders_wait = false;        // so does a synchronise by a thread that holds the GIL
  bool other_drains_wait = false;       // so does any other drain beside latency regions
  bool late_latency_is_missed = false;  // latency work that comes leaves waits under way as they are
  bool events_are_ignored = false;      // a call on an event goes by its stream alone
  bool legacy_is_ignored = false;       // the legacy stream is as any other
  bool no_drain = false;                // direct calls do not wait at all
};

class Process {
 public:
  Process(Order& order, Position& clock, std::uint32_t seed, const Broken& broken)
      : order_(order), pushed_(clock), broken_(broken), random_(seed), clock_(clock) {
    passed_ = opened_ = pushed_;
    outside_closed_ = chance(3);
    for (Thread& thread : threads_) {
      thread.serves_latency = chance(2);
      thread.steps = 3 + static_cast<int>(random_() % 8);
    }
  }

  // Empty: nothing wrong.
  std::string run() {
    for (int step = 0; step < 2000 && wrong_.empty(); ++step) {
      if (!advance()) break;
      look_for_latency_behind_the_gate();
    }
    if (wrong_.empty() && !(done() && ring_.empty())) wrong_ = "stuck";
    clock_ = pushed_;
    order_.passed(pushed_);
    return wrong_;
  }

 private:
  static constexpr std::size_t kThreads = 3;
  static constexpr std::size_t kPlaces = 4;
  static constexpr int kNone = -1;
  enum class State { kReady, kWantsGil, kWantsMutex, kDrains, kDone };

  struct Operation {
    Position position;
    bool launch;
    int stream;  // 0: legacy; 1, 2: blocking; 3, 4: not
    int event;
  };
  struct Call {  // made directly, once the drain is over
    bool valid = false;
    int stream = kNone;
    int event = kNone;
    bool everything = false;
    Position depends = 0;  // the last operation that was queued when it began and that it must follow
  };
  struct Thread {
    State state = State::kReady;
    bool serves_latency = false;
    bool in_region = false;
    bool gil = false;
    bool mutex = false;
    int steps = 0;
    Position awaits = 0;
    Call call;
    bool repeat_push = false;
    Operation push{};
  };

  bool chance(unsigned one_in) { return random_() % one_in == 0; }
  bool region_open() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const Thread& thread) { return thread.in_region; });
  }
  bool gate_closed() const { return outside_closed_ || region_open(); }
  bool done() const {
    return std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.state == State::kDone; });
  }

  static StreamKind kind(int stream) {
    return stream == 0 ? StreamKind::kLegacy : stream <= 2 ? StreamKind::kBlocking : StreamKind::kNonBlocking;
  }
  static std::uint64_t stream_handle(int stream) { return static_cast<std::uint64_t>(0x10 + stream); }
  static std::uint64_t event_handle(int event) { return static_cast<std::uint64_t>(0x80 + event); }

  // Must `call` follow this operation? By CUDA's own rules, not by the product's.
  static bool depends_on(const Call& call, const Operation& operation) {
    if (call.everything) return true;
    if (call.event != kNone && call.event == operation.event) return true;
    if (call.stream == kNone) return false;
    if (call.stream == operation.stream) return true;
    const bool legacy = call.stream == 0 || operation.stream == 0;
    return legacy && call.stream <= 2 && operation.stream <= 2;
  }

  bool launcher_can_move() const {
    if (ring_.empty()) return false;
    const Operation& head = ring_.front();
    return !head.launch || !gate_closed() || head.position <= opened_;
  }

  bool can_move(const Thread& thread) const {
    switch (thread.state) {
      case State::kReady:
        return true;
      case State::kWantsGil:
        return gil_ == nullptr;
      case State::kWantsMutex:
        return mutex_ == nullptr;
      case State::kDrains:
        return passed_ >= thread.awaits;
      case State::kDone:
        return false;
    }
    return false;
  }

  // One step of a thread that can move; false where none can.
  bool advance() {
    std::array<int, kThreads + 1> able{};
    std::size_t count = 0;
    for (std::size_t i = 0; i < kThreads; ++i) {
      if (can_move(threads_[i])) able[count++] = static_cast<int>(i);
    }
    if (launcher_can_move()) able[count++] = kThreads;
    if (outside_closed_ && (count == 0 || chance(20))) {
      outside_closed_ = false;  // another process's request is done
      return true;
    }
    if (count == 0) return false;
    const int chosen = able[random_() % count];
    if (chosen == kThreads) {
      passed_ = ring_.front().position;
      ring_.pop_front();
    } else {
      step(threads_[static_cast<std::size_t>(chosen)]);
    }
    return true;
  }

  void step(Thread& thread) {
    switch (thread.state) {
      case State::kWantsGil:
        gil_ = &thread;
        thread.gil = true;
        break;
      case State::kWantsMutex:
        mutex_ = &thread;
        thread.mutex = true;
        break;
      case State::kDrains:
        if (thread.repeat_push) {
          thread.state = State::kReady;
          push(thread, thread.push);
          return;
        }
        submit(thread);
        break;
      default:
        act(thread);
        return;
    }
    thread.state = State::kReady;
  }

  void act(Thread& thread) {
    if (thread.steps-- <= 0) {
      leave(thread);
      return;
    }
    const int stream = static_cast<int>(random_() % 5);
    const int event = static_cast<int>(random_() % 3);
    switch (random_() % 12) {
      case 0:
      case 1:
        if (thread.serves_latency) {
          thread.in_region ? close_region(thread) : open_region(thread);
        } else {
          launch(thread, stream);
        }
        break;
      case 2:
      case 3:
        launch(thread, stream);
        break;
      case 4:  // a record or a wait
        if (thread.in_region) {
          direct(thread, {true, stream, event, false, 0}, Waiter::For::kOther);
        } else {
          push(thread, {0, false, stream, event});
        }
        break;
      case 5:  // a call that is never deferred
        direct(thread, {true, stream, chance(2) ? event : kNone, false, 0}, Waiter::For::kOther);
        break;
      case 6:  // a stream synchronise: whoever makes it holds no lock but, perhaps, the GIL
        if (!thread.mutex) direct(thread, {true, stream, kNone, false, 0}, Waiter::For::kSynchronise);
        break;
      case 7:
        if (!thread.mutex) direct(thread, {true, kNone, event, false, 0}, Waiter::For::kSynchronise);
        break;
      case 8:  // a free
        direct(thread, {true, kNone, kNone, true, 0}, Waiter::For::kOther);
        break;
      case 9:
        if (thread.gil) {
          release(thread, gil_, thread.gil);
        } else if (!thread.mutex) {  // in this order
          thread.state = State::kWantsGil;
        }
        break;
      default:
        if (thread.mutex) {
          release(thread, mutex_, thread.mutex);
        } else {
          thread.state = State::kWantsMutex;
        }
    }
  }

  void launch(Thread& thread, int stream) {
    if (thread.in_region) {
      direct(thread, {true, stream, kNone, false, 0}, Waiter::For::kOther);
    } else if (!thread.mutex) {  // nobody launches under the allocator's mutex
      push(thread, {0, true, stream, kNone});
    }
  }

  void open_region(Thread& thread) {
    thread.in_region = true;
    process_has_latency_ = true;
    if (!broken_.late_latency_is_missed) opened_ = std::max(opened_, claimed_);
  }
  void close_region(Thread& thread) { thread.in_region = false; }

  static void release(Thread&, Thread*& owner, bool& held) {
    owner = nullptr;
    held = false;
  }
  void leave(Thread& thread) {
    thread.in_region = false;
    if (thread.gil) release(thread, gil_, thread.gil);
    if (thread.mutex) release(thread, mutex_, thread.mutex);
    thread.state = State::kDone;
  }

  // As Queue::push() does.
  void push(Thread& thread, Operation operation) {
    if (ring_.size() == kPlaces) {
      thread.push = operation;
      thread.repeat_push = true;
      drain(thread, passed_ + 1, operation.launch ? Waiter::For::kLaunch : Waiter::For::kOther);
      return;
    }
    thread.repeat_push = false;
    operation.position = ++pushed_;
    order_.passed(passed_);
    order_.stream_used(stream_handle(operation.stream), kind(operation.stream), operation.position);
    if (operation.event != kNone) {
      if (chance(2)) {
        order_.event_recorded(event_handle(operation.event), operation.position);
      } else {
        order_.event_awaited(event_handle(operation.event), operation.position);
      }
    }
    ring_.push_back(operation);
  }

  void direct(Thread& thread, Call call, Waiter::For what) {
    for (const Operation& operation : ring_) {
      if (depends_on(call, operation)) call.depends = operation.position;
    }
    thread.call = call;
    Position position = 0;
    if (call.everything) position = order_.end();
    if (call.stream != kNone) {
      const StreamKind of = broken_.legacy_is_ignored ? StreamKind::kNonBlocking : kind(call.stream);
      position = std::max(position, order_.of_stream(stream_handle(call.stream), of));
    }
    if (call.event != kNone && !broken_.events_are_ignored) {
      position = std::max(position, order_.of_event(event_handle(call.event)));
    }
    if (broken_.no_drain) position = 0;
    drain(thread, position, what);
  }

  // As Queue::drain() does.
  void drain(Thread& thread, Position position, Waiter::For what) {
    thread.state = State::kDrains;
    thread.awaits = position;
    if (position <= passed_) return;
    const Waiter waiter{what, thread.in_region, thread.gil};
    if (!may_wait(waiter, process_has_latency_)) {
      opened_ = std::max(opened_, position);
    } else if (!may_wait(waiter, true)) {
      claimed_ = std::max(claimed_, position);
    }
  }

  bool may_wait(Waiter waiter, bool process_has_latency) const {
    if (waiter.latency && broken_.latency_drains_wait) return true;
    if (!waiter.latency && waiter.what == Waiter::For::kOther && broken_.other_drains_wait) return true;
    if (broken_.gil_holders_wait) waiter.holds_gil = false;
    return may_wait_behind_the_gate(waiter, process_has_latency);
  }

  void submit(Thread& thread) {
    if (thread.call.valid && passed_ < thread.call.depends) wrong_ = "a call went before what it depends on";
    thread.call = {};
  }

  void look_for_latency_behind_the_gate() {
    for (const Thread& thread : threads_) {
      if (!thread.in_region) continue;
      const Thread* last = &thread;
      for (std::size_t hops = 0; hops <= kThreads && last != nullptr; ++hops) {
        if (last->state == State::kDrains) {
          if (behind_closed_gate(last->awaits)) wrong_ = "latency work waits for what is behind a closed gate";
          break;
        }
        last = last->state == State::kWantsGil ? gil_ : last->state == State::kWantsMutex ? mutex_ : nullptr;
      }
    }
  }

  bool behind_closed_gate(Position position) const {
    return gate_closed() && std::any_of(ring_.begin(), ring_.end(), [&](const Operation& operation) {
             return operation.launch && operation.position <= position && operation.position > opened_;
           });
  }

  Order& order_;
  Position pushed_;
  Position passed_ = 0;
  Position opened_ = 0;
  Position claimed_ = 0;
  const Broken broken_;
  std::minstd_rand random_;
  Position& clock_;
  bool outside_closed_ = false;
  bool process_has_latency_ = false;
  Thread* gil_ = nullptr;
  Thread* mutex_ = nullptr;
  std::array<Thread, kThreads> threads_{};
  std::deque<Operation> ring_;
  std::string wrong_;
};

// The first counterexample in so many schedules, as "what was wrong (seed)"; empty if there is none.
std::string search(std::uint32_t schedules, const Broken& broken = {}) {
  const auto order = std::make_unique<Order>();
  Position clock = 0;
  for (std::uint32_t seed = 1; seed <= schedules; ++seed) {
    const std::string wrong = Process(*order, clock, seed, broken).run();
    if (!wrong.empty()) return wrong + " (seed " + std::to_string(seed) + ")";
  }
  return {};
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint32_t kSchedules = 200'000;
#else
constexpr std::uint32_t kSchedules = 2'000'000;
#endif
constexpr std::uint32_t kEnough = 200'000;  // a broken rule shows long before

TEST(Schedules, NoLatencyThreadWaitsBehindAClosedGateAndEveryOrderIsValid) { EXPECT_EQ(search(kSchedules), ""); }

TEST(Schedules, WithoutTheRuleOfLatencyDrainsLatencyWaits) {
  EXPECT_NE(search(kEnough, {.latency_drains_wait = true}), "");
}
TEST(Schedules, WithoutTheRuleOfTheGilLatencyWaits) { EXPECT_NE(search(kEnough, {.gil_holders_wait = true}), ""); }
TEST(Schedules, WithoutTheRuleOfOtherDrainsLatencyWaits) {
  EXPECT_NE(search(kEnough, {.other_drains_wait = true}), "");
}
TEST(Schedules, WithoutTheRuleOfLateLatencyItWaits) {
  EXPECT_NE(search(kEnough, {.late_latency_is_missed = true}), "");
}
TEST(Schedules, WithoutEventsThePositionIsTooEarly) { EXPECT_NE(search(kEnough, {.events_are_ignored = true}), ""); }
TEST(Schedules, WithoutTheLegacyStreamThePositionIsTooEarly) {
  EXPECT_NE(search(kEnough, {.legacy_is_ignored = true}), "");
}
TEST(Schedules, WithoutDrainsOrderIsLost) { EXPECT_NE(search(kEnough, {.no_drain = true}), ""); }

}  // namespace
}  // namespace cudasched::queue
