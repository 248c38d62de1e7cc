#include "simulate/replay.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "schedule/arrivals.hpp"
#include "schedule/deadline.hpp"
#include "schedule/estimates.hpp"
#include "schedule/fair.hpp"
#include "schedule/hold_limit.hpp"
#include "schedule/host_bound.hpp"
#include "schedule/ledger.hpp"
#include "schedule/policy.hpp"
#include "schedule/slack.hpp"
#include "schedule/turn.hpp"

namespace cudasched::simulate {
namespace {

constexpr int kMostClients = 64;
constexpr int kNoClient = -1;
constexpr std::int64_t kForeverNs = INT64_MAX;
constexpr std::int64_t kTurnLookNs = 500'000;
constexpr double kBoundSigmas = 1.2816;  // covers 90%
constexpr std::uint64_t kStream = 1;
constexpr std::int64_t kHeldLookNs =
    1'000'000;  // between two looks of a launch that is held for the lead, at most, as the gate's
constexpr std::int64_t kUngatedLookNs = 500'000;  // as the gate's
constexpr std::int64_t kUnprovenLookNs = 50'000;

constexpr std::uint64_t kPredicted = ~std::uint64_t{0};  // in the place of an estimate's key: there was no estimate

// A launch of a trace is what a kernel's geometry is in the gate.
std::uint64_t estimate_key(std::uint64_t launch) { return launch + 1; }

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

struct Job {
  std::int64_t remaining_ns = 0;
  std::int64_t duration_ns = 0;
  std::int64_t kernel_ns = 0;  // of one of its kernels
  std::int64_t ready_ns = 0;   // since when it could run on
  std::int64_t held_ns = 0;    // for the lead's sake
  std::uint64_t number = 0;    // of its client, from 0
  int segment = schedule::Ledger::kNone;
  std::size_t record = 0;
  bool begun = false;
  std::size_t in_segment = 0;  // a latency launch's number there,
  bool is_timed = false;       // and whether it is measured
};

struct Client {
  Client(const ReplayClient& spec, int place, const ReplaySettings& settings)
      : trace(&spec),
        slot(place),
        best_effort(spec.client_class == Class::kBestEffort),
        lead(settings.lead_bounds),
        arrivals(settings.miss_probability) {
    result.name = spec.name;
    result.client_class = spec.client_class;
    const bool has_segments =
        settings.policy == "slack" ? spec.slo_ns > 0 : schedule::looks_into_requests(settings.policy);
    if (!best_effort && has_segments && !settings.user_policy) {
      segments = std::make_unique<schedule::Segments>(settings.host_bound_inflation);
    }
    gaps = schedule::GapView(settings.host_bound_inflation);
  }

  const TraceLaunch& launch(std::uint64_t number) const { return trace->launches[number % trace->launches.size()]; }
  bool ready() const { return ready_jobs > 0; }
  // As a gate sees it that looks now.
  std::int64_t in_flight_ns(std::int64_t now_ns, std::uint64_t stream = schedule::Ledger::kNoStream) {
    ledger.look(now_ns, gpu);
    ledger.for_each([&](int segment) {
      if (ledger.state(segment) != schedule::Ledger::State::kOpen || !ledger.has_run_out(segment)) return false;
      ledger.complete(segment);
      return true;
    });
    return ledger.remaining_ns(stream);
  }
  std::int64_t in_flight_until_ns(std::int64_t now_ns) {
    return jobs.empty() ? complete_ns : now_ns + in_flight_ns(now_ns);
  }

  const ReplayClient* trace;
  int slot;
  bool best_effort;
  ClientResult result;

  // Launches in their order: pushed by the program, submitted to the driver, complete.
  std::uint64_t pushed = 0;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::deque<std::int64_t> handed_ns;  // of those pushed and not submitted
  std::deque<Job> jobs;                // of those submitted and not complete
  std::size_t ready_jobs = 0;          // of these, on the GPU
  bool waits_for_gpu = false;          // the program, until all is complete
  bool waits_for_room = false;         // the program, in the ring
  std::int64_t complete_ns = -1;       // when the last one was

  // The gate, of best-effort clients.
  schedule::Ledger ledger;
  schedule::Estimates estimates;
  schedule::HoldLimit hold_limit;
  std::array<std::uint64_t, schedule::Ledger::kMarkers> marked{};  // the launch that each marker is behind
  std::array<std::uint64_t, schedule::Ledger::kMarkers> told{};    // whose estimate its completion tells of; 0: of none
  schedule::Ledger::Gpu gpu = schedule::Ledger::Gpu::kOwn;         // whose it is, as its gate saw last
  schedule::Lead lead;
  std::int64_t launcher_free_ns = 0;
  std::uint64_t look_generation = 0;
  std::int64_t look_ns = kForeverNs;  // when the next look is due
  std::int64_t asked_ns = -1;         // since when the head waits; -1: it has not asked
  std::int64_t active_before_ns = 0;  // latency activity by then
  std::int64_t held_since_ns = -1;    // for the lead's sake
  std::int64_t held_ns = 0;
  std::int64_t predicted_ns = 0;  // of the head
  std::int64_t longest_ns = 0;
  std::uint64_t turn_word = 0;    // the last turn that it began,
  std::int64_t turn_used_ns = 0;  // and the predicted time of what was admitted in it
  double lead_sum_ns = 0;
  std::int64_t predicted_sum_ns = 0;  // of all that was submitted
  schedule::GapView gaps;

