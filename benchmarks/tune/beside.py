"""What a tuner does to a server on the same GPU: the row `tuner_beside_p99_ratio` of kernels.json.

    python -m benchmarks.tune beside --out benchmarks/results/kernels.json
    python -m benchmarks.tune beside --rehearse --out /tmp/beside.json

A BERT graph server is alone, beside `cudasched tune`, and beside a tuner that does not see it (another directory of
client tables, so that both take turns as the driver has it), each for some seconds in turns, with equal arrivals. The
tuner begins ahead of its turn and searches, cold, until it is ended. The figure is the median over turns and kernels of
the server's P99 over its P99 alone in the same turn; what the other tuner does is printed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cudasched.demo.harness import CUDASCHED, HEAD_START_S, Backend, percentile
from cudasched.kernels import _catalog

from benchmarks import meta
from benchmarks.breadth.__main__ import Fleet, Place
from benchmarks.results.schema import FigureRow, Results, merge_figures

SERVER = Place("server", "bert_graph", "two_processes")
RATE_HZ = 60.0
#: Kernels that are tuned beside it: one whose launches are short, one of which some configurations take milliseconds.
SPACES = ("layernorm", "gemm")
#: Importing, compiling the first configurations and measuring some.
AHEAD_S = 10.0
GOAL = 1.25


@contextlib.contextmanager
def tuning(space: str, environment: Mapping[str, str], scratch: Path, replay: Path | None) -> Iterator[None]:
    """A tuner that searches until the end of the block."""
    database = scratch / f"{space}.sqlite"
    database.unlink(missing_ok=True)
    what = ["--replay", str(replay)] if replay else ["--space", str(_catalog.sources() / f"{space}.toml")]
    command = [*CUDASCHED, "tune", *what, "--database", str(database), "--evaluations", "100000", "--cold"]
    with (scratch / f"{space}.log").open("w+") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            time.sleep(AHEAD_S)
            if replay is None and child.poll() is not None:
                log.seek(0)
                raise SystemExit(f"the tuner of {space} ended before its turn: {log.read()[-2000:]}")
            yield
            if replay is None and child.poll() is not None:
                print(f"the tuner of {space} ended within its turn", file=sys.stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def served(fleet: Fleet, seconds: float, seed: int) -> list[float]:
    """Latencies of the server's requests, ms."""
    fleet[SERVER].tell(
        "run",
        start_ns=time.monotonic_ns() + int(HEAD_START_S * 1e9),
        seconds=seconds,
        seed=seed,
        rates_hz={SERVER.name: RATE_HZ},
        arrivals="poisson",
        hint_ms=0.0,
        slo_ms=0.0,
        keep_due=False,
    )
    latency: list[float] = fleet[SERVER].answer(seconds + 60.0)["latency"][SERVER.name]["latency_ms"]
    return latency


def brief(latency_ms: Sequence[float]) -> str:
    """Three percentiles of it."""
    return "/".join(f"{percentile(latency_ms, share):.2f}" for share in (0.5, 0.95, 0.99)) + " ms"


def measure(options: argparse.Namespace, backend: Backend) -> dict[str, list[float]]:
    """P99 over alone, by the way that the tuner shares the GPU."""
    ratios: dict[str, list[float]] = {"cudasched": [], "time slices": []}
    replay = options.rehearse and next(iter(sorted((Path(__file__).parent / "recorded").glob("layernorm*.npz"))))
    with Fleet(backend) as fleet:
        fleet.build(SERVER)()
        seen = {**os.environ, "CUDASCHED_RUN_DIR": str(fleet.scratch / SERVER.mode)}
        (fleet.scratch / "apart").mkdir(mode=0o700)
        unseen = {**seen, "CUDASCHED_RUN_DIR": str(fleet.scratch / "apart")}
        for turn in range(options.turns):
            for space in SPACES:
                alone = served(fleet, options.seconds, turn)
                told = [f"alone {brief(alone)}"]
                for arm, environment in (("cudasched", seen), ("time slices", unseen)):
                    with tuning(space, environment, fleet.scratch, replay or None):
                        beside = served(fleet, options.seconds, turn)
                    ratios[arm].append(percentile(beside, 0.99) / percentile(alone, 0.99))
                    told.append(f"{arm} {brief(beside)}")
                print(f"{space}: {', '.join(told)}", flush=True)
    return ratios


def main(arguments: Sequence[str]) -> int:
    """Entry point of `beside`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune beside", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the file whose row is replaced")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part of a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="the simulated driver, and a tuner that needs no GPU")
    parser.add_argument("--limited-by", default="")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    backend = Backend.simulated() if options.rehearse else Backend()
    about = meta.describe(options.rehearse, options.commit)
    try:
        ratios = measure(options, backend)
    finally:
        backend.close()
    for arm, values in ratios.items():
        print(f"{arm}: P99 {statistics.median(values):.2f} x alone ({min(values):.2f} to {max(values):.2f})")
    ours = ratios["cudasched"]
    row = FigureRow.judged(
        figure="tuner_beside_p99_ratio",
        value=statistics.median(ours),
        goal=GOAL,
        better="less",
        low=min(ours),
        high=max(ours),
        n=len(ours),
        limited_by=options.limited_by,
    )
    if options.rehearse:
        Results(meta=about, rows=[row]).write(options.out)
    else:
        merge_figures(options.out, about, [row])
    return 0
