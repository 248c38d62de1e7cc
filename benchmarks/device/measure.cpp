// What graphs save, against the same kernels launched one by one: prints one JSON object a group. Over the simulated
// driver it rehearses, less what launches from the device.
//
//   measure IMAGE GROUP...      IMAGE: machine code of graphs.cu, or an image of the simulated driver
//
// Groups: pipeline, loop, device, pool, peers.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "cudasched/graphs.hpp"

namespace graphs = cudasched::graphs;

namespace {

constexpr int kRepeats = 9;

void* library() {
  static void* const opened = dlopen("libcuda.so.1", RTLD_NOW);
  if (opened == nullptr) throw graphs::UnsupportedError("needs a GPU: there is no libcuda.so.1");
  return opened;
}

template <class Function>
Function* find(const char* name) {
  auto* const function = reinterpret_cast<Function*>(dlsym(library(), name));
  if (function == nullptr) throw graphs::UnsupportedError(std::string("the driver has no ") + name);
  return function;
}

void check(CUresult status, const char* name) {
  if (status != CUDA_SUCCESS) throw graphs::Error(std::string(name) + ": " + std::to_string(status), status);
}

// The function's type comes from cuda.h, its name in the library is given. Looked up once at each place.
#define CALL(function, name, ...)                                    \
  do {                                                               \
    static auto* const found_entry = find<decltype(function)>(name); \
    check(found_entry(__VA_ARGS__), name);                           \
  } while (false)

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Ours and the rival's times by turns; the ratio of the medians and the range of the ratios.
struct Comparison {
  std::vector<double> ours, theirs;

  template <class Ours, class Theirs>
  Comparison(Ours measure_ours, Theirs measure_theirs) {
    measure_ours();
    measure_theirs();
    for (int i = 0; i < kRepeats; ++i) {
      ours.push_back(measure_ours());
      theirs.push_back(measure_theirs());
    }
  }

  double value() const { return median(theirs) / median(ours); }

  void print(const char* name, bool comma) const {
    double low = 1e300;
    double high = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      low = std::min(low, theirs[i] / ours[i]);
      high = std::max(high, theirs[i] / ours[i]);
    }
    std::printf(
        "\"%s\": {\"value\": %.6g, \"low\": %.6g, \"high\": %.6g, \"n\": %zu, \"us\": %.6g, \"rival_us\": %.6g}%s",
        name, value(), low, high, ours.size(), median(ours), median(theirs), comma ? ", " : "");
  }
};

// The GPU, its kernels and some memory.
class Lab {
 public:
  explicit Lab(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string image((std::istreambuf_iterator<char>(file)), {});
    if (image.empty()) throw graphs::Error(path + ": cannot be read", CUDA_SUCCESS);
    CALL(cuInit, "cuInit", 0U);
    CALL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", &context, 0);
    CALL(cuCtxSetCurrent, "cuCtxSetCurrent", context);
    simulated = image.compare(0, 13, "cudasched-sim") == 0;
    if (simulated) {
      CALL(cuModuleLoadData, "cuModuleLoadData", &module_, image.c_str());
    } else {
      linked_ = std::make_unique<graphs::LinkedModule>(std::vector<std::string>{image});
      module_ = linked_->handle();
    }
    for (CUstream& made : streams) CALL(cuStreamCreate, "cuStreamCreate", &made, CU_STREAM_NON_BLOCKING);
    for (CUevent& made : events) CALL(cuEventCreate, "cuEventCreate", &made, CU_EVENT_DISABLE_TIMING);
    CALL(cuMemAlloc, "cuMemAlloc_v2", &data, kBytes);
    CALL(cuMemsetD8, "cuMemsetD8_v2", data, static_cast<unsigned char>(0), kBytes);
    void* host = nullptr;
    CALL(cuMemAllocHost, "cuMemAllocHost_v2", &host, std::size_t{64});
    pinned = static_cast<volatile unsigned long long*>(host);
    synchronize();
  }

  CUfunction function(const char* name) const {
    CUfunction found = nullptr;
    CALL(cuModuleGetFunction, "cuModuleGetFunction", &found, module_, name);
    return found;
  }

  void launch(CUfunction function, CUstream stream, std::vector<void*> parameters, unsigned blocks = 1,
              unsigned threads = 1) const {
    CALL(cuLaunchKernel, "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.data(),
         nullptr);
  }

