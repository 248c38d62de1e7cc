"""Finds the shipped libraries and puts the driver shim in front of CUDA.

The shim is a library with SONAME ``libcuda.so.1``. Loaded with RTLD_GLOBAL before the first CUDA call, the shim answers
every later ``dlopen("libcuda.so.1")``; the stub beside the shim (SONAME ``libcuda.so``) serves programs that open that
name. Both are inert until the program's first driver call.

Nothing here makes a driver call. Every function may be called from any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from cudasched import config
from cudasched.errors import HookError

if TYPE_CHECKING:
    from cudasched import _core as stub

__all__ = ["Files", "install", "installed", "load_core", "locate", "switched_off"]

_ENGINE_NAME = "libcudasched.so"
_DRIVER = re.compile(r"libcuda\.so[.\d]*")
_SHIMS = ("/hook/libcuda.so.1", "/hook/libcuda.so")


class _Core(Protocol):
    """``cudasched._core`` as a type; ``_core.pyi`` documents the functions."""

    def version(self) -> str: ...
    def find_driver(self) -> str: ...
    def install(self) -> None: ...
    def state(self) -> stub.State: ...
    def set_process_class(self, name: str, priority: int, slo_ms: float) -> None: ...
    def region_enter(self, name: str, priority: int, slo_ms: float, counted_as: str) -> int: ...
    def region_enter_until(self, name: str, priority: int, deadline_ns: int) -> int: ...
    def region_exit(self, token: int) -> None: ...
    def region_may_move(self, token: int) -> None: ...
    def region_end_elsewhere(self, token: int) -> None: ...
    def to_its_end(self, function: Callable[..., Any]) -> Any: ...
    def finish(self) -> None: ...
    def expect(self, within_ms: float) -> None: ...
    def measure(self, pause_ms: float) -> tuple[int, int, int, bool]: ...
    def order(self, stream: int, ahead: tuple[int, ...], yields: bool) -> None: ...
    def is_idle(self, stream: int) -> bool: ...
    def new_event(self) -> int: ...
    def bind_stream(self, stream: int, name: str) -> None: ...
    def partition_stream(self, fraction: float) -> int: ...
    def unbind_stream(self, stream: int) -> None: ...
    def run_directory(self) -> str: ...
    def read_counts(self, path: str) -> tuple[str, list[tuple[stub.Client, stub.Counts | None]]]: ...
    def counted(self) -> dict[str, tuple[str, str]]: ...
    def counts(self) -> stub.Counts: ...
    def in_flight_ns(self) -> int: ...
    def graph_ns(self, graph: int) -> int: ...
    def others_slack_ns(self) -> int: ...
    def change(self, path: str, process: int, setting: str, value: str, timeout_ns: int) -> str: ...
    def collect_start(self, directory: str, timing: str, cupti_path: str | None, capacity_bytes: int) -> None: ...
    def collect_stop(self) -> tuple[str, int, int]: ...
    def collect_label(self, text: str) -> None: ...
    def trace_start(self, directory: str, limit_bytes: int) -> None: ...
    def trace_stop(self) -> tuple[str, int, int, int]: ...
    def gather(self, rows: list[int], bytes: int, to: int) -> None: ...
    def aimd_limit(self, limit: float, full: bool, in_time: bool, most: float) -> float: ...
    def demangled(self, name: bytes) -> str: ...
    def feature_names(self) -> list[str]: ...
    def launch_outlooks(
        self, columns: dict[str, Any], durations_ns: Any, sm_count: int, max_threads_per_sm: int = 2048
    ) -> dict[str, Any]: ...
    def launch_features(self, columns: dict[str, Any], sm_count: int, max_threads_per_sm: int = 2048) -> Any: ...
    def policies(self) -> list[tuple[str, str]]: ...
    def settings(self) -> dict[str, tuple[str, tuple[str, ...], object, float, float]]: ...
    def parse_setting(self, name: str, text: bytes) -> Any: ...
    def replay(
        self,
        clients: list[stub.ReplayClient],
        settings: stub.ReplaySettings,
        policy: Callable[[stub.Snapshot], object] | None = None,
    ) -> stub.ReplayResult: ...


_lock = threading.Lock()
_core: _Core | None = None
_installed = False


@dataclass(frozen=True)
class Files:
    """Where the shipped libraries are; all lie in one directory, beside ``_core``.

    Attributes:
        core: The Python module ``cudasched._core``.
        engine: ``libcudasched.so``.
        shim: ``hook/libcuda.so.1``, the driver's replacement.
        stub: ``hook/libcuda.so``, which leads to the shim.
        simulated_driver: ``simulate/libcuda.so.1``, a driver without a GPU.
    """

    core: Path
    engine: Path
    shim: Path
    stub: Path
    simulated_driver: Path


def locate() -> Files:
    """Finds the shipped libraries without loading any.

    An editable install has them beside ``_core``, not beside this file.

    Raises:
        HookError: The package was not built.
    """
    spec = importlib.util.find_spec("cudasched._core")
    if spec is None or not spec.origin:
        raise HookError(
            f"cudasched at {Path(__file__).parent} has no _core module for this Python and processor: "
            f"install cudasched with {sys.executable} -m pip"
        )
    core = Path(spec.origin)
    home = core.parent
    return Files(
        core=core,
        engine=home / _ENGINE_NAME,
        shim=home / "hook" / "libcuda.so.1",
        stub=home / "hook" / "libcuda.so",
        simulated_driver=home / "simulate" / "libcuda.so.1",
    )


def is_simulated(driver: str) -> bool:
    """Whether a driver's path is that of the simulated one."""
    return os.path.realpath(driver) == os.path.realpath(locate().simulated_driver)


