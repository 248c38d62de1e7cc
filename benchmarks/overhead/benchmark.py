"""Nanoseconds that the hook adds to a launch, by class, and the gate to a best-effort launch on a device of its own.

A small C program launches empty kernels in batches, in turn bare and under `cudasched run --class X`, each round anew;
what is added is the median over rounds of the difference of medians. It does so on the real driver, whose launch of
2.8 us is noisy, and on a null driver whose calls return at once, which leaves the hook's own time alone. The same is
done for `x.add_(1)` in PyTorch, and for the CPU time of a process that sleeps. Clients' tables lie in a directory of
this run, so nothing else is on the device.

What a launch takes beside another thread that launches in the same context (launch_beside.c, bare) is what sharing a
process costs whatever the hook does.

`collect` is what recording adds to the same launches, by events and by CUPTI.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cudasched.cli.coverage import find_cupti
from cudasched.demo.harness import CUDASCHED, Backend, HarnessError, percentile

from benchmarks.c_program import compile_c
from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session
from benchmarks.results.schema import OverheadRow, Results
from benchmarks.tables import overhead_table

HERE = Path(__file__).parent
ENTRY_POINTS = HERE.parents[1] / "csrc" / "hook" / "entry_points.py"
BARE = "bare"
#: What a process is started as: without the hook, or by `cudasched run` in a class.
CLASSES = (BARE, "normal", "latency", "best-effort")
KERNELS = {"empty": "no parameters", "ten": "10 parameters"}
#: What the launch loop prints: ns a launch of each kernel, and CPU ns of the process in a second of sleep.
LOOP = {**KERNELS, "idle": "idle for a second"}
ADD = {"add_": "x.add_(1)"}
#: What launch_beside.c prints, and what rows call it.
COMPANY = {
    "launching": "beside a thread that launches each 40 us in the same context",
    "marking": "beside one that also records an event behind each launch and asks for it twice",
    "in_turns": "the same, where both spin until the other one is out of the driver",
}


Rounds = list[list[float]]
"""Batches of one thing in one class: ns a call, a list for each round."""


def compare(
    session: Session, ways: Sequence[str], names: Iterable[str], run: Callable[[str], Mapping[str, list[float]]]
) -> dict[tuple[str, str], Rounds]:
    """Batches of each name in each way, in turns.

    Each round starts elsewhere, so that no way always runs on the clocks that another has warmed.
    """
    series: dict[tuple[str, str], Rounds] = {(name, way): [] for name in names for way in ways}
    for number in range(session.options.rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            for name, batches in run(way).items():
                series[name, way].append(batches)
    return series


def printed(label: str, command: list[str], environment: dict[str, str], names: list[str]) -> dict[str, list[float]]:
    """What a program prints of these names: ns a call for each batch.

    Raises:
        HarnessError: It failed, or prints something else.
    """
    said = output_of(label, command, environment)
    lines = [line.split() for line in said.splitlines()]
    found = {line[0]: [float(value) for value in line[1:]] for line in lines if line and line[0] in names}
    if set(found) != set(names):
        raise HarnessError(f"{label}: expected {', '.join(names)}, got {said[:500]!r}")
    return found


def row(what: str, series: Rounds, baseline: Rounds) -> OverheadRow:
    """What one way adds to another: the median over rounds of the difference of their medians."""
    differences = [
        statistics.median(ours) - statistics.median(bare) for ours, bare in zip(series, baseline, strict=True)
    ]
    batches, without = ([ns for each in rounds for ns in each] for rounds in (series, baseline))
    return OverheadRow(
        what=what,
        ns_median=round(statistics.median(batches), 2),
        ns_p99=round(percentile(batches, 0.99), 2),
        baseline_ns_median=round(statistics.median(without), 2),
        baseline_ns_p99=round(percentile(without, 0.99), 2),
        added_ns_median=round(statistics.median(differences), 2),
        rounds=len(series),
    )


def build(directory: Path) -> tuple[Path, Path, Path]:
    """Compiles the programs and the null driver with the system's C compiler.

    Returns:
        The launch loop, what launches beside a thread, and the null driver's libcuda.so.1 in a directory of its own.

    Raises:
        HarnessError: There is no compiler, or it failed.
    """
    made = directory / "launch_loop", directory / "launch_beside", directory / "null" / "libcuda.so.1"
    if made[2].exists():
        return made
    loop = compile_c(made[0], HERE / "launch_loop.c")
    company = compile_c(made[1], HERE / "launch_beside.c", options=("-pthread",))
    null = HERE / "null_driver.c"
    own = set(_functions(null.read_text()))
    listed = subprocess.run([sys.executable, ENTRY_POINTS, "symbols"], capture_output=True, text=True, check=True)
    others = [symbol for symbol in listed.stdout.split() if symbol not in own]
    generated = directory / "null_symbols.c"
    generated.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
    driver = made[2]
    driver.parent.mkdir()
    options = ("-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1")
    return loop, company, compile_c(driver, null, generated, options=options)


def _functions(source: str) -> list[str]:
    return [line.split("(")[0].split()[1] for line in source.splitlines() if line.startswith("int cu")]


def launch_loop(session: Session, program: Path) -> tuple[str, list[str]]:
    """What rows call the driver, and the command of a program that launches in batches."""
    session.backend.settings["LAUNCH_LOOP_IMAGE"] = "simulated" if session.rehearsal else "ptx"
    label = "simulated driver" if session.rehearsal else "driver"
    return label, [str(program), str(session.options.batches), str(session.options.launches)]


def torch_loop(session: Session) -> list[str]:
    """The same of PyTorch's `x.add_(1)`; empty where that is not installed."""
    counts = [str(session.options.batches), str(session.options.launches)]
    return [sys.executable, str(HERE / "torch_loop.py"), *counts] if session.meta.torch is not None else []


