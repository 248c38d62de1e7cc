// A queue, before a fake driver, behind the hook's deferred calls and guards.
#pragma once

#include <array>
#include <fstream>
#include <string>

#include "fake_driver.hpp"
#include "fake_engine.hpp"
#include "hook/deferred.hpp"
#include "hook/entry_points.hpp"
#include "hook/guards.hpp"
#include "queue/router.hpp"

namespace cudasched::hook {

using namespace queue;

inline int attribute_value = 0;
inline unsigned memory_type = 0;  // 0: pageable
inline unsigned memory_device = 0;

inline void fill_memory_table() {
  driver::Driver& table = driver::table();
  table.cuPointerGetAttribute = [](void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
      *static_cast<CUdeviceptr*>(value) = address & ~CUdeviceptr{0xff};
      return CUDA_SUCCESS;
    }
    unsigned answer = memory_type;
    if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) answer = 0;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) answer = memory_device;
    *static_cast<unsigned*>(value) = answer;
    return memory_type == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuEventCreate = [](CUevent* event, unsigned) {
    *event = kOtherEvent;
    return CUDA_SUCCESS;
  };
  table.cuIpcOpenEventHandle = [](CUevent* event, CUipcEventHandle) {
    *event = kOtherEvent;
    return CUDA_SUCCESS;
  };
  table.cuFuncGetAttribute = [](int* value, CUfunction_attribute, CUfunction function) {
    *value = attribute_value;
    return reinterpret_cast<std::uint64_t>(function) < 0x1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  };
  table.cuKernelGetAttribute = [](int* value, CUfunction_attribute, CUkernel, CUdevice) {
    *value = attribute_value;
    return CUDA_SUCCESS;
  };
}

class HookedQueue : public QueueTest {
 protected:
  HookedQueue() {
    fill_memory_table();
    uncounted_captures = 0;
    router().add(queue());
    here = site_at(&queue(), caller_);
    memory_type = CU_MEMORYTYPE_HOST;
    attribute_value = 0;
  }
  ~HookedQueue() override { router().forget_queues(); }

  // As the entry points of launches do.
  static bool offer(Call call, CUresult& status) {
    call.site = here;
    return defer(call, status);
  }
  // The function that a program would get under this name.
  template <typename Function>
  static Function* entry(std::string_view exported) {
    for (const TakenOver& each : deferred_functions()) {
      if (each.symbol == exported) return reinterpret_cast<Function*>(each.legacy);
    }
    ADD_FAILURE() << exported;
    return nullptr;
  }
  template <typename Function>
  static Function* guard(const char* symbol, Function* target, bool per_thread = false) {
    return reinterpret_cast<Function*>(guarded(find_symbol(symbol), per_thread, address(target)));
  }
};

class EachLine : public HookedQueue {
 protected:
  // Positions of what fill() queues, of which each is the last one for something. A launch behind each of them holds
  // what is queued next while the gate is closed.
  enum Queued : Position { kLaunchOnStream = 1, kRecord = 3, kGraphLaunch = 5, kOtherRecord = 7, kLast = 8 };

