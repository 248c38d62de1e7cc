"""Graphs of a program's own, over the simulated driver: in Python as in C++ (tests/csrc/device_graph)."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from cudasched import graphs
from cudasched.errors import ConfigError
from cudasched.graphs import Use
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Run, succeeded

# A program that finds libcuda.so.1 as it is loaded: the simulated driver, or the shim before it.
PROGRAM = r"""
import ctypes, sys
from ctypes import byref, c_uint32, c_uint64, c_void_p
from cudasched import graphs

cuda = ctypes.CDLL("libcuda.so.1" if sys.argv[1] == "hooked" else sys.argv[1], mode=ctypes.RTLD_GLOBAL)

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)

IMAGE = b"cudasched-sim 1\nkernel append params=8,8,8,4 block_us=param:3 effect=append\n" \
    b"kernel countdown params=8,8 effect=countdown\n\0"
call("cuInit", 0)
context, module, log, cursor, left, stream = (c_void_p() for _ in range(6))
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", byref(module), IMAGE)
def function(name):
    found = c_void_p()
    call("cuModuleGetFunction", byref(found), module, name)
    return found.value
append, countdown = function(b"append"), function(b"countdown")
for memory, size in ((log, 8192), (cursor, 8), (left, 8)):
    call("cuMemAlloc_v2", byref(memory), c_uint64(size))
    call("cuMemsetD8_v2", memory, 0, c_uint64(size))
call("cuStreamCreate", byref(stream), 1)

def values(value):
    return [c_uint64(log.value), c_uint64(cursor.value), c_uint64(value), c_uint32(20)]

def launch(value):
    given = values(value)
    table = (c_void_p * 4)(*(ctypes.cast(ctypes.pointer(one), c_void_p) for one in given))
    call("cuLaunchKernel", c_void_p(append), 1, 1, 1, 1, 1, 1, 0, stream, table, None)

def logged():
    call("cuCtxSynchronize")
    count = c_uint64()
    call("cuMemcpyDtoH_v2", byref(count), cursor, c_uint64(8))
    entries = (c_uint64 * max(count.value, 1))()
    call("cuMemcpyDtoH_v2", entries, log, c_uint64(8 * count.value))
    call("cuMemsetD8_v2", cursor, 0, c_uint64(8))
    return list(entries)[:count.value]
"""


@pytest.fixture
def run(plain_or_hooked: Run) -> Run:
    """Runs code after PROGRAM."""
    return lambda code: plain_or_hooked(PROGRAM + code)


def test_captures_replays_and_updates(run: Run) -> None:
    succeeded(
        run(
            """
with graphs.capture(stream.value) as captured:
    launch(1)
    launch(2)
assert captured.graph.node_count == 2 and logged() == []
replay = captured.graph.instantiate()
replay.upload(stream.value)
for _ in range(2):
    replay.launch(stream.value)
assert logged() == [1, 2, 1, 2]

graph = graphs.Graph()
first = graph.add_kernel(append, 1, (1, 1), values(3))
second = graph.add_kernel(append, 1, 1, values(4), after=[graph.add_empty(after=[first])])
replay = graph.instantiate()
replay.set_kernel(first, append, 1, 1, values(5))
replay.launch(stream.value)
assert logged() == [5, 4]
assert not replay.update(captured.graph).done
replay.set_enabled(second, False)
replay.launch(stream.value)
assert logged() == [5]
"""
        )
    )


def test_too_few_arguments_and_of_other_sizes_are_refused(run: Run) -> None:
    succeeded(
        run(
            """
graph = graphs.Graph()
node = graph.add_kernel(append, 1, 1, values(3))
replay = graph.instantiate()
for ask in (lambda: graph.add_kernel(append, 1, 1, values(4)[:3]), lambda: replay.set_kernel(node, append, 1, 1)):
    try:
        ask()
    except ValueError as error:
        assert "the kernel append has 4 parameters, and " in str(error), error
    else:
        raise SystemExit("no error")
try:
    graph.add_kernel(append, 1, 1, [*values(3)[:2], c_uint32(3), values(3)[3]])
except ValueError as error:
    assert "the kernel append has 8 bytes as parameter 2, and 4 are given" in str(error), error
