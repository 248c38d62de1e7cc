#include "queue/operation.hpp"

namespace cudasched::queue {
namespace {

CUresult launch(const Calls& calls, const Operation::Launch& launch, CUstream stream) {
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
    return calls.launch_kernel_ex(&config, function, parameters, extra);
  }
  if (launch.cooperative) {
    return calls.launch_cooperative(function, what.grid[0], what.grid[1], what.grid[2], what.block[0], what.block[1],
                                    what.block[2], what.dynamic_shared_bytes, stream, parameters);
  }
  return calls.launch_kernel(function, what.grid[0], what.grid[1], what.grid[2], what.block[0], what.block[1],
                             what.block[2], what.dynamic_shared_bytes, stream, parameters, extra);
}

CUresult fill_memory(const Calls& calls, const Operation::Fill& fill, CUstream stream) {
  switch (fill.element_bytes) {
    case 1:
      return calls.fill_8(fill.to, static_cast<unsigned char>(fill.value), fill.width, stream);
    case 2:
      return calls.fill_16(fill.to, static_cast<unsigned short>(fill.value), fill.width, stream);
    default:
      return calls.fill_32(fill.to, fill.value, fill.width, stream);
  }
}

CUresult fill_rows(const Calls& calls, const Operation::Fill& fill, CUstream stream) {
  switch (fill.element_bytes) {
    case 1:
      return calls.fill_rows_8(fill.to, fill.pitch_bytes, static_cast<unsigned char>(fill.value), fill.width, fill.rows,
                               stream);
    case 2:
      return calls.fill_rows_16(fill.to, fill.pitch_bytes, static_cast<unsigned short>(fill.value), fill.width,
                                fill.rows, stream);
    default:
      return calls.fill_rows_32(fill.to, fill.pitch_bytes, fill.value, fill.width, fill.rows, stream);
  }
}

CUresult copy_memory(const Calls& calls, const Operation::Copy& copy, CUstream stream) {
  switch (copy.direction) {
    case Operation::Direction::kToDevice:
      return calls.copy_to_device(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes, stream);
    case Operation::Direction::kToHost:
      return calls.copy_to_host(reinterpret_cast<void*>(copy.to), copy.from, copy.bytes, stream);
    case Operation::Direction::kOnDevice:
      return calls.copy_on_device(copy.to, copy.from, copy.bytes, stream);
    case Operation::Direction::kAny:
      break;
  }
  return calls.copy(copy.to, copy.from, copy.bytes, stream);
}

}  // namespace

CUresult Operation::execute(const Calls& calls) const {
  switch (kind) {
    case Kind::kKernel:
      return queue::launch(calls, launch, stream);
    case Kind::kGraph:
      return calls.launch_graph(graph(), stream);
    case Kind::kFill:
      return fill_memory(calls, fill, stream);
    case Kind::kFillRows:
      return fill_rows(calls, fill, stream);
    case Kind::kCopy:
      return copy_memory(calls, copy, stream);
    case Kind::kRecord:
      return event.flags == CU_EVENT_RECORD_DEFAULT ? calls.record(event.event, stream)
                                                    : calls.record_with_flags(event.event, stream, event.flags);
    case Kind::kWait:
      return calls.wait(stream, event.event, event.flags);
    case Kind::kHostFunction:
      return calls.host_function(stream, host.function, host.data);
    case Kind::kDestroyEvent:
      return calls.destroy_event(event.event);
    case Kind::kFreeMemory:
      return calls.free_memory(memory.address, stream);
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
