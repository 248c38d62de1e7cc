"""From recorded launches to kernels: launches with one function and launch shape put together, and the gaps between."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudasched.errors import Error

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "LONGEST_GAP_NS",
    "OF_GAPS",
    "SCHEMA",
    "Group",
    "Run",
    "check",
    "gaps",
    "groups",
    "metadata",
    "submit_interval_ns",
]

SCHEMA = "1"
"""The version of the data set that is read."""

LONGEST_GAP_NS = 1_000_000
"""A longer gap is the program doing something else, not the cost of a launch."""

_SHAPE = [f"{what}_{axis}" for what in ("grid", "block", "cluster") for axis in "xyz"]
_KEY = ["kind", "function", "identity", "graph", *_SHAPE, "dynamic_shared_bytes"]
_WORK = ("bytes", "flops")
OF_GAPS = ("pid", "thread", "device", "function", *_SHAPE, "submitted_ns", "start_ns", "duration_ns")
"""The columns that `gaps` and `submit_interval_ns` read."""
_OPTIONAL = {"module"}  # in recordings of later versions
_OF_KERNEL = ["static_shared_bytes", "local_bytes", "registers", "max_threads", "blocks_per_sm"]
_OTHERS = ["pid", "thread", "device", "submitted_ns", "start_ns", "duration_ns", "overlapped"]
_PREFIX = "cudasched."


@dataclass(frozen=True)
class Run:
    """The data set's facts about the whole run.

    Attributes:
        version: Of cudasched, at the recording.
        gpu: The name.
        compute_capability: As "9.0".
        sm_count: 0 if not known.
        max_threads_per_sm: 0 if not known.
        timing: "cupti", "events", or "" if not known.
        command: The command line, in a shell's form.
        lost: Launches that were not recorded, for want of memory or disk.
        cut_short: Processes that did not come to their end.
        whole_graphs: Graphs that beside a latency client are launched whole, by reason: their number, the longest one's
            predicted ns, and its nodes. Empty if not known.
    """

    version: str
    gpu: str
    compute_capability: str
    sm_count: int
    max_threads_per_sm: int
    timing: str
    command: str
    lost: int
    cut_short: int
    whole_graphs: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Group:
    """Launches with one function and launch shape.

    Attributes:
        kind: "kernel" or "graph".
        function: The driver's name.
        graph: Number of the executable graph, 0 for kernels.
        process: Of a graph, the place of its process, from 0; 0 for kernels.
        grid: Blocks.
        block: Threads.
        cluster: Blocks.
        dynamic_shared_bytes: A block.
        static_shared_bytes: A block.
        local_bytes: A thread.
        registers: A thread.
        max_threads: A block may have; 0 if not known.
        blocks_per_sm: By the driver; 0 if not known.
        launches: How many.
        timed: How many of them have a duration.
        overlapped: How many ran beside others.
        duration_ns: Of the timed ones, together.
        predicted_ns: Of one launch, mean; None if nothing predicted them.
        idle_before_ns: Of the device before these launches but the first, together; None if none was timed.
        module: The file that the kernel was loaded from; empty if it is not known.
        bytes: The least bytes that a launch moves, mean; None if not known of all launches.
        flops: Additions and multiplications of a launch, alike.
        typical_ns: Measured, of one launch, the median: without warm-up; None if none was timed.
    """

    kind: str
    function: str
    graph: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    static_shared_bytes: int
    local_bytes: int
    registers: int
    max_threads: int
    blocks_per_sm: int
    launches: int
    timed: int
    overlapped: int
    duration_ns: int
    predicted_ns: float | None
    idle_before_ns: int | None
    module: str = ""
    bytes: float | None = None
    flops: float | None = None
    typical_ns: float | None = None
    process: int = 0

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def mean_ns(self) -> float | None:
        """Measured, of one launch."""
        return self.duration_ns / self.timed if self.timed else None

    @property
    def time_ns(self) -> int | None:
        """Of all launches; the untimed ones count as the mean of the timed, else as predicted."""
        each = self.mean_ns if self.timed else self.predicted_ns
        return None if each is None else self.duration_ns + round(each * (self.launches - self.timed))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _command(text: str) -> str:
    """The recording has it as a list of words in JSON."""
    try:
        words = json.loads(text)
    except ValueError:
        return text
    return shlex.join(map(str, words)) if isinstance(words, list) else text


def _whole_graphs(text: str) -> dict[str, tuple[int, int, int]]:
    try:
        said = json.loads(text or "{}")
        return {str(reason): (int(graphs), int(ns), int(nodes)) for reason, (graphs, ns, nodes) in said.items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def metadata(table: pa.Table) -> Run:
    """The file's facts about its run; missing ones are empty or 0."""
    said = {
        key.decode(errors="replace").removeprefix(_PREFIX): value.decode(errors="replace")
        for key, value in (table.schema.metadata or {}).items()
    }
    return Run(
        version=said.get("version", ""),
        gpu=said.get("gpu", ""),
        compute_capability=said.get("compute_capability", ""),
        sm_count=_number(said.get("sm_count", "")),
        max_threads_per_sm=_number(said.get("max_threads_per_sm", "")),
        timing=said.get("timing", ""),
        command=_command(said.get("command", "")),
        lost=_number(said.get("lost", "")),
        cut_short=_number(said.get("cut_short", "")),
        whole_graphs=_whole_graphs(said.get("whole_graphs", "")),
    )


