"""What the predictor learns in one run is there in the next; and what may be wrong with its files."""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cudasched import hook
from program import HOLDING, PATIENT, Program, Stage
from support import PATIENCE_S, ROOT

np = pytest.importorskip("numpy")

MODEL = ROOT / "tests" / "data" / "xgboost" / "3.2" / "absolute.json"
SCALE = 20
"""Real seconds that a simulated second takes."""


@pytest.fixture
def stage(command: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """With a latency client, so that best-effort launches are gated, predicted and timed."""
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", str(SCALE))
    monkeypatch.setenv("CUDASCHED_MODEL", "off")
    stage = Stage(command, tmp_path)
    serve = stage.importing(**PATIENT, **HOLDING, CUDASCHED_CACHE_DIR="off")
    serve.call("gpu = Gpu()")
    serve.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    yield stage
    stage.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of states; it is not there yet."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", str(directory))
    return directory


def begin(stage: Stage, us: int = 20, **environment: str) -> Program:
    """A best-effort program that has launched kernels of `us` simulated microseconds and waited for them."""
    program = stage.run("best-effort", **PATIENT, **environment)
    program.call("gpu = Gpu()")
    program.call(f"for _ in range(6):\n    gpu.launch(us={us})\n    gpu.synchronize()")
    assert program.count("gated_launches") == 6
    return program


def finish(program: Program) -> str:
    """Ends it well. Returns what it said on standard error."""
    assert program.end() == 0, program.stderr
    return program.stderr


def learn(stage: Stage, us: int = 20, **environment: str) -> str:
    return finish(begin(stage, us, **environment))


def states(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if "predictor" in path.name and path.is_file())


def only_state(directory: Path) -> Path:
    found = states(directory)
    assert len(found) == 1, found
    return found[0]


def known_us(state: Path | bytes, us: int) -> float | None:
    """What a state says that the kernel of `us` simulated microseconds takes, us; None: it never saw it."""
    numbers = {f"{name}_{axis}": 1 for name in ("grid", "cluster") for axis in "xyz"}
    numbers |= {"block_x": 32, "block_y": 1, "block_z": 1, "registers": 32, "max_threads": 1024, "blocks_per_sm": 4}
    numbers |= dict.fromkeys(("dynamic_shared_bytes", "static_shared_bytes", "local_bytes"), 0)
    numbers |= {"parameter_bytes": 4, "words": us}
    columns: dict[str, object] = {name: np.array([value], np.uint32) for name, value in numbers.items()}
    columns |= {"function": np.zeros(1, np.int32), "functions": ["work"], "duration_ns": np.zeros(1, np.int64)}
    columns["word_offsets"] = np.array([0, 1], np.int64)
    replay = hook.load_core().Replay()
    replay.restore(state if isinstance(state, bytes) else state.read_bytes())
    said = replay.run(columns, 132)
    return float(said["predicted_ns"][0]) / 1e3 if said["hit"][0] else None


def is_about(measured_us: float | None, us: int) -> bool:
    """Loosely: the machine may be busy, and times it late."""
    return measured_us is not None and 0.9 * us * SCALE <= measured_us <= 100 * us * SCALE


# ---- kept and read -------------------------------------------------------------------------------------------------


def test_what_was_learned_is_kept_for_its_owner_under_the_gpus_name(stage: Stage, cache: Path) -> None:
    program = begin(stage)
    identity = program.call(
        "(lambda bytes: (gpu.call('cuDeviceGetUuid_v2', bytes, 0), list(bytes))[1])((ctypes.c_ubyte * 16)())"
    )
    assert finish(program) == ""
    state = only_state(cache)
    assert isinstance(identity, list)
    assert state.name == f"predictor-GPU-{uuid.UUID(bytes=bytes(identity))}.state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert is_about(known_us(state, 20), 20)
    assert known_us(state, 21) is None


def test_it_is_kept_by_a_program_that_ends_without_exit_handlers(stage: Stage, cache: Path) -> None:
    """As workers do that multiprocessing forks."""
    program = begin(stage)
    program.send("import os; os._exit(3)")
    assert program.process.wait(PATIENCE_S) == 3
    assert is_about(known_us(only_state(cache), 20), 20)


def test_it_is_kept_by_a_program_that_a_signal_ends(stage: Stage, cache: Path) -> None:
    """As services are. It is written after 2 s of work, and then more and more seldom."""
    program = begin(stage)
    end = time.monotonic() + PATIENCE_S
    while not states(cache) and time.monotonic() < end:
        time.sleep(0.05)
    program.kill()
    assert is_about(known_us(only_state(cache), 20), 20)


