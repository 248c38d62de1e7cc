"""Recorded launches as arrays: features, durations, and the groups that splits go by.

Splits are never random over launches, which repeat one another:

- `shapes`: whole shape groups are held out: an operation and a shape, across data types and passes;
- `kernels`: whole name families: kernels whose names differ in template arguments and digits alone, and of names
  without a namespace those that begin with the same two words (all of `nvjet_sm90_*`);
- `processes`: the second recording of the same labels is held out.
"""

from __future__ import annotations

import ctypes
import functools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from training.command import InputError

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: What one launch is told from another by, beside the words of its parameter block.
GEOMETRY = (*(f"{what}_{axis}" for what in ("grid", "block", "cluster") for axis in "xyz"), "dynamic_shared_bytes")
#: Of launches of one kernel and geometry under one label, which are taken to be the same work.
FEW = 4
#: Pairs of launches of a kernel that are compared word by word.
MOST_PAIRS = 512
#: Launches whose words are hashed at a time.
PART = 20_000
#: What else `_core.Replay` takes of a launch.
ATTRIBUTES = (
    *("static_shared_bytes", "local_bytes", "registers", "max_threads", "blocks_per_sm", "parameter_bytes"),
    *("identity", "duration_ns"),
)
#: What the eight-feature network and the nearest neighbour of `training.baselines` see.
LAUNCH_SPACE = (
    *(f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"),
    "dynamic_shared_bytes",
    "registers",
)


@dataclass(frozen=True, eq=False)
class Launches:
    """Kernels that ran alone and were timed; one value a launch in each array, in launch order a process.

    Attributes:
        rows: The C++ features, shape (n, features).
        duration_ns: Measured, end - start.
        launch_space: `LAUNCH_SPACE`, shape (n, 8).
        kernel: Dense number of the kernel (its identity).
        group: Dense number of its name family.
        key: Dense number of kernel, geometry and words that are not free: the same launch has the same.
        geometry_key: Of kernel and geometry alone.
        shape_group: Number of operation and shape; of the whole label in programs; of the geometry without a label.
        family: Index into `families`.
        process: Dense number of the process.
        again: Whether the process recorded what another had recorded before.
        families: Names.
        functions: Demangled name of each kernel.
    """

    rows: NDArray[np.float32]
    duration_ns: Floats
    launch_space: Floats
    kernel: Codes
    group: Codes
    key: Codes
    geometry_key: Codes
    shape_group: Codes
    family: Codes
    process: Codes
    again: Mask
    families: tuple[str, ...]
    functions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.duration_ns)

    def take(self, chosen: Mask | Codes) -> Launches:
        """Some of the launches."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Launches(**{k: v[chosen] if isinstance(v, np.ndarray) else v for k, v in values.items()})


def load(path: str | Path) -> Launches:
    """Reads a recording, or what `training.compact` made of several.

    Raises:
        cudasched.errors.Error: It is no recording of a version that this reads.
        InputError: It has no kernel with a time of its own.
    """
    return launches_of(table_of(path))


def table_of(path: str | Path) -> pa.Table:
    """The recording's kernels that were timed and ran alone, with its metadata."""
    import cudasched.collect

    table = cudasched.collect.read(str(path))
    alone = pc.and_(pc.is_valid(table["duration_ns"]), pc.invert(pc.fill_null(table["overlapped"], False)))
    kernels = table.filter(pc.and_(alone, pc.equal(table["kind"].cast(pa.string()), "kernel")))
    kernels = kernels.filter(pc.greater(kernels["duration_ns"], 0))
    if not len(kernels):
        raise InputError(f"{path} has no kernel with a time of its own: record it with --timing cupti")
    return kernels


def launches_of(table: pa.Table) -> Launches:
    """Arrays of the table's kernels."""
    from cudasched.predictor._recording import feature_rows

    rows, _ = feature_rows(table)
    kernel, identities = dense(table["identity"])
    labels = table["label"].cast(pa.string()).combine_chunks().dictionary_encode()
    texts = labels.dictionary.to_pylist()
    label = labels.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    programs = [text.startswith("program:") for text in texts]
    families = sorted({family_of(text) for text in texts})
    shape_groups = [text if program else shape_group_of(text) for text, program in zip(texts, programs, strict=True)]
    names = table["function"].cast(pa.string()).combine_chunks().dictionary_encode()
    name = names.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    first = np.zeros(len(identities), np.int64)
    first[kernel[::-1]] = name[::-1]
    functions = [demangle(names.dictionary[int(index)].as_py()) for index in first]
    groups = numbered([name_family_of(function) for function in functions])
    geometry = combine([np.asarray(table[column].to_numpy(), np.uint64) for column in ("identity", *GEOMETRY)])
    geometry_key = np.unique(geometry, return_inverse=True)[1].astype(np.int64)
    process, _ = dense(table["pid"])
    labelled = np.array([bool(text.strip("|")) for text in texts])[label]
    # Without a label, what is launched alike is taken for one shape; in programs nothing is split by shapes.
    shape_group = np.where(labelled, numbered(shape_groups)[label], len(texts) + geometry_key)
    numbers = [np.asarray(codes, np.uint64) for codes in (label, process)]
    case = np.unique(combine([*numbers, geometry]), return_inverse=True)[1].astype(np.int64)
    return Launches(
        rows=rows,
        duration_ns=table["duration_ns"].to_numpy(zero_copy_only=False).astype(np.float64),
        launch_space=np.stack([table[column].to_numpy().astype(np.float64) for column in LAUNCH_SPACE], 1),
        kernel=kernel,
        group=groups[kernel],
        key=np.unique(combine([geometry, word_sums(table, kernel, case)]), return_inverse=True)[1].astype(np.int64),
        geometry_key=geometry_key,
        shape_group=shape_group,
        family=np.array([families.index(family_of(text)) for text in texts], np.int64)[label],
        process=process,
        again=repeated(process, label),
        families=tuple(families),
        functions=tuple(functions),
    )


