// What is learned of channel groups from libcuda's calls of the kernel module.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "preempt/groups.hpp"
#include "preempt/wire.hpp"

namespace cudasched::preempt {
namespace {

class GroupsTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kEngine = wire::kFirstGraphics;

  GroupsTest() { file_ = open("/dev/null", O_RDWR | O_CLOEXEC); }
  ~GroupsTest() override { close(file_); }

  wire::AllocWithRights alloc_of(std::uint32_t handle, std::uint32_t object_class = wire::kChannelGroup) {
    wire::AllocWithRights call{};
    call.client = 1;
    call.parent = 2;
    call.object = handle;
    call.object_class = object_class;
    call.parameters = reinterpret_cast<std::uintptr_t>(&parameters_);
    return call;
  }
  void allocate(std::uint32_t handle) {
    auto call = alloc_of(handle);
    groups_.note(file_, wire::request(wire::kAlloc, sizeof call), &call, 0);
  }
  void release(std::uint32_t client, std::uint32_t object, std::uint32_t status = 0) {
    wire::Free call{.client = client, .parent = 2, .object = object, .status = 0};
    groups_.note_before(wire::request(wire::kFree, sizeof call), &call);
    call.status = status;
    groups_.note(file_, wire::request(wire::kFree, sizeof call), &call, 0);
  }
  std::vector<std::uint32_t> handles() const {
    std::array<Group, Groups::kMost> read;
    std::vector<std::uint32_t> found;
    for (std::size_t i = 0, count = groups_.read(read); i < count; ++i) found.push_back(read[i].handle);
    return found;
  }

