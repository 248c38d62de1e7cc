"""Processes of a benchmark that are told what to do, bare and under `cudasched run`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cudasched import mps
from cudasched.demo.harness import CUDASCHED, HEAD_START_S, Child, HarnessError, percentile

from benchmarks.lab.session import Figure, Session

ROOT = Path(__file__).resolve().parents[2]
BREADTH = ROOT / "benchmarks" / "breadth"
START_TIMEOUT_S = 180.0
ANSWER_S = 60.0
#: A program that is run for its output.
RUN_S = 300.0
#: Training that comes to no reading of its loss for so long hangs.
HANG_S = 30.0
#: Programs of the breadth benchmark and the simulated loads that stand for them in a rehearsal.
SIMULATED = {"transformers_llama": "transformer", "torch_long_kernels": "gemm"}


class Processes:
    """Starts scripts, and ends what is left of them."""

    def __init__(self, session: Session) -> None:
        self.session, self.backend = session, session.backend
        self._children: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(*list(self._children))

    def start(
        self,
        script: Path,
        *arguments: str,
        client_class: str | None = None,
        imports_cudasched: bool = False,
        table: str = "shared",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a script: bare, under `cudasched run` with a class, or with cudasched imported by itself.

        Args:
            script: To be run by path.
            arguments: Its own.
            client_class: Of `cudasched run`; None without that.
            imports_cudasched: It does.
            table: Those under cudasched with the same one meet.
            environment: Beside what all have.
        """
        hooked = client_class is not None or imports_cudasched
        command = [sys.executable, str(script), *arguments]
        if client_class is not None:
            command = [*CUDASCHED, "run", "--class", client_class, "--", *command]
        variables = self.backend.environment(hooked)
        if hooked:
            directory = self.session.scratch / table
            directory.mkdir(mode=0o700, exist_ok=True)
            variables["CUDASCHED_RUN_DIR"] = str(directory)
        name = " ".join([script.stem, *arguments[:1], client_class or ("imports cudasched" if hooked else "bare")])
        child = Child(name, command, {**variables, **(environment or {})})
        self._children.append(child)
        return child

    @property
    def often(self) -> int:
        """Steps from one reading of a training to the next, where steps are counted: a rehearsal's cells are short."""
        return 1 if self.session.rehearsal else 2

    def program(self, name: str, client_class: str | None = None, read_every: int | None = None, **more: Any) -> Child:
        """A program of the breadth benchmark."""
        arguments = [SIMULATED[name], "--simulate"] if self.session.rehearsal else [name]
        arguments += ["--read-every", str(read_every)] if read_every else []
        return self.start(BREADTH / "program.py", *arguments, client_class=client_class, **more)

    def server(self, *arguments: str, **more: Any) -> Child:
        """The BERT graph server of the breadth benchmark."""
        simulate = ["--simulate", "--time-scale", f"{self.backend.scale:g}"] if self.session.rehearsal else []
        return self.start(BREADTH / "server.py", "bert_graph", *arguments, *simulate, **more)

    def end(self, *children: Child) -> None:
        """Kills programs; they and their memory on the GPU are gone when this returns."""
        for child in children:
            child.stop(grace_s=0.0)
            self._children.remove(child)


