"""A small model is trained, evaluated and exported in seconds, and C++ answers with XGBoost's own bits."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'cudasched[training]'")

from cudasched import errors, hook  # noqa: E402

from training import baselines, data, evaluate, export, measures, production, train  # noqa: E402

try:
    hook.load_core()
except errors.HookError as error:
    pytest.skip(f"the package is not built: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def trained(sweeps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m training.train` makes of the small recording."""
    out = tmp_path_factory.mktemp("model")
    assert train.main(["--data", str(sweeps), "--out", str(out), "--quick", "--threads", "2"]) == 0
    return out


@pytest.fixture(scope="module")
def launches(sweeps: Path) -> data.Launches:
    return data.load(sweeps)


def booster_of(path: Path) -> xgboost.Booster:
    booster = xgboost.Booster()
    booster.load_model(path / "model.ubj")
    return booster


def test_the_report_says_what_was_done(trained: Path, launches: data.Launches) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["launches"] == len(launches)
    assert report["recipe"]["trees"] == train.TREES
    assert len(report["feature_names"]) >= export.LEAST_FEATURES
    assert set(report["tried"][0]) > {"shapes", "kernels"}
    assert report["recorded"]["cudasched.gpu"] == "NVIDIA H200"


def test_it_learns_new_shapes(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["tried"][0]["shapes"] < 0.10
    assert report["tried"][0]["kernels"] < 0.30


def test_exported_trees_answer_bit_for_bit_as_xgboost(
    trained: Path, sweeps: Path, launches: data.Launches, tmp_path: Path
) -> None:
    from cudasched.predictor import Model

    out = tmp_path / "models" / "sm_90.ubj"
    assert export.main(["--model", str(trained), "--data", str(sweeps), "--out", str(out)]) == 0
    expected = booster_of(trained).inplace_predict(launches.rows, predict_type="margin", validate_features=False)
    fastest = Model(out)
    for isa in fastest.isas:
        assert Model(out, isa=isa).margins(launches.rows).tobytes() == np.asarray(expected).tobytes(), isa
    # From the recording itself: features made in C++, walked in C++.
    assert np.exp(np.asarray(expected, np.float64)).tobytes() == fastest.predict(str(sweeps)).tobytes()
    card = out.with_suffix(".md").read_text()
    assert "NVIDIA H200" in card
    assert f"{len(launches):,} of" in card


def broken(name: str, launches: data.Launches, names: list[str]) -> xgboost.Booster:
    """A model that must not be shipped."""
    recipe = {
        "too many": train.Recipe(trees=train.TREES + 1),
        "too deep": train.Recipe(depth=train.MAX_DEPTH + 1, min_child_weight=1),
    }
    if name in recipe:
        return train.fit(launches, names, recipe[name])
    targets = {
        "not logarithms": launches.duration_ns,
        "seconds": np.log(launches.duration_ns / 1e9),
        "noise": np.log(launches.duration_ns[np.random.default_rng(1).permutation(len(launches))]),
        "constant": np.full(len(launches), 9.0),
    }
    titles = names if name != "other names" else [f"feature {i}" for i in range(len(names))]
    target = targets.get(name, np.log(launches.duration_ns))
    return xgboost.train({"max_depth": 3}, xgboost.DMatrix(launches.rows, target, feature_names=titles), 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too many", f"{train.TREES + 1} trees"),
        ("too deep", f"depth {train.MAX_DEPTH + 1}"),
        ("not logarithms", "natural logarithm"),
        ("seconds", "natural logarithm"),
        ("noise", "wrong by"),
        ("constant", "no splits"),
        ("other names", "not those that this cudasched computes"),
    ],
)
def test_nonsense_is_not_exported(name: str, message: str, launches: data.Launches) -> None:
    from cudasched.predictor._recording import feature_names

    names = list(feature_names())
    with pytest.raises(export.ExportError, match=message):
        export.check(broken(name, launches, names), launches, names)


