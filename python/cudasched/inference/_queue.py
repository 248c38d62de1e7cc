"""The requests that wait for a batch: a state machine, told the time. No thread, no lock: the caller holds one."""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from cudasched import hook
from cudasched.errors import Error
from cudasched.inference._errors import DeadlineError, QueueFullError
from cudasched.inference._times import Times

__all__ = ["NEVER_NS", "Queue", "Refused", "Request"]

NEVER_NS = 2**63 - 1
"""The deadline of a request that has none."""

Action = Literal["reject", "delay"]
_DOUBT_NS = 1_000_000_000
"""Where no batch has run for so long, and a request would be refused, the times of batches are measured anew."""
_numbers = itertools.count()
_key = attrgetter("key")


class Request:
    """One input, and its place among others.

    Args:
        x: The input, which is kept until the answer is there.
        arrival_ns: When it was submitted.
        deadline_ns: When its answer is due.
        level: Higher levels are served first.
        call: Has this request and others, all of another process; None: the request is a future.
        place: Among the requests of the call.

    Attributes:
        delayed: The request was late, and is served after the others of its level.
        key: By which requests are served in order. Of two that are equal otherwise, the first comes first.
    """

    def __init__(
        self,
        x: Any,
        arrival_ns: int,
        deadline_ns: int = NEVER_NS,
        level: float = 0,
        call: Any = None,
        place: int = 0,
    ) -> None:
        self.x, self.arrival_ns, self.deadline_ns, self.level = x, arrival_ns, deadline_ns, level
        self.call, self.place = call, place
        self.delayed = False
        self.key = -level, False, deadline_ns, next(_numbers)

    def delay(self) -> None:
        """From here on it is `delayed`."""
        self.delayed = True
        self.key = self.key[0], True, *self.key[2:]

    def starts(self) -> bool:
        """Whether it was not cancelled; it cannot be any more."""
        return True

    def late(self, end_ns: int, why: str) -> DeadlineError:
        """The error where it would end then."""
        predicted_ms = (end_ns - self.arrival_ns) / 1e6
        deadline_ms = None if self.deadline_ns == NEVER_NS else (self.deadline_ns - self.arrival_ns) / 1e6
        due = "" if deadline_ms is None else f", and its deadline is {deadline_ms:.3g} ms"
        return DeadlineError(
            f"{why}: it would end {predicted_ms:.3g} ms after it was submitted{due}", predicted_ms, deadline_ms
        )


Refused = list[tuple[Request, Error]]


