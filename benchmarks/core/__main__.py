"""Measures the figures of benchmarks/results/core.json; a rerun does what is missing.

    python -m benchmarks.core --out benchmarks/results/core.json --limit-s 590
    python -m benchmarks.core --out benchmarks/results/core.json --only ddp
    python -m benchmarks.core --rehearse --out /tmp/core.json

What is measured is kept after each run of programs in NAME.cells beside the results. Groups:

    readme_example  a server and a trainer in one process, in regions, making no streams (readme_example.py)
    backlog         twenty starts of a trainer that never synchronises, and then of a server (joining_server.py)
    launcher        CPU time of the launcher thread beside transformer training, with the gate on and off, and requests
                    beside training whose launcher sleeps and beside training whose launcher spins, in turns
    ddp             training across two GPUs, a latency client on each; left out where there are not two
    ci              how long CI took: --ci-s, or --ci-log with what scripts/test.sh printed

A figure that misses its goal says what limits it: `--limited-by FIGURE=TEXT` tells; without that it is `not explained
yet`. The exit status is 0 when all groups have their figures, 3 when time ran out first, 1 when a measurement failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cudasched.demo.harness import (
    CUDASCHED,
    HEAD_START_S,
    Backend,
    Child,
    HarnessError,
    Pool,
    Run,
    WorkerSpec,
    percentile,
)

from benchmarks import meta
from benchmarks.breadth.__main__ import counted, per_second
from benchmarks.colocation.__main__ import TIME_RAN_OUT
from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.colocation.frame import interrupt
from benchmarks.results.schema import FigureRow, Results
from benchmarks.store import Store

HERE = Path(__file__).parent
BREADTH = HERE.parent / "breadth"
RATE_HZ = 60.0
START_TIMEOUT_S = 180.0
ANSWER_S = 60.0
CLOSING_S = 5.0
#: A program of the breadth benchmark and the simulated load that stands for it in a rehearsal.
SIMULATED = {"transformers_llama": "transformer", "torch_long_kernels": "gemm", "torch_ddp_resnet50": "resnet50"}
NEVER = 10**9
#: How long the trainer of a backlog runs by itself before the server joins, s.
BACKLOG_S = 1.0
#: Its launches that are timed for the bound: a GPU is faster over its first milliseconds than it can be for long.
SUSTAINED_STEPS = 1000
#: From the server's first request to what is measured.
JOIN_S = 0.15
#: Processes of a backlog that are built at once, while the GPU is idle: so many starts.
BATCH = 10
#: Training that has not come to a reading of its loss for so long hangs, s.
HANG_S = 30.0

Better = Literal["less", "more"]
#: The figures in the order of the results: the goal, and whether less or more is better.
GOALS: dict[str, tuple[float, Better]] = {
    "readme_example_p99_ratio": (1.25, "less"),
    "readme_example_best_effort": (0.97, "more"),
    "backlog_pooled_p99_over_bound": (1.05, "less"),
    "backlog_worst_p99_over_bound": (1.3, "less"),
    "backlog_untracked": (0.0, "less"),
    "ddp_p99_ratio": (1.6, "less"),
    "ddp_best_effort": (0.9, "more"),
    "launcher_cpu_gated": (0.25, "less"),
    "launcher_cpu_busy": (0.25, "less"),
    "launcher_cpu_spinning": (0.0, "more"),  # no goal: it shows that the one beside which the other is measured spins
    "launcher_p50_of_spinning": (1.03, "less"),
    "launcher_p99_of_spinning": (1.03, "less"),
    "ci_s": (1200.0, "less"),
}

Done = Mapping[str, Any]
"""What was measured, by GROUP/PART."""
Found = dict[str, tuple[float, float, float, int]]
"""Figures: the value, the least and the most of its parts, and of how many requests, starts or seconds it is made."""


class OutOfTimeError(Exception):
    """The limit would be passed."""


class Lab:
    """Starts programs, and ends what is left of them; knows what time is left."""

    def __init__(self, backend: Backend, options: argparse.Namespace, store: Store) -> None:
        self.backend, self.options, self.store = backend, options, store
        self.began = time.monotonic()
        self.simulated = backend.name == "simulated"
        self._children: list[Child] = []
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="cudasched-core-", dir=shared))

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(
        self,
        script: Path,
        *arguments: str,
        client_class: str | None = None,
        imports_cudasched: bool = False,
        table: str = "shared",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a script: bare, under `cudasched run` with a class, or with cudasched imported by itself.

        Args:
            script: To be run by path.
            arguments: Its own.
            client_class: Of `cudasched run`; None without that.
            imports_cudasched: It does.
            table: Those under cudasched with the same one meet.
            environment: Beside what all have.
        """
        hooked = client_class is not None or imports_cudasched
        command = [sys.executable, str(script), *arguments]
        if client_class is not None:
            command = [*CUDASCHED, "run", "--class", client_class, "--", *command]
        variables = self.backend.environment(hooked)
        if hooked:
            directory = self.scratch / table
            directory.mkdir(mode=0o700, exist_ok=True)
            variables["CUDASCHED_RUN_DIR"] = str(directory)
        name = " ".join([script.stem, *arguments[:1], client_class or ("imports cudasched" if hooked else "bare")])
        child = Child(name, command, {**variables, **(environment or {})})
        self._children.append(child)
        return child

    def program(self, name: str, client_class: str | None = None, **more: Any) -> Child:
        """A program of the breadth benchmark; past its imports when `imported` has come."""
        read_every = more.pop("read_every", None)
        arguments = [SIMULATED[name], "--simulate"] if self.simulated else [name]
        if read_every:
            arguments += ["--read-every", str(read_every)]
        return self.start(BREADTH / "program.py", *arguments, client_class=client_class, **more)

    def server(self, client_class: str | None = None, **more: Any) -> Child:
        """The BERT graph server of the breadth benchmark."""
        return self.start(BREADTH / "server.py", "bert_graph", *self.simulate(), client_class=client_class, **more)

    def simulate(self) -> list[str]:
        """Options of a script that knows the simulated driver."""
        return ["--simulate", "--time-scale", f"{self.backend.scale:g}"] if self.simulated else []

    def end(self, *children: Child) -> None:
        """Kills programs; they are gone, with what they had on the GPU, when this returns."""
        for child in children:
            child.stop(grace_s=0.0)
            self._children.remove(child)

    def end_all(self) -> None:
        """The same for all that are left."""
        self.end(*list(self._children))

    def need(self, seconds: float) -> None:
        """Raises OutOfTimeError where the next part would pass the limit."""
        if self.options.limit_s is None:
            return
        if self.options.limit_s - CLOSING_S - (time.monotonic() - self.began) < seconds:
            raise OutOfTimeError

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def ask(child: Child, command: str, **arguments: Any) -> dict[str, Any]:
    """Sends a command and waits for its answer."""
    child.tell(command, **arguments)
    return child.answer(ANSWER_S)


