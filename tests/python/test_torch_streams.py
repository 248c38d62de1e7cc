"""Regions' streams over a model of stream order and of memory: random programs, and what each rule is there for."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cudasched.torch import _streams
from cudasched.torch._handover import hand_over
from stream_model import Model, Tensor, Turns

CLASSES = ("latency", "normal", "best_effort")
PROGRAMS = 200


class Program:
    """Threads that enter and leave regions, allocate, use, free and hand over, in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ends = [self.end] * (1 + seed % 3)
        self.model = Model(self.rng)
        self.streams = _streams.Streams(self.model)
        self.members = ["a", "b", "c"]
        self.outsider = "outsider"  # a thread that enters no region
        self.turns = Turns(self.model, [*self.members, self.outsider])
        self.entries: dict[str, list[Any]] = {name: [] for name in self.members}
        self.held: dict[str, list[Tensor]] = {name: [] for name in [*self.members, self.outsider]}
        self.parcels: list[tuple[str, Any, Tensor]] = []
        self.names = itertools.count(1)
        self.side = {name: self.side_stream() for name in ("a", "b")}

    def run(self, steps: int) -> list[str]:
        try:
            for _ in range(steps):
                name = self.rng.choice([*self.members, self.outsider])
                actions: list[Callable[[str], None]] = [self.allocate, self.use, self.use, self.free]
                if name != self.outsider:
                    actions += [self.enter, self.leave, self.enter, self.leave, self.give, self.take, *self.ends]
                action = self.rng.choice(actions)
                if action == self.end:
                    self.end(name)
                else:
                    self.turns.do(name, functools.partial(action, name))
        finally:
            self.turns.stop()
        return self.model.wrong

    def allocate(self, name: str) -> None:
        self.held[name].append(self.model.allocate())

    def use(self, name: str) -> None:
        if self.held[name]:
            self.model.use(*self.rng.sample(self.held[name], self.rng.randint(1, min(3, len(self.held[name])))))

    def free(self, name: str) -> None:
        if self.held[name]:
            self.model.release(self.held[name].pop(self.rng.randrange(len(self.held[name]))))

    def enter(self, name: str) -> None:
        if len(self.entries[name]) >= 4:
            return
        client_class = self.rng.choice(CLASSES)
        chosen = self.side.get(name) if self.rng.random() < 0.2 else None
        self.model.region.setdefault(name, []).append(client_class)
        self.entries[name].append(self.streams.enter(client_class, chosen))

    def leave(self, name: str) -> None:
        if self.entries[name]:
            place = -1 if self.rng.random() < 0.9 else self.rng.randrange(len(self.entries[name]))
            self.streams.leave(self.entries[name].pop(place))
            self.model.region[name].pop(place)

    def give(self, name: str) -> None:
        """The giver lets go of what it gives: as a queue does."""
        if self.held[name]:
            tensor = self.held[name].pop()
            self.parcels.append((name, hand_over(self.streams, 0, [tensor]), tensor))

    def take(self, name: str) -> None:
        for place, (giver, parcel, tensor) in enumerate(self.parcels):
            if giver != name:
                del self.parcels[place]
                parcel.take(self.streams)
                self.held[name].append(tensor)
                return

    def end(self, name: str) -> None:
        """The thread ends outside regions; what it held goes with it."""
        if self.entries[name]:
            return
        for tensor in self.held[name]:
            self.model.release(tensor)
        self.held[name].clear()
        self.turns.end(name)
        if name in self.side:
            self.side[name] = self.side_stream()  # a given stream is one thread's

    def side_stream(self) -> str:
        return self.model.side_stream(f"side {next(self.names)}")


def found(seeds: range, steps: int = 150) -> Iterator[str]:
    for seed in seeds:
        yield from Program(seed).run(steps)


def test_random_programs_keep_their_order_and_their_memory() -> None:
    assert list(found(range(PROGRAMS))) == []


def without_joining_what_was_left(patch: pytest.MonkeyPatch) -> None:
    ordering = _streams.ThreadStreams.ordering

    def changed(self: Any, stream: Any, after: Any) -> _streams.Ordering:
        return ordering(self, stream, [other for other in after if other == "default"])

    patch.setattr(_streams.ThreadStreams, "ordering", changed)


