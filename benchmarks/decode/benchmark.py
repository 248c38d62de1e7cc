"""Tokens of a Llama of 8 billion parameters in vLLM beside a training: in time slices, and under cudasched.

vLLM's engine and the training are built once each for all arms, with and without cudasched, and take turns. In each
repeat an arm's engine answers the same requests alone and beside the training. The arm `training_only` has vLLM as it
is and the training under `cudasched run --class best_effort`; in `cudasched` vLLM runs under `--class latency`, too.

`vllm_tpot_p99_ratio` is P99 of the time per output token of `cudasched` beside over alone, over the requests of all
repeats; the same of `training_only`, and of `time_slices` without cudasched. `vllm_training_share` is the training's
steps a second beside vLLM over those alone and over the GPU time that vLLM leaves: its steps then, of which each takes
the time that the profiler has of a step's kernels.
"""

from __future__ import annotations

import itertools
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
RATE_HZ = 16.0
PROFILED_S = 2.0
"""The profiler's events of a second take many to read."""
BUILD_S = 300.0


def measure(lab: Processes) -> None:
    """Repeats, in each of which the arms take turns."""
    session = lab.session
    if "vllm" in session.store.done:
        return
    session.need(BUILD_S / 2)
    simulate = ["--simulate"] if session.rehearsal else []
    served, trained_as = ({classes[place] for classes in ARMS.values()} for place in (0, 1))
    trainings = {client: lab.program(TRAINING, client_class=client, read_every=2) for client in trained_as}
    engines = {client: lab.start(ENGINE, *simulate, client_class=client) for client in served}
    built(*trainings.values())
    for engine in engines.values():  # one after another: each looks how much memory is free
        engine.answer(BUILD_S, "imported")
        engine.tell("build")
        engine.answer(BUILD_S, "ready")
    seconds = float(session.options.seconds)

    def requests(arm: str, repeat: int, head_s: float = 0.0, **more: Any) -> dict[str, Any]:
        time.sleep(head_s)
        load = {"seconds": seconds, "rate_hz": RATE_HZ, "seed": repeat, **more}
        return ask(engines[ARMS[arm][0]], "run", BUILD_S, **load)

    profiled = requests("time_slices", 0, profile=True, seconds=min(PROFILED_S, seconds))
    step_s = profiled["gpu_s"] * session.backend.scale / profiled["steps"]
    session.say(f"{1e3 * step_s:.2f} ms a step of {profiled['steps']}, in {profiled['seconds']:.1f} s")
    kept: dict[str, Any] = {"step_s": step_s, "sleep": {}}
    for arm in ARMS:
        kept[arm] = {"alone_ms": [], "beside_ms": [], "first_ms": [], "alone_steps": [], "beside_steps": [], "left": []}
    for repeat, arm in itertools.product(range(session.options.repeats), ARMS):
        session.need(4 * seconds)
        training, mine = trainings[ARMS[arm][1]], kept[arm]
        mine["alone_ms"] += requests(arm, repeat)["token_ms"]
        ask(training, "start")
        mine["alone_steps"].append(trained(training, seconds / 4, lambda: time.sleep(seconds / 4 + HEAD_START_S))[0])
        found: dict[str, Any] = {}
        asked = partial(requests, arm, repeat, HEAD_START_S)
        steps, _ = trained(training, seconds, lambda found=found, asked=asked: found.update(asked()))
        ask(training, "pause")
        mine["beside_ms"] += found["token_ms"]
        mine["first_ms"] += found["first_ms"]
        mine["beside_steps"].append(steps)
        mine["left"].append(1 - found["steps"] * step_s / found["seconds"])
        session.say(
            f"{arm} {repeat}: {steps:.2f} of {mine['alone_steps'][-1]:.2f} steps/s, {mine['left'][-1]:.0%} left; a "
            f"token alone {brief(mine['alone_ms'])}, beside {brief(found['token_ms'])}; the first {brief(found['first_ms'])}"
        )
    for client, engine in engines.items():
        kept["sleep"][client or "bare"] = ask(engine, "sleep", BUILD_S)
        session.say(f"sleep, {client or 'bare'}: {kept['sleep'][client or 'bare']}")
    session.store.keep("vllm", kept)


def find(done: Done) -> Found:
    """The figures."""
    if "vllm" not in done:
        return {}
    kept, found = done["vllm"], Found()
    for arm in ARMS:
        mine = kept[arm]
        name = "vllm_tpot_p99_ratio" if arm == "cudasched" else f"vllm_tpot_p99_{arm}"
        found[name] = pooled([mine["beside_ms"]], [mine["alone_ms"]])
        steps = zip(mine["beside_steps"], mine["alone_steps"], mine["left"], strict=True)
        shares = [beside / alone / left for beside, alone, left in steps]
        found["vllm_training_share" if arm == "cudasched" else f"vllm_training_share_{arm}"] = median_of(shares)
    found["vllm_asleep_differs"] = median_of([0.0 if each["same"] else 1.0 for each in kept["sleep"].values()])
    return found


BENCHMARK = Benchmark(
    about="tokens of a Llama in vLLM beside a training, in time slices and under cudasched",
    groups={"vllm": in_processes(measure)},
    find=find,
    goals={
        "vllm_tpot_p99_ratio": (1.25, "less"),
        "vllm_tpot_p99_training_only": (0.0, "more"),
        "vllm_tpot_p99_time_slices": (0.0, "more"),
        "vllm_training_share": (0.9, "more"),
        "vllm_training_share_training_only": (0.0, "more"),
        "vllm_training_share_time_slices": (0.0, "more"),
        "vllm_asleep_differs": (0.0, "less"),
    },
    settings={"seconds": (13.0, 2.5), "repeats": (5, 1)},
    results="inference",
)
