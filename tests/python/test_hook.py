"""The import installs the hook, whatever came before it; each case in an interpreter of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import cudasched
import pytest
from cudasched import hook
from support import Run

REPORT = """
import cudasched, launcher
def report(gpu=None):
    if gpu is not None:
        gpu.synchronize()
    s = cudasched.state()
    print(s.installed, s.attached, s.launches, s.latency_launches, s.best_effort_launches)
"""


@pytest.fixture
def other(tmp_path: Path) -> hook.Files:
    """Another installation of the same version, by its libraries."""
    files = hook.locate()
    home = tmp_path / "other"
    shutil.copytree(files.shim.parent, home / "hook")
    shutil.copy(files.engine, home)
    return hook.Files(
        core=files.core,
        engine=home / files.engine.name,
        shim=home / "hook" / files.shim.name,
        stub=home / "hook" / files.stub.name,
        simulated_driver=files.simulated_driver,
    )


def test_the_libraries_lie_beside_core() -> None:
    files = hook.locate()
    for path in (files.core, files.engine, files.shim, files.stub, files.simulated_driver):
        assert path.is_file() and not path.is_symlink(), path
    assert files.engine.parent == files.core.parent


def test_a_package_that_was_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hook, "_core", None)
    with pytest.raises(
        cudasched.HookError,
        match=f"no _core module for this Python and processor: install cudasched with {sys.executable}",
    ):
        hook.locate()
    assert "has no _core module" in cudasched.state().off_reason


def test_without_a_driver_the_import_is_silent(no_driver: Path, python: Run) -> None:
    done = python(
        "import cudasched\n"
        "with cudasched.region('best_effort', slo_ms=5): pass\n"
        "cudasched.bind_stream(7, 'latency'); cudasched.set_class('latency')\n"
        "s = cudasched.state(); print(s.installed, s.attached); print(s.off_reason)\n"
        "try: cudasched.install()\n"
        "except cudasched.HookError as error: print(error)\n"
    )
    assert done.stderr == ""
    first, reason, refusal = done.stdout.splitlines()
    assert first == "False False"
    assert str(no_driver) in reason and str(no_driver) in refusal


def test_the_import_never_raises(simulated: Path, python: Run) -> None:
    """Whatever error of the engine's stops the installation."""
    done = python(
        "import cudasched\n"
        "def refused(): raise cudasched.Error('no such path')\n"
        "cudasched.install = refused; cudasched._activate()\n"
    )
    assert done.returncode == 0
    assert "HookWarning: no such path; cudasched has no effect in this process" in done.stderr


def test_no_proc_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, **options: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", refused)
    assert hook._mapped_libraries() == []


def test_the_import_alone_makes_no_driver_call(simulated: Path, python: Run) -> None:
    done = python(
        REPORT + "report(); cudasched.install(); report()\n"
        "maps = open('/proc/self/maps').read(); print('/hook/libcuda.so.1' in maps, '/simulate/' in maps)"
    )
    assert (done.stdout, done.stderr) == ("True False 0 0 0\nTrue False 0 0 0\nTrue False\n", "")


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda.so"])
def test_launches_after_the_import_are_seen(simulated: Path, python: Run, name: str) -> None:
    done = python(
        REPORT + f"gpu = launcher.Gpu({name!r}); gpu.launch(5); report(gpu)\n"
        "print(cudasched.state().scheduling, cudasched.state().driver_path)"
    )
    assert (done.stdout, done.stderr) == (f"True True 5 0 0\nTrue {simulated}\n", "")