def without_waiting_for_the_default_stream(patch: pytest.MonkeyPatch) -> None:
    ordering = _streams.ThreadStreams.ordering

    def changed(self: Any, stream: Any, after: Any) -> _streams.Ordering:
        return ordering(self, stream, [other for other in after if other != "default"])

    patch.setattr(_streams.ThreadStreams, "ordering", changed)
    patch.setattr(_streams.ThreadStreams, "end_of_default", lambda self: self._backend.event(0))


def without_keeping_what_is_alive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_streams.ThreadStreams, "keep", lambda self, tensors: None)


def without_keeping_for_later_streams(patch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, stream: Any) -> None:
        self._kept_for[stream] = None

    patch.setattr(_streams.ThreadStreams, "use", changed)


def without_leaving_the_default_stream(patch: pytest.MonkeyPatch) -> None:
    leave = _streams.ThreadStreams.leave

    def changed(self: Any, entry: Any) -> None:
        leave(self, entry)
        if entry.switch.before == "default" and not self.entries:
            self._backend.make_current("default")

    patch.setattr(_streams.ThreadStreams, "leave", changed)


def without_keeping_a_threads_streams_together(patch: pytest.MonkeyPatch) -> None:
    give = _streams._Spare.give

    def changed(self: Any, device: int, streams: Any, markers: Any) -> None:
        for client_class, stream in streams.items():
            give(self, device, {client_class: stream}, markers)

    patch.setattr(_streams._Spare, "give", changed)


def without_waiting_at_a_handover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("cudasched.torch._handover.Parcel._wait", lambda self, streams, stream: None)


