"""Recorded launches run again under the scheduler's own code and a virtual clock, without a GPU.

::

    from cudasched import simulate

    training = simulate.best_effort(simulate.read_trace("train.parquet"))
    server = simulate.latency(simulate.request(0.48), rate_hz=60, seconds=10, slo_ms=2)
    for row in simulate.compare([server, training], [simulate.Arm("open"), simulate.Arm("strict", lead_us=20)]):
        print(row.arm, row.latency_ms, row.best_effort_ratio)

The model is that of ``csrc/simulate/replay.hpp``; docs/policies.md lists the limits. A policy may be a Python function,
which gets a snapshot (``docs/policies.md``) for each look at a best-effort launch. The function returns None to submit
the launch, or a number of nanoseconds after which to look again. ``"latency"`` waits until latency work is done,
``"turn"`` for the client's turn. An invalid answer switches the policy off, and all launches are submitted from then
on.

Traces are data sets of `cudasched.collect`; reading them needs ``cudasched[collect]``, plotting ``cudasched[plot]``.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cudasched import hook
from cudasched._output import Output
from cudasched._text import shown
from cudasched.demo.arrivals import schedule
from cudasched.errors import ConfigError, Error

if TYPE_CHECKING:
    import pyarrow as pa

    from cudasched._core import ReplayClient, Snapshot
    from cudasched._core import Trace as CoreTrace

__all__ = [
    "ADAPTIVE",
    "Arm",
    "Client",
    "Comparison",
    "Latency",
    "Policy",
    "Row",
    "Sharing",
    "Trace",
    "best_effort",
    "compare",
    "host_trace",
    "latency",
    "measured",
    "plot",
    "policies",
    "read_trace",
    "request",
    "run",
    "trace_in",
    "trace_of",
]

Sharing = Literal["one_process", "mps", "two_processes"]
Policy = Callable[["Snapshot"], "int | Literal['latency', 'turn'] | None"]

ADAPTIVE = "auto"
"""A lead that is found on line."""

_MS = 1e6
REQUEST_GAP_MS = 1.0
_PAUSE_S = 1.0
LIMITS: Mapping[str, tuple[float, float]] = {
    "rate_hz": (0.001, 100_000),
    "seconds": (0.001, 3_600),
    "seed": (0, 2**63 - 1),
    "gpu_ms": (1e-6, 3_600_000),
    "kernels": (1, 1_000_000),
    "slo_ms": (0.001, 3_600_000),
    "alone_ms": (0, 3_600_000),
    "request_ms": (1e-6, 3_600_000),
    "request_gap_ms": (0.001, 3_600_000),
    "prepare_ms": (0, 3_600_000),
    "expect_ms": (0, 1000),
    "recording_us": (0, 1_000_000),
    "lead_us": (0, 3_600_000_000),
    "arrivals": (0, 1_000_000),
}
"""The range of each number: beyond it a simulation means nothing, or would not end."""
_SWITCH_US: Mapping[str, float] = {"one_process": 50, "mps": 50, "two_processes": 130}
_COLD_US = 60.0
"""Of a request behind another process's work, beside the change of contexts."""
_SLICE_US = 2048.0
"""libcuda's."""
_LOADS = (
    "bert_graph",
    "bert_eager",
    "resnet50_b4",
    "gpt_decode",
    "mlp",
    "transformer",
    "resnet50",
    "gemm",
    "elementwise",
)


def _engine() -> Any:
    """``cudasched._core``, with the engine loaded as `cudasched.hook` does it."""
    hook.load_core()
    from cudasched import _core

    return _core


