"""Memory of whole programs over a simulated GPU of 1 GB: what they hold, limits, and giving it back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cudasched import control
from program import PATIENCE_S, PATIENT, Program, Stage, clients, eventually
from support import ROOT, Run, stop, threads

MIB = 2**20
OUT_OF_MEMORY = 2

#: Longer than a busy machine keeps a program waiting.
UNHURRIED = {"CUDASCHED_GIVE_BACK_MS": "50000"}

#: Of a program: what allocates, what frees, and what its driver says is free.
ALLOCATOR = """
def allocate(bytes):
    pointer = ctypes.c_uint64()
    with_gil = gpu._library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(bytes))
    if with_gil:
        return -with_gil
    return pointer.value

def free(pointer):
    gpu.call("cuMemFree_v2", ctypes.c_uint64(pointer))

def info():
    free_bytes, all_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    gpu.call("cuMemGetInfo_v2", ctypes.byref(free_bytes), ctypes.byref(all_bytes))
    return [free_bytes.value, all_bytes.value]

gpu = Gpu()
gpu.launch()
gpu.synchronize()
"""

#: A cache, as an allocator keeps one, and the word to the engine that it can be emptied.
CACHE = """
kept = []
emptied = 0

@ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_void_p)
def empty(device, context):
    global emptied
    emptied += 1
    while kept:
        free(kept.pop())

engine = next(line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("libcudasched.so"))
assert ctypes.CDLL(engine).cudasched_use_cache(empty, None) == 0
"""


@pytest.fixture(autouse=True)
def small_device(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_MEMORY_MB", "1000")


def a_program(stage: Stage, client_class: str, **environment: str) -> Program:
    program = stage.run(client_class, **PATIENT, **environment)
    program.call(ALLOCATOR)
    return program


def gives(program: Program) -> bool:
    """Whether the thread that empties its cache waits to be asked."""
    return ("cudasched-mem", "S") in threads(program.pid)


def a_giver(stage: Stage, mib: int = 700, **environment: str) -> Program:
    """A best-effort program that keeps so much memory, which it does not need."""
    giver = a_program(stage, "best_effort", **environment)
    giver.call(CACHE)
    assert giver.number(f"kept.append(allocate({mib * MIB})) or kept[-1]") > 0
    eventually(lambda: gives(giver), "it can be asked")
    return giver


def test_status_shows_memory_by_client(stage: Stage, cudasched: Run) -> None:
    server, training = a_program(stage, "latency"), a_program(stage, "best_effort", CUDASCHED_MEMORY_LIMIT="600MiB")
    pointer = server.number(f"allocate({64 * MIB})")
    training.number(f"allocate({512 * MIB})")
    eventually(lambda: clients()[training.pid].memory_bytes == 512 * MIB, "the training's memory is told")
    eventually(lambda: clients()[server.pid].memory_bytes == 64 * MIB, "the server's memory is told")
    assert clients()[training.pid].memory_limit_bytes == 600 * MIB
    assert clients()[server.pid].memory_limit_bytes is None
    shown = cudasched("status", env={**os.environ, "COLUMNS": "160"}).stdout
    assert "512 MiB of 600 MiB" in shown and "64 MiB" in shown
    metrics = cudasched("metrics", "show").stdout.splitlines()
    of_training = [line.rsplit(" ", 1) for line in metrics if "memory" in line and f'pid="{training.pid}"' in line]
    assert {labels.partition("{")[0]: float(value) for labels, value in of_training} == {
        "cudasched_client_memory_bytes": 512 * MIB,
        "cudasched_client_memory_limit_bytes": 600 * MIB,
        "cudasched_client_memory_given_bytes_total": 0,
    }
    assert not any("memory_limit" in line and f'pid="{server.pid}"' in line for line in metrics)
    server.call(f"free({pointer})")
    eventually(lambda: clients()[server.pid].memory_bytes == 0, "the free is told")
    assert clients()[server.pid].memory_peak_bytes == 64 * MIB


POOL = """
from cudasched import memory
pool = memory.Pool()
"""


def test_status_shows_pools_and_a_server_gets_their_free_memory(stage: Stage, cudasched: Run) -> None:
    training = a_program(stage, "best_effort")
    training.call(POOL)
    kept = training.number(f"pool.allocate({64 * MIB})")
    training.call(f"blocks = [pool.allocate(2 * {MIB}) for _ in range(300)]\nfor block in blocks: pool.free(block)")
    eventually(lambda: clients()[training.pid].pool_reserved_bytes == 664 * MIB, "the pool is told")
    seen = clients()[training.pid]
    assert (seen.pool_allocated_bytes, seen.pool_largest_free_bytes) == (64 * MIB, 600 * MIB)
    assert (seen.pool_fragmentation, seen.memory_bytes) == (0, 664 * MIB)
    shown = " ".join(cudasched("status", env={**os.environ, "COLUMNS": "160"}).stdout.split())
    assert "664 MiB in pools, of which 64 MiB are allocated; largest free block 600 MiB, fragmentation 0.00" in shown
    eventually(lambda: gives(training), "it can be asked")
    server = a_program(stage, "latency", **UNHURRIED)
    assert server.number(f"allocate({800 * MIB})") > 0
    eventually(lambda: clients()[training.pid].pool_reserved_bytes == 64 * MIB, "free memory went back")
    assert clients()[training.pid].memory_given_bytes == 600 * MIB
    training.call(f"pool.free({kept})\npool.close()")
    eventually(lambda: clients()[training.pid].pool_reserved_bytes == 0, "the pool is closed")


RANGE = """
def size_at(pointer):
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    gpu.call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(pointer + 3))
    return size.value if begin.value == pointer else -1

