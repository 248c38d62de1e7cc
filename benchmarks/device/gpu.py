"""The few driver calls that the device benchmarks make, by cuda-bindings."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudasched.tune.compile import choose, compile_source

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"


class NoGpuError(Exception):
    """There is none here, or nothing that runs kernels on it; the message says what."""


class Gpu:
    """The first GPU, its primary context current to the calling thread.

    Raises:
        NoGpuError: See there.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoGpuError(f"needs a GPU, and cuda-bindings to use it ({error})") from None
        self._driver = driver
        try:
            self.call("cuInit", 0)
            device = self.call("cuDeviceGet", 0)
            self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))
        except RuntimeError as error:
            raise NoGpuError(f"needs a GPU ({str(error).splitlines()[0]})") from None
        which = driver.CUdevice_attribute
        major = int(self.call("cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = int(self.call("cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        self.sms = int(self.call("cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device))
        self.target = f"sm_{major}{minor}"
        self._events = self.call("cuEventCreate", 0), self.call("cuEventCreate", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the driver; what it gives back.

        Raises:
            RuntimeError: It failed.
        """
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def compile(self, source: Path, options: Sequence[str] = ()) -> bytes:
        """Machine code for this GPU."""
        return compile_source(source, (), self.target, choose(), [f"-I{INCLUDE}", *options]).image

    def load(self, image: bytes) -> Any:
        """A module."""
        try:
            return self.call("cuModuleLoadData", image)
        except RuntimeError as error:
            raise NoGpuError(f"needs a GPU: this driver loads no machine code ({error})") from None

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module."""
        return self.call("cuModuleGetFunction", module, name.encode())

    def resident_blocks(self, function: Any, threads: int) -> int:
        """As many blocks of it as the GPU holds at once."""
        return self.sms * int(self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, 0))

    def upload(self, array: Any) -> int:
        """Device memory with what a numpy array holds."""
        address = int(self.call("cuMemAlloc", array.nbytes))
        self.call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
        return address

    def timed_ms(self, function: Any, blocks: int, threads: int, arguments: Sequence[tuple[int, Any]]) -> float:
        """The time of one launch between two events, ms."""
        begin, end = self._events
        values = tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments)
        self.call("cuEventRecord", begin, 0)
        self.call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, 0, values, 0)
        self.call("cuEventRecord", end, 0)
        self.call("cuEventSynchronize", end)
        return float(self.call("cuEventElapsedTime", begin, end))


POINTER, COUNT, LENGTH = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64
