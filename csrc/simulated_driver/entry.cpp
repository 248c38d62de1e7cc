// Entry points: initialisation, devices, contexts, modules, functions, launches, streams and events. Each follows
// CUDA's documentation; double.hpp lists the simplifications.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::uint32_t kApiVersion = 13000;
constexpr int kSharedBytesDefault = 48 * 1024;
constexpr int kSharedBytesOptIn = 227 * 1024;

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_LOSSY_QUERY, "CUDA_ERROR_LOSSY_QUERY",
     "the API call would return a result that is missing information"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
     "cannot set while device is active in this process"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
     "too many blocks in cooperative launch"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would merge two capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in its stream"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated "
     "graph update"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult error) {
  const auto* found =
      std::find_if(std::begin(kErrors), std::end(kErrors), [&](const auto& e) { return e.error == error; });
  return found == std::end(kErrors) ? nullptr : found;
}

bool valid_device(CUdevice device) { return device >= 0 && static_cast<std::size_t>(device) < driver().gpus.size(); }

// For calls that take a device and no context.
template <class F>
CUresult with_device(CUdevice device, F call) {
  return with_driver([&](Lock& lock) {
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return call(lock);
  });
}

std::shared_ptr<Context> primary_context(CUdevice device) {
  return driver().gpus[static_cast<std::size_t>(device)]->primary;
}

CUresult find_context(CUcontext handle, std::shared_ptr<Context>& context) {
  const auto found = driver().contexts.find(reinterpret_cast<Context*>(handle));
  if (found == driver().contexts.end()) return CUDA_ERROR_INVALID_CONTEXT;
  context = found->second;
  return context->slot < 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

int device_attribute(CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return kSmCount;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return INT32_MAX;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return kSharedBytesDefault;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return kSharedBytesOptIn;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return 228 * 1024;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return kMaxBlocksPerSm;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1'980'000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 3'201'000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return 6144;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return 50 * 1024 * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return INT32_MAX;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return device + 1;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
      return driver().integrated;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    default:  // CU_DEVICE_ATTRIBUTE_MPS_ENABLED among them: nothing else is there
      return 0;
  }
}

CUresult load_specs(const void* image, std::vector<std::shared_ptr<const KernelSpec>>& specs) {
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* const text = static_cast<const char*>(image);
  const std::size_t bytes = strnlen(text, kImageBytesMax + 1);
  auto parsed = parse_image({text, bytes});
  if (!parsed) return CUDA_ERROR_INVALID_IMAGE;
  for (KernelSpec& spec : *parsed) specs.push_back(std::make_shared<const KernelSpec>(std::move(spec)));
  return CUDA_SUCCESS;
}

CUresult load_file(const char* path, std::string& text) {
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  text.assign(std::istreambuf_iterator<char>(file), {});
  return text.find('\0') == std::string::npos ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult load_module(CUmodule* module, const void* image) {
  if (module == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    std::vector<std::shared_ptr<const KernelSpec>> specs;
    if (const CUresult result = load_specs(image, specs); result != CUDA_SUCCESS) return result;
    auto loaded = std::make_unique<Module>();
    loaded->context = context;
    for (auto& spec : specs) {
      auto function = std::make_unique<Function>();
      function->module = loaded.get();
      function->spec = std::move(spec);
      driver().functions.emplace(function.get(), function.get());
      loaded->functions.push_back(std::move(function));
    }
    *module = reinterpret_cast<CUmodule>(loaded.get());
    driver().modules.emplace(loaded.get(), std::move(loaded));
    return CUDA_SUCCESS;
  });
}

CUresult load_library(CUlibrary* library, const void* image) {
  if (library == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    auto loaded = std::make_unique<Library>();
    if (const CUresult result = load_specs(image, loaded->specs); result != CUDA_SUCCESS) return result;
    for (std::size_t i = 0; i < loaded->specs.size(); ++i) {
      auto kernel = std::make_unique<Kernel>();
      kernel->library = loaded.get();
      kernel->index = i;
      kernel->spec = loaded->specs[i];
      driver().kernels.emplace(kernel.get(), kernel.get());
      loaded->kernels.push_back(std::move(kernel));
    }
    *library = reinterpret_cast<CUlibrary>(loaded.get());
    driver().libraries.emplace(loaded.get(), std::move(loaded));
    return CUDA_SUCCESS;
  });
}

