#include "telemetry/collector.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/sleep.hpp"
#include "base/spin_lock.hpp"
#include "driver/driver.hpp"
#include "driver/registry.hpp"
#include "telemetry/cupti.hpp"
#include "telemetry/event_timer.hpp"
#include "telemetry/journal.hpp"
#include "telemetry/json_text.hpp"
#include "telemetry/pass_thread.hpp"
#include "telemetry/sm_clock.hpp"
#include "telemetry/window.hpp"

namespace cudasched::telemetry {
namespace {

constexpr std::int64_t kPassNs = 100 * kNsPerMs;
constexpr std::int64_t kFlushNs = kNsPerSecond;        // of CUPTI's buffers, and of the clocks' offset
constexpr std::int64_t kRefreshNs = 5 * kNsPerSecond;  // of the events' reference
constexpr std::int64_t kCallsInFlightNs = kNsPerSecond;
constexpr std::size_t kMostBatched = 1 << 20;  // records of CUPTI that wait for the collector's thread
constexpr int kNotReadyInARow = 64;
constexpr std::uint32_t kNoFunction = UINT32_MAX;

// A launch as it leaves the launch path: this, then its words.
struct Item {
  Row row;
  std::uint64_t function = 0;
  std::uint64_t stream = 0;
  std::uint64_t thread = 0;
  void* events = nullptr;
  bool failed = false;
};
static_assert(std::is_trivially_copyable_v<Item> && sizeof(Item) % alignof(Item) == 0);

struct Text {
  std::uint32_t space;  // 0: functions' names, 1: labels
  std::uint32_t number;
  std::string text;
};

// Launches' data for the collector's thread.
struct Intake {
  std::vector<std::byte> items;
  std::vector<std::uint64_t> dropped;  // numbers of launches for which there was no room
  std::vector<Text> texts;
};

class Collector {
 public:
  void start(const CollectOptions& options);
  Collected stop(bool synchronize) noexcept;
  void label(std::string_view text);
  Record begin(CUstream stream, bool may_time) noexcept;
  void end(const Record& record, const Launched* launched) noexcept;
  void deliver(cupti::Batch&& batch);
  void forget(CUcontext context) noexcept {
    if (EventTimer* const timer = timer_.load()) timer->forget(context);
  }

 private:
  bool by_cupti() const noexcept { return options_.timing != Timing::kEvents; }
  bool by_events() const noexcept { return options_.timing != Timing::kCupti; }
  bool keep(const Record& record, const Item& item, const Launched* launched) noexcept;
  void drop(std::uint64_t number) noexcept;
  void give_back(void* events) noexcept {
    if (events != nullptr) timer_.load()->give_back(static_cast<EventTimer::Pair*>(events));
  }
  void pass(bool last);
  void take_intake();
  void take_device_records();
  void read_events();
  void sample_clocks();
  void write_rows(bool all);
  void fill(Pending& launch);
  std::int64_t elapsed_of(const Pending& launch, int& patience_ms);
  void tie_clock() noexcept;
  void write_meta();
  void write_end();
  int sm_count(int device);

  std::mutex lifecycle_;
  CollectOptions options_;
  std::unique_ptr<Journal> journal_;
  std::atomic<EventTimer*> timer_{nullptr};  // once events have timed, for good
  std::atomic<std::uint32_t> session_{0};
  std::atomic<std::uint64_t> next_launch_{0};
  std::atomic<int> calls_in_flight_{0};
  std::atomic<CUcontext> context_{nullptr};  // that of some launch
  std::array<std::atomic<std::uint16_t>, SmClock::kMostDevices> clocks_{};
  std::atomic<std::uint32_t> devices_used_{0};  // a bit each

  SpinLock intake_lock_;
  Intake intake_;
  std::vector<bool> known_functions_;
  std::vector<std::string> labels_{std::string()};
  std::unordered_map<std::string, std::uint32_t> label_numbers_{{std::string(), 0}};
  std::atomic<std::uint32_t> label_{0};

