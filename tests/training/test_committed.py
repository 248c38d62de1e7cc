"""The committed data set, the shipped model and the results belong together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cudasched import errors, hook

ROOT = Path(__file__).parents[2]
DATA = ROOT / "training" / "data"
MODEL = ROOT / "python" / "cudasched" / "predictor" / "models" / "sm_90.ubj"


def test_the_data_set_is_compact_and_of_this_version() -> None:
    files = sorted(DATA.glob("*.parquet"))
    assert [path.name for path in files] == ["h200.parquet", "h200_programs.parquet"]
    assert sum(path.stat().st_size for path in files) <= 20e6
    for path in files:
        assert pq.read_schema(path).metadata[b"cudasched.schema"] == b"1"
        assert pq.read_schema(path).metadata[b"cudasched.timing"] == b"cupti"


def test_programs_have_what_the_bound_is_judged_by() -> None:
    table = pq.read_table(DATA / "h200_programs.parquet", columns=["pid"])
    counts = table.group_by("pid").aggregate([("pid", "count")])["pid_count"].to_pylist()
    assert len(counts) >= 5
    assert min(counts) >= 5_000


def test_the_card_names_the_data_that_the_model_was_trained_on() -> None:
    digest = hashlib.sha256((DATA / "h200.parquet").read_bytes()).hexdigest()
    assert digest in MODEL.with_suffix(".md").read_text()


def test_the_shipped_model_is_what_a_launch_has_time_for() -> None:
    try:
        hook.load_core()
    except errors.HookError as error:
        pytest.skip(f"the package is not built: {error}")
    from cudasched.predictor import Model
    from cudasched.predictor._recording import feature_names

    model = Model(MODEL)
    assert model.trees <= 128
    assert model.depth <= 7
    assert model.feature_names == feature_names()


def test_the_results_are_of_these_data() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "predictor.json").read_text())["rows"]
    repeats = [r for r in rows if r["kind"] == "accuracy" and r["split"] == "repeat" and r["scope"] == "all"]
    assert {(r["model"], r["corrected"]) for r in repeats} >= {("ours", False), ("ours", True), ("history", False)}
    deciles = [r["n"] for r in rows if r["kind"] == "coverage"]
    assert len(deciles) == 10
    assert min(deciles) >= 2_000
