"""How much load a GPU bears: the highest rates of a mix of programs at which every server's P99 is within its SLO.

::

    from cudasched.advise import capacity

    found = capacity.fit(capacity.read("models.toml"))
    print(found.choice, found.modes[found.choice].scale, found.modes[found.choice].limit)

The file has a table for each program (docs/advise.md). A bisection over the offered rate simulates the mix in each mode
of `cudasched.advise.beside`, whose intervals hold here, too. All rates grow by one factor, and the order and the
relative distances of arrivals stay, so that P99 differs by the load alone.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cudasched import config, simulate
from cudasched._text import closest, shown
from cudasched.advise import beside
from cudasched.advise.beside import Interval, Memory, Mode, Recording
from cudasched.demo.arrivals import ARRIVALS
from cudasched.errors import ConfigError, Error
from cudasched.simulate._limits import LIMITS, checked

__all__ = ["Fit", "Load", "Program", "fit", "read"]

_NUMBERS = ("request_ms", "rate_hz", "slo_ms", "alone_ms", "request_gap_ms", "recording_us")
_KEYS = ("recording", "class", *_NUMBERS, "arrivals")
_OF_BEST_EFFORT = ("recording", "recording_us", "class")
_OF_RECORDINGS = ("request_gap_ms", "recording_us")
_TIMES = 4
"""So many times the requests that a P99 needs: with fewer, a knee differs by a tenth from seed to seed."""
_MOST_LAUNCHES = beside.MOST_LAUNCHES // 4
"""Of one simulation, of which a search has tens."""
_MOST_SECONDS = 1_800.0
_HOST_S = 10.0
"""Of the simulation of a server alone that tells its host's time."""
_STEPS_PER_DOUBLING, _DOUBLINGS = 16, 6
_REQUEST_KERNELS = 30
_SLICE_OF_SEVERAL_US = 1_200.0
"""As ``schedule/slice_length.hpp`` chooses it where several best-effort programs have work."""


@dataclass(frozen=True)
class Program:
    """A program of a mix.

    Attributes:
        recording: Of the program alone.
        client_class: As `cudasched run --class`.
        rate_hz: Mean rate of requests; 0 of best effort.
        slo_ms: Target for P99, ms from the arrival; None: there is none.
        arrivals: As of `cudasched.simulate.latency`.
        alone_ms: As of `cudasched.advise.beside.forecast`.
    """

    recording: Recording
    client_class: Literal["latency", "best_effort"]
    rate_hz: float = 0.0
    slo_ms: float | None = None
    arrivals: str = "poisson"
    alone_ms: float | None = None


@dataclass(frozen=True)
class Load:
    """One mode.

    Attributes:
        scale: Load over that of the mix; 0: no load meets every SLO.
        requests: About how many are simulated at that load, of the server that has the fewest.
        p99_ms: Of each server at that load, from the arrival.
        best_effort: Speed of the best-effort programs at that load, of that alone x the time that requests leave; None
            where there are none.
        limit: Why not more; empty: nothing is missed.
        settings: How to start the programs so.
    """

    scale: Interval
    requests: int
    p99_ms: Mapping[str, Interval]
    best_effort: Interval | None
    limit: str
    settings: str


@dataclass(frozen=True)
class Fit:
    """The load that a GPU bears.

    Attributes:
        gpu: On which the programs were recorded; empty: not known.
        rates_hz: Of each server in the mix.
        slos_ms: Likewise.
        modes: By name, as in `cudasched.advise.beside.MODES`.
        choice: The mode to take: of most load, then of most best effort.
        memory: Of all programs.
        notes: Limits of this forecast.
    """

    gpu: str
    rates_hz: Mapping[str, float]
    slos_ms: Mapping[str, float | None]
    modes: Mapping[str, Load]
    choice: str
    memory: Memory
    notes: tuple[str, ...]


