"""One program of the soak that lives on graphs: threads capture, build, launch, update, switch off and destroy them.

``graph_life.py SEED``. As life.py it writes a line of JSON for each round that came to its end, and ends when its
standard input does. A graph's launches run one after another, in the order in which they were made, on whatever streams
they were; each graph has a log of its own, so what is in it says whether anything was lost, ran twice, ran as it was
not meant to, or ran before what it depends on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from life import SPARE_DESCRIPTORS, LostError, descriptors, report, told_to_end
from logged import ROOM, Log
from program import CAPTURE_THREAD_LOCAL, IMAGE, PATIENCE_S, Gpu, Worker

from benchmarks.graphs.driver import KernelParams

UPDATE_FAILURE = "status 910"
NOTE = 1 << 40
"""What a single kernel notes beside a graph is above this, what graphs note is below."""

MOST_NODES = 1500
STREAMS = 3
LEGACY, PER_THREAD = 0, 2
"""Handles of the default streams."""


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams, of a kernel: its type is 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("kernel", KernelParams),
        ("rest", ctypes.c_byte * 168),
    )


class HostParams(ctypes.Structure):
    """CUDA_HOST_NODE_PARAMS."""

    _fields_ = (("function", ctypes.c_void_p), ("data", ctypes.c_void_p))


assert ctypes.sizeof(KernelParams) == 72
assert ctypes.sizeof(NodeParams) == 256

_called: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _call(number: int) -> None:
    _called[number]()


def callback(function: Callable[[], None]) -> int:
    """What a host node or a destructor is given to have the function called; kept for good."""
    number = next(_numbers)
    _called[number] = function
    return number


@dataclass
class Node:
    """One thing that a graph does."""

    kind: str  # kernel, host or empty
    before: list[int]
    us: int = 1
    stream: int = 0  # of the capture
    child: bool = False  # made as a graph of one kernel


@dataclass
class Launch:
    """What one launch is to do."""

    values: list[int]
    off: frozenset[int]


@dataclass
class Recipe:
    """A graph's nodes, and whether it is captured or built node by node."""

    nodes: list[Node]
    captured: bool
    ancestors: list[int] = field(default_factory=list)  # a set of bits for each node

    def __post_init__(self) -> None:
        for node in self.nodes:
            bits = 0
            for other in node.before:
                bits |= self.ancestors[other] | 1 << other
            self.ancestors.append(bits)

    @classmethod
    def random(cls, chance: random.Random) -> Recipe:
        most = chance.choice([1, 4, 30, 60, 60, 120, MOST_NODES])
        count = chance.randint(1, most)
        us = chance.choice([1, 20, 60, 60]) if count < 200 else 5
        captured = chance.random() < 0.5
        branches = chance.randint(1, STREAMS) if captured else 1
        nodes: list[Node] = []
        if not captured:
            wide = chance.random() < 0.5
            for index in range(count):
                kind = chance.choices(["kernel", "host", "empty"], weights=[20, 1 if count < 200 else 0, 1])[0]
                earlier = range(max(0, index - 8), index)
                before = [index - 1] if index else []
                if wide and index:
                    before = chance.sample(earlier, chance.randint(0, min(3, len(earlier))))
                child = kind == "kernel" and chance.random() < 0.05
                nodes.append(Node(kind, before, chance.randint(1, us), child=child))
            return cls(nodes, False)
        # The last node of each stream of the capture; the first stream is where it begins and ends.
        last: list[int | None] = [None] * branches
        for index in range(count):
            stream = 0 if index == 0 else chance.randrange(branches)
            before = [place for place in (last[stream],) if place is not None]
            if not before or (branches > 1 and chance.random() < 0.1):
                other = last[chance.randrange(branches)]
                other = last[0] if other is None else other
                if other is not None and other not in before:
                    before.append(other)
            nodes.append(Node("kernel", before, chance.randint(1, us), stream))
            last[stream] = index
        return cls(nodes, True)


