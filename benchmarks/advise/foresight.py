"""`cudasched advise --beside` against what is measured: pairs of `preempt`'s programs and servers.

Each program and server is recorded alone first, into the directory `recordings` beside the results; then each pair is
measured in each mode but one process, and compared with the forecast, which knows nothing of the pair. A cell is within
where the forecast ratio to alone is off by so much of the measured one, with the same arrivals. Kendall's tau is of the
partners of a server in one mode, by their cost, forecast and measured.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudasched.advise import beside
from cudasched.demo.harness import CUDASCHED, DEFAULT_SCALE

from benchmarks.colocation.cells import CellFile
from benchmarks.colocation.rows import results
from benchmarks.lab.fleet import Mode, Place
from benchmarks.lab.programs import Runner, Scene, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Goals, judged, median_of, report
from benchmarks.preempt.benchmark import PreemptFleet
from benchmarks.preempt.programs import PROGRAMS
from benchmarks.preempt.summary import arms_of
from benchmarks.results.schema import ColocationRow, merge
from benchmarks.tables import core_table

#: Requests a second, other than those of the measurements that the forecasts are fitted to.
SERVERS = {"bert_graph": 150.0, "vit_graph": 90.0, "resnet50_b4": 30.0}
#: The arms that are compared, and the modes that they are.
MODE_OF = {"processes": "time_slices", "slices": "cudasched_slices", "cudasched_mps": "cudasched_mps"}
GOALS: Goals = {
    "advisor_p99_within_15": (0.9, "more"),
    "advisor_best_effort_within_8": (0.9, "more"),
    "advisor_tau": (0.8, "more"),
    "advisor_seconds": (10.0, "less"),
}
P99_WITHIN, BEST_EFFORT_WITHIN = 0.15, 0.08
#: Requests that come before those that are measured (cudasched/demo/client.py).
LEAD_IN_S = 0.5
#: A steady part is what no pause of a second divides; a ranking wants so many partners.
PAUSE_S, RECORDED_S, ENDS_S, PARTNERS = 1.5, 5.0, 60.0, 4


@dataclass(frozen=True)
class Compared:
    """Measured over forecast of one cell, by figure, and the cost of both; what was not measured is left out."""

    server: str
    program: str
    mode: str
    ratios: dict[str, float]
    costs: tuple[float, float] | None


def compared(row: ColocationRow, mode: str, found: beside.Forecast) -> Compared:
    """A measured cell beside its forecast."""
    said = found.modes[mode]
    kept = row.best_effort_gpu_ratio or row.best_effort_ratio
    measured = {"p50": row.p50_ratio, "p99": row.p99_ratio, "best_effort": kept}
    forecast = {"p50": said.p50_ratio, "p99": said.p99_ratio, "best_effort": said.best_effort}
    ratios = {name: value / forecast[name].value for name, value in measured.items() if value and forecast[name].value}
    costs = row.p99_ratio / kept if row.p99_ratio and kept else None
    return Compared(row.latency_load, row.best_effort_load, mode, ratios, (costs, said.cost) if costs else None)


def of_row(
    server: beside.Recording, program: beside.Recording, row: ColocationRow, scale: float = 1.0
) -> beside.Forecast:
    """The forecast of a row; where it is of one repeat, with the arrivals that were measured.

    Args:
        server: Its recording.
        program: Its recording.
        row: Of any arm.
        scale: Seconds that a second of the recordings' GPU takes.
    """
    alone_ms = row.alone_ms.p50 * scale if row.alone_ms else None
    seconds = row.seconds + LEAD_IN_S if row.scene and row.seconds else None
    seed = 1 + (row.repeat or 0)
    return beside.forecast(server, program, rate_hz=row.rate_hz / scale, alone_ms=alone_ms, seconds=seconds, seed=seed)


def share_within(cells: Iterable[Compared], figure: str, most: float) -> tuple[float, float, float, int] | None:
    """The share of cells whose forecast is off by no more."""
    off = [abs(1 / cell.ratios[figure] - 1) for cell in cells if figure in cell.ratios]
    return (sum(each <= most for each in off) / len(off), 0.0, 1.0, len(off)) if off else None


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's, of pairs of values; those that are equal count as neither."""
    orders = [
        ((first[0] > second[0]) - (first[0] < second[0])) * ((first[1] > second[1]) - (first[1] < second[1]))
        for first, second in itertools.combinations(pairs, 2)
    ]
    return sum(orders) / len(orders)


