"""One process of the figures: makes a graph of so many nodes, and measures what it costs there; run by path.

Commands come as JSON lines on stdin, answers go as JSON lines to stdout; before the first one it has not touched the
GPU, and between two it is idle:

    -> {"command": "prepare", "nodes": 2000, "builds": false}
    <- {"event": "result", "bytes": ..., "state": ...}
    -> {"command": "turn", "instantiations": 6, "launches": 2000, "seconds": 0.5, "builds": false}
    <- {"event": "result", "instantiate_ns": ..., "clone_ns": ..., "launch_ns": ..., "per_s": ...}
    -> {"command": "quit"}

Under `cudasched run` it is an unmodified program, which asks cudasched what that has counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from ctypes import byref, c_int, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python" / "cudasched" / "demo")]

from benchmarks.graphs.driver import Graphs  # noqa: E402

#: Executable graphs that memory is divided by: the driver gives it out in large pieces.
COPIES = 8
#: Launches between two waits, in which no queue fills up.
BATCH = 20
#: Nodes of the graph whose launch is timed.
SMALL = 40
#: Slices are awaited so long.
PATIENCE_S = 60.0


class Captures:
    """Makes graphs of small kernels on one stream, by torch or by launches on the simulated driver."""

    def __init__(self, driver: Graphs, simulate: bool) -> None:
        self._keep: list[Any] = []
        self._driver = driver
        self._simulate = simulate
        if simulate:
            from simulated import Driver

            self._simulated = Driver()
            self._simulated.make_current()
            self._function = self._simulated.functions([3], 528)[3]
            self._stream = self._simulated.stream(0)
            self.stream = self._stream.value or 0
        else:
            import torch  # type: ignore[import-not-found,unused-ignore]

            self._torch = torch
            self._tensor = torch.zeros(1 << 16, device="cuda")
            self._side = torch.cuda.Stream()
            self.stream = self._side.cuda_stream

    def graph(self, nodes: int) -> int:
        """A graph of so many kernels, one after another."""
        if self._simulate:
            graph = c_void_p()
            self._simulated.begin_capture(self._stream)
            for _ in range(nodes):
                self._simulated.launch(self._function, 528, self._stream)
            self._driver.call("cuStreamEndCapture", self._stream, byref(graph))
            return graph.value or 0
        captured = self._torch.cuda.CUDAGraph(keep_graph=True)
        with self._torch.cuda.graph(captured, stream=self._side):
            for _ in range(nodes):
                self._tensor.add_(1.0)
        self._keep.append(captured)
        return int(captured.raw_cuda_graph())


def instantiate_and_clone_ns(driver: Graphs, graph: int, times: int) -> tuple[float, float]:
    """What an instantiation and a clone take their caller: medians of so many, which take turns."""
    taken: tuple[list[int], list[int]] = ([], [])
    for number in range(times + 1):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.perf_counter_ns()
            made = driver.clone(graph) if which else driver.instantiate(graph)
            taken[which].append(time.perf_counter_ns() - began)
            if which:
                driver.destroy_graph(made)
            else:
                driver.destroy(made)
    return statistics.median(taken[0][1:]), statistics.median(taken[1][1:])


def launch_ns(driver: Graphs, executable: int, stream: int, launches: int) -> float:
    """CPU time of the launching thread for one launch, the median over batches."""
    each = []
    for _ in range(max(3, launches // BATCH)):
        began = time.thread_time_ns()
        for _ in range(BATCH):
            driver.launch(executable, stream)
        each.append((time.thread_time_ns() - began) / BATCH)
        driver.synchronize()
    return statistics.median(each)


def per_s(driver: Graphs, executable: int, stream: int, seconds: float) -> float:
    """Launches a second, one after another, waited for now and then as a training loop does."""
    driver.synchronize()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for _ in range(BATCH):
            driver.launch(executable, stream)
        driver.synchronize()
        count += BATCH
    return count / (time.monotonic() - began)


def state() -> dict[str, Any]:
    """What cudasched counts in this process; nothing where it is not in it."""
    if os.environ.get("CUDASCHED_CLASS") is None:
        return {}
    import cudasched

    return asdict(cudasched.state())


class Probe:
    """What one process measures, turn by turn."""

    def __init__(self, simulate: bool) -> None:
        self.driver = Graphs()
        self.driver.call("cuInit", 0)
        devices = c_int()
        self.driver.call("cuDeviceGetCount", byref(devices))
        self._captures = Captures(self.driver, simulate)
        self._stream = self._captures.stream

    def prepare(self, nodes: int, builds: bool) -> dict[str, Any]:
        """Makes the graphs; says what memory an executable has taken, and with `builds`, its slices too."""
        driver = self.driver
        self._graph = self._captures.graph(nodes)
        driver.launch(driver.instantiate(self._captures.graph(1)), self._stream)  # what the first of all sets up
        driver.synchronize()
        before, free = state(), driver.free_bytes()
        self._executables = [driver.instantiate(self._graph) for _ in range(COPIES)]
        for executable in self._executables:
            driver.launch(executable, self._stream)
        driver.synchronize()
        if builds:
            self._await_slices(self._executables, before)
        found: dict[str, Any] = {"bytes": (free - driver.free_bytes()) / COPIES}
        after = state()
        found["state"] = {name: value for name, value in after.items() if "graph" in name or "slice" in name}
        if builds:
            found["graphs_sliced"] = after["graphs_sliced"] - before["graphs_sliced"]
        self._small = driver.instantiate(self._captures.graph(SMALL))
        launch_ns(driver, self._small, self._stream, 30 * BATCH)
        return found

    def turn(self, instantiations: int, launches: int, seconds: float, builds: bool) -> dict[str, float]:
        """Measures what is not 0."""
        driver = self.driver
        driver.launch(self._small, self._stream)  # whatever was on the GPU meanwhile
        driver.synchronize()
        found: dict[str, float] = {}
        found["instantiate_ns"], found["clone_ns"] = instantiate_and_clone_ns(driver, self._graph, instantiations)
        if seconds:
            found["per_s"] = per_s(driver, self._executables[0], self._stream, seconds)
        if launches:
            found["launch_ns"] = launch_ns(driver, self._small, self._stream, launches)
        if builds:
            before, executable = state(), driver.instantiate(self._graph)
            self._await_slices([executable], before)
            after = state()
            if after["graph_builds"] > before["graph_builds"]:
                took_ns = after["graph_build_ns"] - before["graph_build_ns"]
                found["build_ns"] = took_ns / (after["graph_builds"] - before["graph_builds"])
            driver.destroy(executable)
        return found

    def _await_slices(self, executables: list[int], before: dict[str, Any]) -> None:
        """Launches graphs until slices of so many more are there, or were tried to be built."""
        until = time.monotonic() + PATIENCE_S
        while (now := state())["graphs_sliced"] - before["graphs_sliced"] < len(executables):
            built = now["graph_builds"] - before["graph_builds"]
            whole = sum(now["graphs_whole"].values()) - sum(before["graphs_whole"].values())
            if max(built, whole) >= len(executables):
                until = min(until, time.monotonic() + 1)  # what is built by then is in place, or stays whole
            if time.monotonic() >= until:
                return
            for executable in executables:
                self.driver.launch(executable, self._stream)
            self.driver.synchronize()
            time.sleep(0.01)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    protocol = os.dup(1)
    os.dup2(2, 1)
    if not options.simulate:
        import torch  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  not while others are measured
    probe: Probe | None = None
    for line in sys.stdin:
        told = json.loads(line)
        command = told.pop("command")
        if command == "quit":
            break
        probe = probe or Probe(options.simulate)
        found = probe.prepare(**told) if command == "prepare" else probe.turn(**told)
        os.write(protocol, (json.dumps({"event": "result"} | found) + "\n").encode())
    os._exit(0)  # the context goes with the process


if __name__ == "__main__":
    sys.exit(main())
