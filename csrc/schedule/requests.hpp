// A latency client's words for the gates of best-effort clients: the beginning of its request, the time that the
// request needs by itself, the foreseen time of the next one, the time of the last one. A request lasts from the
// client's activity to its idleness: a region with its work, or a burst of launches.
//
// Requests of one target (SLO) are taken for alike. Of a request with overlapping regions, or that goes on after the
// client lapsed in mid-region, the words say nothing.
//
// begin() is on the launch path: loads and stores, no lock. The caller of every other function holds a lock. A begin()
// that meets the end() of the request before may find its request unknown, and best effort then waits. Pure: no clock,
// no driver.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arbiter/table.hpp"
#include "schedule/arrivals.hpp"
#include "schedule/segments.hpp"
#include "schedule/slack.hpp"

namespace cudasched::schedule {

// A segment of the request begins, `position_ns` being the expected GPU time of all that the client has launched.
void publish(const Segments::SegmentNews& told, std::int64_t position_ns, arbiter::Slot& slot) noexcept;

class Requests {
 public:
  void join(arbiter::Layout* layout, int slot, double miss_probability) noexcept;

  // The client has another slot now.
  void moved(int slot) noexcept { slot_.store(slot, std::memory_order_relaxed); }

  // Restores the arbiter's words on the request and on hints, where the arbiter has others.
  void write_again(bool in_region) noexcept;

  // A region was entered; `alone`: the client was idle, and a request begins with it.
  void enter(std::int64_t slo_ns, bool alone) noexcept;

  // The client has become active. `in_region`: regions are open. For how long best effort's work in flight is predicted
  // to last; -1: no best-effort client is there.
  std::int64_t begin(std::int64_t now_ns, bool in_region) noexcept;

  // The client has become idle; `now_ns` is a moment before begin() could be called again.
  void end(std::int64_t now_ns, bool in_region) noexcept;

  // The time of the request under way by itself; 0: not known, or the request is to be kept clean.
  std::int64_t expected_ns() const noexcept { return expected_ns_.load(std::memory_order_relaxed); }

  // The deadline of one without a region; 0: none.
  std::int64_t deadline_ns() const noexcept { return deadline_ns_.load(std::memory_order_relaxed); }

  // When the request under way began, or the last one.
  std::int64_t began_ns() const noexcept { return entered_ns_.load(std::memory_order_acquire); }

  // Says anew when the next request is foreseen.
  void look_ahead(std::int64_t now_ns) noexcept;

  // The client says that it comes.
  void expect(std::int64_t within_ns, std::int64_t now_ns) noexcept;

  // When the GPU is to be made ready for the next request, as look_ahead() last found; 0: not at all. Any thread.
  std::int64_t ready_ns() const noexcept { return ready_ns_.load(std::memory_order_relaxed); }

  // Is that now? From then on best effort holds back until the request has come or stayed away.
  bool get_ready(std::int64_t now_ns) noexcept;

 private:
  static constexpr int kHistories = 8;
  static constexpr int kNone = -1;

  // The times of requests with one target.
  struct History {
    std::atomic<std::int64_t> slo_ns{0};
    std::atomic<std::int64_t> expected_ns{0};  // of the next one, as the arbiter has it
    RegionHistory times;
  };

  int find_history(std::int64_t slo_ns) const noexcept;
  int history_of(std::int64_t slo_ns) noexcept;
  arbiter::Slot& slot() noexcept {
    return layout_->slots[static_cast<std::size_t>(slot_.load(std::memory_order_relaxed))];
  }

  arbiter::Layout* layout_ = nullptr;
  std::atomic<int> slot_{kNone};
  // As the slot has them; a table that is damaged does not. Written before the slot's words.
  std::atomic<std::int64_t> entered_ns_{0};
  std::atomic<std::int64_t> expected_ns_{0};
  std::atomic<std::int64_t> admitted_at_entry_ns_{0};
  std::atomic<std::int64_t> deadline_ns_{0};  // without a region
  std::atomic<std::int64_t> hint_until_ns_{0};
  Arrivals arrivals_;
  std::atomic<std::int64_t> ready_ns_{0};
  std::array<History, kHistories> histories_;
  int replaced_ = 0;                        // the history that a new target takes next
  std::atomic<int> region_history_{kNone};  // of the region that is about to begin a request
  std::atomic<int> current_{kNone};         // of the request under way; kNone: nothing is to be learned of it
  std::atomic<std::int64_t> waited_ns_{0};  // best-effort work in flight when it began
};

}  // namespace cudasched::schedule
