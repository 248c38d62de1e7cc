"""The figures that the project promises, beside what was measured: a line each, a column for each way of sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lab.intervals import LEAST_FOR_P99
from benchmarks.results.schema import ColocationRow, Mode, OverheadRow, Results

MODES: dict[Mode, str] = {"two_processes": "two processes", "mps": "under MPS", "one_process": "one process"}
LOADS = ("transformer", "resnet50", "gemm", "elementwise")
OTHERS = ("transformer", "resnet50", "elementwise")
FOUR = "transformer+resnet50"
#: Training whose host is slower than the GPU.
CPU_BOUND = ("resnet50", "bert_training")


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: What it is.
        targets: In each mode that has one; None where the figure is shown without one.
        measure: How it follows from the rows; None where something was not measured.
        at_least: A target is the least that counts as met, not the most.
        repeats: The same of each repeat, where repeats have rates of their own.
    """

    name: str
    targets: Mapping[Mode, float | None]
    measure: Callable[[Rows, Mode], float | None]
    at_least: bool = False
    repeats: Callable[[Rows], list[float]] = lambda _: []

    def cell(self, rows: Rows, mode: Mode) -> str:
        """Measured, target, and whether it is met; empty where the figure is not of the mode."""
        if mode not in self.targets:
            return ""
        measured, target = self.measure(rows, mode), self.targets[mode]
        if target is None:
            return "?" if measured is None else f"{measured:.3g}"
        return judged(measured, target, self.at_least, self.repeats(rows))


class Rows:
    """The colocation rows of one results file, by what they are about."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._rows = results.colocations

    def find(
        self, arm: str, beside: str, latency: str = "bert_graph", arrivals: str = "poisson", others: bool = False
    ) -> ColocationRow | None:
        """The row of an arm, with other latency loads or without; the last where leads or lengths differ."""
        found = [
            row
            for row in self._rows
            if (row.arm, row.best_effort_load, row.latency_load, row.arrivals) == (arm, beside, latency, arrivals)
            and bool(row.other_latency) == others
        ]
        return found[-1] if found else None

    def managed(self, mode: Mode, beside: str, suffix: str = "", **scene: str | bool) -> ColocationRow | None:
        """The row under cudasched in one mode."""
        return self.find(f"cudasched_{mode}{suffix}", beside, **scene)  # type: ignore[arg-type]


def beside(results: Results, row: ColocationRow, arm: str) -> ColocationRow | None:
    """The row of another arm with the same programs, requests, scene and repeat."""

    def about(one: ColocationRow) -> tuple[object, ...]:
        requests = one.latency_load, one.other_latency, one.arrivals, one.rate_hz
        return one.best_effort_load, *requests, one.scene, one.repeat

    others = (one for one in results.colocations if one.arm == arm)
    return next((one for one in others if about(one) == about(row)), None)


def best_effort_of_time_slices(results: Results, row: ColocationRow) -> float | None:
    """Best effort over best effort beside the same requests in plain time slices.

    None where either is missing, and of time slices themselves.
    """
    slices = beside(results, row, "processes")
    if slices is None or row.arm == "processes" or not row.best_effort_per_s or not slices.best_effort_per_s:
        return None
    return row.best_effort_per_s / slices.best_effort_per_s


def p50_of_alone(row: ColocationRow) -> float | None:
    """The row's ratio, or that of its medians in a file that is older than the ratio."""
    if row.p50_ratio or row.latency_ms is None or row.alone_ms is None:
        return row.p50_ratio
    return row.latency_ms.p50 / row.alone_ms.p50


def few_requests(rows: Iterable[ColocationRow]) -> str:
    """The end of a table with cells of few requests: a blank line and a warning; else nothing."""
    numbers = [row.latency_ms.n for row in rows if row.latency_ms and row.arm != "latency_alone"]
    if not numbers or min(numbers) >= LEAST_FOR_P99:
        return ""
    of = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{numbers[0]}"
    return f"\nP99 is of {of} requests a cell, fewer than {LEAST_FOR_P99:,}: single requests move it.\n"


def ratio_cell(results: Results, row: ColocationRow | None) -> str:
    """P50 and P99 over alone, and best effort of what is left and, in brackets, of plain time slices."""
    if row is None or row.latency_ms is None:
        return ""
    ratios = "/".join(f"{ratio:.2f}" for ratio in (p50_of_alone(row), row.p99_ratio) if ratio)
    parts = [f"{ratios}x" if ratios else f"{row.latency_ms.p99:.2f} ms"]
    if row.best_effort_ratio:
        of_slices = best_effort_of_time_slices(results, row)
        parts.append(f"{row.best_effort_ratio:.0%}" + (f" ({of_slices:.0%})" if of_slices else ""))
    return " · ".join(parts)


