"""Training across several GPUs beside servers on one and on two of them, in every arm, and beside servers that die.

A scene `gpus_N` for each N in 2, 4 and 8 that the machine has, or `--gpus` allows: `bert_graph` is on the first GPU,
`tensor_parallel_graph` on the first two. `tensor_parallel_eager`, the same without a graph, runs where `--servers`
names it. On four GPUs two runs at once measure `gpus_2`, a program each, and `merge` puts them together:

    CUDA_VISIBLE_DEVICES=0,1 python -m benchmarks run several_gpus --scene gpus_2 --only torch_ddp_resnet50 --out a.json

`kills` needs four GPUs. On two of them one server after another dies beside training, and the next one takes its
place; on the other two nothing disturbs the same training. Each run is a piece of `--kill-minutes`. The figures go into
NAME_figures.json.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from cudasched.demo.harness import Child, HarnessError

from benchmarks import meta
from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.lab.fleet import Fleet, Mode, Place
from benchmarks.lab.processes import (
    BREADTH,
    HANG_S,
    Processes,
    ask,
    built,
    in_processes,
    ranks_environment,
    serve,
    trained,
)
from benchmarks.lab.programs import Runner, Scene, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import OutOfTimeError, Session
from benchmarks.preempt.benchmark import ALONE, BOTH, OFF, SPARE, write
from benchmarks.preempt.summary import arms_of
from benchmarks.several_gpus.programs import PROGRAMS
from benchmarks.several_gpus.summary import HOOKED, KILLS, SERVERS, SIZES, figures, results

HERE = Path(__file__).parent
ARMS = (*ALONE, HOOKED, *BOTH)
#: Requests a second, of every server, and of those that are killed.
RATE_HZ, KILLED_RATE_HZ = 120.0, 300.0
#: Building a program's ranks in all modes, starting to measure kills, and how long each server lives, s.
BUILD_S, KILLS_START_S, LIFE_S = 25.0, 30.0, 2.0
#: GPUs beside which servers are killed, and readings of the loss before that, which have to be equal already.
KILL_GPUS, READINGS = 2, 3


@cache
def gpus(backend: str) -> Sequence[str]:
    """The names that CUDA_VISIBLE_DEVICES may have; in a rehearsal all ranks share one device."""
    return [str(number) for number in range(2 * KILL_GPUS)] if backend == "simulated" else meta.gpus()


def _scene(size: int) -> Scene:
    modes = {arm: f"{'plain' if arm in ALONE else 'slices' if arm == HOOKED else arm}_{size}" for arm in ARMS}
    pairs = tuple(itertools.product(PROGRAMS, SERVERS))
    return Scene(pairs, ARMS, modes, server_modes={**modes, "slices": f"plain_{size}"})


class SeveralFleet(Fleet):
    """Programs on as many GPUs as their mode says, servers on as many as they need."""

    modes: Mapping[str, Mode] = {
        f"{name}_{size}": mode
        for size in SIZES
        for name, mode in {
            "plain": Mode(managed=False),
            "before": Mode(environment=OFF),
            "slices": Mode(),
            "cudasched": Mode(),
        }.items()
    }
    script = HERE / "programs.py"
    options = ("--warm-up", "4")
    start_timeout_s = 100.0
    programs = tuple(PROGRAMS)

    def _command(self, place: Place) -> list[str]:
        own = str(HERE / "servers.py") if SERVERS.get(place.name, 1) > 1 and self.backend.name == "torch" else None
        return [own or word if word == str(BREADTH / "server.py") else word for word in super()._command(place)]

    def _environment(self, place: Place) -> dict[str, str]:
        count = SERVERS.get(place.name) or int(place.mode.rpartition("_")[2])
        chosen = gpus(self.backend.name)[:count]
        more = ranks_environment(chosen) if count > 1 else {"CUDA_VISIBLE_DEVICES": chosen[0]}
        return {**super()._environment(place), **more}


class SeveralRunner(Runner):
    """Does the missing cells of scenes."""

    known = PROGRAMS
    scenes: Mapping[str, Scene] = {f"gpus_{size}": _scene(size) for size in SIZES}
    arms = arms_of(ARMS)
    fleet_type = SeveralFleet

    def __init__(self, session: Session, fleet: Fleet) -> None:
        most = min(len(gpus(session.backend.name)), session.options.gpus or max(SIZES))
        session.options.scene = session.options.scene or ",".join(f"gpus_{size}" for size in SIZES if size <= most)
        if most < min(SIZES):
            raise HarnessError(f"this needs {min(SIZES)} GPUs; there are {most} (CUDA_VISIBLE_DEVICES, --gpus)")
        super().__init__(session, fleet)

    def seconds(self, rates_hz: Sequence[float]) -> float:
        """As long as the requests of a cell take; without requests, half of that."""
        share = 1.0 if rates_hz else 0.5
        return self.options.seconds or round(share * self.options.requests * SPARE / self.options.rate, 2)

    def build_s(self, program: str) -> float:
        """The time to build the ranks of all modes, about."""
        return BUILD_S


def measure(session: Session) -> None:
    """Measures the chosen groups; raises OutOfTimeError."""
    if {*PROGRAMS} & {name.partition("/")[0] for name in session.options.only}:
        SeveralRunner.measure(session)
    if KILLS in session.options.only:
        in_processes(measure_kills)(session)


def measure_kills(lab: Processes) -> None:
    """A piece of training beside servers that are killed, as long as time is left; raises OutOfTimeError."""
    session, devices = lab.session, gpus(lab.backend.name)
    if len(devices) < 2 * KILL_GPUS:
        session.say(f"{KILLS}: left out, there are not {2 * KILL_GPUS} GPUs")
        return
    pieces = [each.result for each in session.cells.outcomes.values() if each.cell.arm == KILLS and each.result]
    left_s = 60 * session.options.kill_minutes - sum(piece["seconds"] for piece in pieces)
    if left_s <= 0:
        return
    session.need(KILLS_START_S + min(left_s, 10 * LIFE_S))
    seconds = min(left_s, session.left_s() - KILLS_START_S)
    scene, rate = f"gpus_{KILL_GPUS}", f"{KILLED_RATE_HZ:g}"
    cell = Cell(KILLS, "bert_graph", "torch_fsdp_llama", "poisson", rate, 0.0, 0.0, len(pieces), scene=scene)
    session.measure_cell(cell, partial(killed, lab, devices, seconds))
    if seconds < left_s:
        raise OutOfTimeError


def killed(lab: Processes, devices: Sequence[str], seconds: float) -> dict[str, Any]:
    """Trains beside servers that are killed, and elsewhere beside none, and compares all losses that were read."""

    def job(first: int, table: str) -> Child:
        given = ("resnet50", "--simulate") if lab.session.rehearsal else ("torch_fsdp_llama",)
        environment = ranks_environment(devices[first : first + KILL_GPUS]) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        return lab.start(HERE / "programs.py", *given, client_class="best-effort", table=table, environment=environment)

    def server(number: int) -> Child:
        environment = {"CUDA_VISIBLE_DEVICES": devices[number % KILL_GPUS]}
        return lab.server(client_class="latency", table=KILLS, environment=environment)

    def kill() -> None:
        until, waiting = time.monotonic() + seconds, [server(0), server(1)]
        while time.monotonic() < until:
            waiting.append(server(kept["kills"] + 2))  # imports its libraries meanwhile
            one = waiting.pop(0)
            built(one)
            serve([one], 10 * LIFE_S, seed=kept["kills"], rate_hz=KILLED_RATE_HZ)
            time.sleep(LIFE_S)
            lab.end(one)
            kept["kills"] += 1

    def losses() -> list[list[float]]:
        found = [ask(child, "losses")["losses"] for child in jobs]
        return [list(pair) for pair in zip(*found, strict=False)]

    kept: dict[str, Any] = {"seconds": seconds, "kills": 0, "gap_s": 0.0, "readings": 0, "changed": 0, "problem": ""}
    jobs = job(0, KILLS), job(KILL_GPUS, "undisturbed")
    built(*jobs)
    for child in jobs:
        ask(child, "start")
    until = time.monotonic() + HANG_S
    while len(pairs := losses()) < READINGS and time.monotonic() < until:
        time.sleep(LIFE_S / 10)
    if len(pairs) < READINGS or any(ours != theirs for ours, theirs in pairs):
        raise HarnessError(f"no equal losses of two trainings without a server: {pairs}")
    began = time.monotonic()
    try:
        kept["per_s"], kept["gap_s"] = trained(jobs[0], seconds, kill)
        pairs = losses()
        kept |= {"readings": len(pairs), "changed": sum(ours != theirs for ours, theirs in pairs)}
        kept["unmet_collectives"] = ask(jobs[0], "state")["unmet_collectives"]
    except (HarnessError, ValueError) as error:
        kept |= {"problem": str(error), "seconds": time.monotonic() - began}
    lab.session.say(f"{KILLS}: {kept}")
    return kept


def written(cells: CellFile, out: Path) -> None:
    """Writes rows and figures of cells, and prints them."""
    made = results(cells)
    write(cells, out, made, figures(made, cells))


BENCHMARK = Benchmark(
    about="training across 2, 4 and 8 GPUs beside servers on one and on two of them",
    groups=dict.fromkeys((*PROGRAMS, KILLS), measure),
    whole=measure,
    written=written,
    settings={
        **settings("", (0.0, 2.0)),
        "servers": "bert_graph,tensor_parallel_graph",
        "gpus": (0, 2),
        "rate": RATE_HZ,
        "requests": 1000,
        "kill_minutes": (10.0, 0.2),
    },
)
