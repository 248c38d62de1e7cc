"""Requests of other processes: a front carries the protocol, and others have the models.

One interpreter decodes, batches and answers some hundred requests a second, and most of that time is the protocol's. A
front decodes requests, and hands their arrays over a socket to the process that has the model. There, one thread takes
the requests of all fronts, and those that come together may be of one batch. The thread that ran a batch sends its
answers, one message to each front. `_processes` starts the processes, and connects each front with all of those.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudasched.errors import Error
from cudasched.inference._batcher import Answer, Batcher, Call
from cudasched.inference._errors import RunError, UseError
from cudasched.inference._kserve import Asked, Models, check_known, indexed, server
from cudasched.inference._link import Link, Links, Message, packed, pickled
from cudasched.log import logger

__all__ = ["RemoteModels", "Requests"]

_SUBMIT, _CANCEL = "submit", "cancel"
_CALLS = frozenset({"metadata", "statistics"})
_ANSWER_S = 5.0
_LOST_S = 10.0  # after its connection, a process that has ended is known to have


class _Place(Link):
    """In a front: a process that has models, and the requests to it that have no answer, by their numbers."""

    def __init__(self, links: Links, own: socket.socket) -> None:
        self.answers: dict[int, Future[Any]] = {}
        super().__init__(links, own)


class RemoteModels:
    """In a front: as `Models`, of the processes at the other ends of sockets.

    Args:
        names: Of all models, in their order. One that no socket leads to is not there now.

    Attributes:
        on_lost: Called where the connection to a process has ended, and not the process: nobody connects it again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.on_lost: Callable[[], object] = lambda: None
        self._lost: set[str] = set()  # whose connections have ended; their processes may have, too
        self._links = Links()
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._numbers = itertools.count(1)

    def connect(self, names: Sequence[str], own: socket.socket) -> None:
        """These models are at the other end from here on. Any thread may call this."""
        with self._lock:
            place = _Place(self._links, own)
            self._places = {**self._places, **dict.fromkeys(names, place)}
            self._lost.difference_update(names)

    def drop(self, names: Sequence[str]) -> None:
        """The process of these models is gone, though another one may hold the socket open that it had."""
        with self._lock:
            places = {self._places[name] for name in names if name in self._places}
            self._places = {name: its for name, its in self._places.items() if name not in names}
            self._lost.difference_update(names)
        for place in places:
            place.drop()

    def read(self) -> None:
        """Takes answers, until `close`. Where a process is gone, all that wait for it fail."""
        goes_on = True
        while goes_on:
            messages, gone, goes_on = self._links.read()
            self._take(messages)
            for place in gone:
                with self._lock:
                    lost = {name for name, its in self._places.items() if its is place}
                    self._places = {name: its for name, its in self._places.items() if its is not place}
                    self._lost |= lost
                if lost:
                    look = threading.Timer(_LOST_S, self._look, [lost])
                    look.daemon = True
                    look.start()
                for number in list(place.answers):
                    self._end(place, number, None, UseError(place.why))
        self._links.close()

    def _look(self, lost: set[str]) -> None:
        if not lost.isdisjoint(self._lost):
            self.on_lost()

    def close(self) -> None:
        """Ends `read`."""
        self._links.wake()

    def server(self) -> Any:
        """See `Models`."""
        return server()

    def ready(self) -> bool:
        """See `Models`."""
        return all(name in self._places for name in self._names)

    def known(self, name: str, version: str = "") -> None:
        """Raises _UnknownModelError, and UseError where the model's process is not there."""
        check_known(name, version, self._names)
        self._place(name)

    def metadata(self, name: str, version: str) -> Any:
        """See `Models`."""
        return self._ask(name, "metadata", name, version)

    def index(self) -> Any:
        """See `Models`."""
        return [indexed(name, name in self._places) for name in self._names]

    def statistics(self, name: str, version: str) -> Any:
        """See `Models`. Without a name, of those whose process is there."""
        if name:
            return self._ask(name, "statistics", name, version)
        return [row for each in self._names if each in self._places for row in self.statistics(each, version)]

    def submit(self, asked: Asked) -> list[Future[Any]]:
        """One answer to all rows. An error of the request is the answer's, and is not raised."""
        place = self._place(asked.model)
        about = asked.model, asked.version, tuple(asked.outputs), tuple(asked.parameters.items())
        number = next(self._numbers)
        try:
            parts = packed(number, about, asked.inputs, once=bool(asked.parameters))
        except TypeError:  # a parameter is no number
            parts = None
        answer = self._sent(place, number, parts or pickled(number, (_SUBMIT, (asked,))))
        answer.add_done_callback(partial(self._cancelled, place, number))
        return [answer]

    def outputs(self, asked: Asked, answers: list[Any]) -> Any:
        """The arrays, which the process of the model has made."""
        del asked
        return answers[0]

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            check_known(name, "", self._names)
            raise UseError(f"the process of the model {name} is gone, and starts again")
        return place

    def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        try:
            return self._sent(self._place(name), number, pickled(number, (method, arguments))).result(_ANSWER_S)
        except FutureTimeoutError:
            raise UseError(f"the process of the model {name} does not answer") from None

    def _sent(self, place: _Place, number: int, parts: list[Any]) -> Future[Any]:
        answer = place.answers[number] = Future()
        try:
            place.send(parts)
        except Error:
            place.answers.pop(number, None)  # or all have failed meanwhile
            raise
        return answer

    def _cancelled(self, place: _Place, number: int, answer: Future[Any]) -> None:
        if answer.cancelled() and place.answers.pop(number, None) is not None:
            with suppress(Error):
                place.send(pickled(number, (_CANCEL, ())))

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            result, error = message.about or (dict(message.arrays or ()), None)
            self._end(message.link, message.number, result, error)

    def _end(self, place: _Place, number: int, result: Any, error: Exception | None) -> None:
        answer = place.answers.pop(number, None)
        with suppress(InvalidStateError):  # cancelled meanwhile
            if answer is not None and error is not None:
                answer.set_exception(error)
            elif answer is not None:
                answer.set_result(result)


