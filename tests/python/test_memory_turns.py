"""Best-effort programs whose memory does not fit together, over a simulated GPU of 250 MiB: they take turns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cudasched import control
from program import PATIENCE_S, PATIENT, Program, Stage, clients, eventually
from support import stop
from test_memory import ALLOCATOR, BITS, CACHE, OUT_OF_MEMORY, UNHURRIED, away, name_of

#: A thousandth of the memory, in bytes.
PART = 2**18

PAGEABLE = {"CUDASCHED_PAGEABLE": "on", "CUDASCHED_PARK": "1GiB"}

#: Fills a part of its memory in each step, and looks at every byte.
STEPS = """
import threading
done = 0

def steps(pointer, bytes):
    global done
    into = (ctypes.c_ubyte * bytes)()
    gpu.use()
    while not ends:
        value = done % 251
        gpu.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(value), ctypes.c_size_t(bytes))
        gpu.launch(us=2000)
        gpu.synchronize()
        gpu.call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(pointer), ctypes.c_size_t(bytes))
        if memoryview(into).tobytes().count(value) != bytes:
            return
        done += 1

def train(pointer, bytes):
    global ends, thread
    ends = False
    thread = threading.Thread(target=steps, args=(pointer, bytes), daemon=True)
    thread.start()

def wrong():
    return int(not thread.is_alive())
"""


#: Allocates, fills, looks and frees at random, on two threads: each block keeps its own bytes.
HISTORIES = """
import random
done = refused = 0
wrong = ""

def history(seed):
    global done, refused, wrong
    chance, blocks = random.Random(seed), {}
    gpu.use()
    while not wrong:
        what = chance.random()
        pointer = chance.choice(list(blocks)) if blocks else 0
        if what < 0.3 and sum(bytes for bytes, _ in blocks.values()) < 500 * 2**18:
            bytes, value = chance.choice([8, 12, 40, 100, 200]) * 2**18, chance.randrange(256)
            pointer = allocate(bytes)
            if pointer > 0:
                fill(pointer, value, bytes)
                blocks[pointer] = bytes, value
            refused += pointer < 0
        elif what < 0.6 and blocks:
            bytes, value = blocks[pointer]
            if not has(pointer, value, min(bytes, 2**23)):
                wrong = f"{bytes} bytes of {value} have changed"
            if what < 0.4:
                del blocks[pointer]
                free(pointer)
        else:
            gpu.launch(5, us=200)
        done += 1

for each in range(2):
    threading.Thread(target=history, args=(seed + each,), daemon=True).start()
"""


#: Kernels, and a thread whose calls end each attempt to stop the program.
NEVER_IDLE = """
def feed():
    gpu.use()
    while True:
        gpu.launch(2, us=2500000)
        gpu.synchronize()

def call():
    gpu.use()
    while True:
        allocate(4096)
        time.sleep(0.005)

for each in feed, call:
    threading.Thread(target=each, daemon=True).start()
"""


#: A thread whose calls end each attempt to stop the program that lasts for a second.
ASKING = """
import threading

MEMORY_TYPE = 2

def ask():
    gpu.use()
    kind = ctypes.c_int()
    while True:
        gpu.call("cuPointerGetAttribute", ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(pointer))
        time.sleep(0.005)

