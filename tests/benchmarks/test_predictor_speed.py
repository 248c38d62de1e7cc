"""The figures of what a prediction costs: written beside the others, of the model that ships."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.predictor import __main__ as speed

pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_miss_and_hit_are_written_beside_the_other_figures_or_why_not_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One test, because each worker would compile for its own, which takes longer than both."""
    library = speed.build(tmp_path, together=True)
    monkeypatch.setattr(speed, "build", lambda directory: library)

    (tmp_path / "model.ubj").write_bytes(b"nothing")
    assert speed.main(["--figures", str(tmp_path / "f.json"), "--model", str(tmp_path / "model.ubj")]) == 1
    assert "cannot be walked" in capfd.readouterr().err
    assert not (tmp_path / "f.json").exists()

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
