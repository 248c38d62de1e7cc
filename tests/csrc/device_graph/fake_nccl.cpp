// As much of NCCL as csrc/device_graph calls. A sum is one host function on each stream; the last of a group to run
// adds up. Memory of the simulated driver is the host's. As NCCL's do, a communicator lives until no graph has a sum of
// it, and is destroyed with a call that captures forbid.
#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace {

struct Member {
  float* data;
  CUstream stream;
};

std::mutex mutex;
std::condition_variable graph_gone;

struct Communicator {
  int graphs = 0;
  CUstream stream = nullptr;  // of its own
};
std::atomic<int> communicators_alive{0};

// The graph that `stream` captures into holds the communicator.
int hold(Communicator* communicator, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  if (cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, nullptr, nullptr, nullptr) != CUDA_SUCCESS) return 1;
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return 0;
  {
    const std::scoped_lock lock(mutex);
    ++communicator->graphs;
  }
  const CUhostFn let_go = [](void* held) {
    const std::scoped_lock lock(mutex);
    --static_cast<Communicator*>(held)->graphs;
    graph_gone.notify_all();
  };
  CUuserObject object = nullptr;
  if (cuUserObjectCreate(&object, communicator, let_go, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) != CUDA_SUCCESS) return 1;
  return cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CUDA_SUCCESS ? 0 : 1;
}

struct Group {
  std::vector<Member> members;
  std::size_t count = 0;
  std::size_t arrived = 0;
};

Group* open_group = nullptr;
int open_groups = 0;

void arrive(void* data) {
  auto& group = *static_cast<Group*>(data);
  if (++group.arrived % group.members.size() != 0) return;
  for (std::size_t i = 0; i < group.count; ++i) {
    float sum = 0;
    for (const Member& member : group.members) sum += member.data[i];
    for (const Member& member : group.members) member.data[i] = sum;
  }
}

}  // namespace

extern "C" {

int ncclCommInitAll(void** communicators, int count, const int*) {
  for (int i = 0; i < count; ++i) {
    auto* const made = new Communicator;
    cuStreamCreate(&made->stream, CU_STREAM_NON_BLOCKING);
    communicators[i] = made;
  }
  communicators_alive += count;
  return 0;
}

int ncclCommDestroy(void* communicator) {
  auto* const known = static_cast<Communicator*>(communicator);
  {
    std::unique_lock lock(mutex);
    graph_gone.wait(lock, [&] { return known->graphs == 0; });
  }
  cuStreamSynchronize(known->stream);
  cuStreamDestroy(known->stream);
  delete known;
  --communicators_alive;
  return 0;
}

int fake_nccl_communicators() { return communicators_alive; }

int fake_nccl_open_groups() { return open_groups; }

int ncclGroupStart() {
  ++open_groups;
  open_group = std::make_unique<Group>().release();  // graphs may run it as long as the process lives
  static std::vector<std::unique_ptr<Group>> kept;
  kept.emplace_back(open_group);
  return 0;
}

int ncclAllReduce(const void*, void* data, std::size_t count, int, int, void* communicator, CUstream stream) {
  if (hold(static_cast<Communicator*>(communicator), stream) != 0) return 1;
  open_group->count = count;
  open_group->members.push_back({static_cast<float*>(data), stream});
  return 0;
}

int ncclGroupEnd() {
  --open_groups;
  for (const Member& member : open_group->members) {
    if (cuLaunchHostFunc(member.stream, arrive, open_group) != CUDA_SUCCESS) return 1;
  }
  return 0;
}

const char* ncclGetErrorString(int) { return "unhandled cuda error"; }
}
