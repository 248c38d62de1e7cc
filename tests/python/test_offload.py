"""Best-effort launches that a launcher thread makes (docs/order.md), end to end on the simulated driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program import ENTER, HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually, wait_at_the_gate
from support import PATIENCE_S, Run, but_for_long_kernels, stop

RING = 4095 - 256
"""Launches that the ring has room for; a sixteenth of it is for what comes between them."""

LOG = "from logged import *; gpu = Gpu(); log = Log(gpu); log.note(0); gpu.synchronize()"
"""The first launch of its kind is never deferred; its like are from then on."""

pytestmark = pytest.mark.usefixtures("quick_device")


@pytest.fixture
def misbehaving(cudasched: Run, simulated: Path) -> Run:
    """Runs code under `cudasched run --class best-effort`, with what logged.py has."""

    def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
        code = f"import os, sys\nfrom program import *\n{LOG}\n{code}"
        return cudasched("run", "--class", "best-effort", "--", sys.executable, "-c", code, **options)

    return run


def server(stage: Stage) -> Program:
    """A latency client that is idle, and that ENTER and LEAVE make active and idle again."""
    program = stage.importing(CUDASCHED_CLASS="latency", **PATIENT, **HOLDING)
    program.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    return program


def trainer(stage: Stage, **environment: str) -> Program:
    program = stage.run("best-effort", **PATIENT, **environment)
    program.call(LOG)
    return program


def ended_well(*programs: Program) -> None:
    for program in programs:
        assert (program.end(), program.stderr) == (0, "")


# ---- order, and who waits ------------------------------------------------------------------------------------------


def test_launches_return_behind_a_closed_gate_and_run_in_order_when_it_opens(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    train.call("streams = [gpu.stream() for _ in range(3)]")
    serve.call(ENTER)
    train.call("log.note(*range(1, 101))")
    train.call("log.across(range(101, 201), streams); log.wait(0, log.event())")
    wait_at_the_gate(train)
    assert (train.count("best_effort_launches"), train.count("offloaded_launches")) == (1, 0)
    serve.call("gpu.launch(5); gpu.synchronize()")
    assert train.count("offloaded_launches") == 0
    serve.call(LEAVE)
    assert train.call("log.read()") == list(range(201))
    assert (train.count("best_effort_launches"), train.count("offloaded_launches")) == (201, 200)
    assert train.count("gated_launches") == 201
    assert train.count("gate_waits") >= 1
    ended_well(serve, train)


def keeps_running(program: Program) -> bool:
    """Whether its launcher thread is never found asleep. On a busy machine one that spins has hardly any CPU time."""

    def runs() -> bool:
        time.sleep(0.003)
        tasks = Path(f"/proc/{program.pid}/task").iterdir()
        (launcher,) = (task for task in tasks if (task / "comm").read_text() == "cudasched-queue\n")
        return (launcher / "stat").read_text().rpartition(")")[2].split()[0] == "R"

    return all(runs() for _ in range(50))


def test_a_launcher_that_is_told_to_spins_on_an_empty_ring_and_behind_a_closed_gate(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage, CUDASCHED_LAUNCHER_SPINS="1")

    train.call("log.note(1)")
    eventually(lambda: keeps_running(train), "it spins on an empty ring")
    serve.call(ENTER)
    train.call("log.note(*range(2, 101))")
    wait_at_the_gate(train)
    eventually(lambda: keeps_running(train), "it spins at the gate")
    serve.call(LEAVE)
    assert train.call("log.read()") == list(range(101))
    ended_well(serve, train)


def test_launches_are_offloaded_without_a_latency_client(stage: Stage) -> None:
    train = trainer(stage)
    train.call("log.note(*range(1, 1001))")
    assert train.call("log.read()") == list(range(1001))
    seen = train.call("state()")
    assert isinstance(seen, dict)
    assert [seen[name] for name in ("offloaded_launches", "best_effort_launches", "gated_launches")] == [1000, 1001, 0]
    ended_well(train)


def sharing(stage: Stage, host_backoff_ms: str = "3600000") -> Program:
    """A program with a best-effort stream on which it has launched, and threads that back off for so long."""
    program = stage.importing(**PATIENT, **HOLDING, CUDASCHED_HOST_BACKOFF_MS=host_backoff_ms)
    program.call("gpu = Gpu(); cudasched.bind_stream(stream := gpu.stream(), 'best_effort')")
    program.call("gpu.launch(2, stream=stream); gpu.synchronize()")
    return program


@pytest.mark.parametrize(("host_backoff_ms", "backs_off"), [("3600000", True), ("0", False)])
def test_best_effort_threads_back_off_for_a_request_of_their_program(
    stage: Stage, host_backoff_ms: str, backs_off: bool
) -> None:
    program = sharing(stage, host_backoff_ms)
    program.call(ENTER)
    program.call("gpu.launch(3, stream=stream)")  # in the region itself: of the thread that all wait for
    program.call("helper = Worker(gpu, lambda: gpu.launch(3, stream=stream))")
    if backs_off:
        eventually(lambda: program.count("backed_off") == 1, "it pauses")
        assert program.call("helper.is_alive()")
        program.call(LEAVE)
    program.call("helper.join()")
    assert program.count("backed_off") == (1 if backs_off else 0)
    if not backs_off:
        program.call(LEAVE)
    program.call("gpu.synchronize()")
    ended_well(program)


WAITS = (
    'gpu.call("cuStreamSynchronize", handle)',
    'gpu.call("cuEventSynchronize", event)',
    "gpu.synchronize()",
)


@pytest.mark.parametrize("wait", WAITS)
def test_a_best_effort_thread_that_returns_from_a_wait_backs_off_too(stage: Stage, wait: str) -> None:
    """Once for what it has launched: it may hold a lock of the program's, as an allocator does that waits for many."""
    program = sharing(stage)
    program.call("import ctypes, threading; event, handle = ctypes.c_void_p(), ctypes.c_void_p(stream)")
    program.call('gpu.call("cuEventCreate", ctypes.byref(event), 0)')
    program.call('gpu.call("cuEventRecord", event, handle); gpu.synchronize(); go = threading.Event()')
    program.call(f"helper = Worker(gpu, lambda: [gpu.launch(stream=stream), go.wait(), {wait}, {wait}])")
    eventually(lambda: program.count("offloaded_launches") == 2, "it has launched, as before")
    program.call(ENTER)
    program.call(f"{wait}; go.set()")  # in the region itself
    eventually(lambda: program.count("backed_off") == 1, "it pauses")
    assert program.call("helper.is_alive()")
    program.call(LEAVE)
    program.call("helper.join()")
    assert program.count("backed_off") == 1
    ended_well(program)


