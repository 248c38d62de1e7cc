"""Policies end to end: programs share a simulated device, as users start them."""

from __future__ import annotations

import time

import pytest
from cudasched import control
from program import HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually, wait_at_the_gate

pytestmark = pytest.mark.usefixtures("without_offload")

GENEROUS_MS = 60_000
"""A latency target that leaves best-effort work all the slack that a request can bring."""

BY_DEADLINE = {"CUDASCHED_LATENCY_ORDER": "deadline"}


def enter(slo_ms: float) -> str:
    return f"held = cudasched.region('latency', slo_ms={slo_ms}); held.__enter__()"


def server(stage: Stage, **environment: str) -> Program:
    """A latency client that is idle."""
    program = stage.importing(**PATIENT, **HOLDING, **environment)
    program.call("gpu = Gpu()")
    program.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    return program


def experienced_server(stage: Stage, slo_ms: float) -> Program:
    """One whose requests of that target have shown what they take by themselves."""
    program = server(stage)
    for _ in range(8):
        program.call(enter(slo_ms))
        program.call("gpu.launch(); gpu.synchronize(); time.sleep(0.2)")
        program.call(LEAVE)
    return program


def trainer(stage: Stage, us: int = 20, **environment: str) -> Program:
    """A best-effort client that launches and launches kernels of `us` simulated microseconds."""
    program = stage.run("best-effort", **PATIENT, **environment)
    program.call(f"gpu = Gpu(); gpu.launch(20, us={us}); gpu.synchronize(); feeder = Feeder(gpu, us={us})")
    return program


def launched(train: Program) -> int:
    return train.number("feeder.count")


def goes_on(train: Program) -> None:
    before = launched(train)
    eventually(lambda: launched(train) > before + 20, "it goes on")


# ---- beside latency work -------------------------------------------------------------------------------------------


def test_slack_lets_best_effort_work_into_requests_that_have_time_for_it(stage: Stage) -> None:
    serve = experienced_server(stage, GENEROUS_MS)
    train = trainer(stage, CUDASCHED_POLICY="slack")

    def goes_on_in_a_request() -> bool:
        serve.call(enter(GENEROUS_MS))
        before = launched(train)
        time.sleep(0.1)
        meanwhile = launched(train) - before
        serve.call(LEAVE)
        return meanwhile > 1

    eventually(goes_on_in_a_request, "it goes on while a request is under way")
    train.call("feeder.stop()")
    assert (train.end(), train.stderr) == (0, "")


def beside_a_host_bound_request(serve: Program, train: Program) -> int:
    """How many best-effort launches go while the host is at a request."""
    serve.call(enter(GENEROUS_MS))
    before = launched(train)
    serve.call("[(gpu.launch(1), time.sleep(0.01)) for _ in range(10)]")
    meanwhile = launched(train) - before
    serve.call("gpu.synchronize()")
    serve.call(LEAVE)
    return meanwhile


def test_harvest_lets_best_effort_work_into_the_gaps_of_requests_that_it_knows(stage: Stage) -> None:
    serve = server(stage, CUDASCHED_POLICY="harvest")
    serve.call("import time")
    train = trainer(stage, CUDASCHED_POLICY="strict")
    meanwhile = [beside_a_host_bound_request(serve, train) for _ in range(12)]
    assert max(meanwhile) <= 1, "strict"
    # From outside, while both run.
    trainer_id = next(client.id for client in control.clients() if client.pid == train.pid)
    control.change(trainer_id, policy="harvest")
    eventually(lambda: beside_a_host_bound_request(serve, train) > 5, "it goes on in the gaps")
    control.change(trainer_id, policy="strict")
    meanwhile = [beside_a_host_bound_request(serve, train) for _ in range(6)]
    assert max(meanwhile) <= 1, "strict again"
    train.call("feeder.stop()")
    assert (train.end(), train.stderr) == (0, "")


def test_harvest_knows_nothing_of_a_first_request(stage: Stage) -> None:
    serve = server(stage, CUDASCHED_POLICY="harvest")
    serve.call("import time")
    train = trainer(stage, CUDASCHED_POLICY="harvest")
    assert beside_a_host_bound_request(serve, train) <= 1
    eventually(lambda: beside_a_host_bound_request(serve, train) > 5, "it goes on in the gaps")
    train.call("feeder.stop()")
    assert (train.end(), train.stderr) == (0, "")


