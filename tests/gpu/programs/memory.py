"""What PyTorch programs do with memory under cudasched; each prints `done` at its end.

python memory.py limit GIB          # under `cudasched run --memory-limit`: GIB is the limit
python memory.py keep GIB           # best effort: caches so much, then says `kept` and waits for a line
python memory.py silent GIB         # the same, in a program that says nothing of its cache
python memory.py need GIB           # latency: allocates so much, and says in how many ms
python memory.py fill GIB           # allocates all but so much, then says `kept` and waits for a line
python memory.py accounts           # bytes at the driver's door against PyTorch's own
python memory.py pageable           # best effort, pageable: large tensors in chunks, under PyTorch's own allocator
python memory.py parked GIB         # best effort, pageable: fills so much, says `kept`, works until a line comes
python memory.py observed           # bytes by `cudasched.torch.memory()` against PyTorch's own, at every step
"""

import sys
import time

import cudasched
import cudasched.torch
import torch

GIB = 1 << 30


def empty(gib: float) -> torch.Tensor:
    return torch.empty(int(gib * GIB), dtype=torch.uint8, device="cuda")


def mine() -> cudasched.Client:
    import os

    time.sleep(0.1)  # the ticker's time
    found = [c for device in cudasched.status() for c in device.clients if c.pid == os.getpid()]
    return max(found, key=lambda client: client.memory_bytes)


def wait_until_asked() -> None:
    """Returns when the engine's thread that empties the cache waits for requests."""
    from pathlib import Path

    until = time.monotonic() + 60
    while time.monotonic() < until:
        for task in Path("/proc/self/task").iterdir():
            name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            if (name, rest[0]) == ("cudasched-mem", "S"):
                return
        time.sleep(0.01)
    raise AssertionError(f"the engine has found no cache: {cudasched.state()}")


def limit(gib: float) -> None:
    torch.ones(1, device="cuda").add_(1)
    free, total = torch.cuda.mem_get_info()
    assert total == int(gib * GIB) and free <= total, (free, total)
    assert torch.cuda.get_device_properties(0).total_memory == total
    kept = empty(gib / 2)
    try:
        empty(gib)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("no error beyond the limit")
    again = empty(gib / 4)  # and it goes on
    assert torch.cuda.mem_get_info()[0] <= gib * GIB / 4
    del kept, again
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5)  # of the limit, not of the GPU
    try:
        empty(gib * 0.6)
    except torch.OutOfMemoryError:
        return
    raise AssertionError("no error beyond the fraction")


def silent(gib: float) -> None:
    keep(gib, say=False)


def keep(gib: float, say: bool = True) -> None:
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    if say:
        cudasched.torch.give_back()
    blocks = [empty(1) for _ in range(int(gib))]
    small = torch.arange(1 << 20, device="cuda")
    del blocks
    wait_until_asked()
    print("kept", flush=True)
    sys.stdin.readline()
    assert torch.equal(small.cpu(), torch.arange(1 << 20)), "what is used stays"
    assert torch.cuda.memory_reserved() < GIB, torch.cuda.memory_reserved()
    given = mine().memory_given_bytes
    assert given >= (gib - 1) * GIB, f"given {given}, kept {gib} GiB"
    empty(1)  # and it can allocate again