threading.Thread(target=ask, daemon=True).start()
"""


@pytest.fixture(autouse=True)
def small_device(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_MEMORY_MB", "250")


def a_training(stage: Stage, turn_ms: float | None = 300, **environment: str) -> Program:
    if turn_ms is not None:
        environment["CUDASCHED_MEMORY_TURN_MS"] = str(turn_ms)
    program = stage.run("best_effort", **PATIENT, **PAGEABLE, **environment)
    program.call(ALLOCATOR + BITS + STEPS)
    return program


def that_holds(stage: Stage, parts: int, turn_ms: float | None = 300) -> tuple[Program, int]:
    training = a_training(stage, turn_ms)
    pointer = training.number(f"allocate({parts * PART})")
    assert pointer > 0
    training.call(f"fill({pointer}, 7, {parts * PART})")
    return training, pointer


def progress(programs: list[Program], steps: int = 3) -> None:
    """Each of them takes steps."""
    before = [program.number("done") for program in programs]
    for program, count in zip(programs, before, strict=True):
        eventually(lambda: program.number("done") >= count + steps, "it goes on")  # noqa: B023
        assert program.number("wrong()") == 0


@pytest.mark.parametrize("turns", [False, True])
def test_memory_that_does_not_fit_is_refused_without_turns(stage: Stage, turns: bool) -> None:
    """Both have to have the setting."""
    first, _ = that_holds(stage, 750, 300 if not turns else None)
    second = a_training(stage, 300 if turns else None, CUDASCHED_GIVE_BACK_MS="100")
    assert second.number(f"allocate({750 * PART})") == -OUT_OF_MEMORY
    assert away(first) == 0


def test_trainings_whose_memory_does_not_fit_take_turns(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    second, other = that_holds(stage, 750)
    eventually(lambda: 500 * PART <= away(first) < 760 * PART, "it has moved the bytes that the second one lacks")
    assert away(second) == 0
    time.sleep(1)
    assert away(first) > 0, "an idle program does not take its memory back"
    first.call(f"train({one}, {PART})")
    second.call(f"train({other + 749 * PART}, {PART})")
    for _ in range(3):
        progress([first, second])
    assert clients()[first.pid].memory_bytes + clients()[second.pid].memory_bytes <= 1000 * PART
    first.call("ends = True\nthread.join()")
    assert first.number(f"has({one + PART}, 7, {749 * PART})") == 1
    second.call("ends = True\nthread.join()")
    assert second.number(f"has({other}, 7, {749 * PART})") == 1


def test_a_turn_lasts_as_long_as_the_setting_says(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    began = time.monotonic()
    second, _ = that_holds(stage, 750, 4000)
    first.call(f"fill({one}, 8, {PART})")
    assert time.monotonic() - began > 4
    assert away(second) > 0


def test_programs_that_grow_together_both_get_on(stage: Stage) -> None:
    first, second = a_training(stage, **UNHURRIED), a_training(stage, **UNHURRIED)
    grow = f"pointers = [allocate({50 * PART}) for _ in range(16)]"
    first.send(grow)
    second.send(grow)
    for program in (first, second):
        program.answer()
        assert program.number("min(pointers)") > 0
        program.call(f"train(pointers[3], {PART})")
    progress([first, second])


def test_memory_comes_back_while_an_allocation_waits_in_vain(stage: Stage) -> None:
    training = a_training(stage, CUDASCHED_GIVE_BACK_MS="60000")
    assert training.number(f"allocate({700 * PART})") > 0
    waits = f"threading.Thread(target=lambda: (gpu.use(), allocate({900 * PART})), daemon=True).start()"
    training.call(waits)
    that_holds(stage, 750, 3000)
    eventually(lambda: away(training) > 0, "it has moved")
    training.call("gpu.launch()")
    eventually(lambda: away(training) == 0, "the memory is back")


def test_random_histories_keep_every_byte(stage: Stage) -> None:
    """Of three programs, one of which is killed at times, beside a server that asks for memory."""
    programs = [a_training(stage, 150) for _ in range(3)]
    for seed, program in enumerate(programs):
        program.call(f"seed = {seed * 10}\n{HISTORIES}")
    server = stage.run("latency", **PATIENT, **UNHURRIED)
    server.call(ALLOCATOR)
    for each in range(4):
        time.sleep(1.5)
        held = server.number(f"allocate({(300, 900)[each % 2] * PART})")
        assert held > 0
        server.call(f"free({held})")
        if each == 2:
            programs[2].kill()
            programs[2] = a_training(stage, 150)
            programs[2].call(f"seed = 30\n{HISTORIES}")
    for program in programs:
        before = program.number("done")
        eventually(lambda: program.call("wrong") != "" or program.number("done") > before + 5, "it goes on")  # noqa: B023
        assert program.call("wrong") == ""


def test_what_no_turn_could_give_is_refused(stage: Stage) -> None:
    first, one = that_holds(stage, 600)
    plain = stage.run("normal", **PATIENT)
    plain.call(ALLOCATOR)
    assert plain.number(f"allocate({300 * PART})") > 0
    second = a_training(stage)
    began = time.monotonic()
    assert second.number(f"allocate({1500 * PART})") == -OUT_OF_MEMORY
    assert time.monotonic() - began < 1, "it did not wait"
    assert second.number(f"allocate({750 * PART})") == -OUT_OF_MEMORY
    assert away(first) == 0
    assert second.number(f"allocate({600 * PART})") > 0
    eventually(lambda: away(first) > 0, "it has moved")
    first.call(f"train({one}, {PART})")
    progress([first])


def test_what_no_turn_could_give_is_refused_while_turns_change(stage: Stage) -> None:
    """And keeps no other thread's allocation from its room."""
    (first, one), (second, other) = that_holds(stage, 600), that_holds(stage, 600)
    first.call(f"train({one}, {PART})")
    second.call(f"train({other}, {PART})")
    first.call(f"""
refused = []
def ask():
    gpu.use()
    refused.append(allocate({500 * PART}))
threading.Thread(target=ask, daemon=True).start()
""")
    time.sleep(0.1)
    assert first.number(f"allocate({200 * PART})") > 0
    eventually(lambda: first.call("refused") == [-OUT_OF_MEMORY], "it is refused")
    progress([first, second])


