"""The batcher: tasks, threads, models that fail, and misuse. No GPU; time-outs only stop a hang."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cudasched
import numpy as np
import pytest
from cudasched import _region
from cudasched.errors import ConfigError
from cudasched.inference import (
    Batcher,
    DeadlineError,
    InputError,
    QueueFullError,
    RunError,
    Statistics,
    UseError,
    _batcher,
)
from support import PATIENCE_S, Run


def doubled(inputs: list[Any]) -> list[Any]:
    return [2 * x for x in inputs]


class Held:
    """A model that runs one batch for each `release`, and says when it runs."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Semaphore(0), threading.Semaphore(0)
        self.batches: list[list[Any]] = []

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.batches.append(inputs)
        self.begun.release()
        assert self.released.acquire(timeout=PATIENCE_S)
        return doubled(inputs)

    def runs(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)

    def release(self, batches: int = 1) -> None:
        self.released.release(batches)


@pytest.fixture
def held() -> Iterator[Held]:
    model = Held()
    yield model
    model.release(1_000)


def total(counts: Statistics) -> int:
    ended = counts.completed + counts.failed + counts.cancelled + counts.refused + counts.full + counts.timed_out
    return ended + counts.waiting + counts.running


def answer(future: Future[Any]) -> Any:
    return future.result(PATIENCE_S)


@pytest.mark.parametrize("policy", ["deadline", "eager", "delay", "aimd"])
def test_ten_thousand_requests_at_once(policy: Any) -> None:
    sizes: list[int] = []

    def run(inputs: list[int]) -> list[int]:
        sizes.append(len(inputs))
        return doubled(inputs)

    async def ask(batcher: Batcher) -> list[Any]:
        async with batcher:
            return await asyncio.gather(*(batcher.submit(x, priority=x % 3) for x in range(10_000)))

    batcher = Batcher(run, slo_ms=None, policy=policy, max_queue=100, on_full="delay", delay_ms=1)
    assert asyncio.run(ask(batcher)) == [2 * x for x in range(10_000)]
    counts = batcher.statistics()
    assert counts.completed == counts.submitted == total(counts) == 10_000
    assert sum(size * number for size, number in counts.batches.items()) == 10_000
    assert len(sizes) == sum(counts.batches.values()) and max(sizes) <= 16
    assert max(sizes) > 1


def test_threads_and_tasks_share_a_batcher() -> None:
    async def ask(batcher: Batcher, pool: ThreadPoolExecutor) -> list[Any]:
        futures = [pool.submit(lambda x: answer(batcher.submit_future(x)), x) for x in range(200)]
        tasks = await asyncio.gather(*(batcher.submit(x) for x in range(200)))
        return tasks + [answer(future) for future in futures]

    with Batcher(doubled, slo_ms=None, max_queue=400) as batcher, ThreadPoolExecutor(8) as pool:
        assert asyncio.run(ask(batcher, pool)) == 2 * [2 * x for x in range(200)]
        assert total(batcher.statistics()) == batcher.statistics().completed == 400


