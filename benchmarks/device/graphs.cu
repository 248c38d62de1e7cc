// The kernels that graphs are measured with: small ones, as pipelines have them. Relocatable, for CUDA's device
// runtime.

__device__ unsigned long long now_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// One stage of a pipeline: about a microsecond.
extern "C" __global__ void stage(float* data, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] = data[i] * 0.5f + 1.0f;
}

// One turn of a loop: sets whether there is another.
extern "C" __global__ void turn(cudaGraphConditionalHandle condition, unsigned long long* left) {
  if (*left > 0) --*left;
  cudaGraphSetConditional(condition, *left > 0);
}

// The same for a host that looks itself.
extern "C" __global__ void turn_for_host(unsigned long long* left) {
  if (*left > 0) --*left;
}

// The last node of a graph that launches itself again.
extern "C" __global__ void again(unsigned long long* left) {
  if (*left > 0) --*left;
  if (*left > 0) cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}

// Launches a graph and says when.
extern "C" __global__ void fire(cudaGraphExec_t graph, unsigned long long* launched_ns, unsigned* failed) {
  *launched_ns = now_ns();
  if (cudaGraphLaunch(graph, cudaStreamGraphFireAndForget) != cudaSuccess) *failed = 1;
}

// The same beside the graph that launches: as a sibling, whose end that graph does not wait for.
extern "C" __global__ void fire_sibling(cudaGraphExec_t graph, unsigned long long* launched_ns, unsigned* failed) {
  *launched_ns = now_ns();
  if (cudaGraphLaunch(graph, cudaStreamGraphFireAndForgetAsSibling) != cudaSuccess) *failed = 1;
}

// The first node of a graph that says when it ran.
extern "C" __global__ void arrived(unsigned long long* ns, volatile unsigned* for_host) {
  *ns = now_ns();
  *for_host = 1;
  __threadfence_system();
}

// A kernel that launches kernels.
extern "C" __global__ void child(unsigned long long* count) { atomicAdd(count, 1ull); }
extern "C" __global__ void parent(unsigned long long* count, unsigned children) {
  for (unsigned i = 0; i < children; ++i) child<<<1, 1>>>(count);
}
