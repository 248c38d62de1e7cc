// The predicted times of launches, and the timed launches that correct the predictions. Owns the predictor, the timing
// events and the prediction of each segment in flight.
//
// Not thread-safe but for Question: the gate's lock is held.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "predict/predictor.hpp"
#include "queue/call.hpp"
#include "runtime/graphs.hpp"
#include "schedule/estimates.hpp"
#include "schedule/ledger.hpp"
#include "telemetry/trace_record.hpp"

namespace cudasched::runtime {

class Sampler {
 public:
  static constexpr int kTimers = 16;
  static constexpr std::uint32_t kOverlappingPeriod = 4;  // one in so many samples that are wanted of known ones

  // A launch as the predictor wants it: its parameters gathered. Made outside the gate's lock.
  class Question {
   public:
    Question(const predict::Launch& launch, const predict::Residency& device) noexcept;
    Question(const Question&) = delete;
    Question& operator=(const Question&) = delete;

    // Asks the driver how the kernel fills the device. Outside the lock: where modules load lazily, the driver may load
    // this one now.
    void find_residency() noexcept;

    predict::Query query;

   private:
    // Not initialised: only the words that are read are set.
    std::array<std::uint32_t, predict::Function::kMaxParameterBytes / 4> block_;
  };

  void use_graphs(const Graphs* graphs) noexcept { graphs_ = graphs; }
  predict::Predictor& predictor() noexcept { return predictor_; }
  const predict::Predictor& predictor() const noexcept { return predictor_; }

  // The context's events were made: so are the timers.
  void make_timers() noexcept;

  predict::Prediction predict(const predict::Query& query) noexcept;
  std::int64_t measured_graph_ns(CUgraphExec exec) const noexcept;
  std::int64_t graph_ns(CUgraphExec exec) const noexcept;

  // Whether the launch is to be timed. A launch that may overlap the one before it is timed without that overlap,
  // seldom once the kernel is known. Else nothing would be learned of a program without other launches.
  bool times(const queue::Call& call, const predict::Prediction& prediction) noexcept;

  // For schedule::Estimates: the key of a launch, and the predictor's answer where there is no estimate yet.
  static bool is_collective(const predict::Query& query) noexcept {
    return query.function != nullptr && query.function->traits.is_collective;
  }
  static std::uint64_t key_of(const predict::Launch& launch) noexcept {
    return schedule::Estimates::key_of(launch.function, launch.grid, launch.block);
  }
  std::int64_t estimate_ns(const predict::Query& query) noexcept {
    return query.launch.is_graph ? predict(query).duration_ns : predictor_.estimate_ns(query);
  }

  // A launch that was predicted became part of a segment; `alone`: it is all of it.
  void entered(int segment, const predict::Prediction& prediction, bool alone, bool beside_others) noexcept;
  // A launch that was estimated did.
  void entered(int segment) noexcept { at(segment).alone = false; }

  // Takes a timer for the segment; null where none is free. The event to record before the launch.
  CUevent start_timer(int segment) noexcept;
  // The measured time goes into the trace at completion.
  void trace(int segment, const queue::Call& call, int device) noexcept;
  // The event to record behind the segment's last launch and to query: the timer's end of a timed segment, else
  // `marker`.
  CUevent end_event(int segment, CUevent marker) const noexcept;

  // The GPU waited for the segment's launch call, which took so long on the host.
  void waited(int segment, std::int64_t call_ns) noexcept { at(segment).call_ns = call_ns; }

  // The segment's launch was refused, or no event is behind it: nothing can be measured.
  void drop(int segment) noexcept;

  // `marked`: the event behind it is complete.
  void completed(int segment, bool marked) noexcept;

  // All work in flight has run beside other work, or had to wait for a held launch: its times say nothing of such
  // launches alone.
  void overlap() noexcept { ++overlap_; }

  // Launches that run for longer than predicted: the predictor learns the time run so far as their least time.
  void observe_late(schedule::Ledger& ledger) noexcept;

  // The context goes: `pending(segment)` says whether a thread is about to record its events.
  template <typename Pending>
  void forget(Pending&& pending) noexcept {
    for (std::size_t segment = 0; segment < notes_.size(); ++segment) {
      const int timer = notes_[segment].timer;
      if (timer >= 0 && pending(static_cast<int>(segment))) timers_[static_cast<std::size_t>(timer)] = {};
    }
    destroy_timers();
    notes_.fill({});
  }

 private:
  struct Timer {
    CUevent start = nullptr;
    CUevent end = nullptr;
    bool busy = false;
  };
  // Of a segment.
  struct Note {
    int timer = -1;
    bool alone = false;       // one launch, which was predicted
    bool overlapped = false;  // other work was in flight beside it when it entered
    std::uint32_t overlap = 0;
    std::int64_t call_ns = 0;  // of its launch call, if the GPU waited for that
    std::int64_t told_ns = 0;  // the least time that the predictor was told
    predict::Prediction prediction;
    telemetry::TraceRecord traced;  // of kind 0: nothing is to be said of it
  };

  bool overlapped(const Note& note) const noexcept { return note.overlapped || note.overlap != overlap_; }
  Note& at(int segment) noexcept { return notes_[static_cast<std::size_t>(segment)]; }
  void free_timer(Note& note) noexcept;
  void destroy_timers() noexcept;

  const Graphs* graphs_ = nullptr;
  predict::Predictor predictor_;
  std::uint32_t overlap_ = 0;
  std::uint32_t overlapping_wanted_ = 0;  // samples of known launches that may overlap the one before them
  std::array<Note, schedule::Ledger::kMarkers> notes_{};
  std::array<Timer, kTimers> timers_{};
};

}  // namespace cudasched::runtime
