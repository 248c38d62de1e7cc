"""What the preemption benchmark's cells say: rows, a table of a server, and the figures that are promised."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import Arm

from benchmarks.colocation.cells import CellFile
from benchmarks.colocation.rows import results as rows_of
from benchmarks.figures import few_requests, p50_of_alone
from benchmarks.lab.intervals import Interval, of_repeats, too_few
from benchmarks.preempt.programs import LONG_KERNELS
from benchmarks.results.schema import ColocationRow, FigureRow, Results

#: The arms of the table and the plot, and what they are called there.
SHOWN = {
    "latency_alone": "alone",
    "processes": "time slices",
    "mps": "MPS",
    "mps_priority": "MPS, priority",
    "mps_half": "MPS, half of the SMs",
    "before": "before",
    "slices": "slices",
    "cudasched": "cudasched",
    "cudasched_two_processes_whole": "two processes, whole graphs",
    "cudasched_two_processes": "two processes",
    "cudasched_mps": "under MPS",
    "cudasched_one_process": "one process",
}
#: The arms that figures are promised of.
PROMISED = ("slices", "cudasched")
#: A server whose P99 alone is longer, ms, is held to ratios, too; a smaller excess of `before` is none to compare with.
LONG_MS, LEAST_EXCESS_MS = 1.0, 0.05
#: Both worse by more than this is worse in both: what two equal cells differ by.
NOISE = 0.02
_SWITCHES = (
    "each request pays a change of contexts, 0.13 ms, and beside kernels that draw the most power lower clocks; at 120 "
    "requests a second one in ten queues behind another, and the GPU goes back to best effort between the two"
)
_GAPS = (
    "eager requests leave the GPU idle between kernels: each such gap costs two changes of contexts, 0.26 ms, in which "
    "best effort gets nothing; slices of 300 and 1,000 us and a closed gate gained 0 to 3% and cost P50"
)
_QUEUED = (
    "requests that queue, beside kernels that draw the most power (Llama layers); where P99 alone is 4 to 13 ms "
    "(recommender), it is the host's"
)
_HOST = "P99 is the host's in these cells, alone too: 4 to 13 ms for the recommender, 23 to 58 ms for eager servers"
#: Why a figure misses its goal, by its name without its arm.
LIMITED_BY: dict[str, str] = {
    "p99_excess_ms_median": _SWITCHES,
    "p99_excess_ms_worst": _QUEUED,
    "p99_ratio_median": _SWITCHES,
    "p99_ratio_worst": _QUEUED,
    "p50_excess_ms_median": _SWITCHES,
    "p50_excess_ms_worst": _SWITCHES,
    "best_effort_worst": "a gap within a request (copies of the recommender) costs two more changes of contexts, so "
    "do programs of short kernels (LSTM; preempt_short.json has it without the gate)",
    "excess_of_before": _HOST,
    "eager_p99_of_time_slices_worst": _HOST,
    "eager_worse_in_both": _HOST,
    "eager_best_effort_worst": _GAPS,
    "several_best_effort": "two best-effort programs change places each 1.2 ms in place of 2 ms, for the server's P99; "
    "beside two servers more requests interrupt ResNet-50",
    "p99_excess_ms": _SWITCHES,
    "p99_ratio": _SWITCHES,
    "best_effort": "one cell of one repeat: FSDP on two GPUs; the other three have 1.11 to 1.34",
    "lost_without_server": "one repeat of two programs, of which the other gains 5%",
    "kills_minutes": "the time on four GPUs that was there; 25 kills so far",
    "soak_gpu_minutes": "the time on the GPU that was there; no failure so far",
}

Group = Mapping[str, ColocationRow]
"""The rows of one program, server and repeat by their arms."""
Value = Callable[[Group, str], float | None]


def arms_of(names: Iterable[str]) -> dict[str, Arm]:
    """The arms of these names: those that the demo has, else under cudasched, by the mode and policy in the name."""
    return {name: ALL_ARMS.get(name) or _arm(name) for name in names}


def _arm(name: str) -> Arm:
    policy = name.rpartition("_")[2]
    return Arm(
        name,
        "mps" if "mps" in name else "two_processes",
        managed=name != "mps_half",
        policy=policy if policy in ("open", "harvest") else "strict",
    )


def results(cells: CellFile) -> Results:
    """A row for each arm of each program, server and repeat: `alone` is of the same repeat.

    Raises:
        ValueError: The cells say nothing of where they come from.
    """
    names = {cell.arm for cell in cells.outcomes}
    return rows_of(cells, arms_of(sorted(names, key=lambda arm: (arm not in SHOWN, arm))))


def groups_of(results: Results, *scenes: str) -> list[Group]:
    """The rows of some scenes by program, server and repeat."""
    found: dict[tuple[object, ...], dict[str, ColocationRow]] = {}
    for row in results.rows:
        if isinstance(row, ColocationRow) and row.scene in scenes:
            key = row.scene, row.repeat, row.best_effort_load, row.latency_load, row.other_latency, row.rate_hz
            found.setdefault(key, {})[row.arm] = row
    return list(found.values())


def share(group: Group, arm: str, of: str = "processes") -> float | None:
    """What best effort does in an arm, of what it does in another."""
    ours, theirs = (group[each].best_effort_per_s if each in group else None for each in (arm, of))
    return ours / theirs if ours and theirs else None


def _bears(row: ColocationRow, percentile: Literal["p50", "p99"]) -> bool:
    """Whether a row's requests are enough for a percentile."""
    return row.latency_ms is not None and not too_few(row.latency_ms.n, 0.99 if percentile == "p99" else 0.5)