def built(*children: Child) -> None:
    """Waits until programs have imported their libraries, then builds them all at once."""
    for child in children:
        child.answer(START_TIMEOUT_S, "imported")
    for child in children:
        child.tell("build")
    for child in children:
        child.answer(START_TIMEOUT_S, "ready")


def served(
    children: Sequence[Child], seconds: float, seed: int, head_start_s: float = HEAD_START_S
) -> list[list[float]]:
    """Has servers answer requests at random, all at once; returns the latencies of each, ms.

    A request that there was no time for counts with the time that it has waited.
    """
    start_ns = time.monotonic_ns() + int(head_start_s * 1e9)
    for number, child in enumerate(children):
        child.tell(
            "run",
            start_ns=start_ns,
            seconds=seconds,
            seed=seed + 1000 * number,
            rates_hz={"bert_graph": RATE_HZ},
            arrivals="poisson",
            hint_ms=0.0,
            slo_ms=0.0,
        )
    answers = [child.answer(seconds + ANSWER_S) for child in children]
    return [answer["latency"]["bert_graph"]["latency_ms"] for answer in answers]


def p99(values: Sequence[float]) -> float:
    """The P99 of latencies."""
    return percentile(values, 0.99)


# ---- one process, regions, no bound stream ----


def measure_readme_example(lab: Lab) -> None:
    """The server alone and the trainer alone without cudasched, and both in one process with regions, in turns."""
    options, done = lab.options, lab.store.done
    beside = "transformer"
    keys = [
        (part, repeat) for repeat in range(options.repeats) for part in ("latency_alone", "best_effort_alone", "both")
    ]
    missing = [(part, repeat) for part, repeat in keys if f"readme_example/{part}/{repeat}" not in done]
    if not missing:
        return
    lab.need(15.0 + options.seconds + 2)
    alone = {"latency_alone": WorkerSpec("bert_graph", None), "best_effort_alone": WorkerSpec(None, beside)}
    example: Child | None = None
    with Pool(lab.backend) as pool:
        if any(part == "both" for part, _ in missing):
            script = HERE / "readme_example.py"
            loads = ("--latency", "bert_graph", "--best-effort", beside)
            example = lab.start(script, *loads, *lab.simulate(), imports_cudasched=True, table="one_process")
        for error in pool.start([alone[part] for part, _ in missing if part in alone]).values():
            raise error
        if example:
            example.answer(START_TIMEOUT_S, "ready")
        for part, repeat in missing:
            lab.need(options.seconds + 2)
            if part in alone:
                result = pool.run([alone[part]], Run(options.seconds, f"{RATE_HZ:g}", seed=repeat))
            else:
                assert example is not None
                example.tell(
                    "run",
                    start_ns=time.monotonic_ns() + int(HEAD_START_S * 1e9),
                    seconds=options.seconds,
                    seed=repeat,
                    rates_hz={"bert_graph": RATE_HZ},
                    arrivals="poisson",
                    hint_ms=0.0,
                    slo_ms=0.0,
                )
                result = example.answer(options.seconds + ANSWER_S)
            latency = result["latency"].get("bert_graph", {}).get("latency_ms", [])
            per_s = result["best_effort_per_s"].get(beside)
            lab.store.keep(f"readme_example/{part}/{repeat}", {"latency_ms": latency, "per_s": per_s})
            lab.say(f"readme_example {part} {repeat}: {brief(latency)} {f'{per_s:.1f}/s' if per_s else ''}")
    lab.end_all()