  void set(CUdeviceptr where, unsigned long long value) const {
    CALL(cuMemcpyHtoD, "cuMemcpyHtoD_v2", where, static_cast<const void*>(&value), sizeof value);
  }
  unsigned long long get(CUdeviceptr where) const {
    unsigned long long value = 0;
    CALL(cuMemcpyDtoH, "cuMemcpyDtoH_v2", static_cast<void*>(&value), where, sizeof value);
    return value;
  }

  void synchronize() const {
    static auto* const entry = find<CUresult()>("cuCtxSynchronize");
    check(entry(), "cuCtxSynchronize");
  }
  void synchronize(CUstream stream) const { CALL(cuStreamSynchronize, "cuStreamSynchronize", stream); }

  static constexpr std::size_t kBytes = 1 << 20;
  bool simulated = false;
  CUcontext context = nullptr;
  CUstream streams[4] = {};
  CUevent events[8] = {};
  CUdeviceptr data = 0;
  volatile unsigned long long* pinned = nullptr;

 private:
  CUmodule module_ = nullptr;
  std::unique_ptr<graphs::LinkedModule> linked_;
};

// ---- pipelines: branches of small kernels that join every few stages
// ----------------------------------------------------

void pipeline(const Lab& lab) {
  constexpr int kStages = 24;
  constexpr int kJoinEvery = 8;
  constexpr std::size_t kBranches = 4;
  const int turns = lab.simulated ? 2 : 100;
  CUfunction const stage = lab.function("stage");
  unsigned count = 2048;
  const auto record = [](CUevent event, CUstream stream) { CALL(cuEventRecord, "cuEventRecord", event, stream); };
  const auto wait = [](CUstream stream, CUevent event) {
    CALL(cuStreamWaitEvent, "cuStreamWaitEvent", stream, event, 0U);
  };
  const auto body = [&] {
    record(lab.events[4], lab.streams[0]);
    for (std::size_t branch = 1; branch < kBranches; ++branch) wait(lab.streams[branch], lab.events[4]);
    for (int i = 0; i < kStages; ++i) {
      for (std::size_t branch = 0; branch < kBranches; ++branch) {
        CUdeviceptr part = lab.data + branch * 65536;
        lab.launch(stage, lab.streams[branch], {&part, &count}, 8, 256);
      }
      if ((i + 1) % kJoinEvery != 0) continue;
      for (std::size_t branch = 1; branch < kBranches; ++branch) {
        record(lab.events[branch], lab.streams[branch]);
        wait(lab.streams[0], lab.events[branch]);
      }
      if (i + 1 == kStages) break;
      record(lab.events[4], lab.streams[0]);
      for (std::size_t branch = 1; branch < kBranches; ++branch) wait(lab.streams[branch], lab.events[4]);
    }
  };
  const auto captured = [&] {
    graphs::Capture capture(lab.streams[0]);
    body();
    return capture.finish();
  };
  const graphs::Graph graph = captured();
  graphs::Executable replay(graph);
  const auto timed = [&](const auto& once) {
    lab.synchronize();
    const double begin = now_us();
    for (int i = 0; i < turns; ++i) once();
    lab.synchronize();
    return (now_us() - begin) / turns;
  };
  const Comparison compared([&] { return timed([&] { replay.launch(lab.streams[0]); }); }, [&] { return timed(body); });
  // What an update saves of making the graph executable anew.
  const auto host_time = [&](const auto& once) {
    const double begin = now_us();
    for (int i = 0; i < 5; ++i) once();
    return (now_us() - begin) / 5;
  };
  const Comparison updated([&] { return host_time([&] { replay.update(graph); }); },
                           [&] { return host_time([&] { const graphs::Executable anew(graph); }); });
  std::printf("{\"kernels\": %zu, ", graph.node_count());
  compared.print("graph_pipeline", true);
  updated.print("update_of_instantiation", false);
  std::printf("}\n");
}

// ---- loops whose end the device decides
// ---------------------------------------------------------------------------------

