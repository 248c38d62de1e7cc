"""Programs share a simulated device, as users start them: several processes, and one process with several classes."""

from __future__ import annotations

import time
from pathlib import Path

import cudasched
import pytest
from program import ENTER, HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually, wait_at_the_gate

pytestmark = pytest.mark.usefixtures("without_offload")


def server(stage: Stage) -> Program:
    """A latency client that is idle, and that ENTER and LEAVE make active and idle again."""
    program = stage.importing(**PATIENT, **HOLDING)
    program.call("gpu = Gpu()")
    program.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    return program


def trainer(stage: Stage, **environment: str) -> Program:
    program = stage.run("best-effort", **PATIENT, **environment)
    program.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    return program


# ---- two processes -------------------------------------------------------------------------------------------------


def test_best_effort_waits_while_latency_work_is_queued(stage: Stage) -> None:
    serve = stage.run("latency")
    serve.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    train = trainer(stage)
    before = serve.call("monotonic()")
    serve.call("gpu.launch(us=100_000)")  # 2 s
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    assert clients()[serve.pid].active
    serve.call("gpu.synchronize()")
    through = train.answer()
    assert isinstance(before, float) and isinstance(through, float)
    assert through >= before + 2.0
    train.call("gpu.launch(20); gpu.synchronize()")
    assert not clients()[serve.pid].active
    seen = train.call("state()")
    assert isinstance(seen, dict)
    assert (seen["best_effort_launches"], seen["gated_launches"], seen["off_reason"]) == (22, 22, "")
    assert seen["gate_waits"] >= 1 and seen["gate_wait_ns"] > 0
    assert (serve.count("latency_launches"), serve.count("gated_launches")) == (2, 0)
    assert (serve.end(), serve.stderr, train.end(), train.stderr) == (0, "", 0, "")
    assert clients() == {}


def test_without_a_latency_client_nothing_is_gated(stage: Stage) -> None:
    programs = [stage.run("best-effort"), stage.run("best-effort"), stage.run("normal")]
    for program in programs:
        program.call("gpu = Gpu(); feeder = Feeder(gpu)")
    for program in programs:
        before = program.number("feeder.count")
        eventually(lambda p=program, b=before: p.number("feeder.count") > b + 20, "each goes on")
    for program in programs:
        assert program.number("feeder.stop()") == program.count("launches")
        assert (program.count("gated_launches"), program.count("gate_waits")) == (0, 0)
    serve = server(stage)
    programs[0].call("gpu.launch(3)")
    assert programs[0].count("gated_launches") == 3
    assert serve.end() == 0
    programs[0].call("gpu.launch(3)")
    assert programs[0].count("gated_launches") == 3


