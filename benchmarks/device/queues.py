"""Work queues against static distributions: how long the same items take, at three degrees of imbalance.

An item is a chain of steps that nothing can split, of a length drawn from a Zipf distribution whose exponent is such
that the largest length is so many times the mean (64, 4), in random order; or all are equal. A static distribution is
a loop over items around a loop over steps: `blocked` (each thread has so many in a row), `cyclic`, and
`block_per_item`, whose other threads idle because a chain has no work for them. `cyclic_flat` is cyclic with one loop
over steps, as the queues for threads and lanes have it, and `cyclic_flat_4` with the loop of the lanes: they are
measured and reported, and stand outside the figure.

    python -m benchmarks.device.queues --seconds 60     # one JSON object on standard output
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.device.gpu import COUNT, LENGTH, POINTER, Gpu, NoGpuError

SOURCE = Path(__file__).with_name("queue.cu")
ITEMS = 1 << 24
THREADS = 256
MEAN = 64
#: Largest length over the mean.
IMBALANCES = {"queue_severe": 64.0, "queue_moderate": 4.0, "queue_balanced": 1.0}
STATIC = ("blocked", "cyclic", "block_per_item")
OTHER_STATIC = ("cyclic_flat", "cyclic_flat_4")
#: The queues: the kernel, and how many items come from the counter in device memory at once (at most, for lanes).
QUEUES = {
    "queue_thread": ("queue_thread", 1),
    "queue_thread_8": ("queue_thread", 8),
    "queue_lanes": ("queue_lanes", 256),
    "queue_warp": ("queue_warp", 32),
    "queue_shared_warp": ("queue_shared_warp", 4 * THREADS),
    "queue_block": ("queue_block", THREADS),
}
REPEATS = 7


def exponent(largest: int, ratio: float) -> float:
    """Of the Zipf distribution over 1 to `largest` whose largest length is `ratio` times its mean, by bisection."""
    import numpy as np

    values = np.arange(1, largest + 1, dtype=np.float64)

    def ratio_of(a: float) -> float:
        weights = values**-a
        return float(largest * weights.sum() / (values * weights).sum())

    low, high = -4.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio_of(middle) < ratio else (low, middle)
    return (low + high) / 2


def lengths(count: int, ratio: float, seed: int = 1) -> Any:
    """Of `count` items, whose mean is about `MEAN` and whose largest is `ratio` times that."""
    import numpy as np

    if ratio == 1:
        return np.full(count, MEAN, dtype=np.uint32)
    largest = round(MEAN * ratio)
    weights = np.arange(1, largest + 1, dtype=np.float64) ** -exponent(largest, ratio)
    edges = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(edges, np.random.default_rng(seed).random(count)).astype(np.uint32) + 1
    return np.minimum(drawn, largest).astype(np.uint32)


def ratio_of(times: dict[str, list[float]]) -> dict[str, Any]:
    """The best static distribution over the best queue, for each repeat and of the medians."""
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    static = min((name for name in STATIC if name in medians), key=medians.__getitem__)
    queue = min((name for name in QUEUES if name in medians), key=medians.__getitem__)
    ratios = [a / b for a, b in zip(times[static], times[queue], strict=False)]
    return {
        "value": medians[static] / medians[queue],
        "low": min(ratios),
        "high": max(ratios),
        "n": len(ratios),
        "static": static,
        "queue": queue,
        "ms": medians,
    }


def measure(gpu: Gpu, ratio: float, until: float) -> dict[str, Any]:
    """One imbalance: all variants in turn, their results compared with those of the first.

    Raises:
        RuntimeError: A variant left other numbers, or the driver failed.
    """
    import numpy as np

    module = gpu.load(gpu.compile(SOURCE))
    names = (*STATIC, *OTHER_STATIC, *QUEUES)
    functions = {name: gpu.function(module, QUEUES.get(name, (name, 1))[0]) for name in names}
    items = ITEMS
    of_item = lengths(items, ratio)
    wanted = gpu.upload(of_item)
    found = int(gpu.call("cuMemAlloc", 4 * items))
    queue = int(gpu.call("cuMemAlloc", 16))
    gpu.call("cuMemsetD8", queue, 0, 16)

    def run(name: str) -> float:
        single = name == "block_per_item"
        threads = 32 if single else THREADS
        blocks = items if single else gpu.resident_blocks(functions[name], threads)
        batch = QUEUES.get(name, (name, 1))[1]
        arguments = ((queue, POINTER), (items, LENGTH), (batch, COUNT), (wanted, POINTER), (found, POINTER))
        return gpu.timed_ms(functions[name], blocks, threads, arguments)

    reference = None
    for name in names:  # also warms up
        gpu.call("cuMemsetD8", found, 0xFF, 4 * items)  # NaN
        run(name)
        result = np.empty(items, dtype=np.float32)
        gpu.call("cuMemcpyDtoH", result.ctypes.data, found, result.nbytes)
        if reference is None:
            reference = result
        elif not np.array_equal(reference, result):
            wrong = int((reference != result).sum())
            raise RuntimeError(f"{name}: {wrong} of {items} results differ from those of {names[0]}")
    if not np.isfinite(reference).all():
        raise RuntimeError(f"{names[0]}: some items were left out")

    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(REPEATS):
        if repeat >= 3 and time.monotonic() > until:
            break
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            times[name].append(run(name))
    for address in (wanted, found, queue):
        gpu.call("cuMemFree", address)
    made = ratio_of(times)
    made["largest_of_mean"] = float(of_item.max() / of_item.mean())
    for name in OTHER_STATIC:
        made[f"{name}_of_queue"] = made["ms"][name] / made["ms"][made["queue"]]
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text. Status 4: there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.queues")
    parser.add_argument("--seconds", type=float, default=90, help="about how long")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    found: dict[str, Any] = {}
    try:
        gpu = Gpu()
        for number, (name, ratio) in enumerate(IMBALANCES.items(), 1):
            until = begin + options.seconds * number / len(IMBALANCES)
            found[name] = measure(gpu, ratio, until)
            print(json.dumps(found), flush=True)  # the last line counts
    except NoGpuError as error:
        print(error, file=sys.stderr)
        return 4
    except (RuntimeError, ArithmeticError) as error:
        print(f"after {len(found)} of {len(IMBALANCES)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