def in_chunks():
    return "cudasched-sim-memory" in open("/proc/self/maps").read()
"""


@pytest.mark.parametrize("devices", ["1", "2"])
def test_pageable_memory_counts_as_any_and_is_plain_on_several_gpus(
    stage: Stage, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", devices)
    training = a_program(stage, "best_effort", CUDASCHED_PAGEABLE="on", CUDASCHED_MEMORY_LIMIT="400MiB")
    training.call(RANGE)
    pointer = training.number(f"allocate({301 * MIB})")
    assert training.number(f"size_at({pointer})") == 301 * MIB
    assert training.number("int(in_chunks())") == (devices == "1")
    eventually(lambda: clients()[training.pid].memory_bytes == 301 * MIB, "it is told as it was asked for")
    assert training.number(f"allocate({100 * MIB})") == -OUT_OF_MEMORY
    assert training.number(f"allocate({99 * MIB})") > 0
    assert training.number("info()[0]") == 0
    training.call(f"free({pointer})")
    assert training.number("info()[0]") == 301 * MIB
    child = "child = os.fork()\nif child == 0: os._exit(gpu._library.cuMemFree_v2(ctypes.c_uint64(1)) == 0)"
    training.call(f"import os\n{child}")
    assert training.number("os.waitpid(child, 0)[1]") == 0


BITS = """
def fill(pointer, value, bytes):
    gpu.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(value), ctypes.c_size_t(bytes))
    gpu.synchronize()

def fill_later(pointer, value, bytes):
    stream = ctypes.c_void_p(1)
    gpu.call("cuMemsetD8Async", ctypes.c_uint64(pointer), ctypes.c_ubyte(value), ctypes.c_size_t(bytes), stream)

def has(pointer, value, bytes):
    into = (ctypes.c_ubyte * bytes)()
    gpu.call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(pointer), ctypes.c_size_t(bytes))
    return int(memoryview(into).tobytes().count(value) == bytes)
