"""`cudasched.advise(data)`: from a recording to a report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cudasched._version import __version__
from cudasched.advise import profile, rules
from cudasched.advise.names import qualified_name, signature
from cudasched.advise.occupancy import ARCHITECTURES, WARP_THREADS
from cudasched.advise.origins import Origin, origin_of
from cudasched.advise.peaks import peaks_of
from cudasched.advise.report import Finding, Function, Kernel, Report
from cudasched.collect._cost import slowed
from cudasched.errors import Error
from cudasched.status import GRAPH_CHANGES, LEVELS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Predicts", "advise"]

_SLICE_NS = 200_000
"""A graph launch that takes no longer delays no one by much."""
_GRAPH = Origin("graph", changeable=False)


class Predicts(Protocol):
    """Such as `cudasched.predictor.Model`."""

    def predict(self, launches: Any, /) -> Any:
        """Durations of a recording's rows in ns, NaN where there is none."""
        ...


def _read(path: Path) -> pa.Table:
    from cudasched.collect import read

    return read(path)


def _predict(table: pa.Table, model: Predicts | None) -> tuple[pa.Array | None, str]:
    """Predicted times of the rows, ns, and a note where there are none."""
    import pyarrow as pa

    try:
        if model is None:
            from cudasched import predictor

            durations = predictor.predict(table)
        else:
            durations = model.predict(table)
    except (Error, ImportError, OSError) as error:
        return None, f"no predicted times: {error}"
    return pa.array(durations, type=pa.float64(), from_pandas=True), ""  # from_pandas: NaN, a graph's, is null


def work_of(table: pa.Table) -> dict[str, pa.Array] | None:
    """Bytes and operations of the rows' launches, null where they are not known; None without numpy."""
    import pyarrow as pa

    try:
        import numpy as np

        from cudasched.predictor._recording import outlooks

        # In a second, so that rates are amounts.
        found = outlooks(table, np.full(len(table), 1e9))
    except (Error, ImportError):
        return None
    made = {}
    for name in ("bytes", "flops"):
        amounts = found[f"{name}_per_s"].astype(np.float64)
        made[name] = pa.array(amounts, mask=~(amounts > 0))
    return made


def _program(table: pa.Table, subjects: list[rules.Subject]) -> tuple[Finding, ...]:
    import pyarrow.compute as pc

    tiny = rules.tiny_launches(subjects, qualified_name)
    slower = rules.slower_than_predicted(subjects, qualified_name)
    table = table.select(profile.OF_GAPS).unify_dictionaries()
    timed = profile.gaps(table)
    interval = profile.submit_interval_ns(table)
    bound = None
    if len(timed) and interval is not None:
        bound = rules.launch_bound(
            launches=len(timed),
            short=pc.sum(pc.less(timed["duration_ns"], interval)).as_py() or 0,
            busy_ns=pc.sum(timed["duration_ns"]).as_py() or 0,
            idle_ns=pc.sum(timed["gap_ns"]).as_py() or 0,
            interval_ns=interval,
        )
    return tuple(found for found in (slower, bound, tiny) if found is not None)


def _subject(group: profile.Group, run: profile.Run, total_ns: int) -> rules.Subject:
    architecture = ARCHITECTURES.get(run.compute_capability)
    return rules.Subject(
        group=group,
        origin=origin_of(group.function, group.module) if group.kind == "kernel" else _GRAPH,
        sm_count=run.sm_count,
        max_warps_per_sm=run.max_threads_per_sm // WARP_THREADS
        or (architecture.max_warps_per_sm if architecture else 0),
        architecture=architecture,
        share=group.time_ns / total_ns if group.time_ns is not None and total_ns else None,
        peaks=peaks_of(run.gpu),
    )


