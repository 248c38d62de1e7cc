// The queues of the process: which of them hold what a call depends on.
#include "hooked_queue.hpp"

namespace cudasched::hook {
namespace {

TEST_F(HookedQueue, WhoChangesAGraphKnowsWhatIsQueuedOfItAndWaitsForThatAlone) {
  const CUgraphExec other = handle<CUgraphExec>(0x6bad);
  make_graph(kGraph);
  make_graph(other);
  EXPECT_FALSE(router().has_queued(kGraph));
  queue().latency_came();
  block();
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(launch());
  const Position passed = queue().passed();
  EXPECT_TRUE(router().has_queued(kGraph));
  EXPECT_EQ(router().queue_of(kGraph), &queue());
  EXPECT_FALSE(router().has_queued(other));
  EXPECT_EQ(router().queue_of(other), nullptr);
  router().drain_changed(caller_, kGraph);
  EXPECT_EQ(queue().passed(), passed + 2);  // what is behind its launch waits on
  EXPECT_FALSE(router().has_queued(kGraph));
  driver::registry().forget(other);
  EXPECT_TRUE(router().has_queued(other));  // not plain: it may wait for anything
  finish();
}

TEST_F(TwoDevices, AStreamsOperationsAreThoseOfItsOwnDevice) {
  other_gate_.close();
  go_there();
  EXPECT_FALSE(router().has_queued(kStreamThere));
  other_.kernel_launched(plain(kStreamThere));
  Call there = plain(kStreamThere);
  there.site = here;
  ASSERT_TRUE(other_.push_kernel(there));
  EXPECT_TRUE(router().has_queued(kStreamThere));
  EXPECT_TRUE(router().has_queued(CU_STREAM_LEGACY));  // the current context's, which orders blocking streams
  EXPECT_FALSE(router().has_queued(kStream));
  FakeDriver::device_now() = 0;
  EXPECT_FALSE(router().has_queued(CU_STREAM_LEGACY));
  EXPECT_FALSE(router().empty());
}

}  // namespace
}  // namespace cudasched::hook
