"""Listening: addresses that may be had, TLS, connections that say nothing, and the end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from h11 import IDLE
from uvicorn.protocols.http.h11_impl import H11Protocol

from cudasched._text import one_line
from cudasched.errors import ConfigError
from cudasched.observe.prometheus import _why
from cudasched.serve._grpc import grpc_server
from cudasched.serve._guard import Callers, Guard, Limits, hosts_of
from cudasched.serve._http import PUBLIC, application
from cudasched.serve._service import Service

__all__ = ["Server", "is_loopback"]

_HEAD_S = 10.0
_HEAD_BYTES = 16 * 1024
_CONNECTIONS = 128


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Impatient(H11Protocol):
    """Ends connections on which no whole head of a request comes for a while."""

    def connection_made(self, transport: Any) -> None:
        """The connection is there."""
        super().connection_made(transport)
        self._seen: Any = None
        self._watch = self.loop.call_later(_HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        # The same request as at the last look, or none, and no other has begun to be answered.
        if self.conn.their_state is IDLE and self._seen is self.cycle:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(_HEAD_S, self._look)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The signals are the command's."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_CONNECTIONS)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(_why(host, port, error)) from None
    return listening


class Server:
    """Listens over HTTP and, where wanted, gRPC.

    Args:
        service: The operations.
        token: The bearer token.
        host: The address.
        port: 0: any that is free.
        grpc_port: 0: any that is free; None: no gRPC.
        certificate: For TLS, a PEM file with the chain.
        key: Its private key, a PEM file.
        allowed_hosts: Further names of this server.
        limits: What a caller may use.

    Raises:
        ConfigError: The address cannot be had, or certificate and key are none: the message says why.
    """

    def __init__(
        self,
        service: Service,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grpc_port: int | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        allowed_hosts: tuple[str, ...] = (),
        limits: Limits | None = None,
    ) -> None:
        self._service = service
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.scheme = "https" if certificate else "http"
        tls: dict[str, Any] = {}
        if certificate and key:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
                self._pem = (key.read_bytes(), certificate.read_bytes())
            except (OSError, ssl.SSLError) as error:
                self._socket.close()
                raise ConfigError(
                    f"{certificate} and {key} are no certificate and key: {one_line(str(error))}"
                ) from None
            tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        behind: Any = application(service)
        callers = Callers(token, limits, service.wrong_token)
        hosts = hosts_of(host, self.port, allowed_hosts)
        guard = Guard(behind, callers, hosts=hosts, scheme=self.scheme, public=PUBLIC)
        config = uvicorn.Config(
            guard,
            http=_Impatient,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            **tls,
        )
        # What a caller does wrong is answered, and is no event.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._uvicorn = _Uvicorn(config)
        self._grpc: Any = None
        self.grpc_port: int | None = None
        if grpc_port is not None:
            try:
                pem = self._pem if certificate else None
                self._grpc, self.grpc_port = grpc_server(service, callers, host, grpc_port, pem)
            except BaseException:
                self._socket.close()
                raise

    def run(self) -> None:
        """Serves until `stop` is called, or SIGTERM or SIGINT comes to the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        if self._grpc is not None:
            self._grpc.start()
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
        finally:
            if self._grpc is not None:
                self._grpc.stop(grace=1).wait()
            self._socket.close()

    def stop(self) -> None:
        """Ends `run`."""
        self._uvicorn.should_exit = True
