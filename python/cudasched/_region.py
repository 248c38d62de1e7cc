"""Regions, streams and the process's class: how a program classifies its launches."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from numbers import Real
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cudasched import _partition, hook, log
from cudasched._text import shown
from cudasched.config import Config, check_region, parse_size
from cudasched.errors import ConfigError, Error, HookWarning

if TYPE_CHECKING:
    from cudasched.torch import _streams

__all__ = ["bind_stream", "expect", "region", "set_class", "unbind_stream"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LONGEST_HINT_MS = 1000


class region:  # noqa: N801  used like a function
    """A span of host code whose launches share a class and a latency target; a context manager and a decorator.

    ::

        with cudasched.region("latency", slo_ms=5):
            y = model(x)

        @cudasched.region("best_effort")
        def train_step(batch): ...

    A region belongs to the thread that enters it: launches of other threads stay outside, and the same thread must
    leave the region. Regions nest, the innermost holds; one object may be entered again, and by several threads at
    once. A stream's own class (`bind_stream`) takes precedence over a region's.

    Decorated ``async def`` functions, generators and asynchronous generators are in the region while their own code
    runs, and not while suspended. So tasks of one event loop do not enter each other's regions. The latency target
    counts from the first step. The time of later steps is not known, so the policy ``slack`` admits nothing into them.
    An ``await`` in a ``with`` block leaves the region, so that other tasks stay outside. The block then raises `Error`
    at its end, unless another exception ends the block: decorate instead. Across a ``yield`` the region stays open:
    decorate. A block may end on another thread than the one that entered it, as in a generator that threads of a pool
    advance. The region then ends for both threads, with the same `Error`. Greenlets and tasks of trio have regions of
    their own: a ``with`` block is left while others run. `metrics` counts such a block's request to the first switch.

    In a program that has PyTorch on CUDA, the body's work goes to a stream of the thread's own, one a class. From a
    thread's first region on, its work outside goes to a stream of the thread's own, too. On the GPU each of these
    streams waits for the thread's earlier work, so a thread sees its own work in order. A thread that uses another's
    results calls `cudasched.torch.handover`. ``stream="inherit"`` stays on the current stream. ``docs/pytorch.md`` says
    more.

    With `sm_fraction`, a best-effort region's PyTorch work runs on a part of the SMs alone. At the entry a stream of
    that part becomes PyTorch's current one, ordered after the work of the earlier stream. At the end the earlier stream
    is current again, ordered after the region's work. PyTorch's rule for side streams holds: a tensor made on one side
    and still used on the other when freed needs ``record_stream``. The part is rounded to the GPU's granularity: from
    Hopper on multiples of 8 SMs, not above the fraction, but at least 8. Regions with the same part share its one
    stream, which lives as long as the process. A CUDA graph keeps the SMs of its capture. Without PyTorch nothing is
    switched; launch on `stream`. ``docs/partitions.md`` says more.

    Without the hook (no driver, CUDA loaded before cudasched) a region does nothing. A failure inside the engine gives
    one warning and does not reach the program.

    Args:
        client_class: ``"latency"``, ``"normal"`` or ``"best_effort"`` (``"best-effort"``).
        slo_ms: Latency target, ms from entry, over 0 and at most an hour; None: none.
        priority: Of a latency region: higher enters first where clients enter by deadline. Best-effort programs share
            the GPU by the priority of the program (`set_class`).
        sm_fraction: Part of the SMs that the region may use, over 0 and under 1; None: all. Best effort alone.
        name: The name under which `metrics` counts the requests: 1 to 63 bytes of UTF-8 without control characters; "":
            together with all other unnamed ones. Of class latency. A process has 10 names; the regions of any further
            ones are counted together as "(others)", so name kinds of requests, not single ones.
        stream: Where PyTorch's work goes: ``"own"``, the thread's stream of the class; ``"inherit"``, the stream that
            is current; or a ``torch.cuda.Stream``. With `sm_fraction` it is that part's.

        memory_limit: The most memory that PyTorch should hold for regions of this name, ``"20GiB"`` or a number of
            bytes. Beyond the limit nothing fails: each name warns once, and crossings are counted
            (`cudasched.torch.memory`), which needs `cudasched.torch.observe`. A limit that holds is the program's
            (``cudasched run --memory-limit``).

    Raises:
        ConfigError: An argument has no meaning; on entering, the stream is of another device than the current one.
        Error: At the end: this thread has not entered the region, or has left the region already, or the block was held
            across an ``await``. Where an exception ends the block, that exception goes on, with a note.
    """

    def __init__(
        self,
        client_class: str = "latency",
        *,
        slo_ms: float | None = None,
        priority: int = 0,
        sm_fraction: float | None = None,
        name: str = "",
        stream: Any = "own",
        memory_limit: int | str | None = None,
    ) -> None:
        config = _checked(client_class, priority, slo_ms)
        self._name = _checked_name(name)
        self._sm_fraction = None if sm_fraction is None else _partition.check_fraction(config.client_class, sm_fraction)
        self._stream = stream if stream == "own" else _check_stream(stream, sm_fraction)
        if sm_fraction is not None:
            self._stream = "inherit"  # from the part
        self._memory_limit = 0 if memory_limit is None else _checked_limit(memory_limit, name)
        self._class = config.client_class
        self._priority = config.priority
        self._slo_ms = config.slo_ms or 0.0

    def __repr__(self) -> str:
        target = f", slo_ms={self._slo_ms:g}" if self._slo_ms else ""
        part = f", sm_fraction={self._sm_fraction:g}" if self._sm_fraction else ""
        name = f", name={self._name!r}" if self._name else ""
        return f"cudasched.region({self._class!r}{target}, priority={self._priority}{part}{name})"

    @property
    def stream(self) -> int:
        """The CUstream of this region's part of the SMs, for launches by hand; not to be destroyed.

        Raises:
            ConfigError: The region has no `sm_fraction`, or the device has too few SMs for a part.
            HookError: There is no hook, or the driver has no green contexts (CUDA 12.5 and later have).
            Error: The device's primary context is not current to this thread, or the driver refuses.
        """
        if self._sm_fraction is None:
            raise ConfigError(f"{self!r} has no part of the SMs: give it sm_fraction")
        return _partition.stream(self._sm_fraction)

    def __enter__(self) -> region:
        entry = _Entry(self)
        try:
            entry.enter()
            entry.follow(sys._getframe(1))
        except BaseException:
            entry.leave()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        _end([], self, *exception)

    def __call__(self, function: _Function) -> _Function:
        """Decorates `function`: the body runs in the region, and so do returned coroutines and generators.

        Raises:
            ConfigError: `function` is no function.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self(function.__func__))
        if isinstance(function, type) or not callable(function):
            raise ConfigError(f"{self!r} cannot decorate {shown(function)}: it is no function or method")
        wrapper: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await _Awaited(self._steps(function(*args, **kwargs)))

        elif inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                items = function(*args, **kwargs)
                deadline_ns = self._deadline_ns()
                step, value = items.asend, None
                while True:
                    try:
                        item = await _Awaited(self._steps(step(value), deadline_ns))
                    except StopAsyncIteration:
                        return
                    finally:
                        value = None
                    try:
                        step, value = items.asend, (yield item)
                    except GeneratorExit:
                        await _Awaited(self._steps(items.aclose(), deadline_ns))
                        raise
                    except BaseException as error:
                        step, value = items.athrow, error

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                return (yield from self._steps(function(*args, **kwargs)))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                entry = _Entry(self)  # rather than `with`, for a message of ours from torch.compile(fullgraph=True)
                try:
                    entry.enter()
                    entry.follow(None)
                    result = function(*args, **kwargs)
                except BaseException as error:
                    _note_memory(error)
                    raise
                finally:
                    entry.leave()
                resume = _RESUMED.get(type(result))
                return result if resume is None else resume(self, result)

        return cast(_Function, wrapper)

    def _deadline_ns(self) -> int:
        """Of a request that begins now, as `time.monotonic_ns` counts; 0: none."""
        return time.monotonic_ns() + int(self._slo_ms * 1e6) if self._slo_ms else 0

    def _steps(self, body: Any, deadline_ns: int | None = None) -> Generator[Any, Any, Any]:
        """Drives a generator or a coroutine; each step runs in the region, suspensions do not."""
        if deadline_ns is None:
            deadline_ns = self._deadline_ns()
        step, value = body.send, None
        while True:
            entry = _Entry(self, deadline_ns)
            try:
                entry.enter()
                yielded = step(value)
            except StopIteration as stop:
                return stop.value
            except BaseException as error:
                _note_memory(error)
                body = step = value = None  # its traceback has this frame, which would keep it, and so its tensors
                raise
            finally:
                entry.leave()
            try:
                step, value = body.send, (yield yielded)
            except GeneratorExit:
                entry = _Entry(self, deadline_ns)
                try:
                    entry.enter()
                    body.close()
                finally:
                    entry.leave()
                raise
            except BaseException as error:
                step, value = body.throw, error


