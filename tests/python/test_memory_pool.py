"""The pool over the simulated driver, as a program uses it: alone, and as best-effort work under cudasched."""

from __future__ import annotations

import pytest
from cudasched.memory import Pool
from support import Run, succeeded

PROGRAM = r"""
import ctypes, os, sys
from ctypes import byref, c_size_t, c_uint64, c_void_p
from cudasched import memory
from cudasched.memory import OutOfMemoryError, Pool, PoolError

cuda = ctypes.CDLL("libcuda.so.1" if sys.argv[1] == "hooked" else sys.argv[1], mode=ctypes.RTLD_GLOBAL)
MIB = 1 << 20

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)

def error_of(kind, ask):
    try:
        ask()
    except kind as error:
        return str(error)
    raise SystemExit("no error")

IMAGE = b"cudasched-sim 1\nkernel append params=8,8,8,4 block_us=param:3 effect=append\n\0"
call("cuInit", 0)
context, module, append, stream, other = (c_void_p() for _ in range(5))
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", byref(module), IMAGE)
call("cuModuleGetFunction", byref(append), module, b"append")
for made in (stream, other):
    call("cuStreamCreate", byref(made), 1)
stream, other = stream.value, other.value

def free_memory():
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value

def launch(log, cursor, value, on, microseconds=1000):
    given = [c_uint64(log), c_uint64(cursor), c_uint64(value), ctypes.c_uint32(microseconds)]
    table = (c_void_p * 4)(*(ctypes.cast(ctypes.pointer(one), c_void_p) for one in given))
    call("cuLaunchKernel", append, 1, 1, 1, 1, 1, 1, 0, c_void_p(on), table, None)

def word(address):
    read = c_uint64()
    call("cuMemcpyDtoH_v2", byref(read), c_uint64(address), c_size_t(8))
    return read.value
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, plain_or_hooked: Run) -> Run:
    """Runs code after PROGRAM."""
    monkeypatch.setenv("CUDASCHED_SIM_MEMORY_MB", "1024")
    return lambda code: plain_or_hooked(PROGRAM + code)


def test_scattered_free_memory_is_one_large_block(run: Run) -> None:
    succeeded(
        run(
            """
before = free_memory()
with Pool(limit="128MiB") as pool:
    blocks = [pool.allocate(2 * MIB, stream) for _ in range(64)]
    for number, block in enumerate(blocks):
        call("cuMemsetD32_v2", c_uint64(block), number, c_size_t(2))
    call("cuCtxSynchronize")
    for block in blocks[::2]:
        pool.free(block, stream)
    now = pool.statistics()
    assert (now.reserved, now.allocated, now.blocks) == (128 * MIB, 64 * MIB, 32)
    assert (now.largest_free, now.fragmentation) == (64 * MIB, 0)
    large = pool.allocate(64 * MIB, stream)
    call("cuMemsetD8_v2", c_uint64(large), 255, c_size_t(64 * MIB))
    assert (pool.statistics().moved, pool.statistics().created) == (32, 64)
    for number, block in list(enumerate(blocks))[1::2]:
        assert word(block) == number << 32 | number
        pool.free(block, stream)
    pool.free(large, stream)
    assert pool.trim("32MiB") == 96 * MIB and pool.statistics().reserved == 32 * MIB
assert free_memory() == before
assert "is closed" in error_of(PoolError, pool.statistics)
"""
        )
    )


def test_threads_make_pools_at_once(run: Run) -> None:
    """pybind11 notes each new object in a table that only the GIL guards."""
    succeeded(
        run(
            """
import threading
from cudasched import _core
sys.setswitchinterval(1e-6)

def make(count, kind):
    call("cuCtxSetCurrent", context)
    for _ in range(count):
        kept = [kind() for _ in range(20)]
kinds = [(1_000, lambda: _core.MemoryPool(0, 0, 0)), (20_000, _core.ReplaySettings)]
threads = [threading.Thread(target=make, args=of) for of in kinds * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
        )
    )


def test_a_pool_that_goes_waits_for_functions_of_python(run: Run) -> None:
    succeeded(
        run(
            """
import threading
began, may_end = threading.Event(), threading.Event()

@ctypes.CFUNCTYPE(None, c_void_p)
def function(_):
    began.set()
    may_end.wait()

def synchronize():
    call("cuCtxSetCurrent", context)
    call("cuStreamSynchronize", c_void_p(stream))

pool = Pool()
block = pool.allocate(2 * MIB, stream)
call("cuLaunchHostFunc", c_void_p(stream), function, None)
pool.free(block, stream)
thread = threading.Thread(target=synchronize)
thread.start()
began.wait()
threading.Timer(0.3, may_end.set).start()
del pool
assert may_end.is_set()
thread.join()
"""
        )
    )


