"""The server of goodput.py beside a training: in plain time slices, and under cudasched.

Four models, a process each, answer requests alone and beside a Llama-like training. Both servers and both trainings are
built at once and take turns: a training is paused where it is not measured. `beside_training_best_effort` is the
training's steps a second under cudasched over those in time slices, beside as many requests: a share of the goodput
alone. `beside_training_goodput` is goodput beside the training over that alone, of the same minute.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from cudasched.demo.harness import HEAD_START_S

from benchmarks.inference.goodput import OURS, RATES, Callers, batchers, goodput, served
from benchmarks.inference.triton import ROOT, cudasched
from benchmarks.lab.processes import Processes, ask, built, in_processes, pooled, trained
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, brief, median_of

ARMS = {"time_slices": (None, {"CUDASCHED_OFF": "1"}), "cudasched": ("best-effort", {})}
"""The class of the training, and the server's environment."""
TRAINING = "transformers_llama"
SHARE = 0.3
"""Of the goodput alone: the load beside which steps are counted."""
KIND = "poisson"


def measure(lab: Processes) -> None:
    """Repeats, in each of which the arms take turns; then goodput."""
    from benchmarks.inference.models import MODELS

    session = lab.session
    if "beside" in session.store.done:
        return
    session.need(60.0)
    (session.scratch / "shared").mkdir(mode=0o700, exist_ok=True)
    trainings = {
        arm: lab.program(TRAINING, client_class=client, read_every=lab.often) for arm, (client, _) in ARMS.items()
    }
    built(*trainings.values())
    kept: dict[str, Any] = {f"{arm}_{what}": [] for arm in ARMS for what in ("steps", "alone_ms", "beside_ms")}
    with ExitStack() as stack:
        callers = {}
        for arm, (_, environment) in ARMS.items():
            place = session.builds / arm
            place.mkdir()
            given = {"PYTHONPATH": str(ROOT), "CUDASCHED_RUN_DIR": str(session.scratch / "shared"), **environment}
            models, fronts = batchers(list(MODELS), apart=True), 1 if session.rehearsal else OURS["cudasched_apart"]
            server = stack.enter_context(cudasched(place, models, given, fronts))
            callers[arm] = Callers(dict.fromkeys(MODELS, server), place, stack)
        ours, training = callers["cudasched"], trainings["cudasched"]
        alone = goodput("alone", KIND, ours, session)
        rate = max(SHARE * alone, RATES[0])
        for _, arm in ((repeat, arm) for repeat in range(session.options.repeats) for arm in ARMS):
            session.need(3 * session.options.seconds)

            def requests(arm: str = arm, head_s: float = HEAD_START_S) -> list[float]:
                time.sleep(head_s)
                return served(callers[arm].offer(rate, session.options.seconds, 1.0))[1]

            kept[f"{arm}_alone_ms"] += requests(head_s=0.0)
            ask(trainings[arm], "start")
            found: list[float] = []
            steps, _ = trained(trainings[arm], session.options.seconds, lambda found=found: found.extend(requests()))
            ask(trainings[arm], "pause")
            kept[f"{arm}_steps"].append(steps)
            kept[f"{arm}_beside_ms"] += found
            session.say(f"{arm}: {rate:.0f}/s, {steps:.2f} steps/s, {brief(found)}")
        ask(training, "start")
        beside = goodput("beside", KIND, ours, session, [each for each in RATES if each <= alone])
        ask(training, "pause")
    session.store.keep("beside", {**kept, "goodput": [beside / alone] if alone else []})


def find(done: Done) -> Found:
    """The figures."""
    if "beside" not in done:
        return {}
    kept, found = done["beside"], Found()
    pairs = zip(kept["cudasched_steps"], kept["time_slices_steps"], strict=True)
    found["beside_training_best_effort"] = median_of([ours / theirs for ours, theirs in pairs if theirs])
    if kept["goodput"]:
        found["beside_training_goodput"] = median_of(kept["goodput"])
    for arm in ARMS:
        found[f"beside_training_p99_{arm}"] = pooled([kept[f"{arm}_beside_ms"]], [kept[f"{arm}_alone_ms"]])
    return found


BENCHMARK = Benchmark(
    about="four models' requests beside a training, in time slices and under cudasched",
    groups={"beside": in_processes(measure)},
    find=find,
    goals={
        "beside_training_best_effort": (0.95, "more"),
        "beside_training_goodput": (0.95, "more"),
        **{f"beside_training_p99_{arm}": (0.0, "more") for arm in ARMS},
    },
    settings={"seconds": (2.5, 2.0), "repeats": (3, 1)},
    results="inference",
)
