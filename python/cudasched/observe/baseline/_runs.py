"""From recordings and counters to runs: one mean a kernel, graph, region and wait."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched.errors import Error
from cudasched.observe.baseline._model import Baseline, Measured, Run

if TYPE_CHECKING:
    import pyarrow as pa

    from cudasched.observe import Metrics

__all__ = ["DEVICE_WORK", "from_recordings", "merged", "of_counters", "of_launches", "same_setting"]

_TRIMMED = 0.1
"""Of the launches of one shape, so many of the shortest and of the longest are left out: warm-up, interruptions."""
_SHAPE = [f"{what}_{axis}" for what in ("grid", "block", "cluster") for axis in "xyz"] + ["dynamic_shared_bytes"]
_MOST_UNTIMED = 0.1
_FEWEST_REQUESTS = 10
_LEAST_COMMON = 0.5
DEVICE_WORK = ("kernel", "graph")
"""Kinds of quantities that take device time."""


def _trimmed_mean(ordered: Any) -> float:
    cut = int(_TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def of_launches(table: pa.Table) -> tuple[Measured, ...]:
    """The kernels and graphs of one run.

    A kernel's launches of one shape have a mean without a tenth of them at each end. The kernel's time is the mean of
    these over its launches. So the time follows a change of any of its shapes, and work that goes to another shape.

    Args:
        table: A recording's rows; those without a time are left out.
    """
    import numpy as np
    import pyarrow.compute as pc

    timed = table.filter(pc.and_(pc.is_valid(table["duration_ns"]), pc.greater(table["duration_ns"], 0)))
    if not len(timed):
        return ()
    timed = timed.unify_dictionaries().combine_chunks()
    functions = timed["function"].combine_chunks()
    names = functions.dictionary.to_pylist()
    kinds = np.array(timed["kind"].cast("string").to_pylist()) == "graph"
    graphs = np.where(kinds, timed["graph"].to_numpy().astype(np.int64), 0)
    # Graphs are numbered anew in each process; the processes of a run in the order of their rows.
    _, first, process = np.unique(timed["pid"].to_numpy(), return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))[process]
    keys = [np.where(kinds, -1, functions.indices.to_numpy()), graphs, np.where(kinds, ranks, 0)]
    keys += [timed[name].to_numpy().astype(np.int64) for name in _SHAPE]
    durations = timed["duration_ns"].to_numpy().astype(np.float64)
    order = np.lexsort((durations, *reversed(keys)))
    columns = np.stack([key[order] for key in keys], axis=1)
    durations = durations[order]
    begins = np.flatnonzero(np.any(np.diff(columns, axis=0) != 0, axis=1)) + 1
    edges = [0, *begins.tolist(), len(durations)]
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for begin, end in pairwise(edges):
        function, graph, rank = (int(value) for value in columns[begin, :3])
        name = names[function] if function >= 0 else f"graph {graph}" + (f" of process {rank + 1}" if rank else "")
        key = ("kernel" if function >= 0 else "graph", name)
        found.setdefault(key, []).append((end - begin, _trimmed_mean(durations[begin:end])))
    return tuple(
        Measured(
            kind=kind,  # type: ignore[arg-type]
            name=name,
            count=sum(count for count, _ in shapes),
            each_ns=sum(count * mean for count, mean in shapes) / sum(count for count, _ in shapes),
        )
        for (kind, name), shapes in found.items()
    )


def of_counters(counted: Iterable[Metrics]) -> tuple[Measured, ...]:
    """The regions and waits of one run: means, which counters have exactly where their quantiles are in steps of 12%.

    Args:
        counted: The counters of each process of the run at its end.
    """
    totals: dict[tuple[str, str], tuple[int, float]] = {}

    def add(kind: str, name: str, count: int, total_s: float) -> None:
        before = totals.get((kind, name), (0, 0.0))
        totals[kind, name] = (before[0] + count, before[1] + total_s)

    for metrics in counted:
        for region in metrics.regions:
            add("region", region.name or "(without a name)", region.times.count, region.times.sum_s)
        for name, times in (
            ("at the gate", metrics.gate_wait),
            ("in the launch queue", metrics.queue_wait),
            ("of requests for best-effort work in flight", metrics.preemption),
        ):
            add("wait", name, times.count, times.sum_s)
    return tuple(
        Measured(kind=kind, name=name, count=count, each_ns=1e9 * total_s / count)  # type: ignore[arg-type]
        for (kind, name), (count, total_s) in totals.items()
        if count >= _FEWEST_REQUESTS and total_s > 0
    )


def _run(
    table: pa.Table, name: str, *, session: str, recorded: str, counted: tuple[Measured, ...]
) -> tuple[Run, dict[str, str]]:
    """One run, and the recording's facts about its setting. Raises Error."""
    said = {
        key.decode(errors="replace").removeprefix("cudasched."): value.decode(errors="replace")
        for key, value in (table.schema.metadata or {}).items()
    }
    if said.get("cut_short", "0") != "0":
        raise Error(f"{name} is cut short: {said['cut_short']} of the processes did not come to an end; record again")
    if not len(table):
        raise Error(f"{name} is empty: no launch was recorded")
    untimed = table["duration_ns"].null_count
    lost = int(said.get("lost", "0"))
    if untimed + lost > _MOST_UNTIMED * (len(table) + lost):
        raise Error(f"{name} lacks the times of {untimed + lost} of {len(table) + lost} launches; record it again")
    measured = of_launches(table)
    if not measured:
        raise Error(f"{name} has no launch with a time; record it again")
    run = Run(
        recorded=recorded,
        session=session,
        driver_version=said.get("driver_version", ""),
        cudasched_version=said.get("version", ""),
        time_ns=sum(one.count * one.each_ns for one in measured),
        measured=(*measured, *counted),
    )
    return run, said


