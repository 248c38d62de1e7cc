"""The figures of what a prediction costs: written beside the others, of the model that ships."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.predictor import __main__ as speed

pytest.importorskip("numpy", reason="numpy is not installed")

# In one worker, which compiles once.
pytestmark = [
    pytest.mark.xdist_group("predictor_speed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return speed.build(tmp_path_factory.mktemp("speed"))


@pytest.fixture(autouse=True)
def built_once(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "build", lambda directory: library)


def test_miss_and_hit_are_written_beside_the_other_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_COMMIT", "0" * 12)
    committed = speed.HERE.parent / "results" / "predictor_figures.json"
    path = tmp_path / "figures.json"
    shutil.copy(committed, path)
    assert speed.main(["--figures", str(path), "--rounds", "1"]) == 0
    before, after = (json.loads(one.read_text()) for one in (committed, path))
    names = [row["figure"] for row in after["rows"]]
    assert len(names) == len(set(names))
    assert set(names) == {row["figure"] for row in before["rows"]} | {"miss_ns", "hit_ns", "four_predictions_ns"}
    assert [row for row in after["rows"] if row["figure"] == "repeat"] == [
        row for row in before["rows"] if row["figure"] == "repeat"
    ]
    for row in after["rows"]:
        if row["figure"] in speed.GOALS:
            assert 0 < row["value"] <= row["high"]
            assert (row["limited_by"] == "") == (row["value"] <= row["goal"])


def test_a_model_that_cannot_be_read_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.ubj").write_bytes(b"nothing")
    assert speed.main(["--figures", str(tmp_path / "f.json"), "--model", str(tmp_path / "model.ubj")]) == 1
    assert "cannot be walked" in capfd.readouterr().err
    assert not (tmp_path / "f.json").exists()