CUresult find_kernel(CUkernel handle, Kernel*& kernel) {
  const auto found = driver().kernels.find(reinterpret_cast<Kernel*>(handle));
  if (found == driver().kernels.end()) return CUDA_ERROR_INVALID_HANDLE;
  kernel = found->second;
  return CUDA_SUCCESS;
}

// A function by its own handle only, for calls that refuse a CUkernel.
CUresult find_plain_function(CUfunction handle, Function*& function) {
  const auto found = driver().functions.find(reinterpret_cast<Function*>(handle));
  if (found == driver().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
  function = found->second;
  return CUDA_SUCCESS;
}

CUresult param_info(const KernelSpec& spec, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  if (offset == nullptr || index >= spec.param_bytes.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = spec.param_offsets[index];
  if (bytes != nullptr) *bytes = spec.param_bytes[index];
  return CUDA_SUCCESS;
}

CUresult get_attribute(const Function& function, CUfunction_attribute attribute, int* value) {
  const KernelSpec& spec = *function.spec;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = static_cast<int>(spec.threads_max);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(spec.shared_bytes);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = static_cast<int>(spec.regs);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = 90;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = function.dynamic_shared_bytes_max;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = function.carveout;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      *value = function.non_portable_cluster;
      return CUDA_SUCCESS;
    default:
      if (attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
      *value = 0;
      return CUDA_SUCCESS;
  }
}

CUresult set_attribute(Function& function, CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || value + static_cast<int>(function.spec->shared_bytes) > kSharedBytesOptIn) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      function.dynamic_shared_bytes_max = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      function.carveout = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      function.non_portable_cluster = value;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// The parameters as one buffer, from either form in which a launch gives them.
CUresult gather_params(const KernelSpec& spec, void** params, void** extra, std::vector<std::uint8_t>& buffer) {
  buffer.assign(spec.params_total_bytes, 0);
  if (params != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (params != nullptr) {
    for (std::size_t i = 0; i < spec.param_bytes.size(); ++i) {
      if (params[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(buffer.data() + spec.param_offsets[i], params[i], spec.param_bytes[i]);
    }
    return CUDA_SUCCESS;
  }
  if (extra == nullptr) return spec.param_bytes.empty() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  const void* source = nullptr;
  std::size_t bytes = 0;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      source = extra[1];
    } else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      bytes = *static_cast<const std::size_t*>(extra[1]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (bytes < buffer.size() || (source == nullptr && !buffer.empty())) return CUDA_ERROR_INVALID_VALUE;
  if (!buffer.empty()) std::memcpy(buffer.data(), source, buffer.size());
  return CUDA_SUCCESS;
}

struct LaunchAttributes {
  bool cooperative = false;
  bool programmatic = false;  // may overlap earlier work in the stream
  std::optional<int> priority;
  std::map<int, CUlaunchAttributeValue> others;  // that a captured node keeps
};

CUresult read_attributes(const CUlaunchConfig& config, LaunchAttributes& attributes) {
  if (config.numAttrs != 0 && config.attrs == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        attributes.cooperative = attribute.value.cooperative != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        attributes.priority = std::clamp(attribute.value.priority, kGreatestPriority, 0);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        attributes.programmatic = attribute.value.programmaticStreamSerializationAllowed != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:
        if (attribute.id < 0 || attribute.id > 16) return CUDA_ERROR_INVALID_VALUE;
        if (attribute.id != CU_LAUNCH_ATTRIBUTE_IGNORE) attributes.others[attribute.id] = attribute.value;
        break;
    }
  }
  return CUDA_SUCCESS;
}

CUresult capture_launch(Stream& stream, KernelCommand kernel, int priority, LaunchAttributes& attributes) {
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_KERNEL);
  node->command = std::move(kernel);
  node->priority = priority;
  node->attributes = std::move(attributes.others);
  CUresult result = CUDA_SUCCESS;
  Node* const captured = capture_node(stream, std::move(node), result);
  if (captured == nullptr || !attributes.programmatic) return result;
  for (Edge& edge : captured->dependencies) {
    if (edge.from->type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
    edge.data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    edge.data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
  }
  return result;
}

CUresult launch(const CUlaunchConfig& config, CUfunction handle, void** params, void** extra, CUstream stream_handle) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Stream> stream;
    CUresult result = find_stream(stream_handle, stream);
    if (result != CUDA_SUCCESS) return result;
    KernelCommand kernel;
    LaunchAttributes attributes;
    result = read_attributes(config, attributes);
    if (result == CUDA_SUCCESS) {
      result = make_kernel_command(handle, stream->context, config, params, extra, attributes.cooperative, kernel);
    }
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result != CUDA_SUCCESS) return result;
    const int priority = attributes.priority.value_or(stream->priority);
    if (stream->capture) return capture_launch(*stream, std::move(kernel), priority, attributes);
    return submit_command(lock, stream, std::move(kernel), nullptr, priority);
  });
}

