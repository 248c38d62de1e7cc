"""benchmarks/graphs/ablation.py: a rehearsal with each predictor, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from cudasched import predictor
from cudasched.demo.harness import Backend
from test_cells import META, keep

from benchmarks import tables
from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.graphs.ablation import CONSTANT_NS, PREDICTED, PREDICTORS, AblationFleet, constant_model, rows_of
from benchmarks.lab.fleet import Place
from benchmarks.lab.run import run
from benchmarks.results.schema import load


def test_the_constant_model_says_the_same_of_every_launch(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    (tmp_path / "constant.json").write_text(constant_model())
    model = predictor.load(tmp_path / "constant.json")
    rows = np.random.default_rng(0).normal(size=(8, len(model.feature_names))).astype(np.float32)
    assert model.predict(rows) == pytest.approx([CONSTANT_NS] * 8, rel=1e-5)


def test_predictors_differ_in_a_setting_and_an_oracle_keeps_its_state_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDASCHED_MODEL", raising=False)
    with AblationFleet(Backend()) as fleet:
        given = {name: fleet._environment(Place("program", "decode", f"one_process_{name}")) for name in PREDICTORS}
        other = fleet._environment(Place("program", "piecewise", "one_process_oracle"))
    assert "CUDASCHED_MODEL" not in given["trees"] and given["history"]["CUDASCHED_MODEL"] == "off"
    assert given["constant"]["CUDASCHED_MODEL"].endswith("constant.json")
    kept = [each["CUDASCHED_CACHE_DIR"] for each in given.values()]
    assert kept[:3] == ["off"] * 3 and kept[3] not in ("off", other["CUDASCHED_CACHE_DIR"])


def test_the_table_has_a_column_a_predictor_and_the_spread_of_repeats(tmp_path: Path) -> None:
    cells = CellFile(tmp_path / "ablation.cells", META)
    for repeat, ms in ((0, 1.2), (1, 1.4)):
        for arm, took, per_s in (
            ("latency_alone", 1.0, None),
            ("processes", 3.0, 10.0),
            ("cudasched_mps_trees", ms, 9.9),
            ("cudasched_mps_history", 1.5, 9.5),
        ):
            lead = "auto" if arm in PREDICTED else 0.0
            cell = Cell(arm, "bert_graph", "torch_varying", "poisson", "60", 17.0, lead, repeat, scene="first")
            keep(cells, cell, took, per_s, requests=1000)
    made = rows_of(cells)
    assert {row.predictor for row in made.colocations if row.arm in PREDICTED} == {"trees", "history"}
    table = tables.table_of(made)
    assert (
        "| first | torch_varying | mps | 1.30 (1.20 to 1.40) / 1.30 (1.20 to 1.40) / 99.0% (99.0% to 99.0%) | " in table
    )
    assert "| 1.50 (1.50 to 1.50) / " in table and "| trees | history |" in table


def test_a_rehearsal_measures_each_predictor_and_the_oracles_program_leaves_its_state(
    tmp_path: Path, simulated_driver: Path
) -> None:
    out = tmp_path / "ablation.json"
    arms = "latency_alone,processes,cudasched_one_process_constant,cudasched_one_process_oracle"
    given = ["--rehearse", "--out", str(out), "--only", "decode", "--scene", "first", "--arms", arms]
    assert 0 in (run("ablation", given) for _ in range(3))
    rows = {row.arm: row for row in load(out).colocations}
    assert [rows[arm].predictor for arm in arms.split(",")[1:]] == [None, "constant", "oracle"]
    assert all(row.p50 and row.requests and row.scene == "first" for row in rows.values())