void loop(const Lab& lab) {
  const unsigned long long turns = lab.simulated ? 5 : 1000;
  CUdeviceptr left = lab.data;
  graphs::Graph graph;
  const graphs::Condition condition = graph.condition(1);
  const graphs::Conditional looped = graph.add_while(condition);
  graphs::Kernel turn;
  turn.function = lab.function("turn");
  graphs::Condition passed = condition;
  turn.parameters = {&passed.handle, &left};
  graphs::Builder(looped.bodies[0]).add_kernel(turn);
  const graphs::Executable replay(graph);
  CUfunction const for_host = lab.function("turn_for_host");
  CUstream const stream = lab.streams[0];
  auto* const copy = find<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2");
  const auto timed = [&](const auto& whole) {
    lab.set(left, turns);
    lab.synchronize();
    const double begin = now_us();
    whole();
    lab.synchronize();
    const double took = (now_us() - begin) / static_cast<double>(turns);
    if (lab.get(left) != 0) throw graphs::Error("a loop ended early", CUDA_SUCCESS);
    return took;
  };
  const Comparison compared([&] { return timed([&] { replay.launch(stream); }); },
                            [&] {
                              return timed([&] {
                                auto* const seen = const_cast<unsigned long long*>(lab.pinned);
                                unsigned long long host_left = turns;  // the simulated kernel counts nothing
                                do {
                                  if (lab.simulated) lab.set(left, --host_left);
                                  lab.launch(for_host, stream, {&left});
                                  if (copy(seen, left, 8, stream) != CUDA_SUCCESS)
                                    throw graphs::Error("copy", CUDA_SUCCESS);
                                  lab.synchronize(stream);
                                } while (*lab.pinned != 0);
                              });
                            });
  std::printf("{\"turns\": %llu, ", turns);
  compared.print("conditional_loop", false);
  std::printf("}\n");
}

// ---- launches from the device
// -------------------------------------------------------------------------------------------

void device(const Lab& lab) {
  if (lab.simulated) throw graphs::UnsupportedError("needs a GPU: no kernel of the simulated driver launches graphs");
  constexpr int kStages = 5;
  const unsigned long long turns = 500;
  CUdeviceptr left = lab.data;
  CUdeviceptr part = lab.data + 4096;
  unsigned count = 256;
  CUstream const stream = lab.streams[0];
  graphs::Kernel stage;
  stage.function = lab.function("stage");
  stage.block[0] = 256;
  stage.parameters = {&part, &count};
  const auto chain = [&](const char* last, std::vector<void*> parameters) {
    graphs::Graph made;
    std::vector<CUgraphNode> after;
    for (int i = 0; i < kStages; ++i) after = {made.add_kernel(stage, after)};
    graphs::Kernel end;
    end.function = lab.function(last);
    end.parameters = std::move(parameters);
    made.add_kernel(end, after);
    return made;
  };
  // A chain of launches, each decided by the one before: by the device, and by the host that waits and looks.
  const graphs::Graph chained = chain("again", {&left});
  const graphs::Executable on_device(chained, graphs::For::kDevice);
  const graphs::Graph single = chain("turn_for_host", {&left});
  const graphs::Executable on_host(single);
  on_device.upload(stream);
  on_host.upload(stream);
  auto* const copy = find<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2");
  const auto timed = [&](const auto& whole) {
    lab.set(left, turns);
    lab.synchronize();
    const double begin = now_us();
    whole();
    lab.synchronize();
    const double took = (now_us() - begin) / static_cast<double>(turns);
    if (lab.get(left) != 0) throw graphs::Error("a chain of launches ended early", CUDA_SUCCESS);
    return took;
  };
  const auto by_device = [&] { return timed([&] { on_device.launch(stream); }); };
  const Comparison chained_times(by_device, [&] {
    return timed([&] {
      do {
        on_host.launch(stream);
        if (copy(const_cast<unsigned long long*>(lab.pinned), left, 8, stream) != CUDA_SUCCESS) {
          throw graphs::Error("copy", CUDA_SUCCESS);
        }
        lab.synchronize(stream);
      } while (*lab.pinned != 0);
    });
  });
  // The same number of launches in a row by a host that need not look.
  const Comparison in_a_row(by_device, [&] {
    return timed([&] {
      for (unsigned long long i = 0; i < turns; ++i) on_host.launch(stream);
    });
  });

  // From the call to the first kernel: on the device by its timer; on the host until it sees what that kernel writes.
  CUdeviceptr launched_ns = lab.data + 8192;
  CUdeviceptr arrived_ns = lab.data + 8200;
  CUdeviceptr failed = lab.data + 8208;
  volatile unsigned long long* flag = lab.pinned;
  CUdeviceptr flag_address = reinterpret_cast<CUdeviceptr>(flag);
  graphs::Kernel arrived;
  arrived.function = lab.function("arrived");
  arrived.parameters = {&arrived_ns, &flag_address};
  const auto target = [&] {
    graphs::Graph made;
    std::vector<CUgraphNode> after{made.add_kernel(arrived)};
    for (int i = 0; i < kStages; ++i) after = {made.add_kernel(stage, after)};
    return made;
  };
  const graphs::Graph launched = target();
  const graphs::Executable from_host(launched);
  const graphs::Graph launched_too = target();
  const graphs::Executable from_device(launched_too, graphs::For::kDevice);
  from_host.upload(stream);
  from_device.upload(stream);
  unsigned long long handle = from_device.device_handle();
  const auto launcher = [&](const char* name) {
    graphs::Kernel fire;
    fire.function = lab.function(name);
    fire.parameters = {&handle, &launched_ns, &failed};
    graphs::Graph made;
    made.add_kernel(fire);
    return made;
  };
  const graphs::Graph firing_graph = launcher("fire");
  const graphs::Executable firing(firing_graph, graphs::For::kDevice);
  const graphs::Graph sibling_graph = launcher("fire_sibling");
  const graphs::Executable sibling(sibling_graph, graphs::For::kDevice);
  firing.upload(stream);
  sibling.upload(stream);
  lab.synchronize();
  lab.set(failed, 0);
  const auto device_latency = [&](const graphs::Executable& by) {
    std::vector<double> took;
    for (int i = 0; i < 21; ++i) {
      *flag = 0;
      by.launch(stream);
      lab.synchronize();
      for (const double begin = now_us();
           *flag == 0 && now_us() - begin < 1e6;) {  // a sibling may outlive its launcher
      }
      lab.synchronize();
      if (*flag == 0 || lab.get(failed) != 0) throw graphs::Error("a launch from the device failed", CUDA_SUCCESS);
      // The timer of some GPUs goes on by a microsecond at a time.
      took.push_back(std::max(static_cast<double>(lab.get(arrived_ns) - lab.get(launched_ns)) / 1000, 0.1));
    }
    return median(took);
  };
  const auto host_latency = [&] {
    std::vector<double> took;
    for (int i = 0; i < 21; ++i) {
      *flag = 0;
      lab.synchronize();
      const double begin = now_us();
      from_host.launch(stream);
      while (*flag == 0 && now_us() - begin < 1e6) {
      }
      took.push_back(now_us() - begin);
      lab.synchronize();
      if (*flag == 0) throw graphs::Error("a launch from the host failed", CUDA_SUCCESS);
    }
    return median(took);
  };
  const Comparison latency([&] { return device_latency(firing); }, host_latency);
  const Comparison as_sibling([&] { return device_latency(sibling); }, host_latency);

  // Children of a kernel, against the same kernels launched by the host.
  CUdeviceptr counted = lab.data + 8216;
  lab.set(counted, 0);
  unsigned children = 64;
  CUfunction const parent = lab.function("parent");
  CUfunction const child = lab.function("child");
  const auto whole = [&](const auto& once) {
    lab.synchronize();
    const double begin = now_us();
    once();
    lab.synchronize();
    return now_us() - begin;
  };
  const Comparison dynamic([&] { return whole([&] { lab.launch(parent, stream, {&counted, &children}); }); },
                           [&] {
                             return whole([&] {
                               for (unsigned i = 0; i < children; ++i) lab.launch(child, stream, {&counted});
                             });
                           });
  if (lab.get(counted) != 2ULL * (kRepeats + 1) * children) throw graphs::Error("children are missing", CUDA_SUCCESS);
  std::printf("{\"launches\": %llu, ", turns);
  chained_times.print("decided_by_the_one_before", true);
  in_a_row.print("in_a_row", true);
  latency.print("fire_and_forget_latency", true);
  as_sibling.print("sibling_latency", true);
  dynamic.print("child_kernels", false);
  std::printf("}\n");
}

