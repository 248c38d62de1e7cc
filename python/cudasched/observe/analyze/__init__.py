"""Hardware counters of a program's kernels, merged with `cudasched.advise`.

`analyze` records a program, asks Nsight Compute for the counters of the kernels that take the most time, and draws
conclusions from both (``docs/analyze.md``). Needs ``ncu``, pyarrow and, for HTML, jinja2: ``pip install
'cudasched[advise]'``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cudasched._scratch import Scratch
from cudasched._version import __version__
from cudasched.advise import Report, advise
from cudasched.errors import Error
from cudasched.observe.analyze import _ncu
from cudasched.observe.analyze._judge import conclusions, counters
from cudasched.observe.analyze._model import SCHEMA_VERSION, Analysis, Conclusion, Counters, Measured
from cudasched.observe.analyze._ncu import NcuError, find
from cudasched.observe.analyze._view import html, terminal

__all__ = [
    "SCHEMA_VERSION",
    "Analysis",
    "Conclusion",
    "Counters",
    "Measured",
    "NcuError",
    "analyze",
    "find",
    "html",
    "merge",
    "terminal",
]

_NO_NAME = ("", "unknown", "graph")


def _chosen(report: Report, kernels: int) -> list[str]:
    """The functions with the most time that have a name of their own."""
    named = [one.function for one in report.functions if one.function not in _NO_NAME]
    return named[:kernels]


def merge(report: Report, launches: Sequence[_ncu.Launch], *, profiler: str, problem: str, kernels: int) -> Analysis:
    """Puts advice and counters together, by the kernels' mangled names.

    Args:
        report: Of the recorded run.
        launches: Profiled in another run of the same program.
        profiler: Path of ncu.
        problem: Why there are none, or fewer than there should be.
        kernels: How many were asked for.
    """
    wanted = _chosen(report, kernels)
    by_function = {one.function: one for one in report.functions}
    found, missing = [], []
    for function in wanted:
        mine = [launch for launch in launches if launch.function == function]
        if not mine:
            missing.append(by_function[function].name)
            continue
        shapes = [report.kernels[place] for place in by_function[function].shapes]
        time_of: dict[tuple[int, ...], int] = {}
        for shape in shapes:  # some differ in their clusters or shared memory alone
            key = (*shape.grid, *shape.block)
            time_of[key] = time_of.get(key, 0) + (shape.time_ns or 0)
        seen = counters(mine, time_of)
        found.append(
            Measured(
                function=function,
                name=by_function[function].name,
                profiled=len(mine),
                launches=by_function[function].launches,
                time_ns=by_function[function].time_ns,
                share=by_function[function].share,
                counters=seen,
                conclusions=conclusions(function, seen, "" if shapes[0].changeable else shapes[0].origin),
            )
        )
    notes = []
    if found and missing:
        notes.append(f"no launch was profiled of {', '.join(missing)}")
    if found and problem:
        notes.append(problem)
    graphs = sum(one.share or 0.0 for one in report.functions if one.function in _NO_NAME)
    if graphs > 0:
        notes.append(
            f"{100 * graphs:.0f}% of the device time is of graphs, whose kernels the recording does not tell apart"
        )
    if found:
        notes.append("counters are of launches with caches flushed before them: hit rates may be higher in the program")
    return Analysis(
        cudasched_version=__version__,
        profiler=profiler,
        kernels=tuple(found),
        notes=tuple(notes),
        problem="" if found else problem,
        advice=report,
    )


def analyze(
    program: Sequence[str],
    *,
    ncu: str | os.PathLike[str] | None = None,
    kernels: int = 5,
    launches: int = 3,
    timing: str = "cupti",
) -> Analysis:
    """Runs a program twice: recorded, and under Nsight Compute without the hook.

    Args:
        program: The name and arguments.
        ncu: The profiler; None: searched for.
        kernels: So many kernels, those with the most time.
        launches: So many launches of each of their launch shapes.
        timing: Of the recording: "cupti" or "events".

    Raises:
        NcuError: ncu is not there, cannot be run, or answers in another form.
        Error: The program fails or cannot be recorded.
    """
    from cudasched.cli.collect import run_collected

    profiler = find(ncu)  # before the program runs, which may take long
    with Scratch("analyze") as scratch:
        recording = scratch / "data.parquet"
        code = run_collected(program, output=recording, timing=timing, quiet=True)
        if code != 0:
            raise Error(f"{program[0]} ended with exit code {code}; mend the program first")
        report = advise(recording)
        wanted = _chosen(report, kernels)
        found: list[_ncu.Launch] = []
        problem = "the recorded run has no kernel with a name: its launches are graphs, or the driver gives no names"
        if wanted:
            found, problem = _ncu.profile(profiler, wanted, program, launches=launches, directory=scratch)
    return merge(report, found, profiler=str(profiler), problem=problem, kernels=kernels)
