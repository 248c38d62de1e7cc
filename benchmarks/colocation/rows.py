"""From cells to rows: medians over repeats, each arm against the arms alone, the physical bound beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cudasched.demo.harness import ARMS, Arm, percentile, summary

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.colocation.cells import BUSY, KERNELS, CellFile, Outcome
from benchmarks.lab.intervals import Interval, of_repeats, of_requests, too_few
from benchmarks.results.schema import ColocationRow, Latency, Results

#: The target that attainment counts against, as a multiple of the P99 alone: what the project promises.
SLO_OVER_ALONE = 1.7

Scene = tuple[str, str, str, str, float]
"""Latency loads, best-effort loads, arrivals, rates, latency target."""
Kernels = dict[str, Outcome]


@dataclass
class Repeats:
    """The outcomes of one arm in one scene."""

    outcomes: list[Outcome] = field(default_factory=list)

    def latencies_ms(self, load: str) -> list[list[float]]:
        """Of one load's requests, a list for each repeat."""
        return [served["latency_ms"] for served in self._served(load) if served["latency_ms"]]

    def waits_ms(self, load: str) -> list[list[float]]:
        """How long one load's requests waited, a list for each repeat."""
        return [served["wait_ms"] for served in self._served(load) if served["wait_ms"]]

    def request_ms(self, load: str) -> list[float]:
        """What one load's requests took where its latencies are of something else, the time between tokens."""
        return [value for served in self._served(load) for value in served.get("request_ms", [])]

    def unserved(self, load: str) -> int:
        """How many requests there was no time for."""
        return sum(served["unserved"] for served in self._served(load))

    def summary(self, load: str) -> Latency | None:
        """Medians over repeats of each one's figures."""
        each = [summary(values) for values in self.latencies_ms(load)]
        if not each:
            return None
        figures = {name: statistics.median(one[name] for one in each) for name in ("p50", "p95", "p99", "max", "mean")}
        return Latency.model_validate({**figures, "n": sum(one["n"] for one in each)})

    def p99s_ms(self, load: str) -> list[float]:
        """Of each repeat."""
        return [round(percentile(values, 0.99), 5) for values in self.latencies_ms(load)]

    def per_s(self, loads: list[str], kernels: Kernels) -> list[float]:
        """What the best effort did in each repeat: items a second, of several loads the GPU time in them, s/s."""
        rates = [(outcome.result or {}).get("best_effort_per_s", {}) for outcome in self.outcomes]
        rates = [rate for rate in rates if set(loads) <= set(rate)]
        if len(loads) == 1:
            return [rate[loads[0]] for rate in rates if rate[loads[0]]]
        items_s = {load: _item_s(load, kernels) for load in loads}
        if None in items_s.values():
            return []
        return [sum(rate[load] * (items_s[load] or 0.0) for load in loads) for rate in rates]

    def counted_share(self, of: str, less: str = "") -> float | None:
        """A count in ns over the time in which it was counted, the median over repeats."""
        known = [outcome.result for outcome in self.outcomes if outcome.result and "counted" in outcome.result]
        shares = [
            max(0.0, each["counted"][of] - each["counted"].get(less, 0)) / 1e9 / each["counted_s"]
            for each in known
            if of in each["counted"]
        ]
        return statistics.median(shares) if shares else None

    def building_ms(self) -> list[float]:
        """Of requests that met the building of slices, those of all repeats."""
        building = [(outcome.result or {}).get("building") for outcome in self.outcomes]
        return [value for told in building if told for value in told["latency_ms"]]

    def pooled(self, load: str) -> list[float]:
        """One load's requests of all repeats."""
        return [value for values in self.latencies_ms(load) for value in values]

    def _served(self, load: str) -> list[dict[str, Any]]:
        found = [(outcome.result or {}).get("latency", {}).get(load) for outcome in self.outcomes]
        return [served for served in found if served]


def results(cells: CellFile, arms: Mapping[str, Arm] = ARMS) -> Results:
    """The rows of all cells that have a result.

    Args:
        cells: What was measured.
        arms: What the names of arms in the cells mean.

    Raises:
        ValueError: The cells say nothing of where they come from.
    """
    if cells.meta is None:
        raise ValueError(f"{cells.path}: no meta")
    good = [outcome for outcome in cells.outcomes.values() if outcome.result is not None]
    kernels = {outcome.cell.best_effort: outcome for outcome in good if outcome.cell.arm == KERNELS}
    busy_us = {each.cell.latency: each.result["busy_us"] for each in good if each.result and each.cell.arm == BUSY}
    scenes: dict[Scene, dict[tuple[str, float | str, float], Repeats]] = {}
    for outcome in good:
        cell = outcome.cell
        if cell.arm in (KERNELS, BUSY):
            continue
        known = scenes.setdefault((cell.latency, cell.best_effort, cell.arrivals, cell.rates_hz, cell.slo_ms), {})
        known.setdefault((cell.arm, cell.lead_us, cell.seconds), Repeats()).outcomes.append(outcome)
    rows = []
    for scene, repeats in scenes.items():
        for load in scene[0].split("+"):
            rows += _rows(scene, load, repeats, kernels, busy_us, arms)
    return Results(meta=cells.meta, rows=rows)