@pytest.mark.parametrize(
    ("remove", "kind"),
    [
        (without_joining_what_was_left, "order"),
        (without_waiting_for_the_default_stream, "order"),
        (without_keeping_what_is_alive, "memory"),
        (without_keeping_for_later_streams, "memory"),
        (without_leaving_the_default_stream, "order"),
        (without_keeping_a_threads_streams_together, "memory"),
        (without_waiting_at_a_handover, "crossing"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_a_rule_that_is_removed_is_missed(
    remove: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch)
    assert any(line.startswith(kind) for line in found(range(PROGRAMS)))


class OneThread:
    """The rules by hand: the model, and the streams of the test's own thread."""

    def __init__(self) -> None:
        self.model = Model(random.Random(1))
        self.streams = _streams.Streams(self.model)

    def current(self) -> str:
        return self.model.current(0)


@pytest.fixture
def one() -> OneThread:
    return OneThread()


def test_a_region_has_a_stream_of_its_class_and_outside_is_a_normal_one(one: OneThread) -> None:
    assert one.current() == "default"
    for client_class in CLASSES:
        entry = one.streams.enter(client_class)
        inside = one.current()
        assert one.model.classes[inside] == client_class and inside != "default"
        one.streams.leave(entry)
        assert one.model.classes[one.current()] == "normal" and one.current() != "default"
        again = one.streams.enter(client_class)
        assert one.current() == inside
        one.streams.leave(again)


def test_two_threads_share_no_stream(one: OneThread) -> None:
    turns = Turns(one.model, ["a", "b"])
    for name in ("a", "b"):
        turns.do(name, lambda: one.streams.enter("best_effort"))
    assert one.model.currents["a"] != one.model.currents["b"]
    turns.stop()


def test_a_thread_that_ends_leaves_its_streams_to_the_next(one: OneThread) -> None:
    turns = Turns(one.model, ["a"])
    turns.do("a", lambda: one.streams.leave(one.streams.enter("latency")))
    made = set(one.model.clocks)
    turns.end("a")
    turns.do("a", lambda: one.streams.leave(one.streams.enter("latency")))
    assert set(one.model.clocks) == made
    turns.stop()


def test_nesting_comes_back_and_the_same_class_stays(one: OneThread) -> None:
    outer = one.streams.enter("best_effort")
    stream = one.current()
    same = one.streams.enter("best_effort")
    assert one.current() == stream
    inner = one.streams.enter("latency")
    assert one.model.classes[one.current()] == "latency"
    one.streams.leave(inner)
    assert one.current() == stream
    one.streams.leave(same)
    assert one.current() == stream
    one.streams.leave(outer)
    assert one.model.classes[one.current()] == "normal"


def test_an_outer_region_may_be_left_first(one: OneThread) -> None:
    outer = one.streams.enter("best_effort")
    first = one.model.allocate()
    inner = one.streams.enter("latency")
    inside = one.current()
    one.streams.leave(outer)
    assert one.current() == inside
    one.streams.leave(inner)
    assert one.model.classes[one.current()] == "normal"
    one.model.use(first)
    assert one.model.wrong == []


def test_a_side_stream_of_the_program_stays_current(one: OneThread) -> None:
    """The program waits for the stream that it chose: work elsewhere would not be over then."""
    side = one.model.side_stream("side")
    one.model.make_current(side)
    outer = one.streams.enter("best_effort")
    assert one.current() == side
    inner = one.streams.enter("latency")
    assert one.current() == side
    one.streams.leave(inner)
    one.streams.leave(outer)
    assert one.current() == side


def test_what_a_region_in_a_given_stream_computes_is_seen_after_it(one: OneThread) -> None:
    side = one.model.side_stream("side")
    outer = one.streams.enter("best_effort", side)
    entry = one.streams.enter("latency")
    assert one.current() != side
    tensor = one.model.allocate()
    one.streams.leave(entry)
    assert one.current() == side
    one.model.use(tensor)
    one.streams.leave(outer)
    assert one.model.wrong == []


def test_a_given_stream_is_used_and_left(one: OneThread) -> None:
    side = one.model.side_stream("side")
    entry = one.streams.enter("latency", side)
    assert one.current() == side
    tensor = one.model.allocate()
    one.streams.leave(entry)
    assert one.current() not in (side, "default")
    one.model.use(tensor)
    assert one.model.wrong == []


def test_the_default_stream_never_waits(one: OneThread) -> None:
    for client_class in CLASSES:
        entry = one.streams.enter(client_class)
        one.model.allocate()
        one.streams.leave(entry)
        one.model.make_current("default")  # by hand, as a library might
    assert one.model.clocks["default"] == {}


def test_work_of_threads_without_regions_comes_before_a_region(one: OneThread) -> None:
    turns = Turns(one.model, ["outsider"])
    one.streams.leave(one.streams.enter("latency"))
    theirs = turns.do("outsider", lambda: one.model.use())
    one.model.running = "main"
    for client_class in CLASSES:
        entry = one.streams.enter(client_class)
        assert one.model.use().after(theirs)
        one.streams.leave(entry)
    turns.stop()


def test_requests_of_one_thread_never_wait_for_the_training_of_another(one: OneThread) -> None:
    turns = Turns(one.model, ["serving", "training"])
    training, serving = [], []

    def train() -> None:
        entry = one.streams.enter("best_effort")
        training.append(one.model.use())
        one.streams.leave(entry)
        training.append(one.model.use())

    def serve() -> None:
        entry = one.streams.enter("latency")
        serving.append(one.model.use())
        one.streams.leave(entry)
        serving.append(one.model.use())

    for _ in range(5):
        turns.do("training", train)
        turns.do("serving", serve)
    turns.stop()
    assert not any(request.after(step) for request in serving for step in training)
    assert all(later.after(earlier) for earlier, later in itertools.pairwise(serving))


def test_a_server_reads_weights_while_they_are_trained(one: OneThread) -> None:
    """What is handed over is whole; the training goes on with its own, and no request waits for a later step."""
    turns = Turns(one.model, ["serving", "training"])
    parcels, steps, reads = [], [], []

    def train() -> None:
        entry = one.streams.enter("best_effort")
        weights = one.model.allocate()  # a copy, as the step left them
        steps.append(weights.uses[-1])
        parcels.append((hand_over(one.streams, 0, [weights]), weights))
        one.streams.leave(entry)

    def serve() -> None:
        entry = one.streams.enter("latency")
        parcel, weights = parcels[-1]
        parcel.take(one.streams)
        reads.append(one.model.use(weights))
        one.streams.leave(entry)

    turns.do("training", train)
    turns.do("training", train)
    turns.do("serving", serve)
    turns.do("training", train)
    turns.do("serving", serve)
    assert one.model.wrong == []
    assert reads[0].after(steps[1]) and not reads[0].after(steps[2]) and reads[1].after(steps[2])
    # The trainer drops them while a request may still read: their memory is not used again before that is over.
    turns.do("training", lambda: [one.model.release(weights) for _, weights in parcels])
    for _ in range(20):
        turns.do("training", train)
    assert one.model.wrong == []
    turns.stop()


def test_nothing_changes_during_a_capture(one: OneThread) -> None:
    one.streams.leave(one.streams.enter("latency"))
    home, clocks = one.current(), {name: dict(clock) for name, clock in one.model.clocks.items()}
    one.model.is_capturing = True
    begun: list[int] = []
    assert one.streams.enter("best_effort", begin=lambda: begun.append(1)) is None
    assert (one.current(), one.model.clocks, begun) == (home, clocks, [1])


def test_a_region_of_the_parent_changes_nothing_in_the_child_of_a_fork(one: OneThread) -> None:
    entry = one.streams.enter("best_effort")
    inside, clocks = one.current(), {name: dict(clock) for name, clock in one.model.clocks.items()}
    one.streams.forget()
    one.streams.leave(entry)
    assert (one.current(), one.model.clocks) == (inside, clocks)


def test_a_region_that_is_left_during_a_capture_is_come_back_from_at_the_next(one: OneThread) -> None:
    entry = one.streams.enter("best_effort")
    tensor = one.model.allocate()
    one.model.is_capturing = True
    one.streams.leave(entry)
    one.model.is_capturing = False
    entry = one.streams.enter("latency")
    one.model.use(tensor)
    one.streams.leave(entry)
    assert one.model.wrong == []


def test_what_waits_for_a_best_effort_region_is_best_effort_until_the_next_of_another_class(one: OneThread) -> None:
    def classes_outside(client_class: str) -> str | None:
        one.streams.leave(one.streams.enter(client_class))
        return one.model.bound.get(one.current())

    assert [classes_outside(name) for name in ("latency", "best_effort", "latency", "best_effort", "normal")] == [
        None,
        "best_effort",
        None,
        "best_effort",
        None,
    ]


def test_best_effort_regions_look_at_the_default_stream_before_the_engine_queues_their_calls(one: OneThread) -> None:
    said: list[str] = []
    record = one.model.record

    def recorded(event: Any, stream: Any) -> None:
        said.append(stream)
        record(event, stream)

    one.model.record = recorded  # type: ignore[method-assign]
    one.model.default_is_idle = lambda: False  # type: ignore[method-assign]
    one.streams.enter("best_effort", begin=lambda: said.append("begin"))
    assert said[:2] == ["default", "begin"] and "default" not in said[1:]
    said.clear()
    one.streams.enter("latency", begin=lambda: said.append("begin"))
    assert said[0] == "begin" and "default" in said


def test_an_idle_default_stream_is_not_waited_for_behind_a_best_effort_region(one: OneThread) -> None:
    said: list[str] = []

    def idle() -> bool:
        said.append("looked")
        return True

    one.model.default_is_idle = idle  # type: ignore[method-assign]
    recorded = one.model.record
    one.model.record = lambda event, stream: (said.append(stream), recorded(event, stream))[1]  # type: ignore[method-assign]
    one.streams.enter("best_effort", begin=lambda: said.append("begin"))
    assert said[:2] == ["looked", "begin"] and "default" not in said


def test_tensors_of_the_default_stream_are_kept_for_all_streams_of_the_thread(one: OneThread) -> None:
    tensor = one.model.allocate()
    one.streams.leave(one.streams.enter("latency"))
    one.streams.leave(one.streams.enter("best_effort"))
    side = one.model.side_stream("side")
    one.streams.leave(one.streams.enter("best_effort", side))
    assert {one.model.classes[stream] for stream in tensor.kept_for} == set(CLASSES)
    assert side in tensor.kept_for


def test_leaving_the_default_stream_before_any_region(one: OneThread) -> None:
    tensor = one.model.allocate()
    assert one.streams.leave_default()
    assert one.current() != "default" and not one.streams.leave_default()
    one.model.use(tensor)
    assert one.model.wrong == []
