"""From a data set of `cudasched collect` to rows of features, which C++ computes (csrc/predict)."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from cudasched import hook
from cudasched.errors import Error
from cudasched.predictor._numpy import numpy

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy import bool_, float32, float64
    from numpy.typing import NDArray

#: Columns that the features are made of, beside the function's name and the words.
_NUMBERS = (
    *(f"{what}_{axis}" for what in ("grid", "block", "cluster") for axis in "xyz"),
    *("dynamic_shared_bytes", "static_shared_bytes", "local_bytes", "registers", "max_threads", "blocks_per_sm"),
    *("parameter_bytes", "identity"),
)


def feature_names() -> tuple[str, ...]:
    """The features of a launch, in the order of a row's values."""
    hook.load_core()
    from cudasched import _core

    return tuple(_core.feature_names())


def is_recording(launches: object) -> bool:
    """Whether it is a path or a table, and not rows of features."""
    return isinstance(launches, (str, os.PathLike)) or hasattr(launches, "schema")


def launch_columns(kernels: pa.Table) -> dict[str, Any]:
    """A recording's kernel launches as the arrays that ``_core.launch_features`` takes.

    Raises:
        Error: The table is no recording.
    """
    np = numpy()
    missing = [name for name in (*_NUMBERS, "function", "words", "pointers") if name not in kernels.column_names]
    if missing:
        raise Error(f"the table is no recording of `cudasched collect`: it has no column {', '.join(missing)}")
    functions = _filled(kernels["function"], "function").cast("string").combine_chunks().dictionary_encode()
    columns: dict[str, Any] = {
        name: np.ascontiguousarray(_filled(kernels[name], name).combine_chunks().to_numpy(zero_copy_only=False))
        for name in _NUMBERS
    }
    columns["function"] = np.ascontiguousarray(functions.indices.to_numpy(zero_copy_only=False), dtype=np.int32)
    columns["functions"] = functions.dictionary.to_pylist()
    for name, singular in (("words", "word"), ("pointers", "pointer")):
        lists = kernels[name].combine_chunks()
        columns[name] = np.ascontiguousarray(_filled(lists.flatten(), name).to_numpy(zero_copy_only=False))
        lengths = np.asarray(lists.value_lengths().fill_null(0))
        columns[f"{singular}_offsets"] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return columns


def _filled(column: Any, name: str) -> Any:
    """The column. Raises Error: a value is missing."""
    if column.null_count:
        raise Error(f"the table is no recording of `cudasched collect`: column {name} lacks values")
    return column


def feature_rows(launches: Any) -> tuple[NDArray[float32], NDArray[bool_]]:
    """Features of a recording's launches, and which of them are kernels (graphs have none: NaN).

    Raises:
        Error: It is no recording, or pyarrow is not installed.
    """
    hook.load_core()
    from cudasched import _core

    np = numpy()
    table = _table(launches)
    columns, known = _kernels(table)
    rows = np.full((len(known), len(feature_names())), np.nan, dtype=np.float32)
    rows[known] = _core.launch_features(columns, *_device(table))
    return rows, known


def outlooks(table: pa.Table, durations_ns: NDArray[float64]) -> dict[str, NDArray[float32]]:
    """Each launch's use of the GPU in the given time; a graph's values are NaN.

    Raises:
        Error: The table is no recording.
    """
    hook.load_core()
    from cudasched import _core

    np = numpy()
    columns, known = _kernels(table)
    found = _core.launch_outlooks(columns, np.ascontiguousarray(durations_ns[known], np.float64), *_device(table))
    spread = {}
    for name, values in found.items():
        spread[name] = np.full(len(known), np.nan, np.float32)
        spread[name][known] = values
    return spread


def _kernels(table: pa.Table) -> tuple[dict[str, Any], NDArray[bool_]]:
    """Columns of the table's kernels, and which rows these are."""
    import pyarrow.compute as pc

    if "kind" not in table.column_names:
        raise Error("the table is no recording of `cudasched collect`: it has no column kind")
    is_kernel = pc.equal(_filled(table["kind"], "kind").cast("string"), "kernel")
    return launch_columns(table.filter(is_kernel)), numpy().asarray(is_kernel)


def _device(table: pa.Table) -> tuple[int, int]:
    """Multiprocessors, and threads that one can hold."""
    found = []
    for key in ("cudasched.sm_count", "cudasched.max_threads_per_sm"):
        text = _metadata(table, key)
        if not re.fullmatch("[1-9][0-9]{0,8}", text):
            raise Error(f"the table's metadata has no number for {key}: it is no recording of `cudasched collect`")
        found.append(int(text))
    return found[0], found[1]


def capability_of(launches: Any) -> str | None:
    """The architecture of a recording's GPU, such as "sm_90"; None where rows are given.

    Raises:
        Error: It is no recording, or pyarrow is not installed.
    """
    if not is_recording(launches):
        return None
    text = _metadata(_table(launches), "cudasched.compute_capability")
    if not re.fullmatch(r"[0-9]+\.[0-9]+", text):
        raise Error(f"the table's metadata has {text!r} for cudasched.compute_capability, which is such as 9.0")
    return "sm_" + text.replace(".", "")


def _table(launches: Any) -> pa.Table:
    """The recording's launches, with columns of a recording's types.

    Raises:
        Error: It is no recording, cannot be read, or pyarrow is not installed.
    """
    from cudasched import collect
    from cudasched.collect import _dataset

    if isinstance(launches, (str, os.PathLike)):
        return collect.read(launches)
    if not isinstance(launches, _dataset.arrow().Table):
        raise Error(
            f"a recording is a path or a pyarrow.Table with its metadata, not a {type(launches).__name__}; "
            "cudasched.collect.write(rows, path, like=recording) makes one of another tool's rows"
        )
    _dataset.refuse_twice(launches.column_names, "the table is no recording of `cudasched collect`")
    form = _dataset.schema()
    for place, name in enumerate(launches.column_names):
        if name in form.names and launches.field(place).type != form.field(name).type:
            column = _dataset.as_type(launches.column(place), form.field(name))
            launches = launches.set_column(place, form.field(name), column)
    return launches


def _metadata(table: pa.Table, key: str) -> str:
    value = (table.schema.metadata or {}).get(key.encode())
    if not value:
        raise Error(f"the table's metadata has no {key}: it is no recording of `cudasched collect`, or lost its schema")
    return str(value.decode(errors="replace"))
