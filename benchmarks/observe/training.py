"""ResNet50 training for a time, as a program that knows nothing of traces; what `benchmarks.observe.tracing` traces.

    python -m benchmarks.observe.training --seconds 300 --progress FILE [--simulate] [--class best_effort]

Writes the steps done, and the seconds that they took, into the file now and then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_EVERY_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe.training")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--class", dest="client_class", default="normal")
    options = parser.parse_args(arguments)
    import cudasched

    if options.simulate:
        from cudasched.demo import simulated

        load = simulated.best_effort_workload("resnet50")
    else:
        from cudasched.demo import workloads

        load = workloads.best_effort_workload("resnet50")  # type: ignore[assignment]
    cudasched.set_class(options.client_class)
    steps = 0
    with load.context():
        for _ in range(load.warm_up_steps):
            load.step()
        load.synchronize()
        begin = time.monotonic()
        told = begin
        while (now := time.monotonic()) < begin + options.seconds:
            with cudasched.region(options.client_class, name="step"):
                load.step()
            steps += 1
            if now - told >= _EVERY_S:
                told = now
                options.progress.write_text(f"{steps} {now - begin}")
        load.synchronize()
    options.progress.write_text(f"{steps} {time.monotonic() - begin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
