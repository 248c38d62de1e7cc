"""Nothing that a user can do to a command ends in a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cudasched import cli
from cudasched.errors import ConfigError, Error
from support import PATIENCE_S, ROOT, Run


def _shell(command: str, arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$0" {arguments}', command], capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("arguments", ["status", "status --json", "--help", "--version"])
def test_an_output_that_is_full_is_one_line(command: str, simulated: Path, arguments: str) -> None:
    done = _shell(command, f"{arguments} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "cudasched: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", ["status", "status --json", "--help", "--version"])
def test_an_output_that_is_closed_is_one_line(command: str, simulated: Path, arguments: str) -> None:
    done = _shell(command, f"{arguments} >&-")
    assert done.returncode == 1
    assert done.stderr == "cudasched: error: the output cannot be written: standard output is closed\n"


def test_closed_standard_files_are_the_programs_too(command: str, simulated: Path) -> None:
    """The program gets what the caller gave, and no file of ours in the place of one."""
    done = _shell(command, "run -- sh -c 'ls /proc/self/fd >&2; exit 3' >&- <&-")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert _shell(command, "status 2>&- >/dev/full").returncode == 1


def test_a_reader_that_leaves_is_no_error(command: str, simulated: Path) -> None:
    done = _shell(command, "--help | head -n 1")
    assert done.stderr == ""


def test_a_long_run_directory_is_one_line(cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (200, 3000, 5000):
        monkeypatch.setenv("CUDASCHED_RUN_DIR", "/tmp/" + "/".join(["d" * 100] * (length // 101)))
        for arguments in (["status"], ["status", "--json"]):
            done = cudasched(*arguments)
            assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1, done.stderr


def test_a_run_directory_that_is_none_is_said(
    cudasched: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "a file"))
    (tmp_path / "a file").write_text("")
    done = cudasched("status")
    assert done.returncode == 1 and "a file" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_the_data_set_of_advise_and_simulate_may_be_damaged(cudasched: Run, simulated: Path, tmp_path: Path) -> None:
    launcher = str(Path(__file__).with_name("launcher.py"))
    cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, launcher, "50")
    whole = bytearray((tmp_path / "data.parquet").read_bytes())
    for place in range(8, len(whole) - 8, len(whole) // 6):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "damaged.parquet").write_bytes(damaged)
        for arguments in (["advise", "--data", "damaged.parquet"], ["simulate", "damaged.parquet", "--seconds", "0.1"]):
            done = cudasched(*arguments)
            assert "Traceback" not in done.stderr and "mistake in cudasched" not in done.stderr, done.stderr
            if done.returncode:
                assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (lambda: ConfigError("no"), "no", 2),
        (lambda: Error("no"), "no", 1),
        (lambda: OSError(28, "No space left on device"), "the output cannot be written: No space left on device", 1),
        (lambda: FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory", 1),
        (lambda: MemoryError(), "there is not enough memory", 1),
        (lambda: RecursionError("deep"), "a mistake in cudasched (RecursionError: deep)", 1),
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a mistake in cudasched (UnicodeDecodeError", 1),
    ],
)
def test_every_error_has_words_and_a_code(
    error: Callable[[], Exception],
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> None:
        raise error()

    monkeypatch.setattr(cli, "_call", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cudasched: error: ") and said in line


def test_a_message_moves_no_cursor(cudasched: Run, simulated: Path) -> None:
    done = cudasched("run", "--", "./no\x1b[2J\nsuch\u202e")
    assert done.returncode == 127
    assert done.stderr == "cudasched: error: no such program: ./no\\x1b[2J such\\u202e\n"


def test_training_without_xgboost_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xgboost.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module in ("train", "export", "evaluate"):
        command = [sys.executable, "-m", f"training.{module}", "--data", "x", "--out", "y"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
        assert done.returncode == 1
        assert done.stderr == "training needs xgboost (there is none): pip install '.[training]' in the clone\n"
