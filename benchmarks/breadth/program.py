"""One best-effort program of the breadth benchmark, started and paused by commands.

Run by path, so that nothing of cudasched is imported: under `cudasched run` it is an unmodified program. Commands come
as JSON lines on stdin, answers go as JSON lines to stdout:

                                       <- {"event": "imported"}     nothing has touched the GPU
    -> {"command": "build"}            <- {"event": "ready", "step_ms": 21.3}
    -> {"command": "start"}            <- {"event": "result"}       steps from here on, without end
    -> {"command": "readings", "from_ns": ..., "until_ns": ...}
                                       <- {"event": "result", "readings": [[ns, steps], ...]}
    -> {"command": "losses"}           <- {"event": "result", "losses": [6.9, ...]}     all that were read
    -> {"command": "pause"}            <- {"event": "result"}       all steps are done
    -> {"command": "kernels", "steps": 3}
                                       <- {"event": "result", "kernel_us": [[62.5, 120], ...], "per_item_us": ...}
    -> {"command": "again", "after_s": 0.3}
                                       <- {"event": "result"}       while paused: it will begin anew, and step a little
    -> {"command": "builds"}           <- {"event": "result", "done": true, "builds": [[from_ns, until_ns], ...]}
    -> {"command": "state"}            <- {"event": "result", "untracked_launches": ..., ...}
    -> {"command": "quit"}

It never synchronises to be measured: it reads its loss every so many steps, and at those moments it is known how many
steps are complete. Throughput is counted from one such reading to another.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"
#: Steps before it is ready: allocations, autotuning and lazy loading are over then.
WARM_UP_STEPS = 8
PROFILED_STEPS = 3
#: A program that began anew runs so long, so that what it makes slices of is cut meanwhile.
ANEW_S = 1.0
#: Between two looks at whether slices were built.
LOOK_S = 0.005


class Loop:
    """Runs the steps of a program on the thread that calls `run`, until another thread asks it to pause.

    Args:
        steps: The program, past its first `yield`.
        read: Waits for a step's loss.
        read_every: Steps from one reading to the next.
    """

    def __init__(self, steps: Iterator[Any], read: Callable[[Any], object], read_every: int) -> None:
        self.steps, self.read, self.read_every = steps, read, read_every
        self.pausing = threading.Event()
        self.count = 0
        self.readings: list[tuple[int, int]] = []
        self.losses: list[Any] = []

    def warm_up(self, steps: int = WARM_UP_STEPS) -> float:
        """Runs a few steps, and as many again; returns ms a step of the latter."""
        for _ in range(steps):
            loss = next(self.steps)
        self.read(loss)
        began = time.monotonic()
        for _ in range(steps):
            loss = next(self.steps)
        self.read(loss)
        return (time.monotonic() - began) * 1e3 / steps

    def run(self) -> None:
        """Steps until `pausing` is set; all are done then."""
        loss = None
        while not self.pausing.is_set():
            loss = next(self.steps)
            self.count += 1
            if self.count % self.read_every == 0:
                self.losses.append(self.read(loss))
                self.readings.append((time.monotonic_ns(), self.count))
        if loss is not None:
            self.read(loss)
        self.pausing.clear()

    def readings_within(self, from_ns: int, until_ns: int) -> list[tuple[int, int]]:
        """The readings from one moment to another."""
        first = bisect.bisect_left(self.readings, (from_ns, 0))
        return self.readings[first : bisect.bisect_right(self.readings, (until_ns, sys.maxsize))]


def kernels(loop: Loop, steps: int) -> dict[str, Any]:
    """Kernel durations of some steps as CUPTI records them, as [us, count] pairs, and their sum for one step in us."""
    import workloads

    def run() -> None:
        for _ in range(steps):
            loss = next(loop.steps)
        loop.read(loss)

    return counted(workloads.kernel_durations_us(run), steps)


def counted(durations_us: list[float], items: int) -> dict[str, Any]:
    """Durations as the benchmark keeps them."""
    counts: dict[float, int] = {}
    for duration_us in durations_us:
        rounded = round(duration_us, 1)
        counts[rounded] = counts.get(rounded, 0) + 1
    return {"kernel_us": sorted(counts.items()), "per_item_us": sum(durations_us) / items}


def state() -> dict[str, Any]:
    """What cudasched has counted in this process."""
    import cudasched

    return asdict(cudasched.state())


class Builds:
    """Notes when slices of graphs are built, while a program begins anew.

    Attributes:
        spans: From when until when, ns; a build that ends between two looks ended at the second one at the latest.
        done: The program has begun anew.
    """

    def __init__(self, told: Callable[[], dict[str, Any]] = state) -> None:
        self.spans: list[tuple[int, int]] = []
        self.done = True
        self._told = told
        self._ended = threading.Event()

    def around(self, begin: Callable[[], object]) -> None:
        """Calls `begin` and looks meanwhile."""
        self.spans, self.done = [], False
        self._ended.clear()
        before = self._told()
        looks = threading.Thread(target=self._look, args=(before,), daemon=True)
        looks.start()
        try:
            begin()
        finally:
            self._ended.set()
            looks.join()
            self.done = True

    def _look(self, before: dict[str, Any]) -> None:
        while True:
            is_last = self._ended.wait(LOOK_S)
            after, at_ns = self._told(), time.monotonic_ns()
            if after["graph_builds"] > before["graph_builds"]:
                self.spans.append((at_ns - (after["graph_build_ns"] - before["graph_build_ns"]), at_ns))
            before = after
            if is_last:
                return


SimulatedSteps = Callable[[str], tuple[Iterator[Any], Callable[[Any], object], Callable[[int], dict[str, Any]]]]
Beside = Callable[[str, bool, float], Any]


def simulated_steps(load: str) -> tuple[Iterator[Any], Callable[[Any], object], Callable[[int], dict[str, Any]]]:
    """A load of the simulated driver in a program's place: its steps, how it is read, its kernels."""
    import simulated

    def steps() -> Iterator[Any]:
        yield
        workload = simulated.best_effort_workload(load)
        with workload.context():
            while True:
                workload.step()
                yield workload

    durations_us = [float(us) for us in simulated.BEST_EFFORT_LOADS[load]]
    return steps(), lambda workload: workload.synchronize(), lambda _: counted(durations_us, 1)


