"""`cudasched doctor`: what it finds, and that every problem has its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cudasched import doctor, hook
from support import Run

NAMES = ["installation", "hook", "driver", "GPU", "run directory", "settings", "MPS"]
NAMES += ["time slices", "PyTorch", "CUPTI", "extras"]


@pytest.fixture(autouse=True)
def own_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def found(name: str) -> list[doctor.Check]:
    return list(doctor._CHECKS[name]())


def test_all_is_looked_at_and_every_problem_has_a_remedy(cudasched: Run, simulated: Path) -> None:
    done = cudasched("doctor", "--json")
    said = json.loads(done.stdout)
    assert (said["kind"], said["schema_version"]) == ("doctor", 1)
    checks = said["data"]
    assert sorted({check["name"] for check in checks}) == sorted(NAMES)
    assert all(set(check) == {"name", "outcome", "found", "remedy"} and check["found"] for check in checks)
    assert {check["outcome"] for check in checks} <= {"ok", "note", "problem"}
    problems = [check for check in checks if check["outcome"] == "problem"]
    assert all(check["remedy"] for check in problems)
    assert done.returncode == (1 if problems else 0)
    by_name = {check["name"]: check for check in checks}
    assert by_name["hook"]["outcome"] == "ok", by_name["hook"]
    assert "the simulated one" in by_name["driver"]["found"]


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_table_fits_its_terminal(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = cudasched("doctor")
    assert max(map(len, done.stdout.splitlines())) <= int(columns)
    assert all(name in done.stdout for name in NAMES)
    assert done.stdout.splitlines()[-1].split()[-1] in ("problem", "problems")


def test_without_a_driver_it_says_where_it_looked(cudasched: Run, no_driver: Path) -> None:
    done = cudasched("doctor", "--json")
    assert done.returncode == 1
    (driver,) = [check for check in json.loads(done.stdout)["data"] if check["name"] == "driver"]
    assert driver["outcome"] == "problem" and str(no_driver) in driver["found"]


@pytest.mark.parametrize(
    ("name", "release"),
    [("libcuda.so.580.65.06", "580.65.06"), ("libcuda.so.535.104", "535.104"), ("libcuda.so.1", "")],
)
def test_a_drivers_release_is_read_off_its_file(tmp_path: Path, name: str, release: str) -> None:
    (tmp_path / name).touch()
    if name != "libcuda.so.1":
        (tmp_path / "libcuda.so.1").symlink_to(name)
    said = doctor.driver_version(str(tmp_path / "libcuda.so.1"))
    assert said == release or (not release and Path("/proc/driver/nvidia/version").exists())


def test_a_driver_that_is_too_old_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "libcuda.so.535.104.05"
    old.touch()

    class Core:
        @staticmethod
        def find_driver() -> str:
            return str(old)

    monkeypatch.setattr(hook, "load_core", lambda: Core)
    (check,) = found("driver")
    assert check.outcome == "problem" and "535.104.05" in check.found and "550" in check.remedy


def test_a_driver_is_as_old_as_its_cuda(monkeypatch: pytest.MonkeyPatch, simulated: Path, tmp_path: Path) -> None:
    """Tegra's releases have other numbers: 540 has CUDA 12.6."""
    driver, files = tmp_path / "libcuda.so.540.4", hook.locate()
    driver.symlink_to(simulated)

    class Core:
        @staticmethod
        def find_driver() -> str:
            return str(driver)

    monkeypatch.setattr(hook, "load_core", lambda: Core)
    monkeypatch.setattr(doctor, "driver_version", lambda path: "540.4")
    monkeypatch.setattr(hook, "locate", lambda: dataclasses.replace(files, simulated_driver=tmp_path))
    for cuda, outcome in (("12060", "ok"), ("12020", "problem")):
        monkeypatch.setenv("CUDASCHED_SIM_DRIVER_VERSION", cuda)
        (check,) = found("driver")
        assert check.outcome == outcome and "540.4" in check.found


