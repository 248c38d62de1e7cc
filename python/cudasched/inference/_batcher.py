"""Requests from tasks and threads, run in batches on a thread of the batcher's own, or where they are submitted."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cudasched import hook
from cudasched._region import region
from cudasched._text import shown
from cudasched.errors import ConfigError, Error
from cudasched.inference._errors import DeadlineError, InputError, QueueFullError, RunError, UseError
from cudasched.inference._inputs import check_input, number
from cudasched.inference._queue import NEVER_NS, Queue, Refused, Request
from cudasched.inference._times import LONGEST_MS, Times
from cudasched.log import logger

__all__ = ["Batcher", "Statistics", "awaited"]

_MEASURED = 3
"""Runs of each size with the example, after one that is not counted."""

_Ms = Annotated[float, Field(gt=0, le=LONGEST_MS)]
_Count = Annotated[int, Field(ge=1, le=1 << 20)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    sizes: Annotated[tuple[_Count, ...], Field(min_length=1, strict=False)]
    slo_ms: _Ms | None
    policy: Literal["deadline", "eager", "delay", "aimd"]
    max_queue: _Count
    on_full: Literal["reject", "delay"]
    delay_ms: Annotated[float, Field(ge=0, le=LONGEST_MS)]
    margin_ms: Annotated[float, Field(ge=0, le=LONGEST_MS)]
    timeout_ms: _Ms | None
    on_timeout: Literal["reject", "delay"]
    max_bytes: _Count | None
    client_class: Literal["latency", "normal", "best_effort"]
    inline: bool
    hang_ms: _Ms


@dataclass
class Statistics:
    """Counts since the batcher was made; times are ms, totals over all requests or batches.

    ``submitted`` is the sum of ``completed``, ``failed``, ``cancelled``, ``refused``, ``full``, ``timed_out``,
    ``waiting`` and ``running``.

    Attributes:
        submitted: Requests whose input was accepted.
        completed: Requests with an answer.
        missed: Completed requests whose answer came after their deadline.
        failed: Requests whose batch failed, or that waited behind a model that hangs.
        cancelled: Requests cancelled before their batch started.
        refused: Requests that could not meet their deadline when they were submitted.
        full: Requests refused because too many waited.
        timed_out: Requests that waited too long.
        waiting: Requests that wait now.
        running: Requests of the batch that runs now.
        batches: How many batches had how many requests.
        queue_ms: Time between submission and start, of the requests that have run.
        longest_queue_ms: The longest of these.
        run_ms: Time of the batches that have run, by their size.
        answer_ms: Time between submission and answer, of the completed requests.
        last_s: When the last batch ended, s since the epoch; 0: none has.
    """

    submitted: int = 0
    completed: int = 0
    missed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    full: int = 0
    timed_out: int = 0
    waiting: int = 0
    running: int = 0
    batches: dict[int, int] = field(default_factory=dict)
    queue_ms: float = 0.0
    longest_queue_ms: float = 0.0
    run_ms: dict[int, float] = field(default_factory=dict)
    answer_ms: float = 0.0
    last_s: float = 0.0


@dataclass(eq=False)
class _Batch:
    requests: list[Request]
    start_ns: int
    given_up: bool = False
    thread: int = field(default_factory=threading.get_ident)


class _Future(Future[Any], Request):
    """A request of this process, which is its own answer."""

    def __init__(self, forget: Callable[[Request], None], *arguments: Any) -> None:
        Future.__init__(self)
        Request.__init__(self, *arguments)
        self._forget = forget

    def starts(self) -> bool:
        """See `Request`."""
        return self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Whether the request is cancelled; it waits no more."""
        if not super().cancel():
            return False
        self.x = None
        self._forget(self)
        return True


Answer = tuple[Request, Any, Error | None]
"""A request with its output or its error."""


class Front(Protocol):
    """Another process, whose calls the batcher answers."""

    def answer(self, answers: list[Answer]) -> None:
        """Those of a batch, on the thread that ran it. Returns soon, and raises nothing."""


@dataclass(eq=False)
class Call:
    """Inputs of a front that are answered as one; arguments as of `Batcher.submit`. Has no requests at first."""

    front: Front
    inputs: Sequence[Any]
    deadline_ms: float | None
    priority: float
    requests: list[Request]


_SomeCall = TypeVar("_SomeCall", bound=Call)


