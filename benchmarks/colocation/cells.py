"""Cells of a colocation and the file that keeps their outcomes, one at a time, so that a run can stop anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results.schema import Meta, replace

#: Stand where the arm does in cells that measure one load by itself: a best-effort load's kernel durations, and how
#: long a request keeps the GPU busy.
KERNELS = "kernels"
BUSY = "busy"


@dataclass(frozen=True)
class Cell:
    """One arm with its loads, run once.

    Attributes:
        arm: Its name.
        latency: Latency loads, joined by +.
        best_effort: Best-effort loads, joined by +.
        arrivals: Their kind.
        rates_hz: Requests a second of each latency load, joined by + in their order.
        seconds: How long.
        lead_us: cudasched's, or `auto`; 0 where no cudasched is in it.
        repeat: Which.
        slo_ms: Latency target that the regions of requests are given; 0: none.
        scene: Where the same loads and arms are measured in several surroundings, which of them.
    """

    arm: str
    latency: str
    best_effort: str
    arrivals: str
    rates_hz: str
    seconds: float
    lead_us: float | str
    repeat: int
    slo_ms: float = 0.0
    scene: str = ""

    @classmethod
    def kernels(cls, best_effort: str) -> Cell:
        """The cell of a best-effort load's kernel durations."""
        return cls(KERNELS, "", best_effort, "", "", 0.0, 0.0, 0)

    @classmethod
    def busy(cls, latency: str) -> Cell:
        """The cell of how long a request of one latency load keeps the GPU busy."""
        return cls(BUSY, latency, "", "", "", 0.0, 0.0, 0)


@dataclass
class Outcome:
    """What came of a cell: a result, or an error."""

    cell: Cell
    result: dict[str, Any] | None
    error: str | None
    date: str


class CellFile:
    """Outcomes by cell, in a JSON file that is replaced after each.

    Args:
        path: The file; read if it is there.
        meta: Of the run that adds to it; None keeps what the file says.

    Raises:
        ValueError: The file is not one of these.
    """

    def __init__(self, path: Path, meta: Meta | None = None) -> None:
        self.path = path
        self.outcomes: dict[Cell, Outcome] = {}
        self.meta = meta
        if path.exists():
            try:
                stored = json.loads(path.read_text())
                for entry in stored["cells"]:
                    outcome = Outcome(Cell(**entry.pop("cell")), **entry)
                    self.outcomes[outcome.cell] = outcome
                self.meta = meta or Meta.model_validate(stored["meta"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a file of cells ({error}); remove it or name another --out") from error

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those without a result; an error is no result."""
        return [cell for cell in cells if cell not in self.outcomes or self.outcomes[cell].result is None]

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome; an error does not take the place of a result."""
        known = self.outcomes.get(outcome.cell)
        if outcome.result is None and known is not None and known.result is not None:
            return
        self.outcomes[outcome.cell] = outcome

    def save(self) -> None:
        """Replaces the file."""
        stored = {
            "meta": self.meta.model_dump() if self.meta else None,
            "cells": [asdict(outcome) for outcome in self.outcomes.values()],
        }
        replace(self.path, json.dumps(stored) + "\n")

    def merge(self, other: CellFile) -> None:
        """Takes over the outcomes of a later run; its results replace results, and its meta is the meta now."""
        for outcome in other.outcomes.values():
            self.add(outcome)
        self.meta = other.meta or self.meta

    @classmethod
    def merged(cls, paths: Sequence[Path], out: Path) -> CellFile:
        """Several runs' cells in one file beside `out`, saved; later files win. Raises ValueError."""
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path}: no such file")
        first, *others = map(cls, paths)
        for other in others:
            first.merge(other)
        first.path = cells_path(out)
        first.save()
        return first


def cells_path(out: Path) -> Path:
    """Where the cells behind a results file are kept."""
    return out.with_suffix(".cells")