def find_readme_example(done: Done) -> Found:
    """P99 over alone and best effort of what is left, each a median over the repeats."""
    alone, trained, both = (
        _parts(done, f"readme_example/{part}/") for part in ("latency_alone", "best_effort_alone", "both")
    )
    if not (alone and trained and both):
        return {}
    alone_p99 = statistics.median(p99(part["latency_ms"]) for part in alone)
    duty = RATE_HZ * statistics.median(statistics.fmean(part["latency_ms"]) for part in alone) / 1e3
    alone_per_s = statistics.median(part["per_s"] for part in trained)
    ratios = [p99(part["latency_ms"]) / alone_p99 for part in both]
    kept = [part["per_s"] / alone_per_s / (1 - duty) for part in both]
    requests = sum(len(part["latency_ms"]) for part in both)
    return {
        "readme_example_p99_ratio": (statistics.median(ratios), min(ratios), max(ratios), requests),
        "readme_example_best_effort": (statistics.median(kept), min(kept), max(kept), len(kept)),
    }


# ---- a server that joins while a backlog is on the GPU ----


def measure_backlog(lab: Lab) -> None:
    """What the bound needs, then the starts, built a batch at a time while the GPU is idle."""
    done, options = lab.store.done, lab.options
    if "backlog/kernels" not in done:
        lab.need(20.0)
        trainer = lab.program("torch_long_kernels", read_every=NEVER)
        built(trainer)
        recorded = ask(trainer, "kernels", steps=SUSTAINED_STEPS)
        lab.store.keep("backlog/kernels", recorded["kernel_us"])
        lab.end(trainer)
    missing = [start for start in range(options.starts) if f"backlog/start/{start}" not in done]
    while missing:
        batch, missing = missing[: options.batch], missing[options.batch :]
        start_s = BACKLOG_S + 2 * (JOIN_S + options.join_seconds) + 1.5
        lab.need(15.0 + start_s)
        trainers = {
            start: lab.program("torch_long_kernels", "best-effort", read_every=NEVER, table=f"backlog_{start}")
            for start in batch
        }
        servers = {start: _joining(lab, f"backlog_{start}") for start in batch}
        for server in servers.values():
            server.answer(START_TIMEOUT_S, "ready")
        built(*trainers.values())
        for start in batch:
            lab.need(start_s)
            trainer, server = trainers[start], servers[start]
            ask(trainer, "start")
            time.sleep(BACKLOG_S)
            (latency,) = served([server], options.join_seconds, seed=start, head_start_s=JOIN_S + 0.05)
            state = ask(trainer, "state")
            lab.end(trainer)
            # The same requests once more, with the same server alone: what the bound is made of.
            (alone,) = served([server], options.join_seconds, seed=start, head_start_s=JOIN_S + 0.05)
            kept = {"latency_ms": latency, "alone_ms": alone, "untracked": state["untracked_launches"]}
            kept |= {"off": state["off_reason"], "launches": state["best_effort_launches"]}
            lab.store.keep(f"backlog/start/{start}", kept)
            untracked = state["untracked_launches"]
            lab.say(f"backlog start {start}: {brief(latency)}, alone {brief(alone)}, {untracked} untracked")
            lab.end(server)