class Batcher:
    """Collects requests into batches, and starts each batch by the deadlines of its requests.

    ::

        batcher = Batcher(lambda inputs: list(model(torch.stack(inputs)).cpu()), slo_ms=20)
        y = await batcher.submit(x, deadline_ms=15)    # of one event loop
        y = batcher.submit_future(x).result()          # of any thread

    One batch runs at a time, on a thread of the batcher's own, in a ``cudasched.region`` whose target is the time left
    to the earliest deadline in the batch. Requests are served by priority, then by deadline. Regions do nothing without
    a GPU; the rest works there, too. ``with`` and ``async with`` close the batcher.

    Attributes:
        example: An input, which others have to be like; None: any input.
        answer: The output for the example; None: there is no example.
        max_queue: So many requests wait.

    Args:
        run: Called with a list of 1 to ``max(sizes)`` inputs. Returns as many outputs, in their order, when they are
            ready. It writes to their memory no more: a server sends them while the next batch runs.
        sizes: Sizes of batches. The time of a batch is that of the smallest size that holds it, as `run` may pad.
        slo_ms: Deadline of requests that give none, ms after submission, at most an hour; None: no deadline.
        policy: ``"deadline"``: the batch starts when no larger one could start in time, or waiting gains nothing.
            ``"eager"``: at once. ``"delay"``: when it is full, after `delay_ms`, or at its latest start. ``"aimd"``: at
            once, with a limit that rises by one while requests are in time and falls by a tenth when one is late.
        max_queue: So many requests wait.
        on_full: ``"reject"`` further requests, or ``"delay"`` them: each waits outside until there is room.
        delay_ms: Of the policy ``"delay"``: the longest wait for a larger batch.
        margin_ms: Left between the predicted end of a batch and its earliest deadline, as threads wake late.
        timeout_ms: The longest time in the queue; None: none.
        on_timeout: ``"reject"`` requests that waited so long, or that cannot meet their deadline any more, or
            ``"delay"`` them: they are served after the others of their priority.
        predict: The time of a batch of a size in ms, for sizes that have not run; None: from those that have.
        example: An input, which others have to be like in structure, dtype and shape. Each size runs with it, four
            times, before the batcher is made, so that the time of each is known; with `predict` only the largest does.
            None: ``run.example``, or any input.
        max_bytes: The most that arrays of an input may have; None: no limit.
        client_class: Of the region; ``"best_effort"`` for a model whose requests have time.
        name: Of the region, for ``cudasched.metrics``; of class latency alone.
        inline: A batch that can start at once runs on the thread that submits, an event loop's, too, which saves the
            step to the batcher's thread and back, 0.1 ms. For models that take less, and that any thread may run.
        hang_ms: A batch that runs for longer hangs: its requests fail, and all others until it returns.

    Raises:
        ConfigError: An argument has no meaning.
        RunError: `run` fails with the example.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        sizes: Sequence[int] = (1, 2, 4, 8, 16),
        slo_ms: float | None = 10.0,
        policy: Literal["deadline", "eager", "delay", "aimd"] = "deadline",
        max_queue: int = 256,
        on_full: Literal["reject", "delay"] = "reject",
        *,
        delay_ms: float = 0.0,
        margin_ms: float = 0.5,
        timeout_ms: float | None = None,
        on_timeout: Literal["reject", "delay"] = "reject",
        predict: Callable[[int], float] | None = None,
        example: Any = None,
        max_bytes: int | None = None,
        client_class: Literal["latency", "normal", "best_effort"] = "latency",
        name: str = "",
        inline: bool = False,
        hang_ms: float = 60_000.0,
    ) -> None:
        given = dict(locals())
        if not callable(run):
            raise ConfigError(f"run = {shown(run)}: a function from inputs to outputs is needed")
        if predict is not None and not callable(predict):
            raise ConfigError(f"predict = {shown(predict)}: a function from a size to ms is needed")
        try:
            options = self._options = _Options.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            place = str(first["loc"][0])
            raise ConfigError(f"{place} = {shown(given[place])}: {first['msg']}") from None
        self._region = region(client_class, name=name)  # of the thread that runs a batch, which sets its target
        self._run, self.max_queue = run, max_queue
        self.example = getattr(run, "example", None) if example is None else example
        self.answer: Any = None
        self._predicts = predict is not None
        self._hang_ns = _ns(hang_ms)
        self._queue = Queue(
            policy,
            Times(sorted(set(options.sizes)), predict),
            margin_ns=_ns(margin_ms),
            delay_ns=_ns(delay_ms),
            timeout_ns=NEVER_NS if timeout_ms is None else _ns(timeout_ms),
            on_timeout=on_timeout,
            max_queue=max_queue,
            on_full=on_full,
        )
        self._slack_ns: Callable[[], int] = hook.load_core().others_slack_ns
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)  # for the runner
        self._changed = threading.Condition(self._lock)  # for the watcher and `close`
        self._alarm_ns = NEVER_NS  # when the watcher wakes
        self._running: _Batch | None = None
        self._closed = self._ended = False
        self._counts = Statistics()
        ready: Future[None] = Future()
        self._threads = [
            threading.Thread(target=target, name=f"cudasched batcher {name}".strip(), daemon=True)
            for target in (partial(self._serve, ready), self._watch)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)
        try:
            ready.result()
        except BaseException:
            self._refuse_more()
            raise

    async def submit(self, x: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """The answer to one input, from a task. A task that is cancelled takes its request with it.

        Args:
            x: The input.
            deadline_ms: When the answer is due, ms from now; None: `slo_ms`.
            priority: Higher is served first, whatever the deadlines.

        Raises:
            InputError: The input is not like the example or too large, the deadline is in the past or over an hour, or
                the priority is no finite number.
            DeadlineError: The deadline cannot be met, or the request waited for too long.
            QueueFullError: `max_queue` requests wait.
            RunError: `run` raised, hangs, or returned another number of outputs.
            UseError: The batcher is closed, was made before a fork, or was used from another event loop that is open.
        """
        self._check_use()
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is not loop and self._loop is not None and not self._loop.is_closed():
                raise UseError("this batcher is used from another event loop: make one for each, or use submit_future")
            self._loop = loop
        future = self.submit_future(x, deadline_ms=deadline_ms, priority=priority)
        try:
            return await awaited(future)
        finally:
            future.cancel()  # of a task that is cancelled

    def submit_future(self, x: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Future[Any]:
        """The answer to one input, from any thread; arguments and errors as of `submit`.

        Errors that are known at once are raised, the others are the future's. Cancelling the future takes the request
        out of the queue; once its batch runs it cannot be cancelled.
        """
        return self._submit([x], deadline_ms, priority)[0]

    def _submit(
        self, inputs: Sequence[Any], deadline_ms: float | None = None, priority: float = 0
    ) -> list[Future[Any]]:
        """The answers to several inputs, of which all are accepted, or none."""
        due_ns, level = self._checked(inputs, deadline_ms, priority)
        futures: list[Any] = []
        inline, batch = self._options.inline, None
        try:
            with self._lock:
                now_ns = self._now_ns()
                for x in inputs:
                    request = _Future(self._forget, x, now_ns, min(now_ns + due_ns, NEVER_NS), level)
                    if self._add(request, inline and len(inputs) == 1 and self._running is None):
                        batch = self._running = _Batch([request], now_ns)
                        request.starts()
                    futures.append(request)
                self._have_arrived(notify=not inline)
            if inline:
                while self._serve_here(batch) and not futures[-1].done():
                    batch = None
        except BaseException as error:
            if batch is not None and self._running is batch:  # a signal's handler has raised
                self._end(batch, batch.start_ns, [], _interrupted(error))
            for future in futures:
                future.cancel()
            raise
        return futures

    def _submit_calls(self, calls: Sequence[_SomeCall]) -> list[tuple[_SomeCall, Exception]]:
        """Calls that came together, and so may be of one batch. Of each, all inputs are accepted, or none.

        Returns:
            The calls that are not, each with its error.
        """
        refused: list[tuple[_SomeCall, Exception]] = []
        checked = []
        for call in calls:
            try:
                checked.append((call, *self._checked(call.inputs, call.deadline_ms, call.priority)))
            except Exception as error:
                refused.append((call, error))
        with self._lock:
            for call, due_ns, level in checked:
                try:
                    now_ns = self._now_ns()
                    for place, x in enumerate(call.inputs):
                        request = Request(x, now_ns, min(now_ns + due_ns, NEVER_NS), level, call, place)
                        self._add(request, False)
                        call.requests.append(request)
                except Exception as error:
                    self._withdraw(call)
                    call.requests = []
                    refused.append((call, error))
                call.inputs = ()  # the requests have them
            self._have_arrived()
        return refused

    def _withdraw(self, call: Call) -> None:
        """Those of its requests that wait do no more."""
        with self._lock:
            for request in call.requests:
                self._forget(request)

    def _checked(self, inputs: Sequence[Any], deadline_ms: float | None, priority: float) -> tuple[int, float]:
        """The time to the deadline, and the level. Raises InputError, UseError."""
        self._check_use()
        due_ms = self._options.slo_ms if deadline_ms is None else number("deadline_ms", deadline_ms)
        level = number("priority", priority)
        if due_ms is not None and not 0 < due_ms <= LONGEST_MS:
            past = "in the past" if due_ms <= 0 else f"at most {LONGEST_MS:,} ms ahead"
            raise InputError(f"deadline_ms = {due_ms:g}: a deadline is ms from now, and this one is {past}")
        example, max_bytes = self.example, self._options.max_bytes
        for x in inputs:
            check_input(x, example, max_bytes)
        return NEVER_NS if due_ms is None else _ns(due_ms), level

    def _now_ns(self) -> int:
        if self._closed:
            raise UseError("this batcher is closed")
        return time.monotonic_ns()

    def _have_arrived(self, notify: bool = True) -> None:
        if self._running is not None:
            self._set_alarm()
        if notify:
            self._arrived.notify()  # the last step: the runner needs the interpreter that this thread holds

    def _add(self, request: Request, may_start: bool) -> bool:
        """Whether it is a batch by itself, which starts now."""
        counts = self._counts
        counts.submitted += 1
        try:
            if self._running is not None and self._running.given_up:
                raise self._hangs()
            return self._queue.add(request, request.arrival_ns, self._slack_ns() if may_start else None)
        except RunError:
            counts.failed += 1
            raise
        except DeadlineError:
            counts.refused += 1
            raise
        except QueueFullError:
            counts.full += 1
            raise

    def statistics(self) -> Statistics:
        """A copy of the counts, all of one moment.

        Raises:
            UseError: The batcher was made before a fork.
        """
        self._check_use()
        with self._lock:
            running = 0 if self._running is None or self._running.given_up else len(self._running.requests)
            counts = self._counts
            batches, run_ms = dict(counts.batches), dict(counts.run_ms)
            return replace(counts, batches=batches, run_ms=run_ms, waiting=len(self._queue), running=running)

    def close(self) -> None:
        """Accepts no more requests, runs those that wait, in batches that start at once, and returns when that is done.

        Behind a model that hangs, those that wait fail after `hang_ms`. Called twice, or after a fork, it does nothing.

        Raises:
            UseError: The caller is `run`, or a callback on a thread of the batcher, which would wait for itself.
        """
        if self._pid != os.getpid():
            return
        if threading.current_thread() in self._threads or self._runs_here():
            raise UseError("close waits for this thread, which the batcher's work is on: call it on another thread")
        self._refuse_more()
        with self._lock:
            self._changed.wait_for(lambda: self._ended or (self._running is not None and self._running.given_up))

    def _refuse_more(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            self._arrived.notify_all()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Batcher:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _check_use(self) -> None:
        if self._pid != os.getpid():
            raise UseError("this batcher was made before a fork, and its threads are in the parent: make one here")

    def _forget(self, request: Request) -> None:
        """It is cancelled, and waits no more."""
        with self._lock:
            if self._queue.remove(request):
                self._counts.cancelled += 1
                request.x = None
                request.starts()  # it does not: `concurrent.futures.wait` hears of it here

    def _counted(self, refused: Refused) -> Refused:
        """Without the requests that were cancelled. Under the lock; `_fail` comes after it, outside."""
        left = []
        for request, error in refused:
            if request.starts():
                left.append((request, error))
                self._counts.timed_out += isinstance(error, DeadlineError)
                self._counts.failed += isinstance(error, RunError)
            else:
                self._counts.cancelled += 1
        return left

    # The runner.

    def _serve(self, ready: Future[None]) -> None:
        try:
            if self.example is not None:
                self._measure()
            ready.set_result(None)
        except BaseException as error:
            ready.set_exception(error)
        while True:
            batch = None
            try:
                batch, refused = self._next()
                _fail(refused)
                if batch is not None:
                    self._serve_batch(batch)
                elif not refused:
                    break
            except BaseException as error:  # the thread goes on
                logger.error("a batch was not answered: %r", error)
                with suppress(Exception):
                    if not self._fail_batch(batch, error):
                        self._fail_waiting(error)
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def _measure(self) -> None:
        sizes = self._queue.times.sizes[-1 if self._predicts else 0 :]
        for size in reversed(sizes):  # the largest first: graphs of smaller ones share its memory
            for measured in range(-1, _MEASURED):
                begin_ns = time.monotonic_ns()
                self.answer = self._outputs([self.example] * size, self._options.slo_ms)[0]
                if measured >= 0:
                    self._queue.times.record(size, time.monotonic_ns() - begin_ns)

    def _next(self, wait: bool = True) -> tuple[_Batch | None, Refused]:
        """A batch, or requests that wait no longer; neither: none can start now or, with `wait`, ever any more."""
        with self._lock:
            while True:
                now_ns, look_ns = time.monotonic_ns(), None
                if self._running is None:
                    taken, refused, look_ns = self._queue.take(now_ns, self._closed, self._slack_ns())
                    if taken:
                        self._running = batch = _Batch(taken, now_ns)
                        batch.requests = [request for request in taken if request.starts()]
                        self._counts.cancelled += len(taken) - len(batch.requests)
                        if not batch.requests:
                            self._running = None
                        self._set_alarm()
                    if refused:
                        refused = self._counted(refused)
                    if self._running is not None or refused or (self._closed and not taken):
                        return self._running, refused
                    if taken:
                        continue
                if not wait:
                    if self._running is None:
                        self._arrived.notify()  # the runner waits for more
                    return None, []
                self._arrived.wait(None if look_ns is None else max(look_ns - now_ns, 0) / 1e9)

    def _serve_here(self, batch: _Batch | None) -> bool:
        """Runs the batch, or that which can start at once, on the calling thread; whether there was one."""
        refused: Refused = []
        try:
            if batch is None:
                batch, refused = self._next(wait=False)
                _fail(refused)
            error = None if batch is None else self._serve_batch(batch)
            if error is not None and isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
                raise error.__cause__
            return batch is not None or bool(refused)
        except BaseException as error:  # of a signal's handler, at any place
            self._fail_batch(batch, error)
            raise

    def _runs_here(self) -> bool:
        running = self._running  # which another thread may end meanwhile
        return running is not None and running.thread == threading.get_ident()

    def _fail_batch(self, batch: _Batch | None, error: BaseException) -> bool:
        """Fails the batch of the calling thread; whether there is one."""
        with self._lock:
            if self._runs_here():
                batch = self._running
        if batch is not None:
            self._end(batch, batch.start_ns, [], _interrupted(error))
        return batch is not None

    def _fail_waiting(self, error: BaseException) -> None:
        why = f"no batch can be chosen: {type(error).__name__}: {error}"
        with self._lock:
            refused = self._counted([(request, RunError(why)) for request in self._queue.clear()])
        _fail(refused)

    def _serve_batch(self, batch: _Batch) -> RunError | None:
        error: RunError | None = None
        outputs: list[Any] = []
        begin_ns = time.monotonic_ns()
        due_ns = min([request.deadline_ns for request in batch.requests])
        slack_ms = None if due_ns == NEVER_NS else (due_ns - begin_ns) / 1e6
        try:
            outputs = self._outputs([request.x for request in batch.requests], slack_ms)
        except RunError as raised:
            error = raised
        self._end(batch, begin_ns, outputs, error)
        return error

    def _end(self, batch: _Batch, begin_ns: int, outputs: list[Any], error: RunError | None) -> None:
        end_ns = time.monotonic_ns()
        with self._lock:
            if self._running is batch:
                self._running = None
                has_run = error is None and not batch.given_up
                in_time = self._count(batch, begin_ns, end_ns, error is not None)
                self._queue.end(len(batch.requests), end_ns - begin_ns if has_run else None, in_time)
                if len(self._queue) or self._closed:
                    self._arrived.notify()  # the runner, where another thread has run this
            if batch.given_up:
                return
        if error is None:
            _answer([(request, output, None) for request, output in zip(batch.requests, outputs, strict=True)])
        else:
            _fail([(request, _copied(error)) for request in batch.requests])

    def _count(self, batch: _Batch, begin_ns: int, end_ns: int, failed: bool) -> bool:
        """A batch has run; whether each of its requests was in time. Of one that was given up nothing is counted."""
        counts, size = self._counts, len(batch.requests)
        missed = queue_ns = longest_ns = answer_ns = 0
        for request in batch.requests:
            missed += end_ns > request.deadline_ns
            answer_ns += end_ns - request.arrival_ns
            waited_ns = batch.start_ns - request.arrival_ns
            queue_ns += waited_ns
            longest_ns = max(longest_ns, waited_ns)
        if batch.given_up:
            return missed == 0
        counts.batches[size] = counts.batches.get(size, 0) + 1
        counts.run_ms[size] = counts.run_ms.get(size, 0) + (end_ns - begin_ns) / 1e6
        counts.last_s = time.time()
        counts.queue_ms += queue_ns / 1e6
        counts.longest_queue_ms = max(counts.longest_queue_ms, longest_ns / 1e6)
        if failed:
            counts.failed += size
        else:
            counts.completed += size
            counts.missed += missed
            counts.answer_ms += answer_ns / 1e6
        return missed == 0

    def _outputs(self, inputs: list[Any], slack_ms: float | None) -> list[Any]:
        """Raises RunError."""
        has_target = self._options.client_class == "latency" and slack_ms is not None
        self._region._slo_ms = max(slack_ms or 0.0, 0.0) if has_target else 0.0  # a new region checks it at length
        try:
            with self._region:
                outputs = self._run(inputs)
        except BaseException as error:
            raise RunError(f"run raised {type(error).__name__}: {error}") from error
        if type(outputs) is not list:
            is_sequence = hasattr(outputs, "__len__") and getattr(outputs, "shape", None) != ()
            if not is_sequence or isinstance(outputs, (str, bytes, Mapping)):
                raise RunError(f"run returned {shown(outputs)}: a sequence with an output for each input is needed")
            outputs = list(outputs)
        if len(outputs) != len(inputs):
            raise RunError(f"run returned {len(outputs)} outputs for {len(inputs)} inputs")
        return outputs

    # The watcher: time-outs and hangs while a batch runs.

    def _due_ns(self) -> int:
        if self._running is None or self._running.given_up:
            return NEVER_NS
        hangs_ns = self._running.start_ns + self._hang_ns
        return min(self._queue.expiry_ns(), hangs_ns) if len(self._queue) else hangs_ns

    def _set_alarm(self) -> None:
        if (due_ns := self._due_ns()) < self._alarm_ns:
            self._alarm_ns = due_ns
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._ended:
                    return
                now_ns = time.monotonic_ns()
                if now_ns >= self._alarm_ns:  # an early alarm stays: batches that end before it do not wake this thread
                    self._alarm_ns = self._due_ns()
                if now_ns < self._alarm_ns:
                    left_s = (self._alarm_ns - now_ns) / 1e9
                    self._changed.wait(None if self._alarm_ns == NEVER_NS else left_s)
                    continue
                refused = self._counted(self._queue.expire(now_ns))
                batch = self._running
                if batch is not None and now_ns >= batch.start_ns + self._hang_ns:
                    batch.given_up = True
                    self._counts.failed += len(batch.requests)
                    refused += [(request, self._hangs()) for request in batch.requests]
                    refused += self._counted([(request, self._hangs()) for request in self._queue.clear()])
                    self._changed.notify_all()  # for `close`
            _fail(refused)

    def _hangs(self) -> RunError:
        return RunError(f"run has not returned for over {self._options.hang_ms:g} ms (hang_ms)")


async def awaited(answer: Future[Any]) -> Any:
    """Unlike `asyncio.wrap_future`, this costs the event loop one turn, or none where the answer is there."""
    if not answer.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        answer.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(_wake, done))
        await done
    return answer.result()


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():  # the task was cancelled
        done.set_result(None)


def _answer(answers: Sequence[Answer]) -> None:
    """Without the lock: a future makes calls into the program. The answers to one process go there together."""
    elsewhere: dict[Any, list[Answer]] = {}
    for answer in answers:
        request, output, error = answer
        request.x = None
        if not isinstance(request, _Future):
            elsewhere.setdefault(request.call.front, []).append(answer)
        else:
            try:
                if error is None:
                    request.set_result(output)
                elif not request.done():  # interrupted on the way
                    request.set_exception(error)
            except BaseException as raised:  # by a callback: other requests have their answers, too
                if threading.current_thread() is threading.main_thread():
                    raise  # or by a signal's handler
                logger.error("a callback of a request raised %r", raised)
    for front, its in elsewhere.items():
        front.answer(its)


def _fail(refused: Refused) -> None:
    if refused:
        _answer([(request, None, error) for request, error in refused])


def _ns(value_ms: float) -> int:
    return round(value_ms * 1e6)


def _interrupted(error: BaseException) -> RunError:
    return RunError(f"run was interrupted by {type(error).__name__}")


def _copied(error: RunError) -> RunError:
    """For each request one of its own: an exception that is raised twice collects the tracebacks of both."""
    copy = RunError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
