"""The data set of recorded launches: its Arrow schema, and the way from journals to Parquet (docs/dataset.md)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._output import Output
from cudasched._version import __version__
from cudasched.collect._journal import Journal, Rows, Summary, scan
from cudasched.errors import Error

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMATS", "SCHEMA_VERSION", "arrow", "convert", "fact", "journals_of", "read", "schema", "write"]

SCHEMA_VERSION = "1"
FORMATS = (".parquet", ".pq")
ROW_GROUP_ROWS = 65_536
_NO_NAME = "unknown"


def arrow() -> Any:
    """The module ``pyarrow``.

    Raises:
        Error: pyarrow or NumPy is not installed.
    """
    try:
        import numpy  # noqa: F401  # data sets need it, too: better said before a program runs
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Error(f"data sets need pyarrow and NumPy ({error}): pip install 'cudasched[collect]'") from None
    return pyarrow


def schema(timing: str = "") -> pa.Schema:
    """The columns, without metadata, of a data set timed so. docs/dataset.md explains each."""
    pa = arrow()
    text = pa.dictionary(pa.int32(), pa.string())
    numbers = {
        "launch": pa.uint64(),
        "pid": pa.uint32(),
        "thread": pa.uint32(),
        "device": pa.uint8(),
        "stream": pa.uint32(),
        "kind": text,
        "function": text,
        "identity": pa.uint64(),
        "graph": pa.uint32(),
        **{f"{name}_{axis}": pa.uint32() for name in ("grid", "block", "cluster") for axis in "xyz"},
        "dynamic_shared_bytes": pa.uint32(),
        "static_shared_bytes": pa.uint32(),
        "local_bytes": pa.uint32(),
        "registers": pa.uint16(),
        "max_threads": pa.uint16(),
        "blocks_per_sm": pa.uint16(),
        "waves": pa.float32(),
        "parameter_bytes": pa.uint32(),
        "words": pa.list_(pa.uint32()),
        "pointers": pa.list_(pa.uint16()),
        "submitted_ns": pa.int64(),
        "start_ns": pa.int64(),
        "duration_ns": pa.int64(),
        "overlapped": pa.bool_(),
        "sm_clock_mhz": pa.uint16(),
        "label": text,
    }
    if timing == "both":
        numbers["elapsed_ns"] = pa.int64()
    return pa.schema(list(numbers.items()))


def fact(table: pa.Table, name: str) -> str:
    """A recording's metadata of that name (docs/dataset.md); empty: it does not tell."""
    said: bytes = (table.schema.metadata or {}).get(f"cudasched.{name}".encode(), b"")
    return said.decode(errors="replace")


def _offsets(lengths: Any) -> Any:
    import numpy as np

    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _texts(numbers: Any, names: dict[int, str], default: str) -> Any:
    import numpy as np

    pa = arrow()
    distinct, indices = np.unique(numbers, return_inverse=True)
    values = [names.get(int(number), default) for number in distinct]
    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), pa.array(values, pa.string()))