def excess(group: Group, arm: str, percentile: Literal["p50", "p99"] = "p99") -> float | None:
    """By how much a percentile is above the server's alone, ms."""
    row = group.get(arm)
    if row is None or row.latency_ms is None or row.alone_ms is None or not _bears(row, percentile):
        return None
    return float(getattr(row.latency_ms, percentile) - getattr(row.alone_ms, percentile))


def p99_of(group: Group, arm: str, of: str) -> float | None:
    """An arm's P99 over another's."""
    rows = [group[each] for each in (arm, of) if each in group and _bears(group[each], "p99")]
    ours, theirs = (row.latency_ms for row in rows) if len(rows) == 2 else (None, None)
    return ours.p99 / theirs.p99 if ours and theirs else None


def long_ratio(group: Group, arm: str) -> float | None:
    """P99 over alone, of a server that is long enough for a ratio."""
    row = group.get(arm)
    return row.p99_ratio if row and row.alone_ms and row.alone_ms.p99 > LONG_MS else None


def of_before(group: Group, arm: str) -> float | None:
    """The excess of P99 over alone, of the same excess of `before`; beside long kernels, where there was one."""
    ours, theirs = excess(group, arm), excess(group, "before")
    beside = next(iter(group.values())).best_effort_load
    if beside not in LONG_KERNELS or ours is None or theirs is None or theirs < LEAST_EXCESS_MS:
        return None
    return ours / theirs


def worse_in_both(group: Group, arm: str) -> float | None:
    """1 where P99 and best effort are both worse than in time slices, else 0."""
    latency, kept = p99_of(group, arm, "processes"), share(group, arm)
    return None if latency is None or kept is None else float(latency > 1 + NOISE and kept < 1 - NOISE)


@dataclass(frozen=True)
class Promise:
    """A figure that is promised, of all groups of a scene and the arms, one after another.

    Attributes:
        scene: Of which.
        value: Of one group.
        goal: Of the figure.
        better: Whether less or more is better.
        take: How the values of all groups are one.
        ends: The interval of a value over the requests of one repeat.
        arms: Which.
    """

    scene: str
    value: Value
    goal: float
    better: Literal["less", "more"] = "less"
    take: Callable[[Sequence[float]], float] = statistics.median
    ends: Callable[[Group, str], Interval | None] = lambda group, arm: None
    arms: Sequence[str] = PROMISED

    def values(self, groups: Iterable[Group]) -> list[float]:
        """Of those groups that have one."""
        every = [self.value(group, arm) for group in groups for arm in self.arms]
        return [value for value in every if value is not None]

    def of(self, groups: Sequence[Group]) -> float | None:
        """The figure; None where no group has a value."""
        values = self.values(groups)
        return self.take(values) if values else None

    def judged(self, name: str, results: Results) -> list[FigureRow]:
        """The figure's row, where there is a value.

        Its interval is over the repeats of each pair; of one repeat it is the figure of all low and of all high ends.
        """
        groups = groups_of(results, self.scene)
        values = self.values(groups)
        if not values:
            return []
        pairs: dict[object, list[Group]] = {}
        for group in groups:
            row = next(iter(group.values()))
            pairs.setdefault((row.best_effort_load, row.latency_load, row.other_latency), []).append(group)
        known = [(group, arm) for group in groups for arm in self.arms if self.value(group, arm) is not None]
        ends = [interval for each in known if (interval := self.ends(*each))]
        of_one = (self.take([low for low, _ in ends]), self.take([high for _, high in ends])) if ends else None
        once = len(pairs) == len(groups) and len(ends) == len(known)
        why = LIMITED_BY.get(re.sub("^(slices|cudasched)_(gpus_[0-9]_)?", "", name), "")
        interval = of_repeats(list(pairs.values()), self.of) or (of_one if once else None)
        found = self.take(values), min(values), max(values), len(values)
        return [FigureRow.judged(name, found, (self.goal, self.better), why, interval)]


