"""What a server and a best-effort program cost one another on one GPU, before they meet.

::

    from cudasched.advise import beside

    found = beside.forecast(beside.read("serve.parquet"), beside.read("train.parquet"), rate_hz=60)
    print(found.choice, found.modes[found.choice].p99_ratio, found.why)

Each program is recorded alone by `cudasched collect`. The simulator (``csrc/simulate/replay.hpp``) runs both in each
mode. An interval has the two ends of what a recording does not tell of a kernel, and the errors of nine of ten such
forecasts that were compared with measurements (``benchmarks/results/foresight.json``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched import simulate
from cudasched._text import counted
from cudasched.advise import profile
from cudasched.advise.names import qualified_name
from cudasched.advise.peaks import peaks_of
from cudasched.errors import ConfigError, Error
from cudasched.simulate._limits import LIMITS, checked

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MODES", "Forecast", "Interval", "Kernel", "Memory", "Mode", "ModeForecast", "Recording"]
__all__ += ["forecast", "host_ms", "limits_of", "memory_of", "rank", "read", "refuse_mismatch", "unrecorded"]

REQUESTS = 1_000
"""That a P99 is made of, and a part of those that are simulated where that does not take long."""
_TIMES = 4
MOST_LAUNCHES = 800_000
"""Of one simulation: a pair takes seconds."""
CONTEXT_BYTES = 600 << 20
"""That the driver takes for a context, beside the program's own (an H200)."""
MEASURED_ON = ("H100", "H200")
_SHOWN_KERNELS = 3
_FEW_REQUESTS = 10
_SLOWER = 1.1
"""Alone in a simulation, than a client sees."""


@dataclass(frozen=True)
class Interval:
    """A value, and the ends that hold nine of ten."""

    low: float
    value: float
    high: float


Errors = Mapping[str, tuple[float, float, float]]
"""Measured over simulated, by figure: the ends of nine of ten cells, and between these the correction of the value."""


@dataclass(frozen=True)
class Mode:
    """A way to share the GPU.

    Attributes:
        title: For people.
        arm: For the simulator.
        settings: How to start the programs so.
        errors: Of simulations that were compared with measurements; a forecast is the simulated value x the correction.
    """

    title: str
    arm: simulate.Arm
    settings: str
    errors: Errors

    def interval(self, figure: str, ends: Sequence[float]) -> Interval:
        """The forecast of a figure whose simulated value has these ends."""
        low, middle, high = self.errors[figure]
        return Interval(min(ends) * low, sum(ends) / len(ends) * middle, max(ends) * high)

    @property
    def overlaps(self) -> bool:
        """Whether kernels of two programs may run at once."""
        return self.arm.sharing != "two_processes"


MODES: Mapping[str, Mode] = {
    "time_slices": Mode(
        "time slices",
        simulate.Arm("open", offload=False),
        "the programs as they are",
        {"p50": (0.92, 1.0, 1.12), "p99": (0.81, 1.0, 1.14), "best_effort": (0.98, 1.0, 1.05)},
    ),
    "cudasched_slices": Mode(
        "cudasched, time slices",
        simulate.Arm("open", offload=False, time_slice_us=1.0),
        "cudasched run --class best_effort -- PROGRAM; the server as it is",
        {"p50": (0.96, 1.0, 1.18), "p99": (0.96, 1.1, 1.37), "best_effort": (0.77, 1.0, 1.04)},
    ),
    "cudasched_mps": Mode(
        "cudasched, MPS",
        simulate.Arm("strict", lead_us=simulate.ADAPTIVE, sharing="mps"),
        "cudasched run --mps --class latency -- SERVER; cudasched run --mps --class best_effort -- PROGRAM",
        {"p50": (0.96, 1.0, 1.35), "p99": (0.82, 1.0, 1.39), "best_effort": (0.78, 1.0, 1.12)},
    ),
    "cudasched_one_process": Mode(
        "cudasched, one process",
        simulate.Arm("strict", lead_us=simulate.ADAPTIVE, sharing="one_process"),
        'one program under cudasched run; cudasched.region("latency") around requests, "best_effort" around steps',
        {"p50": (1.02, 1.15, 1.51), "p99": (0.88, 1.22, 1.64), "best_effort": (0.71, 1.0, 1.11)},
    ),
}


