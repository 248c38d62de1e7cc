"""Launches as the scheduler meets them: by which times it learns, and when.

Recordings have CUPTI's times. The scheduler has those of two CUDA events around a launch, which add to the kernel's
time: in a busy GPU's queue what the events themselves take, and where the GPU waits for the launch also what the launch
call takes on the host, which the scheduler measures. What that comes to was recorded on an H200, without CUPTI
(``training/data/h200_events.parquet``, `benchmarks.predictor.events`), and is drawn for each launch. It learns of a
launch when that has completed, while the program has launched others. What it says is held against CUPTI's times.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from training.data import Codes, Mask, replay_columns, sm_count_of

EVENTS = Path(__file__).parent / "data" / "h200_events.parquet"
COVERAGE = 0.9
SEED = 1
#: A launch was queued if it was submitted so long before the kernel ahead of it ended: no part of its way to the GPU is
#: between its events.
QUEUED_NS = 10_000

#: Of launches of the six recorded programs: which share was queued so, and which was submitted later, but before the
#: kernel ahead of it ended; by their duration.
LONGER_NS = (10_000, 100_000)
SHARE_QUEUED = np.array([0.08, 0.31, 0.65])
SHARE_SOON = np.array([0.22, 0.11, 0.12])


def has_times(table: pa.Table) -> bool:
    """Whether it is known when each launch was submitted and when it began."""
    return not table["submitted_ns"].null_count and not table["start_ns"].null_count


def ahead_ns(table: pa.Table) -> NDArray[np.int64]:
    """How long before the end of the kernel ahead of it, on that process's GPU, each launch was submitted."""
    submitted, start = (table[name].to_numpy() for name in ("submitted_ns", "start_ns"))
    end = start + table["duration_ns"].to_numpy()
    pid = table["pid"].to_numpy()
    ahead = np.full(len(table), np.iinfo(np.int64).min // 2)
    for process in np.unique(pid):
        mine = np.flatnonzero(pid == process)
        order = mine[np.argsort(start[mine], kind="stable")]
        ahead[order[1:]] = np.maximum.accumulate(end[order])[:-1] - submitted[order[1:]]
    return ahead


def drawn_ahead_ns(duration_ns: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """The same of launches whose times are not known: drawn by what recorded programs' launches of that length do."""
    place, drawn = np.searchsorted(LONGER_NS, duration_ns, side="right"), random.random(len(duration_ns))
    queued, soon = SHARE_QUEUED[place], SHARE_SOON[place]
    return np.where(drawn < queued, QUEUED_NS + 1, np.where(drawn < queued + soon, QUEUED_NS // 2, -1))


def is_queued(table: pa.Table) -> Mask:
    """Launches that a busy GPU found in its queue; the others it had to wait for."""
    return np.asarray(ahead_ns(table) > QUEUED_NS, bool)


@functools.cache
def recorded_events(path: Path = EVENTS) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What two events add, as recorded without CUPTI.

    Returns:
        ns added to launches in the queue; and of launches that the GPU waited for a row each of ns added, ns of the
        launch call, and whether the first event was still not complete after the second was recorded.
    """
    table = pq.read_table(path)
    added = table["elapsed_ns"].to_numpy() - table["kernel_ns"].to_numpy()
    queued = table["case"].cast(pa.string()).to_numpy(zero_copy_only=False) == "queued"
    waited = np.stack([added, table["call_ns"].to_numpy(), table["behind"].to_numpy(zero_copy_only=False)], axis=1)
    return added[queued], waited[~queued].astype(np.int64)


def events_of(table: pa.Table, seed: int = SEED) -> dict[str, NDArray[np.int64]]:
    """What the scheduler would have measured of each launch by two events: drawn from what was recorded.

    A launch that was submitted when the GPU had nothing left is known to be waited for. Of others that may be, the
    scheduler goes by the first event, and takes some for queued.

    Args:
        table: Launches; where they have no times of submission, they came as those of whole programs did.
        seed: Of the draws.

    Returns:
        Columns of a replay: elapsed_ns, and call_ns, which is 0 where the launch is taken for queued.
    """
    random = np.random.default_rng(seed)
    queued, waited = recorded_events()
    duration = table["duration_ns"].to_numpy()
    count = len(duration)
    ahead = ahead_ns(table) if has_times(table) else drawn_ahead_ns(duration, random)
    added, call, behind = waited[random.integers(0, len(waited), count)].T
    in_queue = ahead > QUEUED_NS
    added = np.where(in_queue, random.choice(queued, count), added)
    call = np.where(in_queue | ((behind > 0) & (ahead > 0)), 0, call)
    return {"elapsed_ns": np.maximum(1, duration + added), "call_ns": call}


def recorded_events_of(table: pa.Table) -> dict[str, NDArray[np.int64]]:
    """The same as they were recorded, where CUPTI was not between them: of launches in the queue. 0: nothing."""
    elapsed = table["elapsed_ns"].fill_null(0).to_numpy()
    return {"elapsed_ns": np.where(is_queued(table), elapsed, 0), "call_ns": np.zeros(len(table), np.int64)}


def replay(
    table: pa.Table,
    model: str,
    coverage: float = COVERAGE,
    events: dict[str, NDArray[np.int64]] | None = None,
    by_events: bool = True,
) -> dict[str, Any]:
    """What a predictor that knows nothing yet says of each launch, on line, in the table's order.

    Args:
        table: Kernels of one program. Where it has their times, each is learned from when it has completed; else
            before the next one.
        model: The trees; "" for none.
        coverage: Of the bound.
        events: What events gave of each launch; None: drawn, by `events_of`.
        by_events: Whether it learns from events; else from the recorded durations.

    Returns:
        Arrays with a value a launch: predicted_ns, bound_ns, base_ns, key, hit, cold, sampled.
    """
    from cudasched import hook

    core = hook.load_core()
    columns = replay_columns(table)
    if by_events:
        columns |= events_of(table) if events is None else events
    if has_times(table):
        columns["submitted_ns"] = table["submitted_ns"].to_numpy()
        columns["completed_ns"] = table["start_ns"].to_numpy() + table["duration_ns"].to_numpy()
    found: dict[str, Any] = core.Replay(model, coverage).run(columns, sm_count_of(table))
    return found


def replay_parts(table: pa.Table, model: str, part: Codes, order: Codes) -> dict[str, Any]:
    """As `replay`, with a predictor for each part; launches go by `order`, which may leave some out.

    Returns:
        As `replay`, a value a launch of the table; NaN, and False, where a launch is left out.
    """
    predicted = np.full(len(table), np.nan)
    hit = np.zeros(len(table), bool)
    for number in np.unique(part[order]):
        mine = order[part[order] == number]
        said = replay(table.take(pa.array(mine)), model)
        predicted[mine] = said["predicted_ns"]
        hit[mine] = said["hit"]
    return {"predicted_ns": predicted, "hit": hit}
