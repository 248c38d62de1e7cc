"""`cudasched.torch._streams.Backend` over ``torch.cuda``: the only file here that knows how PyTorch spells it.

A stream's key is that of PyTorch's C layer: ``(stream_id, device_index, device_type)``. The driver makes the streams;
PyTorch's pool of 32 would hand the same stream out again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, cast

from cudasched import hook
from cudasched.errors import ConfigError, DriverError, Error, HookWarning
from cudasched.torch import _check
from cudasched.torch._streams import Ordering, Streams

__all__ = ["TorchBackend", "chosen_stream", "on_new_stream", "say_once", "streams"]

_NON_BLOCKING = 1
_CUDA = 1  # of c10's device types

_Key = tuple[int, int, int]


class TorchBackend:
    """`torch.cuda`, by its C layer where every region goes, because that is a tenth of the time."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._c = torch._C
        self._objects: dict[Hashable, Any] = {}
        self.core = None if _check.wanted() else hook.engine()  # orders streams; the check sees PyTorch's events alone
        # Every region calls these several times, so there is nothing of ours between.
        self.device: Callable[[], int | None] = self._first_device
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self.current: Callable[[int], Hashable] = torch._C._cuda_getCurrentStream
        self._record = torch.cuda.Event.record
        self._wait = torch.cuda.Event.wait
        base = getattr(torch._C, "_CudaEventBase", None)
        if base is not None and issubclass(torch.cuda.Event, base):
            self._record, self._wait = base.record, base.wait

    def available(self) -> bool:
        """Whether there is CUDA; says so once where there is not. Initialises CUDA, as the region's body would."""
        cuda = self._torch.cuda
        if cuda._is_in_bad_fork() or not cuda.is_available():
            return False
        cuda.init()
        self.device = self._c._cuda_getDevice
        return True

    def forget(self) -> None:
        """In the child of a fork, whether CUDA can be used is asked anew."""
        self.device = self._first_device
        self._objects.clear()

    def _first_device(self) -> int | None:
        return self.device() if self.available() else None

    def default(self, device: int) -> Hashable:
        return tuple(self._c._cuda_getDefaultStream(device))

    def make_current(self, stream: Any, device: int | None) -> None:
        self._c._cuda_setStream(*stream)
        if stream[1] != device:  # setting a stream sets the device
            self._c._cuda_setDevice(device)

    def create(self, device: int, client_class: str) -> Hashable:
        with self._torch.cuda.device(device):
            self._torch.cuda.default_stream(device).record_event()  # makes the device's context current
            handle = _new_stream(latency=client_class == "latency")
        stream = self._torch.cuda.ExternalStream(handle, device=self._torch.device("cuda", device))
        _made.append((device, handle, client_class))
        if _tell is not None:
            _tell(device, handle, client_class)
        return self.key(stream)

    def key(self, stream: Any) -> Hashable:
        """Of one of PyTorch's streams."""
        key = (int(stream.stream_id), int(stream.device_index), int(getattr(stream, "device_type", _CUDA)))
        self._objects.setdefault(key, stream)
        return key

    def stream(self, key: Hashable) -> Any:
        """PyTorch's stream of that key."""
        found = self._objects.get(key)
        if found is None:
            stream_id, device, kind = cast(_Key, key)
            found = self._objects[key] = self._torch.cuda.Stream(
                stream_id=stream_id, device_index=device, device_type=kind
            )
        return found

    def event(self, device: int) -> Any:
        return self._torch.cuda.Event()

    def record(self, event: Any, stream: Hashable) -> None:
        self._record(event, self._objects.get(stream) or self.stream(stream))

    def wait(self, stream: Hashable, event: Any) -> None:
        self._wait(event, self._objects.get(stream) or self.stream(stream))

    def default_is_idle(self) -> bool:
        try:
            return self.core is not None and self.core.is_idle(0)
        except Error:
            return False

    def ordering(
        self, device: int, stream: Hashable, others: tuple[Hashable, ...], markers: dict[Hashable, Any]
    ) -> Ordering:
        return _Ordering(self, device, stream, others, markers)

    def handle(self, stream: Hashable) -> int:
        """The CUstream of that key."""
        return int(self.stream(stream).cuda_stream)

    def alive(self, device: int) -> Iterable[Any]:
        return list(_tensors(self._torch, device))

    def keep(self, tensor: Any, stream: Hashable) -> None:
        # PyTorch refuses another process's memory, fake tensors and wrappers around tensors that are found themselves.
        # Also memory that is not the caching allocator's, which is not reused without our knowing.
        with contextlib.suppress(Exception):
            tensor.record_stream(self.stream(stream))

    def set_class(self, stream: Hashable, client_class: str | None) -> None:
        core = hook.engine()
        if core is None:
            return
        handle = self.handle(stream)
        try:
            if client_class is None:
                core.unbind_stream(handle)
            # Latency work waits for earlier work through an open gate, and so does its program's own.
            elif core.state().process_class != "latency":
                core.bind_stream(handle, client_class)
        except Error:
            pass  # 256 streams have a class already; the region's own class and marks work without