@dataclass(frozen=True)
class Trace:
    """Launches of one process on one GPU, as the simulator wants them.

    Attributes:
        name: Of the program.
        launches: How many.
        gpu_ms: GPU time of all launches, ms; overlapping time counts once.
        load: The benchmark load of the trace, where labels or the name tell; else empty.
        core: The launches themselves.
        ends: Where requests end, if each launch is one (graphs); else empty.
        source: The part of a recording; empty where the trace was not read from one.
    """

    name: str
    launches: int
    gpu_ms: float
    load: str
    core: CoreTrace
    ends: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Client:
    """One program of a simulation; `best_effort` and `latency` make them.

    Attributes:
        trace: The client's launches.
        client_class: ``latency`` or ``best_effort``.
        priority: Within the class, higher first.
        arrivals_s: When requests arrive, s from the start.
        ends: Where each request of the trace ends.
        slo_ms: Target from the arrival, ms; None: none.
        prepare_ms: From a region's entry to its first launch, ms.
        expect_ms: How long ahead the client announces each arrival, ms; 0: no announcements.
        rate_hz: Mean rate of the arrivals.
        arrivals: The kind of arrivals.
    """

    trace: Trace
    client_class: Literal["latency", "best_effort"]
    priority: int = 0
    arrivals_s: tuple[float, ...] = ()
    ends: tuple[int, ...] = ()
    slo_ms: float | None = None
    prepare_ms: float = 0
    expect_ms: float = 0
    rate_hz: float = 0
    arrivals: str = ""

    def _replayed(self) -> ReplayClient:
        client: ReplayClient = _engine().ReplayClient(
            name=self.trace.name,
            client_class=self.client_class,
            trace=self.trace.core,
            priority=self.priority,
            request_ends=list(self.ends),
            arrivals_ns=[round(arrival * 1e9) for arrival in self.arrivals_s],
            slo_ns=round((self.slo_ms or 0) * _MS),
            prepare_ns=round(self.prepare_ms * _MS),
            expect_ns=round(self.expect_ms * _MS),
        )
        return client


@dataclass(frozen=True)
class Arm:
    """One way to share the GPU.

    Attributes:
        policy: A name (`policies`) or a function.
        lead_us: Best-effort GPU time in flight at the next submission, us, or `ADAPTIVE`.
        sharing: In one process, under MPS, or contexts that take turns.
        offload: Best-effort launches go through a ring; else the gate holds the program's own thread.
        foresee: Launches over 300 us look out for periodic arrivals, and with a miss probability for likely ones.
        miss_probability: How probable an arrival within a long launch may be, 0 to 1; 0: only periodic ones count.
        max_inflation: Bound of the adaptive lead: how much slower requests may become (1.2: by 20%); 0: none.
        host_bound_inflation: Of policies `harvest` and `slack`: how much slower a host-bound part of a request may
            become (1.03: by 3%).
        earliest_deadline_first: Latency clients enter regions in the order of deadlines.
        stream_priorities: In one process and under MPS, kernels of latency clients go first where both are ready; on
            an H200 such priorities are hardly obeyed.
        linger_us: How long the gate stays closed after latency work, us; to a launch over 300 us twice as long.
        margin_us: The part of a request's slack that `slack` leaves unused, us; None: 0.2 ms and two context switches.
        switch_us: The cost of a change from one process to the other, us; None: as measured on an H200, and 60 us
            more for a request, whose caches another process has filled.
        time_slice_us: In two processes, the hardware's slice that best-effort contexts set themselves, us; None: none.
        prediction_sigma: Noise of predictions: deviation of the log of predicted over true.
        name: Of the arm; by default made of the policy and the lead.
    """

    policy: str | Policy = "strict"
    lead_us: float | str = 20.0
    sharing: Sharing = "two_processes"
    offload: bool = True
    foresee: bool = False
    miss_probability: float = 0.0
    max_inflation: float = 0.0
    host_bound_inflation: float = 1.03
    earliest_deadline_first: bool = False
    stream_priorities: bool = False
    linger_us: float = 100.0
    margin_us: float | None = None
    switch_us: float | None = None
    time_slice_us: float | None = None
    prediction_sigma: float = 0.05
    name: str = ""

    @property
    def policy_name(self) -> str:
        """The name of the policy or of its function."""
        return self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "user")

    @property
    def title(self) -> str:
        """The name, or the arm's description."""
        if self.name:
            return self.name
        if self.policy == "open":
            return "open" if self.time_slice_us is None else f"time slices of {self.time_slice_us:g} us"
        lead = self.lead_us if isinstance(self.lead_us, str) else f"{self.lead_us:g} us"
        return f"{self.policy_name}, lead {lead}"


