"""The pool of `cudasched.memory` against other allocators, and copies beside requests: figures of results/memory.json.

Histories of allocations (traces.py) are replayed by a process of each allocator's own, without work on the GPU.
`pool_reserved_of_used` is the most memory that the pool takes of the GPU over the most that the history uses, of the
worst history. Large blocks of odd sizes, of which every second one is freed, have a figure of their own, because the
blocks that remain share their pages with nothing. `pool_alloc_ns` is the time of an allocation or a free of a size that
the pool has free, on the host, of the slowest size. The rivals are the driver's own pool (cudaMallocAsync), PyTorch's
allocator with expandable segments, and RMM's pool where it is installed.

`copy_p99_ratio` is the P99 of requests that copy 1 MB in, beside a best-effort program that copies 1 GiB at a time both
ways, over that of the requests alone. `copy_rate` is the program's rate, both ways together, over its rate without the
server and without cudasched. Those with `_time_slices` are the same without cudasched.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from cudasched import hook
from cudasched.demo.harness import CUDASCHED, HarnessError

from benchmarks.c_program import compile_c, compile_cpp
from benchmarks.lab.processes import brief, p99
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Session
from benchmarks.memory.traces import TRACES

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
TIMEOUT_S = 120
IN_C = ("pool", "async")
IN_PYTHON = ("torch", "rmm")


#: Of the copies: the arms, and whether the server and the copying program run in each.
COPY_ARMS = {
    "alone": (True, False),
    "bare": (False, True),
    "time_slices": (True, True),
    "cudasched": (True, True),
}
#: Requests a second, and bytes of a copy; a rehearsal's device is slower.
RATE_HZ, COPIED = 100.0, 1 << 30


class Program:
    """The replaying program, compiled once."""

    def __init__(self, session: Session) -> None:
        sources = [*sorted((CSRC / "memory").glob("*.cpp")), CSRC / "driver" / "driver.cpp", CSRC / "base" / "log.cpp"]
        self.path = compile_cpp(session.builds / "replay", HERE / "replay.cpp", *sources)
        self.environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", CUDASCHED_OFF="1")
        if session.rehearsal:
            device = session.builds / "device"
            device.mkdir(mode=0o700)
            self.environment |= {
                "LD_LIBRARY_PATH": str(hook.locate().simulated_driver.parent),
                "CUDASCHED_SIM_DIR": str(device),
                "CUDASCHED_SIM_SCALE": "1",
            }

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink()

    def run(self, arm: str, history: str) -> dict[str, Any]:
        """What one replay prints. Raises HarnessError: it failed."""
        command = [str(self.path), arm, history]
        if arm in IN_PYTHON:
            command = [sys.executable, "-m", "benchmarks.memory.rivals", arm, history]
        made: dict[str, Any] = said(command, self.environment)
        return made


def said(command: Sequence[str], environment: dict[str, str]) -> Any:
    """The JSON that a process prints. Raises HarnessError."""
    try:
        done = subprocess.run(
            command,
            cwd=HERE.parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise HarnessError(f"{' '.join(command)}: {error}") from error


def replays(session: Session) -> None:
    """Each history with each allocator that is here."""
    program = session.shared(Program)
    installed = [name for name in IN_PYTHON if importlib.util.find_spec(name) and not session.rehearsal]
    for name, make in TRACES.items():
        history = session.builds / name
        history.write_text("".join(f"{identity} {size}\n" for identity, size in make(session.options.steps)))
        for arm in (*IN_C, *installed):
            session.need(TIMEOUT_S / 4)
            made = program.run(arm, str(history))
            session.store.keep(f"replays/{name}/{arm}", made)
            session.say(f"{name} {arm}: {made['reserved'] / made['used']:.3f} reserved of used, {made['s']:.2f} s")


def hot(session: Session) -> None:
    """Allocations and frees of sizes that are free."""
    for arm in IN_C:
        made = session.shared(Program).run(arm, "hot")
        session.store.keep(f"hot/{arm}", made)
        session.say(f"{arm}: {made['ns']} ns, by size an allocation and a free")


class Copies:
    """The programs that copy, compiled once, in a table of their own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.path = compile_c(session.builds / "copies", HERE / "copies.c", options=["-pthread"])
        (session.scratch / "copies").mkdir(mode=0o700)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink()

    def _program(self, client_class: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        environment = self.session.backend.environment(bool(client_class))
        environment["CUDASCHED_RUN_DIR"] = str(self.session.scratch / "copies")
        environment["COPIES_IMAGE"] = "simulated" if self.session.rehearsal else "ptx"
        hook_it = [*CUDASCHED, "run", "--class", client_class, "--"] if client_class else []
        return [*hook_it, str(self.path), *arguments], environment

    @contextmanager
    def copying(self, client_class: str) -> Iterator[list[float]]:
        """Copies both ways meanwhile; then the list has the bytes a second into the device and out of it."""
        bytes_each = COPIED // 16 if self.session.rehearsal else COPIED
        command, environment = self._program(client_class, "copy", str(bytes_each))
        rates: list[float] = []
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise HarnessError(f"the copying program failed: {process.communicate()[1][-2000:]}")
                yield rates
                rates += json.loads(process.communicate(timeout=TIMEOUT_S)[0])
            finally:
                process.kill()

    def serve(self, client_class: str, seconds: float, seed: int) -> list[float]:
        """The latencies of requests, ms."""
        rate_hz = RATE_HZ / self.session.backend.scale
        command, environment = self._program(client_class, "serve", str(seconds), str(rate_hz), str(seed))
        made: list[float] = said(command, environment)
        return made


def copies(session: Session) -> None:
    """Each arm in each repeat."""
    programs, seconds = session.shared(Copies), float(session.options.seconds)
    for repeat, (arm, (serves, copies_too)) in itertools.product(range(session.options.repeats), COPY_ARMS.items()):
        part = f"copies/{arm}/{repeat}"
        if part in session.store.done:
            continue
        session.need(2 * seconds + TIMEOUT_S / 10)
        server, copier = ("latency", "best-effort") if arm == "cudasched" else ("", "")
        made: dict[str, list[float]] = {}
        with programs.copying(copier) if copies_too else nullcontext([]) as rates:
            if serves:
                made["latency_ms"] = programs.serve(server, seconds, 1 + repeat)
            else:
                time.sleep(seconds)
        if copies_too:
            made["bytes_per_s"] = rates
        session.store.keep(part, made)
        gb_per_s = " and ".join(f"{rate / 1e9:.1f}" for rate in rates)
        session.say(f"{arm} {repeat}: {brief(made.get('latency_ms', []))} {gb_per_s and gb_per_s + ' GB/s'}")


def find_copies(done: Done) -> Found:
    """The figures of the copies: P99 of the requests of all repeats, and what single repeats say."""
    found: Found = {}
    repeats = [part for part in range(len(done)) if f"copies/cudasched/{part}" in done]  # the last arm of each
    parts = {arm: [done[f"copies/{arm}/{repeat}"] for repeat in repeats] for arm in COPY_ARMS}
    requests = {arm: [part["latency_ms"] for part in parts[arm]] for arm, (serves, _) in COPY_ARMS.items() if serves}
    rates = {arm: [sum(part["bytes_per_s"]) for part in parts[arm]] for arm, (_, copied) in COPY_ARMS.items() if copied}
    for arm, name in {"cudasched": "", "time_slices": "_time_slices"}.items() if repeats else ():
        ratios = [p99(mine) / p99(alone) for mine, alone in zip(requests[arm], requests["alone"], strict=True)]
        pooled = [list(itertools.chain(*each)) for each in (requests[arm], requests["alone"])]
        found[f"copy_p99_ratio{name}"] = p99(pooled[0]) / p99(pooled[1]), min(ratios), max(ratios), len(pooled[0])
        shares = [mine / bare for mine, bare in zip(rates[arm], rates["bare"], strict=True)]
        found[f"copy_rate{name}"] = statistics.median(shares), min(shares), max(shares), len(shares)
    return found


def find(done: Done) -> Found:
    """The figures of what was measured."""
    found = find_copies(done)
    for arm in (*IN_C, *IN_PYTHON):
        parts = {name: done.get(f"replays/{name}/{arm}") for name in TRACES}
        ratios = {name: part["reserved"] / part["used"] for name, part in parts.items() if part}
        if len(ratios) == len(TRACES):
            odd = ratios.pop("odd")
            found[f"{arm}_odd_of_used"] = odd, odd, odd, 1
            found[f"{arm}_reserved_of_used"] = (
                max(ratios.values()),
                min(ratios.values()),
                max(ratios.values()),
                len(ratios),
            )
        if (times := done.get(f"hot/{arm}")) is not None:
            found[f"{arm}_alloc_ns"] = max(times["ns"]), min(times["ns"]), max(times["ns"]), len(times["ns"])
    return found


BENCHMARK = Benchmark(
    about="the memory pool against other allocators, and copies beside requests",
    groups={"replays": replays, "hot": hot, "copies": copies},
    limits={
        "pool_alloc_ns": "a free records an event on the stream, an allocation does not: 0.12 us without it",
        "copy_p99_ratio": "a request waits for pieces under way, 0.2 ms in P50; P99 alone was 1.1 to 2.2 ms",
    },
    goals={
        "pool_reserved_of_used": (1.02, "less"),
        "pool_alloc_ns": (300.0, "less"),
        "copy_p99_ratio": (1.2, "less"),
        "copy_rate": (0.96, "more"),
        "copy_p99_ratio_time_slices": (0.0, "more"),
        "copy_rate_time_slices": (0.0, "more"),
        **{f"{arm}_reserved_of_used": (0.0, "more") for arm in ("async", *IN_PYTHON)},
        **{f"{arm}_odd_of_used": (0.0, "more") for arm in (*IN_C, *IN_PYTHON)},
        "async_alloc_ns": (0.0, "more"),
    },
    find=find,
    settings={"steps": (40, 6), "seconds": (10.0, 1.0), "repeats": (4, 1)},
    torch=False,
)
