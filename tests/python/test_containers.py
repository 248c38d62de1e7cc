"""Programs in namespaces of their own, as containers have them: who meets whom, and who is said to be on the GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cudasched import observe
from support import ROOT, Run

parser = pytest.importorskip("prometheus_client.parser")

HOLD = """
import sys, cudasched, launcher
cudasched.set_class(sys.argv[1])
gpu = launcher.Gpu()
gpu.launch(3)
gpu.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bwrap() -> str:
    program = shutil.which("bwrap")
    if program is None:
        pytest.skip("bubblewrap is not installed")
    if subprocess.run([program, "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]).returncode != 0:
        pytest.skip("this machine does not allow namespaces")
    return program


@contextmanager
def container(bwrap: str, tmp_path: Path, client_class: str, run: str) -> Iterator[int]:
    """A client in mount and pid namespaces of its own; its pid as this namespace numbers it."""
    command = [
        bwrap,
        "--unshare-pid",
        "--die-with-parent",
        "--bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev-bind",
        "/dev",
        "/dev",
    ]
    command += ["--tmpfs", "/dev/shm", "--setenv", "CUDASCHED_RUN_DIR", run, "--setenv", "CUDASCHED_NAME", client_class]
    command += [sys.executable, "-c", HOLD, client_class]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin and running.stdout
        assert running.stdout.readline() == "ready\n"
        # bwrap, its init of the namespace, the program
        yield descendants(running.pid)[-1]
        running.stdin.close()


def descendants(pid: int) -> list[int]:
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found += [child, *descendants(child)]
    return found


def status(cudasched: Run) -> tuple[str, dict[str, object]]:
    shown = cudasched("status", env={**os.environ, "COLUMNS": "300"})
    (device,) = json.loads(cudasched("status", "--json").stdout)["data"]
    return shown.stdout, device


def test_two_containers_that_share_a_run_directory_meet(
    simulated: Path, bwrap: str, tmp_path: Path, nvml: Callable[..., None], cudasched: Run
) -> None:
    run = os.environ["CUDASCHED_RUN_DIR"]
    with ExitStack() as both:
        pids = [both.enter_context(container(bwrap, tmp_path, name, run)) for name in ("latency", "best_effort")]
        nvml(*((pid, 2 << 30) for pid in pids), used=5 << 30)
        text, device = status(cudasched)
        assert {client["client_class"] for client in device["clients"]} == {"latency", "best_effort"}  # type: ignore[attr-defined]
        # Each is shown by the pid that it knows itself by; the two may be the same.
        assert len({client["process"] for client in device["clients"]}) == 2  # type: ignore[attr-defined]
        assert "not under cudasched" not in text and "another run directory" not in text and "unaccounted" not in text
        gpu = device["gpu"]
        assert isinstance(gpu, dict) and gpu["foreign"] == [] and gpu["power_w"] is None and gpu["sm_ratio"] == 0.93
        assert {share["client_class"] for share in gpu["shares"]} <= {"latency", "best_effort", "mixed"}
        assert sum(share["memory_bytes"] for share in gpu["shares"]) == 4 << 30


def test_one_with_a_run_directory_of_its_own_is_named(
    simulated: Path, bwrap: str, tmp_path: Path, nvml: Callable[..., None], cudasched: Run
) -> None:
    run = os.environ["CUDASCHED_RUN_DIR"]
    with ExitStack() as both:
        here = both.enter_context(container(bwrap, tmp_path, "latency", run))
        there = both.enter_context(container(bwrap, tmp_path, "best_effort", "/dev/shm/run"))
        plain = both.enter_context(subprocess.Popen(["sleep", "1000"]))
        both.callback(plain.kill)
        unseen = 2**22 + 1  # of a namespace that this process does not see
        nvml((here, 1 << 30), (there, 2 << 30), (plain.pid, 3 << 30), (unseen, 4 << 30), used=10 << 30)
        text, device = status(cudasched)
        (client,) = device["clients"]  # type: ignore[misc]
        assert client["client_class"] == "latency"
        assert f"({there}, 2.0 GiB) is under cudasched with another run directory" in text
        assert f"sleep ({plain.pid}, 3.0 GiB) is not under cudasched" in text
        assert "unaccounted memory: 4.0 GiB" in text
        gpu = device["gpu"]
        assert isinstance(gpu, dict)
        assert {each["pid"]: each["elsewhere"] for each in gpu["foreign"]} == {there: True, plain.pid: False}
        shares = {share["client_class"]: share["memory_bytes"] for share in gpu["shares"]}
        assert shares == {"latency": 1 << 30, "foreign": 5 << 30}
        shown = {
            (sample.name, sample.labels.get("class", "")): sample.value
            for family in parser.text_string_to_metric_families(cudasched("metrics", "show").stdout)
            for sample in family.samples
        }
        assert shown["cudasched_gpu_foreign_processes", ""] == 2
        assert shown["cudasched_gpu_unaccounted_memory_bytes", ""] == 4 << 30
        assert shown["cudasched_class_memory_bytes", "latency"] == 1 << 30
        assert shown["cudasched_class_sm_ratio", "latency"] == 0.4
        assert shown["cudasched_gpu_sm_clock_hertz", ""] == 1.98e9
        assert ("cudasched_gpu_power_watts", "") not in shown, "this GPU does not say"


def test_a_list_without_anybody_is_memory_unaccounted_for(
    simulated: Path, nvml: Callable[..., None], cudasched: Run, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "latency"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        nvml(used=3 << 30)
        text, _ = status(cudasched)
        assert "unaccounted memory: 3.0 GiB" in text
        nvml((program.pid, 3 << 30), used=3 << 30)
        text, _ = status(cudasched)
        assert "unaccounted" not in text and "not under cudasched" not in text
        program.stdin.close()


def test_without_nvml_nothing_is_said(simulated: Path, cudasched: Run) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "latency"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        if observe.gpus(*observe.clients()):
            pytest.skip("this machine has NVML, and a GPU of that name")
        text, device = status(cudasched)
        assert device["gpu"] is None and "unaccounted" not in text
        program.stdin.close()


def manifests() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The pod of docs/containers.md, and the volumes that two pods have in its place."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
    pod, volumes = (yaml.safe_load(part.split("```")[0]) for part in text.split("```yaml\n")[1:])
    return pod, volumes["volumes"]


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_the_manifests_meet_the_schema_of_kubernetes(version: str) -> None:
    """Strictly: a misspelt field in a manifest is silently ignored by lenient tools."""
    schema = pytest.importorskip("kubernetes_validate")
    pod, volumes = manifests()
    schema.validate(pod, version, strict=True)
    schema.validate({**pod, "spec": {**pod["spec"], "volumes": volumes}}, version, strict=True)
    pod["spec"]["containers"][0]["volumeMount"] = pod["spec"]["containers"][0].pop("volumeMounts")
    with pytest.raises(schema.ValidationError):
        schema.validate(pod, version, strict=True)


def test_the_containers_of_the_manifest_share_a_run_directory() -> None:
    pod, _ = manifests()
    assert (pod["apiVersion"], pod["kind"], set(pod)) == ("v1", "Pod", {"apiVersion", "kind", "metadata", "spec"})
    spec = pod["spec"]
    assert set(spec) == {"securityContext", "volumes", "containers"}
    (volume,) = spec["volumes"]
    assert volume == {"name": "cudasched", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}
    places = set()
    for each in spec["containers"]:
        assert set(each) <= {"name", "image", "command", "env", "volumeMounts", "resources"}
        environment = {variable["name"]: variable["value"] for variable in each["env"]}
        (mount,) = each["volumeMounts"]
        assert mount["name"] == volume["name"]
        # Below the mount, whose own directory need not belong to the user.
        assert environment["CUDASCHED_RUN_DIR"].startswith(mount["mountPath"] + "/")
        places.add(environment["CUDASCHED_RUN_DIR"])
    assert len(places) == 1
