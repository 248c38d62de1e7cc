"""One warm worker of the demo and of the colocation benchmark.

Run by path (`python .../cudasched/demo/client.py`), not with `-m`: a worker without cudasched must not import the
package, whose import installs the hook. Commands come as JSON lines on stdin, answers go as JSON lines to stdout:

    -> {"command": "run", "start_ns": ..., "seconds": 10, "seed": 1, "rate_hz": 60, "arrivals": "poisson"}
    <- {"event": "result", "latency_ms": [...], "unserved": 0, "best_effort_per_s": 16.2}
    -> {"command": "kernels"}          <- {"event": "result", "kernel_us": [[62.5, 120], ...], "per_item_us": ...}
    -> {"command": "quit"}

Times in commands and answers are the device's: on the simulated driver they are the wall clock's divided by its scale;
only `seconds` and `start_ns` (of the monotonic clock, common to all processes) are the wall clock's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cudasched.demo import arrivals, simulated
else:
    import arrivals
    import simulated

#: A latency client that cannot keep up stops this long after the end of its run.
OVERTIME_S = 2.0
#: Best-effort work runs this long before a run starts, so that the first request meets a busy GPU.
LEAD_IN_S = 0.3
SPIN_NS = 300_000
PR_SET_TIMERSLACK = 29

Region = Callable[[], AbstractContextManager[Any]]


class Workload(Protocol):
    """What a role does over and over. Every method is called inside `context()`, on one thread at a time."""

    #: What one step counts for in throughput.
    items: int
    #: Steps after which speed has settled.
    warm_up_steps: int

    @property
    def stream(self) -> int:
        """The CUstream it launches on, 0 for the default stream."""
        ...

    def context(self) -> AbstractContextManager[Any]:
        """Makes the device and stream current on the calling thread."""
        ...

    def step(self) -> None:
        """Submits one request or one step; may return before the device has done it."""
        ...

    def synchronize(self) -> None:
        """Waits for everything submitted."""
        ...

    def kernel_durations(self) -> tuple[list[float], int]:
        """Durations in us of every kernel of some steps run now, and the items of those steps."""
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
        latency: What answers requests, or None.
        best_effort: What runs in a closed loop, or None.
        scale: Wall-clock seconds that one second of the device takes.
        regions: One for each role, entered around each request and each step.
    """

    def __init__(
        self,
        latency: Workload | None,
        best_effort: Workload | None,
        scale: float,
        regions: tuple[Region, Region],
    ) -> None:
        self.latency = latency
        self.best_effort = best_effort
        self.scale = scale
        self.latency_region, self.best_effort_region = regions

    def warm_up(self) -> None:
        """Runs each workload a little: allocations, autotuning and the history of its kernels settle."""
        if self.latency:
            with self.latency.context():
                for _ in range(self.latency.warm_up_steps):
                    self._request(self.latency)
        if self.best_effort:
            with self.best_effort.context():
                for _ in range(self.best_effort.warm_up_steps):
                    with self.best_effort_region():
                        self.best_effort.step()
                self.best_effort.synchronize()

    def run(self, start_ns: int, seconds: float, seed: int, rate_hz: float, kind: str) -> dict[str, Any]:
        """One measured run of every workload here, from `start_ns` for `seconds` of the wall clock."""
        result: dict[str, Any] = {}
        if not self.latency:
            self._drive_best_effort(start_ns, seconds, result)
            return result
        thread: threading.Thread | None = None
        if self.best_effort:
            thread = threading.Thread(target=self._drive_best_effort, args=(start_ns, seconds, result), daemon=True)
            thread.start()
        self._drive_latency(start_ns, seconds, seed, rate_hz, kind, result)
        if thread:
            thread.join()
            if "best_effort_per_s" not in result:
                raise RuntimeError("the best-effort thread failed; see its traceback above")
        return result

    def kernels(self) -> dict[str, Any]:
        """The best-effort load's own kernel durations, as [us, count] pairs, and their sum for one item in us."""
        if not self.best_effort:
            raise ValueError("this worker has no best-effort load")
        with self.best_effort.context():
            durations_us, items = self.best_effort.kernel_durations()
        counts: dict[float, int] = {}
        for duration_us in durations_us:
            rounded = round(duration_us, 1)
            counts[rounded] = counts.get(rounded, 0) + 1
        return {"kernel_us": sorted(counts.items()), "per_item_us": sum(durations_us) / max(items, 1)}

    def _request(self, latency: Workload) -> None:
        with self.latency_region():
            latency.step()
            latency.synchronize()

    def _drive_latency(
        self, start_ns: int, seconds: float, seed: int, rate_hz: float, kind: str, result: dict[str, Any]
    ) -> None:
        assert self.latency is not None
        times = arrivals.schedule(kind, rate_hz, seconds / self.scale, seed)
        due_ns = [start_ns + int(at * self.scale * 1e9) for at in times]
        give_up_ns = start_ns + int((seconds + OVERTIME_S) * 1e9)
        latency_ns = []
        unserved = 0
        tighten_timers()
        with self.latency.context():
            for due in due_ns:
                if time.monotonic_ns() >= give_up_ns:
                    unserved += 1  # at least this late: counted with the others, or a P99 would flatter
                else:
                    wait_until(due)
                    self._request(self.latency)
                latency_ns.append(time.monotonic_ns() - due)
        result["latency_ms"] = [round(taken / self.scale / 1e6, 5) for taken in latency_ns]
        result["unserved"] = unserved

    def _drive_best_effort(self, start_ns: int, seconds: float, result: dict[str, Any]) -> None:
        best_effort = self.best_effort
        assert best_effort is not None
        stop_ns = start_ns + int(seconds * 1e9)
        with best_effort.context():
            wait_until(start_ns - int(LEAD_IN_S * 1e9))
            while time.monotonic_ns() < start_ns:
                with self.best_effort_region():
                    best_effort.step()
            best_effort.synchronize()
            began_ns = time.monotonic_ns()
            items = 0
            while time.monotonic_ns() < stop_ns:
                with self.best_effort_region():
                    best_effort.step()
                items += best_effort.items
            best_effort.synchronize()
            taken_s = (time.monotonic_ns() - began_ns) / 1e9 / self.scale
        result["best_effort_per_s"] = items / taken_s
        result["best_effort_items"] = items


