from __future__ import annotations

import errno
import json
import os

import pytest
from pydantic import ValidationError
from test_cells import META

from benchmarks import tables
from benchmarks.results.schema import (
    NOT_EXPLAINED,
    RESULTS,
    FigureRow,
    OverheadRow,
    PredictorAccuracyRow,
    PredictorCoverageRow,
    PredictorSpeedRow,
    Results,
    SoakRow,
    TracingRow,
    load,
    merge,
)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_meet_the_schema(path):
    results = load(path)
    assert results.rows, "a results file without rows says nothing"
    for_the_simulated_device = isinstance(results.rows[0], (SoakRow, TracingRow))
    assert for_the_simulated_device or results.meta.gpu != "simulated", "rehearsals are not results"


def test_colocations_are_written_without_what_says_nothing(tmp_path):
    row = load(RESULTS / "main.json").colocations[0].model_copy(update={"policy": None, "scene": "", "gpus": 2})
    results = Results(meta=META, rows=[row])
    results.write(tmp_path / "main.json")
    assert load(tmp_path / "main.json") == results
    (written,) = json.loads((tmp_path / "main.json").read_text())["rows"]
    assert written["policy"] is None and written["gpus"] == 2 and "scene" not in written


def overhead(added: float) -> Results:
    row = OverheadRow(what="launch", ns_median=2900.0, ns_p99=4000.0, baseline_ns_median=2850.0, added_ns_median=added)
    return Results(meta=META, rows=[row])


def test_a_marker_becomes_a_table_and_goes_stale_with_its_results(tmp_path):
    merge(tmp_path / "overhead.json", META, overhead(50).rows)  # a file of which several runs have rows
    document = "before\n<!-- table:overhead -->\nold\n<!-- end -->\nafter\n"
    new = tables.rendered(document, tmp_path)
    assert "| launch | 2900 | 4000 | 2850 | +50 |" in new
    assert "old" not in new and new.startswith("before\n") and new.endswith("<!-- end -->\nafter\n")
    assert tables.rendered(new, tmp_path) == new
    overhead(60).write(tmp_path / "overhead.json")
    assert tables.rendered(new, tmp_path) != new


def test_a_marker_without_results_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="table:nothing"):
        tables.rendered("<!-- table:nothing -->\n<!-- end -->", tmp_path)


def test_a_misspelt_field_is_an_error(tmp_path):
    path = tmp_path / "overhead.json"
    path.write_text(overhead(50).model_dump_json().replace("ns_p99", "ns_p98", 1))
    with pytest.raises(ValueError, match=f"{path}: not of this schema"):
        load(path)


SPEED = PredictorSpeedRow(engine="cudasched", ns_per_row_median=120.4, isa="avx512vbmi", cpu="A processor")
COVERAGE = [PredictorCoverageRow(decile=i, coverage=0.9, n=2000, low=0.88, high=0.92) for i in range(1, 11)]


def accuracy(model: str = "ours", split: str = "repeat", **fields: object) -> PredictorAccuracyRow:
    return PredictorAccuracyRow.model_validate(
        {"model": model, "split": split, "corrected": False, "mdape": 0.02, "mape": 0.05, "n": 4000} | fields
    )


def test_a_run_replaces_its_own_kinds_and_keeps_the_others(tmp_path):
    path = tmp_path / "predictor.json"
    here = META.model_copy(update={"gpu": "none", "commit": "speed"})
    recorded = META.model_copy(update={"gpu": "NVIDIA H200", "commit": "recorded"})
    merge(path, here, [SPEED])
    assert load(path).meta.gpu == "none"
    merge(path, recorded, [accuracy(), *COVERAGE])
    faster = SPEED.model_copy(update={"ns_per_row_median": 99.0})
    merge(path, here.model_copy(update={"commit": "faster"}), [faster])
    found = load(path)
    assert sorted(row.kind for row in found.rows) == ["accuracy", *["coverage"] * 10, "speed"]
    assert [row.ns_per_row_median for row in found.rows if isinstance(row, PredictorSpeedRow)] == [99.0]
    assert {kind: meta.commit for kind, meta in found.meta_by_kind.items()} == {
        "accuracy": "recorded",
        "coverage": "recorded",
        "speed": "faster",
    }
    assert found.meta.gpu == "NVIDIA H200"


