#include "simulate/replay.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <vector>

#include "arbiter/table.hpp"
#include "schedule/deadline.hpp"
#include "simulate/replay_client.hpp"

namespace cudasched::simulate {
namespace {

constexpr int kNoClient = -1;
constexpr double kBoundSigmas = 1.2816;  // covers 90%
constexpr std::uint64_t kStream = 1;
constexpr double kLeastSms = 0.004;  // half a multiprocessor is none

class Replay {
 public:
  Replay(std::span<const ReplayClient> clients, const ReplaySettings& settings);
  ReplayResult run();

 private:
  enum class EventKind { kJoin, kHost, kGate, kReady, kGpu, kSlice, kArrival, kExpect, kEnter };
  struct Event {
    std::int64_t at_ns;
    std::uint64_t order;
    EventKind kind;
    int client;
    std::uint64_t generation;
    bool operator>(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
    }
  };

  void add(std::int64_t at_ns, EventKind kind, int client, std::uint64_t generation = 0) {
    events_.push({at_ns, order_++, kind, client, generation});
  }
  // The request of that number comes, or its client says that it does.
  void await(const Client& client, EventKind kind, std::uint64_t number) {
    const ReplayClient& trace = *client.trace;
    if (number >= trace.arrivals_ns.size()) return;
    const std::int64_t ahead_ns = kind == EventKind::kExpect ? trace.expect_ns : 0;
    add(std::max<std::int64_t>(trace.arrivals_ns[number] - ahead_ns, 0), kind, client.slot, number);
  }
  void handle(const Event& event);
  Client& at(int slot) const { return *clients_[static_cast<std::size_t>(slot)]; }
  // Predicted over true.
  double noise() {
    return settings_.prediction_sigma > 0 ? std::exp(settings_.prediction_sigma * normal_(random_)) : 1;
  }

  // Host
  void host_reaches_launch(Client& client);
  void host_goes_on(Client& client, std::int64_t call_ns);
  void host_looks_at_completion(Client& client);
  void enter(Client& client);
  void leave(Client& client);
  void begin_segments(Client& client);
  void tell(Client& client, const schedule::Segments::SegmentNews& told);
  void ask_to_enter(Client& client);
  void next_segment(Client& client);

  // Gate
  void look_at(Client& client, std::int64_t at_ns);
  void look(Client& client);
  void look_ungated(Client& client);
  void ask(Client& client);
  void mark_tail(Client& client);
  void note_progress(Client& client, const schedule::Segments::Launch& launched);
  void note_admission(Client& client, const schedule::Snapshot& seen, LaunchRecord& record);
  void submit(Client& client, const schedule::Snapshot* seen, const schedule::GateMachine::Ticket& ticket = {});
  void wake_gates();

  // GPU
  void reaches_gpu(Client& client);
  void run_gpu();
  bool has_room() const;
  int choose() const;
  void begin(int chosen);
  void share();
  void progress();
  std::int64_t slice_ns_of(const Client& client) const;
  bool another_ready() const;
  void complete();
  void cut();

  const ReplaySettings& settings_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<Client*> best_effort_;
  std::vector<Client*> latency_;
  std::unique_ptr<arbiter::Layout> layout_ = std::make_unique<arbiter::Layout>();  // the clients' shared words
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_{0, 1};

  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t order_ = 0;
  std::int64_t now_ns_ = 0;