@dataclass(frozen=True)
class Latency:
    """Latencies of `n` requests from their arrival, ms."""

    p50: float
    p95: float
    p99: float
    mean: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """A figure measured on the GPU for the same arm, and the simulated one: both relative to alone."""

    what: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """By which part of the measured the simulated is off."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True)
class Row:
    """One arm's results.

    Attributes:
        arm: The title.
        policy: Name of its policy; None for the clients alone.
        lead_us: Lead, us; where it is adaptive, the mean; None where none counts.
        latency_ms: Of all latency clients' requests; None where none was served.
        attainment: Share of requests within the SLO, unserved ones counting as late; None without SLO.
        best_effort_per_s: How often the best-effort clients got through their traces, a second, summed.
        best_effort_ratio: Best-effort GPU time / (the arm alone's x (1 - duty of the latency clients)).
        utilisation: Share of the time in which the GPU ran a kernel.
        latency_busy: Share of the time in which latency clients' kernels ran.
        best_effort_busy: The same of best-effort clients.
        by_client: Latencies of each latency client, in order; unserved requests count as long as the simulation.
        unserved: Requests not complete by the end.
        launches: Submitted in the simulated time.
        policy_refused: Why a policy was switched off; empty: it was not.
        comparisons: With measured figures, where there are any for this arm.
    """

    arm: str
    policy: str | None
    lead_us: float | None
    latency_ms: Latency | None
    attainment: float | None
    best_effort_per_s: float | None
    best_effort_ratio: float | None
    utilisation: float
    latency_busy: float
    best_effort_busy: float
    by_client: tuple[Latency | None, ...]
    unserved: int
    launches: int
    policy_refused: str = ""
    comparisons: tuple[Comparison, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        compared = [{**asdict(one), "error": one.error} for one in self.comparisons]
        return {**asdict(self), "comparisons": compared}


def checked(what: str, value: object) -> float:
    """The value. Raises ConfigError where it is out of its limits (`LIMITS`), or no number."""
    least, most = LIMITS[what]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{what} = {shown(value)}: must be a number from {least:.12g} to {most:.19g}")
    return value


def policies() -> dict[str, str]:
    """The policies by name, with descriptions; the first is the default."""
    return dict(_engine().policies())


# ---- traces --------------------------------------------------------------------------------------------------------


def trace_of(
    submitted_ns: Sequence[int],
    start_ns: Sequence[int | None],
    duration_ns: Sequence[int],
    *,
    name: str = "trace",
    load: str = "",
    requests: bool = False,
    kernels: int = 1,
    recording_us: float = 0.0,
) -> Trace:
    """A trace of launches in the order of their submission.

    Args:
        submitted_ns: When each launch call began, ns.
        start_ns: When it began on the GPU, on the same clock; None: not known.
        duration_ns: The launch's time, ns.
        name: Of the program.
        load: The benchmark load.
        requests: Each launch is a request of its own.
        kernels: Each launch is a graph of so many kernels: between them, other programs may get the GPU.
        recording_us: The program's cost of recording a launch, us; subtracted from its own time between launches.

    Raises:
        ConfigError: The columns differ in length, or are empty; a launch has no kernel.
    """
    if not submitted_ns:
        raise ConfigError(f"{name} has no launches")
    checked("kernels", kernels)
    starts = [-1 if start is None else start for start in start_ns]
    core = _engine().Trace(
        list(submitted_ns), starts, list(duration_ns), kernels, _nanoseconds("recording_us", recording_us)
    )
    ends = tuple(range(1, len(core) + 1)) if requests else ()
    return Trace(name, len(core), core.gpu_ns / _MS, load, core, ends)


def host_trace(
    gap_ns: Sequence[int],
    gpu_ns: Sequence[int],
    waits: Sequence[bool],
    *,
    ends: Sequence[int] = (),
    name: str = "trace",
    load: str = "",
) -> Trace:
    """A trace with known host time between two launches, and known waits for the GPU.

    Args:
        gap_ns: The host's own time since the launch before began, or since the program had waited, ns.
        gpu_ns: How long each launch runs on the GPU, ns.
        waits: Whether the program waits for the GPU before it.
        ends: Where requests end; empty: it is one.
        name: Of the program.
        load: The benchmark load.

    Raises:
        ConfigError: The columns differ in length, or are empty; a request ends where no launch is.
    """
    if not gap_ns:
        raise ConfigError(f"{name} has no launches")
    if list(ends) != sorted(set(ends)) or (ends and not 0 < ends[0] <= ends[-1] == len(gap_ns)):
        raise ConfigError(f"the requests of {name} must end one after another, the last with the last launch")
    core = _engine().Trace.of_host(list(gap_ns), list(gpu_ns), list(waits))
    return Trace(name, len(core), core.gpu_ns / _MS, load, core, tuple(ends) or (len(core),))


def request(gpu_ms: float, *, kernels: int = 1, name: str = "request") -> Trace:
    """A request that is one launch.

    Args:
        gpu_ms: GPU time, ms.
        kernels: It is a graph of so many kernels.
        name: Of the server.

    Raises:
        ConfigError: The time is not above 0, or there is no kernel.
    """
    checked("gpu_ms", gpu_ms)
    return trace_of([0], [None], [round(gpu_ms * _MS)], name=name, requests=True, kernels=kernels)


def _load_of(labels: Iterable[str], path: Path) -> str:
    words = {word for label in labels for word in re.split("[:| ]", label)}
    named = [load for load in _LOADS if load in words or f"{load}_train" in words]
    return named[0] if named else next((load for load in _LOADS if path.stem.startswith(load)), "")


def _filled(durations: Sequence[int | None], kinds: Sequence[tuple[Any, ...]], path: Path) -> list[int]:
    """Durations; where one was not timed, the median of the launches like it, or of all."""
    timed: dict[tuple[Any, ...], list[int]] = {}
    for kind, duration in zip(kinds, durations, strict=True):
        if duration is not None:
            timed.setdefault(kind, []).append(duration)
    if not timed:
        raise Error(f"{path} has no timed launch: record it with timing='cupti' or 'events'")
    likely = {kind: round(statistics.median(values)) for kind, values in timed.items()}
    overall = round(statistics.median(likely.values()))
    return [
        likely.get(kind, overall) if duration is None else duration
        for kind, duration in zip(kinds, durations, strict=True)
    ]


def _without_holes(
    numbers: Sequence[int], submitted_ns: list[int], start_ns: list[int | None], duration_ns: Sequence[int]
) -> None:
    """Where launches of others were left out, moves the later launches to the end of the earlier ones."""
    removed = 0
    done = -math.inf
    for index, start in enumerate(start_ns):
        if index > 0 and numbers[index] != numbers[index - 1] + 1:
            removed = max(removed, round(submitted_ns[index] - max(done, submitted_ns[index - 1])))
        submitted_ns[index] -= removed
        if start is not None:
            start_ns[index] = start - removed
            done = max(done, start - removed + duration_ns[index])


def _parts(submitted_ns: Sequence[int], start_ns: Sequence[int | None], duration_ns: Sequence[int]) -> list[range]:
    """Launches in order of submission, divided where neither the program nor the GPU did anything for a second."""
    begins = [0]
    done = -math.inf
    for index, submitted in enumerate(submitted_ns):
        if index > 0 and submitted - max(done, submitted_ns[index - 1]) >= _PAUSE_S * 1e9:
            begins.append(index)
        start = start_ns[index]
        done = max(done, (submitted if start is None else start) + duration_ns[index])
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(submitted_ns)], strict=True)]


def read_trace(path: str | os.PathLike[str], *, label: str = "", recording_us: float = 0.0) -> Trace:
    """Reads recorded launches that belong together: those of one process on one GPU, without pauses of a second.

    Of several processes and GPUs, the one with most launches is taken. Of these, the longest row in which no second
    passes without work, so that start-up is not replayed. `Trace.source` names the chosen launches.

    Args:
        path: A data set of `cudasched.collect`.
        label: Only launches whose label begins with it.
        recording_us: The program's cost of recording a launch, us.

    Raises:
        Error: The file cannot be read (`cudasched.collect.read`), has no such launches, lacks their submission times,
            or none was timed.
    """
    from cudasched import collect

    file = Path(path)
    return trace_in(collect.read(file), file, label=label, recording_us=recording_us)[0]


def trace_in(table: pa.Table, file: Path, *, label: str = "", recording_us: float = 0.0) -> tuple[Trace, list[int]]:
    """The trace in a recording, as `read_trace` chooses it, and the rows that it is made of, in order of submission.

    Args:
        table: Of `cudasched.collect.read`.
        file: Where it comes from.
        label: Only launches whose label begins with it.
        recording_us: The program's cost of recording a launch, us.

    Raises:
        Error: As `read_trace`.
    """
    kind = ["kind", "identity", "grid_x", "grid_y", "grid_z", "block_x", "graph"]
    columns = ["pid", "device", "launch", *kind, "submitted_ns", "start_ns", "duration_ns", "label"]
    table = table.select(columns)
    if table["submitted_ns"].null_count:
        raise Error(
            f"{file} does not say when its launches were submitted, so they cannot be replayed: it is a data set for "
            "training (training.compact leaves times out); record the program with `cudasched collect`"
        )
    rows = table.to_pydict()
    places: dict[tuple[int, int], list[int]] = {}
    for index, place in enumerate(zip(rows["pid"], rows["device"], strict=True)):
        if (rows["label"][index] or "").startswith(label):
            places.setdefault(place, []).append(index)
    if not places:
        raise Error(f"{file} has no launches" + (f" with a label that begins with {label!r}" if label else ""))
    busiest = max(places, key=lambda place: len(places[place]))
    chosen = sorted(places[busiest], key=rows["submitted_ns"].__getitem__)
    taken = {name: [values[index] for index in chosen] for name, values in rows.items()}
    durations = _filled(taken["duration_ns"], list(zip(*(taken[name] for name in kind), strict=True)), file)
    if label:
        _without_holes(taken["launch"], taken["submitted_ns"], taken["start_ns"], durations)
    parts = _parts(taken["submitted_ns"], taken["start_ns"], durations)
    part = max(parts, key=len)
    cut = slice(part.start, part.stop)
    source = f"process {busiest[0]} on GPU {busiest[1]}" + (f", 1 of {len(places)}" if len(places) > 1 else "")
    if len(parts) > 1:
        source += f", launches {part.start + 1} to {part.stop} of {len(chosen)}, the longest of {len(parts)} parts"
    trace = trace_of(
        taken["submitted_ns"][cut],
        taken["start_ns"][cut],
        durations[cut],
        name=label or file.stem,
        load=_load_of({text for text in taken["label"] if text}, file),
        requests=all(one == "graph" for one in taken["kind"]),
        recording_us=recording_us,
    )
    return replace(trace, source=source), chosen[cut]


# ---- clients -------------------------------------------------------------------------------------------------------


def best_effort(trace: Trace, *, priority: int = 0) -> Client:
    """A program that repeats a trace as fast as the gate allows. One step of priority doubles the program's share."""
    return Client(trace, "best_effort", priority)


def latency(
    trace: Trace,
    *,
    rate_hz: float,
    seconds: float,
    arrivals: str = "poisson",
    slo_ms: float | None = None,
    priority: int = 0,
    request_gap_ms: float | None = None,
    prepare_ms: float = 0,
    expect_ms: float = 0,
    seed: int = 1,
) -> Client:
    """A server of requests.

    Args:
        trace: Launches of one request or several, which are served in turn.
        rate_hz: Mean arrivals a second.
        seconds: The span of arrivals, s.
        arrivals: ``poisson``, ``periodic`` or ``bursts``.
        slo_ms: Target from the arrival, ms.
        priority: Among latency clients, higher first; counts with `Arm.earliest_deadline_first`.
        request_gap_ms: A request of the trace ends where the GPU had nothing for so long, ms. None: in a trace of
            graphs each is a request, in others 1 ms ends one.
        prepare_ms: From a region's entry to its first launch, ms: the server prepares the input inside the region.
        expect_ms: How long ahead of an arrival it is announced (`cudasched.expect`), ms.
        seed: Of the arrivals.

    Raises:
        ConfigError: A value has no meaning.
    """
    given = {"rate_hz": rate_hz, "seconds": seconds, "prepare_ms": prepare_ms, "expect_ms": expect_ms, "seed": seed}
    given |= {} if slo_ms is None else {"slo_ms": slo_ms}
    given |= {} if request_gap_ms is None else {"request_gap_ms": request_gap_ms}
    for what, value in given.items():
        checked(what, value)
    if rate_hz * seconds > LIMITS["arrivals"][1]:
        raise ConfigError(
            f"{rate_hz:g} requests a second for {seconds:g} s are more than the {LIMITS['arrivals'][1]:.0f} that are "
            "simulated: take a lower rate, or fewer seconds"
        )
    try:
        times = tuple(schedule(arrivals, rate_hz, seconds, seed))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    ends = trace.ends if request_gap_ms is None else ()
    if not ends:
        gap_ms = REQUEST_GAP_MS if request_gap_ms is None else request_gap_ms
        ends = tuple(trace.core.request_ends(round(gap_ms * _MS)))
    return Client(trace, "latency", priority, times, ends, slo_ms, prepare_ms, expect_ms, rate_hz, arrivals)


# ---- running -------------------------------------------------------------------------------------------------------


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _summary(latencies_ms: Sequence[float]) -> Latency | None:
    if not latencies_ms:
        return None
    ordered = sorted(latencies_ms)
    p50, p95, p99 = (_percentile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Latency(p50, p95, p99, statistics.fmean(ordered), len(ordered))


def run(clients: Sequence[Client], arm: Arm, *, seconds: float = 10.0, seed: int = 1) -> Row:
    """Runs clients in one arm, with nothing to compare with: `Row.best_effort_ratio` is None.

    Args:
        clients: At least one; at most 64.
        arm: How they share the GPU.
        seconds: Simulated time, s.
        seed: Of the predictions' noise.

    Raises:
        ConfigError: A setting has no meaning, or the policy is unknown.
    """
    checked("seconds", seconds)
    checked("seed", seed)
    core = _engine()
    settings = core.ReplaySettings()
    switch_us = _SWITCH_US.get(arm.sharing, 0) if arm.switch_us is None else arm.switch_us
    settings.sharing = arm.sharing
    settings.offload = arm.offload
    settings.adaptive_lead = arm.lead_us == ADAPTIVE
    if isinstance(arm.lead_us, str):
        if arm.lead_us != ADAPTIVE:
            raise ConfigError(f"a lead is a number of us or {ADAPTIVE!r}, not {arm.lead_us!r}")
    else:
        settings.lead_ns = _nanoseconds("lead_us", arm.lead_us)
    settings.max_inflation = arm.max_inflation
    settings.host_bound_inflation = arm.host_bound_inflation
    settings.foresee = arm.foresee
    settings.miss_probability = arm.miss_probability
    settings.earliest_deadline_first = arm.earliest_deadline_first
    settings.priorities = arm.stream_priorities
    settings.linger_ns = _nanoseconds("linger_us", arm.linger_us)
    settings.switch_ns = _nanoseconds("switch_us", switch_us)
    settings.cold_ns = _nanoseconds("switch_us", _COLD_US if arm.switch_us is None else 0)
    settings.slice_ns = _nanoseconds("time_slice_us", _SLICE_US)
    settings.best_effort_slice_ns = _nanoseconds("time_slice_us", arm.time_slice_us or 0)
    margin_us = 200 + 2 * switch_us if arm.margin_us is None else arm.margin_us
    settings.margin_ns = _nanoseconds("margin_us", margin_us)
    settings.prediction_sigma = arm.prediction_sigma
    settings.end_ns = _nanoseconds("seconds", seconds * 1e6)
    settings.seed = seed
    if isinstance(arm.policy, str):
        settings.policy = arm.policy
    policy = None if isinstance(arm.policy, str) else arm.policy
    result = core.replay([client._replayed() for client in clients], settings, policy)

    served = [(client, done) for client, done in zip(clients, result.clients, strict=True) if client.arrivals_s]
    pushed = [(client, done) for client, done in zip(clients, result.clients, strict=True) if not client.arrivals_s]
    asked = [(client, done) for client, done in served if client.slo_ms is not None]
    wanted = sum(len(done.latencies_ns) + done.unserved for _, done in asked)
    gated = bool(served and pushed) and arm.policy != "open"
    lead_us = statistics.fmean([done.mean_lead_ns / 1e3 for _, done in pushed]) if gated else None
    end_ms = result.end_ns / _MS
    return Row(
        arm=arm.title,
        policy=arm.policy_name if served and pushed else None,
        lead_us=lead_us,
        latency_ms=_summary([value / _MS for _, done in served for value in done.latencies_ns]),
        attainment=sum(done.met for _, done in asked) / wanted if wanted else None,
        best_effort_per_s=(
            sum(done.launches / client.trace.launches for client, done in pushed) / seconds if pushed else None
        ),
        best_effort_ratio=None,
        utilisation=result.busy_ns / result.end_ns,
        latency_busy=sum(done.gpu_ns for _, done in served) / result.end_ns,
        best_effort_busy=sum(done.gpu_ns for _, done in pushed) / result.end_ns,
        by_client=tuple(
            _summary([*(value / _MS for value in done.latencies_ns), *[end_ms] * done.unserved]) for _, done in served
        ),
        unserved=sum(done.unserved for _, done in served),
        launches=result.launches,
        policy_refused=result.policy_refused,
    )


def _nanoseconds(what: str, us: float) -> int:
    if not 0 <= us < 1e12:
        raise ConfigError(f"{what} must be 0 or more and finite, not {us:g}")
    return round(us * 1e3)


def compare(
    clients: Sequence[Client],
    arms: Sequence[Arm],
    *,
    seconds: float = 10.0,
    seed: int = 1,
    results: Sequence[Mapping[str, Any]] = (),
) -> list[Row]:
    """Runs the latency clients alone, the best-effort clients alone without a gate, and each arm.

    Args:
        clients: At least one; at most 64.
        arms: The arms to compare. Runs alone share the GPU as the first arm does.
        seconds: Simulated time, s.
        seed: Of the predictions' noise.
        results: Rows of measured results (`measured`), compared with where they are of the same loads and arm.

    Returns:
        The rows of those alone, and one an arm, in order.

    Raises:
        ConfigError: A setting has no meaning, or a policy is unknown.
    """
    if not arms:
        raise ConfigError("there is no arm to compare")
    servers = [client for client in clients if client.client_class == "latency"]
    trainings = [client for client in clients if client.client_class == "best_effort"]
    # Alone means without cudasched: the program's own thread calls the driver.
    bare = replace(arms[0], policy="open", offload=False, lead_us=0.0, time_slice_us=None)
    rows: list[Row] = []
    alone = run(servers, replace(bare, name="latency alone"), seconds=seconds, seed=seed) if servers else None
    if alone:
        rows.append(alone)
    whole = 0.0
    if trainings:
        unhindered = run(trainings, replace(bare, name="best effort alone"), seconds=seconds, seed=seed)
        if unhindered.best_effort_busy == 0:
            names = ", ".join(client.trace.name for client in trainings)
            raise ConfigError(f"{names} launched nothing in {seconds:g} s: simulate more seconds")
        rows.append(replace(unhindered, best_effort_ratio=1.0))
        whole = unhindered.best_effort_busy * (1 - (alone.latency_busy if alone else 0))
    for arm in arms:
        row = run(clients, arm, seconds=seconds, seed=seed)
        if whole > 0:
            row = replace(row, best_effort_ratio=row.best_effort_busy / whole)
        rows.append(replace(row, comparisons=_compared(row, arm, alone, servers, trainings, results)))
    return rows


# ---- against measurements ------------------------------------------------------------------------------------------


_COMPARED = (
    *("arm", "policy", "lead_us", "latency_load", "best_effort_load", "arrivals", "rate_hz"),
    *("latency_ms", "alone_ms", "best_effort_ratio"),
)


def measured(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a results file of `benchmarks/colocation`.

    Raises:
        Error: It cannot be read, or is none.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        return [{key: row[key] for key in _COMPARED} for row in rows if "latency_load" in row]
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Error(f"{path} is no results file of benchmarks/colocation") from None


def _measured_arms(arm: Arm) -> tuple[str, ...]:
    """The benchmark's names of an arm like this one."""
    if arm.time_slice_us is not None:
        return ()
    if arm.policy != "open":
        return (f"cudasched_{arm.sharing}", f"cudasched_{arm.sharing}_{arm.policy_name}")
    if arm.sharing == "mps":
        return ("mps_priority",) if arm.stream_priorities else ("mps",)
    return ("one_process_priority",) if arm.sharing == "one_process" else ("processes",)


def _compared(
    row: Row,
    arm: Arm,
    alone: Row | None,
    servers: Sequence[Client],
    trainings: Sequence[Client],
    results: Sequence[Mapping[str, Any]],
) -> tuple[Comparison, ...]:
    if len(servers) != 1 or len(trainings) != 1 or not alone or not alone.latency_ms or not row.latency_ms:
        return ()
    server, training = servers[0], trainings[0]
    lead_us = None if arm.policy == "open" else arm.lead_us
    for result in results:
        same = (
            result["arm"] in _measured_arms(arm)
            and result["best_effort_load"] == training.trace.load
            and server.trace.load in ("", result["latency_load"])
            and (result["arrivals"], result["rate_hz"]) == (server.arrivals, server.rate_hz)
            and (lead_us is None or (result["policy"], result["lead_us"]) == (arm.policy, lead_us))
        )
        latency_ms, alone_ms = result["latency_ms"], result["alone_ms"]
        if not same or not latency_ms or not alone_ms:
            continue
        found = [
            Comparison(
                f"{share.upper()} / alone",
                latency_ms[share] / alone_ms[share],
                getattr(row.latency_ms, share) / getattr(alone.latency_ms, share),
            )
            for share in ("p50", "p99")
        ]
        if result["best_effort_ratio"] and row.best_effort_ratio:
            found.append(Comparison("best effort / alone", result["best_effort_ratio"], row.best_effort_ratio))
        return tuple(found)
    return ()


def plot(rows: Sequence[Row], path: Path | Output, title: str) -> None:
    """Draws latency percentiles, best-effort throughput, attainment and utilisation of each arm, side by side.

    Args:
        rows: Of `compare`.
        path: A PNG or SVG, by its suffix.
        title: The loads and arms that ran.

    Raises:
        ConfigError: It is nothing that can be written to.
        Error: matplotlib is not installed, or the file cannot be written.
    """
    from cudasched.demo.plot import plot

    output = path if isinstance(path, Output) else Output(path, parents=True)
    try:
        drawn = plot([asdict(row) for row in rows], output, title)
    except (OSError, ValueError) as error:
        raise Error(f"{output.path} cannot be written: {error}") from None
    if not drawn:
        raise Error("plots need matplotlib: pip install 'cudasched[plot]'")
