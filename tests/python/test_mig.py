"""A MIG instance is a device of its own, with its own UUID, so its clients meet in a table of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Run

LAUNCH = (
    "import cudasched, launcher\n"
    "cudasched.set_class('latency')\n"
    "gpu = launcher.Gpu(); gpu.launch(); gpu.synchronize()\n"
    "print(*(f'{device.uuid} {len(device.clients)}' for device in cudasched.status()), sep=chr(10))"
)


def test_each_instance_has_a_table_that_bears_its_name(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Run
) -> None:
    gpu, _ = python(LAUNCH).stdout.split()
    monkeypatch.setenv("CUDASCHED_SIM_MIG", "1")
    first = python(LAUNCH)
    assert first.stderr == ""
    # The one before has gone; its table is there.
    one, clients = next(line.split() for line in first.stdout.splitlines() if line.startswith("MIG-"))
    assert (one.removeprefix("MIG-"), clients) == (gpu.removeprefix("GPU-"), "1")
    other = tmp_path / "other-instance"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("CUDASCHED_SIM_DIR", str(other))
    tables = [line.split()[0] for line in python(LAUNCH).stdout.splitlines()]
    assert tables[0] == gpu and one in tables[1:] and len(set(tables)) == 3
    assert {path.stem for path in (tmp_path / "run").glob("*.arbiter")} == set(tables)


NEIGHBOURS = (
    LAUNCH
    + """
from cudasched.tune._bench import Neighbours
from cudasched.tune._driver import Device
mine = Device().uuid
print(mine, *(len(Neighbours(uuid).look()[1]) for uuid in (mine, "MIG-of-another-gpu")))
"""
)


def test_the_tuner_looks_at_the_table_of_its_own_instance_alone(
    simulated: Path, monkeypatch: pytest.MonkeyPatch, python: Run
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    monkeypatch.setenv("CUDASCHED_SIM_MIG", "1")
    done = python(NEIGHBOURS)
    assert done.stderr == ""
    table, mine = done.stdout.splitlines()
    assert mine == f"{table.split()[0]} 1 0"
