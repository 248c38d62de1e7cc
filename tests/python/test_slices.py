"""Graphs in slices, end to end on the simulated driver; what the engine does by itself is in tests/csrc/runtime."""

from __future__ import annotations

import pytest
from program import PATIENT, Stage, eventually

pytestmark = pytest.mark.usefixtures("quick_device")

LOG = "from logged import *; gpu = Gpu(); log = Log(gpu); log.note(0); gpu.synchronize()"

MAKE = """
import ctypes, time
stream = gpu.stream()
def captured(first):
    graph = ctypes.c_void_p()
    gpu.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), CAPTURE_THREAD_LOCAL)
    log.note(*range(first, first + 40), stream=stream, us=60)
    gpu.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    return graph
def update(first):
    result = (ctypes.c_uint64 * 4)()
    gpu.call("cuGraphExecUpdate_v2", executable, captured(first), result)
def switch_off(place):
    gpu.call("cuGraphNodeSetEnabled", executable, ctypes.c_void_p(nodes[place]), 0)
def replay(times):
    for _ in range(times):
        gpu.replay(executable.value, stream)
        gpu.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        time.sleep(0.005)
graph = captured(1)
executable, nodes, count = ctypes.c_void_p(), (ctypes.c_void_p * 40)(), ctypes.c_size_t(40)
gpu.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
gpu.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
"""


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_what_is_switched_off_stays_so_over_updates_in_slices_too(stage: Stage, updates: int) -> None:
    settings = {"CUDASCHED_GRAPH_SLICES": "always", "CUDASCHED_GRAPH_SLICE_US": "100"}
    program = stage.run("best-effort", **PATIENT, **settings)
    program.call(LOG)
    program.call(MAKE)
    program.call(f"for turn in range({updates}): replay(1); update(1001 + 40 * turn)")
    program.call("switch_off(7); replay(70); update(2001); replay(30)")
    seen = program.call("log.read()")
    assert isinstance(seen, list)
    last = [value for value in seen if value >= 2001]
    assert last == [value for _ in range(30) for value in range(2001, 2041) if value != 2008]
    assert (program.end(), program.stderr) == (0, "")


def test_slices_outlive_the_context_of_another_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    settings = {"CUDASCHED_GRAPH_SLICES": "always", "CUDASCHED_GRAPH_SLICE_US": "100"}
    program = stage.run("best-effort", **PATIENT, **settings)
    program.call(LOG)
    program.call(MAKE)
    program.call("replay(70)")
    eventually(lambda: program.count("graphs_sliced") == 1, "it is cut")
    program.call("other = Gpu(1); gpu.use(); gpu.call('cuDevicePrimaryCtxReset_v2', 1)")
    assert program.count("graphs_sliced") == 1
    assert (program.end(), program.stderr) == (0, "")
