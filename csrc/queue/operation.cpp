#include "queue/operation.hpp"

#include "driver/barrier.hpp"
#include "driver/driver.hpp"

namespace cudasched::queue {
namespace {

CUresult launch(const Operation::Launch& launch, CUstream stream) {
  const predict::Launch& what = launch.what;
  auto* const function = static_cast<CUfunction>(const_cast<void*>(what.function));
  auto** const parameters = const_cast<void**>(what.parameters);
  auto** const extra = const_cast<void**>(what.extra);
  if (launch.attribute_count != 0) {
    CUlaunchConfig config{};
    config.gridDimX = what.grid[0];
    config.gridDimY = what.grid[1];
    config.gridDimZ = what.grid[2];
    config.blockDimX = what.block[0];
    config.blockDimY = what.block[1];
    config.blockDimZ = what.block[2];
    config.sharedMemBytes = what.dynamic_shared_bytes;
    config.hStream = stream;
    config.attrs = launch.attributes;
    config.numAttrs = launch.attribute_count;
    return driver::table().cuLaunchKernelEx.legacy(&config, function, parameters, extra);
  }
  if (launch.cooperative) {
    return driver::table().cuLaunchCooperativeKernel.legacy(function, what.grid[0], what.grid[1], what.grid[2],
                                                            what.block[0], what.block[1], what.block[2],
                                                            what.dynamic_shared_bytes, stream, parameters);
  }
  return driver::table().cuLaunchKernel.legacy(function, what.grid[0], what.grid[1], what.grid[2], what.block[0],
                                               what.block[1], what.block[2], what.dynamic_shared_bytes, stream,
                                               parameters, extra);
}

CUresult fill_memory(const Operation::Fill& fill, CUstream stream) {
  switch (fill.element_bytes) {
    case 1:
      return driver::table().cuMemsetD8Async(fill.to, static_cast<unsigned char>(fill.value), fill.width, stream);
    case 2:
      return driver::table().cuMemsetD16Async(fill.to, static_cast<unsigned short>(fill.value), fill.width, stream);
    default:
      return driver::table().cuMemsetD32Async(fill.to, fill.value, fill.width, stream);
  }
}

CUresult fill_rows(const Operation::Fill& fill, CUstream stream) {
  switch (fill.element_bytes) {
    case 1:
      return driver::table().cuMemsetD2D8Async(fill.to, fill.pitch_bytes, static_cast<unsigned char>(fill.value),
                                               fill.width, fill.rows, stream);
    case 2:
      return driver::table().cuMemsetD2D16Async(fill.to, fill.pitch_bytes, static_cast<unsigned short>(fill.value),
                                                fill.width, fill.rows, stream);
    default:
      return driver::table().cuMemsetD2D32Async(fill.to, fill.pitch_bytes, fill.value, fill.width, fill.rows, stream);
  }
}

CUresult copy_memory(const Operation::Copy& copy, CUstream stream) {
  switch (copy.direction) {
    case Operation::Direction::kToDevice:
      return driver::table().cuMemcpyHtoDAsync(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes, stream);
    case Operation::Direction::kToHost:
      return driver::table().cuMemcpyDtoHAsync(reinterpret_cast<void*>(copy.to), copy.from, copy.bytes, stream);
    case Operation::Direction::kOnDevice:
      return driver::table().cuMemcpyDtoDAsync(copy.to, copy.from, copy.bytes, stream);
    case Operation::Direction::kAny:
      break;
  }
  return driver::table().cuMemcpyAsync(copy.to, copy.from, copy.bytes, stream);
}

}  // namespace

CUresult Operation::execute() const {
  const driver::Crossing inside;
  if (!inside) return CUDA_ERROR_DEINITIALIZED;
  switch (kind) {
    case Kind::kKernel:
      return queue::launch(launch, stream);
    case Kind::kGraph:
      return driver::table().cuGraphLaunch.legacy(graph(), stream);
    case Kind::kFill:
      return fill_memory(fill, stream);
    case Kind::kFillRows:
      return fill_rows(fill, stream);
    case Kind::kCopy:
      return copy_memory(copy, stream);
    case Kind::kRecord:
      return event.flags == CU_EVENT_RECORD_DEFAULT
                 ? driver::table().cuEventRecord(event.event, stream)
                 : driver::table().cuEventRecordWithFlags(event.event, stream, event.flags);
    case Kind::kWait:
      return driver::table().cuStreamWaitEvent(stream, event.event, event.flags);
    case Kind::kHostFunction:
      return driver::table().cuLaunchHostFunc(stream, host.function, host.data);
    case Kind::kDestroyEvent:
      return driver::table().cuEventDestroy(event.event);
    case Kind::kFreeMemory:
      return driver::table().cuMemFreeAsync.legacy(memory.address, stream);
    case Kind::kChange:
      return CUDA_SUCCESS;  // no call of the driver's
  }
  return CUDA_ERROR_UNKNOWN;
}

bool is_sticky(CUresult status) noexcept {
  switch (status) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

}  // namespace cudasched::queue
