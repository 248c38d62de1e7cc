"""The PyTorch extension: compiled against this machine's PyTorch, and run over an allocator that the test plays."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cudasched
import cudasched.torch
import pytest
from cudasched import _partition, hook
from cudasched.errors import ConfigError
from cudasched.torch import _adapter, _extension, _give_back, _observe, _regions
from support import PATIENCE_S, ROOT
from test_torch_regions import Engine, Torch, engine, torch

__all__ = ["engine", "torch"]

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT = range(8)
Does = Callable[..., None]

COMPILES = """
import sys, subprocess, tempfile, pathlib
import torch
from cudasched.torch import _extension
with tempfile.TemporaryDirectory() as scratch:
    command = _extension.command(torch, pathlib.Path(scratch, "observe.o"), link=False)
    done = subprocess.run([*command, "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
print("compiled")
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_it_compiles_against_this_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(source: Path, output: Path) -> Path:
    """The extension over the double of the allocator."""
    compiler = shutil.which("g++") or "c++"
    include = ["-I", str(ROOT / "tests/python/c10_double"), "-I", str(ROOT / "csrc")]
    # Hidden as in the product: what Python calls must be visible all the same.
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread", *include]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(ROOT / "csrc/torch/observe.cpp", tmp_path_factory.mktemp("extension") / "libcudasched_torch.so")


@pytest.fixture
def does(double: Path, tmp_path: Path, torch: Torch, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Does]:
    """What the allocator does once `observe` is on, which begins with a snapshot of two segments."""
    own = tmp_path / double.name  # state is a process's: each test has a library of its own
    shutil.copy(double, own)
    library = _extension.Library(own)
    plays = ctypes.CDLL(str(own)).double_does
    plays.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.c_size_t] * 3]

    def play(action: int, address: int = 0, size: int = 0, stream: int = 0) -> None:
        plays(action, 0, address, size, stream)

    blocks: list[dict[str, Any]] = [
        {"size": 512, "requested_size": 100, "address": 0x1000, "state": "active_allocated"},
        {"size": 1000, "requested_size": 0, "address": 0x1400, "state": "inactive"},
        {"size": 3000, "requested_size": 0, "address": 0x1800, "state": "inactive"},
    ]
    of_a_region = [{"size": 512, "requested_size": 60, "address": 0x1200, "state": "active_awaiting_free"}]

    def snapshot() -> list[dict[str, Any]]:
        play(SNAPSHOT)
        return [
            {"device": 0, "total_size": 4512, "stream": 0, "blocks": blocks},
            {"device": 0, "total_size": 512, "stream": 0x98, "blocks": of_a_region},
        ]

    more = {
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": snapshot,
        "memory_allocated": lambda device: 512,
        "current_device": lambda: 0,
    }
    for name, value in more.items():
        monkeypatch.setattr(torch, name, value, raising=False)
    monkeypatch.setattr(_extension, "load", lambda: library)
    for name, none in (("_library", None), ("_attached", False)):
        monkeypatch.setattr(_observe, name, none)
    monkeypatch.setattr(_observe, "_regions_by_name", defaultdict(itertools.count(1).__next__, {"": 0}))
    monkeypatch.setattr(_adapter, "_tell", None)
    monkeypatch.setattr(_adapter, "_made", [(0, 0x98, "best_effort")])
    monkeypatch.setattr(_regions, "tell", None)
    for name, value in (("_limits", None), ("_limited", {}), ("_told", set())):
        monkeypatch.setattr(_regions, name, value)
    monkeypatch.setattr(_observe, "_limited", set())
    cudasched.torch.observe()
    yield play


def test_it_begins_with_what_is_there(does: Does) -> None:
    found = cudasched.torch.memory()
    assert (found.requested_bytes, found.reserved_bytes, found.allocated_bytes) == (160, 5024, 512)
    assert found.by_class == {"normal": 100, "latency": 0, "best_effort": 60}
    assert found.fragmentation == 1 - 3000 / 4000
    does(FREE_REQUESTED, 0x1000, 100)
    assert cudasched.torch.memory().requested_bytes == 160
    does(FREE_COMPLETED, 0x1000, 100)
    assert cudasched.torch.memory().requested_bytes == 60
    assert cudasched.torch.memory().requested_peak == 160


