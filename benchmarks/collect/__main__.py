"""What recording adds to a launch: off, by events and by CUPTI, in turn, on a launch loop and on PyTorch's `x.add_(1)`.

``python -m benchmarks.collect --out benchmarks/results/collect.json``. CPU time of the launching thread, ns a launch;
the GPU's own cost of events is not in it. The baseline of each row is the same loop under the hook with recording off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cudasched.cli.coverage import find_cupti
from cudasched.demo.harness import Backend, HarnessError

from benchmarks import meta
from benchmarks.overhead.__main__ import HERE as OVERHEAD
from benchmarks.overhead.__main__ import KERNELS, Series, _row, build
from benchmarks.results.schema import OverheadRow, Results

PATIENCE_S = 300


def _measure(
    command: Sequence[str], names: Sequence[str], timing: str, settings: dict[str, str]
) -> dict[str, list[float]]:
    """Times of each batch, ns a launch, by the loop's kernels, with recording by `timing`, or off where it is empty."""
    with tempfile.TemporaryDirectory(prefix="cudasched-collect-") as directory:
        environment = {**os.environ, **settings}
        if timing:
            environment |= {"CUDASCHED_COLLECT_DIR": directory, "CUDASCHED_COLLECT_TIMING": timing}
            cupti = environment.get("CUDASCHED_CUPTI") or find_cupti(Path(command[0]))
            if cupti:
                environment["CUDASCHED_CUPTI"] = cupti
        done = subprocess.run(
            [sys.executable, "-m", "cudasched", "run", "--", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise HarnessError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
        if timing and not any(path.stat().st_size > 4096 for path in Path(directory).iterdir()):
            raise HarnessError(f"nothing was recorded by {timing}: {done.stderr[-500:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: [float(value) for value in words[1:]] for words in lines if words and words[0] in names}


def _compare(
    label: str,
    command: Sequence[str],
    names: dict[str, str],
    rounds: int,
    timings: Sequence[str],
    settings: dict[str, str],
) -> list[OverheadRow]:
    series = {(name, timing): Series() for name in names for timing in timings}
    for _ in range(rounds):
        for timing in timings:
            for name, batches in _measure(command, list(names), timing, settings).items():
                series[name, timing].rounds.append(batches)
    return [
        _row(f"{label}, {words}: recorded by {timing}", series[name, timing], series[name, ""])
        for name, words in names.items()
        for timing in timings[1:]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--batches", type=int, default=200, help="of each turn (200)")
    parser.add_argument("--launches", type=int, default=200, help="launches of each batch (200)")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the simulated driver, events alone")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(arguments)
    timings = ["", "events"] if options.simulate else ["", "cupti", "events"]
    device = None
    try:
        described = meta.describe(options.simulate, options.commit, torch_needed=False)
        device = Backend.simulated() if options.simulate else Backend()
        settings = {
            **device.environment(hooked=True),
            "CUDASCHED_CACHE_DIR": "off",
            "LAUNCH_LOOP_IMAGE": "simulated" if options.simulate else "ptx",
        }
        counts = [str(options.batches), str(options.launches)]
        with tempfile.TemporaryDirectory(prefix="cudasched-collect-") as scratch:
            program, _ = build(Path(scratch))
            label = "simulated driver" if options.simulate else "driver"
            rows = _compare(label, [str(program), *counts], KERNELS, options.rounds, timings, settings)
        if described.torch is not None:
            loop = [sys.executable, str(OVERHEAD / "torch_loop.py"), *counts]
            rows += _compare("PyTorch", loop, {"add_": "x.add_(1)"}, options.rounds, timings, settings)
        if not options.simulate:
            described.sm_clock_mhz = meta.sm_clock_mhz()
    except HarnessError as error:
        print(f"collect: {error}", file=sys.stderr)
        return 1
    finally:
        if device is not None:
            device.close()
    Results(meta=described, rows=rows).write(options.out)
    for row in rows:
        print(f"{row.what}: {row.ns_median:.0f} ns, {row.added_ns_median:+.0f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