WORKER = """
import cudasched
from program import Gpu
def work():
    cudasched.set_class("best_effort")
    gpu = Gpu()
    for _ in range(6):
        gpu.launch(us=20)
        gpu.synchronize()
"""


@pytest.mark.parametrize("way", ["fork", "forkserver"])
def test_it_is_kept_by_workers_of_a_program_that_imports_cudasched(
    stage: Stage, cache: Path, tmp_path: Path, way: str
) -> None:
    """They end by `os._exit`, which nobody stands before where nothing is preloaded."""
    (tmp_path / "worker.py").write_text(WORKER)
    program = stage.importing(**PATIENT)
    program.call(f"import multiprocessing, sys; sys.path.insert(0, {str(tmp_path)!r}); import worker")
    program.call(f"one = multiprocessing.get_context({way!r}).Process(target=worker.work); one.start(); one.join()")
    assert program.call("one.exitcode") == 0, program.stderr
    assert is_about(known_us(only_state(cache), 20), 20)
    assert finish(program) == ""


def test_a_second_run_goes_on_from_the_first(stage: Stage, cache: Path) -> None:
    assert learn(stage, 20) == ""
    first = known_us(only_state(cache), 20)
    assert learn(stage, 300) == ""
    both = only_state(cache)
    assert known_us(both, 20) == first
    assert is_about(known_us(both, 300), 300)


def test_without_it_the_first_run_is_forgotten(stage: Stage, cache: Path) -> None:
    assert learn(stage, 20) == ""
    only_state(cache).unlink()
    assert learn(stage, 300) == ""
    assert known_us(only_state(cache), 20) is None


