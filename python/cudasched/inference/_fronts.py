"""Processes that carry the protocol for the models of another one.

One interpreter decodes, batches and answers some hundred requests a second, and most of that time is the protocol's. A
front is a process that listens at the address of all fronts, decodes requests, and hands their arrays over a socket to
the process of the models. There, a request costs its batcher's part alone. Each side writes all messages that wait as
one: the answers of a batch wake a front once, and requests that come together may be of one batch.

A front ends with the process of the models. Where a front ends by itself, another takes its place.
"""

from __future__ import annotations

import math
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cudasched.errors import ConfigError, Error
from cudasched.inference._errors import RunError, UseError
from cudasched.inference._kserve import Asked, Models
from cudasched.log import logger

if TYPE_CHECKING:
    from cudasched.serve._server import Server

__all__ = ["Fronts", "Options", "RemoteModels", "server_of"]

_SUBMIT, _CANCEL, _LISTENS = "submit", "cancel", "listens"
_CALLS = frozenset({"server", "known", "metadata", "index", "statistics"})
_READY_S = 120.0
_SHORT_S, _MOST_SHORT = 5.0, 3  # so many fronts in a row that end so soon: a further one would, too
_END_S = 5.0
_GONE = "the process of the models is gone"


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


class _Link:
    """One end of the socket: messages in lists, read by one thread and written by another."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._over = False
        threading.Thread(target=self._write, name="cudasched-front-write", daemon=True).start()

    def send(self, message: Any) -> None:
        """Returns at once. Raises UseError where the other end is gone."""
        if self._over:
            raise UseError(_GONE)
        self._waiting.put(message)

    def read(self, handle: Callable[[list[Any]], None]) -> None:
        """Hands messages over as they come, until the other end is gone."""
        with suppress(EOFError, OSError):
            while True:
                handle(pickle.loads(self._connection.recv_bytes()))
        self.close()

    def close(self) -> None:
        """Ends the writer, too."""
        self._over = True
        self._waiting.put(None)

    def _write(self) -> None:
        with suppress(OSError):
            while True:
                messages = [self._waiting.get()]
                messages += [self._waiting.get() for _ in range(self._waiting.qsize())]  # no other thread takes any
                if None in messages:
                    return
                self._connection.send_bytes(pickle.dumps(messages, 5))
        self.close()


class RemoteModels:
    """In a front: as `Models`, of another process."""

    def __init__(self, connection: Connection) -> None:
        self._link = _Link(connection)
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0

    def read(self) -> None:
        """Takes answers, until the process of the models is gone: all that wait fail then."""
        self._link.read(self._take)
        with self._lock:
            waiting, self._answers = list(self._answers.values()), {}
        for answer in waiting:
            with suppress(InvalidStateError):
                answer.set_exception(UseError(_GONE))

    def listens(self, problem: str) -> None:
        """Says that this front listens, or why it does not."""
        self._link.send((0, _LISTENS, (problem,)))

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
        return [self._ask(_SUBMIT, asked)]

    def outputs(self, asked: Asked, answers: list[Any]) -> Any:
        """The arrays, which the process of the models has made."""
        del asked
        return answers[0]

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            self._count = number = self._count + 1
            self._answers[number] = answer
        self._link.send((number, method, arguments))
        if method == _SUBMIT:
            answer.add_done_callback(partial(self._cancelled, number))
        return answer

    def _cancelled(self, number: int, answer: Future[Any]) -> None:
        if answer.cancelled():
            with self._lock:
                self._answers.pop(number, None)
            with suppress(UseError):
                self._link.send((number, _CANCEL, ()))

    def _take(self, messages: list[tuple[int, Any, Exception | None]]) -> None:
        with self._lock:
            answers = [self._answers.pop(number, None) for number, _, _ in messages]
        for answer, (_, result, error) in zip(answers, messages, strict=True):
            with suppress(InvalidStateError):  # cancelled meanwhile
                if answer is not None and error is not None:
                    answer.set_exception(error)
                elif answer is not None:
                    answer.set_result(result)


class _Served:
    """In the process of the models: the requests of one front."""

    def __init__(self, models: Models, connection: Connection, listens: Callable[[str], None]) -> None:
        self._models, self._listens = models, listens
        self._link = _Link(connection)
        self._running: dict[int, list[Future[Any]]] = {}

    def read(self) -> None:
        """Takes requests until the front is gone; requests that wait then are cancelled."""
        self._link.read(self._take)
        for answers in list(self._running.values()):
            for answer in answers:
                answer.cancel()

    def _take(self, messages: list[tuple[int, str, tuple[Any, ...]]]) -> None:
        submitted = [message for message in messages if message[1] == _SUBMIT]
        with self._models.together({arguments[0].model for _, _, arguments in submitted}):
            for message in submitted:
                self._do(*message)
        for message in messages:  # may lock other batchers, and so wait for other fronts
            if message[1] != _SUBMIT:
                self._do(*message)

    def _do(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method == _CANCEL:
            for answer in self._running.get(number, ()):
                answer.cancel()
        elif method == _LISTENS:
            self._listens(*arguments)
        else:
            try:
                if method == _SUBMIT:
                    self._submit(number, *arguments)
                else:
                    assert method in _CALLS
                    result = getattr(self._models, method)(*arguments)
                    self._say(number, None if method == "known" else result)
            except Exception as error:
                self._refuse(number, error)

    def _submit(self, number: int, asked: Asked) -> None:
        answers = self._models.submit(asked)
        self._running[number] = answers
        left, lock = len(answers), threading.Lock()

        def done(_: Future[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            self._answer(number, asked, answers)

        for answer in answers:
            answer.add_done_callback(done)

    def _answer(self, number: int, asked: Asked, answers: list[Future[Any]]) -> None:
        """On the thread that ran the last row."""
        self._running.pop(number, None)
        try:
            self._say(number, self._models.outputs(asked, [answer.result() for answer in answers]))
        except CancelledError:
            self._say(number, None, UseError("the caller is gone"))
        except Exception as error:
            self._refuse(number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        if not isinstance(error, Error):
            logger.error("a request of the models failed: %r", error)
            error = RunError("the server failed")
        self._say(number, None, error)

    def _say(self, number: int, result: Any, error: Exception | None = None) -> None:
        with suppress(UseError):  # the front is gone
            self._link.send((number, result, error))


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
        self._models = models
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
        self._ended.wait()
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
        connection = Connection(own.detach())
        try:
            if self._ended.is_set():  # meanwhile
                process.terminate()
            with suppress(OSError):
                connection.send(self._options)
            _Served(self._models, connection, listens).read()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        finally:
            connection.close()


def main() -> int:
    """A front: serves what it is told at the other end of the socket whose descriptor is given."""
    connection = Connection(int(sys.argv[1]))
    options = Options(**connection.recv())
    models: Any = RemoteModels(connection)
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
    models.listens("")
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