@dataclass(eq=False)
class _Call(Call):
    """A request of a front.

    Attributes:
        front: It.
        number: The front's.
        asked: Without its inputs.
        batcher: Has it.
        left: So many rows have no answer.
        answers: Of the rows: outputs and errors.
    """

    front: _Front
    number: int
    asked: Asked
    batcher: Batcher
    left: int
    answers: list[tuple[Any, Exception | None]]

    def clear(self) -> None:
        """Its requests refer to it: what it holds would stay until Python's collector comes by."""
        self.requests, self.answers = [], []


class _Front(Link):
    """In a process that has models: a front, and its requests.

    Attributes:
        running: The requests that have no answer, by their numbers.
    """

    def __init__(self, links: Links, own: socket.socket, models: Models) -> None:
        self._models = models
        self.running: dict[int, _Call] = {}
        self._counting = threading.Lock()
        super().__init__(links, own)

    def answer(self, answers: list[Answer]) -> None:
        """See `_batcher.Front`."""
        done = []
        with self._counting:
            for request, output, error in answers:
                call = request.call
                if self.running.get(call.number) is not call:
                    continue  # cancelled meanwhile
                call.answers[request.place] = output, error
                call.left -= 1
                if not call.left:
                    del self.running[call.number]
                    done.append(call)
        self.say([part for call in done for part in self._answer(call)], checked=True)
        for call in done:
            call.clear()

    def say(self, parts: list[Any], checked: bool = False) -> None:
        """Sends messages, as `Link.send`. A front that does not read them is dropped."""
        try:
            if parts:
                self.send(parts, checked)
        except UseError:  # it is gone
            pass
        except Exception as error:
            logger.error("a front of the models takes no answers, and is dropped: %r", error)
            self.drop()

    def _answer(self, call: _Call) -> list[Any]:
        try:
            for _, error in call.answers:
                if error is not None:
                    raise error
            self.check_room()  # else the answer is an error, which is short
            arrays = self._models.outputs(call.asked, [output for output, _ in call.answers])
            return packed(call.number, None, list(arrays.items())) or pickled(call.number, (arrays, None))
        except Exception as error:
            return refused(call.number, error)


def refused(number: int, error: Exception) -> list[Any]:
    """The answer to a request that fails."""
    if not isinstance(error, Error):
        logger.error("a request of the models failed: %r", error)
        error = RunError("the server failed")
    return pickled(number, (None, error))


class Requests:
    """In a process that has models: one thread that takes the requests of all fronts."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._links = Links()
        self._thread = threading.Thread(target=self._read, name="cudasched-fronts", daemon=True)
        self._thread.start()

    def connect(self, own: socket.socket) -> None:
        """A front is at the other end. Any thread may call this."""
        _Front(self._links, own, self._models)

    def close(self) -> None:
        """All fronts are gone."""
        self._links.wake()
        self._thread.join()

    def _read(self) -> None:
        goes_on = True
        while goes_on:
            messages, gone, goes_on = self._links.read()
            self._take(messages)
            for front in gone:
                for number in list(front.running):
                    self._cancel(front, number)
        self._links.close()

    def _take(self, messages: list[Message]) -> None:
        """The requests of a model are submitted together, before others, which may lock other batchers."""
        said: dict[_Front, list[Any]] = {}
        calls: dict[Batcher, list[_Call]] = {}
        others = []
        for front, number, about, arrays in messages:
            try:
                if arrays is not None:
                    model, version, outputs, parameters = about
                    asked = Asked(model, version, arrays, outputs, dict(parameters))
                elif about[0] == _SUBMIT:
                    asked = about[1][0]
                else:
                    others.append((front, number, about))
                    continue
                call = self._call(front, number, asked)
                calls.setdefault(call.batcher, []).append(call)
            except Exception as error:
                said.setdefault(front, []).extend(refused(number, error))
        for batcher, its in calls.items():
            for call, why in batcher._submit_calls(its):
                call.front.running.pop(call.number, None)
                said.setdefault(call.front, []).extend(refused(call.number, why))
        for front, number, about in others:
            said.setdefault(front, []).extend(self._do(front, number, about))
        for front, parts in said.items():
            front.say(parts)

    def _call(self, front: _Front, number: int, asked: Asked) -> _Call:
        batcher, rows, deadline_ms, priority = self._models.checked(asked)
        asked.inputs = ()
        count = len(rows)
        call = _Call(front, rows, deadline_ms, priority, [], number, asked, batcher, count, [(None, None)] * count)
        front.running[number] = call
        return call

    def _do(self, front: _Front, number: int, about: Any) -> list[Any]:
        try:
            method, arguments = about
            if method == _CANCEL:
                self._cancel(front, number)
            else:
                assert method in _CALLS
                return pickled(number, (getattr(self._models, method)(*arguments), None))
        except Exception as error:
            return refused(number, error)
        return []

    def _cancel(self, front: _Front, number: int) -> None:
        with front._counting:
            call = front.running.pop(number, None)
        if call:
            call.batcher._withdraw(call)
            call.clear()
