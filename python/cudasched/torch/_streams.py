"""The stream that a region's work runs on, and the order where a thread changes streams.

A thread that has entered a region has streams of its own: one a class and device, made when first needed. Outside
regions the thread works on its stream of class ``normal``, no longer on the default stream that all threads share. The
rules:

1. A thread works on one stream at a time, and the stream that it changes to waits, on the GPU, for the one that it
   leaves and for its others. So all work of a thread runs in the order of its program, over all streams. A block of
   memory that one of these streams frees is used again only after the work of the others.
2. A region's stream also waits for the default stream: work that threads without regions launched there comes first.
3. The default stream never waits. A thread that leaves a region which it entered from there goes on on its own stream.
4. A block that was allocated on the default stream can be used again there while a stream of ours still works on it. So
   all tensors alive when a thread enters a region from the default stream are recorded for this thread's streams
   (``record_stream``). Tensors that another thread hands over are recorded, too.
5. Nothing changes while the current stream is captured, and a side stream that the program has made current itself
   stays: the program waits for that one.
6. Outside work behind a best-effort region waits for that region's work, so it counts as best effort, too: as normal
   work it would open the gate for all earlier queued work. The thread's next region of another class ends that.

Nothing here waits on the host, and nothing imports PyTorch: the rules need a `Backend`, which `_adapter` is for
``torch.cuda``. Everything is the calling thread's own, but for `_spare`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

__all__ = ["Backend", "Entry", "Streams", "ThreadStreams"]


class Backend(Protocol):
    """The rules' needs of PyTorch. A stream is known by its `Hashable` key, an event is the backend's own."""

    def device(self) -> int | None:
        """The calling thread's current device; None where there is nothing to do, for want of CUDA."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def current(self, device: int) -> Hashable:
        """The calling thread's current stream of the device."""

    def default(self, device: int) -> Hashable:
        """The device's default stream."""

    def make_current(self, stream: Hashable, device: int | None) -> None:
        """The calling thread goes on on that stream; its current device is `device`, and stays."""

    def create(self, device: int, client_class: str) -> Hashable:
        """A new stream that no other code has, of the class's priority; it lives as long as the process."""

    def event(self, device: int) -> Any:
        """A new event without timing."""

    def record(self, event: Any, stream: Hashable) -> None:
        """The event is complete when the stream's present work is."""

    def wait(self, stream: Hashable, event: Any) -> None:
        """The stream's later work comes after the event as last recorded."""

    def default_is_idle(self) -> bool:
        """Whether nothing of the current device's default stream is left to do; False also where that is not known."""

    def ordering(
        self, device: int, stream: Hashable, others: tuple[Hashable, ...], markers: dict[Hashable, Any]
    ) -> Ordering:
        """Puts a stream behind others, as often as it is told to.

        Args:
            device: Theirs.
            stream: The one that waits.
            others: Those that are waited for.
            markers: Data of this thread's orderings on each awaited stream; the backend's own.
        """

    def alive(self, device: int) -> Iterable[Any]:
        """The tensors on the device that this process holds, weakly referable."""

    def keep(self, tensor: Any, stream: Hashable) -> None:
        """When the tensor is freed, its memory is used again only after the stream's work of that time."""

    def set_class(self, stream: Hashable, client_class: str | None) -> None:
        """Launches of all threads on the stream have this class; None: the thread's."""


class Ordering(Protocol):
    """A stream, and others that it waits for; one thread's."""

    def make(self, best_effort: bool, here: bool) -> None:
        """The stream's later work comes after the others' present work. On the GPU; the host goes on.

        Args:
            best_effort: The thread is in a region of that class, which lets others of the process go first.
            here: Their device is the thread's current one.
        """


class _Switch:
    """A thread's switch from one stream to another, and back, prepared once for all regions."""

    __slots__ = ("after_all", "after_own", "back", "before", "changes", "stream")

    def __init__(self, before: Hashable, stream: Hashable, after_own: Ordering, after_all: Ordering) -> None:
        self.before = before
        self.stream = stream
        self.changes = before != stream
        self.after_own = after_own  # all but the default stream
        self.after_all = after_all
        self.back: tuple[Hashable, Ordering] | None = None  # once a region was left: the stream, and its ordering


class Entry:
    """An open region of a thread, where it may have changed streams."""

    __slots__ = ("client_class", "device", "given", "switch")

    def __init__(self, device: int, client_class: str, switch: _Switch, given: bool) -> None:
        self.device = device
        self.client_class = client_class
        self.switch = switch
        self.given = given  # its stream, to the region, by the program


