"""Metrics for Prometheus, through ``prometheus-client``.

In a program, its own metrics and those of all others that share its run directory::

    from prometheus_client import start_http_server
    import cudasched.observe.prometheus

    cudasched.observe.prometheus.register()
    start_http_server(9100)

or ``cudasched metrics serve`` beside the programs, which need not know.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cudasched._text import one_line
from cudasched.errors import ConfigError, Error
from cudasched.observe._gpus import with_gpus
from cudasched.observe._metrics import Device, Process, Times, clients
from cudasched.observe.names import BUCKET_LABELS, Exported, Series, cumulative, exports, unique

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

__all__ = ["ClientsCollector", "Server", "binding", "register", "text"]


def _library() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise ConfigError("metrics for Prometheus need prometheus-client: pip install 'cudasched[observe]'") from None
    return prometheus_client.core


def _family(core: Any, exported: Exported, series: Iterator[Series]) -> Metric:
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family: Metric = kinds[exported.kind](exported.name, exported.help, labels=exported.labels)
    name, labels = exported.name, exported.labels
    for each in unique(series):
        if isinstance(each.value, Times):
            own = dict(zip(labels, each.labels, strict=True))
            sums = cumulative(each.value)
            for bound, count in zip(BUCKET_LABELS, sums, strict=True):
                family.add_sample(f"{name}_bucket", {**own, "le": bound}, count)
            family.add_sample(f"{name}_count", own, sums[-1])
            family.add_sample(f"{name}_sum", own, each.value.sum_s)
        else:
            family.add_metric(each.labels, each.value)  # type: ignore[attr-defined]
    return family


def _read(directory: str | os.PathLike[str] | None) -> tuple[list[Device], list[Process], float]:
    """The devices, their clients, and 1 where nothing can be read."""
    try:
        devices, processes = clients(directory)
    except Error:
        return [], [], 1.0
    return with_gpus(devices, processes), processes, 0.0


class ClientsCollector:
    """Reads the client tables at each scrape: every client that shares a run directory with this process.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._core = _library()
        self._directory = directory

    def describe(self) -> list[Metric]:
        """The exported metrics, without values."""
        return [_family(self._core, exported, iter(())) for exported in exports()]

    def collect(self) -> Iterator[Metric]:
        """The tables' present values.

        A client that dies meanwhile is in it or is not; a table that cannot be read is 0 in
        ``cudasched_gpu_table_readable``.
        """
        begin = time.perf_counter()
        devices, processes, failed = _read(self._directory)
        for exported in exports():
            yield _family(self._core, exported, exported.read(devices, processes))
        for exported, value in zip(_OWN, (failed, time.perf_counter() - begin), strict=True):
            yield self._core.GaugeMetricFamily(exported.name, exported.help, value)


def register(
    registry: CollectorRegistry | None = None, *, directory: str | os.PathLike[str] | None = None
) -> ClientsCollector:
    """Adds every client's metrics to a registry of this program.

    Args:
        registry: prometheus-client's; None: its default one.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        ConfigError: prometheus-client is not installed.
        ValueError: The registry has metrics of these names already.
    """
    collector = ClientsCollector(directory)
    chosen = registry if registry is not None else _library().REGISTRY
    chosen.register(collector)
    return collector


_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _lines(exported: Exported, series: Iterable[Series]) -> Iterator[str]:
    name = exported.name + ("_total" if exported.kind == "counter" else "")
    yield f"# HELP {name} {exported.help}"
    yield f"# TYPE {name} {exported.kind}"
    for each in unique(series):
        labels = ",".join(
            f'{label}="{value.translate(_ESCAPED)}"' for label, value in zip(exported.labels, each.labels, strict=True)
        )
        if isinstance(each.value, Times):
            sums = cumulative(each.value)
            for bound, count in zip(BUCKET_LABELS, sums, strict=True):
                yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
            yield f"{name}_count{{{labels}}} {sums[-1]}"
            yield f"{name}_sum{{{labels}}} {each.value.sum_s!r}"
        else:
            yield f"{name}{{{labels}}} {each.value!r}"


_OWN = (
    Exported(
        "cudasched_scrape_failed",
        "gauge",
        "",
        "1 where nothing could be read, as cudasched is not built or not whole.",
        (),
        lambda *_: iter(()),
    ),
    Exported(
        "cudasched_scrape_duration_seconds",
        "gauge",
        "seconds",
        "Time to read all tables.",
        (),
        lambda *_: iter(()),
    ),
)