# ---- the file ------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> dict[str, Program]:
    """Reads a mix: a TOML file with a table for each program, and the recordings that it names.

    Args:
        path: The file; paths in it are relative to its place.

    Raises:
        ConfigError: A key or a value has no meaning, or a recording cannot be read; with file, line and table.
    """
    file = Path(path)
    tables, text = config.read_toml(file)
    if not tables:
        raise ConfigError(f"{file} names no program: [name] begins a program's table")
    found: dict[str, Program] = {}
    for name, table in tables.items():
        first = line = config.line_of(text, name)
        try:
            if not isinstance(table, dict):
                raise ConfigError(f"a program is a table, not {shown(table)}")
            for key, value in table.items():
                line = first - 1 + config.line_of("\n".join(text.splitlines()[first - 1 :]), key)
                _check(key, value)
            line = first
            found[name] = _program(name, table, file.parent)
        except Error as error:
            raise ConfigError(f"{file}, line {line}, [{name}]: {error}") from None
    return found


def _check(key: str, value: object) -> None:
    if key not in _KEYS:
        raise ConfigError(f"{key} is not known{closest(key, _KEYS) or '; there are ' + ', '.join(_KEYS)}")
    if key in _NUMBERS:
        checked(key, value)
    elif not isinstance(value, str):
        raise ConfigError(f"{key} is a text, not {shown(value)}")
    elif key == "arrivals" and value not in ARRIVALS:
        raise ConfigError(f"arrivals = {shown(value)}: there are {', '.join(ARRIVALS)}")


def _program(name: str, table: Mapping[str, Any], directory: Path) -> Program:
    client_class = config.parse_class(table.get("class", ""))
    if client_class == "normal":
        raise ConfigError("class = 'normal': a mix has latency and best_effort programs")
    if client_class == "best_effort" and (other := next((key for key in table if key not in _OF_BEST_EFFORT), "")):
        raise ConfigError(f"{other} is of latency programs: best effort has no requests")
    if ("recording" in table) == ("request_ms" in table):
        raise ConfigError("it needs a recording, or of a server request_ms; one of the two")
    if "request_ms" in table and (other := next((key for key in _OF_RECORDINGS if key in table), "")):
        raise ConfigError(f"{other} is of a recording, and request_ms needs none")
    if "recording" in table:
        of_recording = {key: table[key] for key in _OF_RECORDINGS if key in table}
        recording = beside.read(directory / table["recording"], **of_recording)
    else:
        recording = beside.unrecorded(simulate.request(table["request_ms"], kernels=_REQUEST_KERNELS, name=name))
    recording = replace(recording, trace=replace(recording.trace, name=name), least=replace(recording.least, name=name))
    if client_class == "best_effort":
        return Program(recording, "best_effort")
    rate_hz = table.get("rate_hz", recording.request_hz)
    if rate_hz is None:
        raise ConfigError(f"rate_hz is needed: the recording holds {recording.requests} request")
    options = {key: table[key] for key in ("slo_ms", "arrivals", "alone_ms") if key in table}
    return Program(recording, "latency", rate_hz, **options)


# ---- the search ----------------------------------------------------------------------------------------------------


