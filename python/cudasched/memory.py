"""A pool of GPU memory that defragments itself by virtual memory.

    with memory.Pool(limit="20GiB") as pool:
        block = pool.allocate(256 << 20, stream)
        launch_my_kernels(block, stream)
        pool.free(block, stream)

    torch_pool = torch.cuda.MemPool(memory.Pool().torch_allocator())
    with torch.cuda.use_mem_pool(torch_pool):
        ...

A freed block answers the next allocation of its size and stream at once. Where no free range is large enough, free
pieces are mapped side by side: scattered free memory refuses no allocation. docs/memory.md has the whole.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cudasched import config, hook
from cudasched.errors import ConfigError, DriverError, Error
from cudasched.graphs import _handle

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DriverError", "OutOfMemoryError", "Pool", "PoolError", "Statistics"]

_CHUNK = 32 << 20


class PoolError(Error):
    """A pool was misused: the message says how."""


class OutOfMemoryError(Error, MemoryError):
    """The pool's limit, or the GPU, has no room for an allocation; the message has the numbers."""


@dataclass(frozen=True)
class Statistics:
    """A pool's memory, in bytes where nothing else is said.

    Attributes:
        reserved: Of the GPU.
        allocated: Of it, in blocks that are in use.
        largest_free: The largest block that free memory can become.
        fragmentation: 1 - largest_free / (reserved - allocated); 0 where nothing is free.
        peak_reserved: The most that was reserved.
        peak_allocated: The most that was allocated.
        blocks: How many are in use.
        created: Physical pieces that the driver gave, since the pool was made.
        moved: Pieces that were mapped at another address.
    """

    reserved: int
    allocated: int
    largest_free: int
    fragmentation: float
    peak_reserved: int
    peak_allocated: int
    blocks: int
    created: int
    moved: int


def _size(name: str, value: int | str | None) -> int:
    try:
        return 0 if value is None else config.parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r} {error}") from None


class Pool:
    """A pool of one GPU's memory, in the primary context of the device, for any thread.

    Memory freed on a stream is used again on that stream at once. On another stream it is used again when the work that
    was on the first one at the free is done. An allocation waits for such work rather than take more of the GPU.

    Args:
        device: As this process numbers GPUs.
        limit: The most that the pool takes of the GPU, in bytes or as ``"20GiB"``; None: all that there is.
        chunk: The largest piece that moves as one. Large pieces make large blocks quickly; small blocks have pieces of
            their own of 2 MiB and more.

    Raises:
        PoolError: The device is unknown, the driver is too old or not there, or the limit is below 2 MiB.
        ConfigError: A size cannot be read.
        DriverError: A call of the driver failed.
        HookError: The package was not built.
    """

    def __init__(self, device: int = 0, *, limit: int | str | None = None, chunk: int | str = _CHUNK) -> None:
        hook.load_core()
        from cudasched import _core

        self._pool = _core.MemoryPool(device, _size("limit", limit), _size("chunk", chunk))

    def allocate(self, nbytes: int, stream: Any = None) -> int:
        """The address of a new block, for work on a stream.

        Args:
            nbytes: At least 1. The address is a multiple of 512, and of 2 MiB where ``nbytes`` is.
            stream: PyTorch's, CuPy's, cuda-bindings', or its handle; None: the default stream.

        Raises:
            OutOfMemoryError: The limit or the GPU has no room.
            PoolError: The pool is closed, or of the process that forked this one.
            DriverError: A call of the driver failed; the pool is as before.
        """
        if nbytes < 1:
            raise PoolError(f"a block of {nbytes} bytes cannot be allocated")
        return self._pool.allocate(min(nbytes, 2**62), _handle(stream))

    def free(self, address: int, stream: Any = None) -> None:
        """Gives a block back.

        Args:
            address: From `allocate`.
            stream: One that is behind all use of the block, and behind its allocation.

        Raises:
            PoolError: The address is no block of the pool, or was freed already; the stream captures a graph; the pool
                is closed, or of the process that forked this one.
            DriverError: A call of the driver failed; the block is in use still.
        """
        self._pool.free(address, _handle(stream))

    def statistics(self) -> Statistics:
        """The pool's memory now.

        Raises:
            PoolError: The pool is closed, or of the process that forked this one.
        """
        now = self._pool.statistics()
        return Statistics(**{field.name: getattr(now, field.name) for field in fields(Statistics)})

    def trim(self, keep: int | str = 0) -> int:
        """Gives free memory back to the GPU, and waits for work that may use it.

        Args:
            keep: How much may stay reserved, in bytes or as ``"1GiB"``.

        Returns:
            The bytes that went back.

        Raises:
            ConfigError: ``keep`` is no size.
            PoolError: The pool is closed, or of the process that forked this one.
            DriverError: A call of the driver failed.
        """
        less_than_a_page = type(keep) is int and 0 <= keep < 1 << 20  # which is no size for a limit
        return self._pool.trim(0 if less_than_a_page else _size("keep", keep))

    def torch_allocator(self) -> Any:
        """The pool as an allocator for ``torch.cuda.MemPool``; a device has one such pool at a time.

        Raises:
            PoolError: The pool is closed, or another pool of the device serves PyTorch.
        """
        from cudasched import _core

        torch = importlib.import_module("torch")
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__, "cudasched_pool_allocate", "cudasched_pool_free"
        )
        self._pool.serve_torch()
        return allocator.allocator()

    def close(self) -> None:
        """Gives all memory back; a second time nothing happens.

        Raises:
            PoolError: Blocks are in use, such as those of a ``MemPool`` that is still there.
            DriverError: A call of the driver failed.
        """
        self._pool.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PoolError:
            if error is None:  # an error that has left blocks behind says more
                raise
