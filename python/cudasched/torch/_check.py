"""``CUDASCHED_CHECK_STREAMS=1``: names each use of a tensor that nothing orders with another stream's use of it.

`Order` knows, of each stream, the work that certainly comes before its next operation. The sources are events recorded
and waited for, by any thread, and the host's waits. `watch` puts a dispatch mode into a thread, which tells `Order`
each operation's reads and writes. Operations inside compiled code and CUDA graphs are not seen.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Order", "StreamOrderWarning", "wanted", "watch"]

_FRAMES = 12

Clock = dict[int, int]


class StreamOrderWarning(RuntimeWarning):
    """Two uses of a tensor on two streams, at least one of which writes it, and neither waits for the other."""


@dataclass(frozen=True)
class Use:
    """An operation that reads or writes a tensor."""

    name: str
    stream: int
    place: int
    thread: str
    stack: traceback.StackSummary


@dataclass
class _Contents:
    written: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)  # since then, the last a stream


def _merge(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        if clock.get(stream, 0) < place:
            clock[stream] = place


class Order:
    """The order of operations, by stream; a stream is its CUstream's address, a tensor its memory's. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # Python's collector may run within, and end an object that waits for an event
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._contents: dict[int, _Contents] = {}
        self._told: set[tuple[object, ...]] = set()

    def recorded(self, event: int, stream: int) -> None:
        """The event is complete when the stream's present work is."""
        with self._lock:
            self._events[event] = dict(self._clocks.get(stream, {}))

    def waited(self, event: int, stream: int) -> None:
        """The stream's later work comes after the event."""
        with self._lock:
            _merge(self._clocks.setdefault(stream, {}), self._events.get(event, {}))

    def host_waited(self, *, stream: int | None = None, event: int | None = None) -> None:
        """The host has seen the end of the stream, of the event, or with neither of all."""
        with self._lock:
            if event is not None:
                _merge(self._host, self._events.get(event, {}))
            elif stream is not None:
                _merge(self._host, self._clocks.get(stream, {}))
            else:
                for clock in self._clocks.values():
                    _merge(self._host, clock)

    def allocated(self, memory: int) -> None:
        """The address is another tensor's from here on."""
        with self._lock:
            self._contents.pop(memory, None)

    def launched(self, name: str, stream: int, reads: Iterable[int], writes: Iterable[int]) -> list[tuple[Use, Use]]:
        """An operation on a stream. Returns the uses not ordered with it: (this use, the earlier one)."""
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), limit=2 * _FRAMES, lookup_lines=False)
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            _merge(clock, self._host)
            before = dict(clock)
            place = clock[stream] = clock.get(stream, 0) + 1
            use = Use(name, stream, place, threading.current_thread().name, stack)
            found = []
            for memory, is_write in [*((m, True) for m in set(writes)), *((m, False) for m in set(reads))]:
                contents = self._contents.setdefault(memory, _Contents())
                earlier = [] if contents.written is None else [contents.written]
                if is_write:
                    earlier += contents.reads.values()
                for other in earlier:
                    if other.stream != stream and before.get(other.stream, 0) < other.place:
                        found.append((use, other))
                if is_write:
                    contents.written, contents.reads = use, {}
                else:
                    contents.reads[stream] = use
        return found

    def tell(self, found: list[tuple[Use, Use]]) -> None:
        """Warns of each pair of places in the program once."""
        for use, other in found:
            pair = (use.name, other.name, _place(use), _place(other))
            with self._lock:
                if pair in self._told:
                    continue
                self._told.add(pair)
            warnings.warn(_text(use, other), StreamOrderWarning, stacklevel=4)


def _own(frame: traceback.FrameSummary) -> bool:
    return frame.filename == __file__ or f"{os.sep}torch{os.sep}utils{os.sep}_python_dispatch" in frame.filename


def _frames(use: Use) -> list[traceback.FrameSummary]:
    return [frame for frame in use.stack if not _own(frame)][:_FRAMES]


def _place(use: Use) -> tuple[object, ...]:
    return tuple((frame.filename, frame.lineno) for frame in _frames(use)[:3])