def _joining(lab: Lab, table: str) -> Child:
    script = HERE / "joining_server.py"
    return lab.start(script, "--join-s", f"{JOIN_S:g}", *lab.simulate(), imports_cudasched=True, table=table)


def find_backlog(done: Done) -> Found:
    """P99 from 150 ms after the server joined, of all starts together and of the worst, over the bound."""
    starts, kernels = _parts(done, "backlog/start/"), done.get("backlog/kernels")
    alone = [value for part in starts for value in part.get("alone_ms", [])]
    if not (alone and kernels):
        return {}
    bound = bound_p99_ms(alone, [(us, count) for us, count in kernels], 1.0, CONTEXT_SWITCH_MS)
    each = [p99(part["latency_ms"]) / bound for part in starts]
    pooled = [value for part in starts for value in part["latency_ms"]]
    untracked = [float(part["untracked"]) for part in starts]
    return {
        "backlog_pooled_p99_over_bound": (p99(pooled) / bound, min(each), max(each), len(pooled)),
        "backlog_worst_p99_over_bound": (max(each), min(each), max(each), len(each)),
        "backlog_untracked": (sum(untracked), min(untracked), max(untracked), len(starts)),
    }


# ---- the launcher's CPU time ----


#: The trainers, and what is in the environment of each.
LAUNCHERS: dict[str, dict[str, str]] = {"sleeps": {}, "spins": {"CUDASCHED_LAUNCHER_SPINS": "1"}}


def measure_launcher(lab: Lab) -> None:
    """The launcher's CPU time while a transformer trains: with no latency client there, then beside its requests.

    Beside requests two trainers take turns, one whose launcher sleeps and one whose launcher spins, in one order and in
    the opposite one, with the same requests. The other one pauses; its launcher goes on as it does, in every turn.
    """
    options, done = lab.options, lab.store.done
    turns = [
        (name, pair)
        for pair in range(options.launcher_pairs)
        for name in (LAUNCHERS if pair % 2 == 0 else [*LAUNCHERS][::-1])
    ]
    turns = [(name, pair) for name, pair in turns if f"launcher/{name}/{pair}" not in done]
    if not turns and "launcher/busy" in done:
        return
    seconds = options.seconds
    lab.need(20.0 + seconds + 5)
    trainers = {
        name: lab.program("transformers_llama", "best-effort", table="launcher", environment=environment)
        for name, environment in LAUNCHERS.items()
    }
    server = lab.server("latency", table="launcher") if turns else None
    built(*trainers.values())
    if "launcher/busy" not in done:
        ask(trainers["sleeps"], "start")
        time.sleep(1.0)
        _count_launcher(lab, "busy", trainers["sleeps"], lambda: time.sleep(seconds))
        ask(trainers["sleeps"], "pause")
    if server is not None:
        built(server)
    for name, pair in turns:
        assert server is not None
        lab.need(seconds + 5)
        ask(trainers[name], "start")
        time.sleep(1.0)
        latency: list[float] = []
        _count_launcher(
            lab,
            f"{name}/{pair}",
            trainers[name],
            lambda: latency.extend(served([server], seconds, seed=pair)[0]),  # noqa: B023
            latency,
        )
        ask(trainers[name], "pause")
    lab.end_all()


