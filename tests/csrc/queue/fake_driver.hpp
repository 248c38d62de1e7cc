// A driver that records what it is asked, and a gate that opens and closes by command.
#pragma once

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "queue/queue.hpp"

namespace cudasched::queue {

using namespace std::chrono_literals;

inline constexpr auto kPatience = 60s;  // against hangs alone

template <typename Condition>
bool eventually(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

template <typename Handle>
Handle handle(std::uintptr_t number) {
  return reinterpret_cast<Handle>(number);
}

inline const CUcontext kContext = handle<CUcontext>(0xc1);
inline const CUcontext kOtherContext = handle<CUcontext>(0xc2);
inline const CUstream kStream = handle<CUstream>(0x51);       // blocking
inline const CUstream kOtherStream = handle<CUstream>(0x53);  // blocking
inline const CUstream kNonBlocking = handle<CUstream>(0x52);  // even numbers are non-blocking
inline const CUevent kEvent = handle<CUevent>(0xe1);
inline const CUevent kOtherEvent = handle<CUevent>(0xe2);
inline const CUfunction kFunction = handle<CUfunction>(0xf1);       // two parameters: 8 bytes, and 4 at offset 8
inline const CUfunction kPlainFunction = handle<CUfunction>(0xf2);  // none
inline const CUgraphExec kGraph = handle<CUgraphExec>(0x91);

struct DriverCall {
  std::string name;
  CUstream stream = nullptr;
  std::uint64_t what = 0;  // function, event, graph or address
  CUcontext context = nullptr;
  pid_t thread = 0;
  std::vector<std::uint64_t> values;
  std::string bytes;  // parameters
};

class FakeDriver {
 public:
  FakeDriver() {
    instance() = this;
    fill_table();
  }
  ~FakeDriver() {
    instance() = nullptr;
    driver::registry().clear();
    driver::functions().forget_handles();
  }

  // What the registry and the descriptions of functions ask.
  static void fill_table() {
    driver::Driver& table = driver::table();
    table.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode* mode) {
      std::swap(*mode, capture_mode());
      return CUDA_SUCCESS;
    };
    table.cuCtxGetCurrent = [](CUcontext* context) {
      *context = current();
      return CUDA_SUCCESS;
    };
    table.cuCtxGetDevice = [](CUdevice* device) {
      *device = device_now();
      return CUDA_SUCCESS;
    };
    // kOtherContext is the second device's, and streams from 0x100 on are its.
    table.cuCtxPushCurrent = [](CUcontext context) {
      pushed().emplace_back(current(), device_now());
      current() = context;
      device_now() = context == kOtherContext ? 1 : 0;
      return CUDA_SUCCESS;
    };
    table.cuCtxPopCurrent = [](CUcontext*) {
      std::tie(current(), device_now()) = pushed().back();
      pushed().pop_back();
      return CUDA_SUCCESS;
    };
    table.cuStreamGetCtx_v1 = [](CUstream stream, CUcontext* context) {
      *context = word(stream) >= 0x100 && word(stream) < 0x200 ? kOtherContext : kContext;
      return CUDA_SUCCESS;
    };
    table.cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
      *status = CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    };
    table.cuStreamGetFlags = [](CUstream stream, unsigned* flags) {
      *flags = word(stream) % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
      ++instance()->flag_queries;
      return word(stream) == 0xbad ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
    };
    // Those over 0x1000 are kernels, which only their own functions describe.
    table.cuFuncGetAttribute = [](int* value, CUfunction_attribute, CUfunction function) {
      *value = 0;
      return word(function) < 0x1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    };
    table.cuKernelGetAttribute = [](int* value, CUfunction_attribute, CUkernel kernel, CUdevice) {
      *value = 0;
      return word(kernel) >= 0x1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    };
    table.cuFuncGetParamInfo = [](CUfunction function, std::size_t i, std::size_t* offset, std::size_t* bytes) {
      return word(function) < 0x1000 ? parameter(word(function), i, offset, bytes) : CUDA_ERROR_INVALID_HANDLE;
    };
    table.cuKernelGetParamInfo = [](CUkernel kernel, std::size_t i, std::size_t* offset, std::size_t* bytes) {
      return word(kernel) >= 0x1000 ? parameter(word(kernel) - 0x1000, i, offset, bytes) : CUDA_ERROR_INVALID_HANDLE;
    };
    table.cuLaunchKernel.legacy = [](CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                     unsigned bz, unsigned shared, CUstream stream, void** parameters, void** extra) {
      return instance()->launch("kernel", f, {gx, gy, gz, bx, by, bz, shared}, stream, parameters, extra);
    };
    table.cuLaunchKernelEx.legacy = [](const CUlaunchConfig* c, CUfunction f, void** parameters, void** extra) {
      std::vector<std::uint64_t> values{c->gridDimX,  c->gridDimY,  c->gridDimZ,      c->blockDimX,
                                        c->blockDimY, c->blockDimZ, c->sharedMemBytes};
      for (unsigned i = 0; i < c->numAttrs; ++i) values.push_back(c->attrs[i].id);
      return instance()->launch("kernel_ex", f, values, c->hStream, parameters, extra);
    };
    table.cuLaunchCooperativeKernel.legacy = [](CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                                void** parameters) {
      return instance()->launch("cooperative", f, {gx, gy, gz, bx, by, bz, shared}, stream, parameters, nullptr);
    };
    table.cuGraphLaunch.legacy = [](CUgraphExec graph, CUstream s) {
      return instance()->note("graph", s, word(graph), {});
    };
    table.cuMemsetD8Async = [](CUdeviceptr to, unsigned char value, std::size_t n, CUstream s) {
      return instance()->note("fill_8", s, to, {value, n});
    };
    table.cuMemsetD16Async = [](CUdeviceptr to, unsigned short value, std::size_t n, CUstream s) {
      return instance()->note("fill_16", s, to, {value, n});
    };
    table.cuMemsetD32Async = [](CUdeviceptr to, unsigned value, std::size_t n, CUstream s) {
      return instance()->note("fill_32", s, to, {value, n});
    };
    table.cuMemsetD2D8Async = [](CUdeviceptr to, std::size_t pitch, unsigned char value, std::size_t w, std::size_t h,
                                 CUstream s) { return instance()->note("fill_rows_8", s, to, {pitch, value, w, h}); };
    table.cuMemsetD2D16Async = [](CUdeviceptr to, std::size_t pitch, unsigned short value, std::size_t w, std::size_t h,
                                  CUstream s) { return instance()->note("fill_rows_16", s, to, {pitch, value, w, h}); };
    table.cuMemsetD2D32Async = [](CUdeviceptr to, std::size_t pitch, unsigned value, std::size_t w, std::size_t h,
                                  CUstream s) { return instance()->note("fill_rows_32", s, to, {pitch, value, w, h}); };
    table.cuMemcpyAsync = [](CUdeviceptr to, CUdeviceptr from, std::size_t n, CUstream s) {
      return instance()->note("copy", s, to, {from, n});
    };
    table.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, std::size_t n, CUstream s) {
      return instance()->note("copy_to_device", s, to, {word(from), n});
    };
    table.cuMemcpyDtoHAsync = [](void* to, CUdeviceptr from, std::size_t n, CUstream s) {
      return instance()->note("copy_to_host", s, word(to), {from, n});
    };
    table.cuMemcpyDtoDAsync = [](CUdeviceptr to, CUdeviceptr from, std::size_t n, CUstream s) {
      return instance()->note("copy_on_device", s, to, {from, n});
    };
    table.cuEventRecord = [](CUevent event, CUstream s) { return instance()->note("record", s, word(event), {}); };
    table.cuEventRecordWithFlags = [](CUevent event, CUstream s, unsigned flags) {
      return instance()->note("record_with_flags", s, word(event), {flags});
    };
    table.cuStreamWaitEvent = [](CUstream s, CUevent event, unsigned flags) {
      return instance()->note("wait", s, word(event), {flags});
    };
    table.cuLaunchHostFunc = [](CUstream s, CUhostFn, void* data) {
      return instance()->note("host_function", s, word(data), {});
    };
    table.cuCtxSetCurrent = [](CUcontext context) {
      if (context == kBrokenContext) return CUDA_ERROR_INVALID_CONTEXT;
      current() = context;
      ++instance()->context_switches;
      return CUDA_SUCCESS;
    };
    table.cuEventDestroy = [](CUevent event) { return instance()->note("destroy", nullptr, word(event), {}); };
    table.cuMemFreeAsync.legacy = [](CUdeviceptr address, CUstream s) {
      return instance()->note("free", s, address, {});
    };
  }

  inline static const CUcontext kBrokenContext = reinterpret_cast<CUcontext>(std::uintptr_t{0xcbad});
  static CUcontext& current() {
    static thread_local CUcontext context = nullptr;
    return context;
  }
  static std::vector<std::pair<CUcontext, CUdevice>>& pushed() {
    static thread_local std::vector<std::pair<CUcontext, CUdevice>> contexts;
    return contexts;
  }
  // Of the current context.
  static CUdevice& device_now() {
    static thread_local CUdevice device = 0;
    return device;
  }
  static CUstreamCaptureMode& capture_mode() {
    static thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return mode;
  }

  std::vector<DriverCall> made() {
    const std::scoped_lock lock(mutex_);
    return made_;
  }
  std::size_t count() { return made().size(); }
  // Names and what they are about, in order: "kernel f1".
  std::vector<std::string> story() {
    std::vector<std::string> lines;
    for (const DriverCall& call : made()) {
      std::array<char, 64> line{};
      std::snprintf(line.data(), line.size(), "%s %llx", call.name.c_str(), static_cast<unsigned long long>(call.what));
      lines.emplace_back(line.data());
    }
    return lines;
  }

  // Called by the driver before each call, unlocked; its answer is the call's.
  std::function<CUresult(const DriverCall&)> on_call;
  std::atomic<int> context_switches{0};
  std::atomic<int> flag_queries{0};

 private:
  template <typename Value>
  static std::uint64_t word(Value value) {
    return reinterpret_cast<std::uint64_t>(value);
  }
  static FakeDriver*& instance() {
    static FakeDriver* driver = nullptr;
    return driver;
  }
  static CUresult parameter(std::uint64_t function, std::size_t i, std::size_t* offset, std::size_t* bytes) {
    if (function == word(kFunction) && i < 2) {
      *offset = 8 * i;
      *bytes = i == 0 ? 8 : 4;
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  }

  CUresult launch(const char* name, CUfunction function, std::vector<std::uint64_t> values, CUstream stream,
                  void** parameters, void** extra) {
    std::string bytes;
    if (parameters != nullptr) {
      bytes.append(static_cast<const char*>(parameters[0]), 8);
      bytes.append(static_cast<const char*>(parameters[1]), 4);
    } else if (extra != nullptr) {
      bytes.assign(static_cast<const char*>(extra[1]), *static_cast<std::size_t*>(extra[3]));
    }
    return note(name, stream, word(function), std::move(values), std::move(bytes));
  }

  CUresult note(const char* name, CUstream stream, std::uint64_t what, std::vector<std::uint64_t> values,
                std::string bytes = {}) {
    const DriverCall call{
        name, stream, what, current(), static_cast<pid_t>(syscall(SYS_gettid)), std::move(values), std::move(bytes)};
    const CUresult status = on_call ? on_call(call) : CUDA_SUCCESS;
    const std::scoped_lock lock(mutex_);
    made_.push_back(call);
    return status;
  }

  std::mutex mutex_;
  std::vector<DriverCall> made_;
};

