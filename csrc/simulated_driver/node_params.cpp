#define __CUDA_API_VERSION_INTERNAL
#include "simulated_driver/node_params.hpp"

#include <algorithm>

namespace cudasched::simulated_driver {
namespace {

CUresult read_side(CUmemorytype type, const void* host, CUdeviceptr device, std::size_t pitch, std::size_t height,
                   std::size_t x, std::size_t y, std::size_t z, const CUDA_MEMCPY3D& params, CopySide& side) {
  if (type == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::uintptr_t base =
      type == CU_MEMORYTYPE_HOST ? reinterpret_cast<std::uintptr_t>(host) : static_cast<std::uintptr_t>(device);
  const bool one_row = params.Height <= 1 && params.Depth <= 1;
  if (base == 0 || (!one_row && pitch < params.WidthInBytes + x)) return CUDA_ERROR_INVALID_VALUE;
  if (params.Depth > 1 && height < params.Height + y) return CUDA_ERROR_INVALID_VALUE;
  side.pitch = pitch;
  side.slice = pitch * height;
  side.address = base + z * side.slice + y * side.pitch + x;
  describe_side(side);
  const std::size_t bytes = params.WidthInBytes + (std::max<std::size_t>(params.Height, 1) - 1) * side.pitch +
                            (std::max<std::size_t>(params.Depth, 1) - 1) * side.slice;
  const bool ours = find_allocation(side.address, 1) != nullptr;
  if (bytes != 0 && (ours || type == CU_MEMORYTYPE_DEVICE) && find_allocation(side.address, bytes) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

void write_side(const CopySide& side, CUmemorytype& type, const void*& host, CUdeviceptr& device, std::size_t& pitch,
                std::size_t& height) {
  type = side.type;
  if (type == CU_MEMORYTYPE_HOST) {
    host = reinterpret_cast<const void*>(side.address);
  } else {
    device = side.address;
  }
  pitch = side.pitch;
  height = side.pitch == 0 ? 0 : side.slice / side.pitch;
}

}  // namespace

CUresult read_params(const CUDA_KERNEL_NODE_PARAMS& params, const std::shared_ptr<Context>& context, Command& command) {
  CUlaunchConfig config{};
  config.gridDimX = params.gridDimX;
  config.gridDimY = params.gridDimY;
  config.gridDimZ = params.gridDimZ;
  config.blockDimX = params.blockDimX;
  config.blockDimY = params.blockDimY;
  config.blockDimZ = params.blockDimZ;
  config.sharedMemBytes = params.sharedMemBytes;
  const CUfunction handle = params.func != nullptr ? params.func : reinterpret_cast<CUfunction>(params.kern);
  std::shared_ptr<Context> in = context;
  Function* function = nullptr;
  if (const CUresult result = find_function(handle, in, function); result != CUDA_SUCCESS) return result;
  if (params.func != nullptr) in = function->module->context;
  KernelCommand kernel;
  const CUresult result = make_kernel_command(handle, in, config, params.kernelParams, params.extra, false, kernel);
  if (result == CUDA_SUCCESS) command = std::move(kernel);
  return result;
}

CUresult read_params(const CUDA_MEMCPY3D& params, Command& command) {
  CopyCommand copy;
  CUresult result = read_side(params.srcMemoryType, params.srcHost, params.srcDevice, params.srcPitch, params.srcHeight,
                              params.srcXInBytes, params.srcY, params.srcZ, params, copy.source);
  if (result != CUDA_SUCCESS) return result;
  result = read_side(params.dstMemoryType, params.dstHost, params.dstDevice, params.dstPitch, params.dstHeight,
                     params.dstXInBytes, params.dstY, params.dstZ, params, copy.destination);
  if (result != CUDA_SUCCESS) return result;
  copy.bytes = params.WidthInBytes;
  copy.height = params.Height;
  copy.depth = params.Depth;
  command = std::move(copy);
  return CUDA_SUCCESS;
}

CUresult read_params(const CUDA_MEMSET_NODE_PARAMS& params, Command& command) {
  const bool known_size = params.elementSize == 1 || params.elementSize == 2 || params.elementSize == 4;
  if (!known_size || params.height == 0 || params.dst % params.elementSize != 0 || params.width > kLargestBytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  SetCommand set;
  set.destination = params.dst;
  set.value = params.value;
  set.width_bytes = params.elementSize;
  set.count = params.width;
  set.height = params.height;
  set.pitch = params.height == 1 ? 0 : params.pitch;
  if (params.height > 1 && params.pitch < params.width * params.elementSize) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t bytes = set.count * set.width_bytes + (set.height - 1) * set.pitch;
  const Allocation* const allocation = find_allocation(set.destination, std::max<std::size_t>(bytes, 1));
  if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  set.context = allocation->context.get();
  command = set;
  return CUDA_SUCCESS;
}

CUresult read_params(const CUDA_HOST_NODE_PARAMS& params, Command& command) {
  if (params.fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  command = HostCommand{params.fn, params.userData};
  return CUDA_SUCCESS;
}

CUresult read_event(CUevent handle, Command& command) {
  std::shared_ptr<Event> event;
  const CUresult result = find_event(handle, event);
  if (result == CUDA_SUCCESS) command = EventCommand{std::move(event)};
  return result;
}

CUresult read_params(const CUgraphNodeParams& params, const std::shared_ptr<Context>& context, Command& command) {
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      const CUDA_KERNEL_NODE_PARAMS_v3& given = params.kernel;
      CUDA_KERNEL_NODE_PARAMS kernel{};
      kernel.func = given.func;
      kernel.gridDimX = given.gridDimX;
      kernel.gridDimY = given.gridDimY;
      kernel.gridDimZ = given.gridDimZ;
      kernel.blockDimX = given.blockDimX;
      kernel.blockDimY = given.blockDimY;
      kernel.blockDimZ = given.blockDimZ;
      kernel.sharedMemBytes = given.sharedMemBytes;
      kernel.kernelParams = given.kernelParams;
      kernel.extra = given.extra;
      kernel.kern = given.kern;
      std::shared_ptr<Context> in = context;
      if (given.func == nullptr && given.ctx != nullptr) {
        const auto found = driver().contexts.find(reinterpret_cast<Context*>(given.ctx));
        if (found == driver().contexts.end()) return CUDA_ERROR_INVALID_CONTEXT;
        in = found->second;
      }
      return read_params(kernel, in, command);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return params.memcpy.flags != 0 ? CUDA_ERROR_INVALID_VALUE : read_params(params.memcpy.copyParams, command);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const CUDA_MEMSET_NODE_PARAMS_v2& given = params.memset;
      return read_params(
          CUDA_MEMSET_NODE_PARAMS{given.dst, given.pitch, given.value, given.elementSize, given.width, given.height},
          command);
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      return read_params(CUDA_HOST_NODE_PARAMS{params.host.fn, params.host.userData}, command);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return read_event(params.eventRecord.event, command);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return read_event(params.eventWait.event, command);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      command = {};
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

void write_params(Node& node, CUDA_KERNEL_NODE_PARAMS& params) {
  auto& kernel = std::get<KernelCommand>(node.command);
  node.parameters.clear();
  for (const std::uint32_t offset : kernel.spec->param_offsets) {
    node.parameters.push_back(kernel.params.data() + offset);
  }
  params = {};
  params.func = kernel.function;
  params.gridDimX = kernel.config.gridDimX;
  params.gridDimY = kernel.config.gridDimY;
  params.gridDimZ = kernel.config.gridDimZ;
  params.blockDimX = kernel.config.blockDimX;
  params.blockDimY = kernel.config.blockDimY;
  params.blockDimZ = kernel.config.blockDimZ;
  params.sharedMemBytes = kernel.config.sharedMemBytes;
  params.kernelParams = node.parameters.data();
  params.ctx = static_cast<CUcontext>(const_cast<void*>(kernel.context));
}

void write_params(const CopyCommand& copy, CUDA_MEMCPY3D& params) {
  params = {};
  const void* destination = nullptr;
  write_side(copy.source, params.srcMemoryType, params.srcHost, params.srcDevice, params.srcPitch, params.srcHeight);
  write_side(copy.destination, params.dstMemoryType, destination, params.dstDevice, params.dstPitch, params.dstHeight);
  params.dstHost = const_cast<void*>(destination);
  params.WidthInBytes = copy.bytes;
  params.Height = copy.height;
  params.Depth = copy.depth;
}

void write_params(const SetCommand& set, CUDA_MEMSET_NODE_PARAMS& params) {
  params = {set.destination, set.pitch, set.value, set.width_bytes, set.count, set.height};
}

CUDA_KERNEL_NODE_PARAMS newer(const CUDA_KERNEL_NODE_PARAMS_v1& params) {
  CUDA_KERNEL_NODE_PARAMS made{};
  made.func = params.func;
  made.gridDimX = params.gridDimX;
  made.gridDimY = params.gridDimY;
  made.gridDimZ = params.gridDimZ;
  made.blockDimX = params.blockDimX;
  made.blockDimY = params.blockDimY;
  made.blockDimZ = params.blockDimZ;
  made.sharedMemBytes = params.sharedMemBytes;
  made.kernelParams = params.kernelParams;
  made.extra = params.extra;
  return made;
}

}  // namespace cudasched::simulated_driver