def _count_launcher(
    lab: Lab, part: str, trainer: Child, meanwhile: Callable[[], object], latency: list[float] | None = None
) -> None:
    """Keeps what a trainer's launcher took while something went on, and the latencies that this has noted."""
    before, began = ask(trainer, "state"), time.monotonic()
    meanwhile()
    after, ended = ask(trainer, "state"), time.monotonic()
    told = counted(before, after)
    included = "launcher_driver_ns" not in told
    own_ns = told["launcher_cpu_ns"] - told.get("launcher_driver_ns", 0)
    cpu, launched = own_ns / 1e9 / (ended - began), told["best_effort_launches"] / (ended - began)
    kept = {"cpu": cpu, "launches_per_s": launched, "seconds": ended - began, "driver_calls_included": included}
    lab.store.keep(f"launcher/{part}", kept if latency is None else {**kept, "latency_ms": latency})
    note = ", driver calls included" if included else ""
    lab.say(f"launcher {part}: {cpu:.0%} of a core{note}, {launched:.0f} launches/s {brief(latency or [])}")


def find_launcher(done: Done) -> Found:
    """The share of a core; percentiles of requests beside the launcher that sleeps over those beside the other."""
    found: Found = {}
    beside = {name: _parts(done, f"launcher/{name}/") for name in LAUNCHERS}
    measured = {"gated": beside["sleeps"], "busy": _parts(done, "launcher/busy"), "spinning": beside["spins"]}
    for name, parts in measured.items():
        if parts:
            cpu = [part["cpu"] for part in parts]
            seconds = round(sum(part["seconds"] for part in parts))
            found[f"launcher_cpu_{name}"] = (statistics.fmean(cpu), min(cpu), max(cpu), seconds)
    pairs = [
        tuple(done[f"launcher/{name}/{pair}"]["latency_ms"] for name in LAUNCHERS)
        for pair in range(max(map(len, beside.values())))
        if all(f"launcher/{name}/{pair}" in done for name in LAUNCHERS)
    ]
    if pairs:
        asleep, spinning = ([value for pair in pairs for value in pair[side]] for side in range(len(LAUNCHERS)))
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            each = [percentile(ours, share) / percentile(theirs, share) for ours, theirs in pairs]
            ratio = percentile(asleep, share) / percentile(spinning, share)
            found[f"launcher_{name}_of_spinning"] = (ratio, min(each), max(each), len(asleep))
    return found


# ---- several GPUs ----


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here, one a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    listed = meta.nvidia_smi_lines("index")
    return [name for name in listed if name]


def measure_ddp(lab: Lab) -> None:
    """Training across two GPUs and a server on each: each kind alone, then both under cudasched, training first."""
    options, done = lab.options, lab.store.done
    devices = ["0", "1"] if lab.simulated else gpus()[:2]
    if len(devices) < 2:
        lab.say("ddp: left out, there are not two GPUs")
        return
    alone_s = max(10.0, options.seconds) if not lab.simulated else options.seconds
    if "ddp/latency_alone" not in done:
        lab.need(15.0 + alone_s)
        servers = [lab.server(environment={"CUDA_VISIBLE_DEVICES": device}) for device in devices]
        built(*servers)
        each = served(servers, alone_s, seed=0)
        lab.store.keep("ddp/latency_alone", each)
        lab.say(f"ddp latency_alone: {', '.join(map(brief, each))}")
        lab.end(*servers)
    if "ddp/best_effort_alone" not in done:
        lab.need(20.0 + alone_s)
        ranks = _ranks(lab, devices, None)
        per_s, _ = _trained(ranks[0], alone_s, lambda: time.sleep(alone_s + HEAD_START_S))
        lab.store.keep("ddp/best_effort_alone", per_s * lab.backend.scale)
        lab.say(f"ddp best_effort_alone: {per_s * lab.backend.scale:.1f}/s")
        lab.end(*ranks)
    for run in range(options.ddp_runs):
        if f"ddp/both/{run}" in done:
            continue
        lab.need(18.0 + options.ddp_seconds)
        ranks = _ranks(lab, devices, "best-effort")
        servers = [
            lab.server("latency", table="ddp", environment={"CUDA_VISIBLE_DEVICES": device}) for device in devices
        ]
        built(*servers)
        answers: list[list[list[float]]] = []
        per_s, gap_s = _trained(
            ranks[0],
            options.ddp_seconds,
            lambda: answers.append(served(servers, options.ddp_seconds, seed=1 + run)),  # noqa: B023
        )
        if gap_s > HANG_S:
            raise HarnessError(f"ddp: training came to no reading of its loss for {gap_s:.0f} s")
        states = [ask(rank, "state") for rank in ranks]
        kept = {"latency_ms": answers[0], "per_s": per_s * lab.backend.scale, "longest_gap_s": gap_s}
        kept["states"] = states
        lab.store.keep(f"ddp/both/{run}", kept)
        lab.say(
            f"ddp both {run}: {', '.join(map(brief, answers[0]))}, {kept['per_s']:.1f}/s, longest gap {gap_s:.1f} s, "
            f"{sum(state.get('unmet_collectives', 0) for state in states)} unmet collectives"
        )
        lab.end(*ranks, *servers)


