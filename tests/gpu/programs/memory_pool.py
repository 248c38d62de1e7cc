"""What a pool does for a program on a real driver: `memory_pool.py scattered|torch|graph`."""

from __future__ import annotations

import ctypes
import gc
import sys

import cudasched
import torch
from cudasched import memory

MIB = 1 << 20


class Block:
    """A block as PyTorch and others see memory that is not theirs."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def words(address: int, nbytes: int) -> torch.Tensor:
    """The block as 32-bit numbers."""
    return torch.as_tensor(Block(address, nbytes), device="cuda")


def scattered() -> None:
    """Every second of 512 blocks is freed, and one block of all that is free is written and read by kernels."""
    stream = torch.cuda.current_stream()
    with memory.Pool(limit="1GiB") as pool:
        blocks = [pool.allocate(2 * MIB, stream) for _ in range(512)]
        for number, block in enumerate(blocks):
            words(block, 2 * MIB).fill_(number)
        for block in blocks[::2]:
            pool.free(block, stream)
        large = pool.allocate(512 * MIB, stream)
        assert pool.statistics().reserved == 1024 * MIB and pool.statistics().moved == 256, pool.statistics()
        view = words(large, 512 * MIB)
        view.copy_(torch.arange(len(view), dtype=torch.int32))
        assert int(view.sum(dtype=torch.int64)) == len(view) * (len(view) - 1) // 2
        for number, block in list(enumerate(blocks))[1::2]:
            assert bool((words(block, 2 * MIB) == number).all()), number
            pool.free(block, stream)
        pool.free(large, stream)


def step(weights: torch.Tensor) -> torch.Tensor:
    """Some work of PyTorch's."""
    return (weights @ weights).relu().sum(0)


def in_torch() -> None:
    """Tensors of a MemPool are as others, and all memory comes back."""
    expected = step(torch.ones(2048, 2048, device="cuda"))
    pool = memory.Pool(limit="2GiB")
    torch_pool = torch.cuda.MemPool(pool.torch_allocator())
    for _ in range(3):
        with torch.cuda.use_mem_pool(torch_pool):
            weights = torch.ones(2048, 2048, device="cuda")
            found = step(weights)
        assert torch.equal(found, expected)
        assert pool.statistics().allocated >= 16 * MIB, pool.statistics()
    with torch.cuda.use_mem_pool(torch_pool):
        try:
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            pass
        else:
            raise SystemExit("the limit does not hold")
    del weights, found, torch_pool
    gc.collect()
    torch.cuda.empty_cache()
    assert pool.trim() > 0
    assert pool.statistics().reserved == 0, pool.statistics()  # blocks, too: these are reserved
    pool.close()


def in_graph() -> None:
    """A graph that is captured on a MemPool's memory replays."""
    pool = memory.Pool()
    torch_pool = torch.cuda.MemPool(pool.torch_allocator())
    weights = torch.ones(512, 512, device="cuda")
    expected = step(weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch_pool.id):
        found = step(weights)
    for _ in range(5):
        graph.replay()
    assert torch.equal(found, expected) and pool.statistics().blocks > 0, pool.statistics()


if __name__ == "__main__":
    torch.cuda.init()
    {"scattered": scattered, "torch": in_torch, "graph": in_graph}[sys.argv[1]]()
    print("done", cudasched.state().installed, ctypes.sizeof(ctypes.c_void_p))