def managed_regions(latency: Workload | None, best_effort: Workload | None) -> tuple[Region, Region]:
    """Regions of both classes, and their streams bound to them: autograd launches from threads of its own."""
    import cudasched

    for workload, client_class in ((latency, "latency"), (best_effort, "best_effort")):
        if workload and workload.stream:
            cudasched.bind_stream(workload.stream, client_class)
    return (lambda: cudasched.region("latency")), (lambda: cudasched.region("best_effort"))


def probe() -> dict[str, Any]:
    """What is here to run on: the first device's name and driver version, and PyTorch's version, each or None."""
    import importlib.metadata

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
    if args.managed:
        import cudasched  # noqa: F401  before the first CUDA call: the import installs the hook
    one_process = bool(args.latency and args.best_effort)
    make_latency: Callable[..., Workload]
    make_best_effort: Callable[..., Workload]
    if args.backend == "simulated":
        make_latency, make_best_effort = simulated.latency_workload, simulated.best_effort_workload
    else:
        if TYPE_CHECKING:
            from cudasched.demo import workloads
        else:
            import workloads
        make_latency, make_best_effort = workloads.latency_workload, workloads.best_effort_workload
    latency = make_latency(args.latency, own_stream=one_process) if args.latency else None
    best_effort = make_best_effort(args.best_effort, own_stream=one_process) if args.best_effort else None
    regions: tuple[Region, Region] = (nullcontext, nullcontext)
    if args.managed:
        regions = managed_regions(latency, best_effort)
    if one_process:
        sys.setswitchinterval(1e-4)  # else either thread may hold the interpreter for 5 ms
    return Client(latency, best_effort, args.time_scale, regions)


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
            result = client.run(
                command["start_ns"], command["seconds"], command["seed"], command["rate_hz"], command["arrivals"]
            )
            gc.enable()
        elif name == "kernels":
            result = client.kernels()
        else:
            raise ValueError(f"unknown command {name!r}")
        answer({"event": "result", **result})


def main() -> int:
    """Entry point of the worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--latency", help="load that answers requests")
    parser.add_argument("--best-effort", help="load that runs in a closed loop")
    parser.add_argument("--backend", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--managed", action="store_true", help="schedule the roles of this process with regions")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes")
    parser.add_argument("--probe", action="store_true", help="say what there is to run on, and stop")
    args = parser.parse_args()
    # Whatever a library prints belongs to stderr: stdout is the protocol's.
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    if args.probe:
        answer({"event": "probe", **probe()})
        return 0
    if not (args.latency or args.best_effort):
        parser.error("name a --latency load, a --best-effort load, or both")
    began = time.monotonic()
    client = build(args)
    client.warm_up()
    answer({"event": "ready", "pid": os.getpid(), "startup_s": round(time.monotonic() - began, 2)})
    serve(client, sys.stdin, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
