// What-if: recorded launches run again under a virtual clock, with the scheduling code of csrc/schedule deciding as in
// the gate. Deterministic: equal input and seed give an equal result. Any thread; no lock, no clock, no driver.
//
// The model, and its omissions
//   Host       each client is one thread. A best-effort client repeats its trace: its own time between two launches,
//   and
//              waits for the GPU where it waited in the recording. With a blocking gate the thread stands at the gate;
//              with offload it pushes into a ring of kRing launches, which a launcher feeds to the driver. A latency
//              client serves requests that arrive at given times, first come first served: enters its region, launches,
//              waits for the GPU, leaves. Its launches pass at once.
//   GPU        one kernel of a client at a time, in order, so a trace should hold the time that each kernel adds. In
//              one process and under MPS every kernel runs to its end, and clients alternate kernel by kernel (latency
//              work first, where `priorities` says so). A kernel that leaves multiprocessors to others overlaps with
//              them, as far as the memory's bandwidth goes (`sms`, `bandwidth`). The first kernel of a request that
//              follows best-effort work takes `switch_ns` longer, because the caches are cold. With time slicing,
//              contexts take turns: one yields when it has no kernel ready or its slice is over while another has
//              (kernels are then cut), and each change costs `switch_ns`, or to such a request `cold_ns` more. Slices
//              are `slice_ns` long, or as long as a class sets its own.
//   Scheduler  predictions are the recorded durations with log-normal noise; completions are seen `reaction_ns` late.
//              Under `harvest` and `slack` the simulation learns a request's segments as a latency client does, with
//              the same noise in the time of a timed launch. The gate's ledger counts the work in flight, and held
//              launches have the gate's limits. Until the first latency client joins, the gate's bound of the work in
//              flight applies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/class.hpp"
#include "schedule/admission.hpp"
#include "schedule/gate_settings.hpp"
#include "schedule/segments.hpp"

namespace cudasched::simulate {

struct TraceLaunch {
  std::int64_t gap_ns = 0;        // the program's own time since the launch before it began, or since it had waited
  std::int64_t duration_ns = 0;   // on the GPU
  bool synchronised = false;      // the program waits for all its launches first
  int kernels = 1;                // of a graph: between them, other work may get the GPU
  std::int64_t predicted_ns = 0;  // predicted duration, before noise; 0: duration_ns
  double sms = 1;                 // part of the multiprocessors that its blocks take, above 0
  double bandwidth = 1;           // part of the memory's bandwidth that it uses alone
};

struct ReplayClient {
  std::string name;
  Class client_class = Class::kBestEffort;  // kLatency or kBestEffort
  std::int32_t priority = 0;                // at most 64 clients in all
  std::uint32_t weight_milli = 1'000;       // of its share among best-effort clients
  std::vector<TraceLaunch> launches;        // not empty; best effort repeats them

  // Latency only.
  std::int64_t joins_ns = 0;              // until then the client is absent, and the gate is off
  std::vector<std::size_t> request_ends;  // the trace's requests, served in turn: where each ends; empty: it is one
  std::vector<std::int64_t> arrivals_ns;  // ascending
  std::int64_t slo_ns = 0;                // from the arrival; 0: none
  std::int64_t prepare_ns = 0;            // from the region's entry to the first launch
  std::int64_t expect_ns = 0;             // a hint so long before each arrival; 0: no hints
};

// One row of a recording. All on one clock; -1: not known.
struct RecordedLaunch {
  std::int64_t submitted_ns = 0;
  std::int64_t start_ns = -1;
  std::int64_t duration_ns = 0;
};

// The host and GPU model of a recording, in the order of submission. A launch keeps the time by which it prolonged the
// GPU's work (overlapped time counts once). The program is taken to have waited for the GPU where its launches had
// piled up and all were done before it launched again. A program whose launches had filled the driver's queue waited
// for room, and the gap counts as a short one.
std::vector<TraceLaunch> trace_launches(std::span<const RecordedLaunch> recorded);

// For ReplayClient::request_ends: a request ends where the GPU had nothing and got nothing for `gap_ns`.
std::vector<std::size_t> request_ends(std::span<const RecordedLaunch> recorded, std::int64_t gap_ns);

enum class Sharing { kOneProcess, kMps, kTimeSlice };

inline constexpr std::uint64_t kEventsAtATime = 1U << 16;

struct ReplaySettings : schedule::GateSettings {
  Sharing sharing = Sharing::kTimeSlice;
  std::string policy = "strict";  // of schedule/policy.hpp; ignored with a policy of one's own
  std::function<schedule::Decision(const schedule::Snapshot&)> user_policy;  // may throw: it is then refused
  bool offload = true;                                                       // else a blocking gate
  bool foresee = false;                  // long launches look out for foreseen arrivals
  double miss_probability = 0;           // for learned rates, 0: only periodic arrivals are foreseen
  bool earliest_deadline_first = false;  // between latency clients, at region entry
  bool priorities = false;               // of streams or MPS clients, obeyed; on the H200 they hardly are
  double prediction_sigma = 0.05;        // of the log of predicted over true; the bound holds for 90%