def main(
    known: dict[str, Any] | None = None, simulated: SimulatedSteps = simulated_steps, beside: Beside | None = None
) -> int:
    """Entry point.

    Args:
        known: The programs; those of this benchmark by default.
        simulated: Makes what stands for one on the simulated driver.
        beside: Makes a server that is to run in this process.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="a program, or with --simulate a load of the simulated driver")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--read-every", type=int, help="steps from one reading of the loss to the next")
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps, and as many are timed then")
    if beside:
        parser.add_argument("--beside", help="a server that runs in this process")
        parser.add_argument(
            "--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes"
        )
    args = parser.parse_args()
    sys.path.insert(0, str(DEMO))
    import client

    send = client.take_protocol()

    def answer(event: str = "result", **fields: Any) -> None:
        send({"event": event, **fields})

    profile: Callable[[int], dict[str, Any]]
    make: Callable[[], Iterator[Any]]
    server = beside(args.beside, args.simulate, args.time_scale) if beside and args.beside else None
    if args.simulate:
        make = lambda: simulated(args.name)[0]  # noqa: E731
        steps, read, profile = simulated(args.name)
        read_every = args.read_every or 2
    else:
        from programs import PROGRAMS

        one = (known or PROGRAMS)[args.name]
        make = lambda: one.steps(args.tiny)  # noqa: E731
        steps, read = make(), float
        read_every = args.read_every or one.read_every
        profile = lambda steps: kernels(loop, steps)  # noqa: E731
    loop = Loop(steps, read, read_every)
    builds = Builds()
    del steps  # the loop has them, and lets go of them when the program begins anew
    next(loop.steps)
    answer("imported", pid=os.getpid())

    def anew() -> None:
        loop.steps = iter(())
        gc.collect()  # graphs and memory of the one before
        loop.steps = make()
        next(loop.steps)
        until = time.monotonic() + ANEW_S
        while True:
            for _ in range(read_every):
                loss = next(loop.steps)
            loop.read(loss)
            if time.monotonic() >= until:
                return

    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    #: What is answered while the program steps.
    at_once: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "readings": lambda told: {"readings": loop.readings_within(told["from_ns"], told["until_ns"])},
        "losses": lambda _: {"losses": loop.losses},
        "state": lambda _: state(),
        "builds": lambda _: {"done": builds.done, "builds": builds.spans},
    }

    def listen() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            name = command["command"]
            if name in at_once:
                answer(**at_once[name](command))
            elif name == "run" and server:
                del command["command"]
                threading.Thread(target=lambda told=command: answer(**server.run(told)), daemon=True).start()
            else:
                if name in ("pause", "quit"):
                    loop.pausing.set()
                commands.put(command)
        os._exit(0)  # the parent is gone

    threading.Thread(target=listen, daemon=True).start()
    while True:
        command = commands.get()
        name = command["command"]
        if name == "quit":
            os._exit(0)  # its CUDA context goes with the process; tearing down Python takes a second more
        if name == "leave":
            return 0  # with all that ends a process in good order
        if name == "build":
            if server:
                server.build()
            answer("ready", step_ms=round(loop.warm_up(args.warm_up), 3))
        elif name == "start":
            gc.collect()
            answer()
            loop.run()
        elif name == "pause":
            loop.pausing.clear()
            answer()
        elif name == "kernels":
            answer(**profile(command.get("steps", PROFILED_STEPS)))
        elif name == "again":
            builds.done = False
            answer()
            time.sleep(command["after_s"])
            builds.around(anew)
        else:
            raise ValueError(f"unknown command {name!r}")


if __name__ == "__main__":
    sys.exit(main())
