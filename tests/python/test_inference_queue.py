"""The queue of a batcher and the times of batches, on a virtual clock: no thread, no time goes by."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import pytest
from cudasched.errors import ConfigError, Error
from cudasched.inference import DeadlineError, QueueFullError
from cudasched.inference._queue import NEVER_NS, Queue, Request
from cudasched.inference._times import Times
from hypothesis import given
from hypothesis import strategies as st

POLICIES = ("deadline", "eager", "delay", "aimd")


def known(bounds: dict[int, int]) -> Times:
    times = Times(sorted(bounds))
    for size, bound_ns in bounds.items():
        for _ in range(4):  # of fewer it would not be believed that it takes longer than several smaller ones
            times.record(size, bound_ns)
    return times


def test_a_bound_is_a_time_that_nine_of_ten_recent_batches_do_not_exceed() -> None:
    times = Times((1,))
    for duration_ns in [5_000] * 64 + list(range(101, 165)) * 2:
        times.record(1, duration_ns)
    assert abs(times.bound_ns(1) - 159) <= 1
    fresh = known({1: 7})
    assert fresh.bound_ns(1) == 7


def test_one_slow_run_of_a_size_that_runs_seldom_is_no_bound() -> None:
    for seldom, often, expected in ((4, 1, [10, 20, 40]), (1, 4, [40, 40, 40])):
        times = Times((1, 2, 4))
        for _ in range(9):
            times.record(often, 10 * often)
        times.record(seldom, 9_000)
        for _ in range(64):  # that the others are longer than they typically are is forgotten with the slow run
            times.record(often, 10 * often)
        assert list(times.bounds_ns) == expected


def test_rare_slow_batches_make_their_own_requests_late_and_shut_out_no_others() -> None:
    """At half load; one batch in 200 takes 10 ms longer."""
    random = Random(3)
    took_ns = known({size: 1_000 * (550 + 50 * size) for size in (1, 2, 4, 8, 16)})
    queue = Queue("deadline", known(dict(zip(took_ns.sizes, took_ns.bounds_ns, strict=True))), max_queue=4096)
    now_ns, offered, in_time = 0, 0, 0
    batch: list[Request] = []
    ends_ns = look_ns = NEVER_NS
    began_ns = arrival_ns = 0
    while offered < 20_000 or batch or len(queue):
        now_ns = max(now_ns, min(arrival_ns if offered < 20_000 else NEVER_NS, ends_ns if batch else look_ns))
        if batch and ends_ns <= now_ns:
            in_time += sum(request.deadline_ns >= ends_ns for request in batch)
            queue.end(len(batch), ends_ns - began_ns, in_time=all(request.deadline_ns >= ends_ns for request in batch))
            batch = []
        while offered < 20_000 and arrival_ns <= now_ns:
            with contextlib.suppress(DeadlineError):
                queue.add(Request(0, arrival_ns, arrival_ns + 4_050_000), now_ns)
            offered += 1
            arrival_ns += round(random.expovariate(0.5 * 16 / 1_350_000))
        if not batch:
            batch, _, next_ns = queue.take(now_ns)
            look_ns = NEVER_NS if next_ns is None else max(next_ns, now_ns + 1)
            began_ns = now_ns
            slow_ns = 10_000_000 if random.random() < 0.005 else 0
            ends_ns = now_ns + took_ns.bound_ns(len(batch)) + slow_ns if batch else NEVER_NS
    assert in_time / offered > 0.9


def test_a_size_is_as_far_above_its_typical_time_as_others() -> None:
    times = Times((1, 4))
    for _ in range(4):
        times.record(4, 100)
    for _ in range(64):
        for duration_ns in (10, 10, 10, 15):
            times.record(1, duration_ns)
    assert list(times.bounds_ns) == [15, 150]


def test_a_batch_takes_as_long_as_the_smallest_size_that_holds_it() -> None:
    times = known({1: 10, 4: 25, 8: 40})
    assert [times.bound_ns(count) for count in range(1, 9)] == [10, 25, 25, 25, 40, 40, 40, 40]


@pytest.mark.parametrize(
    ("ran", "expected"),
    [
        ({}, [0, 0, 0, 0]),
        ({1: 10}, [10, 20, 40, 80]),
        ({8: 80}, [80, 80, 80, 80]),
        ({1: 10, 8: 24}, [10, 12, 16, 24]),
        ({2: 20, 4: 10}, [20, 20, 20, 40]),
    ],
)
def test_sizes_that_have_not_run_have_times_by_those_that_have(ran: dict[int, int], expected: list[int]) -> None:
    times = Times((1, 2, 4, 8))
    for size, duration_ns in ran.items():
        times.record(size, duration_ns)
    assert list(times.bounds_ns) == expected


def test_a_prediction_counts_until_the_size_has_run() -> None:
    times = Times((1, 2), lambda size: size * 1e-3)
    assert list(times.bounds_ns) == [1_000, 2_000]
    times.record(2, 1_500)
    assert list(times.bounds_ns) == [1_000, 1_500]
    times.forget()
    assert list(times.bounds_ns) == [0, 0]


@pytest.mark.parametrize("predicted", [0, -1, float("nan"), float("inf"), None, "1", 1e9])
def test_a_prediction_is_a_time(predicted: object) -> None:
    with pytest.raises(ConfigError, match=r"predict\(1\)"):
        Times((1,), lambda size: predicted)  # type: ignore[arg-type, return-value]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10**9)), max_size=30))
def test_bounds_ascend(runs: list[tuple[int, int]]) -> None:
    times = Times((1, 3, 8, 40))
    for count, duration_ns in runs:
        times.record(count, duration_ns)
    assert list(times.bounds_ns) == sorted(times.bounds_ns)
    assert bool(runs) == bool(times.bounds_ns[0])


def test_what_is_served_first() -> None:
    queue = Queue("eager", known({4: 1}), max_queue=4)
    for level, deadline_ns in [(0, 50), (1, 90), (0, 40), (0, NEVER_NS)]:
        queue.add(Request("", 0, deadline_ns, level), 0)
    batch, refused, _ = queue.take(0)
    assert [(request.level, request.deadline_ns) for request in batch] == [(1, 90), (0, 40), (0, 50), (0, NEVER_NS)]
    assert not refused


def test_a_request_that_cannot_be_in_time_is_refused_with_its_predicted_time() -> None:
    queue = Queue("eager", known({1: 4_000_000}))
    queue.add(Request("", 0, 5_000_000), 0)
    with pytest.raises(DeadlineError, match="8 ms after it was submitted, and its deadline is 7 ms") as told:
        queue.add(Request("", 0, 7_000_000), 0)
    assert (told.value.predicted_ms, told.value.deadline_ms) == (8, 7)
    with pytest.raises(DeadlineError, match="another one late"):
        queue.add(Request("", 0, 4_500_000), 0)
    queue.add(Request("", 0, 8_000_000), 0)
    queue.add(Request("", 0, 4_000_000, level=1), 0)  # those of lower levels are not protected
    queue.take(0)
    with pytest.raises(DeadlineError, match="it would end 8 ms"):  # the one that runs comes first
        queue.add(Request("", 0, 7_900_000, level=2), 0)


def test_a_time_that_refuses_every_request_is_measured_anew() -> None:
    second = 1_000_000_000
    queue = Queue("deadline", known({1: 90}))
    refused = []
    for now in (1, second, 2 * second, 2 * second + 1, 2 * second + 5, 3 * second):
        try:
            queue.add(Request("", now, now + 50), now)
        except DeadlineError:
            refused.append(now)
        if batch := queue.take(now)[0]:
            queue.end(len(batch), 90, in_time=False)
    assert refused == [1, second, 2 * second + 1, 2 * second + 5]
    with pytest.raises(DeadlineError):
        queue.add(Request("", 9 * second, 9 * second - 1), 9 * second)  # no time is short enough


def test_a_margin_is_left() -> None:
    queue = Queue("deadline", known({1: 4}), margin_ns=3)
    with pytest.raises(DeadlineError):
        queue.add(Request("", 0, 6), 0)
    queue.add(Request("", 0, 7), 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_waited_too_long_is_rejected(policy: str) -> None:
    queue = Queue(policy, known({1: 4}), timeout_ns=50)
    queue.add(request := Request("", 0), 0)
    queue.add(late := Request("", 0, 40), 0)
    assert queue.expiry_ns() == 37
    assert queue.expire(36) == []
    assert [one for one, _ in queue.expire(37)] == [late]
    assert [one for one, _ in queue.take(50)[1]] == [request]
    assert len(queue) == 0 and queue.expiry_ns() == NEVER_NS


def test_a_request_that_waited_too_long_is_delayed() -> None:
    queue = Queue("eager", known({1: 4}), timeout_ns=50, on_timeout="delay")
    queue.add(first := Request("first", 0), 0)
    assert queue.expire(50) == []
    queue.add(second := Request("second", 50), 50)
    queue.add(lower := Request("lower", 50, level=-1), 50)
    assert first.delayed and queue.expiry_ns() == 100
    assert [queue.take(60)[0] for _ in range(3)] == [[second], [first], [lower]]


def test_no_request_waits_for_others_until_it_times_out() -> None:
    queue = Queue("delay", known({2: 4}), timeout_ns=50, delay_ns=90, margin_ns=5)
    queue.add(request := Request("", 0), 0)
    assert queue.take(0) == ([], [], 44)
    assert queue.take(44)[0] == [request]


def test_a_larger_batch_is_waited_for_as_long_as_requests_come() -> None:
    queue = Queue("deadline", known({1: 60, 2: 61}))
    queue.add(Request("", 1, 1_001), 1)
    assert len(queue.take(1)[0]) == 1  # nothing is known of arrivals
    queue.add(Request("", 101, 1_101), 101)
    assert queue.take(101) == ([], [], 501)  # none has come for four times as long as between those before
    queue.add(Request("", 201, 1_201), 201)
    assert len(queue.take(201)[0]) == 2


def test_a_batch_grows_no_further_than_the_slack_of_other_programs() -> None:
    queue = Queue("deadline", known({1: 10, 4: 11}))
    for _ in range(4):
        queue.add(Request("", 0), 0)
    assert [len(queue.take(0, slack_ns=slack_ns)[0]) for slack_ns in (10, 11)] == [1, 3]


def test_a_full_queue_rejects_or_delays() -> None:
    full = Queue("eager", known({1: 1}), max_queue=1)
    full.add(Request("", 0), 0)
    with pytest.raises(QueueFullError, match=r"1 requests wait; no more may \(max_queue\)"):
        full.add(Request("", 0), 0)
    queue = Queue("eager", known({1: 10}), max_queue=1, on_full="delay")
    requests = [Request("", 0, deadline_ns) for deadline_ns in (99, 60, 15, NEVER_NS)]
    for request in requests:
        queue.add(request, 0)
    assert len(queue) == 4
    assert queue.take(0)[0] == requests[:1]
    assert queue.take(10)[0] == requests[1:2]  # in the order in which they came
    batch, refused, _ = queue.take(20)
    assert batch == requests[3:] and [one for one, _ in refused] == requests[2:3]


def test_those_outside_come_in_where_those_inside_have_left() -> None:
    queue = Queue("eager", known({1: 10}), max_queue=1, on_full="delay")
    inside, outside, last = (Request("", 0) for _ in range(3))
    for request in (inside, outside, last):
        queue.add(request, 0)
    assert queue.remove(inside) and queue.remove(last) and not queue.remove(last)
    assert queue.take(0)[0] == [outside]
    assert queue.take(0) == ([], [], None)


@pytest.mark.parametrize("on_timeout", ["reject", "delay"])
def test_a_request_that_waited_too_long_outside_is_one_that_waited_too_long(
    on_timeout: Literal["reject", "delay"],
) -> None:
    queue = Queue("eager", known({1: 1}), timeout_ns=10, on_timeout=on_timeout, max_queue=2, on_full="delay")
    requests = [Request("", 0) for _ in range(5)]
    for request in requests:
        queue.add(request, 0)
    late = Request("", 15)
    queue.add(late, 15)
    batch, refused, _ = queue.take(20)
    if on_timeout == "reject":
        assert batch == [late] and [one for one, _ in refused] == requests
    else:
        assert batch == requests[:1] and not refused
        assert queue.take(21)[0] == requests[1:2] and requests[2].delayed


def test_the_limit_of_aimd() -> None:
    queue = Queue("aimd", known({8: 10}))
    taken = []
    for in_time in (True, True, False, True):
        for _ in range(8):
            queue.add(Request("", 0), 0)
        batch, _, _ = queue.take(0)
        taken.append(len(batch))
        queue.end(len(batch), 10, in_time)
        queue.clear()
    assert taken == [1, 2, 3, 2]  # 3 less a tenth is 2.7


def test_a_closing_queue_waits_for_nobody() -> None:
    queue = Queue("delay", known({8: 10}), delay_ns=1_000)
    queue.add(request := Request("", 0), 0)
    assert queue.take(0)[0] == []
    assert queue.take(0, at_once=True)[0] == [request]


@given(
    policy=st.sampled_from(POLICIES),
    arrivals=st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 60))), min_size=1, max_size=20),
    slack=st.integers(0, 30),
    delay=st.integers(0, 2),
)
def test_a_request_that_need_not_wait_is_the_batch_that_would_be_taken(
    policy: str, arrivals: list[tuple[int, int | None]], slack: int, delay: int
) -> None:
    sooner, queue = (
        Queue(policy, known({1: 10, 3: 20}), margin_ns=2, delay_ns=delay, timeout_ns=90, max_queue=2) for _ in range(2)
    )
    now = 0
    for gap, deadline in arrivals:
        now += gap
        one, other = (Request("", now, NEVER_NS if deadline is None else now + deadline) for _ in range(2))
        told: list[str | bool] = []
        try:
            told.append(sooner.add(one, now, slack))
        except Error as error:
            told.append(str(error))
        waited = len(queue)
        try:
            queue.add(other, now)
            starts = waited == 0 and queue.take(now, slack_ns=slack)[0] == [other]
            told.append(starts)
        except Error as error:
            told.append(str(error))
        assert told[0] == told[1]
        if told[0] is True:
            for each in (sooner, queue):
                each.end(1, None, in_time=True)


@dataclass
class World:
    """A GPU and its queue on a virtual clock.

    Attributes:
        queue: The queue.
        bounds: Of batches, by size; they take at most so long.
        slow: How much of its bound each takes, in turn.
        now: The time.
        free: From when on the GPU is.
        served: In their order.
        refused: After they had been accepted.
        batches: How many there were.
        running: How many requests are in the one that runs.
        margin: The queue's.
        timeout: The queue's.
        outside: Requests wait outside of it, too.
        gives_up: Requests make way for others that can be in time in a larger batch.
    """

    queue: Queue
    bounds: dict[int, int]
    slow: list[float]
    now: int = 0
    free: int = 0
    served: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)
    batches: int = 0
    running: int = 0
    margin: int = 0
    timeout: int = NEVER_NS
    outside: bool = False
    gives_up: bool = False

    def bound(self, count: int) -> int:
        return self.bounds[min(size for size in self.bounds if size >= count)]

    def serve(self, until: int, last_arrival: int) -> None:
        """The GPU takes batches until then."""
        while self.free <= until:
            self.now = max(self.now, self.free)
            if self.running:
                self.queue.end(self.running, None, in_time=True)  # times stay what they are
                self.running = 0
            batch, refused, look = self.queue.take(self.now)
            for request, _ in refused:
                self.refused.append(request)
                if self.now < request.arrival_ns + self.timeout and not self.outside:
                    latest = request.deadline_ns - self.bound(1)
                    replaced = batch and self.gives_up and request.deadline_ns < self.now + max(self.bounds.values())
                    assert latest < max(self.free, request.arrival_ns) or replaced, "rejected, and the GPU was free"
            if batch:
                self.check(batch, last_arrival)
                took = max(round(self.bound(len(batch)) * self.slow[self.batches % len(self.slow)]), 1)
                self.batches += 1
                self.free = self.now + took
                self.running = len(batch)
                self.served += batch
            elif look is None or look > until:
                assert look is not None or not len(self.queue)
                return
            else:
                assert look > self.now or refused
                self.now = max(look, self.now)

    def check(self, batch: list[Request], last_arrival: int) -> None:
        assert 1 <= len(batch) <= max(self.bounds)
        order = [(-one.level, one.delayed, one.deadline_ns) for one in (*batch, *self.queue._requests)]
        assert order == sorted(order)
        due = min((request.deadline_ns for request in batch if not request.delayed), default=NEVER_NS)
        latest = due - self.bound(len(batch)) - self.margin
        assert self.now <= max(latest, self.free, last_arrival), "a batch is late, and the GPU was free"


@given(
    policy=st.sampled_from(POLICIES),
    bounds=st.dictionaries(st.integers(1, 12), st.integers(1, 60), min_size=1, max_size=4),
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(1, 200)), st.integers(0, 2)), max_size=60
    ),
    slow=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    margin=st.integers(0, 10),
    delay=st.integers(0, 50),
    timeout=st.one_of(st.just(NEVER_NS), st.integers(1, 150)),
    on_timeout=st.sampled_from(["reject", "delay"]),
    max_queue=st.integers(1, 20),
    on_full=st.sampled_from(["reject", "delay"]),
    cancelled=st.sets(st.integers(0, 59)),
)
def test_no_request_is_lost_or_served_twice_and_no_batch_is_later_than_it_has_to_be(
    policy: str,
    bounds: dict[int, int],
    arrivals: list[tuple[int, int | None, int]],
    slow: list[float],
    margin: int,
    delay: int,
    timeout: int,
    on_timeout: Literal["reject", "delay"],
    max_queue: int,
    on_full: Literal["reject", "delay"],
    cancelled: set[int],
) -> None:
    ascending = dict(zip(sorted(bounds), sorted(bounds.values()), strict=True))
    queue = Queue(
        policy,
        known(ascending),
        margin_ns=margin,
        delay_ns=delay,
        timeout_ns=timeout,
        on_timeout=on_timeout,
        max_queue=max_queue,
        on_full=on_full,
    )
    world = World(queue, ascending, slow, margin=margin, timeout=timeout, outside=on_full == "delay")
    world.gives_up = policy == "deadline"
    refused: list[Request] = []
    removed: list[Request] = []
    everyone: list[Request] = []
    at = 1
    for number, (gap, deadline, level) in enumerate(arrivals):
        world.serve(at + gap - 1, at)
        at += gap
        world.now = max(world.now, at)
        request = Request(number, at, NEVER_NS if deadline is None else at + deadline, level)
        everyone.append(request)
        try:
            queue.add(request, at)
        except Error:
            refused.append(request)
        world.serve(at, at)
        if number in cancelled and queue.remove(everyone[number // 2]):
            removed.append(everyone[number // 2])
    world.serve(NEVER_NS - 1, at)
    assert len(queue) == 0
    ends = [*world.served, *world.refused, *refused, *removed]
    assert sorted(request.key[-1] for request in ends) == [request.key[-1] for request in everyone]
    if on_timeout == "delay" and on_full == "reject":
        assert not world.refused


@given(
    alone=st.integers(5, 20),
    eight=st.integers(20, 40),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(20, 90), st.integers(0, 1)), min_size=20, max_size=60),
    slow=st.lists(st.floats(0.5, 2), min_size=1, max_size=5),
)
def test_where_requests_come_too_fast_those_that_are_given_up_are_late_and_of_the_lowest_level(
    alone: int, eight: int, arrivals: list[tuple[int, int, int]], slow: list[float]
) -> None:
    bounds = {1: alone, 8: eight}
    queue = Queue("deadline", known(bounds))
    world = World(queue, bounds, slow, gives_up=True)
    take = queue.take

    def looked_at(now_ns: int) -> tuple[list[Request], list[tuple[Request, Error]], int | None]:
        batch, refused, look = take(now_ns)
        lowest = min((request.level for request in batch), default=0)
        for request, _ in refused:
            in_vain = request.deadline_ns < now_ns + alone
            assert in_vain or (request.deadline_ns < now_ns + eight and request.level <= lowest)
        return batch, refused, look

    queue.take = looked_at  # type: ignore[method-assign,assignment]
    at = accepted = 0
    for gap, deadline, level in arrivals:
        at += gap
        world.now = max(world.now, at)
        with contextlib.suppress(Error):
            queue.add(Request("", at, at + deadline, level), at)
            accepted += 1
        world.serve(at, at)
    world.serve(NEVER_NS - 1, at)
    assert len(world.served) + len(world.refused) == accepted


@pytest.mark.parametrize(
    ("waiting", "served", "refused"),
    [
        ([(27, 0), (37, 0), (37, 0), (37, 0), (37, 0)], [1, 2, 3, 4], [0]),
        ([(27, 0), (60, 0), (60, 0), (60, 0), (60, 0)], [0], []),  # there is time for both
        ([(27, 1), (60, 0), (60, 0), (60, 0)], [0], []),
        ([(27, 0), (37, 0), (37, 0), (37, 0)], [0, 1, 2, 3], []),  # nobody takes the place
        ([(27, 0), (27, 0), (27, 0), (27, 0)], [0], []),  # a smaller batch is in time
        ([(27, 1), (37, 0), (37, 0), (37, 0), (37, 0)], [0, 1, 2, 3], []),  # not for a lower level
        ([(60, 1), (27, 0), (60, 0), (60, 0), (60, 0)], [0, 2, 3, 4], [1]),
    ],
)
def test_requests_that_would_be_late_make_way_for_others(
    waiting: list[tuple[int, int]], served: list[int], refused: list[int]
) -> None:
    """The first batch takes longer than its bound, so that a batch of four is late for some that wait."""
    queue = Queue("deadline", known({1: 10, 4: 16}))
    queue.add(Request("", 0), 0)
    assert len(queue.take(0)[0]) == 1
    requests = [Request("", 1, deadline, level) for deadline, level in waiting]
    for request in requests:
        queue.add(request, 1)
    queue.end(1, None, in_time=True)
    batch, given_up, _ = queue.take(12)
    assert [requests.index(request) for request in batch] == served
    assert [requests.index(request) for request, _ in given_up] == refused


def test_with_too_many_requests_hardly_one_runs_late() -> None:
    """Half as many again as can be served; a batch takes up to 5% longer than its time, one in ten up to 30%."""
    random = Random(3)
    took_ns = known({size: 1_000 * (600 + 90 * size) for size in (1, 2, 4, 8, 16)})
    queue = Queue("deadline", known(dict(zip(took_ns.sizes, took_ns.bounds_ns, strict=True))), margin_ns=500_000)
    now_ns, late, in_time = 0, 0, 0
    arrival_ns = look_ns = 0
    while now_ns < 5_000_000_000:
        now_ns = max(now_ns, min(arrival_ns, look_ns))
        while arrival_ns <= now_ns:
            with contextlib.suppress(Error):
                queue.add(Request(0, arrival_ns, arrival_ns + 5_000_000), arrival_ns)
            arrival_ns += round(random.expovariate(1.5 * 16 / 2_040_000))
        batch, _, next_ns = queue.take(now_ns)
        look_ns = NEVER_NS if next_ns is None else next_ns
        if batch:
            longer = random.uniform(0, 0.3 if random.random() < 0.1 else 0.05)
            duration_ns = round(took_ns.bound_ns(len(batch)) * (1 + longer))
            ends_ns = now_ns + duration_ns
            while arrival_ns <= ends_ns:
                with contextlib.suppress(Error):
                    queue.add(Request(0, arrival_ns, arrival_ns + 5_000_000), arrival_ns)
                arrival_ns += round(random.expovariate(1.5 * 16 / 2_040_000))
            late += sum(request.deadline_ns < ends_ns for request in batch)
            in_time += sum(request.deadline_ns >= ends_ns for request in batch)
            queue.end(len(batch), duration_ns, in_time=True)
            now_ns = look_ns = ends_ns
    assert late < 0.02 * in_time and in_time > 0.9 * 5 * 7_843
