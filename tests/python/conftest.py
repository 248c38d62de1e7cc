"""Fixtures of the Python tests, and the rule for tests that need a GPU."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated import Builder
from program import Stage
from support import PATIENCE_S, Run

HERE = Path(__file__).resolve().parent
# What the tests are run under must not reach the programs that they start, nor decide what an import here does.
for _variable in [name for name in os.environ if name.startswith("CUDASCHED_") and name != "CUDASCHED_LIB_DIR"]:
    del os.environ[_variable]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and programs inherit that

from cudasched import errors, hook  # noqa: E402


def _why_no_gpu() -> str:
    try:
        hook.load_core().find_driver()
    except errors.HookError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else ""
    for item in marked if reason else []:
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings of the user or of the working directory; the shared tables of this test alone."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    # Python's own word, from 3.12 on, about forking beside any thread, the engine's too. Programs' stderr is looked at.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:This process:DeprecationWarning")
    monkeypatch.chdir(tmp_path)
    return home


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a driver, whatever this one has. Returns the path at which there is none."""
    path = tmp_path / "nowhere" / "libcuda.so.1"
    monkeypatch.setenv("CUDASCHED_DRIVER", str(path))
    # That a driver that was named is not there is said; where none is named, as on such a machine, nothing is.
    monkeypatch.setenv("PYTHONWARNINGS", f"{os.environ['PYTHONWARNINGS']},ignore:CUDASCHED_DRIVER=")
    return path


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The simulated driver in place of the real one, with a device of this test's own. Returns its path."""
    path = hook.locate().simulated_driver
    device = tmp_path / "device"
    device.mkdir(mode=0o700)
    monkeypatch.setenv("CUDASCHED_DRIVER", str(path))
    monkeypatch.setenv("CUDASCHED_SIM_DIR", str(device))
    # The gate steps aside where the GPU interrupts kernels; test_time_slices.py has that.
    monkeypatch.setenv("CUDASCHED_TIME_SLICE_US", "off")
    return path


@pytest.fixture
def python() -> Run:
    """Runs code in a new interpreter with this one's environment as the test has made it."""

    def run(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)  # type: ignore[call-overload,no-any-return]

    return run


@pytest.fixture(scope="session")
def command() -> str:
    """The installed `cudasched`."""
    beside = Path(sys.executable).parent / "cudasched"
    found = str(beside) if beside.exists() else shutil.which("cudasched")
    assert found, "the cudasched command is not installed: pip install the package first"
    return found


@pytest.fixture
def cudasched(command: str) -> Run:
    """Runs the installed command."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, **options)  # type: ignore[call-overload,no-any-return]

    return run


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds the checks of the kernels; the processes of one run share what is precompiled."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "emulated"
    directory.mkdir(exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Builder(directory)


@pytest.fixture
def without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate holds the program's own thread, so that a test sees who waits; test_offload.py has the launcher's."""
    monkeypatch.setenv("CUDASCHED_OFFLOAD", "0")


@pytest.fixture
def quick_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device is four times as slow as a real one, not twenty times."""
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "4")


@pytest.fixture
def stage(command: str, simulated: Path, tmp_path: Path) -> Iterator[Stage]:
    """Programs that share a simulated device; all are gone at the end."""
    stage = Stage(command, tmp_path)
    yield stage
    stage.close()


NVML = '''
"""Stands in for nvidia-ml-py: what a file says."""
import json, os
from types import SimpleNamespace as N
NVML_CLOCK_SM = 1
said = lambda: json.load(open(os.environ["FAKE_NVML"]))
def nvmlInit():
    if not os.path.exists(os.environ["FAKE_NVML"]): raise RuntimeError("NVML Shared Library Not Found")
def nvmlShutdown(): pass
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetMemoryInfo(handle): return N(used=said()["used"], total=80 << 30, free=0)
def nvmlDeviceGetUtilizationRates(handle): return N(gpu=93, memory=10)
def nvmlDeviceGetClockInfo(handle, kind): return 1980
def nvmlDeviceGetPowerUsage(handle): raise RuntimeError("Not Supported")
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [N(pid=pid, usedGpuMemory=memory) for pid, memory in said()["processes"]]
def nvmlDeviceGetProcessUtilization(handle, since):
    return [N(pid=pid, smUtil=40) for pid, _ in said()["processes"]]
'''


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what NVML sees from here on."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))

    def say(*processes: tuple[int, int], used: int = 0) -> None:
        (tmp_path / "nvml.json").write_text(json.dumps({"processes": processes, "used": used}))

    return say


@pytest.fixture(params=["plain", "hooked"])
def plain_or_hooked(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    simulated: Path,
    python: Run,
    command: str,
    quick_device: None,
) -> Run:
    """Runs a program over the simulated driver, and as best-effort work under cudasched."""
    if request.param == "plain":
        monkeypatch.setenv("CUDASCHED_OFF", "1")
        return lambda program: python(program, str(simulated))

    def hooked(program: str) -> subprocess.CompletedProcess[str]:
        file = Path("program.py")
        file.write_text(program)
        arguments = [command, "run", "--class", "best-effort", "--", sys.executable, str(file), "hooked"]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S)

    return hooked
