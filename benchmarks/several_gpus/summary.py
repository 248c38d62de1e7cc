"""Rows with the number of GPUs, and the figures that are promised."""

from __future__ import annotations

from benchmarks.colocation.cells import CellFile
from benchmarks.lab.processes import HANG_S
from benchmarks.preempt import summary
from benchmarks.preempt.summary import PROMISED, Group, Promise, ends_of, excess, share, summed
from benchmarks.results.schema import Results

#: Numbers of GPUs, each with a scene of its own.
SIZES = (2, 4, 8)
#: Servers, and on how many of the GPUs each is.
SERVERS = {"bert_graph": 1, "tensor_parallel_graph": 2, "tensor_parallel_eager": 2}
#: The arm of training under cudasched without a server, and the place of an arm in cells of servers that are killed.
HOOKED, KILLS = "best_effort_alone_hooked", "kills"


def results(cells: CellFile) -> Results:
    """A row for each arm of each program, server and number of GPUs. Raises ValueError."""
    measured = CellFile(cells.path.with_suffix(".rows"), cells.meta)
    for outcome in cells.outcomes.values():
        if outcome.cell.arm != KILLS:
            measured.add(outcome)
    made = summary.results(measured)
    rows = [row.model_copy(update={"gpus": int(row.scene.rpartition("_")[2])}) for row in made.colocations]
    return made.model_copy(update={"rows": rows})


def ratio(group: Group, arm: str) -> float | None:
    """P99 over alone."""
    return group[arm].p99_ratio if arm in group else None


def lost_more(group: Group, arm: str) -> float | None:
    """The share of its steps that training loses beyond the share of time that requests take of a GPU with a server.

    All GPUs take the same steps: so much is lost on those without a server. Against training under cudasched alone,
    which launches faster than bare training. None where every GPU has a server.
    """
    row, alone = group.get(arm), group.get(HOOKED)
    if row is None or alone is None or row.gpus is None or row.gpus <= SERVERS[row.latency_load]:
        return None
    if not (row.best_effort_per_s and alone.best_effort_per_s and row.duty):
        return None
    return 1 - row.best_effort_per_s / alone.best_effort_per_s - row.duty


PROMISES = {
    f"{arm}_gpus_{size}_{name}": Promise(f"gpus_{size}", *promise, arms=(arm,))
    for arm in PROMISED
    for size in SIZES
    for name, promise in {
        "p99_excess_ms": (excess, 0.35, "less", max, ends_of("p99", in_ms=True)),
        "p99_ratio": (ratio, 1.3, "less", max, ends_of("p99", in_ms=False)),
        "best_effort": (share, 0.97, "more", min),
        "lost_without_server": (lost_more, 0.02, "less", max),
    }.items()
}


def figures(made: Results, cells: CellFile) -> Results:
    """The figures that are promised, as far as their cells were measured."""
    rows = [row for name, promise in PROMISES.items() for row in promise.judged(name, made)]
    pieces = [each.result for each in cells.outcomes.values() if each.cell.arm == KILLS and each.result]
    if pieces:
        # Training that ended, hung, or came to other losses than elsewhere.
        wrong = (one["problem"] or one["changed"] or not one["readings"] or one["gap_s"] > HANG_S for one in pieces)
        failed = [float(bool(each)) for each in wrong]
        rows += [
            summed("kills", [float(piece["kills"]) for piece in pieces], 20.0, "more"),
            summed("kills_minutes", [piece["seconds"] / 60 for piece in pieces], 10.0, "more"),
            summed("kills_failures", failed, 0.0, "less"),
        ]
    return Results(meta=made.meta, rows=rows)
