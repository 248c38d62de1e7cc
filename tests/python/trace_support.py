"""Reads traces by Perfetto's own schema, and makes the files that traced processes write."""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudasched.observe.trace._file import RECORD, VERSION, Kind

LAUNCH, PUSH, WAIT, TIMED = Kind.LAUNCH, Kind.PUSH, Kind.WAIT, Kind.TIMED
REGION_BEGIN, REGION_END, COUNTER = Kind.REGION_BEGIN, Kind.REGION_END, Kind.COUNTER


def record(
    kind: int,
    time_ns: int,
    *,
    what: int = 1,
    stream: int = 0x10,
    duration_ns: int = 0,
    class_number: int = 0,
    device: int = 0,
    detail: int = 0,
    region: int = 0,
    thread: int = 1,
    value: int = 0,
) -> bytes:
    low, high = duration_ns & 0xFFFFFFFF, duration_ns >> 32
    place = class_number | device << 2
    return RECORD.pack(time_ns, what, stream, low, high, kind, place, detail, region, thread, value)


def block(kind: int, payload: bytes, records: int = 0) -> bytes:
    return struct.pack("<4sIQII", b"TBLK", kind, len(payload), records, zlib.crc32(payload)) + payload


def text(space: int, number: int, words: str) -> bytes:
    encoded = words.encode("utf-8", "surrogatepass")
    return struct.pack("<III", space, number, len(encoded)) + encoded


def trace_file(
    directory: Path,
    records: Sequence[bytes],
    *,
    pid: int = 7,
    number: int = 0,
    texts: Iterable[bytes] = (),
    meta: dict[str, Any] | None = None,
    end: bool = True,
    dropped: int = 0,
) -> Path:
    about = {"pid": pid, "command": ["/usr/bin/python", "train.py"], "started_ns": pid}
    about |= {"monotonic_ns": 100, "boottime_ns": 1100, "realtime_ns": 10**18}
    content = struct.pack("<8sII", b"CSDTRACE", VERSION, RECORD.size)
    content += block(1, json.dumps(about | (meta or {})).encode())
    content += block(2, b"".join(texts)) if texts else b""
    content += block(3, b"".join(records), len(records))
    content += block(4, struct.pack("<Q", dropped)) if dropped else b""
    content += block(5, json.dumps({"records": len(records)}).encode()) if end else b""
    path = directory / f"trace-{pid}-0-{number:06}.records"
    path.write_bytes(content)
    return path


@dataclass
class Slice:
    track: str
    name: str
    category: str
    begin_ns: int
    end_ns: int = -1
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Parsed:
    """What a Perfetto trace says, with everything that is interned looked up."""

    slices: list[Slice]
    counters: dict[str, list[tuple[int, int]]]
    processes: dict[int, str]
    tracks: dict[int, str]

    def on(self, track: str) -> list[Slice]:
        return [each for each in self.slices if track in each.track]

    def of(self, category: str) -> list[Slice]:
        return [each for each in self.slices if each.category == category]


def parse(path: Path) -> Parsed:
    """By the schema of the `perfetto` package; asserts what the format asks for."""
    from google.protobuf.unknown_fields import UnknownFieldSet
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

    trace = schema.Trace()
    trace.ParseFromString(path.read_bytes())
    parsed = Parsed([], defaultdict(list), {}, {})
    interned: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
    stacks: dict[int, list[Slice]] = defaultdict(list)
    events = []
    assert trace.packet[0].HasField("clock_snapshot")
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        assert sequence
        for message in (packet, packet.track_event, packet.track_descriptor, packet.interned_data):
            assert len(UnknownFieldSet(message)) == 0
        if packet.sequence_flags & 1:
            for kind in ("names", "categories", "keys", "values"):
                interned[sequence, kind].clear()
        data = packet.interned_data
        for kind, entries in (
            ("names", data.event_names),
            ("categories", data.event_categories),
            ("keys", data.debug_annotation_names),
        ):
            interned[sequence, kind].update({entry.iid: entry.name for entry in entries})
        interned[sequence, "values"].update(
            {entry.iid: entry.str.decode() for entry in data.debug_annotation_string_values}
        )
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in parsed.tracks
            if track.HasField("process"):
                parsed.tracks[track.uuid] = f"process {track.process.pid}"
                parsed.processes[track.process.pid] = track.process.process_name
            else:
                parsed.tracks[track.uuid] = f"{parsed.tracks[track.parent_uuid]} / {track.name}"
        if packet.HasField("track_event"):
            events.append((packet.timestamp, packet.track_event, sequence, len(interned[sequence, "names"])))
    for time_ns, event, sequence, _ in sorted(events, key=lambda each: each[0]):
        name = parsed.tracks[event.track_uuid]
        if event.type == event.TYPE_SLICE_BEGIN:
            args = {}
            for arg in event.debug_annotations:
                which = arg.WhichOneof("value")
                value = getattr(arg, which)
                if which == "string_value_iid":
                    value = interned[sequence, "values"][value]
                args[interned[sequence, "keys"][arg.name_iid]] = value
            (category,) = event.category_iids
            begun = Slice(
                name,
                interned[sequence, "names"][event.name_iid],
                interned[sequence, "categories"][category],
                time_ns,
                args=args,
            )
            stacks[event.track_uuid].append(begun)
            parsed.slices.append(begun)
        elif event.type == event.TYPE_SLICE_END:
            stacks[event.track_uuid].pop().end_ns = time_ns
        else:
            assert event.type == event.TYPE_COUNTER
            parsed.counters[name].append((time_ns, event.counter_value))
    assert not any(stacks.values()), "each slice has its end"
    return parsed