def test_a_program_alone_or_beside_others_without_the_setting_does_not_wait(stage: Stage) -> None:
    training, _ = that_holds(stage, 600)
    for _ in range(2):
        began = time.monotonic()
        assert training.number(f"allocate({900 * PART})") == -OUT_OF_MEMORY
        assert time.monotonic() - began < 2.5
        that_holds(stage, 10, None)


def test_a_wait_for_a_program_that_never_stops_ends(stage: Stage) -> None:
    """Its turn is over, and attempts to park it fail, one after the other."""
    first, _ = that_holds(stage, 750)
    first.call("import threading\n" + NEVER_IDLE)
    second = a_training(stage, 300, CUDASCHED_GIVE_BACK_MS="500")
    began = time.monotonic()
    assert second.number(f"allocate({750 * PART})") == -OUT_OF_MEMORY
    assert 2 < time.monotonic() - began < 20
    assert away(first) == 0
    assert second.number(f"allocate({100 * PART})") > 0


def test_a_latency_client_asks_a_program_again_that_was_busy(stage: Stage) -> None:
    training, pointer = that_holds(stage, 750)
    server = stage.run("latency", **PATIENT, **UNHURRIED)
    server.call(ALLOCATOR)
    launched = training.count("offloaded_launches")
    training.call(f"pointer = {pointer}\n{ASKING}gpu.launch(us=300000)")  # for six seconds
    eventually(lambda: training.count("offloaded_launches") > launched, "it is busy")
    assert server.number(f"allocate({750 * PART})") > 0
    assert clients()[training.pid].memory_refusals > 0


