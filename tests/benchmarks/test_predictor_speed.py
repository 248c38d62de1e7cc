"""The figures of what a prediction costs: written beside the others, of the model that ships."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.run import run
from benchmarks.predictor import benchmark
from benchmarks.predictor.benchmark import COSTS
from benchmarks.results.schema import RESULTS

pytest.importorskip("numpy", reason="numpy is not installed")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True, scope="module")
def _built_once() -> Iterator[None]:
    """Compiling is nearly all that a run takes."""
    build = benchmark.build
    built: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "build", lambda session: built.get(0) or built.setdefault(0, build(session)))
        yield


def test_miss_and_hit_are_written_beside_the_other_figures(tmp_path: Path) -> None:
    committed, path = RESULTS / "predictor_figures.json", tmp_path / "figures.json"
    shutil.copy(committed, path)
    assert run("predictor_figures", ["--rehearse", "--out", str(path)]) == 0
    before, after = ({row["figure"]: row for row in json.loads(one.read_text())["rows"]} for one in (committed, path))
    assert set(after) == set(before) | set(COSTS.goals) and after["repeat"] == before["repeat"] | {"interval": None}
    for name in COSTS.goals:
        row = after[name]
        assert 0 < row["value"] <= row["high"] and (row["limited_by"] == "") == (row["value"] <= row["goal"])


def test_a_model_that_is_none_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.ubj").write_bytes(b"nothing")
    options = ["--rehearse", "--out", str(tmp_path / "f.json"), "--model", str(tmp_path / "model.ubj")]
    assert run("predictor_figures", options) == 1
    assert "cannot be walked" in capfd.readouterr().out and not (tmp_path / "f.json").exists()