"""


def a_pageable_program(stage: Stage, mib: int = 700) -> tuple[Program, int]:
    """And where its memory is, all of it in use and full of sevens."""
    training = a_program(stage, "best_effort", CUDASCHED_PAGEABLE="on", CUDASCHED_PARK="1GiB")
    training.call(BITS)
    pointer = training.number(f"allocate({mib * MIB})")
    assert pointer > 0
    training.call(f"fill({pointer}, 7, {mib * MIB})")
    return training, pointer


def name_of(program: Program) -> str:
    """For a controller."""
    return {each.pid: each.id for each in control.clients()}[program.pid]


def away(program: Program) -> int:
    return clients()[program.pid].memory_away_bytes


@pytest.mark.parametrize("end", ["frees", "ends", "is killed"])
def test_a_server_gets_memory_that_a_training_uses_and_the_training_has_it_back(stage: Stage, end: str) -> None:
    training, pointer = a_pageable_program(stage)
    caching = a_giver(stage, 4)
    server = a_program(stage, "latency", **UNHURRIED)
    held = server.number(f"allocate({600 * MIB})")
    assert held > 0, "but 300 MiB were free"
    assert clients()[caching.pid].memory_refusals == 0, "one that has nothing to move is not asked to"
    assert server.number("info()[0]") >= 256 * MIB, "the server's kernels have room, too"
    eventually(lambda: 300 * MIB <= away(training) < 700 * MIB, "no more than the server lacks is moved")
    assert clients()[training.pid].memory_bytes == 700 * MIB - away(training)
    training.call(f"fill_later({pointer + 9}, 8, {MIB})")
    if end == "frees":
        server.call(f"free({held})")
    elif end == "ends":
        server.end()
    else:
        os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: away(training) == 0, "the memory is back")
    training.call("gpu.synchronize()")
    for at, value, size in ((0, 7, 9), (9, 8, MIB), (9 + MIB, 7, MIB), (600 * MIB, 7, 100 * MIB)):
        assert training.number(f"has({pointer + at}, {value}, {size})") == 1
    assert training.number(f"free({pointer}) or info()[0]") >= 1000 * MIB


# Before the thread that moves it has looked, or has begun.
def test_a_server_gets_memory_that_a_training_has_only_just_allocated(stage: Stage) -> None:
    server = a_program(stage, "latency", **UNHURRIED)
    training = a_program(stage, "best_effort", CUDASCHED_PAGEABLE="on", CUDASCHED_PARK="1GiB")
    for _ in range(4):
        pointer = training.number(f"allocate({700 * MIB})")
        held = server.number(f"allocate({600 * MIB})")
        assert held > 0
        server.call(f"free({held})")
        training.call(f"free({pointer})")


FILLS_AND_ALLOCATES = """
import threading

def steps():
    gpu.use()
    while True:
        gpu.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(7), ctypes.c_size_t(9))
        free(allocate(4096))

for _ in range(4):
    threading.Thread(target=steps, daemon=True).start()
