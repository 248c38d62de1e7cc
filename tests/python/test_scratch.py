"""Temporary directories go with their process, or with the next one of the same purpose."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import cudasched
import pytest
from cudasched._scratch import Scratch
from support import PATIENCE_S, killed_and_living


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_there_for_the_block_alone(temporary: Path) -> None:
    with Scratch("test") as directory:
        assert directory.is_dir() and directory.stat().st_mode & 0o777 == 0o700
        (directory / "file").write_text("x")
    assert not list(temporary.glob("*cudasched*"))


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(temporary: Path) -> None:
    with killed_and_living() as paths:
        assert all(path.is_dir() for path in paths)
        with Scratch("test"):
            assert [path.is_dir() for path in paths] == [False, True]
        with Scratch("other"):
            assert paths[1].is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing(command: str, tmp_path: Path, number: signal.Signals) -> None:
    arguments = [command, "demo", "--simulate", "--seconds", "60", "--output", str(tmp_path / "x.png")]
    demo = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def made() -> set[Path]:
        """The demo's own, which it holds open; other tests make some, too."""
        found = set()
        for descriptor in Path(f"/proc/{demo.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(Path(os.readlink(descriptor)))
        return {path for path in found if path.name.startswith("cudasched.demo")}

    began = time.monotonic()
    while len(made()) < 2 and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.05)
    directories = made()
    assert len(directories) >= 2
    demo.send_signal(number)
    output = demo.communicate(timeout=PATIENCE_S)[0]
    assert demo.returncode == 128 + number, output
    assert not [path for path in directories if path.exists()]


def test_a_kernel_that_is_compiled_keeps_its_directory_while_a_tuner_begins(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the name of a tuner's directories and no lock, so that the next tuner took it for one that was left."""
    from cudasched.tune import compile as compiling

    compiler = temporary / "nvcc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho image > "$2"\n')
    compiler.chmod(0o700)
    run = subprocess.run

    def beside_a_tuner(*arguments: Any, **options: Any) -> Any:
        for purpose in ("tune", "compile"):
            Scratch(purpose).close()
        return run(*arguments, **options)

    monkeypatch.setattr(compiling, "_nvcc", lambda: str(compiler))
    monkeypatch.setattr(subprocess, "run", beside_a_tuner)
    image, _ = compiling._by_nvcc(temporary / "kernel.cu", [])
    assert image == b"image\n"
    assert not list(temporary.glob("*cudasched*"))


def test_directories_of_such_names_are_all_of_this_kind() -> None:
    """`_sweep` goes by the name: one of another kind is locked by nobody."""
    package = Path(cudasched.__file__).parent
    others = [path for path in package.rglob("*.py") if 'prefix="cudasched.' in path.read_text()]
    assert others == []