_SLICES = "cudasched_slices"


@dataclass(frozen=True)
class Kernel:
    """Launches of one function: ms of the longest, and the share of the program's GPU time."""

    name: str
    longest_ms: float
    share: float


@dataclass(frozen=True)
class Recording:
    """A recorded program.

    Attributes:
        path: The file.
        trace: Its launches, each with the most of the GPU that it may take.
        least: The same with the least.
        launches_per_s: In the recording.
        idle: Share of the time in which the program left the GPU without work.
        untold: Share of its GPU time in launches of which the recording does not tell the share of the GPU.
        kernels: The longest functions.
        longest_ms: The longest launch that is no graph.
        request_hz: Requests a second in the recording; None where it has one or none.
        requests: In the recording.
        memory_bytes: The most that the program held; 0 if not known.
        gpu_memory_bytes: Of the GPU; 0 if not known.
        identity: Equal for two recordings of one process.
    """

    path: str
    trace: simulate.Trace
    least: simulate.Trace
    launches_per_s: float
    idle: float
    untold: float
    kernels: tuple[Kernel, ...]
    longest_ms: float
    request_hz: float | None
    requests: int
    memory_bytes: int
    gpu_memory_bytes: int
    identity: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Of the program."""
        return self.trace.name

    @property
    def gpu(self) -> str:
        """Its GPU's name; empty: not known."""
        return self.trace.gpu


@dataclass(frozen=True)
class Memory:
    """GPU memory, bytes; 0 is not known.

    Attributes:
        programs: The most that each held, the servers first.
        gpu: Of the GPU.
        fits: Whether all fit, each with a context of its own; None: not known.
    """

    programs: tuple[int, ...]
    gpu: int
    fits: bool | None


def memory_of(recordings: Sequence[Recording]) -> Memory:
    """Of programs that share a GPU."""
    held, gpu = tuple(each.memory_bytes for each in recordings), max(each.gpu_memory_bytes for each in recordings)
    return Memory(held, gpu, sum(held) + len(held) * CONTEXT_BYTES <= gpu if all((*held, gpu)) else None)


@dataclass(frozen=True)
class ModeForecast:
    """One mode.

    Attributes:
        p50_ms: Of requests, from their arrival.
        p99_ms: The same.
        p50_ratio: Over the server alone.
        p99_ratio: The same.
        best_effort: The program's speed, of that alone x the time that requests leave.
        settings: How to start the programs so.
    """

    p50_ms: Interval
    p99_ms: Interval
    p50_ratio: Interval
    p99_ratio: Interval
    best_effort: Interval
    settings: str

    @property
    def cost(self) -> float:
        """P99 over alone for each part of its speed that the program keeps: less is better."""
        return self.p99_ratio.value / max(self.best_effort.value, 1e-6)


@dataclass(frozen=True)
class Forecast:
    """A server beside a program.

    Attributes:
        server: Its name.
        program: Its name.
        gpu: On which both were recorded.
        rate_hz: Requests a second.
        requests: That were simulated.
        alone_p50_ms: Of the server alone, simulated.
        alone_p99_ms: The same.
        modes: By name, as in `MODES`.
        choice: The mode to take.
        cost: Of the chosen mode.
        memory: Of both.
        why: Reasons, for people.
        notes: Limits of this forecast.
    """

    server: str
    program: str
    gpu: str
    rate_hz: float
    requests: int
    alone_p50_ms: float
    alone_p99_ms: float
    modes: Mapping[str, ModeForecast]
    choice: str
    cost: float
    memory: Memory
    why: tuple[str, ...]
    notes: tuple[str, ...]


