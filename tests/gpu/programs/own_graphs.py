"""cudasched.graphs on a GPU: one part of it, whose name is the argument."""

from __future__ import annotations

import sys
from ctypes import c_uint32, c_uint64

import torch
from cudasched import graphs
from kernels import compiled, pointer

SOURCE = """
extern "C" __global__ void add(unsigned long long* counter, unsigned long long value) { atomicAdd(counter, value); }
extern "C" __global__ void countdown(cudaGraphConditionalHandle condition, unsigned long long* left) {
  if (*left > 0) --*left;
  cudaGraphSetConditional(condition, *left > 0);
}
extern "C" __global__ void choose(cudaGraphConditionalHandle one, cudaGraphConditionalHandle other, unsigned* value) {
  cudaGraphSetConditional(one, *value);
  if (other != 0) cudaGraphSetConditional(other, *value);
}
extern "C" __global__ void again(unsigned long long* left) {
  if (*left > 0) --*left;
  if (*left > 0) cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}
extern "C" __global__ void fire(cudaGraphExec_t graph, unsigned* status) {
  *status = cudaGraphLaunch(graph, cudaStreamGraphFireAndForget);
}
extern "C" __global__ void sibling(cudaGraphExec_t graph, unsigned* status) {
  *status = cudaGraphLaunch(graph, cudaStreamGraphFireAndForgetAsSibling);
}
extern "C" __global__ void tail(cudaGraphExec_t graph, unsigned* status) {
  *status = cudaGraphLaunch(graph, cudaStreamGraphTailLaunch);
}
extern "C" __global__ void parent(unsigned long long* counter, unsigned children) {
  for (unsigned i = 0; i < children; ++i) add<<<1, 1>>>(counter, 1);
}
"""


def linked() -> graphs.LinkedModule:
    return graphs.LinkedModule([compiled(SOURCE, relocatable=True)])


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cuda")


def capture_and_update() -> None:
    stream = torch.cuda.Stream()
    data = torch.zeros(1000, device="cuda")
    data.add_(1).mul_(0)  # the kernels are loaded before the capture
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        with graphs.capture(stream) as captured:
            data.add_(1)
            data.mul_(2)
        replay = captured.graph.instantiate()
        with graphs.capture(stream) as other:
            data.add_(2)
            data.mul_(2)
    replay.upload(stream)
    replay.launch(stream)
    stream.synchronize()
    assert data[0].item() == 2 and data[999].item() == 2, data
    assert replay.update(other.graph).done
    replay.launch(stream)
    stream.synchronize()
    assert data[0].item() == 8, data
    empty = graphs.Graph()
    empty.add_fill(data.data_ptr(), 0, 4000)
    assert not replay.update(empty).done
    replay.launch(stream)
    stream.synchronize()
    assert data[0].item() == 20, data


def conditional() -> None:
    module, stream = linked(), torch.cuda.Stream()
    add, countdown, choose = (module.function(name) for name in ("add", "countdown", "choose"))
    if graphs.driver_version() < 12040:
        print("done: an older driver")
        return
    counter, left = numbers(0), numbers(5)
    graph = graphs.Graph()
    turns = graph.condition(1)
    loop = graph.add_while(turns)
    first = loop.bodies[0].add_kernel(add, 1, 1, [pointer(counter), c_uint64(1)])
    loop.bodies[0].add_kernel(countdown, 1, 1, [c_uint64(turns), pointer(left)], after=[first])
    torch.cuda.synchronize()
    replay = graph.instantiate()
    replay.launch(stream)
    stream.synchronize()
    assert counter.tolist() == [5] and left.tolist() == [0], (counter, left)
    replay.launch(stream)  # begins with 1 again, and ends after one turn
    stream.synchronize()
    assert counter.tolist() == [6], counter

    newer = graphs.driver_version() >= 12080
    for value in range(4):
        counter, wanted = numbers(0), torch.tensor([value], dtype=torch.int32, device="cuda")
        graph = graphs.Graph()
        choice, other = graph.condition(), graph.condition() if newer else 0
        chosen = graph.add_kernel(choose, 1, 1, [c_uint64(choice), c_uint64(other), pointer(wanted)])
        either = graph.add_if(choice, with_else=newer, after=[chosen])
        for number, body in enumerate(either.bodies):
            body.add_kernel(add, 1, 1, [pointer(counter), c_uint64(1 + number)])
        if newer:
            cases = graph.add_switch(other, 3, after=[either.node])
            for number, body in enumerate(cases.bodies):
                body.add_kernel(add, 1, 1, [pointer(counter), c_uint64(10 * (1 + number))])
        torch.cuda.synchronize()
        graph.instantiate().launch(stream)
        stream.synchronize()
        right = (1 if value else 2 if newer else 0) + (10 * (1 + value) if newer and value < 3 else 0)
        assert counter.tolist() == [right], (value, counter)