"""


# The fill is under way until its thread makes another call: the allocation, which waits for the server's.
def test_a_training_whose_allocations_let_a_server_go_first_can_be_parked(stage: Stage) -> None:
    training, pointer = a_pageable_program(stage)
    training.call(f"pointer = {pointer}\n{FILLS_AND_ALLOCATES}")
    server = a_program(stage, "latency", CUDASCHED_GIVE_BACK_MS="10000")
    for _ in range(6):
        held = server.number(f"allocate({600 * MIB})")
        assert held > 0
        server.call(f"free({held})")
        eventually(lambda: away(training) == 0, "the memory is back")


# What it had is free when it is asked, which is no reason to let it be for a while.
def test_a_server_gets_memory_of_a_training_that_had_none_just_before(stage: Stage) -> None:
    plain, server = a_program(stage, "normal"), a_program(stage, "latency", **UNHURRIED)
    assert plain.number(f"allocate({300 * MIB})") > 0
    training, pointer = a_pageable_program(stage, 600)
    for _ in range(6):
        training.call(f"free({pointer})")
        assert server.number(f"allocate({800 * MIB})") == -OUT_OF_MEMORY
        pointer = training.number(f"allocate({600 * MIB})")
        held = server.number(f"allocate({500 * MIB})")
        assert held > 0
        server.call(f"free({held})")
        eventually(lambda: away(training) == 0, "the memory is back")
        time.sleep(0.1)  # it says again what can move


# All that could move is away, and comes back while the server asks again.
def test_a_server_that_asks_again_gets_memory_that_is_on_its_way_back(stage: Stage) -> None:
    training, _ = a_pageable_program(stage)
    server = a_program(stage, "latency", **UNHURRIED)
    for after_ms in range(200, 500, 30):
        held = server.number(f"allocate({900 * MIB})")
        assert held > 0, f"{after_ms} ms"
        server.call(f"free({held})")
        time.sleep(after_ms / 1e3)
    eventually(lambda: away(training) == 0, "the memory is back")


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_a_training_ends_while_its_memory_is_away(stage: Stage, how: str) -> None:
    training, pointer = a_pageable_program(stage)
    server = a_program(stage, "latency", **UNHURRIED)
    assert server.number(f"allocate({600 * MIB})") > 0
    training.call(f"fill_later({pointer}, 8, {MIB})")
    if how == "exits":
        training.end()
    else:
        os.kill(training.pid, signal.SIGKILL)
    eventually(lambda: training.pid not in clients(), "it has ended")
    assert server.number(f"allocate({300 * MIB})") > 0


def test_a_program_is_parked_by_control(stage: Stage, cudasched: Run) -> None:
    training, pointer = a_pageable_program(stage, 100)
    plain = a_program(stage, "best_effort")
    control.change(name_of(training), parked=True)
    eventually(lambda: away(training) == 100 * MIB, "all of it is moved")
    shown = " ".join(cudasched("status", env={**os.environ, "COLUMNS": "160"}).stdout.split())
    assert f"({training.pid}): parked, 100 MiB are in the host's memory" in shown
    control.change(name_of(training), parked=False)
    eventually(lambda: away(training) == 0, "all of it is back")
    assert training.number(f"has({pointer}, 7, {100 * MIB})") == 1
    with pytest.raises(control.ControlError, match="no such setting"):
        control.change(name_of(plain), parked=True)


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_a_program_that_gives_nothing_says_so(stage: Stage, when: str) -> None:
    """Or a server would wait for its answers, and a controller for its move."""
    setting = {"CUDASCHED_GIVE_BACK_MS": "0" if when == "from the beginning" else "1000"}
    training = a_program(stage, "best_effort", CUDASCHED_PAGEABLE="on", CUDASCHED_PARK="1GiB", **setting)
    assert training.number(f"allocate({500 * MIB})") > 0
    training.call(CACHE)
    assert training.number(f"kept.append(allocate({200 * MIB})) or kept[-1]") > 0
    if when == "later":
        eventually(lambda: gives(training), "it can be asked")
        assert training.number("ctypes.CDLL(engine).cudasched_configure(b'give_back_ms', b'0')") == 0
    server = a_program(stage, "latency")
    assert server.number(f"allocate({600 * MIB})") == -OUT_OF_MEMORY
    assert training.number("emptied") == 0
    assert away(training) == 0
    if when == "from the beginning":
        assert "Did not give memory back in time" not in server.stderr
    with pytest.raises(control.ControlError, match="no such setting"):
        control.change(name_of(training), parked=True)


def test_what_a_parked_program_frees_is_free_when_it_is_back(stage: Stage) -> None:
    training, pointer = a_pageable_program(stage, 500)
    control.change(name_of(training), parked=True)
    eventually(lambda: away(training) == 500 * MIB, "all of it is moved")
    training.call(f"free({pointer})")
    control.change(name_of(training), parked=False)
    other = a_program(stage, "normal")
    eventually(lambda: other.number(f"allocate({800 * MIB})") > 0, "it is free")


def test_memory_that_went_with_its_context_is_not_offered(stage: Stage) -> None:
    training, _ = a_pageable_program(stage, 500)
    server = a_program(stage, "latency", CUDASCHED_GIVE_BACK_MS="3000")
    held = server.number(f"allocate({900 * MIB})")
    assert held > 0
    eventually(lambda: away(training) > 0, "it has moved")
    training.call("gpu.call('cuDevicePrimaryCtxReset_v2', 0)\ngpu = Gpu()\ngpu.launch()\ngpu.synchronize()")
    control.change(name_of(training), memory_limit="900MiB")  # the settings of memory are read again
    server.call(f"free({held})")
    assert a_program(stage, "normal").number(f"allocate({500 * MIB})") > 0
    assert server.number(f"allocate({900 * MIB})") == -OUT_OF_MEMORY
    assert clients()[training.pid].memory_refusals == 0


def test_memory_that_was_not_there_is_in_no_peak(stage: Stage) -> None:
    program = a_program(stage, "best_effort")
    program.number(f"allocate({64 * MIB})")
    assert program.number(f"allocate({5000 * MIB})") == -OUT_OF_MEMORY
    eventually(lambda: clients()[program.pid].memory_bytes == 64 * MIB, "it is told")
    assert clients()[program.pid].memory_peak_bytes == 64 * MIB


def test_a_limit_of_run_holds_and_the_program_sees_a_gpu_of_that_size(command: str, simulated: Path) -> None:
    code = (
        "from program import *\n"
        + ALLOCATOR
        + f"print(info(), allocate({300 * MIB}), allocate({100 * MIB}) > 0, info())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [command, "run", "--memory-limit", "256MiB", "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_S,
    )
    all_bytes = 256 * MIB
    assert done.stdout.split("\n")[0] == (
        f"[{all_bytes}, {all_bytes}] -{OUT_OF_MEMORY} True [{156 * MIB}, {all_bytes}]"
    ), done.stderr
    assert "refused by the memory limit of this program, 256.0 MiB: it holds 0.0 MiB" in done.stderr


@pytest.mark.parametrize("client_class", ["normal", "best_effort"])
def test_a_limit_knows_what_the_drivers_pool_has_given_back(stage: Stage, client_class: str) -> None:
    program = a_program(stage, client_class, CUDASCHED_MEMORY_LIMIT="400MiB")
    program.call(f"""