  std::mutex batch_lock_;
  cupti::Batch batch_;

  PassThread thread_;

  // The thread's alone, while it runs.
  Intake taken_;
  Window window_;
  SmClock sm_clock_;
  std::vector<std::uint64_t> name_hashes_;
  std::uint32_t labels_written_ = 1;
  std::unordered_map<std::uint64_t, std::uint32_t> threads_;
  std::unordered_map<std::uint64_t, std::uint32_t> streams_;
  std::unordered_map<std::string, std::uint32_t> graphs_;
  std::unordered_map<int, int> sm_counts_;
  std::int64_t cupti_offset_ns_ = 0;
  std::int64_t next_flush_ns_ = 0;
  std::int64_t next_refresh_ns_ = 0;
  std::uint64_t rows_ = 0;
  std::uint64_t lost_ = 0;
  std::uint64_t dropped_before_ = 0;
};

alignas(Collector) unsigned char storage[sizeof(Collector)];
constinit std::atomic<bool> collector_exists{false};  // it takes memory, and what only ends it must not fail

// Never destroyed: launches may still come while the process exits.
Collector& collector() {
  static Collector* const instance = [] {
    Collector* const made = new (storage) Collector();
    collector_exists.store(true);
    return made;
  }();
  return *instance;
}

void Collector::start(const CollectOptions& options) {
  if (!collecting()) stop(/*synchronize=*/false);  // a collection that could not be written
  const std::scoped_lock lock(lifecycle_);
  if (collecting()) throw Error("launches are collected already; there is one collection a process at a time");
  options_ = options;
  journal_ = std::make_unique<Journal>(options.directory);
  try {
    if (by_cupti()) {
      cupti::start(cupti::Use::kTimes, options_.cupti_path,
                   [](cupti::Batch&& batch) { collector().deliver(std::move(batch)); });
    }
    if (by_events() && timer_.load() == nullptr) timer_.store(new EventTimer);
  } catch (const std::exception&) {
    ::unlink(journal_->path().c_str());
    journal_.reset();
    throw;
  }
  next_launch_.store(0);
  {
    const std::scoped_lock taking(intake_lock_);
    intake_ = {};
    known_functions_.clear();
  }
  taken_ = {};
  batch_ = {};
  window_ = Window();
  name_hashes_.clear();
  labels_written_ = 1;
  threads_.clear();
  streams_ = {{reinterpret_cast<std::uintptr_t>(CU_STREAM_LEGACY), 0},
              {reinterpret_cast<std::uintptr_t>(CU_STREAM_PER_THREAD), 1}};
  graphs_.clear();
  rows_ = lost_ = 0;
  next_flush_ns_ = next_refresh_ns_ = 0;
  dropped_before_ = cupti::dropped_records();
  tie_clock();
  write_meta();
  const bool runs = thread_.start("cudasched-coll", kPassNs, [this](bool last) {
    try {
      pass(last);
      if (last) write_end();
    } catch (const std::exception& error) {
      collecting_now.store(false);
      log::warning(std::string("collecting launches has ended: ") + error.what());
    }
    return kPassNs;
  });
  if (!runs) {
    if (by_cupti()) cupti::stop(cupti::Use::kTimes);
    throw Error("launches cannot be collected: no thread can be made");
  }
  session_.fetch_add(1);
  collecting_now.store(true, std::memory_order_release);
}

Collected Collector::stop(bool synchronize) noexcept {
  Collected result;
  const std::scoped_lock lock(lifecycle_);
  if (journal_ == nullptr) return result;
  collecting_now.store(false);
  const std::int64_t patience = now_ns() + kCallsInFlightNs;
  while (calls_in_flight_.load() > 0 && now_ns() < patience) sleep_ns(kNsPerMs);
  if (synchronize) {
    int waited_for = -1;
    const auto wait = [&] {
      driver::table().cuCtxSynchronize();
      waited_for = driver::current_device();
    };
    CUcontext current = nullptr;
    if (driver::table().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != nullptr) {
      wait();
    } else if (CUcontext const last = context_.load(); last != nullptr) {
      const driver::CurrentContext context(last);
      if (context.ok()) wait();
    }
    // At the exit, a driver may have given up what it has of this thread: it makes no other context current then.
    for (std::uint32_t rest = waited_for < 0 ? 0 : devices_used_.load(); rest != 0; rest &= rest - 1) {
      if (const int device = std::countr_zero(rest); device != waited_for) driver::synchronize_primary(device);
    }
  }
  thread_.stop();
  session_.fetch_add(1);
  result.journal = journal_->path();
  result.rows = rows_;
  result.lost = lost_;
  if (by_cupti()) cupti::stop(cupti::Use::kTimes);
  journal_.reset();
  return result;
}

void Collector::label(std::string_view text) {
  const std::scoped_lock lock(intake_lock_);
  const auto [found, fresh] = label_numbers_.emplace(std::string(text), static_cast<std::uint32_t>(labels_.size()));
  if (fresh) {
    if (labels_.size() >= kMostLabels) {
      label_numbers_.erase(found);
      throw Error("there are more than " + std::to_string(kMostLabels) +
                  " labels; a label names a kind of work, not a single launch");
    }
    labels_.push_back(found->first);
  }
  label_.store(found->second, std::memory_order_relaxed);
}

Record Collector::begin(CUstream stream, bool may_time) noexcept {
  Record record;
  record.session = session_.load(std::memory_order_acquire);
  calls_in_flight_.fetch_add(1);
  // In one order with stop(), which looks at the calls in flight after it has said that it is off.
  if (!collecting_now.load()) {
    calls_in_flight_.fetch_sub(1);
    return record;
  }
  record.open = true;
  record.launch = next_launch_.fetch_add(1, std::memory_order_relaxed);
  record.submitted_ns = now_ns();
  if (by_events() && may_time) record.events = timer_.load()->begin(stream);
  if (by_cupti()) {
    cupti::push(record.launch);
    record.correlated = true;
  }
  return record;
}

void Collector::drop(std::uint64_t number) noexcept {
  try {
    intake_.dropped.push_back(number);
  } catch (const std::exception&) {  // the window gives the number up when it is crowded
  }
}

void Collector::end(const Record& record, const Launched* launched) noexcept {
  if (!record.open) return;
  struct Done {
    std::atomic<int>& calls;
    ~Done() { calls.fetch_sub(1); }
  } const done{calls_in_flight_};
  if (record.correlated) cupti::pop();
  Item item;
  item.row.launch = record.launch;
  item.row.submitted_ns = record.submitted_ns;
  if (launched == nullptr) {
    item.failed = true;
    give_back(record.events);
  } else {
    item.events = record.events;
    if (record.events != nullptr) timer_.load()->end(static_cast<EventTimer::Pair*>(record.events), launched->stream);
    const predict::Launch& launch = launched->launch;
    Row& row = item.row;
    std::copy_n(launch.grid, 3, row.grid);
    std::copy_n(launch.block, 3, row.block);
    std::copy_n(launch.cluster, 3, row.cluster);
    row.dynamic_shared_bytes = launch.dynamic_shared_bytes;
    row.is_graph = launch.is_graph ? 1 : 0;
    row.device = static_cast<std::uint8_t>(launched->device);
    row.blocks_per_sm = static_cast<std::uint16_t>(std::clamp(launched->blocks_per_sm, 0, 65'535));
    row.label = label_.load(std::memory_order_relaxed);
    row.function = kNoFunction;
    if (const predict::Function* function = launched->function) {
      row.function = function->index;
      row.identity = function->identity;
      row.parameter_bytes = function->parameter_bytes;
      row.registers = static_cast<std::uint16_t>(function->registers);
      row.max_threads = static_cast<std::uint16_t>(function->max_threads);
      row.static_shared_bytes = function->static_shared_bytes;
      row.local_bytes = function->local_bytes;
    }
    if (launched->device >= 0 && launched->device < SmClock::kMostDevices) {
      row.sm_clock_mhz = clocks_[static_cast<std::size_t>(launched->device)].load(std::memory_order_relaxed);
      const std::uint32_t bit = 1U << launched->device;
      if ((devices_used_.load(std::memory_order_relaxed) & bit) == 0) devices_used_.fetch_or(bit);
    }
    item.function = reinterpret_cast<std::uintptr_t>(launch.function);
    item.stream = reinterpret_cast<std::uintptr_t>(launched->stream);
    item.thread = static_cast<std::uint64_t>(gettid());  // pthread's handle is soon another thread's
    row.word_count = static_cast<std::uint32_t>(launched->words.size());
    if (context_.load(std::memory_order_relaxed) == nullptr) context_.store(driver::shareable_context());
  }
  if (!keep(record, item, launched)) give_back(item.events);
}

// False: the collection has ended, or there is no room.
bool Collector::keep(const Record& record, const Item& item, const Launched* launched) noexcept {
  const std::span<const std::byte> words =
      launched == nullptr ? std::span<const std::byte>() : std::as_bytes(launched->words);
  const std::scoped_lock lock(intake_lock_);
  if (record.session != session_.load(std::memory_order_relaxed)) return false;
  if (intake_.items.size() + sizeof item + words.size() > options_.capacity_bytes) {
    drop(record.launch);
    return false;
  }
  const std::size_t before = intake_.items.size();
  try {
    if (launched != nullptr && launched->function != nullptr) {
      const std::uint32_t index = launched->function->index;
      if (index >= known_functions_.size()) known_functions_.resize(index + 1);
      if (!known_functions_[index]) {
        intake_.texts.push_back({0, index, std::string(launched->name)});
        known_functions_[index] = true;
      }
    }
    const auto* const head = reinterpret_cast<const std::byte*>(&item);
    intake_.items.insert(intake_.items.end(), head, head + sizeof item);
    intake_.items.insert(intake_.items.end(), words.begin(), words.end());
    return true;
  } catch (const std::exception&) {
    intake_.items.resize(before);
    drop(record.launch);
    return false;
  }
}

void Collector::deliver(cupti::Batch&& batch) {
  const std::scoped_lock lock(batch_lock_);
  if (batch_.records.size() > kMostBatched || batch_.correlations.size() > kMostBatched) return;
  if (batch_.records.empty() && batch_.correlations.empty()) {
    batch_ = std::move(batch);
    return;
  }
  batch_.records.insert(batch_.records.end(), batch.records.begin(), batch.records.end());
  batch_.correlations.insert(batch_.correlations.end(), batch.correlations.begin(), batch.correlations.end());
}

// ---- the collector's thread

void Collector::pass(bool last) {
  const std::int64_t now = now_ns();
  bool flushed = false;
  if (by_cupti()) {
    if (last || now >= next_flush_ns_) {
      tie_clock();
      try {
        cupti::flush(cupti::Use::kTimes, /*all=*/last);
      } catch (const Error& error) {
        log::warning(error.what());
      }
      flushed = true;
      next_flush_ns_ = now + kFlushNs;
    }
    take_device_records();
  } else if (now >= next_refresh_ns_) {
    timer_.load()->refresh();
    next_refresh_ns_ = now + kRefreshNs;
  }
  take_intake();
  if (flushed) window_.flushed(/*all=*/last);
  if (options_.timing == Timing::kEvents) read_events();
  sample_clocks();
  write_rows(/*all=*/last);
  if (journal_->failed()) collecting_now.store(false);
}

void Collector::take_device_records() {
  cupti::Batch batch;
  {
    const std::scoped_lock lock(batch_lock_);
    std::swap(batch, batch_);
  }
  for (const cupti::Correlation& correlation : batch.correlations) window_.correlate(correlation);
  for (const cupti::DeviceRecord& record : batch.records) window_.observe(record, cupti_offset_ns_);
}

void Collector::take_intake() {
  taken_.items.clear();
  taken_.dropped.clear();
  taken_.texts.clear();
  std::vector<Text> labels;
  {
    const std::scoped_lock lock(intake_lock_);
    std::swap(taken_, intake_);
    for (; labels_written_ < labels_.size(); ++labels_written_) {
      labels.push_back({1, labels_written_, labels_[labels_written_]});
    }
  }
  std::vector<std::byte> block;
  const auto put = [&block](const void* data, std::size_t bytes) {
    const auto* const from = static_cast<const std::byte*>(data);
    block.insert(block.end(), from, from + bytes);
  };
  for (const auto* texts : {&taken_.texts, &labels}) {
    for (const Text& text : *texts) {
      if (text.space == 0) {
        if (text.number >= name_hashes_.size()) name_hashes_.resize(text.number + 1);
        name_hashes_[text.number] = cupti::hash_of(text.text.c_str());
      }
      const std::array<std::uint32_t, 3> head{text.space, text.number, static_cast<std::uint32_t>(text.text.size())};
      put(head.data(), sizeof head);
      put(text.text.data(), text.text.size());
    }
  }
  if (!block.empty()) journal_->append(Journal::Block::kTexts, 0, {block});

  lost_ += taken_.dropped.size();
  for (const std::uint64_t number : taken_.dropped) window_.failed(number);
  const std::byte* next = taken_.items.data();
  const std::byte* const end = next + taken_.items.size();
  while (next < end) {
    Item item;
    std::memcpy(&item, next, sizeof item);
    next += sizeof item;
    if (item.failed) {
      window_.failed(item.row.launch);
      continue;
    }
    Pending launch;
    launch.row = item.row;
    launch.function = item.function;
    launch.stream = item.stream;
    launch.events = item.events;
    launch.words.resize(item.row.word_count);
    if (item.row.word_count > 0) std::memcpy(launch.words.data(), next, item.row.word_count * sizeof(std::uint32_t));
    next += item.row.word_count * sizeof(std::uint32_t);
    if (item.row.function < name_hashes_.size()) launch.name_hash = name_hashes_[item.row.function];
    launch.row.thread = threads_.try_emplace(item.thread, static_cast<std::uint32_t>(threads_.size())).first->second;
    launch.row.stream = streams_.try_emplace(item.stream, static_cast<std::uint32_t>(streams_.size())).first->second;
    const bool untimed = options_.timing == Timing::kEvents && item.events == nullptr;
    const std::uint64_t number = item.row.launch;
    if (!window_.add(std::move(launch))) {
      ++lost_;
      give_back(item.events);
    }
    if (untimed) window_.timed(number, 0, -1);
  }
}

void Collector::read_events() {
  int not_ready = 0;
  struct Answer {
    std::uint64_t launch;
    std::int64_t start_ns;
    std::int64_t duration_ns;
  };
  std::vector<Answer> answers;
  window_.for_each_open([&](Pending& launch) {
    if (launch.events == nullptr) return true;
    Answer answer{launch.row.launch, 0, -1};
    const auto said =
        timer_.load()->read(static_cast<EventTimer::Pair*>(launch.events), answer.start_ns, answer.duration_ns);
    if (said == EventTimer::Answer::kNotYet) return ++not_ready < kNotReadyInARow;
    if (said == EventTimer::Answer::kFailed) answer.duration_ns = -1;
    answers.push_back(answer);
    return true;
  });
  for (const Answer& answer : answers) window_.timed(answer.launch, answer.start_ns, answer.duration_ns);
}

void Collector::sample_clocks() {
  const std::uint32_t used = devices_used_.load(std::memory_order_relaxed);
  for (int device = 0; device < SmClock::kMostDevices; ++device) {
    // Device 0 before its first launch too, so that a single-GPU program's first launches have a clock.
    if (device != 0 && (used >> device & 1) == 0) continue;
    clocks_[static_cast<std::size_t>(device)].store(sm_clock_.sample(device), std::memory_order_relaxed);
  }
}

int Collector::sm_count(int device) {
  const auto [found, fresh] = sm_counts_.try_emplace(device, 0);
  if (fresh) {
    CUdevice handle = 0;
    if (driver::table().cuDeviceGet(&handle, device) == CUDA_SUCCESS) {
      found->second = driver::device_attribute(handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    }
  }
  return found->second;
}

void Collector::fill(Pending& launch) {
  Row& row = launch.row;
  if (row.is_graph != 0) {
    // The address of a graph that is gone may be another's; CUPTI's number tells them apart.
    const std::string key = std::to_string(launch.function) + ":" + std::to_string(launch.device_graph);
    row.graph = graphs_.try_emplace(key, static_cast<std::uint32_t>(graphs_.size() + 1)).first->second;
  }
  const int places = row.blocks_per_sm * sm_count(row.device);
  const double blocks = static_cast<double>(row.grid[0]) * row.grid[1] * row.grid[2];
  row.waves = row.is_graph != 0 || places == 0 ? 0 : static_cast<float>(blocks / places);
}

void Collector::write_rows(bool all) {
  std::vector<Pending> launches = window_.take(now_ns(), all);
  if (launches.empty()) return;
  std::vector<Row> rows;
  std::vector<std::uint32_t> words;
  std::vector<std::uint16_t> pointers;
  std::vector<std::int64_t> elapsed;
  int patience_ms = 50;  // of all these launches
  for (Pending& launch : launches) {
    fill(launch);
    if (options_.timing == Timing::kBoth) {
      elapsed.push_back(elapsed_of(launch, patience_ms));
    } else {
      give_back(launch.events);  // it was given up
    }
    const std::size_t pointers_before = pointers.size();
    // A pointer is aligned to its size in the block.
    for (std::size_t i = 0; options_.allocations != nullptr && i + 1 < launch.words.size(); i += 2) {
      const std::uint64_t value = launch.words[i] | std::uint64_t{launch.words[i + 1]} << 32;
      if (!options_.allocations->contains(value)) continue;
      launch.words[i] = launch.words[i + 1] = 0;
      pointers.push_back(static_cast<std::uint16_t>(i));
      pointers.push_back(static_cast<std::uint16_t>(i + 1));
    }
    launch.row.pointer_count = static_cast<std::uint32_t>(pointers.size() - pointers_before);
    words.insert(words.end(), launch.words.begin(), launch.words.end());
    rows.push_back(launch.row);
  }
  if (!elapsed.empty()) {
    journal_->append(Journal::Block::kElapsed, static_cast<std::uint32_t>(elapsed.size()),
                     {std::as_bytes(std::span(elapsed))});
  }
  const bool written = journal_->append(
      Journal::Block::kRows, static_cast<std::uint32_t>(rows.size()),
      {std::as_bytes(std::span(rows)), std::as_bytes(std::span(words)), std::as_bytes(std::span(pointers))});
  (written ? rows_ : lost_) += rows.size();
}

// CUPTI has told the launch's end, and the event behind it comes soon.
std::int64_t Collector::elapsed_of(const Pending& launch, int& patience_ms) {
  constexpr std::int64_t kNone = -1;
  auto* const pair = static_cast<EventTimer::Pair*>(launch.events);
  if (pair == nullptr) return kNone;
  std::int64_t elapsed_ns = kNone;
  EventTimer::Answer answer = timer_.load()->read_elapsed(pair, elapsed_ns);
  for (; answer == EventTimer::Answer::kNotYet && patience_ms > 0; --patience_ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    answer = timer_.load()->read_elapsed(pair, elapsed_ns);
  }
  if (answer == EventTimer::Answer::kNotYet) timer_.load()->give_back(pair);
  return elapsed_ns;
}

void Collector::tie_clock() noexcept {
  if (!by_cupti()) return;
  std::int64_t narrowest = INT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const std::int64_t before = now_ns();
    const auto device = static_cast<std::int64_t>(cupti::timestamp());
    const std::int64_t after = now_ns();
    if (device == 0 || after - before >= narrowest) continue;
    narrowest = after - before;
    cupti_offset_ns_ = before + narrowest / 2 - device;
  }
}

void Collector::write_meta() {
  const auto& driver = driver::table();
  int version = 0;
  int count = 0;
  driver.cuDriverGetVersion(&version);
  driver.cuDeviceGetCount(&count);
  std::string text =
      "{\"pid\": " + std::to_string(getpid()) + ", \"timing\": " +
      (options_.timing == Timing::kCupti    ? "\"cupti\""
       : options_.timing == Timing::kEvents ? "\"events\""
                                            : "\"both\"") +
      ", \"driver_version\": " + std::to_string(version) + ", \"cupti_version\": " + std::to_string(cupti::version()) +
      ", \"started_ns\": " + std::to_string(now_ns()) + ", \"command\": " + command_json() + ", \"devices\": [";
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    if (driver.cuDeviceGet(&device, i) != CUDA_SUCCESS) break;
    const auto attribute = [device](CUdevice_attribute which) {
      return std::to_string(driver::device_attribute(device, which));
    };
    std::size_t memory = 0;
    if (driver.cuDeviceTotalMem == nullptr || driver.cuDeviceTotalMem(&memory, device) != CUDA_SUCCESS) memory = 0;
    text += std::string(i == 0 ? "" : ", ") + "{\"memory\": " + std::to_string(memory) +
            ", \"gpu\": " + json_text(driver::device_name(device)) + ", \"compute_capability\": \"" +
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) + "." +
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) +
            "\", \"sm_count\": " + attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) +
            ", \"max_threads_per_sm\": " + attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) + "}";
  }
  text += "]}";
  journal_->append(Journal::Block::kMeta, 0, {bytes_of(text)});
}

