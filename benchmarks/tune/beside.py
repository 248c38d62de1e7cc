"""What a tuner does to a server on the same GPU: two rows of kernels.json.

A BERT graph server is alone, beside `cudasched tune`, and beside a tuner that does not see it (another directory of
client tables, so that both take turns as the driver has it), each for some seconds in turns, with equal arrivals. A
tuner is started as its turn begins. Until its database has a first measurement it starts: it imports, computes what is
right and copies it to the GPU (`tuner_starting_p99_ratio`). Then it searches, cold, until it is ended
(`tuner_beside_p99_ratio`). The figures are medians over turns and kernels of the server's P99 over its P99 alone in the
same turn; what the tuner that does not see it does is printed beside them.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from cudasched.demo.harness import CUDASCHED, HarnessError
from cudasched.kernels import _catalog

from benchmarks.lab.processes import Processes, built, latencies, p99, running
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, brief, median_of

#: Kernels that are tuned beside it: one whose launches are short, one of which some configurations take milliseconds.
SPACES = ("layernorm", "gemm")
#: The tuner that sees the server, and the one that does not.
SEES, APART = "cudasched", "time slices"
#: The server is measured for so long at a time until the tuner has begun to search, s.
PART_S = 3.0
START_TIMEOUT_S = 120.0
RECORDED = Path(__file__).parent / "recorded"


class Tuner(ExitStack):
    """A tuner that searches until the end of the block.

    Raises:
        HarnessError: It ends by itself.
    """

    def __init__(self, space: str, environment: Mapping[str, str], scratch: Path, replay: Path | None) -> None:
        super().__init__()
        self._database, self._log = scratch / f"{space}.sqlite", scratch / f"{space}.log"
        self._may_end = replay is not None
        self._began = time.monotonic()
        for path in scratch.glob(f"{space}.sqlite*"):
            path.unlink()
        what = ["--replay", str(replay)] if replay else ["--space", str(_catalog.sources() / f"{space}.toml")]
        options = ["--database", str(self._database), "--evaluations", "100000", "--cold"]
        log = self.enter_context(self._log.open("w"))
        self._child = self.enter_context(running([*CUDASCHED, "tune", *what, *options], environment, log, log))

    def must_have_begun_within(self, seconds: float) -> None:
        """Ends the benchmark where it has been starting for longer."""
        if time.monotonic() - self._began > seconds:
            raise HarnessError(f"a tuner measured nothing in {seconds:g} s: {self._log.read_text()[-2000:]}")

    def measured(self) -> int:
        """How many configurations it has measured."""
        if not self._may_end and self._child.poll() is not None:
            raise HarnessError(f"a tuner ended before its time: {self._log.read_text()[-2000:]}")
        if not self._database.exists():
            return 0
        with closing(sqlite3.connect(self._database)) as database:
            try:
                return int(database.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])
            except sqlite3.OperationalError:  # it is being made
                return 0


def measure(session: Session) -> Found:
    """P99 over alone: by what the tuner does, and whether it sees the server."""
    ratios: dict[str, list[float]] = {}
    replay = next(iter(sorted(RECORDED.glob("layernorm*.npz")))) if session.rehearsal else None
    options = session.options
    with Processes(session) as lab:
        server = lab.server(client_class="latency")
        built(server)

        def requests(seconds: float, seed: int) -> list[float]:
            return latencies([server], seconds, seed)[0]

        seen = {**os.environ, "CUDASCHED_RUN_DIR": str(session.scratch / "shared")}
        (session.scratch / "apart").mkdir(mode=0o700)
        unseen = {**seen, "CUDASCHED_RUN_DIR": str(session.scratch / "apart")}
        for turn in range(options.turns):
            for space in SPACES:
                alone = requests(options.seconds, turn)
                told = [f"alone {brief(alone)}"]
                # In one order and in the opposite one.
                for arm, environment in ((SEES, seen), (APART, unseen))[:: 1 if turn % 2 == 0 else -1]:
                    with Tuner(space, environment, session.scratch, replay) as tuner:
                        starting = []
                        while not (starting and tuner.measured()):
                            tuner.must_have_begun_within(START_TIMEOUT_S)
                            starting += requests(PART_S, turn + len(starting))
                        before = tuner.measured()
                        searching = requests(options.seconds, turn)
                        rate = (tuner.measured() - before) / options.seconds
                    for what, latency in (("starting", starting), ("beside", searching)):
                        ratio = p99(latency) / p99(alone)
                        ratios.setdefault(f"{what}, {arm}", []).append(ratio)
                    told.append(f"{arm}: starting {brief(starting)}, searching {brief(searching)}, {rate:.1f}/s")
                print(f"{space}: {'; '.join(told)}", flush=True)
    found: Found = {}
    for name, values in ratios.items():
        figure = median_of(values)
        session.say("{}: P99 {:.2f} x alone ({:.2f} to {:.2f})".format(name, *figure))
        what, _, arm = name.partition(", ")
        if arm == SEES:
            found[f"tuner_{what}_p99_ratio"] = figure
    return found


BENCHMARK = Benchmark(
    about="a tuner on the GPU of a server, while it starts and while it searches",
    groups={"beside": measure},
    goals={"tuner_starting_p99_ratio": (1.25, "less"), "tuner_beside_p99_ratio": (1.25, "less")},
    results="kernels",
    settings={"seconds": (10.0, 2.0), "turns": (2, 1)},
)
