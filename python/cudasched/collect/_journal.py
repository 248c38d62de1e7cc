"""Reads the journals into which processes write their launches (``csrc/telemetry/journal.hpp``, docs/dataset.md).

A journal is whole up to its last block for any end of its process. The first block that is cut short or damaged, and
all later ones, are left out.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cudasched.errors import Error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ROW", "Journal", "Rows", "Summary", "json_of", "scan", "texts_of"]

VERSION = 1
_FILE = struct.Struct("<8sII")
_BLOCK = struct.Struct("<4sIQII")
_TEXT = struct.Struct("<III")
_MAGIC = b"CSDJRNL\0"
_BLOCK_MAGIC = b"CBLK"
_META, _TEXTS, _ROWS, _END, _ELAPSED = _KINDS = 1, 2, 3, 4, 5
_MOST_BYTES = 1 << 31

ROW = [
    ("launch", "<u8"),
    ("identity", "<u8"),
    ("submitted_ns", "<i8"),
    ("start_ns", "<i8"),
    ("duration_ns", "<i8"),
    ("thread", "<u4"),
    ("stream", "<u4"),
    ("function", "<u4"),
    ("graph", "<u4"),
    ("label", "<u4"),
    ("grid", "<u4", (3,)),
    ("block", "<u4", (3,)),
    ("cluster", "<u4", (3,)),
    ("dynamic_shared_bytes", "<u4"),
    ("static_shared_bytes", "<u4"),
    ("local_bytes", "<u4"),
    ("parameter_bytes", "<u4"),
    ("word_count", "<u4"),
    ("pointer_count", "<u4"),
    ("waves", "<f4"),
    ("registers", "<u2"),
    ("max_threads", "<u2"),
    ("blocks_per_sm", "<u2"),
    ("sm_clock_mhz", "<u2"),
    ("device", "u1"),
    ("is_graph", "u1"),
    ("overlapped", "u1"),
    ("padding", "u1"),
]
"""``struct Row`` of ``csrc/telemetry/journal.hpp``, as a numpy type."""


@dataclass(frozen=True)
class Rows:
    """One block of launches.

    Attributes:
        rows: One `ROW` each.
        words: The parameter blocks, one after the other, `word_count` each.
        pointers: Indices of words that were pointers, `pointer_count` a row.
        elapsed: The time between two events around each launch, ns; -1: no time. None: none were recorded.
    """

    rows: NDArray[np.void]
    words: NDArray[np.uint32]
    pointers: NDArray[np.uint16]
    elapsed: NDArray[np.int64] | None = None


@dataclass
class Journal:
    """A journal's content so far, while `blocks` reads.

    Attributes:
        path: The file.
        meta: Of the process, devices and timing.
        functions: Kernels' names by number.
        labels: Labels by number.
        end: The process's record at its end; empty if the journal is cut short.
    """

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=lambda: {0: ""})
    end: dict[str, Any] = field(default_factory=dict)

    def blocks(self) -> Iterator[Rows]:
        """The blocks of launches, in order, up to the first that is not whole.

        Raises:
            Error: The file is no journal, or of a version that is not known.
        """
        elapsed = None
        with self.path.open("rb") as file:
            for kind, count, payload in _blocks(file, self.path):
                if kind == _META:
                    self.meta = json_of(payload)
                elif kind == _END:
                    self.end = json_of(payload)
                elif kind == _TEXTS:
                    for space, number, text in texts_of(payload):
                        (self.functions if space == 0 else self.labels)[number] = text
                elif kind == _ROWS:
                    rows = _rows(count, payload, elapsed)
                    if rows is None:
                        return
                    elapsed = None
                    yield rows
                elif kind == _ELAPSED:
                    elapsed = payload


@dataclass(frozen=True)
class Summary:
    """A journal at a glance, without its launches.

    Attributes:
        path: The file.
        meta: Of its process, devices and timing; empty if the journal ends earlier.
        end: The process's record at its end; empty if the journal is cut short, or still written.
        rows: Launches in whole blocks. Checksums are not verified.
    """

    path: Path
    meta: dict[str, Any]
    end: dict[str, Any]
    rows: int


def scan(path: Path) -> Summary:
    """Goes over a journal's blocks without reading its launches.

    Raises:
        Error: The file is no journal, or of a version that is not known.
    """
    meta: dict[str, Any] = {}
    end: dict[str, Any] = {}
    rows = 0
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        _read_header(file, path)
        while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
            magic, kind, length, count, crc = _BLOCK.unpack(head)
            if magic != _BLOCK_MAGIC or kind not in _KINDS or length > size - file.tell():
                break
            if kind in (_META, _END):
                payload = file.read(length)
                if zlib.crc32(payload) != crc:
                    break
                if kind == _META:
                    meta = json_of(payload)
                else:
                    end = json_of(payload)
            else:
                file.seek(length, 1)
                rows += count if kind == _ROWS else 0
    return Summary(path, meta, end, rows)


def _read_header(file: BinaryIO, path: Path) -> None:
    head = file.read(_FILE.size)
    if len(head) < _FILE.size and _MAGIC.startswith(head[: len(_MAGIC)]):
        return  # its process has only just begun
    magic, version, row_bytes = _FILE.unpack(head) if len(head) == _FILE.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise Error(f"{path} is no journal of launches")
    import numpy as np

    if version != VERSION or row_bytes != np.dtype(ROW).itemsize:
        raise Error(f"{path} is a journal of version {version}; this cudasched reads version {VERSION}")


def _blocks(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    _read_header(file, path)
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        magic, kind, length, count, crc = _BLOCK.unpack(head)
        # The checksum is of the data after the header; a damaged header shows in its fields.
        if magic != _BLOCK_MAGIC or kind not in _KINDS or length > _MOST_BYTES:
            return
        payload = file.read(length)
        if len(payload) != length or zlib.crc32(payload) != crc:
            return
        yield kind, count, payload


def json_of(payload: bytes) -> dict[str, Any]:
    """A block's JSON; empty where it is damaged."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def texts_of(payload: bytes) -> Iterator[tuple[int, int, str]]:
    """A block's texts, each with its space and number."""
    at = 0
    while at + _TEXT.size <= len(payload):
        space, number, length = _TEXT.unpack_from(payload, at)
        at += _TEXT.size
        yield space, number, payload[at : at + length].decode("utf-8", "replace")
        at += length


def _rows(count: int, payload: bytes, elapsed: bytes | None) -> Rows | None:
    import numpy as np

    kind = np.dtype(ROW)
    if count * kind.itemsize > len(payload):
        return None
    rows = np.frombuffer(payload, kind, count)
    words = int(rows["word_count"].sum(dtype=np.uint64))
    pointers = int(rows["pointer_count"].sum(dtype=np.uint64))
    at = count * kind.itemsize
    if at + 4 * words + 2 * pointers != len(payload):
        return None
    return Rows(
        rows,
        np.frombuffer(payload, "<u4", words, at),
        np.frombuffer(payload, "<u2", pointers, at + 4 * words),
        np.frombuffer(elapsed, "<i8") if elapsed is not None and len(elapsed) == 8 * count else None,
    )