# ---- recordings ----------------------------------------------------------------------------------------------------


def read(
    path: str | os.PathLike[str], *, request_gap_ms: float | None = None, recording_us: float | None = None
) -> Recording:
    """Reads a recording of one program alone.

    Args:
        path: Of `cudasched collect`.
        request_gap_ms: As of `cudasched.simulate.read_trace`.
        recording_us: Likewise.

    Raises:
        ConfigError: The gap or the cost is out of its limits.
        Error: It cannot be read or replayed (`cudasched.simulate.read_trace`).
    """
    from cudasched import collect

    file = Path(path)
    table = collect.read(file)
    import numpy as np
    import pyarrow.compute as pc

    run = profile.metadata(table)
    trace, rows = simulate.trace_in(table, file, request_gap_ms=request_gap_ms, recording_us=recording_us)
    taken = table.take(rows)
    durations = np.nan_to_num(np.asarray(taken["duration_ns"].to_numpy(zero_copy_only=False), np.float64))
    most, least, told = _shares(taken, run, durations)
    submitted = np.asarray(taken["submitted_ns"])
    starts = submitted[[0, *trace.ends[:-1]]]
    between_ns = int(starts[-1] - starts[0])
    span_ns = max(int(submitted[-1] - submitted[0]), int(trace.gpu_ms * 1e6), 1)
    graphs = np.asarray(pc.equal(taken["kind"].cast("string"), "graph"))
    metadata = table.schema.metadata or {}
    return Recording(
        path=str(file),
        trace=replace(trace, core=trace.core.with_shares(*most)),
        least=replace(trace, core=trace.core.with_shares(*least)),
        launches_per_s=len(rows) / span_ns * 1e9,
        idle=max(0.0, 1 - trace.gpu_ms * 1e6 / span_ns),
        untold=float(durations[~told].sum() / max(durations.sum(), 1)),
        kernels=_longest(taken["function"].cast("string").to_pylist(), durations),
        longest_ms=float(durations[~graphs].max(initial=0) / 1e6),
        request_hz=(len(starts) - 1) / between_ns * 1e9 if between_ns else None,
        requests=len(starts),
        memory_bytes=int(metadata.get(b"cudasched.memory_peak", b"0")),
        gpu_memory_bytes=int(metadata.get(b"cudasched.memory", b"0")),
        identity=(taken["pid"][0].as_py(), int(submitted[0]), int(submitted[-1])),
    )


def unrecorded(trace: simulate.Trace) -> Recording:
    """A recording of a trace that no file has: which part of the GPU its launches take is not told."""
    count = trace.launches
    halves = trace.core.with_shares([0.5] * count, [0.0] * count)
    return Recording(
        path="",
        trace=trace,
        least=replace(trace, core=halves),
        launches_per_s=count / trace.gpu_ms * 1e3,
        idle=0.0,
        untold=1.0,
        kernels=(),
        longest_ms=0.0,
        request_hz=None,
        requests=len(trace.ends),
        memory_bytes=0,
        gpu_memory_bytes=0,
        identity=(hash(trace.name), 0, 0),
    )


def refuse_mismatch(recordings: Sequence[Recording]) -> None:
    """Raises Error where two recordings cannot share a GPU: they are of different GPUs, or of one process."""
    for one, other in itertools.combinations(recordings, 2):
        if one.gpu != other.gpu and one.path and other.path:
            raise Error(
                f"{one.path} was recorded on {one.gpu or 'an unknown GPU'}, {other.path} on "
                f"{other.gpu or 'an unknown GPU'}: record all on the GPU that they are to share"
            )
        if one.identity == other.identity:
            raise Error(
                f"{one.path or one.name} and {other.path or other.name} are recordings of one process: record each "
                "program alone, in a process of its own"
            )