def _batch(journal: Journal, block: Rows, form: pa.Schema) -> pa.RecordBatch:
    import numpy as np

    pa = arrow()
    rows = block.rows
    columns: dict[str, Any] = {name: rows[name] for name in rows.dtype.names or () if rows[name].ndim == 1}
    for name in ("grid", "block", "cluster"):
        for place, axis in enumerate("xyz"):
            columns[f"{name}_{axis}"] = rows[name][:, place]
    untimed = rows["duration_ns"] < 0
    is_graph = rows["is_graph"] != 0
    functions = np.where(is_graph, np.uint64(1 << 32), rows["function"].astype(np.uint64))
    columns["pid"] = np.full(len(rows), journal.meta.get("pid", 0), np.uint32)
    columns["kind"] = _texts(is_graph, {0: "kernel", 1: "graph"}, "")
    columns["function"] = _texts(functions, {**journal.functions, 1 << 32: "graph"}, _NO_NAME)
    columns["label"] = _texts(rows["label"], journal.labels, "")
    columns["overlapped"] = rows["overlapped"] != 0
    for name in ("start_ns", "duration_ns"):
        columns[name] = pa.array(rows[name], pa.int64(), mask=untimed)
    columns["words"] = pa.ListArray.from_arrays(_offsets(rows["word_count"]), pa.array(block.words))
    columns["pointers"] = pa.ListArray.from_arrays(_offsets(rows["pointer_count"]), pa.array(block.pointers))
    if "elapsed_ns" in form.names:
        elapsed = np.full(len(rows), -1, np.int64) if block.elapsed is None else block.elapsed
        columns["elapsed_ns"] = pa.array(elapsed, pa.int64(), mask=elapsed < 0)
    arrays = [
        columns[entry.name]
        if isinstance(columns[entry.name], pa.Array)
        else pa.array(np.ascontiguousarray(columns[entry.name]), entry.type)
        for entry in form
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=form)


def journals_of(path: Path) -> Path:
    """The directory in which the journals for the data set `path` are, until they are converted."""
    return path.with_name(path.name + ".journals")


def _metadata(summaries: Sequence[Summary]) -> dict[str, str]:
    """The file's metadata: the first journal's GPU, and the losses of all journals."""
    metas = [summary.meta for summary in summaries if summary.meta]
    first = metas[0] if metas else {}
    gpu = (first.get("devices") or [{}])[0]
    command = [word.encode("latin-1", "replace").decode("utf-8", "replace") for word in first.get("command", [])]
    totals = {
        name: sum(int(summary.end.get(name, 0)) for summary in summaries)
        for name in ("lost", "untimed", "exact", "by_order", "mismatched", "foreign", "dropped_records")
    }
    overheads = [int(summary.end.get("event_overhead_ns", 0)) for summary in summaries]
    return {
        "cudasched.schema": SCHEMA_VERSION,
        "cudasched.version": __version__,
        "cudasched.gpu": str(gpu.get("gpu", "")),
        "cudasched.compute_capability": str(gpu.get("compute_capability", "")),
        "cudasched.sm_count": str(gpu.get("sm_count", 0)),
        "cudasched.max_threads_per_sm": str(gpu.get("max_threads_per_sm", 0)),
        "cudasched.driver_version": str(first.get("driver_version", 0)),
        "cudasched.cupti_version": str(first.get("cupti_version", 0)),
        "cudasched.timing": str(first.get("timing", "")),
        "cudasched.event_overhead_ns": str(max(overheads, default=0)),
        "cudasched.empty_pair_ns": str(max((int(s.end.get("empty_pair_ns", 0)) for s in summaries), default=0)),
        "cudasched.command": json.dumps(command),
        "cudasched.processes": str(len(summaries)),
        "cudasched.cut_short": str(sum(not summary.end for summary in summaries)),
        "cudasched.memory": str(gpu.get("memory", 0)),
        "cudasched.memory_peak": str(sum(int(summary.end.get("memory_peak", 0)) for summary in summaries)),
        "cudasched.whole_graphs": json.dumps(_whole_graphs(summaries)),
        **{f"cudasched.{name}": str(value) for name, value in totals.items()},
    }


def _whole_graphs(summaries: Sequence[Summary]) -> dict[str, list[int]]:
    """By reason: executable graphs that stay whole, how many ns the longest is predicted to take, and its nodes."""
    whole: dict[str, list[int]] = {}
    for summary in summaries:
        for reason, (graphs, ns, nodes) in summary.end.get("whole_graphs", {}).items():
            count, longest_ns, longest_nodes = whole.get(reason, [0, -1, 0])
            longest = (ns, nodes) if ns > longest_ns else (longest_ns, longest_nodes)
            whole[reason] = [count + graphs, *longest]
    return whole


