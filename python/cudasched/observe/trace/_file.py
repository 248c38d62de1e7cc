"""Reads the files that a traced process writes (``csrc/telemetry/trace_file.hpp``).

Each file is whole up to its last block, for any end of its process. The first block that is cut short or damaged, and
all later ones, are left out. All values of a file are checked against their bounds.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cudasched.collect._journal import json_of, texts_of
from cudasched.errors import Error

__all__ = ["RECORD", "VERSION", "Gpu", "Kind", "ProcessTrace", "Record", "Resources", "Shape", "processes"]

VERSION = 2
_FILE = struct.Struct("<8sII")
_BLOCK = struct.Struct("<4sIQII")
_MAGIC = b"CSDTRACE"
_BLOCK_MAGIC = b"TBLK"
_META, _TEXTS, _RECORDS, _DROPPED, _END = range(1, 6)
_MOST_BYTES = 1 << 30
_LONGEST_NAME = 1024
_NAME = re.compile(r"trace-(\d+)-(\d+)-(\d+)\.records")

RECORD = struct.Struct("<qQQIBBBBHHI")
"""``TraceRecord``: time, ``what``, stream, duration (low and high), kind, place, detail, region, thread, value."""

Record = tuple[int, int, int, int, int, int, int, int, int, int, int]


class Kind:
    """A record's kind: ``enum class TraceKind``."""

    LAUNCH, PUSH, WAIT, TIMED, REGION_BEGIN, REGION_END, COUNTER = range(1, 8)


@dataclass(frozen=True)
class Shape:
    """Of a kernel's launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int


@dataclass(frozen=True)
class Resources:
    """A kernel's resources: registers and local memory a thread, static shared memory a block; most threads a block."""

    registers: int
    local_bytes: int
    static_shared_bytes: int
    max_threads: int


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties; numbers are 0 where unknown to the driver."""

    compute_capability: str
    sm_count: int
    max_threads_per_sm: int


@dataclass
class ProcessTrace:
    """One process's trace; complete when `records` has run to its end.

    Attributes:
        paths: The files, in order.
        meta: Of the process and the clocks.
        kernels: Kernels' names by number.
        modules: The files that they were loaded from; empty where that is not known.
        resources: Of kernels, by number.
        regions: Class and name of regions by number.
        shapes: Of launches, by number.
        devices: GPUs by ordinal.
        dropped: Records for which there was no room in memory.
        rotated_away: Records in files that were deleted to keep the limit.
        end: The process's record at its end; empty if there is none.
        damaged: Files with something in them that is no whole block.
    """

    paths: list[Path]
    meta: dict[str, Any] = field(default_factory=dict)
    kernels: dict[int, str] = field(default_factory=dict)
    modules: dict[int, str] = field(default_factory=dict)
    resources: dict[int, Resources] = field(default_factory=dict)
    regions: dict[int, tuple[str, str]] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    devices: dict[int, Gpu] = field(default_factory=dict)
    dropped: int = 0
    rotated_away: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    damaged: int = 0

    @property
    def pid(self) -> int:
        """The process's own number, which may be of a pid namespace of its own."""
        return _number(self.meta, "pid")

    @property
    def started_ns(self) -> int:
        """When tracing began, CLOCK_MONOTONIC."""
        return _number(self.meta, "started_ns")

    @property
    def command(self) -> list[str]:
        """The process's command line."""
        words = self.meta.get("command")
        if not isinstance(words, list):
            return []
        # The engine writes bytes as the characters of their number.
        return [
            str(word)[:_LONGEST_NAME].encode("latin-1", "replace").decode("utf-8", "replace") for word in words[:256]
        ]

    @property
    def boot_offset_ns(self) -> int:
        """CLOCK_BOOTTIME less CLOCK_MONOTONIC."""
        return _number(self.meta, "boottime_ns") - _number(self.meta, "monotonic_ns")

    @property
    def real_offset_ns(self) -> int:
        """The time of day, since 1970, less CLOCK_MONOTONIC."""
        return _number(self.meta, "realtime_ns") - _number(self.meta, "monotonic_ns")

    def begin(self) -> None:
        """Reads the first file's facts about the process."""
        with self.paths[0].open("rb") as file:
            for kind, _, payload in _blocks(file, self.paths[0]):
                if kind == _META:
                    self.meta = json_of(payload)
                return

    def records(self) -> Iterator[Record]:
        """Its records, in order of time but for those that several threads wrote within milliseconds.

        Raises:
            Error: A file is none of a trace, or of a version that is not known.
            OSError: A file cannot be read.
        """
        for path in self.paths:
            with path.open("rb") as file:
                for kind, count, payload in _blocks(file, path):
                    if kind == _RECORDS:
                        if count * RECORD.size != len(payload):
                            break
                        yield from RECORD.iter_unpack(payload)
                    elif kind == _TEXTS:
                        self._take_texts(payload)
                    elif kind == _META:
                        self.meta = self.meta or json_of(payload)
                        self.rotated_away = max(self.rotated_away, _number(json_of(payload), "rotated_away"))
                    elif kind == _DROPPED and len(payload) == 8:
                        self.dropped = int.from_bytes(payload, "little")
                    elif kind == _END:
                        self.end = json_of(payload)
                        self.rotated_away = max(self.rotated_away, _number(self.end, "rotated_away"))
                self.damaged += bool(file.read(1))

    def _take_texts(self, payload: bytes) -> None:
        for space, number, text in texts_of(payload):
            if space == 0:
                self.kernels[number], _, behind = text.partition("\0")
                self.modules[number], _, resources = behind.partition("\0")
                if taken := _numbers(resources, 4):
                    self.resources[number] = Resources(*taken)
            elif space == 1:
                class_name, _, name = text.partition("\0")
                self.regions[number] = class_name[:_LONGEST_NAME], name[:_LONGEST_NAME]
            elif space == 2:
                sizes = _numbers(text, 10)
                if sizes and all(sizes[:6]):
                    grid, block, cluster = ((sizes[at], sizes[at + 1], sizes[at + 2]) for at in (0, 3, 6))
                    self.shapes[number] = Shape(grid, block, cluster, sizes[9])
            elif space == 3 and (said := _numbers(text, 4)):
                self.devices[number] = Gpu(f"{said[0]}.{said[1]}", said[2], said[3])


