"""Odd input for what other people reach or write: ``python -m tests.soak.mutations [--count N] [--out FILE]``.

Damaged files of each kind that a tool reads (tests/soak/damage.py), and odd connections and heads of requests
for a `cudasched serve` that runs; regions that a signal's handler interrupts (interrupted_regions.py) and histories of
refused memory calls (refused_memory.py). A file ends in an answer or in one of cudasched's errors; the server answers
an odd request with a refusal or ends its connection, and goes on answering who has the token. Its P99 is measured
beside 500 connections of another user that say nothing.

Prints what was run and what failed of each kind, as JSON. Exit code 0: nothing failed. ``--out`` puts the figures into
a results file; ``--trials`` runs the programs of a directory that check themselves: 0 is right, 77 cannot tell.
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
from typing import Literal

from cudasched import hook

from benchmarks.meta import command_line, current_commit
from benchmarks.results.schema import FigureRow, Meta, merge
from tests.soak import damage

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


def on_a_simulated_gpu(directory: Path) -> dict[str, str]:
    """The environment of a program that has a GPU, a run directory and a state of its own."""
    (directory / "device").mkdir(mode=0o700)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDASCHED_")},
        "CUDASCHED_DRIVER": str(hook.locate().simulated_driver),
        "CUDASCHED_SIM_DIR": str(directory / "device"),
        "CUDASCHED_RUN_DIR": str(directory / "run"),
        "HOME": str(directory),
    }


def by_itself(program: str, count: int, environment: dict[str, str], *run: str) -> dict[str, int]:
    """The two counts that a program of this directory prints; with options of `cudasched run` it runs under that."""
    wrapped = [sys.executable, "-m", "cudasched", "run", *run, "--"] if run else []
    command = [*wrapped, sys.executable, str(Path(__file__).with_name(program)), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise AssertionError(f"{program} ended with {done.returncode}")
    ran, failed = done.stdout.split()
    return {"run": int(ran), "failed": int(failed)}


def trials(directory: Path) -> dict[str, int]:
    """The exit codes of its programs, by their names from there; those in `gpu` need one."""
    codes = {}
    for program in sorted(directory.rglob("[!_]*.py")):
        if program.name != "common.py" and (program.parent.name != "gpu" or Path("/dev/nvidiactl").exists()):
            done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=program.parent)
            codes[str(program.relative_to(directory))] = done.returncode
            if done.returncode not in (0, 77):
                print(f"{program.name} ended with {done.returncode}: {done.stdout[-300:]}", file=sys.stderr)
    return codes


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """A server."""
    token = directory / "serve.token"
    command = [sys.executable, "-m", "cudasched", "serve", "--port", "0", "--token-file", str(token)]
    environment = on_a_simulated_gpu(directory)
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


def figure(name: str, values: list[float], goal: float, n: int, better: Literal["less", "more"] = "less") -> FigureRow:
    """One row: the median where less is better, else the least."""
    value = statistics.median(values) if better == "less" else min(values)
    return FigureRow.judged(name, (value, min(values), max(values), n), (goal, better))


def meta_here() -> Meta:
    """Of figures that need no GPU."""
    return Meta(
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


def main() -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--turns", type=int, default=3, help="pairs of turns of the attack; 0: none")
    parser.add_argument("--trials", type=Path, help="a directory of programs that check themselves")
    parser.add_argument("--out", type=Path, help="a results file, into which the figures go")
    options = parser.parse_args()
    counts: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        failed, said = damage.run(kind, options.count)
        print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
        counts[kind] = {"run": options.count, "failed": failed}
    with tempfile.TemporaryDirectory(prefix="cudasched-mutations-") as scratch:
        environment = on_a_simulated_gpu(Path(scratch))
        counts["signal_regions"] = by_itself("interrupted_regions.py", options.count, environment)
        counts["refused_memory"] = by_itself("refused_memory.py", options.count, environment, "--memory-limit", "1GiB")
    with tempfile.TemporaryDirectory(prefix="cudasched-mutations-") as scratch, serving(Path(scratch)) as server:
        counts |= requests(server, options.count)
        ratios = under_attack(server, options.turns)
        said_by_server = server.said()
    if said_by_server:
        counts["connections"]["failed"] += 1
        print(f"the server said: {said_by_server[:2000]}", file=sys.stderr)
    codes = trials(options.trials.resolve()) if options.trials else {}
    wrong = [name for name, code in codes.items() if code not in (0, 77)]
    failed = sum(one["failed"] for one in counts.values())
    ran: list[float] = [one["run"] for one in counts.values()]
    print(json.dumps({"counts": counts, "serve_p99_under_attack_ratio": ratios, "trials": codes}, indent=1))
    if options.out:
        rows = [
            figure("mutations_failed", [failed], 0, int(sum(ran))),
            figure("mutations_run", ran, 1000, len(ran), better="more"),
            figure("signal_regions_left", [counts["signal_regions"]["failed"]], 0, counts["signal_regions"]["run"]),
        ]
        if ratios:
            rows.append(figure("serve_p99_under_attack_ratio", ratios, 2, len(ratios)))
        if codes:
            told = [name for name, code in codes.items() if code != 77]
            coverage = [name for name in told if "coverage" in name]
            rows.append(figure("trials_failed", [len(wrong)], 0, len(told)))
            rows.append(figure("coverage_false_passes", [len(set(coverage) & set(wrong))], 0, len(coverage)))
        merge(options.out, meta_here(), rows)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