def test_segments_come_and_go(does: Does) -> None:
    does(SEGMENT_ALLOC, 0x10000, 2048)
    does(SEGMENT_MAP, 0x20000, 4096)
    assert cudasched.torch.memory().reserved_bytes == 5024 + 2048 + 4096
    does(SEGMENT_FREE, 0x10000, 2048)
    does(SEGMENT_UNMAP, 0x20000, 4096)
    found = cudasched.torch.memory()
    assert (found.reserved_bytes, found.reserved_peak) == (5024, 5024 + 2048 + 4096)


def test_allocations_have_the_class_of_their_stream_and_the_region_of_their_thread(does: Does, torch: Torch) -> None:
    with cudasched.region("latency", name="answer"):
        does(ALLOC, 0x5000, 30, stream=torch.current())
        with cudasched.region("best_effort", stream="inherit"):
            does(ALLOC, 0x6000, 5, stream=0x99)
        does(ALLOC, 0x7000, 2, stream=0x99)
    does(ALLOC, 0x8000, 1, stream=0x99)
    found = cudasched.torch.memory()
    assert found.by_class == {"normal": 101, "latency": 32, "best_effort": 65}
    assert found.by_region == {"": 166, "answer": 32}
    assert found.by_stream[0x99] == 8


def test_a_backward_pass_counts_for_the_region_of_its_forward_pass(does: Does, torch: Torch) -> None:
    with cudasched.region("best_effort", name="train"):
        stream = torch.current()
        does(ALLOC, 0x5000, 30, stream=stream)
        autograd = threading.Thread(target=does, args=(ALLOC, 0x6000, 12, stream))
        autograd.start()
        autograd.join()
    found = cudasched.torch.memory()
    assert found.by_region["train"] == 42 and found.by_class["best_effort"] == 102


def test_names_of_threads_that_come_at_once_are_counted_apart(does: Does) -> None:
    names = [[f"{thread}-{place}" for place in range(2000)] for thread in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            told = pool.map(lambda mine: [_regions.tell("normal", name) for name in mine], names)  # type: ignore[misc]
            while len(_observe._regions_by_name) < 8001:
                cudasched.torch.memory()
            list(told)
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set(_observe._regions_by_name.values())) == 8001


def test_the_timeline_has_classes_regions_and_what_is_reserved(does: Does) -> None:
    with cudasched.region("best_effort", stream="inherit", name="train"):
        does(ALLOC, 0x5000, 30, stream=0x99)
        does(SEGMENT_ALLOC, 0x10000, 2048)
    does(FREE_COMPLETED, 0x5000, 30)
    found = cudasched.torch.memory_timeline()
    assert 1 <= len(found.seconds) <= 3 and found.seconds == sorted(found.seconds)
    assert max(found.by_class["best_effort"]) == 90
    assert max(found.by_region["train"]) == 30 and max(found.by_region[""]) == 160
    assert max(found.reserved_bytes) == 5024 + 2048
    assert {len(each) for each in [*found.by_class.values(), *found.by_region.values()]} == {len(found.seconds)}


@pytest.mark.parametrize("device", [-1, 64, 1 << 31])
@pytest.mark.parametrize("ask", [cudasched.torch.memory, cudasched.torch.memory_timeline])
def test_a_device_that_cannot_be_is_refused(does: Does, ask: Callable[[int], object], device: int) -> None:
    with pytest.raises(ConfigError, match=f"device = {device}: "):
        ask(device)


def test_a_regions_limit_is_warned_of_once_and_counted(does: Does) -> None:
    train = cudasched.region("best_effort", stream="inherit", name="train", memory_limit="1MiB")
    with train:
        does(ALLOC, 0x5000, 1 << 20)
    with pytest.warns(cudasched.HookWarning, match=r"'train' have held more than their memory limit"), train:
        does(ALLOC, 0x6000, 5)
    does(FREE_COMPLETED, 0x5000)
    with train:  # said already
        does(ALLOC, 0x7000, 1 << 20)
    assert cudasched.torch.memory().over_limit == {"train": 2}