def _summaries(directory: Path) -> list[Summary]:
    files = sorted(directory.glob("*.journal"), key=lambda path: (path.stat().st_ctime_ns, path.name))
    found = [scan(path) for path in files]
    return sorted(found, key=lambda summary: int(summary.meta.get("started_ns", 0)))


def _batches(summaries: Iterable[Summary], form: pa.Schema) -> Iterator[pa.RecordBatch]:
    for summary in summaries:
        journal = Journal(summary.path)
        for block in journal.blocks():
            if len(block.rows):
                yield _batch(journal, block, form)


class _NothingRecordedError(Exception):
    pass


def convert(directory: Path, output: Path | Output) -> dict[str, str]:
    """Makes a data set of the journals in a directory, with memory for one row group.

    Args:
        directory: Of the journals, which stay.
        output: The Parquet file, which appears when whole and replaces an earlier one. Without launches, none is
            written, and an earlier file stays; a stream gets one without rows.

    Returns:
        The file's metadata, "rows", and "kept" if the file is the one that was there before.

    Raises:
        Error: A file in the directory is of another version, or pyarrow is missing.
        OSError: The file cannot be written.
    """
    target = output if isinstance(output, Output) else Output(output)
    summaries = _summaries(directory)
    metadata = _metadata(summaries)
    form = schema(metadata["cudasched.timing"]).with_metadata(metadata)
    rows = 0
    try:
        with target.replacing() as unfinished:
            with _writer(unfinished, form) as writer:
                waiting: list[pa.RecordBatch] = []
                count = 0
                for batch in _batches(summaries, form):
                    waiting.append(batch)
                    count += batch.num_rows
                    if count >= ROW_GROUP_ROWS:
                        writer.write_table(_table(waiting, form), row_group_size=ROW_GROUP_ROWS)
                        rows, count = rows + count, 0
                        waiting.clear()
                if waiting or rows == 0:
                    writer.write_table(_table(waiting, form), row_group_size=ROW_GROUP_ROWS)
                    rows += count
            if rows == 0 and not target.is_stream:
                raise _NothingRecordedError
    except _NothingRecordedError:
        if target.holds_something:
            metadata["kept"] = "1"
    return {**metadata, "rows": str(rows)}


def _table(batches: Sequence[pa.RecordBatch], form: pa.Schema) -> pa.Table:
    pa = arrow()
    table = pa.Table.from_batches(list(batches), schema=form.remove_metadata()).unify_dictionaries()
    return table.replace_schema_metadata(form.metadata)


@contextlib.contextmanager
def _writer(path: Path, form: pa.Schema) -> Iterator[Any]:
    """A writer of a file with checksums of pages and metadata."""
    arrow()
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, form, compression="zstd", write_page_checksum=True) as writer:
        yield writer
        if hasattr(writer, "add_key_value_metadata"):  # from pyarrow 16 on
            writer.add_key_value_metadata({_SEAL: _seal(form.metadata)})


