"""One warm worker of the demo and of the colocation benchmark.

Run by path (`python .../cudasched/demo/client.py`), not with `-m`: a worker without cudasched must not import the
package, whose import installs the hook. Commands come as JSON lines on stdin, answers go as JSON lines to stdout:

    -> {"command": "run", "start_ns": ..., "seconds": 10, "seed": 1, "rates_hz": {"mlp": 60}, "arrivals": "poisson",
        "hint_ms": 0, "slo_ms": 0}
    <- {"event": "result", "latency": {"mlp": {"latency_ms": [...], "wait_ms": [...], "unserved": 0}},
        "best_effort_per_s": {"gemm": 580.1}}
    -> {"command": "busy"}             <- {"event": "result", "busy_us": 1893.5}
    -> {"command": "quit"}

Times in commands and answers are the device's: on the simulated driver, the wall clock's divided by the driver's scale.
Only `seconds` and `start_ns` (of the monotonic clock, common to all processes) are the wall clock's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cudasched.demo import simulated
    from cudasched.demo.arrivals import schedule
else:
    import simulated
    from arrivals import schedule

#: A latency client that cannot keep up stops this long after the end of its run.
OVERTIME_S = 2.0
#: All work runs this long before the measurement: the first request meets a busy GPU, and a rhythm is known.
LEAD_IN_S = 0.5
SPIN_NS = 300_000
PR_SET_TIMERSLACK = 29
#: One request in so many runs between two timing events, to tell waiting from work; the events cost the GPU 4 us.
TIMED_EVERY = 5

LatencyRegion = Callable[[float], AbstractContextManager[Any]]
"""The context of a request with this latency target in ms (0: none)."""
Region = Callable[[], AbstractContextManager[Any]]


class Workload(Protocol):
    """A role's repeated work. Every method is called inside `context()`, on one thread at a time."""

    #: Steps after which speed has settled.
    warm_up_steps: int

    def context(self) -> AbstractContextManager[Any]:
        """Makes the device and stream current on the calling thread."""
        ...

    def step(self) -> None:
        """Submits one request or one step; may return before the device has done it."""
        ...

    def timed_step(self) -> Callable[[], float]:
        """As `step`; the result gives, once synchronised, the ms from the first to the last work on the device."""
        ...

    def synchronize(self) -> None:
        """Waits for everything submitted."""
        ...

    def busy_spans(self) -> tuple[list[tuple[int, int]], int]:
        """Start and length in ns of every kernel, copy and fill of some steps run now, and how many steps."""
        ...


def tighten_timers() -> None:
    """Takes the 50 us of slack off the calling thread's sleeps, so that they end on time."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def wait_until(target_ns: int) -> None:
    """Sleeps, then spins without holding the interpreter's lock, until the monotonic clock reaches `target_ns`."""
    while (left_ns := target_ns - time.monotonic_ns()) > 0:
        time.sleep((left_ns - SPIN_NS) / 1e9 if left_ns > SPIN_NS else 0)


