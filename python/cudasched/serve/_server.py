"""Listening: addresses that may be had, TLS, connections that say nothing, and the end by a signal.

Where there are too many connections, those that have not sent the token give way to newer ones, the oldest first. So
callers that merely connect do not shut out those with the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cudasched._text import one_line
from cudasched.errors import ConfigError
from cudasched.log import logger
from cudasched.observe.prometheus import binding
from cudasched.serve import _admission
from cudasched.serve._guard import Application, Callers, Guard, Limits, Receive, Scope, Send, hosts_of

__all__ = ["Server", "is_loopback", "on_signals", "reserved"]

_HEAD_S = 10.0
_HEAD_BYTES = 16 * 1024
_BACKLOG = 128
_AT_ONCE = 16  # are accepted before one that is there is looked at, or ends
_MOST_CONNECTIONS = 1024
_DESCRIPTORS = 4096
_SAID_EVERY_S = 60.0
_ACKNOWLEDGED = slice(120, 128)  # tcpi_bytes_acked of struct tcp_info


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connections() -> int:
    """How many connections HTTP and gRPC may each have: a quarter of the descriptors, more of which are taken first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(soft // 4, _MOST_CONNECTIONS))


class _Waiting:
    """Connections that have not sent the token, the oldest first. For the event loop's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[Any, socket.socket] = {}

    def add(self, peer: Any, connection: socket.socket) -> None:
        """One was accepted."""
        self._sockets[peer] = connection
        if len(self._sockets) > self._most:
            self.give_way()

    def remove(self, peer: Any) -> None:
        """One has sent the token, or is gone."""
        self._sockets.pop(peer, None)

    def give_way(self) -> None:
        """Ends the oldest."""
        for peer in list(self._sockets)[: max(1, self._most // 16)]:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._sockets.pop(peer).shutdown(socket.SHUT_RDWR)


class _Listening(socket.socket):
    """Notes whom it accepts, before a handshake of TLS has begun."""

    waiting: _Waiting

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        try:
            connection, peer = super().accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self.waiting.give_way()
            raise
        self.waiting.add(peer, connection)
        return connection, peer


_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class _Impatient(HttpToolsProtocol):
    """Ends connections on which no whole head of a request comes for a while, or only after too many bytes."""

    waiting: _Waiting
    callers: Callers
    _has_token = False
    _unread_bytes = 0  # since a head, a part of a body, or its end came: the parser itself has no limit

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")
        if not self._has_token and self.cycle is not None:
            given = [value for name, value in self.cycle.scope["headers"] if name == b"authorization"]
            if self.callers.knows(given):
                self._has_token = True
                self.waiting.remove(self._peer)

    def on_headers_complete(self) -> None:
        """A whole head has come."""
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of the body has come."""
        self._unread_bytes = 0
        super().on_message_complete()
        self._hold(True)

    def on_response_complete(self) -> None:
        """The answer has been written."""
        super().on_response_complete()
        self._hold(False)

    def _hold(self, held: bool) -> None:
        """Head and body of an answer go in one packet, for which the caller wakes once."""
        with contextlib.suppress(OSError):  # closed meanwhile
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, held)

    def connection_made(self, transport: Any) -> None:
        """The connection is there."""
        super().connection_made(transport)
        self._peer = transport.get_extra_info("peername")
        self._seen: tuple[Any, bytes] = None, b""
        self._watch = self.loop.call_later(_HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._watch.cancel()
        self.waiting.remove(self._peer)
        super().connection_lost(exc)

    def _acknowledged(self) -> bytes:
        """Bytes of answers that the caller's system has; empty where the kernel does not count them."""
        try:
            info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile
            return b""
        return bytes(info[_ACKNOWLEDGED])

    def _look(self) -> None:
        # The same request as at the last look, or none, no other has begun to be answered, and no more has been read.
        seen = self.cycle, b"" if self.cycle is None else self._acknowledged()
        if (self.cycle is None or self.cycle.response_complete) and self._seen == seen:
            self.transport.abort()
            return
        self._seen = seen
        self._watch = self.loop.call_later(_HEAD_S, self._look)


class _Uvicorn(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; so many may wait to be accepted as without the limit of those that are accepted at once."""
        await super().startup(sockets=sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The signals are the command's."""
        yield


def on_signals(stop: Callable[[], None]) -> None:
    """Has SIGTERM and SIGINT call `stop`, where this is the main thread. A second SIGINT ends the process at once."""

    def on_signal(number: int, _: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)


def _bound(host: str, port: int, *options: int, named: str = "--port") -> _Listening:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = _Listening(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks: no delay by Nagle
    try:
        with binding(host, port, named):
            for option in options:
                bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind((host, port))
    except ConfigError:
        bound.close()
        raise
    return bound


def reserved(host: str, port: int, named: str = "--port") -> socket.socket:
    """A socket by which a port is this user's, and at which processes of this user may listen together.

    Args:
        host: The address.
        port: 0: any that is free.
        named: The port's option, for the message.

    Raises:
        ConfigError: The address cannot be had: the message says why. Another program may listen there, or reserve it.
    """
    # Two programs do not share a port by mistake: without SO_REUSEADDR, a socket that does not listen shuts others out.
    _bound(host, port, socket.SO_REUSEADDR, named=named).close()
    return _bound(host, port, socket.SO_REUSEPORT, named=named)


def _no_pass_phrase() -> str:
    """In the place of a question on the terminal: a service has none."""
    raise OSError("the key is encrypted: give one without a pass phrase (openssl pkey -in KEY -out FILE)")


def _with_admission(
    other: Application, admission: Application, token: str, hosts: frozenset[str], scheme: str
) -> Application:
    """The admission webhook in front of the rest. Its caller is the API server, which has no token and sends much."""
    limits = Limits(body_bytes=_admission.BODY_BYTES, per_s=500, burst=1000)
    public = frozenset({_admission.PATH})
    webhook = Guard(admission, Callers(token, limits), hosts=hosts, scheme=scheme, public=public)

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        await (webhook if scope.get("path") == _admission.PATH else other)(scope, receive, send)

    return choose


class Server:
    """Listens over HTTP and, where wanted, gRPC.

    Args:
        application: The operations over HTTP, an ASGI application.
        token: The bearer token.
        public: Paths that need no token.
        wrong_token: Told of each wrong token, with the caller's address.
        grpc: Makes the server for gRPC, of callers, address, port, key and certificate, and the most connections.
        host: The address.
        port: 0: any that is free.
        grpc_port: 0: any that is free; None: no gRPC.
        certificate: For TLS, a PEM file with the chain.
        key: The certificate's private key, a PEM file.
        allowed_hosts: Further names of this server.
        limits: A caller's limits.
        admission: Kubernetes's admission webhook, an ASGI application; None: there is none.
        shared: Other processes listen at the same port, which is `reserved`.

    Raises:
        ConfigError: The address cannot be had, or certificate and key are none: the message says why.
    """

    def __init__(
        self,
        application: Any,
        token: str,
        *,
        public: frozenset[str] = frozenset(),
        wrong_token: Callable[[str], None] = lambda address: None,
        grpc: Callable[[Callers, str, int, tuple[bytes, bytes] | None, int], tuple[Any, int]] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        grpc_port: int | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        allowed_hosts: tuple[str, ...] = (),
        limits: Limits | None = None,
        admission: Any = None,
        shared: bool = False,
    ) -> None:
        self._socket = _bound(host, port, socket.SO_REUSEADDR, *[socket.SO_REUSEPORT] * shared)
        self._socket.listen(_BACKLOG)
        # For the connections: what stays of them keeps no server from sharing the port later.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port = int(self._socket.getsockname()[1])
        self.scheme = "https" if certificate else "http"
        tls: dict[str, Any] = {}
        if certificate and key:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _no_pass_phrase)
                self._pem = (key.read_bytes(), certificate.read_bytes())
            except (OSError, ssl.SSLError) as error:
                self._socket.close()
                raise ConfigError(
                    f"{certificate} and {key} are no certificate and key: {one_line(str(error))}"
                ) from None
            tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        callers = Callers(token, limits, wrong_token)
        hosts = hosts_of(host, self.port, allowed_hosts)
        guard: Application = Guard(application, callers, hosts=hosts, scheme=self.scheme, public=public)
        if admission is not None:
            guard = _with_admission(guard, admission, token, hosts, self.scheme)
        connections = _connections()
        waiting = self._socket.waiting = _Waiting(connections)
        config = uvicorn.Config(
            guard,
            http=type("_Protocol", (_Impatient,), {"waiting": waiting, "callers": callers}),
            backlog=_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
            **tls,
        )
        # A caller's error is answered, and is no event.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._uvicorn = _Uvicorn(config)
        self._grpc: Any = None
        self.grpc_port: int | None = None
        if grpc is not None and grpc_port is not None:
            try:
                pem = self._pem if certificate else None
                self._grpc, self.grpc_port = grpc(callers, host, grpc_port, pem, connections)
            except BaseException:
                self._socket.close()
                raise

    def run(self) -> None:
        """Serves until `stop` is called, or SIGTERM or SIGINT comes to the main thread."""
        on_signals(self.stop)
        if self._grpc is not None:
            self._grpc.start()
        try:
            asyncio.run(self._serve())
        finally:
            if self._grpc is not None:
                self._grpc.stop(grace=1).wait()
            self._socket.close()

    async def _serve(self) -> None:
        said_at = -math.inf

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """Where descriptors are used up, each attempt to accept fails: a line a minute, not one for each."""
            nonlocal said_at
            error = context.get("exception")
            if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTORS:
                loop.default_exception_handler(context)
            elif time.monotonic() - said_at > _SAID_EVERY_S:
                said_at = time.monotonic()
                logger.warning("no connection can be accepted: %s (ulimit -n)", error.strerror)

        asyncio.get_running_loop().set_exception_handler(failed)
        await self._uvicorn.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Ends `run`."""
        self._uvicorn.should_exit = True