class _Entry:
    """An open region."""

    __slots__ = (
        "begun", "core", "deadline_ns", "entries", "leave_part", "moving", "region", "stream_entry", "tokens"
    )  # fmt: skip

    def __init__(self, region_: region, deadline_ns: int | None = None) -> None:
        self.region = region_
        self.deadline_ns = deadline_ns  # of a step of a request: that of the whole
        self.begun = False
        self.core: Any = None  # the engine, where there is one, and
        self.tokens: list[int] = []  # the core's tokens of the region, while open
        self.entries: list[_Entry] = []  # those of the thread
        self.moving: tuple[int, int] | None = None  # its key in `_moving`
        self.leave_part: Callable[[], None] | None = None  # leaves a part of the SMs
        self.stream_entry: _streams.Entry | None = None

    def enter(self) -> None:
        """Enters the region, on the calling thread. If that raises, `leave` undoes the part done."""
        global _best_effort_thread
        mine = self.region
        self.entries = entries = _thread.regions
        if mine._class == "latency" and _best_effort_thread and _best_effort_thread != threading.get_ident():
            _look_at_switch_interval()
        if mine._sm_fraction is not None:
            self.leave_part = _partition.enter(mine._sm_fraction)
        if "torch" not in sys.modules:
            self.begin()
        else:
            torch_side = _torch_regions or _torch_side()
            torch_side.enter(self, mine._class, mine._stream)
            if torch_side.tell is not None:
                torch_side.tell(mine._class, mine._name)
            if mine._memory_limit:
                torch_side.limit(mine._name, mine._memory_limit)
        entries.append(self)
        if mine._class == "best_effort" and _best_effort_thread == 0:
            _best_effort_thread = threading.get_ident()

    def enter_again(self) -> None:
        """After `leave`, on the thread whose turn it is; a step of its request."""
        self.begun = False
        self.enter()

    def begin(self) -> None:
        """Tells the engine, where there is one; once."""
        self.begun = True
        core = self.core = hook.engine()
        if core is None:
            return
        mine, deadline_ns = self.region, self.deadline_ns
        call: Callable[..., int] = core.region_enter
        last: tuple[object, ...] = (mine._slo_ms, mine._name)
        if deadline_ns is not None:
            call, last = core.region_enter_until, (deadline_ns,)
        try:
            # One step for signal handlers, whose exceptions would lose the result: no bytecode lies between.
            self.tokens.extend(itertools.starmap(call, [(mine._class, mine._priority, *last)]))
        except Error as error:
            _warn_once(error, 4)

    def follow(self, frame: FrameType | None) -> None:
        """Follows the region while its task may give way to others.

        Args:
            frame: That of the `with` block; None: the region is a function's.
        """
        modules = sys.modules
        if "greenlet" in modules or "trio" in modules:
            from cudasched import _tasks

            _tasks.follow(_thread)
            if self.deadline_ns is None:
                self.deadline_ns = self.region._deadline_ns()
        if frame is None:
            return
        asyncio = modules.get("asyncio")
        if asyncio is not None and (loop := asyncio._get_running_loop()) is not None:
            # The loop runs this when the region's task has given way, if the task has not left the region by then.
            loop.call_soon(_suspended, self)
        if frame.f_code.co_flags & _SUSPENDS:
            self.moving = id(frame), id(self.region)
            _moving.setdefault(self.moving, []).append(self)
            for token in self.tokens:
                self.core.region_may_move(token)

    def leave(self) -> None:
        """Leaves the region, on the thread that entered it. Once left, this does nothing."""
        _leave([], self)

    def end_elsewhere(self) -> None:
        """Ends the region on another thread than that of the entry."""
        tokens, self.tokens = self.tokens, []
        for token in tokens:
            self.core.region_end_elsewhere(token)
        self.forget()

    def forget(self) -> None:
        """Takes it from the lists of open regions."""
        if self in self.entries:
            self.entries.remove(self)
        if self.moving is not None and self in (moving := _moving.get(self.moving, [])):
            moving.remove(self)
            if not moving:
                del _moving[self.moving]


