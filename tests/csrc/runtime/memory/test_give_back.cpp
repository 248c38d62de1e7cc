// Giving memory back, between the engine of this process and another client: a process that stands in the same table.
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/memory_calls.hpp"
#include "runtime/other_client.hpp"
#include "schedule/give_back.hpp"

namespace cudasched {
namespace {

using namespace std::chrono_literals;
using test::allocate;
using test::call;
using test::eventually;
using test::free_memory;
using test::HookedDriver;
using test::InRegion;
using test::kMiB;
using test::Program;

// Holds memory, and gives some back where it is best effort.
class Neighbour : public test::OtherClient {
 public:
  Neighbour(Class client_class, const Act& act, const std::string& directory = HookedDriver::instance().run_directory())
      : OtherClient(
            client_class, "neighbour",
            [client_class](arbiter::Table& table, int slot) {
              table.memory(slot).held_bytes.store(512 * kMiB);
              if (client_class == Class::kBestEffort) table.memory(slot).gives.store(1);
            },
            act, directory) {}

  arbiter::SlotMemory& words() const { return HookedDriver::instance().table().memory(slot()); }
};

// The numbers of the open requests, the greatest.
std::uint64_t open_request(arbiter::Table& table) {
  std::uint64_t found = 0;
  for (std::uint64_t rest = table.layout().memory.requests.load(); rest != 0; rest &= rest - 1) {
    found = std::max(found, table.memory(std::countr_zero(rest)).request.load());
  }
  return found;
}

void answer(arbiter::Table& table, int slot) {
  const std::uint64_t number = open_request(table);
  if (number <= table.memory(slot).answered.load()) return;
  table.memory(slot).answered.store(number);
  table.wake_for_memory();
}

void silent(arbiter::Table&, int) {}

// The driver's, until enough of this many allocations have failed.
std::atomic<int> failures_left{0};
std::atomic<int> attempts{0};
decltype(driver::table().cuMemAlloc) real_allocate = nullptr;

class ScarceMemory {
 public:
  explicit ScarceMemory(int failures) {
    failures_left.store(failures);
    attempts.store(0);
    real_allocate = driver::table().cuMemAlloc;
    driver::driver_table.cuMemAlloc = [](CUdeviceptr* pointer, std::size_t bytes) {
      attempts.fetch_add(1);
      return failures_left.fetch_sub(1) > 0 ? CUDA_ERROR_OUT_OF_MEMORY : real_allocate(pointer, bytes);
    };
  }
  ~ScarceMemory() { driver::driver_table.cuMemAlloc = real_allocate; }
};

CUresult allocate_in_a_latency_region(CUdeviceptr& pointer) {
  const InRegion region(CUDASCHED_LATENCY);
  return allocate(pointer, kMiB);
}

class GiveBack : public ::testing::Test {
 protected:
  ~GiveBack() override { cudasched_configure("give_back_ms", "1000"); }
  Program program_;
};

TEST_F(GiveBack, ALatencyClientTriesAgainWhenTheOtherHasAnswered) {
  const Neighbour giver(Class::kBestEffort, &answer);
  const ScarceMemory scarce(1);
  cudasched_configure("give_back_ms", "60000");
  CUdeviceptr pointer = 0;
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_SUCCESS);
  EXPECT_EQ(attempts.load(), 2);
  EXPECT_EQ(HookedDriver::instance().table().layout().memory.requests.load(), 0u) << "the request is over";
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

TEST_F(GiveBack, NobodyElseAsks) {
  const Neighbour giver(Class::kBestEffort, &answer);
  const ScarceMemory scarce(1);
  CUdeviceptr pointer = 0;
  EXPECT_EQ(allocate(pointer, kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(attempts.load(), 1);
  EXPECT_EQ(giver.words().answered.load(), 0u);
}

TEST_F(GiveBack, IsOffWhereTheSettingSaysSo) {
  cudasched_configure("give_back_ms", "0");
  const Neighbour giver(Class::kBestEffort, &answer);
  const ScarceMemory scarce(1);
  CUdeviceptr pointer = 0;
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(attempts.load(), 1);
}

// Without a cache that is known there is nobody to wait for.
TEST_F(GiveBack, AClientWithoutACacheSaysNoAtOnce) {
  const Neighbour other(Class::kBestEffort, [](arbiter::Table& table, int slot) { table.memory(slot).gives.store(0); });
  ASSERT_TRUE(eventually([&] { return other.words().gives.load() == 0; }));
  const ScarceMemory scarce(1);
  cudasched_configure("give_back_ms", "60000");
  CUdeviceptr pointer = 0;
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(attempts.load(), 1);
}

TEST_F(GiveBack, AClientThatDoesNotAnswerIsWaitedForNoLongerThanAllowed) {
  const Neighbour giver(Class::kBestEffort, &silent);
  const ScarceMemory scarce(2);
  cudasched_configure("give_back_ms", "30");
  CUdeviceptr pointer = 0;
  testing::internal::CaptureStderr();
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_ERROR_OUT_OF_MEMORY);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("Did not give memory back in time: neighbour ("), std::string::npos) << said;
  EXPECT_NE(said.find("512.0 MiB best_effort"), std::string::npos) << said;
  EXPECT_EQ(HookedDriver::instance().table().layout().memory.requests.load(), 0u);
}

// It may have freed enough without having come to its end.
TEST_F(GiveBack, WhenTheTimeIsOverTheAllocationIsTriedOnceMore) {
  const Neighbour giver(Class::kBestEffort, &silent);
  const ScarceMemory scarce(1);
  cudasched_configure("give_back_ms", "30");
  CUdeviceptr pointer = 0;
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_SUCCESS);
  EXPECT_EQ(attempts.load(), 2);
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

// A server's threads allocate at once: the end of one's request is not the end of another's.
TEST_F(GiveBack, ARequestStaysOpenWhileAThreadOfTheProcessWaits) {
  const Neighbour giver(Class::kBestEffort, [](arbiter::Table& table, int slot) {
    if (table.memory(slot).refusals.load() != 0) answer(table, slot);  // when it is told to
  });
  cudasched_configure("give_back_ms", "50000");
  const auto open = [] { return HookedDriver::instance().table().layout().memory.requests.load() != 0; };
  {
    runtime::MemoryRequest first(0, kMiB);
    {
      const runtime::MemoryRequest second(0, kMiB);
      EXPECT_TRUE(open());
    }
    EXPECT_TRUE(open());
    giver.words().refusals.store(1);
    EXPECT_TRUE(first.next()) << "the answer to the second is the first one's, too";
    EXPECT_EQ(first.unanswered(), "");
    EXPECT_FALSE(first.next());
  }
  EXPECT_FALSE(open());
}

void ask(arbiter::Table& table, int slot) {
  if ((table.layout().memory.requests.load() >> slot & 1) != 0) return;
  auto& words = table.memory(slot);
  words.request_until_ns.store(now_ns() + 50'000'000'000);
  words.request.store(table.layout().memory.made.fetch_add(1) + 1);
  table.layout().memory.requests.fetch_or(std::uint64_t{1} << slot);
  table.wake_for_memory();
}

void ask_once(arbiter::Table& table, int slot) {
  if (table.memory(slot).request.load() == 0) ask(table, slot);
}

// The table is replaced while a request is open, and what was this client's slot is another's, who asks as well. The
// end of the first request took that one's away.
TEST_F(GiveBack, TheEndOfARequestIsNotThatOfTheClientThatHasItsSlotSince) {
  const auto& driver = HookedDriver::instance();
  const Neighbour giver(Class::kBestEffort, &silent);
  cudasched_configure("give_back_ms", "50000");
  std::optional<runtime::MemoryRequest> request(std::in_place, 0, kMiB);
  const runtime::Device* const own = runtime::engine().known_device(0);
  ASSERT_NE(own, nullptr);
  const int before = own->slot(Class::kLatency);
  const auto asks = [&](int slot) { return (driver.table().layout().memory.requests.load() >> slot & 1) != 0; };
  ASSERT_TRUE(asks(before));
  const std::string elsewhere = driver.run_directory() + "-of-others";
  std::vector<std::unique_ptr<Neighbour>> others;
  while (others.size() <= static_cast<std::size_t>(before)) {
    others.push_back(std::make_unique<Neighbour>(Class::kLatency, &ask_once, elsewhere));
  }
  const std::string name = driver::device_uuid(0) + ".arbiter";
  std::filesystem::rename(elsewhere + "/" + name, driver.run_directory() + "/" + name);
  ASSERT_TRUE(eventually([&] { return own->slot(Class::kLatency) != before; }));
  ASSERT_TRUE(eventually([&] { return asks(before); }));
  request.reset();
  EXPECT_TRUE(asks(before));
  EXPECT_FALSE(asks(own->slot(Class::kLatency)));
}

TEST_F(GiveBack, AGiverThatIsKilledIsWaitedForNoLonger) {
  Neighbour giver(Class::kBestEffort, &silent);
  const ScarceMemory scarce(1);
  cudasched_configure("give_back_ms", "60000");
  CUdeviceptr pointer = 0;
  std::thread killer([&] {
    EXPECT_TRUE(eventually([] { return HookedDriver::instance().table().layout().memory.requests.load() != 0; }));
    giver.kill();
  });
  EXPECT_EQ(allocate_in_a_latency_region(pointer), CUDA_SUCCESS) << "what it held went with it";
  killer.join();
  EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
}

// ---- this process gives

struct Cache {
  std::atomic<int> emptied{0};
  std::function<void()> also;
};

void empty(std::int32_t, void* context) {
  auto& cache = *static_cast<Cache*>(context);
  if (cache.also) cache.also();
  cache.emptied.fetch_add(1);
}

class Gives : public ::testing::Test {
 protected:
  static bool someone_gives(arbiter::Table& table) {
    for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
      if (table.memory(slot).gives.load() != 0) return true;
    }
    return false;
  }

  static void become_best_effort(const Program& program) {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    ASSERT_EQ(program.launch(1), CUDA_SUCCESS);
    ASSERT_EQ(program.synchronize(), CUDA_SUCCESS);
  }
  // It has asked, and this process has answered.
  static bool answers(int own, const Neighbour& asker) {
    const auto asked = asker.words().request.load();
    return asked != 0 && HookedDriver::instance().table().memory(own).answered.load() == asked;
  }
};

TEST_F(Gives, ACacheIsEmptiedWhenALatencyClientAsksAndOnceForEachRequest) {
  const Program program;
  become_best_effort(program);
  if (HookedDriver::instance().table().latency_clients() != 0) GTEST_SKIP() << "this process has latency work";
  static Cache cache;
  CUdeviceptr kept = 0;
  ASSERT_EQ(allocate(kept, 7 * kMiB), CUDA_SUCCESS);
  cache.also = [&] {
    EXPECT_EQ(free_memory(kept), CUDA_SUCCESS);
    CUcontext current = nullptr;
    EXPECT_EQ(driver::table().cuCtxGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, program.context());
  };
  ASSERT_EQ(cudasched_use_cache(&empty, &cache), CUDASCHED_OK);
  auto& table = HookedDriver::instance().table();
  int own = -1;
  for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
    if (table.slot(slot).occupied.load() != 0 && table.slot(slot).client_class.load() == 2) own = slot;
  }
  ASSERT_GE(own, 0);
  ASSERT_TRUE(eventually([&] { return table.memory(own).gives.load() == 1; }));
  {
    const Neighbour asker(Class::kLatency, &ask);
    EXPECT_TRUE(eventually([&] { return answers(own, asker); }));
    EXPECT_EQ(cache.emptied.load(), 1);
    EXPECT_EQ(table.memory(own).given_bytes.load(), 7 * kMiB);
    // What was freed is reserved: a best-effort allocation waits until the request is over.
    std::atomic<bool> done{false};
    std::thread waits([&] {
      program.use_on_this_thread();
      const InRegion region(CUDASCHED_BEST_EFFORT);
      CUdeviceptr pointer = 0;
      EXPECT_EQ(allocate(pointer, kMiB), CUDA_SUCCESS);
      done.store(true);
      EXPECT_EQ(free_memory(pointer), CUDA_SUCCESS);
    });
    std::this_thread::sleep_for(30ms);
    EXPECT_FALSE(done.load());
    CUdeviceptr normal = 0;
    EXPECT_EQ(allocate(normal, kMiB), CUDA_SUCCESS) << "other classes do not wait";
    EXPECT_EQ(free_memory(normal), CUDA_SUCCESS);
    const_cast<Neighbour&>(asker).kill();  // in the middle of its request
    waits.join();
    EXPECT_TRUE(done.load());
  }
  // While a stream captures, it says no at once.
  cache.also = nullptr;
  const std::uint64_t refusals = table.memory(own).refusals.load();
  const int emptied = cache.emptied.load();
  ASSERT_EQ(call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2")(program.stream(),
                                                                                     CU_STREAM_CAPTURE_MODE_GLOBAL),
            CUDA_SUCCESS);
  {
    const Neighbour asker(Class::kLatency, &ask);
    EXPECT_TRUE(eventually([&] { return answers(own, asker); }));
  }
  CUgraph graph = nullptr;
  EXPECT_EQ(call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture")(program.stream(), &graph), CUDA_SUCCESS);
  EXPECT_GT(table.memory(own).refusals.load(), refusals);
  EXPECT_EQ(cache.emptied.load(), emptied);
  cudasched_use_cache(nullptr, nullptr);
}

// A pool that does not tell at once leaves the shown sizes as they are.
TEST(MemoryPools, AreSummedAndTrimmedUntilTheyAreRemoved) {
  struct Fake {
    cudasched_pool_sizes sizes;
    int trimmed = 0;
    bool busy = false;
  };
  Fake first{.sizes = {10, 4, 6}};
  Fake second{.sizes = {20, 19, 1}};
  const auto described = [](int device, Fake& fake) {
    return cudasched_pool{device, &fake, [](void* pool) { ++static_cast<Fake*>(pool)->trimmed; },
                          [](void* pool, cudasched_pool_sizes* sizes) {
                            *sizes = static_cast<Fake*>(pool)->sizes;
                            return static_cast<Fake*>(pool)->busy ? 0 : 1;
                          }};
  };
  runtime::Pools pools;
  EXPECT_FALSE(pools.any(0));
  for (Fake* const fake : {&first, &second}) pools.add(described(0, *fake));
  EXPECT_THROW(pools.add(described(runtime::Holdings::kDevices, first)), ConfigError);
  EXPECT_TRUE(pools.any(0));
  EXPECT_FALSE(pools.any(1));
  const auto read = pools.read(0);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->reserved, 30U);
  EXPECT_EQ(read->allocated, 23U);
  EXPECT_EQ(read->largest_free, 6U);
  second.busy = true;
  EXPECT_FALSE(pools.read(0).has_value());
  pools.trim(1);
  pools.trim(0);
  pools.remove(&second);
  pools.trim(0);
  EXPECT_EQ(first.trimmed, 2);
  EXPECT_EQ(second.trimmed, 1);
  EXPECT_EQ(pools.read(0)->reserved, 10U);
  pools.remove(&second);
  pools.remove(&first);
  EXPECT_FALSE(pools.any(0));
}