class _Spare:
    """Streams of threads that have ended, oldest first.

    A set's streams are never destroyed, because PyTorch's allocator keeps memory by stream. They stay together: work on
    another stream of the same thread may still use one stream's memory. The markers that ordered them stay, too: a
    thread on other streams would have to wait for a marker that is still queued.
    """

    def __init__(self) -> None:
        self._sets: dict[int, deque[tuple[dict[str, Hashable], dict[Hashable, Any]]]] = {}

    def give(self, device: int, streams: dict[str, Hashable], markers: dict[Hashable, Any]) -> None:
        self._sets.setdefault(device, deque()).append((streams, markers))

    def take(self, device: int) -> tuple[dict[str, Hashable], dict[Hashable, Any]]:
        try:
            return self._sets[device].popleft()
        except (KeyError, IndexError):
            return {}, {}

    def clear(self) -> None:
        self._sets.clear()


class ThreadStreams:
    """One thread's streams on one device."""

    def __init__(self, backend: Backend, device: int, spare: _Spare) -> None:
        self._backend = backend
        self._device = device
        self._spare = spare
        self._default = backend.default(device)
        self._own, self._markers = spare.take(device)
        self._switches: dict[tuple[Hashable, Hashable], _Switch] = {}
        self._kept: list[weakref.ref[Any]] = []
        self._kept_for: dict[Hashable, None] = {}
        self._home_class: str | None = None
        self.entries: list[Entry] = []
        for client_class, stream in self._own.items():
            self._is_mine(client_class, stream)

    def __del__(self) -> None:
        if self._own:
            self._spare.give(self._device, self._own, self._markers)

    @property
    def default(self) -> Hashable:
        """The device's default stream."""
        return self._default

    def own(self, client_class: str) -> Hashable:
        """This thread's stream of a class."""
        stream = self._own.get(client_class)
        if stream is None:
            stream = self._own[client_class] = self._backend.create(self._device, client_class)
            self._is_mine(client_class, stream)
        return stream

    def _is_mine(self, client_class: str, stream: Hashable) -> None:
        self._switches.clear()  # they are for the streams that there were
        # Bound, so that backward passes which autograd's threads launch there after the region are best effort too.
        self._backend.set_class(stream, "best_effort" if client_class == "best_effort" else None)
        self.use(stream)

    def use(self, stream: Hashable) -> None:
        """Other streams' memory that this thread holds is kept for this stream, too."""
        if stream in self._kept_for or stream == self._default:
            return
        self._kept_for[stream] = None
        for reference in self._kept:
            if (tensor := reference()) is not None:
                self._backend.keep(tensor, stream)

    def keep(self, tensors: Iterable[Any]) -> None:
        """The memory of these, which another stream allocated, is kept for all streams of this thread."""
        self._kept = [reference for reference in self._kept if reference() is not None]
        for tensor in tensors:
            self._kept.append(weakref.ref(tensor))
            for stream in self._kept_for:
                self._backend.keep(tensor, stream)

    def ordering(self, stream: Hashable, after: Iterable[Hashable]) -> Ordering:
        """An ordering that puts a stream behind others at each call."""
        others = tuple(other for other in dict.fromkeys(after) if other != stream)
        return self._backend.ordering(self._device, stream, others, self._markers)

    def end_of_default(self) -> Any:
        """An event that is complete when the default stream's present work is."""
        event = self._backend.event(self._device)
        self._backend.record(event, self._default)
        return event

    def leave_default(self) -> Hashable:
        """The thread works on its normal stream from here on, after all that the default stream has."""
        home = self.own("normal")
        self.keep(self._backend.alive(self._device))
        self.ordering(home, [self._default]).make(False, True)
        self._backend.make_current(home, self._device)
        return home

    def enter(self, client_class: str, chosen: Hashable | None, begin: Callable[[], None]) -> Entry:
        """The thread goes on on its stream of the class, or on the one that was chosen; the device is the current one.

        `begin` tells the engine, before all else: from then on best-effort work holds back for a latency region. For a
        best-effort region the default stream is checked first. From then on the engine queues the region's calls. The
        next user of a stream that all threads share waits, through an open gate, for calls queued there. For the same
        reason the default stream's event, which is needed where that stream is not idle, is used once.
        """
        best_effort = client_class == "best_effort"
        if not best_effort:
            begin()
        backend, own, default = self._backend, self._own, self._default
        before = backend.current(self._device)
        if before == default:
            self.keep(backend.alive(self._device))
        stream = chosen
        if stream is not None:
            self.use(stream)
        elif before in own.values() or before == default or self._is_given(before):
            stream = own.get(client_class) or self.own(client_class)
        else:
            stream = before
        switch = self._switches.get((before, stream)) or self._switch(before, stream)
        after_default = switch.changes or not self.entries
        if best_effort:
            end_of_default = None
            if after_default and not backend.default_is_idle():
                end_of_default = self.end_of_default()
            begin()
            if switch.changes:
                switch.after_own.make(True, True)
            if end_of_default is not None:
                backend.wait(stream, end_of_default)
        else:
            if self._home_class is not None and stream == own.get("normal"):
                self._class_of_home(None)
            if after_default:
                switch.after_all.make(False, True)
        if switch.changes:
            backend.make_current(stream, self._device)
        entry = Entry(self._device, client_class, switch, chosen is not None)
        self.entries.append(entry)
        return entry

    def _is_given(self, stream: Hashable) -> bool:
        return any(entry.given and entry.switch.stream == stream for entry in self.entries)

    def _switch(self, before: Hashable, stream: Hashable) -> _Switch:
        own = [other for other in (before, *self._own.values()) if other != self._default] if before != stream else []
        switch = _Switch(before, stream, self.ordering(stream, own), self.ordering(stream, [*own, self._default]))
        self._switches[before, stream] = switch
        return switch

    def leave(self, entry: Entry) -> None:
        """The thread goes back to its earlier stream, or from the default stream to its normal one."""
        entries = self.entries
        if entries and entries[-1] is entry:
            entries.pop()
        elif entry in entries:  # left before one that was entered in it
            place = entries.index(entry)
            del entries[place]
            above = entries[place]
            if above.switch.before == entry.switch.stream:
                above.switch = self._switch(entry.switch.before, above.switch.stream)
            return
        backend = self._backend
        if backend.capturing():
            return
        switch = entry.switch
        back, ordering = switch.back or self._back(switch)
        current = backend.current(self._device)
        best_effort = entry.client_class == "best_effort"
        if back != current:
            device = backend.device()
            if current != switch.stream:  # the body has changed the stream
                ordering = self.ordering(back, (switch.stream, current))
            ordering.make(best_effort, device == self._device)
            backend.make_current(back, device)
        home_class = "best_effort" if best_effort else None
        if home_class != self._home_class and switch.stream != back and back == self._own.get("normal"):
            self._class_of_home(home_class)

    def _back(self, switch: _Switch) -> tuple[Hashable, Ordering]:
        back = switch.before if switch.before != self._default else self.own("normal")
        switch.back = back, self.ordering(back, (switch.stream,))
        return switch.back

    def _class_of_home(self, client_class: str | None) -> None:
        self._backend.set_class(self._own["normal"], client_class)
        self._home_class = client_class


