"""The processes of a server of models: fronts, and one for each model that is made by a function.

The first process starts the others, and connects each front with each process that has models: it hands both ends of a
socket over, by the socket on which it controls the process at each end. It has the models that are batchers in the file
itself. A process that ends by itself is replaced, and connected again; all end with the first.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._life import end_with
from cudasched.errors import ConfigError, Error
from cudasched.inference import Batcher
from cudasched.inference._file import made
from cudasched.inference._fronts import RemoteModels, Requests
from cudasched.inference._kserve import Models
from cudasched.log import logger

if TYPE_CHECKING:
    from cudasched.serve._server import Server

__all__ = ["Options", "Processes", "server_of"]

_LINK, _GONE, _SERVE, _MODEL = "link", "gone", "serve", "model"
_READY_S = 120.0
_SHORT_S, _MOST_SHORT = 5.0, 3  # so many in a row that end so soon: a further one would, too
_LONGEST_S = 30.0  # between two of a model that ends again and again; and from `stop` to the end
_LOOK_S = 0.5
_MESSAGE_BYTES = 1 << 16
_PROBLEM_LENGTH = 4000


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
        models: Those of this process, or of others.
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


class _Process:
    """Another process, and the socket that controls it: it ends when that does.

    Attributes:
        model: Its model; empty: it is a front.
        serves: Requests may come.
    """

    def __init__(self, model: str) -> None:
        self.model, self.serves = model, False
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            try:
                # A session of its own: the terminal's Ctrl-C is the first process's, also while this one imports.
                self._process = subprocess.Popen(command, pass_fds=[other.fileno()], start_new_session=True)
            except OSError:
                self._control.close()
                raise

    def tell(self, kind: str, *about: Any, own: socket.socket | None = None) -> None:
        """A process that is gone hears nothing: its keeper finds that. The socket is closed here."""
        with suppress(OSError), own or nullcontext():
            sent = [] if own is None else [own.fileno()]
            socket.send_fds(self._control, [pickle.dumps((kind, about))], sent)

    def hear(self) -> str | None:
        """Waits for what it says: why it does not serve, or nothing, if it does; None: it is gone."""
        try:
            said = self._control.recv(_MESSAGE_BYTES)
        except OSError:
            return None
        return str(pickle.loads(said)) if said else None

    def end(self, at_once: bool = False) -> None:
        """Has it end, with answers to all that it has accepted, or at once."""
        with suppress(OSError):
            if self.serves and not at_once:
                self._control.shutdown(socket.SHUT_WR)
            else:
                self._process.kill()

    def wait(self) -> None:
        """Returns when it has ended. Its control may live on, in a process that it forked."""
        self._process.wait()
        self._control.close()


class Processes:
    """A server of models in several processes. Ports of 0 become those that are taken.

    Args:
        file: Has the models.
        models: Batchers, which are of this process, or functions that make one, each in a process of its own.
        count: How many fronts.
        options: Of each.

    Raises:
        ConfigError: An address cannot be had, or the token.
    """

    def __init__(self, file: Path, models: Mapping[str, Any], count: int, options: Options) -> None:
        from cudasched.serve._secret import token_from
        from cudasched.serve._server import reserved

        token_from(options.token_file)  # made before the fronts read it
        self.scheme = "https" if options.tls_cert else "http"
        self._reserved = [reserved(options.host, options.port)]
        if options.grpc_port is not None:
            self._reserved.append(reserved(options.host, options.grpc_port, "--grpc-port"))
        self.port, *grpc_ports = (int(each.getsockname()[1]) for each in self._reserved)
        self.grpc_port = grpc_ports[0] if grpc_ports else None
        self._options = replace(options, port=self.port, grpc_port=self.grpc_port)
        self._file, self._names = str(file.absolute()), list(models)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._problem = ""
        self._running: set[_Process] = set()
        own = any(isinstance(each, Batcher) for each in models.values())
        self._requests = Requests(Models(models)) if own else None
        self._models, self._fronts = (
            [threading.Thread(target=self._keep, args=(model,), name=f"cudasched-{model or 'front'}") for model in each]
            for each in ([] if own else self._names, [""] * count)
        )

    def start(self) -> bool:
        """Whether all fronts listen; not where `stop` was called, which SIGTERM and SIGINT do in the main thread.

        Raises:
            ConfigError: A front does not listen, or a model cannot be made.
        """
        from cudasched.serve._server import on_signals

        on_signals(self.stop)
        self._begin(self._models, math.inf)
        self._begin(self._fronts, _READY_S)
        if self._problem:
            self.run()
        return not self._ended.is_set()

    def _begin(self, keepers: Sequence[threading.Thread], limit_s: float) -> None:
        """Returns when the processes of these, too, serve."""
        needed = len(self._serving()) + len(keepers)
        until = time.monotonic() + limit_s
        for keeper in keepers:
            keeper.start()
        while len(self._serving()) < needed and not self._ended.wait(_LOOK_S / 10):
            if time.monotonic() > until:
                self._fail(f"a front of the models does not listen within {limit_s:.0f} s")

    def run(self) -> None:
        """Serves until `stop` is called. Raises ConfigError where fronts end by themselves, again and again."""
        while not self._ended.wait(_LOOK_S):  # a signal that another thread got is handled once this one wakes
            pass
        for keepers, fronts in ((self._fronts, True), (self._models, False)):
            self._end(fronts)
            until = time.monotonic() + _LONGEST_S
            for keeper in (each for each in keepers if each.ident is not None):
                keeper.join(max(until - time.monotonic(), 0.0))
                while keeper.is_alive():  # it is stopped, or a model hangs
                    self._end(fronts, at_once=True)
                    keeper.join(_LOOK_S)
        if self._requests is not None:
            self._requests.close()
        for each in self._reserved:
            each.close()
        if self._problem:
            raise ConfigError(self._problem)

    def stop(self) -> None:
        """Ends `run`. May be called by a handler of signals."""
        self._ended.set()

    def _those(self) -> list[_Process]:
        with self._lock:
            return list(self._running)

    def _end(self, fronts: bool, at_once: bool = False) -> None:
        """The fronts, or those of models."""
        for process in self._those():
            if fronts == (not process.model):
                process.end(at_once)

    def _serving(self) -> list[_Process]:
        return [each for each in self._those() if each.serves]

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._ended.set()

    def _keep(self, model: str) -> None:
        """One process after another: of a model, or of a front."""
        what = f"the process of the model {model}" if model else "a front of the models"
        ever, short = False, 0
        while not self._ended.is_set():
            try:
                process = _Process(model)
            except OSError as error:
                return self._fail(f"{what} cannot be started: {error}")
            served_s, problem = self._serve(process)
            ever = ever or served_s > 0
            if problem and ever and model:
                logger.error("%s", problem)
            elif problem:
                self._fail(problem)
            if self._ended.is_set():
                break
            short = short + 1 if served_s < _SHORT_S else 0
            if not ever or (short == _MOST_SHORT and not model):
                self._fail(f"{what} ends by itself: see its message")
            else:
                logger.warning("%s ended by itself; another takes its place", what)
                self._ended.wait(min(2.0**short - 1, _LONGEST_S) if model else 0)

    def _serve(self, process: _Process) -> tuple[float, str | None]:
        """A process to its end; how long it served, s, and why not."""
        began = math.inf
        with self._lock:
            self._running.add(process)
            if not process.model:
                self._connect_front(process)
        if self._ended.is_set():  # meanwhile
            process.end()
        if process.model:
            process.tell(_MODEL, self._file, process.model)
        else:
            process.tell(_SERVE, self._options, self._names)
        problem = process.hear()
        if problem == "":
            began = time.monotonic()
            with self._lock:
                process.serves = True
                for front in self._fronts_to(process):
                    _connect(process, front)
            if self._ended.is_set():
                process.end()
        process.wait()
        with self._lock:
            self._running.discard(process)
            for front in self._fronts_to(process):
                front.tell(_GONE, [process.model])
        return max(time.monotonic() - began, 0.0), problem

    def _fronts_to(self, process: _Process) -> list[_Process]:
        """Under the lock. None where it is a front itself, or does not serve."""
        return [each for each in self._running if process.model and process.serves and not each.model]

    def _connect_front(self, front: _Process) -> None:
        """With all that have models. Under the lock."""
        if self._requests is not None:
            own, other = socket.socketpair()
            self._requests.connect(own)
            front.tell(_LINK, self._names, own=other)
        for process in self._running:
            if process.model and process.serves:
                _connect(process, front)


def _connect(process: _Process, front: _Process) -> None:
    own, other = socket.socketpair()
    process.tell(_LINK, own=own)
    front.tell(_LINK, [process.model], own=other)


class _Controller:
    """The first process, as another one has it."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._control = socket.socket(fileno=descriptor)

    def hear(self) -> tuple[str, Any, socket.socket | None]:
        """Waits for what it tells: a kind, arguments, and a socket with a link. Raises EOFError when it ends this."""
        data, descriptors, *_ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not data:
            raise EOFError
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        kind, about = pickle.loads(data)
        return kind, about, socket.socket(fileno=descriptors[0]) if descriptors else None

    def links(self, connect: Callable[..., None], drop: Callable[..., None] | None = None) -> None:
        """Connects what it links, and drops what is gone, until it ends this."""
        with suppress(EOFError, OSError):
            while True:
                kind, about, own = self.hear()
                if kind == _LINK:
                    connect(*about, own)
                elif drop is not None:
                    drop(*about)

    def say(self, problem: str) -> None:
        """That this process serves; or why it does not."""
        with suppress(OSError):
            self._control.send(pickle.dumps(problem[:_PROBLEM_LENGTH]))


