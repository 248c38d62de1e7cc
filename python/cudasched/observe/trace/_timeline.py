"""From the records of processes to a timeline: tracks with slices and counters, for any viewer.

A process has a track for each of its threads, with the thread's regions, and a group of tracks for each stream. A
stream's group has the launches and waits of each thread that used the stream, and known GPU times. Counters are a
device's.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field

from cudasched.advise.names import qualified_name
from cudasched.observe.trace._device import DeviceTimes
from cudasched.observe.trace._file import Kind, ProcessTrace, Record
from cudasched.observe.trace._flame import Flame
from cudasched.observe.trace._outlook import Outlooks

__all__ = ["REASONS", "Args", "Sink", "Summary", "Track", "add_process"]

Track = int
Args = list[tuple[str, object]]

CLASSES = ("normal", "latency", "best_effort")
REASONS = (
    "not said",
    "latency work is active",
    "latency work was just done",
    "latency work was announced",
    "latency work is foreseen",
    "enough is in flight",
    "another client's turn",
    "the job's other members",
    "a backlog, should a latency client join",
    "a request of its own process",
)
"""Why a launch waits at the gate, by ``enum class WaitReason``."""

_GRAPH, _REFUSED, _DEFERRED, _SLICE = 1, 2, 4, 8
_COUNTERS = (("GPU memory in use, all processes", "bytes"), ("GPU time in flight, predicted", "ns"))
_LEGACY, _PER_THREAD = 1, 2


class Sink(abc.ABC):
    """Where a timeline goes. Times are ns of CLOCK_MONOTONIC."""

    @abc.abstractmethod
    def process(self, pid: int, name: str, command: Iterable[str], boot_offset_ns: int, real_offset_ns: int) -> Track:
        """Begins a process; all that follows is its own."""

    @abc.abstractmethod
    def track(self, parent: Track, name: str, rank: int) -> Track:
        """A track of its own below another; tracks are shown by rank."""

    @abc.abstractmethod
    def counter_track(self, parent: Track, name: str, unit: str) -> Track:
        """A track of values, in "bytes" or "ns"."""

    @abc.abstractmethod
    def slice(self, track: Track, name: str, category: str, begin_ns: int, end_ns: int, args: Args) -> None:
        """Something that lasted."""

    @abc.abstractmethod
    def count(self, track: Track, time_ns: int, value: int) -> None:
        """A value from a moment on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Everything was said."""


@dataclass
class Summary:
    """The numbers of records that a timeline has and lacks."""

    processes: int = 0
    launches: int = 0
    waits: int = 0
    wait_ns: int = 0
    timed: int = 0
    device_times: int = 0
    dropped: int = 0
    rotated_away: int = 0
    cut_short: int = 0
    damaged: int = 0
    without_time: int = 0


@dataclass
class _Names:
    """The names of a process's kernels, graphs and streams."""

    trace: ProcessTrace
    graphs: dict[int, str] = field(default_factory=dict)
    kernels: dict[int, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def launch(self, what: int, graph: bool) -> tuple[str, str]:
        """A launch's shown name, and the driver's name. Of a kernel the shape is left out."""
        if graph:
            name = self.graphs.get(what)
            if name is None:
                name = self.graphs[what] = f"graph {len(self.graphs) + 1}"
            return name, ""
        what &= 0xFFFFFFFF
        found = self.kernels.get(what)
        if found is None:
            full = self.trace.kernels.get(what, "")
            found = (qualified_name(full) or f"kernel {what}" if what else "kernel", full)
            if full:
                self.kernels[what] = found
        return found

    def module(self, name: str) -> str:
        """The file that a kernel of this name was loaded from; empty where that is not known."""
        for number, known in self.trace.kernels.items() if len(self.modules) < len(self.trace.kernels) else ():
            self.modules.setdefault(known, self.trace.modules.get(number, ""))
        return self.modules.get(name, "")

    def region(self, number: int) -> tuple[str, str]:
        """A region's class and name."""
        return self.trace.regions.get(number, ("", ""))


class _Tracks:
    """The tracks of a process, made when something is on them."""

    def __init__(self, sink: Sink, process: Track) -> None:
        self._sink = sink
        self._process = process
        self._groups: dict[tuple[int, int], Track] = {}
        self._on_stream: dict[tuple[int, int, object], Track] = {}
        self._threads: dict[int, Track] = {}
        self._counters: dict[tuple[int, int], Track] = {}

    def thread(self, number: int) -> Track:
        found = self._threads.get(number)
        if found is None:
            found = self._threads[number] = self._sink.track(self._process, f"thread {number}", number)
        return found

    def on_stream(self, device: int, stream: int, who: object, name: str, rank: int) -> Track:
        found = self._on_stream.get((device, stream, who))
        if found is None:
            group = self._groups.get((device, stream))
            if group is None:
                place = len(self._groups) + 1
                called = {_LEGACY: "the default stream", _PER_THREAD: "the per-thread default stream"}
                text = f"GPU {device}, {called.get(stream, f'stream {place} ({stream:#x})')}"
                group = self._groups[device, stream] = self._sink.track(self._process, text, 100_000 + place)
            found = self._on_stream[device, stream, who] = self._sink.track(group, name, rank)
        return found

    def host(self, device: int, stream: int, thread: int) -> Track:
        name = f"launches of thread {thread}" if thread else "launches by cudasched's launcher thread"
        return self.on_stream(device, stream, thread, name, thread + 10)

    def counter(self, device: int, counter: int) -> Track:
        found = self._counters.get((device, counter))
        if found is None:
            name, unit = _COUNTERS[counter]
            found = self._counters[device, counter] = self._sink.counter_track(
                self._process, f"GPU {device}: {name}", unit
            )
        return found


class _Regions:
    """The regions that threads are in, until each is over."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[int, int, int]]] = {}  # by thread: token, begin, number
        self._sink_ready = True

    def begin(self, thread: int, token: int, begin_ns: int, number: int) -> None:
        stack = self._open.setdefault(thread, [])
        if len(stack) < 64:  # as deep as regions may be nested, twice
            stack.append((token, begin_ns, number))

    def end(self, thread: int, token: int) -> tuple[int, int] | None:
        """When the region was begun, and its number; None if not known."""
        stack = self._open.get(thread, [])
        for place in range(len(stack) - 1, -1, -1):
            if stack[place][0] == token:
                _, begin_ns, number = stack.pop(place)
                return begin_ns, number
        return None

    def left(self) -> Iterable[tuple[int, int, int]]:
        """Those that are open at the end: thread, begin, number."""
        for thread, stack in self._open.items():
            for _, begin_ns, number in stack:
                yield thread, begin_ns, number


def add_process(
    trace: ProcessTrace, sink: Sink, summary: Summary, flame: Flame | None, device_times: DeviceTimes | None
) -> None:
    """Puts one process on the timeline."""
    command = trace.command
    name = command[0].rpartition("/")[2] if command else f"process {trace.pid}"
    name = " ".join([name, *(word.rpartition("/")[2] for word in command[1:2])])
    process = sink.process(trace.pid, name, command, trace.boot_offset_ns, trace.real_offset_ns)
    _Process(trace, sink, process, summary, flame, device_times).add()


class _Process:
    def __init__(
        self,
        trace: ProcessTrace,
        sink: Sink,
        process: Track,
        summary: Summary,
        flame: Flame | None,
        device_times: DeviceTimes | None,
    ) -> None:
        self._trace = trace
        self._sink = sink
        self._summary = summary
        self._flame = flame
        self._device_times = device_times
        self._names = _Names(trace)
        self._outlooks = Outlooks(trace)
        self._tracks = _Tracks(sink, process)
        self._regions = _Regions()
        self._last_ns = 0
        self._graph_ns: dict[int, int] = {}  # as last predicted, by graph
        self._ended_ns: dict[Track, int] = {}

    def add(self) -> None:
        summary, trace = self._summary, self._trace
        adders = {
            Kind.LAUNCH: self._launch,
            Kind.PUSH: self._push,
            Kind.WAIT: self._wait,
            Kind.TIMED: self._timed,
            Kind.REGION_BEGIN: self._region_begin,
            Kind.REGION_END: self._region_end,
            Kind.COUNTER: self._counter,
        }
        for record in trace.records():
            adder = adders.get(record[5])
            if adder is None:
                continue
            time_ns = record[0]
            end_ns = time_ns + (record[4] << 32 | record[3])
            if time_ns < 0 or end_ns >= 1 << 62:
                continue  # no clock says so
            self._last_ns = max(self._last_ns, time_ns)
            adder(record, end_ns)
        for thread, begin_ns, number in self._regions.left():
            self._region(thread, begin_ns, max(self._last_ns, begin_ns), number, [("unfinished", True)])
        if self._device_times is not None:
            self._add_device_times(self._device_times)
        summary.processes += 1
        summary.dropped += trace.dropped
        summary.rotated_away += trace.rotated_away
        summary.cut_short += not trace.end
        summary.damaged += trace.damaged

    def _where(self, record: Record) -> Args:
        """The class and the region of a launch."""
        args: Args = [("class", CLASSES[record[6] & 3] if record[6] & 3 < 3 else "unknown")]
        if record[8]:
            class_name, name = self._names.region(record[8])
            args.append(("region", name or f"({class_name})"))
        return args

    def _launch(self, record: Record, end_ns: int) -> None:
        time_ns, what, stream, _, _, _, place, detail, region, thread, value = record
        name, full = self._names.launch(what, bool(detail & _GRAPH))
        args = self._where(record)
        if full and full != name:
            args.append(("kernel", full))
        predicted_ns = part = 0
        if detail & _SLICE:
            part, parts = value & 0xFFFF, value >> 16
            name = f"{name}, slice {part + 1} of {parts}"
            predicted_ns = self._graph_ns.get(what, 0)
        elif value:
            predicted_ns = value
            args.append(("predicted_ns", value))
            if detail & _GRAPH:
                self._graph_ns[what] = value
        if not detail & _GRAPH:
            args += self._outlooks.args(what, place >> 2, predicted_ns)
        if detail & _DEFERRED:
            args.append(("deferred", True))
        if detail & _REFUSED:
            args.append(("refused", True))
        self._slice(self._tracks.host(place >> 2, stream, thread), name, "launch", time_ns, end_ns, args)
        self._summary.launches += 1
        if detail & _REFUSED:
            return
        if self._device_times is not None:
            self._device_times.launched(time_ns, end_ns, full, stream, place >> 2, region, what)
        elif self._flame is not None and part == 0:  # the first slice stands for its graph's launch
            self._flame.launch(self._region_name(region, place), name, full, predicted_ns, self._names.module(full))

    def _region_name(self, region: int, place: int) -> str:
        class_name, name = self._names.region(region)
        return name or f"({class_name or CLASSES[min(place & 3, 2)]})"

    def _push(self, record: Record, end_ns: int) -> None:
        name, full = self._names.launch(record[1], bool(record[7] & _GRAPH))
        args = self._where(record)
        if full and full != name:
            args.append(("kernel", full))
        track = self._tracks.host(record[6] >> 2, record[2], record[9])
        self._slice(track, name, "deferred", record[0], end_ns, args)

    def _wait(self, record: Record, end_ns: int) -> None:
        why = REASONS[record[7]] if record[7] < len(REASONS) else REASONS[0]
        args = self._where(record)
        if record[1]:
            args.append(("launch", self._names.launch(record[1], False)[0]))
        self._summary.waits += 1
        self._summary.wait_ns += end_ns - record[0]
        track = self._tracks.host(record[6] >> 2, record[2], record[9])
        self._slice(track, f"waits: {why}", "wait", record[0], end_ns, args)

    def _timed(self, record: Record, end_ns: int) -> None:
        time_ns, what, stream, _, _, _, place, detail, region, _, predicted_ns = record
        measured_ns = end_ns - time_ns
        name, full = self._names.launch(what, bool(detail & _GRAPH))
        args: Args = [("predicted_ns", predicted_ns), ("measured_ns", measured_ns)]
        args.append(("off_by_percent", round(100 * (predicted_ns - measured_ns) / measured_ns) if measured_ns else 0))
        if full and full != name:
            args.append(("kernel", full))
        if not detail & _GRAPH:
            args += self._outlooks.args(what, place >> 2, predicted_ns)
        track = self._tracks.on_stream(place >> 2, stream, "timed", "GPU, launches that the gate timed", 1)
        # The begin is not known: the time of submission, or the end of the launch before.
        begin_ns = max(time_ns, self._ended_ns.get(track, 0))
        self._slice(track, name, "timed", begin_ns, begin_ns + measured_ns, args)
        self._summary.timed += 1
        if self._flame is not None and self._device_times is None:
            self._flame.timed(self._region_name(region, place), name, full, measured_ns, self._names.module(full))

    def _region_begin(self, record: Record, end_ns: int) -> None:
        self._regions.begin(record[9], record[1], record[0], record[8])

    def _region_end(self, record: Record, end_ns: int) -> None:
        known = self._regions.end(record[9], record[1])
        if known is not None:
            self._region(record[9], known[0], record[0], known[1], [])

    def _region(self, thread: int, begin_ns: int, end_ns: int, number: int, args: Args) -> None:
        class_name, name = self._names.region(number)
        args = [("class", class_name), *args]
        self._sink.slice(self._tracks.thread(thread), name or f"({class_name})", "region", begin_ns, end_ns, args)

    def _counter(self, record: Record, end_ns: int) -> None:
        if record[7] < len(_COUNTERS) and record[1] < 1 << 63:
            self._sink.count(self._tracks.counter(record[6] >> 2, record[7]), record[0], record[1])

    def _slice(self, track: Track, name: str, category: str, begin_ns: int, end_ns: int, args: Args) -> None:
        """On a track whose slices come one after another: one that seems to begin too early is cut."""
        begin_ns = max(begin_ns, min(self._ended_ns.get(track, 0), end_ns))
        self._ended_ns[track] = end_ns
        self._sink.slice(track, name, category, begin_ns, end_ns, args)

    def _add_device_times(self, device_times: DeviceTimes) -> None:
        for row in device_times.rows():
            name = row.name and (qualified_name(row.name) or row.name)
            if row.graph:
                name = f"graph launch {row.graph}"
            where = row.launch
            stream, device, region, what = where if where is not None else (row.stream, row.device, 0, 0)
            args: Args = [("submitted_to_start_ns", row.start_ns - row.submitted_ns)]
            if row.name and row.name != name:
                args.append(("kernel", row.name))
            region_name = self._region_name(region, 0) if region else ""
            if region_name:
                args.append(("region", region_name))
            if not row.graph:
                args += self._outlooks.args(what, device, row.duration_ns)
            who = "device" if where is not None else ("device", row.stream)
            track = self._tracks.on_stream(device, stream, who, "GPU, by CUPTI", 0)
            self._slice(track, name or "kernel", "gpu", row.start_ns, row.start_ns + row.duration_ns, args)
            self._summary.device_times += 1
            if self._flame is not None:
                about = region_name or "(no region)", name or "kernel", row.name
                module = self._names.module(row.name)
                self._flame.timed(*about, row.duration_ns, module)
                self._flame.launch(*about, 0, module)
