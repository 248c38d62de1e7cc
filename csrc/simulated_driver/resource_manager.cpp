#include "simulated_driver/resource_manager.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "preempt/wire.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

namespace wire = preempt::wire;

constexpr std::uint32_t kClient = 0xC1D0'0001;
constexpr std::uint32_t kDevice = 0x5C00'0001;  // and so on
constexpr std::uint32_t kFirstGroup = 0x5C00'0100;
constexpr std::uint32_t kOwnUs = 2'048;
constexpr std::uint32_t kFirstUs = 1'024;                 // until libcuda sets its own for kernels,
constexpr std::int64_t kSetsOwnAfterNs = 100 * kNsPerMs;  // so long after the group was made
// Of the kernel module (nvstatuscodes.h).
constexpr std::uint32_t kInsufficientPermissions = 0x1B, kInvalidArgument = 0x1F, kInvalidClient = 0x23,
                        kInvalidObject = 0x33, kNotSupported = 0x56;

struct ChannelGroup {
  std::uint32_t engine = 0;
  int device = 0;
  int slot = 0;
  std::uint64_t us = kFirstUs;
  std::int64_t made_ns = 0;
  bool own_is_set = false;
};

struct ResourceManager {
  std::mutex mutex;
  int descriptor = -1;
  std::uint32_t next = kFirstGroup;
  std::map<std::uint32_t, ChannelGroup> groups;
};

ResourceManager& manager() {
  static auto* const instance = new ResourceManager;  // never destroyed: contexts end at exit, too
  return *instance;
}

std::string_view mode() {
  static const char* const value = std::getenv("CUDASCHED_SIM_TIME_SLICES");
  return value == nullptr || *value == '\0' ? std::string_view("on") : std::string_view(value);
}

bool copies(const ChannelGroup& group) { return group.engine == wire::kFirstCopy; }

// Copies are not time-sliced (simulate/device.hpp).
void set_slice(ChannelGroup& group, std::uint64_t us) {
  group.us = us;
  if (copies(group)) return;
  SharedDevice::Guard device(driver().gpus[static_cast<std::size_t>(group.device)]->shared);
  device->set_slice(group.slot, static_cast<std::int64_t>(us) * kNsPerUs);
}

std::uint32_t control(ResourceManager& rm, int descriptor, const wire::Control& call) {
  if (call.client != kClient || descriptor != rm.descriptor) return kInvalidClient;
  const auto found = rm.groups.find(call.object);
  if (found == rm.groups.end()) return kInvalidObject;
  if (mode() == "unsupported") return kNotSupported;
  auto* const slice = reinterpret_cast<wire::TimeSlice*>(call.parameters);
  if (slice == nullptr || call.parameters_size != sizeof *slice) return kInvalidArgument;
  ChannelGroup& group = found->second;
  if (!copies(group) && !group.own_is_set && now_ns() - group.made_ns >= kSetsOwnAfterNs) {
    group.own_is_set = true;
    set_slice(group, kOwnUs);
  }
  if (call.command == wire::kGetTimeSlice) {
    slice->us = group.us;
    return 0;
  }
  if (call.command != wire::kSetTimeSlice) return kNotSupported;
  if (mode() == "refused" || (mode() == "copies refused" && copies(group))) return kInsufficientPermissions;
  if (slice->us == 0) return kInvalidArgument;
  set_slice(group, slice->us);
  return 0;
}

void make_group(const Context& context, std::uint32_t object, std::uint32_t engine) {
  ResourceManager& rm = manager();
  {
    const std::scoped_lock lock(rm.mutex);
    rm.groups[object] = {.engine = engine, .device = context.device, .slot = context.slot, .made_ns = now_ns()};
  }
  wire::GroupParameters parameters{.error = 0, .ecc_error = 0, .address_space = 0, .engine = engine};
  wire::AllocWithRights call{.client = kClient,
                             .parent = kDevice + static_cast<std::uint32_t>(context.device),
                             .object = object,
                             .object_class = wire::kChannelGroup,
                             .parameters = reinterpret_cast<std::uintptr_t>(&parameters),
                             .rights = 0,
                             .parameters_size = sizeof parameters,
                             .flags = 0,
                             .status = 0,
                             .padding = 0};
  const std::uint32_t size = mode() == "unknown" ? sizeof call + 8 : sizeof call;
  ioctl(rm.descriptor, wire::request(wire::kAlloc, size), &call);
}

void free_group(const Context& context, std::uint32_t object) {
  ResourceManager& rm = manager();
  wire::Free call{
      .client = kClient, .parent = kDevice + static_cast<std::uint32_t>(context.device), .object = object, .status = 0};
  if (ioctl(rm.descriptor, wire::request(wire::kFree, sizeof call), &call) == 0) return;
  const std::scoped_lock lock(rm.mutex);
  rm.groups.erase(object);
}

}  // namespace

// One for kernels, and one for copies behind it.
void make_channel_groups(Context& context) {
  ResourceManager& rm = manager();
  {
    const std::scoped_lock lock(rm.mutex);
    if (rm.descriptor < 0) rm.descriptor = open("/dev/null", O_RDWR | O_CLOEXEC);
    context.group = std::exchange(rm.next, rm.next + 2);
  }
  make_group(context, context.group, wire::kFirstGraphics);
  make_group(context, context.group + 1, wire::kFirstCopy);
  if (mode() == "closed") close(rm.descriptor);
}

void free_channel_groups(Context& context) {
  free_group(context, context.group);
  free_group(context, context.group + 1);
}

}  // namespace cudasched::simulated_driver

extern "C" int cudasched_simulated_ioctl(int descriptor, unsigned long request, ...) {
  using namespace cudasched::simulated_driver;
  std::va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  ResourceManager& rm = manager();
  if (mode() == "forbidden" && wire::number_of(request) == wire::kControl) {
    errno = EPERM;
    return -1;
  }
  const std::scoped_lock lock(rm.mutex);
  if (wire::number_of(request) == wire::kControl) {
    auto* const call = static_cast<wire::Control*>(argument);
    call->status = control(rm, descriptor, *call);
  }
  if (wire::number_of(request) == wire::kFree) rm.groups.erase(static_cast<wire::Free*>(argument)->object);
  return 0;  // the allocated object is there by then
}
