"""Tokens of a Llama of 8 billion parameters in vLLM beside a training: in time slices, and under cudasched.

vLLM's engine and the training are built once each for all arms, with and without cudasched, and take turns. In each
repeat an engine answers the same requests alone, and in each of its arms beside the training. The arm `training_only`
has vLLM as it is and the training under `cudasched run --class best_effort`; in `cudasched` vLLM runs under
`--class latency`, too.

`vllm_tpot_p99_ratio` is P99 of the time per output token of `cudasched` beside over alone, over the requests of all
repeats; the same of `training_only`, and of `time_slices` without cudasched; and of P50. `vllm_training_of_time_slices`
is the training's steps a second beside vLLM over those in time slices, of the same repeat. `vllm_training_share` has
them over those alone and over the GPU time that vLLM leaves: its steps then, of which each takes the time that the
profiler has of a step's kernels.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HEAD_START_S

from benchmarks.lab.processes import Processes, ask, built, in_processes, pooled, trained
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, brief, median_of

ENGINE = Path(__file__).with_name("engine.py")
ARMS: dict[str, tuple[str | None, str | None]] = {
    "time_slices": (None, None),
    "training_only": (None, "best-effort"),
    "cudasched": ("latency", "best-effort"),
}
"""The class of vLLM, and that of the training."""
TRAINING = "transformers_llama"
OF_TIME_SLICES = "vllm_training_of_time_slices"
RATE_HZ = 16.0
PROFILED_S = 2.0
"""The profiler's events of a second take many to read."""
BUILD_S = 300.0
ALONE_S = 3.0
"""Of the training, in each repeat."""


def measure(lab: Processes) -> None:
    """Repeats, in each of which the arms take turns: a part is an arm's, by its name and repeat."""
    session = lab.session
    seconds = float(session.options.seconds)
    turns = [*itertools.product(range(session.options.repeats), ARMS)]
    if all(f"{arm}/{repeat}" in session.store.done for repeat, arm in turns):
        return
    session.need(BUILD_S / 2)
    simulate = ["--simulate"] if session.rehearsal else []
    trainings = {
        client: lab.program(TRAINING, client_class=client, read_every=lab.often)
        for client in {client for _, client in ARMS.values()}
    }
    engines = {client: lab.start(ENGINE, *simulate, client_class=client) for client in {None, "latency"}}
    built(*trainings.values())
    for engine in engines.values():  # one after another: each looks how much memory is free
        engine.answer(BUILD_S, "imported")
        engine.tell("build")
        engine.answer(BUILD_S, "ready")

    def requests(arm: str, repeat: int, head_s: float = 0.0, **more: Any) -> dict[str, Any]:
        time.sleep(head_s)
        load = {"seconds": seconds, "rate_hz": RATE_HZ, "seed": repeat, **more}
        return ask(engines[ARMS[arm][0]], "run", BUILD_S, **load)

    if "engines" not in session.store.done:
        profiled = requests("time_slices", 0, profile=True, seconds=min(PROFILED_S, seconds))
        asleep = [ask(engine, "sleep", BUILD_S) for engine in engines.values()]
        step_s = profiled["gpu_s"] * session.backend.scale / profiled["steps"]
        session.store.keep("engines", {"step_s": step_s, "same": [each["same"] for each in asleep]})
        session.say(f"{1e3 * step_s:.2f} ms a step of {profiled['steps']}; asleep: {asleep}")
    tokens_alone: dict[tuple[int, str | None], list[float]] = {}
    for repeat, arm in turns:
        if f"{arm}/{repeat}" in session.store.done:
            continue
        session.need(3 * seconds)
        (server, client), found = ARMS[arm], dict[str, Any]()
        if (repeat, server) not in tokens_alone:
            tokens_alone[repeat, server] = requests(arm, repeat)["token_ms"]
        alone_ms, training = tokens_alone[repeat, server], trainings[client]
        ask(training, "start")
        alone, _ = trained(training, ALONE_S, lambda: time.sleep(ALONE_S + HEAD_START_S))
        asked = partial(requests, arm, repeat, HEAD_START_S)
        beside, _ = trained(training, seconds, lambda found=found, asked=asked: found.update(asked()))
        ask(training, "pause")
        found |= {"alone_ms": alone_ms, "training_alone": alone, "training": beside}
        session.store.keep(f"{arm}/{repeat}", found)
        session.say(
            f"{arm} {repeat}: {beside:.2f} of {alone:.2f} steps/s; a token alone {brief(alone_ms)}, "
            f"beside {brief(found['token_ms'])}; the first {brief(found['first_ms'])}"
        )


def find(done: Done) -> Found:
    """The figures, of the repeats that all arms have."""
    repeats = [{arm: f"{arm}/{repeat}" for arm in ARMS} for repeat in range(len(done))]
    parts = [{arm: done[key] for arm, key in keys.items()} for keys in repeats if done.keys() >= {*keys.values()}]
    if not parts:
        return {}
    found = Found()
    for arm in ARMS:
        mine, suffix = [part[arm] for part in parts], "" if arm == "cudasched" else f"_{arm}"
        tokens, others = ([part[name] for part in mine] for name in ("token_ms", "alone_ms"))
        found[f"vllm_tpot_p50_ratio{suffix}"] = pooled(tokens, others, statistics.median)
        found[f"vllm_tpot_p99_ratio{suffix}"] = pooled(tokens, others)
        left = [1 - part["steps"] * done["engines"]["step_s"] / part["seconds"] for part in mine]
        shares = [part["training"] / part["training_alone"] / rest for part, rest in zip(mine, left, strict=True)]
        found[f"vllm_training_share{suffix}"] = median_of(shares)
        if arm != "time_slices":
            of_theirs = [part[arm]["training"] / part["time_slices"]["training"] for part in parts]
            found[f"{OF_TIME_SLICES}{suffix}"] = median_of(of_theirs)
    found["vllm_asleep_differs"] = median_of([0.0 if same else 1.0 for same in done["engines"]["same"]])
    return found


BENCHMARK = Benchmark(
    about="tokens of a Llama in vLLM beside a training, in time slices and under cudasched",
    groups={"vllm": in_processes(measure)},
    find=find,
    goals={
        **{
            f"{name}_{arm}".removesuffix("_cudasched"): (0.0, "more")
            for name in ("vllm_tpot_p50_ratio", "vllm_tpot_p99_ratio", "vllm_training_share", OF_TIME_SLICES)
            for arm in ARMS
            if (name, arm) != (OF_TIME_SLICES, "time_slices")
        },
        "vllm_tpot_p99_ratio": (1.25, "less"),
        "vllm_training_share": (0.9, "more"),
        "vllm_asleep_differs": (0.0, "less"),
    },
    settings={"seconds": (13.0, 2.5), "repeats": (5, 1)},
    limits={
        "vllm_training_share": "both together leave a sixth of the GPU's time unused: about the gaps of 1 ms between "
        "the engine's steps"
    },
    results="inference",
)