def figures(cells: Sequence[Compared], seconds: Sequence[float]) -> Found:
    """The figures that are promised, as far as cells were measured."""
    ranked: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.costs:
            ranked.setdefault((cell.server, cell.mode), []).append(cell.costs)
    taus = [tau(each) for each in ranked.values() if len(each) >= PARTNERS]
    found = {
        "advisor_p99_within_15": share_within(cells, "p99", P99_WITHIN),
        "advisor_best_effort_within_8": share_within(cells, "best_effort", BEST_EFFORT_WITHIN),
        "advisor_tau": median_of(taus) if taus else None,
        "advisor_seconds": (max(seconds), min(seconds), max(seconds), len(seconds)) if seconds else None,
    }
    return {name: value for name, value in found.items() if value}


class ForesightFleet(PreemptFleet):
    """The processes; one that is recorded writes into `recordings`."""

    modes = {"plain": Mode(managed=False), "recorded": Mode(managed=False), "slices": Mode(), "mps": Mode(mps=True)}  # noqa: RUF012
    recordings = Path()

    def _command(self, place: Place) -> list[str]:
        command = super()._command(place)
        if place.mode != "recorded":
            return command
        timing = "events" if self.backend.name == "simulated" else "cupti"
        output = str(self.recordings / f"{place.name}.parquet")
        return [*CUDASCHED, "collect", "--quiet", "--timing", timing, "-o", output, "--", *command]


class ForesightRunner(Runner):
    """Records what is missing, then does the missing cells."""

    known = PROGRAMS
    arms = arms_of(("latency_alone", "best_effort_alone", *MODE_OF))
    scenes = {  # noqa: RUF012
        "held_out": Scene(
            tuple(itertools.product(PROGRAMS, SERVERS)),
            ("latency_alone", "best_effort_alone", *MODE_OF),
            {**dict.fromkeys(("latency_alone", "best_effort_alone", "processes"), "plain"), "cudasched_mps": "mps"},
            dict.fromkeys(("latency_alone", "processes", "slices"), "plain") | {"cudasched_mps": "mps"},
            profiled=True,
        )
    }
    fleet_type = ForesightFleet

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        return SERVERS[server]

    def seconds(self, rates_hz: Sequence[float]) -> float:
        """As long as a thousand requests take."""
        return self.options.seconds or round(1060 / min(rates_hz, default=min(SERVERS.values())), 2)

    def run(self) -> None:
        """Records, and does what is missing; raises OutOfTimeError."""
        recordings = ForesightFleet.recordings = recordings_of(self.session.out)
        recordings.mkdir(parents=True, exist_ok=True)
        for program, servers in list(self.plan()):
            places = [Place("program", program, "recorded"), *(Place("server", name, "recorded") for name in servers)]
            for place in places:
                if not (recordings / f"{place.name}.parquet").exists():
                    self._record(place)
        super().run()

    def _record(self, place: Place) -> None:
        self.session.need(RECORDED_S + ENDS_S)
        self.session.say(f"recording {place.name}")
        self.fleet.build(place)()
        time.sleep(PAUSE_S)
        seconds = min(RECORDED_S, 2 * self.options.seconds) if self.session.rehearsal else RECORDED_S
        if place.role == "server":
            self._served(self.cell("latency_alone", place.name, ""), [place], time.monotonic_ns(), seconds, False)
        else:
            self.fleet.ask(place, "start")
            time.sleep(seconds)
            self.fleet.ask(place, "pause")
            self.fleet[place].tell("leave")
        self.fleet.retire(place, grace_s=ENDS_S)
        self.fleet.settle()


def recordings_of(out: Path) -> Path:
    """Where the recordings are; parts of one run share them."""
    return out.parent / "recordings"


def written(cells: CellFile, out: Path) -> None:
    """Writes figures, and rows of cells into NAME_pairs.json; prints the figures."""
    made = results(cells, ForesightRunner.arms)
    simulated = made.meta.gpu.startswith("simulated")
    scale = float(os.environ.get("CUDASCHED_SIM_SCALE", DEFAULT_SCALE)) if simulated else 1.0
    found, seconds = [], []
    for row in made.colocations:
        mode = MODE_OF.get(row.arm)
        files = {name: recordings_of(out) / f"{name}.parquet" for name in (row.latency_load, row.best_effort_load)}
        if mode is None or row.alone_ms is None or not all(path.exists() for path in files.values()):
            continue
        began = time.monotonic()
        server, program = (beside.read(path) for path in files.values())
        said = of_row(server, program, row, scale)
        seconds.append(time.monotonic() - began)
        found.append(compared(row, mode, said))
    rows = judged(GOALS, figures(found, seconds), {})
    report(cells, out.with_name(f"{out.stem}_pairs.json"), made, ())
    if rows:
        print(core_table(merge(out, made.meta, rows)))


BENCHMARK = Benchmark(
    about="what `cudasched advise --beside` forecasts, beside what is measured",
    groups=dict.fromkeys(PROGRAMS, ForesightRunner.measure),
    whole=ForesightRunner.measure,
    written=written,
    settings=settings("held_out", (0.0, 2.0)),
)