@pytest.mark.parametrize("launches", ["[]", "[gpu.launch(stream=stream), gpu.launch(stream=served)]"])
def test_a_thread_that_waits_for_other_work_does_not_back_off(stage: Stage, launches: str) -> None:
    program = sharing(stage)
    program.call("cudasched.bind_stream(served := gpu.stream(), 'latency'); gpu.launch(stream=served)")
    program.call("import threading; ready, go = threading.Event(), threading.Event()")
    program.call(f"helper = Worker(gpu, lambda: [{launches}, ready.set(), go.wait(), gpu.synchronize()])")
    program.call("ready.wait(); gpu.synchronize()")
    program.call(ENTER)
    program.call("go.set(); helper.join()")
    program.call(LEAVE)
    assert program.count("backed_off") == 0
    ended_well(program)


def test_a_best_effort_thread_backs_off_behind_its_launch(stage: Stage) -> None:
    """The GPU may go on with it, and one that had to wait for room does not go on to the next."""
    program = sharing(stage)
    before = program.count("offloaded_launches")
    program.call(ENTER)
    program.call("helper = Worker(gpu, lambda: gpu.launch(stream=stream))")
    eventually(lambda: program.count("backed_off") == 1, "it pauses")
    program.call("gpu.synchronize()")  # the gate opens for it
    assert program.count("offloaded_launches") == before + 1
    assert program.call("helper.is_alive()")
    program.call(LEAVE)
    program.call("helper.join()")
    ended_well(program)