def test_a_refused_model_leaves_no_file(trained: Path, sweeps: Path, tmp_path: Path) -> None:
    from cudasched.predictor._recording import feature_names

    names = list(feature_names())
    bad = tmp_path / "bad"
    bad.mkdir()
    broken("constant", data.load(sweeps), names).save_model(bad / "model.ubj")
    (bad / "report.json").write_text((trained / "report.json").read_text())
    out = tmp_path / "sm_90.ubj"
    assert export.main(["--model", str(bad), "--data", str(sweeps), "--out", str(out)]) == 1
    assert not out.exists()


@pytest.mark.parametrize("name", ["sweeps.parquet", "model.ubj", "model.md"])
def test_an_exported_model_replaces_nothing_that_it_is_made_of(
    name: str, trained: Path, sweeps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a recording that `--out` replaced, and a model that its card did."""
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    shutil.copy(sweeps, model / "sweeps.parquet")
    (model / "model.md").write_text("before")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    given = ["--model", str(model), "--data", str(model / "sweeps.parquet"), "--out", str(model / name)]
    assert export.main(given) == 1
    assert "not exported: " in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_model_that_cannot_be_written_is_one_line_and_the_one_before_stays(
    trained: Path, sweeps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against XGBoost's stack trace over the half of a file."""
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    before = (model / "model.ubj").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk
    try:
        assert train.main(["--data", str(sweeps), "--out", str(model), "--quick", "--threads", "1"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = f"not trained: {model / 'model.ubj'}: it cannot be written: File too large\n"
    assert capsys.readouterr().err.endswith(said)
    assert (model / "model.ubj").read_bytes() == before


def test_nor_does_one_that_answers_otherwise_in_cpp(
    trained: Path, sweeps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cudasched.predictor import Model

    monkeypatch.setattr(Model, "margins", lambda self, rows: np.zeros(len(rows), np.float32))
    out = tmp_path / "sm_90.ubj"
    assert export.main(["--model", str(trained), "--data", str(sweeps), "--out", str(out)]) == 1
    assert "it answers otherwise than XGBoost" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("what", ["train", "evaluate", "export"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("none.parquet", "there is no data set at"),
        ("text.parquet", "is no data set of launches, or is damaged"),
        ("empty.parquet", "has no kernel with a time of its own"),
        ("one.parquet", ""),
    ],
)
def test_what_nothing_can_be_made_of_is_one_line(
    what: str, data: str, says: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq
    import recordings

    (tmp_path / "text.parquet").write_text("nothing")
    pq.write_table(recordings.table([]), tmp_path / "empty.parquet")
    pq.write_table(recordings.table(recordings.sweep(1, 1, 1)[:1]), tmp_path / "one.parquet")
    if not says:  # enough to export by, and nothing to hold out
        says = "one shape or kernel alone" if what == "train" else "No such file or directory: 'nowhere/report.json'"
    model = "nowhere" if data == "one.parquet" else str(trained)
    given = ["--data", str(tmp_path / data), *(["--model", model] if what != "train" else [])]
    out = ["--out", str(tmp_path / "out")] if what != "evaluate" else []
    assert {"train": train, "evaluate": evaluate, "export": export}[what].main([*given, *out]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"not {what.removesuffix('e')}ed: ") and said.count("\n") == 1 and says in said


@pytest.mark.parametrize(
    ("file", "text"), [("report.json", "{"), ("report.json", "{}"), ("report.json", "[1]"), ("model.ubj", "{")]
)
def test_a_damaged_model_is_one_line(
    file: str, text: str, trained: Path, sweeps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    (model / file).write_text(text)
    assert export.main(["--model", str(model), "--data", str(sweeps), "--out", str(tmp_path / "out")]) == 1
    said = f"not exported: {model / file} is damaged: train the model again\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--out", "not of this schema"),
        ("--figures", "not of this schema"),
        ("--libraries", "record it with --timing both"),
    ],
)
def test_what_an_evaluation_cannot_use_is_refused_before_it(
    option: str, says: str, trained: Path, sweeps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a traceback behind hours of work."""
    if option == "--libraries":
        path = sweeps
    else:
        path = tmp_path / "results.json"
        path.write_text("{")
    assert evaluate.main(["--data", str(sweeps), "--model", str(trained), option, str(path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"not evaluated: {path}") and says in said.err and said.err.count("\n") == 1
    assert "new_shape" not in said.out


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_baselines_answer_every_launch(name: str, launches: data.Launches) -> None:
    train_mask, test_mask = data.split(launches, "kernels")
    answers = baselines.BASELINES[name](launches.take(train_mask), launches.take(test_mask))
    assert answers.shape == (test_mask.sum(),)
    assert (answers > 0).all()
    assert np.isfinite(answers).all()


def test_history_knows_what_it_has_seen(launches: data.Launches) -> None:
    train_mask, test_mask = data.split(launches, "processes")
    test = launches.take(test_mask)
    errors_seen = train.percentage_errors(baselines.history(launches.take(train_mask), test), test.duration_ns)
    assert np.median(errors_seen) < 0.05


def test_a_feature_set_hides_its_features(launches: data.Launches) -> None:
    from cudasched.predictor._recording import feature_names

    names = feature_names()
    for feature_set, beginnings in train.FEATURE_SETS.items():
        booster = train.fit(launches, names, train.Recipe(trees=5, features=feature_set))
        used = set(booster.get_score())
        assert used
        assert not [name for name in used if beginnings and name.startswith(beginnings)]
        assert not beginnings or any(name.startswith(beginnings) for name in names)


def test_the_whole_evaluation(trained: Path, sweeps: Path, programs: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictor.json"
    figures = tmp_path / "figures.json"
    arguments = ["--data", str(sweeps), "--programs", str(programs), "--model", str(trained), "--out", str(out)]
    assert evaluate.main([*arguments, "--plots", str(tmp_path / "plots"), "--figures", str(figures)]) == 0
    from benchmarks.results.schema import FigureRow, load

    results = load(out)
    rows = [row.model_dump() for row in results.rows]
    accuracy = {
        (row["split"], row["model"], row["corrected"]): row["mdape"]
        for row in rows
        if row["kind"] == "accuracy" and row["scope"] == "all"
    }
    for split in measures.SPLITS:
        models = {(model, corrected) for name, model, corrected in accuracy if name == split}
        assert models == {("ours", False), ("ours", True), *((name, False) for name in baselines.BASELINES)}
    assert accuracy["new_shape", "ours", False] < 0.10
    assert accuracy["repeat", "ours", True] < 0.05
    whole = [row for row in rows if row["kind"] == "accuracy" and row["split"] == "program" and row["corrected"]]
    by_scope = {row["scope"]: row for row in whole}
    assert {f"program:p{i}" for i in range(5)} | {"program:all"} <= set(by_scope)
    assert by_scope["program:all"]["n"] == 5 * 3000
    assert by_scope["program:all"]["groups"] == 5
    assert by_scope["program:all"]["time_weighted"] < 0.2
    assert all(row["low"] <= row["mdape"] <= row["high"] for row in whole)
    coverage = [row for row in rows if row["kind"] == "coverage"]
    assert [row["decile"] for row in coverage] == list(range(1, 11))
    assert sum(row["n"] for row in coverage) == 5 * (3000 - evaluate.WARM_UP)
    assert all(row["low"] <= row["coverage"] <= row["high"] for row in coverage)
    assert results.meta.gpu == "NVIDIA H200"
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "predictor_scatter.png",
        "predictor_errors.png",
        "predictor_coverage.png",
    }

    told = {row.figure: row for row in load(figures).rows if isinstance(row, FigureRow)}
    assert {"repeat", "program_time_weighted", "program_bias", "new_shape_misses", "coverage_least"} <= set(told)
    assert all(row.low is not None and row.low <= row.value <= (row.high or 0) for row in told.values())
    for row in told.values():
        met = row.value >= row.goal if row.better == "more" else row.value <= row.goal
        assert bool(row.limited_by) != met, row


def test_a_recording_without_labels_is_evaluated_on_what_it_can_show(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq
    import recordings

    rows = recordings.sweep(11, 120, 1)
    for row in rows:
        row["label"] = ""
    path = tmp_path / "mine.parquet"
    pq.write_table(recordings.table(rows), path)
    assert train.main(["--data", str(path), "--out", str(tmp_path / "model"), "--quick"]) == 0
    assert evaluate.main(["--data", str(path), "--model", str(tmp_path / "model"), "--baselines"]) == 0
    said = capsys.readouterr().out
    assert "repeat 1: not judged: the recording has nothing to split by processes" in said
    assert "new_shape_misses" in said
    found = json.loads((tmp_path / "model" / "evaluation.json").read_text())
    assert {row["split"] for row in found["rows"]} == {"new_shape", "unseen_kernel"}


def test_programs_of_which_no_launch_comes_again_have_no_figure_of_repeats(trained: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq
    import recordings

    rows = [recordings.launch(n % 8, 1000 * (n + 1), f"program:once|{n}||", 0.0, n, 9) for n in range(40)]
    path = tmp_path / "once.parquet"
    pq.write_table(recordings.table(rows), path)
    programs = evaluate.Programs(path, str(trained / "model.ubj"))
    assert not programs.columns["hit"].any()
    tested = evaluate.Tested(data.load(path))
    names = {row["figure"] for row in evaluate.figures_of(tested, programs, set())}
    assert names == {"program_time_weighted", "program_bias"}


def test_results_and_figures_of_one_run_name_one_commit(
    tmp_path: Path, sweeps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, figures = tmp_path / "predictor.json", tmp_path / "figures.json"
    row = measures.errors_of(np.array([1.0]), np.array([2.0]), np.zeros(1, np.int64))
    found = [row.row(split="repeat", model="ours", corrected=True)], [evaluate.figure("repeat", 0.03, 0.02, 0, 1, 7)]
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: found)
    # A results file that was written is itself a change that is not committed.
    monkeypatch.setattr("benchmarks.meta.current_commit", lambda: "abc-dirty" if out.exists() else "abc")
    places = ["--out", str(out), "--figures", str(figures)]
    assert evaluate.main(["--data", str(sweeps), "--model", str(tmp_path), *places]) == 0
    said = [json.loads(path.read_text())["meta"] for path in (out, figures)]
    assert [meta["commit"] for meta in said] == ["abc", "abc"]
    assert [meta["command"].split()[-2] for meta in said] == ["--out", "--figures"]


def test_figures_of_another_run_stay(tmp_path: Path, sweeps: Path) -> None:
    from benchmarks.results.schema import FigureRow, load

    path = tmp_path / "figures.json"
    evaluate.write_figures(
        path, [evaluate.figure("repeat", 0.03, 0.02, 0.01, 0.03, 7)], evaluate.meta_of(sweeps, "one")
    )
    evaluate.write_figures(
        path, [evaluate.figure("program_bias", 0.02, 0.03, 0.0, 0.05, 7)], evaluate.meta_of(sweeps, "two")
    )
    rows = [row for row in load(path).rows if isinstance(row, FigureRow)]
    assert {row.figure: bool(row.limited_by) for row in rows} == {"repeat": False, "program_bias": True}


def test_a_model_says_which_gpu_it_is_for(trained: Path) -> None:
    from cudasched.predictor import Model

    model = Model(trained / "model.ubj")
    assert (model.architecture, model.gpu) == ("sm_90", "NVIDIA H200")


def test_errors_by_time_and_their_bias() -> None:
    measured = np.array([1_000.0, 1_000.0, 98_000.0])
    found = measures.errors_of(np.array([2_000.0, 1_000.0, 88_000.0]), measured, np.array([0, 1, 2]))
    assert found.median.value == pytest.approx(10 / 98)
    assert found.mean == pytest.approx((1 + 0 + 10 / 98) / 3)
    assert found.time_weighted.value == pytest.approx(0.11)
    assert found.bias.value == pytest.approx(-0.09)
    assert found.time_weighted.low <= 0.11 <= found.time_weighted.high
    with pytest.raises(ValueError, match="no predictions"):
        measures.errors_of(measured[:0], measured[:0], np.zeros(0, np.int64))


def test_intervals_take_groups_for_units() -> None:
    # A thousand launches of two keys, one always inside and one never, say little of a third key.
    inside = np.repeat([True, False], 500)
    assert measures.share_interval(inside, np.repeat([0, 1], 500)) == (0.0, 1.0)
    low, high = measures.share_interval(inside, np.arange(1000))
    assert 0.45 < low < high < 0.55
    measured = np.full(1000, 1000.0)
    predicted = np.where(inside, 1000.0, 1500.0)
    wide = measures.errors_of(predicted, measured, np.repeat([0, 1], 500)).time_weighted
    narrow = measures.errors_of(predicted, measured, np.arange(1000)).time_weighted
    assert (wide.low, wide.high) == (0, 0.5)
    assert 0.2 < narrow.low < narrow.high < 0.3


def test_what_events_give_is_drawn_from_what_was_measured() -> None:
    import pyarrow as pa

    # Submitted 40 us before the kernel ahead was done, 5 us before, and 5 us after.
    count, took = 3_000, 20_000
    start = np.arange(count) * 100_000
    end = start + took
    for ahead, is_known in ((40_000, False), (5_000, False), (-5_000, True)):
        submitted = np.concatenate([[0], end[:-1] - ahead])
        columns = {"pid": np.ones(count, np.int64), "submitted_ns": submitted, "start_ns": start}
        table = pa.table({**columns, "duration_ns": np.full(count, took)})
        said = production.events_of(table)
        added, call = (said["elapsed_ns"] - took)[1:], said["call_ns"][1:]
        if ahead > production.QUEUED_NS:
            assert not call.any()
            assert 2_300 < np.median(added) < 3_100
            continue
        # Less the launch call, it is nearly always the same. The first event tells of most that it was waited for.
        told = call > 0
        assert told.all() if is_known else 0.5 < told.mean() < 1
        left = (added - call)[told]
        assert 1_100 < np.median(left) < 1_450
        assert np.quantile(left, 0.84) - np.quantile(left, 0.16) < 500
        assert np.median(added[~told]) > 2_900 if not told.all() else True


def test_launches_without_times_come_as_those_of_programs_do() -> None:
    random = np.random.default_rng(1)
    for duration, queued in ((1_000, 0.08), (50_000, 0.31), (1_000_000, 0.65)):
        ahead = production.drawn_ahead_ns(np.full(20_000, duration), random)
        assert np.mean(ahead > production.QUEUED_NS) == pytest.approx(queued, abs=0.02)
        assert 0 < np.mean((ahead > 0) & (ahead <= production.QUEUED_NS)) < 0.3


def test_what_completes_later_is_learned_later(programs: Path) -> None:
    import pyarrow as pa

    table = data.table_of(programs).slice(0, 400)
    table = table.filter(pa.array(np.arange(len(table)) % 20 == 0))  # one launch, again and again
    assert production.replay(table, "", by_events=False)["cold"].sum() == 1
    place = table.schema.get_field_index("start_ns")
    late = table.set_column(place, table.schema.field(place), pa.array(table["start_ns"].to_numpy() + 1_000_000))
    assert production.replay(late, "", by_events=False)["cold"].sum() == 6  # 0.2 ms from one to the next


def test_of_events_that_were_recorded_those_of_queued_launches_are_learned_from(programs: Path) -> None:
    import pyarrow as pa

    table = data.table_of(programs).slice(0, 2000)
    # Events that say twice the time, and of every third launch nothing.
    elapsed = 2 * table["duration_ns"].to_numpy() + 2_660
    both = table.append_column("elapsed_ns", pa.array(elapsed, mask=np.arange(len(table)) % 3 == 0))
    as_it_is = production.recorded_events_of(both)["elapsed_ns"]
    assert not as_it_is[~production.is_queued(both)].any()
    place = both.schema.get_field_index("submitted_ns")
    ahead = pa.array(both["start_ns"].to_numpy() - 1_000_000)
    queued = both.set_column(place, both.schema.field(place), ahead)
    found = production.recorded_events_of(queued)["elapsed_ns"][1:]
    assert (found == np.where(np.arange(len(table)) % 3 == 0, 0, elapsed)[1:]).mean() > 0.95
    said = production.replay(both, "", events={"elapsed_ns": elapsed, "call_ns": np.zeros(len(table), np.int64)})
    hits = said["hit"] & (np.arange(len(table)) > 500)
    ratio = said["predicted_ns"][hits] / table["duration_ns"].to_numpy()[hits]
    assert np.median(ratio) == pytest.approx(2, rel=0.05)
    assert np.median(production.replay(table, "")["predicted_ns"][hits] / table["duration_ns"].to_numpy()[hits]) < 1.2


def test_events_of_launches_that_the_gpu_waited_for_are_told_from_those_in_its_queue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pyarrow as pa

    from training import record

    # Forty launches of 20 us that were submitted at once, and forty that each came 5 us after the GPU was done.
    count, took, ahead = 40, 20_000, np.arange(40)
    submitted = np.concatenate([ahead * 100, 2_000_000 + ahead * 30_000])
    start = np.concatenate([5_000 + ahead * (took + 1_000), 2_005_000 + ahead * 30_000])
    added = np.concatenate([np.full(count, 2_700), np.full(count, 7_000)])
    columns = {
        "pid": np.ones(2 * count, np.int64),
        "submitted_ns": submitted,
        "start_ns": start,
        "duration_ns": np.full(2 * count, took),
        "elapsed_ns": took + added,
        "overlapped": np.zeros(2 * count, bool),
    }
    table = pa.table(columns)
    queued = production.is_queued(table)
    assert not queued[0]
    assert queued[1:count].all() and not queued[count + 1 :].any()
    assert set(added[queued]) <= {2_700, 7_000}
    assert np.median(added[queued]) == 2_700
    gaps = record.event_gap(table, "some")
    assert (gaps["queued_gap"], gaps["waited_gap"]) == (2_700, 7_000)
    assert "one in the queue" in capsys.readouterr().out
    # Another process's launches keep nobody waiting.
    apart = table.set_column(0, "pid", pa.array(np.arange(2 * count)))
    assert not production.is_queued(apart).any()


def test_a_roofline_rises_as_multiprocessors_go_until_the_memory_is_the_limit(launches: data.Launches) -> None:
    from cudasched.predictor._recording import feature_names

    from training.roofline import H200, roofline_ns

    names = feature_names()
    rows = np.zeros((3, len(names)), np.float32)
    values = {"log_blocks": 20.0, "log_thread_work": 30.0, "element_bytes": 4.0}
    for name, value in values.items():
        rows[:, names.index(name)] = value
    rows[:, names.index("sm_count")] = (16, 64, 132)
    few, more, whole = roofline_ns(rows, names) - H200.launch_ns
    assert few == pytest.approx(2**30 / (16 * H200.sm_bytes_per_ns), rel=1e-6)
    assert more == whole == pytest.approx(2**30 / H200.bytes_per_ns, rel=1e-6)
    # A product of matrices goes by its operations, which more multiprocessors share.
    for name, value in {"log_work": 36.0, **{f"log_work_{side}": 12.0 for side in "mnk"}}.items():
        rows[:, names.index(name)] = value
    few, more, whole = roofline_ns(rows, names) - H200.launch_ns
    assert few == pytest.approx(4 * more, rel=1e-6)
    assert whole == pytest.approx(2 * 2**36 / (132 * H200.sm_flops_per_ns[4]), rel=1e-6)
    # One block has one multiprocessor, however many there are.
    rows[:, names.index("log_blocks")] = 0
    assert len(set(roofline_ns(rows, names))) == 1
    assert (roofline_ns(launches.rows, names) >= H200.launch_ns).all()


def test_programs_of_other_libraries_have_rows_and_a_figure(trained: Path, programs: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(programs)
    # Events that add three times what is taken off, to launches that were all in the queue: all is learned too long.
    elapsed = table["duration_ns"].fill_null(0).to_numpy() + 8_000
    table = table.append_column("elapsed_ns", pa.array(elapsed))
    ahead = pa.array(table["start_ns"].fill_null(0).to_numpy() - 5_000_000, mask=table["start_ns"].is_null().to_numpy())
    place = table.schema.get_field_index("submitted_ns")
    table = table.set_column(place, table.schema.field(place), ahead)
    labels = [text.replace("p0", "cupy_arrays").replace("p1", "jax_models") for text in table["label"].to_pylist()]
    place = table.schema.get_field_index("label")
    other = programs.with_name("libraries.parquet")
    column = pa.array(labels).dictionary_encode()
    pq.write_table(table.set_column(place, table.schema.field(place), column), other)
    trees = str(trained / "model.ubj")
    found = evaluate.Programs(other, trees)
    recorded = evaluate.Programs(other, trees, production.recorded_events_of)
    known: set[int] = set()
    rows = evaluate.library_rows(found, known)
    as_recorded = evaluate.library_rows(recorded, known, "recorded events")
    assert {row["scope"] for row in as_recorded} == {f"{row['scope']}, recorded events" for row in rows}
    assert all(row["corrected"] for row in as_recorded)
    assert (recorded.judged(recorded.columns["hit"]).bias.value) > found.judged(found.columns["hit"]).bias.value + 0.1
    scopes = {row["scope"] for row in rows}
    assert {"program:cupy_arrays", "program:jax_models", "libraries:all"} <= scopes
    assert "program:all" not in scopes
    tested = evaluate.Tested(data.load(programs))
    figures = {
        row["figure"]: row for row in evaluate.figures_of(tested, None, known, {"": found, "recorded events": recorded})
    }
    first = next(row for row in rows if row["scope"] == "program:cupy_arrays" and row["split"] == "unseen_kernel")
    assert figures["other_libraries_first"]["n"] == first["n"]
    assert figures["other_libraries_first"]["goal"] == 0.40
    assert figures["other_libraries_first_recorded"]["n"] > 0


def parts_of_the_gpu(sweeps: Path, out: Path) -> Path:
    """The sweeps' launches as if on several counts of multiprocessors, each as much slower as it has fewer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(sweeps)
    tables = []
    for count in (16, 64, 132):
        labels = [f"program:sm_counts|{count}|work {i % 40}" for i in range(len(table))]
        took = table["duration_ns"].to_numpy() * 132 // count
        for name, column in (("label", pa.array(labels).dictionary_encode()), ("duration_ns", pa.array(took))):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(place), column.cast(table.schema.field(place).type))
        tables.append(table)
        table = pq.read_table(sweeps)
    # What made the data to work on, on the whole GPU and before the first label.
    place = table.schema.get_field_index("label")
    unlabelled = pa.array([""] * 50).dictionary_encode().cast(table.schema.field(place).type)
    tables.insert(0, table.slice(0, 50).set_column(place, table.schema.field(place), unlabelled))
    pq.write_table(pa.concat_tables(tables, promote_options="default").unify_dictionaries(), out)
    return out


def test_trees_are_tested_on_counts_of_multiprocessors_that_they_did_not_have(
    sweeps: Path, launches: data.Launches, tmp_path: Path
) -> None:
    from cudasched.predictor._recording import feature_names

    path = parts_of_the_gpu(sweeps, tmp_path / "sm_counts.parquet")
    tables = evaluate.by_sm_count(path)
    assert {count: data.sm_count_of(table) for count, table in tables.items()} == {16: 16, 64: 64, 132: 132}
    assert [len(table) for table in tables.values()] == [len(launches)] * 3
    rows = evaluate.sm_count_rows(path, launches, feature_names(), train.Recipe(trees=40), 2)
    assert {row["scope"] for row in rows} == {"sm_count:64"}
    assert {(row["model"], row["corrected"]) for row in rows} == {
        ("ours", False),
        ("ours", True),
        ("over roofline", False),
    }
    error = {(row["split"], row["corrected"]): row["mdape"] for row in rows if row["model"] == "ours"}
    # Half the multiprocessors take twice as long, of which trees of the whole GPU know little; corrections follow.
    assert error["program", True] < error["program", False]
    with pytest.raises(ValueError, match="how many multiprocessors"):
        evaluate.by_sm_count(sweeps)