CUlaunchConfig launch_config(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                             unsigned shared) {
  CUlaunchConfig config{};
  config.gridDimX = gx;
  config.gridDimY = gy;
  config.gridDimZ = gz;
  config.blockDimX = bx;
  config.blockDimY = by;
  config.blockDimZ = bz;
  config.sharedMemBytes = shared;
  return config;
}

CUresult record_event(CUevent event_handle, CUstream stream_handle, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Event> event;
    std::shared_ptr<Stream> stream;
    CUresult result = find_event(event_handle, event);
    if (result == CUDA_SUCCESS) result = find_stream(stream_handle, stream);
    if (result != CUDA_SUCCESS) return result;
    if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0) {
      if (!stream->capture) return CUDA_ERROR_INVALID_VALUE;
      return capture_command(*stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, EventCommand{event}, 0);
    }
    result = refuse_implicit(*stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->capture) return capture_record(*stream, *event);
    auto record = std::make_shared<Record>();
    record->context = stream->context.get();
    result = submit_command(lock, stream, {}, record);
    if (result == CUDA_SUCCESS) {
      event->record = std::move(record);
      event->capture = nullptr;
      event->captured.clear();
    }
    return result;
  });
}

CUresult elapsed_time(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Event> start;
    std::shared_ptr<Event> end;
    CUresult result = find_event(start_handle, start);
    if (result == CUDA_SUCCESS) result = find_event(end_handle, end);
    if (result != CUDA_SUCCESS) return result;
    if (start->capture || end->capture) return CUDA_ERROR_CAPTURED_EVENT;
    if (((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0 || !start->record || !end->record) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    progress(lock);
    if (!start->record->done || !end->record->done) return CUDA_ERROR_NOT_READY;
    const SharedDevice& shared = driver().gpus[static_cast<std::size_t>(end->context->device)]->shared;
    *milliseconds = static_cast<float>(
        static_cast<double>(shared.to_real_ns(end->record->finish_ns - start->record->finish_ns)) / 1e6);
    return CUDA_SUCCESS;
  });
}

CUresult create_stream(CUstream* stream, unsigned flags, int priority) {
  if (stream == nullptr || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    std::shared_ptr<Stream> made;
    const CUresult result = make_stream(context, StreamKind::kOrdinary, flags, priority, made);
    if (result != CUDA_SUCCESS) return result;
    *stream = reinterpret_cast<CUstream>(made.get());
    driver().streams.emplace(made.get(), made);
    return CUDA_SUCCESS;
  });
}

// For calls on a stream that neither submit nor wait.
template <class F>
CUresult with_stream(CUstream handle, F call) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Stream> stream;
    if (const CUresult result = find_stream(handle, stream); result != CUDA_SUCCESS) return result;
    return call(lock, stream);
  });
}