def classes(
    session: Session, label: str, command: Sequence[str], names: Mapping[str, str], backend: Backend
) -> list[OverheadRow]:
    """What each class adds to the bare driver, and what the gate adds to a normal launch under the hook."""

    def run(client_class: str) -> dict[str, list[float]]:
        hooked = client_class != BARE
        managed = [*CUDASCHED, "run", "--class", client_class, "--"] if hooked else []
        environment = backend.environment(hooked)
        environment.setdefault("CUDASCHED_RUN_DIR", str(session.scratch))
        return printed(f"{label}, {client_class}", [*managed, *command], environment, list(names))

    series = compare(session, CLASSES, names, run)
    made = []
    for name, words in names.items():
        for client_class in CLASSES[1:]:
            made.append(row(f"{label}, {words}: {client_class}", series[name, client_class], series[name, BARE]))
        if name != "idle":
            gate = f"{label}, {words}: gate check, no latency client (against normal)"
            made.append(row(gate, series[name, "best-effort"], series[name, "normal"]))
    return made


def on_the_null_driver(session: Session) -> None:
    """The hook's own time."""
    program, _, null_driver = build(session.builds)
    backend = Backend("torch", null_driver, settings={"LAUNCH_LOOP_IMAGE": "ptx"})
    session.rows += classes(session, "null driver", launch_loop(session, program)[1], LOOP, backend)


def on_the_driver(session: Session) -> None:
    """What is added to the driver's launch."""
    label, command = launch_loop(session, build(session.builds)[0])
    session.rows += classes(session, label, command, LOOP, session.backend)


def in_pytorch(session: Session) -> None:
    """What is added to an operation."""
    if command := torch_loop(session):
        session.rows += classes(session, "PyTorch", command, ADD, session.backend)


def beside(session: Session) -> None:
    """What a launch takes beside another thread's, over what it takes alone."""
    label, (_, batches, launches) = launch_loop(session, company := build(session.builds)[1])
    command = [str(company), str(max(int(batches) // 4, 1)), launches]
    names = ["alone", *COMPANY]
    environment = session.backend.environment(False)
    series = compare(session, [BARE], names, lambda _: printed(label, command, environment, names))
    what = f"{label}, no parameters, one each 20 us"
    session.rows += [
        row(f"{what}: {words}", series[name, BARE], series["alone", BARE]) for name, words in COMPANY.items()
    ]


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


def recorded_launches(session: Session) -> None:
    """The same of the launch loop."""
    recorded(session, *launch_loop(session, build(session.builds)[0]), KERNELS)


def recorded_in_pytorch(session: Session) -> None:
    """The same of PyTorch's operation."""
    if command := torch_loop(session):
        recorded(session, "PyTorch", command, ADD)


def finish(session: Session) -> None:
    """Prints the rows."""
    print(overhead_table(Results(meta=session.meta, rows=session.rows)))


BENCHMARK = Benchmark(
    about="ns that the hook adds to a launch, by class",
    groups={"null": on_the_null_driver, "driver": on_the_driver, "pytorch": in_pytorch, "beside": beside},
    finish=finish,
    settings={"rounds": (7, 2), "batches": (400, 40), "launches": 200},
    torch=False,
)
COLLECT = Benchmark(
    about="ns that recording adds to a launch, by CUPTI and by events",
    groups={"launches": recorded_launches, "pytorch": recorded_in_pytorch},
    finish=finish,
    settings={"rounds": (5, 1), "batches": (200, 20), "launches": 200},
    torch=False,
)