def text(directory: str | os.PathLike[str] | None = None) -> str:
    """A scrape's answer, in Prometheus's text format: as prometheus-client's, in a third of the time.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.
    """
    begin = time.perf_counter()
    devices, processes, failed = _read(directory)
    lines: list[str] = []
    for exported in exports():
        lines += _lines(exported, exported.read(devices, processes))
    for exported, value in zip(_OWN, (failed, time.perf_counter() - begin), strict=True):
        lines += [*_lines(exported, ()), f"{exported.name} {value!r}"]
    return "\n".join(lines) + "\n"


_REQUEST_S = 10.0
_MOST_CONNECTIONS = 64


class _Quiet(WSGIRequestHandler):
    """No line for each scrape; and a client that says nothing, or a byte now and then, is not waited for."""

    timeout = _REQUEST_S

    def setup(self) -> None:
        """The connection ends after a while, at any state."""
        super().setup()
        self._end = threading.Timer(_REQUEST_S, self._shut)
        self._end.daemon = True
        self._end.start()

    def finish(self) -> None:
        """The request was answered, or not."""
        self._end.cancel()
        super().finish()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


class Server:
    """An HTTP server of the metrics at ``/metrics``, on a thread of its own.

    Args:
        host: The address to listen on.
        port: 0: any that is free.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Raises:
        ConfigError: The address cannot be had: the message says why.
    """

    def __init__(self, host: str, port: int, directory: str | os.PathLike[str] | None = None) -> None:
        def application(environment: dict[str, Any], start: Any) -> Iterable[bytes]:
            if environment.get("REQUEST_METHOD") not in ("GET", "HEAD"):
                start("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
                return [b""]
            if environment.get("PATH_INFO") not in ("/metrics", "/"):
                start("404 Not Found", [("Content-Type", "text/plain"), ("Content-Length", "9")])
                return [b"/metrics\n"]
            found = text(directory).encode()
            kind = "text/plain; version=0.0.4; charset=utf-8"
            start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(found)))])
            return [found] if environment["REQUEST_METHOD"] == "GET" else []

        waiting: deque[socket.socket] = deque()

        class Listening(ThreadingMixIn, WSGIServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            request_queue_size = 2 * _MOST_CONNECTIONS  # else a scrape beside silent ones connects seconds later

            def process_request(self, request: Any, client_address: Any) -> None:
                """Where there are too many connections, the oldest gives way."""
                waiting.append(request)
                if len(waiting) > _MOST_CONNECTIONS:
                    with contextlib.suppress(OSError):
                        waiting.popleft().shutdown(socket.SHUT_RDWR)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                """A connection is over."""
                with contextlib.suppress(ValueError):
                    waiting.remove(request)
                super().shutdown_request(request)

            def handle_error(self, request: object, client_address: object) -> None:
                """A scraper that goes away in the middle is no event."""

        with binding(host, port):
            self._server = Listening((host, port), _Quiet)
        self._server.set_app(application)
        self.host, self.port = host, self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="cudasched-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def binding(host: str, port: int, option: str = "--port") -> Iterator[None]:
    """Wherein a socket is bound.

    Args:
        host: The address; an empty one, which sockets take for all addresses, is refused.
        port: The port.
        option: The command's, by which another one is chosen.

    Raises:
        ConfigError: The address cannot be had: the message says why.
    """
    try:
        if not host.encode("idna"):
            raise UnicodeError
        yield
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(_why(host, port, error, option)) from None


def _why(host: str, port: int, error: Exception, option: str) -> str:
    number = error.errno if isinstance(error, OSError) else None
    where = f"{host} port {port}"
    if number == errno.EADDRINUSE:
        return f"{where} is in use by another program: choose another with {option}, or end that program"
    if number in (errno.EACCES, errno.EPERM):
        return f"{where} may not be listened on by this user: choose a port from 1024 on with {option}"
    if isinstance(error, (socket.gaierror, UnicodeError)) or number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        named = host or "an empty text"
        return f"{named} is no address of this machine: choose 127.0.0.1, 0.0.0.0 or one of its own"
    return f"{where} cannot be listened on: {one_line(str(error))}"
