"""The CUDA driver for a worker process: one context, arrays between guards, timing by events.

By cuda-bindings, which loads libcuda.so.1. Under cudasched that is the shim, so that a tuner's launches are a
best-effort client's like any other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudasched.errors import DriverError, Error
from cudasched.tune._need import need
from cudasched.tune.space import TYPES, Gpu, Launch, TensorMap

__all__ = ["KINDS", "Buffer", "Device", "Kernel", "RefusedError"]

_GUARD_BYTES = 64 * 1024
_GUARD = 0xA5
_LOOKED_AT = 4096  # bytes of a guard, on each side
_L2_TIMES = 2
_COPIED_AT_ONCE = 256 << 10
#: Errors after which the context goes on; all others are sticky.
_HARMLESS = (
    *("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_OUT_OF_MEMORY"),
    *("CUDA_ERROR_NOT_FOUND", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    *("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_INVALID_SOURCE", "CUDA_ERROR_NOT_SUPPORTED"),
)


_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
KINDS: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int8": ctypes.c_int8,
    "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
}
"""ctypes' type of an argument."""
_MAP_TYPES = {
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float64": "FLOAT64",
    "int8": "UINT8",  # the width alone matters
    "uint8": "UINT8",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
}


class RefusedError(Error):
    """The driver refused something, and the context goes on."""


@dataclass(frozen=True)
class Buffer:
    """Device memory with a guard before and behind it.

    Attributes:
        address: Where the array begins.
        nbytes: The size.
        base: Where the allocation begins.
    """

    address: int
    nbytes: int
    base: int


@dataclass(frozen=True)
class Kernel:
    """A loaded function, and its properties from the compiler."""

    module: Any
    function: Any
    registers: int
    local_bytes: int
    static_shared_bytes: int
    max_threads: int