class Streams:
    """A thread's streams: the default ones, those that wait for these or do not, and those that it captures on."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        blocking = ctypes.c_void_p()
        gpu.call("cuStreamCreate", ctypes.byref(blocking), 0)
        self.captures = [gpu.stream() for _ in range(STREAMS)]
        self._own = [blocking.value or 0, gpu.stream(), *self.captures]
        self.blocking = {PER_THREAD, self._own[0]}
        self.launches = [LEGACY, PER_THREAD, *self._own[:2]]

    def end(self) -> None:
        """Waits for them, and destroys those that were made."""
        for stream in (LEGACY, PER_THREAD, *self._own):
            self._gpu.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        for stream in self._own:
            self._gpu.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))


class Subject:
    """An executable graph, its log, and what is to be in it."""

    def __init__(self, gpu: Gpu, chance: random.Random, streams: Streams, may_hold: bool) -> None:
        self._gpu, self._chance, self._streams, self._captures = gpu, chance, streams.launches, streams.captures
        self._blocking = streams.blocking
        self._recipe = Recipe.random(chance)
        self._log = Log(gpu)
        self._function = self._log._function
        self._cursor = self._log._cursor
        self._events = [
            self._log.event() for _ in range(max(2, len(self._recipe.nodes) if self._recipe.captured else 2))
        ]
        gpu.call("cuStreamSynchronize", None)  # memory is cleared on the default stream
        self._next = 1
        self._notes = itertools.count(NOTE)
        self._hosts: list[tuple[int, int]] = []
        self._keep: list[object] = []
        self._launches: list[Launch] = []
        self._bounds: list[tuple[int, int, bool]] = []  # a note's value, a launch, whether it is after that
        self._entries = 0
        self._history: list[str] = []
        self.destroyed = 0
        self._values = self._fresh()
        self._off: set[int] = set()
        self._graph, self._nodes = self._build(self._recipe, self._values)
        self.holds = may_hold and chance.random() < 0.5
        if self.holds:
            self._hold(self._graph)
        self._exec = ctypes.c_void_p()
        if chance.random() < 0.5:
            gpu.call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))
        else:
            parameters = (ctypes.c_uint64 * 4)()
            gpu.call("cuGraphInstantiateWithParams", ctypes.byref(self._exec), self._graph, parameters)
        if chance.random() < 0.5:  # as PyTorch does
            gpu.call("cuGraphDestroy", self._graph)
            self._nodes = []

    # ---- making graphs

    def _fresh(self) -> list[int]:
        count = len(self._recipe.nodes)
        first = self._next
        self._next += count
        return list(range(first, first + count))

    def _hold(self, graph: ctypes.c_void_p) -> None:
        made = ctypes.c_void_p()

        def destroyed() -> None:
            self.destroyed += 1

        number = ctypes.c_void_p(callback(destroyed))
        self._gpu.call("cuUserObjectCreate", ctypes.byref(made), number, _call, 1, 1)
        self._gpu.call("cuGraphRetainUserObject", graph, made, 1, 1)

    def _kernel(self, value: int, us: int) -> KernelParams:
        words = (self._log.values, self._cursor, ctypes.c_uint64(value), ctypes.c_uint32(us))
        addresses = (ctypes.c_void_p * 4)(*[ctypes.addressof(word) for word in words])
        one = (ctypes.c_uint * 3)(1, 1, 1)
        self._keep[:] = [words, addresses]  # until the call that takes it
        return KernelParams(self._function.value, one, one, 0, ctypes.addressof(addresses), None, None, None)

    def _host(self, value: int) -> HostParams:
        cursor = ctypes.c_uint64.from_address(self._cursor.value)

        def called() -> None:
            self._hosts.append((value, cursor.value))

        return HostParams(ctypes.cast(_call, ctypes.c_void_p), callback(called))

    def _build(self, recipe: Recipe, values: list[int]) -> tuple[ctypes.c_void_p, list[int]]:
        return self._capture(recipe, values) if recipe.captured else self._add_nodes(recipe, values)

    def _add_nodes(self, recipe: Recipe, values: list[int]) -> tuple[ctypes.c_void_p, list[int]]:
        graph = ctypes.c_void_p()
        self._gpu.call("cuGraphCreate", ctypes.byref(graph), 0)
        made: list[int] = []
        for node, value in zip(recipe.nodes, values, strict=True):
            handle = ctypes.c_void_p()
            before = (ctypes.c_void_p * max(1, len(node.before)))(*[made[place] for place in node.before])
            where = (ctypes.byref(handle), graph, before, ctypes.c_size_t(len(node.before)))
            if node.kind == "host":
                self._gpu.call("cuGraphAddHostNode", *where, ctypes.byref(self._host(value)))
            elif node.kind == "empty":
                self._gpu.call("cuGraphAddEmptyNode", *where)
            elif node.child:
                inner = self._inner(value, node.us)
                self._gpu.call("cuGraphAddChildGraphNode", *where, inner)
                self._gpu.call("cuGraphDestroy", inner)
            else:
                self._gpu.call("cuGraphAddKernelNode_v2", *where, ctypes.byref(self._kernel(value, node.us)))
            assert handle.value
            made.append(handle.value)
        return graph, made

    def _inner(self, value: int, us: int) -> ctypes.c_void_p:
        """A graph of one kernel, to be a child."""
        inner, inside = ctypes.c_void_p(), ctypes.c_void_p()
        self._gpu.call("cuGraphCreate", ctypes.byref(inner), 0)
        where = (ctypes.byref(inside), inner, None, ctypes.c_size_t(0))
        self._gpu.call("cuGraphAddKernelNode_v2", *where, ctypes.byref(self._kernel(value, us)))
        return inner

    def _capture(self, recipe: Recipe, values: list[int]) -> tuple[ctypes.c_void_p, list[int]]:
        graph, streams = ctypes.c_void_p(), self._captures
        self._gpu.call("cuStreamBeginCapture_v2", ctypes.c_void_p(streams[0]), CAPTURE_THREAD_LOCAL)
        last: dict[int, int] = {}
        for index, (node, value) in enumerate(zip(recipe.nodes, values, strict=True)):
            for place in node.before:
                if last.get(node.stream) != place:
                    self._log.wait(streams[node.stream], self._events[place])
            self._log.note(value, stream=streams[node.stream], us=node.us)
            self._log.record(self._events[index], streams[node.stream])
            last[node.stream] = index
        for stream, index in last.items():
            if stream:
                self._log.wait(streams[0], self._events[index])
        self._gpu.call("cuStreamEndCapture", ctypes.c_void_p(streams[0]), ctypes.byref(graph))
        count = ctypes.c_size_t(len(values))
        nodes = (ctypes.c_void_p * len(values))()
        self._gpu.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
        assert count.value == len(values)
        return graph, [node or 0 for node in nodes]

    # ---- what a thread does with it

    @property
    def full(self) -> bool:
        return self._entries + 2 * len(self._recipe.nodes) + 16 > ROOM

    def launch(self) -> None:
        stream = self._chance.choice(self._streams)
        number = len(self._launches)
        self._history.append(f"{number}@{self._streams.index(stream)}")
        if self._chance.random() < 0.3:
            self._note(stream, number, after=False)
        self._gpu.replay(self._exec.value or 0, stream)
        nodes = self._recipe.nodes
        self._launches.append(Launch(list(self._values), frozenset(self._off)))
        self._entries += sum(node.kind == "kernel" and place not in self._off for place, node in enumerate(nodes))
        behind = self._streams_behind(stream)
        if self._chance.random() < 0.3:
            self._note(stream, number, after=True)
        elif behind and self._chance.random() < 0.3:
            self._note(self._chance.choice(behind), number, after=True)
        elif self._chance.random() < 0.3:
            other = self._chance.choice(self._streams)
            self._log.record(self._events[0], stream)
            self._log.wait(other, self._events[0])
            self._note(other, number, after=True)
        elif self._chance.random() < 0.15:
            due = self._entries
            self._log.record(self._events[1], stream)
            self._gpu.call("cuEventSynchronize", self._events[1])
            there = ctypes.c_uint64.from_address(self._cursor.value).value
            if there < due - sum(after for _, _, after in self._bounds):
                raise LostError(f"an event after a launch is done and {there} of {due} kernels have run")

    def _streams_behind(self, stream: int) -> list[int]:
        """What CUDA orders behind work on that stream without being told: the default stream and blocking ones."""
        if stream == LEGACY:
            return [other for other in self._streams if other in self._blocking]
        return [LEGACY] if stream in self._blocking else []

    def _note(self, stream: int, number: int, after: bool) -> None:
        value = next(self._notes)
        self._history.append(f"note{value - NOTE}{'>' if after else '<'}{number}@{self._streams.index(stream)}")
        self._log.note(value, stream=stream)
        self._bounds.append((value, number, after))
        self._entries += 1

    def take_over(self) -> None:
        """Updates it to a graph of the same nodes."""
        values = self._fresh()
        graph, _ = self._build(self._recipe, values)
        result = (ctypes.c_uint64 * 4)()
        if self._chance.random() < 0.5:
            self._gpu.call("cuGraphExecUpdate_v2", self._exec, graph, result)
        else:
            node, outcome = ctypes.c_void_p(), ctypes.c_int()
            self._gpu.call("cuGraphExecUpdate", self._exec, graph, ctypes.byref(node), ctypes.byref(outcome))
        self._gpu.call("cuGraphDestroy", graph)
        self._values = values
        self._history.append("update")
        if self.holds:  # the graph that it was updated to holds nothing
            self.holds = False

    def refuse(self) -> None:
        """An update to a graph of other nodes is refused, and changes nothing."""
        other = Recipe([*self._recipe.nodes, Node("kernel", [0])], False)
        graph, _ = self._add_nodes(other, [*self._values, 999_999_999])
        result = (ctypes.c_uint64 * 4)()
        try:
            self._gpu.call("cuGraphExecUpdate_v2", self._exec, graph, result)
        except RuntimeError as error:
            if UPDATE_FAILURE not in str(error):
                raise
        else:
            raise LostError("an update to other nodes was taken over")
        self._history.append("refused")
        self._gpu.call("cuGraphDestroy", graph)

    def change_node(self) -> None:
        places = [place for place, node in enumerate(self._recipe.nodes) if node.kind == "kernel" and not node.child]
        if not self._nodes or not places:
            return
        place = self._chance.choice(places)
        node = ctypes.c_void_p(self._nodes[place])
        value = self._next
        self._next += 1
        parameters = self._kernel(value, self._recipe.nodes[place].us)
        if self._chance.random() < 0.5:
            self._gpu.call("cuGraphExecKernelNodeSetParams_v2", self._exec, node, ctypes.byref(parameters))
        else:
            general = NodeParams(kernel=parameters)
            self._gpu.call("cuGraphExecNodeSetParams", self._exec, node, ctypes.byref(general))
        self._values[place] = value
        self._history.append(f"set{place}")

    def change_child(self) -> None:
        places = [place for place, node in enumerate(self._recipe.nodes) if node.child]
        if not self._nodes or not places:
            return
        place = self._chance.choice(places)
        value = self._next
        self._next += 1
        inner = self._inner(value, self._recipe.nodes[place].us)
        node = ctypes.c_void_p(self._nodes[place])
        self._gpu.call("cuGraphExecChildGraphNodeSetParams", self._exec, node, inner)
        self._gpu.call("cuGraphDestroy", inner)
        self._values[place] = value
        self._history.append(f"child{place}")

    def launch_changed(self, most: int = 8) -> None:
        """Again and again, with other parameters each time, as decoders and XLA do."""
        changes = self._chance.sample([self.change_node, self.change_child, self.take_over], self._chance.randint(1, 3))
        for _ in range(self._chance.randint(2, most)):
            if self.full:
                return
            for change in changes:
                change()
            self.launch()

    def switch(self) -> None:
        places = [place for place, node in enumerate(self._recipe.nodes) if node.kind == "kernel" and not node.child]
        if not self._nodes or not places:
            return
        place = self._chance.choice(places)
        self._off ^= {place}
        self._history.append(f"{'off' if place in self._off else 'on'}{place}")
        self._gpu.call(
            "cuGraphNodeSetEnabled", self._exec, ctypes.c_void_p(self._nodes[place]), int(place not in self._off)
        )

    def destroy(self) -> None:
        """With launches in flight, as it may be."""
        self._gpu.call("cuGraphExecDestroy", self._exec)
        if self._nodes:
            self._gpu.call("cuGraphDestroy", self._graph)

    # ---- what came of it

    def check(self) -> int:
        """Looks at everything and gives it back. Returns how many launches ran."""
        log = self._log.read()
        nodes = self._recipe.nodes
        where = [index for index, value in enumerate(log) if value < NOTE]
        notes = {value: index for index, value in enumerate(log) if value >= NOTE}
        if len(notes) != len(self._bounds):
            raise LostError(f"{len(notes)} of {len(self._bounds)} single kernels ran")
        spans = []
        taken = hosts = 0
        for number, launch in enumerate(self._launches):
            due = [place for place, node in enumerate(nodes) if node.kind == "kernel" and place not in launch.off]
            span = where[taken : taken + len(due)]
            taken += len(due)
            position = {log[index]: 2 * index + 1 for index in span}
            wanted = {launch.values[place] for place in due}
            if set(position) != wanted or len(span) != len(due):
                lost, others = sorted(wanted - set(position)), sorted(set(position) - wanted)
                raise LostError(
                    f"launch {number} of {len(self._launches)}, of {len(nodes)} nodes, lost {len(lost)}: {lost[:8]}, "
                    f"and ran {len(others)} others: {others[:8]}; what was done: {' '.join(self._history)}"
                )
            host_count = sum(node.kind == "host" for node in nodes)
            called = self._hosts[hosts : hosts + host_count]
            hosts += host_count
            position |= {value: 2 * cursor for value, cursor in called}
            for place, value in enumerate(launch.values):
                for other in bits(self._recipe.ancestors[place]) if len(nodes) < 200 else nodes[place].before:
                    first, then = position.get(launch.values[other]), position.get(value)
                    if first is not None and then is not None and first > then:
                        raise LostError(f"launch {number}: node {place} ran before node {other}")
            spans.append((min(span, default=0), max(span, default=0)) if span else None)
        if taken != len(where) or hosts != len(self._hosts):
            raise LostError(f"{len(where)} kernels and {len(self._hosts)} host functions ran, not {taken} and {hosts}")
        for value, number, after in self._bounds:
            span_of = spans[number]
            if span_of is not None and (notes[value] < span_of[1] if after else notes[value] > span_of[0]):
                when = "before the end" if after else "after the begin"
                raise LostError(
                    f"note {value - NOTE} ran {when} of launch {number}, of {len(nodes)} nodes; what was done: "
                    f"{' '.join(self._history)}"
                )
        for event in self._events:
            self._gpu.call("cuEventDestroy_v2", event)
        self._log.free()
        return len(self._launches)

    def wait_for_destructor(self) -> None:
        """When all is done, what a graph held is destroyed, once."""
        until = time.monotonic() + PATIENCE_S
        while self.holds and not self.destroyed:
            if time.monotonic() > until:
                raise LostError("a user object of a destroyed graph is still held")
            self._gpu.synchronize()
            time.sleep(0.01)
        if self.destroyed > 1:
            raise LostError("a user object was destroyed twice")


def bits(set_of: int) -> list[int]:
    """The members of a set of bits."""
    return [place for place in range(set_of.bit_length()) if set_of >> place & 1]


class Life:
    """Random rounds; `did` counts what was done in the one under way."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._gpu = chance, Gpu()
        self.did: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._sliced = 0
        # Whole updates leave slices once a process has given any graph a user object.
        self._may_hold = chance.random() < 0.3

    def _count(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1

    def _live(self, chance: random.Random, all_subjects: list[Subject]) -> None:
        gpu = self._gpu
        streams = Streams(gpu)
        subjects: list[Subject] = []
        for _ in range(chance.randint(5, 150)):
            if not subjects or (len(subjects) < 4 and chance.random() < 0.2):
                subjects.append(Subject(gpu, chance, streams, self._may_hold))
                self._count("captures")
                with self._lock:
                    all_subjects.append(subjects[-1])
                if chance.random() < 0.3:
                    self._wait_for_slices(subjects[-1])
            subject = chance.choice(subjects)
            if subject.full or chance.random() < 0.02:
                subject.destroy()
                subjects.remove(subject)
                continue
            actions = {
                subject.launch: 25,
                subject.launch_changed: 3,
                subject.take_over: 2,
                subject.refuse: 0.5,
                subject.change_node: 3,
                subject.change_child: 1,
                subject.switch: 2,
                self._load_and_unload: 0.5,
                self._pause: 2,
            }
            action = chance.choices([*actions], weights=[*actions.values()])[0]
            if action not in (subject.launch, subject.switch, self._load_and_unload, self._pause):
                self._count("graph_updates")
            action()
        for subject in subjects:
            subject.destroy()
        streams.end()

    def _wait_for_slices(self, subject: Subject) -> None:
        """Of whichever graph: where all is new all the time, few are there when they are launched."""
        subject.launch()
        before, until = counted("graph_builds"), time.monotonic() + 0.3
        while counted("graph_builds") == before and time.monotonic() < until:
            time.sleep(0.005)
        subject.launch_changed(most=60)
        self._count("graph_updates")

    def _load_and_unload(self) -> None:
        """A module that nothing uses, while other threads launch."""
        module = ctypes.c_void_p()
        self._gpu.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(IMAGE))
        self._gpu.call("cuModuleUnload", module)

    def _pause(self) -> None:
        """At times long enough for slices to be built."""
        time.sleep(self._chance.expovariate(1 / self._chance.choice([0.003, 0.05])))

    def round(self) -> None:
        self.did.clear()
        subjects: list[Subject] = []
        seeds = [self._chance.random() for _ in range(self._chance.randint(1, 3))]
        threads = [Worker(self._gpu, lambda seed=seed: self._live(random.Random(seed), subjects)) for seed in seeds]
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        # Not before: nobody may synchronise with a context while a thread captures.
        self.did["launches"] += sum(subject.check() for subject in subjects)
        for subject in subjects:
            subject.wait_for_destructor()
        self.did["threads"] += len(threads)
        sliced = counted("sliced_launches")
        self.did["sliced_launches"] += sliced - self._sliced
        self._sliced = sliced
        report(self.did)


def counted(name: str) -> int:
    """A count of what cudasched did in this process; 0 without cudasched."""
    if "CUDASCHED_CLASS" not in os.environ:
        return 0
    import cudasched

    return int(getattr(cudasched.state(), name))


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    chance = random.Random(int(sys.argv[1]))
    life = Life(chance)
    ends = chance.expovariate(1 / 60)
    rounds, begun, before = 0, time.monotonic(), 0
    while not told_to_end() and time.monotonic() - begun < ends:
        life.round()
        rounds += 1
        if rounds == 20:
            before = descriptors()
    if rounds > 20 and descriptors() > before + SPARE_DESCRIPTORS:
        raise LostError(f"{descriptors() - before} descriptors were left open in {rounds} rounds")


if __name__ == "__main__":
    main()
