// The part of the ioctl(2) protocol between libcuda and NVIDIA's kernel module that this room uses: the resource
// manager's calls that allocate, free and control objects. Layouts and numbers as in NVIDIA's open kernel modules,
// releases 535 to 595 (nvos.h, ctrla06cgpfifo.h); x86-64.
//
// An object is named by the handle of its client and its own. A channel group owns the channels of one context for one
// engine; the hardware gives time slices to channel groups.
#pragma once

#include <cstdint>

namespace cudasched::preempt::wire {

// NV_ESC_RM_FREE, _CONTROL, _ALLOC; a call wrapped for 32-bit programs and large arguments is NV_ESC_IOCTL_XFER_CMD.
inline constexpr std::uint32_t kFree = 0x29;
inline constexpr std::uint32_t kControl = 0x2A;
inline constexpr std::uint32_t kAlloc = 0x2B;
inline constexpr std::uint32_t kTransfer = 211;

inline constexpr std::uint32_t kChannelGroup = 0xA06C;      // KEPLER_CHANNEL_GROUP_A
inline constexpr std::uint32_t kSetTimeSlice = 0xA06C0103;  // NVA06C_CTRL_CMD_SET_TIMESLICE
inline constexpr std::uint32_t kGetTimeSlice = 0xA06C0104;  // NVA06C_CTRL_CMD_GET_TIMESLICE
inline constexpr std::uint32_t kFirstGraphics = 1;          // NV2080_ENGINE_TYPE_GR0: the engines that run kernels
inline constexpr std::uint32_t kLastGraphics = 8;           // NV2080_ENGINE_TYPE_GR7
inline constexpr std::uint32_t kFirstCopy = 9;              // NV2080_ENGINE_TYPE_COPY0
inline constexpr std::uint32_t kLastCopy = 18;              // NV2080_ENGINE_TYPE_COPY9
inline constexpr std::uint32_t kNoStatus = 0xFFFF'FFFF;

struct Free {  // NVOS00
  std::uint32_t client, parent, object, status;
};

struct Alloc {  // NVOS21
  std::uint32_t client, parent, object, object_class;
  std::uint64_t parameters;
  std::uint32_t parameters_size, status;
};

struct AllocWithRights {  // NVOS64
  std::uint32_t client, parent, object, object_class;
  std::uint64_t parameters, rights;
  std::uint32_t parameters_size, flags, status, padding;
};

struct Control {  // NVOS54
  std::uint32_t client, object, command, flags;
  std::uint64_t parameters;
  std::uint32_t parameters_size, status;
};

struct Transfer {  // nv_ioctl_xfer_t
  std::uint32_t number, size;
  std::uint64_t argument;
};

struct GroupParameters {  // NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS, as far as it is read
  std::uint32_t error, ecc_error, address_space, engine;
};

struct TimeSlice {  // NVA06C_CTRL_TIMESLICE_PARAMS
  std::uint64_t us;
};

static_assert(sizeof(Free) == 16 && sizeof(Alloc) == 32 && sizeof(AllocWithRights) == 48 && sizeof(Control) == 32);
static_assert(sizeof(Transfer) == 16 && sizeof(GroupParameters) == 16 && sizeof(TimeSlice) == 8);

// The request word of ioctl(2): direction both ways, size, the driver's letter, number.
constexpr unsigned long request(std::uint32_t number, std::uint32_t size) noexcept {
  return (3UL << 30) | (static_cast<unsigned long>(size) << 16) | (std::uint32_t{'F'} << 8) | number;
}
constexpr bool is_drivers(unsigned long request) noexcept { return ((request >> 8) & 0xFF) == 'F'; }
constexpr std::uint32_t number_of(unsigned long request) noexcept { return request & 0xFF; }
constexpr std::uint32_t size_of(unsigned long request) noexcept { return (request >> 16) & 0x3FFF; }

}  // namespace cudasched::preempt::wire
