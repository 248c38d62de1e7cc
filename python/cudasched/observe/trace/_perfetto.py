"""Writes a timeline as Perfetto's TrackEvents.

The wire format is written here, by field numbers of Perfetto's public schema (``perfetto_trace.proto``), in the few
dozen lines below. protobuf's Python package would be a requirement of every installation, and several times slower for
millions of small messages. Tests read this module's output by the schema of the ``perfetto`` package.

Times are of CLOCK_BOOTTIME, Perfetto's own default, for all processes; a clock snapshot ties them to the time of day.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO

from cudasched.observe.trace._timeline import Args, Sink, Track

__all__ = ["PerfettoSink"]

# Fields of TracePacket,
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _SEQUENCE_FLAGS, _DESCRIPTOR = 6, 8, 10, 11, 12, 13, 60
# of TrackEvent,
_CATEGORY_IIDS, _ANNOTATIONS, _TYPE, _NAME_IID, _TRACK_UUID, _COUNTER_VALUE, _DOUBLE_VALUE = 3, 4, 9, 10, 11, 30, 44
_BEGIN, _END, _COUNTER = 1, 2, 4
# of TrackDescriptor and its fields.
_UUID, _NAME, _PROCESS, _PARENT, _COUNTER_DESCRIPTOR, _CHILD_ORDERING, _RANK = 1, 2, 3, 5, 8, 11, 12
_EXPLICIT_ORDER = 3
_UNITS = {"bytes": 3, "ns": 1}
_BOOTTIME, _MONOTONIC, _REALTIME = 6, 3, 1

_MASK = (1 << 64) - 1


def varint(number: int) -> bytes:
    """A number, of 64 bits, as protobuf writes it."""
    number &= _MASK
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number_field(field: int, number: int) -> bytes:
    """A field that is a number."""
    return varint(field << 3) + varint(number)


def bytes_field(field: int, content: bytes | str) -> bytes:
    """A field that is a text or a message."""
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    return varint(field << 3 | 2) + varint(len(content)) + content


class _Interned:
    """Texts of one kind that are written once for a sequence of packets, and known by a number from then on."""

    def __init__(self, field: int) -> None:
        self._field = field
        self._numbers: dict[str, int] = {}

    def number(self, text: str, fresh: list[bytes]) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self._numbers) + 1
            fresh.append(bytes_field(self._field, number_field(1, found) + bytes_field(2, text)))
        return found


class PerfettoSink(Sink):
    """One trace, written to a file as it comes: memory for names alone."""

    def __init__(self, file: BinaryIO) -> None:
        self._write = file.write
        self._sequence = 0
        self._uuids = 0

    def process(self, pid: int, name: str, command: Iterable[str], boot_offset_ns: int, real_offset_ns: int) -> Track:
        self._sequence += 1
        self._tail = number_field(_SEQUENCE, self._sequence)
        self._categories, self._names = _Interned(1), _Interned(2)
        self._keys, self._values = _Interned(3), _Interned(29)
        self._annotations: dict[tuple[str, object], bytes] = {}
        self._begins: dict[tuple[int, str, str], bytes] = {}
        self._boot_ns = boot_offset_ns
        cleared = self._tail + number_field(_SEQUENCE_FLAGS, 1)
        if self._sequence == 1:
            clocks = ((_BOOTTIME, boot_offset_ns), (_MONOTONIC, 0), (_REALTIME, real_offset_ns))
            # Of CLOCK_MONOTONIC, so that no clock is before its own zero.
            zero = max(0, -min(offset for _, offset in clocks))
            snapshot = b"".join(
                bytes_field(1, number_field(1, clock) + number_field(2, zero + offset)) for clock, offset in clocks
            )
            cleared += bytes_field(_CLOCK_SNAPSHOT, snapshot) + number_field(_TIMESTAMP, zero + boot_offset_ns)
        self._packet(cleared)
        described = number_field(1, pid & 0x7FFFFFFF) + bytes_field(6, name)
        described += b"".join(bytes_field(2, word) for word in command)
        return self._track(bytes_field(_PROCESS, described) + number_field(_CHILD_ORDERING, _EXPLICIT_ORDER))

    def track(self, parent: Track, name: str, rank: int) -> Track:
        ordering = number_field(_RANK, rank) + number_field(_CHILD_ORDERING, _EXPLICIT_ORDER)
        return self._track(number_field(_PARENT, parent) + bytes_field(_NAME, name) + ordering)

    def counter_track(self, parent: Track, name: str, unit: str) -> Track:
        counter = number_field(3, _UNITS[unit])
        return self._track(
            number_field(_PARENT, parent) + bytes_field(_NAME, name) + bytes_field(_COUNTER_DESCRIPTOR, counter)
        )

    def slice(self, track: Track, name: str, category: str, begin_ns: int, end_ns: int, args: Args) -> None:
        fresh: list[bytes] = []
        head = self._begins.get((track, name, category))
        if head is None:
            head = self._begins[track, name, category] = (
                number_field(_TYPE, _BEGIN)
                + number_field(_TRACK_UUID, track)
                + number_field(_NAME_IID, self._names.number(name, fresh))
                + number_field(_CATEGORY_IIDS, self._categories.number(category, fresh))
            )
        for arg in args:
            encoded = self._annotations.get(arg)
            if encoded is None:
                encoded = self._annotation(*arg, fresh)
            head += encoded
        interned = bytes_field(_INTERNED, b"".join(fresh)) if fresh else b""
        self._event(begin_ns, head, interned)
        self._event(end_ns, number_field(_TYPE, _END) + number_field(_TRACK_UUID, track))

    def count(self, track: Track, time_ns: int, value: int) -> None:
        head = number_field(_TYPE, _COUNTER) + number_field(_TRACK_UUID, track)
        self._event(time_ns, head + number_field(_COUNTER_VALUE, value))

    def close(self) -> None:
        """Nothing is left to be written."""

    def _annotation(self, key: str, value: object, fresh: list[bytes]) -> bytes:
        content = number_field(1, self._keys.number(key, fresh))
        if isinstance(value, bool):
            content += number_field(2, int(value))
        elif isinstance(value, float):
            content += varint(5 << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            content += number_field(4, value)
            return bytes_field(_ANNOTATIONS, content)  # not remembered: there may be many
        else:
            content += number_field(17, self._values.number(str(value), fresh))
        encoded = self._annotations[key, value] = bytes_field(_ANNOTATIONS, content)
        return encoded

    def _track(self, content: bytes) -> Track:
        self._uuids += 1
        self._packet(self._tail + bytes_field(_DESCRIPTOR, number_field(_UUID, self._uuids) + content))
        return self._uuids

    def _event(self, time_ns: int, content: bytes, interned: bytes = b"") -> None:
        time_ns += self._boot_ns
        # Needs the texts of the packets before it.
        self._packet(
            number_field(_TIMESTAMP, max(time_ns, 0))
            + self._tail
            + b"\x68\x02"
            + interned
            + bytes_field(_TRACK_EVENT, content)
        )

    def _packet(self, content: bytes) -> None:
        self._write(bytes_field(1, content))
