"""Runs an arm (who shares the GPU, and how) with its loads, once, with warm workers; and what benchmarks share with it.

A worker of `cudasched demo` is one process of client.py. The pool starts a cell's
workers, in parallel, and keeps them until told otherwise. One thread drives the pool. A worker that dies, hangs or
cannot start is an exception that carries the end of its stderr. Every worker is gone when the pool is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cudasched._preload import removed
from cudasched._scratch import Scratch
from cudasched.config import VARIABLES, Config

CLIENT = Path(__file__).with_name("client.py")
START_TIMEOUT_S = 240.0
ANSWER_SLACK_S = 60.0
#: From the command to the start of a run: all workers have read it, and the lead-in is over.
HEAD_START_S = 0.8
#: Runs that a worker may spoil before it is given up.
MAX_STRIKES = 2
DEFAULT_SCALE = 20.0
#: Engine times that a slow simulated device stretches, with their defaults in the unit of the name. The lead is fixed
#: there: the choices of `auto` are in the time of a real GPU.
SCALED_SETTINGS = {
    VARIABLES[name]: float(value)
    for name, value in vars(Config(lead_us=20.0)).items()
    if name.endswith(("_us", "_ms")) and isinstance(value, (int, float))
}
#: Variables that a bare worker must not inherit from a managed parent.
CLASS_SETTINGS = ("CUDASCHED_CLASS", "CUDASCHED_PRIORITY", "CUDASCHED_SLO_MS", "CUDASCHED_OFF", "CUDASCHED_NAME")
# The command need not be on PATH where the package is.
CUDASCHED = (sys.executable, "-m", "cudasched")


class HarnessError(RuntimeError):
    """A worker or a service of a cell failed; the message has its name and the end of its stderr."""


@dataclass(frozen=True)
class Arm:
    """One way of sharing the GPU.

    Attributes:
        name: The name in results.
        mode: `one_process`, `two_processes` or `mps`.
        latency: Requests are served in this arm.
        best_effort: Best-effort work runs in this arm.
        managed: By cudasched.
        hint_ms: Requests are prepared for so long; their region is entered so long before their due time.
        policy: cudasched's.
    """

    name: str
    mode: str
    latency: bool = True
    best_effort: bool = True
    managed: bool = False
    hint_ms: float = 0.0
    policy: str = "strict"


#: How long a request of a `_hint` arm is prepared within its region.
HINT_MS = 0.5

ARMS = {
    arm.name: arm
    for arm in (
        Arm("latency_alone", "two_processes", best_effort=False),
        Arm("best_effort_alone", "two_processes", latency=False),
        Arm("processes", "two_processes"),
        Arm("mps", "mps"),
        Arm("mps_priority", "mps"),
        Arm("cudasched_two_processes", "two_processes", managed=True),
        Arm("cudasched_one_process", "one_process", managed=True),
        Arm("cudasched_mps", "mps", managed=True),
        Arm("best_effort_alone_hooked", "two_processes", latency=False, managed=True),
        Arm("best_effort_alone_mps", "mps", latency=False, managed=True),
        Arm("latency_alone_hint", "two_processes", best_effort=False, hint_ms=HINT_MS),
        Arm("cudasched_two_processes_hint", "two_processes", managed=True, hint_ms=HINT_MS),
        Arm("cudasched_mps_hint", "mps", managed=True, hint_ms=HINT_MS),
        Arm("cudasched_one_process_hint", "one_process", managed=True, hint_ms=HINT_MS),
        Arm("cudasched_two_processes_slack", "two_processes", managed=True, policy="slack"),
        Arm("cudasched_mps_slack", "mps", managed=True, policy="slack"),
        Arm("cudasched_two_processes_whole", "two_processes", managed=True),
    )
}


@dataclass(frozen=True)
class WorkerSpec:
    """The properties that distinguish workers; equal specs share a worker.

    Attributes:
        latency: The latency load; None without one.
        best_effort: The best-effort load; None without one.
        managed: Runs under `cudasched run`.
    """

    latency: str | None
    best_effort: str | None
    managed: bool = False

    @property
    def name(self) -> str:
        """For messages and for the client's display name."""
        said = [self.latency, self.best_effort, "managed" if self.managed else None]
        return " ".join(word for word in said if word)


def workers_of(arm: Arm, latency: str, best_effort: str) -> list[WorkerSpec]:
    """The workers that an arm of two processes needs, the one that serves requests first."""
    serving = [WorkerSpec(latency, None, arm.managed)] if arm.latency else []
    return [*serving, WorkerSpec(None, best_effort, arm.managed)] if arm.best_effort else serving