CUresult max_active_blocks(int* blocks, CUfunction handle, int threads, std::size_t dynamic_shared_bytes) {
  if (blocks == nullptr || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Function* function = nullptr;
    if (const CUresult result = find_function(handle, context, function); result != CUDA_SUCCESS) return result;
    *blocks = static_cast<int>(occupancy(*function->spec, static_cast<std::uint32_t>(threads), dynamic_shared_bytes));
    return CUDA_SUCCESS;
  });
}

CUresult create_context(CUcontext* handle, unsigned flags, CUdevice device) {
  if (handle == nullptr || (flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    auto context = std::make_shared<Context>();
    context->device = device;
    context->flags = flags;
    context->id = driver().next_id++;
    driver().contexts.emplace(context.get(), context);
    if (const CUresult result = activate_context(*context); result != CUDA_SUCCESS) {
      driver().contexts.erase(context.get());
      return result;
    }
    context_stack().push_back(context.get());
    *handle = reinterpret_cast<CUcontext>(context.get());
    return CUDA_SUCCESS;
  });
}

void copy_text(char* to, int bytes, const char* text) {
  const std::size_t room = static_cast<std::size_t>(bytes) - 1;
  const std::size_t length = std::min(room, std::strlen(text));
  std::memcpy(to, text, length);
  to[length] = '\0';
}

}  // namespace