class FakeGate : public Admission {
 public:
  std::int64_t admit(const Operation&, Position position, const Opening& opening) noexcept override {
    std::unique_lock lock(mutex_);
    ++asked_;
    changed_.notify_all();
    while (closed_ && !opening.is_open_for(position)) {
      lock.unlock();
      const bool again = opening.submit_pieces();
      lock.lock();
      const auto changed = [&] { return !closed_ || opening.is_open_for(position); };
      if (again) {
        changed_.wait_for(lock, 20us, changed);
      } else {
        changed_.wait(lock, changed);
      }
    }
    if (closed_) ++forced_;
    return predicted_ns_;
  }
  void submitted(const Operation&, CUresult status, bool overlap_follows) noexcept override {
    const std::scoped_lock lock(mutex_);
    statuses_.push_back(status);
    overlap_follows_.push_back(overlap_follows);
  }
  std::uint32_t begin_graph(const Operation&) noexcept override {
    const std::scoped_lock lock(mutex_);
    return static_cast<std::uint32_t>(parts_.size());
  }
  CUgraphExec part(std::uint32_t index) noexcept override {
    const std::scoped_lock lock(mutex_);
    return parts_[index];
  }
  bool may_go_whole() noexcept override {
    const std::scoped_lock lock(mutex_);
    return may_go_whole_;
  }
  void change_graph(const Operation& change) noexcept override {
    const std::scoped_lock lock(mutex_);
    changes_.emplace_back(change.change.exec, static_cast<unsigned>(change.change.bytes[0]), asked_);
  }
  void end_graph(const Operation& launch, CUresult status) noexcept override {
    const std::scoped_lock lock(mutex_);
    ended_.emplace_back(launch.graph(), status);
  }
  Operation::Direction direction_of_pieces(const Operation& copy) noexcept override {
    const std::scoped_lock lock(mutex_);
    return copy.copy.bytes > piece_bytes_ ? copy.copy.direction : Operation::Direction::kAny;
  }
  std::size_t next_piece(const Operation& copy, Operation::Direction direction, bool all) noexcept override {
    const std::scoped_lock lock(mutex_);
    if (all) return copy.copy.bytes;
    ++pieces_asked_;
    const bool goes = only_ == Operation::Direction::kAny || only_ == direction;
    return !goes || (may_go_ && !may_go_()) ? 0 : std::min(piece_bytes_, copy.copy.bytes);
  }
  void piece_submitted(const Operation&, Operation::Direction direction, CUresult) noexcept override {
    const std::scoped_lock lock(mutex_);
    pieces_.push_back(direction);
  }
  void wake() noexcept override {
    const std::scoped_lock lock(mutex_);
    changed_.notify_all();
  }

