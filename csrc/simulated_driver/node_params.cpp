#include "simulated_driver/node_params.hpp"

#include <algorithm>

namespace cudasched::simulated_driver {
namespace {

CopySide read_side(CUmemorytype type, const void* host, CUdeviceptr device, std::size_t pitch, std::size_t height,
                   std::size_t x, std::size_t y, std::size_t z, const CUDA_MEMCPY3D& params) {
  require(type != CU_MEMORYTYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
  require(type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED);
  const std::uintptr_t base =
      type == CU_MEMORYTYPE_HOST ? reinterpret_cast<std::uintptr_t>(host) : static_cast<std::uintptr_t>(device);
  const bool one_row = params.Height <= 1 && params.Depth <= 1;
  require(base != 0 && (one_row || pitch >= params.WidthInBytes + x));
  require(params.Depth <= 1 || height >= params.Height + y);
  CopySide side;
  side.pitch = pitch;
  side.slice = pitch * height;
  side.address = base + z * side.slice + y * side.pitch + x;
  describe_side(side);
  const std::size_t bytes = params.WidthInBytes + (std::max<std::size_t>(params.Height, 1) - 1) * side.pitch +
                            (std::max<std::size_t>(params.Depth, 1) - 1) * side.slice;
  const bool ours = find_allocation(side.address, 1) != nullptr;
  require(bytes == 0 || (!ours && type != CU_MEMORYTYPE_DEVICE) || find_allocation(side.address, bytes) != nullptr);
  return side;
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

// Of each version of the structure; `kernel` and its context are where there is no function.
template <class Params>
Command read_kernel(const Params& params, CUkernel kernel, const std::shared_ptr<Context>& context) {
  const CUlaunchConfig config{
      params.gridDimX,  params.gridDimY,       params.gridDimZ, params.blockDimX, params.blockDimY,
      params.blockDimZ, params.sharedMemBytes, nullptr,         nullptr,          0};
  const CUfunction handle = params.func != nullptr ? params.func : reinterpret_cast<CUfunction>(kernel);
  const Function& function = find_function(handle, context);
  return make_kernel_command(handle, params.func != nullptr ? function.module->context : context, config,
                             params.kernelParams, params.extra, false);
}

template <class Params>
void write_kernel(Node& node, Params& params) {
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
}

}  // namespace

Command read_params(const CUDA_KERNEL_NODE_PARAMS_v1& params) {
  return read_kernel(params, nullptr, current_context());
}

Command read_params(const CUDA_KERNEL_NODE_PARAMS& params) {
  return read_kernel(params, params.kern, current_context());
}

Command read_params(const CUDA_MEMCPY3D& params) {
  CopyCommand copy;
  copy.source = read_side(params.srcMemoryType, params.srcHost, params.srcDevice, params.srcPitch, params.srcHeight,
                          params.srcXInBytes, params.srcY, params.srcZ, params);
  copy.destination = read_side(params.dstMemoryType, params.dstHost, params.dstDevice, params.dstPitch,
                               params.dstHeight, params.dstXInBytes, params.dstY, params.dstZ, params);
  copy.bytes = params.WidthInBytes;
  copy.height = params.Height;
  copy.depth = params.Depth;
  return copy;
}

Command read_params(const CUDA_MEMSET_NODE_PARAMS& params) {
  require(params.elementSize == 1 || params.elementSize == 2 || params.elementSize == 4);
  require(params.height != 0 && params.dst % params.elementSize == 0 && params.width <= kLargestBytes);
  require(params.height == 1 || params.pitch >= params.width * params.elementSize);
  SetCommand set;
  set.destination = params.dst;
  set.value = params.value;
  set.width_bytes = params.elementSize;
  set.count = params.width;
  set.height = params.height;
  set.pitch = params.height == 1 ? 0 : params.pitch;
  const std::size_t bytes = set.count * set.width_bytes + (set.height - 1) * set.pitch;
  const Allocation* const allocation = find_allocation(set.destination, std::max<std::size_t>(bytes, 1));
  require(allocation != nullptr);
  set.context = allocation->context.get();
  return set;
}

Command read_params(const CUDA_HOST_NODE_PARAMS& params) {
  require(params.fn != nullptr);
  return HostCommand{params.fn, params.userData};
}

Command read_params(CUevent event) { return EventCommand{find_event(event)}; }

Command read_params(const CUgraphNodeParams& params) {
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      const CUDA_KERNEL_NODE_PARAMS_v3& given = params.kernel;
      const bool elsewhere = given.func == nullptr && given.ctx != nullptr;
      return read_kernel(
          given, given.kern,
          elsewhere ? find(driver().contexts, given.ctx, CUDA_ERROR_INVALID_CONTEXT) : current_context());
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      require(params.memcpy.flags == 0);
      return read_params(params.memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const CUDA_MEMSET_NODE_PARAMS_v2& given = params.memset;
      return read_params(
          CUDA_MEMSET_NODE_PARAMS{given.dst, given.pitch, given.value, given.elementSize, given.width, given.height});
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      return read_params(CUDA_HOST_NODE_PARAMS{params.host.fn, params.host.userData});
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return read_params(params.eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return read_params(params.eventWait.event);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return {};
    default:
      throw Refused(CUDA_ERROR_NOT_SUPPORTED);
  }
}

void write_params(Node& node, CUDA_KERNEL_NODE_PARAMS_v1& params) { write_kernel(node, params); }

void write_params(Node& node, CUDA_KERNEL_NODE_PARAMS& params) {
  write_kernel(node, params);
  params.ctx = static_cast<CUcontext>(const_cast<void*>(std::get<KernelCommand>(node.command).context));
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

void write_params(const HostCommand& host, CUDA_HOST_NODE_PARAMS& params) { params = {host.function, host.data}; }

void write_params(const EventCommand& of, CUevent& event) { event = reinterpret_cast<CUevent>(of.event.get()); }

void write_params(const GraphMemoryCommand& of, CUDA_MEM_ALLOC_NODE_PARAMS& params) {
  params = {};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  params.bytesize = of.memory->bytes;
  params.dptr = of.memory->address;
}

void write_params(const GraphMemoryCommand& of, CUdeviceptr& address) { address = of.memory->address; }

}  // namespace cudasched::simulated_driver
