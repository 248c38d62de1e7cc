#include "preempt/groups.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "preempt/wire.hpp"

namespace cudasched::preempt {
namespace {

template <typename Layout>
Layout copy_of(const void* argument) noexcept {
  Layout layout;
  std::memcpy(&layout, argument, sizeof layout);
  return layout;
}

}  // namespace

OpenFile OpenFile::of(int descriptor) noexcept {
  struct stat seen {};
  if (fstat(descriptor, &seen) != 0) return {};
  return {descriptor, seen.st_dev, seen.st_ino, seen.st_rdev};
}

void Groups::note(int descriptor, unsigned long request, const void* argument, int result) noexcept {
  if (result < 0 || argument == nullptr || !wire::is_drivers(request)) return;
  std::uint32_t number = wire::number_of(request);
  std::uint32_t size = wire::size_of(request);
  if (number == wire::kTransfer && size == sizeof(wire::Transfer)) {
    const auto transfer = copy_of<wire::Transfer>(argument);
    number = transfer.number;
    size = transfer.size;
    argument = reinterpret_cast<const void*>(transfer.argument);
    if (argument == nullptr) return;
  }
  if (number == wire::kAlloc && size == sizeof(wire::Alloc)) {
    const auto call = copy_of<wire::Alloc>(argument);
    if (call.object_class != wire::kChannelGroup || call.status != 0) return;
    add(descriptor, call.client, call.parent, call.object, call.parameters);
  } else if (number == wire::kAlloc && size == sizeof(wire::AllocWithRights)) {
    const auto call = copy_of<wire::AllocWithRights>(argument);
    if (call.object_class != wire::kChannelGroup || call.status != 0) return;
    add(descriptor, call.client, call.parent, call.object, call.parameters);
  } else if (number == wire::kFree && size == sizeof(wire::Free)) {
    const auto call = copy_of<wire::Free>(argument);
    if (call.status == 0) remove(call.client, call.object);
  }
}

void Groups::add(int descriptor, std::uint32_t client, std::uint32_t device, std::uint32_t handle,
                 std::uint64_t parameters) noexcept {
  if (parameters == 0) return;
  const auto wanted = copy_of<wire::GroupParameters>(reinterpret_cast<const void*>(parameters));
  if (wanted.engine < wire::kFirstGraphics || wanted.engine > wire::kLastGraphics) return;
  const OpenFile file = OpenFile::of(descriptor);
  const std::scoped_lock lock(lock_);
  ++made_;
  if (count_ == kMost) {
    ++overflows_;
    return;
  }
  groups_[count_++] = {file, client, device, handle, 0};
}

// A group goes with itself, its device or its client.
void Groups::remove(std::uint32_t client, std::uint32_t object) noexcept {
  const std::scoped_lock lock(lock_);
  const auto goes = [&](const Group& group) {
    return group.client == client && (object == client || object == group.handle || object == group.device);
  };
  const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(count_);
  count_ = static_cast<std::size_t>(std::remove_if(groups_.begin(), end, goes) - groups_.begin());
}

std::size_t Groups::read(std::array<Group, kMost>& groups) const noexcept {
  const std::scoped_lock lock(lock_);
  std::copy_n(groups_.begin(), count_, groups.begin());
  return count_;
}

void Groups::set(std::uint32_t client, std::uint32_t handle, std::uint32_t us) noexcept {
  const std::scoped_lock lock(lock_);
  for (std::size_t i = 0; i < count_; ++i) {
    if (groups_[i].client == client && groups_[i].handle == handle) groups_[i].set_us = us;
  }
}

std::uint64_t Groups::made() const noexcept {
  const std::scoped_lock lock(lock_);
  return made_;
}

std::uint64_t Groups::overflows() const noexcept {
  const std::scoped_lock lock(lock_);
  return overflows_;
}

void Groups::reset_in_child() noexcept {
  new (&lock_) SpinLock;  // another thread of the parent may have held it
  count_ = 0;
  made_ = 0;
  overflows_ = 0;
}

}  // namespace cudasched::preempt