def _rows(
    scene: Scene,
    load: str,
    arms: dict[tuple[str, float | str, float], Repeats],
    kernels: Kernels,
    busy_us: dict[str, float],
    known_arms: Mapping[str, Arm],
) -> list[ColocationRow]:
    """The rows of one latency load of a scene."""
    latency_loads, best_effort, arrivals, rates, given_slo_ms = scene
    loads, best_efforts = latency_loads.split("+"), best_effort.split("+")
    rates_hz = dict(zip(loads, map(float, rates.split("+")), strict=True))
    named: dict[str, Repeats] = {}
    for (name, _, _), repeats in arms.items():
        named.setdefault(name, Repeats()).outcomes.extend(repeats.outcomes)
    alone = named.get("latency_alone", Repeats())
    alone_summary = alone.summary(load)
    alone_rates = named.get("best_effort_alone", Repeats()).per_s(best_efforts, kernels)
    alone_per_s = statistics.median(alone_rates) if alone_rates else None
    alone_each = [alone.summary(each) for each in loads]
    busy = [rates_hz[each] * known.mean / 1e3 for each, known in zip(loads, alone_each, strict=True) if known]
    duty = min(1.0, sum(busy)) if len(busy) == len(loads) else None
    host_ms = alone.request_ms(load)
    if host_ms and len(loads) == 1:
        duty = min(1.0, rates_hz[load] * statistics.fmean(host_ms) / 1e3)
    gpu_duty = min(1.0, sum(rates_hz[each] * busy_us[each] / 1e6 for each in loads)) if {*loads} <= {*busy_us} else None
    offloaded_rates = named.get("best_effort_alone_hooked", Repeats()).per_s(best_efforts, kernels)
    offloaded_per_s = statistics.median(offloaded_rates) if offloaded_rates else None
    mps_rates = named.get("best_effort_alone_mps", Repeats()).per_s(best_efforts, kernels)
    mps_per_s = statistics.median(mps_rates) if mps_rates else None
    target_ms = given_slo_ms or (SLO_OVER_ALONE * alone_summary.p99 if alone_summary else None)
    bounds = _bounds(load, named, best_efforts, kernels, alone_per_s)
    item_s = _item_s(best_effort, kernels)
    order = list(known_arms)
    rows = []
    for (name, lead_us, seconds), repeats in sorted(
        arms.items(), key=lambda item: (order.index(item[0][0]), str(item[0]))
    ):
        arm = known_arms[name]
        compared = named.get("latency_alone_hint", alone) if arm.hint_ms else alone
        compared_summary = compared.summary(load)
        measured = repeats.summary(load)
        done = repeats.per_s(best_efforts, kernels)
        per_s = statistics.median(done) if done else None
        left_over = 1.0 if not arm.latency else 1.0 - duty if duty is not None else 0.0
        ratio = per_s / alone_per_s / left_over if per_s and alone_per_s and left_over > 0 else None
        compared_mps_per_s = mps_per_s if arm.mode == "mps" else None
        mps_ratio = per_s / compared_mps_per_s / left_over if per_s and compared_mps_per_s and left_over > 0 else None
        gpu_left = 1.0 - (gpu_duty or 0.0) if arm.latency else 1.0
        known = gpu_duty is not None or not arm.latency
        gpu_ratio = per_s / offloaded_per_s / gpu_left if per_s and offloaded_per_s and gpu_left > 0 and known else None
        bound = bounds.get(arm.mode) if arm.latency and arm.best_effort else None
        building_ms = repeats.building_ms()
        waits_ms = [statistics.fmean(values) for values in repeats.waits_ms(load)]
        pooled_ms = repeats.pooled(load)
        ratios = {
            f"{share}_ratio": getattr(measured, share) / getattr(compared_summary, share)
            if measured and compared_summary
            else None
            for share in ("p50", "p95", "p99")
        }
        intervals = {
            f"p{percent}_ratio_interval": _interval(repeats, compared, load, percent / 100)
            for percent in (50, 99)
            if arm.best_effort
        }
        rows.append(
            ColocationRow.model_validate(
                dict(
                    arm=name,
                    mode=arm.mode,
                    latency_load=load,
                    other_latency="+".join(other for other in loads if other != load),
                    best_effort_load=best_effort,
                    arrivals=arrivals,
                    rate_hz=rates_hz[load],
                    policy=arm.policy if arm.managed else None,
                    lead_us=lead_us if arm.managed else None,
                    repeats=len(repeats.outcomes),
                    latency_ms=measured,
                    alone_ms=compared_summary,
                    **ratios,
                    **intervals,
                    bound_p99_ms=bound[0] if bound else None,
                    bound_from=bound[1] if bound else None,
                    best_effort_per_s=per_s,
                    best_effort_alone_per_s=alone_per_s,
                    duty=duty,
                    best_effort_ratio=ratio,
                    gpu_duty=gpu_duty,
                    best_effort_gpu_ratio=gpu_ratio,
                    best_effort_alone_mps_per_s=compared_mps_per_s,
                    best_effort_mps_ratio=mps_ratio,
                    attainment=_share_within(pooled_ms, target_ms),
                    slo_ms=target_ms,
                    gpu_alone=min(1.0, alone_per_s * item_s) if alone_per_s and item_s else None,
                    gate_wait=repeats.counted_share("gate_wait_ns"),
                    launcher_cpu=repeats.counted_share("launcher_cpu_ns", "launcher_driver_ns"),
                    building_p99_ms=percentile(building_ms, 0.99) if building_ms else None,
                    building_requests=len(building_ms) or None,
                    wait_ms=statistics.median(waits_ms) if waits_ms else None,
                    useful_gpu=_useful(arm, duty, per_s, best_efforts, kernels),
                    seconds=seconds,
                    unserved=repeats.unserved(load),
                    p99_ms_per_repeat=repeats.p99s_ms(load),
                    best_effort_per_s_per_repeat=done,
                    alone_p99_ms_per_repeat=compared.p99s_ms(load),
                )
            )
        )
    return rows