  // Requests, of latency clients.
  schedule::Arrivals arrivals;
  schedule::RegionHistory history;
  std::size_t arrived = 0;  // requests
  std::size_t served = 0;
  bool entering = false;  // one waits for a more urgent client
  bool in_region = false;
  bool cold = false;  // its request has not run yet: best-effort work may have filled the caches
  std::int64_t asked_entry_ns = 0;
  std::int64_t entered_ns = 0;
  std::int64_t admitted_at_entry_ns = 0;
  std::int64_t expected_ns = schedule::Snapshot::kUnknownNs;
  std::int64_t in_flight_at_entry_ns = 0;
  std::uint64_t request_end = 0;  // launch at which the request ends
  std::unique_ptr<schedule::Segments> segments;
  schedule::Segments::Told told_segment;
  schedule::Progress progress;
  schedule::SegmentProgress marks;
  std::uint64_t marked_launch = 0;  // behind which the mark is, counted from 1
};

class Replay {
 public:
  Replay(std::span<const ReplayClient> clients, const ReplaySettings& settings);
  ReplayResult run();

 private:
  enum class What { kHost, kGate, kReady, kGpu, kSlice, kArrival, kExpect, kEnter };
  struct Event {
    std::int64_t at_ns;
    std::uint64_t order;
    What what;
    int client;
    std::uint64_t generation;
    bool operator>(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
    }
  };

  void add(std::int64_t at_ns, What what, int client, std::uint64_t generation = 0) {
    events_.push({at_ns, order_++, what, client, generation});
  }
  std::optional<Event> next_event() {
    if (foreseen_.empty() || (!events_.empty() && foreseen_.back() > events_.top())) {
      if (events_.empty()) return std::nullopt;
      const Event event = events_.top();
      events_.pop();
      return event;
    }
    const Event event = foreseen_.back();
    foreseen_.pop_back();
    return event;
  }
  void handle(const Event& event);

  // Host
  void host_reaches_launch(Client& client);
  void host_goes_on(Client& client, std::int64_t call_ns);
  void host_looks_at_completion(Client& client);
  void arrive(Client& client);
  void enter(Client& client);
  void leave(Client& client);
  void next_segment(Client& client);

  // Gate
  void look_at(Client& client, std::int64_t at_ns);
  void look(Client& client);
  void look_ungated(Client& client);
  void ask(Client& client);
  bool gated() const;
  void note_progress(Client& client, const schedule::Segments::Launch& launched);
  schedule::Snapshot snapshot(Client& client);
  bool my_turn(Client& client);
  void rejoin(Client& client);
  void completed(Client& client, const Job& job);
  std::int64_t slack_ns();
  schedule::HostBound host_bound(Client& client, std::int64_t in_flight_ns);
  void submit(Client& client, const schedule::Snapshot* seen, bool mark = false, std::uint64_t key = 0);
  void wake_gates();
  std::int64_t active_ns() const { return active_ns_ + (active_ > 0 ? now_ns_ - active_since_ns_ : 0); }

  // GPU
  void reaches_gpu(Client& client);
  void run_gpu();
  int choose() const;
  std::int64_t slice_ns_of(const Client& client) const;
  bool another_ready() const;
  void complete();
  void cut();

  const ReplaySettings& settings_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<Client*> best_effort_;
  std::vector<Client*> latency_;
  schedule::Decider decider_;
  std::mt19937_64 random_;
  std::normal_distribution<double> noise_{0, 1};

  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Event> foreseen_;  // the requests' arrivals, the next one last: thousands would make the queue deep
  std::uint64_t order_ = 0;
  std::int64_t now_ns_ = 0;

  int active_ = 0;  // latency clients in a region
  std::int64_t active_since_ns_ = 0;
  std::int64_t active_ns_ = 0;  // of ended activity
  std::int64_t latency_seen_ns_ = -1;
  std::int64_t admitted_ns_ = 0;  // what all best-effort launches so far cost a request (admission_cost_ns)

  std::uint64_t turn_ = 0;
  std::uint64_t waiting_ = 0;
  std::array<std::int64_t, kMostClients> virtual_ns_{};

  int running_ = kNoClient;
  int last_ = kNoClient;  // the client that ran last
  std::int64_t run_start_ns_ = 0;
  std::uint64_t run_generation_ = 0;
  std::int64_t slice_start_ns_ = 0;
  std::int64_t slice_end_ns_ = kForeverNs;  // known once another context wants the GPU