def test_a_region_on_a_part_of_the_sms_is_counted_and_limited(does: Does, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partition, "enter", lambda fraction: None)
    train = cudasched.region("best_effort", sm_fraction=0.5, name="train", memory_limit="1MiB")
    with pytest.warns(cudasched.HookWarning, match=r"'train' have held more than their memory limit"), train:
        does(ALLOC, 0x5000, (1 << 20) + 1, stream=0x99)
    found = cudasched.torch.memory()
    assert found.by_region == {"": 160, "train": (1 << 20) + 1} and found.over_limit == {"train": 1}
    assert found.by_class["best_effort"] == 60 + (1 << 20) + 1


def test_a_regions_limit_without_observing_says_so_once(
    torch: Torch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_limits", None), ("_limited", {}), ("_told", set())):
        monkeypatch.setattr(_regions, name, value)
    region = cudasched.region("best_effort", name="train", memory_limit=1 << 30)
    with pytest.warns(cudasched.HookWarning, match=r"has no effect: call cudasched\.torch\.observe"), region:
        pass
    with cudasched.region("best_effort", name="test", memory_limit=1 << 30):
        pass


@pytest.mark.parametrize(("value", "name"), [("much", "train"), (-1, "train"), (5, "train"), (True, "x"), ("1GiB", "")])
def test_a_regions_limit_without_meaning_is_refused(value: object, name: str) -> None:
    with pytest.raises(cudasched.ConfigError, match=r"^memory_limit = "):
        cudasched.region("best_effort", name=name, memory_limit=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["block", "function", "coroutine"])
def test_an_out_of_memory_error_says_who_holds_what(
    how: str, torch: Torch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    clients = [
        SimpleNamespace(name="serve.py", pid=1, memory_bytes=1 << 30, client_class="latency"),
        SimpleNamespace(name="idle.py", pid=2, memory_bytes=0, client_class="normal"),
        SimpleNamespace(name="train.py", pid=3, memory_bytes=40 << 30, client_class="best_effort"),
    ]
    monkeypatch.setattr(sys.modules["cudasched.status"], "status", lambda: [SimpleNamespace(clients=clients)])

    def block() -> None:
        with cudasched.region("latency"):
            raises()

    @cudasched.region("latency")
    def raises() -> None:
        raise OutOfMemoryError("CUDA out of memory")

    @cudasched.region("latency")
    async def waits() -> None:
        raises()

    with pytest.raises(OutOfMemoryError) as raised:
        {"block": block, "function": raises, "coroutine": lambda: asyncio.run(waits())}[how]()
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert note == ("cudasched: holders: train.py (3) 40.0 GiB best_effort, serve.py (1) 1.0 GiB latency")


def test_a_program_that_never_asks_loses_no_record(does: Does) -> None:
    for _ in range(6):
        for _ in range(30_000):
            does(ALLOC, 0x5000, 30)
        time.sleep(0.2)
    assert cudasched.torch.memory().lost == 0


def test_the_timeline_before_observe_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observe, "_library", None)
    with pytest.raises(cudasched.StateError, match=r"cudasched\.torch\.observe"):
        cudasched.torch.memory_timeline()


class Cdll:
    """The engine, as ctypes loads it."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def cudasched_use_cache(self, function: ctypes.c_void_p, context: object) -> None:
        self.given.append(function.value)


def test_the_engine_empties_pytorchs_cache(
    double: Path, tmp_path: Path, torch: Torch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / double.name
    shutil.copy(double, own)
    library, engines, real = _extension.Library(own), Cdll(), ctypes.CDLL
    monkeypatch.setattr(_extension, "load", lambda: library)
    monkeypatch.setattr(torch, "get_allocator_backend", lambda: "native", raising=False)
    monkeypatch.setattr(hook, "installed", lambda: True)
    monkeypatch.setattr(_give_back, "_begun", False)
    monkeypatch.setattr(_give_back, "_library", None)
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda path: engines)
        cudasched.torch.give_back()
        cudasched.torch.give_back()
    assert len(engines.given) == 1
    ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_void_p)(engines.given[0])(0, None)
    assert real(str(own)).double_emptied() == 1


@pytest.mark.parametrize(("built", "times", "sm_fraction"), [(True, 1, None), (False, 0, None), (True, 1, 0.5)])
def test_best_effort_regions_give_back_by_themselves_where_the_extension_is_built(
    torch: Torch, engine: Engine, monkeypatch: pytest.MonkeyPatch, built: bool, times: int, sm_fraction: float | None
) -> None:
    monkeypatch.setattr(_partition, "enter", lambda fraction: None)
    called: list[int] = []
    monkeypatch.setattr(_give_back, "_looked", False)
    monkeypatch.setattr(_give_back, "give_back", lambda: called.append(1))
    monkeypatch.setattr(_extension, "built", lambda torch: built)
    with cudasched.region("latency"):
        pass
    assert called == []
    for _ in range(2):
        with cudasched.region("best_effort", sm_fraction=sm_fraction):
            pass
    assert len(called) == times


def test_check_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_extension, "_cuda_include", lambda: "/usr/include")
    found = _extension.check(a_pytorch("2.3.1"))
    assert [well for well, _ in found] == [False, True, True, True]
    assert "for PyTorch 2.4 to 2.13" in found[0][1] and "cudasched torch build" in found[3][1]
    found = _extension.check(a_pytorch(cuda=None))
    assert not found[0][0] and "without CUDA" in found[0][1]


def test_the_second_call_does_nothing(does: Does) -> None:
    cudasched.torch.observe()
    assert cudasched.torch.memory().requested_bytes == 160


def test_its_thread_gets_no_signals(double: Path, tmp_path: Path) -> None:
    own = tmp_path / double.name
    shutil.copy(double, own)
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    _extension.Library(own).begin()
    (begun,) = {task.name for task in tasks.iterdir()} - before
    (blocked,) = re.findall(r"^SigBlk:\s+(\w+)$", (tasks / begun / "status").read_text(), re.MULTILINE)
    assert int(blocked, 16) & 1 << (signal.SIGTERM - 1)


# Beside the extension, in one source with it: a thread that holds its lock until it is told to go.
HOLDS = """
#include "torch/observe.cpp"
#pragma GCC visibility push(default)
extern "C" void hold(int told, int go) {
  const std::scoped_lock lock(state().accounts_lock);
  char byte = 0;
  if (write(told, &byte, 1) == 1 && read(go, &byte, 1) == 1) return;
}
#pragma GCC visibility pop
"""
FORKS = """
import ctypes, os, signal, sys, threading
import cudasched.torch
from cudasched.torch import _extension, _observe

own = ctypes.CDLL(sys.argv[1])
library = _observe._library = _extension.Library(sys.argv[1])
library.attach()
library.begin_with(0, 0x1000, 100, 0)
(told, tells), (goes, go) = os.pipe(), os.pipe()
holder = threading.Thread(target=own.hold, args=(tells, goes))
holder.start()
os.read(told, 1)
_observe._lock.acquire()
child = os.fork()
if child == 0:
    signal.alarm(30)  # a hang ends
    for ask in (cudasched.torch.memory, cudasched.torch.memory_timeline):
        try:
            ask(0)
            os._exit(1)
        except cudasched.StateError as error:
            assert "the child of a fork" in str(error), error
    assert not _observe._lock.locked()
    assert library.read(0).requested == 0
    library.limit(1, 5)
    assert library.over_limit(-1, 1) == 0 and library.timeline(0) == []
    for action in (7, 0):  # a snapshot, an allocation
        own.double_does(action, 0, ctypes.c_size_t(0x5000), ctypes.c_size_t(30), ctypes.c_size_t(0))
    assert library.read(0).requested == 30
    os._exit(0)
_, status = os.waitpid(child, 0)
os.write(go, b"x")
holder.join()
assert library.read(0).requested == 100
print("child", status)
"""


def test_a_child_of_fork_begins_with_nothing_whichever_thread_held_the_lock(tmp_path: Path) -> None:
    """It waited for ever for a thread that is not there."""
    source = tmp_path / "holds.cpp"
    source.write_text("#include <unistd.h>\n" + HOLDS)
    library = compiled(source, tmp_path / "libcudasched_torch.so")
    done = subprocess.run([sys.executable, "-c", FORKS, library], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "child 0\n", done.stdout + done.stderr


NO_THREAD = """
import ctypes, resource, sys
from cudasched.torch import _extension

library = _extension.Library(sys.argv[1])
library.attach()
pages = int(open("/proc/self/statm").read().split()[0])
limit = (pages * resource.getpagesize() + (4 << 20), resource.RLIM_INFINITY)  # less than a thread's stack
resource.setrlimit(resource.RLIMIT_AS, limit)
library.begin()
library.begin_with(0, 0x1000, 100, 0)
print(library.read(0).requested)
"""


def test_without_a_thread_records_are_taken_out_where_memory_is_asked_for(double: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_THREAD, double], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "100\n", done.stdout + done.stderr


def test_memory_before_observe_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observe, "_library", None)
    with pytest.raises(cudasched.StateError, match=r"cudasched\.torch\.observe"):
        cudasched.torch.memory()


def test_a_snapshot_that_fails_leaves_the_tracker_alone_which_is_attached_once(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a second tracker, which counts all twice, and listeners of a count that has not begun."""
    calls = list[str]()
    names = ("attach", "begin", "begin_with", "begin_with_reserved", "name_stream")
    library = SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) for name in names})
    snapshots = iter([RuntimeError("no memory"), []])

    def snapshot() -> list[object]:
        if isinstance(found := next(snapshots), Exception):
            raise found
        return found

    monkeypatch.setattr(torch, "get_allocator_backend", lambda: "native", raising=False)
    monkeypatch.setattr(torch, "memory_snapshot", snapshot, raising=False)
    monkeypatch.setattr(_extension, "load", lambda: library)
    for module, name, value in (
        (_observe, "_library", None),
        (_observe, "_attached", False),
        (_adapter, "_tell", None),
        (_adapter, "_made", []),
        (_regions, "tell", None),
        (_regions, "_limits", None),
    ):
        monkeypatch.setattr(module, name, value)
    with pytest.raises(RuntimeError, match="no memory"):
        cudasched.torch.observe()
    assert calls == ["attach"] and _adapter._tell is None and _regions.tell is None
    cudasched.torch.observe()
    assert calls == ["attach", "begin"]