def _leave(begun: list[Any], entry: _Entry) -> None:
    """`_Entry.leave`; twice does no harm."""
    entry.forget()
    torch_side = _torch_regions
    if entry.stream_entry is not None:  # in the region still: its queued work stays queued
        torch_side.leave(entry)
        entry.stream_entry = None
    if torch_side is not None and not begun:
        begun.append(entry)
        if entry.region._memory_limit:
            torch_side.check_limit(entry.region._name)
        if torch_side.tell is not None:
            inner = entry.entries[-1].region if entry.entries else None
            torch_side.tell(inner._class if inner else "normal", inner._name if inner else "")
    if entry.tokens:
        try:
            # No handler of a signal runs between the two.
            tokens, entry.tokens = entry.tokens, []
            entry.core.region_exit(tokens[0])
        except Error as error:
            _warn_once(error, 3)
    if entry.leave_part is not None:
        leave_part, entry.leave_part = entry.leave_part, None
        leave_part()


def _end(begun: list[_Entry | str], mine: region, *exception: object) -> None:
    """The end of a `with` block; a second call goes on with the entry in `begun`."""
    if not begun:
        begun.append(_open_entry(mine))
    entry, error = begun[0], exception[1] if len(exception) > 1 else None
    if isinstance(entry, str):
        _refuse(entry, error)
        return
    entry.leave()
    _note_memory(error)