CUresult make_kernel_command(CUfunction handle, const std::shared_ptr<Context>& context, const CUlaunchConfig& config,
                             void** params, void** extra, bool cooperative, KernelCommand& kernel) {
  Function* function = nullptr;
  if (const CUresult result = find_function(handle, context, function); result != CUDA_SUCCESS) return result;
  if (function->module->context != context) return CUDA_ERROR_INVALID_HANDLE;
  const std::uint64_t threads = std::uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
  if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0 || threads == 0 ||
      config.gridDimX > INT32_MAX || config.gridDimY > 65535 || config.gridDimZ > 65535 || config.blockDimX > 1024 ||
      config.blockDimY > 1024 || config.blockDimZ > 64 || threads > 1024) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (config.sharedMemBytes > static_cast<unsigned>(function->dynamic_shared_bytes_max))
    return CUDA_ERROR_INVALID_VALUE;
  const std::uint32_t per_sm = occupancy(*function->spec, static_cast<std::uint32_t>(threads), config.sharedMemBytes);
  if (per_sm == 0) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  kernel.spec = function->spec;
  kernel.function = handle;
  kernel.context = context.get();
  kernel.cooperative = cooperative;
  kernel.config = config;
  kernel.config.hStream = nullptr;
  kernel.config.attrs = nullptr;
  kernel.config.numAttrs = 0;
  kernel.blocks = std::uint64_t{config.gridDimX} * config.gridDimY * config.gridDimZ;
  kernel.blocks_per_sm = per_sm;
  if (kernel.blocks > std::uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
  if (cooperative && kernel.blocks > std::uint64_t{per_sm} * kSmCount) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  return gather_params(*kernel.spec, params, extra, kernel.params);
}

}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- errors, initialisation, devices

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* const found = find_error(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* const found = find_error(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) {
  const Steps steps;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  try {
    return initialize_driver();
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = driver_version();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(ordinal, [&](Lock&) {
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetCount(int* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *count = static_cast<int>(driver().gpus.size());
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  if (name == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    copy_text(name, bytes, driver().mig != 0 ? "cudasched simulated GPU MIG 1g.18gb" : "cudasched simulated GPU");
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    // The same for all processes that share the device, and another for each directory of devices.
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : driver().directory) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    std::memcpy(uuid->bytes, &hash, sizeof hash);
    std::memcpy(uuid->bytes + 8, "cs-sim\0", 7);
    uuid->bytes[15] = static_cast<char>(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (value == nullptr || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    *value = device_attribute(attribute, device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    *bytes = device_memory(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  if (id == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    char text[16];
    std::snprintf(text, sizeof text, "0000:%02X:00.0", static_cast<unsigned>(device + 1) & 0xff);
    copy_text(id, bytes, text);
    return CUDA_SUCCESS;
  });
}

// ---- contexts

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot < 0) {
      if (const CUresult result = activate_context(*primary); result != CUDA_SUCCESS) return result;
    }
    ++primary->retained;
    *context = reinterpret_cast<CUcontext>(primary.get());
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return with_device(device, [&](Lock& lock) {
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    release_primary(lock, primary);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return with_device(device, [&](Lock& lock) {
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot >= 0) deactivate_context(lock, primary);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    *flags = primary_context(device)->flags;
    *active = primary_context(device)->slot >= 0 ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    primary_context(device)->flags = flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  return create_context(context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* affinity, int count, unsigned flags, CUdevice device) {
  if (affinity != nullptr || count != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return create_context(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* params, unsigned flags, CUdevice device) {
  if (params != nullptr && (params->numExecAffinityParams != 0 || params->cigParams != nullptr)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return create_context(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Context> context;
    if (const CUresult result = find_context(handle, context); result != CUDA_SUCCESS) return result;
    if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    deactivate_context(lock, context);
    driver().contexts.erase(context.get());
    if (!context_stack().empty() && context_stack().back() == context.get()) context_stack().pop_back();
    return CUDA_SUCCESS;
  });
}

// There is no attaching, so that a context has one user.
CUresult cuCtxDetach(CUcontext handle) { return cuCtxDestroy_v2(handle); }

CUresult cuCtxSetCurrent(CUcontext handle) {
  return with_driver([&](Lock&) {
    std::vector<Context*>& stack = context_stack();
    if (handle == nullptr) {
      if (!stack.empty()) stack.pop_back();
      return CUDA_SUCCESS;
    }
    std::shared_ptr<Context> context;
    if (const CUresult result = find_context(handle, context); result != CUDA_SUCCESS) return result;
    if (stack.empty()) stack.push_back(nullptr);
    stack.back() = reinterpret_cast<Context*>(handle);  // which may be a green context's name for the primary one
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const std::vector<Context*>& stack = context_stack();
    *context = reinterpret_cast<CUcontext>(stack.empty() ? nullptr : stack.back());
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return with_driver([&](Lock&) {
    std::shared_ptr<Context> context;
    if (const CUresult result = find_context(handle, context); result != CUDA_SUCCESS) return result;
    context_stack().push_back(reinterpret_cast<Context*>(handle));
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return with_driver([&](Lock&) {
    std::vector<Context*>& stack = context_stack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) *context = reinterpret_cast<CUcontext>(stack.back());
    stack.pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    *device = context->device;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext handle) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr) return cuCtxGetDevice(device);
  return with_driver([&](Lock&) {
    std::shared_ptr<Context> context;
    if (const CUresult result = find_context(handle, context); result != CUDA_SUCCESS) return result;
    *device = context->device;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return with_context([&](Lock& lock, const std::shared_ptr<Context>& context) {
    CUresult result = refuse_capturing_context(*context);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    return result != CUDA_SUCCESS ? result : synchronize_context(lock, context);
  });
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  if (handle == nullptr) return cuCtxSynchronize();
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Context> context;
    CUresult result = find_context(handle, context);
    if (result == CUDA_SUCCESS) result = refuse_capturing_context(*context);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    return result != CUDA_SUCCESS ? result : synchronize_context(lock, context);
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return with_context([&](Lock&, const std::shared_ptr<Context>&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::shared_ptr<Context> context;
    const CUresult result = handle == nullptr ? current_context(context) : find_context(handle, context);
    if (result == CUDA_SUCCESS) *version = kApiVersion;
    return result;
  });
}

CUresult cuCtxGetFlags(unsigned* flags) {
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    *flags = context->flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::shared_ptr<Context> context;
    const CUresult result = handle == nullptr ? current_context(context) : find_context(handle, context);
    if (result == CUDA_SUCCESS) *id = context->id;
    return result;
  });
}

// ---- modules, libraries, functions

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load_module(module, image); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return load_module(module, image);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  if (const CUresult result = may_call(); result != CUDA_SUCCESS) return result;
  try {
    std::string text;
    const CUresult result = load_file(path, text);
    return result == CUDA_SUCCESS ? load_module(module, text.c_str()) : result;
  } catch (const std::exception&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

CUresult cuModuleUnload(CUmodule handle) {
  return with_context([&](Lock& lock, const std::shared_ptr<Context>&) {
    const auto found = driver().modules.find(reinterpret_cast<Module*>(handle));
    if (found == driver().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = refuse_in_capture();
    if (result == CUDA_SUCCESS) result = synchronize_context(lock, found->second->context);
    if (result != CUDA_SUCCESS) return result;
    const auto still = driver().modules.find(reinterpret_cast<Module*>(handle));
    if (still == driver().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& function : still->second->functions) driver().functions.erase(function.get());
    driver().modules.erase(still);
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const auto module = driver().modules.find(reinterpret_cast<Module*>(handle));
    if (module == driver().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& candidate : module->second->functions) {
      if (candidate->spec->name != name) continue;
      *function = reinterpret_cast<CUfunction>(candidate.get());
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  });
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
  });
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
  return load_library(library, code);
}

CUresult cuLibraryUnload(CUlibrary handle) {
  return with_driver([&](Lock& lock) {
    const auto found = driver().libraries.find(reinterpret_cast<Library*>(handle));
    if (found == driver().libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    std::vector<std::shared_ptr<Context>> contexts;
    for (const auto& [key, module] : found->second->modules) contexts.push_back(module->context);
    for (const auto& context : contexts) synchronize_context(lock, context);
    const auto still = driver().libraries.find(reinterpret_cast<Library*>(handle));
    if (still == driver().libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& [key, module] : still->second->modules) {
      for (const auto& function : module->functions) driver().functions.erase(function.get());
    }
    for (const auto& kernel : still->second->kernels) driver().kernels.erase(kernel.get());
    driver().libraries.erase(still);
    return CUDA_SUCCESS;
  });
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary handle, const char* name) {
  if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const auto library = driver().libraries.find(reinterpret_cast<Library*>(handle));
    if (library == driver().libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& candidate : library->second->kernels) {
      if (candidate->spec->name != name) continue;
      *kernel = reinterpret_cast<CUkernel>(candidate.get());
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  });
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel handle) {
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Kernel* kernel = nullptr;
    if (const CUresult result = find_kernel(handle, kernel); result != CUDA_SUCCESS) return result;
    *function = reinterpret_cast<CUfunction>(function_of(*kernel, context));
    return CUDA_SUCCESS;
  });
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel handle) {
  if (library == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Kernel* kernel = nullptr;
    const CUresult result = find_kernel(handle, kernel);
    if (result == CUDA_SUCCESS) *library = reinterpret_cast<CUlibrary>(kernel->library);
    return result;
  });
}

CUresult cuKernelGetName(const char** name, CUkernel handle) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Kernel* kernel = nullptr;
    const CUresult result = find_kernel(handle, kernel);
    if (result == CUDA_SUCCESS) *name = kernel->spec->name.c_str();
    return result;
  });
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
  return with_driver([&](Lock&) {
    Kernel* kernel = nullptr;
    const CUresult result = find_kernel(handle, kernel);
    return result == CUDA_SUCCESS ? param_info(*kernel->spec, index, offset, bytes) : result;
  });
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_device(device, [&](Lock&) {
    Kernel* kernel = nullptr;
    if (const CUresult result = find_kernel(handle, kernel); result != CUDA_SUCCESS) return result;
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot < 0) return CUDA_ERROR_INVALID_CONTEXT;
    return get_attribute(*function_of(*kernel, primary), attribute, value);
  });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
  return with_device(device, [&](Lock&) {
    Kernel* kernel = nullptr;
    if (const CUresult result = find_kernel(handle, kernel); result != CUDA_SUCCESS) return result;
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot < 0) return CUDA_ERROR_INVALID_CONTEXT;
    return set_attribute(*function_of(*kernel, primary), attribute, value);
  });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Function* function = nullptr;
    const CUresult result = find_function(handle, context, function);
    return result == CUDA_SUCCESS ? get_attribute(*function, attribute, value) : result;
  });
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    Function* function = nullptr;
    const CUresult result = find_function(handle, context, function);
    return result == CUDA_SUCCESS ? set_attribute(*function, attribute, value) : result;
  });
}

CUresult cuFuncGetName(const char** name, CUfunction handle) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Function* function = nullptr;
    if (find_plain_function(handle, function) == CUDA_SUCCESS) {
      *name = function->spec->name.c_str();
      return CUDA_SUCCESS;
    }
    Kernel* kernel = nullptr;
    const CUresult result = find_kernel(reinterpret_cast<CUkernel>(handle), kernel);
    if (result == CUDA_SUCCESS) *name = kernel->spec->name.c_str();
    return result;
  });
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  return with_driver([&](Lock&) {
    Function* function = nullptr;
    const CUresult result = find_plain_function(handle, function);
    return result == CUDA_SUCCESS ? param_info(*function->spec, index, offset, bytes) : result;
  });
}

CUresult cuFuncGetModule(CUmodule* module, CUfunction handle) {
  if (module == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Function* function = nullptr;
    const CUresult result = find_plain_function(handle, function);
    if (result == CUDA_SUCCESS) *module = reinterpret_cast<CUmodule>(function->module);
    return result;
  });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
  return max_active_blocks(blocks, function, threads, shared);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int threads,
                                                              size_t shared, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return max_active_blocks(blocks, function, threads, shared);
}