def fit(programs: Mapping[str, Program], *, slo: bool = True, seed: int = 1) -> Fit:
    """The load that a GPU bears in each mode.

    Args:
        programs: By name, each recorded alone on the same kind of GPU.
        slo: Find the highest load at which every server's P99 is within its SLO; else simulate the mix as it is.
        seed: Of arrivals.

    Raises:
        ConfigError: There is no server, or a server has no SLO.
        Error: The recordings are of different GPUs, or of one process.
    """
    beside.refuse_mismatch([program.recording for program in programs.values()])
    mix = _Mix(programs, seed)
    if not mix.servers:
        raise ConfigError("the mix has no program of class latency, so nothing bounds its load")
    if slo and (without := [name for name, server in mix.servers.items() if server.slo_ms is None]):
        raise ConfigError(f"{', '.join(without)}: name slo_ms, which bounds the load")
    modes = {name: mix.load(name, slo) for name in beside.MODES}
    servers, others = ([one.recording for one in each.values()] for each in (mix.servers, mix.others))
    recordings = servers + others
    notes = beside.limits_of(servers, others, min(load.requests for load in modes.values()))
    if len(programs) != 2:
        notes = (*notes, "the intervals are of one server beside one program; of other mixes nothing was measured")
    return Fit(
        gpu=next((recording.gpu for recording in recordings if recording.gpu), ""),
        rates_hz={name: server.rate_hz for name, server in mix.servers.items()},
        slos_ms={name: server.slo_ms for name, server in mix.servers.items()},
        modes=modes,
        choice=max(modes, key=lambda name: _worth(modes[name])),
        memory=beside.memory_of(recordings),
        notes=notes,
    )


def _worth(load: Load) -> tuple[float, bool, float]:
    return load.scale.value, not load.limit, load.best_effort.value if load.best_effort else 0.0


