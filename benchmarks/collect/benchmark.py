"""What recording adds to a launch; see benchmarks/README.md."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cudasched.cli.coverage import find_cupti
from cudasched.demo.harness import CUDASCHED, HarnessError

from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session
from benchmarks.overhead.benchmark import ADD, KERNELS, build, compare, launch_loop, printed, row, torch_loop
from benchmarks.results.schema import Results
from benchmarks.tables import overhead_table


def recorded(session: Session, label: str, command: Sequence[str], names: Mapping[str, str]) -> None:
    """What each way of recording adds."""
    ways = ("off", "events") if session.rehearsal else ("off", "cupti", "events")

    def run(way: str) -> dict[str, list[float]]:
        with tempfile.TemporaryDirectory(prefix="cudasched-collect-") as directory:
            environment = session.backend.environment(hooked=True)
            if way != "off":
                environment |= {"CUDASCHED_COLLECT_DIR": directory, "CUDASCHED_COLLECT_TIMING": way}
                if cupti := environment.get("CUDASCHED_CUPTI") or find_cupti(Path(command[0])):
                    environment["CUDASCHED_CUPTI"] = cupti
            found = printed(f"{label}, {way}", [*CUDASCHED, "run", "--", *command], environment, list(names))
            if way != "off" and not any(path.stat().st_size > 4096 for path in Path(directory).iterdir()):
                raise HarnessError(f"nothing was recorded by {way}")
        return found

    series = compare(session, ways, names, run)
    session.rows += [
        row(f"{label}, {words}: recorded by {way}", series[name, way], series[name, "off"])
        for name, words in names.items()
        for way in ways[1:]
    ]


def launches(session: Session) -> None:
    """Of the launch loop."""
    recorded(session, *launch_loop(session, build(session.builds)[0]), KERNELS)


def in_pytorch(session: Session) -> None:
    """Of PyTorch's operation."""
    if command := torch_loop(session):
        recorded(session, "PyTorch", command, ADD)


BENCHMARK = Benchmark(
    about="ns that recording adds to a launch, by CUPTI and by events",
    groups={"launches": launches, "pytorch": in_pytorch},
    finish=lambda session: print(overhead_table(Results(meta=session.meta, rows=session.rows))),
    settings={"rounds": (5, 1), "batches": (200, 20), "launches": 200},
    torch=False,
)
