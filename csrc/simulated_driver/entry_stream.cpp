// Entry points: launches, streams, events.
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

// The parameters as one buffer, from either form in which a launch gives them.
std::vector<std::uint8_t> gather_params(const KernelSpec& spec, void** params, void** extra) {
  std::vector<std::uint8_t> buffer(spec.params_total_bytes, 0);
  require(params == nullptr || extra == nullptr);
  if (params != nullptr) {
    for (std::size_t i = 0; i < spec.param_bytes.size(); ++i) {
      require(params[i] != nullptr);
      std::memcpy(buffer.data() + spec.param_offsets[i], params[i], spec.param_bytes[i]);
    }
    return buffer;
  }
  require(extra != nullptr || spec.param_bytes.empty());
  const void* source = nullptr;
  std::size_t bytes = 0;
  for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    require(*extra == CU_LAUNCH_PARAM_BUFFER_POINTER || *extra == CU_LAUNCH_PARAM_BUFFER_SIZE);
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      source = extra[1];
    } else {
      bytes = *static_cast<const std::size_t*>(extra[1]);
    }
  }
  require(bytes >= buffer.size() && (source != nullptr || buffer.empty()));
  if (!buffer.empty()) std::memcpy(buffer.data(), source, buffer.size());
  return buffer;
}

struct LaunchAttributes {
  bool cooperative = false;
  bool programmatic = false;  // may overlap earlier work in the stream
  std::optional<int> priority;
  std::map<int, CUlaunchAttributeValue> others;  // that a captured node keeps
};

LaunchAttributes read_attributes(const CUlaunchConfig& config) {
  LaunchAttributes attributes;
  require(config.numAttrs == 0 || config.attrs != nullptr);
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
        throw Refused(CUDA_ERROR_NOT_SUPPORTED);
      default:
        require(attribute.id >= 0 && attribute.id <= 16);
        if (attribute.id != CU_LAUNCH_ATTRIBUTE_IGNORE) attributes.others[attribute.id] = attribute.value;
        break;
    }
  }
  return attributes;
}

void capture_launch(Stream& stream, KernelCommand kernel, int priority, LaunchAttributes& attributes) {
  auto node = std::make_unique<Node>(CU_GRAPH_NODE_TYPE_KERNEL);
  node->command = std::move(kernel);
  node->priority = priority;
  node->attributes = std::move(attributes.others);
  Node& captured = capture_node(stream, std::move(node));
  if (!attributes.programmatic) return;
  for (Edge& edge : captured.dependencies) {
    if (edge.from->type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
    edge.data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    edge.data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
  }
}

CUresult launch(const CUlaunchConfig& config, CUfunction handle, void** params, void** extra, CUstream stream_handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(stream_handle);
    LaunchAttributes attributes = read_attributes(config);
    KernelCommand kernel = make_kernel_command(handle, stream->context, config, params, extra, attributes.cooperative);
    refuse_implicit(*stream);
    const int priority = attributes.priority.value_or(stream->priority);
    if (stream->capture) return capture_launch(*stream, std::move(kernel), priority, attributes);
    submit_command(lock, stream, std::move(kernel), nullptr, priority);
  });
}

// The calling thread may neither wait for the stream nor ask about it while it, or what it stands for, captures.
void refuse_any_capture(const Stream& stream) {
  refuse_capturing(stream);
  refuse_implicit(stream);
  refuse_in_capture();
}

CUresult record_event(CUevent event_handle, CUstream stream_handle, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Event> event = find_event(event_handle);
    const std::shared_ptr<Stream> stream = find_stream(stream_handle);
    require(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE);
    if (flags != 0) {
      require(stream->capture != nullptr);
      return capture_command(*stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, EventCommand{event}, 0);
    }
    refuse_implicit(*stream);
    if (stream->capture) return capture_record(*stream, *event);
    auto record = std::make_shared<Record>();
    record->context = stream->context.get();
    submit_command(lock, stream, {}, record);
    event->record = std::move(record);
    event->capture = nullptr;
    event->captured.clear();
  });
}

std::shared_ptr<Event> find_uncaptured(CUevent handle) {
  std::shared_ptr<Event> event = find_event(handle);
  refuse_captured_event(*event);
  refuse_in_capture();
  return event;
}

}  // namespace

KernelCommand make_kernel_command(CUfunction handle, const std::shared_ptr<Context>& context,
                                  const CUlaunchConfig& config, void** params, void** extra, bool cooperative) {
  const Function& function = find_function(handle, context);
  require(function.module->context == context, CUDA_ERROR_INVALID_HANDLE);
  const std::uint64_t threads = std::uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
  require(config.gridDimX != 0 && config.gridDimY != 0 && config.gridDimZ != 0 && threads != 0 &&
          config.gridDimX <= INT32_MAX && config.gridDimY <= 65535 && config.gridDimZ <= 65535 &&
          config.blockDimX <= 1024 && config.blockDimY <= 1024 && config.blockDimZ <= 64 && threads <= 1024);
  require(config.sharedMemBytes <= static_cast<unsigned>(function.dynamic_shared_bytes_max));
  const std::uint32_t per_sm = occupancy(*function.spec, static_cast<std::uint32_t>(threads), config.sharedMemBytes);
  require(per_sm != 0, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  KernelCommand kernel;
  kernel.spec = function.spec;
  kernel.function = handle;
  kernel.context = context.get();
  kernel.cooperative = cooperative;
  kernel.config = config;
  kernel.config.hStream = nullptr;
  kernel.config.attrs = nullptr;
  kernel.config.numAttrs = 0;
  kernel.blocks = std::uint64_t{config.gridDimX} * config.gridDimY * config.gridDimZ;
  kernel.blocks_per_sm = per_sm;
  require(kernel.blocks <= std::uint64_t{1} << 40);
  require(!cooperative || kernel.blocks <= std::uint64_t{per_sm} * kSmCount, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  kernel.params = gather_params(*kernel.spec, params, extra);
  return kernel;
}

}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- launches

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void** params, void** extra) {
  return launch({gx, gy, gz, bx, by, bz, shared, nullptr, nullptr, 0}, function, params, extra, stream);
}

CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, CUstream stream, void** params, void** extra) {
  return launch({gx, gy, gz, bx, by, bz, shared, nullptr, nullptr, 0}, function, params, extra, per_thread(stream));
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
  CUlaunchConfig config{gx, gy, gz, bx, by, bz, shared, nullptr, nullptr, 0};
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
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_implicit(*stream);
    const HostCommand host{function, data};
    if (stream->capture) return capture_command(*stream, CU_GRAPH_NODE_TYPE_HOST, host, 0);
    submit_command(lock, stream, host);
  });
}

CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn function, void* data) {
  return cuLaunchHostFunc(per_thread(stream), function, data);
}

// ---- streams

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  if ((flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(stream, [&] { return open_stream(current_context(), flags, priority, current_green()); });
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  return with_driver([&](Lock&) {
    const std::shared_ptr<Stream> stream = find(driver().streams, handle);
    driver().streams.erase(stream.get());
    close_stream(stream);
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_any_capture(*stream);
    synchronize_stream(lock, stream);
  });
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) { return cuStreamSynchronize(per_thread(stream)); }

CUresult cuStreamQuery(CUstream handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_any_capture(*stream);
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
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(stream_handle);
    const std::shared_ptr<Event> event = find(driver().events, event_handle);
    if (flags != 0) {
      require(stream->capture != nullptr);
      return capture_command(*stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, EventCommand{event}, 0);
    }
    refuse_implicit(*stream);
    if (stream->capture || event->capture) return capture_wait(stream, *event);
    if (event->record) submit_wait(lock, stream, event->record);
  });
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
  return cuStreamWaitEvent(per_thread(stream), event, flags);
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return give(priority, [&] { return find_stream(handle)->priority; });
}

CUresult cuStreamGetPriority_ptsz(CUstream stream, int* priority) {
  return cuStreamGetPriority(per_thread(stream), priority);
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  return give(flags, [&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_capturing(*stream);
    return stream->flags;
  });
}

CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned* flags) { return cuStreamGetFlags(per_thread(stream), flags); }

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  return give(id, [&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_capturing(*stream);
    return stream->id;
  });
}

CUresult cuStreamGetId_ptsz(CUstream stream, unsigned long long* id) { return cuStreamGetId(per_thread(stream), id); }

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return give(context, [&] { return reinterpret_cast<CUcontext>(find_stream(handle)->context.get()); });
}

CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext* context) {
  return cuStreamGetCtx(per_thread(stream), context);
}

// ---- events

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  const bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  if ((flags & ~kKnown) != 0 || ((flags & CU_EVENT_INTERPROCESS) != 0 && timed)) return CUDA_ERROR_INVALID_VALUE;
  return give(event, [&] {
    auto made = std::make_shared<Event>();
    made->context = current_context();
    made->flags = flags;
    driver().events.emplace(made.get(), made);
    return reinterpret_cast<CUevent>(made.get());
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return with_driver(
      [&](Lock&) { require(driver().events.erase(reinterpret_cast<Event*>(event)) != 0, CUDA_ERROR_INVALID_HANDLE); });
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
    const std::shared_ptr<Event> event = find_uncaptured(handle);
    const std::shared_ptr<Record> record = event->record;
    if (!record || record->done) return CUDA_SUCCESS;
    progress(lock);
    if (event->context->sticky != CUDA_SUCCESS) return event->context->sticky;
    return record->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Event> event = find_uncaptured(handle);
    const std::shared_ptr<Record> record = event->record;
    if (!record) return;
    wait_until(lock, event->context->device, [&] { return record->done || event->context->slot < 0; });
    require_sound(*event->context);
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Event> start = find_event(start_handle);
    const std::shared_ptr<Event> end = find_event(end_handle);
    require(!start->capture && !end->capture, CUDA_ERROR_CAPTURED_EVENT);
    require(((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0 && start->record && end->record,
            CUDA_ERROR_INVALID_HANDLE);
    progress(lock);
    if (!start->record->done || !end->record->done) return CUDA_ERROR_NOT_READY;
    const std::int64_t took_ns = end->record->finish_ns - start->record->finish_ns;
    *milliseconds = static_cast<float>(static_cast<double>(gpu(end->context->device).shared.to_real_ns(took_ns)) / 1e6);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime(milliseconds, start, end);
}

}  // extern "C"
#pragma GCC visibility pop
