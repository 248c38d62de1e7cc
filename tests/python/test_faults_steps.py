"""Each party is killed at each step of its way: at each driver call of a thread, before and after it.

By default every few steps; with EVERY_STEP=1 in the environment all of them.
"""

from __future__ import annotations

import os

import pytest
from program import HOLDING, PATIENT, Program, Stage, clients, eventually

LONG_TURN = {"CUDASCHED_TURN_MS": "3600000"}
EVERY_STEP = os.environ.get("EVERY_STEP", "") == "1"

pytestmark = pytest.mark.usefixtures("quick_device")


def survivor(program: Program, *, latency: bool) -> Program:
    program.call("from lives import *; gpu = Gpu()")
    program.call(f"life = Survivor(gpu, latency={latency})")
    return program


def goes_on(program: Program) -> None:
    before = program.number("life.count")
    eventually(lambda: program.number("life.count") >= before + 2 or not program.call("life.is_alive()"), "it goes on")


PARTIES = {
    "best-effort": ("best_effort", "main", 17, {}),
    "launcher": ("best_effort", "cudasched-queue", 5, {}),
    # Only the death of these two ends their turn.
    "owner-of-the-turn": ("best_effort", "main", 17, {"CUDASCHED_OFFLOAD": "0", **LONG_TURN}),
    "launcher-with-the-turn": ("best_effort", "cudasched-queue", 5, LONG_TURN),
    "latency": ("latency", "main", 13, {}),
    # Only its death ends its region.
    "latency-that-holds": ("latency", "main", 13, {**HOLDING, **PATIENT}),
    "latency-ticker": ("lingering", "cudasched", 31, {"CUDASCHED_CLASS": "latency"}),
}


@pytest.mark.parametrize(("life", "thread", "stride", "environment"), PARTIES.values(), ids=PARTIES)
def test_a_party_is_killed_at_each_step(
    stage: Stage, life: str, thread: str, stride: int, environment: dict[str, str]
) -> None:
    """The others go on, what they launch runs once and in order, and the dead one's slot is given back."""
    serve = survivor(stage.importing(), latency=True)
    train = survivor(stage.run("best-effort"), latency=False)
    survivors = {serve.pid, train.pid}
    nursery = stage.importing(**({"CUDASCHED_CLASS": "best-effort"} if life == "best_effort" else {}), **environment)
    nursery.call("import lives")
    step, killed, code = 1, 0, -9
    while code == -9:
        code = nursery.number(f"lives.killed_at({thread!r}, {step}, lives.{life})")
        assert code in (-9, 0), f"step {step}: {nursery.stderr}"
        for program in (serve, train):
            goes_on(program)
        assert set(clients()) == survivors, f"step {step}"
        killed += code == -9
        step += 1 if EVERY_STEP else stride
    assert killed >= 2  # more where the machine is not busy: the ticker's way is as long as its time
    for program in (serve, train):
        assert program.number("life.stop()") > 0
        assert program.call("state()['scheduling']") is True
        assert (program.end(), program.stderr) == (0, "")
    assert clients() == {}