  void close() {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
  }
  void predict(std::int64_t ns) {
    const std::scoped_lock lock(mutex_);
    predicted_ns_ = ns;
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    closed_ = false;
    changed_.notify_all();
  }
  int asked() {
    const std::scoped_lock lock(mutex_);
    return asked_;
  }
  // Copies of more bytes go in pieces from here on, each where may_go() says so.
  void cut_copies(std::size_t piece_bytes, std::function<bool()> may_go = {}) {
    const std::scoped_lock lock(mutex_);
    piece_bytes_ = piece_bytes;
    may_go_ = std::move(may_go);
  }
  // Pieces of the other direction are held from here on; kAny: none are.
  void only(Operation::Direction direction) {
    const std::scoped_lock lock(mutex_);
    only_ = direction;
  }
  int pieces_asked() {
    const std::scoped_lock lock(mutex_);
    return pieces_asked_;
  }
  std::vector<Operation::Direction> pieces() {
    const std::scoped_lock lock(mutex_);
    return pieces_;
  }
  // Graphs are submitted in these parts from here on.
  void cut(std::vector<CUgraphExec> parts) {
    const std::scoped_lock lock(mutex_);
    parts_ = std::move(parts);
  }
  void forbid_whole() {
    const std::scoped_lock lock(mutex_);
    may_go_whole_ = false;
  }
  // What was changed: the graph, the first byte, and behind how many admissions.
  std::vector<std::tuple<CUgraphExec, unsigned, int>> changes() {
    const std::scoped_lock lock(mutex_);
    return changes_;
  }
  std::vector<std::pair<CUgraphExec, CUresult>> ended() {
    const std::scoped_lock lock(mutex_);
    return ended_;
  }
  // Launches that passed while it was closed.
  int forced() {
    const std::scoped_lock lock(mutex_);
    return forced_;
  }
  std::vector<CUresult> statuses() {
    const std::scoped_lock lock(mutex_);
    return statuses_;
  }
  std::vector<bool> overlap_follows() {
    const std::scoped_lock lock(mutex_);
    return overlap_follows_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  std::vector<CUgraphExec> parts_;
  bool may_go_whole_ = true;
  std::size_t piece_bytes_ = ~std::size_t{0};
  std::function<bool()> may_go_;
  Operation::Direction only_ = Operation::Direction::kAny;
  int pieces_asked_ = 0;
  std::vector<Operation::Direction> pieces_;
  std::vector<std::tuple<CUgraphExec, unsigned, int>> changes_;
  std::vector<std::pair<CUgraphExec, CUresult>> ended_;
  std::int64_t predicted_ns_ = 0;
  int asked_ = 0;
  int forced_ = 0;
  std::vector<CUresult> statuses_;
  std::vector<bool> overlap_follows_;
};

inline CUlaunchAttribute attribute(unsigned id, int value = 0) {
  CUlaunchAttribute result{};
  std::memcpy(&result.id, &id, sizeof id);
  result.value.priority = value;
  return result;
}

// Calls that a queue may take.
inline Operation record_of(CUevent event, CUstream stream, unsigned flags = 0) {
  return {Operation::Kind::kRecord, stream, Operation::Event{event, flags}};
}
inline Operation wait_of(CUstream stream, CUevent event, unsigned flags = 0) {
  return {Operation::Kind::kWait, stream, Operation::Event{event, flags}};
}
inline Operation fill_of(const Operation::Fill& fill, bool rows, CUstream stream) {
  return {rows ? Operation::Kind::kFillRows : Operation::Kind::kFill, stream, fill};
}
inline Operation copy_of(const Operation::Copy& copy, CUstream stream) {
  return {Operation::Kind::kCopy, stream, copy};
}
inline Operation free_of(CUdeviceptr address, CUstream stream) {
  return {Operation::Kind::kFreeMemory, stream, Operation::Memory{address}};
}
inline Operation host_function(CUhostFn function, void* data, CUstream stream) {
  return {Operation::Kind::kHostFunction, stream, Operation::Host{function, data}};
}

// Of a best-effort call that `queue` takes.
inline Site site_at(Queue* queue, const Caller& caller) {
  Site site;
  site.queue = queue;
  site.caller = caller;
  return site;
}

// A queue before a fake driver, with a gate that the test opens and closes.
class QueueTest : public testing::Test {
 protected:
  explicit QueueTest(std::uint32_t slots = 64, std::uint32_t arena_bytes = 1U << 16,
                     Launcher::Idle idle = Launcher::Idle::kSleeps) {
    holds_gil = false;
    FakeDriver::device_now() = 0;
    FakeDriver::current() = kContext;
    for (const CUevent event : {kEvent, kOtherEvent}) driver::registry().created(event, CU_EVENT_DISABLE_TIMING);
    queue_ = std::make_unique<Queue>(gate_, +[]() noexcept { return holds_gil; }, slots, arena_bytes);
    EXPECT_TRUE(queue_->start(idle));
  }
  ~QueueTest() override {
    gate_.open();
    queue_.reset();
  }