def _front(controller: _Controller, models: Any, options: Options) -> int:
    try:
        server = server_of(models, options, shared=True)
    except Error as error:
        controller.say(str(error))
        return 1

    def end() -> None:
        logger.error("a connection to a model's process has ended, and the process lives: this front ends")
        server.stop()

    models.on_lost = end

    def follow() -> None:
        controller.links(models.connect, models.drop)
        server.stop()

    for target in (models.read, follow):
        threading.Thread(target=target, name="cudasched-front", daemon=True).start()
    gc.collect()
    gc.freeze()
    controller.say("")
    server.run()
    return 0


def _model(controller: _Controller, file: Path, name: str) -> int:
    own = os.getpid()

    def on_signal(number: int, _: object) -> None:  # to all: the first process ends this one behind the fronts
        if os.getpid() != own:  # a process that the model has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        with made(file, name) as batcher:
            requests = Requests(Models({name: batcher}))
            gc.collect()
            gc.freeze()
            controller.say("")
            controller.links(requests.connect)
            requests.close()
    except Error as error:
        controller.say(f"the model {name}: {error}")
        return 1
    return 0


def main() -> int:
    """A front, or a model: what is told at the other end of the socket whose descriptor is given."""
    controller = _Controller(int(sys.argv[1]))
    links = []
    try:
        while (told := controller.hear())[0] == _LINK:
            links.append((*told[1], told[2]))
    except EOFError:
        return 0
    kind, about, _ = told
    if kind == _MODEL:
        file, name = about
        end_with(int(sys.argv[1]), 0)  # one that hangs, too
        return _model(controller, Path(file), name)
    options, names = about
    models = RemoteModels(names)
    for its, own in links:
        models.connect(its, own)
    return _front(controller, models, options)


if __name__ == "__main__":
    sys.exit(main())