def ends_of(percentile: Literal["p50", "p99"], in_ms: bool) -> Callable[[Group, str], Interval | None]:
    """The interval of a percentile over alone, or by how much it is above alone, ms, where requests have one."""

    def ends(group: Group, arm: str) -> Interval | None:
        row = group[arm]
        interval: Interval | None = getattr(row, f"{percentile}_ratio_interval")
        if interval is None or row.alone_ms is None or not in_ms:
            return interval
        alone_ms = getattr(row.alone_ms, percentile)
        return (interval[0] - 1) * alone_ms, (interval[1] - 1) * alone_ms

    return ends


PROMISES = {
    f"{arm}_{name}": replace(promise, arms=(arm,))
    for arm in PROMISED
    for name, promise in {
        "p99_excess_ms_median": Promise("main", excess, 0.30, ends=ends_of("p99", in_ms=True)),
        "p99_excess_ms_worst": Promise("main", excess, 0.60, take=max, ends=ends_of("p99", in_ms=True)),
        "p99_ratio_median": Promise("main", long_ratio, 1.25, ends=ends_of("p99", in_ms=False)),
        "p99_ratio_worst": Promise("main", long_ratio, 1.4, take=max, ends=ends_of("p99", in_ms=False)),
        "p50_excess_ms_median": Promise(
            "main", partial(excess, percentile="p50"), 0.15, ends=ends_of("p50", in_ms=True)
        ),
        "p50_excess_ms_worst": Promise(
            "main", partial(excess, percentile="p50"), 0.25, take=max, ends=ends_of("p50", in_ms=True)
        ),
        "best_effort_median": Promise("main", share, 0.99, "more"),
        "best_effort_worst": Promise("main", share, 0.96, "more", min),
        "excess_of_before": Promise("main", of_before, 0.3),
        "eager_p99_of_time_slices_median": Promise("eager", partial(p99_of, of="processes"), 0.9),
        "eager_p99_of_time_slices_worst": Promise("eager", partial(p99_of, of="processes"), 1.15, take=max),
        "eager_best_effort_worst": Promise("eager", share, 0.95, "more", min),
        "eager_worse_in_both": Promise("eager", worse_in_both, 0.0, take=sum),
    }.items()
} | {
    "outside_p99_ratio": Promise("outside", partial(p99_of, of="slices_inside"), 1.1, arms=("slices",)),
    "several_best_effort": Promise("several", share, 0.95, "more", min),
}


def figures(results: Results, soak: Sequence[Path] = ()) -> Results:
    """The figures that are promised, as far as their cells were measured.

    Args:
        results: The rows.
        soak: Files of `tests.soak.slices`, one a GPU: kinds of programs whose checksums are not those of an
            undisturbed run, all else that went wrong, and for how long they ran.
    """
    made = [row for name, promise in PROMISES.items() for row in promise.judged(name, results)]
    by_arm = [row for row in made if row.figure.endswith("_excess_of_before")]
    if by_arm:
        worst = max(by_arm, key=lambda row: row.value)
        made.append(worst.model_copy(update={"figure": "excess_of_before"}))
    told = [json.loads(path.read_text()) for path in soak]
    if told:
        kinds = {kind for each in told for kind in each["checked"]}
        changed = {kind for each in told for kind in each["changed"]}
        made += [
            summed("bits_failed", [float(kind in changed) for kind in kinds], 0.0),
            summed("soak_failures", [float(len(each["failures"])) for each in told], 0.0),
            summed("soak_gpu_minutes", [each["seconds"] / 60 for each in told], 30.0, "more"),
        ]
    return Results(meta=results.meta, rows=made)


def summed(name: str, values: Sequence[float], goal: float, better: Literal["less", "more"] = "less") -> FigureRow:
    found = sum(values), min(values), max(values), len(values)
    return FigureRow.judged(name, found, (goal, better), LIMITED_BY.get(name, ""))