// ---- launches

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void** params, void** extra) {
  return launch(launch_config(gx, gy, gz, bx, by, bz, shared), function, params, extra, stream);
}

CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, CUstream stream, void** params, void** extra) {
  return launch(launch_config(gx, gy, gz, bx, by, bz, shared), function, params, extra, per_thread(stream));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return launch(*config, function, params, extra, config->hStream);
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return launch(*config, function, params, extra, per_thread(config->hStream));
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void** params) {
  CUlaunchConfig config = launch_config(gx, gy, gz, bx, by, bz, shared);
  CUlaunchAttribute cooperative{};
  cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  cooperative.value.cooperative = 1;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return launch(config, function, params, nullptr, stream);
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void** params) {
  return cuLaunchCooperativeKernel(function, gx, gy, gz, bx, by, bz, shared, per_thread(stream), params);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(handle, [&](Lock& lock, const std::shared_ptr<Stream>& stream) {
    if (const CUresult result = refuse_implicit(*stream); result != CUDA_SUCCESS) return result;
    const HostCommand host{function, data};
    if (stream->capture) return capture_command(*stream, CU_GRAPH_NODE_TYPE_HOST, host, 0);
    return submit_command(lock, stream, host);
  });
}

CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn function, void* data) {
  return cuLaunchHostFunc(per_thread(stream), function, data);
}