def test_programs_of_other_classes_keep_nothing(stage: Stage, cache: Path) -> None:
    for client_class in ("latency", "normal"):
        program = stage.run(client_class, **PATIENT)
        program.call("gpu = Gpu(); gpu.launch(5); gpu.synchronize()")
        assert finish(program) == ""
    assert not states(cache.parent)


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_by_default_it_is_in_the_users_cache(
    stage: Stage, private_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    expected = private_home / ".cache" / "cudasched"
    if variable == "XDG_CACHE_HOME":
        expected = tmp_path / "elsewhere" / "cudasched"
        monkeypatch.setenv(variable, str(expected.parent))
    assert learn(stage) == ""
    assert only_state(tmp_path).parent == expected


# ---- nothing to keep it in: no word, no file -----------------------------------------------------------------------


def test_off_writes_nothing(stage: Stage, tmp_path: Path) -> None:
    assert learn(stage, CUDASCHED_CACHE_DIR="off") == ""
    assert not states(tmp_path)
    assert not (tmp_path / "home" / ".cache").exists()
    assert not (tmp_path / "off").exists()


def test_without_a_home_nothing_is_kept(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert learn(stage) == ""
    assert not states(tmp_path)


@pytest.mark.parametrize("kind", ["cannot_be_made", "below_a_file", "read_only"])
def test_a_directory_that_cannot_be_written_is_no_fault(stage: Stage, tmp_path: Path, kind: str) -> None:
    directory = Path("/proc/cudasched")
    if kind == "below_a_file":
        directory = tmp_path / "file" / "cache"
        directory.parent.write_text("")
    elif kind == "read_only":
        if os.geteuid() == 0:
            pytest.skip("nothing is read-only to root")
        directory = tmp_path / "cache"
        directory.mkdir(mode=0o500)
    assert learn(stage, CUDASCHED_CACHE_DIR=str(directory)) == ""
    assert not states(tmp_path)


# ---- a state that is not one ---------------------------------------------------------------------------------------


def _corrupt(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0x10
    state.write_bytes(content)


def _truncate(state: Path) -> None:
    os.truncate(state, state.stat().st_size // 2)


def _replace(state: Path) -> None:
    state.write_bytes(b"#!/bin/sh\necho somebody else's file\n" * 20)


def _newer(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[8] += 1
    state.write_bytes(content)


def _directory(state: Path) -> None:
    state.unlink()
    state.mkdir()


def _pipe(state: Path) -> None:
    state.unlink()
    os.mkfifo(state)


def _loop(state: Path) -> None:
    state.unlink()
    state.symlink_to(state.name)


def _unreadable(state: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is unreadable to root")
    state.chmod(0)


def _huge(state: Path) -> None:
    os.truncate(state, 1 << 40)  # without a byte on the disk


@pytest.mark.parametrize("spoil", [_corrupt, _truncate, _replace, _newer, _directory, _pipe, _loop, _unreadable, _huge])
def test_a_state_that_is_not_ours_is_one_warning(stage: Stage, cache: Path, spoil: Callable[[Path], None]) -> None:
    assert learn(stage) == ""
    state = only_state(cache)
    spoil(state)
    said = learn(stage, 300).splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("cudasched: warning: ") and "state" in said[0]
    if state.is_dir():
        return
    # A new one stands in its place.
    assert stat.S_IMODE(state.lstat().st_mode) == 0o600
    assert known_us(state, 20) is None
    assert is_about(known_us(state, 300), 300)


# ---- the model -----------------------------------------------------------------------------------------------------


def _model_of(features: int, path: Path) -> Path:
    """A saved model, said to be of so many features: its trees look at fewer."""
    model = json.loads(MODEL.read_text())
    model["learner"]["learner_model_param"]["num_feature"] = str(features)
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        tree["tree_param"]["num_feature"] = str(features)
    path.write_text(json.dumps(model))
    return path


@pytest.mark.parametrize("kind", ["missing", "corrupt", "cut_short", "empty", "other_features"])
def test_a_model_that_cannot_be_used_is_one_warning(stage: Stage, cache: Path, tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model.json"
    if kind == "corrupt":
        model.write_bytes(b"\x00\x01 no model" * 99)
    elif kind == "cut_short":
        model.write_bytes(MODEL.read_bytes()[:-200])
    elif kind == "empty":
        model.write_bytes(b"")
    elif kind == "other_features":
        _model_of(len(hook.load_core().feature_names()) + 1, model)
    said = learn(stage, CUDASCHED_MODEL=str(model)).splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("cudasched: warning: ")
    assert is_about(known_us(only_state(cache), 20), 20)


def test_a_model_that_can_be_used_is_none(stage: Stage, cache: Path, tmp_path: Path) -> None:
    model = _model_of(len(hook.load_core().feature_names()), tmp_path / "model.json")
    assert learn(stage, CUDASCHED_MODEL=str(model)) == ""
    assert is_about(known_us(only_state(cache), 20), 20)


def test_a_directory_without_a_model_for_this_gpu_is_history(stage: Stage, cache: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    _model_of(1, models / "sm_10.json")
    said = learn(stage, CUDASCHED_MODEL=str(models)).splitlines()
    assert len(said) == 1, said
    assert "there is no model for cudasched simulated GPU (sm_90)" in said[0]
    assert "cudasched train" in said[0]
    assert is_about(known_us(only_state(cache), 20), 20)


def test_without_a_choice_the_packages_models_are_used_or_none(
    stage: Stage, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDASCHED_MODEL")
    assert learn(stage) == ""
    assert is_about(known_us(only_state(cache), 20), 20)


# ---- several at once, and ends in the middle -----------------------------------------------------------------------


def test_programs_that_end_at_once_leave_a_whole_state(stage: Stage, cache: Path) -> None:
    durations = (20, 40, 60, 80)
    for _ in range(3):
        programs = [begin(stage, us) for us in durations]
        for program in programs:
            assert program.process.stdin is not None
            program.process.stdin.close()
        assert [finish(program) for program in programs] == [""] * len(programs)
        state = only_state(cache)
        assert any(is_about(known_us(state, us), us) for us in durations)


@pytest.mark.parametrize("action", ["SIG_DFL", "SIG_IGN"])
def test_an_end_in_the_middle_of_writing_leaves_the_earlier_state(stage: Stage, cache: Path, action: str) -> None:
    """The file may not grow beyond half a state: the write is cut there, and no signal kills the program."""
    assert learn(stage, 20) == ""
    state = only_state(cache)
    half = state.stat().st_size // 2
    program = begin(stage, 300)
    program.call(
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.{action}); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({half}, {half}))"
    )
    before = state.read_bytes()
    assert finish(program) == ""
    assert states(cache) == [state]
    assert state.read_bytes() == before
    assert learn(stage, 300) == ""
    assert is_about(known_us(state, 300), 300)


def test_a_kill_at_any_moment_leaves_a_whole_state_or_none(stage: Stage, cache: Path) -> None:
    for round_ in range(6):
        program = begin(stage, 20)
        assert program.process.stdin is not None
        program.process.stdin.close()
        time.sleep(0.004 * round_)
        program.kill()
        for state in cache.glob("*.state"):
            assert is_about(known_us(state, 20), 20)
    assert learn(stage, 300) == ""
    assert is_about(known_us(next(cache.glob("*.state")), 300), 300)
