"""Traces of recordings: of the launches in a data set, those that belong together, and where requests end."""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched import collect
from cudasched._text import counted
from cudasched.collect._cost import COST_US, slowed
from cudasched.collect._dataset import fact
from cudasched.errors import Error
from cudasched.simulate._trace import REQUEST_GAP_MS, Trace, trace_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read_trace", "trace_in"]

_PAUSE_S = 1.0
_LATEST_NS = 1 << 60
"""Of a clock: 36 years."""
_LOADS = (
    "bert_graph",
    "bert_eager",
    "resnet50_b4",
    "gpt_decode",
    "mlp",
    "transformer",
    "resnet50",
    "gemm",
    "elementwise",
)


def _load_of(labels: Iterable[str], path: Path) -> str:
    words = {word for label in labels for word in re.split("[:| ]", label)}
    named = [load for load in _LOADS if load in words or f"{load}_train" in words]
    return named[0] if named else next((load for load in _LOADS if path.stem.startswith(load)), "")


def _filled(durations: Sequence[int | None], kinds: Sequence[tuple[Any, ...]], path: Path) -> list[int]:
    """Durations; where one was not timed, the median of the launches like it, or of all."""
    timed: dict[tuple[Any, ...], list[int]] = {}
    for kind, duration in zip(kinds, durations, strict=True):
        if duration is not None:
            timed.setdefault(kind, []).append(duration)
    if not timed:
        raise Error(f"{path} has no timed launch: record it with timing='cupti' or 'events'")
    likely = {kind: round(statistics.median(values)) for kind, values in timed.items()}
    overall = round(statistics.median(likely.values()))
    return [
        likely.get(kind, overall) if duration is None else duration
        for kind, duration in zip(kinds, durations, strict=True)
    ]


def _without_holes(
    numbers: Sequence[int], submitted_ns: list[int], start_ns: list[int | None], duration_ns: Sequence[int]
) -> None:
    """Where launches of others were left out, moves the later launches to the end of the earlier ones."""
    removed = 0
    done = -math.inf
    for index, start in enumerate(start_ns):
        if index > 0 and numbers[index] != numbers[index - 1] + 1:
            removed = max(removed, round(submitted_ns[index] - max(done, submitted_ns[index - 1])))
        submitted_ns[index] -= removed
        if start is not None:
            start_ns[index] = start - removed
            done = max(done, start - removed + duration_ns[index])


def _parts(submitted_ns: Sequence[int], start_ns: Sequence[int | None], duration_ns: Sequence[int]) -> list[range]:
    """Launches in order of submission, divided where neither the program nor the GPU did anything for a second."""
    begins = [0]
    done = -math.inf
    for index, submitted in enumerate(submitted_ns):
        if index > 0 and submitted - max(done, submitted_ns[index - 1]) >= _PAUSE_S * 1e9:
            begins.append(index)
        start = start_ns[index]
        done = max(done, (submitted if start is None else start) + duration_ns[index])
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(submitted_ns)], strict=True)]