def device_launch() -> None:
    module, stream = linked(), torch.cuda.Stream()
    counter, left = numbers(0), numbers(7)
    graph = graphs.Graph()
    first = graph.add_kernel(module.function("add"), 1, 1, [pointer(counter), c_uint64(1)])
    graph.add_kernel(module.function("again"), 1, 1, [pointer(left)], after=[first])
    again = graph.instantiate(device_launch=True)
    torch.cuda.synchronize()
    again.upload(stream)
    again.launch(stream)
    stream.synchronize()
    assert counter.tolist() == [7] and left.tolist() == [0], (counter, left)

    for way in ("fire", "tail", "sibling"):
        counter, status = numbers(0), torch.ones(1, dtype=torch.int32, device="cuda")
        target = graphs.Graph()
        target.add_kernel(module.function("add"), 1, 1, [pointer(counter), c_uint64(3)])
        launched = target.instantiate(device_launch=True)
        launcher = graphs.Graph()
        launcher.add_kernel(module.function(way), 1, 1, [c_uint64(launched.handle), pointer(status)])
        launching = launcher.instantiate(device_launch=True)
        torch.cuda.synchronize()
        launched.upload(stream)
        launching.upload(stream)
        launching.launch(stream)
        torch.cuda.synchronize()
        assert status.tolist() == [0] and counter.tolist() == [3], (way, status, counter)


def dynamic_parallelism() -> None:
    module, stream = linked(), torch.cuda.Stream()
    counter = numbers(0)
    graph = graphs.Graph()
    graph.add_kernel(module.function("parent"), 1, 1, [pointer(counter), c_uint32(50)])
    torch.cuda.synchronize()
    graph.instantiate().launch(stream)
    stream.synchronize()
    assert counter.tolist() == [50], counter


def pool() -> None:
    stream = torch.cuda.Stream()
    wanted = [graphs.Use(4096, 0, 0), graphs.Use(4096, 1, 1), graphs.Use(8192, 0, 1)]
    memory = graphs.Pool(wanted)
    assert memory.nbytes == 4096 + 8192 and memory.address(0) == memory.address(1)
    replays = []
    for use in (0, 1):
        graph = graphs.Graph()
        filled = graph.add_fill(memory.address(use), use + 1, 4096)
        graph.add_copy(memory.address(2) + 4096 * use, memory.address(use), 4096, after=[filled])
        replays.append(graph.instantiate())
    result = torch.zeros(8192, dtype=torch.uint8, device="cuda")
    out = graphs.Graph()
    out.add_copy(result.data_ptr(), memory.address(2), 8192)
    torch.cuda.synchronize()
    for replay in (*replays, out.instantiate()):
        replay.launch(stream)
    stream.synchronize()
    assert bool((result[:4096] == 1).all()) and bool((result[4096:] == 2).all())


def two_gpus() -> None:
    import ctypes

    from kernels import call

    contexts = []
    for device in (0, 1):
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        contexts.append(context.value)
    for one, other in (contexts, contexts[::-1]):
        graphs.enable_peer_access(one, other)
        graphs.enable_peer_access(one, other)  # again: nothing

    # One graph, whose copy reads the other GPU's memory.
    here = torch.zeros(1000, device="cuda:0")
    there = torch.arange(1000, dtype=torch.float32, device="cuda:1")
    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    graph = graphs.Graph()
    graph.add_copy(here.data_ptr(), there.data_ptr(), 4000)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    graph.instantiate().launch(streams[0])
    streams[0].synchronize()
    assert torch.equal(here.cpu(), there.cpu())

    # A graph a GPU, with a sum over both in each.
    collectives = graphs.Collectives([0, 1])
    data = [torch.full((1 << 16,), float(device + 1), device=f"cuda:{device}") for device in (0, 1)]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    collectives.sum([one.data_ptr() for one in data], 1 << 16, streams)  # NCCL sets itself up
    for stream in streams:
        stream.synchronize()
    assert all(one[5].item() == 3 for one in data), data
    with graphs.capture(streams[0]) as first, graphs.capture(streams[1]) as second:
        collectives.sum([one.data_ptr() for one in data], 1 << 16, streams)
    replays = []
    for device, captured in enumerate((first, second)):
        with torch.cuda.device(device):
            replays.append(captured.graph.instantiate())
    for _ in range(3):
        for device, replay in enumerate(replays):
            with torch.cuda.device(device):
                replay.launch(streams[device])
    for stream in streams:
        stream.synchronize()
    assert all(one[5].item() == 24 for one in data), data


PARTS = {
    one.__name__: one for one in (capture_and_update, conditional, device_launch, dynamic_parallelism, pool, two_gpus)
}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
    print("done")