def _text(use: Use, other: Use) -> str:
    def said(which: Use) -> str:
        lines = "".join(traceback.StackSummary.from_list(list(reversed(_frames(which)))).format())
        return f"{which.name} on stream {which.stream:#x}, by thread {which.thread}:\n{lines}"

    return (
        "a tensor is used by two streams, and nothing orders them. Hand it over (cudasched.torch.handover), or wait "
        f"for an event.\n{said(use)}It may run before, or at the same time as, the earlier\n{said(other)}"
    )


def wanted() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get("CUDASCHED_CHECK_STREAMS", "") not in ("", "0")


_order: Order | None = None
_watched = threading.local()


class _Entered:
    """The mode of a thread, left when the thread ends.

    A mode that a thread still has then is freed after the thread was joined: where the interpreter ends meanwhile,
    PyTorch ends the process.
    """

    def __init__(self, mode: Any, stack: Callable[[], list[Any]]) -> None:
        self._mode = mode
        self._stack = stack
        mode.__enter__()

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._stack()[-1:] == [self._mode]:
            self._mode.__exit__(None, None, None)


def watch(torch: Any, current_stream: Any = None, is_watched: Any = None) -> None:
    """Watches the calling thread's operations from here on, and those of autograd's threads for this thread.

    Args:
        torch: PyTorch.
        current_stream: A function that gives the calling thread's stream; None: PyTorch's.
        is_watched: Which tensors are looked at; None: those on a GPU.
    """
    global _order
    if getattr(_watched, "mode", None) is not None:
        return
    dispatch = torch.utils._python_dispatch
    if dispatch._get_current_dispatch_mode_stack():
        return  # the program is in a mode of its own, which would come off before ours; the next region tries again
    if _order is None:
        _order = Order()
        _subscribe(torch, _order)
    if current_stream is None:

        def current_stream() -> int:
            return int(torch.cuda.current_stream().cuda_stream)

    if is_watched is None:

        def is_watched(tensor: Any) -> bool:
            return bool(tensor.is_cuda)

    _watched.mode = _Entered(
        _mode(torch, _order, current_stream, is_watched), dispatch._get_current_dispatch_mode_stack
    )


def _subscribe(torch: Any, order: Order) -> None:
    """PyTorch's C layer reports events and the host's waits."""
    try:
        trace: Any = importlib.import_module("torch.cuda._gpu_trace")  # which `import torch` leaves out
    except ImportError:
        return
    if not hasattr(torch._C, "_activate_gpu_trace"):
        return
    trace.register_callback_for_event_record(order.recorded)
    trace.register_callback_for_event_wait(order.waited)
    trace.register_callback_for_memory_allocation(order.allocated)
    trace.register_callback_for_device_synchronization(lambda: order.host_waited())
    trace.register_callback_for_stream_synchronization(lambda stream: order.host_waited(stream=stream))
    trace.register_callback_for_event_synchronization(lambda event: order.host_waited(event=event))
    torch._C._activate_gpu_trace()


def _mode(torch: Any, order: Order, current_stream: Any, is_watched: Any) -> Any:
    tree = torch.utils._pytree

    def memory(tensors: Iterable[Any]) -> set[int]:
        found = set()
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and is_watched(tensor):
                try:
                    address = tensor.untyped_storage().data_ptr()
                except RuntimeError:  # a wrapper without memory of its own
                    continue
                if address:
                    found.add(address)
        return found

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """PyTorch asks this: functions are compiled beside the mode."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if not isinstance(func, torch._ops.OpOverload):  # an operator of functions, such as torch.cond
                return result
            if func.is_view or func._schema.name in ("aten::record_stream", "aten::_local_scalar_dense"):
                return result
            given = memory(tree.tree_leaves((args, kwargs)))
            written: set[int] = set()
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else kwargs.get(argument.name)
                    written |= memory(tree.tree_leaves(value))
            made = memory(tree.tree_leaves(result)) - given
            for address in made:
                order.allocated(address)
            name = str(func._schema.name).removeprefix("aten::")
            order.tell(order.launched(name, current_stream(), given - written, written | made))
            return result

    return Watch()