void Collector::write_end() {
  const Window::Counts& counts = window_.counts();
  const EventTimer::Overhead overhead = timer_.load() != nullptr ? timer_.load()->overhead() : EventTimer::Overhead{};
  std::string text =
      "{\"rows\": " + std::to_string(rows_) + ", \"lost\": " + std::to_string(lost_) +
      ", \"exact\": " + std::to_string(counts.exact) + ", \"by_order\": " + std::to_string(counts.by_order) +
      ", \"untimed\": " + std::to_string(counts.untimed) + ", \"mismatched\": " + std::to_string(counts.mismatched) +
      ", \"foreign\": " + std::to_string(counts.foreign) +
      ", \"dropped_records\": " + std::to_string(cupti::dropped_records() - dropped_before_) +
      ", \"event_overhead_ns\": " + std::to_string(overhead.subtracted_ns) +
      ", \"empty_pair_ns\": " + std::to_string(overhead.empty_pair_ns) +
      ", \"empty_kernel\": " + (overhead.of_empty_kernel ? "true" : "false") +
      (options_.ending != nullptr ? options_.ending() : "") + "}";
  journal_->append(Journal::Block::kEnd, 0, {bytes_of(text)});
}

}  // namespace

void start_collecting(const CollectOptions& options) { collector().start(options); }
Collected stop_collecting(bool synchronize) noexcept {
  return collector_exists.load() ? collector().stop(synchronize) : Collected{};
}
void set_label(std::string_view text) { collector().label(text); }
Record begin_record(CUstream stream, bool may_time) noexcept { return collector().begin(stream, may_time); }
void end_record(const Record& record, const Launched* launched) noexcept { collector().end(record, launched); }
void forget_context(CUcontext context) noexcept {
  if (collector_exists.load()) collector().forget(context);
}

void reset_collecting_in_child() noexcept {
  collecting_now.store(false);
  // The collector's locks may be held and its thread is the parent's: the old memory is left to leak.
  if (collector_exists.load()) new (storage) Collector();
}

}  // namespace cudasched::telemetry