class Device:
    """One GPU. Calls raise `RefusedError` where the context goes on, `DriverError` where it is lost."""

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda = need("cuda.bindings.driver", "running kernels")
        self._call("cuInit", 0)
        handle = self._call("cuDeviceGet", ordinal)
        self._handle = handle
        self.context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxSetCurrent", self.context)
        self.stream = self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        name = self._call("cuDeviceGetName", 256, handle)
        major, minor = self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")
        self.gpu = Gpu(
            name=name.split(b"\0")[0].decode(errors="replace"),
            capability=f"{major}.{minor}",
            sms=self._attribute("MULTIPROCESSOR_COUNT"),
            l2_bytes=self._attribute("L2_CACHE_SIZE") or 50 << 20,
        )
        self._begin = self._call("cuEventCreate", 0)
        self._end = self._call("cuEventCreate", 0)
        self._flushed = self._call("cuMemAlloc", self.gpu.l2_bytes * _L2_TIMES)
        self._clock = _Clock(self.uuid)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cuda, name)(*arguments)
        if int(error) == 0:
            return values[0] if len(values) == 1 else values or None
        label = getattr(error, "name", str(error))
        raise (RefusedError if label in _HARMLESS else DriverError)(f"{name}: {label}")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        try:
            return int(self._call("cuDeviceGetAttribute", attribute, self._handle))
        except (RefusedError, DriverError):
            return 0

    @property
    def uuid(self) -> str:
        """As the client tables name the GPU."""
        # In CUDA 12, the first version gives an instance the UUID of its GPU.
        call = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        raw = bytes(self._call(call, self._handle).bytes)
        kind = "MIG-" if " MIG " in self.gpu.name else "GPU-"  # csrc/driver/driver.cpp
        return kind + "-".join(raw[a:b].hex() for a, b in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 16)))

    def allocate(self, nbytes: int) -> Buffer:
        """Memory whose content is not known, with guards."""
        padded = -(-nbytes // 256) * 256
        base = int(self._call("cuMemAlloc", padded + 2 * _GUARD_BYTES))
        buffer = Buffer(base + _GUARD_BYTES, nbytes, base)
        self._fill(base, _GUARD, _GUARD_BYTES)
        self._fill(buffer.address + nbytes, _GUARD, padded - nbytes + _GUARD_BYTES)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Frees the memory."""
        self._call("cuMemFree", buffer.base)

    def _fill(self, address: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", address, value, nbytes, self.stream)

    def fill(self, buffer: Buffer, value: int) -> None:
        """Sets each byte."""
        if buffer.nbytes:
            self._fill(buffer.address, value, buffer.nbytes)

    def upload(self, buffer: Buffer, array: Any) -> None:
        """Copies an array of numpy's to the device."""
        self.wait()
        self._copy("cuMemcpyHtoD", buffer.address, array.ctypes.data, min(buffer.nbytes, array.nbytes))

    def download(self, address: int, nbytes: int, dtype: Any) -> Any:
        """Memory as an array of numpy's."""
        np = need("numpy", "the tuner")
        array = np.empty(nbytes // np.dtype(dtype).itemsize, dtype=dtype)
        self.wait()
        self._copy("cuMemcpyDtoH", array.ctypes.data, address, nbytes)
        return array

    def _copy(self, call: str, to: int, of: int, nbytes: int) -> None:
        """A part at a time: another process that has something to copy waits for one of them at most."""
        for done in range(0, nbytes, _COPIED_AT_ONCE):
            self._call(call, to + done, of + done, min(_COPIED_AT_ONCE, nbytes - done))

    def guards_hold(self, buffer: Buffer) -> bool:
        """Whether nothing was written right before and right behind it."""
        before = self.download(buffer.address - _LOOKED_AT, _LOOKED_AT, "uint8")
        behind = self.download(buffer.address + buffer.nbytes, _LOOKED_AT, "uint8")
        return bool((before == _GUARD).all() and (behind == _GUARD).all())

    def mend_guards(self, buffer: Buffer) -> None:
        """After something was written there."""
        padded = -(-buffer.nbytes // 256) * 256
        self._fill(buffer.base, _GUARD, _GUARD_BYTES)
        self._fill(buffer.address + buffer.nbytes, _GUARD, padded - buffer.nbytes + _GUARD_BYTES)

    def load(self, image: bytes, name: str) -> Kernel:
        """A kernel of an image."""
        module = self._call("cuModuleLoadData", image)
        function = self._call("cuModuleGetFunction", module, name.encode())

        def attribute(which: str) -> int:
            of = self._cuda.CUfunction_attribute
            return int(self._call("cuFuncGetAttribute", getattr(of, f"CU_FUNC_ATTRIBUTE_{which}"), function))

        return Kernel(
            module=module,
            function=function,
            registers=attribute("NUM_REGS"),
            local_bytes=attribute("LOCAL_SIZE_BYTES"),
            static_shared_bytes=attribute("SHARED_SIZE_BYTES"),
            max_threads=attribute("MAX_THREADS_PER_BLOCK"),
        )

    def unload(self, kernel: Kernel) -> None:
        """Gives a kernel back."""
        self._call("cuModuleUnload", kernel.module)

    def allow_shared(self, kernel: Kernel, nbytes: int) -> None:
        """Dynamic shared memory beyond the 48 KiB that every kernel may have."""
        if nbytes + kernel.static_shared_bytes > 48 * 1024:
            which = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", kernel.function, which, nbytes)

    def launch(self, kernel: Kernel, launch: Launch, arguments: Arguments) -> None:
        """Launches the kernel on the stream."""
        self._call(
            "cuLaunchKernel",
            kernel.function,
            *launch.grid,
            *launch.block,
            launch.shared_bytes,
            self.stream,
            arguments.address,
            0,
        )

    def tensor_map(self, address: int, seen: TensorMap) -> bytes:
        """A kernel's argument for TMA to read or write the dense array at an address; zeros lie beyond the array."""
        cuda = self._cuda
        strides = [TYPES[seen.type] * math.prod(seen.dims[: i + 1]) for i in range(len(seen.dims) - 1)]
        try:
            made = self._call(
                "cuTensorMapEncodeTiled",
                getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[seen.type]}"),
                len(seen.dims),
                address,
                [cuda.cuuint64_t(size) for size in seen.dims],
                [cuda.cuuint64_t(stride) for stride in strides],
                [cuda.cuuint32_t(size) for size in seen.box],
                [cuda.cuuint32_t(1) for _ in seen.box],
                cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                getattr(
                    cuda.CUtensorMapSwizzle,
                    f"CU_TENSOR_MAP_SWIZZLE_{f'{seen.swizzle}B' if seen.swizzle else 'NONE'}",
                ),
                cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        except RefusedError as error:
            raise RefusedError(f"the tensor map of {seen.of}, box {seen.box} of {seen.dims}: {error}") from None
        except RuntimeError as error:  # cuda-bindings, where the driver has no such function
            raise RefusedError(f"this driver makes no tensor maps: {error}") from None
        return ctypes.string_at(made.getPtr(), _MAP_BYTES)

    def time(self, kernel: Kernel, launch: Launch, arguments: Arguments, launches: int = 1) -> float:
        """The time of a launch on an L2 without the arguments, us; of several in a row, their mean.

        The fill that flushes the L2 runs while the host submits the rest, so that no time of the host's is in it.
        """
        self._fill(int(self._flushed), 0, self.gpu.l2_bytes * _L2_TIMES)
        self._call("cuEventRecord", self._begin, self.stream)
        for _ in range(launches):
            self.launch(kernel, launch, arguments)
        self._call("cuEventRecord", self._end, self.stream)
        self._call("cuEventSynchronize", self._end)
        return float(self._call("cuEventElapsedTime", self._begin, self._end)) * 1000 / launches

    def wait(self) -> None:
        """Until all that was launched is done; a fault of a kernel shows here."""
        self._call("cuStreamSynchronize", self.stream)

    def sm_clock_mhz(self) -> int:
        """The multiprocessors' present clock; 0: not known."""
        return self._clock.read()


class Arguments:
    """A kernel's parameters as the driver takes them."""

    def __init__(self, values: Sequence[tuple[str, int | float | bytes]]) -> None:
        """Makes them.

        Args:
            values: Type and value of each; the type "pointer" for addresses, "tensor_map" for a tensor map that the
                device made.
        """
        self._held: list[Any] = []
        addresses = []
        for kind, value in values:
            if isinstance(value, bytes):
                self._held.append(ctypes.create_string_buffer(len(value) + _MAP_ALIGNMENT))
                begin = -(-ctypes.addressof(self._held[-1]) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
                ctypes.memmove(begin, value, len(value))
                addresses.append(begin)
                continue
            if kind not in KINDS:
                raise RefusedError(f"a scalar argument of type {kind} cannot be given")
            self._held.append(KINDS[kind](value if "float" in kind else int(value)))
            addresses.append(ctypes.addressof(self._held[-1]))
        self._table = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._table)


class _Clock:
    """The clock of a GPU's multiprocessors by NVML, where that is installed; it is read, never set."""

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # any error of NVML: the clock is for the record alone
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml

    def read(self) -> int:
        if self._nvml is None:
            return 0
        with contextlib.suppress(Exception):
            return int(self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM))
        return 0