def test_regions_streams_and_the_process_class_reach_the_engine(simulated: Path, python: Run) -> None:
    done = python(
        REPORT
        + """
gpu = launcher.Gpu()
with cudasched.region("latency", slo_ms=50):
    gpu.launch(2)
    with cudasched.region("best_effort"):
        gpu.launch(3, gpu.stream())
    gpu.launch(1)
report(gpu)
stream = gpu.stream()
cudasched.bind_stream(stream, "best-effort")
with cudasched.region("latency"):
    gpu.launch(4, stream)
report(gpu)
cudasched.unbind_stream(stream)
gpu.launch(1, stream)
report(gpu)
cudasched.set_class("latency")
gpu.launch(1, stream)
report(gpu)
"""
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True 6 3 3", "True True 10 3 7", "True True 11 3 7", "True True 12 4 7"]


def test_a_class_set_before_the_first_call_holds(simulated: Path, python: Run) -> None:
    done = python(REPORT + "cudasched.set_class('latency'); gpu = launcher.Gpu(); gpu.launch(3); report(gpu)")
    assert (done.stdout, done.stderr) == ("True True 3 3 0\n", "")


def test_cuda_loaded_before_the_import(simulated: Path, python: Run) -> None:
    done = python(
        f"import ctypes; ctypes.CDLL({str(simulated)!r}, mode=ctypes.RTLD_GLOBAL)\n" + REPORT + "gpu = launcher.Gpu()\n"
        "with cudasched.region('latency'): gpu.launch(3)\n"
        "report(gpu)\n"
        "try: cudasched.install()\n"
        "except cudasched.HookError as error: print(error)\n"
        "print(cudasched.state().off_reason)\n"
    )
    warning = [line for line in done.stderr.splitlines() if "HookWarning" in line]
    assert len(warning) == 1 and "import cudasched before torch" in warning[0] and "cudasched run" in warning[0]
    counts, refusal, reason = done.stdout.splitlines()
    assert counts == "False False 0 0 0"
    assert refusal == reason and str(simulated) in refusal


def test_under_ld_preload_there_is_one_shim_and_one_engine(
    simulated: Path, python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hook.locate()
    monkeypatch.setenv("LD_PRELOAD", f"{files.shim}:{files.stub}")
    done = python(
        "import launcher; gpu = launcher.Gpu(); gpu.launch(2)\n"  # CUDA before the import: the shim was there first
        + REPORT
        + "gpu.launch(3); report(gpu)\n"
        "paths = {line.split(None, 5)[5].strip() for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(*sorted(p for p in paths if p.endswith(('libcudasched.so', 'libcuda.so.1', 'libcuda.so'))))"
    )
    assert done.stderr == ""
    counts, mapped = done.stdout.splitlines()
    assert counts == "True True 5 0 0"
    assert mapped.split() == sorted(map(str, (files.engine, files.shim, files.stub, simulated)))


def test_switched_off_nothing_is_loaded(simulated: Path, python: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_OFF", "1")
    done = python(
        "import cudasched; cudasched.install()\n"
        "with cudasched.region(): pass\n"
        "s = cudasched.state(); print(s.installed, s.off_reason)\n"
        "print('/hook/' in open('/proc/self/maps').read())"
    )
    assert (done.stdout, done.stderr) == ("False CUDASCHED_OFF=1\nFalse\n", "")


def test_another_installations_shim_is_named_and_left_alone(
    simulated: Path, python: Run, other: hook.Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"{other.shim}:{other.stub}")
    done = python(
        REPORT + "gpu = launcher.Gpu()\n"
        "with cudasched.region('latency'): gpu.launch(3)\n"
        "report(gpu)\n"
        "try: cudasched.install()\n"
        "except cudasched.HookError as error: print(error)\n"
        "print({l.split()[5] for l in open('/proc/self/maps') if 'libcudasched.so' in l})"
    )
    assert "HookWarning" in done.stderr and str(other.shim) in done.stderr
    counts, refusal, engines = done.stdout.splitlines()
    assert counts == "False False 0 0 0"
    assert str(other.shim) in refusal and str(hook.locate().shim) in refusal
    assert f"version {cudasched.__version__}" in refusal
    assert engines == str({str(other.engine)})


def test_another_installations_engine_is_named(simulated: Path, python: Run, other: hook.Files) -> None:
    done = python(
        f"import ctypes; ctypes.CDLL({str(other.engine)!r})\n" + REPORT + "report()\n"
        "try: cudasched.status()\n"
        "except cudasched.HookError as error: print(error)"
    )
    assert "HookWarning" in done.stderr
    counts, refusal = done.stdout.splitlines()
    assert counts == "False False 0 0 0"
    assert str(other.engine) in refusal and str(hook.locate().engine) in refusal


def test_a_forked_child_starts_anew(simulated: Path, python: Run) -> None:
    done = python(
        REPORT
        + """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forking beside the engine's thread
gpu = launcher.Gpu()
with cudasched.region("latency"):
    gpu.launch(2)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print("child", cudasched.state().launches)
if child == 0:
    sys.exit(7)
print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gpu.launch(1)
report(gpu)
"""
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["child 0", "parent 7", "True True 3 2 0"]


def test_a_child_forked_before_any_call_has_cuda_of_its_own(simulated: Path, python: Run) -> None:
    done = python(
        REPORT
        + """
import os, sys
child = os.fork()
gpu = launcher.Gpu()
gpu.launch(4 if child == 0 else 2)
if child != 0:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
report(gpu)
"""
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True 4 0 0", "True True 2 0 0"]


def test_a_working_directory_that_is_gone_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    resolved = cudasched.config.resolve({"run_dir": "run"}, environment={"CUDASCHED_PRIORITY": "3"})
    assert (resolved.config.priority, resolved.config.run_dir) == (3, "run")


@pytest.mark.gpu
def test_the_real_driver_is_hooked(python: Run) -> None:
    done = python(
        "import ctypes, cudasched\n"
        "cuda = ctypes.CDLL('libcuda.so.1'); assert cuda.cuInit(0) == 0\n"
        "s = cudasched.state(); print(s.installed, s.attached, s.driver_version >= 12040)"
    )
    assert (done.stdout, done.stderr) == ("True True True\n", "")


def test_set_class_before_the_first_call_goes_before_the_environment(simulated: Path, python: Run) -> None:
    code = (
        "import cudasched\n"
        "cudasched.set_class('latency', priority=4, slo_ms=7)\n"
        "from launcher import Gpu\n"
        "gpu = Gpu(); gpu.launch(1); gpu.synchronize()\n"
        "state = cudasched.state()\n"
        "assert state.process_class == 'latency' and state.latency_launches == 1, state\n"
        "client, = cudasched.status()[0].clients\n"
        "assert (client.priority, client.slo_ms) == (4, 7), client\n"
    )
    done = python(code, env={**os.environ, "CUDASCHED_CLASS": "best-effort"})
    assert done.returncode == 0, done.stderr


def test_in_a_notebook_two_lines_say_what_to_do(simulated: Path, python: Run) -> None:
    done = python(
        "import ctypes, sys, types, warnings\n"
        f"ctypes.CDLL({str(simulated)!r}, ctypes.RTLD_GLOBAL)\n"
        "sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import cudasched\n"
        "(only,) = seen\n"
        "print(only.category.__name__, only.message, sep='\\n')\n"
    )
    assert done.stdout.splitlines() == [
        "HookWarning",
        "CUDA is loaded already, so cudasched has no effect in this notebook.",
        "Restart the kernel and import cudasched first, before torch.",
    ], done.stderr
