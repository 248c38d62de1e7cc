"""Odd input for what other people reach or write: ``python -m tests.soak.mutations [--count N] [--out FILE]``.

Damaged files of each kind that a tool reads (benchmarks/hardening/damage.py), and odd connections and heads of requests
for a `cudasched serve` that runs. A file ends in an answer or in one of cudasched's errors; the server answers an odd
request with a refusal or ends its connection, and goes on answering who has the token. Its P99 is measured beside 500
connections of another user that say nothing.

Prints what was run and what failed of each kind, as JSON. Exit code 0: nothing failed. ``--out`` puts the figures into
a results file; ``--with`` adds the counts of another program in the form that this one prints, for one figure over all.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cudasched import hook

from benchmarks.hardening import damage
from benchmarks.meta import command_line, current_commit
from benchmarks.results.schema import FigureRow, Meta, merge_figures

KINDS = ("parquet", "spaces", "space_recordings", "databases", "tokens", "layers")
PATIENCE_S = 30.0
IDLE_CONNECTIONS = 500
REQUESTS = 240
PER_S = 16  # fewer than a caller may send

_HOLD = """
import encodings.idna, os, socket, sys, time
port, wanted, end = int(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
if os.geteuid() == 0:
    os.setuid(65534)
held = []
while time.monotonic() < end:
    for one in held[:]:
        try:
            if one.recv(1) == b"": held.remove(one)
        except BlockingIOError: pass
        except OSError: held.remove(one)
    try:
        while len(held) < wanted:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=2)); held[-1].setblocking(False)
    except OSError: pass
    print(len(held), flush=True); time.sleep(0.2)