@dataclass(frozen=True)
class Run:
    """How long one cell runs, and when its requests arrive; all but the length is in the device's time.

    Attributes:
        seconds: Of the wall clock.
        rates_hz: Requests a second, in digits.
        arrivals: The kind of arrivals.
        seed: Of the arrivals.
    """

    seconds: float
    rates_hz: str = "60"
    arrivals: str = "poisson"
    seed: int = 0


@dataclass
class Backend:
    """The workers' device and settings.

    Attributes:
        name: `torch` or `simulated`.
        driver: The simulated driver's libcuda.so.1; None with torch.
        scale: Wall-clock seconds that a second of the device takes.
        settings: Environment of every worker, over this process's own.
        scratch: Where the simulated device lies, in the way of no other run.
    """

    name: str = "torch"
    driver: Path | None = None
    scale: float = 1.0
    settings: dict[str, str] = field(default_factory=dict)
    scratch: Scratch | None = None

    @classmethod
    def simulated(cls, driver: Path | None = None) -> Backend:
        """The simulated driver, on a device of its own.

        Args:
            driver: Its libcuda.so.1; by default the one installed with the package.

        Raises:
            HarnessError: The simulated driver is missing.
        """
        driver = driver or installed_simulated_driver()
        if not driver.is_file():
            raise HarnessError(f"no simulated driver at {driver}: reinstall cudasched, or build it with CMake")
        scale = float(os.environ.get("CUDASCHED_SIM_SCALE", DEFAULT_SCALE))
        scratch = Scratch("demo", in_memory=True)
        settings = {name: f"{value * scale:g}" for name, value in SCALED_SETTINGS.items()}
        settings["CUDASCHED_SIM_SCALE"] = f"{scale:g}"
        (scratch.path / "device").mkdir(mode=0o700)
        settings["CUDASCHED_SIM_DIR"] = str(scratch.path / "device")
        return cls("simulated", driver.resolve(), scale, settings, scratch)

    def environment(self, hooked: bool) -> dict[str, str]:
        """Environment of a worker, behind the hook or bare."""
        environment = removed({name: value for name, value in os.environ.items() if name not in CLASS_SETTINGS})
        environment.update(self.settings)
        environment["PYTHONUNBUFFERED"] = "1"
        # Every process predicts from its own history: arms must not learn from one another.
        environment["CUDASCHED_CACHE_DIR"] = "off"
        if self.driver and hooked:
            environment["CUDASCHED_DRIVER"] = str(self.driver)
        elif self.driver:
            paths = [str(self.driver.parent), environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        return environment

    def close(self) -> None:
        """Removes the backend's files."""
        if self.scratch:
            self.scratch.close()


def installed_simulated_driver() -> Path:
    """Where the package keeps the simulated driver: beside its compiled module, wherever that was installed.

    Raises:
        HarnessError: The compiled module is not there.
    """
    from cudasched.errors import HookError
    from cudasched.hook import locate

    try:
        return locate().simulated_driver
    except HookError as error:
        raise HarnessError(str(error)) from error


def probe(backend: Backend | None = None) -> dict[str, Any]:
    """The machine's device (see client.py), asked in a process of its own so that this one never touches CUDA.

    Raises:
        HarnessError: The probe itself failed.
    """
    backend = backend or Backend()
    command = [sys.executable, str(CLIENT), "--probe"]
    try:
        done = subprocess.run(
            command, env=backend.environment(hooked=False), capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HarnessError("the driver did not answer within 60 s: is the GPU in use or broken?") from error
    if done.returncode != 0:
        raise HarnessError(f"the probe for a device failed with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Child:
    """One process that reads commands from stdin and answers on stdout, in JSON lines; its stderr is in a file.

    Args:
        name: For messages.
        command: The program and arguments.
        environment: The whole environment.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  as long-lived as the process
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            bufsize=1,
            start_new_session=True,  # so that Ctrl-C comes to us alone, and that killing takes its children along
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, command: str, **arguments: Any) -> None:
        """Sends a command; `answer` gets its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._failure("died between runs") from error

    def answer(self, timeout_s: float, event: str = "result") -> dict[str, Any]:
        """The next message with this event: the answer to the last command, or a report of its own."""
        return self._answer(event, timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends the process, politely at first, and then by force."""
        if self.alive and grace_s > 0:
            try:
                self.tell("quit")
                self._process.wait(grace_s)
            except (HarnessError, subprocess.TimeoutExpired):
                pass
        if self.alive:
            self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self, event: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not answer within {timeout_s:.0f} s") from None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                raise self._failure(f"ended with status {self._process.returncode}")
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line of its starter
            if isinstance(message, dict) and message.get("event") == event:
                return message

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:
            pass  # closed under us by stop()
        self._answers.put(None)

    def _failure(self, what: str) -> HarnessError:
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").strip().splitlines()[-12:]
        told = "\n".join(tail) if tail else "(nothing on its stderr)"
        return HarnessError(f"worker [{self.name}] {what}\n{told}")


class Worker(Child):
    """One process of client.py."""

    def __init__(self, spec: WorkerSpec, backend: Backend, extra_environment: Mapping[str, str]) -> None:
        self.spec = spec
        environment = {**backend.environment(spec.managed), **extra_environment}
        command = [sys.executable, str(CLIENT), "--backend", backend.name, "--time-scale", f"{backend.scale:g}"]
        if spec.latency:
            command += ["--latency", spec.latency]
        if spec.best_effort:
            command += ["--best-effort", spec.best_effort]
        if spec.managed:
            environment["CUDASCHED_NAME"] = spec.name[:63]
            client_class = "latency" if spec.latency else "best_effort"
            command = [*CUDASCHED, "run", "--class", client_class, "--", *command]
        super().__init__(spec.name, command, environment)

    def await_ready(self, timeout_s: float) -> None:
        """Waits until its workloads are built and warm."""
        self.answer(timeout_s, "ready")


class Pool:
    """Warm workers by their specs; idle ones wait for a line on stdin and use neither CPU nor GPU."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._workers: dict[WorkerSpec, Worker] = {}
        self._failed: dict[WorkerSpec, HarnessError] = {}
        self._strikes: dict[WorkerSpec, int] = {}
        self._table = Scratch("demo", in_memory=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=0.0 if kind else 5.0)

    def close(self, grace_s: float = 5.0) -> None:
        """Ends all workers."""
        for worker in self._workers.values():
            worker.stop(grace_s)
        self._workers.clear()
        self._table.close()

    def start(self, specs: Iterable[WorkerSpec], timeout_s: float = START_TIMEOUT_S) -> dict[WorkerSpec, HarnessError]:
        """Starts the workers that are missing, all at once, and waits until they are warm.

        Returns:
            Those that failed, which stay failed, and why.
        """
        wanted = list(dict.fromkeys(specs))
        started = []
        for spec in wanted:
            if spec in self._failed or (spec in self._workers and self._workers[spec].alive):
                continue
            try:
                table = {"CUDASCHED_RUN_DIR": str(self._table.path)} if spec.managed else {}
                self._workers[spec] = Worker(spec, self.backend, table)
                started.append(spec)
            except (HarnessError, OSError) as error:
                self._failed[spec] = HarnessError(str(error))
        deadline = time.monotonic() + timeout_s
        for spec in started:
            try:
                self._workers[spec].await_ready(max(0.1, deadline - time.monotonic()))
            except HarnessError as error:
                self._failed[spec] = error
                self._workers.pop(spec).stop(grace_s=0.0)
        return {spec: self._failed[spec] for spec in wanted if spec in self._failed}

    def run(self, specs: list[WorkerSpec], run: Run) -> dict[str, Any]:
        """One run of these workers together.

        Returns:
            The answers of all, in one (see client.py): `latency` and `best_effort_per_s`, by load.

        Raises:
            HarnessError: A worker failed; the next run replaces failed workers, but not twice.
        """
        self._require(specs)
        rates_hz = {spec.latency: float(run.rates_hz) for spec in specs if spec.latency}
        start_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
        result: dict[str, Any] = {"latency": {}, "best_effort_per_s": {}}
        try:
            for spec in specs:
                self._workers[spec].tell(
                    "run",
                    start_ns=start_ns,
                    seconds=run.seconds,
                    seed=run.seed,
                    rates_hz=rates_hz,
                    arrivals=run.arrivals,
                    hint_ms=0.0,
                    slo_ms=0.0,
                )
            for spec in specs:
                answer = self._workers[spec].answer(run.seconds + ANSWER_SLACK_S)
                for role, found in result.items():
                    found.update(answer[role])
        except HarnessError as error:
            for spec in specs:
                self._strikes[spec] = self._strikes.get(spec, 0) + 1
                if self._strikes[spec] >= MAX_STRIKES:
                    self._failed[spec] = error
            self._discard(specs)
            raise
        return result

    def _require(self, specs: list[WorkerSpec]) -> None:
        for spec, error in self.start(specs).items():
            raise HarnessError(f"worker [{spec.name}] could not start: {error}")

    def _discard(self, specs: list[WorkerSpec]) -> None:
        for spec in specs:
            if spec in self._workers:
                self._workers.pop(spec).stop(grace_s=0.0)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly.

    Raises:
        ValueError: There are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a percentile of")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values_ms: list[float]) -> dict[str, float | int]:
    """P50, P95, P99, the most, mean and number of latencies in ms."""
    return {
        "p50": percentile(values_ms, 0.50),
        "p95": percentile(values_ms, 0.95),
        "p99": percentile(values_ms, 0.99),
        "max": max(values_ms),
        "mean": sum(values_ms) / len(values_ms),
        "n": len(values_ms),
    }