def processes(directory: Path) -> list[ProcessTrace]:
    """The processes that have traced into a directory, in the order in which they began.

    Raises:
        Error: A file is none of a trace, or of a version that is not known.
        OSError: The directory or a file cannot be read.
    """
    found: dict[tuple[int, int], list[tuple[int, Path]]] = {}
    for path in directory.glob("trace-*.records"):
        if match := _NAME.fullmatch(path.name):
            pid, turn, number = map(int, match.groups())
            found.setdefault((pid, turn), []).append((number, path))
    traces = [ProcessTrace([path for _, path in sorted(files)]) for files in found.values()]
    for trace in traces:
        trace.begin()
    return sorted(traces, key=lambda trace: (trace.started_ns, trace.paths[0].name))


def _blocks(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    head = file.read(_FILE.size)
    if len(head) < _FILE.size and _MAGIC.startswith(head[: len(_MAGIC)]):
        return  # its process has only just begun
    magic, version, record_bytes = _FILE.unpack(head) if len(head) == _FILE.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise Error(f"{path} is no file of a trace")
    if version != VERSION or record_bytes != RECORD.size:
        raise Error(f"{path} is of a trace of version {version}; this cudasched reads version {VERSION}")
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        magic, kind, length, count, crc = _BLOCK.unpack(head)
        # The checksum is of the data after the header; a damaged header shows in its fields.
        if magic != _BLOCK_MAGIC or not _META <= kind <= _END or length > _MOST_BYTES:
            file.seek(-1, 1)
            return
        payload = file.read(length)
        if len(payload) != length or zlib.crc32(payload) != crc:
            file.seek(-1, 1)
            return
        yield kind, count, payload
    if head:
        file.seek(-1, 1)


def _numbers(text: str, count: int) -> list[int]:
    """Just as many, of 32 bits; else none."""
    words = text.split(" ")
    if len(words) != count or not all(word.isascii() and word.isdigit() and len(word) <= 10 for word in words):
        return []
    return [min(int(word), 0xFFFFFFFF) for word in words]


def _number(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and abs(value) < 1 << 63 else 0
