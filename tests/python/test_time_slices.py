"""Hardware time slices of programs, as users meet them, over the simulated driver and its kernel module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import ENTER, HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually, wait_at_the_gate
from support import Run

NOT_SET = "cudasched: warning: this program's time slice cannot be set"


@pytest.fixture(autouse=True)
def automatic(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDASCHED_TIME_SLICE_US")


def trainer(stage: Stage, **environment: str) -> Program:
    program = stage.run("best_effort", **PATIENT, **environment)
    program.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    return program


def server(stage: Stage, **environment: str) -> Program:
    program = stage.importing(**PATIENT, **HOLDING, **environment)
    program.call("gpu = Gpu()")
    program.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    return program


def has_slice(program: Program, us: int) -> None:
    eventually(lambda: clients()[program.pid].time_slice_us == us, f"its time slice is {us} us")
    assert clients()[program.pid].time_slice == "on"


def test_a_best_effort_program_alone_has_the_shortest(stage: Stage) -> None:
    train = trainer(stage)
    has_slice(train, 1)
    assert (train.end(), train.stderr) == (0, "")


def keeps_the_drivers(program: Program) -> bool:
    return (clients()[program.pid].time_slice, clients()[program.pid].time_slice_us) == ("", None)


def test_a_server_beside_best_effort_has_longer_ones_and_other_programs_keep_the_drivers(stage: Stage) -> None:
    serve = server(stage)
    plain = stage.run("normal")
    plain.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    assert keeps_the_drivers(serve)
    train = trainer(stage)
    has_slice(train, 1)
    has_slice(serve, 20_000)
    assert keeps_the_drivers(plain)
    train.end()
    eventually(lambda: keeps_the_drivers(serve), "the server has the driver's again")


@pytest.mark.parametrize("environment", [{"CUDASCHED_TIME_SLICE_US": "off"}, {"CUDASCHED_SIM_TIME_SLICES": "refused"}])
def test_a_server_that_cannot_have_longer_ones_says_nothing(stage: Stage, environment: dict[str, str]) -> None:
    serve = server(stage, **environment)
    has_slice(trainer(stage), 1)
    for _ in range(10):
        serve.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize(); time.sleep(0.03)")  # it ticks
        assert keeps_the_drivers(serve)
    assert (serve.end(), serve.stderr) == (0, "")


def test_the_length_can_be_set(stage: Stage) -> None:
    has_slice(trainer(stage, CUDASCHED_TIME_SLICE_US="300"), 300)


def test_the_gate_steps_aside_where_kernels_are_interrupted(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    has_slice(train, 1)

    def passes() -> bool:
        before = train.count("gated_launches")
        train.call("gpu.launch(5); gpu.synchronize()")
        return train.count("gated_launches") == before

    eventually(passes, "the gate steps aside")
    serve.call(ENTER)
    assert passes()
    serve.call(LEAVE)


@pytest.mark.parametrize(
    "setting", [{"CUDASCHED_TIME_SLICE_US": "1"}, {"CUDASCHED_POLICY": "slack"}], ids=["length", "policy"]
)
def test_the_gate_stays_where_a_length_or_a_policy_was_chosen(stage: Stage, setting: dict[str, str]) -> None:
    serve, train = server(stage), trainer(stage, CUDASCHED_OFFLOAD="0", **setting)
    has_slice(train, 1)
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()


def test_best_effort_programs_that_share_a_gpu_have_longer_ones(stage: Stage) -> None:
    programs = [trainer(stage), trainer(stage)]
    for program in programs:
        program.call("feeder = Feeder(gpu)")
    for program in programs:
        has_slice(program, 1_200)


def test_a_program_with_latency_work_of_its_own_keeps_the_drivers(stage: Stage) -> None:
    program = stage.importing()
    program.call("gpu = Gpu()")
    program.call("with cudasched.region('latency'): gpu.launch(); gpu.synchronize()")
    program.call("with cudasched.region('best_effort'): gpu.launch(); gpu.synchronize()")
    eventually(lambda: clients()[program.pid].time_slice == "shared", "it is said")


@pytest.mark.parametrize(
    ("mode", "state", "said"),
    [
        ("refused", "refused", f"{NOT_SET} (SET_TIMESLICE gave status 0x1b)"),
        ("unsupported", "refused", f"{NOT_SET} (GET_TIMESLICE gave status 0x56)"),
        ("forbidden", "refused", f"{NOT_SET} (GET_TIMESLICE failed with errno 1)"),
        ("closed", "closed", "cudasched: warning: this program has closed files of the NVIDIA driver"),
        ("unknown", "unseen", ""),
    ],
)
def test_what_it_does_not_know_turns_them_off_once_and_the_gate_goes_on(
    stage: Stage, cudasched: Run, mode: str, state: str, said: str
) -> None:
    serve, train = server(stage), trainer(stage, CUDASCHED_OFFLOAD="0", CUDASCHED_SIM_TIME_SLICES=mode)
    eventually(lambda: clients()[train.pid].time_slice == state, f"it is {state}")
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    shown = cudasched("status").stdout
    assert "are not interrupted for others" in shown
    (device,) = json.loads(cudasched("status", "--json").stdout)["data"]
    (seen,) = [client for client in device["clients"] if client["pid"] == train.pid]
    assert (seen["time_slice"], seen["time_slice_us"]) == (state, None)
    assert train.end() == 0
    assert train.stderr.count("cudasched: warning: ") == (1 if said else 0)
    assert train.stderr.startswith(said)


@pytest.mark.parametrize(
    ("state", "environment"),
    [("off", {"CUDASCHED_TIME_SLICE_US": "off"}), ("tool", {"NV_SANITIZER_INJECTION_PORT_BASE": "1"})],
)
def test_off_and_beside_a_tool_nothing_is_set(stage: Stage, state: str, environment: dict[str, str]) -> None:
    train = trainer(stage, **environment)
    eventually(lambda: clients()[train.pid].time_slice == state, f"it is {state}")


def test_a_forked_child_leaves_its_parents_alone(stage: Stage) -> None:
    train = trainer(stage)
    has_slice(train, 1)
    train.call("import os; child = os.fork() or os._exit(0); os.waitpid(child, 0)")
    train.call("gpu.launch(); gpu.synchronize()")
    has_slice(train, 1)
    assert (train.end(), train.stderr) == (0, "")
