"""What the committed data set keeps of the recordings."""

from __future__ import annotations

import json
from pathlib import Path

import cudasched.collect
import pyarrow.parquet as pq
import pytest
import recordings

from training import compact, data


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Files as `training.workloads` leaves them."""
    rows = recordings.sweep(11, 40, 1, repeats=5)
    for number, row in enumerate(rows):
        if number % 5 == 0:
            row["label"] = row["label"].replace("|forward", "|warm-up")
    setup = [recordings.launch(0, 1000, "setup|||", 0.0, 900, 11)]
    busy = [{**recordings.launch(0, 1000, "gemm.mm|1|fp32|forward", 0.0, 901, 11), "overlapped": True}]
    untimed = [{**recordings.launch(0, 1000, "gemm.mm|1|fp32|forward", 0.0, 902, 11), "duration_ns": None}]
    source = tmp_path / "recorded"
    source.mkdir()
    pq.write_table(recordings.table(rows + setup + busy + untimed), source / "sweep-matrix.parquet")
    pq.write_table(recordings.table(recordings.sweep(12, 20, 2, repeats=5)), source / "again.parquet")
    pq.write_table(recordings.table(recordings.sweep(13, 20, 3)), source / "program-one.parquet")
    (source / "sweep-matrix.json").write_text(json.dumps({"complete": True, "skipped": {"gemm.mm: OutOfMemory": 2}}))
    return source


def test_sweeps_lose_what_is_of_no_use_and_programs_nothing(recorded: Path, tmp_path: Path) -> None:
    assert compact.compact(recorded, tmp_path, repeats=2) == {"sweeps": 40 * 2 * 2 + 20 * 2 * 4, "programs": 120}
    sweeps = cudasched.collect.read(tmp_path / "sweeps.parquet")
    labels = set(sweeps["label"].to_pylist())
    assert not [label for label in labels if label.startswith("setup") or label.endswith("warm-up")]
    assert sweeps["duration_ns"].null_count == 0
    assert sweeps["submitted_ns"].null_count == len(sweeps)
    assert not any(sweeps["overlapped"].to_pylist())
    assert sweeps["pid"].to_pylist()[-1] == 12  # what repeats the others comes last
    programs = cudasched.collect.read(tmp_path / "programs.parquet")
    original = cudasched.collect.read(recorded / "program-one.parquet")
    assert programs.to_pylist() == original.to_pylist()
    notes = json.loads((tmp_path / "recorded.json").read_text())
    assert notes["sweep-matrix"]["skipped"] == {"gemm.mm: OutOfMemory": 2}


def test_words_tell_launches_apart(tmp_path: Path) -> None:
    rows = [recordings.launch(1, 100, "a.b|1|fp32|forward", 0.0, i, 1) for i in range(6)]
    for row in rows[3:]:
        row["words"] = [0, 0, 100, 1, 0, 2]
    table = compact.sort_out(compact.plain(recordings.table(rows)), 2)
    assert [row["launch"] for row in table.to_pylist()] == [0, 1, 3, 4]


def test_whole_shape_groups_are_left_out_to_fit(recorded: Path, tmp_path: Path) -> None:
    table = compact.plain(cudasched.collect.read(recorded / "sweep-matrix.parquet"))
    kept = compact.thin(table, 0.5)
    groups = {"|".join(label.split("|")[:2]) for label in kept["label"].to_pylist()}
    assert 0 < len(groups) < 42
    everything = [label for label in table["label"].to_pylist() if "|".join(label.split("|")[:2]) in groups]
    assert kept["label"].to_pylist() == everything
    assert compact.thin(table, 1.0).equals(table)


def test_a_broken_file_costs_itself_alone(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "sweep-image.parquet").write_bytes(b"PAR1 and no more")
    assert compact.compact(recorded, tmp_path)["programs"] == 120
    assert "sweep-image.parquet" in capsys.readouterr().err


def test_a_recording_without_labels_is_refused_and_not_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = recordings.sweep(11, 20, 1)
    for row in rows:
        row["label"] = ""
    source = tmp_path / "recorded"
    source.mkdir()
    pq.write_table(recordings.table(rows), source / "mine.parquet")
    with pytest.raises(ValueError, match="no launch with a label"):
        compact.compact(source, tmp_path / "out")
    assert compact.main(["--in", str(source), "--out", str(tmp_path / "out")]) == 1
    assert "no launch with a label" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.workloads first"):
        compact.compact(tmp_path, tmp_path / "out")


def test_recordings_of_two_gpus_are_not_joined(tmp_path: Path) -> None:
    """Guards against features of one GPU's launches that are made of another GPU's multiprocessors."""
    source = tmp_path / "recorded"
    source.mkdir()
    for name, sms in (("one", b"132"), ("other", b"78")):
        table = recordings.table(recordings.sweep(7, 30, 1))
        metadata = {**table.schema.metadata, b"cudasched.sm_count": sms}
        pq.write_table(table.replace_schema_metadata(metadata), source / f"sweep-{name}.parquet")
    with pytest.raises(ValueError, match=r"sweep-one.parquet of .* 132 .*, sweep-other.parquet of .* 78 "):
        compact.compact(source, tmp_path / "out")


def test_what_is_read_is_not_written_beside(recorded: Path) -> None:
    """Guards against a second run that takes the first one's files for more recordings."""
    with pytest.raises(ValueError, match="has the recordings"):
        compact.compact(recorded, recorded)


def test_processes_of_two_containers_stay_two(tmp_path: Path) -> None:
    """Each container counts its processes from 1."""
    pytest.importorskip("xgboost", reason="evaluation needs XGBoost")
    from training import evaluate

    source = tmp_path / "recorded"
    source.mkdir()
    for number, name in enumerate(("sweep-one", "again-one")):
        pq.write_table(recordings.table(recordings.sweep(7, 30, number)), source / f"{name}.parquet")
    for name in ("first", "second"):
        rows = [recordings.launch(0, 1000, f"program:{name}|step||", 0.0, n, 7) for n in range(20)]
        pq.write_table(recordings.table(rows), source / f"program-{name}.parquet")
    compact.compact(source, tmp_path)
    sweeps = data.load(tmp_path / "sweeps.parquet")
    assert len(set(sweeps.process)) == 2 and sweeps.again.any() and not sweeps.again.all()
    names = evaluate.program_of(cudasched.collect.read(tmp_path / "programs.parquet"))
    assert names == ["first"] * 20 + ["second"] * 20
