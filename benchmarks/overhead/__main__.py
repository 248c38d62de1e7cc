"""Nanoseconds that the hook adds to a launch, by class, and the gate to a best-effort launch on a device of its own.

    python -m benchmarks.overhead --out benchmarks/results/overhead.json
    python -m benchmarks.overhead --simulate --out /tmp/rehearsal.json

A small C program launches empty kernels in batches, in turn bare and under `cudasched run --class X`, each round anew;
what is added is the median over rounds of the difference of medians. It does so on the real driver, whose launch of
2.8 us is noisy, and on a null driver whose calls return at once, which leaves the hook's own time alone. The same is
done for `x.add_(1)` in PyTorch, and for the CPU time of a process that sleeps. Clients' tables lie in a directory of
this run, so nothing else is on the device.

What a launch takes beside another thread that launches in the same context (launch_beside.c, bare) is what sharing a
process costs whatever the hook does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudasched.demo.harness import CUDASCHED, Backend, HarnessError, percentile

from benchmarks import meta
from benchmarks.c_program import compile_c
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
#: What launch_beside.c prints, and what rows call it.
COMPANY = {
    "launching": "beside a thread that launches each 40 us in the same context",
    "marking": "beside one that also records an event behind each launch and asks for it twice",
    "in_turns": "the same, where both spin until the other one is out of the driver",
}
TIMEOUT_S = 120


@dataclass
class Series:
    """Batches of one thing in one class: ns a call, a list for each round."""

    rounds: list[list[float]] = field(default_factory=list)

    def batches(self) -> list[float]:
        """All rounds together."""
        return [value for batch in self.rounds for value in batch]

    def medians(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(batch) for batch in self.rounds]


@dataclass(frozen=True)
class Bench:
    """One program on one driver.

    Attributes:
        label: The driver, in the rows' words.
        command: The program; it prints lines of a name and ns a call for each batch.
        backend: Whose environment it runs in.
        names: The names that it prints, and what rows call them.
        rounds: How often each class has its turn.
    """

    label: str
    command: list[str]
    backend: Backend
    names: dict[str, str]
    rounds: int

    def measure(self, run_directory: Path) -> dict[tuple[str, str], Series]:
        """Series by name and class.

        Raises:
            HarnessError: A program failed.
        """
        series = {(name, client_class): Series() for name in self.names for client_class in CLASSES}
        for number in range(self.rounds):
            # Each round starts elsewhere, so that no class always runs on the clocks that another has warmed.
            for client_class in CLASSES[number % len(CLASSES) :] + CLASSES[: number % len(CLASSES)]:
                for name, batches in self._run(client_class, run_directory).items():
                    series[name, client_class].rounds.append(batches)
        return series

    def _run(self, client_class: str, run_directory: Path) -> dict[str, list[float]]:
        hooked = client_class != BARE
        command = [*CUDASCHED, "run", "--class", client_class, "--", *self.command] if hooked else self.command
        environment = self.backend.environment(hooked)
        environment.setdefault("CUDASCHED_RUN_DIR", str(run_directory))
        return printed(f"{self.label}, {client_class}", command, environment, list(self.names))


def printed(label: str, command: list[str], environment: dict[str, str], names: list[str]) -> dict[str, list[float]]:
    """What a program prints of these names: ns a call for each batch.

    Raises:
        HarnessError: It failed, or prints something else.
    """
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"{label}: no answer within {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise HarnessError(f"{label}: status {done.returncode}\n{done.stderr[-2000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {line[0]: [float(value) for value in line[1:]] for line in lines if line and line[0] in names}
    if set(found) != set(names):
        raise HarnessError(f"{label}: expected {', '.join(names)}, got {done.stdout[:500]!r}")
    return found


def beside(program: Path, backend: Backend, options: argparse.Namespace) -> list[OverheadRow]:
    """What a launch takes beside another thread's, over what it takes alone.

    Raises:
        HarnessError: The program failed.
    """
    names = ["alone", *COMPANY]
    series = {name: Series() for name in names}
    command = [str(program), str(max(options.batches // 4, 1)), str(options.launches)]
    for _ in range(options.rounds):
        for name, batches in printed(options.driver, command, backend.environment(False), names).items():
            series[name].rounds.append(batches)
    what = f"{options.driver}, no parameters, one each 20 us"
    return [_row(f"{what}: {words}", series[name], series["alone"]) for name, words in COMPANY.items()]


def rows(bench: Bench, series: dict[tuple[str, str], Series]) -> list[OverheadRow]:
    """What each class adds to the bare driver, and what the gate adds to a normal launch under the hook."""
    made = []
    for name, words in bench.names.items():
        for client_class in CLASSES[1:]:
            what = f"{bench.label}, {words}: {client_class}"
            made.append(_row(what, series[name, client_class], series[name, BARE]))
        if name == "idle":
            continue
        gate = f"{bench.label}, {words}: gate check, no latency client (against normal)"
        made.append(_row(gate, series[name, "best-effort"], series[name, "normal"]))
    return made


def _row(what: str, series: Series, baseline: Series) -> OverheadRow:
    differences = [with_it - without for with_it, without in zip(series.medians(), baseline.medians(), strict=True)]
    return OverheadRow(
        what=what,
        ns_median=round(statistics.median(series.batches()), 2),
        ns_p99=round(percentile(series.batches(), 0.99), 2),
        baseline_ns_median=round(statistics.median(baseline.batches()), 2),
        baseline_ns_p99=round(percentile(baseline.batches(), 0.99), 2),
        added_ns_median=round(statistics.median(differences), 2),
        rounds=len(series.rounds),
    )


def build(directory: Path) -> tuple[Path, Path, Path]:
    """Compiles the programs and the null driver with the system's C compiler.

    Returns:
        The launch loop, what launches beside a thread, and the null driver's libcuda.so.1 in a directory of its own.

    Raises:
        HarnessError: There is no compiler, or it failed.
    """
    loop = compile_c(directory / "launch_loop", HERE / "launch_loop.c")
    company = compile_c(directory / "launch_beside", HERE / "launch_beside.c", options=("-pthread",))
    null = HERE / "null_driver.c"
    own = set(_functions(null.read_text()))
    listed = subprocess.run([sys.executable, ENTRY_POINTS, "symbols"], capture_output=True, text=True, check=True)
    others = [symbol for symbol in listed.stdout.split() if symbol not in own]
    generated = directory / "null_symbols.c"
    generated.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
    driver = directory / "null" / "libcuda.so.1"
    driver.parent.mkdir()
    options = ("-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1")
    return loop, company, compile_c(driver, null, generated, options=options)


def _functions(source: str) -> list[str]:
    return [line.split("(")[0].split()[1] for line in source.splitlines() if line.startswith("int cu")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text. The exit status is 1 when a part failed, after the others were written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each class (7; 2 on the simulated driver)")
    parser.add_argument("--torch-rounds", type=int, default=3, help="turns of each class with PyTorch (3); 0: none")
    parser.add_argument("--batches", type=int, default=None, help="of each turn (400; 40 on the simulated driver)")
    parser.add_argument("--launches", type=int, default=200, help="launches of each batch (200)")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the simulated driver")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(arguments)
    options.driver = "simulated driver" if options.simulate else "driver"
    options.rounds = options.rounds or (2 if options.simulate else 7)
    options.batches = options.batches or (40 if options.simulate else 400)
    made: list[OverheadRow] = []
    failed = False
    device: Backend | None = None
    with tempfile.TemporaryDirectory(prefix="cudasched-overhead-") as scratch:
        try:
            described = meta.describe(options.simulate, options.commit, torch_needed=False)
            program, company, null_driver = build(Path(scratch))
            device = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
            for bench in _benches(options, program, null_driver, device, described.torch is not None):
                try:
                    made += rows(bench, bench.measure(Path(scratch)))
                    print(f"{bench.label}: done", flush=True)
                except HarnessError as error:
                    failed = True
                    print(f"overhead: {error}", file=sys.stderr)
            made += beside(company, device, options)
            if not options.simulate:
                described.sm_clock_mhz = meta.sm_clock_mhz()
        except HarnessError as error:
            print(f"overhead: {error}", file=sys.stderr)
            return 1
        finally:
            if device:
                device.close()
    if made:
        results = Results(meta=described, rows=made)
        results.write(options.out)
        print(overhead_table(results))
    return 1 if failed else 0


def _benches(
    options: argparse.Namespace, program: Path, null_driver: Path, device: Backend, has_torch: bool
) -> list[Bench]:
    loop = [str(program), str(options.batches), str(options.launches)]
    image = "simulated" if options.simulate else "ptx"
    device.settings["LAUNCH_LOOP_IMAGE"] = image
    null = Backend("torch", null_driver, settings={"LAUNCH_LOOP_IMAGE": "ptx"})
    benches = [
        Bench("null driver", loop, null, LOOP, options.rounds),
        Bench(options.driver, loop, device, LOOP, options.rounds),
    ]
    if not options.simulate and has_torch and options.torch_rounds:
        command = [sys.executable, str(HERE / "torch_loop.py"), str(options.batches), str(options.launches)]
        benches.append(Bench("PyTorch", command, device, {"add_": "x.add_(1)"}, options.torch_rounds))
    return benches


if __name__ == "__main__":
    sys.exit(main())