class Client:
    """The workloads of one process, and the loops that drive them.

    Args:
        latency: The loads that answer requests, by name.
        best_effort: The loads that run in a closed loop, by name.
        scale: Wall-clock seconds that one second of the device takes.
        regions: One for each role, entered around each request and each step.
    """

    def __init__(
        self,
        latency: dict[str, Workload],
        best_effort: dict[str, Workload],
        scale: float,
        regions: tuple[LatencyRegion, Region],
    ) -> None:
        self.latency = latency
        self.best_effort = best_effort
        self.scale = scale
        self.latency_region, self.best_effort_region = regions

    def warm_up(self) -> None:
        """Runs each workload a little: allocations, autotuning and the history of its kernels settle."""
        for workload in self.latency.values():
            with workload.context():
                for _ in range(workload.warm_up_steps):
                    with self.latency_region(0.0):
                        workload.step()
                        workload.synchronize()
        for workload in self.best_effort.values():
            with workload.context():
                for _ in range(workload.warm_up_steps):
                    with self.best_effort_region():
                        workload.step()
                workload.synchronize()

    def run(
        self,
        start_ns: int,
        seconds: float,
        seed: int,
        rates_hz: dict[str, float],
        arrivals: str,
        hint_ms: float,
        slo_ms: float,
        keep_due: bool = False,
    ) -> dict[str, Any]:
        """One measured run of every workload here, from `start_ns` for `seconds` of the wall clock.

        Args:
            start_ns: When, on the monotonic clock.
            seconds: How long.
            seed: Of the arrivals; each load has others.
            rates_hz: Requests a second of each latency load of the cell, here or in another worker.
            arrivals: The kind of arrivals.
            hint_ms: A request's region is entered so long before the request is due, which is prepared within.
            slo_ms: Latency target of a request's region, counted from its entry; 0: none.
            keep_due: The result of a latency load also has `due_ns`, when each of its requests was due.
        """
        result: dict[str, Any] = {"latency": {}, "best_effort_per_s": {}}
        tasks: list[tuple[str, str, Callable[[], Any]]] = []
        for name, workload in self.latency.items():
            length_s = (LEAD_IN_S + seconds) / self.scale
            times = schedule(arrivals, rates_hz[name], length_s, seed + 1000 * list(rates_hz).index(name))
            due_ns = [start_ns + int((at * self.scale - LEAD_IN_S) * 1e9) for at in times]
            give_up_ns = start_ns + int((seconds + OVERTIME_S) * 1e9)
            drive = partial(self._drive_latency, workload, start_ns, due_ns, give_up_ns, hint_ms, slo_ms, keep_due)
            tasks.append(("latency", name, drive))
        for name, workload in self.best_effort.items():
            tasks.append(("best_effort_per_s", name, partial(self._drive_best_effort, workload, start_ns, seconds)))

        def carry_out(kind: str, name: str, drive: Callable[[], Any]) -> None:
            result[kind][name] = drive()

        threads = [threading.Thread(target=carry_out, args=task, daemon=True) for task in tasks[1:]]
        for thread in threads:
            thread.start()
        carry_out(*tasks[0])
        for thread in threads:
            thread.join()
        failed = {*self.latency, *self.best_effort} - {*result["latency"], *result["best_effort_per_s"]}
        if failed:
            raise RuntimeError(f"the thread of {', '.join(sorted(failed))} failed; see its traceback above")
        return result

    def busy(self) -> dict[str, Any]:
        """How long a request of the latency load keeps the GPU busy, in us."""
        if len(self.latency) != 1:
            raise ValueError("this worker has not one latency load")
        (workload,) = self.latency.values()
        with workload.context():
            spans, steps = workload.busy_spans()
        return {"busy_us": covered_ns(spans) / 1e3 / steps}

    def _drive_latency(
        self,
        workload: Workload,
        start_ns: int,
        due_ns: Sequence[int],
        give_up_ns: int,
        hint_ms: float,
        slo_ms: float,
        keep_due: bool,
    ) -> dict[str, Any]:
        hint_ns = int(hint_ms * self.scale * 1e6)
        latency_ms: list[float] = []
        served_due_ns: list[int] = []
        wait_ms: list[float] = []
        unserved = 0
        tighten_timers()
        with workload.context():
            for number, due in enumerate(due_ns):
                timed: Callable[[], float] | None = None
                if time.monotonic_ns() >= give_up_ns:
                    unserved += due >= start_ns  # at least this late: counted with the others, or a P99 would flatter
                else:
                    wait_until(due - hint_ns)
                    with self.latency_region(slo_ms * self.scale):
                        wait_until(due)
                        if number % TIMED_EVERY == 0:
                            timed = workload.timed_step()
                        else:
                            workload.step()
                        workload.synchronize()
                if due < start_ns:
                    continue
                latency_ms.append(round((time.monotonic_ns() - due) / self.scale / 1e6, 5))
                served_due_ns.append(due)
                if timed:
                    wait_ms.append(round(max(0.0, latency_ms[-1] - timed()), 5))
        result = {"latency_ms": latency_ms, "wait_ms": wait_ms, "unserved": unserved}
        return result | {"due_ns": served_due_ns} if keep_due else result

    def _drive_best_effort(self, workload: Workload, start_ns: int, seconds: float) -> float:
        """Steps a second of the device."""
        stop_ns = start_ns + int(seconds * 1e9)
        with workload.context():
            wait_until(start_ns - int(LEAD_IN_S * 1e9))
            while time.monotonic_ns() < start_ns:
                with self.best_effort_region():
                    workload.step()
            workload.synchronize()
            began_ns = time.monotonic_ns()
            steps = 0
            while time.monotonic_ns() < stop_ns:
                with self.best_effort_region():
                    workload.step()
                steps += 1
            workload.synchronize()
            return steps / ((time.monotonic_ns() - began_ns) / 1e9 / self.scale)


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """How much time lies in at least one of the spans, each a start and a length."""
    covered, end = 0, 0
    for start, length in sorted(spans):
        covered += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return covered


def probe() -> dict[str, Any]:
    """The machine's first device and driver version, and PyTorch's version, each or None."""
    found: dict[str, Any] = {"device": None, "driver_version": None, "torch": None, "problem": None}
    try:
        driver = simulated.Driver()
        found["device"] = driver.device_name()
        found["driver_version"] = driver.version()
    except (OSError, AttributeError, simulated.DriverCallError) as error:
        found["problem"] = str(error)
    with suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def build(args: argparse.Namespace) -> Client:
    """Makes the workloads that the arguments ask for and warms them up."""
    loads: Any = importlib.import_module("simulated" if args.backend == "simulated" else "workloads")
    latency = {args.latency: loads.latency_workload(args.latency)} if args.latency else {}
    best_effort = {args.best_effort: loads.best_effort_workload(args.best_effort)} if args.best_effort else {}
    return Client(latency, best_effort, args.time_scale, (lambda slo_ms: nullcontext(), nullcontext))


def serve(client: Client, commands: IO[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answers commands until `quit` or the end of the input, which is also how a dead parent looks."""
    for line in commands:
        command = json.loads(line)
        name = command.pop("command")
        if name == "quit":
            return
        if name == "run":
            gc.collect()
            gc.disable()
            result = client.run(**command)
            gc.enable()
        elif name == "busy":
            result = client.busy()
        else:
            raise ValueError(f"unknown command {name!r}")
        answer({"event": "result", **result})


def take_protocol() -> Callable[[dict[str, Any]], None]:
    """Keeps standard output for answers: libraries' output goes to standard error from here on.

    Returns:
        A function that writes an answer, at once.
    """
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    return answer


def main() -> int:
    """Entry point of the worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--latency", help="a load that answers requests")
    parser.add_argument("--best-effort", help="a load that runs in a closed loop")
    parser.add_argument("--backend", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes")
    parser.add_argument("--probe", action="store_true", help="name the GPU to run on, and stop")
    args = parser.parse_args()
    answer = take_protocol()
    if args.probe:
        answer({"event": "probe", **probe()})
        return 0
    if not (args.latency or args.best_effort):
        parser.error("name a --latency load, a --best-effort load, or both")
    client = build(args)
    client.warm_up()
    answer({"event": "ready", "pid": os.getpid()})
    serve(client, sys.stdin, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
