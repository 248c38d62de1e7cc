"""`cudasched clean`: what goes, and what stays because a process uses it or another user owns it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cudasched import clean as cleaning
from cudasched.clean import Cleaned, clean
from program import Stage
from support import PATIENCE_S, Run, killed_and_living


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of other tests, but for those in /dev/shm, which are in memory."""
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr("tempfile.tempdir", str(own))
    monkeypatch.setenv("CUDASCHED_SIM_DIR", str(tmp_path / "device"))


@pytest.fixture
def cache(private_home: Path) -> Path:
    """A cache with one of everything, and things that are not ours."""
    place = private_home / ".cache" / "cudasched"
    for name in (
        *("kernels/1.cubin", "torch-2.9-1/libcudasched_torch.so", "predictor-GPU-1.state", "predictor-GPU-1.state.17"),
        *("models/sm_90.ubj", "tune.sqlite", "tune.sqlite-wal", "notes.txt", "models/mine.txt"),
    ):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 5000)
    return place


def outcomes(found: Iterator[Cleaned]) -> dict[str, str]:
    return {each.path.name: each.outcome for each in found if each.path.parent != Path("/dev/shm")}


def lines(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if "/dev/shm/" not in line]


def left(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def test_a_dry_run_says_it_and_removes_nothing(cudasched: Run, cache: Path) -> None:
    before = left(cache)
    done = cudasched("clean", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    *places, freed = lines(done.stdout)
    assert [line.split()[0] for line in places] == ["unused"] * 4
    assert f"compiled kernels: {cache}/kernels" in places[0] and "KiB" in places[0]
    assert freed.endswith(" KiB would be freed")
    assert left(cache) == before


def test_caches_go_and_what_costs_gpu_time_stays(cudasched: Run, cache: Path) -> None:
    done = cudasched("clean")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(" KiB freed")
    assert left(cache) == {"models/sm_90.ubj", "tune.sqlite", "tune.sqlite-wal", "notes.txt", "models/mine.txt"}
    assert cudasched("clean", "--all").returncode == 0
    assert left(cache) == {"notes.txt", "models/mine.txt"}
    assert len(lines(cudasched("clean").stdout)) == 1


def test_of_another_cache_directory_only_the_predictors_files_go(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    cache.rename(other)
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", str(other))
    assert outcomes(clean()) == {"predictor-GPU-1.state": "unused", "predictor-GPU-1.state.17": "unused"}
    assert {"kernels/1.cubin", "torch-2.9-1/libcudasched_torch.so"} < left(other)


def test_what_a_living_program_uses_stays(simulated: Path, stage: Stage, tmp_path: Path, private_home: Path) -> None:
    program = stage.run("best_effort")
    program.call("gpu = Gpu(); gpu.launch()")
    table = next((tmp_path / "run").glob("*.arbiter"))
    history = private_home / ".cache/cudasched" / f"predictor-{table.stem}.state"
    history.parent.mkdir(parents=True, exist_ok=True)
    history.write_bytes(b"x")
    for dry_run in (True, False):
        found = outcomes(clean(dry_run=dry_run))
        assert found == {table.name: "used", "device-0": "used", history.name: "used"}
    assert history.exists()
    program.kill()
    assert outcomes(clean()) == {table.name: "unused", "device-0": "unused", history.name: "unused"}
    assert not table.exists() and not history.exists()
    after = stage.run("best_effort")
    after.call("Gpu().launch()")  # makes what it needs anew
    assert table.exists()


def test_a_file_that_a_process_has_mapped_stays(cache: Path) -> None:
    library = cache / "torch-2.9-1" / "libcudasched_torch.so"
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ);"
        "f.close(); print('mapped', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "mapped\n"
        assert outcomes(clean())["torch-2.9-1"] == "used"
        assert library.exists()
    finally:
        holder.communicate("\n", timeout=PATIENCE_S)
    assert outcomes(clean())["torch-2.9-1"] == "unused"


def test_left_temporary_directories_go_and_a_living_programs_do_not() -> None:
    with killed_and_living() as paths:
        found = outcomes(clean())
        assert [found[path.name] for path in paths] == ["unused", "used"]
        assert [path.exists() for path in paths] == [False, True]


def test_records_of_a_trace_go_when_its_client_cannot_write_any_more(tmp_path: Path) -> None:
    traces = tmp_path / "run" / "traces"
    for name in ("old", "new"):
        (traces / name).mkdir(parents=True)
        (traces / name / "records").write_bytes(b"x")
        (traces / f"{name}.lock").touch()
    for path in (traces / "old", traces / "old" / "records"):
        os.utime(path, (0, 0))
    assert outcomes(clean()) == {"old": "unused", "new": "used"}
    assert left(traces) == {"new/records", "new.lock"}


def test_of_an_mps_daemon_that_is_gone_the_locks_stay(tmp_path: Path) -> None:
    """A program that waits for a lock whose file was removed would be alone with it."""
    mps = tmp_path / "run" / "mps"
    (mps / "log").mkdir(parents=True)
    for name in ("clients", "keeper", "log/control.log"):
        (mps / name).touch()
    claim = os.open(mps / "clients", os.O_RDWR)
    cleaning._by_file(claim)
    try:
        assert outcomes(clean()) == {"log": "used"}
    finally:
        os.close(claim)
    assert outcomes(clean()) == {"log": "unused"}
    assert left(mps) == {"clients", "keeper"}


def test_a_link_goes_and_not_its_target(cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (cache / "kernels").rename(target)
    (cache / "kernels").symlink_to(target)
    assert outcomes(clean())["kernels"] == "unused"
    assert left(target) == {"1.cubin"} and not (cache / "kernels").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_what_another_user_owns_is_refused(cudasched: Run, cache: Path, tmp_path: Path) -> None:
    os.chown(cache / "predictor-GPU-1.state", 54321, 54321)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.arbiter").touch()
    os.chown(tmp_path / "run", 54321, 54321)
    done = cudasched("clean")
    assert done.returncode == 1
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert len(refused) == 2 and all(line.endswith(": it belongs to user 54321") for line in refused)
    assert (tmp_path / "run" / "x.arbiter").exists() and (cache / "predictor-GPU-1.state").exists()
    assert not (cache / "kernels").exists()


def test_each_place_that_the_package_writes_to_is_known() -> None:
    """Guards against caches that are added and never cleaned: one that is new belongs into `cudasched.clean`."""
    package = Path(cleaning.__file__).parent
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if "cache_directory" in path.read_text()}
    assert users == {"_scratch.py", "clean.py", "kernels/_cache.py", "torch/_extension.py", "tune/database.py"}