class _Devices(threading.local):
    """The calling thread's streams, by device."""

    def __init__(self) -> None:
        self.devices: dict[int, ThreadStreams] = {}


class Streams:
    """Regions' handling of the streams of their threads."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._thread = _Devices()
        self._spare = _Spare()

    def forget(self) -> None:
        """In the child of a fork: the parent's streams are none of this process's."""
        for streams in self._thread.devices.values():
            streams._own = {}
        self._thread = _Devices()
        self._spare.clear()

    def of_thread(self, device: int) -> ThreadStreams:
        """The calling thread's."""
        devices = self._thread.devices
        if device not in devices:
            devices[device] = ThreadStreams(self.backend, device, self._spare)
        return devices[device]

    def enter(
        self, client_class: str, chosen: Hashable | None = None, begin: Callable[[], None] = lambda: None
    ) -> Entry | None:
        """A region is entered.

        Args:
            client_class: The class.
            chosen: Its stream, of the current device; None: the thread's own of that class.
            begin: Tells the engine; called once in every case.

        Returns:
            The argument of `leave`; None where nothing was done: without CUDA, and during a capture.
        """
        backend = self.backend
        device = backend.device()
        if device is None or backend.capturing():
            begin()
            return None
        streams = self._thread.devices.get(device) or self.of_thread(device)
        return streams.enter(client_class, chosen, begin)

    def leave(self, entry: Entry) -> None:
        """The region is left, on the thread that entered it."""
        streams = self._thread.devices.get(entry.device)
        if streams is not None:  # in the child of a fork: it was the parent's
            streams.leave(entry)

    def leave_default(self) -> bool:
        """The calling thread leaves the default stream before its first region. False: it was on another stream."""
        device = self.backend.device()
        if device is None or self.backend.capturing():
            return False
        streams = self.of_thread(device)
        if self.backend.current(device) != streams.default:
            return False
        streams.leave_default()
        return True