def _mapped_libraries() -> list[str]:
    """Paths of the files that this process has mapped, each once, in address order; none where there is no /proc."""
    paths: dict[str, None] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            columns = line.rstrip("\n").split(None, 5)
            if len(columns) == 6 and columns[5].startswith("/"):
                paths[columns[5].removesuffix(" (deleted)")] = None
    return list(paths)


def driver_past_the_shim() -> str:
    """The driver that this process has opened by its path, where no call has gone through the shim; "" if none."""
    for path in _mapped_libraries():
        if _DRIVER.fullmatch(os.path.basename(path)) and not path.endswith(_SHIMS) and "/stubs/" not in path:
            return path
    return ""


def _same(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path == str(other)


def _shim_version(path: str) -> str | None:
    """The version of the cudasched whose shim the mapped library `path` is; None if it is no shim."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_LOCAL)
        ask = library.cudasched_shim_version
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    return cast(bytes, ask()).decode(errors="replace")


def _refuse_second_engine(files: Files, mapped: Sequence[str]) -> None:
    """There is one engine a process. Raises HookError if another installation's is loaded, or will be by its shim."""
    for path in mapped:
        if os.path.basename(path) != files.shim.name or _same(path, files.shim):
            continue
        version = _shim_version(path)
        if version is not None:
            raise HookError(
                f"two installations of cudasched meet in this process: the shim of version {version} at {path} is "
                f"loaded (by `cudasched run` or LD_PRELOAD), and {files.shim} would be the second; run the program "
                "with one of them"
            )
    for path in mapped:
        if os.path.basename(path) == _ENGINE_NAME and not _same(path, files.engine):
            raise HookError(
                f"two installations of cudasched meet in this process: {path} is loaded, and {files.engine} would be "
                "the second; run the program with one of them"
            )


def _in_subinterpreter() -> bool:
    """Whether there is another interpreter that the process began with: pybind11's modules load in that one alone."""
    here, main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    here.restype = main.restype = ctypes.c_void_p
    return bool(here() != main())


def load_core() -> _Core:
    """Imports ``cudasched._core``, and the engine with it.

    Returns:
        The module.

    Raises:
        HookError: The package was not built, or another installation's engine is in this process.
    """
    global _core
    if _core is not None:
        return _core
    with _lock:
        if _core is None:
            if _in_subinterpreter():
                raise HookError("cudasched works in a process's main interpreter alone, and this is a sub-interpreter")
            files = locate()
            _refuse_second_engine(files, _mapped_libraries())
            try:
                from cudasched import _core as module
            except ImportError as error:
                raise HookError(f"{files.core} cannot be loaded: {error}") from error
            _core = module
            _finish_workers()
        return _core


def _finish_workers() -> None:
    """Exit handlers' output is written by multiprocessing's workers, too, which end by `os._exit`."""

    def at_the_end(_: object = None) -> None:
        from multiprocessing import util

        util.Finalize(None, load_core().finish, exitpriority=-1)

    def when_it_begins() -> None:
        # A worker forgets the existing finalizers, and then runs those registered here.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.register_after_fork(at_the_end, at_the_end)

    os.register_at_fork(after_in_child=when_it_begins)  # of one that a fork makes,
    when_it_begins()  # of one that imports cudasched as it begins,
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:  # and of one that has begun
        at_the_end()


def switched_off() -> bool:
    """``CUDASCHED_OFF=1``: every call passes through, nothing is installed."""
    return config.switched_off(os.environ)


def engine() -> _Core | None:
    """The engine, where the shim stands in front of the driver in this process; else None."""
    return _core if _installed else None


def installed() -> bool:
    """Whether the shim stands in front of the driver in this process."""
    return _installed


def install() -> None:
    """Puts the shim in front of the driver, for all CUDA calls of this process from here on.

    Does nothing if that is done already (by an earlier call, by ``cudasched run``, by LD_PRELOAD), or under
    ``CUDASCHED_OFF=1``.

    Raises:
        HookError: CUDA is loaded already, there is no driver (the message lists the searched places), another
            installation of cudasched is in this process, or the package was not built. The process goes on unmanaged.
    """
    global _installed
    if _installed or switched_off():
        return
    load_core().install()
    _installed = True
