"""One process of the serving benchmark: requests at random times to a batcher.

    python -m benchmarks.inference.program --seconds 2.5 [--simulate]

With PyTorch on a GPU, where the model is BERT's encoder as one CUDA graph a size; with --simulate on the simulated
driver, where a batch is one kernel. Prints figures as JSON: the value, the least, the most, and the number of samples.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import cudasched  # noqa: F401  before torch
from cudasched.demo.harness import percentile
from cudasched.inference import Batcher, DeadlineError
from cudasched.inference._times import Times

SIZES = (1, 2, 4, 8, 16)
HELD_OUT = (2, 8)
OVERLOAD, BESIDE = 1.5, 0.2
"""Rates, of the capacity: the most requests a second that batches back to back serve."""
SLO_OF_LARGEST = 3.0
RUNS = 40
Run = Callable[[int], None]
Made = tuple[Run, Callable[[int], float]]
"""A batch of so many requests on the GPU, and its time in ms as it is predicted before one has run."""


def torch_run() -> Made:
    """BERT's encoder."""
    import torch
    from cudasched.demo.workloads import Encoder
    from cudasched.inference.torch import Model

    example = torch.zeros(128, dtype=torch.int64)
    model = Model(Encoder().half().cuda().eval(), example, sizes=SIZES, graphs=True)
    return lambda count: model([example] * count) and None, model.predict


def simulated_run() -> Made:
    """A batch is a kernel of 300 us and 60 us a request."""
    from cudasched.demo.simulated import Driver

    driver = Driver()
    driver.make_current()
    functions = driver.functions([300 + 60 * count for count in range(1, SIZES[-1] + 1)], blocks=1)
    stream = driver.stream(priority=0)

    def run(count: int) -> None:
        driver.make_current()  # on whichever thread
        driver.launch(functions[300 + 60 * count], 1, stream)
        driver.synchronize(stream)

    return run, lambda count: 0.3 + 0.06 * count


@dataclass
class Served:
    """What became of offered requests.

    Attributes:
        offered: All, and those that were refused.
        in_time: Had an answer before their deadline.
        latency_ms: Of those that had an answer.
        ran_s: Time of their batches, each request's share of it.
        late_s: Of those that were late.
    """

    offered: int = 0
    in_time: int = 0
    latency_ms: list[float] = field(default_factory=list)
    ran_s: float = 0.0
    late_s: float = 0.0


class Load:
    """Requests at random times to a batcher of its own."""

    def __init__(self, run: Run, slo_ms: float, **options: Any) -> None:
        self._run, self._slo_ms = run, slo_ms
        self._ran: dict[int, tuple[float, float]] = {}  # a request's share of its batch, and when that ended
        self._batcher = Batcher(self._batch, SIZES, slo_ms, max_queue=4096, example=-1, **options)

    def _batch(self, numbers: list[int]) -> list[int]:
        began = time.perf_counter()
        self._run(len(numbers))
        ended = time.perf_counter()
        self._ran |= dict.fromkeys(numbers, ((ended - began) / len(numbers), ended))
        return numbers

    def serve(self, rate: float, seconds: float, seed: int) -> Served:
        """Poisson arrivals, so many a second; the deadline counts from the arrival."""
        served, waiting = Served(), []
        draw = random.Random(seed)
        began = due = time.perf_counter()
        while due < began + seconds:
            if (left_s := due - time.perf_counter()) > 0:
                time.sleep(left_s)
            number = served.offered
            served.offered += 1
            if (left_ms := self._slo_ms - 1e3 * (time.perf_counter() - due)) > 0:  # else this thread came too late
                with contextlib.suppress(DeadlineError):
                    waiting.append((number, due, self._batcher.submit_future(number, deadline_ms=left_ms)))
            due += draw.expovariate(rate)
        for number, due, future in waiting:
            try:
                future.result(60)
            except DeadlineError:
                continue
            took_s, ended = self._ran[number]
            served.latency_ms.append(1e3 * (ended - due))
            served.ran_s += took_s
            if served.latency_ms[-1] <= self._slo_ms:
                served.in_time += 1
            else:
                served.late_s += took_s
        return served

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._batcher.close()


def times_ms(run: Run) -> dict[int, list[float]]:
    """Of batches of each size, in turns."""
    taken: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(-4, RUNS):
        for size in SIZES:
            began = time.perf_counter()
            run(size)
            if number >= 0:
                taken[size].append(1e3 * (time.perf_counter() - began))
    return taken


def unseen(taken: dict[int, list[float]]) -> dict[str, Any]:
    """The bounds of sizes that have not run, against what they take when they run."""
    errors, held = [], []
    for size in HELD_OUT:
        known = Times(SIZES)
        for other in set(SIZES) - {size}:
            for value_ms in taken[other]:
                known.record(other, round(1e6 * value_ms))
        bound_ms = known.bound_ns(size) / 1e6
        errors.append(abs(bound_ms / percentile(taken[size], 0.9) - 1))
        held.append(statistics.fmean(value_ms <= bound_ms for value_ms in taken[size]))
    count = RUNS * len(HELD_OUT)
    return {
        "unseen_batch_error": (statistics.median(errors), min(errors), max(errors), count),
        "unseen_batch_coverage": (statistics.fmean(held), min(held), max(held), count),
    }


def figures(make: Callable[[], Made], seconds: float) -> dict[str, Any]:
    """All of them."""
    run, predict = make()
    gc.collect()
    gc.disable()  # the answers that this program keeps are no server's garbage
    predicted_ms = {size: predict(size) for size in SIZES}
    taken = times_ms(run)
    errors = [abs(predicted_ms[size] / statistics.median(taken[size]) - 1) for size in SIZES]
    capacity = max(1e3 * size / statistics.median(values) for size, values in taken.items())
    slo_ms = SLO_OF_LARGEST * statistics.median(taken[SIZES[-1]])
    with Load(run, slo_ms) as load:
        over = load.serve(OVERLOAD * capacity, 2 * seconds, 0)
    late = over.late_s / over.ran_s if over.ran_s else 0.0
    with Load(run, slo_ms) as load:
        alone = load.serve(BESIDE * capacity, 3 * seconds, 1)
    p99 = percentile(alone.latency_ms, 0.99)
    beside = _beside(run, [make()[0] for _ in range(3)], slo_ms, BESIDE * capacity, 3 * seconds)
    priority = percentile(beside.latency_ms, 0.99) / p99
    return {
        **unseen(taken),
        "predicted_batch_error": (statistics.median(errors), min(errors), max(errors), RUNS * len(SIZES)),
        "late_gpu_share": (late, late, late, over.offered),
        "priority_p99_ratio": (priority, priority, priority, beside.offered),
    }


def _beside(run: Run, others: list[Run], slo_ms: float, rate: float, seconds: float) -> Served:
    """A latency model's requests beside those of best-effort ones."""
    with ExitStack() as stack:
        loads = [stack.enter_context(Load(one, 20 * slo_ms, client_class="best_effort")) for one in others]
        load = stack.enter_context(Load(run, slo_ms))
        threads = stack.enter_context(ThreadPoolExecutor(len(loads)))
        beside = [threads.submit(one.serve, rate, seconds, 2 + number) for number, one in enumerate(loads)]
        served = load.serve(rate, seconds, 1)
        for each in beside:
            each.result()  # raises what went wrong there
    return served


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)  # four models in one interpreter (docs/pytorch.md)
    print(json.dumps(figures(simulated_run if options.simulate else torch_run, options.seconds)))


if __name__ == "__main__":
    main()