def test_another_allocator_tells_nothing(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observe, "_library", None)
    monkeypatch.setattr(torch, "get_allocator_backend", lambda: "cudaMallocAsync", raising=False)
    with pytest.raises(cudasched.torch.ExtensionError, match=r"cudaMallocAsync.*mem_get_info"):
        cudasched.torch.observe()


def a_pytorch(version: str = "2.11.0+cu130", cuda: str | None = "13.0") -> SimpleNamespace:
    return SimpleNamespace(
        __version__=version,
        __file__="/nowhere/torch/__init__.py",
        version=SimpleNamespace(cuda=cuda),
        compiled_with_cxx11_abi=lambda: True,
    )


@pytest.mark.parametrize("version", ["2.3.1", "1.13", "2.14.0", "3.0"])
def test_a_pytorch_that_is_too_old_or_too_new_is_named(version: str) -> None:
    with pytest.raises(cudasched.torch.ExtensionError, match=rf"for PyTorch 2\.4 to 2\.13, and this is {version}"):
        _extension.build(a_pytorch(version))


def test_a_pytorch_without_cuda_has_none(tmp_path: Path) -> None:
    with pytest.raises(cudasched.torch.ExtensionError, match=r"without CUDA.*memory by class"):
        _extension.build(a_pytorch(cuda=None))


