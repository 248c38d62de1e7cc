"""What results say about where they come from."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

from cudasched.demo.harness import Backend, HarnessError, probe

from benchmarks.results.schema import Meta

ROOT = Path(__file__).parents[1]


def describe(simulated: bool, commit: str | None = None, torch_needed: bool = True) -> Meta:
    """The machine, its versions and the command that is running; `sm_clock_mhz` is read later, under load."""
    gpu, driver, cuda, torch = "simulated", None, None, None
    if not simulated:
        found = probe(Backend())
        if found["device"] is None:
            raise HarnessError(f"no GPU here ({found['problem']}); --rehearse does without one")
        if torch_needed and found["torch"] is None:
            raise HarnessError("PyTorch is not installed here; --rehearse does without it")
        gpu, torch = found["device"], found["torch"]
        cuda = f"{found['driver_version'] // 1000}.{found['driver_version'] % 1000 // 10}"
        driver = nvidia_smi("driver_version")
    return _described(commit, gpu=gpu, driver=driver, cuda=cuda, torch=torch)


def describe_host(commit: str | None = None) -> Meta:
    """The processor, where no GPU has a part in what is measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return _described(commit, gpu=f"none ({next(named, platform.machine())})")


def _described(
    commit: str | None, gpu: str, driver: str | None = None, cuda: str | None = None, torch: str | None = None
) -> Meta:
    return Meta(
        gpu=gpu,
        driver=driver,
        cuda=cuda,
        torch=torch,
        python=platform.python_version(),
        commit=commit or os.environ.get("CUDASCHED_COMMIT") or current_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        sm_clock_mhz=None,
        command=command_line(),
    )


def command_line() -> str:
    """The running command, as one would type it in the repository root."""
    module = Path(sys.argv[0]).resolve()
    if not module.is_relative_to(ROOT):
        return " ".join([module.name, *sys.argv[1:]])
    inside = module.parent if module.name == "__main__.py" else module.with_suffix("")
    return " ".join(["python -m", ".".join(inside.relative_to(ROOT).parts), *sys.argv[1:]])


def sm_clock_mhz() -> int | None:
    """The clock of the first GPU's SMs now, MHz."""
    answer = nvidia_smi("clocks.sm", "--format=csv,noheader,nounits")
    return int(answer) if answer and answer.isdigit() else None


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here, one a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return nvidia_smi_lines("uuid")


def nvidia_smi(field: str, form: str = "--format=csv,noheader") -> str | None:
    """One field of the first GPU, None where there is no nvidia-smi."""
    found = nvidia_smi_lines(field, form)
    return found[0] if found else None


def nvidia_smi_lines(query: str, form: str = "--format=csv,noheader", of: str = "gpu") -> list[str]:
    """Fields of every GPU, or of another thing that nvidia-smi knows; nothing where there is no nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = ["-i", visible] if visible else []
    answer = _output(["nvidia-smi", *chosen, f"--query-{of}={query}", form])
    return [line.strip() for line in answer.splitlines()] if answer else []


def gpu_processes() -> dict[int, str]:
    """The processes with work on the visible GPUs that NVML names: what each runs, by pid."""
    lines = nvidia_smi_lines("pid,process_name", of="compute-apps")
    return {int(pid): name.strip() for pid, _, name in (line.partition(",") for line in lines) if pid.isdigit()}


def current_commit() -> str | None:
    """The commit checked out, with `-dirty` where files differ from it; None outside a clone."""
    return _output(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
