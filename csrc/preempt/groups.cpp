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

// A request to the kernel module, taken out of a call that may wrap it; no argument: none of the driver's.
struct Call {
  std::uint32_t number = 0;
  std::uint32_t size = 0;
  const void* argument = nullptr;
};

Call unwrapped(unsigned long request, const void* argument) noexcept {
  if (argument == nullptr || !wire::is_drivers(request)) return {};
  const Call call{wire::number_of(request), wire::size_of(request), argument};
  if (call.number != wire::kTransfer || call.size != sizeof(wire::Transfer)) return call;
  const auto transfer = copy_of<wire::Transfer>(argument);
  return {transfer.number, transfer.size, reinterpret_cast<const void*>(transfer.argument)};
}

bool is_between(std::uint32_t engine, std::uint32_t first, std::uint32_t last) noexcept {
  return engine >= first && engine <= last;
}

bool goes_with(const Group& group, std::uint32_t client, std::uint32_t object) noexcept {
  return group.client == client && (object == client || object == group.handle || object == group.device);
}

}  // namespace

OpenFile OpenFile::of(int descriptor) noexcept {
  struct stat seen {};
  if (fstat(descriptor, &seen) != 0) return {};
  return {descriptor, seen.st_dev, seen.st_ino, seen.st_rdev};
}

void Groups::note_before(unsigned long request, const void* argument) noexcept {
  const Call call = unwrapped(request, argument);
  if (call.argument == nullptr || call.number != wire::kFree || call.size != sizeof(wire::Free)) return;
  const auto free = copy_of<wire::Free>(call.argument);
  const std::scoped_lock lock(lock_);
  for_each_of(free.client, free.object, [](Group& group) { group.ends = true; });
}

void Groups::note(int descriptor, unsigned long request, const void* wrapped, int result) noexcept {
  const auto [number, size, argument] = unwrapped(request, wrapped);
  if (argument == nullptr) return;
  const bool made = result >= 0;
  if (made && number == wire::kAlloc && size == sizeof(wire::Alloc)) {
    const auto call = copy_of<wire::Alloc>(argument);
    if (call.object_class != wire::kChannelGroup || call.status != 0) return;
    add(descriptor, call.client, call.parent, call.object, call.parameters);
  } else if (made && number == wire::kAlloc && size == sizeof(wire::AllocWithRights)) {
    const auto call = copy_of<wire::AllocWithRights>(argument);
    if (call.object_class != wire::kChannelGroup || call.status != 0) return;
    add(descriptor, call.client, call.parent, call.object, call.parameters);
  } else if (number == wire::kFree && size == sizeof(wire::Free)) {
    const auto call = copy_of<wire::Free>(argument);
    const std::scoped_lock lock(lock_);
    if (made && call.status == 0) {
      remove(call.client, call.object);
    } else {
      for_each_of(call.client, call.object, [](Group& group) { group.ends = false; });
    }
  }
}

void Groups::add(int descriptor, std::uint32_t client, std::uint32_t device, std::uint32_t handle,
                 std::uint64_t parameters) noexcept {
  if (parameters == 0) return;
  const auto engine = copy_of<wire::GroupParameters>(reinterpret_cast<const void*>(parameters)).engine;
  const bool copies = is_between(engine, wire::kFirstCopy, wire::kLastCopy);
  if (!copies && !is_between(engine, wire::kFirstGraphics, wire::kLastGraphics)) return;
  const OpenFile file = OpenFile::of(descriptor);
  const std::scoped_lock lock(lock_);
  ++made_;
  if (count_ >= (copies ? kMost - kMostContexts : kMost)) {
    if (!copies) ++overflows_;
    return;
  }
  groups_[count_++] = {file, client, device, handle, copies, false};
}

template <typename Visit>
void Groups::for_each_of(std::uint32_t client, std::uint32_t object, Visit&& visit) noexcept {
  for (std::size_t i = 0; i < count_; ++i) {
    if (goes_with(groups_[i], client, object)) visit(groups_[i]);
  }
}

// The caller holds lock_.
void Groups::remove(std::uint32_t client, std::uint32_t object) noexcept {
  const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(count_);
  const auto goes = [&](const Group& group) { return goes_with(group, client, object); };
  count_ = static_cast<std::size_t>(std::remove_if(groups_.begin(), end, goes) - groups_.begin());
}

std::size_t Groups::read(std::array<Group, kMost>& groups) const noexcept {
  const std::scoped_lock lock(lock_);
  const auto end = std::copy_if(groups_.begin(), groups_.begin() + static_cast<std::ptrdiff_t>(count_), groups.begin(),
                                [](const Group& group) { return !group.ends; });
  return static_cast<std::size_t>(end - groups.begin());
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
  new (&lock_) SpinLock;  // another thread of the parent may have held the lock
  count_ = 0;
  made_ = 0;
  overflows_ = 0;
}

}  // namespace cudasched::preempt