def judged(measured: float | None, target: float, at_least: bool = False, repeats: Sequence[float] = ()) -> str:
    """A measured figure, the least and the most of several repeats, and its target."""
    wanted = f"{'>=' if at_least else '<='} {target:g}"
    if len(repeats) > 1:
        wanted = f"{spread(repeats)}; {wanted}"
    if measured is None:
        return f"? ({wanted})"
    met = measured >= target if at_least else measured <= target
    return f"{measured:.3g} ({wanted}) {'met' if met else '**missed**'}"


def spread(repeats: Sequence[float]) -> str:
    """The least and the most of them."""
    return f"{min(repeats):.3g} to {max(repeats):.3g}"


def worst(values: Iterable[float | None], at_least: bool = False) -> float | None:
    """The one farthest from its target; None if any was not measured."""
    known = list(values)
    if None in known or not known:
        return None
    return (min if at_least else max)(value for value in known if value is not None)


def _each(two_processes: float, mps: float, one_process: float) -> dict[Mode, float]:
    return {"two_processes": two_processes, "mps": mps, "one_process": one_process}


def _ratio(share: str, beside: str, suffix: str = "", **scene: str | bool) -> Callable[[Rows, Mode], float | None]:
    """A percentile against the latency client alone."""

    def measure(rows: Rows, mode: Mode) -> float | None:
        row = rows.managed(mode, beside, suffix, **scene)
        return getattr(row, f"{share}_ratio") if row else None

    return measure


def _over_bound(*loads: str) -> Callable[[Rows, Mode], float | None]:
    def measure(rows: Rows, mode: Mode) -> float | None:
        found = [rows.managed(mode, load) for load in loads]
        return worst(
            row.latency_ms.p99 / row.bound_p99_ms if row and row.latency_ms and row.bound_p99_ms else None
            for row in found
        )

    return measure


def _hinted(rows: Rows, mode: Mode) -> float | None:
    return worst(_ratio("p99", load, "_hint")(rows, mode) for load in ("transformer", "resnet50"))


def _best_effort(beside: str, suffix: str = "", **scene: str | bool) -> Callable[[Rows, Mode], float | None]:
    def measure(rows: Rows, mode: Mode) -> float | None:
        row = rows.managed(mode, beside, suffix, **scene)
        return row.best_effort_ratio if row else None

    return measure


def _least_best_effort(rows: Rows, mode: Mode) -> float | None:
    return worst((_best_effort(load)(rows, mode) for load in LOADS), at_least=True)


def _least_of_time_slices(rows: Rows, mode: Mode) -> float | None:
    found = [rows.managed(mode, load) for load in LOADS]
    return worst((best_effort_of_time_slices(rows.results, row) if row else None for row in found), at_least=True)


def _attained(rows: Rows, mode: Mode) -> float | None:
    row = rows.managed(mode, "transformer", "_slack", latency="gpt_decode", arrivals="periodic")
    return row.attainment if row else None


def _p99_of_two(rows: Rows, mode: Mode) -> float | None:
    return worst(_ratio("p99", FOUR, latency=load, others=True)(rows, mode) for load in ("bert_graph", "mlp"))


def _p95(row: ColocationRow) -> float | None:
    return row.latency_ms.p95 if row.latency_ms else None


def _down(value: Callable[[ColocationRow], float | None], *loads: str) -> Callable[[Rows, Mode], float | None]:
    """By how much something is less than under time slices, beside the load where it is least so."""

    def one(rows: Rows, mode: Mode, load: str) -> float | None:
        managed, unmanaged = rows.managed(mode, load), rows.find("processes", load)
        ours, theirs = (value(row) if row else None for row in (managed, unmanaged))
        return 1 - ours / theirs if ours is not None and theirs else None

    return lambda rows, mode: worst((one(rows, mode, load) for load in loads), at_least=True)


def _offload_gain(load: str) -> Callable[[Rows, Mode], float | None]:
    def measure(rows: Rows, mode: Mode) -> float | None:
        hooked, bare = rows.find("best_effort_alone_hooked", load), rows.find("best_effort_alone", load)
        if not hooked or not bare or not hooked.best_effort_per_s or not bare.best_effort_per_s:
            return None
        return hooked.best_effort_per_s / bare.best_effort_per_s - 1

    return measure


