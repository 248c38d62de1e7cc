"""The one command line of the benchmarks; benchmarks/README.md says what each measures.

    python -m benchmarks run core --minutes 9.8 --only backlog
    python -m benchmarks run core --rehearse --out /tmp/core.json
    python -m benchmarks spread main --minutes 9.8            # on every GPU
    python -m benchmarks merge main --out benchmarks/results/main.json first.cells second.cells

`run NAME` measures the groups that are missing, one after another; a group that fails costs its own figures alone. A
part that is done is kept beside the results in NAME.cells, and the same command goes on from there. The exit status is
0 when all is measured, 3 when time ran out first, 1 when a part failed, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from cudasched.demo.harness import HarnessError
from cudasched.errors import Error

from benchmarks import meta
from benchmarks.colocation.cells import CellFile, cells_path
from benchmarks.lab import gpu
from benchmarks.lab.session import Done, Found, Goals, OutOfTimeError, Session, judged
from benchmarks.lab.spread import spread
from benchmarks.results.schema import RESULTS
from benchmarks.results.schema import merge as merge_rows
from benchmarks.store import Store
from benchmarks.tables import core_table

TIME_RAN_OUT = 3
#: The modules that declare them, as `BENCHMARK` or what is named.
MODULES = {
    "main": "preempt.benchmark:MAIN",
    "preempt": "preempt.benchmark",
    "ablation": "graphs.ablation",
    "core": "core.benchmark",
    "several_gpus": "several_gpus.benchmark",
    "observe": "observe.benchmark",
    "tracing": "observe.tracing",
    "events": "predictor.events",
    "overhead": "overhead.benchmark",
    "collect": "overhead.benchmark:COLLECT",
    "pytorch": "pytorch.benchmark",
    "device": "device.benchmark",
    "kernels": "kernels.benchmark:KERNELS",
    "layers": "kernels.benchmark:LAYERS",
    "tuner": "tune.evaluate",
    "tuner_beside": "tune.beside",
    "tuner_ppo": "tune.ppo",
    "tuner_quiet": "tune.quiet",
    "predictor": "predictor.benchmark:SPEED",
    "predictor_figures": "predictor.benchmark:COSTS",
    "graph_slicing": "graphs.figures",
    "regressions": "regressions.benchmark",
    "hardening": "hardening.benchmark",
    "advise": "advise.benchmark",
    "foresight": "advise.foresight",
    "foresight_committed": "advise.committed",
    "reach": "reach.benchmark",
    "lab": "lab.counts",
    "memory": "memory.benchmark",
    "inference": "inference.benchmark",
    "inference_load": "inference.benchmark:LOAD",
    "goodput": "inference.goodput:GOODPUT",
    "inference_table": "inference.table",
    "inference_beside": "inference.beside",
    "vllm": "decode.benchmark",
}
Group = Callable[[Session], Found | None]


@dataclass(frozen=True)
class Benchmark:
    """The declaration of a benchmark.

    Attributes:
        about: One line.
        groups: What it measures, in order; each may return figures. `--only a` chooses the group `a`, and `a/b`, too.
        goals: Of its figures.
        limits: Why figures miss their goals, where that is known beforehand.
        find: The figures of the parts that are done.
        finish: Writes what are no figures, and prints.
        settings: More options: a default, a pair of defaults of which the second is a rehearsal's, or a type.
        written: Writes and prints the results of cells, of one run and of several (`merge`): takes a CellFile, the
            results' path, and other files that they are made of, where these are given.
        results: The name of the results file, where that is not the benchmark's.
        merge: Puts the parts of several runs together, where these are no cells.
        whole: Measures the groups that are chosen itself, and its part of them.
        gpu: It needs one.
        torch: It needs PyTorch.
    """

    about: str
    groups: Mapping[str, Group]
    goals: Goals = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    find: Callable[[Done], Found] | None = None
    finish: Callable[[Session], None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    written: Callable[..., None] | None = None
    results: str = ""
    merge: Callable[[Sequence[Done]], Done] | None = None
    whole: Group | None = None
    gpu: bool = True
    torch: bool = True


def load_benchmark(name: str) -> Benchmark:
    """The declaration of that name; raises HarnessError where a library is missing."""
    module, _, attribute = MODULES[name].partition(":")
    try:
        made = getattr(importlib.import_module(f"benchmarks.{module}"), attribute or "BENCHMARK")
    except ImportError as error:
        raise HarnessError(f"{name} needs {error.name}: {error}") from error
    assert isinstance(made, Benchmark)
    return made


def parse(name: str, benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a run, checked."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks run {name}", description=benchmark.about)
    results = RESULTS / f"{benchmark.results or name}.json"
    parser.add_argument("--out", type=Path, help=f"the results ({results})")
    known = ", ".join(benchmark.groups)
    only = ("--only", "--programs") if benchmark.whole else ("--only",)
    parser.add_argument(*only, default=known.replace(" ", ""), help=f"by commas, of {known}")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth of them from the Ith on")
    parser.add_argument("--minutes", type=float, help="stop before so much time has passed")
    parser.add_argument("--rehearse", action="store_true", help="no GPU, no results")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="why a goal is missed")
    for setting, default in benchmark.settings.items():
        option, usual = f"--{setting.replace('_', '-')}", _usual(default)[0]
        if default is bool:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=usual if isinstance(usual, type) else type(usual), help=f"({usual})")
    options = parser.parse_args(arguments)
    for setting, default in benchmark.settings.items():
        value = _usual(default)[options.rehearse]
        if getattr(options, setting) is None and not isinstance(value, type):
            setattr(options, setting, value)
    if options.out is None:
        if options.rehearse:
            parser.error("--out: a rehearsal's figures are no results")
        options.out = results
    asked = [one for one in options.only.split(",") if one]
    chosen = [one for one in benchmark.groups if any(f"{one}/".startswith(f"{name}/") for name in asked)]
    if unknown := [name for name in asked if not any(f"{one}/".startswith(f"{name}/") for one in benchmark.groups)]:
        parser.error(f"--only: {', '.join(unknown)}; there are {known}")
    number, _, parts = options.part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        parser.error("--part: I/N with 1 <= I <= N")
    options.only = chosen if benchmark.whole else chosen[int(number) - 1 :: int(parts)]
    reasons = [text.partition("=") for text in options.limited_by]
    if any(figure not in benchmark.goals or not text for figure, _, text in reasons):
        parser.error(f"--limited-by: FIGURE=TEXT, of {', '.join(benchmark.goals)}")
    options.limited_by = {figure: text for figure, _, text in reasons}
    return options


def _usual(default: Any) -> tuple[Any, Any]:
    """What a setting is by default, and in a rehearsal."""
    return default if isinstance(default, tuple) else (default, default)


def run(name: str, arguments: Sequence[str]) -> int:
    """Measures what is missing, and writes what can be told; returns the exit status."""
    benchmark = load_benchmark(name)
    options = parse(name, benchmark, arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    session: Session | None = None
    status = 0
    try:
        described = (
            meta.describe(options.rehearse, options.commit, benchmark.torch)
            if benchmark.gpu
            else meta.describe_host(options.commit)
        )
        session = Session(name, options, described)
        if session.on_gpu:
            gpu.refuse_busy()
        groups = {name: benchmark.groups[name] for name in options.only}
        for group, measure in groups.items() if benchmark.whole is None else [(name, benchmark.whole)]:
            try:
                session.found |= measure(session) or {}
                session.note_clock()
            except OutOfTimeError:
                session.say(f"{group}: time ran out; the same command goes on")
                status = TIME_RAN_OUT
            except (HarnessError, Error, ValueError, OSError) as error:
                session.fail(f"{group} failed: {error}")
        _write(benchmark, session)
        return 1 if session.failed else status
    except (HarnessError, Error, ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; finished cells are kept", file=sys.stderr)
        return 130
    finally:
        if session:
            session.close()


def _write(benchmark: Benchmark, session: Session) -> None:
    """Writes the figures that there are, beside those of others that the file has, and what the benchmark adds."""
    found = {**session.found, **(benchmark.find(session.store.done) if benchmark.find else {})}
    limits = {**benchmark.limits, **session.limits}
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if not benchmark.gpu and load > cores:
        limits |= dict.fromkeys(found, f"other work on this machine (a load of {load:.0f} on {cores} cores)")
    rows = judged(benchmark.goals, found, limits | session.options.limited_by)
    if rows:
        results = merge_rows(session.out, session.meta, rows)
        print(core_table(results.model_copy(update={"rows": rows})))
    if session.rows:
        merge_rows(session.out, session.meta, session.rows)
    if benchmark.written:
        benchmark.written(session.cells, session.out)
    if benchmark.finish:
        benchmark.finish(session)
    print(f"results: {session.out}")


def _interrupt(*_: object) -> NoReturn:
    """Ends a run on SIGTERM, as Ctrl-C does."""
    raise KeyboardInterrupt


def together(benchmark: Benchmark, *others: Sequence[Path]) -> Callable[[Sequence[Path], Path], None]:
    """What puts several runs of a benchmark together. Raises ValueError where nothing does."""
    written, joined, find = benchmark.written, benchmark.merge, benchmark.find
    if written is not None:
        return lambda paths, out: written(CellFile.merged(paths, out), out, *others)
    if joined is None or find is None:
        raise ValueError("its runs are not put together")

    def of_parts(paths: Sequence[Path], out: Path) -> None:
        runs = [Store(path) for path in paths]
        store = Store(cells_path(out), runs[-1].meta)
        for key, part in joined([run.done for run in runs]).items():
            store.keep(key, part)
        merge_rows(out, store.meta, judged(benchmark.goals, find(store.done), benchmark.limits))

    return of_parts


def merge(name: str, arguments: Sequence[str]) -> int:
    """Puts the cells of several runs together; later files win."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks merge {name}", description=merge.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the results; their cells go beside them")
    parser.add_argument("--with", dest="others", type=Path, nargs="+", help="other files that results are made of")
    parser.add_argument("cells", type=Path, nargs="+", help="NAME.cells of each run, oldest first")
    options = parser.parse_args(arguments)
    others = [options.others] if options.others else []
    together(load_benchmark(name), *others)(options.cells, options.out)
    return 0


def run_on_every_gpu(name: str, arguments: Sequence[str]) -> int:
    """Runs a benchmark on all GPUs of the machine, each with a part of its groups."""
    benchmark = load_benchmark(name)
    return spread(name, parse(name, benchmark, arguments), arguments, together(benchmark))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"run": run, "spread": run_on_every_gpu, "merge": merge}
    if len(given) < 2 or given[0] not in commands or given[1] not in MODULES:
        print(__doc__, f"There are {', '.join(MODULES)}.", sep="\n")
        return 0 if given in ([], ["--help"], ["-h"]) else 2
    try:
        return commands[given[0]](given[1], given[2:])
    except (HarnessError, OSError, ValueError) as error:
        print(f"{given[1]}: {error}", file=sys.stderr)
        return 1