def output_of(
    label: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = RUN_S,
    ended: Collection[int] = (0,),
) -> str:
    """Runs a program to its end in the repository's root, without input, and returns its output.

    Args:
        label: Its name in errors.
        command: The program and its arguments.
        environment: All of it; by default this process's.
        timeout_s: How long it may take.
        ended: The statuses of a program that did not fail.

    Raises:
        HarnessError: It could not be started, failed, or did not end in time.
    """
    try:
        with running(command, environment, subprocess.PIPE, subprocess.PIPE) as started:
            output, errors = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"{label}: no answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise HarnessError(f"{label}: {error}") from error
    if started.returncode not in ended:
        raise HarnessError(f"{label}: status {started.returncode}\n{(errors or output)[-2000:]}")
    return output


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str] | None, output: IO[str] | int, errors: IO[str] | int
) -> Iterator[subprocess.Popen[str]]:
    """A program in the repository's root, without input; at the block's end it is gone, and all that it started."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "env": environment}
    with subprocess.Popen(command, **given, cwd=ROOT, text=True, start_new_session=True) as started:
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def mps_client(directory: Path) -> mps.Membership:
    """Joins the MPS of a directory, of the visible GPUs. Raises HarnessError where there is none here."""
    try:
        return mps.join(directory, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except mps.MpsError as error:
        raise HarnessError(str(error)) from error


def in_processes(measure: Callable[[Processes], None]) -> Callable[[Session], None]:
    """A group of a benchmark that starts processes; none of them outlives it."""

    def group(session: Session) -> None:
        with Processes(session) as processes:
            measure(processes)

    return group


def ask(child: Child, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> dict[str, Any]:
    """Sends a command and waits for its answer."""
    child.tell(command, **arguments)
    return {name: value for name, value in child.answer(timeout_s).items() if name != "event"}


def built(*children: Child) -> None:
    """Waits until programs have imported their libraries, then builds them all at once."""
    for child in children:
        child.answer(START_TIMEOUT_S, "imported")
    for child in children:
        child.tell("build")
    for child in children:
        child.answer(START_TIMEOUT_S, "ready")


def serve(
    children: Sequence[Child], seconds: float, seed: int, rate_hz: float = 60.0, head_start_s: float = HEAD_START_S
) -> None:
    """Has servers answer requests at random, all at once."""
    start_ns = time.monotonic_ns() + int(head_start_s * 1e9)
    for number, child in enumerate(children):
        child.tell(
            "run",
            start_ns=start_ns,
            seconds=seconds,
            seed=seed + 1000 * number,
            rates_hz={"bert_graph": rate_hz},
            arrivals="poisson",
            hint_ms=0.0,
            slo_ms=0.0,
        )


def served(children: Sequence[Child], seconds: float, seed: int, **more: float) -> list[dict[str, Any]]:
    """The same, and the servers' answers (cudasched/demo/client.py).

    A request that there was no time for counts with the time that it has waited.
    """
    serve(children, seconds, seed, **more)
    return [child.answer(seconds + ANSWER_S) for child in children]


def latencies(children: Sequence[Child], seconds: float, seed: int, **more: float) -> list[list[float]]:
    """The latencies of the same, ms."""
    return [answer["latency"]["bert_graph"]["latency_ms"] for answer in served(children, seconds, seed, **more)]


def ranks_environment(devices: Sequence[str]) -> dict[str, str]:
    """The environment that torchrun gives rank 0 of one rank a device, with NVLink multicast off."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    count = str(len(devices))
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


def trained(first: Child, seconds: float, meanwhile: Callable[[], object]) -> tuple[float, float]:
    """Steps a second of the first rank in the seconds after the head start, and its longest time without a reading."""
    start_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
    until_ns = start_ns + int(seconds * 1e9)
    meanwhile()
    readings = ask(first, "readings", from_ns=start_ns, until_ns=until_ns)["readings"]
    times_ns = [start_ns, *(at for at, _ in readings), until_ns]
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(times_ns)) / 1e9
    return per_second(readings), gap_s


def per_second(readings: Sequence[Sequence[int]]) -> float:
    """Steps a second from the first to the last reading.

    Raises:
        ValueError: There are not two.
    """
    if len(readings) < 2:
        raise ValueError(f"{len(readings)} readings of the loss in the cell, where two are needed: use longer cells")
    (began_ns, first), (ended_ns, last) = readings[0], readings[-1]
    return (last - first) / ((ended_ns - began_ns) / 1e9)


def p99(values: Sequence[float]) -> float:
    """The P99 of latencies."""
    return percentile(values, 0.99)


def pooled(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float] = p99
) -> Figure:
    """P99, or another figure, of all requests over that of others; low and high are of single repeats."""
    each = [of(mine) / of(other) for mine, other in zip(ours, theirs, strict=True)]
    every, others = (list(itertools.chain.from_iterable(parts)) for parts in (ours, theirs))
    return of(every) / of(others), min(each), max(each), len(every)