def _note_memory(error: object) -> None:
    """Names the holders of the GPUs' memory, where an error that leaves a region is for want of it."""
    if type(error).__name__ == "OutOfMemoryError":
        _torch_side().note_holders(error)


def _open_entry(mine: region) -> _Entry | str:
    """The calling thread's innermost entry of the region; the error text, where there is none."""
    for entry in reversed(_thread.regions):
        if entry.region is mine:
            return entry
    if _take_suspended(mine):
        return (
            f"{mine!r} was held across an await: other tasks of the event loop would have been in it, so it "
            "was left there. Decorate the coroutine with the region, or keep await out of the block"
        )
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    if moved := _moving.get((id(frame), id(mine))):
        moved[-1].end_elsewhere()
        return (
            f"{mine!r} was entered on another thread than {threading.current_thread().name}, which ends it: several "
            "threads advance the generator or coroutine. Decorate it with the region, or keep yield out of the block"
        )
    return (
        f"{mine!r} was not entered on this thread ({threading.current_thread().name}), or was left already; a "
        "region belongs to the thread that entered it"
    )


def _refuse(problem: str, error: object) -> None:
    """Raises Error, unless another exception is on its way: that one goes on, with a note, and is warned of once."""
    if not isinstance(error, BaseException):
        raise Error(problem)
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(f"cudasched: {problem}")
    _warn_once(Error(problem), 4)


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_moving: dict[tuple[int, int], list[_Entry]] = {}
"""Open regions of `with` blocks that may end on another thread, by the addresses of their frames and regions."""


async def _awaited(mine: region, body: Any) -> Any:
    return await _Awaited(mine._steps(body))


_RESUMED: dict[type, Callable[[region, Any], Any]] = {
    types.CoroutineType: _awaited,
    types.GeneratorType: region._steps,
}
"""Types of results that go on in the region of the function that returned them."""


def guard_ends(core: Any) -> None:
    """From here on no exception of a signal handler keeps a region from its end."""
    region.__exit__ = core.to_its_end(_end)  # type: ignore[method-assign]
    _Entry.leave = core.to_its_end(_leave)  # type: ignore[method-assign]


# torch.compile breaks the graph at functions that say so, and with fullgraph=True raises an error that has the reason.
for _function in (region.__init__, region.__enter__, region.__exit__, _Entry.__init__, _Entry.enter):
    vars(_function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="a cudasched.region changes streams, which a graph cannot; enter it around the "
        "compiled function",
    )


