#include "telemetry/trace.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/log.hpp"
#include "base/spin_lock.hpp"
#include "driver/functions.hpp"
#include "telemetry/json_text.hpp"
#include "telemetry/pass_thread.hpp"
#include "telemetry/trace_file.hpp"

namespace cudasched::telemetry {
namespace {

constexpr std::int64_t kPassNs = 5 * kNsPerMs;   // while records come fast,
constexpr std::int64_t kIdleNs = 20 * kNsPerMs;  // else
constexpr std::size_t kFast = 1024;              // records in a pass
constexpr std::size_t kMostInPass = 1 << 16;
constexpr std::size_t kMostTextBytes = 4 << 20;  // of names, which each file repeats
constexpr std::size_t kLongestText = 4 << 10;
constexpr int kMostDevices = 64;  // that TraceRecord::place tells apart

enum class TraceText : std::uint32_t { kKernel = 0, kRegion = 1, kShape = 2, kDevice = 3 };

struct Text {
  TraceText space;
  std::uint32_t number;
  std::string text;
};

// The names of regions. Names are texts of the program's, so the number of places is bounded.
class RegionNames {
 public:
  static constexpr std::size_t kNameBytes = 64;

  std::uint16_t number_of(std::string_view name, Class region_class) noexcept {
    name = name.substr(0, kNameBytes - 1);
    const std::uint64_t hash = hash_of(name, region_class);
    const SpinGuard guard(lock_);
    if (!guard.owns()) return 0;
    const int named = named_.load(std::memory_order_relaxed);
    for (int i = 0; i < named; ++i) {
      const Place& place = places_[static_cast<std::size_t>(i)];
      if (place.hash == hash && place.region_class == region_class && name == place.name.data()) {
        return static_cast<std::uint16_t>(i + 1);
      }
    }
    if (named == kMostRegions) return kMostRegions;
    Place& place = places_[static_cast<std::size_t>(named)];
    place.hash = hash;
    place.region_class = region_class;
    if (named == kMostRegions - 1) name = "(others)";
    std::copy_n(name.data(), name.size(), place.name.data());
    named_.store(named + 1, std::memory_order_release);
    return static_cast<std::uint16_t>(named + 1);
  }

  int count() const noexcept { return named_.load(std::memory_order_acquire); }
  std::string_view name(int index) const noexcept { return places_[static_cast<std::size_t>(index)].name.data(); }
  Class region_class(int index) const noexcept { return places_[static_cast<std::size_t>(index)].region_class; }

  // In a forked child, whose only thread has regions of these names open: the names stay.
  void reset_in_child() noexcept { lock_.unlock(); }

 private:
  struct Place {
    std::uint64_t hash = 0;
    Class region_class = Class::kNormal;
    std::array<char, kNameBytes> name{};
  };

  static std::uint64_t hash_of(std::string_view name, Class region_class) noexcept {
    std::uint64_t hash = static_cast<std::uint64_t>(region_class) + 1;
    for (const char c : name) hash = mix(hash, static_cast<unsigned char>(c));
    return hash;
  }

  SpinLock lock_;
  std::atomic<int> named_{0};
  std::array<Place, kMostRegions> places_{};
};

RegionNames& region_names() noexcept {
  // Never destroyed: threads may leave regions while the process exits.
  alignas(RegionNames) static unsigned char storage[sizeof(RegionNames)];
  static RegionNames* const instance = new (storage) RegionNames();
  return *instance;
}

// The GPUs' capacities. A forked child has the parent's.
class Devices {
 public:
  void add(const TraceDevice& device) noexcept {
    const SpinGuard guard(lock_);
    const int known = known_.load(std::memory_order_relaxed);
    if (!guard.owns() || known == kMostDevices) return;
    for (int i = 0; i < known; ++i) {
      if ((*this)[i].ordinal == device.ordinal) return;
    }
    devices_[static_cast<std::size_t>(known)] = device;
    known_.store(known + 1, std::memory_order_release);
  }

  int count() const noexcept { return known_.load(std::memory_order_acquire); }
  const TraceDevice& operator[](int index) const noexcept { return devices_[static_cast<std::size_t>(index)]; }