def test_without_a_compiler_it_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(cudasched.torch.ExtensionError, match=r"no C\+\+ compiler.*regions, streams, handover"):
        _extension.build(a_pytorch())


def test_a_compilers_failure_is_quoted_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "compiler"
    said = f"a.hpp:1:2: fatal error: no such header\n{700 * '.'}"
    compiler.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(_extension, "_cuda_include", lambda: "/nowhere")
    with pytest.raises(cudasched.torch.ExtensionError, match=r"the compiler failed: a\.hpp:1:2: fatal error: no"):
        _extension.build(a_pytorch())
    assert list(_extension.place(a_pytorch()).parent.iterdir()) == []


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a compiler, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_extension, "_cuda_include", lambda: "/nowhere")
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_a_compiler_may_be_a_command_with_arguments(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env 'A=b c' {compiler}")
    assert _extension.command(a_pytorch(), Path("out"))[:4] == ["env", "A=b c", str(compiler), "-std=c++20"]
    assert _extension.build(a_pytorch()).is_file()
    monkeypatch.setenv("CXX", "/nowhere/c++ -v")
    with pytest.raises(cudasched.torch.ExtensionError, match=r"CXX='/nowhere/c\+\+ -v' names no command; unset it"):
        _extension.build(a_pytorch(), again=True)
    monkeypatch.setenv("CXX", "g++ 'a")
    with pytest.raises(cudasched.torch.ExtensionError, match="is no command: No closing quotation"):
        _extension.build(a_pytorch(), again=True)


def test_a_compiler_may_say_anything_and_is_not_waited_for_without_end(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.write_bytes(b"#!/bin/sh\necho 'a.hpp:1: error: d\xe9claration' >&2\nexit 1\n")
    with pytest.raises(cudasched.torch.ExtensionError, match=r"the compiler failed: a\.hpp:1: error: d"):
        _extension.build(a_pytorch())
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(_extension, "_COMPILES_S", 0.1)
    with pytest.raises(cudasched.torch.ExtensionError, match=r"the compiler did not end within 0\.1 s"):
        _extension.build(a_pytorch())


def test_a_library_that_another_user_could_have_put_there_is_not_loaded(compiler: Path, tmp_path: Path) -> None:
    """As the kernels and the engine do; guards against code of another user."""
    library = _extension.build(a_pytorch())
    assert _extension.built(a_pytorch())
    library.chmod(0o666)
    assert not _extension.built(a_pytorch())
    assert _extension.build(a_pytorch()) == library and (tmp_path / "runs").read_text().count("run") == 2
    library.parent.chmod(0o777)
    assert not _extension.built(a_pytorch())
    with pytest.raises(cudasched.torch.ExtensionError, match="another user may write to it"):
        _extension.build(a_pytorch())


def test_without_a_home_it_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    with pytest.raises(cudasched.torch.ExtensionError, match="neither HOME nor XDG_CACHE_HOME"):
        _extension.place(a_pytorch())
    assert not _extension.built(a_pytorch())


def test_observing_a_pytorch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a PyTorch has no allocator to ask for its kind."""
    monkeypatch.setitem(sys.modules, "torch", a_pytorch(cuda=None))
    with pytest.raises(cudasched.torch.ExtensionError, match="without CUDA"):
        cudasched.torch.observe()


def test_headers_are_taken_from_where_all_of_them_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, toolkit = tmp_path / "wheel", tmp_path / "toolkit"
    for directory in (wheel, toolkit / "crt"):
        directory.mkdir(parents=True)
    for header in (wheel / "cuda_runtime_api.h", toolkit / "cuda_runtime_api.h"):
        header.touch()
    monkeypatch.setattr(_extension, "_include_directories", lambda: iter([str(wheel), str(toolkit)]))
    with pytest.raises(cudasched.torch.ExtensionError, match="pip install nvidia-cuda-runtime nvidia-cuda-crt"):
        _extension._cuda_include()
    (toolkit / "crt" / "host_config.h").touch()
    assert _extension._cuda_include() == str(toolkit)


def test_it_is_kept_by_version_and_abi_and_built_once(compiler: Path, tmp_path: Path) -> None:
    first = _extension.build(a_pytorch())
    assert first.is_file() and _extension.build(a_pytorch()) == first
    assert (tmp_path / "runs").read_text().count("run") == 1
    other = a_pytorch()
    other.compiled_with_cxx11_abi = lambda: False
    assert len({first, _extension.place(a_pytorch("2.12.0")), _extension.place(other)}) == 3
    assert _extension.build(a_pytorch(), again=True) == first
    assert (tmp_path / "runs").read_text().count("run") == 2


def test_the_command_builds_it_or_says_why_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cudasched", "torch", "build"], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    if done.returncode != 0:
        assert "PyTorch" in done.stderr and "Traceback" not in done.stderr