def _ranks(lab: Lab, devices: Sequence[str], client_class: str | None) -> list[Child]:
    """Training across the GPUs, running: a process on each, with what torchrun puts into its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(len(devices)):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(len(devices)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
        }
        ranks.append(lab.program("torch_ddp_resnet50", client_class, table="ddp", environment=environment))
    built(*ranks)
    for child in ranks:
        ask(child, "start")
    return ranks


def _trained(first: Child, seconds: float, meanwhile: Callable[[], object]) -> tuple[float, float]:
    """Steps a second of the first rank in the seconds after the head start, and its longest time without a reading."""
    start_ns = time.monotonic_ns() + int(HEAD_START_S * 1e9)
    until_ns = start_ns + int(seconds * 1e9)
    meanwhile()
    readings = ask(first, "readings", from_ns=start_ns, until_ns=until_ns)["readings"]
    times_ns = [start_ns, *(at for at, _ in readings), until_ns]
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(times_ns)) / 1e9
    return per_second(readings), gap_s


def find_ddp(done: Done) -> Found:
    """The worst GPU's P99 over its own alone, and the least of the runs' training of what both servers leave."""
    runs, alone = _parts(done, "ddp/both/"), done.get("ddp/latency_alone")
    alone_per_s = done.get("ddp/best_effort_alone")
    if not (runs and alone and alone_per_s):
        return {}
    duties = [RATE_HZ * statistics.fmean(values) / 1e3 for values in alone]
    ratios = [p99(values) / p99(own) for part in runs for values, own in zip(part["latency_ms"], alone, strict=True)]
    kept = [part["per_s"] / alone_per_s / (1 - sum(duties)) for part in runs]
    requests = sum(len(values) for part in runs for values in part["latency_ms"])
    return {
        "ddp_p99_ratio": (max(ratios), min(ratios), max(ratios), requests),
        "ddp_best_effort": (min(kept), min(kept), max(kept), len(runs)),
    }


# ---- CI ----


def measure_ci(lab: Lab) -> None:
    """What was told."""
    seconds = lab.options.ci_s
    if lab.options.ci_log is not None:
        said = re.findall(r"^(?:passed|FAILED): .* \((\d+) s\)$", lab.options.ci_log.read_text(), re.MULTILINE)
        if not said:
            raise HarnessError(f"{lab.options.ci_log}: not what scripts/test.sh prints at its end")
        seconds = float(said[-1])
    if seconds is not None:
        lab.store.keep("ci/seconds", seconds)


def find_ci(done: Done) -> Found:
    """The seconds."""
    seconds = done.get("ci/seconds")
    return {"ci_s": (seconds, seconds, seconds, 1)} if seconds is not None else {}


GROUPS: dict[str, tuple[Callable[[Lab], None], Callable[[Done], Found]]] = {
    "readme_example": (measure_readme_example, find_readme_example),
    "backlog": (measure_backlog, find_backlog),
    "launcher": (measure_launcher, find_launcher),
    "ddp": (measure_ddp, find_ddp),
    "ci": (measure_ci, find_ci),
}


def figures(done: Done, limited_by: Mapping[str, str]) -> list[FigureRow]:
    """A row for each figure that was measured.

    Args:
        done: What was measured.
        limited_by: For figures that miss their goal, what limits them.
    """
    found: Found = {}
    for _, find in GROUPS.values():
        found |= find(done)
    rows = []
    for name, (goal, better) in GOALS.items():
        if name not in found:
            continue
        value, low, high, count = found[name]
        why = limited_by.get(name, "")
        row = FigureRow.judged(
            figure=name, value=value, goal=goal, better=better, low=low, high=high, n=count, limited_by=why
        )
        rows.append(row)
    return rows


def _parts(done: Done, prefix: str) -> list[Any]:
    return [value for key, value in done.items() if key.startswith(prefix)]


def brief(latency_ms: Sequence[float]) -> str:
    """Three percentiles of latencies, and how many these are; empty where there are none."""
    if not latency_ms:
        return ""
    shares = "/".join(f"{percentile(latency_ms, share):.2f}" for share in (0.5, 0.95, 0.99))
    return f"P50/P95/P99 {shares} ms of {len(latency_ms)}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, by commas, of {', '.join(GROUPS)}")
    parser.add_argument("--limit-s", type=float, help="stop before so much time has passed")
    parser.add_argument("--seconds", type=float, help="of each part (8; 2 in a rehearsal)")
    parser.add_argument("--repeats", type=int, help="of the README's example (2; 1 in a rehearsal)")
    parser.add_argument("--starts", type=int, help="of a trainer with a backlog (20; 2 in a rehearsal)")
    parser.add_argument("--batch", type=int, default=BATCH, help="so many starts are built at once")
    parser.add_argument("--join-seconds", type=float, default=1.5, help="what is measured of each start")
    parser.add_argument("--launcher-pairs", type=int, help="turns of each launcher (6; 1 in a rehearsal)")
    parser.add_argument("--ddp-seconds", type=float, help="of each run on two GPUs (240; 3 in a rehearsal)")
    parser.add_argument("--ddp-runs", type=int, help="so many (2; 1 in a rehearsal)")
    parser.add_argument("--ci-s", type=float, help="how long CI took")
    parser.add_argument("--ci-log", type=Path, help="or what scripts/test.sh printed")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="what limits a figure")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in GROUPS]
    if unknown or not options.only:
        parser.error(f"--only: {', '.join(unknown) or 'none named'}; there are {', '.join(GROUPS)}")
    defaults = {
        "seconds": (8.0, 2.0),
        "repeats": (2, 1),
        "starts": (20, 2),
        "launcher_pairs": (6, 1),
        "ddp_seconds": (240.0, 3.0),
        "ddp_runs": (2, 1),
    }
    for name, (measured, rehearsed) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, rehearsed if options.simulate else measured)
    limits = [text.partition("=") for text in options.limited_by]
    if any(name not in GOALS or not text for name, _, text in limits):
        parser.error(f"--limited-by: FIGURE=TEXT, of {', '.join(GOALS)}")
    options.limited_by = {name: text for name, _, text in limits}
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    options = parse(sys.argv[1:] if arguments is None else list(arguments))
    signal.signal(signal.SIGTERM, interrupt)
    backend: Backend | None = None
    status = 0
    try:
        backend = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
        store = Store(options.out.with_suffix(".cells"), meta.describe(options.simulate, options.commit))
        with Lab(backend, options, store) as lab:
            for name in options.only:
                try:
                    GROUPS[name][0](lab)
                except OutOfTimeError:
                    lab.say(f"{name}: time ran out; run again to go on")
                    status = status or TIME_RAN_OUT
                except (HarnessError, ValueError) as error:
                    lab.say(f"{name} failed: {error}")
                    status = 1
                finally:
                    lab.end_all()
    except (HarnessError, ValueError) as error:
        print(f"core: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("core: interrupted; what is done is kept", file=sys.stderr)
        return 130
    finally:
        if backend:
            backend.close()
    rows = figures(store.done, options.limited_by)
    if rows:
        made = Results(meta=store.meta, rows=rows)
        made.write(options.out)
        from benchmarks.tables import core_table

        print(core_table(made))
    print(f"results: {options.out}, measured: {store.path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