  int file_ = -1;
  wire::GroupParameters parameters_{0, 0, 0, kEngine};
  Groups groups_;
};

using Handles = std::vector<std::uint32_t>;

TEST_F(GroupsTest, OneIsKnownFromItsAllocationToItsEndThatOfItsDeviceOrOfItsClient) {
  for (const std::uint32_t ended : {10U, 2U, 1U}) {
    allocate(10);
    EXPECT_EQ(handles(), Handles{10});
    release(9, ended);  // another client's
    EXPECT_EQ(handles(), Handles{10});
    release(1, ended, /*status=*/0x23);  // refused
    EXPECT_EQ(handles(), Handles{10});
    release(1, ended);
    EXPECT_EQ(handles(), Handles{});
  }
  EXPECT_EQ(groups_.made(), 3U);
}

// The kernel module does not know it any more by the time that the call returns.
TEST_F(GroupsTest, OneThatIsBeingFreedIsNotThereAndIsAgainWhereThatIsRefused) {
  allocate(10);
  wire::Free call{.client = 1, .parent = 2, .object = 10, .status = 0};
  groups_.note_before(wire::request(wire::kFree, sizeof call), &call);
  EXPECT_EQ(handles(), Handles{});
  groups_.note(file_, wire::request(wire::kFree, sizeof call), &call, -1);
  EXPECT_EQ(handles(), Handles{10});
}

TEST_F(GroupsTest, BothLayoutsAndTheWrappedCallAreRead) {
  wire::Alloc old{.client = 1,
                  .parent = 2,
                  .object = 20,
                  .object_class = wire::kChannelGroup,
                  .parameters = reinterpret_cast<std::uintptr_t>(&parameters_),
                  .parameters_size = 16,
                  .status = 0};
  groups_.note(file_, wire::request(wire::kAlloc, sizeof old), &old, 0);
  auto call = alloc_of(21);
  wire::Transfer wrapped{
      .number = wire::kAlloc, .size = sizeof call, .argument = reinterpret_cast<std::uintptr_t>(&call)};
  groups_.note(file_, wire::request(wire::kTransfer, sizeof wrapped), &wrapped, 0);
  EXPECT_EQ(handles(), (Handles{20, 21}));
}

TEST_F(GroupsTest, WhatIsNoGroupOfKernelsWasRefusedOrIsNotOfTheDriverIsLeftOut) {
  auto other = alloc_of(30, 0xC86F);
  groups_.note(file_, wire::request(wire::kAlloc, sizeof other), &other, 0);
  auto refused = alloc_of(31);
  refused.status = 0x1B;
  groups_.note(file_, wire::request(wire::kAlloc, sizeof refused), &refused, 0);
  auto failed = alloc_of(32);
  groups_.note(file_, wire::request(wire::kAlloc, sizeof failed), &failed, -1);
  auto without = alloc_of(33);
  without.parameters = 0;
  groups_.note(file_, wire::request(wire::kAlloc, sizeof without), &without, 0);
  auto foreign = alloc_of(34);
  groups_.note(file_, wire::request(wire::kAlloc, sizeof foreign) ^ (1UL << 8), &foreign, 0);
  auto longer = alloc_of(35);
  groups_.note(file_, wire::request(wire::kAlloc, sizeof longer + 8), &longer, 0);
  groups_.note(file_, wire::request(wire::kAlloc, sizeof longer), nullptr, 0);
  for (const std::uint32_t engine : {0U, wire::kLastCopy + 1, 64U}) {
    parameters_.engine = engine;
    allocate(36 + engine);
  }
  EXPECT_EQ(handles(), Handles{});
  EXPECT_EQ(groups_.made(), 0U);
}

TEST_F(GroupsTest, MoreThanThereIsRoomForAreCounted) {
  for (std::uint32_t i = 0; i < Groups::kMost + 3; ++i) allocate(100 + i);
  EXPECT_EQ(handles().size(), Groups::kMost);
  EXPECT_EQ(groups_.overflows(), 3U);
  release(1, 1);
  allocate(99);
  EXPECT_EQ(handles(), Handles{99});
}

TEST_F(GroupsTest, ThoseThatCopyAreToldApartAndLeaveRoomForContexts) {
  allocate(98);
  parameters_.engine = wire::kFirstCopy;
  allocate(99);
  std::array<Group, Groups::kMost> read;
  ASSERT_EQ(groups_.read(read), 2U);
  EXPECT_FALSE(read[0].copies);
  EXPECT_TRUE(read[1].copies);
  parameters_.engine = wire::kLastCopy;
  for (std::uint32_t i = 0; i < Groups::kMost; ++i) allocate(100 + i);
  EXPECT_EQ(handles().size(), Groups::kMost - Groups::kMostContexts);
  EXPECT_EQ(groups_.overflows(), 0U);
  parameters_.engine = kEngine;
  for (std::uint32_t i = 0; i < Groups::kMostContexts; ++i) allocate(1'000 + i);
  EXPECT_EQ(handles().size(), Groups::kMost);
  EXPECT_EQ(groups_.overflows(), 0U);
}

TEST_F(GroupsTest, AFileThatWasClosedIsAnother) {
  const OpenFile before = OpenFile::of(file_);
  EXPECT_EQ(before, OpenFile::of(file_));
  const int zero = open("/dev/zero", O_RDWR | O_CLOEXEC);
  dup2(zero, file_);
  close(zero);
  EXPECT_NE(before, OpenFile::of(file_));
  EXPECT_EQ(OpenFile::of(-1).descriptor, -1);
}

// Random calls, some of them with nonsense in every word: what is known is what a model of the rules knows.
TEST_F(GroupsTest, AnyCallsLeaveWhatTheRulesSay) {
  std::mt19937 random(7);
  const auto any = [&](std::uint32_t bound) { return static_cast<std::uint32_t>(random() % bound); };
  for (int round = 0; round < 200; ++round) {
    groups_.reset_in_child();
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> model;  // client and handle: device
    for (int step = 0; step < 100; ++step) {
      const std::uint32_t client = 1 + any(3);
      const std::uint32_t device = 10 + any(2);
      const std::uint32_t handle = 100 + any(200);
      const std::uint32_t status = any(4) == 0 ? 0x1B : 0;
      const int result = any(8) == 0 ? -1 : 0;
      if (any(3) != 0) {
        parameters_.engine = any(24);
        auto call = alloc_of(handle, any(4) == 0 ? random() : wire::kChannelGroup);
        call.client = client;
        call.parent = device;
        call.status = status;
        if (model.contains({client, handle})) continue;  // no handle is given out twice
        groups_.note(file_, wire::request(wire::kAlloc, sizeof call), &call, result);
        const bool is_known = parameters_.engine >= 1 && parameters_.engine <= 18;
        if (call.object_class == wire::kChannelGroup && status == 0 && result == 0 && is_known) {
          model[{client, handle}] = device;
        }
      } else {
        const std::uint32_t object = any(6) == 0 ? client : any(6) == 0 ? device : handle;
        wire::Free call{.client = client, .parent = 0, .object = object, .status = status};
        groups_.note(file_, wire::request(wire::kFree, sizeof call), &call, result);
        if (status != 0 || result != 0) continue;
        std::erase_if(model, [&](const auto& known) {
          return known.first.first == client &&
                 (object == client || object == known.first.second || object == known.second);
        });
      }
    }
    std::array<Group, Groups::kMost> read;
    const std::size_t count = groups_.read(read);
    ASSERT_EQ(count, model.size());
    for (std::size_t i = 0; i < count; ++i) EXPECT_TRUE(model.contains({read[i].client, read[i].handle}));
  }
}

}  // namespace
}  // namespace cudasched::preempt
