"""The key of the prediction cache on real launches: what differs in it, and what does not."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from conftest import Start, finish
from cudasched import hook

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")
np = pytest.importorskip("numpy")

import cudasched.collect as recordings  # noqa: E402

Shape = tuple[object, ...]
"""A kernel and its launch shape."""


def replayed(table: pa.Table) -> dict[str, list[object]]:
    """What the predictor says of each kernel launch, in order; graphs are left out."""
    from cudasched.predictor._recording import launch_columns

    columns = launch_columns(table)
    columns["duration_ns"] = np.asarray(table["duration_ns"].fill_null(0).to_numpy())
    sm_count = int(table.schema.metadata[b"cudasched.sm_count"])
    said = hook.load_core().Replay().run(columns, sm_count)
    return {name: values.tolist() for name, values in said.items()}


def kernels(path: Path) -> pa.Table:
    table = recordings.read(path)
    return table.filter(pc.equal(table["kind"].cast("string"), "kernel"))


def test_products_that_differ_in_k_alone_have_keys_of_their_own(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    output = finish(start("gemms.py", str(data)))
    table = kernels(data)
    assert f"recorded {table.num_rows} 0" in output
    said = replayed(table)
    # Of each kernel and launch shape: the keys that each K got. What adds parts up does not know K, so the kernel that
    # counts is the one that takes the time.
    keys: dict[Shape, dict[str, set[object]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    time_ns: collections.Counter[Shape] = collections.Counter()
    late_misses = []
    for row, key, hit in zip(table.to_pylist(), said["key"], said["hit"], strict=True):
        _, shape, _, round_ = row["label"].split("|")
        launch = tuple(row[name] for name in ("function", "grid_x", "grid_y", "grid_z", "block_x", "cluster_x"))
        time_ns[launch] += row["duration_ns"]
        if int(round_) >= 2:
            keys[launch][shape].add(key)
            if not hit:
                late_misses.append(row["label"])
    assert not late_misses
    alike = {launch: shapes for launch, shapes in keys.items() if len(shapes) >= 2 and "plit" not in str(launch[0])}
    assert alike, f"no two sizes of K had one kernel: {sorted(keys)}"
    for shapes in alike.values():
        assert all(len(found) == 1 for found in shapes.values())
        assert len(set.union(*shapes.values())) == len(shapes), shapes
    assert max(time_ns[launch] for launch in alike) > 0.1 * sum(time_ns.values())


def test_the_second_training_step_is_known(start: Start, tmp_path: Path) -> None:
    """ResNet-50 with dropout, whose kernels get another random offset each time, fused Adam and a Triton kernel."""
    data = tmp_path / "data.parquet"
    output = finish(start("resnet50_steps.py", str(data)))
    table = kernels(data)
    assert f"recorded {table.num_rows} 0" in output
    labels = table["label"].to_pylist()
    functions = table["function"].to_pylist()
    assert any("dropout" in name for name in functions) and any("FusedAdam" in name for name in functions)
    assert functions.count("add") == 2
    launches = zip(labels, functions, replayed(table)["hit"], strict=True)
    second = [(name, hit) for label, name, hit in launches if label.endswith("step 1")]
    missed = [name for name, hit in second if not hit]
    assert len(second) > 500
    # Garbage in unfilled parameters is told from sizes once it has changed beside nothing else: 3% are missed in the
    # second step of a recording and 6% here; 1% is the aim, and what later steps miss.
    assert len(missed) <= 0.08 * len(second), collections.Counter(missed)