def from_recordings(
    paths: Sequence[Path], *, session: str, counted: Sequence[tuple[Measured, ...]] | None = None
) -> Baseline:
    """Reads recordings of one program, each of one run.

    Args:
        paths: Of `cudasched collect`.
        session: Name of the session.
        counted: Regions and waits of each; None: there are none.

    Raises:
        Error: A recording is missing, damaged, empty or cut short, or they are of different GPUs, timings or programs.
    """
    from cudasched.advise.profile import metadata
    from cudasched.collect import read

    made: Baseline | None = None
    for place, path in enumerate(paths):
        table = read(path)
        try:
            changed = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
        except OSError:
            changed = datetime.datetime.now(datetime.timezone.utc)
        run, said = _run(
            table,
            str(path),
            session=session,
            recorded=changed.isoformat(timespec="seconds"),
            counted=counted[place] if counted else (),
        )
        about = metadata(table)
        one = Baseline(
            gpu=about.gpu,
            compute_capability=about.compute_capability,
            sm_count=about.sm_count,
            timing=said.get("timing", ""),
            command=about.command,
            runs=(run,),
        )
        made = one if made is None else merged(made, one, f"the first recording, {paths[0]}", str(path))
    if made is None:
        raise Error("there is no recording")
    return made


def same_setting(one: Baseline, other: Baseline, first: str, second: str) -> None:
    """Raises Error where times of one cannot be compared with those of the other: another GPU, clock or program."""

    def gpu(side: Baseline) -> str:
        return f"{side.gpu or 'an unnamed GPU'} ({side.sm_count} SMs, {side.compute_capability})"

    if (one.gpu, one.sm_count, one.compute_capability) != (other.gpu, other.sm_count, other.compute_capability):
        raise Error(
            f"{first} is of {gpu(one)}, and {second} of {gpu(other)}: times of different GPUs cannot be compared; "
            "save a baseline for each"
        )
    if one.timing != other.timing:
        raise Error(
            f"{first} was timed by {one.timing or '?'}, and {second} by {other.timing or '?'}: their times cannot be "
            "compared; choose the same --timing"
        )
    for side, against, where in ((one, other, first), (other, one, second)):
        known = {(each.kind, each.name) for run in against.runs for each in run.measured if each.kind in DEVICE_WORK}
        measured = [each for run in side.runs for each in run.measured if (each.kind, each.name) in known]
        whole = sum(run.time_ns for run in side.runs)
        common = sum(each.count * each.each_ns for each in measured)
        if common < _LEAST_COMMON * whole:
            raise Error(
                f"kernels that both sides have take only {100 * common / whole:.0f}% of the device time of {where}: "
                "the program or the model is another one; save another baseline"
            )


def merged(one: Baseline, other: Baseline, first: str, second: str) -> Baseline:
    """The runs of both.

    Raises:
        Error: They are of different GPUs, timings or programs.
    """
    same_setting(one, other, first, second)
    return one.model_copy(update={"runs": (*one.runs, *other.runs)})