def write(rows: Any, path: str | os.PathLike[str], *, like: str | os.PathLike[str] | pa.Table | None = None) -> None:
    """Writes rows of a recording, such as those that another tool has chosen, as a recording.

    ::

        table = cudasched.collect.read("data.parquet")
        chosen = polars.from_arrow(table).filter(polars.col("duration_ns") > 1_000)
        cudasched.collect.write(chosen, "long.parquet", like=table)

    Args:
        rows: A table of pyarrow, pandas, polars or DuckDB, or any other object that exports an Arrow stream, with the
            columns of `schema`. Types that a tool has changed are changed back; other columns are left out.
        path: The Parquet file; an earlier one is replaced.
        like: The recording that the rows are of, a path or a table, whose metadata the file gets. None: the rows have
            it still, as a filtered ``pyarrow.Table`` has.

    Raises:
        Error: The rows lack columns or metadata, a value does not fit its column, or the file cannot be written.
    """
    table = _arrow_table(rows)
    source = like if like is None or hasattr(like, "schema") else read(like)
    metadata = (table if source is None else source).schema.metadata or {}
    told = {key: value for key, value in metadata.items() if key.startswith(b"cudasched.") and key != _SEAL}
    if told.get(b"cudasched.schema", b"").decode(errors="replace") != SCHEMA_VERSION:
        raise Error("the rows name no GPU: name the recording that the rows are from (like=)")
    timing = "both" if "elapsed_ns" in table.column_names else ""
    form = schema(timing).with_metadata(told)
    _refuse_missing(table.column_names, "the rows are no recording's")
    columns = [as_type(table[entry.name], entry) for entry in form]
    made = arrow().Table.from_arrays(columns, schema=form)
    if wrong := _wrong(made):
        raise Error(f"the rows are no recording's: {wrong}")
    target = Output(path, formats=FORMATS)
    try:
        with target.replacing() as unfinished, _writer(unfinished, form) as writer:
            writer.write_table(made, row_group_size=ROW_GROUP_ROWS)
    except OSError as error:
        raise Error(f"{path} cannot be written: {error.strerror or error}") from None


def _arrow_table(rows: Any) -> pa.Table:
    pa = arrow()
    try:
        if type(rows).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(rows, preserve_index=False)
        return rows.read_all() if isinstance(rows, pa.RecordBatchReader) else pa.table(rows)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise Error(f"a {type(rows).__name__} is no table of launches: {_first_line(error)}") from None