  ReplayResult result_;
};

// A policy of Python's or a test's may throw; that is nonsense, and refused as such.
schedule::Decision call_user(const schedule::Snapshot& snapshot, void* context) noexcept {
  try {
    return (*static_cast<const decltype(ReplaySettings::user_policy)*>(context))(snapshot);
  } catch (...) {
    return {static_cast<schedule::Answer>(-1), 0};
  }
}

schedule::Decider decider(const ReplaySettings& settings) {
  if (settings.user_policy) {
    return schedule::Decider(
        schedule::UserPolicy{&call_user, const_cast<void*>(static_cast<const void*>(&settings.user_policy))});
  }
  if (const schedule::Policy* policy = schedule::find_policy(settings.policy)) return schedule::Decider(*policy);
  std::string known;
  for (const schedule::Policy& policy : schedule::policies()) {
    known += (known.empty() ? "" : ", ") + std::string(policy.name);
  }
  throw ConfigError("policy '" + settings.policy + "' is unknown; there are " + known);
}

void check(const ReplaySettings& settings) {
  const auto refuse = [](const char* name, const char* what) {
    throw ConfigError(std::string("simulation: ") + name + " must be " + what);
  };
  const auto not_negative = [&](const char* name, std::int64_t value) {
    if (value < 0) refuse(name, "0 or more");
  };
  not_negative("lead", settings.lead_ns);
  not_negative("linger", settings.linger_ns);
  not_negative("margin", settings.margin_ns);
  not_negative("launch time", settings.launch_ns);
  not_negative("push time", settings.push_ns);
  not_negative("kernel gap", settings.kernel_gap_ns);
  not_negative("switch time", settings.switch_ns);
  if (settings.reaction_ns <= 0) refuse("reaction time", "above 0");
  if (settings.turn_ns <= 0) refuse("turn", "above 0");
  if (settings.slice_ns <= 0) refuse("slice", "above 0");
  not_negative("slice of best effort", settings.best_effort_slice_ns);
  if (settings.end_ns <= 0) refuse("length", "above 0");
  if (!(settings.prediction_sigma >= 0 && settings.prediction_sigma <= 3)) refuse("prediction sigma", "0 to 3");
}

void check(const ReplayClient& client) {
  const auto refuse = [&](const std::string& what) { throw ConfigError("client '" + client.name + "': " + what); };
  const bool latency = client.client_class == Class::kLatency;
  if (!latency && client.client_class != Class::kBestEffort) refuse("its class must be latency or best_effort");
  if (client.launches.empty()) refuse("it has no launches");
  const bool negative = std::any_of(client.launches.begin(), client.launches.end(), [](const TraceLaunch& one) {
    return one.gap_ns < 0 || one.duration_ns < 0 || one.kernels < 1;
  });
  if (negative) refuse("a gap or duration is negative, or a graph has no kernel");
  if (!latency && !client.arrivals_ns.empty()) refuse("best-effort clients have no arrivals");
  if (!std::is_sorted(client.arrivals_ns.begin(), client.arrivals_ns.end())) refuse("its arrivals are not in order");
  const bool negative_time = client.slo_ns < 0 || client.prepare_ns < 0 || client.expect_ns < 0 || client.joins_ns < 0;
  if (negative_time) refuse("a time is negative");
  if (!client.arrivals_ns.empty() && client.arrivals_ns.front() < client.joins_ns)
    refuse("it has work before it joins");
  std::size_t before = 0;
  for (const std::size_t end : client.request_ends) {
    if (end <= before || end > client.launches.size()) refuse("its requests do not divide its launches");
    before = end;
  }
  if (!client.request_ends.empty() && before != client.launches.size()) {
    refuse("its last request does not end with its last launch");
  }
}

Replay::Replay(std::span<const ReplayClient> clients, const ReplaySettings& settings)
    : settings_(settings), decider_(decider(settings)), random_(settings.seed) {
  check(settings);
  if (clients.empty() || clients.size() > kMostClients) throw ConfigError("a simulation has 1 to 64 clients");
  for (const ReplayClient& spec : clients) {
    check(spec);
    clients_.push_back(std::make_unique<Client>(spec, static_cast<int>(clients_.size()), settings));
    Client& client = *clients_.back();
    (client.best_effort ? best_effort_ : latency_).push_back(&client);
    if (settings.adaptive_lead) {
      auto bounds = settings.lead_bounds;
      bounds.first_ns = settings.lead_ns;
      client.lead = schedule::Lead(bounds);
    }
  }
}

ReplayResult Replay::run() {
  for (Client* client : best_effort_) add(client->launch(0).gap_ns, What::kHost, client->slot);
  for (Client* client : latency_) {
    const auto foresee = [&](std::int64_t at_ns, What what) {
      foreseen_.push_back({at_ns, order_++, what, client->slot, 0});
    };
    for (const std::int64_t arrival_ns : client->trace->arrivals_ns) {
      if (client->trace->expect_ns > 0) {
        foresee(std::max<std::int64_t>(arrival_ns - client->trace->expect_ns, 0), What::kExpect);
      }
      foresee(arrival_ns, What::kArrival);
    }
  }
  std::sort(foreseen_.begin(), foreseen_.end(), std::greater<>());
  while (const std::optional<Event> event = next_event()) {
    if (event->at_ns >= settings_.end_ns) break;
    now_ns_ = event->at_ns;
    handle(*event);
  }
  now_ns_ = settings_.end_ns;
  if (running_ != kNoClient) result_.busy_ns += std::max<std::int64_t>(now_ns_ - run_start_ns_, 0);
  result_.end_ns = now_ns_;
  result_.policy_refused = decider_.refused();
  for (const auto& client : clients_) {
    client->result.unserved = client->arrived - client->served;
    if (client->submitted > 0)
      client->result.mean_lead_ns = client->lead_sum_ns / static_cast<double>(client->submitted);
    if (client->segments != nullptr) client->result.segments = client->segments->counts();
    result_.launches += client->submitted;
    result_.clients.push_back(std::move(client->result));
  }
  return std::move(result_);
}

void Replay::handle(const Event& event) {
  Client& client = *clients_[static_cast<std::size_t>(std::max(event.client, 0))];
  switch (event.what) {
    case What::kHost:
      return host_reaches_launch(client);
    case What::kGate:
      if (event.generation != client.look_generation) return;
      client.look_ns = kForeverNs;
      return look(client);
    case What::kReady:
      return reaches_gpu(client);
    case What::kGpu:
      if (event.generation == run_generation_) complete();
      return;
    case What::kSlice:
      if (event.generation == run_generation_) cut();
      return;
    case What::kArrival:
      return arrive(client);
    case What::kExpect:
      return client.arrivals.expect(client.trace->expect_ns, now_ns_);
    case What::kEnter:
      if (client.entering) enter(client);
      return;
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

void Replay::host_reaches_launch(Client& client) {
  if (!client.best_effort) {
    client.handed_ns.push_back(now_ns_);
    ++client.pushed;
    submit(client, nullptr);
    return host_goes_on(client, settings_.launch_ns);
  }
  if (client.pushed - client.submitted >= (settings_.offload ? kRing : 1)) {
    client.waits_for_room = true;
    return;
  }
  client.handed_ns.push_back(now_ns_);
  ++client.pushed;
  if (settings_.offload) host_goes_on(client, settings_.push_ns);
  if (client.pushed - client.submitted == 1) look_at(client, now_ns_);
}

// The launch before has been handed over, which took `call_ns` where the recorded gap has a driver call in it.
void Replay::host_goes_on(Client& client, std::int64_t call_ns) {
  const TraceLaunch& next = client.launch(client.pushed);
  const bool ends = !client.best_effort && client.pushed == client.request_end;
  if (client.segments != nullptr && (ends || next.synchronised)) client.segments->waits(now_ns_);
  if (ends || (next.synchronised && client.completed < client.pushed)) {
    client.waits_for_gpu = true;
    return;
  }
  if (next.synchronised) next_segment(client);
  add(now_ns_ + std::max(next.gap_ns - (settings_.launch_ns - call_ns), call_ns), What::kHost, client.slot);
}

void Replay::host_looks_at_completion(Client& client) {
  if (!client.waits_for_gpu || client.completed < client.pushed) return;
  client.waits_for_gpu = false;
  if (!client.best_effort && client.pushed == client.request_end) return leave(client);
  next_segment(client);
  add(now_ns_ + client.launch(client.pushed).gap_ns, What::kHost, client.slot);
}

// The program has waited for the GPU, or asked and found it done.
void Replay::next_segment(Client& client) {
  if (client.segments == nullptr || !client.segments->next(now_ns_, client.told_segment)) return;
  if (schedule::worth_waking(client.told_segment.left)) wake_gates();
}

void Replay::arrive(Client& client) {
  ++client.arrived;
  if (!client.in_region && !client.entering) {
    client.entering = true;
    client.asked_entry_ns = now_ns_;
    enter(client);
  }
}

void Replay::enter(Client& client) {
  const auto entrant = [](const Client& one) {
    const std::int64_t slo_ns = one.trace->slo_ns;
    return schedule::Entrant{one.slot, one.trace->priority,
                             slo_ns > 0 ? one.trace->arrivals_ns[one.served] + slo_ns : 0};
  };
  if (settings_.earliest_deadline_first) {
    std::array<schedule::Entrant, kMostClients> others;
    std::size_t count = 0;
    for (const Client* other : latency_) {
      if (other != &client && (other->in_region || other->entering)) others[count++] = entrant(*other);
    }
    schedule::EntryView view;
    view.self = entrant(client);
    view.others = {others.data(), count};
    view.waited_ns = now_ns_ - client.asked_entry_ns;
    if (schedule::earliest_deadline_first(view).answer != schedule::Answer::kSubmit) {
      add(client.asked_entry_ns + view.max_wait_ns, What::kEnter, client.slot);
      return;
    }
  }
  client.entering = false;
  client.in_region = true;
  client.cold = true;
  client.entered_ns = now_ns_;
  client.admitted_at_entry_ns = admitted_ns_;
  client.expected_ns = client.history.expected_ns();
  client.in_flight_at_entry_ns = 0;
  for (Client* other : best_effort_) client.in_flight_at_entry_ns += other->in_flight_ns(now_ns_);
  client.arrivals.arrived(now_ns_);
  if (client.segments != nullptr) {
    std::optional<schedule::Segments::Target> target;
    if (settings_.policy == "slack") {
      const std::int64_t slo_ns = client.trace->slo_ns;
      const std::int64_t deadline_ns = slo_ns > 0 ? client.trace->arrivals_ns[client.served] + slo_ns : 0;
      target = schedule::Segments::Target{deadline_ns, client.expected_ns, settings_.margin_ns};
    }
    client.told_segment = client.segments->begin(static_cast<std::uint64_t>(client.trace->slo_ns), now_ns_,
                                                 settings_.sharing == Sharing::kTimeSlice, target);
    if (schedule::worth_waking(client.told_segment.left)) wake_gates();
  }
  if (active_++ == 0) active_since_ns_ = now_ns_;
  const auto& ends = client.trace->request_ends;
  const std::size_t size = client.trace->launches.size();
  std::uint64_t launches = size;
  if (!ends.empty()) {
    const std::size_t request = client.served % ends.size();
    launches = ends[request] - (request == 0 ? 0 : ends[request - 1]);
  }
  client.request_end = client.pushed + launches;
  // What was recorded before a request's first launch is how long the program waited for it.
  add(now_ns_ + client.trace->prepare_ns, What::kHost, client.slot);
}

void Replay::leave(Client& client) {
  const std::int64_t arrival_ns = client.trace->arrivals_ns[client.served++];
  const std::int64_t latency_ns = now_ns_ - arrival_ns;
  client.result.latencies_ns.push_back(latency_ns);
  if (client.trace->slo_ns > 0 && latency_ns <= client.trace->slo_ns) ++client.result.met;
  const std::int64_t time_ns = now_ns_ - client.entered_ns;
  const std::int64_t admitted_ns = admitted_ns_ - client.admitted_at_entry_ns;
  client.history.observe(time_ns, admitted_ns);
  if (client.segments != nullptr) client.segments->end(now_ns_);
  for (Client* other : best_effort_) other->lead.completed(time_ns, client.in_flight_at_entry_ns + admitted_ns);
  client.in_region = false;
  if (--active_ == 0) active_ns_ += now_ns_ - active_since_ns_;
  latency_seen_ns_ = now_ns_;
  if (client.served < client.arrived) {
    client.entering = true;
    client.asked_entry_ns = now_ns_;
    enter(client);
  }
  for (Client* other : latency_) {
    if (other->entering) add(now_ns_ + settings_.reaction_ns, What::kEnter, other->slot);
  }
  wake_gates();
}

// ---- gate ----------------------------------------------------------------------------------------------------------

void Replay::look_at(Client& client, std::int64_t at_ns) {
  at_ns = std::max(at_ns, client.launcher_free_ns);
  if (client.look_ns <= at_ns) return;
  client.look_ns = at_ns;
  add(at_ns, What::kGate, client.slot, ++client.look_generation);
}

void Replay::wake_gates() {
  for (Client* client : best_effort_) {
    if (client->pushed > client->submitted) look_at(*client, now_ns_ + settings_.reaction_ns);
  }
}

bool Replay::gated() const {
  return std::any_of(latency_.begin(), latency_.end(),
                     [&](const Client* one) { return one->trace->joins_ns <= now_ns_; });
}

// The head is asked for for the first time.
void Replay::ask(Client& client) {
  rejoin(client);
  client.asked_ns = now_ns_;
  client.active_before_ns = active_ns();
  client.held_ns = 0;
  client.hold_limit.begin(client.ledger.observed_ns());
  const TraceLaunch& launch = client.launch(client.submitted);
  const auto said_ns = static_cast<double>(launch.predicted_ns > 0 ? launch.predicted_ns : launch.duration_ns);
  const double sigma = settings_.prediction_sigma;
  client.predicted_ns = static_cast<std::int64_t>(said_ns * (sigma > 0 ? std::exp(sigma * noise_(random_)) : 1));
  client.longest_ns =
      static_cast<std::int64_t>(static_cast<double>(client.predicted_ns) * std::exp(kBoundSigmas * sigma));
}

// While no latency client is there, as Gate::admit_ungated.
void Replay::look_ungated(Client& client) {
  const std::uint64_t key = estimate_key(client.submitted % client.trace->launches.size());
  schedule::Estimates::Found found = client.estimates.find(key);
  if (!found.known) {
    client.estimates.note(key, client.predicted_ns);
    found = client.estimates.find(key);
  }
  client.gpu = schedule::Ledger::Gpu::kOwn;
  schedule::Snapshot seen;
  seen.predicted_ns = found.duration_ns;
  seen.in_flight_ns = client.in_flight_ns(now_ns_, kStream);
  seen.launches_in_flight = client.ledger.launches();
  schedule::Decision decision;
  if (!settings_.user_policy && settings_.policy != "open") decision = schedule::bounded(seen);
  if (decision.answer == schedule::Answer::kWaitForTime) {
    const schedule::HoldLimit::View view{client.ledger.observed_ns(), client.ledger.completions(),
                                         client.ledger.any_late(), client.ledger.late_ns(kStream) > 0, false};
    if (client.hold_limit.look(view) == schedule::Exception::kNone) {
      return look_at(client, now_ns_ + (found.proven ? kUngatedLookNs : kUnprovenLookNs));
    }
    ++client.result.exceptions;
  }
  client.predicted_ns = client.longest_ns = found.duration_ns;
  submit(client, &seen, !found.proven, key);
}

void Replay::look(Client& client) {
  if (client.pushed == client.submitted || client.submitted - client.completed >= kRing) return;
  if (client.asked_ns < 0) ask(client);
  if (!latency_.empty() && !gated()) return look_ungated(client);
  const schedule::Snapshot seen = snapshot(client);
  const schedule::Decision decision = decider_(seen);
  if (client.held_since_ns >= 0) client.held_ns += now_ns_ - client.held_since_ns;
  client.held_since_ns = -1;
  if (decision.answer == schedule::Answer::kSubmit) {
    waiting_ &= ~bit(client.slot);
    return submit(client, &seen, /*mark=*/true, kPredicted);
  }
  std::int64_t wait_ns = kForeverNs;
  bool announced = true;
  if (decision.answer == schedule::Answer::kWaitForTime) {
    wait_ns = decision.wait_ns;
    const bool for_lead = seen.in_flight_ns > seen.lead_ns;
    if (for_lead) {
      client.held_since_ns = now_ns_;
      const schedule::HoldLimit::View view{client.ledger.observed_ns(), client.ledger.completions(),
                                           client.ledger.any_late(), client.ledger.late_ns(kStream) > 0, false};
      if (!seen.latency_active && client.hold_limit.look(view) != schedule::Exception::kNone) {
        waiting_ &= ~bit(client.slot);
        ++client.result.exceptions;
        return submit(client, &seen, /*mark=*/true, kPredicted);
      }
      wait_ns = std::min(wait_ns, kHeldLookNs);
    }
    announced = for_lead && settings_.sharing != Sharing::kTimeSlice;
  } else if (decision.answer == schedule::Answer::kWaitForTurn) {
    wait_ns = kTurnLookNs;
  }
  waiting_ = announced ? waiting_ | bit(client.slot) : waiting_ & ~bit(client.slot);
  if (wait_ns != kForeverNs) look_at(client, now_ns_ + std::max(wait_ns, settings_.reaction_ns));
}

// As runtime::LatencySegments, for the launch that is submitted.
void Replay::note_progress(Client& client, const schedule::Segments::Launch& launched) {
  schedule::Progress& progress = client.progress;
  if (launched.number == 0) client.marks.begin(progress.submitted_ns);
  progress.submitted_ns += launched.gpu_ns;
  const auto complete = [&] { return client.completed >= client.marked_launch; };
  if (schedule::SegmentProgress::asks(launched.number) && client.marks.ask(progress.submitted_ns, complete)) {
    client.marks.marked(progress.submitted_ns);
    client.marked_launch = client.submitted + 1;
  }
  progress.done_ns = client.marks.done_ns();
  progress.not_done_ns = client.marks.not_done_ns();
}

schedule::Snapshot Replay::snapshot(Client& client) {
  schedule::Snapshot seen;
  seen.latency_clients = gated();
  seen.latency_active = active_ > 0;
  if (seen.latency_active) {
    seen.since_latency_ns = 0;
  } else if (latency_seen_ns_ >= 0) {
    seen.since_latency_ns = now_ns_ - latency_seen_ns_;
  }
  seen.linger_ns = settings_.linger_ns;
  seen.predicted_ns = client.predicted_ns;
  seen.bound_ns = client.longest_ns;
  seen.lead_ns = settings_.adaptive_lead ? client.lead.ns() : settings_.lead_ns;
  seen.slack_ns = slack_ns();
  seen.margin_ns = settings_.margin_ns;
  seen.long_ns = settings_.long_ns;
  seen.max_hold_ns = settings_.max_hold_ns;
  seen.waited_ns = now_ns_ - client.asked_ns - (active_ns() - client.active_before_ns);
  seen.in_flight_ns = client.in_flight_ns(now_ns_, kStream);
  seen.launches_in_flight = client.ledger.launches();
  for (const Client* one : latency_) {
    seen.hint_ns = std::max(seen.hint_ns, one->arrivals.hint_ns(now_ns_));
    if (!settings_.foresee) continue;
    const schedule::Arrivals::Foresight foresight = one->arrivals.look(now_ns_);
    if (foresight.free_ns >= seen.free_ns) continue;
    seen.free_ns = foresight.free_ns;
    seen.foreseen_over_ns = foresight.over_ns;
  }
  if (schedule::looks_into_requests(settings_.policy)) seen.host_bound = host_bound(client, seen.in_flight_ns);
  const bool lets_in = seen.slack_ns > 0 || seen.host_bound.known;
  if (best_effort_.size() > 1) {
    if (settings_.sharing != Sharing::kTimeSlice) {
      for (Client* other : best_effort_) {
        if (other != &client) seen.in_flight_ns += other->in_flight_ns(now_ns_);
      }
    }
    // Under latency work that lets nothing in, a turn would run out unused.
    if (!seen.latency_active || lets_in) seen.my_turn = my_turn(client);
  }
  using Gpu = schedule::Ledger::Gpu;
  const bool in_gaps = seen.host_bound.known && !seen.host_bound.closed;
  const bool anothers = !seen.my_turn || (seen.latency_active && seen.slack_ns <= 0 && !in_gaps);
  const Gpu beside = in_gaps ? Gpu::kInGaps : Gpu::kShared;
  client.gpu = anothers ? Gpu::kAnothers : seen.latency_active ? beside : Gpu::kOwn;
  return seen;
}

// What the latency clients under way tell, as the client's gate sees it. `in_flight_ns`: of its own.
schedule::HostBound Replay::host_bound(Client& client, std::int64_t in_flight_ns) {
  client.gaps.begin(now_ns_);
  for (const Client* one : latency_) {
    client.gaps.add(one->slot, one->told_segment, one->progress, one->in_region);
  }
  schedule::GapView::Own own;
  own.in_flight_ns = in_flight_ns;
  own.longest_ns = client.longest_ns;
  own.submitted_ns = client.predicted_sum_ns;
  own.submitted = client.submitted;
  own.in_flight = client.ledger.launches();
  return client.gaps.look(own, settings_.sharing == Sharing::kTimeSlice);
}

bool Replay::my_turn(Client& client) {
  if (settings_.sharing != Sharing::kTimeSlice) {
    schedule::FairView view;
    view.self = client.slot;
    view.waiting = waiting_;
    view.virtual_ns = virtual_ns_.data();
    view.waited_ns = now_ns_ - client.asked_ns - (active_ns() - client.active_before_ns);
    return schedule::may_feed(view);
  }
  schedule::TurnView view;
  view.word = turn_;
  view.self = client.slot;
  for (const Client* other : best_effort_) view.best_effort |= bit(other->slot);
  view.waiting = waiting_;
  view.now_us = now_ns_ / 1'000;
  view.turn_us = settings_.turn_ns / 1'000;
  view.virtual_ns = virtual_ns_.data();
  const int owner = schedule::Turn::unpack(turn_).owner;
  if (owner >= 0) {
    view.owner_until_us = clients_[static_cast<std::size_t>(owner)]->in_flight_until_ns(now_ns_) / 1'000;
  }
  view.offered = turn_ != client.turn_word;
  view.turn_used = 2 * client.turn_used_ns >= settings_.turn_ns;
  const schedule::TurnDecision decision = schedule::take_turn(view);
  if (!decision.swap) return decision.mine;
  turn_ = decision.new_word;
  if (decision.mine) {
    client.turn_word = turn_;
    client.turn_used_ns = 0;
  } else {
    wake_gates();
  }
  return decision.mine;
}

// As the gate does when a launch asks.
void Replay::rejoin(Client& client) {
  if (!schedule::is_idle(client.in_flight_until_ns(now_ns_), now_ns_)) return;
  schedule::JoinView view{client.slot, 0, 0, virtual_ns_.data()};
  for (Client* other : best_effort_) {
    if (other == &client) continue;
    view.others |= bit(other->slot);
    const bool waits = (waiting_ & bit(other->slot)) != 0;
    if (waits || !schedule::is_idle(other->in_flight_until_ns(now_ns_), now_ns_)) view.at_work |= bit(other->slot);
  }
  virtual_ns_[static_cast<std::size_t>(client.slot)] = schedule::joined_ns(view);
}

std::int64_t Replay::slack_ns() {
  std::array<schedule::Request, kMostClients> requests;
  std::size_t count = 0;
  for (const Client* client : latency_) {
    if (!client->in_region) continue;
    const std::int64_t passed_ns = now_ns_ - client->entered_ns - (admitted_ns_ - client->admitted_at_entry_ns);
    const std::int64_t slo_ns = client->trace->slo_ns;
    requests[count++] = {slo_ns > 0 ? client->trace->arrivals_ns[client->served] + slo_ns : 0,
                         schedule::remaining_ns(client->expected_ns, passed_ns), client->expected_ns};
  }
  return schedule::least_slack_ns({requests.data(), count}, now_ns_);
}

// `seen`: what a best-effort launch was admitted by; null for latency launches. `mark`: a marker is to be behind it.
// `key`: whose estimate its completion tells of; 0: of none.
void Replay::submit(Client& client, const schedule::Snapshot* seen, bool mark, std::uint64_t key) {
  Job job;
  job.number = client.submitted;
  const TraceLaunch& launch = client.launch(client.submitted);
  job.duration_ns = job.remaining_ns = launch.duration_ns;
  job.kernel_ns = (launch.duration_ns + launch.kernels - 1) / launch.kernels;
  job.ready_ns = now_ns_ + settings_.launch_ns;
  LaunchRecord record;
  record.client = client.slot;
  record.number = client.submitted;
  record.handed_ns = client.handed_ns.front();
  record.submitted_ns = now_ns_;
  if (seen != nullptr) {
    job.held_ns = client.held_ns;
    const schedule::Ledger::Entry entry = client.ledger.submit(kStream, client.predicted_ns, mark);
    if (entry.segment < 0) {
      ++client.result.uncounted;
    } else if (entry.marks) {
      client.ledger.submitted(entry.segment, true);
      const auto place = static_cast<std::size_t>(entry.segment);
      client.marked[place] = job.number;
      client.told[place] = mark || client.ledger.segment_launches(entry.segment) == 1 ? key : 0;
      job.segment = entry.segment;
    }
    admitted_ns_ += schedule::admission_cost_ns(client.longest_ns, seen->in_flight_ns, settings_.switch_ns);
    client.predicted_sum_ns += client.predicted_ns;
    virtual_ns_[static_cast<std::size_t>(client.slot)] +=
        schedule::charge_ns(client.predicted_ns, client.trace->priority);
    client.turn_used_ns += client.predicted_ns;
    client.lead_sum_ns += static_cast<double>(seen->lead_ns);
    const std::int64_t waited_ns = now_ns_ - client.asked_ns;
    client.result.gate_wait_ns += waited_ns;
    client.result.longest_gate_wait_ns = std::max(client.result.longest_gate_wait_ns, waited_ns);
    client.asked_ns = -1;
    client.launcher_free_ns = now_ns_ + settings_.launch_ns;
    record.longest_ns = client.longest_ns;
    record.latency_active = seen->latency_active;
    record.slack_ns = seen->slack_ns;
    record.in_flight_ns = seen->in_flight_ns;
    record.lead_ns = seen->lead_ns;
  }
  if (client.segments != nullptr) {
    const schedule::Segments::Launch launched = client.segments->launch([&] { return now_ns_; });
    client.told_segment.left = launched.left;
    note_progress(client, launched);
    job.in_segment = launched.number;
    job.is_timed = launched.is_timed;
  }
  if (settings_.log) {
    job.record = result_.log.size();
    result_.log.push_back(record);
  }
  client.handed_ns.pop_front();
  client.jobs.push_back(job);
  ++client.submitted;
  add(job.ready_ns, What::kReady, client.slot);
  if (seen == nullptr) return;
  if (!settings_.offload) {
    host_goes_on(client, settings_.launch_ns);
  } else if (client.waits_for_room) {
    client.waits_for_room = false;
    add(now_ns_, What::kHost, client.slot);
  }
  if (client.pushed > client.submitted) look_at(client, client.launcher_free_ns);
}

// ---- GPU -----------------------------------------------------------------------------------------------------------

void Replay::reaches_gpu(Client& client) {
  const Job& job = client.jobs[client.ready_jobs++];
  if (client.best_effort && settings_.adaptive_lead) {
    bool dry = active_ == 0 && client.jobs.size() == 1 && client.complete_ns > latency_seen_ns_;
    for (const Client* other : best_effort_) dry = dry && (other == &client || other->jobs.empty());
    client.lead.submitted(job.held_ns, dry ? now_ns_ - client.complete_ns : 0, job.duration_ns);
  }
  run_gpu();
}

std::int64_t Replay::slice_ns_of(const Client& client) const {
  const bool own = client.best_effort && settings_.best_effort_slice_ns > 0;
  return own ? settings_.best_effort_slice_ns : settings_.slice_ns;
}

bool Replay::another_ready() const {
  return std::any_of(clients_.begin(), clients_.end(),
                     [&](const auto& client) { return client->slot != last_ && client->ready(); });
}

int Replay::choose() const {
  if (settings_.sharing == Sharing::kTimeSlice) {
    const int count = static_cast<int>(clients_.size());
    const bool stays =
        last_ != kNoClient && clients_[static_cast<std::size_t>(last_)]->ready() && now_ns_ < slice_end_ns_;
    if (stays) return last_;
    for (int step = 1; step <= count; ++step) {
      const int slot = (std::max(last_, 0) + step) % count;
      if (clients_[static_cast<std::size_t>(slot)]->ready()) return slot;
    }
    return kNoClient;
  }
  const Client* chosen = nullptr;
  for (const auto& client : clients_) {
    if (!client->ready()) continue;
    if (chosen != nullptr) {
      const bool differ = settings_.priorities && client->best_effort != chosen->best_effort;
      const bool before = differ ? chosen->best_effort : client->jobs.front().ready_ns < chosen->jobs.front().ready_ns;
      if (!before) continue;
    }
    chosen = client.get();
  }
  return chosen != nullptr ? chosen->slot : kNoClient;
}

void Replay::run_gpu() {
  const bool slices = settings_.sharing == Sharing::kTimeSlice;
  if (slices && slice_end_ns_ == kForeverNs && last_ != kNoClient && another_ready()) {
    // A slice renews while no other client wants the GPU.
    const std::int64_t slice_ns = slice_ns_of(*clients_[static_cast<std::size_t>(last_)]);
    const std::int64_t passed = std::max<std::int64_t>(now_ns_ - slice_start_ns_, 0) / slice_ns;
    slice_end_ns_ = slice_start_ns_ + (passed + 1) * slice_ns;
    if (running_ != kNoClient) add(slice_end_ns_, What::kSlice, kNoClient, run_generation_);
  }
  if (running_ != kNoClient) return;
  const int chosen = choose();
  if (chosen == kNoClient) return;
  Client& client = *clients_[static_cast<std::size_t>(chosen)];
  std::int64_t switch_ns = 0;
  if (last_ != kNoClient && last_ != chosen) {
    const bool cold = client.cold && clients_[static_cast<std::size_t>(last_)]->best_effort;
    if (slices || cold) switch_ns = settings_.switch_ns;
  }
  client.cold = false;
  Job& job = client.jobs.front();
  run_start_ns_ = now_ns_ + switch_ns + (job.begun ? 0 : settings_.kernel_gap_ns);
  result_.switch_ns += switch_ns;
  if (last_ != chosen) {
    last_ = chosen;
    slice_start_ns_ = run_start_ns_;
    slice_end_ns_ = another_ready() ? run_start_ns_ + slice_ns_of(client) : kForeverNs;
  }
  running_ = chosen;
  if (!job.begun && settings_.log) result_.log[job.record].start_ns = run_start_ns_;
  job.begun = true;
  ++run_generation_;
  const std::int64_t until_next_ns = slices ? job.remaining_ns : std::min(job.remaining_ns, job.kernel_ns);
  add(run_start_ns_ + until_next_ns, What::kGpu, kNoClient, run_generation_);
  if (slices && slice_end_ns_ != kForeverNs) add(slice_end_ns_, What::kSlice, kNoClient, run_generation_);
}

void Replay::complete() {
  Client& client = *clients_[static_cast<std::size_t>(running_)];
  Job& front = client.jobs.front();
  front.remaining_ns -= std::min(now_ns_ - run_start_ns_, front.remaining_ns);
  result_.busy_ns += now_ns_ - run_start_ns_;
  running_ = kNoClient;
  ++run_generation_;
  if (front.remaining_ns > 0) {
    front.ready_ns = now_ns_;
    return run_gpu();
  }
  const Job job = front;
  client.jobs.pop_front();
  --client.ready_jobs;
  // Clients alternate: the next one is as new here as the other's.
  if (!client.jobs.empty()) client.jobs.front().ready_ns = std::max(client.jobs.front().ready_ns, now_ns_);
  ++client.completed;
  ++client.result.launches;
  client.result.gpu_ns += job.duration_ns;
  client.complete_ns = now_ns_;
  if (job.is_timed) {
    const double noise = settings_.prediction_sigma > 0 ? std::exp(settings_.prediction_sigma * noise_(random_)) : 1;
    const auto measured_ns = static_cast<double>(job.duration_ns + settings_.kernel_gap_ns);
    client.segments->took(job.in_segment, static_cast<std::int64_t>(measured_ns * noise));
  }
  if (settings_.log) result_.log[job.record].end_ns = now_ns_;
  if (client.best_effort) {
    completed(client, job);
    wake_gates();
  }
  host_looks_at_completion(client);
  run_gpu();
}

// The client's gate sees it.
void Replay::completed(Client& client, const Job& job) {
  const auto place = static_cast<std::size_t>(std::max(job.segment, 0));
  const bool marked = job.segment >= 0 && client.marked[place] == job.number &&
                      client.ledger.state(job.segment) == schedule::Ledger::State::kMarked;
  if (!marked) return;  // no marker is behind it, or that was given up for the next one's
  // Looked at just before, so that it is known to have ended now.
  client.in_flight_ns(now_ns_);
  client.in_flight_ns(now_ns_);
  const schedule::Ledger::Completed took = client.ledger.complete(job.segment);
  if (client.told[place] == kPredicted) return;
  client.estimates.look(now_ns_);
  if (client.told[place] != 0) {
    client.estimates.observe(client.told[place], took.least_ns, took.most_ns);
  } else {
    client.estimates.observe_together(took.predicted_ns, took.least_ns, took.most_ns);
  }
}

void Replay::cut() {
  if (!another_ready()) return;
  Job& job = clients_[static_cast<std::size_t>(running_)]->jobs.front();
  const std::int64_t ran_ns = std::max<std::int64_t>(now_ns_ - run_start_ns_, 0);
  job.remaining_ns -= std::min(ran_ns, job.remaining_ns);
  result_.busy_ns += ran_ns;
  running_ = kNoClient;
  ++run_generation_;
  run_gpu();
}

}  // namespace

std::vector<TraceLaunch> trace_launches(std::span<const RecordedLaunch> recorded) {
  constexpr std::int64_t kAheadNs = 20'000;  // from a launch to its start: others were before it
  constexpr std::size_t kFullQueue = 512;    // launches not complete: no program means to run so far ahead
  constexpr std::int64_t kShortGapNs = 10'000;
  std::vector<TraceLaunch> launches;
  launches.reserve(recorded.size());
  std::int64_t busy_until_ns = INT64_MIN;
  std::size_t done = 0;  // launches before this one are complete
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    TraceLaunch traced{0, std::max<std::int64_t>(launch.duration_ns, 0), false};
    if (i > 0) {
      const RecordedLaunch& before = recorded[i - 1];
      traced.gap_ns = std::max<std::int64_t>(launch.submitted_ns - before.submitted_ns, 0);
      const bool was_ahead = before.start_ns >= 0 && before.start_ns - before.submitted_ns > kAheadNs;
      if (was_ahead && before.submitted_ns < busy_until_ns && busy_until_ns <= launch.submitted_ns) {
        traced.synchronised = true;
        traced.gap_ns = launch.submitted_ns - busy_until_ns;
      }
      while (done < i && recorded[done].start_ns + recorded[done].duration_ns <= launch.submitted_ns) ++done;
      if (i - done >= kFullQueue) traced.gap_ns = std::min(traced.gap_ns, kShortGapNs);
    }
    if (launch.start_ns >= 0) {
      const std::int64_t end_ns = launch.start_ns + traced.duration_ns;
      traced.duration_ns = std::max<std::int64_t>(end_ns - std::max(launch.start_ns, busy_until_ns), 0);
      busy_until_ns = std::max(busy_until_ns, end_ns);
    }
    launches.push_back(traced);
  }
  return launches;
}

std::vector<std::size_t> request_ends(std::span<const RecordedLaunch> recorded, std::int64_t gap_ns) {
  std::vector<std::size_t> ends;
  std::int64_t busy_until_ns = INT64_MIN;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const RecordedLaunch& launch = recorded[i];
    const bool quiet = i > 0 && launch.submitted_ns - std::max(busy_until_ns, recorded[i - 1].submitted_ns) >= gap_ns;
    if (quiet) ends.push_back(i);
    const std::int64_t start_ns = launch.start_ns >= 0 ? launch.start_ns : launch.submitted_ns;
    busy_until_ns = std::max(busy_until_ns, start_ns + std::max<std::int64_t>(launch.duration_ns, 0));
  }
  if (!recorded.empty()) ends.push_back(recorded.size());
  return ends;
}

ReplayResult replay(std::span<const ReplayClient> clients, const ReplaySettings& settings) {
  return Replay(clients, settings).run();
}

}  // namespace cudasched::simulate
