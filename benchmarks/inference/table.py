"""Four models in one process of cudasched's, and in a process each: the table of the goals.

All arms run the models of models.py by `cudasched models serve`, for the same callers: in one process (`together`), in
a process a model without cudasched (`apart`), and the same as clients of MPS (`mps`). `table_throughput` is the goodput
of the first over the better of the others', `table_latency` its P50 at a rate that all bear over the shorter of theirs.
`table_models` is how many models it holds for each that processes of their own hold in the same memory, smallest first;
`table_memory_points` by how many points its share of weights in its memory is higher than theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from cudasched.demo.harness import percentile

from benchmarks import meta
from benchmarks.inference.goodput import OURS, Callers, batchers, goodput, of_mps, served
from benchmarks.inference.triton import ROOT, Serving, cudasched
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Session, least_of

ARMS = ("together", "apart", "mps")
KIND, RATE_HZ = "poisson", 200
MIB = 1 << 20


def used_mib() -> int:
    """Memory of the GPU in use; 0 where there is none."""
    used = meta.nvidia_smi("memory.used", "--format=csv,noheader,nounits") or ""
    return int(used) if used.isdigit() else 0


def measure(arm: str, session: Session) -> None:
    """Goodput, latency and memory of one arm."""
    from benchmarks.inference.models import MODELS, weight_bytes

    if arm in session.store.done:
        return
    names = list(MODELS)
    groups = [names] if arm == "together" else [[name] for name in names]
    directory = session.builds / arm
    with ExitStack() as stack:
        environment = {"PYTHONPATH": str(ROOT), **({} if arm == "together" else {"CUDASCHED_OFF": "1"})}
        if arm == "mps":
            environment |= stack.enter_context(of_mps(session))
        fronts = 1 if session.rehearsal or arm != "together" else OURS["cudasched"]
        servers: dict[str, Serving] = {}
        before, used = used_mib(), []
        for group in groups:
            place = directory / group[0]
            place.mkdir(parents=True)
            server = stack.enter_context(cudasched(place, batchers(group), environment, fronts))
            servers |= dict.fromkeys(group, server)
            used.append(used_mib() - before - sum(used))
        callers = Callers(servers, directory, stack)
        kept: dict[str, Any] = {"goodput": goodput(arm, KIND, callers, session), "used_mib": used}
        kept["weights_mib"] = sum(weight_bytes(name) for name in names) / MIB
        kept["latency_ms"] = served(callers.offer(RATE_HZ, 2 * session.options.seconds, 1.0))[1]
    session.store.keep(arm, kept)
    session.say(f"{arm}: {kept['goodput']}/s, {sum(used)} MiB of the GPU for {kept['weights_mib']:.0f} of weights")


def fit(used: Sequence[float], limit: float) -> int:
    """How many processes fit, the smallest first."""
    count = total = 0
    for each in sorted(used):
        total += each
        count += total <= limit
    return int(count)


def find(done: Done) -> Found:
    """The table, where all arms were measured."""
    if not all(arm in done for arm in ARMS):
        return {}
    ours, *others = (done[arm] for arm in ARMS)
    p50, *theirs = [percentile(each["latency_ms"], 0.5) for each in (ours, *others)]
    ratios = [p50 / each for each in theirs]
    found: Found = {"table_latency": (max(ratios), min(ratios), max(ratios), len(ours["latency_ms"]))}
    goodputs = [each["goodput"] for each in others]
    if all(goodputs):
        found["table_throughput"] = least_of([ours["goodput"] / each for each in goodputs])
    limit = sum(ours["used_mib"])
    if limit:
        held = [fit(each["used_mib"], limit) for each in others]
        found["table_models"] = least_of([len(others[0]["used_mib"]) / max(each, 1) for each in held])
        share, *theirs = [100 * each["weights_mib"] / sum(each["used_mib"]) for each in (ours, *others)]
        found["table_memory_points"] = least_of([share - each for each in theirs])
    return found


BENCHMARK = Benchmark(
    about="four models in one process, beside a process a model in time slices and under MPS",
    groups={arm: partial(measure, arm) for arm in ARMS},
    find=find,
    goals={
        "table_throughput": (1.4, "more"),
        "table_latency": (0.85, "less"),
        "table_models": (2.0, "more"),
        "table_memory_points": (25.0, "more"),
    },
    settings={"seconds": (2.5, 0.4)},
    results="inference",
)
