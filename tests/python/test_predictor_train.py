"""`cudasched train`: from a recording without labels to a model that the scheduler uses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cudasched import errors, predictor
from program import HOLDING, PATIENT, Stage
from support import PATIENCE_S, Run
from test_advise import launch, recording

pytest.importorskip("xgboost", reason="training needs XGBoost")
np = pytest.importorskip("numpy")


def rows(count: int) -> list[dict[str, Any]]:
    """Launches of four kernels whose time follows from their blocks; nothing is labelled."""
    random = np.random.default_rng(1)
    made = []
    for number in range(count):
        blocks = int(np.exp(random.uniform(2, 10)))
        kernel = number % 4
        duration = (2_000 + 20 * blocks * (1 + kernel)) * np.exp(random.normal(0, 0.02))
        row = launch(grid=(blocks, 1, 1), function=f"kernel_{kernel}", identity=7 + kernel, duration_ns=int(duration))
        made.append(row | {"registers": 32 + 8 * kernel, "parameter_bytes": 8, "words": [blocks, kernel]})
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "mine.parquet"
    parquet.write_table(recording(rows(1_500), gpu="cudasched simulated GPU"), path)
    return path


def test_one_command_from_a_recording_to_a_model_in_use(
    data: Path, cudasched: Run, command: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", str(cache))
    monkeypatch.delenv("CUDASCHED_MODEL", raising=False)  # as this process's own import of cudasched leaves it
    done = cudasched("train", "--data", str(data))
    assert done.returncode == 0, done.stderr
    model = cache / "models" / "sm_90.ubj"
    assert f"{model}: a model for cudasched simulated GPU (sm_90)" in done.stdout
    assert "the scheduler uses it from the next program on" in done.stdout
    assert [path.name for path in model.parent.iterdir()] == [model.name]

    # And the engine of the next program loads it.
    monkeypatch.setenv("CUDASCHED_LOG", "info")
    stage = Stage(command, tmp_path)
    serve = stage.importing(**PATIENT, **HOLDING)  # a latency client: launches beside it are predicted
    serve.call("gpu = Gpu()")
    serve.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    program = stage.run("best-effort", **PATIENT)
    program.call("gpu = Gpu()")
    program.call("gpu.launch(us=20); gpu.synchronize()")
    assert program.end() == 0
    stage.close()
    assert f"are predicted by the trees of {model}" in program.stderr


def test_what_was_trained_predicts_what_it_has_not_seen(data: Path, tmp_path: Path) -> None:
    trained = predictor.train(data, tmp_path / "mine.ubj")
    assert (trained.launches, trained.architecture) == (1_500, "sm_90")
    assert trained.error < 0.15
    assert trained.time_weighted < 0.2
    model = predictor.load(tmp_path / "mine.ubj")
    assert (model.architecture, model.gpu) == ("sm_90", "cudasched simulated GPU")
    new = recording([row | {"duration_ns": None} for row in rows(40)])
    measured = [row["duration_ns"] for row in rows(40)]
    assert np.median(np.abs(model.predict(new) / measured - 1)) < 0.1


@pytest.mark.parametrize("kind", ["empty", "few", "untimed", "no recording"])
def test_what_cannot_be_trained_on_says_why_and_leaves_no_model(kind: str, tmp_path: Path) -> None:
    table = {
        "empty": recording([]),
        "few": recording(rows(20)),
        "untimed": recording([row | {"duration_ns": None} for row in rows(500)]),
        "no recording": recording(rows(500)).drop_columns(["duration_ns"]),
    }[kind]
    out = tmp_path / "model.ubj"
    with pytest.raises(errors.Error, match="no column duration_ns" if kind == "no recording" else "different launches"):
        predictor.train(table, out)
    assert not out.exists()


def test_a_model_does_not_replace_its_recording(data: Path) -> None:
    before = data.read_bytes()
    with pytest.raises(errors.ConfigError, match="the model would replace the recording"):
        predictor.train(data, data)
    assert data.read_bytes() == before


def test_where_nothing_is_kept_a_file_is_asked_for(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", "off")
    with pytest.raises(errors.ModelError, match="name a file for the model"):
        predictor.train(data)


@pytest.mark.parametrize("arguments", [(), ("--data", "x.parquet", "--", "python")])
def test_a_program_or_a_recording(cudasched: Run, arguments: tuple[str, ...]) -> None:
    done = cudasched("train", *arguments)
    assert done.returncode == 2
    assert "name either a program to record" in done.stderr


def test_a_pipe_is_written_to_and_never_replaced(data: Path, tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    predictor.train(data, pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join()
    assert predictor.Model(got[0]).architecture == "sm_90"


def test_a_model_on_standard_output_is_there_alone(data: Path, command: str, tmp_path: Path) -> None:
    """Guards against a model with the command's report behind it, which no reader takes."""
    out = tmp_path / "model.ubj"
    with out.open("w") as file:
        given = [command, "train", "--data", str(data), "-o", "/dev/stdout"]
        done = subprocess.run(given, stdout=file, stderr=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S)
    assert predictor.load(out).architecture == "sm_90"
    assert "trained on" in done.stderr and "CUDASCHED_MODEL" not in done.stderr


def test_a_model_that_is_not_in_use_is_not_said_to_be(
    cudasched: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a trained model that another setting keeps out of use without a word."""
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDASCHED_MODEL", "off")
    done = cudasched("train", "--data", str(data))
    assert done.stdout.endswith("the scheduler uses the model that CUDASCHED_MODEL names; without that, this one\n")


def test_a_gpus_name_is_printed_on_one_line(cudasched: Run, tmp_path: Path) -> None:
    """Guards against a recording whose text moves the terminal's cursor."""
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(recording(rows(200), gpu="some\x1b[2J\nGPU"), tmp_path / "odd.parquet")
    done = cudasched("train", "--data", str(tmp_path / "odd.parquet"), "-o", str(tmp_path / "model.ubj"))
    assert done.returncode == 0 and "a model for some\\x1b[2J\\nGPU (sm_90)\n" in done.stdout, done.stdout


def test_more_threads_than_xgboost_can_count_are_refused(cudasched: Run, data: Path) -> None:
    done = cudasched("train", "--data", str(data), "--threads", "99999999999")
    assert done.returncode == 2 and "--threads" in done.stderr, done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_CUPTI", "none: no launch is timed")
    program = (sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = cudasched("train", "-o", str(tmp_path), "--", *program)
    assert (done.returncode, done.stderr) == (2, f"cudasched: error: -o {tmp_path}: it is a directory; name a file\n")
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", "off")
    done = cudasched("train", "--", *program)
    assert "name a file for the model" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_program_without_launches_is_one_error(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_CUPTI", "none: no launch is timed")
    done = cudasched("train", "-o", "model.ubj", "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("cudasched: error: no launch was recorded")
    assert done.stderr.count("\n") == 1
