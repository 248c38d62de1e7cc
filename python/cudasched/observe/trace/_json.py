"""Writes a timeline in the JSON form that chrome://tracing, Perfetto and Speedscope read: times in us."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import BinaryIO

from cudasched.observe.trace._timeline import Args, Sink, Track

__all__ = ["JsonSink"]


class JsonSink(Sink):
    """One trace, written to a file piece by piece. Times are of CLOCK_MONOTONIC. A track is a thread of its process."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._first = True
        self._tracks = 0
        self._counters: dict[Track, str] = {}
        self._names: dict[Track, str] = {}
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')

    def process(self, pid: int, name: str, command: Iterable[str], boot_offset_ns: int, real_offset_ns: int) -> Track:
        self._pid = pid
        self._names = {}
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        return 0

    def track(self, parent: Track, name: str, rank: int) -> Track:
        self._tracks += 1
        full = f"{self._names[parent]}: {name}" if parent in self._names else name
        self._names[self._tracks] = full
        about = {"pid": self._pid, "tid": self._tracks}
        self._write({"ph": "M", "name": "thread_name", **about, "args": {"name": full}})
        self._write({"ph": "M", "name": "thread_sort_index", **about, "args": {"sort_index": rank}})
        return self._tracks

    def counter_track(self, parent: Track, name: str, unit: str) -> Track:
        self._tracks += 1
        self._counters[self._tracks] = f"{name}, {unit}"
        return self._tracks

    def slice(self, track: Track, name: str, category: str, begin_ns: int, end_ns: int, args: Args) -> None:
        self._write(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": self._pid,
                "tid": track,
                "ts": begin_ns / 1000,
                "dur": (end_ns - begin_ns) / 1000,
                "args": dict(args),
            }
        )

    def count(self, track: Track, time_ns: int, value: int) -> None:
        about = {"ph": "C", "name": self._counters[track], "pid": self._pid, "ts": time_ns / 1000}
        self._write({**about, "args": {"value": value}})

    def close(self) -> None:
        """Ends the document."""
        self._file.write(b"\n]}\n")

    def _write(self, event: dict[str, object]) -> None:
        self._file.write((b"\n" if self._first else b",\n") + json.dumps(event).encode())
        self._first = False
