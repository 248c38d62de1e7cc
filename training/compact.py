"""Makes two small files of what `training.workloads` has recorded: sweeps, and whole programs.

    python -m training.compact --in DIR --out DIR [--most-mib 12]

Sweeps lose what was set-up or warm-up, launches without a time, when they ran (null), and repeats beyond `--repeats`
of one launch under one label in one process. Programs keep every launch, in order. Where a file would be larger than
`--most-mib`, whole shape groups (operation and shape) are left out of sweeps, chosen by their hash.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from training.command import InputError, carry_out
from training.data import family_of, shape_group_of

#: The same launch under the same label: what tells repeats from other launches, besides words.
KEY = (
    "pid",
    "label",
    "identity",
    *(f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"),
    "dynamic_shared_bytes",
)
TIMES = ("submitted_ns", "start_ns")
DELTA = ("launch", "submitted_ns", "start_ns")


def read(path: Path) -> pa.Table:
    """A recording, also one whose process was killed."""
    import cudasched.collect

    return cudasched.collect.read(str(path))


def plain(table: pa.Table) -> pa.Table:
    """The table with dictionaries resolved, so that files with different ones can be joined."""
    columns = [pc.cast(c, c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(columns, names=table.column_names, metadata=table.schema.metadata)


def apart(table: pa.Table, taken: set[int]) -> pa.Table:
    """The table, with other numbers for its processes where `taken` has some of theirs: containers count from 1 each.

    Args:
        table: A recording.
        taken: Numbers of processes of earlier tables; gets those of this one.
    """
    if taken.intersection(pc.unique(table["pid"]).to_pylist()):
        place = table.schema.get_field_index("pid")
        moved = pc.add(table["pid"], pa.scalar(max(taken) + 1, pa.uint32()))
        table = table.set_column(place, table.schema.field(place), moved)
    taken.update(pc.unique(table["pid"]).to_pylist())
    return table


def of_one_gpu(table: pa.Table, name: str, gpus: dict[str, str]) -> None:
    """Refuses a recording of another GPU: of a file's one GPU, features are made.

    Args:
        table: A recording.
        name: Its file's.
        gpus: The GPUs of earlier ones, with a file's name each; gets this one's.

    Raises:
        InputError: Names two files and their GPUs.
    """
    from cudasched.collect._dataset import fact

    gpus.setdefault(f"{fact(table, 'gpu')} with {fact(table, 'sm_count')} multiprocessors", name)
    if len(gpus) > 1:
        told = ", ".join(f"{file} of {gpu}" for gpu, file in gpus.items())
        raise InputError(f"recordings of several GPUs cannot be joined: {told}")


def sort_out(table: pa.Table, repeats: int) -> pa.Table:
    """Sweeps without set-up, warm-up and needless repeats."""
    label = table["label"]
    wanted = pc.and_(
        pc.invert(pc.or_(pc.starts_with(label, "setup"), pc.ends_with(label, "|warm-up"))),
        pc.and_(pc.not_equal(label, ""), pc.and_(pc.is_valid(table["duration_ns"]), pc.invert(table["overlapped"]))),
    )
    table = table.filter(wanted)
    hashes = np.zeros(len(table), np.uint64)
    with np.errstate(over="ignore"):
        for name in KEY:
            codes = pc.dictionary_encode(table[name]).combine_chunks().indices.to_numpy().astype(np.uint64)
            hashes = (hashes ^ (codes + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(29)
        words = table["words"].combine_chunks()
        offsets = words.offsets.to_numpy().astype(np.int64)
        mixed = np.asarray(words.values).astype(np.uint64) + np.uint64(1)
        position = np.arange(len(mixed), dtype=np.uint64) - np.repeat(offsets[:-1], np.diff(offsets)).astype(np.uint64)
        mixed *= (position * np.uint64(2) + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed ^= mixed >> np.uint64(31)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        hashes += sums[offsets[1:]] - sums[offsets[:-1]]
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    index = np.arange(len(ordered))
    rank = np.empty(len(ordered), np.int64)
    rank[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    return table.filter(pa.array(rank < repeats))


def write(table: pa.Table, path: Path, level: int = 19) -> int:
    """Writes the file and returns its size; pages are large, so that a step looks like the one before it."""
    names = table.column_names
    flat = [name for name in names if not pa.types.is_list(table.schema.field(name).type)]
    delta = {name: "DELTA_BINARY_PACKED" for name in DELTA if name in names}
    encoding = {**delta, **({"duration_ns": "PLAIN"} if "duration_ns" in names else {})}
    temporary = path.with_name(path.name + ".new")
    pq.write_table(
        table,
        temporary,
        compression="zstd",
        compression_level=level,
        use_dictionary=[name for name in flat if name not in encoding],
        column_encoding=encoding,
        row_group_size=1 << 20,
        data_page_size=32 << 20,
        write_statistics=False,
    )
    os.replace(temporary, path)
    return path.stat().st_size


def thin(table: pa.Table, share: float, most_a_family: int | None = None) -> pa.Table:
    """About `share` of the shape groups, whole ones; fewer of families with more than `most_a_family` launches."""
    labels = pc.dictionary_encode(table["label"]).combine_chunks()
    texts, codes = labels.dictionary.to_pylist(), labels.indices.to_numpy()
    families = [family_of(text) for text in texts]
    rows: collections.Counter[str] = collections.Counter()
    for name, count in zip(families, np.bincount(codes, minlength=len(texts)).tolist(), strict=True):
        rows[name] += count
    shares = {name: min(share, (most_a_family or count) / max(1, count)) for name, count in rows.items()}
    kept = [
        zlib.crc32(shape_group_of(text).encode()) < shares[name] * 2**32
        for text, name in zip(texts, families, strict=True)
    ]
    return table.filter(pa.array(np.asarray(kept, bool)[codes]))


def where_recorded() -> dict[str, str]:
    """Versions and the date, for the file's metadata; compact on the machine that recorded."""
    found = {"python": platform.python_version()}
    found["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def compact(
    source: Path,
    out: Path,
    repeats: int = 2,
    most_mib: float = 12.0,
    level: int = 19,
    most_a_family: int | None = None,
) -> dict[str, int]:
    """Writes `sweeps.parquet`, `programs.parquet` and `recorded.json`; returns rows a file.

    Raises:
        FileNotFoundError: Nothing was recorded in `source`.
        InputError: No launch of the sweeps has a label and a time: nothing would be left of them. Or the recordings are
            of several GPUs, or in the directory that is written to.
    """
    if out.resolve() == source.resolve():
        raise InputError(f"{out} has the recordings: the files written there would be read as others the next time")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[pa.Table]] = {"sweeps": [], "programs": []}
    recorded: dict[str, object] = {}
    gpus: dict[str, str] = {}
    processes: set[int] = set()
    finished = set(source.glob("*.parquet"))
    unfinished = {journals.with_suffix("") for journals in source.glob("*.parquet.journals")}
    # What repeats the others comes last, as it was recorded.
    for path in sorted(finished | unfinished, key=lambda path: (path.stem.startswith("again"), path.name)):
        try:
            table = apart(plain(read(path)), processes)
        except Exception as error:  # a file cut short before its first row group; the others are still worth having
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        of_one_gpu(table, path.name, gpus)
        recorded[path.stem] = {"rows": len(table)}
        if (tally := path.with_suffix(".json")).exists():
            recorded[path.stem] = {"rows": len(table), **json.loads(tally.read_text())}
        is_program = path.stem.startswith("program-")
        if not is_program:
            table = sort_out(table, repeats if path.stem.startswith("sweep") else 2 * repeats)
            for name in TIMES:
                place = table.schema.get_field_index(name)
                table = table.set_column(place, table.schema.field(place), pa.nulls(len(table), pa.int64()))
        print(f"{path.name}: {len(table)} rows", flush=True)
        found["programs" if is_program else "sweeps"].append(table)
    if not recorded:
        raise FileNotFoundError(f"{source} has no *.parquet: record with python -m training.workloads first")
    rows: dict[str, int] = {}
    for name, tables in found.items():
        if not tables:
            continue
        whole = pa.concat_tables(tables, promote_options="default")
        if not len(whole):
            raise InputError(
                f"{name} have no launch with a label and a time: what has no labels is trained on as it is "
                "(cudasched train --data, or python -m training.train)"
            )
        versions = {f"training.{name}": text for name, text in where_recorded().items()}
        # What was compacted before, elsewhere, keeps what it says of itself.
        known = {key.decode(): value.decode() for key, value in (tables[0].schema.metadata or {}).items()}
        # One command stands for all processes, and says nothing of the machine's directories.
        known["cudasched.command"] = json.dumps(["python", "-m", "training.workloads"])
        whole = whole.replace_schema_metadata({**versions, **known})
        if name == "sweeps" and most_a_family:
            whole = thin(whole, 1.0, most_a_family)
        size = write(whole, out / f"{name}.parquet", level)
        share = 1.0
        if name == "sweeps" and size > most_mib * 2**20:
            share = 0.98 * most_mib * 2**20 / size
            whole = thin(whole, share)
            size = write(whole, out / f"{name}.parquet", level)
        rows[name] = len(whole)
        recorded[f"{name}.parquet"] = {"rows": len(whole), "bytes": size, "share_of_shape_groups": share}
        print(f"{name}.parquet: {len(whole)} rows, {size / 2**20:.1f} MiB, {share:.2f} of the shape groups", flush=True)
    (out / "recorded.json").write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m training.compact", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--in", dest="source", type=Path, required=True, help="what training.workloads wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2, help="of one launch under one label in one process")
    parser.add_argument("--most-mib", type=float, default=12.0, help="size that sweeps.parquet is held to")
    parser.add_argument("--level", type=int, default=19, help="of zstd: 19 is small, 9 is quick")
    parser.add_argument("--most-a-family", type=int, help="launches of a family of operations in sweeps.parquet")
    options = parser.parse_args(arguments)
    how = options.repeats, options.most_mib, options.level, options.most_a_family
    return carry_out(lambda: compact(options.source, options.out, *how), "not compacted")


if __name__ == "__main__":
    sys.exit(main())