def _offload_gains(load: str) -> Callable[[Rows], list[float]]:
    """The same of each pair of repeats that followed one another."""

    def measure(rows: Rows) -> list[float]:
        hooked, bare = rows.find("best_effort_alone_hooked", load), rows.find("best_effort_alone", load)
        if not hooked or not bare:
            return []
        pairs = zip(hooked.best_effort_per_s_per_repeat, bare.best_effort_per_s_per_repeat, strict=False)
        return [ours / theirs - 1 for ours, theirs in pairs]

    return measure


_DECODE: dict[str, str | bool] = {"latency": "gpt_decode", "arrivals": "periodic"}
FIGURES = (
    Figure("transformer: P50 / alone", _each(1.42, 1.22, 1.18), _ratio("p50", "transformer")),
    Figure("transformer: P99 / alone", _each(1.42, 1.32, 1.28), _ratio("p99", "transformer")),
    Figure("ResNet50: P50 / alone", _each(1.36, 1.16, 1.14), _ratio("p50", "resnet50")),
    Figure("ResNet50: P99 / alone", _each(1.60, 1.45, 1.40), _ratio("p99", "resnet50")),
    Figure("transformer, ResNet50: P99 / bound", {"one_process": 1.05}, _over_bound("transformer", "resnet50")),
    Figure("the same, hint 0.5 ms ahead: P99 / alone", _each(1.22, 1.15, 1.10), _hinted),
    Figure("GEMMs, periodic: P99 / alone", _each(1.30, 1.15, 1.10), _ratio("p99", "gemm", arrivals="periodic")),
    Figure("best effort, least of four loads", _each(0.97, 0.97, 0.97), _least_best_effort, at_least=True),
    Figure("best effort of time slices, least of four loads", dict.fromkeys(MODES), _least_of_time_slices),
    Figure(
        "best effort, GEMMs, periodic",
        _each(0.94, 0.94, 0.94),
        _best_effort("gemm", arrivals="periodic"),
        at_least=True,
    ),
    Figure("GEMMs, elementwise: P99 / bound", _each(1.10, 1.10, 1.05), _over_bound("gemm", "elementwise")),
    Figure("GPT decode, half busy, SLO 2 x: attained", _each(0.99, 0.99, 0.99), _attained, at_least=True),
    Figure(
        "GPT decode: best effort", _each(0.9, 1.2, 1.2), _best_effort("transformer", "_slack", **_DECODE), at_least=True
    ),
    Figure("two and two clients: P99 / without best effort", _each(1.8, 1.6, 1.5), _p99_of_two),
    Figure("two and two clients: best effort", _each(0.93, 0.93, 0.93), _best_effort(FOUR, others=True), at_least=True),
    # One 8192^3 GEMM takes 1.6 ms, which is what a request waits for at the most; a time slice gives it no more.
    *(
        Figure(f"{name}, less than time slices by", _each(0.5, 0.5, 0.5), _down(value, *loads), at_least=True)
        for beside, loads in (("all but GEMMs", OTHERS), ("GEMMs", ("gemm",)))
        for name, value in ((f"{beside}: P95", _p95), (f"{beside}: queue wait", lambda row: row.wait_ms))
    ),
    *(
        Figure(
            f"{load} alone, offloaded: faster than bare by",
            {"two_processes": 0.10},
            _offload_gain(load),
            at_least=True,
            repeats=_offload_gains(load),
        )
        for load in CPU_BOUND
    ),
)

#: What an overhead row must be at most: its ns, or what it adds.
OVERHEADS = (
    ("offloaded launch", "driver, 10 parameters: best-effort", "ns_median", 300.0),
    ("latency launch, added", "null driver, 10 parameters: latency", "added_ns_median", 100.0),
    ("PyTorch `add_`, offloaded, added", "PyTorch, x.add_(1): best-effort", "added_ns_median", 0.0),
    ("idle for a second, CPU ns added", "driver, idle for a second: best-effort", "added_ns_median", 1e6),
    ("idle for a second, CPU ns added, latency", "driver, idle for a second: latency", "added_ns_median", 1e6),
)


def figures_table(results: Results) -> str:
    """Every figure with its target, and whether it is met."""
    overheads = {row.what: row for row in results.rows if isinstance(row, OverheadRow)}
    if overheads:
        lines = ["| figure | ns |", "|---|---|"]
        for name, what, field, target in OVERHEADS:
            measured = getattr(overheads[what], field) if what in overheads else None
            lines.append(f"| {name} | {judged(measured, target)} |")
        return "\n".join(lines) + "\n"
    rows = Rows(results)
    lines = [f"| figure | {' | '.join(MODES.values())} |", f"|---|{'---|' * len(MODES)}"]
    lines += [f"| {figure.name} | {' | '.join(figure.cell(rows, mode) for mode in MODES)} |" for figure in FIGURES]
    return "\n".join(lines) + "\n"
