"""Checks whether cudasched can work here, and names remedies: ``cudasched doctor``.

Makes no CUDA call in this process. Checks that run something have a process of their own: the hook on the simulated
driver, and two questions to the found driver without a context.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cudasched import config, hook
from cudasched._scratch import Scratch
from cudasched._version import __version__
from cudasched.errors import Error

__all__ = ["Check", "driver_version", "examine"]

Outcome = Literal["ok", "note", "problem"]

_OLDEST_DRIVER = 550
_OLDEST_CUDA = 12040  # which that release has; Tegra's releases have other numbers
_FOR_DEVELOPERS = ("test", "lint", "release", "site")
_DEV = Path("/dev")
_TRY_S = 60.0
_TABLE_BYTES = 64 * 1024
_ATTACH = """
import ctypes, cudasched
ctypes.CDLL("libcuda.so.1").cuInit(0)
state = cudasched.state()
print("attached" if state.attached and state.scheduling else state.off_reason or "the driver was not hooked")
"""
_ASK = """
import ctypes, json, sys
cuda, number, device, integrated = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_int(), []
cuda.cuDriverGetVersion(ctypes.byref(number))
version, error = number.value, ctypes.c_char_p(b"")
status = cuda.cuInit(0)
cuda.cuGetErrorName(status, ctypes.byref(error))
if status == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
    for ordinal in range(number.value):
        name, value = ctypes.create_string_buffer(256), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), 18, device)  # CU_DEVICE_ATTRIBUTE_INTEGRATED
        integrated += [name.value.decode(errors="replace")] if value.value else []
print(json.dumps([version, integrated, error.value.decode() if status else ""]))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: The subject of the check.
        outcome: ``ok``; ``note``: cudasched works without the subject; ``problem``: it does not work properly.
        found: The finding.
        remedy: The steps against a problem; empty if none are needed.
    """

    name: str
    outcome: Outcome
    found: str
    remedy: str = ""


def driver_version(path: str) -> str:
    """The release of a driver, such as "580.65.06", by the name of its file or the kernel's report; "" if unknown."""
    if told := re.search(r"libcuda\.so\.(\d+\.[\d.]+)$", os.path.realpath(path)):
        return told[1]
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
        if told := re.search(r"Module\s+(\d+\.[\d.]+)", text):
            return told[1]
    return ""


def _installation() -> Iterator[Check]:
    files = hook.locate()
    missing = [str(path) for path in (files.engine, files.shim, files.stub) if not path.is_file()]
    where = f"{__version__} in {files.core.parent}"
    if missing:
        yield Check("installation", "problem", f"{', '.join(missing)} is missing", "install cudasched again")
    elif any(character in str(files.shim) for character in " :\t\n"):
        remedy = "install it in a directory without spaces and colons, or import cudasched in the program"
        yield Check("installation", "problem", f"{where}: `cudasched run` cannot preload from there", remedy)
    else:
        yield Check("installation", "ok", where)


def _hook() -> Iterator[Check]:
    files = hook.locate()
    with Scratch("doctor") as scratch:
        (scratch / "device").mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDASCHED_", "LD_PRELOAD"))}
        own = {
            "CUDASCHED_DRIVER": str(files.simulated_driver),
            "CUDASCHED_SIM_DIR": str(scratch / "device"),
            "CUDASCHED_RUN_DIR": str(scratch / "run"),
            "CUDASCHED_CONFIG": os.devnull,
            "CUDASCHED_CACHE_DIR": "off",
        }
        done = subprocess.run(
            [sys.executable, "-c", _ATTACH],
            env={**kept, **own},
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            cwd=scratch,
            check=False,
        )
    said = done.stdout.strip()
    if said == "attached":
        yield Check("hook", "ok", "stands in front of the simulated driver, and schedules")
    else:
        why = said or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("hook", "problem", why, "install cudasched again, in a new environment")


def _asked(path: str) -> tuple[int, list[str], str]:
    """A driver's CUDA version, its integrated GPUs and its error in cuInit; 0 and nothing without an answer."""
    return _answer(path, tuple(sorted(item for item in os.environ.items() if item[0].startswith("CUDASCHED_SIM_"))))


@functools.lru_cache(maxsize=1)
def _answer(path: str, simulated: tuple[tuple[str, str], ...]) -> tuple[int, list[str], str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDASCHED_", "LD_PRELOAD"))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK, path],
            env={**kept, **dict(simulated)},
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
        )
        version, integrated, error = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return 0, [], ""
    return version, integrated, error