def test_what_observes_the_end_waits_for_it(stage: Stage) -> None:
    """Each waits behind the closed gate, too: no latency work is in this process."""
    serve, train = server(stage), trainer(stage)
    train.call(
        "stream = ctypes.c_void_p(gpu.stream()); event = log.event(); spare = [log.allocate(64) for _ in range(2)]"
    )
    train.call("host = (ctypes.c_uint64 * 1)(); log.note(0, stream=stream.value); gpu.synchronize()")
    observers = [
        "gpu.synchronize()",
        'gpu.call("cuStreamSynchronize", stream)',
        'gpu.call("cuEventSynchronize", event)',
        'gpu.call("cuMemcpyDtoH_v2", host, log.values, ctypes.c_size_t(8))',
        'gpu.call("cuMemFree_v2", spare.pop())',
        'gpu.call("cuStreamBeginCapture_v2", stream, 1); gpu.call("cuStreamEndCapture", stream, ctypes.byref(event))',
    ]
    for turn, observe in enumerate(observers, 1):
        serve.call(ENTER)
        train.call(f"log.note({turn}, stream=stream.value); log.record(event, stream.value)")
        assert train.call('log.ready("cuEventQuery", event)') is False
        assert train.call('log.ready("cuStreamQuery", stream)') is False
        train.send(observe)
        wait_at_the_gate(train)
        serve.call(LEAVE)
        train.answer()
        assert train.count("offloaded_launches") == turn + 1
    assert train.call("log.read()") == [0, 0, *range(1, len(observers) + 1)]


