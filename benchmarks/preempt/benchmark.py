"""Programs of long kernels beside servers, with time slices of their own and without.

Servers are started once and kept. `--scene` takes several by commas:

    main      12 programs beside 3 servers; `run main` is this scene alone, with results of its own
    eager     host-bound servers; `--lengths` adds arms `slices_N` with time slices of N us
    outside   the server is another user's, with a root, a /tmp and a /dev/shm of its own; `slices_inside` is as in main
    several   two best-effort programs beside a server, and one beside two servers
    ablation  all under cudasched, with other settings an arm; results of their own, preempt_ablation.json

In the arms `slices` best effort alone is under cudasched, in `before` and `cudasched` both are, `before` without time
slices of its own. The figures that are promised go into NAME_figures.json; `merge preempt --with FILE...`
adds those of `tests.soak.slices`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cudasched.demo.harness import HarnessError

from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.lab.fleet import Fleet, Mode, Place
from benchmarks.lab.programs import Runner, Scene, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session, report
from benchmarks.preempt.programs import PROGRAMS
from benchmarks.preempt.summary import arms_of, every_table, figures, results
from benchmarks.results.schema import Results
from benchmarks.tables import core_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = ("bert_graph", "vit_graph", "recommender")
EAGER_SERVERS = ("bert_eager", "resnet50_b4", "decode_short")
#: Requests a second of those, of the eager ones, and of those in `main`.
RATE_HZ, EAGER_RATE_HZ, MAIN_RATE_HZ = 150.0, 30.0, 120.0
#: Of a cell; a Poisson process is short of its mean by less than the share, with the seeds of the first repeats.
REQUESTS, SPARE = 1000, 1.06
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


ALONE = ("latency_alone", "best_effort_alone", "processes")
BOTH = ("before", "slices", "cudasched")
#: MPS by itself, and what its two means for unequal clients give the program: a lower priority, half of the SMs.
MPS = {
    "mps": {},
    "mps_priority": {"CUDA_MPS_CLIENT_PRIORITY": "1"},
    "mps_half": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
}
BARE = {
    **dict.fromkeys(ALONE, "plain"),
    **{arm: f"{arm}_bare" for arm in MPS},
    "best_effort_alone_hooked": "slices",
    "slices_inside": "slices",
}
#: The server is bare beside a program of which best effort alone is under cudasched.
BARE_SERVERS = {**BARE, "slices": "plain", "slices_inside": "plain"}
FEW = ("torch_llama_layers", "torch_resnet50", "torch_long_kernels")
SCENES = {
    "main": Scene(
        tuple(itertools.product(PROGRAMS, SERVERS)),
        ("latency_alone", "best_effort_alone", "best_effort_alone_hooked", "processes", "slices", "cudasched", *MPS),
        BARE,
        BARE_SERVERS,
        optional=("before",),
        profiled=True,
        together=(8, 5),
    ),
    "eager": Scene(tuple(itertools.product(FEW, EAGER_SERVERS)), (*ALONE, *BOTH), BARE, BARE_SERVERS),
    "outside": Scene(
        tuple(itertools.product(FEW, SERVERS[:2])),
        ("latency_alone", "processes", "slices", "slices_inside"),
        BARE,
        server_modes=BARE_SERVERS | dict.fromkeys(("latency_alone", "processes", "slices"), "outside"),
    ),
    "several": Scene(
        (
            ("torch_resnet50+torch_long_kernels", SERVERS[0]),
            ("torch_llama_layers+torch_graph_network", SERVERS[0]),
            ("torch_llama_layers", "+".join(SERVERS[:2])),
            ("torch_resnet50", "bert_graph+recommender"),
        ),
        (*ALONE, "slices", "cudasched"),
        BARE,
        BARE_SERVERS,
    ),
    "ablation": Scene(
        tuple((name, SERVERS[0]) for name in ("torch_llama_layers", "whole_step", "torch_lstm", "torch_resnet50")),
        (*ALONE, *ABLATION),
        BARE,
    ),
}


class PreemptFleet(Fleet):
    """The processes of the arms; a server may run outside."""

    modes: Mapping[str, Mode] = {
        "plain": Mode(managed=False),
        **{f"{arm}_bare": Mode(managed=False, mps=True, program=environment) for arm, environment in MPS.items()},
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
    """Does the missing cells of scenes."""

    known = PROGRAMS
    scenes = SCENES
    fleet_type = PreemptFleet
    named = True

    def __init__(self, session: Session, fleet: Fleet) -> None:
        lengths = [length for length in session.options.lengths.split(",") if length]
        if not all(length.isdigit() for length in lengths):
            raise HarnessError(f"--lengths: us, by commas, not {session.options.lengths}")
        own = {f"slices_{us}": Mode(environment={"CUDASCHED_TIME_SLICE_US": us}) for us in lengths}
        self.lengths = list(own)
        fleet.modes = {**fleet.modes, **own}
        self.arms = arms_of([*(arm for scene in SCENES.values() for arm in scene.arms + scene.optional), *self.lengths])
        super().__init__(session, fleet)

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        return float(self.options.eager_rate if server in EAGER_SERVERS else self.options.rate)

    def seconds(self, rates_hz: Sequence[float]) -> float:
        """As long as the requests of a cell take."""
        return self.options.seconds or round(
            self.options.requests * SPARE / min(rates_hz, default=self.options.rate), 2
        )

    def arms_of(self, scene: str) -> Sequence[str]:
        """With time slices of certain lengths beside eager servers."""
        return [*SCENES[scene].arms, *self.lengths] if scene == "eager" else SCENES[scene].arms

    def early_s(self, cell: Cell) -> float:
        """Where both know of one another, what is found out of requests with many launches takes seconds."""
        both = any(self.fleet.modes[server.mode].managed for server in self._servers(cell))
        graphs = all(name.endswith("_graph") for name in cell.latency.split("+"))
        return min(EARLY_S, cell.seconds) if both and not graphs and cell.arm != "before" else 0.0

    def _servers(self, cell: Cell) -> list[Place]:
        found = super()._servers(cell)
        return [Place("server", place.name, "plain") for place in found] if cell.arm in self.lengths else found


def written(cells: CellFile, out: Path, soak: Sequence[Path] = ()) -> None:
    """Writes rows and figures of cells, and prints them."""
    made = results(cells)
    write(cells, out, made, figures(made, soak))


def write(cells: CellFile, out: Path, made: Results, found: Results) -> None:
    """Writes rows, and figures beside them, and prints both."""
    report(cells, out, made, (every_table,))
    if found.rows:
        found.write(out.with_name(f"{out.stem}_figures.json"))
        print(core_table(found))


def preempt(about: str, groups: Iterable[str], **usual: object) -> Benchmark:
    """The declaration of scenes: what may be named by `--only`, and settings by default."""
    return Benchmark(
        about=about,
        groups=dict.fromkeys(groups, PreemptRunner.measure),
        whole=PreemptRunner.measure,
        written=written,
        settings={
            **settings("main", (0.0, 2.0)),
            "rate": RATE_HZ,
            "eager_rate": EAGER_RATE_HZ,
            "requests": REQUESTS,
            "lengths": "",
            **usual,
        },
    )


BENCHMARK = preempt("programs of long kernels beside servers, with time slices of their own and without", PROGRAMS)
MAIN = preempt(
    "12 programs beside 3 servers in every arm; --only PROGRAM/SERVER is a pair",
    ("/".join(pair) for pair in SCENES["main"].pairs),
    rate=MAIN_RATE_HZ,
)
