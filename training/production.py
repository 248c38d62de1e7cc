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

from training.data import Codes, Floats, replay_columns, sm_count_of

#: As event_sample() of csrc/predict/sample.hpp.
GAP_NS = 1300
TICK_NS = 500
COVERAGE = 0.9
SEED = 1


def elapsed_ns(duration_ns: Floats, seed: int = SEED) -> NDArray[np.int64]:
    """What two events around launches of these durations give, each at a place of its own within a tick."""
    begin = np.random.default_rng(seed).random(len(duration_ns)) * TICK_NS
    return (np.floor((begin + duration_ns + GAP_NS) / TICK_NS) * TICK_NS).astype(np.int64)


def replay(table: pa.Table, model: str, coverage: float = COVERAGE, by_events: bool = True) -> dict[str, Any]:
    """What a predictor that knows nothing yet says of each launch, on line, in the table's order.

    Args:
        table: Kernels of one program. Where it has their times, each is learned from when it has completed; else
            before the next one.
        model: The trees; "" for none.
        coverage: Of the bound.
        by_events: Whether it learns from events; else from the recorded durations.

    Returns:
        Arrays with a value a launch: predicted_ns, bound_ns, base_ns, key, hit, cold, sampled.
    """
    from cudasched import hook

    core = hook.load_core()
    columns = replay_columns(table)
    if by_events and "elapsed_ns" in table.column_names:
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
