"""How scripts/common.sh gets the system packages that a machine lacks, with stand-ins for apt-get, sudo and id."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import ROOT, run

TOOLS = ["bash", "cat", "cut", "dirname", "env", "grep", "head", "nproc", "sed", "sh", "true", "uname"]


class Machine:
    """A PATH without a compiler, where apt-get and sudo only write down what they were asked."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "log"
        self.log.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.stand_in("apt-get", f'echo "apt-get $*" >>{self.log}')

    def stand_in(self, name: str, text: str) -> None:
        """Puts a shell script on the PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def set_up(self) -> subprocess.CompletedProcess[str]:
        """Asks for what a build needs."""
        environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
        return subprocess.run(
            ["bash", "-c", f"source {ROOT}/scripts/common.sh; ensure_system_packages build"],
            env=environment | {"PATH": str(self.bin)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_root_installs(machine: Machine) -> None:
    machine.stand_in("id", "echo 0")
    done = machine.set_up()
    asked = machine.log.read_text().splitlines()
    assert asked[0].startswith("apt-get update")
    assert asked[1].startswith("apt-get install -y")
    assert "g++" in asked[1].split()
    # apt-get installed nothing here, which must not pass for success.
    assert done.returncode != 0
    assert "no C++ compiler" in done.stderr


def test_user_with_sudo_installs_by_it(machine: Machine) -> None:
    machine.stand_in("id", "echo 1000")
    machine.stand_in("sudo", f'echo "sudo $*" >>{machine.log}; shift; exec "$@"')
    machine.set_up()
    asked = machine.log.read_text().splitlines()
    assert asked[0] == "sudo -n true"
    assert any(line.startswith("sudo -n apt-get update") for line in asked)
    assert any(line.startswith("sudo -n env DEBIAN_FRONTEND=noninteractive apt-get install") for line in asked)


@pytest.mark.parametrize("sudo", [False, True], ids=["no sudo", "sudo wants a password"])
def test_user_without_rights_is_told_the_command(machine: Machine, sudo: bool) -> None:
    machine.stand_in("id", "echo 1000")
    if sudo:
        machine.stand_in("sudo", "exit 1")
    done = machine.set_up()
    assert done.returncode != 0
    assert machine.log.read_text() == ""
    assert "apt-get update && apt-get install -y --no-install-recommends g++" in done.stderr


def test_nothing_is_installed_where_nothing_lacks(machine: Machine) -> None:
    machine.stand_in("id", "echo 0")
    machine.stand_in("g++", 'case "$1" in -dumpversion) echo 12;; *) echo "g++ 12";; esac')
    python = shutil.which("python3")
    (machine.bin / "python3").symlink_to(str(python))
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert machine.log.read_text() == ""


def test_old_compiler_counts_as_none(machine: Machine) -> None:
    machine.stand_in("id", "echo 1000")
    machine.stand_in("g++", 'case "$1" in -dumpversion) echo 11;; *) echo "g++ 11";; esac')
    done = machine.set_up()
    assert done.returncode != 0
    assert "apt-get install -y --no-install-recommends g++" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("test.sh lint pyhton", "error: no stage 'pyhton'; there are lint cpp "),
        ("roots.sh jamy", "error: no suite 'jamy'; there are bookworm, "),
    ],
)
def test_a_misspelt_word_is_refused_before_any_work(machine: Machine, command: str, said: str) -> None:
    """Guards against a stage that ran for minutes before the next one was unknown, and 0 roots that passed."""
    script, *words = command.split()
    done = subprocess.run(
        [ROOT / "scripts" / script, *words],
        env={**os.environ, "PATH": str(machine.bin)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, machine.log.read_text()) == (1, "", "")
    assert done.stderr.startswith(said)


def test_requirements_are_those_of_pyproject() -> None:
    printed = run(["python", "scripts/requirements.py", "build", "run", "test"], cwd=ROOT).splitlines()
    names = {line.split("=")[0].split(">")[0] for line in printed}
    assert {
        "scikit-build-core",
        "pybind11",
        "nvidia-cuda-cupti",
        "cmake",
        "ninja",
        "typer",
        "pytest",
        "matplotlib",
    } <= names
    assert not any(name.startswith("cudasched") for name in names)
