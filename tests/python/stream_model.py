"""A model of streams, events and a caching allocator by stream: what `cudasched.torch._streams` is tested over.

Nothing runs: of each operation the model knows what comes before it. An operation is a place in its stream; a clock
says how far of each stream is certainly done before something. Memory that is freed is used again at once by its own
stream, as PyTorch's allocator does, and where streams were recorded for it, when their events are seen to be complete.
"""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Clock = dict[str, int]


def later(clock: Clock, other: Clock) -> Clock:
    return {stream: max(clock.get(stream, 0), other.get(stream, 0)) for stream in clock.keys() | other.keys()}


@dataclass
class Operation:
    thread: str
    stream: str
    place: int
    before: Clock
    client_class: str

    def after(self, other: Operation) -> bool:
        """Whether the GPU cannot begin this one before the other one is done."""
        return self.before.get(other.stream, 0) >= other.place


@dataclass
class Event:
    clock: Clock = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    """Memory of a stream's pool."""

    stream: str
    earlier: list[Operation] = field(default_factory=list)  # by the tensors that had it before
    over: Clock = field(default_factory=dict)  # what the allocator has seen to be over


@dataclass(eq=False)
class Tensor:
    model: Model
    block: Block
    kept_for: set[str] = field(default_factory=set)
    uses: list[Operation] = field(default_factory=list)


@dataclass
class Ordering:
    model: Model
    stream: str
    others: tuple[str, ...]
    markers: dict[str, Event]

    def make(self, best_effort: bool, here: bool) -> None:
        for other in self.others:
            event = self.markers.setdefault(other, Event())
            self.model.record(event, other)
            self.model.wait(self.stream, event)


class Model:
    """The GPU, and what the threads of one process did on it. A `Backend`, for the thread that is `running`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names = itertools.count(1)
        self.running = "main"
        self.clocks: dict[str, Clock] = {"default": {}}
        self.seen: dict[str, Clock] = {}  # by thread: what its host knows to be over
        self.currents: dict[str, str] = {}
        self.classes: dict[str, str] = {"default": "normal"}
        self.bound: dict[str, str] = {}
        self.region: dict[str, list[str]] = {}
        self.is_capturing = False
        self.free: dict[str, list[Block]] = {}
        self.pending: list[tuple[Block, list[Event]]] = []
        self.tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.wrong: list[str] = []
        self.operations: list[Operation] = []

    # ---- Backend

    def device(self) -> int | None:
        return 0

    def capturing(self) -> bool:
        return self.is_capturing

    def current(self, device: int) -> str:
        return self.currents.get(self.running, "default")

    def default(self, device: int) -> str:
        return "default"

    def make_current(self, stream: Any, device: int | None = 0) -> None:
        self.currents[self.running] = stream

    def create(self, device: int, client_class: str) -> str:
        return self.side_stream(f"{client_class} {next(self._names)}", client_class)

    def event(self, device: int) -> Event:
        return Event()

    def record(self, event: Event, stream: Any) -> None:
        event.clock = dict(self.clocks[stream])

    def wait(self, stream: Any, event: Event) -> None:
        self.clocks[stream] = later(self.clocks[stream], event.clock)

    def default_is_idle(self) -> bool:
        """Now and then, and then the host has seen it."""
        if self._rng.random() < 0.5:
            return False
        self.seen[self.running] = later(self.seen.get(self.running, {}), self.clocks["default"])
        return True

    def ordering(self, device: int, stream: Any, others: tuple[Any, ...], markers: dict[Any, Any]) -> Ordering:
        return Ordering(self, stream, others, markers)

    def alive(self, device: int) -> Iterable[Tensor]:
        return list(self.tensors)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        if stream != tensor.block.stream:
            tensor.kept_for.add(stream)

    def set_class(self, stream: Any, client_class: str | None) -> None:
        if client_class is None:
            self.bound.pop(stream, None)
        else:
            self.bound[stream] = client_class

    # ---- what programs do

    def side_stream(self, name: str, client_class: str = "normal") -> str:
        self.clocks[name] = {}
        self.classes[name] = client_class
        return name

    def _launch(self, stream: str) -> Operation:
        regions = self.region.get(self.running) or ["normal"]
        clock = self.clocks[stream]
        place = clock.get(stream, 0) + 1
        before = later(clock, self.seen.get(self.running, {}))
        self.clocks[stream] = later(before, {stream: place})
        operation = Operation(self.running, stream, place, before, regions[-1])
        self.operations.append(operation)
        return operation

    def allocate(self) -> Tensor:
        """A tensor, and the kernel that fills it."""
        stream = self.current(0)
        self._look_at_events()
        blocks = self.free.get(stream)
        block = blocks.pop(self._rng.randrange(len(blocks))) if blocks else Block(stream)
        self.seen[self.running] = later(self.seen.get(self.running, {}), block.over)
        tensor = Tensor(self, block)
        self.tensors.add(tensor)
        self.use(tensor)
        return tensor

    def use(self, *tensors: Tensor) -> Operation:
        """A kernel on the current stream that reads and writes these."""
        operation = self._launch(self.current(0))
        for tensor in tensors:
            for other in tensor.block.earlier:
                if not operation.after(other):
                    self.wrong.append(f"memory: {operation} may run before {other}, which used the block before")
            for other in tensor.uses:
                if not operation.after(other) and other.thread == operation.thread:
                    self.wrong.append(f"order: {operation} may run before {other} of its own thread")
                elif not operation.after(other):
                    self.wrong.append(f"crossing: {operation} may run before {other} of another thread")
            tensor.uses.append(operation)
        return operation

    def release(self, tensor: Tensor) -> None:
        """The last reference goes."""
        self.tensors.discard(tensor)
        block = tensor.block
        block.earlier = tensor.uses
        events = []
        for stream in sorted(tensor.kept_for):
            event = Event()
            self.record(event, stream)
            events.append(event)
        if events:
            self.pending.append((block, events))
        else:
            self.free.setdefault(block.stream, []).append(block)

    def _look_at_events(self) -> None:
        """The allocator asks which events are complete: some are, some are not yet."""
        waiting = []
        for block, events in self.pending:
            if self._rng.random() < 0.5:
                waiting.append((block, events))
                continue
            for event in events:
                block.over = later(block.over, event.clock)
            self.free.setdefault(block.stream, []).append(block)
        self.pending = waiting


class Turns:
    """Real threads, of which one at a time does something: threading.local is what it is in a program."""

    def __init__(self, model: Model, names: Iterable[str]) -> None:
        self._model = model
        self._workers = {name: _Worker(name) for name in names}

    def do(self, name: str, action: Any) -> Any:
        self._model.running = name
        return self._workers[name].run(action)

    def end(self, name: str) -> None:
        """The thread ends; another of the name begins."""
        self._workers[name].stop()
        self._model.currents.pop(name, None)
        self._workers[name] = _Worker(name)

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()


class _Worker:
    def __init__(self, name: str) -> None:
        self._asked = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._action: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            self._asked.acquire()
            action, self._action = self._action, None
            if action is None:
                return
            try:
                self._result, self._error = action(), None
            except BaseException as error:
                self._result, self._error = None, error
            del action
            self._done.release()

    def run(self, action: Any) -> Any:
        self._action = action
        self._asked.release()
        self._done.acquire()
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self._asked.release()
        self._thread.join()
