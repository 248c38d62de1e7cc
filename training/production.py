"""Launches as the scheduler meets them: by which times it learns, and when.

Recordings have CUPTI's times. The scheduler has those of two CUDA events around a launch: in ticks of half a
microsecond, with a gap that the events add to the kernel between them. Recordings by both (`--timing both`) have what
they gave; of the others it is emulated: the events fall on the device's clock anywhere within a tick, and the gap is
always the same. It learns of a launch when that has completed, while the program has launched others. What it says is
held against CUPTI's times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.data import Codes, Floats, Mask, replay_columns, sm_count_of

#: As event_sample() of csrc/predict/sample.hpp.
GAP_NS = 1300
TICK_NS = 500
COVERAGE = 0.9
SEED = 1
#: A launch was queued if it was submitted so long before the kernel ahead of it ended: no part of its way to the GPU is
#: between its events.
QUEUED_NS = 10_000


def elapsed_ns(duration_ns: Floats, seed: int = SEED) -> NDArray[np.int64]:
    """What two events around launches of these durations give, each at a place of its own within a tick."""
    begin = np.random.default_rng(seed).random(len(duration_ns)) * TICK_NS
    return (np.floor((begin + duration_ns + GAP_NS) / TICK_NS) * TICK_NS).astype(np.int64)


def is_queued(table: pa.Table) -> Mask:
    """Launches that a busy GPU found in its queue; the others it had to wait for."""
    submitted, start = (table[name].to_numpy() for name in ("submitted_ns", "start_ns"))
    end = start + table["duration_ns"].to_numpy()
    pid = table["pid"].to_numpy()
    queued = np.zeros(len(table), bool)
    for process in np.unique(pid):
        mine = np.flatnonzero(pid == process)
        order = mine[np.argsort(start[mine], kind="stable")]
        busy_until = np.maximum.accumulate(end[order])[:-1]
        queued[order[1:]] = busy_until - submitted[order[1:]] > QUEUED_NS
    return queued


def added_ns(table: pa.Table) -> NDArray[np.int64]:
    """What two events added to each kernel that was queued, in a recording by both; empty where it has none."""
    if "elapsed_ns" not in table.column_names:
        return np.zeros(0, np.int64)
    elapsed = table["elapsed_ns"].fill_null(0).to_numpy()
    chosen = is_queued(table) & (elapsed > 0)
    return np.asarray(elapsed[chosen] - table["duration_ns"].to_numpy()[chosen], np.int64)


def measured_ns(
    duration_ns: Floats, added: NDArray[np.int64], gap_is_known: bool = False, seed: int = SEED
) -> NDArray[np.int64]:
    """What two events around launches of these durations give, if each adds what a recorded one did.

    Args:
        duration_ns: Of the launches.
        added: What to draw from: of `added_ns`.
        gap_is_known: Whether what the scheduler takes off is right in the median, and the rest is spread alone.
        seed: Of the draws.
    """
    drawn = np.random.default_rng(seed).choice(added, len(duration_ns))
    off = round(float(np.median(added))) - GAP_NS if gap_is_known else 0
    return np.maximum(1, duration_ns.astype(np.int64) + drawn - off)


def replay(
    table: pa.Table,
    model: str,
    coverage: float = COVERAGE,
    by_events: bool = True,
    elapsed: NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """What a predictor that knows nothing yet says of each launch, on line, in the table's order.

    Args:
        table: Kernels of one program. Where it has their times, each is learned from when it has completed; else
            before the next one.
        model: The trees; "" for none.
        coverage: Of the bound.
        by_events: Whether it learns from events; else from the recorded durations.
        elapsed: What events gave for each launch, in place of what was recorded or is emulated.

    Returns:
        Arrays with a value a launch: predicted_ns, bound_ns, base_ns, key, hit, cold, sampled.
    """
    from cudasched import hook

    core = hook.load_core()
    columns = replay_columns(table)
    if elapsed is not None:
        columns["elapsed_ns"] = elapsed
    elif by_events and "elapsed_ns" in table.column_names:
        columns["elapsed_ns"] = (
            table["elapsed_ns"].fill_null(0).to_numpy()
        )  # of what they gave nothing, nothing is learned
    elif by_events:
        columns["elapsed_ns"] = elapsed_ns(columns["duration_ns"].astype(np.float64))
    if not table["submitted_ns"].null_count and not table["start_ns"].null_count:
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
