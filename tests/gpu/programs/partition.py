"""Regions with a part of the SMs: where their kernels run, in which order, and what they compute."""

import threading

import cudasched
import cupy
import torch

FRACTION = 0.5
STEP = 8
SHARED = 2
"""SMs that all green contexts may use besides their own, once a kernel with dynamic parallelism is loaded."""

SOURCE = r"""
extern "C" __global__ void visit(int* seen) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0) atomicAdd(&seen[sm], 1);
  for (long long begin = clock64(); clock64() - begin < 200000;) {}
}
"""

kernel = cupy.RawKernel(SOURCE, "visit")
sms = torch.cuda.get_device_properties(0).multi_processor_count
most = int(FRACTION * sms) // STEP * STEP
assert torch.cuda.current_stream().cuda_stream == 0


def visit(seen: torch.Tensor, stream: int) -> None:
    with cupy.cuda.ExternalStream(stream):
        kernel((sms * 8,), (1024,), (cupy.asarray(seen),))


def visited(stream: int) -> int:
    seen = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    visit(seen, stream)
    torch.cuda.synchronize()
    assert int(seen.sum()) == sms * 8
    return int((seen > 0).sum())


with cudasched.region("latency", stream="inherit"):  # from here on there is a gate
    bare = visited(torch.cuda.Stream().cuda_stream)
assert bare > most + SHARED, bare

region = cudasched.region("best_effort", sm_fraction=FRACTION)
with region:
    part = torch.cuda.current_stream()
    assert part.cuda_stream == region.stream
    inside = visited(part.cuda_stream)
assert torch.cuda.current_stream().cuda_stream == 0
assert most // 2 < inside <= most + SHARED, (inside, most)
small = cudasched.region("best_effort", sm_fraction=0.01)
with small:
    assert 1 <= visited(small.stream) <= STEP + SHARED

# Class and offload belong to the stream, from any thread.
before = cudasched.state()
with region:
    for _ in range(200):
        torch.sin(torch.ones(1024, device="cuda"))
    torch.cuda.synchronize()
after = cudasched.state()
assert after.best_effort_launches >= before.best_effort_launches + 400, (before, after)
assert after.offloaded_launches > before.offloaded_launches, (before, after)

streams: list[int] = []


def enter_on_a_new_thread() -> None:
    with region:
        streams.append(torch.cuda.current_stream().cuda_stream)


thread = threading.Thread(target=enter_on_a_new_thread)
thread.start()
thread.join()
assert streams == [region.stream], streams

# Ordered after what was before, and before what comes after.
x = torch.zeros(1 << 24, device="cuda")
for i in range(50):
    x.fill_(i)
    x.mul_(3)
    with region:
        x.add_(1)
        x.mul_(2)
    x.sub_(2)
    assert float(x[-1]) == 6 * i, (i, float(x[-1]))
    assert float(x[0]) == 6 * i, (i, float(x[0]))


def compute() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(1024, 1024, device="cuda", generator=generator)
    exact = [torch.softmax(a, -1), a.sort(-1).values, a.cumsum(0), (a.sin() * a).relu()]
    # cuBLAS may choose another kernel for fewer SMs.
    return [*exact, a @ a]


expected = compute()
with region:
    found = compute()
for mine, theirs in zip(found[:-1], expected[:-1], strict=True):
    assert torch.equal(mine, theirs)
torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=1e-3)
print("matrix products are", "equal" if torch.equal(found[-1], expected[-1]) else "close", "to those on all SMs")

# A graph keeps the SMs that it was captured on.
seen = torch.zeros(1024, dtype=torch.int32, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    visit(seen, torch.cuda.current_stream().cuda_stream)
with region:
    graph.replay()
torch.cuda.synchronize()
outside = int((seen > 0).sum())
assert outside > most + SHARED, outside
seen.zero_()
graph = torch.cuda.CUDAGraph()
with region, torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
    visit(seen, torch.cuda.current_stream().cuda_stream)
graph.replay()
torch.cuda.synchronize()
print("a graph captured in the region ran on", int((seen > 0).sum()), "SMs")

state = cudasched.state()
assert not state.off_reason, state
print(f"all {sms} SMs: {bare} seen; part of {most}: {inside} seen; untracked launches: {state.untracked_launches}")
print("done")
