"""The committed data set, the shipped model and the results belong together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cudasched import errors, hook

from training import production
from training.record import PROGRAMS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "training" / "data"
MODEL = ROOT / "python" / "cudasched" / "predictor" / "models" / "sm_90.ubj"


def test_the_data_set_is_compact_and_of_this_version() -> None:
    files = sorted(path for path in DATA.glob("*.parquet") if path != production.EVENTS)
    by_both = ["h200_libraries.parquet", "h200_sm_counts.parquet"]
    assert [path.name for path in files] == ["h200.parquet", *by_both[:1], "h200_programs.parquet", *by_both[1:]]
    assert sum(path.stat().st_size for path in files) <= 20e6
    for path in files:
        metadata = pq.read_schema(path).metadata
        assert metadata[b"cudasched.schema"] == b"1"
        assert metadata[b"cudasched.timing"] == (b"both" if path.name in by_both else b"cupti")


def test_programs_of_all_libraries_and_all_parts_of_the_gpu_are_there_with_both_times() -> None:
    columns = ["label", "duration_ns", "elapsed_ns"]
    libraries = pq.read_table(DATA / "h200_libraries.parquet", columns=columns)
    labels = {text.split("|")[0].removeprefix("program:") for text in set(libraries["label"].to_pylist()) if text}
    assert labels == set(PROGRAMS)
    parts = pq.read_table(DATA / "h200_sm_counts.parquet", columns=columns)
    assert {int(text.split("|")[1]) for text in set(parts["label"].to_pylist()) if text} == {
        *(16, 32, 48, 64, 96, 112, 132)
    }
    for table in (libraries, parts):
        assert table["duration_ns"].null_count == 0
        assert table["elapsed_ns"].null_count < 0.1 * len(table)


def test_what_is_said_of_events_is_in_the_recordings() -> None:
    for name in ("h200_libraries.parquet", "h200_sm_counts.parquet"):
        metadata = pq.read_schema(DATA / name).metadata
        gaps = {key: int(value) for key, value in metadata.items() if b"event_" in key and b"overhead" not in key}
        queued = [value for key, value in gaps.items() if b"queued_gap" in key]
        waited = [value for key, value in gaps.items() if b"waited_gap" in key]
        assert queued and all(2_000 < value < 3_500 for value in queued)
        assert waited and all(value > 7_000 for value in waited)


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
    scopes = {r["scope"] for r in rows if r["kind"] == "accuracy" and r["split"] == "program"}
    assert {f"program:{name}{events}" for name in PROGRAMS for events in ("", ", recorded events")} <= scopes
    assert {f"sm_count:{count}" for count in (32, 64, 112)} <= scopes
