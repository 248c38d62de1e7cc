"""Benchmarks of whole programs beside servers, in several arms; processes are built, started and paused by commands.

For each program the processes of all arms are built at once; then each server is measured in all arms, one after
another, the server alone first: so `alone` is of the same minute, and what there is when time runs out is complete. The
processes of the program after that import their libraries meanwhile, stopped while something is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cudasched.config import Config
from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import HEAD_START_S, Arm, Backend, HarnessError, percentile

from benchmarks.breadth.programs import Program
from benchmarks.colocation.cells import BUSY, KERNELS, Cell
from benchmarks.lab.fleet import SIMULATED_SERVERS, Fleet, Place
from benchmarks.lab.processes import ANSWER_S, per_second
from benchmarks.lab.session import Session

#: A cell is long enough for so many readings of a program's loss, and made no longer than the second figure for them.
READINGS, LONGEST_S = 3.5, 20.0
#: Cells that profile a program or a server, after all others: profiling leaves traces.
PROFILES = (KERNELS, BUSY)
#: What things take, s: a program's processes, those that compile, servers, a profile, a cell beyond its seconds.
BUILD_S, COMPILE_S, SERVER_S, KERNELS_S, EXTRA_S = 14.0, 25.0, 4.0, 2.5, HEAD_START_S + 0.4


@dataclass(frozen=True)
class Scene:
    """What is measured together.

    Attributes:
        pairs: Programs and the server, or servers, that each is beside; both joined by +.
        arms: In the order in which they take turns.
        optional: Arms behind these where `--arms` names them.
        modes: Which of a program's processes an arm runs, where that has not its name.
        server_modes: Which of a server's, where that is not the program's.
        profiled: Kernel durations of programs and GPU time of servers' requests are recorded after the other cells.
        together: So many arms take turns first, and then so many: their processes have to fit into the GPU's memory.
    """

    pairs: tuple[tuple[str, str], ...]
    arms: tuple[str, ...]
    modes: Mapping[str, str] = field(default_factory=dict)
    server_modes: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    profiled: bool = False
    together: tuple[int, int] = (7, 5)


class Runner:
    """Does the missing cells of scenes: for each program all servers, for each server all arms.

    Attributes:
        known: The programs.
        scenes: By their names.
        arms: What the names of arms mean.
        fleet_type: Makes the processes.
        settle_s: A program runs so long before its cell: predictions, clocks.
        name: The scene.
        repeat: Which.
        turns: The arms that are measured together.
    """

    known: Mapping[str, Program] = {}
    scenes: Mapping[str, Scene] = {}
    arms: Mapping[str, Arm] = ALL_ARMS
    fleet_type: type[Fleet] = Fleet
    settle_s = 0.0

    def __init__(self, session: Session, fleet: Fleet) -> None:
        self.session, self.fleet, self.options, self.cells = session, fleet, session.options, session.cells
        self.lead_us = configured_lead_us(session.backend)
        self.step_ms: dict[str, float] = {}
        self.name, self.repeat, self.turns = "", 0, list[str]()
        self.parts: dict[tuple[str, int], list[tuple[str, str]]] = {}
        only = self.options.repeat
        repeats = range(self.options.repeats) if only is None else [only]
        for name, repeat in itertools.product(self.options.scene.split(","), repeats):
            if name not in self.scenes:
                raise HarnessError(f"--scene: {name}; there are {', '.join(self.scenes)}")
            self.name, self.repeat = name, repeat
            self.parts[name, repeat] = self.part()

    @classmethod
    def measure(cls, session: Session) -> None:
        """All that is missing of the chosen programs; raises OutOfTimeError."""
        with cls.fleet_type(session.backend) as fleet:
            runner = cls(session, fleet)
            session.say(runner.estimate())
            if not session.options.dry:
                runner.run()

    # ---- what there is to do ----

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        return float(self.options.rate)

    def seconds(self, rates_hz: Sequence[float]) -> float:
        """Of a cell with requests at such rates."""
        return float(self.options.seconds)

    def cell(self, arm: str, server: str, program: str) -> Cell:
        """The cell of an arm; a program alone has no server."""
        lead_us = self.lead_us if self.arms[arm].managed else 0.0
        rates_hz = [self.rate_hz(name) for name in server.split("+")] if server else []
        rates = "+".join(f"{rate:g}" for rate in rates_hz)
        seconds = self.seconds(rates_hz)
        return Cell(arm, server, program, "poisson", rates, seconds, lead_us, self.repeat, scene=self.name)

    def missing(self, server: str, program: str) -> list[Cell]:
        """Of one program beside one server, in the arms that take turns."""
        planned = []
        for arm in self.turns:
            alone = not self.arms[arm].latency
            for beside in program.split("+") if alone else [program]:
                planned.append(self.cell(arm, "" if alone else server, beside))
        if self.scenes[self.name].profiled and planned:
            planned += [Cell.kernels(name) for name in program.split("+")]
            planned += [Cell.busy(name) for name in server.split("+")]
        return self.cells.missing(planned)

    def turns_of(self, scene: str) -> list[list[str]]:
        """The arms of a scene that are measured together."""
        known = self.scenes[scene].arms
        asked = [arm for arm in self.options.arms.split(",") if arm]
        if unknown := [arm for arm in asked if arm not in self.arms]:
            raise HarnessError(f"--arms: {', '.join(unknown)}; there are {', '.join(known)}")
        arms = [arm for arm in (*known, *self.scenes[scene].optional) if arm in (asked or known)]
        if self.session.rehearsal:  # whose driver has no MPS
            arms = [arm for arm in arms if self.arms[arm].mode != "mps"]
        first, later = self.scenes[scene].together
        return [arms[:first], *(arms[place : place + later] for place in range(first, len(arms), later))]

    def part(self) -> list[tuple[str, str]]:
        """The pairs of this part of the scene: a run of those in which something is missing."""
        asked = [server for server in self.options.servers.split(",") if server]
        pairs = []
        for program, server in self.scenes[self.name].pairs:
            named = all({name, f"{name}/{server}"} & {*self.options.only} for name in program.split("+"))
            if named and server in (asked or [server]):
                self.turns = list(itertools.chain.from_iterable(self.turns_of(self.name)))
                pairs += [(program, server)] * bool(self.missing(server, program))
        number, _, parts = self.options.part.partition("/")
        return pairs[(int(number) - 1) * len(pairs) // int(parts) : int(number) * len(pairs) // int(parts)]

    def plan(self) -> Iterator[tuple[str, list[str]]]:
        """Programs with the servers beside which something is missing; scene, repeat and turns are set meanwhile."""
        for (scene, repeat), pairs in self.parts.items():
            self.name, self.repeat = scene, repeat
            for program in dict.fromkeys(program for program, _ in pairs):
                for turns in self.turns_of(scene):
                    self.turns = turns
                    servers = [server for name, server in pairs if name == program and self.missing(server, program)]
                    if servers:
                        yield program, servers

    def estimate(self) -> str:
        """How many cells are missing, and about how long they take."""
        known: set[Cell] = set()
        took_s = 0.0
        for program, servers in self.plan():
            cells = {cell for server in servers for cell in self.missing(server, program)} - known
            took_s += self.build_s(program) + self.takes_s(list(cells))
            known |= cells
        return f"{len(known)} cells are missing: about {took_s:.0f} s"

    def build_s(self, program: str) -> float:
        """What building a program's processes takes, about."""
        return COMPILE_S if any(self.known[name].compiles for name in program.split("+")) else BUILD_S

    def takes_s(self, cells: Sequence[Cell]) -> float:
        """What cells take, about."""
        measured = [cell for cell in cells if cell.arm not in PROFILES]
        early_s = [self.early_s(cell) for cell in measured]
        profiles = len(cells) - len(measured)
        own_s = sum(cell.seconds + EXTRA_S + self.settle_s for cell in measured)
        return own_s + profiles * KERNELS_S + sum(each + HEAD_START_S for each in early_s if each)

    # ---- doing it ----

    def run(self) -> None:
        """Does what is missing; raises OutOfTimeError."""
        ahead = type(self)(self.session, self.fleet)
        following = ahead.plan()
        next(following, None)
        scene = ""
        for program, servers in self.plan():
            if scene not in ("", self.name):
                self.fleet.retire_all()
            scene = self.name
            after = next(following, None)
            self._group(program, servers, ahead._programs(*after) if after else [])

    def _group(self, program: str, servers: Sequence[str], following: Sequence[Place]) -> None:
        """All missing cells of a program beside some servers."""
        cells = [cell for server in servers for cell in self.missing(server, program)]
        self.session.need(self.build_s(program) + self.takes_s(self.missing(servers[0], program)) + SERVER_S)
        self.session.say(f"{self.name}: {program} beside {', '.join(servers)}: {len(cells)} cells")
        processes = self._programs(program, servers)
        served = list(dict.fromkeys(server for cell in cells for server in self._servers(cell)))
        self.fleet.settle()
        self.fleet.prepare([*processes, *served, *following])
        compiles = any(self.known[name].compiles for name in program.split("+"))
        broken = self._build([*processes, *served], first_ahead=compiles)
        self.session.say("  built")
        try:
            for server in servers:
                missing = [cell for cell in self.missing(server, program) if cell.arm not in PROFILES]
                self.session.need(self.takes_s(missing) + SERVER_S)
                self._measured(missing, broken)
            profiles = [cell for server in servers for cell in self.missing(server, program) if cell.arm in PROFILES]
            self.session.need(self.takes_s(profiles))
            self._measured(list(dict.fromkeys(profiles)), broken)
        finally:
            for process in processes:
                self.fleet.retire(process)

    def _measured(self, missing: Sequence[Cell], broken: dict[Place, HarnessError]) -> None:
        """Cells of programs that are built. Processes that end are broken from then on."""
        for cell in missing:
            processes, servers = self._processes(cell), self._servers(cell)
            failed = [broken[place] for place in (*processes, *servers) if place in broken]
            self.session.measure_cell(cell, partial(self._unbroken, cell, processes, failed))
            for process in processes:
                if process not in self.fleet:
                    gone = HarnessError(f"the program's process of the mode {process.mode} is gone")
                    broken.setdefault(process, gone)

    def _unbroken(self, cell: Cell, processes: Sequence[Place], failed: Sequence[HarnessError]) -> dict[str, Any]:
        if failed:
            raise failed[0]
        return self._cell(cell, processes)

    def _mode(self, arm: str) -> str:
        return self.scenes[self.name].modes.get(arm, arm)

    def _processes(self, cell: Cell) -> list[Place]:
        """The programs of a cell, those that it names joined by +; none where a server is measured alone."""
        if cell.arm == BUSY or (cell.arm != KERNELS and not self.arms[cell.arm].best_effort):
            return []
        names = cell.best_effort.split("+")
        mode = "plain" if cell.arm == KERNELS else self._mode(cell.arm)
        return [Place("program", name, mode) for name in names]

    def _servers(self, cell: Cell) -> list[Place]:
        """The servers of a cell, likewise."""
        if cell.arm == BUSY:
            return [Place("server", cell.latency, "plain")]
        if cell.arm == KERNELS or not self.arms[cell.arm].latency:
            return []
        mode = self.scenes[self.name].server_modes.get(cell.arm, self._mode(cell.arm))
        if self.fleet.modes[mode].inside:
            return self._processes(cell)
        return [Place("server", name, mode) for name in cell.latency.split("+")]

    def _programs(self, program: str, servers: Sequence[str]) -> list[Place]:
        cells = [cell for server in servers for cell in self.missing(server, program)]
        return list(dict.fromkeys(process for cell in cells for process in self._processes(cell)))

    def _build(self, processes: Sequence[Place], first_ahead: bool) -> dict[Place, HarnessError]:
        """Builds processes at once, or the first one ahead of the others, which find the kernels that it compiled."""
        broken: dict[Place, HarnessError] = {}
        waits: list[tuple[Place, Callable[[], dict[str, Any]]]] = []

        def fails(process: Place, error: HarnessError) -> None:
            broken[process] = error
            self.fleet.retire(process, grace_s=0.0)
            self.session.say(str(error))

        def collect() -> None:
            for process, wait in waits:
                try:
                    self.step_ms[process.name] = wait().get("step_ms") or self.step_ms.get(process.name, 0.0)
                except HarnessError as error:
                    fails(process, error)
            waits.clear()

        for process in processes:
            try:
                waits.append((process, self.fleet.build(process)))
            except HarnessError as error:
                fails(process, error)
            if first_ahead:
                collect()
                first_ahead = False
        collect()
        return broken

    def early_s(self, cell: Cell) -> float:
        """For so long a cell's requests come before those that are measured, beside its programs."""
        return 0.0

    def _cell(self, cell: Cell, processes: Sequence[Place]) -> dict[str, Any]:
        """One cell of programs that are built and paused; they are paused again afterwards."""
        served = self._servers(cell)
        if cell.arm in PROFILES:
            (place,) = processes or [self._server(server) for server in served]
            found = self.fleet.ask(place, cell.arm)
            if served:
                self.fleet.retire(place)
            return {name: value for name, value in found.items() if name != "event"}
        alone = [process for process in processes if not served and self.fleet.modes[process.mode].managed]
        for process in alone:  # no server, not even an idle one of the cells before
            self.fleet.retire_servers(process.mode)
        try:
            for process in processes:
                self.fleet.ask(process, "start")
            servers = [self._server(server) for server in served]
            time.sleep(self.settle_s)
            early: dict[str, Any] = {}
            if early_s := self.early_s(cell):
                early = self.window(dataclasses.replace(cell, seconds=early_s), [], servers)["latency"]
            result = self._counted(cell, processes, servers)
            for requests in early.values():
                result["early_p99_ms"] = percentile(requests["latency_ms"], 0.99)
            return result
        finally:
            for process in processes:
                if process in self.fleet:
                    with contextlib.suppress(HarnessError):  # it is ended then, which its next cell says
                        self.fleet.ask(process, "pause")

    def _counted(self, cell: Cell, processes: Sequence[Place], servers: Sequence[Place]) -> dict[str, Any]:
        """A cell's window, and what cudasched counted in its programs meanwhile."""
        managed = [process for process in processes if self.fleet.modes[process.mode].managed]
        before, began = [self.fleet.ask(process, "state") for process in managed], time.monotonic()
        result = self.window(cell, processes, servers)
        if managed:
            result["counted_s"] = time.monotonic() - began
            sums = Counter[str]()
            for process, first in zip(managed, before, strict=True):
                sums.update(counted(first, self.fleet.ask(process, "state")))
            result["counted"] = dict(sums)
        return result

    def _server(self, place: Place) -> Place:
        if place not in self.fleet:
            self.fleet.retire(place, grace_s=0.0)
            try:
                self.fleet.build(place)()
            except HarnessError:
                self.fleet.retire(place, grace_s=0.0)
                raise
        return place

    def window(
        self, cell: Cell, processes: Sequence[Place], servers: Sequence[Place], keep_due: bool = False
    ) -> dict[str, Any]:
        """Measures for a cell's seconds, longer for a program whose steps are long."""
        apart_s = [self.step_ms.get(each.name, 0.0) / 1e3 * self.known[each.name].read_every for each in processes]
        longest_s = 0.0 if self.session.rehearsal else max(apart_s, default=0.0)
        seconds = max(cell.seconds, min(LONGEST_S, READINGS * longest_s))
        result: dict[str, Any] = {"latency": {}, "best_effort_per_s": {}, "seconds": seconds}
        with self.fleet.held():
            start_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
            until_ns = start_ns + int(seconds * 1e9)
            if servers:
                result["latency"] = self._served(cell, servers, start_ns, seconds, keep_due)
            time.sleep(max(0.0, (until_ns - time.monotonic_ns()) / 1e9))
        for process in processes:
            found = self.fleet.ask(process, "readings", from_ns=start_ns, until_ns=until_ns)["readings"]
            result["best_effort_per_s"][process.name] = per_second(found) * self.fleet.backend.scale
            result["readings"] = len(found)
        return result

    def _served(
        self, cell: Cell, servers: Sequence[Place], start_ns: int, seconds: float, keep_due: bool
    ) -> dict[str, Any]:
        """What the requests of servers took, which come at once."""
        names = cell.latency.split("+")
        loads = [SIMULATED_SERVERS.get(name, name) if self.session.rehearsal else name for name in names]
        rates_hz = {load: self.rate_hz(name) for load, name in zip(loads, names, strict=True)}
        result = {}
        try:
            for server in servers:
                self.fleet[server].tell(
                    "run",
                    start_ns=start_ns,
                    seconds=seconds,
                    seed=1 + cell.repeat,
                    rates_hz=rates_hz,
                    arrivals=cell.arrivals,
                    hint_ms=self.arms[cell.arm].hint_ms,
                    slo_ms=cell.slo_ms,
                    keep_due=keep_due,
                )
            for server, load, name in zip(servers, loads, names, strict=True):
                answer = self.fleet[server].answer(seconds + ANSWER_S)
                result[name] = dict(answer["latency"][load])
        except HarnessError:
            for server in servers:
                self.fleet.retire(server, grace_s=0.0)
            raise
        return result


def counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """What cudasched counted between two looks at a program, and its graphs that are whole: what explains a cell."""
    told = {
        name: value - before[name]
        for name, value in after.items()
        if isinstance(value, int) and not isinstance(value, bool) and name != "driver_version"
    }
    return told | {f"graphs_whole_{why}": graphs for why, graphs in after.get("graphs_whole", {}).items()}


def configured_lead_us(backend: Backend) -> float | str:
    """The lead of arms with cudasched, or auto."""
    if "CUDASCHED_LEAD_US" in backend.settings:
        return float(backend.settings["CUDASCHED_LEAD_US"]) / backend.scale
    lead_us = os.environ.get("CUDASCHED_LEAD_US") or str(Config().lead_us)
    return lead_us if lead_us == "auto" else float(lead_us)


def settings(scene: str, seconds: Any) -> dict[str, Any]:
    """Options of such a benchmark: scenes, servers and arms by commas."""
    repeats = {"repeats": 1, "repeat": int}
    return {"scene": scene, "servers": "", "arms": "", "seconds": seconds, **repeats, "dry": bool}