// ---- streams

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return create_stream(stream, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  return with_driver([&](Lock&) {
    const auto found = driver().streams.find(reinterpret_cast<Stream*>(handle));
    if (found == driver().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Stream> stream = found->second;
    driver().streams.erase(found);
    close_stream(stream);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return with_stream(handle, [&](Lock& lock, const std::shared_ptr<Stream>& stream) {
    CUresult result = refuse_capturing(*stream);
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    return result != CUDA_SUCCESS ? result : synchronize_stream(lock, stream);
  });
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) { return cuStreamSynchronize(per_thread(stream)); }

CUresult cuStreamQuery(CUstream handle) {
  return with_stream(handle, [&](Lock& lock, const std::shared_ptr<Stream>& stream) {
    CUresult result = refuse_capturing(*stream);
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    if (result != CUDA_SUCCESS) return result;
    const std::shared_ptr<Context> context = stream->context;
    progress(lock);
    if (context->sticky != CUDA_SUCCESS) return context->sticky;
    if (!stream_idle(*stream)) return CUDA_ERROR_NOT_READY;
    if (stream->kind != StreamKind::kLegacy) return CUDA_SUCCESS;
    const bool idle = std::all_of(context->streams.begin(), context->streams.end(), [](const auto& entry) {
      return !entry.second->blocking() || stream_idle(*entry.second);
    });
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamQuery_ptsz(CUstream stream) { return cuStreamQuery(per_thread(stream)); }

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(stream_handle, [&](Lock& lock, const std::shared_ptr<Stream>& stream) {
    const auto found = driver().events.find(reinterpret_cast<Event*>(event_handle));
    if (found == driver().events.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Event> event = found->second;
    if (flags != 0) {
      if (!stream->capture) return CUDA_ERROR_INVALID_VALUE;
      return capture_command(*stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, EventCommand{event}, 0);
    }
    CUresult result = refuse_implicit(*stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->capture || event->capture) return capture_wait(stream, *event);
    return event->record ? submit_wait(lock, stream, event->record) : CUDA_SUCCESS;
  });
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
  return cuStreamWaitEvent(per_thread(stream), event, flags);
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(handle, [&](Lock&, const std::shared_ptr<Stream>& stream) {
    *priority = stream->priority;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetPriority_ptsz(CUstream stream, int* priority) {
  return cuStreamGetPriority(per_thread(stream), priority);
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(handle, [&](Lock&, const std::shared_ptr<Stream>& stream) {
    if (const CUresult refused = refuse_capturing(*stream)) return refused;
    *flags = stream->flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned* flags) { return cuStreamGetFlags(per_thread(stream), flags); }

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(handle, [&](Lock&, const std::shared_ptr<Stream>& stream) {
    if (const CUresult refused = refuse_capturing(*stream)) return refused;
    *id = stream->id;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetId_ptsz(CUstream stream, unsigned long long* id) { return cuStreamGetId(per_thread(stream), id); }

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(handle, [&](Lock&, const std::shared_ptr<Stream>& stream) {
    *context = reinterpret_cast<CUcontext>(stream->context.get());
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext* context) {
  return cuStreamGetCtx(per_thread(stream), context);
}

// ---- events

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (event == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0 && (flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    auto made = std::make_shared<Event>();
    made->context = context;
    made->flags = flags;
    *event = reinterpret_cast<CUevent>(made.get());
    driver().events.emplace(made.get(), made);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return with_driver([&](Lock&) {
    return driver().events.erase(reinterpret_cast<Event*>(event)) == 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return record_event(event, stream, 0); }
CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) { return record_event(event, per_thread(stream), 0); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  return record_event(event, stream, flags);
}

CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags) {
  return record_event(event, per_thread(stream), flags);
}

CUresult cuEventQuery(CUevent handle) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Event> event;
    CUresult result = find_event(handle, event);
    if (result == CUDA_SUCCESS) result = refuse_captured_event(*event);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    if (result != CUDA_SUCCESS || !event->record || event->record->done) return result;
    const std::shared_ptr<Record> record = event->record;
    progress(lock);
    if (event->context->sticky != CUDA_SUCCESS) return event->context->sticky;
    return record->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Event> event;
    CUresult result = find_event(handle, event);
    if (result == CUDA_SUCCESS) result = refuse_captured_event(*event);
    if (result == CUDA_SUCCESS) result = refuse_in_capture();
    if (result != CUDA_SUCCESS || !event->record) return result;
    const std::shared_ptr<Record> record = event->record;
    const std::shared_ptr<Context> context = event->context;
    wait_until(lock, context->device, [&] { return record->done || context->slot < 0; });
    return context->slot < 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context->sticky;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return elapsed_time(milliseconds, start, end);
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return elapsed_time(milliseconds, start, end);
}

// ---- profiler

CUresult cuProfilerStart() {
  return with_context([](Lock&, const std::shared_ptr<Context>&) { return CUDA_SUCCESS; });
}

CUresult cuProfilerStop() {
  return with_context([](Lock&, const std::shared_ptr<Context>&) { return CUDA_SUCCESS; });
}

CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  if (table == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
#pragma GCC visibility pop