def _shares(taken: pa.Table, run: profile.Run, durations: Any) -> tuple[Any, Any, Any]:
    """The most and the least (multiprocessors, bandwidth) of each launch, 0 to 1, and of which these are told.

    Blocks may take whole multiprocessors or their places on these alone; a graph, half of the GPU or all.
    """
    import numpy as np

    from cudasched.advise._face import work_of

    def column(name: str) -> Any:
        return np.asarray(taken[name].to_numpy(zero_copy_only=False), np.float64)

    sms = max(run.sm_count, 1)
    waves = np.nan_to_num(column("waves"))
    blocks = column("grid_x") * column("grid_y") * column("grid_z")
    told = (waves > 0) & (run.sm_count > 0)
    fewest = 0.5 / sms
    touched = np.where(told, np.clip(blocks / sms, fewest, 1), 1.0)
    places = np.where(told, np.clip(waves, fewest, 1), 0.5)
    peaks = peaks_of(run.gpu)
    work = work_of(taken) if peaks else None
    used = np.full(len(taken), np.nan)
    if peaks and work:
        moved = np.asarray(work["bytes"].to_numpy(zero_copy_only=False), np.float64)
        used = np.clip(moved / np.maximum(durations, 1) * 1e9 / peaks.bytes_per_s, 0, 1)
    most = touched.tolist(), np.nan_to_num(used, nan=1.0).tolist()
    least = np.minimum(places, touched).tolist(), np.nan_to_num(used, nan=0.0).tolist()
    return most, least, told


def _longest(functions: Sequence[str], durations: Any) -> tuple[Kernel, ...]:
    """The functions with the longest launches."""
    longest: dict[str, float] = {}
    total: dict[str, float] = {}
    for function, duration in zip(functions, durations.tolist(), strict=True):
        longest[function] = max(longest.get(function, 0.0), duration)
        total[function] = total.get(function, 0.0) + duration
    chosen = sorted(longest, key=longest.__getitem__, reverse=True)[:_SHOWN_KERNELS]
    every = max(sum(total.values()), 1.0)
    return tuple(Kernel(qualified_name(name), longest[name] / 1e6, total[name] / every) for name in chosen)


# ---- forecasts -----------------------------------------------------------------------------------------------------


