"""Recording programs of other libraries: over the simulated driver, with the stand-in for CUPTI."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.compute as pc
import pytest
from cudasched import collect, hook

from training import record
from training.data import table_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvidia = importlib.util.find_spec("nvidia")
    homes = [Path(home) / "cu13/include" for home in (nvidia.submodule_search_locations or [] if nvidia else [])]
    compiler = shutil.which("g++")
    if compiler is None or not any((home / "cupti.h").is_file() for home in homes):
        pytest.skip("needs g++ and the headers of CUPTI: pip install 'nvidia-cuda-cupti==13.0.*'")
    library = tmp_path_factory.mktemp("cupti") / "fake_cupti.so"
    includes = [option for home in homes if home.is_dir() for option in ("-isystem", str(home))]
    options = ["-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *includes]
    source = str(ROOT / "tests/csrc/telemetry/fake_cupti.cpp")
    subprocess.run([compiler, *options, source, "-o", str(library)], check=True, timeout=PATIENCE_S)
    return library


@pytest.fixture
def machine(fake_cupti: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the simulated driver."""
    device = tmp_path / "device"
    device.mkdir(mode=0o700)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDASCHED_")},
        "CUDASCHED_DRIVER": str(hook.locate().simulated_driver),
        "CUDASCHED_SIM_DIR": str(device),
        "CUDASCHED_RUN_DIR": str(tmp_path / "run"),
        "CUDASCHED_CACHE_DIR": "off",
        "CUDASCHED_CUPTI": str(fake_cupti),
        "PYTHONPATH": str(Path(__file__).parent),
        "LD_PRELOAD": "",
    }


