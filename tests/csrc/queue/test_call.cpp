// What a launch's attributes say of it (csrc/queue/call.hpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "fake_driver.hpp"
#include "queue/call.hpp"

namespace cudasched::queue {
namespace {

using testing::ElementsAre;

Call with(const std::vector<CUlaunchAttribute>& attributes) {
  Call call;
  call.read_attributes(attributes.data(), static_cast<unsigned>(attributes.size()));
  return call;
}

CUlaunchAttribute recording(CUevent event, int flags = 0) {
  CUlaunchAttribute result = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT);
  result.value.programmaticEvent.event = event;
  result.value.programmaticEvent.flags = flags;
  return result;
}

const CUlaunchAttribute kOverlap = attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1);
const CUlaunchAttribute kUnknown = attribute(200);

TEST(Call, WithoutAttributesMayBeTimedAndDeferred) {
  const Call call;
  EXPECT_TRUE(call.meaning.known);
  EXPECT_TRUE(call.may_time());
  EXPECT_THAT(call.cluster, ElementsAre(1, 1, 1));
}

TEST(Call, TheClusterAndWhatOverlapsAreRead) {
  CUlaunchAttribute cluster = attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  cluster.value.clusterDim = {2, 4, 1};
  const Call call = with({cluster, kOverlap, attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1)});
  EXPECT_THAT(call.cluster, ElementsAre(2, 4, 1));
  EXPECT_TRUE(call.meaning.overlaps_predecessor);
  EXPECT_FALSE(call.may_time());
  EXPECT_TRUE(call.meaning.cooperative);
  EXPECT_TRUE(call.meaning.known);
  EXPECT_TRUE(with({attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 0)}).may_time());
}

// No event may go before an overlapping launch, deferred or not.
TEST(Call, WhatStandsBehindAnUnknownAttributeIsReadToo) {
  const Call call = with({kUnknown, kOverlap});
  EXPECT_FALSE(call.meaning.known);
  EXPECT_FALSE(call.may_time());
}

TEST(Call, MoreAttributesThanCanBeCopiedAreNotDeferred) {
  std::vector<CUlaunchAttribute> many(Attributes::kMost, attribute(CU_LAUNCH_ATTRIBUTE_IGNORE));
  EXPECT_TRUE(with(many).meaning.known);
  many.push_back(kOverlap);
  EXPECT_FALSE(with(many).meaning.known);
  EXPECT_FALSE(with(many).may_time());
  Call nowhere;
  nowhere.read_attributes(nullptr, 1);
  EXPECT_FALSE(nowhere.meaning.known);
}

TEST(Call, TheEventsThatItRecordsAreRead) {
  const Call two = with({recording(kEvent), recording(kOtherEvent)});
  EXPECT_TRUE(two.meaning.known);
  ASSERT_EQ(two.meaning.event_count, 2);
  EXPECT_THAT(two.meaning.events, ElementsAre(kEvent, kOtherEvent));
  EXPECT_FALSE(with({recording(kEvent), recording(kOtherEvent), recording(kEvent)}).meaning.known);
  EXPECT_FALSE(with({recording(nullptr)}).meaning.known);
  EXPECT_FALSE(with({recording(kEvent, CU_EVENT_RECORD_EXTERNAL)}).meaning.known);
}

TEST(Call, AttributesOfOtherValuesHaveAnotherHash) {
  const std::uint64_t none = Call().meaning.hash;
  const std::uint64_t low = with({attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, -3)}).meaning.hash;
  const std::uint64_t high = with({attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, -5)}).meaning.hash;
  EXPECT_NE(low, none);
  EXPECT_NE(low, high);
  EXPECT_EQ(low, with({attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, -3)}).meaning.hash);
}

}  // namespace
}  // namespace cudasched::queue
