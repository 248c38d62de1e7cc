"""`cudasched metrics`: the counters of every client on this machine, once or for Prometheus."""

from __future__ import annotations

import signal
import sys
import threading
from importlib import resources
from typing import Annotated

import typer

from cudasched.cli.run import configure

__all__ = ["app"]

DEFAULT_PORT = 9464
"""The port of OpenTelemetry's exporters for Prometheus."""

app = typer.Typer(
    name="metrics",
    help="The counts of every client on this machine, for Prometheus (docs/metrics.md).",
    no_args_is_help=True,
)


@app.command(epilog="Example: cudasched metrics serve --port 9464")
def serve(
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; 0.0.0.0 is all of them, for every host."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free, which is said.")] = DEFAULT_PORT,
) -> int:
    """Serve the metrics of every client that shares the run directory at /metrics until Ctrl-C or SIGTERM."""
    configure()
    from cudasched.observe.prometheus import Server

    server = Server(host, port)
    shown = f"[{host}]" if ":" in host else host
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(f"cudasched: metrics at http://{shown}:{server.port}/metrics", file=sys.stderr, flush=True)
    try:
        ended.wait()
    finally:
        server.close()
    return 0


@app.command(epilog="Example: cudasched metrics show | grep slo")
def show() -> int:
    """Print the metrics once, in Prometheus's text format."""
    configure()
    from cudasched.observe.prometheus import text

    print(text(), end="")
    return 0


@app.command(epilog="Example: cudasched metrics dashboard > cudasched.json")
def dashboard() -> int:
    """Print a dashboard for Grafana, to be imported there."""
    return _printed("dashboard.json")


@app.command(epilog="Example: cudasched metrics alerts > /etc/prometheus/cudasched.yaml")
def alerts() -> int:
    """Print alerts for Prometheus, a file of rules."""
    return _printed("alerts.yaml")


def _printed(name: str) -> int:
    print(resources.files("cudasched.observe").joinpath(name).read_text(encoding="utf-8"), end="")
    return 0
