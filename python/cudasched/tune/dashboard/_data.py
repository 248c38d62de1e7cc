"""The page's content as plain data: runs as tables, grids for heat maps, Pareto fronts. No Streamlit in here."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched._text import one_line
from cudasched.errors import ConfigError, Error
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from cudasched.tune.recording import Recording

__all__ = ["GPU", "Entry", "Layer", "entries", "grid", "layers", "pareto", "recorded"]


GPU = threading.Lock()
"""Held while a page measures: two at once on a GPU would each be slower by the other."""


@dataclass(frozen=True)
class Entry:
    """A configuration with a measurement."""

    configuration: Mapping[str, Any]
    measurement: Measurement

    @property
    def time_us(self) -> float | None:
        """The time, us."""
        return self.measurement.time_us

    def row(self) -> dict[str, Any]:
        """The text for a table."""
        made = self.measurement
        return {
            **self.configuration,
            "us": made.time_us,
            "status": made.status,
            "samples": len(made.samples_us),
            "registers": made.registers,
            "occupancy": made.occupancy,
            "workspace MB": made.workspace_bytes / 1e6,
            "MHz": made.sm_clock_mhz or None,
            "compile s": made.compile_s,
            **made.profile,
            "log": made.message,
        }


def entries(database: Database, key: Key) -> list[Entry]:
    """All measurements of a problem, the fastest first, those without a time last."""
    found = [Entry(json.loads(text), made) for text, made in database.get(key).items()]
    return sorted(found, key=lambda one: math.inf if one.time_us is None else one.time_us)


def recorded(recording: Recording) -> list[Entry]:
    """The entries of a recording."""
    pairs = zip(recording.problem.configurations, recording.measurements, strict=True)
    found = [Entry(configuration, made) for configuration, made in pairs]
    return sorted(found, key=lambda one: math.inf if one.time_us is None else one.time_us)


def grid(found: Sequence[Entry], x: str, y: str) -> tuple[list[Any], list[Any], list[list[float | None]]]:
    """The best time for each pair of values of two parameters: values of x, values of y, and a row for each y."""

    def values(name: str) -> list[Any]:
        seen = {one.configuration[name] for one in found}
        return sorted(seen, key=lambda value: (isinstance(value, str), value))

    found = [one for one in found if {x, y} <= one.configuration.keys()]  # one of an earlier space may have less
    xs, ys = values(x), values(y)
    best: dict[tuple[Any, Any], float] = {}
    for one in found:
        if one.time_us is not None:
            place = one.configuration[x], one.configuration[y]
            best[place] = min(best.get(place, math.inf), one.time_us)
    return xs, ys, [[best.get((a, b)) for a in xs] for b in ys]


def cost(one: Entry, what: str) -> float:
    """A configuration's costs beside its time."""
    made = one.measurement
    return {
        "registers": float(made.registers),
        "workspace": made.workspace_bytes / 1e6,
        "shared memory": made.static_shared_bytes / 1024,
        "unused occupancy": 1 - made.occupancy,
    }[what]


def pareto(found: Sequence[Entry], what: str) -> list[Entry]:
    """Those that no other one beats in both time and another cost, the fastest first."""
    timed = sorted((one for one in found if one.time_us is not None), key=lambda one: (one.time_us, cost(one, what)))
    front: list[Entry] = []
    least = math.inf
    for one in timed:
        if cost(one, what) < least:
            least = cost(one, what)
            front.append(one)
    return front


@dataclass(frozen=True)
class Layer:
    """One kernel of a transformer layer.

    Attributes:
        kernel: The name.
        baseline_us: The kernel's earlier time.
        tuned_us: The kernel's time with the best configuration.
    """

    kernel: str
    baseline_us: float
    tuned_us: float


def layers(text: str) -> list[Layer]:
    """A layer's kernels from JSON: ``{"kernels": [{"kernel", "baseline_us", "tuned_us"}, ...]}``.

    Raises:
        ConfigError: The text is of another form.
    """
    try:
        found = [
            Layer(str(one["kernel"]), float(one["baseline_us"]), float(one["tuned_us"]))
            for one in json.loads(text)["kernels"]
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"it is no layer: {one_line(repr(error))[:200]}") from None
    if not found or not all(0 < time < math.inf for one in found for time in (one.baseline_us, one.tuned_us)):
        raise ConfigError("a layer has kernels, and their times are over 0 and finite")
    return found


def open_file(path: Path) -> tuple[str, Any]:
    """A file's kind and its content: "recording", "layer", "report" (of `advise`) or "data" (of `collect`).

    Raises:
        Error: The file is none of these.
    """
    if path.suffix == ".npz":
        return "recording", Recording.load(path)
    if path.suffix == ".json":
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            return "layer", layers(text)
        except ConfigError:
            from cudasched.advise import Report

            try:
                return "report", Report.model_validate_json(text)
            except ValueError as error:
                raise Error(
                    f"{path.name}: it is neither a report of `advise` nor a layer: {str(error)[:200]}"
                ) from None
    if path.suffix == ".parquet":
        from cudasched.advise import advise

        return "report", advise(path)
    raise Error(f"{path.name}: the dashboard opens .npz, .json and .parquet")