  void fill() {
    for (const CUevent event : {kEvent, kOtherEvent}) driver::registry().created(event, CU_EVENT_DISABLE_TIMING);
    make_graph(kGraph);
    before_ = queue().pushed();
    block(kStream);
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kNonBlocking, 0)));
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(push_graph(kGraph, kNonBlocking));
    ASSERT_TRUE(launch(kNonBlocking));
    ASSERT_TRUE(queue().push_call(caller_, record_of(kOtherEvent, kNonBlocking, 0)));
    ASSERT_TRUE(launch(kOtherStream));
    ASSERT_EQ(queue().pushed() - before_, Position{kLast});
  }
  Position passed() { return queue().passed() - before_; }

  // Where a call that is about kStream, kEvent, kOtherEvent and kGraph stops waiting.
  static Position end_of(Scope scope) {
    switch (scope) {
      case Scope::kNone:
      case Scope::kGraph:  // no graph has memory
        return 0;
      case Scope::kStream:
        return kLaunchOnStream;
      case Scope::kEvent:
      case Scope::kStreamAndEvent:
        return kRecord;
      case Scope::kEvents:
        return kOtherRecord;
      case Scope::kExec:
        return kGraphLaunch;
      default:
        return kLast;
    }
  }

  // With these in the places that the table names, and in all others what is none of them.
  static CUresult call(void* function, const EntryPoint& point) {
    std::array<std::uint64_t, 16> with{};
    with.fill(7);
    const auto put = [&](int place, auto value) {
      if (place >= 0) with[static_cast<std::size_t>(place)] = (std::uint64_t)value;
    };
    const Arguments& at = point.arguments;
    put(at.stream, kStream);
    put(at.event, kEvent);
    if (point.scope == Scope::kPeers) {
      put(at.other, kContext);
    } else {
      put(at.other, kOtherEvent);
    }
    put(at.function, kFunction);
    put(at.kernel, kFunction);
    put(at.exec, kGraph);
    put(at.context, kContext);
    put(at.memory, 0x1000);
    using Word = std::uint64_t;
    return reinterpret_cast<CUresult (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                                         Word, Word, Word)>(function)(
        with[0], with[1], with[2], with[3], with[4], with[5], with[6], with[7], with[8], with[9], with[10], with[11],
        with[12], with[13], with[14], with[15]);
  }

  static void expect_told(const EntryPoint& point) {
    driver::StreamFacts stream;
    driver::EventFacts event;
    driver::ExecFacts exec;
    switch (point.meaning) {
      case Meaning::kDestroyStream:
        EXPECT_FALSE(driver::registry().find(kStream, stream)) << point.symbol;
        break;
      case Meaning::kShareEvent:
        EXPECT_TRUE(driver::registry().find(kEvent, event) && event.shared) << point.symbol;
        break;
      case Meaning::kChangeExec:
        EXPECT_TRUE(driver::registry().find(kGraph, exec) && !exec.launched) << point.symbol;
        break;
      case Meaning::kDestroyExec:
        EXPECT_FALSE(driver::registry().find(kGraph, exec)) << point.symbol;
        break;
      default:
        break;
    }
  }

  template <typename Visit>
  static void for_each(Treatment treatment, Visit&& visit) {
    for (const EntryPoint& point : entry_points()) {
      if (point.treatment != treatment) continue;
      visit(point, false);
      if (!point.twin.empty()) visit(point, true);
    }
  }

  Position before_ = 0;
};

template <typename Function>
Function* as(void* function) {
  return reinterpret_cast<Function*>(function);
}

inline CUresult its_target() { return CUDA_ERROR_NOT_SUPPORTED; }

inline const CUstream kStreamThere = handle<CUstream>(0x151);  // of the second device

class TwoDevices : public HookedQueue {
 protected:
  TwoDevices() : other_(other_gate_, +[]() noexcept { return false; }, 64, 1U << 14) {
    queue().serve(0);
    other_.serve(1);
    EXPECT_TRUE(other_.start());
    router().add(other_);
    memory_type = CU_MEMORYTYPE_DEVICE;
    memory_device = 1;
  }
  ~TwoDevices() override {
    other_gate_.open();
    router().forget_queues();
    FakeDriver::device_now() = 0;
  }
  // From here on the calling thread is on the second device.
  void go_there() {
    FakeDriver::device_now() = 1;
    FakeDriver::current() = kOtherContext;
    here = site_at(&other_, {1, kOtherContext, false});
  }
  static bool sleeps(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string said;
    std::getline(file, said);
    const std::size_t name_ends = said.rfind(')');
    return name_ends != std::string::npos && said.compare(name_ends, 3, ") S") == 0;
  }
  // Calls `what` with the first device's gate closed behind a launch; says whether it waited.
  template <typename Call>
  bool waits_for_the_first_gate(Call&& what) {
    std::atomic<bool> done{false};
    std::atomic<pid_t> id{0};
    std::thread thread([&] {
      id = static_cast<pid_t>(syscall(SYS_gettid));
      go_there();
      what();
      done = true;
    });
    // It waits where it sleeps at each look for a while: one that has no core yet is runnable.
    for (int looks = 0; !done && looks < 20; looks = sleeps(id) ? looks + 1 : 0) std::this_thread::sleep_for(1ms);
    const bool waited = !done && !queue().empty();
    if (waited) gate_.open();
    thread.join();
    if (waited) finish();
    return waited;
  }

  FakeGate other_gate_;
  Queue other_;
};

}  // namespace cudasched::hook