pointer = ctypes.c_uint64()
gpu.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t({300 * MIB}), ctypes.c_void_p(0))
gpu.call("cuMemFreeAsync", pointer, ctypes.c_void_p(0))
gpu.synchronize()
free_bytes, allocated = info()[0], allocate({300 * MIB})
""")
    assert program.number("free_bytes") == 400 * MIB
    assert program.number("allocated") > 0


def test_on_an_integrated_gpu_a_limit_leaves_the_host_its_memory(
    command: str, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 1 TiB that says that it has the host's memory, of which less is available."""
    monkeypatch.setenv("CUDASCHED_SIM_MEMORY_MB", str(2**20))
    monkeypatch.setenv("CUDASCHED_SIM_INTEGRATED", "1")
    code = "from program import *\n" + ALLOCATOR + f"print(info()[0] < 2**39, allocate(2**39), allocate({MIB}) > 0)"
    done = subprocess.run(
        [command, "run", "--memory-limit", "1000GiB", "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == f"True -{OUT_OF_MEMORY} True\n", done.stderr
    assert "the GPU has the host's memory, of which" in done.stderr


def test_what_the_driver_refuses_changes_no_account(command: str, simulated: Path) -> None:
    """Histories of calls that are too much, twice, in part or somewhere else."""
    program = Path(__file__).parents[1] / "soak" / "refused_memory.py"
    run = [command, "run", "--memory-limit", "1GiB", "--", sys.executable, program, "200"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "200 0\n"), done.stderr


@pytest.mark.parametrize("value", ["much", "20", "20GiBs", "-1GiB"])
def test_a_limit_that_is_no_size_starts_nothing(cudasched: Run, value: str) -> None:
    done = cudasched("run", f"--memory-limit={value}", "--", "echo", "started")
    assert done.returncode == 2
    assert "--memory-limit" in done.stderr and "such as 20GiB" in done.stderr
    assert "started" not in done.stdout


def test_memory_that_only_caches_keep_goes_to_the_latency_client(stage: Stage) -> None:
    giver, server = a_giver(stage), a_program(stage, "latency", **UNHURRIED)
    assert server.number(f"allocate({600 * MIB})") > 0
    assert giver.number("emptied") >= 1
    assert clients()[giver.pid].memory_given_bytes == 700 * MIB
    assert server.stderr == ""


def test_for_more_than_a_gpu_has_nobody_is_asked(stage: Stage) -> None:
    giver, server = a_giver(stage), a_program(stage, "latency", **UNHURRIED)
    assert server.number(f"allocate({1001 * MIB})") == -OUT_OF_MEMORY
    assert giver.number("emptied") == 0


# Before the next tick.
def test_a_server_gets_what_a_pool_has_only_just_freed(stage: Stage) -> None:
    server = a_program(stage, "latency", **UNHURRIED)
    for _ in range(4):
        training = a_program(stage, "best_effort")
        training.call(f"{POOL}pool.free(pool.allocate({700 * MIB}))")
        held = server.number(f"allocate({800 * MIB})")
        assert held > 0
        server.call(f"free({held})")
        training.kill()


def test_pytorchs_cache_of_a_program_that_says_nothing_is_found(stage: Stage, tmp_path: Path) -> None:
    """By the extension that was built for the PyTorch that the program has loaded; none of another version."""
    library = tmp_path / "torch/lib/libc10_cuda.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "torch/version.py").write_text("from typing import Optional\n__version__ = '2.11.0+cu130'\n")
    compiler = shutil.which("g++") or "c++"
    source = tmp_path / "empty.cpp"
    source.write_text("")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    cache = tmp_path / "cache"
    include = ["-I", str(ROOT / "tests/python/c10_double"), "-I", str(ROOT / "csrc")]
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]
    built = cache / "cudasched/torch-2.11.0+cu130-0123/libcudasched_torch.so"
    built.parent.mkdir(parents=True)
    subprocess.run([compiler, *flags, *include, ROOT / "csrc/torch/observe.cpp", "-o", built], check=True)
    other = cache / "cudasched/torch-2.12.0+cu130-0123/libcudasched_torch.so"
    other.parent.mkdir()
    other.write_text("no library")

    giver = a_program(stage, "best_effort", XDG_CACHE_HOME=str(cache))
    giver.call(f"c10 = ctypes.CDLL({str(library)!r})")
    eventually(lambda: str(built) in str(giver.call("open('/proc/self/maps').read()")), "the extension is loaded")
    giver.number(f"allocate({700 * MIB})")
    server = a_program(stage, "latency")
    emptied = f"ctypes.CDLL({str(built)!r}).double_emptied()"

    def asked() -> bool:
        server.number(f"allocate({600 * MIB})")
        return giver.number(emptied) > 0

    eventually(asked, "PyTorch's cache is emptied")


def test_without_a_latency_class_nothing_is_asked_for(stage: Stage) -> None:
    giver, other = a_giver(stage), a_program(stage, "normal")
    assert other.number(f"allocate({600 * MIB})") == -OUT_OF_MEMORY
    assert giver.number("emptied") == 0


def test_an_error_says_who_holds_what(stage: Stage) -> None:
    training = a_program(stage, "best_effort", CUDASCHED_NAME="train.py")  # no cache that is known
    assert training.number(f"allocate({700 * MIB})") > 0
    server = a_program(stage, "latency")
    assert server.number(f"allocate({600 * MIB})") == -OUT_OF_MEMORY
    (line,) = [line for line in server.stderr.splitlines() if "Holders: " in line]
    assert f"train.py ({training.pid}) 700.0 MiB best_effort" in line
    assert "has no 600.0 MiB left for this program (latency)" in line
    assert "of 1000.0 MiB are free" in line
    assert f"({server.pid})" not in line, "it has not got them"


def test_an_error_names_no_free_memory_of_another_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    server = a_program(stage, "latency")
    server.call("other = Gpu(1); other.launch(); there = ctypes.c_void_p(other.stream()); gpu.use()")
    asked = f"ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t({1001 * MIB}), there"
    assert server.number(f"gpu._library.cuMemAllocAsync({asked})") == OUT_OF_MEMORY
    (line,) = [line for line in server.stderr.splitlines() if "GPU 1 has no 1001.0 MiB left" in line]
    assert "are free" not in line


def test_a_giver_that_is_stopped_is_waited_for_no_longer_than_allowed_and_named(stage: Stage) -> None:
    giver = a_giver(stage, CUDASCHED_NAME="train.py")
    server = a_program(stage, "latency", CUDASCHED_GIVE_BACK_MS="300")
    stop(giver.pid)
    try:
        assert server.number(f"allocate({600 * MIB})") == -OUT_OF_MEMORY
    finally:
        os.kill(giver.pid, signal.SIGCONT)
    assert f"Did not give memory back in time: train.py ({giver.pid})" in server.stderr
    eventually(lambda: server.number(f"allocate({600 * MIB})") > 0, "it answers again")


def test_what_a_killed_giver_held_is_there_at_once(stage: Stage) -> None:
    giver = a_giver(stage, CUDASCHED_NAME="train.py")
    server = a_program(stage, "latency", **UNHURRIED)
    stop(giver.pid)
    server.send(f"allocate({600 * MIB})")
    time.sleep(0.1)
    assert not server.answered()
    giver.kill()  # in the middle
    value = server.answer()
    assert isinstance(value, int) and value > 0


def test_a_killed_client_that_asked_holds_nobody_up(stage: Stage) -> None:
    """It asks one that does not answer, so that its request is open; the other one waits only until it is dead."""
    stuck = a_giver(stage, 300)
    giver = a_giver(stage, 300)
    server = a_program(stage, "latency", **UNHURRIED)
    stop(stuck.pid)
    try:
        server.send(f"allocate({900 * MIB})")
        eventually(lambda: clients()[giver.pid].memory_given_bytes == 300 * MIB, "it has given")
        giver.send(f"allocate({100 * MIB})")
        time.sleep(0.2)
        assert not giver.answered(), "what was freed is kept for the client that asked"
        server.kill()
        value = giver.answer()
        assert isinstance(value, int) and value > 0
    finally:
        os.kill(stuck.pid, signal.SIGCONT)


def test_a_limit_that_is_set_at_run_time_is_not_below_what_is_held(stage: Stage) -> None:
    program = stage.importing(**PATIENT)
    program.call(ALLOCATOR)
    assert program.number(f"allocate({64 * MIB})") > 0
    set_it = """
def configure(value):
    engine = next(line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("libcudasched.so"))
    library = ctypes.CDLL(engine)
    library.cudasched_last_error.restype = ctypes.c_char_p
    return "" if library.cudasched_configure(b"memory_limit", value) == 0 else library.cudasched_last_error().decode()
"""
    program.call(set_it)
    assert "is below the 64.0 MiB that this program holds" in str(program.call("configure(b'32MiB')"))
    assert program.call("configure(b'65MiB')") == ""
    assert program.number(f"allocate({2 * MIB})") == -OUT_OF_MEMORY


def test_a_forked_child_holds_nothing_of_its_parents(stage: Stage) -> None:
    program = stage.importing(**PATIENT)
    program.call(ALLOCATOR)
    program.number(f"allocate({64 * MIB})")
    assert program.call("os.fork() == 0 and os._exit(0) or os.wait()[1]") == 0
    eventually(lambda: clients()[program.pid].memory_bytes == 64 * MIB, "the parent's stays")