def check(table: pa.Table) -> None:
    """Raises `cudasched.Error` if this is no data set of launches of the version that is read here."""
    version = (table.schema.metadata or {}).get(b"cudasched.schema", b"").decode(errors="replace")
    if not version:
        raise Error(
            "the table is no recording of launches: its metadata have no cudasched.schema; use `cudasched collect`"
        )
    if version != SCHEMA:
        raise Error(
            f"the recording has schema version {version}, and this cudasched reads {SCHEMA}: "
            "record anew, or use the cudasched that recorded"
        )
    missing = [name for name in [*_KEY, *_OF_KERNEL, *_OTHERS] if name not in table.column_names]
    if missing:
        raise Error(
            f"the recording lacks the columns {', '.join(missing)}: it is damaged or was edited; record it anew"
        )


def _partitions(table: pa.Table, by: list[str]) -> Iterator[pa.Table]:
    import pyarrow.compute as pc

    for values in table.select(by).group_by(by).aggregate([]).to_pylist():
        chosen = None
        for name, value in values.items():
            equal = pc.equal(table[name], value)
            chosen = equal if chosen is None else pc.and_(chosen, equal)
        yield table.filter(chosen)


def _first_of_its_kind(ran: pa.Table) -> pa.Array:
    """Of each row, whether no row before it has the same function and launch shape."""
    import pyarrow as pa
    import pyarrow.compute as pc

    place = pa.array(range(len(ran)), pa.int64())
    kinds = ran.select(["function", *_SHAPE]).append_column("place", place).group_by(["function", *_SHAPE])
    return pc.is_in(place, value_set=kinds.aggregate([("place", "min")])["place_min"].combine_chunks())


def gaps(table: pa.Table) -> pa.Table:
    """The timed launches, those of a device in the order of execution, with a column ``gap_ns``.

    The column is the device's idle time before the launch, as far as this process tells. Null for the first launch, and
    for gaps of more than `LONGEST_GAP_NS`. Also for the first launch of each function and shape, whose code is loaded
    then, and where libraries search for their fastest kernel.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    timed = table.filter(pc.and_(pc.is_valid(table["start_ns"]), pc.is_valid(table["duration_ns"])))
    parts = []
    for part in _partitions(timed, ["pid", "device"]):
        ran = part.sort_by("start_ns").combine_chunks()
        busy_until = pc.cumulative_max(pc.add(ran["start_ns"], ran["duration_ns"]))
        gap = pc.subtract(ran["start_ns"].slice(1), busy_until.slice(0, len(ran) - 1))
        gap = pc.max_element_wise(gap, pa.scalar(0, pa.int64()))
        gap = pc.if_else(pc.greater(gap, LONGEST_GAP_NS), pa.scalar(None, pa.int64()), gap)
        column = pa.chunked_array(
            [pa.nulls(1, pa.int64()), *(gap.chunks if isinstance(gap, pa.ChunkedArray) else [gap])]
        )
        column = pc.if_else(_first_of_its_kind(ran), pa.scalar(None, pa.int64()), column)
        parts.append(ran.append_column("gap_ns", column))
    return pa.concat_tables(parts) if parts else timed.append_column("gap_ns", pa.nulls(0, pa.int64()))


def submit_interval_ns(table: pa.Table) -> float | None:
    """The median time from a launch call to the next of the same thread, ns; pauses over `LONGEST_GAP_NS` left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = []
    for part in _partitions(table.filter(pc.is_valid(table["submitted_ns"])), ["pid", "thread"]):
        called = part["submitted_ns"].combine_chunks().sort()
        if len(called) > 1:
            between = pc.subtract(called.slice(1), called.slice(0, len(called) - 1))
            found.append(between.filter(pc.less_equal(between, LONGEST_GAP_NS)))
    if not sum(map(len, found)):
        return None
    median = pc.quantile(pa.chunked_array(found), 0.5)[0].as_py()
    return float(median)


def groups(table: pa.Table, predicted: pa.Array | None, work: dict[str, pa.Array] | None = None) -> list[Group]:
    """Puts the launches together.

    Args:
        table: Checked by `check`.
        predicted: Of each row, ns, float64; null where nothing predicts it. None: no predictions at all.
        work: "bytes" and "flops" of each row, float64; null where they are not known. None: of no row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    # Each chunk may come with a dictionary of its own, and groups are told apart by one.
    key = [*_KEY, *(_OPTIONAL & set(table.column_names))]
    plain = table.select([*key, *_OF_KERNEL, *_OTHERS]).unify_dictionaries()
    # Graphs are numbered anew in each process.
    process = pc.index_in(plain["pid"], value_set=pc.unique(plain["pid"]))
    process = pc.if_else(pc.equal(plain["kind"].cast(pa.string()), "graph"), process, pa.scalar(0, pa.int32()))
    plain = plain.append_column("process", process)
    plain = plain.append_column("predicted_ns", pa.nulls(len(plain), pa.float64()) if predicted is None else predicted)
    for name in _WORK:
        plain = plain.append_column(name, pa.nulls(len(plain), pa.float64()) if work is None else work[name])
    timed = gaps(plain)
    untimed = plain.filter(pc.invert(pc.and_(pc.is_valid(plain["start_ns"]), pc.is_valid(plain["duration_ns"]))))
    everything = pa.concat_tables([timed, untimed.append_column("gap_ns", pa.nulls(len(untimed), pa.int64()))])
    rows: list[dict[str, Any]] = (
        everything.group_by([*key, "process"])
        .aggregate(
            [
                *((name, "max") for name in _OF_KERNEL),
                ([], "count_all"),
                ("duration_ns", "count"),
                ("duration_ns", "sum"),
                ("duration_ns", "approximate_median"),
                ("overlapped", "sum"),
                ("predicted_ns", "mean"),
                ("gap_ns", "sum"),
                *((name, what) for name in _WORK for what in ("count", "mean")),
            ]
        )
        .to_pylist()
    )
    return [_group(row) for row in rows]


def _group(row: dict[str, Any]) -> Group:
    def triple(what: str) -> tuple[int, int, int]:
        return row[f"{what}_x"] or 0, row[f"{what}_y"] or 0, row[f"{what}_z"] or 0

    return Group(
        kind=row["kind"],
        function=row["function"] or "",
        graph=row["graph"] or 0,
        grid=triple("grid"),
        block=triple("block"),
        cluster=triple("cluster"),
        dynamic_shared_bytes=row["dynamic_shared_bytes"] or 0,
        launches=row["count_all"],
        timed=row["duration_ns_count"],
        overlapped=row["overlapped_sum"] or 0,
        duration_ns=row["duration_ns_sum"] or 0,
        predicted_ns=row["predicted_ns_mean"],
        idle_before_ns=row["gap_ns_sum"],
        module=row.get("module") or "",
        bytes=row["bytes_mean"] if row["bytes_count"] == row["count_all"] else None,
        flops=row["flops_mean"] if row["flops_count"] == row["count_all"] else None,
        typical_ns=row["duration_ns_approximate_median"],
        process=row["process"],
        **{name: row[f"{name}_max"] or 0 for name in _OF_KERNEL},
    )
