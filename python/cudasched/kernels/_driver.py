"""The driver as the kernels use it: modules and launches in the primary context of a GPU, by ctypes.

``libcuda.so.1`` is opened by that name. Where cudasched stands in front of the driver, that is its shim, so that these
launches are scheduled like any others of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cudasched.errors import DriverError
from cudasched.kernels._errors import KernelError
from cudasched.tune._driver import KINDS
from cudasched.tune.space import TYPES, Gpu, Launch, TensorMap

__all__ = ["Cell", "Driver", "Function", "Map", "cells", "load"]

_MAJOR, _MINOR, _SMS, _L2_BYTES = 75, 76, 16, 38  # CUdevice_attribute
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_RELAXED = 2  # CUstreamCaptureMode
_PLAIN_SHARED_BYTES = 48 * 1024
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
#: CUtensorMapDataType; of integers only the width matters.
_MAP_TYPES = {
    **{"int8": 0, "uint8": 0, "uint32": 2, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8},
    "bfloat16": 9,
}
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes
_MAP_L2_256B = 3  # CUtensorMapL2promotion
Cell = Any
"""One argument, in ctypes' form."""


class Map:
    """Room for a tensor map, which TMA is given by value, and of which array it is."""

    def __init__(self) -> None:
        self._room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.begin = -(-ctypes.addressof(self._room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.address = 0


def cells(kinds: Sequence[str]) -> tuple[list[Cell], Any]:
    """Room for a kernel's arguments, and the table of their addresses that the driver takes."""
    made = [Map() if kind == "tensor_map" else KINDS[kind]() for kind in kinds]
    begins = [one.begin if isinstance(one, Map) else ctypes.addressof(one) for one in made]
    return made, (ctypes.c_void_p * len(made))(*begins)


@dataclass(frozen=True)
class Function:
    """A loaded kernel.

    Attributes:
        handle: The driver's.
        context: Of the function.
        static_shared_bytes: Shared memory of every launch.
    """

    handle: int
    context: int
    static_shared_bytes: int = 0


class Driver:
    """The driver. For any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Of a library that is loaded.

        Raises:
            DriverError: There is no GPU.
        """
        self._library = library
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        uint, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch = library.cuLaunchKernel
        self._launch.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]
        self._current = library.cuCtxGetCurrent
        self._current.argtypes = [pointer]
        self._local = threading.local()
        self.call("cuInit", uint(0))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver.

        Raises:
            DriverError: The call failed; the message names the function.
        """
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise DriverError(f"{name}: {self.name_of(code)}")

    def name_of(self, code: int) -> str:
        """The driver's name of an error."""
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        return known.decode() if known else f"error {code}"

    def context(self, ordinal: int) -> int:
        """The primary context of a GPU, which PyTorch and CuPy use."""
        with self._lock:
            if ordinal not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(device), ordinal)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context.value or 0
            return self._contexts[ordinal]

    def gpu(self, ordinal: int) -> Gpu:
        """The GPU's properties that decide which configurations there are.

        Raises:
            DriverError: There is no such GPU.
        """
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        try:
            self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        except DriverError as error:
            raise DriverError(f"{error}: this process has no GPU {ordinal}") from None
        self.call("cuDeviceGetName", name, 256, device)

        def attribute(which: int) -> int:
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
            return value.value

        return Gpu(
            name=name.value.decode(errors="replace"),
            capability=f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
            sms=attribute(_SMS),
            l2_bytes=attribute(_L2_BYTES) or 50 << 20,
        )

    def load(self, ordinal: int, image: bytes, name: str, shared_bytes: int) -> Function:
        """A kernel of an image, in the primary context.

        Args:
            ordinal: Of the GPU.
            image: The cubin.
            name: The kernel's.
            shared_bytes: Dynamic shared memory that it will be launched with at most.

        Raises:
            DriverError: The driver refuses the image.
        """
        context = self.context(ordinal)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        mode = ctypes.c_int(_RELAXED)
        # A capture of the calling program neither forbids the load nor contains it.
        exchange = getattr(self._library, "cuThreadExchangeStreamCaptureMode", None)
        if exchange is not None:
            exchange(ctypes.byref(mode))
        try:
            with self._entered(context):
                self.call("cuModuleLoadData", ctypes.byref(module), image)
                self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                if shared_bytes > _PLAIN_SHARED_BYTES:
                    self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))
        return Function(function.value or 0, context)

    @contextlib.contextmanager
    def _entered(self, context: int) -> Iterator[None]:
        """Makes a context current to this thread for a while."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def encode(self, into: Map, address: int, seen: TensorMap, function: Function) -> None:
        """Makes the tensor map of a dense array at an address; beyond the array there are zeros.

        `function` is the map's user: its context is current meanwhile, because a thread that is new to CUDA has none.

        Raises:
            DriverError: The driver does not take it, or makes none.
        """
        current = self._held()
        self._current(ctypes.byref(current))
        try:
            with contextlib.nullcontext() if current.value == function.context else self._entered(function.context):
                self._encode(into, address, seen)
        except AttributeError:
            raise DriverError("this driver makes no tensor maps (cuTensorMapEncodeTiled)") from None
        except DriverError as error:
            raise DriverError(f"the tensor map of {seen.of}, box {seen.box} of {seen.dims}: {error}") from None
        into.address = address

    def _encode(self, into: Map, address: int, seen: TensorMap) -> None:
        rank = len(seen.dims)
        strides = [TYPES[seen.type] * math.prod(seen.dims[: i + 1]) for i in range(rank - 1)]
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(into.begin),
            _MAP_TYPES[seen.type],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*seen.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*seen.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _MAP_SWIZZLES[seen.swizzle],
            _MAP_L2_256B,
            0,
        )

    def launch(self, function: Function, launch: Launch, stream: int, table: Any) -> None:
        """Launches a kernel; other threads of Python run meanwhile.

        Args:
            function: The kernel.
            launch: Grid, block and shared memory.
            stream: The driver's handle; 0: the default stream.
            table: Of its arguments (`cells`), which the driver has read when this returns.

        Raises:
            DriverError: The driver refuses it, or an earlier launch failed.
        """
        current = self._held()
        self._current(ctypes.byref(current))
        if current.value == function.context:
            code = self._launch(function.handle, *launch.grid, *launch.block, launch.shared_bytes, stream, table, None)
        else:
            code = self._in_context(function, launch, stream, table)
        if code != 0:
            raise DriverError(f"cuLaunchKernel: {self.name_of(code)}")

    def _held(self) -> ctypes.c_void_p:
        """Room for a handle, this thread's own."""
        try:
            return self._local.current  # type: ignore[no-any-return]
        except AttributeError:
            self._local.current = ctypes.c_void_p()
            return self._local.current  # type: ignore[no-any-return]

    def _in_context(self, function: Function, launch: Launch, stream: int, table: Any) -> int:
        """The same from a thread whose current GPU is another one, or none."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(function.context))
        try:
            code: int = self._launch(
                function.handle, *launch.grid, *launch.block, launch.shared_bytes, stream, table, None
            )
            return code
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def load() -> Driver:
    """The driver of this machine.

    Raises:
        KernelError: There is none, or no GPU.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError, DriverError) as error:
        raise KernelError(f"the kernels need a GPU and its driver: {error}") from None
