"""Errors of deferred calls, work that never ends, and clocks that jump: end to end on the simulated driver."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cudasched as package
import pytest
from program import ENTER, HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually
from support import Run, stop

LOG = "from logged import *; gpu = Gpu(); log = Log(gpu); log.note(0); gpu.synchronize()"
"""The first launch of its kind is never deferred; its like are from then on."""

pytestmark = pytest.mark.usefixtures("quick_device")


def server(stage: Stage, **environment: str) -> Program:
    """A latency client that is idle, and that ENTER and LEAVE make active and idle again."""
    program = stage.importing(CUDASCHED_CLASS="latency", **HOLDING, **environment)
    program.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    return program


def trainer(stage: Stage, **environment: str) -> Program:
    program = stage.run("best-effort", **environment)
    program.call(LOG)
    return program


# ---- errors in the launcher ----------------------------------------------------------------------------------------

STATUS = """
def status(name, *arguments):
    try: gpu.call(name, *arguments)
    except RuntimeError as error: return int(str(error).split()[-1])
    return 0
def fills(address): return status("cuMemsetD32Async", address, 1, ctypes.c_size_t(4), None)
"""


def test_a_call_that_fails_in_the_launcher_is_told_at_the_next_one(stage: Stage) -> None:
    """Once, to the thread that made it; all else goes on."""
    train = trainer(stage)
    train.call(f"{STATUS}\nspare = log.allocate(64)")
    serve = server(stage, **PATIENT)
    serve.call(ENTER)
    train.call("log.note(1)")  # it waits at the gate, and what follows behind it
    assert train.call("fills(ctypes.c_uint64(64))") == 0
    train.call("log.note(2)")
    serve.call(LEAVE)
    eventually(lambda: train.count("offloaded_launches") == 2, "the launcher comes to it")
    train.call("other = []; Worker(gpu, lambda: other.append(fills(spare))).join()")
    assert train.call("other") == [0]
    assert train.call("[fills(spare), fills(spare)]") == [1, 0]
    train.call("log.note(3)")
    assert train.call("log.read()[1:]") == [1, 2, 3]
    assert (train.end(), train.stderr) == (0, "")


BREAKS_AND_MENDS = """
def notes():
    try: log.note(1)
    except RuntimeError as error: return int(str(error).split()[-1])
    return 0
gpu.call("cuMemFree_v2", log.values)
log.note(1)
said = [status("cuCtxSynchronize"), status("cuCtxSynchronize")]
while notes() != 700: pass
said += {notes() for _ in range(50)} | {fills(log.values) for _ in range(50)} | {status("cuCtxSynchronize")}
gpu.call("cuDevicePrimaryCtxReset_v2", 0)
gpu.call("cuDevicePrimaryCtxRelease_v2", 0)
gpu = Gpu(); log = Log(gpu); log.note(0); gpu.synchronize()
log.note(*range(1, 11))
print(said + log.read())
if sys.argv[1:]: assert state()["offloaded_launches"] > 10
sys.stdout.flush()
"""


def test_an_error_that_stays_is_told_by_every_call_until_the_reset(
    cudasched: Run, python: Run, simulated: Path
) -> None:
    code = f"import sys\nfrom program import *\n{LOG}\n{STATUS}\n{BREAKS_AND_MENDS}"
    bare = python(code, env={**os.environ, "LD_LIBRARY_PATH": str(simulated.parent)})
    assert (bare.stdout, bare.stderr) == (f"{[700, 700, 700, *range(11)]}\n", "")
    done = cudasched("run", "--class", "best-effort", "--", sys.executable, "-c", code, "offloads")
    assert (done.stdout, done.stderr) == (bare.stdout, "")


# ---- work that never ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["0", "1"])
def test_a_kernel_that_never_ends_stops_nobody_else(stage: Stage, offload: str) -> None:
    """Neither latency work nor another best-effort program, which gets the turn; the device has room for them."""
    serve = stage.importing(CUDASCHED_CLASS="latency", **PATIENT)
    serve.call("gpu = Gpu(); gpu.launch(); gpu.synchronize()")
    hangs, train = trainer(stage, CUDASCHED_OFFLOAD=offload), trainer(stage)
    hangs.call("log.note(1, us=FOREVER_US)")
    hangs.send("log.note(*range(2, 20)); gpu.synchronize()")
    for first in range(1, 101, 10):
        serve.call("with cudasched.region('latency'): gpu.launch(3); gpu.synchronize()")
        train.call(f"log.note(*range({first}, {first + 10})); gpu.synchronize()")
    assert train.call("log.read() == list(range(101))") is True
    assert not hangs.answered()
    eventually(lambda: clients()[hangs.pid].overdue_s > 1, "status names it")
    assert clients()[train.pid].overdue_s == 0
    hangs.kill()
    assert set(clients()) == {serve.pid, train.pid}


# ---- clocks --------------------------------------------------------------------------------------------------------


class Words:
    """The 8-byte words of the shared table, wherever its layout has what."""

    def __init__(self) -> None:
        (device,) = package.status()
        self._file = device.path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def read(self) -> tuple[int, ...]:
        return struct.unpack(f"{len(self._map) // 8}q", self._map[: len(self._map) // 8 * 8])

    def write(self, places: list[int], value: int) -> None:
        for place in places:
            struct.pack_into("q", self._map, 8 * place, value)

    def heartbeat(self, client: Program) -> int:
        """Where the one client's heartbeat is: the time that moves on by itself, again and again, in a region."""
        client.call(ENTER)
        seen = [self.read()]
        for _ in range(4):
            time.sleep(0.15)
            seen.append(self.read())
        now = time.monotonic_ns()
        client.call(LEAVE)
        (place,) = [
            place
            for place, times in enumerate(zip(*seen, strict=True))
            # A version of counts begins at the time, and goes on by ones.
            if all(new - old > 10**7 for old, new in itertools.pairwise(times)) and abs(now - times[-1]) < 10**9
        ]
        return place


@pytest.fixture
def words(stage: Stage) -> Iterator[Words]:
    """Of the table that `server` and `trainer` made."""
    server(stage).end()
    words = Words()
    yield words
    words.close()


@pytest.mark.parametrize("beat", [10**18, 2**63 - 1, -(2**63), 0])
def test_a_heartbeat_from_another_time_is_no_sign_of_life(stage: Stage, words: Words, beat: int) -> None:
    """A stopped client in a region, whose clock is not ours, holds nobody back; when it goes on, it counts again."""
    serve = server(stage)
    heartbeat = words.heartbeat(serve)
    train = trainer(stage)
    serve.call(ENTER)
    stop(serve.pid)
    words.write([heartbeat], beat)
    train.call("log.note(*range(1, 51)); gpu.synchronize()")
    os.kill(serve.pid, signal.SIGCONT)
    serve.call("gpu.launch(); gpu.synchronize()")
    eventually(lambda: abs(time.monotonic_ns() - words.read()[heartbeat]) < 10**9, "its heart beats")
    serve.call(LEAVE)
    assert train.call("log.read() == list(range(51))") is True
    assert (serve.end(), serve.stderr) == (0, "")


def test_all_clients_stop_and_go_on_as_with_a_suspended_machine(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.call("log.note(*range(1, 51))")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for program in (train, serve):
            os.kill(program.pid, number)
        time.sleep(0.3)
    serve.call("gpu.launch(3); gpu.synchronize()")
    train.call("log.note(*range(51, 101))")
    serve.call(LEAVE)
    assert train.call("log.read() == list(range(101))") is True
    for program in (train, serve):
        assert (program.end(), program.stderr) == (0, "")


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), -1])
def test_a_table_of_foreign_words_stops_nobody(stage: Stage, words: Words, value: int) -> None:
    """Whatever a client's own words say, from its class to its deadlines, the others go on and end."""
    first = server(stage, **PATIENT)
    heartbeat = words.heartbeat(first)
    train = trainer(stage)
    stop(first.pid)
    words.write(list(range(heartbeat - 1, heartbeat + 24)), value)
    late = trainer(stage)
    for program in (train, late):
        program.call("log.note(*range(1, 51)); gpu.synchronize()")
        assert program.call("log.read() == list(range(51))") is True
    package.status()
    for program in (train, late):
        assert (program.end(), program.stderr) == (0, "")