def run(machine: dict[str, str], out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.record", "--out", str(out), "--programs", "simulated_program", *options]
    return subprocess.run(
        command, cwd=ROOT, env=machine, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_machine_without_a_driver_is_one_line(machine: dict[str, str], tmp_path: Path) -> None:
    done = run({**machine, "CUDASCHED_DRIVER": str(tmp_path / "none")}, tmp_path / "out")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("not recorded: ")
    assert "Traceback" not in done.stderr


def test_a_program_is_recorded_by_both_times_packed_and_unpacked(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, tmp_path / "out", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["simulated_program.tar.xz"]
    with tarfile.open(tmp_path / "out/simulated_program.tar.xz") as archive:
        said = json.loads(archive.extractfile("record.json").read())  # type: ignore[union-attr]
    assert (said["complete"], said["parts"], said["rows"], said["exit_code"]) == (True, 2, 50, 0)
    assert said["failed"] == {"refused": "RuntimeError: not supported here"}

    assert record.unpack(tmp_path / "out", tmp_path / "data") == {"simulated_program": 50}
    table = collect.read(tmp_path / "data/libraries.parquet")
    assert set(table["label"].to_pylist()) == {"program:simulated_program|some", "program:simulated_program|more"}
    assert table["elapsed_ns"].null_count == 0
    assert pc.min(table["elapsed_ns"]).as_py() >= 20_000  # of kernels of 20 us; nothing is taken off
    assert len(table_of(tmp_path / "data/libraries.parquet")) == 50
    assert (table.schema.metadata or {})[b"training.empty_pair_ns.simulated_program"].isdigit()
    # What events add to a kernel, and by how much that varies.
    assert int((table.schema.metadata or {})[b"training.event_gap_ns.simulated_program"]) >= -500
    assert int((table.schema.metadata or {})[b"training.event_spread_ns.simulated_program"]) >= 0


def test_what_is_whole_is_not_recorded_again(machine: dict[str, str], tmp_path: Path) -> None:
    assert run(machine, tmp_path, "--tiny").returncode == 0
    before = (tmp_path / "simulated_program.tar.xz").stat().st_mtime_ns
    again = run(machine, tmp_path, "--tiny")
    assert again.returncode == 0
    assert "recorded already" in again.stdout
    assert (tmp_path / "simulated_program.tar.xz").stat().st_mtime_ns == before
    assert run(machine, tmp_path, "--tiny", "--again").returncode == 0
    assert (tmp_path / "simulated_program.tar.xz").stat().st_mtime_ns > before


def test_of_a_program_that_hangs_what_it_recorded_is_kept_and_it_is_recorded_again(
    machine: dict[str, str], tmp_path: Path
) -> None:
    done = run(machine, tmp_path / "out", "--seconds", "1", "--grace", "4")
    assert "20 launches" in done.stdout, done.stdout + done.stderr
    assert not record.is_whole(tmp_path / "out/simulated_program.tar.xz")
    assert record.unpack(tmp_path / "out", tmp_path / "data") == {"simulated_program": 20}


def test_a_cut_or_foreign_archive_is_not_whole(tmp_path: Path) -> None:
    assert not record.is_whole(tmp_path / "none.tar.xz")
    (tmp_path / "cut.tar.xz").write_bytes(b"\xfd7zXZ\0 and no more")
    assert not record.is_whole(tmp_path / "cut.tar.xz")
    with pytest.raises(FileNotFoundError, match="no recorded launches"):
        record.unpack(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize("text", ["[]", "5", "null", '"complete"'])
def test_a_record_that_is_no_object_is_not_whole(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals/record.json").write_text(text)
    record.pack(tmp_path / "journals", tmp_path / "some.tar.xz")
    assert not record.is_whole(tmp_path / "some.tar.xz")
    assert record.main(["--unpack", str(tmp_path), "--out", str(tmp_path / "data")]) == 1
    assert "some.tar.xz is damaged (record.json is no object)" in capsys.readouterr().err


def test_a_program_without_launches_is_left_out(machine: dict[str, str], tmp_path: Path) -> None:
    """Its library is not installed, say."""
    done = run(machine, tmp_path / "out", "--tiny", "--programs", "simulated_program,not_installed")
    assert done.returncode == 1 and "not_installed: 0 launches" in done.stdout, done.stdout + done.stderr
    said = {"simulated_program": 50, "not_installed": 0}
    assert record.unpack(tmp_path / "out", tmp_path / "data") == said
    assert len(collect.read(tmp_path / "data/libraries.parquet")) == 50


def test_a_cut_archive_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals/record.json").write_bytes(os.urandom(1 << 16))
    record.pack(tmp_path / "journals", tmp_path / "some.tar.xz")
    whole = (tmp_path / "some.tar.xz").read_bytes()
    for cut in (0, 20, len(whole) // 2):
        (tmp_path / "some.tar.xz").write_bytes(whole[:cut])
        assert record.main(["--unpack", str(tmp_path), "--out", str(tmp_path / "data")]) == 1
        assert f"not unpacked: {tmp_path}/some.tar.xz is damaged" in capsys.readouterr().err


def test_a_program_that_has_recorded_enough_ends_and_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "endless.py").write_text(
        "import itertools\ndef parts(tiny):\n    for i in itertools.count():\n        yield str(i), lambda: None\n"
    )
    calls: list[str] = []
    done = record.run("endless", 3600, False, calls.append, lambda: len(calls) >= 5)
    assert done["complete"] and done["parts"] == 5


def test_parts_of_the_gpu_are_recorded_apart_from_libraries(machine: dict[str, str], tmp_path: Path) -> None:
    assert run(machine, tmp_path / "out", "--tiny").returncode == 0
    packed = tmp_path / "out/simulated_program.tar.xz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "journals", filter="data")
    said = json.loads((tmp_path / "journals/record.json").read_text()) | {"program": record.SM_COUNTS}
    (tmp_path / "journals/record.json").write_text(json.dumps(said))
    record.pack(tmp_path / "journals", tmp_path / "out/sm_counts.tar.xz")
    assert record.unpack(tmp_path / "out", tmp_path / "data") == {"simulated_program": 50, "sm_counts": 50}
    assert len(collect.read(tmp_path / "data/libraries.parquet")) == 50
    assert len(collect.read(tmp_path / "data/sm_counts.parquet")) == 50


def test_launches_on_parts_of_the_multiprocessors_are_timed_by_both(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, tmp_path / "out", "--programs", "simulated_parts")
    assert done.returncode == 0, done.stdout + done.stderr
    record.unpack(tmp_path / "out", tmp_path / "data")
    table = collect.read(tmp_path / "data/libraries.parquet")
    counted = {text: table["label"].to_pylist().count(text) for text in set(table["label"].to_pylist()) - {""}}
    assert counted == {f"program:simulated_parts|{count}|work": 10 for count in (16, 64, 132)}
    assert len(set(table["stream"].to_pylist())) == 3
    assert table["elapsed_ns"].null_count == table["duration_ns"].null_count == 0


@pytest.mark.parametrize("name", record.PROGRAMS)
def test_programs_compile_and_share_nothing_with_the_sweeps(name: str) -> None:
    source = (ROOT / f"training/libraries/{name}.py").read_text()
    compile(source, name, "exec")
    for module in ("training.operations", "training.models", "training.programs", "training.triton_kernels", "demo"):
        assert module not in source


def test_what_runs_on_parts_shares_nothing_with_the_sweeps() -> None:
    source = (ROOT / "training/sm_counts.py").read_text()
    compile(source, "sm_counts", "exec")
    assert "training.operations" not in source and "training.models" not in source