def every_table(results: Results) -> str:
    """The tables of all scenes and servers."""
    rows = results.colocations
    pairs = dict.fromkeys((row.latency_load, row.scene) for row in rows)
    named = ((f"{scene}: " if scene else "", preempt_table(results, server, scene)) for server, scene in pairs)
    return "\n".join(f"{name}{table}" for name, table in named)


def preempt_table(
    results: Results,
    server: str | None = None,
    scene: str | None = None,
    arms: Mapping[str, str] | None = None,
) -> str:
    """A line a program beside one server: P50 and P99 in each arm, and best effort of time slices'; medians of repeats.

    In a file without scenes, whose rows are of several machines, latencies are over those alone.

    Args:
        results: The rows.
        server: Beside which; the first by default.
        scene: Of which; by default the main one, or the first of a file without it.
        arms: Which, and what they are called; by default all.

    Raises:
        ValueError: There is no such server in the scene.
    """
    scenes = [row.scene for row in results.colocations]
    groups = groups_of(results, scene or ("main" if "main" in scenes else scenes[0]))
    servers = list(dict.fromkeys(next(iter(group.values())).latency_load for group in groups))
    own = [group for group in groups if next(iter(group.values())).latency_load == (server or servers[0])]
    if not own:
        raise ValueError(f"there are no rows of the server {server}, only of {', '.join(servers)}")
    server = next(iter(own[0].values())).latency_load
    arms = arms or SHOWN | {arm: arm.replace("_", " ") for group in own for arm in group if arm not in SHOWN}
    names = {arm: name for arm, name in arms.items() if any(arm in group and group[arm].latency_ms for group in own)}
    kept = [arm for arm in names if arm != "processes" and any(share(group, arm) for group in own)]
    first = next(iter(own[0].values()))
    show = _latency if first.scene else _over_alone
    lines = [
        f"`{server}`, {_requests(own)}: P50/P99 {f'ms{_with_interval(own)}' if first.scene else 'over alone'}, then "
        "best effort of that in time slices.",
        "",
        f"| beside | {' | '.join(names.values())} | {' | '.join(f'best effort, {names[arm]}' for arm in kept)} |",
        f"|---|{'---|' * (len(names) + len(kept))}",
    ]
    for program in dict.fromkeys(next(iter(group.values())).best_effort_load for group in own):
        repeats = [group for group in own if next(iter(group.values())).best_effort_load == program]
        cells = [show([group[arm] for group in repeats if arm in group]) for arm in names]
        shares = [[value for group in repeats if (value := share(group, arm))] for arm in kept]
        cells += [f"{statistics.median(values):.1%}" if values else "" for values in shares]
        lines.append(f"| {program} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + few_requests(row for group in own for row in group.values())


def _requests(groups: Iterable[Group]) -> str:
    """How the requests came, and how many a second: the least and the most of several runs."""
    rows = [row for group in groups for row in group.values()]
    rates = sorted({row.rate_hz for row in rows})
    return f"{rows[0].arrivals} {' to '.join(f'{rate:g}' for rate in dict.fromkeys((rates[0], rates[-1])))}/s"


def _with_interval(groups: Iterable[Group]) -> str:
    has = any(row.p99_ratio_interval for group in groups for row in group.values())
    return " (95% interval of P99 over alone)" if has else ""


def _latency(rows: Sequence[ColocationRow]) -> str:
    """P50 and P99, medians of repeats, and the interval of P99 over alone."""
    known = [row.latency_ms for row in rows if row.latency_ms]
    if not known:
        return ""
    shares = ([k.p50 for k in known], [k.p99 for k in known])
    said = "/".join(f"{statistics.median(values):.2f}" for values in shares)
    ratios = [row.p99_ratio for row in rows if row.p99_ratio]
    interval = rows[0].p99_ratio_interval if len(rows) == 1 else of_repeats([ratios], statistics.median)
    return said if interval is None else f"{said} ({interval[0]:.2f} to {interval[1]:.2f}x)"


def _over_alone(rows: Sequence[ColocationRow]) -> str:
    """P50 and P99 over those alone, medians; of the server alone in ms."""
    ratios = [(p50, row.p99_ratio) for row in rows if (p50 := p50_of_alone(row)) and row.p99_ratio]
    if not ratios or rows[0].arm == "latency_alone":
        return _latency(rows)
    return "/".join(f"{statistics.median(values):.2f}" for values in zip(*ratios, strict=True)) + "x"
