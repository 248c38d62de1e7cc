#include "runtime/gate/copies.hpp"

#include <algorithm>

#include "driver/driver.hpp"

namespace cudasched::runtime {
namespace {

bool is_pinned(CUdeviceptr first, std::size_t bytes) noexcept {
  return driver::memory_type(first) == CU_MEMORYTYPE_HOST &&
         driver::memory_type(first + bytes - 1) == CU_MEMORYTYPE_HOST;
}

}  // namespace

Copies::Direction Copies::direction_of(const queue::Operation::Copy& copy) noexcept {
  if (copy.bytes <= kPieceBytes || copy.direction == Direction::kOnDevice) return Direction::kAny;
  const bool to_device = driver::memory_type(copy.to) == CU_MEMORYTYPE_DEVICE;
  const CUdeviceptr host = to_device ? copy.from : copy.to;
  const CUdeviceptr other = to_device ? copy.to : copy.from;
  if (!is_pinned(host, copy.bytes) || driver::memory_type(other) != CU_MEMORYTYPE_DEVICE) return Direction::kAny;
  return to_device ? Direction::kToDevice : Direction::kToHost;
}

bool Copies::ready(CUcontext context) noexcept {
  if (context_ != nullptr) return context_ == context;
  for (Way& way : ways_) {
    for (CUevent& event : way.events) {
      if (driver::table().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) continue;
      event = nullptr;
      forget(nullptr);
      return false;
    }
  }
  context_ = context;
  return true;
}

std::size_t Copies::next(Direction direction, std::size_t bytes, bool beside_request, std::int64_t now_ns) noexcept {
  Way& way = this->way(direction);
  while (way.outstanding > 0 &&
         driver::table().cuEventQuery(way.events[static_cast<std::size_t>(way.oldest)]) != CUDA_ERROR_NOT_READY) {
    way.oldest = (way.oldest + 1) % kOutstanding;
    --way.outstanding;
    way.since_ns = now_ns;
  }
  if (way.outstanding > 0 && now_ns - way.since_ns > kLongestNs) return bytes;
  if (way.outstanding >= (beside_request ? kBesideRequest : kOutstanding)) return 0;
  return std::min(bytes, kPieceBytes);
}

void Copies::submitted(Direction direction, CUstream stream, std::int64_t now_ns) noexcept {
  Way& way = this->way(direction);
  if (way.outstanding == kOutstanding) return;  // the rest went at once
  CUevent const event = way.events[static_cast<std::size_t>((way.oldest + way.outstanding) % kOutstanding)];
  if (driver::table().cuEventRecord(event, stream) != CUDA_SUCCESS) return;
  if (way.outstanding++ == 0) way.since_ns = now_ns;
}

void Copies::forget(CUcontext context) noexcept {
  if (context != nullptr && context != context_) return;
  for (const Way& way : ways_) {
    for (CUevent const event : way.events) {
      if (event != nullptr) driver::table().cuEventDestroy(event);
    }
  }
  ways_.fill({});
  context_ = nullptr;
}

}  // namespace cudasched::runtime