  std::int64_t launch_ns = 2'800;  // from the driver's call to the GPU, and the call's cost to its thread
  std::int64_t push_ns = 200;      // the cost of an offloaded launch to its thread
  std::int64_t kernel_gap_ns = 1'300;
  std::int64_t reaction_ns = 3'000;  // from the gate's opening to the launch's submission
  std::int64_t switch_ns = 130'000;
  std::int64_t cold_ns = 0;
  std::int64_t slice_ns = 2'000'000;
  std::int64_t best_effort_slice_ns = 0;  // that best-effort contexts set themselves; 0: as the others'
  std::int64_t latency_slice_ns = 0;      // and those of a latency client

  std::int64_t end_ns = 10'000'000'000;  // of the virtual time
  std::uint64_t seed = 1;
  bool log = false;  // keep a LaunchRecord of every launch

  std::function<bool()> goes_on;  // asked every kEventsAtATime events; false ends the simulation there
};

struct LaunchRecord {
  int client = 0;
  std::uint64_t number = 0;       // of its client, from 0
  std::int64_t handed_ns = 0;     // by the program
  std::int64_t submitted_ns = 0;  // to the driver
  std::int64_t start_ns = -1;     // on the GPU; -1: not by the end
  std::int64_t end_ns = -1;
  std::int64_t longest_ns = 0;  // its bound
  bool latency_active = false;  // at its submission, and
  std::int64_t slack_ns = 0;    // the slack in the snapshot
  std::int64_t in_flight_ns = 0;
  std::int64_t lead_ns = 0;
};

struct ClientResult {
  std::string name;
  Class client_class = Class::kBestEffort;
  std::uint64_t launches = 0;  // complete
  std::int64_t gpu_ns = 0;     // of these
  std::int64_t gate_wait_ns = 0;
  std::int64_t longest_gate_wait_ns = 0;
  std::uint64_t exceptions = 0;  // launches that went though held (schedule/hold_limit.hpp)
  std::uint64_t uncounted = 0;   // launches that the ledger had no room for
  double mean_lead_ns = 0;
  std::vector<std::int64_t> latencies_ns;  // of served requests, from their arrival, in order of arrival
  std::uint64_t unserved = 0;              // arrived and not complete by the end
  std::uint64_t met = 0;                   // within the SLO
  schedule::Segments::Counts segments;     // under `harvest` and `slack`
};

struct ReplayResult {
  std::vector<ClientResult> clients;
  std::int64_t end_ns = 0;
  std::int64_t busy_ns = 0;    // the GPU ran a kernel
  std::int64_t switch_ns = 0;  // it changed contexts
  std::uint64_t launches = 0;  // submitted, by all
  std::string policy_refused;  // why a policy of one's own was switched off; empty: it was not
  std::vector<LaunchRecord> log;
};

inline constexpr std::uint64_t kRing = 1024;  // launches in the ring, or on their way to the GPU

// Throws ConfigError: a client or a setting has no meaning; the message names it.
void check(std::span<const ReplayClient> clients, const ReplaySettings& settings);

// Throws ConfigError as check() does.
ReplayResult replay(std::span<const ReplayClient> clients, const ReplaySettings& settings);

}  // namespace cudasched::simulate