def _interval(own: Repeats, alone: Repeats, load: str, share: float) -> Interval | None:
    """Of a percentile over that alone: over the requests of one repeat, else over repeats."""
    pairs = list(zip(own.latencies_ms(load), alone.latencies_ms(load), strict=False))
    if len(pairs) == 1:
        return of_requests(pairs[0][0], share, pairs[0][1])
    if any(too_few(len(values), share) for pair in pairs for values in pair):
        return None
    ratios = [percentile(ours, share) / percentile(theirs, share) for ours, theirs in pairs]
    return of_repeats([ratios], statistics.median)


def _bounds(
    load: str, named: dict[str, Repeats], best_efforts: list[str], kernels: Kernels, alone_per_s: float | None
) -> dict[str, tuple[float, str]]:
    """The bound in each mode and what it starts from, as far as what it needs was measured.

    It starts from the hinted arm where that was measured: a request on a GPU that best effort has just left finds other
    data in the caches. Its change of contexts was paid ahead; a request without a hint pays it.
    """
    if len(best_efforts) != 1 or best_efforts[0] not in kernels or alone_per_s is None:
        return {}
    recorded = kernels[best_efforts[0]].result or {}
    durations = [(duration_us, count) for duration_us, count in recorded["kernel_us"]]
    busy = min(1.0, alone_per_s * recorded["per_item_us"] / 1e6)
    bounds = {}
    for mode in ("one_process", "mps", "two_processes"):
        hinted = named.get(f"cudasched_{mode}_hint", Repeats()).latencies_ms(load)
        switch_ms = CONTEXT_SWITCH_MS if mode == "two_processes" else 0.0
        start = hinted or named.get("latency_alone", Repeats()).latencies_ms(load)
        each = [bound_p99_ms(values, durations, busy, switch_ms) for values in start]
        if each:
            bounds[mode] = statistics.median(each), "hint" if hinted else "alone"
    return bounds


def _item_s(load: str, kernels: Kernels) -> float | None:
    """GPU time of one item of a best-effort load."""
    outcome = kernels.get(load)
    return outcome.result["per_item_us"] / 1e6 if outcome and outcome.result else None


def _useful(
    arm: Arm, duty: float | None, per_s: float | None, best_efforts: list[str], kernels: Kernels
) -> float | None:
    """Share of the time with useful work on the GPU."""
    item_s = _item_s(best_efforts[0], kernels) if len(best_efforts) == 1 else 1.0
    if (arm.latency and duty is None) or (arm.best_effort and (per_s is None or item_s is None)):
        return None
    return (duty or 0.0) * arm.latency + (per_s or 0.0) * (item_s or 0.0) * arm.best_effort


def _share_within(values_ms: Iterable[float], target_ms: float | None) -> float | None:
    values_ms = list(values_ms)
    if not values_ms or target_ms is None:
        return None
    return sum(value <= target_ms for value in values_ms) / len(values_ms)