def forecast(
    server: Recording,
    program: Recording,
    *,
    rate_hz: float | None = None,
    arrivals: str = "poisson",
    slo_ms: float | None = None,
    alone_ms: float | None = None,
    seconds: float | None = None,
    seed: int = 1,
) -> Forecast:
    """What both cost one another in each mode.

    Args:
        server: Recorded alone.
        program: Recorded alone, on the same kind of GPU.
        rate_hz: Requests a second; None: as in the recording.
        arrivals: As of `cudasched.simulate.latency`.
        slo_ms: Target for P99, ms from the arrival.
        alone_ms: P50 of a request alone, as its client sees it, ms: a recording has no host time before a request's
            first launch and after its last. None: there is none.
        seconds: To simulate; None: four thousand requests, or as long as some hundred thousand launches take.
        seed: Of arrivals.

    Raises:
        ConfigError: A setting has no meaning, or the server does not keep up with its requests.
        Error: The recordings are of different GPUs, or of one process.
    """
    for what, value in (("rate_hz", rate_hz), ("slo_ms", slo_ms), ("alone_ms", alone_ms)):
        if value is not None:
            checked(what, value)
    refuse_mismatch([server, program])
    if rate_hz is None:
        if server.request_hz is None:
            raise ConfigError(
                f"{server.path} holds {counted(server.requests, 'request', 'requests')}: name the rate with --rate-hz, "
                "or with --request-gap-ms how long the GPU has nothing to do between two"
            )
        rate_hz = server.request_hz
    if seconds is None:
        each = program.launches_per_s + rate_hz * server.trace.launches / server.requests
        seconds = max(min(_TIMES * REQUESTS / rate_hz, MOST_LAUNCHES / each, LIMITS["seconds"][1]), 1.0)

    def requests(trace: simulate.Trace, prepare_ms: float = 0.0) -> simulate.Client:
        return simulate.latency(
            trace,
            rate_hz=rate_hz,
            seconds=seconds,
            arrivals=arrivals,
            prepare_ms=prepare_ms,
            seed=seed,
        )

    prepare_ms = 0.0 if alone_ms is None else host_ms(requests(server.trace), alone_ms, seconds)

    def simulated(arms: Sequence[simulate.Arm], asked: simulate.Trace, other: simulate.Trace) -> list[simulate.Row]:
        clients = [requests(asked, prepare_ms), simulate.best_effort(other)]
        return simulate.compare(clients, arms, seconds=seconds, seed=seed)

    arms = [mode.arm for mode in MODES.values()]
    if 1e3 * _request_ms(server) > simulate.SLICE_US:  # the GPU changes contexts within one
        arms.append(replace(MODES[_SLICES].arm, latency_slice_us=simulate.LATENCY_SLICE_US))
    alone, _, *rows = simulated(arms, server.trace, program.trace)
    overlapping = [name for name, mode in MODES.items() if mode.overlaps]
    _, _, *others = simulated([MODES[name].arm for name in overlapping], server.least, program.least)
    managed = rows.pop() if len(rows) > len(MODES) else None
    ends = {name: [row] for name, row in zip(MODES, rows, strict=True)}
    for name, row in zip(overlapping, others, strict=True):
        ends[name].append(row)
    if alone.latency_ms is None or alone.unserved > max(2, alone.latency_ms.n // 10):
        raise ConfigError(
            f"{server.name} alone does not keep up with {rate_hz:g} requests a second: {alone.unserved} are not served "
            "by the end; name a lower rate with --rate-hz"
        )
    longest_ms = seconds * 1e3  # at least so long, where none is served by the end
    never = simulate.Latency(longest_ms, longest_ms, longest_ms, longest_ms, 0)
    modes = {name: _mode(mode, ends[name], alone.latency_ms, never) for name, mode in MODES.items()}
    choice = choose(modes, slo_ms)
    notes = limits_of([server], [program], alone.latency_ms.n)
    if alone_ms is not None and alone.latency_ms.p50 > _SLOWER * alone_ms:
        notes += (
            f"{server.name} alone has a P50 of {alone.latency_ms.p50:.2f} ms in the simulation, not {alone_ms:g}. If "
            "that is of this rate, its host was slower while it was recorded: raise --recording-us until both agree",
        )
    return Forecast(
        server=server.name,
        program=program.name,
        gpu=server.gpu,
        rate_hz=rate_hz,
        requests=alone.latency_ms.n,
        alone_p50_ms=alone.latency_ms.p50,
        alone_p99_ms=alone.latency_ms.p99,
        modes=modes,
        choice=choice,
        cost=modes[choice].cost,
        memory=memory_of([server, program]),
        why=_why(server, program, modes, choice, slo_ms, managed),
        notes=notes,
    )


def host_ms(requests: simulate.Client, alone_ms: float, seconds: float) -> float:
    """The host's part of a request, ms: the excess of its P50 alone over P50 of its simulation alone."""
    own = simulate.run([requests], simulate.Arm("open", offload=False), seconds=seconds).latency_ms
    return max(0.0, alone_ms - own.p50) if own else 0.0


def _mode(mode: Mode, ends: Sequence[simulate.Row], alone: simulate.Latency, never: simulate.Latency) -> ModeForecast:
    latencies = [row.latency_ms or never for row in ends]
    p50, p99 = [each.p50 for each in latencies], [each.p99 for each in latencies]
    return ModeForecast(
        p50_ms=mode.interval("p50", p50),
        p99_ms=mode.interval("p99", p99),
        p50_ratio=mode.interval("p50", [value / alone.p50 for value in p50]),
        p99_ratio=mode.interval("p99", [value / alone.p99 for value in p99]),
        best_effort=mode.interval("best_effort", [row.best_effort_ratio or 0.0 for row in ends]),
        settings=mode.settings,
    )


def _request_ms(server: Recording) -> float:
    return server.trace.gpu_ms / server.requests


def choose(modes: Mapping[str, ModeForecast], slo_ms: float | None = None) -> str:
    """The mode in which the program keeps most, of those that are sure to meet the target; else that of least cost."""
    good = [name for name, mode in modes.items() if slo_ms is not None and mode.p99_ms.high <= slo_ms]
    if good:
        return max(good, key=lambda name: modes[name].best_effort.value)
    return min(modes, key=lambda name: modes[name].cost)


def _why(
    server: Recording,
    program: Recording,
    modes: Mapping[str, ModeForecast],
    choice: str,
    slo_ms: float | None,
    managed: simulate.Row | None,
) -> tuple[str, ...]:
    longest = ", ".join(f"{one.name} {one.longest_ms:.3g} ms ({one.share:.0%})" for one in program.kernels)
    said = [
        f"the longest launches of {program.name}, and their function's share of its GPU time: {longest}",
        f"{program.name} leaves the GPU idle for {program.idle:.0%} of its time",
    ]
    if not MODES[choice].overlaps:
        said.append(
            "time slices interrupt its kernels: a request waits for a change of contexts, 0.13 ms"
            if MODES[choice].arm.time_slice_us
            else "a request waits for the program's time slice, up to 2 ms"
        )
    else:
        said.append(
            f"nothing interrupts kernels here: a request that comes unannounced may wait {program.longest_ms:.3g} ms"
        )
    if choice == _SLICES and managed and managed.latency_ms:
        said.append(
            f"a request of {server.name} takes {_request_ms(server):.3g} ms of the GPU, which changes contexts each "
            "2 ms of it, but not with the server under `cudasched run --class latency`: by simulation it has a P50 of "
            f"{managed.latency_ms.p50:.3g} ms then, "
            f"and {program.name} {managed.best_effort_ratio or 0:.0%} of best effort"
        )
    if slo_ms is not None and modes[choice].p99_ms.high > slo_ms:
        said.append(f"no mode is sure to have P99 within {slo_ms:g} ms")
    return tuple(said)


def limits_of(servers: Sequence[Recording], others: Sequence[Recording], requests: int) -> tuple[str, ...]:
    """Limits of what is forecast of servers and programs, for people; P99 is of so many requests."""
    recordings = [*servers, *others]
    notes = ["copies between host and GPU are not in a recording, nor in the forecast"]
    notes += [f"{each.name}: {each.trace.slowed}" for each in recordings if each.trace.slowed]
    notes += [
        f"{each.name}: {counted(each.requests, 'recorded request stands', 'recorded requests stand')} for all "
        f"({each.trace.source}): record more, less than a second apart"
        for each in servers
        if each.path and each.requests < _FEW_REQUESTS
    ]
    gpu = next((each.gpu for each in recordings if each.gpu), "")
    if not any(name in gpu for name in MEASURED_ON):
        notes.append(
            f"the intervals are of measurements on {' and '.join(MEASURED_ON)}; on {gpu or 'this GPU'} nothing "
            "was measured"
        )
    if requests < REQUESTS:
        notes.append(f"P99 is of {requests} simulated requests, fewer than {REQUESTS}")
    untold = max(each.untold for each in recordings)
    if untold > 0.05:
        notes.append(
            f"of up to {untold:.0%} of the GPU time (graphs) the recording does not tell how much of the GPU it takes: "
            "intervals under MPS and in one process are wider"
        )
    return tuple(notes)


def rank(server: Recording, programs: Iterable[Recording], **options: Any) -> list[Forecast]:
    """Forecasts of a server beside each program, the best partner first (`Forecast.cost`).

    Args:
        server: Recorded alone.
        programs: Likewise.
        options: Of `forecast`.

    Raises:
        ConfigError, Error: As `forecast`.
    """
    found = [forecast(server, program, **options) for program in programs]
    return sorted(found, key=lambda one: (one.memory.fits is False, one.cost))