class _Mix:
    """Simulations of a mix; those of a load and mode are done once."""

    def __init__(self, programs: Mapping[str, Program], seed: int) -> None:
        self.servers = {name: one for name, one in programs.items() if one.client_class == "latency"}
        self.others = {name: one for name, one in programs.items() if one.client_class == "best_effort"}
        self._slos_ms = {name: one.slo_ms for name, one in self.servers.items() if one.slo_ms is not None}
        self._seed = seed
        self._seeds = {name: seed + number for number, name in enumerate(self.servers)}
        self._host_ms: dict[str, float] = {}
        for name, one in self.servers.items():
            if one.alone_ms is not None:
                alone = self._server(name, one.recording.trace, 1.0, _HOST_S)
                self._host_ms[name] = beside.host_ms(alone, one.alone_ms, _HOST_S)
        self.p99_ms = functools.cache(self._p99_ms)

    def _server(self, name: str, trace: simulate.Trace, scale: float, seconds: float) -> simulate.Client:
        one = self.servers[name]
        return simulate.latency(
            trace,
            rate_hz=one.rate_hz * scale,
            seconds=seconds,
            arrivals=one.arrivals,
            prepare_ms=self._host_ms.get(name, 0.0),
            seed=self._seeds[name],
        )

    def _seconds(self, scale: float) -> float:
        """Of arrivals."""
        launches = [
            one.rate_hz * one.recording.trace.launches / one.recording.requests for one in self.servers.values()
        ]
        per_s = scale * sum(launches) + sum(one.recording.launches_per_s for one in self.others.values())
        slowest_hz = min(one.rate_hz for one in self.servers.values()) * scale
        return min(max(min(_TIMES * beside.REQUESTS / slowest_hz, _MOST_LAUNCHES / per_s), 1.0), _MOST_SECONDS)

    def _ends(self, mode: Mode, scale: float) -> Iterator[tuple[list[simulate.Client], list[simulate.Client]]]:
        """Servers and best-effort programs, once for each end of what recordings do not tell."""
        for least in (False, True) if mode.overlaps else (False,):
            traces = {
                name: one.recording.least if least else one.recording.trace
                for name, one in (*self.servers.items(), *self.others.items())
            }
            seconds = self._seconds(scale)
            yield (
                [self._server(name, traces[name], scale, seconds) for name in self.servers],
                [simulate.best_effort(traces[name]) for name in self.others],
            )

    def _simulated_s(self, scale: float) -> float:
        """A request that has not been served by then is late."""
        seconds = self._seconds(scale)
        return seconds + min(max(self._slos_ms.values(), default=0.0) / 1e3, seconds)

    def _arm(self, mode: Mode) -> simulate.Arm:
        several = mode.arm.time_slice_us is not None and len(self.others) > 1
        return replace(mode.arm, time_slice_us=_SLICE_OF_SEVERAL_US) if several else mode.arm

    def _p99_ms(self, mode_name: str, scale: float, best_effort: bool = True) -> dict[str, Interval]:
        """Of each server at a load, with the best-effort programs or without; unserved requests count as late."""
        mode = beside.MODES[mode_name]
        ends = []
        for servers, others in self._ends(mode, scale):
            clients = servers + others if best_effort else servers
            row = simulate.run(clients, self._arm(mode), seconds=self._simulated_s(scale), seed=self._seed)
            ends.append([latency.p99 if latency else 0.0 for latency in row.by_client])
        return {name: mode.interval("p99", each) for name, *each in zip(self.servers, *ends, strict=True)}

    def _best_effort(self, mode: Mode, scale: float) -> Interval:
        ends = []
        for servers, others in self._ends(mode, scale):
            seconds = self._simulated_s(scale)
            rows = simulate.compare(servers + others, [self._arm(mode)], seconds=seconds, seed=self._seed)
            ends.append(rows[-1].best_effort_ratio or 0.0)
        return mode.interval("best_effort", ends)

    def _missed(self, p99_ms: Mapping[str, Interval], end: str = "value") -> list[str]:
        """The servers beyond their SLOs, the worst first."""
        over = {name: getattr(p99_ms[name], end) / slo_ms for name, slo_ms in self._slos_ms.items()}
        return sorted((name for name in over if over[name] > 1), key=over.__getitem__, reverse=True)

    def _scales(self) -> list[float]:
        """From a sixty-fourth of the load at which each server fills the GPU to that load, where rates allow it."""
        rates = [one.rate_hz for one in self.servers.values()]
        request_ms = [one.recording.trace.gpu_ms / one.recording.requests for one in self.servers.values()]
        top = len(rates) / sum(rate * ms / 1e3 for rate, ms in zip(rates, request_ms, strict=True))
        scales = [top * 2 ** (step / _STEPS_PER_DOUBLING) for step in range(-_DOUBLINGS * _STEPS_PER_DOUBLING, 1)]
        least, most = LIMITS["rate_hz"]
        return [scale for scale in scales if least <= min(rates) * scale and max(rates) * scale <= most] or [1.0]

    def load(self, name: str, slo: bool) -> Load:
        """Of a mode: at the highest load of every SLO, or at that of the mix."""
        mode = beside.MODES[name]
        at, scale = 1.0, Interval(1.0, 1.0, 1.0)
        beyond: float | None = 1.0
        if slo:
            scales = self._scales()

            def first_missed(end: str) -> int:
                return bisect.bisect_left(
                    scales, True, key=lambda scale: bool(self._missed(self.p99_ms(name, scale), end))
                )

            found = [first_missed(end) for end in ("high", "value", "low")]
            scale = Interval(*(scales[place - 1] if place else 0.0 for place in found))
            at = scale.value or scales[0]
            beyond = scales[found[1]] if found[1] < len(scales) else None
        return Load(
            scale=scale,
            requests=round(self._seconds(at) * at * min(one.rate_hz for one in self.servers.values())),
            p99_ms=self.p99_ms(name, at),
            best_effort=self._best_effort(mode, at) if self.others else None,
            limit=self._limit(name, beyond),
            settings=mode.settings,
        )

    def _limit(self, name: str, beyond: float | None) -> str:
        """Which server misses its SLO at that load, and why."""
        if beyond is None:
            return "the GPU's time: no SLO is missed before requests fill it"
        missed = self._missed(self.p99_ms(name, beyond))
        if not missed:
            return ""
        worst, without = missed[0], self.p99_ms(name, beyond, best_effort=False)[missed[0]].value
        cause = "requests alone" if without > self._slos_ms[worst] else "best effort"
        return (
            f"{worst}: P99 is over {self._slos_ms[worst]:g} ms at {beyond:.2f} x the rates, because of {cause}: "
            f"without best effort it is {without:.2f} ms"
        )