def _available_gib() -> float:
    text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
    told = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(told[1]) / 2**20 if told else 0.0


def _driver() -> Iterator[Check]:
    try:
        path = hook.load_core().find_driver()
    except Error as error:
        yield Check("driver", "problem", str(error))  # which has the remedy
        return
    if hook.is_simulated(path):
        yield Check("driver", "note", f"{path}, the simulated one", "unset CUDASCHED_DRIVER to use a GPU")
        return
    version = driver_version(path)
    shown = f"{version or 'of unknown version'} ({path})"
    cuda, integrated, _ = _asked(path)
    too_old = cuda < _OLDEST_CUDA if cuda else bool(version) and int(version.split(".")[0]) < _OLDEST_DRIVER
    if too_old:
        newer = "JetPack to one with CUDA 12.4" if integrated else f"the driver to {_OLDEST_DRIVER}"
        found = f"{shown}: too old to schedule, every call passes through"
        yield Check("driver", "problem", found, f"update {newer} or later")
    else:
        yield Check("driver", "ok", shown)


def _devices() -> Iterator[Check]:
    integrated: list[str] = []
    refusal = ""
    with contextlib.suppress(Error):
        _, integrated, refusal = _asked(hook.load_core().find_driver())
    if integrated:
        found = f"{', '.join(integrated)}: integrated, with the host's memory, {_available_gib():.1f} GiB available"
        remedy = "memory limits, time slices, MPS and NVML differ there (docs/jetson.md)"
        yield Check("GPU", "note", found, remedy)
        return
    gpus = [*sorted(_DEV.glob("nvidia[0-9]*")), *_DEV.glob("dxg")]  # which WSL has for all
    if not gpus:
        remedy = "load the kernel module (nvidia-smi does), or give the container a GPU"
        yield Check("GPU", "problem", f"no {_DEV}/nvidia*", remedy)
        return
    nodes = [*(node for node in (_DEV / "nvidiactl", _DEV / "nvidia-uvm") if node.exists()), *gpus]
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        remedy = "join the group that owns these files (ls -l), or ask the administrator"
        yield Check("GPU", "problem", f"you may not use {', '.join(closed)}", remedy)
    elif refusal:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        remedy = "`nvidia-smi` says why" if visible is None else "unset it, or name GPUs that `nvidia-smi -L` lists"
        yield Check("GPU", "problem", f"the driver gives programs none{names}: {refusal}", remedy)
    else:
        yield Check("GPU", "ok", f"you may use {', '.join(map(str, gpus))}")


def _run_directory() -> Iterator[Check]:
    directory = Path(hook.load_core().run_directory())
    remedy = "set CUDASCHED_RUN_DIR to a directory of your own, the same for all programs that share the GPU"
    parent = directory.parent
    try:
        status = directory.lstat()
    except FileNotFoundError:
        if os.access(parent, os.W_OK | os.X_OK):
            yield Check("run directory", "ok", f"{directory} (made by the first program)")
        else:
            why = f"you may not write to {parent}" if parent.is_dir() else f"there is no directory {parent}"
            yield Check("run directory", "problem", f"{directory} cannot be made: {why}", remedy)
        return
    except OSError as error:
        yield Check("run directory", "problem", f"{directory}: {error.strerror}", remedy)
        return
    if stat.S_ISLNK(status.st_mode):
        yield Check("run directory", "problem", f"{directory} is a link, which programs refuse", remedy)
    elif not stat.S_ISDIR(status.st_mode):
        yield Check("run directory", "problem", f"{directory} is no directory", remedy)
    elif status.st_uid != os.geteuid():
        yield Check("run directory", "problem", f"{directory} belongs to user {status.st_uid}", remedy)
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"{directory} may be written by other users: programs refuse it"
        yield Check("run directory", "problem", why, f"chmod go-w {directory}")
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        yield Check("run directory", "problem", f"you may not write to {directory}", f"chmod 700 {directory}")
    elif shutil.disk_usage(directory).free < _TABLE_BYTES:
        yield Check(
            "run directory", "problem", f"{directory}: no space is left", f"make space in {parent}, or {remedy}"
        )
    else:
        yield Check("run directory", "ok", str(directory))


def _settings() -> Iterator[Check]:
    resolved = config.resolve(tolerant=True)
    for text in resolved.refused:
        yield Check("settings", "problem", text, "correct it: the default is used")
    for text in resolved.notes:
        yield Check("settings", "note", text)
    if config.switched_off(os.environ):
        yield Check("settings", "problem", "CUDASCHED_OFF is on: nothing is hooked", "unset CUDASCHED_OFF")
    if not resolved.refused and not resolved.notes:
        count = len(resolved.origins)
        yield Check("settings", "ok", ", ".join(sorted(set(resolved.origins.values()))) if count else "all by default")


