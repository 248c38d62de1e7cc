"""What two events add to the kernel between them, without CUPTI: what the scheduler's samples are too long by.

    python -m benchmarks.predictor.events          # on a GPU, with gcc and CUPTI, in seconds

A kernel that waits for 3 and for 20 us on the GPU's clock is launched between two events, in the queue of a busy GPU
and so that the GPU waits for it (events.c). It runs bare, which gives the time between its events, and once more
recorded by CUPTI, which gives the kernel's. The difference is what csrc/predict/sample.hpp takes to be 1.3 us.
Recordings by both (`training.record`) cannot say it where the GPU waits: CUPTI makes the launch call slower, which is
between the events.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cudasched.demo.harness import Backend, HarnessError

from benchmarks.c_program import compile_c

SOURCE = Path(__file__).with_name("events.c")
CASES = ("queued", "waited")
SEEN = tuple(f"{case}_seen" for case in CASES)
WAITS_NS = (3_000, 20_000)
PATIENCE_S = 120


def run(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, list[float]]:
    """Times between events, ns, by case.

    Raises:
        HarnessError: The program failed.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: [float(value) for value in words[1:]] for words in lines if words and words[0] in CASES + SEEN}


def kernel_ns(program: Path, samples: int, wait_ns: int, scratch: Path) -> tuple[float, dict[str, list[float]]]:
    """The median of what CUPTI says that the kernel takes, and times between events beside it."""
    import cudasched.collect

    data = scratch / f"{wait_ns}.parquet"
    collect = [sys.executable, "-m", "cudasched", "collect", "-o", str(data), "--"]
    beside = run([*collect, str(program), str(samples), str(wait_ns)], {**os.environ, "EVENTS_IMAGE": "ptx"})
    took = [ns for ns in cudasched.collect.read(str(data))["duration_ns"].to_pylist() if ns is not None]
    own = [ns for ns in took if ns < 2 * wait_ns + 20_000]  # without those that keep the GPU busy
    if not own:
        raise HarnessError("CUPTI timed none of the kernels")
    return statistics.median(own), beside


def say(what: str, values: Sequence[float], kernel: float) -> None:
    """A line: what events added, as median and from the 16th to the 84th percentile."""
    added = sorted(value - kernel for value in values)
    low, high = added[len(added) * 16 // 100], added[len(added) * 84 // 100]
    print(f"{what}: events add {statistics.median(added):.0f} ns ({low:.0f} to {high:.0f}; {len(added)} launches)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictor.events", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--samples", type=int, default=640, help="launches of each case (640)")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the simulated driver, without CUPTI")
    options = parser.parse_args(arguments)
    device = None
    try:
        device = Backend.simulated() if options.simulate else Backend()
        image = {"EVENTS_IMAGE": "simulated" if options.simulate else "ptx"}
        with tempfile.TemporaryDirectory(prefix="cudasched-events-") as scratch:
            program = compile_c(Path(scratch) / "events", SOURCE, options=("-Wall", "-Werror"))
            for wait_ns in WAITS_NS:
                command = [str(program), str(options.samples), str(wait_ns)]
                bare = run(command, {**device.environment(hooked=False), **image})
                if options.simulate:
                    kernel, beside = 20_000 * device.scale, {}
                else:
                    kernel, beside = kernel_ns(program, options.samples, wait_ns, Path(scratch))
                print(f"a kernel of {kernel:.0f} ns")
                for case in CASES:
                    say(f"  {case}", bare[case], kernel)
                    seen = bare[f"{case}_seen"]
                    print(f"    of {sum(seen) / len(seen):.1%} the first event was not complete after the second call")
                    if case in beside:
                        say(f"  {case}, beside CUPTI", beside[case], kernel)
            ticks = sorted({round(value) for case in CASES for value in bare[case]})
            least = min((after - before for before, after in itertools.pairwise(ticks)), default=0)
            print(f"the least difference of two times is {least} ns")
    except (HarnessError, subprocess.TimeoutExpired) as error:
        print(f"events: {error}", file=sys.stderr)
        return 1
    finally:
        if device is not None:
            device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