"""


class Server:
    """A `cudasched serve` over the simulated driver.

    Attributes:
        port: Of HTTP.
    """

    def __init__(self, process: subprocess.Popen[str], token: Path) -> None:
        assert process.stderr is not None
        self._process = process
        first = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", first)
        assert found, first + process.stderr.read()
        process.stderr.readline()
        self.port, self._token = int(found[1]), token.read_text().strip()

    def head(self, **more: str) -> dict[str, str]:
        """Headers of a request with the token."""
        return {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {self._token}", **more}

    def answers(self) -> float:
        """How long a request with the token takes, ms; it is answered."""
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/api/v1/clients", headers=self.head())
            status = connection.getresponse().status
        finally:
            connection.close()
        if status != 200:
            raise AssertionError(f"the token's holder got {status}")
        return 1e3 * (time.perf_counter() - begin)

    def sent(self, data: bytes) -> str:
        """What is wrong with the answer to some bytes; empty: nothing."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            got = b""
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    got += part
        if self._process.poll() is not None:
            raise AssertionError(f"the server ended with {self._process.returncode}")
        status = got.split(b" ", 2)[1:2]
        return f"answered {got[:60]!r}" if status and status[0][:1] not in (b"2", b"4") else ""

    def said(self) -> str:
        """All that it has said since; it is over then."""
        assert self._process.stderr is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.stderr.read()


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """A server with a run directory and a state of its own."""
    (directory / "device").mkdir(mode=0o700)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDASCHED_")},
        "CUDASCHED_DRIVER": str(hook.locate().simulated_driver),
        "CUDASCHED_SIM_DIR": str(directory / "device"),
        "CUDASCHED_RUN_DIR": str(directory / "run"),
        "HOME": str(directory),
    }
    token = directory / "serve.token"
    command = [sys.executable, "-m", "cudasched", "serve", "--port", "0", "--token-file", str(token)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Server(process, token)
        finally:
            process.kill()


_VALUES = (
    "",
    " ",
    "0",
    "-1",
    "9" * 400,
    "é",
    "\x00",
    "a\tb",
    "chunked",
    "Bearer",
    "Bearer ",
    "null",
    "x" * 9000,
    "*",
    "%",
)
_NAMES = (
    "Host",
    "Authorization",
    "Origin",
    "Content-Length",
    "Transfer-Encoding",
    "Content-Type",
    "Connection",
    "Expect",
)


def odd_head(chance: random.Random, server: Server) -> bytes:
    """A request with the token, some of whose headers are odd, missing or there twice."""
    headers = list(server.head(**{"Content-Type": "application/json", "Content-Length": "2"}).items())
    for _ in range(chance.choice((1, 1, 2, 4))):
        name, value = chance.choice(_NAMES), chance.choice(_VALUES)
        what = chance.randrange(4)
        if what == 0:
            headers.append((name, value))
        elif what == 1:
            headers = [(one, value if one == name else kept) for one, kept in headers]
        elif what == 2:
            headers.pop(chance.randrange(len(headers) or 1)) if headers else None
        else:
            headers.append((chance.choice(_VALUES), value))
    method = chance.choice(("GET", "PATCH", "POST", "HEAD", "PUT", "OPTIONS", "BREW"))
    path = chance.choice(
        ("/", "/api/v1/clients", "/api/v1/clients/" + "1" * 16, "/api/v1/usage?after=x", "//", "/%00", "*")
    )
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", "{}"]
    return "\r\n".join(lines).encode("utf-8")


def odd_connection(chance: random.Random, server: Server) -> bytes:
    """Bytes that may be no HTTP at all."""
    lines = [f"{name}: {value}" for name, value in server.head().items()]
    whole = "\r\n".join(["GET /api/v1/usage HTTP/1.1", *lines, "", ""]).encode()
    return damage.mutate(chance, whole)


def requests(server: Server, count: int) -> dict[str, dict[str, int]]:
    """Odd requests, at a rate that is allowed; after each fifty the token's holder is answered."""
    counts = {}
    for kind, make in (("connections", odd_connection), ("headers", odd_head)):
        failed = 0
        for number in range(count):
            wrong = server.sent(make(random.Random(number), server))
            time.sleep(1 / PER_S)  # else they would be refused for coming too often
            if wrong:
                failed += 1
                print(f"{kind} {number}: {wrong}", file=sys.stderr)
            if number % 50 == 49:
                server.answers()
        counts[kind] = {"run": count, "failed": failed}
    return counts


def p99_ms(server: Server) -> float:
    """Of requests with the token, at a rate that is allowed."""
    times = []
    for _ in range(REQUESTS):
        times.append(server.answers())
        time.sleep(max(0.0, 1 / PER_S - times[-1] / 1e3))
    return statistics.quantiles(times, n=100)[98]


def under_attack(server: Server, turns: int) -> list[float]:
    """P99 beside connections of another user that say nothing over P99 without them, of each pair of turns."""
    ratios = []
    for _ in range(turns):
        alone = p99_ms(server)
        seconds = 3 * REQUESTS / PER_S
        command = [sys.executable, "-c", _HOLD, str(server.port), str(IDLE_CONNECTIONS), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            while int(holder.stdout.readline()) < IDLE_CONNECTIONS:
                pass
            ratios.append(p99_ms(server) / alone)
            holder.kill()
        time.sleep(1)
    return ratios


def figure(name: str, value: float, goal: float, better: str, n: int, spread: tuple[float, float]) -> FigureRow:
    """One row."""
    return FigureRow.judged(
        figure=name,
        value=value,
        goal=goal,
        better="less" if better == "less" else "more",
        low=spread[0],
        high=spread[1],
        n=n,
    )


def main() -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--turns", type=int, default=3, help="pairs of turns of the attack; 0: none")
    parser.add_argument("--with", dest="others", type=Path, nargs="*", default=[], help="counts of other programs")
    parser.add_argument("--out", type=Path, help="a results file, into which the figures go")
    options = parser.parse_args()
    counts: dict[str, dict[str, int]] = {}
    for path in options.others:
        counts |= json.loads(path.read_text())["counts"]
    for kind in KINDS:
        failed, said = damage.run(kind, options.count)
        print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
        counts[kind] = {"run": options.count, "failed": failed}
    with tempfile.TemporaryDirectory(prefix="cudasched-mutations-") as scratch, serving(Path(scratch)) as server:
        counts |= requests(server, options.count)
        ratios = under_attack(server, options.turns)
        said_by_server = server.said()
    if said_by_server:
        counts["connections"]["failed"] += 1
        print(f"the server said: {said_by_server[:2000]}", file=sys.stderr)
    failed, least = sum(one["failed"] for one in counts.values()), min(one["run"] for one in counts.values())
    print(json.dumps({"counts": counts, "serve_p99_under_attack_ratio": ratios}, indent=1))
    if options.out:
        total = sum(one["run"] for one in counts.values())
        most = max(one["run"] for one in counts.values())
        rows = [
            figure("mutations_failed", failed, 0, "less", total, (failed, failed)),
            figure("mutations_run", least, 1000, "more", len(counts), (least, most)),
        ]
        if ratios:
            spread = min(ratios), max(ratios)
            value = statistics.median(ratios)
            rows.append(figure("serve_p99_under_attack_ratio", value, 2, "less", len(ratios), spread))
        meta = Meta(
            gpu="none",
            driver=None,
            cuda=None,
            torch=None,
            python=platform.python_version(),
            commit=current_commit(),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            sm_clock_mhz=None,
            command=command_line(),
        )
        merge_figures(options.out, meta, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
