"""Processes that carry the protocol for the models of another one.

One interpreter decodes, batches and answers some hundred requests a second, and most of that time is the protocol's. A
front is a process that listens at the address of all fronts, decodes requests, and hands their arrays over a socket to
the process of the models. There, one thread takes the requests of all fronts, and those that come together may be of
one batch. The thread that ran a batch sends its answers, one message to each front.

A front ends with the process of the models. Where a front ends by itself, another takes its place.
"""

from __future__ import annotations

import gc
import itertools
import math
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched.errors import ConfigError, Error
from cudasched.inference._batcher import Answer, Batcher, Call
from cudasched.inference._errors import QueueFullError, RunError, UseError
from cudasched.inference._kserve import Asked, Models
from cudasched.inference._link import Link, Links, Message, packed, pickled
from cudasched.log import logger

if TYPE_CHECKING:
    from cudasched.serve._server import Server

__all__ = ["Fronts", "Options", "RemoteModels", "server_of"]

_SUBMIT, _CANCEL, _LISTENS = "submit", "cancel", "listens"
_CALLS = frozenset({"server", "known", "metadata", "index", "statistics"})
_READY_S = 120.0
_SHORT_S, _MOST_SHORT = 5.0, 3  # so many fronts in a row that end so soon: a further one would, too
_END_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class Options:
    """Of a server of models, or of each front: the arguments of `Server`, and files in the place of their contents.

    Attributes:
        host: The address.
        port: Of HTTP; 0: any that is free.
        grpc_port: Likewise; None: no gRPC.
        token_file: Has the token.
        tls_cert: A PEM file; None: no TLS.
        tls_key: A PEM file.
        allowed_hosts: Further names of the server.
        body_bytes: The largest request.
    """

    host: str
    port: int
    grpc_port: int | None
    token_file: Path
    tls_cert: Path | None
    tls_key: Path | None
    allowed_hosts: tuple[str, ...]
    body_bytes: int


def server_of(models: Models, options: Options, shared: bool = False) -> Server:
    """A server of models in this process. Errors as of `Server`.

    Args:
        models: Those of this process, or of another one.
        options: Its options.
        shared: Other processes listen at the same ports.
    """
    from cudasched.inference._kserve_grpc import grpc_server
    from cudasched.inference._kserve_http import PUBLIC, application
    from cudasched.serve._guard import Limits
    from cudasched.serve._secret import token_from
    from cudasched.serve._server import Server

    return Server(
        application(models),
        token_from(options.token_file),
        public=PUBLIC,
        grpc=partial(grpc_server, models, shared=shared),
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
        certificate=options.tls_cert,
        key=options.tls_key,
        allowed_hosts=options.allowed_hosts,
        limits=Limits(body_bytes=options.body_bytes, per_s=math.inf),
        shared=shared,
    )