def test_a_latency_program_sees_the_slack_of_the_requests_of_others(stage: Stage) -> None:
    other, own = experienced_server(stage, GENEROUS_MS), server(stage)

    def sees(program: Program) -> int:
        return program.number("cudasched._core.others_slack_ns()")

    def sees_it() -> bool:
        other.call(enter(GENEROUS_MS))
        assert sees(other) == 2**63 - 1
        seen = sees(own)
        other.call("gpu.launch(); gpu.synchronize(); time.sleep(0.2)")
        other.call(LEAVE)
        return 0 < seen < 1e6 * GENEROUS_MS

    assert sees(own) == 2**63 - 1
    eventually(sees_it, "the slack is seen")
    assert sees(own) == 2**63 - 1


@pytest.mark.parametrize(("policy", "slo_ms"), [("slack", 1), ("strict", GENEROUS_MS)])
def test_nothing_goes_beside_requests_without_slack_and_under_strict(stage: Stage, policy: str, slo_ms: float) -> None:
    serve = experienced_server(stage, slo_ms)
    train = trainer(stage, CUDASCHED_POLICY=policy)
    for _ in range(3):
        serve.call(enter(slo_ms))
        wait_at_the_gate(train)
        before = launched(train)
        serve.call("gpu.launch(5); gpu.synchronize()")
        assert launched(train) == before
        serve.call(LEAVE)
        goes_on(train)


def test_open_has_no_gate(stage: Stage) -> None:
    serve = server(stage)
    train = trainer(stage, CUDASCHED_POLICY="open")
    serve.call(enter(GENEROUS_MS))
    goes_on(train)
    assert clients()[serve.pid].active
    train.call("feeder.stop()")
    assert train.count("gate_waits") == 0
    assert train.count("gated_launches") > 20


# ---- several best-effort clients -----------------------------------------------------------------------------------


def test_a_step_of_priority_is_worth_more_launches(stage: Stage) -> None:
    """How much more, tests/csrc/schedule/test_neighbours.cpp says.

    The kernels are long, so that a program which a busy machine delays uses its turns all the same: who does not use
    them has no more of them for its priority.
    """
    server(stage)
    # From launcher threads: a program's own thread, which may wait for itself, is let go every 10 ms.
    settings = {"CUDASCHED_TURN_MS": "20", "CUDASCHED_OFFLOAD": "1"}
    plain, favoured = (trainer(stage, us=500, CUDASCHED_PRIORITY=priority, **settings) for priority in "01")

    def submitted(train: Program) -> int:
        return train.count("best_effort_launches")

    def launches_more() -> bool:
        before = [submitted(train) for train in (plain, favoured)]
        eventually(lambda: submitted(favoured) > before[1] + 60, "the favoured one makes progress")
        gained = [submitted(train) - count for train, count in zip((plain, favoured), before, strict=True)]
        return 0 < gained[0] < 0.8 * gained[1]

    eventually(launches_more, "the favoured one launches more, and the other one some")


# ---- several latency clients ---------------------------------------------------------------------------------------


def test_an_entry_waits_for_a_more_urgent_client_but_not_for_ever(stage: Stage) -> None:
    urgent, patient = server(stage, **BY_DEADLINE), server(stage, **BY_DEADLINE)
    urgent.call(enter(1000))
    patient.call(f"before = monotonic(); {enter(GENEROUS_MS)}; waited = monotonic() - before")
    patient.call(LEAVE)
    waited = patient.call("waited")
    assert isinstance(waited, float)
    assert waited >= 0.1
    assert clients()[urgent.pid].regions == 1


def test_an_entry_that_waits_holds_no_other_thread_of_python_up(stage: Stage) -> None:
    urgent, patient = server(stage, **BY_DEADLINE), server(stage, **BY_DEADLINE)
    urgent.call(enter(1000))
    patient.call("ticks = 0\ndef tick():\n    global ticks\n    while True: time.sleep(0.001); ticks += 1\n")
    patient.call("ticker = Worker(gpu, tick)")

    def ticks_meanwhile() -> bool:
        patient.call(f"before = ticks; {enter(GENEROUS_MS)}; meanwhile = ticks - before")
        patient.call(LEAVE)
        return patient.number("meanwhile") >= 5

    eventually(ticks_meanwhile, "another thread runs while one waits to enter")


def test_a_killed_client_is_not_waited_for(stage: Stage) -> None:
    urgent, patient = server(stage, **BY_DEADLINE), server(stage, **BY_DEADLINE)
    urgent.call(enter(1000))
    urgent.kill()
    patient.call(enter(GENEROUS_MS))
    assert set(clients()) == {patient.pid}