else:
    raise SystemExit("no error")
replay.launch(stream.value)
assert logged() == [3]
"""
        )
    )


def test_conditional_nodes(run: Run) -> None:
    succeeded(
        run(
            """
call("cuMemcpyHtoD_v2", left, byref(c_uint64(3)), c_uint64(8))
graph = graphs.Graph()
turns, choice, truth = graph.condition(1), graph.condition(2), graph.condition(1)
loop = graph.add_while(turns)
with graphs.capture(stream.value, into=loop.bodies[0]):
    launch(7)
last = loop.bodies[0].add_kernel(countdown, 1, 1, [c_uint64(turns), c_uint64(left.value)])
cases = graph.add_switch(choice, 3, after=[loop.node])
for number, body in enumerate(cases.bodies):
    body.add_kernel(append, 1, 1, values(10 + number))
either = graph.add_if(truth, with_else=True, after=[cases.node])
for number, body in enumerate(either.bodies):
    body.add_kernel(append, 1, 1, values(20 + number))
replay = graph.instantiate()
replay.launch(stream.value)
assert logged() == [7, 7, 7, 12, 20], "wrong"
"""
        )
    )


def test_a_condition_decides_one_node(run: Run) -> None:
    succeeded(
        run(
            """
graph = graphs.Graph()
choice = graph.condition(1)
graph.add_if(choice)
try:
    graph.add_switch(choice, 2)
except graphs.DriverError as error:
    assert "each has a condition of its own" in str(error), error
else:
    raise AssertionError("two nodes by one condition")
"""
        )
    )


def test_a_graph_lives_as_long_as_what_names_a_part_of_it(run: Run) -> None:
    succeeded(
        run(
            """
import gc, weakref
def made():
    graph = graphs.Graph()
    node = graph.add_kernel(append, 1, 1, values(3))
    return weakref.ref(graph), graph.instantiate(), node

graph, replay, node = made()
gc.collect()
assert graph() is not None
replay.set_kernel(node, append, 1, 1, values(4))
replay.launch(stream.value)
assert logged() == [4]
del replay
gc.collect()
assert graph() is None

def looped():
    graph = graphs.Graph()
    return weakref.ref(graph), graph.add_while(graph.condition(1)).bodies[0]

graph, body = looped()
gc.collect()
assert graph() is not None
body.add_kernel(append, 1, 1, values(5))
assert body.node_count == 1
"""
        )
    )


def test_the_document_says_which_graphs_go_whole(
    simulated: Path, command: str, quick_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with conditional nodes, and those that the device may launch, are never cut into slices."""
    monkeypatch.setenv("CUDASCHED_GRAPH_SLICES", "always")
    Path("program.py").write_text(
        PROGRAM
        + """
import time
import cudasched
looping, plain = graphs.Graph(), graphs.Graph()
body = looping.add_if(looping.condition(1)).bodies[0]
for number in range(4):
    body.add_kernel(append, 1, 1, values(number))
    plain.add_kernel(append, 1, 1, values(number))
both = looping.instantiate(), plain.instantiate(device_launch=True)
wanted = {"conditional", "device_launch"}
for _ in range(300):
    for replay in both:
        replay.launch(stream.value)
    assert len(logged()) == 8
    whole = {name for name, count in cudasched.state().graphs_whole.items() if count}
    if wanted <= whole:
        break
    time.sleep(0.02)
assert wanted <= whole, whole
"""
    )
    arguments = [command, "run", "--class", "best-effort", "--", sys.executable, "program.py", "hooked"]
    succeeded(subprocess.run(arguments, capture_output=True, text=True, timeout=120))


def test_a_program_that_fails_in_a_capture_goes_on(run: Run) -> None:
    succeeded(
        run(
            """
for breaks in (False, True):
    try:
        with graphs.capture(stream.value) as captured:
            launch(1)
            if breaks:
                assert cuda.cuStreamSynchronize(stream) != 0
            raise KeyError
    except KeyError:
        pass
try:
    with graphs.capture(stream.value) as captured:
        cuda.cuStreamSynchronize(stream)
    raise SystemExit("no error")
except graphs.DriverError as error:
    assert "cuStreamEndCapture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" in str(error), error
launch(2)
assert logged() == [2]
"""
        )
    )