// Else every latency client would wait for its answers until its time is over. In a process of its own, where nothing
// is scheduled afterwards.
TEST_F(Gives, WhereSchedulingWasTurnedOffNothingIsGiven) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HookedDriver::instance();  // its directory is removed, and the other process's in it
  const auto fails = [] {
    const Program program;
    become_best_effort(program);
    static Cache cache;
    cudasched_use_cache(&empty, &cache);
    auto& table = HookedDriver::instance().table();
    const auto gives = [&] { return someone_gives(table); };
    if (!eventually(gives)) _exit(2);
    runtime::engine().lifecycle().fail("as a test wants it");
    table.wake_for_memory();
    _exit(eventually([&] { return !gives(); }) ? 0 : 3);
  };
  EXPECT_EXIT(fails(), ::testing::ExitedWithCode(0), "as a test wants it");
}

// The thread that gives is started again at the next tick. In a process of its own, where none runs yet.
TEST_F(Gives, WhereThereWasNoThreadForItThereIsOneLater) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HookedDriver::instance();  // its directory is removed, and the other process's in it
  const auto starts_late = [] {
    const Program program;
    become_best_effort(program);
    pthread_attr_t before;
    pthread_attr_t none;  // whose stack no machine has the addresses for
    if (pthread_getattr_default_np(&before) != 0 || pthread_attr_init(&none) != 0 ||
        pthread_attr_setstacksize(&none, std::size_t{1} << 50) != 0 || pthread_setattr_default_np(&none) != 0) {
      _exit(2);
    }
    static Cache cache;
    cudasched_use_cache(&empty, &cache);
    auto& table = HookedDriver::instance().table();
    const auto gives = [&] { return someone_gives(table); };
    if (gives() || pthread_setattr_default_np(&before) != 0) _exit(3);
    _exit(eventually(gives) ? 0 : 4);
  };
  EXPECT_EXIT(starts_late(), ::testing::ExitedWithCode(0), "");
}