// ---- memory and several GPUs
// ------------------------------------------------------------------------------------------

// Arrays that a step needs for a while: from a pool, and by nodes that allocate and free.
void pool(const Lab& lab) {
  constexpr std::size_t kSteps = 16;
  constexpr std::size_t kArray = 1 << 20;
  const int turns = lab.simulated ? 2 : 100;
  CUfunction const stage = lab.function("stage");
  CUstream const stream = lab.streams[0];
  unsigned count = 2048;
  std::vector<graphs::Use> uses;
  for (std::uint32_t step = 0; step < kSteps; ++step) uses.push_back({kArray, step, step});
  const graphs::StaticPool memory(uses);
  const auto from_pool = [&] {
    graphs::Capture capture(stream);
    for (std::size_t step = 0; step < kSteps; ++step) {
      CUdeviceptr array = memory.address(step);
      lab.launch(stage, stream, {&array, &count}, 8, 256);
    }
    return capture.finish();
  }();
  const auto by_nodes = [&] {
    graphs::Capture capture(stream);
    for (std::size_t step = 0; step < kSteps; ++step) {
      CUdeviceptr array = 0;
      CALL(cuMemAllocAsync, "cuMemAllocAsync", &array, kArray, stream);
      lab.launch(stage, stream, {&array, &count}, 8, 256);
      CALL(cuMemFreeAsync, "cuMemFreeAsync", array, stream);
    }
    return capture.finish();
  }();
  const graphs::Executable pooled(from_pool);
  const graphs::Executable allocating(by_nodes);
  const auto timed = [&](const graphs::Executable& replay) {
    lab.synchronize();
    const double begin = now_us();
    for (int i = 0; i < turns; ++i) replay.launch(stream);
    lab.synchronize();
    return (now_us() - begin) / turns;
  };
  const Comparison compared([&] { return timed(pooled); }, [&] { return timed(allocating); });
  std::printf("{\"arrays\": %zu, \"pool_bytes\": %zu, \"array_bytes\": %zu, ", kSteps, memory.bytes(), kSteps * kArray);
  compared.print("pool_of_allocation_nodes", false);
  std::printf("}\n");
}