# Kernels that the program has launched, and that may be in cudasched's ring still, see their memory to their end.
def test_memory_moves_behind_the_work_that_uses_it(run: Run) -> None:
    succeeded(
        run(
            """
results = Pool().allocate(2 * MIB)
call("cuMemsetD8_v2", c_uint64(results), 0, c_size_t(2 * MIB))
pool = Pool(limit="16MiB")
for step in range(20):
    small = [pool.allocate(2 * MIB, stream) for _ in range(8)]
    for block in small:
        call("cuMemsetD8Async", c_uint64(block), 0, c_size_t(4096), c_void_p(stream))
        launch(block + 8, block, step, stream)
    for block in small[::2]:
        pool.free(block, stream)
    large = pool.allocate(8 * MIB, other)
    call("cuMemsetD8Async", c_uint64(large), 1, c_size_t(8 * MIB), c_void_p(other))
    pool.free(large, other)
    call("cuStreamSynchronize", c_void_p(stream))
    for block in small[1::2]:
        assert word(block) == 1 and word(block + 8) == step
        pool.free(block, stream)
call("cuCtxSynchronize")
assert pool.statistics().reserved == 16 * MIB and pool.statistics().moved > 0
pool.close()
"""
        )
    )


def test_errors_say_what_to_do(run: Run) -> None:
    succeeded(
        run(
            """
assert "no device 7" in error_of(PoolError, lambda: Pool(7))
pool = Pool(limit="8MiB")
block = pool.allocate(6 * MIB)
text = error_of(OutOfMemoryError, lambda: pool.allocate(4 * MIB))
assert "an allocation of 4.00 MiB on device 0 does not fit in the pool's limit" in text, text
assert "its limit is 8.00 MiB; 1 blocks hold 6.00 MiB" in text, text
assert issubclass(OutOfMemoryError, MemoryError)
assert "0 bytes" in error_of(PoolError, lambda: pool.allocate(0))
assert "does not fit" in error_of(OutOfMemoryError, lambda: Pool().allocate(2**70))
assert "is no block of this pool" in error_of(PoolError, lambda: pool.free(12345))
assert "1 blocks hold 6.00 MiB" in error_of(PoolError, pool.close)
child = os.fork()
if child == 0:
    os._exit("forked this one" not in error_of(PoolError, lambda: pool.allocate(1)))
assert os.waitpid(child, 0)[1] == 0
pool.free(block)
assert "freed already" in error_of(PoolError, lambda: pool.free(block))
pool.close()
pool.close()
assert "is closed" in error_of(PoolError, lambda: pool.allocate(1))
"""
        )
    )


def test_a_pool_is_trimmed_to_what_it_has_allocated(run: Run) -> None:
    succeeded(
        run(
            """
pool = Pool()
block = pool.allocate(512)
pool.free(pool.allocate(64 * MIB))
assert pool.trim(pool.statistics().allocated) == 64 * MIB
assert "keep=-1" in error_of(ValueError, lambda: pool.trim(-1))
"""
        )
    )


def test_an_error_in_the_block_is_the_one_that_is_seen(run: Run) -> None:
    succeeded(
        run(
            """
def leave():
    with Pool() as pool:
        pool.allocate(MIB)
        raise ValueError("the program's own")
assert error_of(ValueError, leave) == "the program's own"
"""
        )
    )


# PyTorch for the host alone has no pools: a stand-in looks the functions up as PyTorch does.
def test_pytorch_takes_its_memory_from_a_pool(run: Run) -> None:
    succeeded(
        run(
            """
import types
class Allocator:
    def __init__(self, path, allocate, free):
        library = ctypes.CDLL(path)
        self.allocate, self.free = getattr(library, allocate), getattr(library, free)
        self.allocate.restype, self.allocate.argtypes = c_void_p, [c_size_t, ctypes.c_int, c_void_p]
        self.free.argtypes = [c_void_p, c_size_t, ctypes.c_int, c_void_p]
    def allocator(self):
        return self
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(memory=types.SimpleNamespace(CUDAPluggableAllocator=Allocator))
sys.modules["torch"] = torch

pool = Pool(limit="64MiB")
allocator = pool.torch_allocator()
segment = allocator.allocate(20 * MIB, 0, stream)
assert segment and pool.statistics().allocated == 20 * MIB
assert not allocator.allocate(60 * MIB, 0, stream)
assert not allocator.allocate(MIB, 1, stream)
assert "serves PyTorch" in error_of(PoolError, Pool().torch_allocator)
assert "blocks hold" in error_of(PoolError, pool.close)
allocator.free(segment, 20 * MIB, 0, stream)
allocator.free(segment, 20 * MIB, 0, stream)
pool.close()
assert not allocator.allocate(MIB, 0, stream)
assert "is closed" in error_of(PoolError, pool.torch_allocator)
Pool().torch_allocator()
"""
        )
    )


def test_without_a_driver_the_error_says_so(python: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_OFF", "1")
    done = python(
        "import ctypes.util; from cudasched import memory\n"
        "if ctypes.util.find_library('cuda'): raise SystemExit\n"
        "try: memory.Pool()\nexcept memory.PoolError as error: assert 'no NVIDIA driver' in str(error)\n"
        "else: raise SystemExit('no error')"
    )
    succeeded(done)


@pytest.mark.parametrize("limit", ["much", -1, 12.5, True])
def test_sizes_that_cannot_be_read_are_named(limit: object) -> None:
    with pytest.raises(ValueError, match="limit="):
        Pool(limit=limit)  # type: ignore[arg-type]