def _requests(what: Sequence[Hashable], ends: Sequence[int]) -> tuple[range, list[int]]:
    """The launches that are requests, and where each of these ends from the first of them on (`read_trace`).

    Args:
        what: What each launch does.
        ends: Where the GPU then had nothing to do.
    """
    numbers: dict[Hashable, int] = {}
    does = array("I", (numbers.setdefault(each, len(numbers)) for each in what))
    rows = [does[begin:end].tobytes() for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    seen = Counter(rows)
    # A hiccup of the host cuts some requests in two: what is seen seldom is no piece of others.
    least = max(3, len(rows) // 20)
    wholes: set[bytes] = set()
    pieces: dict[bytes, list[bytes]] = {}
    lengths: list[int] = []  # of wholes, descending
    for row in sorted(seen, key=len):
        pieces[row] = _divided(row, lengths, wholes, seen)
        if len(pieces[row]) == 1 and seen[row] >= least:
            wholes.add(row)
            if lengths[:1] != [len(row)]:
                lengths.insert(0, len(row))
    found = [piece for row in rows for piece in pieces[row]]
    times = Counter(found)
    usual = [place for place, piece in enumerate(found) if times[piece] > 1]
    if 2 * len(usual) < len(found):
        usual = [0, len(found) - 1]
    at = [0, *itertools.accumulate(len(piece) // does.itemsize for piece in found)]
    first, last = usual[0], usual[-1] + 1
    return range(at[first], at[last]), [end - at[first] for end in at[first + 1 : last + 1]]


def _divided(row: bytes, lengths: Sequence[int], wholes: set[bytes], seen: Mapping[bytes, int]) -> list[bytes]:
    """The row as wholes of these lengths that are seen as often, the longest first; itself where it is none."""
    pieces: list[bytes] = []
    at = 0
    while at < len(row):
        for size in lengths:
            piece = row[at : at + size]
            if piece in wholes and seen[piece] >= seen[row]:
                break
        else:
            return [row]
        pieces.append(piece)
        at += len(piece)
    return pieces


def _refuse_wrong_times(table: pa.Table, file: Path) -> None:
    import pyarrow.compute as pc

    wrong = [
        pc.fill_null(pc.or_(pc.less(table[name], 0), pc.greater(table[name], _LATEST_NS)), False)
        for name in ("submitted_ns", "start_ns", "duration_ns")
    ]
    if count := pc.sum(pc.or_(pc.or_(*wrong[:2]), wrong[2])).as_py():
        raise Error(
            f"{file}: {counted(count, 'launch has', 'launches have')} times below 0, or beyond any clock's, so it was "
            "edited or is damaged: record it again"
        )


def read_trace(
    path: str | os.PathLike[str],
    *,
    label: str = "",
    recording_us: float | None = None,
    request_gap_ms: float | None = None,
) -> Trace:
    """Reads recorded launches that belong together: those of one process on one GPU, without pauses of a second.

    Of several processes and GPUs, the one with most launches is taken. Of these, the row with most GPU time in which no
    second passes without work, so that start-up is not replayed. `Trace.source` names the chosen launches.

    Where each launch is a graph, each is a request. Else requests end where the GPU had nothing for `request_gap_ms`,
    or if that is None, for a millisecond. Then launches that are those of several other requests in a row, which had
    queued, count as so many. Where most requests are like others, those before the first and after the last of these
    are left out: a warm-up, a request that the recording cut off.

    Args:
        path: A data set of `cudasched.collect`.
        label: Only launches whose label begins with it.
        recording_us: The program's cost of recording a launch, us, subtracted from its own time between launches. None:
            1.7 where CUPTI timed them, 3 where events did, 0 where the recording does not tell.
        request_gap_ms: A request ends where the GPU had nothing for so long, ms; None: as above.

    Raises:
        ConfigError: The gap or the cost is out of its limits.
        Error: The file cannot be read (`cudasched.collect.read`), has no such launches, lacks their submission times,
            or times that no GPU has, or none was timed.
    """
    file = Path(path)
    return trace_in(collect.read(file), file, label=label, recording_us=recording_us, request_gap_ms=request_gap_ms)[0]


def trace_in(
    table: pa.Table,
    file: Path,
    *,
    label: str = "",
    recording_us: float | None = None,
    request_gap_ms: float | None = None,
) -> tuple[Trace, list[int]]:
    """The trace in a recording, as `read_trace` chooses it, and the rows that it is made of, in order of submission.

    Args:
        table: Of `cudasched.collect.read`.
        file: Where it comes from.
        label: Only launches whose label begins with it.
        recording_us: As of `read_trace`.
        request_gap_ms: As of `read_trace`.

    Raises:
        ConfigError: As `read_trace`.
        Error: As `read_trace`.
    """
    kind = ["kind", "identity", "grid_x", "grid_y", "grid_z", "block_x", "graph"]
    columns = ["pid", "device", "launch", *kind, "submitted_ns", "start_ns", "duration_ns", "label"]
    table, timing = table.select(columns), fact(table, "timing")
    if table["submitted_ns"].null_count:
        raise Error(
            f"{file} does not say when its launches were submitted, so they cannot be replayed: it is a data set for "
            "training (training.compact leaves times out); record the program with `cudasched collect`"
        )
    _refuse_wrong_times(table, file)
    rows = table.to_pydict()
    places: dict[tuple[int, int], list[int]] = {}
    for index, place in enumerate(zip(rows["pid"], rows["device"], strict=True)):
        if (rows["label"][index] or "").startswith(label):
            places.setdefault(place, []).append(index)
    if not places:
        without = f" with a label that begins with {label!r}" if label else ": record the program while it works"
        raise Error(f"{file} has no launches{without}")
    busiest = max(places, key=lambda place: len(places[place]))
    chosen = sorted(places[busiest], key=rows["submitted_ns"].__getitem__)
    taken = {name: [values[index] for index in chosen] for name, values in rows.items()}
    does = list(zip(*(taken[name] for name in kind), strict=True))
    durations = _filled(taken["duration_ns"], does, file)
    if label:
        _without_holes(taken["launch"], taken["submitted_ns"], taken["start_ns"], durations)
    parts = _parts(taken["submitted_ns"], taken["start_ns"], durations)
    part = max(parts, key=lambda part: sum(durations[part.start : part.stop]))
    source = f"process {busiest[0]} on GPU {busiest[1]}" + (f", 1 of {len(places)}" if len(places) > 1 else "")
    load = _load_of({text for text in taken["label"] if text}, file)

    each = request_gap_ms is None and set(taken["kind"]) == {"graph"}

    def trace_in_part() -> Trace:
        return trace_of(
            *(column[part.start : part.stop] for column in (taken["submitted_ns"], taken["start_ns"], durations)),
            name=label or file.stem,
            load=load,
            requests=each,
            request_gap_ms=REQUEST_GAP_MS if request_gap_ms is None else request_gap_ms,
            recording_us=COST_US.get(timing, 0.0) if recording_us is None else recording_us,
        )

    trace = trace_in_part()
    if not trace.gpu_ms:
        raise Error(f"{file}: its launches took no time on the GPU, so it was edited or is damaged: record it again")
    if request_gap_ms is None and not each:
        kept, ends = _requests(does[part.start : part.stop], trace.ends)
        if len(kept) < len(part):
            part = range(part.start + kept.start, part.start + kept.stop)
            trace = trace_in_part()
        trace = replace(trace, ends=tuple(ends))
    if len(part) < len(chosen):
        source += f", launches {part.start + 1} to {part.stop} of {len(chosen)}"
    kept_rows = chosen[part.start : part.stop]
    if recording_us is None and not label:
        trace = replace(trace, slowed=slowed([table.take(kept_rows)], timing))
    return replace(trace, gpu=fact(table, "gpu"), source=source), kept_rows