def test_a_region_holds_back_and_lets_go_as_often_as_it_is_entered(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    for _ in range(5):
        serve.call(ENTER)
        train.send("gpu.launch()")
        wait_at_the_gate(train)
        serve.call(LEAVE)
        train.answer()
    assert train.count("best_effort_launches") == 6
    assert train.count("gate_waits") >= 5


@pytest.mark.parametrize("count", [2, 3])
def test_best_effort_programs_take_turns_beside_an_idle_latency_client(stage: Stage, count: int) -> None:
    serve = server(stage)
    trainers = [stage.run("best-effort", **PATIENT) for _ in range(count)]
    for train in trainers:
        train.call("gpu = Gpu(); feeder = Feeder(gpu)")
    for _ in range(3):
        for train in trainers:
            before = train.number("feeder.count")
            eventually(lambda t=train, b=before: t.number("feeder.count") >= b + 10, "each makes progress")
    serve.call(ENTER)
    wait_at_the_gate(*trainers)
    counts = [train.number("feeder.count") for train in trainers]
    serve.call("gpu.launch(10); gpu.synchronize()")
    assert [train.number("feeder.count") for train in trainers] == counts
    serve.call(LEAVE)
    for train, before in zip(trainers, counts, strict=True):
        eventually(lambda t=train, b=before: t.number("feeder.count") >= b + 10, "each goes on")
        assert train.number("feeder.stop()") == train.count("best_effort_launches") == train.count("gated_launches")
        assert (train.end(), train.stderr) == (0, "")


def test_a_thread_with_the_gil_waits_for_another_process(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.send("gpu.launch(keep_gil=True)")
    wait_at_the_gate(train)
    serve.call("gpu.launch(3); gpu.synchronize()")
    assert not train.answered()
    serve.call(LEAVE)
    train.answer()


# ---- two devices ---------------------------------------------------------------------------------------------------


def test_a_latency_client_gates_its_own_device_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    beside, elsewhere = stage.run("best-effort", **PATIENT), stage.run("best-effort", **PATIENT)
    beside.call("gpu = Gpu(0); gpu.launch(); gpu.synchronize()")
    elsewhere.call("gpu = Gpu(1); gpu.launch(); gpu.synchronize()")
    serve.call(ENTER)
    beside.send("gpu.launch()")
    wait_at_the_gate(beside)
    elsewhere.call("gpu.launch(20); gpu.synchronize()")
    assert (elsewhere.count("best_effort_launches"), elsewhere.count("gated_launches")) == (21, 0)
    assert not beside.answered()
    shown = [{client.pid for client in device.clients} for device in cudasched.status()]
    assert sorted(shown, key=len) == [{elsewhere.pid}, {serve.pid, beside.pid}]
    serve.call(LEAVE)
    beside.answer()


def two_devices(train: Program) -> None:
    train.call("one = Gpu(0); one.launch(); one.synchronize(); two = Gpu(1); two.launch(); two.synchronize()")


def test_the_gates_of_one_program_on_two_devices_close_together(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    train = stage.run("best-effort", **PATIENT)
    two_devices(train)
    serve.call(ENTER)
    for name in ("two", "one"):
        train.send(f"{name}.use(); {name}.launch()")
        wait_at_the_gate(train)
        serve.call(LEAVE)
        train.answer()
        serve.call(ENTER)
    serve.call(LEAVE)
    assert (train.count("best_effort_launches"), train.count("gate_waits")) == (4, 2)


def test_without_a_job_each_device_is_by_itself(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    train = stage.run("best-effort", CUDASCHED_JOB="off", **PATIENT)
    two_devices(train)
    serve.call(ENTER)
    train.call("two.launch(5); two.synchronize()")
    train.send("one.use(); one.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert (train.count("best_effort_launches"), train.count("gated_launches")) == (8, 2)


def test_a_normal_program_is_a_client_of_each_device_that_its_thread_uses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    program = stage.run("normal")
    program.call("gpus = [Gpu(0), Gpu(1)]")
    program.call("for gpu in gpus: gpu.use(); gpu.launch(); gpu.synchronize()")
    assert [[client.pid for client in device.clients] for device in cudasched.status()] == [[program.pid]] * 2


def other_device_goes(program: Program, how: str) -> None:
    """The context of the second device is released by one of two holders, or reset."""
    if how == "released":
        program.call("other.call('cuDevicePrimaryCtxRetain', ctypes.byref(ctypes.c_void_p()), 1)")
    program.call(f"other.call('cuDevicePrimaryCtx{'Release' if how == 'released' else 'Reset'}_v2', 1)")


@pytest.mark.parametrize("how", ["released", "reset"])
def test_the_end_of_a_context_leaves_the_streams_of_other_devices_their_class(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Bound to a class while the ended device was the current one; marked by a region; of a part of the SMs."""
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    program = stage.importing()
    program.call("gpu = Gpu(0); bound, marked = gpu.stream(), gpu.stream(); other = Gpu(1)")
    program.call("cudasched.bind_stream(bound, 'best_effort'); gpu.use()")
    program.call("part = cudasched.region('best_effort', sm_fraction=0.5); before = part.stream")
    program.call("held = cudasched.region('best_effort'); held.__enter__(); gpu.launch(stream=marked)")
    other_device_goes(program, how)
    assert program.call("part.stream == before")
    for stream in ("bound", "marked"):
        count = program.count("best_effort_launches")
        program.call(f"Worker(gpu, lambda: gpu.launch(stream={stream})).join(); gpu.synchronize()")
        assert program.count("best_effort_launches") == count + 1, stream
    program.call(LEAVE)


# ---- jobs of several processes -------------------------------------------------------------------------------------

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def rank(stage: Stage, device: int, **environment: str) -> Program:
    """One process of a job, on one device, which launches once."""
    program = stage.run("best-effort", **PATIENT, **(environment or MASTER))
    program.call(f"gpu = Gpu({device}); gpu.launch(); gpu.synchronize()")
    return program


def know_of_each_other(serve: Program, *ranks: Program) -> None:
    """Until each rank waits for latency work on the first device."""
    for program in ranks:

        def waits(program: Program = program) -> bool:
            before = program.count("gate_waits")
            serve.call("with cudasched.region('latency'): time.sleep(0.05)")
            program.call("gpu.launch()")
            serve.call(ENTER)
            program.send("gpu.launch()")
            time.sleep(0.05)
            serve.call(LEAVE)
            program.answer()
            return program.count("gate_waits") > before

        eventually(waits, "it knows of the other's device")


@pytest.mark.parametrize("how", [MASTER, {"CUDASCHED_JOB": "resnet"}], ids=["master", "job"])
def test_a_job_holds_back_on_all_its_devices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, how: dict[str, str]
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "3")
    serve = server(stage)
    ranks = [rank(stage, device, **how) for device in range(3)]
    elsewhere = rank(stage, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT="29501")
    know_of_each_other(serve, *ranks)
    for _ in range(3):
        serve.call(ENTER)
        for program in ranks:
            program.send("gpu.launch()")
        wait_at_the_gate(*ranks)
        elsewhere.call("gpu.launch(5); gpu.synchronize()")
        serve.call(LEAVE)
        for program in ranks:
            program.answer()
            program.call("gpu.synchronize()")
    assert elsewhere.count("gate_waits") == 0
    assert [program.end() for program in ranks] == [0, 0, 0]


def test_a_job_does_not_wait_for_a_device_that_its_member_has_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    ranks = [rank(stage, device) for device in range(2)]
    know_of_each_other(serve, *ranks)
    serve.call(ENTER)
    ranks[1].send("gpu.launch()")
    wait_at_the_gate(ranks[1])
    assert ranks[0].end() == 0
    ranks[1].answer()
    ranks[1].call("gpu.launch(20); gpu.synchronize()")


def test_a_member_of_a_job_is_killed_at_the_gate(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    ranks = [rank(stage, device) for device in range(2)]
    know_of_each_other(serve, *ranks)
    serve.call(ENTER)
    for program in ranks:
        program.send("gpu.launch()")
    wait_at_the_gate(*ranks)
    ranks[0].kill()
    ranks[1].answer()
    ranks[1].call("gpu.launch(20); gpu.synchronize()")


def test_the_latency_client_of_another_device_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    ranks = [rank(stage, device) for device in range(2)]
    know_of_each_other(serve, *ranks)
    ranks[0].call("feeder = Feeder(gpu)")  # it is not the other rank that finds out
    serve.call(ENTER)
    ranks[1].send("gpu.launch()")
    wait_at_the_gate(ranks[1])
    serve.kill()
    ranks[1].answer()


def test_a_job_goes_on_when_its_tables_are_deleted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    serve = server(stage)
    ranks = [rank(stage, device) for device in range(2)]
    know_of_each_other(serve, *ranks)
    for device in cudasched.status():
        device.path.unlink()
    eventually(lambda: set(clients()) == {program.pid for program in (serve, *ranks)}, "they meet again")
    know_of_each_other(serve, *ranks)
    serve.call(ENTER)
    for program in ranks:
        program.send("gpu.launch()")
    wait_at_the_gate(*ranks)
    serve.call(LEAVE)
    for program in ranks:
        program.answer()


# ---- one process ---------------------------------------------------------------------------------------------------

IN_BEST_EFFORT = """
def best_effort(**how):
    with cudasched.region("best_effort"):
        gpu.launch(**how)
"""


def both_classes(stage: Stage) -> Program:
    program = server(stage)
    program.call(IN_BEST_EFFORT)
    program.call("Worker(gpu, best_effort).join()")
    return program


def test_a_latency_thread_holds_back_the_best_effort_thread_of_its_process(stage: Stage) -> None:
    program = both_classes(stage)
    program.call(ENTER)
    program.call("worker = Worker(gpu, best_effort)")
    wait_at_the_gate(program)
    program.call("gpu.launch(3, stream=gpu.stream()); gpu.synchronize()")
    assert program.call("worker.is_alive()")
    program.call(LEAVE)
    program.call("worker.join()")
    assert (program.count("latency_launches"), program.count("best_effort_launches")) == (4, 2)
    assert program.count("gate_waits") >= 1
    assert (program.end(), program.stderr) == (0, "")


def test_both_classes_on_one_stream_are_warned_of_once(stage: Stage) -> None:
    program = both_classes(stage)
    program.call(
        "launched, leave = threading.Event(), threading.Event()\n"
        "def trains():\n"
        "    with cudasched.region('best_effort'):\n"
        "        gpu.launch()\n"
        "        launched.set()\n"
        "        leave.wait()\n"
    )
    for _ in range(2):
        program.call("launched.clear(); leave.clear(); trainer = Worker(gpu, trains); launched.wait()")
        program.call(f"{ENTER}; gpu.launch(3); gpu.synchronize(); {LEAVE}")
        program.call("leave.set(); trainer.join()")
    assert program.count("contested_streams") == 2
    eventually(lambda: "on one stream" in program.stderr, "it is warned of")
    assert program.end() == 0
    assert program.stderr.count("on one stream") == 1


def test_a_best_effort_thread_with_the_gil_never_stops_the_latency_thread(stage: Stage) -> None:
    program = both_classes(stage)
    waited = program.count("gate_waits")
    program.call(ENTER)
    program.call("worker = Worker(gpu, lambda: best_effort(count=5, keep_gil=True)); worker.join()")
    program.call("gpu.launch(); gpu.synchronize()")
    assert program.count("gate_waits") == waited
    assert (program.count("best_effort_launches"), program.count("gated_launches")) == (6, 6)
    program.call(LEAVE)


def test_nested_regions_of_one_thread(stage: Stage) -> None:
    program = stage.importing(**PATIENT)
    program.call(
        "gpu = Gpu()\n"
        "with cudasched.region('latency'):\n"
        "    gpu.launch(2)\n"
        "    gpu.synchronize()\n"
        "    with cudasched.region('best_effort'):\n"
        "        gpu.launch(3)\n"
        "        with cudasched.region('latency'): gpu.launch(4)\n"
        "        with cudasched.region('normal'): gpu.launch(5)\n"
        "    gpu.launch(6)\n"
        "gpu.launch(7)\n"
        "gpu.synchronize()"
    )
    counts = [program.count(name) for name in ("latency_launches", "best_effort_launches", "launches")]
    assert counts == [12, 3, 27]
    assert {client.client_class: client.regions for device in cudasched.status() for client in device.clients} == {
        "latency": 0,
        "best_effort": 0,
        "normal": 0,
    }
    assert not any(client.active for device in cudasched.status() for client in device.clients)


def test_the_outer_region_holds_until_it_is_left(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    serve.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()


def test_best_effort_holds_back_for_as_long_as_latency_work_is_expected(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    before = serve.call("monotonic()")
    serve.call("cudasched.expect(within_ms=1000)")
    through = train.call("gpu.launch()")
    assert isinstance(before, float) and isinstance(through, float)
    assert through >= before + 1.0
    assert train.count("gate_waits") >= 1


def test_a_thread_that_ends_leaves_its_regions(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call("region = cudasched.region('latency'); Worker(gpu, region.__enter__).join()")
    train.call("gpu.launch(5); gpu.synchronize()")
    assert clients()[serve.pid].regions == 0


# ---- graphs --------------------------------------------------------------------------------------------------------

CAPTURE_AND_LAUNCH = """
import contextlib
def captures(inside):
    stream = gpu.stream()
    with inside():
        for _ in range(5):
            graph = gpu.capture(10, stream)
            gpu.replay(graph, stream)
            gpu.replay(graph, stream)
        gpu.call("cuStreamSynchronize", ctypes.c_void_p(stream))
def launches(inside):
    stream = gpu.stream()
    with inside():
        for _ in range(5):
            gpu.launch(10, stream=stream)
            gpu.call("cuStreamSynchronize", ctypes.c_void_p(stream))
def all_together(*classes):
    threads = []
    for name in classes:
        inside = (lambda name=name: cudasched.region(name)) if name else contextlib.nullcontext
        threads += [Worker(gpu, lambda what=what, inside=inside: what(inside)) for what in (captures, launches)]
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("client_class", ["latency", "best-effort"])
def test_launches_into_captures_are_no_launches(stage: Stage, client_class: str) -> None:
    server(stage)
    program = stage.run(client_class, **PATIENT)
    program.call("gpu = Gpu()")
    program.call(CAPTURE_AND_LAUNCH)
    program.call("all_together(None, None)")
    assert program.count("launches") == 2 * (5 * 2 + 5 * 10)
    assert program.count("gated_launches") == (program.count("launches") if client_class == "best-effort" else 0)
    assert (program.end(), program.stderr) == (0, "")


def test_captures_and_launches_of_both_classes_in_one_process(stage: Stage) -> None:
    program = stage.importing()
    program.call("gpu = Gpu()")
    program.call(CAPTURE_AND_LAUNCH)
    program.call("all_together('latency', 'best_effort', 'latency', 'best_effort')")
    assert (program.count("latency_launches"), program.count("best_effort_launches")) == (120, 120)
    assert (program.end(), program.stderr) == (0, "")


def test_a_capture_does_not_wait_at_the_gate(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    train.call("stream = gpu.stream()")
    serve.call(ENTER)
    train.call("graph = gpu.capture(10, stream)")
    assert (train.count("launches"), train.count("gate_waits")) == (1, 0)
    train.send("gpu.replay(graph, stream)")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.count("launches") == 2


# ---- switched off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["run", "import"])
def test_switched_off_a_program_is_alone(stage: Stage, simulated: Path, how: str) -> None:
    serve = server(stage)
    serve.call(ENTER)
    # The import puts nothing in front of the driver, so the loader's own search has to find it.
    off = {"CUDASCHED_OFF": "1", "CUDASCHED_CLASS": "best-effort", "LD_LIBRARY_PATH": str(simulated.parent)}
    train = stage.run("best-effort", **off) if how == "run" else stage.importing(**off)
    train.call("gpu = Gpu(); gpu.launch(5); gpu.synchronize()")
    seen = train.call("state()")
    assert isinstance(seen, dict)
    assert (seen["attached"], seen["scheduling"], seen["launches"]) == (False, False, 0)
    assert seen["off_reason"] == "CUDASCHED_OFF=1"
    assert set(clients()) == {serve.pid}
    assert (train.end(), train.stderr) == (0, "")
