"""Programs of long kernels beside servers, with time slices of their own and without; a rerun does what is missing.

    python -m benchmarks.preempt --out benchmarks/results/preempt.json --limit-s 590
    python -m benchmarks.preempt --out benchmarks/results/preempt.json --scene eager --lengths 1,100,300,600,1000
    python -m benchmarks.preempt --out benchmarks/results/preempt_ablation.json --scene ablation
    python -m benchmarks.preempt --out OUT/main.json --part 2/4          # for a GPU a part: benchmarks/preempt.sh
    python -m benchmarks.preempt --rehearse --out /tmp/preempt.json --programs cupy_persistent
    python -m benchmarks.preempt merge --out benchmarks/results/preempt.json first.cells second.cells

Processes, cells and rows are those of the breadth benchmark. For each program the processes of all arms are built once,
and then, server after server, all arms are measured one after another, the server alone first. So each repeat of a
program and a server has an `alone` of its own, and what there is when time runs out is complete. Servers are started
once and kept. `--scene` takes several by commas:

    main      12 programs beside 3 servers
    eager     host-bound servers; `--lengths` adds arms `slices_N` with time slices of N us
    outside   the server is another user's, with a root, a /tmp and a /dev/shm of its own; `slices_inside` is as in main
    several   two best-effort programs beside a server, and one beside two servers
    ablation  all under cudasched, with other settings an arm; results of their own, preempt_ablation.json

In the arms `slices` best effort alone is under cudasched, in `before` and `cudasched` both are, `before` without time
slices of its own. The figures that are promised go into NAME_figures.json; `merge --soak FILE...` adds those
of `tests.soak.slices`. The exit status is 0 when all cells have a result, 3 when time
ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudasched.demo.harness import HEAD_START_S, Backend, HarnessError

from benchmarks.breadth.__main__ import SERVER_S, Fleet, Mode, Place, Runner, split_choices
from benchmarks.colocation.cells import Cell, CellFile, cells_path
from benchmarks.colocation.frame import merge_cells, merge_parser, part_of, report, run_cells
from benchmarks.lab.pairs import configured_lead_us
from benchmarks.preempt.programs import PROGRAMS
from benchmarks.preempt.summary import arms_of, every_table, figures, results
from benchmarks.tables import core_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = ("bert_graph", "vit_graph", "recommender")
EAGER_SERVERS = ("bert_eager", "resnet50_b4", "decode_short")
#: Requests a second of those, and of the eager ones.
RATE_HZ, EAGER_RATE_HZ = 150.0, 30.0
#: Of a cell; a Poisson process is short of its mean by less than the share, with the seeds of the first repeats.
REQUESTS, SPARE = 1000, 1.06
#: Arms that take turns, so many first and then so many: five processes of a program fit into the GPU's memory.
TURNS, LATER_TURNS = 7, 5
#: What things take, s, for the estimate: a program's processes and the servers to be built, a cell beyond its seconds.
BUILD_S, SERVERS_S, EXTRA_S = 14.0, 15.0, HEAD_START_S + 0.4
#: Requests of an eager server come so long before those that are measured.
EARLY_S = 3.0
OFF = {"CUDASCHED_TIME_SLICE_US": "off"}
#: Arms of the ablation and their environment: the gate steps aside only where the length is found on line.
ABLATION: dict[str, dict[str, str]] = {
    "slices": {},
    "slices_no_offload": {"CUDASCHED_OFFLOAD": "off"},
    "slices_strict": {"CUDASCHED_TIME_SLICE_US": "1"},
    "slices_strict_200": {"CUDASCHED_TIME_SLICE_US": "200"},
    "before": OFF,
}
#: Makes a server another user's, with a root of its own in which nothing of /tmp and /dev/shm is; $1 is the repository.
OUTSIDE = """set -e
mount --rbind / /mnt
mount -t tmpfs -o mode=1777 none /mnt/tmp
mount -t tmpfs -o mode=1777 none /mnt/dev/shm
mkdir -p /mnt/tmp/repo/benchmarks /mnt/tmp/repo/python/cudasched
cp -r "$1/benchmarks/breadth" /mnt/tmp/repo/benchmarks/
cp -r "$1/python/cudasched/demo" /mnt/tmp/repo/python/cudasched/
chmod -R a+rX /mnt/tmp/repo
shift
exec chroot --userspec=65534:65534 /mnt env HOME=/tmp "$@"
"""
OTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "HOME=/tmp")


@dataclass(frozen=True)
class Scene:
    """What is measured together.

    Attributes:
        pairs: Programs and the server, or servers, that each is beside; both joined by +.
        arms: In the order in which they take turns.
        server_modes: Which of a server's processes an arm runs, where that is not the bare one in arms of `slices`, and
            that of the program's mode in others.
    """

    pairs: tuple[tuple[str, str], ...]
    arms: tuple[str, ...]
    server_modes: Mapping[str, str] = field(default_factory=dict)


ALONE = ("latency_alone", "best_effort_alone", "processes")
BOTH = ("before", "slices", "cudasched")
BARE = {**dict.fromkeys(ALONE, "plain"), "mps_priority": "mps_bare", "slices_inside": "slices"}
FEW = ("torch_llama_layers", "torch_resnet50", "torch_long_kernels")
SCENES = {
    "main": Scene(tuple(itertools.product(PROGRAMS, SERVERS)), (*ALONE, *BOTH, "mps_priority")),
    "eager": Scene(tuple(itertools.product(FEW, EAGER_SERVERS)), (*ALONE, *BOTH)),
    "outside": Scene(
        tuple(itertools.product(FEW, SERVERS[:2])),
        ("latency_alone", "processes", "slices", "slices_inside"),
        server_modes=dict.fromkeys(("latency_alone", "processes", "slices"), "outside"),
    ),
    "several": Scene(
        (
            ("torch_resnet50+torch_long_kernels", SERVERS[0]),
            ("torch_llama_layers+torch_graph_network", SERVERS[0]),
            ("torch_llama_layers", "+".join(SERVERS[:2])),
            ("torch_resnet50", "bert_graph+recommender"),
        ),
        (*ALONE, "slices", "cudasched"),
    ),
    "ablation": Scene(
        tuple((name, SERVERS[0]) for name in ("torch_llama_layers", "whole_step", "torch_lstm", "torch_resnet50")),
        (*ALONE, *ABLATION),
        server_modes={name: name for name in ABLATION},
    ),
}


class PreemptFleet(Fleet):
    """The processes of the arms; a server may run outside."""

    modes: Mapping[str, Mode] = {
        "plain": Mode(managed=False),
        "mps_bare": Mode(managed=False, mps=True),
        "outside": Mode(managed=False),
        "cudasched": Mode(),
        **{name: Mode(environment=environment) for name, environment in ABLATION.items()},
    }
    script = HERE / "programs.py"
    options = ("--warm-up", "4")
    start_timeout_s = 100.0
    programs = tuple(PROGRAMS)
    #: What puts a server outside; found out when the first one starts.
    _outside: Sequence[str] | None = None

    def _command(self, place: Place) -> list[str]:
        command = super()._command(place)
        if place.mode != "outside" or self.backend.name == "simulated":  # whose device is its user's alone
            return command
        if self._outside is None:
            self._outside = outside()
        if self._outside[0] == "unshare":
            command[1] = command[1].replace(str(ROOT), "/tmp/repo")
        return [*self._outside, *command]


def outside() -> Sequence[str]:
    """What to put before this Python to run it outside: with a root of its own, or at least as another user.

    Raises:
        HarnessError: This machine allows neither.
    """
    ways = (("unshare", "-m", "--", "sh", "-c", OUTSIDE, "sh", str(ROOT)), OTHER_USER)
    problems = []
    for way in ways:
        done = subprocess.run([*way, sys.executable, "-c", ""], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return way
        problems.append(f"{way[0]}: {done.stderr.strip()}")
        print(f"outside: {problems[-1]}", flush=True)
    raise HarnessError(f"no server can be outside here: {'; '.join(problems)}")


class PreemptRunner(Runner):
    """Does the missing cells of scenes: for each program all servers, for each server all arms.

    Attributes:
        name: The scene.
        repeat: Which.
        turns: The arms that are measured together.
    """

    known = PROGRAMS
    settle_s = 0.0
    name = "main"
    repeat = 0
    turns: Sequence[str] = ()

    def __init__(self, fleet: Fleet, cells: CellFile, options: argparse.Namespace, lead_us: float | str) -> None:
        super().__init__(fleet, cells, options, lead_us)
        lengths = [f"slices_{length}" for length in options.lengths]
        fleet.modes = {
            **fleet.modes,
            **{arm: Mode(environment={"CUDASCHED_TIME_SLICE_US": arm.removeprefix("slices_")}) for arm in lengths},
        }
        self.lengths = lengths
        self.rates = dict.fromkeys(SERVERS, options.rate) | dict.fromkeys(EAGER_SERVERS, options.eager_rate)
        every = dict.fromkeys([*(arm for scene in SCENES.values() for arm in scene.arms), *lengths])
        self.arms = arms_of(every)
        self.modes = {arm: BARE.get(arm, arm) for arm in every}
        self.parts: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for name, repeat in itertools.product(options.scene, range(options.repeats)):
            self.name, self.repeat = name, repeat
            self.parts[name, repeat] = self.part()

    # ---- what there is to do ----

    def cell(self, arm: str, server: str, program: str, repeat: int = 0) -> Cell:
        """The cell of an arm; a program alone has no server."""
        lead_us = self.lead_us if self.arms[arm].managed else 0.0
        rates_hz = [self.rates[name] for name in server.split("+")] if server else []
        requests_s = self.options.requests * SPARE / min(rates_hz, default=self.options.rate)
        rates = "+".join(f"{rate:g}" for rate in rates_hz)
        seconds = self.options.seconds or round(requests_s, 2)
        return Cell(arm, server, program, "poisson", rates, seconds, lead_us, repeat, scene=self.name)

    def missing(self, server: str, program: str) -> list[Cell]:
        """Of one program beside one server, in the arms that take turns."""
        planned = []
        for arm in self.turns:
            alone = arm == "best_effort_alone"
            for beside in program.split("+") if alone else [program]:
                planned.append(self.cell(arm, "" if alone else server, beside, self.repeat))
        return self.cells.missing(planned)

    def turns_of(self, scene: str) -> list[Sequence[str]]:
        """The arms of a scene that are measured together."""
        known = (*SCENES[scene].arms, *self.lengths) if scene == "eager" else SCENES[scene].arms
        arms = [arm for arm in known if arm in (self.options.arms or known)]
        later = range(TURNS, len(arms), LATER_TURNS)
        return [arms[:TURNS], *(arms[first : first + LATER_TURNS] for first in later)]

    def part(self) -> list[tuple[str, str]]:
        """The pairs of this part of the scene: a run of those in which something is missing."""
        chosen = self.options
        pairs = []
        for program, server in SCENES[self.name].pairs:
            if set(program.split("+")) <= set(chosen.programs) and server in (chosen.servers or [server]):
                self.turns = list(itertools.chain.from_iterable(self.turns_of(self.name)))
                pairs += [(program, server)] * bool(self.missing(server, program))
        number, parts = chosen.part
        return pairs[(number - 1) * len(pairs) // parts : number * len(pairs) // parts]

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

    def _todo(self) -> tuple[int, float]:
        """How many cells are missing, and how long they take, about."""
        known: set[Cell] = set()
        took_s = 0.0
        for program, servers in self.plan():
            cells = {cell for server in servers for cell in self.missing(server, program)} - known
            took_s += BUILD_S + self._takes_s(list(cells)) + SERVERS_S * (not known)
            known |= cells
        return len(known), took_s

    def estimate_s(self) -> float:
        """How long the missing cells take, about."""
        return self._todo()[1]

    def estimate(self) -> str:
        """The same in words."""
        limit = "" if self.options.limit_s is None else f", limit {self.options.limit_s:.0f} s"
        count, took_s = self._todo()
        return f"{count} cells are missing: about {took_s:.0f} s{limit}"

    # ---- doing it ----

    def run(self) -> int:
        """Returns the exit status."""
        ahead = PreemptRunner(self.fleet, self.cells, self.options, self.lead_us)
        following = ahead.plan()
        next(following, None)
        scene = ""
        for program, servers in self.plan():
            if scene != self.name:
                self.fleet.retire_all()
            scene = self.name
            after = next(following, None)
            if not self._group(program, servers, ahead._programs(*after) if after else []):
                return self._out_of_time()
        return 1 if self.failed else 0

    def _group(self, program: str, servers: Sequence[str], following: Sequence[Place]) -> bool:
        """All missing cells of a program beside some servers; False when time ran out."""
        cells = [cell for server in servers for cell in self.missing(server, program)]
        if self._left_s() < BUILD_S + self._needed_s(self.missing(servers[0], program)):
            return False
        self.say(f"{self.name}: {program} beside {', '.join(servers)}: {len(cells)} cells")
        processes = self._programs(program, servers)
        needed = list(dict.fromkeys([*processes, *(server for cell in cells for server in self._servers(cell))]))
        self.fleet.settle()
        self.fleet.prepare([*needed, *following])
        broken = self._build(needed, first_ahead=any(PROGRAMS[name].compiles for name in program.split("+")))
        self.say("  built")
        try:
            for server in servers:
                missing = self.missing(server, program)
                if self._left_s() < self._needed_s(missing) or not self._measured(missing, broken):
                    return False
        finally:
            for process in processes:
                self.fleet.retire(process)
        return True

    def _programs(self, program: str, servers: Sequence[str]) -> list[Place]:
        return list(dict.fromkeys(place for server in servers for place in self._places(server, program)))

    def _servers(self, cell: Cell) -> list[Place]:
        mode = SCENES[self.name].server_modes.get(
            cell.arm, "plain" if cell.arm.startswith("slices") else self.modes[cell.arm]
        )
        names = cell.latency.split("+") if self.arms[cell.arm].latency else []
        return [Place("server", name, mode) for name in names]

    def early_s(self, cell: Cell) -> float:
        """Where both know of one another, what is found out of requests with many launches takes seconds."""
        both = any(self.fleet.modes[server.mode].managed for server in self._servers(cell))
        graphs = all(name.endswith("_graph") for name in cell.latency.split("+"))
        return min(EARLY_S, cell.seconds) if both and not graphs and cell.arm != "before" else 0.0

    def _takes_s(self, cells: Sequence[Cell]) -> float:
        early_s = [self.early_s(cell) for cell in cells]
        return sum(cell.seconds + EXTRA_S for cell in cells) + sum(each + HEAD_START_S for each in early_s if each)

    def _needed_s(self, cells: Sequence[Cell]) -> float:
        return self._takes_s(cells) + SERVER_S

    def _read_every(self) -> int:
        return 0  # each program's own: no cell is longer for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["merge"]:
        parser = merge_parser("preempt")
        parser.add_argument("--soak", type=Path, nargs="+", default=[], help="files of tests.soak.slices, one a GPU")
        chosen = parser.parse_args(arguments[1:])
        return merge_cells("preempt", chosen, lambda cells: finish(cells, chosen.out, chosen.soak))
    options = parse(arguments)
    if options.dry:
        with PreemptFleet(backend := Backend()) as fleet:
            known = CellFile(cells_path(options.out))
            print(PreemptRunner(fleet, known, options, configured_lead_us(backend)).estimate())
        return 0

    def measure(backend: Backend, cells: CellFile) -> int:
        with PreemptFleet(backend) as fleet:
            runner = PreemptRunner(fleet, cells, options, configured_lead_us(backend))
            runner.say(runner.estimate())
            return runner.run()

    return run_cells(
        "preempt", options, measure, lambda cells: finish(cells, options.out, shown=options.part == (1, 1))
    )


def finish(cells: CellFile, out: Path, soak: Sequence[Path] = (), shown: bool = True) -> None:
    """Writes rows and figures, and prints what they say (of all that there is, not of a part) and what failed."""
    made = results(cells)
    report(cells, out, made, (every_table,) if shown else ())
    found = figures(made, soak)
    if found.rows:
        found.write(out.with_name(f"{out.stem}_figures.json"))
        print(core_table(found) if shown else "")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with lists split and checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preempt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--scene", default="main", help=f"by commas, of {', '.join(SCENES)}")
    parser.add_argument("--programs", "--only", default=",".join(PROGRAMS), help=f"by commas, of {', '.join(PROGRAMS)}")
    parser.add_argument("--servers", default="", help="by commas; all of the scene by default")
    parser.add_argument("--arms", default="", help="by commas; all of the scene by default")
    parser.add_argument("--lengths", default="", help="us, by commas: arms slices_N of the scene eager")
    parser.add_argument("--rate", type=float, default=RATE_HZ, help=f"requests a second ({RATE_HZ:g})")
    parser.add_argument("--eager-rate", type=float, default=EAGER_RATE_HZ, help=f"of eager servers ({EAGER_RATE_HZ:g})")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of a cell, at least ({REQUESTS})")
    parser.add_argument(
        "--seconds", type=float, help="of each cell, in place of what its requests take (2 in a rehearsal)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of each cell")
    parser.add_argument("--part", default="1/1", help="I/N: the Ith of N runs of pairs, for a GPU a part")
    parser.add_argument("--limit-s", type=float, help="stop before so much time has passed")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--dry", action="store_true", help="say how long it would take, and do nothing")
    options = parser.parse_args(arguments)
    split_choices(parser, options, scene=SCENES, programs=PROGRAMS)
    options.servers, options.arms, options.lengths = (
        [each for each in text.split(",") if each] for text in (options.servers, options.arms, options.lengths)
    )
    lengths = [f"slices_{length}" for length in options.lengths]
    known = {each for name in options.scene for pair in SCENES[name].pairs for each in pair}
    known |= {arm for name in options.scene for arm in SCENES[name].arms} | set(lengths)
    unknown = [each for each in (*options.servers, *options.arms) if each not in known]
    if unknown or not all(length.isdigit() for length in options.lengths):
        parser.error(f"{', '.join(unknown or options.lengths)}: of this scene there are {', '.join(sorted(known))}")
    part, _, parts = options.part.partition("/")
    part_of(parser, options.part, ())
    options.part = int(part), int(parts)
    if min(options.rate, options.eager_rate, options.requests, options.repeats) <= 0:
        parser.error("--rate, --eager-rate, --requests and --repeats: above 0")
    options.keep_servers = True
    if options.simulate:  # whose driver has no MPS
        options.seconds = options.seconds or 2.0
        every = [arm for name in options.scene for arm in SCENES[name].arms] + lengths
        options.arms = [arm for arm in options.arms or every if arm != "mps_priority"]
    return options


if __name__ == "__main__":
    sys.exit(main())