_best_effort_thread: int | None = 0
"""The first thread that has entered a best-effort region; -1: the whole program is best effort; 0: none; None: told."""
_LONGEST_INTERVAL_S = 1e-3


def _look_at_switch_interval() -> None:
    """Says once that Python lets a best-effort thread hold the interpreter for long while a request waits for it."""
    global _best_effort_thread
    _best_effort_thread = None
    interval_s = sys.getswitchinterval()
    if interval_s > _LONGEST_INTERVAL_S and getattr(sys, "_is_gil_enabled", lambda: True)():
        log.logger.warning(
            "latency and best-effort regions of one process: a best-effort thread may hold Python's interpreter for "
            "%g ms while a request waits; call sys.setswitchinterval(1e-4)",
            interval_s * 1e3,
        )


class _Thread(threading.local):
    """The calling thread's open regions, in the order of entry, and those that were left by `_suspended`."""

    def __init__(self) -> None:
        self.regions: list[_Entry] = []
        self.suspended: list[region] = []
        self.traces_greenlets = False  # `_tasks` hears when they take turns,
        self.trio_run: object = None  # and of this run's tasks


_thread = _Thread()


def _suspended(entry: _Entry) -> None:
    """The event loop goes on while a task's region is open: leaves the region, and its end is an error."""
    if entry in _thread.regions:
        entry.leave()
        _thread.suspended.append(entry.region)


def _take_suspended(mine: region) -> bool:
    """Whether the region was left by `_suspended`, once for each time that it was."""
    suspended = _thread.suspended
    for place, other in enumerate(suspended):
        if other is mine:
            del suspended[place]
            return True
    return False


def _torch_side() -> Any:
    """The handling of PyTorch's streams (`cudasched.torch._regions`); loaded when PyTorch is."""
    global _torch_regions
    if _torch_regions is None:
        from cudasched.torch import _regions

        _torch_regions = _regions
    return _torch_regions


_torch_regions: Any = None


def _checked_limit(memory_limit: object, name: str) -> int:
    """Raises ConfigError."""
    try:
        size = parse_size(memory_limit)
    except ValueError as error:
        raise ConfigError(f"memory_limit = {memory_limit!r}: {error}") from None
    if not name:
        raise ConfigError(f"memory_limit = {memory_limit!r}: a region with a limit has a name, by which it is counted")
    return size


def _check_stream(stream: object, sm_fraction: object) -> object:
    """Raises ConfigError."""
    if sm_fraction is not None:
        raise ConfigError(f"stream = {stream!r}: a region with sm_fraction runs on that part's stream")
    if isinstance(stream, str) and stream != "inherit":
        raise ConfigError(f"stream = {stream!r}: must be 'own', 'inherit' or a torch.cuda.Stream")
    if not isinstance(stream, str) and not hasattr(stream, "cuda_stream"):
        raise ConfigError(f"stream = {stream!r}: must be 'own', 'inherit' or a torch.cuda.Stream")
    return stream


class _Awaited:
    """Makes a generator of steps awaitable."""

    def __init__(self, steps: Generator[Any, Any, Any]) -> None:
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps


def expect(*, within_ms: float) -> None:
    """Says that latency work of this program is about to come: best-effort work holds back from now on.

    ::

        cudasched.expect(within_ms=0.5)     # the request is being received
        x = decode(socket.recv())
        with cudasched.region("latency", slo_ms=5):
            y = model(x)

    The next latency region or launch ends the announcement. If none comes, best-effort work goes on when `within_ms` is
    over. Without the hook this does nothing.

    Args:
        within_ms: The latest arrival of the work: ms, over 0 and at most 1000. A bound that is too long costs
            best-effort time.

    Raises:
        ConfigError: `within_ms` has no meaning.
    """
    number = isinstance(within_ms, Real) and not isinstance(within_ms, bool)
    if not number or not 0 < within_ms <= _LONGEST_HINT_MS:
        raise ConfigError(
            f"within_ms = {within_ms!r}: must be a number of milliseconds, over 0 and at most {_LONGEST_HINT_MS}; say "
            "it again for latency work that comes later"
        )
    if (core := hook.engine()) is not None:
        try:
            core.expect(float(within_ms))
        except Error as error:
            _warn_once(error, 2)


