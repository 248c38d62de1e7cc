#include "queue/operation.hpp"

#include <algorithm>

namespace cudasched::queue {
namespace {

CUresult launch(const Calls& calls, const Operation::Kernel& kernel, CUstream stream) {
  std::size_t packed_bytes = kernel.packed_bytes;
  void* extra_words[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, kernel.packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_bytes,
                         CU_LAUNCH_PARAM_END};
  void** const extra = kernel.packed != nullptr ? extra_words : nullptr;
  if (kernel.attribute_count != 0) {
    CUlaunchConfig config{};
    config.gridDimX = kernel.grid[0];
    config.gridDimY = kernel.grid[1];
    config.gridDimZ = kernel.grid[2];
    config.blockDimX = kernel.block[0];
    config.blockDimY = kernel.block[1];
    config.blockDimZ = kernel.block[2];
    config.sharedMemBytes = kernel.shared_bytes;
    config.hStream = stream;
    config.attrs = kernel.attributes;
    config.numAttrs = kernel.attribute_count;
    return calls.launch_kernel_ex(&config, kernel.function, kernel.parameters, extra);
  }
  if (kernel.cooperative) {
    return calls.launch_cooperative(kernel.function, kernel.grid[0], kernel.grid[1], kernel.grid[2], kernel.block[0],
                                    kernel.block[1], kernel.block[2], kernel.shared_bytes, stream, kernel.parameters);
  }
  return calls.launch_kernel(kernel.function, kernel.grid[0], kernel.grid[1], kernel.grid[2], kernel.block[0],
                             kernel.block[1], kernel.block[2], kernel.shared_bytes, stream, kernel.parameters, extra);
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

bool Operation::overlaps_predecessor() const noexcept {
  if (kind != Kind::kKernel) return false;
  return std::any_of(kernel.attributes, kernel.attributes + kernel.attribute_count, [](const CUlaunchAttribute& each) {
    return each.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
           each.value.programmaticStreamSerializationAllowed != 0;
  });
}

CUresult Operation::execute(const Calls& calls) const {
  switch (kind) {
    case Kind::kKernel:
      return launch(calls, kernel, stream);
    case Kind::kGraph:
      return calls.launch_graph(graph.graph, stream);
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
