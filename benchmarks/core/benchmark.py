"""The figures of benchmarks/results/core.json.

readme_example  a server and a trainer in one process, in regions, making no streams (breadth/server.py)
backlog         twenty starts of a trainer that never synchronises, and then of a server
launcher        CPU time of the launcher thread beside transformer training, with the gate on and off, and requests
beside training whose launcher sleeps and beside training whose launcher spins, in turns

Its rows `ddp` are of before `several_gpus`, its row `ci_s` of before `reach`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cudasched.demo.harness import Child, Pool, Run, WorkerSpec, percentile

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.lab.processes import Processes, ask, built, in_processes, latencies, p99, pooled, served
from benchmarks.lab.programs import counted
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Goals, brief, median_of, parts_of, worst_of

RATE_HZ = 60.0
NEVER = 10**9
#: How long the trainer of a backlog runs by itself before the server joins, s.
BACKLOG_S = 1.0
#: Its launches that are timed for the bound: a GPU is faster over its first milliseconds than it can be for long.
SUSTAINED_STEPS = 1000
#: From the server's first request to what is measured.
JOIN_S = 0.15
#: Processes of a backlog that are built at once, while the GPU is idle: so many starts.
BATCH = 10

#: The figures in the order of the results: the goal, and whether less or more is better.
GOALS: Goals = {
    "readme_example_p99_ratio": (1.25, "less"),
    "readme_example_best_effort": (0.97, "more"),
    "backlog_pooled_p99_over_bound": (1.05, "less"),
    "backlog_worst_p99_over_bound": (1.3, "less"),
    "backlog_untracked": (0.0, "less"),
    "launcher_cpu_gated": (0.25, "less"),
    "launcher_cpu_busy": (0.25, "less"),
    "launcher_cpu_spinning": (0.0, "more"),  # no goal: it shows that the one beside which the other is measured spins
    "launcher_p50_of_spinning": (1.03, "less"),
    "launcher_p99_of_spinning": (1.03, "less"),
}

# ---- one process, regions, no bound stream ----


def measure_readme_example(lab: Processes) -> None:
    """The server alone and the trainer alone without cudasched, and both in one process with regions, in turns."""
    options, done = lab.session.options, lab.session.store.done
    beside = "transformer"
    missing = [
        (part, repeat)
        for repeat in range(options.repeats)
        for part in ("latency_alone", "best_effort_alone", "both")
        if f"readme_example/{part}/{repeat}" not in done
    ]
    if not missing:
        return
    lab.session.need(15.0 + options.seconds + 2)
    alone = {"latency_alone": WorkerSpec("bert_graph", None), "best_effort_alone": WorkerSpec(None, beside)}
    example: Child | None = None
    with Pool(lab.session.backend) as pool:
        if any(part == "both" for part, _ in missing):
            example = lab.server("--regions", "--best-effort", beside, imports_cudasched=True, table="one_process")
        for error in pool.start([alone[part] for part, _ in missing if part in alone]).values():
            raise error
        if example:
            built(example)
        for part, repeat in missing:
            lab.session.need(options.seconds + 2)
            if part in alone:
                result = pool.run([alone[part]], Run(options.seconds, f"{RATE_HZ:g}", seed=repeat))
            else:
                assert example is not None
                (result,) = served([example], lab.session.options.seconds, seed=repeat)
            latency = result["latency"].get("bert_graph", {}).get("latency_ms", [])
            per_s = result["best_effort_per_s"].get(beside)
            lab.session.store.keep(f"readme_example/{part}/{repeat}", {"latency_ms": latency, "per_s": per_s})
            lab.session.say(f"readme_example {part} {repeat}: {brief(latency)} {f'{per_s:.1f}/s' if per_s else ''}")


def find_readme_example(done: Done) -> Found:
    """P99 over alone and best effort of what is left, each a median over the repeats."""
    alone, trained, both = (
        parts_of(done, f"readme_example/{part}/") for part in ("latency_alone", "best_effort_alone", "both")
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
        "readme_example_p99_ratio": median_of(ratios, requests),
        "readme_example_best_effort": median_of(kept),
    }


# ---- a server that joins while a backlog is on the GPU ----


def measure_backlog(lab: Processes) -> None:
    """What the bound needs, then the starts, built a batch at a time while the GPU is idle."""
    done, options = lab.session.store.done, lab.session.options
    if "backlog/kernels" not in done:
        lab.session.need(20.0)
        trainer = lab.program("torch_long_kernels", read_every=NEVER)
        built(trainer)
        recorded = ask(trainer, "kernels", steps=SUSTAINED_STEPS)
        lab.session.store.keep("backlog/kernels", recorded["kernel_us"])
        lab.end(trainer)
    missing = [start for start in range(options.starts) if f"backlog/start/{start}" not in done]
    while missing:
        batch, missing = missing[: options.batch], missing[options.batch :]
        start_s = BACKLOG_S + 2 * (JOIN_S + options.join_seconds) + 1.5
        lab.session.need(15.0 + start_s)
        trainers = {
            start: lab.program("torch_long_kernels", "best-effort", read_every=NEVER, table=f"backlog_{start}")
            for start in batch
        }
        joining = ("--regions", "--join-s", f"{JOIN_S:g}")
        servers = {start: lab.server(*joining, imports_cudasched=True, table=f"backlog_{start}") for start in batch}
        built(*servers.values())
        built(*trainers.values())
        for start in batch:
            lab.session.need(start_s)
            trainer, server = trainers[start], servers[start]
            ask(trainer, "start")
            time.sleep(BACKLOG_S)
            (latency,) = latencies([server], options.join_seconds, seed=start, head_start_s=JOIN_S + 0.05)
            state = ask(trainer, "state")
            lab.end(trainer)
            # The same requests once more, with the same server alone: what the bound is made of.
            (alone,) = latencies([server], options.join_seconds, seed=start, head_start_s=JOIN_S + 0.05)
            kept = {"latency_ms": latency, "alone_ms": alone, "untracked": state["untracked_launches"]}
            kept |= {"off": state["off_reason"], "launches": state["best_effort_launches"]}
            lab.session.store.keep(f"backlog/start/{start}", kept)
            untracked = state["untracked_launches"]
            lab.session.say(f"backlog start {start}: {brief(latency)}, alone {brief(alone)}, {untracked} untracked")
            lab.end(server)


def find_backlog(done: Done) -> Found:
    """P99 from 150 ms after the server joined, of all starts together and of the worst, over the bound."""
    starts, kernels = parts_of(done, "backlog/start/"), done.get("backlog/kernels")
    alone = [value for part in starts for value in part.get("alone_ms", [])]
    if not (alone and kernels):
        return {}
    bound = bound_p99_ms(alone, [(us, count) for us, count in kernels], 1.0, CONTEXT_SWITCH_MS)
    each = [p99(part["latency_ms"]) / bound for part in starts]
    pooled = [value for part in starts for value in part["latency_ms"]]
    untracked = [float(part["untracked"]) for part in starts]
    return {
        "backlog_pooled_p99_over_bound": (p99(pooled) / bound, min(each), max(each), len(pooled)),
        "backlog_worst_p99_over_bound": worst_of(each),
        "backlog_untracked": (sum(untracked), min(untracked), max(untracked), len(starts)),
    }


# ---- the launcher's CPU time ----


#: The trainers, and what is in the environment of each.
LAUNCHERS: dict[str, dict[str, str]] = {"sleeps": {}, "spins": {"CUDASCHED_LAUNCHER_SPINS": "1"}}


def measure_launcher(lab: Processes) -> None:
    """The launcher's CPU time while a transformer trains: with no latency client there, then beside its requests.

    Beside requests two trainers take turns, one whose launcher sleeps and one whose launcher spins, in one order and in
    the opposite one, with the same requests. The other one pauses; its launcher goes on as it does, in every turn.
    """
    options, done = lab.session.options, lab.session.store.done
    turns = [
        (name, pair)
        for pair in range(options.launcher_pairs)
        for name in (LAUNCHERS if pair % 2 == 0 else [*LAUNCHERS][::-1])
        if f"launcher/{name}/{pair}" not in done
    ]
    if not turns and "launcher/busy" in done:
        return
    seconds = options.seconds
    lab.session.need(20.0 + seconds + 5)
    trainers = {
        name: lab.program("transformers_llama", "best-effort", table="launcher", environment=environment)
        for name, environment in LAUNCHERS.items()
    }
    server = lab.server(client_class="latency", table="launcher") if turns else None
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
        lab.session.need(seconds + 5)
        ask(trainers[name], "start")
        time.sleep(1.0)
        latency: list[float] = []
        _count_launcher(
            lab,
            f"{name}/{pair}",
            trainers[name],
            lambda: latency.extend(latencies([server], seconds, seed=pair)[0]),  # noqa: B023
            latency,
        )
        ask(trainers[name], "pause")


def _count_launcher(
    lab: Processes, part: str, trainer: Child, meanwhile: Callable[[], object], latency: list[float] | None = None
) -> None:
    """Keeps what a trainer's launcher took while something went on, and the latencies that this has noted."""
    before, began = ask(trainer, "state"), time.monotonic()
    meanwhile()
    after, ended = ask(trainer, "state"), time.monotonic()
    told = counted(before, after)
    own_ns = told["launcher_cpu_ns"] - told["launcher_driver_ns"]
    cpu, launched = own_ns / 1e9 / (ended - began), told["best_effort_launches"] / (ended - began)
    kept: dict[str, Any] = {"cpu": cpu, "launches_per_s": launched, "seconds": ended - began}
    lab.session.store.keep(f"launcher/{part}", kept if latency is None else {**kept, "latency_ms": latency})
    lab.session.say(f"launcher {part}: {cpu:.0%} of a core, {launched:.0f} launches/s {brief(latency or [])}")


def find_launcher(done: Done) -> Found:
    """The share of a core; percentiles of requests beside the launcher that sleeps over those beside the other."""
    found: Found = {}
    beside = {name: parts_of(done, f"launcher/{name}/") for name in LAUNCHERS}
    measured = {"gated": beside["sleeps"], "busy": parts_of(done, "launcher/busy"), "spinning": beside["spins"]}
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
        asleep, spinning = zip(*pairs, strict=True)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found[f"launcher_{name}_of_spinning"] = pooled(asleep, spinning, partial(percentile, share=share))
    return found


def find(done: Done) -> Found:
    """All figures of what was measured."""
    return {**find_readme_example(done), **find_backlog(done), **find_launcher(done)}


BENCHMARK = Benchmark(
    about="the figures that are promised of the core",
    groups={
        "readme_example": in_processes(measure_readme_example),
        "backlog": in_processes(measure_backlog),
        "launcher": in_processes(measure_launcher),
    },
    goals=GOALS,
    find=find,
    settings={
        "seconds": (8.0, 2.0),
        "repeats": (2, 1),
        "starts": (20, 2),
        "batch": BATCH,
        "join_seconds": 1.5,
        "launcher_pairs": (6, 1),
    },
)