_warned = False


def _warn_once(error: Error, frames: int) -> None:
    """A failure inside the engine does not reach the program: the first one warns, others are silent.

    Args:
        error: The failure.
        frames: So many calls of ours lie between the program and this one, this one among them.
    """
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"a region or a hint has no effect: {error}", HookWarning, stacklevel=frames + 1)


# A request makes a region where every microsecond counts, mostly with arguments that were seen before. By types too:
# True is no priority, though equal to 1.
_known = functools.lru_cache(maxsize=64, typed=True)(check_region)


def _checked(client_class: object, priority: object, slo_ms: object) -> Config:
    try:
        return _known(client_class, priority, slo_ms)
    except TypeError:  # an unhashable argument is wrong too, and gets its message
        return check_region(client_class, priority, slo_ms)
    except ConfigError:
        if callable(client_class):  # @cudasched.region, without its parentheses
            raise ConfigError(
                f'{shown(client_class)} is no class of launches: decorate it with @cudasched.region("latency")'
            ) from None
        raise


_LONGEST_NAME = 63
"""Bytes (``CUDASCHED_REGION_NAME_BYTES``, less the zero at the end)."""


def _checked_name(name: object) -> str:
    if isinstance(name, str) and name.isprintable():
        with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair
            if len(name.encode()) <= _LONGEST_NAME:
                return name
    raise ConfigError(
        f"name = {shown(name)}: the name of a region has at most {_LONGEST_NAME} bytes of UTF-8 and nothing that a "
        "terminal would obey"
    )


def _stream_handle(stream: object) -> int:
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            stream = handle
            break
    if isinstance(stream, bool) or not isinstance(stream, int) or not 0 < stream < 2**64:
        raise ConfigError(
            f"stream = {stream!r}: must be a torch.cuda.Stream, a cupy.cuda.Stream or a CUstream as an integer, and "
            "not a default stream, which cannot have a class of its own"
        )
    return stream


def bind_stream(stream: object, client_class: str) -> None:
    """Gives a stream's launches a class, for launches of every thread; it overrides a region's.

    A priority is a program's or a region's, and a stream has none. PyTorch takes its streams from pools: unbind a
    stream before it goes back to its pool. Without the hook this does nothing.

    Args:
        stream: A ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, or a CUstream's address as an integer.
        client_class: ``"latency"``, ``"normal"`` or ``"best_effort"``.

    Raises:
        ConfigError: An argument has no meaning, or the stream is a default stream.
        Error: More than 256 streams have a class.
    """
    handle = _stream_handle(stream)
    config = check_region(client_class, 0, None)
    if (core := hook.engine()) is not None:
        core.bind_stream(handle, config.client_class)


def unbind_stream(stream: object) -> None:
    """Takes a stream's class away again; a stream without one is left alone.

    Args:
        stream: As for `bind_stream`.

    Raises:
        ConfigError: This is no stream, or a default stream.
    """
    handle = _stream_handle(stream)
    if (core := hook.engine()) is not None:
        core.unbind_stream(handle)


_mps_class: str | None = None
"""Whose MPS priority `set_class` has put into the environment."""


def set_class(client_class: str, *, slo_ms: float | None = None, priority: int = 0) -> None:
    """Sets the class of this process's launches that no region and no stream decides.

    This overrides the environment's class at any time; MPS uses the class at the first CUDA call. Without the hook this
    does nothing.

    Args:
        client_class: ``"latency"``, ``"normal"`` or ``"best_effort"``.
        slo_ms: Latency target, ms, over 0 and at most an hour; None: none.
        priority: Within the class, higher first.

    Raises:
        ConfigError: An argument has no meaning.
    """
    global _best_effort_thread, _mps_class
    config = check_region(client_class, priority, slo_ms)
    if not hook.installed():
        return
    if config.client_class == "best_effort" and _best_effort_thread == 0:
        _best_effort_thread = -1
    from cudasched import mps

    before = {"CUDASCHED_CLASS": _mps_class} if _mps_class else {}
    if variables := mps.priority({**os.environ, **before}, config.client_class):
        os.environ.update(variables)
        _mps_class = config.client_class
    hook.load_core().set_process_class(config.client_class, config.priority, config.slo_ms or 0.0)