def test_a_query_says_ready_only_when_the_work_is_done(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    train.call("stream = ctypes.c_void_p(gpu.stream()); event = log.event()")
    serve.call(ENTER)
    train.call("log.note(1, stream=stream.value); log.record(event, stream.value)")
    for _ in range(20):
        assert train.call('log.ready("cuEventQuery", event)') is False
    serve.call(LEAVE)
    eventually(lambda: train.call('log.ready("cuEventQuery", event)'), "the event is ready")
    assert train.call('log.ready("cuStreamQuery", stream)') is True
    assert train.count("offloaded_launches") == 1


def test_a_full_ring_holds_the_program_until_the_gate_opens(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    train.call("launched = 0")
    serve.call(ENTER)
    train.call(
        f"def many():\n    global launched\n    for value in range(1, {RING + 501}):\n"
        "        log.note(value)\n        launched = value\n"
        "worker = Worker(gpu, many)"
    )
    eventually(lambda: train.call("launched") == RING, "the ring is full")
    wait_at_the_gate(train)
    assert train.call("launched") == RING
    assert train.count("offloaded_launches") == 0
    serve.call(LEAVE)
    train.call("worker.join()")
    assert train.call(f"log.read() == list(range({RING + 501}))") is True
    assert train.count("offloaded_launches") == RING + 500
    ended_well(serve, train)


# ---- graphs and captures -------------------------------------------------------------------------------------------


def test_graphs_are_deferred_in_order_and_captures_pass(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    train.call("stream = gpu.stream(); graph = log.graph([7, 8], stream); gpu.replay(graph, stream); gpu.synchronize()")
    assert train.count("offloaded_launches") == 0
    serve.call(ENTER)
    train.call("other = gpu.stream(); late = log.graph([9], other)")
    train.call("for value in (1, 2): log.note(value, stream=stream); gpu.replay(graph, stream)")
    wait_at_the_gate(train)
    assert train.count("offloaded_launches") == 0
    train.send("gpu.replay(late, stream); log.note(3, stream=stream); print(file=sys.stderr)")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.call("log.read()") == [0, 7, 8, 1, 7, 8, 2, 7, 8, 9, 3]
    assert train.count("offloaded_launches") == 5


# ---- switched off --------------------------------------------------------------------------------------------------


def test_a_graph_launched_directly_does_not_overtake_its_own_queued_launches(stage: Stage) -> None:
    """A launch on the per-thread default stream is never deferred; the one before it, on another stream, is."""
    train = trainer(stage)
    train.call("stream = gpu.stream(); graph = log.graph([1, 2, 3], stream)")
    train.call("for i in range(200):\n to = (stream, 2)[i % 2]\n gpu.replay(graph, to)\n log.note(100 + i, stream=to)")
    seen = train.call("log.read()")
    assert isinstance(seen, list) and len(seen) == 1 + 200 * 4
    ran = 0
    for value in seen[1:]:
        ran += value < 100
        assert value < 100 or ran >= 3 * (value - 99), f"the launch before {value} had not run"
    assert train.count("offloaded_launches") > 100
    ended_well(train)


def test_what_switches_it_off(stage: Stage, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    switches = [
        {"CUDASCHED_OFFLOAD": "0"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"CUDA_INJECTION64_PATH": "/nowhere/libtool.so"},
        {"CUDASCHED_COLLECT_DIR": str(recorded), "CUDASCHED_COLLECT_TIMING": "events"},
    ]
    serve, trainers = server(stage), [trainer(stage, **switch) for switch in [{}, *switches]]
    for train in trainers:
        train.call("log.note(*range(1, 20)); gpu.synchronize()")
    assert [train.count("offloaded_launches") for train in trainers] == [19, 0, 0, 0, 0]
    assert {train.count("best_effort_launches") for train in trainers} == {20}
    serve.call(ENTER)
    for train in trainers[1:]:
        train.send("log.note(20)")
    trainers[0].call("log.note(20)")
    wait_at_the_gate(*trainers[1:])
    serve.call(LEAVE)
    for train in trainers[1:]:
        train.answer()
    for train in trainers:
        assert train.call("log.read()") == list(range(21))


def test_it_is_off_while_the_program_records(stage: Stage) -> None:
    train = stage.importing(CUDASCHED_CLASS="best-effort")
    train.call(LOG)
    train.call("log.note(*range(1, 11))")
    train.call("with cudasched.collect('data.parquet', timing='events'): log.note(*range(11, 21)); gpu.synchronize()")
    assert train.count("offloaded_launches") == 10
    train.call("log.note(*range(21, 31))")
    assert train.call("log.read()") == list(range(31))
    assert train.count("offloaded_launches") == 20
    assert train.call("cudasched.collect.read('data.parquet').num_rows") == 10


# ---- errors --------------------------------------------------------------------------------------------------------


def test_a_launch_that_cannot_be_fails_where_it_is_made(stage: Stage) -> None:
    train = trainer(stage)
    train.call(
        "def status(**how):\n"
        "    try: log.note(99, **how)\n"
        "    except RuntimeError as error: return str(error)\n"
        "log.note(*range(1, 51))"
    )
    assert train.call("status(grid=0)") == "cuLaunchKernel failed with status 1"
    assert train.call("status(stream=12345678)") == "cuLaunchKernel failed with status 400"
    train.call("Worker(gpu, lambda: log.note(51)).join(); log.note(52)")
    assert train.call("log.read()") == list(range(53))
    assert train.count("offloaded_launches") == train.count("best_effort_launches") - 1 == 52


STICKY = """
def status(what):
    try: what()
    except RuntimeError as error: return int(str(error).split()[-1])
    return 0
gpu.call("cuMemFree_v2", log.values)
print([status(lambda: log.note(1)), status(gpu.synchronize), status(gpu.synchronize)])
sys.stdout.flush()
os._exit(0)
"""


def test_a_sticky_error_is_told_as_the_driver_tells_it(misbehaving: Run, python: Run, simulated: Path) -> None:
    code = f"import os, sys\nfrom program import *\n{LOG}\n{STICKY}"
    bare = python(code, env={**os.environ, "LD_LIBRARY_PATH": str(simulated.parent)})
    assert (bare.stdout, bare.stderr) == ("[0, 700, 700]\n", "")
    done = misbehaving(STICKY)
    assert (done.stdout, done.stderr) == (bare.stdout, "")


# ---- ends, forks, other programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "runs"),
    [
        ("sys.exit(5)", 5, True),
        ("class Enough(BaseException): pass\nraise Enough", 1, True),
        ("os._exit(5)", 5, True),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, False),
    ],
)
def test_the_end_of_a_program_with_work_in_the_ring(
    stage: Stage, tmp_path: Path, end: str, code: int, runs: bool
) -> None:
    """What was launched is run before CUDA's own exit handler, whatever the gate; the report counts it."""
    reports = tmp_path / "reports"
    reports.mkdir()
    serve = server(stage)
    train = trainer(stage, CUDASCHED_COVERAGE_DIR=str(reports), CUDASCHED_CUPTI="/nowhere/libcupti.so")
    serve.call(ENTER)
    train.call("import signal; log.note(*range(1, 51))")
    assert train.count("offloaded_launches") == 0
    train.send(end)
    assert train.process.wait(PATIENCE_S) == code
    (report,) = [json.loads(path.read_text()) for path in reports.iterdir()]
    assert report["hook_launches"] == (51 if runs else 0)
    assert (report["error"] == "the program did not come to an end") == (not runs)
    serve.call("gpu.launch(); gpu.synchronize()")
    assert set(clients()) == {serve.pid}


def test_work_that_never_ends_does_not_keep_a_program_from_ending(misbehaving: Run) -> None:
    """More of it than the driver takes, so that the launcher stands in the driver."""
    begin = time.monotonic()
    done = misbehaving("log.note(*range(1, 2001), us=FOREVER_US)\nsys.exit(5)")
    assert (done.returncode, done.stdout, but_for_long_kernels(done.stderr)) == (5, "", "")
    assert time.monotonic() - begin < PATIENCE_S / 2


def test_a_fork_with_work_in_the_ring(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.call("log.note(*range(1, 51))")
    for end, code in (("os._exit(3)", 3), ("sys.exit(4)", 4)):
        train.call(
            "child = os.fork()\n"
            "if child == 0:\n"
            "    assert state()['offloaded_launches'] == 0\n"
            "    try:\n"
            "        gpu.synchronize(); log.note(99)\n"
            "    except RuntimeError as error:\n"
            "        assert 'status 3' in str(error), error\n"
            "    else:\n"
            "        os._exit(9)\n"
            f"    {end}\n"
            "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
        )
        assert train.call("code") == code
    train.call("log.note(51)")
    assert train.count("offloaded_launches") == 0
    serve.call(LEAVE)
    assert train.call("log.read()") == list(range(52))
    ended_well(serve, train)


def test_another_program_takes_the_place_of_one_with_work_in_the_ring(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.call("log.note(*range(1, 51))")
    train.send("os.execv(sys.executable, [sys.executable, sys.modules['__main__'].__file__])")
    assert train.call("state()['launches']") == 0
    serve.call(LEAVE)
    train.call(LOG)
    train.call("log.note(1, 2)")
    assert train.call("log.read()") == [0, 1, 2]
    assert train.count("offloaded_launches") == 2
    ended_well(serve, train)


def test_a_best_effort_program_is_killed_while_latency_work_waits(stage: Stage) -> None:
    serve, dies, stays = server(stage), trainer(stage), trainer(stage)
    for train in (dies, stays):
        train.call("feeder = Feeder(gpu)")
    serve.send("for _ in range(30):\n    with cudasched.region('latency'): gpu.launch(3); gpu.synchronize()")
    dies.kill()
    serve.answer()
    assert set(clients()) == {serve.pid, stays.pid}
    before = stays.number("feeder.count")
    eventually(lambda: stays.number("feeder.count") > before + 10, "the other goes on")
    assert stays.number("feeder.stop()") > 0
    stays.call("gpu.synchronize()")


def test_a_program_is_stopped_with_work_in_the_ring(stage: Stage) -> None:
    serve, stops, train = server(stage), trainer(stage), trainer(stage)
    serve.call(ENTER)
    stops.call("log.note(*range(1, 101))")
    stop(stops.pid)
    serve.call(LEAVE)
    train.call("log.note(*range(1, 101))")
    assert train.call("log.read()") == list(range(101))
    serve.call("with cudasched.region('latency'): gpu.launch(3); gpu.synchronize()")
    os.kill(stops.pid, signal.SIGCONT)
    assert stops.call("log.read()") == list(range(101))
    assert stops.count("offloaded_launches") == 100
    ended_well(serve, stops, train)


# ---- both classes in one process -----------------------------------------------------------------------------------

BEST_EFFORT = """
def best_effort(action, *arguments, **how):
    with cudasched.region("best_effort"):
        return action(*arguments, **how)
def synchronizes(keep_gil):
    gpu.call("cuCtxSynchronize", keep_gil=keep_gil)
"""


SERVE = "gpu.launch(3, stream=serving); gpu.call('cuStreamSynchronize', ctypes.c_void_p(serving))"


def both_classes(stage: Stage) -> Program:
    program = stage.importing(**PATIENT, **HOLDING)
    program.call("from logged import *; gpu = Gpu(); log = Log(gpu); serving = gpu.stream(); spare = log.allocate(64)")
    program.call("with cudasched.region('latency'): gpu.launch(stream=serving); gpu.synchronize()")
    program.call(BEST_EFFORT)
    program.call("Worker(gpu, lambda: best_effort(log.note, 0)).join(); gpu.synchronize()")
    return program


def test_who_waits_behind_the_gate_beside_latency_work(stage: Stage) -> None:
    program = both_classes(stage)
    program.call(ENTER)
    program.call("best_effort(log.note, 1)")
    program.call("Worker(gpu, lambda: best_effort(log.note, *range(2, 51))).join()")
    offloaded = program.count("offloaded_launches")
    assert offloaded < 50
    # Without the GIL it waits; with it, or for another reason than a synchronise, it must not.
    program.call("waits = Worker(gpu, lambda: best_effort(synchronizes, False))")
    wait_at_the_gate(program)
    program.call(SERVE)
    assert program.call("waits.is_alive()") is True
    assert program.count("offloaded_launches") == offloaded
    program.call("Worker(gpu, lambda: best_effort(synchronizes, True)).join()")
    program.call("waits.join()")
    opened = program.count("offloaded_launches")
    assert opened > offloaded
    program.call("Worker(gpu, lambda: best_effort(log.note, 51)).join()")
    program.call("Worker(gpu, lambda: best_effort(gpu.call, 'cuMemFree_v2', spare)).join()")
    assert program.count("offloaded_launches") == opened + 1
    program.call("Worker(gpu, lambda: best_effort(log.note, 52)).join()")
    program.call("gpu.synchronize()")  # by latency work
    assert program.count("offloaded_launches") == opened + 2
    program.call(LEAVE)
    assert program.call("log.read()") == list(range(53))
    ended_well(program)


def test_the_threads_that_work_for_a_region_wait_with_it(stage: Stage) -> None:
    """Two classes in one process, as README shows: autograd's threads launch the backward pass outside any region."""
    program = both_classes(stage)
    program.call(
        "go, passed = threading.Event(), threading.Event()\n"
        "def trains():\n"
        "    with cudasched.region('best_effort'):\n"
        "        log.note(1)\n"
        "        backward = Worker(gpu, lambda: log.note(*range(2, 31)))\n"
        "        backward.join()\n"
        "        go.wait()\n"
    )
    program.call(ENTER)
    program.call("trainer = Worker(gpu, trains)")
    wait_at_the_gate(program)
    before = program.count("offloaded_launches")
    program.call(SERVE)
    assert program.count("offloaded_launches") == before
    assert program.count("normal_beside_best_effort") == 0
    program.call(LEAVE)
    program.call("go.set(); trainer.join()")
    assert program.call("log.read()") == list(range(31))
    assert program.count("best_effort_launches") == 31
    ended_well(program)


def test_events_and_stream_ordered_memory_end_behind_a_backlog_without_a_wait(stage: Stage) -> None:
    """Found: an event's destruction waited for all that was queued, 1.4 s behind 20 launches, and opened the gate."""
    program = both_classes(stage)
    program.call(
        "def ends():\n"
        "    event, address, stream = log.event(), ctypes.c_uint64(), ctypes.c_void_p(gpu.stream())\n"
        "    gpu.call('cuMemAllocAsync', ctypes.byref(address), ctypes.c_size_t(4096), stream)\n"
        "    log.note(*range(1, 21), stream=stream.value)\n"
        "    log.record(event, stream.value)\n"
        "    gpu.call('cuEventDestroy_v2', event)\n"
        "    gpu.call('cuMemFreeAsync', address, stream)\n"
        "    other = ctypes.c_uint64()\n"
        "    gpu.call('cuMemAllocAsync', ctypes.byref(other), ctypes.c_size_t(4096), stream)\n"
        "    assert other.value != address.value\n"
        "    gpu.call('cuMemFreeAsync', other, stream)\n"
        "    gpu.call('cuEventDestroy_v2', log.event())"
    )
    program.call(ENTER)
    program.call("Worker(gpu, lambda: best_effort(ends)).join()")
    assert program.count("offloaded_launches") == 0
    program.call(LEAVE)
    program.call("gpu.synchronize()")
    assert program.call("log.read()") == list(range(21))
    ended_well(program)


def test_memory_whose_free_is_queued_is_freed_before_a_program_hears_that_there_is_none(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    # Seven eighths of the device's 64 GiB, which nothing touches.
    train.call(
        "size, stream, taken, more = ctypes.c_size_t(8 << 30), ctypes.c_void_p(gpu.stream()), [], ctypes.c_uint64()\n"
        "for _ in range(7):\n"
        "    taken.append(ctypes.c_uint64())\n"
        "    gpu.call('cuMemAllocAsync', ctypes.byref(taken[-1]), size, stream)\n"
        "log.note(1, stream=stream.value); gpu.synchronize()"
    )
    serve.call(ENTER)
    train.call("log.note(2, stream=stream.value)\nfor each in taken: gpu.call('cuMemFreeAsync', each, stream)")
    train.send("gpu.call('cuMemAllocAsync', ctypes.byref(more), size, stream)")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.call("log.read()") == [0, 1, 2]
    ended_well(serve, train)


def test_graphs_made_before_the_first_best_effort_launch_are_offloaded(stage: Stage) -> None:
    program = stage.importing(**PATIENT, **HOLDING)
    program.call("from logged import *; gpu = Gpu(); log = Log(gpu); stream = gpu.stream()")
    program.call("graph = log.graph([1, 2], stream)")
    program.call(BEST_EFFORT)
    program.call("best_effort(log.note, 0); gpu.synchronize()")
    program.call("best_effort(gpu.replay, graph, stream); best_effort(gpu.replay, graph, stream); gpu.synchronize()")
    assert program.call("log.read()") == [0, 1, 2, 1, 2]
    assert program.count("offloaded_launches") == 1
    ended_well(program)


def test_a_full_ring_beside_latency_work(stage: Stage) -> None:
    """A launch waits for room; another call that needs it, or a thread with the GIL, opens the gate instead."""
    program = both_classes(stage)
    program.call(ENTER)
    program.call(f"worker = Worker(gpu, lambda: best_effort(log.note, *range(1, {RING + 201})))")
    wait_at_the_gate(program)
    program.call(f"{SERVE}; time.sleep(0.5)")
    assert program.call("worker.is_alive()") is True
    assert program.count("offloaded_launches") == 0
    program.call("Worker(gpu, lambda: best_effort(log.note, 1, stream=gpu.stream(), keep_gil=True)).join()")
    assert program.count("offloaded_launches") > 0
    program.call(LEAVE)
    program.call("worker.join()")
    assert program.call(f"sorted(log.read()) == sorted([1, *range({RING + 201})])") is True
    ended_well(program)


def test_latency_work_that_comes_late_waits_for_nobody(stage: Stage) -> None:
    """A thread waits behind another process's gate with the GIL in hand, or a lock; then this process gets a region."""
    serve = server(stage)
    program = stage.importing(**PATIENT, **HOLDING)
    program.call("from logged import *; gpu = Gpu(); log = Log(gpu)")
    program.call(BEST_EFFORT)
    program.call("address = log.allocate(64); best_effort(log.note, 0); gpu.synchronize()")
    serve.call(ENTER)
    program.call("best_effort(log.note, 1)")
    program.call("worker = Worker(gpu, lambda: best_effort(gpu.call, 'cuMemFree_v2', address))")
    wait_at_the_gate(program)
    assert program.call("worker.is_alive()") is True
    program.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    program.call("worker.join()")
    assert program.call("log.read()") == [0, 1]
    serve.call(LEAVE)


def test_both_classes_on_many_threads_never_stand_still(stage: Stage) -> None:
    program = both_classes(stage)
    program.call(
        "stop = threading.Event()\n"
        "streams = [gpu.stream() for _ in range(4)]\n"
        "def trains(which):\n"
        "    with cudasched.region('best_effort'):\n"
        "        step = 0\n"
        "        while not stop.is_set():\n"
        "            log.note(*[which] * 20, stream=streams[which], keep_gil=which % 2 == 0)\n"
        "            step += 1\n"
        "            if step % 3 == which % 3: synchronizes(which % 2 == 0)\n"
        "            if step % 5 == 0: gpu.call('cuMemFree_v2', log.allocate(64))\n"
        "            if step * 80 > ROOM // 2: return\n"
        "def serves():\n"
        "    for _ in range(100):\n"
        "        with cudasched.region('latency'):\n"
        "            gpu.launch(3, us=5, stream=serving); gpu.call('cuStreamSynchronize', ctypes.c_void_p(serving))\n"
        "trainers = [Worker(gpu, lambda which=which: trains(which)) for which in range(4)]\n"
        "server = Worker(gpu, serves)"
    )
    program.call("server.join()")
    program.call("stop.set()")
    program.call("for each in trainers: each.join()")
    assert program.count("latency_launches") == 301
    program.call("gpu.synchronize()")
    assert program.count("best_effort_launches") == program.call("len(log.read())")
    assert program.count("offloaded_launches") > 0
    ended_well(program)


# ---- two devices ---------------------------------------------------------------------------------------------------


def test_each_device_has_a_ring_of_its_own(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    train = stage.run("best-effort", **PATIENT, CUDASCHED_JOB="off")
    train.call("from logged import *; one = Gpu(0); first = Log(one); first.note(0); one.synchronize()")
    train.call("two = Gpu(1); second = Log(two); second.note(0); two.synchronize()")
    train.call("there = two.stream(); one.use(); here = one.stream(); event = first.event()")
    serve.call(ENTER)
    train.call("first.note(*range(1, 51), stream=here); first.record(event, here)")
    train.call("two.use(); second.note(*range(1, 51)); gpu = two")
    eventually(lambda: train.count("offloaded_launches") == 50, "the other device goes on")
    # What waits for the first device's event waits for its gate.
    train.send("second.wait(there, event); second.note(51, stream=there)")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.call("second.read()") == list(range(52))
    train.call("one.use()")
    assert train.call("first.read()") == list(range(51))
    assert train.count("offloaded_launches") == 101
    ended_well(serve, train)


def test_a_free_on_one_device_does_not_wait_for_the_gate_of_another(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    train = stage.run("best-effort", **PATIENT, CUDASCHED_JOB="off")
    train.call("from logged import *; one = Gpu(0); first = Log(one); first.note(0); one.synchronize()")
    train.call("two = Gpu(1); second = Log(two); second.note(0); two.synchronize()")
    train.call("there = second.allocate(64); host = ctypes.c_void_p()")
    train.call("two.call('cuMemAllocHost_v2', ctypes.byref(host), ctypes.c_size_t(64))")
    train.call("one.use(); here = one.stream(); first.note(1, stream=here); one.synchronize()")
    serve.call(ENTER)
    train.call("first.note(2, stream=here); two.use(); gpu = two")
    train.call("second.note(1); two.call('cuMemFree_v2', there); two.synchronize()")
    assert train.count("offloaded_launches") == 2  # the launch of the second device, and the first's before
    # The first device may be reading it.
    train.send("two.call('cuMemFreeHost', host)")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.call("second.read()") == [0, 1]
    train.call("one.use()")
    assert train.call("first.read()") == [0, 1, 2]
    ended_well(serve, train)


# ---- at random -----------------------------------------------------------------------------------------------------

AT_RANDOM = """
import json, os, sys
from program import *
from logged import *
gpus = [Gpu(ordinal) for ordinal in range(int(os.environ.get("CUDASCHED_SIM_DEVICES", "1")))]
works = []
for seed in range(4):
    gpu = gpus[seed % len(gpus)]
    gpu.use()
    Log(gpu).note(0)
    gpu.synchronize()
    works.append((gpu, Chance(gpu, seed, steps=150)))
threads = [Worker(gpu, work.run) for gpu, work in works]
for thread in threads: thread.join()
for gpu, work in works:
    gpu.use()
    work.look()
print(json.dumps([work.result for _, work in works]))
if sys.argv[1:]: print(state()["offloaded_launches"], state()["best_effort_launches"])
"""


@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.parametrize("beside", ["nobody", "a latency client"])
def test_random_work_leaves_what_it_leaves_without(
    stage: Stage, command: str, python: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch, beside: str, devices: str
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", devices)
    bare = python(AT_RANDOM, env={**os.environ, "LD_LIBRARY_PATH": str(simulated.parent)})
    assert (bare.returncode, bare.stderr) == (0, "")
    serve = server(stage) if beside != "nobody" else None
    arguments = [command, "run", "--class", "best-effort", "--", sys.executable, "-c", AT_RANDOM, "count"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as scheduled:
        try:
            until = time.monotonic() + PATIENCE_S
            while serve is not None and scheduled.poll() is None and time.monotonic() < until:
                serve.call("with cudasched.region('latency'): gpu.launch(3, us=200); gpu.synchronize()")
                time.sleep(0.002)
            said, complaints = scheduled.communicate(timeout=PATIENCE_S)
        finally:
            scheduled.kill()
    assert (scheduled.returncode, complaints) == (0, "")
    result, counts = said.splitlines()
    assert json.loads(result) == json.loads(bare.stdout)
    offloaded, launches = map(int, counts.split())
    assert launches * 0.9 < offloaded <= launches