def replay_columns(table: pa.Table) -> dict[str, Any]:
    """The table's columns as `_core.Replay` takes them."""
    numbers = [name for name in (*GEOMETRY, *ATTRIBUTES) if name in table.column_names]
    columns: dict[str, Any] = {name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in numbers}
    functions = table["function"].cast(pa.string()).combine_chunks().dictionary_encode()
    columns["function"] = functions.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    columns["functions"] = functions.dictionary.to_pylist()
    for name, singular in (("words", "word"), ("pointers", "pointer")):
        lists = table[name].combine_chunks()
        columns[name] = lists.flatten().to_numpy(zero_copy_only=False)
        lengths = np.asarray(lists.value_lengths().fill_null(0), np.int64)
        columns[f"{singular}_offsets"] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return columns


def sm_count_of(table: pa.Table) -> int:
    """Multiprocessors of the GPU that the table was recorded on."""
    return int((table.schema.metadata or {})[b"cudasched.sm_count"])


def family_of(label: str) -> str:
    """Of "gemm.mm_nt|1x2x3|bf16|forward" it is "gemm"; of a program's label, the program."""
    operation = label.split("|")[0]
    return operation if label.startswith("program:") else operation.split(".")[0] or "unlabelled"


def shape_group_of(label: str) -> str:
    """Operation and shape, without data type and pass."""
    return "|".join(label.split("|")[:2])


def repeated(process: Codes, label: Codes) -> Mask:
    """Launches of processes whose labels, most of them, a process with more labels has too."""
    again = np.zeros(len(process), bool)
    seen: set[int] = set()
    masks = [process == number for number in np.unique(process)]
    for mine in sorted(masks, key=lambda mask: -len(np.unique(label[mask]))):
        labels = set(np.unique(label[mine]).tolist())
        again[mine] = len(labels & seen) > len(labels) / 2
        seen |= labels
    return again


def dense(column: pa.ChunkedArray) -> tuple[Codes, list[int]]:
    """Numbers from 0 in the order of first appearance, and what each stands for."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def numbered(texts: Sequence[str]) -> Codes:
    """Dense numbers of texts."""
    return np.unique(np.asarray(texts, dtype=object).astype(str), return_inverse=True)[1].astype(np.int64)


def combine(columns: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """A hash over the columns' values, row by row."""
    state = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            state = (state ^ column) * np.uint64(0x9E3779B97F4A7C15)
            state ^= state >> np.uint64(29)
    return state


def word_sums(table: pa.Table, kernel: Codes, case: Codes) -> NDArray[np.uint64]:
    """A hash of each launch's words, less those that are free: see `free_words`."""
    words = table["words"].combine_chunks()
    offsets = words.offsets.to_numpy().astype(np.int64)
    values = np.asarray(words.values)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    free = free_words(values, offsets, kernel, case)
    sums = np.zeros(len(table), np.uint64)
    for begin in range(0, len(table), PART):
        end = min(begin + PART, len(table))
        some = offsets[begin : end + 1]
        row = np.repeat(np.arange(begin, end), np.diff(some))
        place = np.arange(some[0], some[-1]) - np.repeat(some[:-1], np.diff(some))
        with np.errstate(over="ignore"):
            mixed = values[some[0] : some[-1]].astype(np.uint64) + np.uint64(1)
            mixed *= (place.astype(np.uint64) << np.uint64(1)) + np.uint64(0xC2B2AE3D27D4EB4F)
            mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0x9FB21C651E98DF25)
            mixed ^= mixed >> np.uint64(28)
            mixed[free[kernel[row], place]] = 0
            total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
            sums[begin:end] = total[some[1:] - some[0]] - total[some[:-1] - some[0]]
    return sums