def _mps() -> Iterator[Check]:
    from cudasched import mps
    from cudasched.mps import keeper

    if (pipe := mps.running_daemon(os.environ)) is not None:
        yield Check("MPS", "ok", f"a daemon listens in {pipe}")
    elif shutil.which(keeper.TOOL):
        yield Check("MPS", "ok", "no daemon runs; `cudasched run --mps` starts one")
    else:
        yield Check("MPS", "note", f"{keeper.TOOL} is not there", "`cudasched run --mps` needs this part of the driver")


def _time_slices() -> Iterator[Check]:
    from cudasched.status import status

    clients = [client for device in status() for client in device.clients if client.client_class == "best_effort"]
    told = {client.time_slice: client for client in clients if client.time_slice}
    refused = [client for state, client in told.items() if state in ("refused", "closed", "unseen")]
    if refused:
        why = f"{refused[0].name} ({refused[0].pid}): {refused[0].time_slice}"
        remedy = "its gate alone holds it back (docs/design.md)"
        yield Check("time slices", "note", f"kernels of best-effort programs are not interrupted: {why}", remedy)
    elif client := told.get("on"):
        yield Check("time slices", "ok", f"{client.time_slice_us} us for {client.name} ({client.pid})")
    elif (_DEV / "dxg").exists():
        remedy = "WSL has no channel groups to set: the gate alone holds best-effort programs back"
        yield Check("time slices", "note", "not on WSL: kernels are not interrupted", remedy)
    else:
        yield Check("time slices", "ok", "shown while a best-effort program runs")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _pytorch() -> Iterator[Check]:
    if version := _version_of("torch"):
        yield Check("PyTorch", "ok", f"{version}: import cudasched before it, or use `cudasched run`")
    else:
        yield Check("PyTorch", "note", f"not installed for {sys.executable}", "only PyTorch programs need PyTorch")


def _extras_of(requirements: Sequence[str]) -> dict[str, list[str]]:
    """The requirements of each extra, by the package's metadata: ``pyarrow>=15; extra == "collect"``."""
    own: dict[str, list[str]] = {}
    for requirement in requirements:
        found = re.fullmatch(r'([\w.-]+)(?:\[([\w,-]+)\])?[^;]*; *extra == "([\w-]+)"', requirement)
        if found and found[3] not in _FOR_DEVELOPERS:
            names = found[2].split(",") if found[1] == "cudasched" else [found[1]]
            own.setdefault(found[3], []).extend(f"[{name}]" if found[1] == "cudasched" else name for name in names)

    def needed(extra: str) -> list[str]:
        return [name for one in own.get(extra, []) for name in (needed(one[1:-1]) if one[0] == "[" else [one])]

    return {extra: needed(extra) for extra in own}


def _extras() -> Iterator[Check]:
    wanted = _extras_of(importlib.metadata.requires("cudasched") or [])
    missing = [extra for extra, names in wanted.items() if not all(map(_version_of, names))]
    if missing:
        yield Check(
            "extras", "note", f"not installed: {', '.join(missing)}", f"pip install 'cudasched[{','.join(missing)}]'"
        )
    else:
        yield Check("extras", "ok", ", ".join(wanted))


def _cupti() -> Iterator[Check]:
    from cudasched.cli.coverage import find_cupti

    if found := os.environ.get("CUDASCHED_CUPTI") or find_cupti(Path(sys.executable)):
        yield Check("CUPTI", "ok", found)
    else:
        remedy = "pip install 'nvidia-cuda-cupti==13.*', or `collect --timing events`, which needs none"
        yield Check("CUPTI", "note", "no libcupti of CUDA 13: no device times, no coverage", remedy)


_CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "installation": _installation,
    "hook": _hook,
    "driver": _driver,
    "GPU": _devices,
    "run directory": _run_directory,
    "settings": _settings,
    "MPS": _mps,
    "time slices": _time_slices,
    "PyTorch": _pytorch,
    "CUPTI": _cupti,
    "extras": _extras,
}


def examine() -> list[Check]:
    """Runs all checks. Never raises: a check that fails is a problem of its own."""
    found: list[Check] = []
    for name, look in _CHECKS.items():
        try:
            found += look()
        except Exception as error:
            found.append(Check(name, "problem", f"cannot be looked at: {type(error).__name__}: {error}"))
    return found