class Queue:
    """Requests in the order in which they are served: by level, then by deadline.

    Args:
        policy: When a batch starts (csrc/schedule/batching.hpp).
        times: Of batches.
        margin_ns: Between the predicted end of a batch and its earliest deadline.
        delay_ns: Of the policy ``delay``.
        timeout_ns: A request may wait for so long; NEVER_NS: for ever.
        on_timeout: ``reject`` it then, and where it cannot meet its deadline any more, or ``delay`` it.
        max_queue: So many wait.
        on_full: ``reject`` further ones, or ``delay`` them: they come in, in the order of their arrival, as others go.
    """

    def __init__(
        self,
        policy: str,
        times: Times,
        *,
        margin_ns: int = 0,
        delay_ns: int = 0,
        timeout_ns: int = NEVER_NS,
        on_timeout: Action = "reject",
        max_queue: int = 256,
        on_full: Action = "reject",
    ) -> None:
        hook.load_core()
        from cudasched import _core

        self._batching = _core.Batching(policy, times.sizes, margin_ns, delay_ns)
        self._aimd_limit = _core.aimd_limit
        self.times, self._margin_ns = times, margin_ns
        self._timeout_ns, self._on_timeout = timeout_ns, on_timeout
        self._max_queue, self._on_full = max_queue, on_full
        self._most = float(times.sizes[-1])
        self._aimd = policy == "aimd"
        self._gives_up = policy == "deadline"
        self._limit = 1.0 if self._aimd else self._most
        self._busy_until_ns = 0
        self._gap_ns, self._last_ns = NEVER_NS, 0  # between arrivals, a running mean; the last of them
        self._taken_ns = 0  # when the last batch was taken, or the first request came
        # The requests, with columns beside them for the decision.
        self._requests: list[Request] = []
        self._deadlines_ns = array("q")
        self._arrivals_ns = array("q")
        self._timeouts_ns = array("q")
        self._outside: deque[Request] = deque()
        self._alone_deadline_ns, self._alone_arrival_ns = array("q", [0]), array("q", [0])

    def __len__(self) -> int:
        return len(self._requests) + len(self._outside)

    def add(self, request: Request, now_ns: int, alone_slack_ns: int | None = None) -> bool:
        """A request arrives; whether it does not wait, but is a batch by itself, which starts now.

        Args:
            request: It.
            now_ns: The time.
            alone_slack_ns: The GPU is free, and this is the slack of other processes' requests; None: it waits.

        Raises:
            QueueFullError: As many wait as may.
            DeadlineError: The request cannot meet its deadline, or only if one of its level or above misses its own.
        """
        if self._last_ns:
            gap_ns = now_ns - self._last_ns
            self._gap_ns = gap_ns if self._gap_ns == NEVER_NS else self._gap_ns + (gap_ns - self._gap_ns) // 16
        else:
            self._taken_ns = now_ns
        self._last_ns = now_ns
        if alone_slack_ns is not None and not self._requests and not self._outside:
            bound_ns, deadline_ns = self.times.bounds_ns[0], request.deadline_ns
            self._alone_deadline_ns[0], self._alone_arrival_ns[0] = deadline_ns, request.arrival_ns
            columns = self._alone_deadline_ns, self._alone_arrival_ns, self.times.bounds_ns
            in_time = deadline_ns == NEVER_NS or now_ns + bound_ns + self._margin_ns <= deadline_ns
            if in_time and self._batching.next(now_ns, *columns, int(self._limit), self._gap_ns, alone_slack_ns)[0]:
                self._busy_until_ns, self._taken_ns = now_ns + bound_ns, now_ns
                return True
        if len(self._requests) < self._max_queue and not self._outside:
            self._insert(request, now_ns)
        elif self._on_full == "delay":
            self._outside.append(request)
        else:
            raise QueueFullError(f"{self._max_queue} requests wait; no more may (max_queue)")
        return False

    def _insert(self, request: Request, now_ns: int) -> None:
        place = self._place(request.key)
        if request.deadline_ns != NEVER_NS and not request.delayed:
            end_ns, displaces = self._batching.admit(
                max(now_ns, self._busy_until_ns),
                self._deadlines_ns,
                self.times.bounds_ns,
                int(self._limit),
                place,
                request.deadline_ns,
                self._place((-request.level, True)),
            )
            if end_ns + self._margin_ns > request.deadline_ns:
                idle = not self._requests and not self._busy_until_ns and now_ns - self._taken_ns >= _DOUBT_NS
                if not idle or now_ns + self._margin_ns > request.deadline_ns:
                    raise request.late(end_ns, "the request cannot meet its deadline")
                self.times.forget()  # else no batch would correct a time that refuses every request
            if displaces:
                raise request.late(end_ns, "the request would make another one late that was accepted before")
        self._requests.insert(place, request)
        self._deadlines_ns.insert(place, NEVER_NS if request.delayed else request.deadline_ns)
        self._arrivals_ns.insert(place, request.arrival_ns)
        waits = request.delayed or self._timeout_ns == NEVER_NS
        self._timeouts_ns.insert(place, NEVER_NS if waits else request.arrival_ns + self._timeout_ns)

    def _place(self, key: tuple[float, ...]) -> int:
        return bisect_left(self._requests, key, key=_key)

    def remove(self, request: Request) -> bool:
        """Whether it waited; it does no more."""
        place = self._place(request.key)
        if place < len(self._requests) and self._requests[place] is request:
            self._delete(place, place + 1)
            return True
        if request in self._outside:
            self._outside.remove(request)
            return True
        return False

    def _delete(self, first: int, last: int) -> None:
        for column in (self._requests, self._deadlines_ns, self._arrivals_ns, self._timeouts_ns):
            del column[first:last]

    def clear(self) -> list[Request]:
        """All that waited; none does any more."""
        everyone = [*self._requests, *self._outside]
        self._delete(0, len(self._requests))
        self._outside.clear()
        return everyone

    def take(
        self, now_ns: int, at_once: bool = False, slack_ns: int = NEVER_NS
    ) -> tuple[list[Request], Refused, int | None]:
        """The GPU is free: the batch that starts now, else when to ask again; None: when a request arrives.

        Args:
            now_ns: The time.
            at_once: Wait for no larger batch.
            slack_ns: Of other processes' requests; NEVER_NS: none, or not known.

        Returns:
            The batch, the requests that wait no longer, each with its error, and when to ask again.
        """
        self._busy_until_ns = 0
        if not self._requests and not self._outside:
            return [], [], None
        refused = self.expire(now_ns)
        while self._outside and len(self._requests) < self._max_queue:
            refused += self._let_in(now_ns) + self.expire(now_ns)
        count, look_ns = self._next(now_ns, self._deadlines_ns, self._arrivals_ns, self._gap_ns, slack_ns)
        if count == 0:
            last_ns = min(self._timeouts_ns, default=NEVER_NS) - self._margin_ns - 1  # rather than let it time out
            if not at_once and now_ns < last_ns:
                return [], refused, None if look_ns is None else min(look_ns, last_ns)
            count = min(len(self._requests), int(self._limit))
        if self._gives_up and count:
            count, late = self._without_late(count, now_ns, slack_ns)
            refused += late
        batch = self._requests[:count]
        if batch:
            self._delete(0, count)
            self._busy_until_ns, self._taken_ns = now_ns + self.times.bound_ns(count), now_ns
        return batch, refused, None

    def _next(
        self, now_ns: int, deadlines_ns: array[int], arrivals_ns: array[int], gap_ns: int, slack_ns: int
    ) -> tuple[int, int | None]:
        """How many of these requests start now; of none, when to ask again."""
        return self._batching.next(
            now_ns, deadlines_ns, arrivals_ns, self.times.bounds_ns, int(self._limit), gap_ns, slack_ns
        )

    def _let_in(self, now_ns: int) -> Refused:
        refused: Refused = []
        while self._outside and len(self._requests) < self._max_queue:
            request = self._outside.popleft()
            try:
                self._insert(request, now_ns)
            except DeadlineError as error:
                refused.append((request, error))
        return refused

    def end(self, count: int, duration_ns: int | None, in_time: bool) -> None:
        """A batch of so many requests has ended.

        Args:
            count: How many.
            duration_ns: How long it took; None: it failed.
            in_time: No request of it was late.
        """
        if duration_ns is not None:
            self.times.record(count, duration_ns)
        if self._aimd:
            self._limit = self._aimd_limit(self._limit, count >= int(self._limit), in_time, self._most)
        self._busy_until_ns = 0

    def expiry_ns(self) -> int:
        """When the next request times out or cannot meet its deadline any more; NEVER_NS: none does."""
        if not self._requests:
            return NEVER_NS
        return min(min(self._timeouts_ns), min(self._deadlines_ns) - self.times.bounds_ns[0] + 1)

    def expire(self, now_ns: int) -> Refused:
        """Rejects or delays requests that have timed out or cannot meet their deadlines any more."""
        if self.expiry_ns() > now_ns:
            return []
        end_ns = now_ns + self.times.bounds_ns[0]
        columns = zip(self._requests, self._timeouts_ns, self._deadlines_ns, strict=True)
        late = [request for request, timeout, deadline in columns if now_ns >= timeout or end_ns > deadline]
        return self._give_up(late, end_ns, now_ns)

    def _without_late(self, count: int, now_ns: int, slack_ns: int) -> tuple[int, Refused]:
        """The batch that has the most requests in time a second: of so many, a smaller one, or one without late ones.

        Where two batches serve all that wait in time, the first of these. Only those of the lowest level in it are left
        out, for none of a lower one: they are given up.

        Returns:
            How many it has, and those that were given up, each with its error.
        """

        def in_time(deadlines_ns: array[int], count: int) -> float:
            taken_ns = self.times.typical_ns(count)
            return sum(each >= now_ns + taken_ns for each in deadlines_ns[:count]) / max(taken_ns, 1)

        def next_of(deadlines_ns: array[int], arrivals_ns: array[int], gap_ns: int) -> int:
            taken, _ = self._next(now_ns, deadlines_ns, arrivals_ns, gap_ns, slack_ns)
            return taken or min(len(deadlines_ns), int(self._limit))

        end_ns = now_ns + self.times.typical_ns(count)
        if min(self._deadlines_ns[:count]) >= end_ns:
            return count, []
        fewer = next_of(self._deadlines_ns, self._arrivals_ns, NEVER_NS)
        first, rest = self._deadlines_ns[:fewer], self._deadlines_ns[fewer:]
        if 0 < len(rest) <= int(self._limit):
            then_ns = now_ns + self.times.bound_ns(fewer)
            if then_ns <= min(first) and then_ns + self.times.bound_ns(len(rest)) <= min(rest):
                return fewer, []
        level = self._requests[count - 1].key[0]
        late = slice(self._place((level,)), self._place((level, False, end_ns)))
        deadlines_ns, arrivals_ns = self._deadlines_ns[:], self._arrivals_ns[:]
        del deadlines_ns[late], arrivals_ns[late]
        not_lower = self._place((level, 2)) - (late.stop - late.start)
        others = min(next_of(deadlines_ns, arrivals_ns, self._gap_ns), not_lower)
        best = max(count, fewer, key=partial(in_time, self._deadlines_ns))  # of equal ones, the first
        if in_time(deadlines_ns, others) > in_time(self._deadlines_ns, best):
            return others, self._give_up(self._requests[late], end_ns, now_ns)
        return best, []

    def _give_up(self, late: list[Request], end_ns: int, now_ns: int) -> Refused:
        """Rejects or delays requests that would end then."""
        refused: Refused = []
        for request in late:
            self.remove(request)
            if self._on_timeout == "delay":
                request.delay()
                self._insert(request, now_ns)
            else:
                refused.append((request, request.late(end_ns, "the request waited for too long")))
        return refused