def test_figures_of_several_machines_in_one_file_say_where_each_was_measured(tmp_path):
    path = tmp_path / "observe.json"
    row = FigureRow(figure="found", value=1, goal=0.95, better="more", low=1, high=1, n=48, limited_by="")
    here = META.model_copy(update={"gpu": "none (A processor)", "driver": None, "cuda": None, "torch": None})
    merge(path, here, [row.model_copy(update={"figure": name}) for name in ("paint", "kB")])
    assert "`paint`" not in tables.rendered("<!-- table:observe -->\n<!-- end -->\n", tmp_path).splitlines()[-2]
    merge(path, META.model_copy(update={"gpu": "NVIDIA H200", "commit": "recorded"}), [row])
    later = merge(path, here.model_copy(update={"commit": "later"}), [row.model_copy(update={"figure": "kB"})])
    assert [each.figure for each in later.figures] == ["paint", "kB", "found"]
    assert later.meta.gpu == "NVIDIA H200"
    text = tables.rendered("<!-- table:observe -->\n<!-- end -->\n", tmp_path)
    assert "\n`paint`: none (A processor), " in text and "\n`kB`: none (A processor), " in text
    assert "\n`found`: NVIDIA H200, " in text and "commit recorded." in text


def test_a_disk_that_is_full_leaves_the_file_as_it_was_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "overhead.json"
    overhead(50).write(path)
    before = path.read_text()

    def full(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(OSError, match=f"not written, and as before: No space left on device: '{path}'"):
        overhead(60).write(path)
    assert path.read_text() == before and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_broken_file_is_not_merged_into(tmp_path):
    path = tmp_path / "predictor.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"{path}: not of this schema"):
        merge(path, META, [SPEED])
    assert path.read_text() == "{}"


def test_the_predictors_table_has_its_engines_and_processor(tmp_path):
    path = tmp_path / "predictor.json"
    merge(path, META.model_copy(update={"gpu": "NVIDIA H200"}), [accuracy(), *COVERAGE])
    merge(path, META.model_copy(update={"gpu": "none"}), [SPEED])
    text = tables.rendered("<!-- table:predictor -->\n<!-- end -->\n", tmp_path)
    assert "| cudasched, trees | avx512vbmi | 120 |" in text and "A processor, " in text and "NVIDIA H200" not in text
    assert tables.rendered(text, tmp_path) == text


@pytest.mark.parametrize("wrong", [{"decile": 0}, {"decile": 11}, {"coverage": 1.1}, {"n": 0}])
def test_figures_out_of_their_range_are_errors(wrong):
    with pytest.raises(ValidationError):
        PredictorCoverageRow.model_validate({"decile": 1, "coverage": 0.9, "n": 1} | wrong)


def test_a_marker_for_what_may_not_be_measured_yet_says_so_until_it_is(tmp_path):
    document = "<!-- table:overhead if measured -->\nold\n<!-- end -->\n"
    before = tables.rendered(document, tmp_path)
    assert "Not measured yet." in before and "old" not in before
    overhead(50).write(tmp_path / "overhead.json")
    after = tables.rendered(before, tmp_path)
    assert "| launch | 2900 | 4000 | 2850 | +50 |" in after and "Not measured" not in after
    (tmp_path / "overhead.json").write_text("{}")
    with pytest.raises(ValueError, match="table:overhead"):
        tables.rendered(document, tmp_path)


def test_the_summary_has_a_line_for_each_program_beside_the_first_server_and_four_arms():
    main = load(RESULTS / "main.json")
    said, head, _, *lines = (line for line in tables.table_of(main, "summary").splitlines() if line)
    assert said.startswith("`bert_graph`, poisson 120/s")
    rivals = "MPS, priority | cudasched"
    assert (
        head
        == f"| beside | alone | time slices | {rivals} | best effort, {rivals.replace(' | ', ' | best effort, ')} |"
    )
    programs = dict.fromkeys(row.best_effort_load for row in main.colocations if row.latency_load == "bert_graph")
    assert [line.split(" | ")[0] for line in lines[:-1]] == [f"| {name}" for name in programs]
    assert "NVIDIA H100" in lines[-1]


def test_figures_of_the_core_say_what_limits_them(tmp_path):
    row = dict(figure="ci_s", value=1300.0, goal=1200.0, better="less", low=1300.0, high=1300.0, n=1)
    missed = FigureRow.model_validate(row | {"limited_by": "two cores"})
    Results(meta=META, rows=[missed, missed.model_copy(update={"value": 900.0, "limited_by": ""})]).write(
        tmp_path / "core.json"
    )
    text = tables.rendered("<!-- table:core -->\n<!-- end -->\n", tmp_path)
    assert "| <= 1200 **missed** | two cores |" in text and "| <= 1200 met |  |" in text
    assert "some GPU, driver 580.1" in text
    reported = FigureRow.model_validate(row | {"goal": 0.0, "better": "more", "limited_by": ""})
    assert "| 1 | none |  |" in tables.core_table(Results(meta=META, rows=[reported]))
    with pytest.raises(ValidationError):
        FigureRow.model_validate(row | {"limited_by": "x", "better": "most"})


def test_a_part_of_the_kernels_figures_is_shown_with_its_plot(tmp_path, monkeypatch):
    row = FigureRow(figure="queue_severe", value=3, goal=2, better="more", low=2, high=4, n=5, limited_by="")
    rows = [
        row.model_copy(update={"figure": name})
        for name in ("softmax_of_copy", "queue_severe", "warm_start_evaluations")
    ]
    Results(meta=META, rows=rows[:2]).write(tmp_path / "kernels.json")
    monkeypatch.setattr(tables, "IMAGES", tmp_path)

    def shown(part):
        return tables.rendered(f"<!-- table:kernels:{part} if measured -->\nold\n<!-- end -->\n", tmp_path)

    assert "queue_severe" in shown("device") and "softmax" not in shown("device") and "![" not in shown("device")
    assert "softmax_of_copy" in shown("kernels") and "queue" not in shown("kernels")
    assert "Not measured yet." in shown("tuner") and "old" not in shown("tuner")
    tables.plot_figures(Results(meta=META, rows=rows), tmp_path)
    assert "](images/device.png)" in shown("device") and (tmp_path / "tuner.png").exists()
    Results(meta=META, rows=rows).write(tmp_path / "kernels.json")
    assert "warm_start_evaluations" in shown("tuner")
    with pytest.raises(ValueError, match="no part 'nothing'"):
        shown("nothing")


@pytest.mark.parametrize(("better", "goal"), [("less", 1.0), ("more", 3.0)])
def test_a_figure_says_what_limits_it_where_it_misses_its_goal_and_nowhere_else(better, goal):
    row = dict(figure="a", value=2.0, better=better, low=1.0, high=2.0, n=1)
    found = (2.0, 1.0, 2.0, 1)
    assert FigureRow.judged("a", found, (goal, better)).limited_by == NOT_EXPLAINED
    assert FigureRow.judged("a", found, (goal, better), "the L2").limited_by == "the L2"
    assert FigureRow.judged("a", found, (2.0, better), "the L2").limited_by == ""
    with pytest.raises(ValidationError, match="a misses its goal and does not say its limit"):
        FigureRow(**row, goal=goal, limited_by="")
    with pytest.raises(ValidationError, match="a meets its goal and has its limit"):
        FigureRow(**row, goal=2.0, limited_by="the L2")