def free_words(values: NDArray[np.uint32], offsets: Codes, kernel: Codes, case: Codes) -> Mask:
    """Words of each kernel that change when one case is run again: random offsets, what lay on the stack.

    They say nothing of a shape; with them in a key, every repeat would be a new shape.

    Args:
        values: The words of all launches.
        offsets: Where each launch's words begin, and the end of the last.
        kernel: The kernel of each launch.
        case: A number for label, process, kernel and geometry together: launches of one case do the same, unless a case
            launches a kernel many times.

    Returns:
        Shape (kernels, words): True where a word differs between neighbours in a tenth of the cases or more.
    """
    lengths = np.diff(offsets)
    free = np.zeros((int(kernel.max()) + 1, int(lengths.max(initial=0)) + 1), bool)
    order = np.argsort(case, kind="stable")
    sizes = np.bincount(case)
    pairs = np.flatnonzero(case[order[1:]] == case[order[:-1]])
    first, second = order[pairs], order[pairs + 1]
    few = (sizes[case[first]] <= FEW) & (lengths[first] == lengths[second])
    first, second = first[few], second[few]
    of_kernel = np.argsort(kernel[first], kind="stable")
    first, second = first[of_kernel], second[of_kernel]
    kernels, starts = np.unique(kernel[first], return_index=True)
    ends = np.append(starts, len(first))[1:]
    for number, begin, end in zip(kernels.tolist(), starts.tolist(), ends.tolist(), strict=True):
        chosen = np.linspace(begin, end - 1, min(end - begin, MOST_PAIRS)).astype(np.int64)
        length = int(lengths[first[chosen]].min())
        columns = np.arange(length)
        differs = values[offsets[first[chosen], None] + columns] != values[offsets[second[chosen], None] + columns]
        free[number, :length] = differs.mean(0) >= 0.1
    return free


# ---- names ----------------------------------------------------------------------------------------------------------


@functools.cache
def _demangler() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
        return library
    except (OSError, AttributeError):
        return None


@functools.cache
def demangle(name: str) -> str:
    """The name as C++ writes it; unchanged if it is not mangled."""
    library = _demangler()
    if library is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    found = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not found:
        return name
    text = ctypes.string_at(found).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


def group_of(function: str) -> str:
    """A demangled name without template arguments, parameters, return type and digits."""
    depth, kept = 0, []
    for character in function.replace("(anonymous namespace)", "anonymous").replace("->", " "):
        depth += character in "<"
        if depth == 0:
            kept.append(character)
        depth -= character in ">" and depth > 0
    base = "".join(kept).split("(")[0].strip()
    return re.sub(r"[\d_]*\d[\d_]*", "#", base.split(" ")[-1])


def name_family_of(function: str) -> str:
    """What kernels of one source share: the name without template arguments and digits.

    Of a name without a namespace only its first two words count: the rest of `nvjet_sm90_hsh_128x8_64x12_2x1_v_bz_TNT`
    says which of some hundred variants it is.
    """
    group = group_of(function)
    if "::" in group:
        return group
    words = [word for word in re.split(r"[_#\d]+", group) if word]
    return "_".join(words[:2]) or group


# ---- splits ---------------------------------------------------------------------------------------------------------


def folds(groups: Codes, count: int, salt: str = "") -> Codes:
    """A fold for each launch, the same for all of a group and in every run; folds are of about equal size.

    Groups go, the largest first and equal ones in the order of a hash, into the fold that has the fewest launches.
    """
    numbers, sizes = np.unique(groups, return_counts=True)
    order = sorted(range(len(numbers)), key=lambda i: (-int(sizes[i]), zlib.crc32(f"{salt}{int(numbers[i])}".encode())))
    filled = np.zeros(count, np.int64)
    chosen = np.zeros(int(numbers.max()) + 1, np.int64)
    for i in order:
        fold = int(filled.argmin())
        chosen[numbers[i]] = fold
        filled[fold] += sizes[i]
    return chosen[groups]


def split(launches: Launches, kind: str, fold: int = 0, count: int = 5) -> tuple[Mask, Mask]:
    """What to train on and what to test on.

    Args:
        launches: All of them.
        kind: "shapes", "kernels" or "processes".
        fold: Which of `count` folds to test on; "processes" has one.
        count: Number of folds.

    Returns:
        Two masks. Of "shapes", only launches of kernels that training has seen and of keys that it has not are tested;
        of "processes", only launches of keys that it has.

    Raises:
        ValueError: No such split, or the recording has nothing to test it on.
    """
    if kind == "shapes":
        held = folds(launches.shape_group, count, kind) == fold
        train = ~held
        test = held & np.isin(launches.kernel, launches.kernel[train]) & ~np.isin(launches.key, launches.key[train])
    elif kind == "kernels":
        held = folds(launches.group, count, kind) == fold
        train, test = ~held, held
    elif kind == "processes":
        train = ~launches.again
        test = launches.again & np.isin(launches.key, launches.key[train])
    else:
        raise ValueError(f"no split {kind!r}: shapes, kernels or processes")
    if not train.any() or not test.any():
        raise ValueError(
            f"the recording has nothing to split by {kind}: it needs labels, and two processes for repeats"
        )
    return train, test