// What the cache's frees wait for stands behind the gate, which latency work keeps closed. Other frees of best effort
// wait.
TEST_F(Gives, TheDrainsOfGivingPassTheClosedGate) {
  const Program program;
  become_best_effort(program);
  auto& table = HookedDriver::instance().table();
  if (table.latency_clients() != 0) GTEST_SKIP() << "this process has latency work";
  CUdeviceptr kept = 0;
  CUdeviceptr another = 0;
  ASSERT_EQ(allocate(kept, 7 * kMiB), CUDA_SUCCESS);
  ASSERT_EQ(allocate(another, kMiB), CUDA_SUCCESS);
  Neighbour active(Class::kLatency, [](arbiter::Table& shared, int slot) { shared.set_active(slot, now_ns()); });
  ASSERT_TRUE(eventually([&] { return table.active() != 0; }));
  const std::uint64_t before = program.ran();
  constexpr std::uint64_t kLaunches = 20;
  std::atomic<bool> freed{false};
  std::thread frees([&] {
    program.use_on_this_thread();
    const InRegion region(CUDASCHED_BEST_EFFORT);
    for (std::uint64_t i = 0; i < kLaunches; ++i) EXPECT_EQ(program.launch(i + 2), CUDA_SUCCESS);
    EXPECT_EQ(free_memory(another), CUDA_SUCCESS);
    freed.store(true);
  });
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(freed.load());
  static Cache cache;
  static std::uint64_t ran_when_freed = 0;
  cache.also = [&] {
    EXPECT_EQ(free_memory(kept), CUDA_SUCCESS);
    ran_when_freed = program.ran();
  };
  ASSERT_EQ(cudasched_use_cache(&empty, &cache), CUDASCHED_OK);
  const Neighbour asker(Class::kLatency, &ask);
  EXPECT_TRUE(eventually([&] { return cache.emptied.load() >= 1; }));
  EXPECT_EQ(ran_when_freed - before, kLaunches) << "the free waited for what was launched before it";
  frees.join();
  EXPECT_NE(table.active(), 0u) << "nobody but the drain opened the gate";
  cudasched_use_cache(nullptr, nullptr);
}

}  // namespace
}  // namespace cudasched