def test_a_wait_outlasts_anothers_turn(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    second, other = that_holds(stage, 750, 15000)
    second.call(f"train({other}, {PART})")
    third = a_training(stage, 300, CUDASCHED_GIVE_BACK_MS="500")
    began = time.monotonic()
    assert third.number(f"allocate({700 * PART})") > 0
    assert time.monotonic() - began > 3
    first.call(f"train({one}, {PART})")
    progress([first, second])


def test_a_latency_clients_allocation_goes_before_all_turns(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    second, other = that_holds(stage, 750)
    first.call(f"train({one}, {PART})")
    second.call(f"train({other}, {PART})")
    server = stage.run("latency", **PATIENT, **UNHURRIED)
    server.call(ALLOCATOR)
    for _ in range(3):
        progress([first, second], 1)
        held = server.number(f"allocate({900 * PART})")
        assert held > 0
        server.call(f"free({held})")
    progress([first, second])


@pytest.mark.parametrize("step", [40, 130, 300, 600])
def test_a_program_killed_in_a_move_leaves_the_others_running(stage: Stage, step: int) -> None:
    """At driver calls of the thread that moves its memory."""
    first, one = that_holds(stage, 450)
    killed = a_training(stage, CUDASCHED_SIM_KILL_AT=f"cudasched-mem:{step}")
    killed.send(f"pointer = allocate({750 * PART})\ntrain(pointer, {PART})")
    second, other = that_holds(stage, 450)
    first.call(f"train({one}, {PART})")
    second.call(f"train({other}, {PART})")
    assert killed.process.wait(PATIENCE_S) == -signal.SIGKILL
    eventually(lambda: killed.pid not in clients(), "it has ended")
    progress([first, second])
    for program, pointer in ((first, one), (second, other)):
        program.call("ends = True\nthread.join()")
        eventually(lambda: away(program) == 0, "both fit")  # noqa: B023
        assert program.number(f"has({pointer + PART}, 7, {449 * PART})") == 1


def test_a_program_killed_while_it_waits_leaves_the_others_running(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    second, other = that_holds(stage, 750, 3_600_000)
    second.call(f"train({other}, {PART})")
    third = a_training(stage)
    third.send(f"allocate({750 * PART})")
    first.call(f"train({one}, {PART})")
    time.sleep(0.5)
    assert not third.answered()
    third.kill()
    second.kill()
    progress([first])
    assert first.number(f"has({one + PART}, 7, {749 * PART})") == 1


@pytest.mark.parametrize("how", ["by a signal", "by a controller"])
def test_a_wait_outlasts_a_stop_of_its_own_program(stage: Stage, how: str) -> None:
    that_holds(stage, 750)
    second, other = that_holds(stage, 700, 3_600_000)
    second.call(f"train({other}, {PART})")
    third, _ = that_holds(stage, 100)
    third.send(f"allocate({500 * PART})")
    time.sleep(2)
    if how == "by a signal":
        stop(third.pid)
    else:
        control.change(name_of(third), parked=True)
    time.sleep(5)
    if how == "by a signal":
        os.kill(third.pid, signal.SIGCONT)
    else:
        control.change(name_of(third), parked=False)
    time.sleep(1)
    assert not third.answered()
    second.kill()
    held = third.answer()
    assert isinstance(held, int)
    assert held > 0


def test_a_stopped_server_holds_nobody_up_for_longer_than_its_request(stage: Stage) -> None:
    first, one = that_holds(stage, 200)
    server = stage.run("latency", **PATIENT, CUDASCHED_GIVE_BACK_MS="1000")
    server.call(ALLOCATOR)
    stuck, _ = that_holds(stage, 600)
    stop(stuck.pid)
    server.send(f"allocate({900 * PART})")
    eventually(lambda: away(first) > 0, "it has moved")
    stop(server.pid)  # while the other does not answer
    stuck.kill()
    try:
        first.call(f"train({one}, {PART})")
        progress([first])
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_cache_is_not_waited_for_whose_lock_a_waiting_thread_holds(stage: Stage) -> None:
    """As PyTorch's allocator holds its own while it allocates."""
    that_holds(stage, 700)
    second, other = that_holds(stage, 700, 3_600_000)
    second.call(f"train({other}, {PART})")
    third, _ = that_holds(stage, 200)
    third.call("import threading\nlock = threading.Lock()\n" + CACHE.replace("emptied += 1", "with lock: emptied += 1"))
    third.call(f"""
def ask():
    gpu.use()
    with lock:
        allocate({400 * PART})
threading.Thread(target=ask, daemon=True).start()
""")
    time.sleep(1)
    server = stage.run("latency", **PATIENT, **UNHURRIED)
    server.call(ALLOCATOR)
    began = time.monotonic()
    assert server.number(f"allocate({950 * PART})") > 0
    assert time.monotonic() - began < 30, "a request for caches may take fifty seconds"


def test_a_stopped_program_holds_up_none_but_those_that_need_its_memory(stage: Stage) -> None:
    first, one = that_holds(stage, 750)
    second, other = that_holds(stage, 750)
    second.call(f"train({other}, {PART})")
    first.call(f"train({one}, {PART})")
    eventually(lambda: away(first) > 0, "it waits")
    stop(first.pid)
    try:
        progress([second], 60)
        assert away(second) == 0
    finally:
        os.kill(first.pid, signal.SIGCONT)
    progress([first, second])
