"""Servers and training loops in threads of one process, as a user writes them; prints one JSON line of what they did.

    python benchmarks/pytorch/threads.py --how regions --latency bert_graph --training transformer

`--how`: `bare` (no cudasched, one default stream), `regions` (the `with` lines and nothing else), or `priority` (no
cudasched, a stream each, the servers' of high priority). The loads are built on the default stream. Phases run one
after another: `all`, `servers` (all of them, and no training), or one load alone by its number. A server's requests
come at the same times in each phase and however it is run, and at other times than another server's.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cudasched  # with CUDASCHED_OFF=1 where `--how` says without
import torch
from cudasched.demo.workloads import best_effort_workload, latency_workload
from torch import nn

#: Before each phase's time, not counted: first steps load kernels and try algorithms out, for which the whole process
#: stops, and in the phases of one load alone that is long over.
WARM_UP_S = 2.0


class Tiny:
    """Stands for a load in a rehearsal."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)

    def step(self) -> None:
        """A forward and a backward pass of next to nothing."""
        self.model(torch.ones(1, 8)).sum().backward()


class Thread:
    """One load, its thread's scope, and what it did in a phase."""

    def __init__(self, name: str, serves: bool, how: str, simulated: bool) -> None:
        self.name, self.serves, self.how = name, serves, how
        self.warm_up_s = 0.5 if simulated else WARM_UP_S
        build = latency_workload if serves else best_effort_workload
        self.load: Any = Tiny() if simulated else build(name)
        self.stream: Any = None
        if how == "priority" and not simulated:
            self.stream = torch.cuda.Stream(priority=-5 if serves else 0)
        self.latency_ms: list[float] = []
        self.per_s = 0.0

    def scope(self) -> AbstractContextManager[Any]:
        """What each request or step is in."""
        if self.how == "regions":
            return cudasched.region("latency" if self.serves else "best_effort")
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def run(self, seconds: float, rate_hz: float, seed: int) -> None:
        """A phase."""
        if self.serves:
            self.serve(seconds, rate_hz, seed)
        else:
            self.train(seconds)

    def serve(self, seconds: float, rate_hz: float, seed: int) -> None:
        """Answers requests at random; a latency counts from when the request was due."""
        rng, self.latency_ms = random.Random(seed), []
        began = time.monotonic()
        due = began + rng.expovariate(rate_hz)
        while due < began + self.warm_up_s + seconds:
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            with self.scope():
                self.load.step()
                synchronize()
            if due > began + self.warm_up_s:
                self.latency_ms.append((time.monotonic() - due) * 1e3)
            due += rng.expovariate(rate_hz)

    def train(self, seconds: float) -> None:
        """Steps without end."""
        steps, began, first = 0, time.monotonic(), 0.0
        while (now := time.monotonic()) < began + self.warm_up_s + seconds:
            with self.scope():
                self.load.step()
            if now > began + self.warm_up_s:
                first = first or now
                steps += 1
        with self.scope():
            synchronize()
        self.per_s = steps / max(time.monotonic() - first, 1e-9) if first else 0.0


def synchronize() -> None:
    """Waits for the thread's own work."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def main() -> None:
    """Runs the phases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["bare", "regions", "priority"], required=True)
    parser.add_argument("--latency", nargs="*", default=[])
    parser.add_argument("--training", nargs="*", default=[])
    parser.add_argument("--phases", nargs="*", default=["all"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate-hz", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the times of requests")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    threads = [Thread(name, True, options.how, options.simulate) for name in options.latency]
    threads += [Thread(name, False, options.how, options.simulate) for name in options.training]
    done = []
    for phase in options.phases:
        running = chosen(threads, phase)
        together(
            [
                lambda t=thread: t.run(options.seconds, options.rate_hz, 100 * options.seed + threads.index(t))
                for thread in running
            ],
        )
        done.append(
            {
                "phase": phase,
                "latency_ms": {t.name: t.latency_ms for t in running if t.serves},
                "per_s": {t.name: t.per_s for t in running if not t.serves},
            }
        )
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 1
    print(json.dumps({"phases": done, "reserved": reserved}))


def chosen(threads: list[Thread], phase: str) -> list[Thread]:
    """Those that run in a phase."""
    if phase == "all":
        return threads
    return [thread for thread in threads if thread.serves] if phase == "servers" else [threads[int(phase)]]


def together(actions: list[Callable[[], None]]) -> None:
    """Runs them in a thread each. Raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    main()