class Where:
    """A model that says on which thread each batch ran, and that two never run at once."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.batches: list[list[Any]] = []
        self._alone = threading.Lock()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        assert self._alone.acquire(blocking=False)
        self.threads.append(threading.get_ident())
        self.batches.append(inputs)
        self._alone.release()
        return doubled(inputs)


def runner_waits(batcher: Batcher) -> None:
    """For a larger batch: it has seen what has come so far."""
    until = time.monotonic() + PATIENCE_S
    while not batcher._arrived._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < until
        time.sleep(0.001)


def test_inline_a_batch_runs_where_it_is_submitted() -> None:
    model, me = Where(), threading.get_ident()
    with Batcher(model, slo_ms=None, inline=True) as batcher:
        future = batcher.submit_future(1)
        assert future.done() and answer(future) == 2
        assert asyncio.run(batcher.submit(2)) == 4
        assert [answer(each) for each in batcher._submit([3, 4])] == [6, 8]
        assert total(batcher.statistics()) == batcher.statistics().completed == 4
    assert model.threads == [me] * 3 and model.batches == [[1], [2], [3, 4]]


def test_inline_a_batch_that_cannot_start_at_once_is_the_batchers() -> None:
    model, me = Where(), threading.get_ident()
    with Batcher(model, (2,), None, "delay", delay_ms=90_000, inline=True) as batcher:
        first = batcher.submit_future(1)  # waits for another one
        runner_waits(batcher)
        assert not first.done()
        assert batcher.submit_future(2).done() and answer(first) == 2
        last = batcher.submit_future(3)
    assert answer(last) == 6 and model.batches == [[1, 2], [3]]
    assert model.threads[0] == me and model.threads[1] != me


def test_inline_requests_behind_a_batch_are_the_batchers(held: Held) -> None:
    with Batcher(held, slo_ms=None, inline=True) as batcher, ThreadPoolExecutor(1) as pool:
        first = pool.submit(batcher.submit_future, 1)
        held.runs()
        behind = [batcher.submit_future(x) for x in (2, 3)]
        assert not any(future.done() for future in behind)
        held.release(2)
        assert [answer(future) for future in behind] == [4, 6] and answer(answer(first)) == 2
    assert held.batches == [[1], [2, 3]]


def test_inline_no_batch_runs_beside_another() -> None:
    model = Where()
    with Batcher(model, slo_ms=None, max_queue=10_000, inline=True) as batcher, ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda x: answer(batcher.submit_future(x)), range(3_000)))
        assert done == [2 * x for x in range(3_000)]
        assert total(batcher.statistics()) == batcher.statistics().completed == 3_000


@pytest.mark.parametrize("place", ["run", "_count", "_serve_batch"])
def test_inline_an_interrupt_ends_the_batch_and_reaches_the_program(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: list[Any]) -> list[Any]:
        if place == "run" and 2 in inputs:
            raise KeyboardInterrupt
        return doubled(inputs)

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Batcher(run, (2,), None, "delay", delay_ms=90_000, inline=True) as batcher:
        first = batcher.submit_future(1)
        runner_waits(batcher)
        if place != "run":
            monkeypatch.setattr(batcher, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            batcher.submit_future(2)
        assert isinstance(first.exception(PATIENCE_S), RunError)
        assert [answer(each) for each in batcher._submit([3, 4])] == [6, 8]
    with Batcher(doubled, slo_ms=None, inline=True) as batcher:
        monkeypatch.setattr(batcher, "_serve_here", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batcher.submit_future(1)
        assert answer(batcher.submit_future(2)) == 4
        assert total(batcher.statistics()) == batcher.statistics().submitted == 2


def test_requests_are_served_by_priority_and_then_by_deadline(held: Held) -> None:
    with Batcher(held, sizes=(1, 2), slo_ms=None, policy="eager") as batcher:
        batcher.submit_future(0)
        held.runs()
        for x, deadline_ms, priority in [(1, 80_000, 0), (2, 70_000, 0), (3, None, 1), (4, 90_000, 1), (5, None, -0.5)]:
            batcher.submit_future(x, deadline_ms=deadline_ms, priority=priority)
        held.release(4)
    assert held.batches == [[0], [4, 3], [2, 1], [5]]


def test_a_model_that_raises_fails_its_batch_alone(held: Held) -> None:
    def run(inputs: list[Any]) -> list[Any]:
        held(inputs)
        if 1 in inputs:
            raise ZeroDivisionError("one")
        return inputs

    with Batcher(run, slo_ms=None, policy="eager") as batcher:
        first = batcher.submit_future(0)
        held.runs()
        failing = [batcher.submit_future(1), batcher.submit_future(2)]
        held.release(2)
        errors = [future.exception(PATIENCE_S) for future in failing]
        assert answer(first) == 0
        for error in errors:
            assert isinstance(error, RunError) and isinstance(error.__cause__, ZeroDivisionError)
            assert str(error) == "run raised ZeroDivisionError: one"
        assert errors[0] is not errors[1]
        held.release()
        assert answer(batcher.submit_future(3)) == 3
        counts = batcher.statistics()
    assert (counts.failed, counts.completed, total(counts)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([], "run returned 0 outputs for 1 inputs"),
        ([1, 2], "run returned 2 outputs for 1 inputs"),
        (None, "run returned None"),
        ({0: 1}, "run returned a table"),
        ("y", "run returned 'y'"),
        (iter([1]), "run returned <list_iterator"),
        (np.zeros((3, 2)), "run returned 3 outputs"),
        (np.zeros(()), r"run returned array\(0.\): a sequence"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_returns_an_output_for_each_input(outputs: Any, said: str) -> None:
    with Batcher(lambda inputs: outputs, slo_ms=None) as batcher, pytest.raises(RunError, match=said):
        answer(batcher.submit_future(1))


def test_a_batch_that_cannot_be_counted_fails_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        monkeypatch.undo()
        raise IndexError

    with Batcher(doubled, slo_ms=None) as batcher:
        monkeypatch.setattr(batcher, "_count", fails)
        with pytest.raises(RunError, match="interrupted by IndexError"):
            answer(batcher.submit_future(1))
        assert answer(batcher.submit_future(2)) == 4


def test_requests_that_no_batch_can_be_chosen_of_fail_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        monkeypatch.undo()
        raise IndexError("out of range")

    with Batcher(doubled, slo_ms=None) as batcher:
        runner_waits(batcher)
        monkeypatch.setattr(batcher._queue, "take", fails)
        with pytest.raises(RunError, match="no batch can be chosen: IndexError: out of range"):
            answer(batcher.submit_future(1))
        assert answer(batcher.submit_future(2)) == 4
        monkeypatch.setattr(batcher, "_set_alarm", fails)
        with pytest.raises(RunError, match="interrupted by IndexError"):
            answer(batcher.submit_future(3))
        assert answer(batcher.submit_future(4)) == 8
        assert batcher.statistics().failed == 2 and total(batcher.statistics()) == 4


def test_inline_a_model_cannot_close_its_batcher() -> None:
    def run(inputs: list[Any]) -> list[Any]:
        batcher.close()
        return inputs

    with Batcher(run, slo_ms=None, inline=True) as batcher:
        with pytest.raises(RunError, match="call it on another thread") as error:
            answer(batcher.submit_future(1))
        assert isinstance(error.value.__cause__, UseError)


def test_callbacks_that_exit_or_close_do_not_end_the_batcher(held: Held) -> None:
    raised: list[BaseException] = []

    def close(_: object) -> None:
        try:
            batcher.close()
        except UseError as error:
            raised.append(error)
        raise SystemExit

    with Batcher(held, slo_ms=None, policy="eager") as batcher:
        futures = [batcher.submit_future(0)]
        held.runs()
        futures += [batcher.submit_future(x) for x in range(1, 4)]
        for future in futures:
            future.add_done_callback(close)
        held.release(3)
        assert [answer(future) for future in (*futures, batcher.submit_future(4))] == [0, 2, 4, 6, 8]
    assert len(raised) == 4 and "call it on another thread" in str(raised[0])


def test_a_future_does_not_keep_its_input() -> None:
    class Input:
        pass

    with Batcher(lambda inputs: [1 for _ in inputs], slo_ms=None) as batcher:
        x = Input()
        gone = weakref.ref(x)
        future = batcher.submit_future(x)
        del x
        assert answer(future) == 1
    assert gone() is None


def test_an_array_of_outputs_is_taken_apart() -> None:
    with Batcher(lambda inputs: np.stack(inputs) * 2, slo_ms=None) as batcher:
        assert answer(batcher.submit_future(np.ones(3))).tolist() == [2, 2, 2]


def test_behind_a_model_that_hangs_every_request_fails_until_it_returns(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_ns = [0]
    clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead_ns[0], time=time.time)
    monkeypatch.setattr(_batcher, "time", clock)
    batcher = Batcher(held, sizes=(1,), slo_ms=None, hang_ms=90_000, max_queue=1, on_full="delay")
    futures = [batcher.submit_future(x) for x in range(3)]
    held.runs()
    ahead_ns[0] = 100_000_000_000
    with batcher._lock:
        batcher._changed.notify_all()  # it sleeps by the real clock
    for future in futures:
        with pytest.raises(RunError, match=r"has not returned for over 90000 ms \(hang_ms\)"):
            answer(future)
    with pytest.raises(RunError, match="hang_ms"):
        batcher.submit_future(3)
    counts = batcher.statistics()
    assert counts.failed == counts.submitted == total(counts) == 4
    held.release(2)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            assert answer(batcher.submit_future(4)) == 8
            break
        except RunError:  # the batch that hung has not returned yet
            held.release()
    assert held.batches[0] == [0] and held.batches[-1] == [4]
    batcher.close()


def test_closing_behind_a_model_that_hangs_ends(held: Held) -> None:
    batcher = Batcher(held, slo_ms=None, hang_ms=20)
    future = batcher.submit_future(0)
    held.runs()
    batcher.close()
    assert isinstance(future.exception(PATIENCE_S), RunError)


def test_a_request_times_out_while_another_batch_runs(held: Held) -> None:
    with Batcher(held, slo_ms=None) as batcher:
        running = batcher.submit_future(0)
        held.runs()
        with pytest.raises(DeadlineError, match="waited for too long") as told:
            answer(batcher.submit_future(1, deadline_ms=5))
        assert told.value.deadline_ms == 5 and told.value.predicted_ms >= 5
        assert not running.done()
        held.release()
        assert answer(running) == 0
        counts = batcher.statistics()
    assert (counts.timed_out, counts.completed, held.batches) == (1, 1, [[0]])


def test_a_request_that_cannot_meet_its_deadline_is_refused() -> None:
    with Batcher(doubled, predict=lambda size: 50.0 + size) as batcher:
        with pytest.raises(DeadlineError, match="it would end 51 ms") as told:
            batcher.submit_future(1)
        copy = pickle.loads(pickle.dumps(told.value))  # of a worker of another process
        for error in (told.value, copy):
            assert (error.predicted_ms, error.deadline_ms) == (51, 10) and "51 ms" in str(error)
        assert answer(batcher.submit_future(1, deadline_ms=90_000)) == 2
        counts = batcher.statistics()
    assert (counts.refused, counts.completed, total(counts)) == (1, 1, 2)


def test_an_answer_after_its_deadline_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ns = [0]
    clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead_ns[0], time=time.time)
    monkeypatch.setattr(_batcher, "time", clock)

    def run(inputs: list[int]) -> list[int]:
        ahead_ns[0] += 100_000_000_000
        return inputs

    with Batcher(run, slo_ms=90_000, hang_ms=3_600_000) as batcher:
        answer(batcher.submit_future(1))
        assert batcher.statistics().missed == batcher.statistics().completed == 1


def test_a_full_queue_is_told(held: Held) -> None:
    with Batcher(held, slo_ms=None, max_queue=1) as batcher:
        batcher.submit_future(0)
        held.runs()
        batcher.submit_future(1)
        with pytest.raises(QueueFullError, match="1 requests wait"):
            batcher.submit_future(2)
        counts = batcher.statistics()
        assert (counts.full, counts.waiting, counts.running, total(counts)) == (1, 1, 1, 3)
        held.release(2)


def test_a_cancelled_task_takes_its_request_with_it(held: Held) -> None:
    async def ask(batcher: Batcher) -> None:
        running = asyncio.ensure_future(batcher.submit(0))
        await asyncio.to_thread(held.runs)
        waiting = [asyncio.ensure_future(batcher.submit(x)) for x in (1, 2, 3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        running.cancel()
        await asyncio.wait([waiting[1], running])
        assert batcher.statistics().cancelled == 1
        held.release(2)
        assert await asyncio.gather(waiting[0], waiting[2]) == [2, 6]

    with Batcher(held, slo_ms=None) as batcher:
        asyncio.run(ask(batcher))
        counts = batcher.statistics()
    assert held.batches == [[0], [1, 3]]
    assert (counts.cancelled, counts.completed, total(counts)) == (1, 3, 4)


def test_who_waits_for_several_requests_hears_of_one_that_is_cancelled(held: Held) -> None:
    with Batcher(held, sizes=(1,), slo_ms=None) as batcher:
        batcher.submit_future(0)
        held.runs()
        waiting = batcher.submit_future(1)
        assert waiting.cancel() and waiting.cancel()
        assert futures.wait([waiting], timeout=0).done == {waiting}
        held.release()
    assert batcher.statistics().cancelled == 1


def test_requests_that_are_cancelled_anywhere_are_counted_once() -> None:
    with Batcher(doubled, slo_ms=None, max_queue=5_000) as batcher:
        futures = [batcher.submit_future(x) for x in range(3_000)]
        cancelled = sum(future.cancel() for future in futures)
        answers = [answer(future) for future in futures if not future.cancelled()]
        counts = batcher.statistics()
    assert (counts.cancelled, counts.completed) == (cancelled, len(answers)) and total(counts) == 3_000


def test_closing_runs_what_waits_and_refuses_more(held: Held) -> None:
    batcher = Batcher(held, slo_ms=90_000, predict=lambda size: 1.0, policy="delay", delay_ms=90_000)
    future = batcher.submit_future(1)  # waits for others
    held.release()
    batcher.close()
    assert answer(future) == 2
    batcher.close()
    with pytest.raises(UseError, match="closed"):
        batcher.submit_future(2)
    assert total(batcher.statistics()) == 1


def test_a_batcher_belongs_to_one_loop_at_a_time() -> None:
    async def ask(batcher: Batcher) -> Any:
        return await batcher.submit(1)

    async def twice(batcher: Batcher) -> None:
        assert await ask(batcher) == 2
        with pytest.raises(UseError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, ask(batcher))
        assert await asyncio.to_thread(lambda: answer(batcher.submit_future(2))) == 4

    with Batcher(doubled, slo_ms=None) as batcher:
        asyncio.run(twice(batcher))
        assert asyncio.run(ask(batcher)) == 2


def test_after_a_fork_it_refuses(held: Held) -> None:
    def refused(call: Callable[[], Any]) -> bool:
        try:
            call()
        except UseError as error:
            return "fork" in str(error)
        return False

    with Batcher(held, slo_ms=None) as batcher:
        future = batcher.submit_future(1)
        held.runs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if child == 0:
            told = [
                refused(lambda: batcher.submit_future(1)),
                refused(lambda: asyncio.run(batcher.submit(1))),
                refused(batcher.statistics),
            ]
            batcher.close()
            os._exit(0 if all(told) else 1)
        held.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answer(future) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deadline_ms": 0}, "deadline_ms = 0: .* in the past"),
        ({"deadline_ms": -1.5}, "in the past"),
        ({"deadline_ms": float("nan")}, "deadline_ms = nan: a finite number"),
        ({"deadline_ms": 1e9}, "at most 3,600,000 ms ahead"),
        ({"deadline_ms": "soon"}, "deadline_ms = 'soon'"),
        ({"deadline_ms": 10**400}, "deadline_ms = an integer of 1329 bits"),
        ({"priority": float("nan")}, "priority = nan: a finite number"),
        ({"priority": float("inf")}, "priority = inf"),
        ({"priority": True}, "priority = True"),
    ],
)
def test_a_deadline_and_a_priority_are_numbers(options: dict[str, Any], said: str) -> None:
    with Batcher(doubled) as batcher:
        with pytest.raises(InputError, match=said):
            batcher.submit_future(1, **options)
        assert batcher.statistics().submitted == 0


def array(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("example", "x", "said"),
    [
        (array(3), array(4), r"x has shape \(4,\); \(3,\) is needed"),
        (array(3), array(3, dtype=np.float64), "x has dtype float64; float32 is needed"),
        (array(3), [0, 0, 0], "x has dtype None"),
        ({"a": array(1), "b": array(2)}, {"a": array(1)}, "x has no input 'b'"),
        ({"a": array(1)}, {"a": array(1), "c": 1}, "x has an unknown input 'c'"),
        ({"a": array(1)}, {"a": array(2)}, r"x\['a'\] has shape \(2,\)"),
        ({"a": array(1)}, array(1), r"x is a ndarray; a mapping with 'a' is needed"),
        ((array(1), 1), (array(1),), "a tuple of 2 inputs"),
        ((array(1), 1), (array(1), "y"), r"x\[1\] is a str; a int is needed"),
    ],
)
def test_an_input_is_like_the_example(example: Any, x: Any, said: str) -> None:
    with Batcher(lambda inputs: inputs, sizes=(1,), slo_ms=None, example=example) as batcher:
        with pytest.raises(InputError, match=said):
            batcher.submit_future(x)
        assert answer(batcher.submit_future(example)) is example
        assert batcher.statistics().submitted == 1


def test_an_input_has_a_limit() -> None:
    with Batcher(lambda inputs: inputs, slo_ms=None, max_bytes=8) as batcher:
        for x in (array(3), {"a": array(1), "b": [array(2)]}, b"123456789", np.array([b"123456789"], object)):
            with pytest.raises(InputError, match=r"at most 8 \(max_bytes\)"):
                batcher.submit_future(x)
        assert len(answer(batcher.submit_future(array(2)))) == 2


def test_the_example_runs_in_each_size_before_the_first_request() -> None:
    sizes: list[int] = []

    def run(inputs: list[int]) -> list[int]:
        sizes.append(len(inputs))
        return inputs

    with Batcher(run, sizes=(4, 1), example=1):
        assert sizes == [4] * 4 + [1] * 4
    run.example = 2  # type: ignore[attr-defined]
    with Batcher(run, sizes=(1,)) as batcher:
        assert len(sizes) == 12
        with pytest.raises(InputError):
            batcher.submit_future("x")


def test_a_model_that_fails_with_the_example_makes_no_batcher() -> None:
    with pytest.raises(RunError, match="run raised TypeError"):
        Batcher(doubled, example={}, name="failing")
    for thread in threading.enumerate():
        if "failing" in thread.name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    "options",
    [
        {"run": 1},
        {"sizes": ()},
        {"sizes": (0, 1)},
        {"sizes": 4},
        {"slo_ms": 0},
        {"slo_ms": float("nan")},
        {"slo_ms": 1e9},
        {"policy": "fifo"},
        {"max_queue": 0},
        {"max_queue": 2.5},
        {"on_full": "drop"},
        {"delay_ms": -1},
        {"margin_ms": float("inf")},
        {"timeout_ms": 0},
        {"on_timeout": "retry"},
        {"predict": 3},
        {"predict": lambda size: -1},
        {"max_bytes": 0},
        {"client_class": "bulk"},
        {"name": "\n"},
        {"hang_ms": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_has_a_meaning(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Batcher(**{"run": doubled, **options})


@pytest.mark.parametrize(
    ("client_class", "deadline_ms", "within_ms"),
    [("latency", 80_000, 80_000), ("latency", None, None), ("best_effort", 80_000, None)],
)
def test_a_batch_runs_in_a_region_with_the_time_that_is_left(
    client_class: Any, deadline_ms: float | None, within_ms: float | None
) -> None:
    entered: list[str] = []

    def run(inputs: list[Any]) -> list[Any]:
        entered.append(repr(_region._thread.regions[-1].region))
        return inputs

    with Batcher(run, slo_ms=None, client_class=client_class, name="model") as batcher:
        answer(batcher.submit_future(1, deadline_ms=90_000))
        answer(batcher.submit_future(1, deadline_ms=deadline_ms))
    said = rf"cudasched.region\('{client_class}'(, slo_ms=(.+))?, priority=0, name='model'\)"
    found = re.fullmatch(said, entered[-1])
    assert found, entered
    assert found[2] is None if within_ms is None else 0 < float(found[2]) <= within_ms


SERVES = """
import json, cudasched, launcher
from cudasched.inference import Batcher

def run(inputs):
    if not gpus:
        gpus.append(launcher.Gpu())
    gpus[0].launch()
    gpus[0].synchronize()
    return inputs

gpus = []
with Batcher(run, slo_ms=60_000, name="model", policy="eager") as batcher:
    assert [future.result() for future in [batcher.submit_future(x) for x in range(50)]] == list(range(50))
metrics = cudasched.metrics()
(region,) = metrics.regions
batches = sum(batcher.statistics().batches.values())
print(json.dumps([metrics.launches["latency"] - batches, region.name, region.requests - batches, region.missed]))
"""


def test_with_a_driver_each_batch_is_a_request_of_class_latency(simulated: Path, python: Run) -> None:
    done = python(SERVES)
    assert done.stdout == '[0, "model", 0, 0]\n', done.stderr


def test_names_are_documented() -> None:
    for name in cudasched.inference.__all__:
        assert getattr(cudasched.inference, name).__doc__, name
