"""Tests on the real driver; skipped, with the reason, where there is none. Each behaviour has a test without it too."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cudasched import errors, hook

PROGRAMS = Path(__file__).resolve().parent / "programs"
PATIENCE_S = 240


def _why_not() -> str:
    try:
        hook.load_core().find_driver()
    except errors.HookError as error:
        return f"needs a GPU: {error}"
    probe = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode != 0:
        return "needs PyTorch with CUDA, and a GPU"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if mine else ""
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `alone` runs while no other of these does, whatever process runs it.

    Others take the first lock in turn and pass; one that is alone keeps it while the tests before it end.
    """
    mine = Path(tempfile.gettempdir(), f"cudasched-tests-gpu-{os.getuid()}")
    with mine.open("w") as gpu, mine.with_suffix(".turn").open("w") as turn:
        alone = request.node.get_closest_marker("alone") is not None
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program of tests/gpu/programs, managed if `client_class` is given; kills what still runs at the end."""
    running: list[subprocess.Popen[str]] = []
    environment = dict(os.environ, CUDASCHED_RUN_DIR=str(tmp_path / "run"), CUDASCHED_LOG="warning")

    def begin(
        program: str,
        *arguments: str,
        client_class: str = "",
        options: tuple[str, ...] = (),
        settings: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAMS / program), *arguments]
        if client_class:
            command = [sys.executable, "-m", "cudasched", "run", "--class", client_class, *options, "--", *command]
        process = subprocess.Popen(
            command,
            env={**environment, **(settings or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


Collect = Callable[..., Path]


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collect:
    """Runs a program of tests/gpu/programs to its end with its launches recorded. Returns the data set."""
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("CUDASCHED_CACHE_DIR", "off")

    def run(program: str, *arguments: str, options: tuple[str, ...] = ()) -> Path:
        data = tmp_path / f"{Path(program).stem}-{len(list(tmp_path.iterdir()))}.parquet"
        command = [sys.executable, "-m", "cudasched", "collect", "-o", str(data), "--quiet", *options, "--"]
        done = subprocess.run(
            [*command, sys.executable, str(PROGRAMS / program), *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr
        return data

    return run


def run_program(program: str, *arguments: str) -> str:
    """Runs a program of tests/gpu/programs as it is, to its end. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def gpus() -> int:
    """How many there are here."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def finish(process: subprocess.Popen[str]) -> str:
    """What the program printed, once it has ended well."""
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output
    return output


def line_of(process: subprocess.Popen[str], start_of_line: str) -> str:
    """Reads the program's output up to a line that begins so."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(start_of_line):
            return line
    raise AssertionError(f"the program ended before it said {start_of_line!r}:\n{''.join(seen)}")