def parked(gib: float) -> None:
    """All bytes, and a chain of products that runs meanwhile, are as without a neighbour that needs the memory."""
    import select

    torch.manual_seed(1)
    block = torch.randint(0, 1 << 40, (int(gib * GIB) // 8,), device="cuda")
    expected = block.sum().item()
    factor = torch.randn(2048, 2048, device="cuda") / 45

    def chain(steps: int) -> torch.Tensor:
        product = factor.clone()
        for _ in range(steps):
            product = (product @ factor).tanh()
        return product

    wait_until_asked()
    print("kept", flush=True)
    rounds = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        rounds.append(chain(50).double().sum())
        torch.cuda.synchronize()
    assert block.sum().item() == expected
    assert len(set(torch.stack(rounds).tolist())) == 1, "rounds differ"
    given = mine().memory_given_bytes
    assert given > 0, "nothing was moved"
    print(f"rounds {len(rounds)}, moved {given / GIB:.1f} GiB")


def need(gib: float) -> None:
    began = time.perf_counter()
    with cudasched.region("latency"):
        block = empty(gib)
    print(f"ms {(time.perf_counter() - began) * 1e3:.1f}")
    block[::4096].fill_(7)
    torch.cuda.synchronize()


def fill(gib: float) -> None:
    torch.ones(1, device="cuda").add_(1)
    block = empty(torch.cuda.mem_get_info()[0] / GIB - gib)
    print("kept", flush=True)
    sys.stdin.readline()
    del block


def accounts(_: float) -> None:
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    before = mine().memory_bytes - torch.cuda.memory_reserved()
    for _round in range(20):
        kept = [empty(0.1 * (1 + i % 5)) for i in range(10)]
        del kept[::2]
        if _round % 5 == 0:
            torch.cuda.empty_cache()
        assert mine().memory_bytes - torch.cuda.memory_reserved() == before


def pageable(_: float) -> None:
    import ctypes

    cuda = ctypes.CDLL("libcuda.so.1")
    torch.ones(1, device="cuda").add_(1)

    def cost_us(mib: int) -> float:
        """Of an allocation and its free, the median."""
        times, pointer = [], ctypes.c_uint64()
        for _ in range(21):
            begun = time.perf_counter()
            assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)) == 0
            assert cuda.cuMemFree_v2(pointer) == 0
            times.append(time.perf_counter() - begun)
        return sorted(times)[10] * 1e6

    sizes = (2, 20, 32, 256, 2048)
    in_chunks = [cost_us(mib) for mib in sizes]
    values = torch.arange(600 << 20, device="cuda", dtype=torch.int32)  # 75 chunks
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    last = ctypes.c_uint64(values.data_ptr() + values.nbytes - 1)
    assert cuda.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), last) == 0
    assert (begin.value, size.value) == (values.data_ptr(), values.nbytes), (begin, size)
    context, current = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuPointerGetAttribute(ctypes.byref(context), 1, last) == 0  # CU_POINTER_ATTRIBUTE_CONTEXT
    assert cuda.cuCtxGetCurrent(ctypes.byref(current)) == 0 and context.value == current.value, (context, current)
    handle = ctypes.c_void_p()
    assert cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), last) == 0, "it is in chunks"
    assert cuda.cuMemRelease(handle) == 0
    copy = values.clone()
    assert torch.equal(copy[1 << 20 :: 97].cpu(), torch.arange(1 << 20, 600 << 20, 97, dtype=torch.int32))
    assert (values[:1024, None] + values[None, :1024]).sum().item() == 1024 * 1023 * 1024
    copy.zero_()
    for _ in range(20):
        copy.add_(values)  # in flight at the free
    del copy, values
    torch.cuda.empty_cache()
    assert cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), last) != 0, "the chunks went back"
    assert mine().memory_bytes < GIB
    weights = torch.randn(2048, 2048, device="cuda")
    graph, made = torch.cuda.CUDAGraph(), weights @ weights
    with torch.cuda.graph(graph):
        replayed = weights @ weights
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made, replayed)
    ipc = (ctypes.c_char * 64)()
    assert cuda.cuIpcGetMemHandle(ipc, ctypes.c_uint64(weights.data_ptr())) != 0, "a handle of a chunk"
    for mib, ours, plain in zip(sizes, in_chunks, map(cost_us, sizes), strict=True):  # plain ones from here on
        print(f"{mib} MiB, an allocation and its free: {ours:.0f} us in chunks, {plain:.0f} us plain")


def observed(_: float) -> None:
    import random

    rng, held = random.Random(1), [torch.empty(1 << 20, device="cuda")]
    cudasched.torch.observe()
    for step in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            with cudasched.region(rng.choice(["latency", "normal", "best_effort"]), name=rng.choice("abc")):
                held.append(torch.empty(rng.randrange(1, 1 << 24), device="cuda", dtype=torch.int8))
        if rng.random() < 0.02:
            torch.cuda.empty_cache()
        mine, theirs = cudasched.torch.memory(), torch.cuda.memory_stats()
        assert mine.lost == 0
        for name in ("requested_bytes", "reserved_bytes"):
            assert getattr(mine, name) == theirs[f"{name}.all.current"], (step, name, mine)
    assert set(mine.by_class) >= {"latency", "best_effort"}, mine
    points = cudasched.torch.memory_timeline()
    assert points, "no timeline"


if __name__ == "__main__":
    globals()[sys.argv[1]](float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("done")
