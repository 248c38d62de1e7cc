"""Best-effort programs beside servers in every arm: one runner, one fleet, a scene for each question.

Servers are started once and kept. `--scene` takes several by commas:

    main       12 programs beside 3 servers; `run main` is this scene alone, with results of its own
    eager      host-bound servers
    eager_mps  the same with the policy `harvest`, in two processes and under MPS
    outside    the server is another user's, with a root, /tmp and /dev/shm of its own; `slices_inside` is as in main
    several    two best-effort programs beside a server, and one beside two servers
    libraries  programs of torchvision, transformers, CuPy and JAX, in two processes and under MPS
    graphs     programs of CUDA graphs: cut, whole, under MPS and in the server's process
    kinds      kinds of kernels under MPS, in the server's process, with hints, and with a latency target (`slack`)
    ablation   all under cudasched, with other settings an arm; results of their own, preempt_ablation.json

In the arms `slices` best effort alone is under cudasched, in `before` and `cudasched` both are, `before` without time
slices of its own. The figures that are promised go into NAME_figures.json; `merge preempt --with FILE...`
adds those of `tests.soak.slices`.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HarnessError

from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.graphs.building import while_building
from benchmarks.graphs.loads import LOADS
from benchmarks.lab.fleet import Fleet, Mode, Place
from benchmarks.lab.programs import Runner, Scene, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import report
from benchmarks.preempt.programs import LIBRARIES, PROGRAMS, RUNNABLE
from benchmarks.preempt.summary import arms_of, every_table, figures, results
from benchmarks.results.schema import Results
from benchmarks.tables import core_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = ("bert_graph", "vit_graph", "recommender")
EAGER_SERVERS = ("bert_eager", "resnet50_b4", "decode_short")
#: Requests a second of those, of the eager ones, and of those in `main`.
RATE_HZ, EAGER_RATE_HZ, MAIN_RATE_HZ = 150.0, 30.0, 120.0
#: A server that keeps the GPU busy for half of the time: its requests a second, and their latency target, ms.
DECODER, DECODER_RATE_HZ, DECODER_SLO_MS = "gpt_decode", 13.0, 76.0
#: Of a cell; a Poisson process is short of its mean by less than the share, with the seeds of the first repeats.
REQUESTS, SPARE = 1000, 1.06
#: Requests of an eager server come so long before those that are measured.
EARLY_S = 3.0
OFF = {"CUDASCHED_TIME_SLICE_US": "off"}
HARVEST, SLACK = {"CUDASCHED_POLICY": "harvest"}, {"CUDASCHED_POLICY": "slack"}
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
#: Best effort alone under cudasched.
HOOKED = "best_effort_alone_hooked"
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
    "latency_alone_hint": "plain",
    HOOKED: "slices",
    "best_effort_alone_mps": "cudasched_mps",
    "cudasched_one_process_hint": "cudasched_one_process",
    "slices_inside": "slices",
}
#: The server is bare beside a program of which best effort alone is under cudasched.
BARE_SERVERS = {**BARE, "slices": "plain", "slices_inside": "plain"}
#: Modes of cudasched in which slices are off or not alone; arms have their names.
SHARED = {
    "cudasched_mps": Mode(mps=True),
    "cudasched_one_process": Mode(inside=SERVERS[0]),
    "cudasched_two_processes_whole": Mode(environment=OFF | {"CUDASCHED_GRAPH_SLICES": "off"}),
    "cudasched_harvest": Mode(environment=HARVEST),
    "cudasched_mps_harvest": Mode(mps=True, environment=HARVEST),
    "cudasched_two_processes_hint": Mode(regions=True),
    "cudasched_mps_hint": Mode(mps=True, regions=True),
    "cudasched_two_processes_slack": Mode(environment=SLACK, regions=True),
    "cudasched_mps_slack": Mode(mps=True, environment=SLACK, regions=True),
}
#: Arms in which graphs are cut beside requests.
CUT = ("before", "cudasched_mps", "cudasched_one_process")
HINTED = tuple(f"cudasched_{mode}_hint" for mode in ("two_processes", "mps", "one_process"))
FEW = ("torch_llama_layers", "torch_resnet50", "torch_long_kernels")
FEW_LIBRARIES = ("torchvision_resnet50", "transformers_llama", "torch_recommender", "jax_transformer")
OTHER_SERVERS = ("vit_graph", "bert_eager", "recommender")
SCENES = {
    "main": Scene(
        tuple(itertools.product(PROGRAMS, SERVERS)),
        ("latency_alone", "best_effort_alone", HOOKED, "processes", "slices", "cudasched", *MPS),
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
    "eager_mps": Scene(
        tuple(itertools.product(FEW, EAGER_SERVERS)),
        (*ALONE, HOOKED, "mps_priority", "cudasched", "cudasched_harvest", "cudasched_mps", "cudasched_mps_harvest"),
        BARE,
        profiled=True,
    ),
    "libraries": Scene(
        (*itertools.product(LIBRARIES, SERVERS[:1]), *itertools.product(FEW_LIBRARIES, OTHER_SERVERS)),
        (*ALONE, HOOKED, "mps_priority", "slices", "cudasched", "cudasched_mps"),
        BARE,
        BARE_SERVERS,
        profiled=True,
    ),
    "graphs": Scene(
        tuple(itertools.product(LOADS, SERVERS[:1])),
        (*ALONE, "best_effort_alone_mps", "cudasched", *CUT, "cudasched_two_processes_whole"),
        BARE,
        profiled=True,
    ),
    "kinds": Scene(
        tuple(itertools.product((*FEW, "torch_small_kernels"), SERVERS[:1])),
        (*ALONE, "cudasched", "cudasched_mps", "cudasched_one_process", "latency_alone_hint", *HINTED),
        BARE,
        profiled=True,
    ),
    "engines": Scene(tuple(itertools.product(FEW, ["bert_onnx"])), (*ALONE, "slices", "cudasched"), BARE, BARE_SERVERS),
    "slack": Scene(
        (("torch_llama_layers", DECODER),),
        (*ALONE, "cudasched_two_processes_slack", "cudasched_mps_slack"),
        BARE,
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
        **SHARED,
        **{name: Mode(environment=environment) for name, environment in ABLATION.items()},
    }
    script = HERE / "programs.py"
    options = ("--warm-up", "4")
    start_timeout_s = 100.0
    programs = tuple(RUNNABLE)
    simulated = tuple(LOADS)
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

    known = RUNNABLE
    scenes: Mapping[str, Scene] = SCENES
    arms = arms_of(arm for scene in SCENES.values() for arm in scene.arms + scene.optional)
    fleet_type: type[Fleet] = PreemptFleet

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        if server == DECODER:
            return DECODER_RATE_HZ
        return float(self.options.eager_rate if server in EAGER_SERVERS else self.options.rate)

    def cell(self, arm: str, server: str, program: str) -> Cell:
        """The decoder's requests come at equal distances, and have a latency target."""
        made = super().cell(arm, server, program)
        return dataclasses.replace(made, arrivals="periodic", slo_ms=DECODER_SLO_MS) if server == DECODER else made

    def seconds(self, rates_hz: Sequence[float]) -> float:
        """As long as the requests of a cell take."""
        return self.options.seconds or round(
            self.options.requests * SPARE / min(rates_hz, default=self.options.rate), 2
        )

    def early_s(self, cell: Cell) -> float:
        """Where both know of one another, seconds are needed to know requests with many launches, and to cut graphs."""
        both = any(self.fleet.modes[server.mode].managed for server in self._servers(cell))
        in_graphs = all(name.endswith("_graph") for name in cell.latency.split("+"))
        known = self.name != "graphs" and (in_graphs or cell.arm == "before")
        return min(EARLY_S, cell.seconds) if both and not known else 0.0

    def _counted(self, cell: Cell, processes: Sequence[Place], servers: Sequence[Place]) -> dict[str, Any]:
        """With the requests that meet the building of slices, where graphs are cut."""
        result = super()._counted(cell, processes, servers)
        if self.name == "graphs" and cell.arm in CUT:
            self.fleet.ask(processes[0], "pause")
            result["building"] = while_building(self, cell, processes[0], servers[0])
        return result


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
            **usual,
        },
    )


BENCHMARK = preempt("programs beside servers in every arm; --scene names the question", RUNNABLE)
MAIN = preempt(
    "12 programs beside 3 servers in every arm; --only PROGRAM/SERVER is a pair",
    ("/".join(pair) for pair in SCENES["main"].pairs),
    rate=MAIN_RATE_HZ,
)