class _Ordering:
    """By the engine, or by PyTorch's events where that cannot.

    A marker is an event of the driver's: one call of ours makes the records and waits for all streams, except for idle
    ones. On a thread without a context PyTorch's event makes its device's context current.
    """

    __slots__ = ("_ahead", "_backend", "_device", "_handle", "_markers", "_others", "_stream")

    def __init__(
        self,
        backend: TorchBackend,
        device: int,
        stream: Hashable,
        others: tuple[Hashable, ...],
        markers: dict[Hashable, Any],
    ) -> None:
        self._backend = backend
        self._device = device
        self._stream = stream
        self._others = others
        self._markers = markers
        self._handle = 0
        self._ahead: tuple[int, ...] | None = None  # the engine's arguments, once needed

    def make(self, best_effort: bool, here: bool) -> None:
        # An event is of the current device, and a default stream's handle is 0 on every device.
        backend = self._backend
        core: Any = backend.core
        if here and core is not None:
            try:
                if self._ahead is None:
                    self._prepare(core)
                core.order(self._handle, self._ahead, best_effort)
                return
            except Error:
                pass
        for other in self._others:
            event = backend.event(self._device)
            backend.record(event, other)
            backend.wait(self._stream, event)

    def _prepare(self, core: Any) -> None:
        ahead: list[int] = []
        for other in self._others:
            if other not in self._markers:
                self._markers[other] = core.new_event()
            ahead += self._backend.handle(other), self._markers[other]
        self._handle = self._backend.handle(self._stream)
        self._ahead = tuple(ahead)


def _tensors(torch: Any, device: int) -> Iterator[Any]:
    """All tensors of the process on the device. Real types are examined: objects may lie about theirs."""
    tensor_type = torch.Tensor
    known: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        is_tensor = known.get(kind)
        if is_tensor is None:
            is_tensor = known[kind] = issubclass(kind, tensor_type)
        if is_tensor:
            try:
                if thing.is_cuda and thing.get_device() == device:
                    yield thing
                    if thing.is_leaf and thing.grad is not None:  # no object of Python's until it is asked for
                        yield thing.grad
            except Exception:  # another library's tensor, half made or without a device
                continue


def _new_stream(*, latency: bool) -> int:
    """A CUstream of the current context that waits for no default stream. Raises DriverError."""
    driver = ctypes.CDLL("libcuda.so.1")  # the shim
    least, greatest, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    status = driver.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
    if status == 0:
        priority = greatest if latency else least
        status = driver.cuStreamCreateWithPriority(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), priority)
    if status != 0 or not handle.value:
        raise DriverError(f"a stream for a region cannot be made: the CUDA driver answered {status}")
    return handle.value


_made: list[tuple[int, int, str]] = []
_tell: Callable[[int, int, str], None] | None = None


def on_new_stream(tell: Callable[[int, int, str], None]) -> None:
    """Tells the device, CUstream and class of each stream that regions have, and of those to come."""
    global _tell
    _tell = tell
    for made in list(_made):
        tell(*made)


_streams: Streams | None = None
_backend: TorchBackend | None = None
_making = threading.RLock()
_said = False


def _forget() -> None:
    global _making
    _making = threading.RLock()  # another thread of the parent may have held it
    if _backend is not None and _streams is not None:
        _backend.forget()
        _streams.forget()


os.register_at_fork(after_in_child=_forget)


def streams() -> Streams | None:
    """The streams of regions; None where nothing is done, with one warning.

    That is: PyTorch is not loaded (without a warning then), or has no CUDA.
    """
    global _streams, _backend
    if _streams is not None:
        return _streams
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not hasattr(torch, "_C"):
        return None  # not there, or half imported
    if not hook.installed():
        if not hook.switched_off():
            say_once("cudasched is not in front of CUDA in this process (cudasched.state() says why)")
        return None
    if not hasattr(torch._C, "_cuda_getCurrentStream"):
        say_once("this PyTorch was built without CUDA")
        return None
    backend = TorchBackend(torch)
    if not backend.available():
        say_once("PyTorch finds no CUDA device here")
        return None
    with _making:
        if _streams is None:  # two threads may have initialised CUDA at once
            _backend, _streams = backend, Streams(backend)
    return _streams


def say_once(why: str) -> None:
    """Regions have no effect, and why."""
    global _said
    if not _said:
        _said = True
        warnings.warn(f"cudasched's regions do nothing here: {why}", HookWarning, stacklevel=5)


def chosen_stream(stream: object) -> Hashable:
    """The key of a stream that a region was given.

    Raises:
        ConfigError: It is none of PyTorch's, or of another device than the current one.
    """
    assert _backend is not None
    for attribute in ("stream_id", "device_index", "cuda_stream"):
        if not isinstance(getattr(stream, attribute, None), int):
            raise ConfigError(f"stream = {stream!r}: must be a torch.cuda.Stream, or 'inherit'")
    device = _backend.device()
    if stream.device_index != device:  # type: ignore[attr-defined]
        raise ConfigError(
            f"stream = {stream!r}: it is of cuda:{stream.device_index}, and the current device is cuda:{device}"  # type: ignore[attr-defined]
        )
    key = _backend.key(stream)
    if key == _backend.default(device):
        raise ConfigError(
            f"stream = {stream!r}: it is the default stream, which all threads share; 'inherit' stays there"
        )
    return key