// Small sums over two GPUs, captured and one by one.
void peers(const Lab& lab) {
  int gpus = 0;
  CALL(cuDeviceGetCount, "cuDeviceGetCount", &gpus);
  if (gpus < 2) throw graphs::UnsupportedError("needs two GPUs");
  constexpr int kSums = 20;
  constexpr std::size_t kCount = 1024;
  const std::vector<int> devices{0, 1};
  graphs::Collectives collectives(devices);
  std::vector<CUcontext> contexts(2);
  std::vector<CUstream> streams(2);
  std::vector<CUdeviceptr> data(2);
  const auto use = [&](std::size_t gpu) { CALL(cuCtxSetCurrent, "cuCtxSetCurrent", contexts[gpu]); };
  const auto on_each = [&](const auto& once) {
    for (std::size_t gpu = 0; gpu < 2; ++gpu) {
      use(gpu);
      once(gpu);
    }
    use(0);
  };
  for (std::size_t gpu = 0; gpu < 2; ++gpu) {
    CALL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", &contexts[gpu], devices[gpu]);
  }
  on_each([&](std::size_t gpu) {
    CALL(cuStreamCreate, "cuStreamCreate", &streams[gpu], CU_STREAM_NON_BLOCKING);
    CALL(cuMemAlloc, "cuMemAlloc_v2", &data[gpu], kCount * sizeof(float));
    CALL(cuMemsetD8, "cuMemsetD8_v2", data[gpu], static_cast<unsigned char>(0), kCount * sizeof(float));
    lab.synchronize();
  });
  const auto sums = [&] {
    for (int i = 0; i < kSums; ++i) collectives.sum(data, kCount, streams);
  };
  sums();
  on_each([&](std::size_t) { lab.synchronize(); });
  std::vector<graphs::Executable> replays;
  {
    graphs::Capture first(streams[0]);
    graphs::Capture second(streams[1]);
    sums();
    const graphs::Graph ends[] = {first.finish(), second.finish()};
    on_each([&](std::size_t gpu) { replays.emplace_back(ends[gpu]); });
  }
  const auto timed = [&](const auto& once) {
    on_each([&](std::size_t) { lab.synchronize(); });
    const double begin = now_us();
    for (int i = 0; i < 20; ++i) once();
    on_each([&](std::size_t) { lab.synchronize(); });
    return (now_us() - begin) / (20 * kSums);
  };
  const auto replay = [&] { on_each([&](std::size_t gpu) { replays[gpu].launch(streams[gpu]); }); };
  const Comparison compared([&] { return timed(replay); }, [&] { return timed(sums); });
  std::printf("{\"sums\": %d, \"floats\": %zu, ", kSums, kCount);
  compared.print("captured_sums", false);
  std::printf("}\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "measure IMAGE GROUP...\n");
    return 2;
  }
  const std::map<std::string, void (*)(const Lab&)> groups{
      {"pipeline", pipeline}, {"loop", loop}, {"device", device}, {"pool", pool}, {"peers", peers}};
  int status = 0;
  try {
    const Lab lab(arguments[1]);
    for (int i = 2; i < count; ++i) {
      const auto group = groups.find(arguments[i]);
      if (group == groups.end()) throw graphs::Error(std::string("no group ") + arguments[i], CUDA_SUCCESS);
      try {
        group->second(lab);
        std::fflush(stdout);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", arguments[i], error.what());
        status = dynamic_cast<const graphs::UnsupportedError*>(&error) != nullptr ? 4 : 1;
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return dynamic_cast<const graphs::UnsupportedError*>(&error) != nullptr ? 4 : 1;
  }
  return status;
}