def test_threads_make_executables_at_once(run: Run) -> None:
    """pybind11 notes each new object in a table that only the GIL guards."""
    succeeded(
        run(
            """
import threading
from cudasched import _core
sys.setswitchinterval(1e-6)
graph = _core.Graph()
graph.add_empty([])
turns = 1_000 if sys.argv[1] == "hooked" else 10_000

def make(count, kind):
    call("cuCtxSetCurrent", context)
    for _ in range(count):
        kept = [kind() for _ in range(20)]
kinds = [(turns, lambda: _core.GraphExecutable(graph, False)), (20_000, _core.ReplaySettings)]
threads = [threading.Thread(target=make, args=of) for of in kinds * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
        )
    )


def test_what_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DRIVER_VERSION", "12020")
    succeeded(
        run(
            """
def said(ask):
    try:
        ask()
    except graphs.UnsupportedError as error:
        return str(error)
assert graphs.driver_version() == 12020
assert "need an NVIDIA driver for CUDA 12.4 (release 550)" in said(lambda: graphs.Graph().condition(1))
assert "captures into a graph need" in said(lambda: graphs.capture(stream.value, into=graphs.Graph()).__enter__())
assert "peers need" in said(lambda: graphs.enable_peer_access(context.value, context.value))
assert "linked at run time need" in said(lambda: graphs.LinkedModule([b"x"]))
"""
        )
    )


def test_a_machine_without_a_driver_is_said(python: Run, no_driver: Path) -> None:
    if Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists():
        pytest.skip("this machine has a driver")
    done = python("from cudasched import graphs\ntry: graphs.Graph()\nexcept graphs.UnsupportedError as e: print(e)")
    assert "there is no NVIDIA driver here" in done.stdout, done


uses = st.builds(
    lambda nbytes, first, length: Use(nbytes, first, first + length),
    st.integers(0, 4000),
    st.integers(0, 9),
    st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(uses, max_size=12))
def test_a_plan_keeps_apart_what_is_used_at_once(wanted: list[Use]) -> None:
    offsets, nbytes = graphs.plan_memory(wanted)
    for i, (one, at) in enumerate(zip(wanted, offsets, strict=True)):
        assert at % 256 == 0 and at + one.nbytes <= max(nbytes, at)
        for other, place in zip(wanted[:i], offsets[:i], strict=True):
            if one.first_step <= other.last_step and other.first_step <= one.last_step and one.nbytes and other.nbytes:
                assert at + one.nbytes <= place or place + other.nbytes <= at


def test_the_device_runtime_is_found_beside_the_nvcc_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin", "targets/x86_64-linux/lib", "other/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin" / "nvcc").touch()
    (tmp_path / "targets/x86_64-linux/lib/libcudadevrt.a").touch()
    (tmp_path / "other/lib/libcudadevrt.a").touch()
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"/nowhere:{tmp_path / 'bin'}")
    if not Path("/usr/local/cuda/lib64/libcudadevrt.a").exists():
        monkeypatch.delenv("CUDA_HOME", raising=False)
        assert graphs._device_runtime() == str(tmp_path / "targets/x86_64-linux/lib/libcudadevrt.a")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert graphs._device_runtime() == str(tmp_path / "other/lib/libcudadevrt.a")


def test_arguments_say_their_types() -> None:
    assert graphs._parameter(ctypes.c_uint32(7)) == b"\7\0\0\0"
    assert graphs._parameter(b"ab") == b"ab"
    numpy = pytest.importorskip("numpy")
    for value in (7, 1.5):
        for kind in ("uint8", "int32", "uint64", "float32", "float64", "bool"):
            scalar = numpy.dtype(kind).type(value)
            assert graphs._parameter(scalar) == scalar.tobytes(), kind
    with pytest.raises(ConfigError, match="c_uint32"):
        graphs._parameter(7)
    with pytest.raises(ConfigError, match="grid"):
        graphs._sizes((0, 1), "grid")
    with pytest.raises(ValueError, match="before it begins"):
        graphs.plan_memory([Use(1, 2, 1)])
    with pytest.raises(ConfigError, match="has not ended"):
        _ = graphs.Captured().graph
