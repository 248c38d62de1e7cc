"""containers/start, which begins a pod's command, beside a Python that runs and one that does not."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
from conftest import ROOT

PROGRAMS = {
    "busybox": 'exec "$@"',
    "python3": 'test "$1 $2" = "-I -c" && exit "$PYTHON_FAILS"',
    "cudasched": 'echo "cudasched $*"',
}


@pytest.fixture
def start(tmp_path: pathlib.Path) -> pathlib.Path:
    """The script as it stands in an image, with stand-ins beside it."""
    for name, script in PROGRAMS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    made = tmp_path / "bin" / "start"
    made.write_text((ROOT / "containers/start").read_text().replace("/opt/cudasched", str(tmp_path)))
    return made


def begin(start: pathlib.Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", start, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_a_command_starts_under_cudasched(start: pathlib.Path) -> None:
    done = begin(start, "python", "a b", PYTHON_FAILS="0")
    assert (done.stdout, done.stderr) == ("cudasched run -- python a b\n", "")


def test_a_command_starts_by_itself_where_python_does_not(start: pathlib.Path) -> None:
    done = begin(start, "printf", "%s|", "a b", "c", PYTHON_FAILS="127")
    assert done.stdout == "a b|c|"
    assert done.stderr.startswith("cudasched: warning: printf runs unmanaged: this image has no glibc, or one older")
    assert begin(start, "no-such-program", PYTHON_FAILS="127").returncode == 127


@pytest.mark.parametrize(("own", "used"), [({}, f"/run/cudasched/{os.getuid()}"), ({"CUDASCHED_RUN_DIR": "/d"}, "/d")])
def test_users_have_directories_of_their_own(start: pathlib.Path, own: dict[str, str], used: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDASCHED_RUN_DIR"} | own
    done = subprocess.run(
        ["sh", start, "printenv", "CUDASCHED_RUN_DIR"],
        env={**environment, "PYTHON_FAILS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{used}\n"