  // A kernel on the GPU.
  struct Running {
    int slot;
    std::int64_t since_ns;  // its progress is known up to here; later than now: it begins then
    double rate = 1;        // of its speed alone
  };
  std::vector<Running> running_;  // in the order in which they began
  int last_ = kNoClient;          // the client that began last
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
  return schedule::Decider(*schedule::find_policy(settings.policy));
}

Replay::Replay(std::span<const ReplayClient> clients, const ReplaySettings& settings)
    : settings_(settings), random_(settings.seed) {
  check(clients, settings);
  const schedule::Decider policy = decider(settings);
  for (const ReplayClient& spec : clients) {
    clients_.push_back(std::make_unique<Client>(spec, static_cast<int>(clients_.size()), settings, *layout_));
    Client& client = *clients_.back();
    client.gate.use_policy(policy);
    (client.best_effort ? best_effort_ : latency_).push_back(&client);
  }
}

ReplayResult Replay::run() {
  for (Client* client : best_effort_) add(client->launch(0).gap_ns, EventKind::kHost, client->slot);
  for (Client* client : latency_) {
    add(client->trace->joins_ns, EventKind::kJoin, client->slot);
    await(*client, EventKind::kArrival, 0);
    if (client->trace->expect_ns > 0) await(*client, EventKind::kExpect, 0);
  }
  std::int64_t end_ns = settings_.end_ns;
  std::uint64_t handled = 0;
  for (; !events_.empty() && events_.top().at_ns < end_ns;) {
    const Event event = events_.top();
    events_.pop();
    now_ns_ = event.at_ns;
    handle(event);
    if (++handled % kEventsAtATime == 0 && settings_.goes_on && !settings_.goes_on()) end_ns = now_ns_;
  }
  now_ns_ = end_ns;
  progress();
  result_.end_ns = now_ns_;
  for (const auto& client : clients_) {
    if (result_.policy_refused.empty()) result_.policy_refused = client->gate.refused_policy();
    client->result.unserved = client->arrived - client->served;
    const auto submitted = static_cast<double>(std::max<std::uint64_t>(client->submitted, 1));
    client->result.mean_lead_ns = client->lead_sum_ns / submitted;
    if (client->segments != nullptr) client->result.segments = client->segments->counts();
    result_.launches += client->submitted;
    result_.clients.push_back(std::move(client->result));
  }
  return std::move(result_);
}

void Replay::handle(const Event& event) {
  Client& client = at(std::max(event.client, 0));
  switch (event.kind) {
    case EventKind::kJoin:
      layout_->latency |= bit(client.slot);
      return;
    case EventKind::kHost:
      return host_reaches_launch(client);
    case EventKind::kGate:
      if (event.generation != client.look_generation) return;
      client.look_ns = kForeverNs;
      return look(client);
    case EventKind::kReady:
      return reaches_gpu(client);
    case EventKind::kGpu:
      if (event.generation == run_generation_) complete();
      return;
    case EventKind::kSlice:
      if (event.generation == run_generation_) cut();
      return;
    case EventKind::kArrival:
      await(client, event.kind, event.generation + 1);
      ++client.arrived;
      if (!client.in_region(*layout_) && !client.entering) ask_to_enter(client);
      return;
    case EventKind::kExpect:
      await(client, event.kind, event.generation + 1);
      return client.requests.expect(client.trace->expect_ns, now_ns_);
    case EventKind::kEnter:
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
  add(now_ns_ + std::max(next.gap_ns - (settings_.launch_ns - call_ns), call_ns), EventKind::kHost, client.slot);
}

void Replay::host_looks_at_completion(Client& client) {
  if (!client.waits_for_gpu || client.completed < client.pushed) return;
  client.waits_for_gpu = false;
  if (!client.best_effort && client.pushed == client.request_end) return leave(client);
  next_segment(client);
  add(now_ns_ + client.launch(client.pushed).gap_ns, EventKind::kHost, client.slot);
}

// The program has waited for the GPU, or asked and found it done.
void Replay::next_segment(Client& client) {
  schedule::Segments::SegmentNews told;
  if (client.segments != nullptr && client.segments->next(now_ns_, told)) tell(client, told);
}

void Replay::ask_to_enter(Client& client) {
  client.entering = true;
  client.asked_entry_ns = now_ns_;
  enter(client);
}

void Replay::enter(Client& client) {
  const auto entrant = [](const Client& one) {
    return schedule::Entrant{one.slot, one.trace->priority, one.deadline_ns()};
  };
  if (settings_.earliest_deadline_first) {
    std::array<schedule::Entrant, arbiter::kSlotCount> others;
    std::size_t count = 0;
    for (const Client* other : latency_) {
      if (other != &client && (other->in_region(*layout_) || other->entering)) others[count++] = entrant(*other);
    }
    schedule::EntryView view;
    view.self = entrant(client);
    view.others = {others.data(), count};
    view.waited_ns = now_ns_ - client.asked_entry_ns;
    if (schedule::earliest_deadline_first(view).answer != schedule::Answer::kSubmit) {
      add(client.asked_entry_ns + view.max_wait_ns, EventKind::kEnter, client.slot);
      return;
    }
  }
  client.entering = false;
  client.cold = true;
  client.words.deadline_ns = client.deadline_ns();
  client.requests.enter(client.trace->slo_ns, /*alone=*/true);
  client.requests.begin(now_ns_, /*in_region=*/true);
  if (client.segments != nullptr) begin_segments(client);
  layout_->active |= bit(client.slot);
  client.request_end = client.pushed + client.request_launches();
  // The recorded gap before a request's first launch is the program's wait for the request.
  add(now_ns_ + client.trace->prepare_ns, EventKind::kHost, client.slot);
}

void Replay::begin_segments(Client& client) {
  std::optional<schedule::Segments::Target> target;
  if (settings_.policy == "slack") {
    const std::int64_t expected_ns = client.requests.expected_ns();
    target =
        schedule::Segments::Target{client.deadline_ns(), expected_ns > 0 ? expected_ns : schedule::Snapshot::kUnknownNs,
                                   settings_.margin_ns, best_effort_.empty()};
  }
  const bool sliced = settings_.sharing == Sharing::kTimeSlice && !best_effort_.empty();
  const auto key = static_cast<std::uint64_t>(client.trace->slo_ns);
  tell(client, client.segments->begin(key, now_ns_, sliced, target));
}

void Replay::tell(Client& client, const schedule::Segments::SegmentNews& told) {
  schedule::publish(told, client.words.latency_gpu_ns, client.words);
  if (told.late_ns > 0 && schedule::worth_waking(told.left)) wake_gates();
}

void Replay::leave(Client& client) {
  const std::int64_t latency_ns = now_ns_ - client.trace->arrivals_ns[client.served++];
  client.result.latencies_ns.push_back(latency_ns);
  if (client.trace->slo_ns > 0 && latency_ns <= client.trace->slo_ns) ++client.result.met;
  client.requests.end(now_ns_, /*in_region=*/false);
  if (!settings_.foresee) client.words.foreseen_over_ns = client.words.rate_free_ns = 0;
  if (client.segments != nullptr) client.segments->end(now_ns_);
  client.words.segment_late_ns = 0;
  layout_->active &= ~bit(client.slot);
  if (client.served < client.arrived) ask_to_enter(client);
  for (Client* other : latency_) {
    if (other->entering) add(now_ns_ + settings_.reaction_ns, EventKind::kEnter, other->slot);
  }
  wake_gates();
}

// ---- gate ----------------------------------------------------------------------------------------------------------

void Replay::look_at(Client& client, std::int64_t at_ns) {
  at_ns = std::max(at_ns, client.launcher_free_ns);
  if (client.look_ns <= at_ns) return;
  client.look_ns = at_ns;
  add(at_ns, EventKind::kGate, client.slot, ++client.look_generation);
}

void Replay::wake_gates() {
  for (Client* client : best_effort_) {
    if (client->pushed > client->submitted) look_at(*client, now_ns_ + settings_.reaction_ns);
  }
}

// The head is asked for for the first time.
void Replay::ask(Client& client) {
  client.asked_ns = now_ns_;
  client.was_held = false;
  const TraceLaunch& launch = client.launch(client.submitted);
  const auto said_ns = static_cast<double>(launch.predicted_ns > 0 ? launch.predicted_ns : launch.duration_ns);
  client.asking = {.stream = kStream, .by_launcher = settings_.offload};
  client.asking.predicted_ns = static_cast<std::int64_t>(said_ns * noise());
  const double bound = std::exp(kBoundSigmas * settings_.prediction_sigma);
  client.asking.bound_ns = static_cast<std::int64_t>(static_cast<double>(client.asking.predicted_ns) * bound);
}

void Replay::look(Client& client) {
  if (client.pushed == client.submitted || client.submitted - client.completed >= kRing) return;
  client.see_completions(now_ns_);
  if (client.asked_ns < 0) ask(client);
  if (layout_->latency == 0) return look_ungated(client);
  for (Client* one : latency_) {
    if (settings_.foresee && !one->in_region(*layout_)) one->requests.look_ahead(now_ns_);
  }
  schedule::GateMachine& gate = client.gate;
  if (gate.begin_gated()) mark_tail(client);
  schedule::GateMachine::Ticket ticket;
  const schedule::GateMachine::Verdict verdict = gate.step(
      client.asking, ticket, kNoClient, nullptr, now_ns_, [] { return false; }, [&] { return !settings_.offload; });
  if (verdict.passed_on) wake_gates();
  if (verdict.exception != schedule::Exception::kNone) ++client.result.exceptions;
  const bool announces = verdict.waits() && verdict.announce;
  layout_->waiting = announces ? layout_->waiting | bit(client.slot) : layout_->waiting & ~bit(client.slot);
  if (verdict.waits()) return look_at(client, now_ns_ + std::max(verdict.look_in_ns, settings_.reaction_ns));
  if (gate.submit(client.asking, ticket, now_ns_).segment < 0) ++client.result.uncounted;
  submit(client, &gate.seen(), ticket);
}

// While no latency client is there.
void Replay::look_ungated(Client& client) {
  schedule::GateMachine& gate = client.gate;
  // A launch's number in the trace takes the place of the gate's key by geometry.
  const std::uint64_t key = client.submitted % client.trace->launches.size() + 1;
  schedule::Estimates::Found found = gate.estimate(key);
  if (!found.known) found = gate.note(key, client.asking.predicted_ns);
  schedule::Snapshot seen;
  seen.predicted_ns = found.duration_ns;
  seen.in_flight_ns = gate.ledger().remaining_ns(kStream);
  schedule::GateMachine::Ticket ticket;
  if (!gate.unbounded()) {
    if (gate.is_much(found)) {
      const schedule::GateMachine::Verdict verdict =
          gate.step_ungated(kStream, found, client.was_held, [] { return false; }, [&] { return !settings_.offload; });
      if (verdict.waits()) return look_at(client, now_ns_ + verdict.look_in_ns);
      if (verdict.exception != schedule::Exception::kNone) ++client.result.exceptions;
    }
    if (gate.submit_ungated(kStream, key, found, ticket).segment < 0) ++client.result.uncounted;
  }
  submit(client, &seen, ticket);
}

// The last launches may have no marker.
void Replay::mark_tail(Client& client) {
  const int segment = client.gate.ledger().mark(kStream);
  if (segment < 0) return;
  client.gate.ledger().submitted(segment, true);
  client.marked[static_cast<std::size_t>(segment)] = client.submitted - 1;
}

// As runtime::LatencySegments, for the launch that is submitted.
void Replay::note_progress(Client& client, const schedule::Segments::Launch& launched) {
  arbiter::Slot& words = client.words;
  const std::int64_t before_ns = words.latency_gpu_ns;
  const std::int64_t position_ns = words.latency_gpu_ns += launched.gpu_ns;
  words.segment_left = launched.left;
  if (launched.number == 0) client.marks.begin(before_ns);
  if (launched.gpu_ns == 0 || !schedule::SegmentProgress::asks(launched.number) || words.segment_late_ns <= 0) return;
  if (client.marks.ask(position_ns, [&] { return client.completed >= client.marked_launch; })) {
    client.marks.marked(position_ns);
    client.marked_launch = client.submitted + 1;
  }
  words.latency_done_ns = client.marks.done_ns();
  words.latency_not_done_ns = client.marks.not_done_ns();
}

void Replay::note_admission(Client& client, const schedule::Snapshot& seen, LaunchRecord& record) {
  client.lead_sum_ns += static_cast<double>(seen.lead_ns);
  const std::int64_t waited_ns = now_ns_ - client.asked_ns;
  client.result.gate_wait_ns += waited_ns;
  client.result.longest_gate_wait_ns = std::max(client.result.longest_gate_wait_ns, waited_ns);
  client.asked_ns = -1;
  client.launcher_free_ns = now_ns_ + settings_.launch_ns;
  record.longest_ns = seen.longest_ns();
  record.latency_active = seen.latency_active;
  record.slack_ns = seen.slack_ns;
  record.in_flight_ns = seen.in_flight_ns;
  record.lead_ns = seen.lead_ns;
}

// `seen`: the snapshot that admitted a best-effort launch; null for latency launches.
void Replay::submit(Client& client, const schedule::Snapshot* seen, const schedule::GateMachine::Ticket& ticket) {
  Job job;
  job.number = client.submitted;
  job.ticket = ticket;
  if (ticket.entry >= 0) client.marked[static_cast<std::size_t>(ticket.entry)] = job.number;
  const TraceLaunch& launch = client.launch(client.submitted);
  job.duration_ns = job.remaining_ns = launch.duration_ns;
  job.kernel_ns = (launch.duration_ns + launch.kernels - 1) / launch.kernels;
  job.ready_ns = now_ns_ + settings_.launch_ns;
  LaunchRecord record{client.slot, client.submitted, client.handed_ns.front(), now_ns_};
  if (seen != nullptr) note_admission(client, *seen, record);
  if (client.segments != nullptr) {
    const schedule::Segments::Launch launched = client.segments->launch([&] { return now_ns_; });
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
  add(job.ready_ns, EventKind::kReady, client.slot);
  if (seen == nullptr) return;
  if (!settings_.offload) {
    host_goes_on(client, settings_.launch_ns);
  } else if (client.waits_for_room) {
    client.waits_for_room = false;
    add(now_ns_, EventKind::kHost, client.slot);
  }
  if (client.pushed > client.submitted) look_at(client, client.launcher_free_ns);
}

// ---- GPU -----------------------------------------------------------------------------------------------------------

void Replay::reaches_gpu(Client& client) {
  const schedule::GateMachine::Ticket& ticket = client.jobs[client.ready_jobs++].ticket;
  if (ticket.entry >= 0) {
    client.gate.submitted(ticket, /*accepted=*/true, /*recorded=*/true, now_ns_);
    if (ticket.admitted_ns != 0) {
      client.see_completions(now_ns_);
      client.gate.learn_lead(ticket, now_ns_);
    }
  }
  run_gpu();
}

std::int64_t Replay::slice_ns_of(const Client& client) const {
  const std::int64_t own_ns = client.best_effort ? settings_.best_effort_slice_ns : settings_.latency_slice_ns;
  return own_ns > 0 ? own_ns : settings_.slice_ns;
}

bool Replay::another_ready() const {
  return std::any_of(clients_.begin(), clients_.end(),
                     [&](const auto& client) { return client->slot != last_ && client->ready(); });
}

// Of the multiprocessors, for a kernel that does not run yet.
bool Replay::has_room() const {
  double left = 1;
  for (const Running& one : running_) left -= at(one.slot).launch(at(one.slot).jobs.front().number).sms;
  return left > kLeastSms && (running_.empty() || settings_.sharing != Sharing::kTimeSlice);
}

int Replay::choose() const {
  if (settings_.sharing == Sharing::kTimeSlice) {
    const int count = static_cast<int>(clients_.size());
    if (last_ != kNoClient && at(last_).ready() && now_ns_ < slice_end_ns_) return last_;
    for (int step = 1; step <= count; ++step) {
      const int slot = (std::max(last_, 0) + step) % count;
      if (at(slot).ready()) return slot;
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
    const std::int64_t slice_ns = slice_ns_of(at(last_));
    const std::int64_t passed = std::max<std::int64_t>(now_ns_ - slice_start_ns_, 0) / slice_ns;
    slice_end_ns_ = slice_start_ns_ + (passed + 1) * slice_ns;
    if (!running_.empty()) add(slice_end_ns_, EventKind::kSlice, kNoClient, run_generation_);
  }
  while (has_room()) {
    const int chosen = choose();
    if (chosen == kNoClient) return;
    begin(chosen);
  }
}

void Replay::begin(int chosen) {
  progress();
  const bool slices = settings_.sharing == Sharing::kTimeSlice;
  Client& client = at(chosen);
  std::int64_t switch_ns = 0;
  if (last_ != kNoClient && last_ != chosen) {
    const bool is_cold = client.cold && at(last_).best_effort;
    if (slices || is_cold) switch_ns = settings_.switch_ns;
    if (slices && is_cold) switch_ns += settings_.cold_ns;
  }
  client.cold = false;
  Job& job = client.jobs.front();
  const std::int64_t start_ns = now_ns_ + switch_ns + (job.begun ? 0 : settings_.kernel_gap_ns);
  result_.switch_ns += switch_ns;
  if (last_ != chosen) {
    last_ = chosen;
    slice_start_ns_ = start_ns;
    slice_end_ns_ = another_ready() ? start_ns + slice_ns_of(client) : kForeverNs;
  }
  if (!job.begun && settings_.log) result_.log[job.record].start_ns = start_ns;
  job.begun = true;
  job.kernel_left_ns = slices ? job.remaining_ns : std::min(job.remaining_ns, job.kernel_ns);
  client.runs = true;
  running_.push_back({chosen, start_ns});
  share();
}

// An earlier kernel keeps its multiprocessors, and a later one has those that are left. With a part of those that it
// fills, a kernel that the memory holds up loses less than that part: beside one that left half of them to it, a kernel
// of 84% of the bandwidth kept 89% of its speed (H100), for 0.5 ^ (1 - 0.84). All are slower where they want more
// bandwidth than there is.
void Replay::share() {
  double left = 1;
  double wanted = 0;
  for (Running& one : running_) {
    const Client& client = at(one.slot);
    const TraceLaunch& launch = client.launch(client.jobs.front().number);
    one.rate = left >= launch.sms ? 1 : std::pow(left / launch.sms, 1 - launch.bandwidth);
    left = std::max(left - launch.sms, 0.0);
    wanted += launch.bandwidth * one.rate;
  }
  std::int64_t next_ns = kForeverNs;
  for (Running& one : running_) {
    if (wanted > 1) one.rate /= wanted;
    const auto left_ns = static_cast<double>(at(one.slot).jobs.front().kernel_left_ns);
    next_ns =
        std::min(next_ns, std::max(one.since_ns, now_ns_) + static_cast<std::int64_t>(std::ceil(left_ns / one.rate)));
  }
  ++run_generation_;
  if (running_.empty()) return;
  add(next_ns, EventKind::kGpu, kNoClient, run_generation_);
  const bool slices = settings_.sharing == Sharing::kTimeSlice;
  if (slices && slice_end_ns_ != kForeverNs) add(slice_end_ns_, EventKind::kSlice, kNoClient, run_generation_);
}

// Of the kernels that run, up to now.
void Replay::progress() {
  std::int64_t busy_ns = 0;
  for (Running& one : running_) {
    const std::int64_t passed_ns = std::max<std::int64_t>(now_ns_ - one.since_ns, 0);
    one.since_ns += passed_ns;
    busy_ns = std::max(busy_ns, passed_ns);
    Job& job = at(one.slot).jobs.front();
    const std::int64_t ran_ns =
        std::min<std::int64_t>(std::llround(static_cast<double>(passed_ns) * one.rate), job.kernel_left_ns);
    job.remaining_ns -= ran_ns;
    job.kernel_left_ns -= ran_ns;
  }
  result_.busy_ns += busy_ns;
}

// The kernel that is over stops; others go on.
void Replay::complete() {
  progress();
  const auto over = std::find_if(running_.begin(), running_.end(),
                                 [&](const Running& one) { return at(one.slot).jobs.front().kernel_left_ns == 0; });
  Client& client = at(over->slot);
  client.runs = false;
  running_.erase(over);
  share();
  Job& front = client.jobs.front();
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
  if (job.is_timed) {
    const auto measured_ns = static_cast<double>(job.duration_ns + settings_.kernel_gap_ns);
    client.segments->took(job.in_segment, static_cast<std::int64_t>(measured_ns * noise()));
  }
  if (settings_.log) result_.log[job.record].end_ns = now_ns_;
  if (client.best_effort) wake_gates();
  host_looks_at_completion(client);
  run_gpu();
}

// The end of a slice.
void Replay::cut() {
  if (!another_ready()) return;
  progress();
  for (const Running& one : running_) at(one.slot).runs = false;
  running_.clear();
  share();
  run_gpu();
}

}  // namespace

ReplayResult replay(std::span<const ReplayClient> clients, const ReplaySettings& settings) {
  return Replay(clients, settings).run();
}

}  // namespace cudasched::simulate
