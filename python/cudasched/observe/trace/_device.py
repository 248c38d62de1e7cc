"""The device's own times of a traced process: from the journals that the collector wrote beside the trace.

A row of a journal and a record of the trace are of one launch where both have the kernel's name. The record's launch
must also be under way at the row's time of submission. Needs numpy.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched.collect._journal import Journal, scan
from cudasched.errors import Error
from cudasched.observe.trace._file import ProcessTrace

__all__ = ["DeviceTimes", "Row", "check", "journals"]

_MOST_AT_ONCE = 32  # launches under way, of as many threads


def check() -> None:
    """Can journals be read?

    Raises:
        Error: numpy is not installed.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise Error(f"device times need numpy ({error}): pip install 'cudasched[collect]'") from None


@dataclass(frozen=True)
class Row:
    """One launch on the device.

    Attributes:
        name: The kernel's, as the driver gives it; empty for a graph.
        graph: A graph's number; 0: it is a kernel.
        submitted_ns: When the driver was called, CLOCK_MONOTONIC.
        start_ns: When the device began.
        duration_ns: The launch's time.
        stream: The number in the journal.
        device: Ordinal.
        launch: Stream handle, device, region and kernel or graph in the trace; None where the trace has no such launch.
    """

    name: str
    graph: int
    submitted_ns: int
    start_ns: int
    duration_ns: int
    stream: int
    device: int
    launch: tuple[int, int, int, int] | None


class DeviceTimes:
    """Of one process, in a directory where it may have left journals.

    Args:
        directory: With the journals.
        trace: Of the process.
        traces: Of all processes: a program that becomes another (exec) keeps its pid.
    """

    def __init__(self, directory: Path, trace: ProcessTrace, traces: Iterable[ProcessTrace]) -> None:
        of_pid = [each for each in traces if each.pid == trace.pid]

        def is_own(meta: dict[str, Any]) -> bool:
            """Whether a journal was begun with this trace, and no other."""
            began = meta.get("started_ns")
            began_ns = began if isinstance(began, int) else 0
            return meta.get("pid") == trace.pid and trace is min(of_pid, key=lambda t: abs(t.started_ns - began_ns))

        self._paths = [path for path in sorted(directory.glob("*.journal")) if is_own(scan(path).meta)]
        self._begins, self._ends = array("q"), array("q")
        self._streams, self._devices, self._regions, self._names = array("Q"), array("H"), array("H"), array("L")
        self._whats = array("Q")
        self._numbers: dict[str, int] = {}

    def launched(self, begin_ns: int, end_ns: int, name: str, stream: int, device: int, region: int, what: int) -> None:
        """The trace has this launch. In order of time, nearly."""
        self._begins.append(begin_ns)
        self._ends.append(end_ns)
        self._names.append(self._numbers.setdefault(name, len(self._numbers)))
        self._streams.append(stream)
        self._devices.append(device)
        self._regions.append(region)
        self._whats.append(what)

    def rows(self) -> Iterator[Row]:
        """The launches that the device has run, with times.

        Raises:
            Error: A file is no journal.
            OSError: A file cannot be read.
        """
        if any(a > b for a, b in zip(self._begins, self._begins[1:], strict=False)):
            order = sorted(range(len(self._begins)), key=self._begins.__getitem__)
            for name in ("_begins", "_ends", "_streams", "_devices", "_regions", "_names", "_whats"):
                column = getattr(self, name)
                setattr(self, name, array(column.typecode, (column[place] for place in order)))
        for path in self._paths:
            journal = Journal(path)
            for block in journal.blocks():
                rows = block.rows
                for function, graph, submitted_ns, start_ns, duration_ns, stream, device, is_graph in zip(
                    *(rows[name].tolist() for name in ("function", "graph", "submitted_ns", "start_ns", "duration_ns")),
                    *(rows[name].tolist() for name in ("stream", "device", "is_graph")),
                    strict=True,
                ):
                    if duration_ns < 0 or start_ns < 0:
                        continue
                    name = "" if is_graph else journal.functions.get(function, "")
                    found = self._find(submitted_ns, name)
                    yield Row(
                        name, graph + 1 if is_graph else 0, submitted_ns, start_ns, duration_ns, stream, device, found
                    )

    def _find(self, submitted_ns: int, name: str) -> tuple[int, int, int, int] | None:
        number = self._numbers.get(name)
        last = bisect.bisect_right(self._begins, submitted_ns) - 1
        for place in range(last, max(last - _MOST_AT_ONCE, -1), -1):
            if self._ends[place] >= submitted_ns and self._names[place] == number:
                return self._streams[place], self._devices[place], self._regions[place], self._whats[place]
        return None


def journals(directory: Path) -> bool:
    """Are there any?

    Raises:
        Error: numpy is not installed, and there are.
    """
    found = any(directory.glob("*.journal"))
    if found:
        check()
    return found