class RemoteModels:
    """In a front: as `Models`, of the process at the other end of a socket."""

    def __init__(self, own: socket.socket) -> None:
        self._links = Links()
        self._link = Link(self._links, own)
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)

    def read(self) -> None:
        """Takes answers, until the process of the models is gone: all that wait fail then."""
        gone: list[Any] = []
        while not gone:
            messages, gone, _ = self._links.read()
            self._take(messages)
        self._links.close()
        for number in list(self._answers):
            self._end(number, None, UseError("the process of the models is gone"))

    def listens(self, problem: str) -> None:
        """Says that this front listens, or why it does not."""
        self._link.send(pickled(0, (_LISTENS, (problem,))))

    def server(self) -> Any:
        """See `Models`."""
        return self._ask("server").result()

    def known(self, name: str, version: str = "") -> None:
        """Raises _UnknownModelError."""
        self._ask("known", name, version).result()

    def metadata(self, name: str, version: str) -> Any:
        """See `Models`."""
        return self._ask("metadata", name, version).result()

    def index(self) -> Any:
        """See `Models`."""
        return self._ask("index").result()

    def statistics(self, name: str, version: str) -> Any:
        """See `Models`."""
        return self._ask("statistics", name, version).result()

    def submit(self, asked: Asked) -> list[Future[Any]]:
        """One answer to all rows. An error of the request is the answer's, and is not raised."""
        about = asked.model, asked.version, tuple(asked.outputs), tuple(asked.parameters.items())
        number = next(self._numbers)
        try:
            parts = packed(number, about, asked.inputs, once=bool(asked.parameters))
        except TypeError:  # a parameter is no number
            parts = None
        answer = self._sent(number, parts or pickled(number, (_SUBMIT, (asked,))))
        answer.add_done_callback(partial(self._cancelled, number))
        return [answer]

    def outputs(self, asked: Asked, answers: list[Any]) -> Any:
        """The arrays, which the process of the models has made."""
        del asked
        return answers[0]

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        number = next(self._numbers)
        return self._sent(number, pickled(number, (method, arguments)))

    def _sent(self, number: int, parts: list[Any]) -> Future[Any]:
        answer = self._answers[number] = Future()
        try:
            self._link.send(parts)
        except Error:
            self._answers.pop(number, None)  # or all have failed meanwhile
            raise
        return answer

    def _cancelled(self, number: int, answer: Future[Any]) -> None:
        if answer.cancelled() and self._answers.pop(number, None) is not None:
            with suppress(Error):
                self._link.send(pickled(number, (_CANCEL, ())))

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            result, error = message.about or (dict(message.arrays or ()), None)
            self._end(message.number, result, error)

    def _end(self, number: int, result: Any, error: Exception | None) -> None:
        answer = self._answers.pop(number, None)
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
    """In the process of the models: a front, and its requests.

    Attributes:
        listens: Told when it does, or why it does not.
        running: The requests that have no answer, by their numbers.
        ended: The front is gone.
    """

    def __init__(self, links: Links, own: socket.socket, models: Models, listens: Callable[[str], None]) -> None:
        self._models, self.listens = models, listens
        self.running: dict[int, _Call] = {}
        self.ended = threading.Event()
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
        self.say([part for call in done for part in self._answer(call)])
        for call in done:
            call.clear()

    def say(self, parts: list[Any]) -> None:
        """Sends messages. A front that does not read them is dropped."""
        try:
            if parts:
                self.send(parts)
        except UseError:  # it is gone
            pass
        except QueueFullError:
            logger.error("a front of the models does not read its answers, and is dropped")
            self.drop()

    def _answer(self, call: _Call) -> list[Any]:
        try:
            for _, error in call.answers:
                if error is not None:
                    raise error
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
    """In the process of the models: one thread that takes the requests of all fronts."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._links = Links()
        self._thread = threading.Thread(target=self._read, name="cudasched-fronts", daemon=True)
        self._thread.start()

    def serve(self, own: socket.socket, listens: Callable[[str], None]) -> None:
        """Returns when the front at the other end is gone."""
        _Front(self._links, own, self._models, listens).ended.wait()

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
                front.ended.set()
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
            elif method == _LISTENS:
                front.listens(*arguments)
            else:
                assert method in _CALLS
                result = getattr(self._models, method)(*arguments)
                return pickled(number, (None if method == "known" else result, None))
        except Exception as error:
            return refused(number, error)
        return []

    def _cancel(self, front: _Front, number: int) -> None:
        if call := front.running.pop(number, None):
            call.batcher._withdraw(call)
            call.clear()


class Fronts:
    """Fronts of models, each a process. Ports of 0 become those that are taken.

    Args:
        models: Of this process.
        count: How many fronts.
        options: Of each.

    Raises:
        ConfigError: An address cannot be had, or the token.
    """

    def __init__(self, models: Models, count: int, options: Options) -> None:
        from cudasched.serve._secret import token_from
        from cudasched.serve._server import reserved

        token_from(options.token_file)  # made before the fronts read it
        self.scheme = "https" if options.tls_cert else "http"
        self._reserved = [reserved(options.host, options.port)]
        if options.grpc_port is not None:
            self._reserved.append(reserved(options.host, options.grpc_port))
        self.port, *grpc_ports = (int(each.getsockname()[1]) for each in self._reserved)
        self.grpc_port = grpc_ports[0] if grpc_ports else None
        self._options = {**asdict(options), "port": self.port, "grpc_port": self.grpc_port}
        self._ended = threading.Event()
        self._ready = threading.Semaphore(0)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed = ""
        self._threads = [
            threading.Thread(target=self._keep, args=(place,), name=f"cudasched-front-{place}")
            for place in range(count)
        ]
        self._requests = Requests(models)

    def start(self) -> None:
        """Returns when all fronts listen; from here on SIGTERM and SIGINT end `run`, if this is the main thread.

        Raises:
            ConfigError: A front does not listen.
        """
        from cudasched.serve._server import on_signals

        on_signals(self.stop)
        for thread in self._threads:
            thread.start()
        until = time.monotonic() + _READY_S
        for _ in self._threads:
            if not self._ready.acquire(timeout=max(0.0, until - time.monotonic())):
                self._fail(f"a front of the models does not listen within {_READY_S:.0f} s")
        if self._failed:
            self.run()

    def run(self) -> None:
        """Serves until `stop` is called. Raises ConfigError where fronts end by themselves, again and again."""
        while not self._ended.wait(_LOOK_S):  # a signal that another thread got is handled once this one wakes
            pass
        self._join()
        if self._failed:
            raise ConfigError(self._failed)

    def stop(self) -> None:
        """Ends `run`, and all fronts. May be called by a handler of signals."""
        self._ended.set()
        for process in list(self._processes.values()):
            with suppress(OSError):
                process.terminate()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._requests.close()
        for each in self._reserved:
            each.close()

    def _fail(self, problem: str) -> None:
        self._failed = self._failed or problem
        self.stop()

    def _keep(self, place: int) -> None:
        """One front after another."""
        short, listened = 0, False

        def listens(problem: str) -> None:
            nonlocal listened
            if problem:
                self._fail(problem)
            elif not listened:
                listened = True
                self._ready.release()

        while not self._ended.is_set():
            began = time.monotonic()
            self._serve(place, listens)
            if self._ended.is_set():
                break
            short = short + 1 if time.monotonic() - began < _SHORT_S else 0
            if not listened or short == _MOST_SHORT:
                self._fail("a front of the models ends by itself: see its message")
            else:
                logger.warning("a front of the models ended by itself; another takes its place")
        if not listened:
            self._ready.release()

    def _serve(self, place: int, listens: Callable[[str], None]) -> None:
        """One front, to its end."""
        own, other = socket.socketpair()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            try:
                process = self._processes[place] = subprocess.Popen(command, pass_fds=[other.fileno()])
            except OSError as error:
                own.close()
                return self._fail(f"a front of the models cannot be started: {error}")
        if self._ended.is_set():  # meanwhile
            process.terminate()
        with suppress(OSError):
            own.sendall(pickle.dumps(self._options))
        self._requests.serve(own, listens)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """A front: serves what it is told at the other end of the socket whose descriptor is given."""
    own = socket.socket(fileno=int(sys.argv[1]))
    with own.makefile("rb") as first:  # nothing else comes before this end asks
        options = Options(**pickle.load(first))
    models: Any = RemoteModels(own)
    try:
        server = server_of(models, options, shared=True)
    except Error as error:
        models.listens(str(error))
        models.read()
        return 1

    def read() -> None:
        models.read()
        server.stop()

    threading.Thread(target=read, name="cudasched-front-read", daemon=True).start()
    gc.collect()
    gc.freeze()
    models.listens("")
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
