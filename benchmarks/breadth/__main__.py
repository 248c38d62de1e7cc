"""Other people's models as best-effort programs beside servers, in every arm; a rerun does what is missing.

    python -m benchmarks.breadth --out benchmarks/results/breadth.json --limit-s 590
    python -m benchmarks.breadth --out benchmarks/results/breadth.json --servers vit_graph,bert_eager,recommender \
        --programs torchvision_resnet50,transformers_llama,torch_recommender,jax_transformer
    python -m benchmarks.breadth --rehearse --out /tmp/breadth.json
    python -m benchmarks.breadth merge --out benchmarks/results/breadth.json first.cells second.cells
    python -m benchmarks.breadth explain benchmarks/results/breadth.cells        # what may limit each cell

Each program runs as its user would run it, and is started first; then the server comes and is measured. A program has
three processes: one bare, one under `cudasched run`, one under `cudasched run --mps`. Their imports go on during the
turn of the program before, stopped while that is measured, and they are built at their own turn; nothing else uses
the GPU while a cell is measured. Each outcome is saved at once, beside the results with the suffix .cells. The exit
status is 0 when all cells have a result, 3 when time ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudasched import mps
from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import CUDASCHED, HEAD_START_S, Arm, Backend, Child, HarnessError

from benchmarks import meta
from benchmarks.breadth.programs import PROGRAMS as ALL_PROGRAMS
from benchmarks.breadth.programs import Program
from benchmarks.breadth.summary import breadth_figures, breadth_table, explain_table
from benchmarks.colocation import rows as colocation_rows
from benchmarks.colocation.cells import KERNELS, Cell, CellFile, Outcome
from benchmarks.colocation.frame import Tables, merge_cells, merge_parser, part_of, report, run_cells
from benchmarks.lab.pairs import configured_lead_us
from benchmarks.lab.run import TIME_RAN_OUT
from benchmarks.lab.session import brief
from benchmarks.results.schema import Results

HERE = Path(__file__).parent
#: Requests a second of each server. An eager BERT takes several ms of its own host's time.
SERVERS = {"bert_graph": 60.0, "vit_graph": 60.0, "bert_eager": 30.0, "recommender": 60.0}
PROGRAMS = {name: program for name, program in ALL_PROGRAMS.items() if not program.only_in_core}
MAIN_PROGRAMS = tuple(name for name in PROGRAMS if name != "jax_transformer_graphs")
ARMS = ("latency_alone", "best_effort_alone", "processes", "cudasched_two_processes", "cudasched_mps")
#: Which of a program's three processes an arm runs.
MODES = {
    "best_effort_alone": "plain",
    "processes": "plain",
    "cudasched_two_processes": "two_processes",
    "cudasched_mps": "mps",
}
#: On the simulated driver, these stand for programs and servers.
SIMULATED_PROGRAMS = ("transformer", "resnet50", "elementwise", "bert_training")
SIMULATED_SERVERS = {"vit_graph": "mlp", "recommender": "resnet50_b4", "decode_short": "gpt_decode"}
#: The server alone is measured before each so many programs, and at the end.
ALONE_EVERY = 5
#: A cell is long enough for so many readings of the loss, and no longer than the second figure.
READINGS = 3.5
LONGEST_S = 20.0
#: A program that is not measured at once runs so long before its cell: predictions, clocks.
SETTLE_S = 1.0
START_TIMEOUT_S = 180.0
ANSWER_S = 60.0
#: What things take, s, for the estimate.
BUILD_S, COMPILE_S, SERVER_S, KERNELS_S, CELL_EXTRA_S, CLOSING_S = 6.0, 25.0, 4.0, 2.5, 1.2, 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["merge"]:
        return merge(arguments[1:])
    if arguments[:1] == ["explain"]:
        cells = CellFile(Path(arguments[1]))
        print(explain_table(results(cells), cells))
        return 0
    options = parse(arguments)

    def measure(backend: Backend, cells: CellFile) -> int:
        with Fleet(backend) as fleet:
            runner = Runner(fleet, cells, options, configured_lead_us(backend))
            runner.say(f"{runner.estimate()}")
            return runner.run()

    return run_cells("breadth", options, measure, lambda cells: finish(cells, options.out))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with lists split and checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breadth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--programs", default=",".join(MAIN_PROGRAMS), help=f"by commas, of {', '.join(PROGRAMS)}")
    parser.add_argument("--servers", default="bert_graph", help=f"by commas, of {', '.join(SERVERS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"by commas, of {', '.join(ARMS)}")
    parser.add_argument("--seconds", type=float, default=None, help="of each cell, at least (8; 2 in a rehearsal)")
    parser.add_argument("--limit-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth program, from the Ith on; for a GPU a part")
    parser.add_argument("--keep-servers", action="store_true", help="start servers once, not after each program")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--dry", action="store_true", help="say how long it would take, and do nothing")
    options = parser.parse_args(arguments)
    split_choices(parser, options, programs=PROGRAMS, servers=SERVERS, arms=ARMS)
    options.programs = part_of(parser, options.part, options.programs)
    if options.seconds is None:
        options.seconds = 2.0 if options.simulate else 8.0
    if options.seconds <= 0:
        parser.error("--seconds: above 0")
    if options.simulate and "cudasched_mps" in options.arms:
        options.arms.remove("cudasched_mps")  # the simulated driver has no MPS
    return options


def split_choices(parser: argparse.ArgumentParser, options: argparse.Namespace, **choices: Iterable[str]) -> None:
    """Makes lists of options that name things by commas; what there is none of is an error.

    Args:
        parser: Says what is wrong.
        options: Whose attributes are replaced.
        choices: What each of them may name.
    """
    for name, known in choices.items():
        chosen = [part for part in getattr(options, name).split(",") if part]
        unknown = [part for part in chosen if part not in known]
        if unknown or not chosen:
            parser.error(f"--{name}: {', '.join(unknown) or 'none named'}; there are {', '.join(known)}")
        setattr(options, name, chosen)


@dataclass(frozen=True)
class Place:
    """One process: what it runs, and by whom it is scheduled.

    Attributes:
        role: `program` or `server`.
        name: Which.
        mode: A name in the modes of its fleet.
    """

    role: str
    name: str
    mode: str


@dataclass(frozen=True)
class Mode:
    """How processes run. Those of one mode meet in a table of cudasched's that no other mode has.

    Attributes:
        managed: Under `cudasched run`.
        mps: Clients of the fleet's MPS daemon; without cudasched, programs have the lower priority.
        environment: Beside what all have.
    """

    managed: bool = True
    mps: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Fleet:
    """The processes, from their imports to their end. Prepared ones wait for `build` and have not touched the GPU.

    Attributes:
        modes: How processes may run.
        script: What runs a program.
        options: What every program's script is told, beside its name.
        start_timeout_s: For a process's imports, and for what it builds.
        programs: All that there are, in the order in which loads of the simulated driver stand for them.
    """

    modes: Mapping[str, Mode] = {"plain": Mode(managed=False), "two_processes": Mode(), "mps": Mode(mps=True)}
    script = HERE / "program.py"
    options: Sequence[str] = ()
    start_timeout_s = START_TIMEOUT_S
    programs: Sequence[str] = tuple(PROGRAMS)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._prepared: dict[Place, Child] = {}
        self._running: dict[Place, Child] = {}
        self._leaving: list[threading.Thread] = []
        self._mps: mps.Membership | None = None
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="cudasched-breadth-", dir=shared))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._prepared.values(), *self._running.values()]:
            child.stop(grace_s=0.0)
        for thread in self._leaving:
            thread.join()
        if self._mps:
            self._mps.leave()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def prepare(self, places: Iterable[Place]) -> None:
        """Starts processes that are missing, up to the end of their imports; returns at once.

        What cannot be started is an error when it is to be built.
        """
        for place in places:
            if place in self._prepared or place in self._running:
                continue
            with contextlib.suppress(HarnessError):
                self._prepared[place] = self._start(place)

    def _start(self, place: Place) -> Child:
        return Child(f"{place.name} {place.mode}", self._command(place), self._environment(place))

    def build(self, place: Place) -> Callable[[], dict[str, Any]]:
        """Tells a process to build; what it returns waits until that is done.

        Raises:
            HarnessError: It failed, here or there.
        """
        if place in self._running:
            return dict
        child = self._running[place] = self._prepared.pop(place, None) or self._start(place)

        def wait() -> dict[str, Any]:
            ready = child.answer(self.start_timeout_s, "ready")
            if self.modes[place.mode].mps and self._mps and not self._mps.server_runs():
                raise HarnessError(f"worker [{child.name}] runs, but no MPS server does: MPS does not work here")
            return ready

        child.answer(self.start_timeout_s, "imported")
        child.tell("build")
        return wait

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stops all processes that only import their libraries, so that none of them disturbs what is measured."""
        waiting = list(self._prepared.values())
        for child in waiting:
            child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for child in waiting:
                child.signal(signal.SIGCONT)

    def __getitem__(self, place: Place) -> Child:
        return self._running[place]

    def __contains__(self, place: Place) -> bool:
        return place in self._running and self._running[place].alive

    def ask(self, place: Place, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; a process that gives none is ended: nothing waits for it again.

        Raises:
            HarnessError: It gave none.
        """
        try:
            self._running[place].tell(command, **arguments)
            return self._running[place].answer(ANSWER_S)
        except HarnessError:
            self.retire(place, grace_s=0.0)
            raise

    def retire(self, place: Place, grace_s: float = 5.0) -> None:
        """Ends a process in the background."""
        for children in (self._running, self._prepared):
            child = children.pop(place, None)
            if child:
                thread = threading.Thread(target=child.stop, args=(grace_s,))
                thread.start()
                self._leaving.append(thread)

    def retire_all(self) -> None:
        """Ends all that run, in the background."""
        for place in list(self._running):
            self.retire(place)

    def settle(self) -> None:
        """Waits until all that were retired are gone."""
        while self._leaving:
            self._leaving.pop().join()

    def _command(self, place: Place) -> list[str]:
        mode = self.modes[place.mode]
        command = [sys.executable, str(self.script if place.role == "program" else HERE / "server.py")]
        if self.backend.name == "simulated":
            if place.role == "program":
                command += [self._stand_in(place.name), "--simulate"]
            else:
                command += [SIMULATED_SERVERS.get(place.name, place.name), "--simulate"]
                command += ["--time-scale", f"{self.backend.scale:g}"]
        else:
            command.append(place.name)
        if place.role == "program":
            command += self.options
        if not mode.managed:
            return command
        client_class = "latency" if place.role == "server" else "best-effort"
        return [*CUDASCHED, "run", *["--mps"] * mode.mps, "--class", client_class, "--", *command]

    def _stand_in(self, program: str) -> str:
        """The load of the simulated driver that stands for a program."""
        return SIMULATED_PROGRAMS[self.programs.index(program) % len(SIMULATED_PROGRAMS)]

    def _environment(self, place: Place) -> dict[str, str]:
        mode = self.modes[place.mode]
        environment = self.backend.environment(hooked=mode.managed)
        cache = self.scratch / "jax"
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        environment.update(mode.environment)
        table = self.scratch / place.mode
        if mode.mps and self._mps is None:
            # Held here too, so that the daemon does not end and start again between two programs.
            try:
                self._mps = mps.join(table, os.environ.get("CUDA_VISIBLE_DEVICES"))
            except mps.MpsError as error:
                raise HarnessError(str(error)) from error
        if mode.managed:
            table.mkdir(mode=0o700, exist_ok=True)
            environment["CUDASCHED_RUN_DIR"] = str(table)
            environment["CUDASCHED_NAME"] = f"{place.name} {place.mode}"[:63]
        elif self._mps and mode.mps:
            environment.update(self._mps.environment)
            environment["CUDA_MPS_CLIENT_PRIORITY"] = "1" if place.role == "program" else "0"
        return environment


class Runner:
    """Does the cells that are missing while there is time: for each server, program after program.

    Attributes:
        known: The programs.
        arms: What the names of arms mean.
        modes: Which of a program's processes an arm runs.
        server_modes: Which of a server's, where that is another mode.
        rates: Requests a second of each server.
        settle_s: A program that is not measured at once runs so long before its cell: predictions, clocks.
    """

    known: Mapping[str, Program] = PROGRAMS
    arms: Mapping[str, Arm] = ALL_ARMS
    modes: Mapping[str, str] = MODES
    server_modes: Mapping[str, str] = {}
    rates: Mapping[str, float] = SERVERS
    settle_s = SETTLE_S

    def __init__(self, fleet: Fleet, cells: CellFile, options: argparse.Namespace, lead_us: float | str) -> None:
        self.fleet, self.cells, self.options, self.lead_us = fleet, cells, options, lead_us
        self.began = time.monotonic()
        self.failed = 0
        self.step_ms: dict[str, float] = {}

    # ---- what there is to do ----

    def cell(self, arm: str, server: str, program: str, repeat: int = 0) -> Cell:
        """The cell of an arm; the server alone stands for all programs of this run."""
        lead_us = self.lead_us if self.arms[arm].managed else 0.0
        beside = "+".join(self.options.programs) if arm == "latency_alone" else program
        rate = f"{self.rates[server]:g}"
        return Cell(arm, server, beside, "poisson", rate, self.options.seconds, lead_us, repeat)

    def missing(self, server: str, program: str) -> list[Cell]:
        """Of one program beside one server, kernel durations last: profiling leaves traces in a process."""
        arms = [arm for arm in self.options.arms if arm != "latency_alone"]
        planned = [self.cell(arm, server, program) for arm in arms]
        if planned:
            planned.append(Cell.kernels(program))
        return self.cells.missing(planned)

    def alone_missing(self, server: str, place: int) -> list[Cell]:
        """The server's own cell that is due before the program at `place`; one place past the last is the end."""
        count = len(self.options.programs)
        if "latency_alone" not in self.options.arms or (place % ALONE_EVERY and place != count):
            return []
        return self.cells.missing([self.cell("latency_alone", server, "", -(-place // ALONE_EVERY))])

    def estimate_s(self) -> float:
        """How long the missing cells take, about."""
        cell_s = self.options.seconds + CELL_EXTRA_S
        total = CLOSING_S
        for server in self.options.servers:
            total += SERVER_S
            for place in range(len(self.options.programs) + 1):
                total += cell_s * len(self.alone_missing(server, place))
            for program in self.options.programs:
                missing = self.missing(server, program)
                measured = [cell for cell in missing if cell.arm != KERNELS]
                total += cell_s * len(measured) + KERNELS_S * (len(missing) - len(measured))
                if missing:
                    total += COMPILE_S if self.known[program].compiles else BUILD_S
                managed = sum(cell.arm.startswith("cudasched") for cell in measured)
                total += managed * (self.settle_s if self.options.keep_servers else SERVER_S)
        return total

    def estimate(self) -> str:
        """The same in words."""
        count = sum(
            len(self.missing(server, program)) for server in self.options.servers for program in self.options.programs
        )
        limit = f", limit {self.options.limit_s:.0f} s" if self.options.limit_s is not None else ""
        return f"{count} cells of programs are missing: about {self.estimate_s():.0f} s{limit}"

    # ---- doing it ----

    def run(self) -> int:
        """Returns the exit status."""
        if self.options.dry:
            return 0
        units = [(server, program) for server in self.options.servers for program in self.options.programs]
        units = [unit for unit in units if self.missing(*unit)]
        if units:
            self.fleet.prepare(self._places(*units[0]))
        for server in self.options.servers:
            plain = Place("server", server, "plain")
            self.fleet.prepare([plain])
            for place, program in enumerate([*self.options.programs, None]):
                if not self._alone(plain, server, place):
                    return self._out_of_time()
                if program is None or not self.missing(server, program):
                    continue
                after = units[units.index((server, program)) + 1 :]
                if not self._unit(server, program, after[0] if after else None):
                    return self._out_of_time()
            for mode in dict.fromkeys(self.modes.values()):
                self.fleet.retire(Place("server", server, mode))
        return 1 if self.failed else 0

    def _alone(self, plain: Place, server: str, place: int) -> bool:
        for cell in self.alone_missing(server, place):
            if self._left_s() < cell.seconds + CELL_EXTRA_S + SERVER_S:
                return False
            self._measure(cell, lambda cell=cell: self._window(cell, [], [self._server(plain)]))
        return True

    def _unit(self, server: str, program: str, following: tuple[str, str] | None) -> bool:
        """All missing cells of one program; False when time ran out."""
        missing = self.missing(server, program)
        modes = dict.fromkeys(self.modes.get(cell.arm, "plain") for cell in missing)
        if self._left_s() < BUILD_S + self.options.seconds + CELL_EXTRA_S:
            return False
        self.say(f"{program} beside {server}: {len(missing)} cells")
        self.fleet.settle()
        processes = self._places(server, program)
        # What is needed next imports its libraries meanwhile, and is done with that before much is measured.
        self.fleet.prepare(processes)
        self.fleet.prepare(Place("server", server, mode) for mode in modes if mode != "plain")
        if following:
            self.fleet.prepare(self._places(*following))
        broken = self._build(processes, first_ahead=self.known[program].compiles)
        try:
            return self._measured(missing, broken)
        finally:
            for process in processes:
                self.fleet.retire(process)

    def _measured(self, missing: Sequence[Cell], broken: dict[Place, HarnessError]) -> bool:
        """Cells of programs that are built; False when time ran out. Processes that end are broken from then on."""
        for cell in missing:
            needed_s = KERNELS_S if cell.arm == KERNELS else cell.seconds + CELL_EXTRA_S + SERVER_S
            if self._left_s() < needed_s:
                return False
            processes = self._processes(cell)
            servers = [] if cell.arm == KERNELS else self._servers(cell)
            failed = [str(broken[place]) for place in (*processes, *servers) if place in broken]
            if failed:
                self._keep(cell, None, failed[0])
                continue
            try:
                self._measure(cell, lambda cell=cell, processes=processes: self._cell(cell, processes))
            finally:
                for process in processes:
                    if process not in self.fleet:
                        broken[process] = HarnessError(f"the program's process of the mode {process.mode} is gone")
        return True

    def _processes(self, cell: Cell) -> list[Place]:
        """The programs of a cell, those that it names joined by +; none where a server is measured alone."""
        mode = self.modes.get(cell.arm, "plain")
        names = [] if cell.arm == "latency_alone" else cell.best_effort.split("+")
        return [Place("program", name, mode) for name in names]

    def _servers(self, cell: Cell) -> list[Place]:
        """The servers of a cell, likewise."""
        mode = self.server_modes.get(cell.arm, self.modes.get(cell.arm, "plain"))
        names = cell.latency.split("+") if self.arms[cell.arm].latency else []
        return [Place("server", name, mode) for name in names]

    def _places(self, server: str, program: str) -> list[Place]:
        cells = self.missing(server, program)
        return list(dict.fromkeys(process for cell in cells for process in self._processes(cell)))

    def _build(self, processes: Sequence[Place], first_ahead: bool) -> dict[Place, HarnessError]:
        """Builds processes at once, or the first one ahead of the others, which find the kernels that it compiled."""
        broken: dict[Place, HarnessError] = {}
        waits: list[tuple[Place, Callable[[], dict[str, Any]]]] = []

        def collect() -> None:
            for process, wait in waits:
                try:
                    self.step_ms[process.name] = wait().get("step_ms") or self.step_ms.get(process.name, 0.0)
                except HarnessError as error:
                    broken[process] = error
                    self.fleet.retire(process, grace_s=0.0)
                    self.say(str(error))
            waits.clear()

        for process in processes:
            try:
                waits.append((process, self.fleet.build(process)))
            except HarnessError as error:
                broken[process] = error
                self.fleet.retire(process, grace_s=0.0)
                self.say(str(error))
            if first_ahead:
                collect()
                first_ahead = False
        collect()
        return broken

    def early_s(self, cell: Cell) -> float:
        """For so long a cell's requests come before those that are measured, beside its programs."""
        del cell
        return 0.0

    def _cell(self, cell: Cell, processes: Sequence[Place]) -> dict[str, Any]:
        """One cell of programs that are built and paused; they are paused again afterwards."""
        if cell.arm == KERNELS:
            return _without_event(self.fleet.ask(processes[0], "kernels"))
        served = self._servers(cell)
        fresh = any(server not in self.fleet for server in served)
        try:
            for process in processes:
                self.fleet.ask(process, "start")
            servers = [self._server(server) for server in served]
            if served and processes and not fresh:
                time.sleep(self.settle_s)
            if early_s := self.early_s(cell):
                self._window(dataclasses.replace(cell, seconds=early_s), [], servers)
            managed = [process for process in processes if self.fleet.modes[process.mode].managed]
            before, began = [self.fleet.ask(process, "state") for process in managed], time.monotonic()
            result = self._window(cell, processes, servers)
            if managed:
                result["counted_s"] = time.monotonic() - began
                after = [self.fleet.ask(process, "state") for process in managed]
                sums = Counter[str]()
                for each in map(counted, before, after):
                    sums.update(each)
                result["counted"] = dict(sums)
            return result
        finally:
            for process in processes:
                if process in self.fleet:
                    with contextlib.suppress(HarnessError):  # it is ended then, which its next cell says
                        self.fleet.ask(process, "pause")
            if not self.options.keep_servers:
                for server in served:
                    if self.fleet.modes[server.mode].managed:
                        self.fleet.retire(server)

    def _server(self, place: Place) -> Place:
        if place not in self.fleet:
            self.fleet.retire(place, grace_s=0.0)
            try:
                self.fleet.build(place)()
            except HarnessError:
                self.fleet.retire(place, grace_s=0.0)
                raise
        return place

    def _window(
        self, cell: Cell, processes: Sequence[Place], servers: Sequence[Place], keep_due: bool = False
    ) -> dict[str, Any]:
        """Measures for a cell's seconds, longer for a program whose steps are long."""
        scale = self.fleet.backend.scale
        periods_s = [self.step_ms.get(process.name, 0.0) / 1e3 * self._read_every() for process in processes]
        seconds = max(cell.seconds, min(LONGEST_S, READINGS * max(periods_s, default=0.0)))
        result: dict[str, Any] = {"latency": {}, "best_effort_per_s": {}, "seconds": seconds}
        with self.fleet.held():
            start_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
            until_ns = start_ns + int(seconds * 1e9)
            if servers:
                result["latency"] = self._served(cell, servers, start_ns, seconds, keep_due)
            time.sleep(max(0.0, (until_ns - time.monotonic_ns()) / 1e9))
        for process in processes:
            found = self.fleet.ask(process, "readings", from_ns=start_ns, until_ns=until_ns)["readings"]
            result["best_effort_per_s"][process.name] = per_second(found) * scale
            result["readings"] = len(found)
        return result

    def _served(
        self, cell: Cell, servers: Sequence[Place], start_ns: int, seconds: float, keep_due: bool
    ) -> dict[str, Any]:
        """What the requests of servers took, which come at once."""
        names = cell.latency.split("+")
        loads = [SIMULATED_SERVERS.get(name, name) if self._simulated else name for name in names]
        rates_hz = {load: self.rates[name] for load, name in zip(loads, names, strict=True)}
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
                    hint_ms=0.0,
                    slo_ms=0.0,
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

    def _read_every(self) -> int:
        return 2 if self._simulated else 50

    @property
    def _simulated(self) -> bool:
        return self.fleet.backend.name == "simulated"

    def _measure(self, cell: Cell, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            self._keep(cell, measure(), None)
        except (HarnessError, ValueError) as error:
            self._keep(cell, None, str(error))

    def _keep(self, cell: Cell, result: dict[str, Any] | None, problem: str | None) -> None:
        self.failed += problem is not None
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.cells.add(Outcome(cell, result, problem, now))
        if self.cells.meta and not self._simulated and cell.arm == "best_effort_alone" and result:
            clock = meta.sm_clock_mhz()
            if clock and clock > (self.cells.meta.sm_clock_mhz or 0):
                self.cells.meta.sm_clock_mhz = clock
        self.cells.save()
        self.say(f"  {cell.arm}: {problem or brief(result)}")

    def _out_of_time(self) -> int:
        self.say(f"time ran out: run again to go on ({self.estimate()})")
        return TIME_RAN_OUT

    def _left_s(self) -> float:
        if self.options.limit_s is None:
            return float("inf")
        return float(self.options.limit_s - CLOSING_S - (time.monotonic() - self.began))

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def per_second(readings: Sequence[Sequence[int]]) -> float:
    """Steps a second from the first to the last reading.

    Raises:
        ValueError: There are not two.
    """
    if len(readings) < 2:
        raise ValueError(f"{len(readings)} readings of the loss in the cell, where two are needed: use longer cells")
    (began_ns, first), (ended_ns, last) = readings[0], readings[-1]
    return (last - first) / ((ended_ns - began_ns) / 1e9)


def counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """What cudasched counted between two looks at a program, and its graphs that are whole: what explains a cell."""
    told = {
        name: value - before[name]
        for name, value in after.items()
        if isinstance(value, int) and not isinstance(value, bool) and name != "driver_version"
    }
    return told | {f"graphs_whole_{why}": graphs for why, graphs in after.get("graphs_whole", {}).items()}


def _without_event(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "event"}


def results(cells: CellFile) -> Results:
    """The rows of all cells that have a result; the server alone stands beside each program that its cell names."""
    spread = CellFile(cells.path.with_suffix(".spread"), cells.meta)
    for outcome in cells.outcomes.values():
        names = outcome.cell.best_effort.split("+")
        numbered = sum(1 for known in spread.outcomes if known.arm == outcome.cell.arm)
        for name in names:
            # Parts that ran on several GPUs have cells of the same number.
            repeat = numbered if outcome.cell.arm == "latency_alone" else outcome.cell.repeat
            spread.add(
                dataclasses.replace(outcome, cell=dataclasses.replace(outcome.cell, best_effort=name, repeat=repeat))
            )
    return colocation_rows.results(spread)


def finish(cells: CellFile, out: Path, tables: Tables = (breadth_table, breadth_figures)) -> None:
    """Writes results, and prints what they say and what failed."""
    report(cells, out, results(cells), tables)


def merge(arguments: Sequence[str], name: str = "breadth", tables: Tables = (breadth_table, breadth_figures)) -> int:
    """Puts the cells of several runs together."""
    options = merge_parser(name).parse_args(arguments)
    return merge_cells(name, options, lambda cells: finish(cells, options.out, tables))


if __name__ == "__main__":
    sys.exit(main())