  Queue& queue() { return *queue_; }
  static Call plain(CUstream stream = kStream) { return Call({.function = kPlainFunction}, stream); }
  bool push(Call call, const Caller& caller = {1, kContext, false}) {
    call.site.caller = caller;
    return queue_->push_kernel(call);
  }
  static Call graph_call(CUgraphExec graph, CUstream stream) {
    return Call({.function = graph, .is_graph = true}, stream);
  }
  bool push_graph(CUgraphExec graph, CUstream stream = kStream) {
    Call call = graph_call(graph, stream);
    call.site.caller = caller_;
    return queue_->push_graph(call);
  }
  // An executable graph that has been launched.
  static void make_graph(CUgraphExec graph, bool plain = true) {
    driver::registry().made(graph, {.identity = 1, .plain = plain});
    driver::registry().launched(graph);
  }
  // Pushes a launch whose like has succeeded.
  bool launch(CUstream stream = kStream, const Caller& caller = {1, kContext, false}) {
    queue_->kernel_launched(plain(stream));
    return push(plain(stream), caller);
  }
  // Closes the gate with a launch behind it.
  void block(CUstream stream = kStream) {
    gate_.close();
    const int before = gate_.asked();
    ASSERT_TRUE(launch(stream));
    ASSERT_TRUE(eventually([&] { return gate_.asked() > before; }));
  }
  void finish() {
    gate_.open();
    queue_->drain(caller_, queue_->pushed(), Waiter::For::kSynchronise);
  }
  // Does this wait end while the gate stays closed?
  bool opens(const Caller& caller, Position position, Waiter::For what) {
    std::atomic<bool> done{false};
    const bool gil = holds_gil;
    std::thread thread([&] {
      holds_gil = gil;
      queue_->drain(caller, position, what);
      done = true;
    });
    const auto end = std::chrono::steady_clock::now() + (expect_opening_ ? kPatience : 50ms);
    while (!done && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    const bool result = done;
    if (!result) gate_.open();
    thread.join();
    return result;
  }

  inline static thread_local bool holds_gil = false;

  bool expect_opening_ = true;
  FakeDriver driver_;
  FakeGate gate_;
  const Caller caller_{1, kContext, false};
  const Caller latency_{2, kContext, true};
  std::unique_ptr<Queue> queue_;
};

}  // namespace cudasched::queue