def _functions(kernels: list[Kernel], total_ns: int) -> tuple[Function, ...]:
    """The kernels by function. Graphs stay apart, by name."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for place, kernel in enumerate(kernels):
        places.setdefault((kernel.kind, kernel.function, kernel.name), []).append(place)
    found = []
    for (_, function, name), mine in places.items():
        shapes = [kernels[place] for place in mine]
        times = [shape.time_ns for shape in shapes if shape.time_ns is not None]
        stakes = [shape.time_at_stake_ns for shape in shapes if shape.time_at_stake_ns is not None]
        found.append(
            Function(
                function=function,
                name=name,
                origin=shapes[0].origin,
                launches=sum(shape.launches for shape in shapes),
                time_ns=sum(times) if times else None,
                share=sum(times) / total_ns if times and total_ns else None,
                level=min((shape.level for shape in shapes), key=LEVELS.index),
                time_at_stake_ns=sum(stakes) if stakes else None,
                shapes=tuple(mine),
            )
        )
    return tuple(sorted(found, key=lambda one: (-(one.time_ns or 0), one.name, one.function)))


def _name(group: profile.Group) -> str:
    if group.kind != "graph":
        return qualified_name(group.function)
    return f"graph {group.graph}" + (f" of process {group.process + 1}" if group.process else "")


def _kernel(subject: rules.Subject) -> Kernel:
    group = subject.group
    fits = rules.achieved(subject)
    findings = rules.find(subject)
    stakes = [finding.time_at_stake_ns for finding in findings if finding.time_at_stake_ns is not None]
    return Kernel(
        function=group.function,
        name=_name(group),
        signature=signature(group.function),
        kind="graph" if group.kind == "graph" else "kernel",
        graph=group.graph,
        origin=subject.origin.name,
        changeable=subject.origin.changeable,
        grid=group.grid,
        block=group.block,
        cluster=group.cluster,
        registers=group.registers,
        local_bytes=group.local_bytes,
        static_shared_bytes=group.static_shared_bytes,
        dynamic_shared_bytes=group.dynamic_shared_bytes,
        launches=group.launches,
        timed_launches=group.timed,
        overlapped_launches=group.overlapped,
        time_ns=group.time_ns,
        mean_ns=group.mean_ns,
        predicted_ns=group.predicted_ns,
        share=subject.share,
        blocks_per_sm=fits.blocks_per_sm if fits else None,
        occupancy=fits.fraction if fits else None,
        limited_by=fits.limited_by if fits else (),
        waves=rules.waves(subject),
        tail_fill=rules.tail_fill(subject),
        sm_utilisation=rules.sm_utilisation(subject),
        block_efficiency=rules.block_efficiency(subject),
        bytes_per_s=rules.bytes_per_s(subject),
        flops_per_s=rules.flops_per_s(subject),
        peak_share=rules.peak_share(subject),
        idle_before_ns=group.idle_before_ns,
        level=rules.level(subject, findings),
        time_at_stake_ns=max(stakes) if stakes else None if group.time_ns is None else 0,
        findings=findings,
    )


def _notes(run: profile.Run, kernels: list[Kernel], prediction: str, slow: str) -> tuple[str, ...]:
    launches = sum(kernel.launches for kernel in kernels)
    timed = sum(kernel.timed_launches for kernel in kernels)
    overlapped = sum(kernel.overlapped_launches for kernel in kernels)
    notes = []
    if not launches:
        notes.append("the recording holds no launch: the program made none, or not under cudasched")
    if run.lost:
        notes.append(f"{run.lost} launches were lost, for want of memory or disk, while it was recorded")
    if run.cut_short:
        notes.append(f"{run.cut_short} of the processes did not come to their end: their last launches may be missing")
    if timed < launches:
        notes.append(f"{launches - timed} of {launches} launches were not timed")
    if overlapped:
        notes.append(f"{overlapped} launches ran beside others of the process, and their times include the sharing")
    if run.timing == "events":
        notes.append(
            "timed by events, which is coarser than CUPTI: kernels of a few microseconds look longer than they are"
        )
    if launches and run.compute_capability not in ARCHITECTURES:
        notes.append(
            f"compute capability {run.compute_capability or '?'} is not in the table: no advice on block sizes"
        )
    if launches and not run.sm_count:
        notes.append("the recording does not say how many SMs the device has: no advice on grids")
    if graphs := [kernel for kernel in kernels if kernel.kind == "graph"]:
        notes.append(
            "kernels inside CUDA graphs are not recorded one by one; for advice on them, record without graphs"
        )
        longest_ns = max(kernel.mean_ns or 0.0 for kernel in graphs)
        if longest_ns > _SLICE_NS:
            notes.append(
                f"a launch of a CUDA graph takes up to {longest_ns / 1e6:.1f} ms: beside a latency client it is "
                "submitted in slices, so that a request waits for one of these alone. Not so with memory, conditional "
                "or event nodes: allocate before the capture, branch on the host, record events behind the launch "
                "(docs/graphs.md; `cudasched status` says which graphs are launched whole)"
            )
    for reason, (count, ns, nodes) in sorted(run.whole_graphs.items(), key=lambda one: -one[1][1]):
        if ns > _SLICE_NS:
            change = f": {GRAPH_CHANGES[reason]}" if reason in GRAPH_CHANGES else ""
            notes.append(
                f"{count} CUDA graph{'s are' if count != 1 else ' is'} launched whole beside a latency client, "
                f"predicted to take up to {ns / 1e6:.1f} ms ({nodes} nodes), for the reason {reason}{change} "
                "(docs/graphs.md)"
            )
    notes += [note for note in (prediction, slow) if note]
    return tuple(notes)


def advise(data: str | os.PathLike[str] | Any, *, model: Predicts | None = None) -> Report:
    """Advice on the kernels of a recorded run, the most time first.

    Args:
        data: A data set of `cudasched collect`: a path, or its ``pyarrow.Table`` with metadata.
        model: Predicts the times; None: the model that the package ships for the recording's GPU. Without one, or
            without numpy, a note in the report says why there are no predicted times.

    Raises:
        Error: It is no recording, is of another schema version, or pyarrow is not installed.
        OSError: The file cannot be read.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise Error("advice needs pyarrow: pip install 'cudasched[advise]'") from None
    if isinstance(data, str | os.PathLike):
        data = _read(Path(data))
    elif not isinstance(data, pa.Table):
        raise Error(f"advice is on a recording (a path or a pyarrow.Table), not on a {type(data).__name__}")
    profile.check(data)
    run = profile.metadata(data)
    predicted, note = _predict(data, model) if len(data) else (None, "")
    groups = profile.groups(data, predicted, work_of(data) if len(data) else None)
    times = [group.time_ns for group in groups if group.time_ns is not None]
    subjects = [_subject(group, run, sum(times)) for group in groups]
    kernels = [_kernel(subject) for subject in subjects]
    kernels.sort(
        key=lambda kernel: (
            -(kernel.time_ns or 0),
            -max((finding.expected_gain for finding in kernel.findings), default=0.0)
            if kernel.time_ns is None
            else 0.0,
            kernel.name,
            kernel.function,
            kernel.grid,
            kernel.block,
        )
    )
    return Report(
        cudasched_version=__version__,
        command=run.command,
        gpu=run.gpu,
        compute_capability=run.compute_capability,
        sm_count=run.sm_count,
        timing=run.timing,
        launches=sum(group.launches for group in groups),
        timed_launches=sum(group.timed for group in groups),
        time_ns=sum(times) if times else None,
        notes=_notes(run, kernels, note, slowed([data], run.timing)) + rules.unknown_to_the_model(subjects),
        program=_program(data, subjects),
        functions=_functions(kernels, sum(times)),
        kernels=tuple(kernels),
    )
