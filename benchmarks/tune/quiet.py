"""Whether a tuner beside a server and a training picks the configurations that it picks on an idle GPU.

A tuner times 30 Triton kernels in nine to twelve configurations each (quiet_program.py): on the idle GPU, beside a BERT
graph server and a training with nothing of cudasched, and with all three under it and the tuner in
`cudasched.tune.quiet()`. The idle GPU is measured before and after. A configuration is right that takes at most 2% more
than the best one by the shorter of both idle times. `*_winners` are the shares of kernels of which the fastest
configuration by the arm's times is right; `idle_winners` judges the second idle time by the first. `*_server_p99` is
P99 over that of the server beside the training without a tuner; `*_training` the steps a second likewise, and
`*_seconds` how long the tuner takes over that on the idle GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cudasched.demo.harness import Child, HarnessError

from benchmarks.lab.processes import Processes, ask, built, in_processes, latencies, per_second, pooled
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Figure, Found, brief, once

PROGRAM = Path(__file__).with_name("quiet_program.py")
TRAINING = "transformers_llama"
RIGHT = 1.02
RATE_HZ = 100.0
TUNE_S = 200.0
Times = Mapping[str, list[float]]
"""Of each kernel's configurations, ms."""


def measure(lab: Processes) -> None:
    """All arms, one after another."""
    options, done = lab.session.options, lab.session.store.done
    if "quiet" in done:
        return
    lab.session.need(20.0)
    simulate = ["--simulate"] if lab.session.rehearsal else []
    tuners = {
        "bare": lab.start(PROGRAM, *simulate),
        "quiet": lab.start(PROGRAM, "--quiet", *simulate, imports_cudasched=True),
    }
    beside: dict[str, tuple[Child, Child]] = {
        arm: (lab.server(client_class=latency), lab.program(TRAINING, client_class=best_effort, read_every=lab.often))
        for arm, latency, best_effort in (("bare", None, None), ("quiet", "latency", "best-effort"))
    }
    for arm in tuners:  # the second finds what the first has compiled
        built(tuners[arm])
    built(*(child for pair in beside.values() for child in pair))

    def tune(arm: str) -> dict[str, Any]:
        began = time.monotonic()
        return {**ask(tuners[arm], "tune", timeout_s=TUNE_S), "tune_s": time.monotonic() - began}

    def loaded(arm: str, tuning: bool) -> dict[str, Any]:
        """Requests and steps of windows in which the tuner was at work, or of as many seconds without it."""
        server, training = beside[arm]
        windows: list[list[float]] = []
        ask(training, "start")
        ends_ns = [time.monotonic_ns()]
        with ThreadPoolExecutor(1) as thread:
            tuner = thread.submit(tune, arm) if tuning else None
            while not tuner.done() if tuner else len(windows) * options.seconds < options.without:
                windows.extend(latencies([server], options.seconds, len(windows), rate_hz=RATE_HZ))
                ends_ns.append(time.monotonic_ns())
        found = tuner.result() if tuner else {}
        if tuner:
            del ends_ns[-1:], windows[-1:]  # the tuner ended in it
        if not windows:
            raise HarnessError("the tuner ended within a window: use shorter ones")
        readings = ask(training, "readings", from_ns=ends_ns[0], until_ns=ends_ns[-1])["readings"]
        ask(training, "pause")
        latency_ms = list(itertools.chain.from_iterable(windows))
        return {**found, "latency_ms": latency_ms, "steps_per_s": per_second(readings)}

    idle = tune("bare")
    kept: dict[str, Any] = {"idle": idle["times_ms"], "idle_s": idle["tune_s"]}
    for arm in beside:
        lab.session.need(30.0)
        kept[f"{arm}/without"] = loaded(arm, tuning=False)
        kept[arm] = loaded(arm, tuning=True)
        told = {part: kept[part] for part in (f"{arm}/without", arm)}
        said = (f"{part} {brief(one['latency_ms'])}, {one['steps_per_s']:.1f} steps/s" for part, one in told.items())
        lab.session.say("; ".join(said) + f", {kept[arm].get('discarded')} samples again")
    kept["idle again"] = tune("bare")["times_ms"]
    lab.session.store.keep("quiet", kept)


def right(times: Times, judge: Times) -> Figure:
    """The share of kernels whose fastest configuration by `times` is right by `judge`."""
    picked = {name: each.index(min(each)) for name, each in times.items()}
    share = statistics.fmean(judge[name][place] <= RIGHT * min(judge[name]) for name, place in picked.items())
    return once(share, len(picked))


def find(done: Done) -> Found:
    """The figures."""
    if "quiet" not in done:
        return {}
    kept = done["quiet"]
    again = kept["idle again"]
    idle = {name: [*map(min, each, again[name])] for name, each in kept["idle"].items()}
    found: Found = {"idle_winners": right(again, kept["idle"])}
    for arm in ("bare", "quiet"):
        beside, without = kept[arm], kept[f"{arm}/without"]
        found[f"{arm}_winners"] = right(beside["times_ms"], idle)
        found[f"{arm}_server_p99"] = pooled([beside["latency_ms"]], [without["latency_ms"]])
        found[f"{arm}_training"] = once(beside["steps_per_s"] / without["steps_per_s"])
        found[f"{arm}_seconds"] = once(beside["tune_s"] / kept["idle_s"])
    return found


BENCHMARK = Benchmark(
    about="a tuner's choices beside a server and a training, with quiet windows and without",
    groups={"quiet": in_processes(measure)},
    find=find,
    goals={
        "quiet_winners": (0.95, "more"),
        "quiet_server_p99": (1.1, "less"),
        **dict.fromkeys(("bare_winners", "idle_winners", "bare_server_p99"), (0.0, "more")),
        **dict.fromkeys(("quiet_training", "bare_training", "quiet_seconds", "bare_seconds"), (0.0, "more")),
    },
    results="foresight",
    settings={"seconds": 2.0, "without": (17.0, 3.0)},
)