def as_type(column: Any, entry: pa.Field) -> Any:
    """A column with the type that a recording has; a value that would change is refused."""
    pa = arrow()
    if column.type == entry.type:
        return column
    try:
        if not pa.types.is_dictionary(entry.type):
            return column.cast(entry.type)
        if pa.types.is_dictionary(column.type):  # of a kind of text that pyarrow does not decode by itself, it may be
            texts = [chunk.dictionary.cast(pa.string()).take(chunk.indices) for chunk in column.chunks]
            column = pa.chunked_array(texts, pa.string())
        return column.cast(pa.string()).dictionary_encode()
    except pa.ArrowException as error:
        raise Error(
            f"column {entry.name} holds {column.type}, which is no {entry.type}: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _refuse_missing(names: Sequence[str], what: str) -> None:
    missing = [name for name in schema().names if name not in names]
    if missing:
        raise Error(f"{what}: columns {', '.join(missing)} are missing")
    refuse_twice(names, what)


def refuse_twice(names: Sequence[str], what: str) -> None:
    """Raises Error: a column of a recording comes twice."""
    twice = [name for name in schema().names if names.count(name) > 1]
    if twice:
        raise Error(f"{what}: columns {', '.join(twice)} come twice")


def read(path: str | os.PathLike[str]) -> pa.Table:
    """Reads a data set of recorded launches.

    Args:
        path: A Parquet file of `recording` or ``cudasched collect``. If the file was never finished, because its writer
            was killed, its journals are read.

    Returns:
        One row a launch, with the columns of docs/dataset.md; the metadata is the schema's.

    Raises:
        Error: There is no such file, it is no data set of launches, or of another version.
    """
    arrow()
    import pyarrow.parquet as pq

    file = Path(path)
    journals = file if file.is_dir() else journals_of(file)
    if not file.is_file() and journals.is_dir():
        summaries = _summaries(journals)
        if not summaries:
            raise Error(f"{journals} has no journals of `cudasched collect`")
        metadata = _metadata(summaries)
        form = schema(metadata["cudasched.timing"]).with_metadata(metadata)
        return _table(list(_batches(summaries, form)), form)
    try:
        with pq.ParquetFile(file) as reader:
            form = reader.schema_arrow
            whole = _counts_agree(reader.metadata)
        version = (form.metadata or {}).get(b"cudasched.schema", b"").decode(errors="replace")
        if version != SCHEMA_VERSION:
            raise Error(
                f"{file} is no data set of launches that this cudasched reads: "
                + (
                    f"it has schema version {version}, and {SCHEMA_VERSION} is read"
                    if version
                    else "it has no version; write rows that another tool has chosen of a recording with "
                    "cudasched.collect.write(rows, file, like=recording)"
                )
            )
        _refuse_missing(form.names, f"{file} is no data set of launches")
        texts = ["kind", "function", "label"]
        with pq.ParquetFile(file, read_dictionary=texts, page_checksum_verification=True) as reader:
            table = reader.read()
        table.validate(full=True)
    except Error:
        raise
    except FileNotFoundError:
        raise Error(
            f"there is no data set at {file}, nor journals at {journals}; "
            f"`cudasched collect -o {file} -- PROGRAM` makes one"
        ) from None
    except MemoryError:
        raise Error(f"{file} cannot be read: the file is damaged, or needs more memory than the machine has") from None
    except Exception as error:  # pyarrow has no common class for the errors of a damaged file
        why = getattr(error, "strerror", None) or _first_line(error)
        raise Error(f"{file} is no data set of launches, or is damaged: {why}; record it again") from None
    wrong = _wrong(table) or ("" if whole else "its numbers of rows and values do not agree")
    if wrong:
        raise Error(f"{file} is damaged: {wrong}; record it again")
    # The seal does not hold for rows chosen from the table.
    return table.replace_schema_metadata({key: value for key, value in form.metadata.items() if key != _SEAL})


def _counts_agree(metadata: Any) -> bool:
    """Whether the footer, which has no checksum, says the same number of rows for all columns that have one a row."""
    flat = [i for i in range(metadata.num_columns) if metadata.schema.column(i).max_repetition_level == 0]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return metadata.num_rows == sum(group.num_rows for group in groups) and all(
        group.column(i).num_values == group.num_rows for group in groups for i in flat
    )


_MAY_BE_MISSING = (
    "submitted_ns",
    "start_ns",
    "duration_ns",
    "label",
    "sm_clock_mhz",
    "overlapped",
    "waves",
)  # training.compact keeps durations alone
_NUMBERS = ("sm_count", "max_threads_per_sm", "processes", "lost", "untimed", "memory", "memory_peak")


def _wrong(table: pa.Table) -> str:
    """The faults of a damaged footer that no checksum of a page shows; empty: none."""
    pa = arrow()
    wrong = ""
    for entry in schema():
        column = table[entry.name]
        kind = column.type
        if pa.types.is_dictionary(kind) and pa.types.is_dictionary(entry.type):
            kind = entry.type if kind.value_type == entry.type.value_type else kind
        if kind != entry.type:
            wrong = f"column {entry.name} holds {column.type}, not {entry.type}"
        elif column.null_count and entry.name not in _MAY_BE_MISSING:
            wrong = f"column {entry.name} lacks values"
    metadata = table.schema.metadata or {}
    for name in _NUMBERS:
        value = metadata.get(f"cudasched.{name}".encode(), b"0")
        if not value.isdigit():
            wrong = f"its metadata has no number for {name}"
    if not re.fullmatch(rb"(\d+\.\d+)?", metadata.get(b"cudasched.compute_capability", b"")):
        wrong = "its metadata has no compute capability"
    seal = metadata.get(_SEAL)
    if not wrong and seal is not None and seal not in (_seal(metadata), _seal(metadata, table.num_rows)):
        wrong = "its metadata differs from the written one"
    return wrong


_SEAL = b"cudasched.seal"


def _seal(metadata: Mapping[bytes, bytes], rows: int | None = None) -> bytes:
    """A checksum of the metadata, which no page's checksum covers; earlier files' checksums have the rows, too."""
    items = sorted((key, value) for key, value in metadata.items() if key.startswith(b"cudasched.") and key != _SEAL)
    return b"%08x" % zlib.crc32(repr(items if rows is None else (items, rows)).encode())
