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
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cudasched._output import Output
from cudasched.demo.arrivals import schedule
from cudasched.errors import ConfigError, Error
from cudasched.simulate._limits import LIMITS, checked
from cudasched.simulate._recording import read_trace, trace_in
from cudasched.simulate._trace import MS, Trace, engine, host_trace, request, trace_of

if TYPE_CHECKING:
    from cudasched._core import ReplayClient, Snapshot

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

_SWITCH_US: Mapping[str, float] = {"one_process": 50, "mps": 50, "two_processes": 130}
_COLD_US = 60.0
"""Of a request behind another process's work, beside the change of contexts."""
SLICE_US = 2048.0
"""Of a context, as libcuda sets it."""
LATENCY_SLICE_US = 20000.0
"""Of a server alone under cudasched (``csrc/schedule/slice_length.hpp``)."""


@dataclass(frozen=True)
class Client:
    """One program of a simulation; `best_effort` and `latency` make them.

    Attributes:
        trace: The client's launches.
        client_class: ``latency`` or ``best_effort``.
        priority: Within the class, higher first.
        arrivals_s: When requests arrive, s from the start.
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
    slo_ms: float | None = None
    prepare_ms: float = 0
    expect_ms: float = 0
    rate_hz: float = 0
    arrivals: str = ""

    def _replayed(self) -> ReplayClient:
        client: ReplayClient = engine().ReplayClient(
            name=self.trace.name,
            client_class=self.client_class,
            trace=self.trace.core,
            priority=self.priority,
            request_ends=list(self.trace.ends),
            arrivals_ns=[round(arrival * 1e9) for arrival in self.arrivals_s],
            slo_ns=round((self.slo_ms or 0) * MS),
            prepare_ns=round(self.prepare_ms * MS),
            expect_ns=round(self.expect_ms * MS),
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
        latency_slice_us: The same of a server's contexts.
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
    latency_slice_us: float | None = None
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
            if self.time_slice_us is None:
                return "open"
            server = "" if self.latency_slice_us is None else f", of the server {self.latency_slice_us:g} us"
            return f"time slices of {self.time_slice_us:g} us{server}"
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


def policies() -> dict[str, str]:
    """The policies by name, with descriptions; the first is the default."""
    return dict(engine().policies())


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
        prepare_ms: From a region's entry to its first launch, ms: the server prepares the input inside the region.
        expect_ms: How long ahead of an arrival it is announced (`cudasched.expect`), ms.
        seed: Of the arrivals.

    Raises:
        ConfigError: A value has no meaning.
    """
    given = {"rate_hz": rate_hz, "seconds": seconds, "prepare_ms": prepare_ms, "expect_ms": expect_ms, "seed": seed}
    given |= {} if slo_ms is None else {"slo_ms": slo_ms}
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
    return Client(trace, "latency", priority, times, slo_ms, prepare_ms, expect_ms, rate_hz, arrivals)


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
    core = engine()
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
    settings.slice_ns = _nanoseconds("time_slice_us", SLICE_US)
    settings.best_effort_slice_ns = _nanoseconds("time_slice_us", arm.time_slice_us or 0)
    settings.latency_slice_ns = _nanoseconds("latency_slice_us", arm.latency_slice_us or 0)
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
    end_ms = result.end_ns / MS
    return Row(
        arm=arm.title,
        policy=arm.policy_name if served and pushed else None,
        lead_us=lead_us,
        latency_ms=_summary([value / MS for _, done in served for value in done.latencies_ns]),
        attainment=sum(done.met for _, done in asked) / wanted if wanted else None,
        best_effort_per_s=(
            sum(done.launches / client.trace.launches for client, done in pushed) / seconds if pushed else None
        ),
        best_effort_ratio=None,
        utilisation=result.busy_ns / result.end_ns,
        latency_busy=sum(done.gpu_ns for _, done in served) / result.end_ns,
        best_effort_busy=sum(done.gpu_ns for _, done in pushed) / result.end_ns,
        by_client=tuple(
            _summary([*(value / MS for value in done.latencies_ns), *[end_ms] * done.unserved]) for _, done in served
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
        ConfigError: A setting has no meaning, a policy is unknown, or recordings are of different GPUs.
    """
    if not arms:
        raise ConfigError("there is no arm to compare")
    on = {client.trace.gpu: client.trace.name for client in clients if client.trace.gpu}
    if len(on) > 1:
        where = ", ".join(f"{name} on {gpu}" for gpu, name in on.items())
        raise ConfigError(f"recordings of different GPUs: {where}; record all on the GPU that they are to share")
    servers = [client for client in clients if client.client_class == "latency"]
    trainings = [client for client in clients if client.client_class == "best_effort"]
    # Alone means without cudasched: the program's own thread calls the driver.
    bare = replace(arms[0], policy="open", offload=False, lead_us=0.0, time_slice_us=None, latency_slice_us=None)
    rows: list[Row] = []
    alone = run(servers, replace(bare, name="latency alone"), seconds=seconds, seed=seed) if servers else None
    if alone:
        rows.append(alone)
    whole = 0.0
    if trainings:
        unhindered = run(trainings, replace(bare, name="best effort alone"), seconds=seconds, seed=seed)
        if unhindered.best_effort_busy == 0:
            names = ", ".join(client.trace.name for client in trainings)
            raise ConfigError(
                f"no launch of {names} is over after {seconds:g} s: simulate more seconds, or shorter launches"
            )
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