  void reset_in_child() noexcept { lock_.unlock(); }

 private:
  SpinLock lock_;
  std::atomic<int> known_{0};
  std::array<TraceDevice, kMostDevices> devices_{};
};

constinit Devices devices;

std::string joined(std::span<const std::uint32_t> numbers) {
  std::string text;
  for (const std::uint32_t number : numbers) text.append(text.empty() ? "" : " ").append(std::to_string(number));
  return text;
}

std::int64_t clock_ns(clockid_t clock) noexcept {
  timespec time{};
  clock_gettime(clock, &time);
  return time.tv_sec * kNsPerSecond + time.tv_nsec;
}

class Tracer {
 public:
  void start(const TraceOptions& options);
  Traced stop() noexcept;
  std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

 private:
  bool pass(bool last);
  void begin_file();
  void number_kernel(TraceRecord& record);
  void name_shape(std::uint16_t number);
  void add_text(TraceText space, std::uint32_t number, std::string_view text);
  const std::string& file_of(const void* address);
  void write_texts(std::size_t from);
  void write_records();
  std::string meta() const;

  std::mutex lifecycle_;
  PassThread thread_;
  std::atomic<std::uint64_t> dropped_{0};

  // The thread's alone, while it runs.
  std::unique_ptr<TraceFile> file_;
  std::int64_t started_ns_ = 0;
  std::string command_;
  std::vector<TraceRecord> batch_;
  std::bitset<TraceShapes::kPlaces + 1> known_shapes_;
  std::vector<bool> known_kernels_;
  std::unordered_map<const void*, std::string> files_by_image_;
  std::vector<Text> texts_;
  std::size_t texts_written_ = 0;  // to this file
  std::size_t text_bytes_ = 0;
  int regions_known_ = 0;
  int devices_known_ = 0;
  std::uint64_t records_ = 0;  // written
  std::uint64_t lost_ = 0;     // that could not be written
  std::uint64_t dropped_before_ = 0;
  std::uint64_t dropped_told_ = 0;
};

Tracer& tracer() noexcept {
  // Never destroyed: launches may still come while the process exits.
  alignas(Tracer) static unsigned char storage[sizeof(Tracer)];
  static Tracer* const instance = new (storage) Tracer();
  return *instance;
}

std::uint64_t dropped_by_rings() noexcept {
  std::uint64_t sum = 0;
  if (const TraceRings* const rings = trace_rings.load(std::memory_order_acquire)) {
    for (const auto& ring : rings->rings) sum += ring.dropped();
  }
  return sum;
}

void make_rings() {
  if (trace_rings.load() != nullptr) return;
  // Its pages are there from now on, so that no launch is held by the kernel's making one.
  void* const memory =
      mmap(nullptr, sizeof(TraceRings), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw Error("launches cannot be traced: there is no memory for their records");
  trace_rings.store(new (memory) TraceRings, std::memory_order_release);
}

void Tracer::start(const TraceOptions& options) {
  const std::scoped_lock lock(lifecycle_);
  if (tracing()) throw Error("this process is traced already; there is one trace a process at a time");
  make_rings();
  file_ = std::make_unique<TraceFile>(options.directory, options.limit_bytes);
  batch_.clear();
  batch_.reserve(kMostInPass);
  known_shapes_.reset();
  known_kernels_.clear();
  files_by_image_.clear();
  texts_.clear();
  text_bytes_ = 0;
  regions_known_ = devices_known_ = 0;
  records_ = lost_ = 0;
  // Drops the records that an earlier trace left.
  for (auto& ring : trace_rings.load()->rings) ring.drain(TraceRings::kCells, [](const TraceRecord&) {});
  dropped_before_ = dropped_by_rings();
  dropped_told_ = 0;
  dropped_.store(0, std::memory_order_relaxed);
  command_ = command_json();
  started_ns_ = now_ns();
  begin_file();
  const bool runs = thread_.start("cudasched-trace", kIdleNs, [this](bool last) {
    try {
      return pass(last) ? kPassNs : kIdleNs;
    } catch (const std::exception&) {  // no memory for names: the batch counts as lost
      lost_ += batch_.size();
      batch_.clear();
      return kIdleNs;
    }
  });
  if (!runs) throw Error("launches cannot be traced: no thread can be made");
  tracing_now.store(true, std::memory_order_release);
}

Traced Tracer::stop() noexcept {
  Traced result;
  const std::scoped_lock lock(lifecycle_);
  if (file_ == nullptr) return result;
  tracing_now.store(false);
  thread_.stop();
  result.base = file_->base();
  result.records = records_;
  result.dropped = dropped();
  result.rotated_away = file_->rotated_away();
  file_.reset();
  return result;
}

// Returns whether records come fast.
bool Tracer::pass(bool last) {
  std::size_t taken = 0;
  bool more = true;
  while (more) {
    batch_.clear();
    for (auto& ring : trace_rings.load()->rings) {
      ring.drain(kMostInPass - batch_.size(), [this](const TraceRecord& record) {
        if (record.time_ns >= started_ns_) batch_.push_back(record);  // else a call of the last trace was late
      });
    }
    more = batch_.size() == kMostInPass;
    taken += batch_.size();
    for (TraceRecord& record : batch_) number_kernel(record);
    for (const int named = region_names().count(); regions_known_ < named; ++regions_known_) {
      std::string text(class_name(region_names().region_class(regions_known_)));
      add_text(TraceText::kRegion, static_cast<std::uint32_t>(regions_known_) + 1,
               text.append(1, '\0').append(region_names().name(regions_known_)));
    }
    for (const int known = devices.count(); devices_known_ < known; ++devices_known_) {
      const TraceDevice& device = devices[devices_known_];
      const auto positive = [](int value) { return static_cast<std::uint32_t>(std::max(value, 0)); };
      add_text(TraceText::kDevice, static_cast<std::uint32_t>(device.ordinal),
               joined(std::array{positive(device.major), positive(device.minor), positive(device.sm_count),
                                 positive(device.max_threads_per_sm)}));
    }
    write_texts(texts_written_);
    std::stable_sort(batch_.begin(), batch_.end(),
                     [](const TraceRecord& a, const TraceRecord& b) { return a.time_ns < b.time_ns; });
    write_records();
  }
  const std::uint64_t dropped = dropped_by_rings() - dropped_before_;
  dropped_.store(dropped + lost_, std::memory_order_relaxed);
  if (dropped > std::exchange(dropped_told_, dropped)) {
    file_->append(TraceFile::Block::kDropped, 0, {std::as_bytes(std::span(&dropped, 1))});
  }
  if (last) {
    const std::string end = "{\"records\": " + std::to_string(records_) + ", \"dropped\": " + std::to_string(dropped) +
                            ", \"rotated_away\": " + std::to_string(file_->rotated_away()) + "}";
    file_->append(TraceFile::Block::kEnd, 0, {bytes_of(end)});
  }
  return taken >= kFast;
}

void Tracer::write_records() {
  for (std::span<const TraceRecord> left(batch_); !left.empty();) {
    if (file_->room() == 0 && file_->rotate()) begin_file();
    const auto some = left.first(file_->failed() ? left.size() : std::min(left.size(), file_->room()));
    const bool written =
        file_->append(TraceFile::Block::kRecords, static_cast<std::uint32_t>(some.size()), {std::as_bytes(some)});
    (written ? records_ : lost_) += some.size();
    left = left.subspan(some.size());
  }
}

std::string Tracer::meta() const {
  const auto number = [](const char* name, std::int64_t value) {
    return std::string(", \"") + name + "\": " + std::to_string(value);
  };
  return "{\"pid\": " + std::to_string(getpid()) + ", \"command\": " + command_ + number("started_ns", started_ns_) +
         number("monotonic_ns", now_ns()) + number("boottime_ns", clock_ns(CLOCK_BOOTTIME)) +
         number("realtime_ns", clock_ns(CLOCK_REALTIME)) +
         number("rotated_away", static_cast<std::int64_t>(file_->rotated_away())) +
         ", \"version\": " + json_text(CUDASCHED_VERSION) + "}";
}

// Every file can be read without the others.
void Tracer::begin_file() {
  const std::string text = meta();
  file_->append(TraceFile::Block::kMeta, 0, {bytes_of(text)});
  write_texts(0);
}

void Tracer::number_kernel(TraceRecord& record) {
  const bool launches = record.kind == TraceKind::kLaunch || record.kind == TraceKind::kPush ||
                        record.kind == TraceKind::kWait || record.kind == TraceKind::kTimed;
  const bool graph = record.kind != TraceKind::kWait && (record.detail & kTraceGraph) != 0;
  if (!launches || graph || record.what == 0) return;
  const auto shape = static_cast<std::uint16_t>(record.what >> TraceRecord::kShapeBit);
  constexpr std::uint64_t kAddress = (std::uint64_t{1} << TraceRecord::kShapeBit) - 1;
  const auto& kernel = *reinterpret_cast<const driver::KernelFacts*>(record.what & kAddress);
  const std::size_t index = kernel.facts.index;
  record.what = (index + 1) | std::uint64_t{shape} << 32;
  if (shape != 0) name_shape(shape);
  if (index < known_kernels_.size() && known_kernels_[index]) return;
  if (index >= known_kernels_.size()) known_kernels_.resize(index + 1);
  known_kernels_[index] = true;
  std::string text = kernel.name.substr(0, kLongestText / 2);
  const predict::Function& facts = kernel.facts;
  text.append(1, '\0').append(file_of(kernel.image).substr(0, kLongestText / 4)).append(1, '\0');
  text.append(joined(std::array{facts.registers, facts.local_bytes, facts.static_shared_bytes, facts.max_threads}));
  add_text(TraceText::kKernel, static_cast<std::uint32_t>(index + 1), text);
}

void Tracer::name_shape(std::uint16_t number) {
  if (known_shapes_[number]) return;
  known_shapes_[number] = true;
  add_text(TraceText::kShape, number, joined(trace_rings.load()->shapes.shape(number).numbers()));
}

// The file that is mapped at the address; empty: none. By the kernel's own list, because the loader's takes its lock.
const std::string& Tracer::file_of(const void* address) {
  const auto [known, is_new] = files_by_image_.try_emplace(address);
  if (!is_new || address == nullptr) return known->second;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first = 0;
    unsigned long long behind = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx", &first, &behind) != 2) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at < first || at >= behind) continue;
    const std::size_t path = line.find('/');
    if (path != std::string::npos) known->second = line.substr(path);
    break;
  }
  return known->second;
}

void Tracer::add_text(TraceText space, std::uint32_t number, std::string_view text) {
  text = text.substr(0, kLongestText);
  if (text_bytes_ + text.size() > kMostTextBytes) return;  // it is known by its number alone
  text_bytes_ += text.size();
  texts_.push_back({space, number, std::string(text)});
}

void Tracer::write_texts(std::size_t from) {
  std::string payload;
  for (std::size_t i = from; i < texts_.size(); ++i) {
    const Text& text = texts_[i];
    const std::array<std::uint32_t, 3> head{static_cast<std::uint32_t>(text.space), text.number,
                                            static_cast<std::uint32_t>(text.text.size())};
    payload.append(reinterpret_cast<const char*>(head.data()), sizeof head).append(text.text);
  }
  texts_written_ = texts_.size();
  if (!payload.empty()) file_->append(TraceFile::Block::kTexts, 0, {bytes_of(payload)});
}

}  // namespace

void start_tracing(const TraceOptions& options) { tracer().start(options); }

Traced stop_tracing() noexcept { return tracer().stop(); }

std::uint16_t trace_region(std::string_view name, Class region_class) noexcept {
  return region_names().number_of(name, region_class);
}

void trace_device(const TraceDevice& device) noexcept { devices.add(device); }

void reset_tracing_in_child() noexcept {
  tracing_now.store(false);
  // A thread of the parent's may have been in the middle of a record. The memory is the child's own copy, and no other
  // thread is there to use it.
  if (TraceRings* const rings = trace_rings.exchange(nullptr)) munmap(rings, sizeof(TraceRings));
  region_names().reset_in_child();
  devices.reset_in_child();
  new (&tracer()) Tracer();  // the parent's tracer is left to leak: its state may be torn
}

}  // namespace cudasched::telemetry
