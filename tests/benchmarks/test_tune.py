"""Recording, packing and evaluating spaces: over the simulated driver, and over synthetic recordings."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("sklearn")

from axpy_space import ARGUMENTS, IMAGE  # noqa: E402
from cudasched.tune.recording import Recording  # noqa: E402
from synthetic_spaces import recording, small  # noqa: E402

from benchmarks.lab.run import run  # noqa: E402
from benchmarks.results.schema import load  # noqa: E402
from benchmarks.tune import evaluate, record, rivals  # noqa: E402

SMALL = recording(small())


def test_chance_is_a_course_of_what_was_tried_and_how_long_it_took() -> None:
    course = rivals.ours(SMALL, 0, 30, strategy="random")
    assert len(course.times_us) == len(course.seconds) == 30
    assert list(course.seconds) == sorted(course.seconds) and course.seconds[0] > 0.3
    assert course.gap(SMALL, 30) == pytest.approx(course.times_us[-1] / SMALL.best()[1] - 1)
    everything = rivals.ours(SMALL, 0, 1000, strategy="exhaustive")
    assert everything.gap(SMALL, 1000) < 0.02 and math.isfinite(everything.seconds_to(SMALL, 0.02))
    assert everything.evaluations_to(SMALL, -0.5) == math.inf


def test_a_search_that_is_stopped_once_it_has_found_it_gives_the_same_figures() -> None:
    whole = rivals.ours(SMALL, 0, 120)
    stopped = rivals.ours(SMALL, 0, 120, near=0.02, at_least=20)
    count = len(stopped.times_us)
    assert 20 < count < 120 and whole.times_us[:20] == stopped.times_us[:20]
    assert stopped.evaluations_to(SMALL, 0.02) == whole.evaluations_to(SMALL, 0.02)
    assert stopped.gap(SMALL, 20) == whole.gap(SMALL, 20)


def test_kernel_tuner_replays_the_same_space() -> None:
    pytest.importorskip("kernel_tuner")
    course = rivals.kernel_tuner(SMALL, 1, 40, "genetic_algorithm")
    assert 30 <= len(course.times_us) <= 60 and list(course.seconds) == sorted(course.seconds)
    assert course.times_us == rivals.kernel_tuner(SMALL, 1, 40, "genetic_algorithm").times_us
    everything = rivals.kernel_tuner(SMALL, 0, 1000, "random_sample")
    assert len(everything.times_us) == len(SMALL.measurements) and everything.gap(SMALL, 1000) < 0.02
    total = sum(one.compile_s + one.run_s for one in SMALL.measurements)
    assert total <= everything.seconds[-1] < total + 60


def test_an_evaluation_writes_its_rows_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kernel_tuner")
    monkeypatch.setattr(rivals, "STRATEGIES", ("genetic_algorithm", "random_sample"))
    monkeypatch.setattr(evaluate, "LONGEST", 40)
    monkeypatch.setattr(evaluate, "KNOWN_EVALUATIONS", 30)
    monkeypatch.setattr(evaluate, "EVALUATIONS", 30)
    monkeypatch.setattr(evaluate, "FLAT", 0.2)
    for place, problem in enumerate((small(), small(n=65536))):
        recording(problem).save(tmp_path / f"first-{place}.npz")
    text = small().space.text.replace('"scale"', '"other"')
    from cudasched.tune.space import Space
    from synthetic_spaces import GPU

    recording(Space(text, tmp_path / "o.toml").problem(GPU), seed=3).save(tmp_path / "other.npz")
    options = ["--recorded", str(tmp_path), "--out", str(tmp_path / "k.json")]
    assert run("tuner", ["--rehearse", *options]) == 0
    results = load(tmp_path / "k.json")
    found = {row.figure: row for row in results.figures}
    assert set(found) == set(evaluate.GOALS)
    assert all(row.low <= row.value <= row.high and row.better == "less" for row in found.values())
    assert (tmp_path / "tuner.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "kernels.png").exists()
    assert run("tuner", options) == 1
    assert "no figure may come from it" in capsys.readouterr().out


def test_a_figure_is_of_all_kernels_searches() -> None:
    path, best = Path("small.npz"), SMALL.best()[1]
    courses = {
        evaluate.Task(path, "ours", 0, 1): rivals.Course((2 * best,), (1.0,)),
        evaluate.Task(path, "random", 0, 1): rivals.Course((1.5 * best,), (1.0,)),
    }
    found = evaluate.find(evaluate.Evaluation({path: SMALL}, courses), range(1), range(0))
    assert found == {"tuner_gap_of_random": (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0), 1)}


@pytest.fixture(name="ppo")
def _ppo() -> Any:
    pytest.importorskip("stable_baselines3", reason="reinforcement learning needs stable-baselines3")
    from benchmarks.tune import ppo

    return ppo


def action(index: int) -> list[int]:
    """Which names a configuration."""
    configuration = SMALL.problem.configurations[index]
    return [values.index(configuration[name]) for name, values in SMALL.problem.space.parameters.items()]


def test_any_action_runs_the_allowed_configuration_that_is_nearest(ppo: Any) -> None:
    space = ppo.space_of([SMALL])
    parameters, configurations = SMALL.problem.space.parameters, SMALL.problem.configurations
    assert list(space.action_space.nvec) == [len(values) for values in parameters.values()]
    space.reset()
    for index in (3, 0, len(configurations) - 1):
        _, reward, _, _, _ = space.step(action(index))
        assert space.tried[-1] == index and -3 <= reward <= 3
    for _ in range(100):
        seen, _, ended, truncated, _ = space.step(space.action_space.sample())
        assert space.observation_space.contains(seen) and not ended
        if truncated:
            space.reset()
    assert set(space.tried) <= set(range(len(configurations)))


def test_faster_configurations_are_rewarded_and_failures_are_not(ppo: Any) -> None:
    times = [one.time_us for one in SMALL.measurements]
    fastest = min((i for i, one in enumerate(times) if one), key=lambda i: times[i] or 0)
    failing = next(i for i, one in enumerate(times) if one is None)
    space = ppo.space_of([SMALL])
    space.reset()
    rewards = []
    for index in (next(i for i, one in enumerate(times) if one and i != fastest), fastest, failing):
        rewards.append(space.step(action(index))[1])
    assert rewards[0] == 0 < rewards[1] and rewards[2] == ppo.LEAST


def test_ppo_searches_as_far_as_it_may_with_and_without_training(ppo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "TRAINING_STEPS", 64)
    for others in ([], [recording(small(n=65536))]):
        course = ppo.search(SMALL, 0, 20, others)
        assert 1 <= len(course.times_us) <= 20
        assert course.times_us == ppo.search(SMALL, 0, 20, others).times_us


def test_ppo_is_written_beside_ours_and_chance(ppo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "EVALUATIONS", 10)
    monkeypatch.setattr(ppo, "TRAINING_STEPS", 64)
    monkeypatch.setattr(evaluate, "FLAT", 0.2)
    for place, problem in enumerate((small(), small(n=65536))):
        recording(problem).save(tmp_path / f"{place}.npz")
    out = tmp_path / "foresight.json"
    assert run("tuner_ppo", ["--rehearse", "--recorded", str(tmp_path), "--out", str(out)]) == 0
    assert {row.figure for row in load(out).figures} == {f"tuner_gap_{tuner}" for tuner in ppo.TUNERS}
    assert run("tuner_ppo", ["--recorded", str(tmp_path), "--out", str(out)]) == 1


@pytest.mark.parametrize("path", sorted(evaluate.RECORDED.glob("*.npz")), ids=lambda path: path.stem)
def test_a_committed_recording_is_of_a_gpu_and_compact(path: Path) -> None:
    made = Recording.load(path)
    assert not made.is_synthetic and made.about["origin"] == "recorded"
    assert {"gpu", "driver", "commit", "date"} <= set(made.about)
    assert path.stem == record.Part(made.problem.space.kernel, dict(made.problem.shape)).name
    assert path.stat().st_size < 1 << 20


SPACE = f"""
kernel = "axpy"
source = "axpy.cubin"
[shape]
rows = 8
cols = 64
[parameters]
THREADS = [32, 64, 128]
[launch]
block = "THREADS"
grid = 1
{ARGUMENTS.replace('"n"', '"512"')}"""


def test_a_space_is_recorded_goes_on_and_is_packed(
    tmp_path: Path, simulated_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    (tmp_path / "axpy.cubin").write_text(IMAGE)
    (tmp_path / "layernorm.toml").write_text(SPACE)
    device = tmp_path / "device"
    device.mkdir(mode=0o700)
    environment = {
        **os.environ,
        "CUDASCHED_DRIVER": str(simulated_driver),
        "CUDASCHED_SIM_DIR": str(device),
        "CUDASCHED_SIM_SCALE": "1",
        "CUDASCHED_RUN_DIR": str(tmp_path / "run"),
    }
    given = ("--only", "layernorm", "--shapes", "1", "--spaces", str(tmp_path), "--out", str(tmp_path / "out"))
    command = [sys.executable, "-m", "benchmarks.tune", "record", *given, "--processes", "1"]

    def recorded() -> str:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "3 configurations, 3 to measure" in recorded() and "0 to measure" in recorded()
    assert len(list((tmp_path / "out").iterdir())) <= 8
    packed = [str(tmp_path / "out"), str(tmp_path / "packed"), "--spaces", str(tmp_path), "--l2-mib", "50"]
    assert record.pack(packed) == 0
    (path,) = (tmp_path / "packed").iterdir()
    made = Recording.load(path)
    assert path.name == "layernorm-8192-4096.npz" and len(made.retimed) == 3 and not made.is_synthetic
    assert {"gpu", "driver", "commit", "date"} <= set(made.about) and made.about["origin"] == "recorded"
    assert {one.status for one in made.measurements} == {"ok"} and made.about["gpu"] == made.problem.gpu.name
    assert record.Part("gemm", {"m": 1, "n": 2}).name == "gemm-1-2"
