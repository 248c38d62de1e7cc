"""From cells to rows: each arm of a program beside a server in a repeat, against both alone, the bound beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cudasched.demo.harness import ARMS, Arm, percentile, summary

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.colocation.cells import BUSY, KERNELS, CellFile, Outcome
from benchmarks.lab.intervals import LEAST_FOR_P99, of_requests
from benchmarks.results.schema import ColocationRow, Latency, Results

#: The target that attainment counts against, as a multiple of the P99 alone: what the project promises.
SLO_OVER_ALONE = 1.7
PERCENTILES = ("p50", "p95", "p99")


def results(cells: CellFile, arms: Mapping[str, Arm] = ARMS) -> Results:
    """A row for each arm of each program, server and repeat of a scene.

    What a program does alone stands beside each server; `alone` of a server is of the same program, and repeat.

    Args:
        cells: What was measured.
        arms: What the names of arms in the cells mean.

    Raises:
        ValueError: The cells say nothing of where they come from.
    """
    if cells.meta is None:
        raise ValueError(f"{cells.path}: no meta")
    kernels: dict[str, dict[str, Any]] = {}
    busy_us: dict[str, float] = {}
    alone: dict[tuple[str, int, str], dict[str, Outcome]] = {}
    groups: dict[tuple[str, int, str, str, str], dict[str, Outcome]] = {}
    for outcome in cells.outcomes.values():
        cell, result = outcome.cell, outcome.result
        if result is None:
            continue
        if cell.arm == KERNELS:
            kernels[cell.best_effort] = result
        elif cell.arm == BUSY:
            busy_us[cell.latency] = result["busy_us"]
        elif not arms[cell.arm].latency:
            alone.setdefault((cell.scene, cell.repeat, cell.best_effort), {})[cell.arm] = outcome
        else:
            key = cell.scene, cell.repeat, cell.best_effort, cell.latency, cell.rates_hz
            groups.setdefault(key, {})[cell.arm] = outcome
    rows: list[ColocationRow] = []
    for (scene, repeat, programs, _, _), outcomes in groups.items():
        by_program = {name: alone.get((scene, repeat, name), {}) for name in programs.split("+")}
        rows += Group(outcomes, by_program, kernels, busy_us, arms).rows()
    return Results(meta=cells.meta, rows=rows)


@dataclass
class Group:
    """The cells of programs beside servers in one repeat.

    Attributes:
        outcomes: Those with requests, by their arms.
        alone: Those of each program alone, by its arms.
        kernels: What was recorded of programs' kernels.
        busy_us: How long a request of each server keeps the GPU busy.
        arms: What the names of arms mean.
    """

    outcomes: dict[str, Outcome]
    alone: Mapping[str, Mapping[str, Outcome]]
    kernels: Mapping[str, Mapping[str, Any]]
    busy_us: Mapping[str, float]
    arms: Mapping[str, Arm]

    def __post_init__(self) -> None:
        self.like = next(iter(self.outcomes.values())).cell
        self.servers, self.programs = self.like.latency.split("+"), list(self.alone)
        self.rates_hz = dict(zip(self.servers, map(float, self.like.rates_hz.split("+")), strict=True))
        if len(self.programs) == 1:
            self.outcomes = {**self.outcomes, **self.alone[self.programs[0]]}

    def rows(self) -> Iterator[ColocationRow]:
        """A row for each arm and server."""
        order = list(self.arms)
        for server in self.servers:
            for arm in sorted(self.outcomes, key=order.index):
                yield self.row(arm, server)

    def served(self, arm: str, server: str) -> Mapping[str, Any]:
        """What an arm's cell has of a server's requests; empty where there is none."""
        result = self.outcomes[arm].result if arm in self.outcomes else None
        return (result or {}).get("latency", {}).get(server, {})

    def latency(self, arm: str, server: str) -> Latency | None:
        """The percentiles of a server's requests."""
        values = self.served(arm, server).get("latency_ms")
        return Latency.model_validate(summary(values)) if values else None

    def per_s(self, arm: str) -> float | None:
        """What best effort did: items a second; of several programs, the time that each takes alone for its items."""
        if len(self.programs) > 1 and arm == "best_effort_alone":
            return float(len(self.programs)) if all(arm in each for each in self.alone.values()) else None
        rates = (self.outcomes[arm].result or {})["best_effort_per_s"] if arm in self.outcomes else {}
        if not {*self.programs} <= {*rates}:
            return None
        if len(self.programs) == 1:
            return rates[self.programs[0]] or None
        alone = {name: self.alone[name].get("best_effort_alone") for name in self.programs}
        if any(each is None for each in alone.values()):
            return None
        return sum(rates[name] / each.result["best_effort_per_s"][name] for name, each in alone.items() if each)

    def duty(self, server: str) -> float | None:
        """Share of the time that all servers' requests take by themselves."""
        host_ms = self.served("latency_alone", server).get("request_ms")  # where latencies are the time between tokens
        if host_ms and len(self.servers) == 1:
            return min(1.0, self.rates_hz[server] * statistics.fmean(host_ms) / 1e3)
        known = [(self.rates_hz[each], self.latency("latency_alone", each)) for each in self.servers]
        if not all(latency for _, latency in known):
            return None
        return min(1.0, sum(rate_hz * latency.mean / 1e3 for rate_hz, latency in known if latency))

    def gpu_duty(self) -> float | None:
        """The same of the GPU's time, by the profiler."""
        if not {*self.servers} <= {*self.busy_us}:
            return None
        return min(1.0, sum(self.rates_hz[each] * self.busy_us[each] / 1e6 for each in self.servers))

    def bound(self, mode: str, server: str) -> tuple[float, str] | None:
        """The bound in a mode and what it starts from, as far as what it needs was measured.

        It starts from the hinted arm where that was measured: a request on a GPU that best effort has just left finds
        other data in the caches. Its change of contexts was paid ahead; a request without a hint pays it.
        """
        alone_per_s = self.per_s("best_effort_alone")
        recorded = self.kernels.get(self.programs[0])
        if len(self.programs) != 1 or recorded is None or alone_per_s is None:
            return None
        durations = [(duration_us, count) for duration_us, count in recorded["kernel_us"]]
        busy = min(1.0, alone_per_s * recorded["per_item_us"] / 1e6)
        switch_ms = CONTEXT_SWITCH_MS if mode == "two_processes" else 0.0
        for start, arm in (("hint", f"cudasched_{mode}_hint"), ("alone", "latency_alone")):
            if values := self.served(arm, server).get("latency_ms"):
                return bound_p99_ms(values, durations, busy, switch_ms), start
        return None

    def row(self, name: str, server: str) -> ColocationRow:
        """The row of an arm and a server."""
        cell, result, arm = self.outcomes[name].cell, self.outcomes[name].result or {}, self.arms[name]
        base = "latency_alone_hint" if arm.hint_ms and "latency_alone_hint" in self.outcomes else "latency_alone"
        served, compared = self.served(name, server), self.served(base, server)
        latency, alone = self.latency(name, server), self.latency(base, server)
        values_ms = served.get("latency_ms", [])
        bears_p99 = latency is not None and latency.n >= LEAST_FOR_P99
        duty, gpu_duty, per_s = self.duty(server), self.gpu_duty(), self.per_s(name)
        left = (None if duty is None else 1.0 - duty) if arm.latency else 1.0
        gpu_left = (None if gpu_duty is None else 1.0 - gpu_duty) if arm.latency else 1.0
        mps_per_s = self.per_s("best_effort_alone_mps") if arm.mode == "mps" else None
        plain = self.latency("latency_alone", server)
        target_ms = self.like.slo_ms or (SLO_OVER_ALONE * plain.p99 if plain else None)
        bound = self.bound(arm.mode, server) if arm.latency and arm.best_effort else None
        building_ms = (result.get("building") or {}).get("latency_ms")
        ratios = {
            f"{share}_ratio": getattr(latency, share) / getattr(alone, share)
            for share in PERCENTILES
            if latency and alone and (share != "p99" or bears_p99)
        }
        intervals = {
            f"p{percent}_ratio_interval": of_requests(values_ms, percent / 100, compared["latency_ms"])
            for percent in (50, 99)
            if arm.best_effort and latency and alone
        }
        stated = {share: getattr(latency, share) for share in (*PERCENTILES, "max") if latency}
        return ColocationRow.model_validate(
            {
                "p99_ratio": None,
                **ratios,
                **intervals,
                **stated,
                **({} if bears_p99 else {"p99": None}),
                "arm": name,
                "mode": arm.mode,
                "latency_load": server,
                "other_latency": "+".join(other for other in self.servers if other != server),
                "scene": self.like.scene,
                "repeat": self.like.repeat,
                "best_effort_load": self.like.best_effort,
                "arrivals": self.like.arrivals,
                "rate_hz": self.rates_hz[server],
                "policy": arm.policy if arm.managed else None,
                "lead_us": cell.lead_us if arm.managed else None,
                "repeats": 1,
                "latency_ms": latency,
                "alone_ms": alone,
                "requests": latency.n if latency else None,
                "bound_p99_ms": bound[0] if bound else None,
                "bound_from": bound[1] if bound else None,
                "best_effort_per_s": per_s,
                "best_effort_alone_per_s": self.per_s("best_effort_alone"),
                "duty": duty,
                "best_effort_ratio": ratio(per_s, self.per_s("best_effort_alone"), left),
                "best_effort_of_time_slices": None if name == "processes" else ratio(per_s, self.per_s("processes")),
                "gpu_duty": gpu_duty,
                "best_effort_gpu_ratio": ratio(per_s, self.per_s("best_effort_alone_hooked"), gpu_left),
                "best_effort_alone_mps_per_s": mps_per_s,
                "best_effort_mps_ratio": ratio(per_s, mps_per_s, left),
                "attainment": share_within(values_ms, target_ms),
                "slo_ms": target_ms,
                "building_p99_ms": percentile(building_ms, 0.99) if building_ms else None,
                "building_requests": len(building_ms) if building_ms else None,
                "wait_ms": statistics.fmean(served["wait_ms"]) if served.get("wait_ms") else None,
                "seconds": cell.seconds or None,
                "unserved": served.get("unserved", 0),
            }
        )


def ratio(per_s: float | None, of: float | None, left: float | None = 1.0) -> float | None:
    """A rate over another in the share of the time that is left; None where one is not known."""
    return per_s / of / left if per_s and of and left else None


def share_within(values_ms: list[float], target_ms: float | None) -> float | None:
    """The share of latencies within a target."""
    if not values_ms or target_ms is None:
        return None
    return sum(value <= target_ms for value in values_ms) / len(values_ms)