def test_an_integrated_gpu_is_named_with_the_hosts_memory(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_INTEGRATED", "1")
    checks = json.loads(cudasched("doctor", "--json").stdout)["data"]
    (gpu,) = [check for check in checks if check["name"] == "GPU"]
    assert gpu["outcome"] == "note" and "docs/jetson.md" in gpu["remedy"]
    assert re.fullmatch(
        r"cudasched simulated GPU: integrated, with the host's memory, \d+\.\d GiB available", gpu["found"]
    )


def test_a_run_directory_without_a_parent_is_told_from_one_that_may_not_be_made(
    own_run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(own_run_directory / "none" / "below"))
    (check,) = found("run directory")
    assert check.outcome == "problem" and check.found.endswith(f"there is no directory {own_run_directory / 'none'}")


def test_a_run_directory_that_cannot_serve_is_a_problem(own_run_directory: Path) -> None:
    (check,) = found("run directory")
    assert check.outcome == "ok" and "made by the first program" in check.found
    own_run_directory.write_text("")
    (check,) = found("run directory")
    assert check.outcome == "problem" and "is no directory" in check.found and "CUDASCHED_RUN_DIR" in check.remedy
    own_run_directory.unlink()
    own_run_directory.mkdir(mode=0o700)
    (check,) = found("run directory")
    assert check.outcome == "ok"
    own_run_directory.chmod(0o770)
    (check,) = found("run directory")
    assert check.outcome == "problem" and "written by other users" in check.found and "chmod go-w" in check.remedy
    own_run_directory.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(own_run_directory, 65534, 65534)
        (check,) = found("run directory")
        assert check.outcome == "problem" and "belongs to user 65534" in check.found


def test_a_link_to_a_run_directory_is_a_problem_as_programs_refuse_it(own_run_directory: Path) -> None:
    own_run_directory.with_name("elsewhere").mkdir(mode=0o700)
    own_run_directory.symlink_to("elsewhere")
    (check,) = found("run directory")
    assert check.outcome == "problem" and "is a link" in check.found and "CUDASCHED_RUN_DIR" in check.remedy


def test_settings_that_are_refused_or_switch_it_off_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_LEAD_US", "soon")
    assert any(check.outcome == "problem" and "LEAD_US" in check.found for check in found("settings"))
    monkeypatch.delenv("CUDASCHED_LEAD_US")
    monkeypatch.setenv("CUDASCHED_OFF", "yes")
    assert any(check.outcome == "problem" and "CUDASCHED_OFF" in check.remedy for check in found("settings"))


def test_what_is_not_installed_is_a_note_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda distribution: "")
    (extras,) = found("extras")
    assert extras.outcome == "note" and "pip install" in extras.remedy and "advise" in extras.remedy
    (torch,) = found("PyTorch")
    assert torch.outcome == "note" and sys.executable in torch.found


def test_every_extra_is_looked_at() -> None:
    """Guards against extras that were added and that the doctor did not know."""
    offered = set(metadata.metadata("cudasched").get_all("Provides-Extra") or []) - {"test", "lint", "release", "site"}
    wanted = doctor._extras_of(metadata.requires("cudasched") or [])
    assert set(wanted) == offered and len(offered) >= 11
    assert set(wanted["baseline"]) == {"pyarrow", "numpy", "jinja2", "scipy"}
    assert {"fastapi", "prometheus-client"} <= set(wanted["serve"])


@pytest.mark.parametrize(
    ("nodes", "outcome"),
    [(("nvidiactl", "nvidia-uvm", "nvidia0"), "ok"), (("nvidiactl", "nvidia-uvm"), "problem"), (("dxg",), "ok")],
    ids=["a GPU", "a container without one", "WSL"],
)
def test_a_gpu_has_a_node(
    nodes: tuple[str, ...], outcome: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setattr(doctor, "_DEV", tmp_path)
    (check,) = doctor._devices()
    assert check.outcome == outcome


@pytest.mark.parametrize("visible", [None, "GPU-0"])
def test_a_driver_that_gives_programs_no_gpu_is_a_problem(
    visible: str | None, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "_DEV", tmp_path)
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (check,) = doctor._devices()
    assert check.outcome == "problem" and "CUDA_ERROR_" in check.found
    assert ("CUDA_VISIBLE_DEVICES='GPU-0'" in check.found) == (visible is not None)


def test_neither_the_import_nor_the_first_region_loads_pydantic(python: Run, simulated: Path) -> None:
    done = python(
        "import sys, cudasched\n"
        "with cudasched.region('latency', slo_ms=5): pass\n"
        "print([name for name in ('pydantic', 'typer', 'rich', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr
