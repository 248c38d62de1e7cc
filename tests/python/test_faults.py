"""Programs are killed, stopped, misbehaving or badly off: the others go on, and each comes to its own end."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cudasched as package
import pytest
from program import ENTER, HOLDING, LEAVE, PATIENT, Program, Stage, clients, eventually, wait_at_the_gate
from support import PATIENCE_S, Run, but_for_long_kernels, stop

ONCE = "gpu = Gpu(); gpu.launch(); gpu.synchronize()"


pytestmark = pytest.mark.usefixtures("without_offload")


@pytest.fixture
def misbehaving(cudasched: Run, simulated: Path) -> Run:
    """Runs code under `cudasched run --class best-effort`, with what program.py has."""

    def run(code: str, client_class: str = "best-effort", **options: object) -> subprocess.CompletedProcess[str]:
        code = "import os, sys\nfrom program import *\n" + code
        return cudasched("run", "--class", client_class, "--", sys.executable, "-c", code, **options)

    return run


def shown(cudasched: Run) -> set[int]:
    """The pids that `cudasched status` lists."""
    done = cudasched("status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {client["pid"] for device in json.loads(done.stdout)["data"] for client in device["clients"]}


def started(program: Program) -> Program:
    program.call(ONCE)
    return program


def server(stage: Stage) -> Program:
    """A latency client that is idle, and that ENTER and LEAVE make active and idle again."""
    program = stage.importing(CUDASCHED_CLASS="latency", **PATIENT, **HOLDING)
    return started(program)


def trainer(stage: Stage) -> Program:
    return started(stage.run("best-effort", **PATIENT))


def goes_on(program: Program) -> None:
    """Asserts that a program with a `feeder` makes progress."""
    before = program.number("feeder.count")
    eventually(lambda: program.number("feeder.count") >= before + 10, "the program goes on")


# ---- killed --------------------------------------------------------------------------------------------------------


def test_an_active_latency_client_is_killed(stage: Stage, cudasched: Run) -> None:
    serve, train = started(stage.run("latency")), trainer(stage)
    serve.call("gpu.launch(us=FOREVER_US)")
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    assert shown(cudasched) == {serve.pid, train.pid}
    serve.kill()
    train.answer()
    train.call("gpu.launch(20); gpu.synchronize()")
    assert shown(cudasched) == {train.pid}
    gated = train.count("gated_launches")
    train.call("gpu.launch(5)")
    assert train.count("gated_launches") == gated


def test_a_latency_client_is_killed_in_a_region_without_work(stage: Stage, cudasched: Run) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.kill()
    train.answer()
    assert shown(cudasched) == {train.pid}


def test_a_latency_client_is_killed_between_launches(stage: Stage, cudasched: Run) -> None:
    serve, train = started(stage.run("latency")), trainer(stage)
    train.call("gpu.launch()")
    assert train.count("gated_launches") == 2
    serve.kill()

    def ungated() -> bool:
        before = train.count("gated_launches")
        train.call("gpu.launch()")
        return train.count("gated_launches") == before

    eventually(ungated, "the gate is off again")
    assert shown(cudasched) == {train.pid}


def test_one_of_two_active_latency_clients_is_killed(stage: Stage) -> None:
    dies, stays, train = server(stage), server(stage), trainer(stage)
    dies.call(ENTER)
    stays.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    dies.kill()
    eventually(lambda: dies.pid not in clients(), "its slot is given back")
    wait_at_the_gate(train)
    stays.call(LEAVE)
    train.answer()


def test_a_best_effort_client_is_killed_at_the_gate(stage: Stage, cudasched: Run) -> None:
    serve, dies, train = server(stage), trainer(stage), trainer(stage)
    serve.call(ENTER)
    dies.send("gpu.launch()")
    train.send("gpu.launch()")
    wait_at_the_gate(dies)
    wait_at_the_gate(train)
    dies.kill()
    serve.call("gpu.launch(3); gpu.synchronize()")
    assert shown(cudasched) == {serve.pid, train.pid}
    assert not train.answered()
    serve.call(LEAVE)
    train.answer()
    train.call("gpu.launch(20); gpu.synchronize()")


@pytest.mark.parametrize("turn_ms", ["3", "3600000"])
def test_a_best_effort_client_is_killed_while_it_feeds(stage: Stage, cudasched: Run, turn_ms: str) -> None:
    """With turns of an hour only the killed one's death can end its turn."""
    serve = server(stage)
    feeds, waits = [started(stage.run("best-effort", CUDASCHED_TURN_MS=turn_ms, **PATIENT)) for _ in range(2)]
    feeds.call("feeder = Feeder(gpu)")
    goes_on(feeds)
    waits.call("feeder = Feeder(gpu)")
    feeds.kill()
    goes_on(waits)
    assert shown(cudasched) == {serve.pid, waits.pid}


def test_a_killed_clients_work_leaves_the_device(stage: Stage) -> None:
    dies, stays = trainer(stage), trainer(stage)
    dies.call("gpu.launch(100, us=FOREVER_US)")
    dies.kill()
    stays.call("gpu.launch(20); gpu.synchronize()")


def test_a_program_is_killed_and_started_again_often(stage: Stage, cudasched: Run) -> None:
    """A slot is given to the next client whatever the last one was doing."""
    train = trainer(stage)
    train.call("feeder = Feeder(gpu)")
    for _ in range(6):
        serve = started(stage.run("latency"))
        serve.call("gpu.launch(us=FOREVER_US)")
        serve.kill()
        goes_on(train)
    assert shown(cudasched) == {train.pid}
    (device,) = package.status()
    assert [client.slot for client in device.clients] == [0]


def test_five_programs_killed_at_random(stage: Stage, cudasched: Run) -> None:
    chance = random.Random(7)
    classes = ["latency", "best-effort", "best-effort", "best-effort", "normal"]

    def start(client_class: str) -> Program:
        program = stage.run(client_class)
        program.send(f"{ONCE}; feeder = Feeder(gpu, requests={client_class == 'latency'})")
        return program

    programs = [start(client_class) for client_class in classes]
    for _ in range(16):
        time.sleep(chance.uniform(0, 0.6))
        victim = chance.randrange(len(programs))
        programs[victim].kill()
        programs[victim] = start(classes[victim])
    for program in programs:
        program.answer()
    for program in programs:
        goes_on(program)
    for program in programs:
        program.call("feeder.stop(); gpu.synchronize()")
    assert shown(cudasched) == {program.pid for program in programs}
    assert not any(client.active or client.waiting for client in clients().values())
    for program in programs:
        assert (program.end(), program.stderr) == (0, "")
    assert shown(cudasched) == set()


# ---- stopped -------------------------------------------------------------------------------------------------------


def test_a_stopped_latency_client_counts_again_when_it_is_continued(stage: Stage, cudasched: Run) -> None:
    serve = server(stage)
    train = started(stage.run("best-effort", CUDASCHED_STALE_HEARTBEAT_MS="1000"))
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    stop(serve.pid)
    train.answer()
    train.call("gpu.launch(20); gpu.synchronize()")
    assert shown(cudasched) == {serve.pid, train.pid}
    assert clients()[serve.pid].active
    os.kill(serve.pid, signal.SIGCONT)
    serve.call("gpu.launch(); gpu.synchronize()")
    eventually(lambda: clients()[serve.pid].heartbeat_age_s < 0.5, "its heart beats")
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()


def test_a_stopped_best_effort_client_does_not_keep_the_turn(stage: Stage) -> None:
    server(stage)
    stops, train = trainer(stage), trainer(stage)
    for program in (stops, train):
        program.call("feeder = Feeder(gpu)")
        goes_on(program)
    stop(stops.pid)
    goes_on(train)
    os.kill(stops.pid, signal.SIGCONT)
    goes_on(stops)
    goes_on(train)


# ---- forks, other programs, threads, ends --------------------------------------------------------------------------


def said(done: subprocess.CompletedProcess[str], stdout: str, code: int = 0, stderr: str = "") -> None:
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


def test_workers_forked_before_cuda(misbehaving: Run) -> None:
    code = (
        "import multiprocessing\n"
        "def work(count):\n"
        "    gpu = Gpu(); gpu.launch(count); gpu.synchronize()\n"
        "    return state()['best_effort_launches'], state()['scheduling']\n"
        "with multiprocessing.get_context('fork').Pool(2, maxtasksperchild=1) as pool:\n"
        "    print(pool.map(work, [3, 4], chunksize=1))\n"
        "print(work(2))"
    )
    said(misbehaving(code), "[(3, True), (4, True)]\n(2, True)\n")


@pytest.mark.parametrize("end", ["os._exit(3)", "sys.exit(3)"])
def test_a_child_forked_after_cuda_leaves_the_parent_alone(stage: Stage, cudasched: Run, end: str) -> None:
    serve, train = server(stage), trainer(stage)
    fork = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        gpu.launch()\n"
        "    except RuntimeError as error:\n"
        "        assert 'status 3' in str(error), error\n"
        "    else:\n"
        "        os._exit(9)\n"
        f"    {end}\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    for program in (train, serve):
        program.call(fork)
        assert program.call("code") == 3
        assert shown(cudasched) == {serve.pid, train.pid}
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert train.count("best_effort_launches") == 2
    for program in (train, serve):
        assert (program.end(), program.stderr) == (0, "")


def test_a_fork_inside_a_region_while_a_thread_wait_at_the_gate(stage: Stage, cudasched: Run) -> None:
    program = server(stage)
    program.call("best_effort = cudasched.region('best_effort')(gpu.launch)")
    program.call(ENTER)
    program.call("worker = Worker(gpu, best_effort)")
    wait_at_the_gate(program)
    program.call(
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    {LEAVE}\n"
        "    with cudasched.region('latency'): os._exit(3)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    assert program.call("code") == 3
    wait_at_the_gate(program)
    program.call("subprocess.run(['true'], check=True)")
    assert program.call("worker.is_alive()")
    program.call(LEAVE)
    program.call("worker.join()")
    assert (program.count("latency_launches"), program.count("best_effort_launches")) == (1, 1)
    assert (program.end(), program.stderr) == (0, "")
    assert shown(cudasched) == set()


def test_a_child_outlives_its_killed_parent(stage: Stage, cudasched: Run) -> None:
    """A fork has the parent's descriptors, but its slot is not the child's to keep."""
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    serve.call("child = os.fork()\nif child == 0: time.sleep(3600)")
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    child = serve.number("child")
    try:
        serve.kill()
        train.answer()
        assert shown(cudasched) == {train.pid}
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_program_takes_ones_place(stage: Stage, cudasched: Run) -> None:
    serve, program = server(stage), trainer(stage)
    assert shown(cudasched) == {serve.pid, program.pid}
    program.send("os.execv(sys.executable, [sys.executable, sys.modules['__main__'].__file__])")
    assert program.call("state()['launches']") == 0
    assert shown(cudasched) == {serve.pid}
    program.call(ONCE)
    assert (program.count("best_effort_launches"), program.count("gated_launches")) == (1, 1)
    assert shown(cudasched) == {serve.pid, program.pid}
    assert (program.end(), program.stderr) == (0, "")


def test_a_program_starts_cudasched_run_again(misbehaving: Run, command: str) -> None:
    code = (
        "import subprocess\n"
        'report = "from program import *; gpu = Gpu(); gpu.launch(2); s = state(); '
        "print(s['process_class'], s['latency_launches'], s['scheduling'])\"\n"
        "gpu = Gpu(); gpu.launch(3)\n"
        f"subprocess.run([{command!r}, 'run', '--class', 'latency', '--', sys.executable, '-c', report], check=True)\n"
        "gpu.launch(); gpu.synchronize()\n"
        "print(state()['process_class'], state()['best_effort_launches'])"
    )
    said(misbehaving(code), "latency 2 True\nbest_effort 4\n")


@pytest.mark.parametrize("client_class", ["latency", "best-effort", "normal"])
@pytest.mark.parametrize("end", ["sys.exit(5)", "os._exit(5)"])
def test_exit_with_work_in_flight(misbehaving: Run, cudasched: Run, client_class: str, end: str) -> None:
    done = misbehaving(f"Gpu().launch(50, us=FOREVER_US)\n{end}", client_class)
    assert (done.returncode, done.stdout, but_for_long_kernels(done.stderr)) == (5, "", "")
    assert shown(cudasched) == set()


def test_exit_while_a_thread_wait_at_the_gate(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.call("feeder = Feeder(gpu)")
    eventually(lambda: clients()[train.pid].waiting, "its thread waits at the gate")
    assert (train.end(), train.stderr) == (0, "")
    assert set(clients()) == {serve.pid}


def test_exit_inside_a_region_and_in_a_thread(stage: Stage) -> None:
    train = trainer(stage)
    serve = server(stage)
    serve.call("Worker(gpu, lambda: (cudasched.region('latency').__enter__(), gpu.launch(), sys.exit(3)))")
    train.call("gpu.launch(20); gpu.synchronize()")
    serve.call(ENTER)
    assert (serve.end(), serve.stderr) == (0, "")
    train.call("gpu.launch(20); gpu.synchronize()")
    assert set(clients()) == {train.pid}


# ---- descriptors, directories --------------------------------------------------------------------------------------


def test_a_program_closes_all_descriptors_before_cuda(misbehaving: Run) -> None:
    code = "os.closerange(3, 4096); gpu = Gpu(); gpu.launch(5); gpu.synchronize(); print(state()['scheduling'])"
    said(misbehaving(code), "True\n")


def loses_its_table(program: Program) -> None:
    """Closes all descriptors of a client: scheduling goes off for it, which it says once."""
    program.call("close_descriptors()")
    eventually(lambda: not program.call("state()['scheduling']"), "it notices")
    assert "closed the descriptor" in str(program.call("state()['off_reason']"))


def said_that_it_lost_its_table(program: Program) -> None:
    (line,) = program.stderr.splitlines()
    assert line.startswith("cudasched: error: scheduling is off for this process: the program closed the descriptor")


@pytest.mark.parametrize("client_class", ["latency", "best-effort"])
def test_a_program_closes_all_descriptors_after_cuda(stage: Stage, client_class: str) -> None:
    """Its lock goes with them: it loses its place, but it runs to its end and stops nobody."""
    careless = started(stage.run(client_class, **PATIENT))
    loses_its_table(careless)
    serve, train = server(stage), trainer(stage)
    for program in (careless, serve, train):
        program.call("feeder = Feeder(gpu, requests=True)")
    for program in (careless, serve, train):
        goes_on(program)
        program.call("feeder.stop()")
    assert set(clients()) == {serve.pid, train.pid}
    for program in (careless, serve, train):
        assert program.end() == 0
    said_that_it_lost_its_table(careless)
    assert (serve.stderr, train.stderr) == ("", "")
    assert clients() == {}


def test_a_program_closes_all_descriptors_and_locks_files_of_its_own(stage: Stage, cudasched: Run) -> None:
    """Its files may get the numbers: their locks stay, and no other client is taken for dead because of them."""
    serve, train, careless = server(stage), trainer(stage), trainer(stage)
    careless.call(
        "import fcntl, tempfile\n"
        "file = tempfile.NamedTemporaryFile()\n"
        "numbers = [int(name) for name in os.listdir('/proc/self/fd')"
        " if os.path.realpath(f'/proc/self/fd/{name}').endswith('.arbiter')]\n"
        "for number in numbers: os.dup2(file.fileno(), number)\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)"
    )
    assert careless.call("len(numbers)") == 1
    serve.call(ENTER)
    eventually(lambda: not careless.call("state()['scheduling']"), "it notices")
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    assert shown(cudasched) == {serve.pid, train.pid}
    careless.call("gpu.launch()")
    name = str(careless.call("file.name"))
    with open(name, "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    serve.call(LEAVE)
    train.answer()
    assert careless.end() == 0
    said_that_it_lost_its_table(careless)


def test_the_end_of_a_program_that_lost_its_place_leaves_its_successor_alone(stage: Stage, cudasched: Run) -> None:
    first = started(stage.run("latency", **PATIENT))
    loses_its_table(first)
    train, serve = trainer(stage), server(stage)
    assert {client.slot for client in clients().values()} == {0, 1}
    first.call("gpu.launch(us=FOREVER_US)")
    train.call("gpu.launch(20)")
    serve.call(ENTER)
    assert first.end() == 0
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    assert shown(cudasched) == {serve.pid, train.pid}
    serve.call(LEAVE)
    train.answer()


def test_the_working_directory_is_gone(misbehaving: Run) -> None:
    code = (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "gpu = Gpu(); gpu.launch(5); gpu.synchronize(); print(state()['best_effort_launches'])"
    )
    said(misbehaving(code), "5\n")


def test_no_home(misbehaving: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    said(misbehaving("gpu = Gpu(); gpu.launch(5); gpu.synchronize(); print(state()['scheduling'])"), "True\n")


LAUNCH_AND_SAY = (
    "gpu = Gpu(); gpu.launch(3); gpu.synchronize()\n"
    "s = state(); print(s['scheduling'], bool(s['off_reason'])); sys.exit(7)"
)


def runs_unscheduled(done: subprocess.CompletedProcess[str], *why: str) -> None:
    assert (done.returncode, done.stdout) == (7, "False True\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("cudasched: error: scheduling is off for this process: ")
    for word in why:
        assert word in line


@pytest.fixture
def mounted(command: str, simulated: Path, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs LAUNCH_AND_SAY after shell commands in a mount namespace of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=PATIENCE_S).returncode != 0:
        pytest.skip("needs the right to mount filesystems")

    def run(mount: str) -> subprocess.CompletedProcess[str]:
        code = "import sys\nfrom program import *\n" + LAUNCH_AND_SAY
        script = f'set -e; {mount}; exec "$@"'
        program = [command, "run", "--class", "best-effort", "--", sys.executable, "-c", code]
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", *program], capture_output=True, text=True, timeout=PATIENCE_S
        )

    return run


Mounted = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("own", [True, False], ids=["its-own-directory", "a-directory-in-it"])
def test_the_run_directory_is_on_a_full_filesystem(
    mounted: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    directory = tmp_path / "full"
    directory.mkdir()
    run = directory if own else directory / "run"
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(run))
    fill = f"mount -t tmpfs -o size=64k,mode=700 none {directory}; cat /dev/zero > {directory}/filler 2>/dev/null || :"
    runs_unscheduled(mounted(fill), str(run), "No space left on device", "CUDASCHED_RUN_DIR")


@pytest.mark.parametrize("exists", [True, False])
def test_the_run_directory_is_on_a_read_only_filesystem(
    mounted: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    directory = tmp_path / "fixed"
    directory.mkdir(mode=0o700)
    run = directory if exists else directory / "run"
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(run))
    done = mounted(f"mount -t tmpfs -o ro,mode=700 none {directory}")
    runs_unscheduled(done, str(run), "Read-only file system", "CUDASCHED_RUN_DIR")


def test_the_home_is_read_only(mounted: Mounted, private_home: Path) -> None:
    done = mounted(f"mount -t tmpfs -o ro none {private_home}")
    assert (done.returncode, done.stdout, done.stderr) == (7, "True False\n", "")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_the_run_directory_may_be_written_by_others(misbehaving: Run, tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    runs_unscheduled(misbehaving(LAUNCH_AND_SAY), str(tmp_path / "run"), "chmod go-w")


def test_the_run_directory_is_someone_elses(misbehaving: Run, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs the right to give a directory away")
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, 12345)
    runs_unscheduled(misbehaving(LAUNCH_AND_SAY), str(tmp_path / "run"), "belongs to user 12345")


@pytest.mark.parametrize("what", ["file", "link"])
def test_the_run_directory_is_none(misbehaving: Run, tmp_path: Path, what: str) -> None:
    if what == "file":
        (tmp_path / "run").touch()
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    runs_unscheduled(misbehaving(LAUNCH_AND_SAY), str(tmp_path / "run"))


# ---- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["noise", "empty", "short", "of another version"])
def test_a_table_that_is_none_is_replaced(misbehaving: Run, cudasched: Run, content: str) -> None:
    said(misbehaving(LAUNCH_AND_SAY), "True False\n", 7)
    (device,) = package.status()
    whole = device.path.read_bytes()
    garbage = {
        "noise": random.Random(1).randbytes(len(whole)),
        "empty": b"",
        "short": whole[:100],
        "of another version": whole[:8] + b"\xff\0\0\0" + whole[12:],
    }
    device.path.write_bytes(garbage[content])
    said(misbehaving(LAUNCH_AND_SAY), "True False\n", 7)
    assert shown(cudasched) == set()


def test_a_table_whose_clients_are_noise(stage: Stage, cudasched: Run) -> None:
    """Only the head is right: all slots seem taken and active, the turn may be taken by any client."""
    assert started(stage.run("normal")).end() == 0
    (device,) = package.status()
    whole = device.path.read_bytes()
    device.path.write_bytes(whole[:128] + b"\xff" * (len(whole) - 128))
    trainers = [trainer(stage) for _ in range(2)]
    for train in trainers:
        train.call("gpu.launch(20); gpu.synchronize()")
    assert shown(cudasched) == {train.pid for train in trainers}


@pytest.mark.parametrize("what", ["the table", "the run directory"])
def test_the_table_is_removed_under_its_clients(stage: Stage, what: str) -> None:
    """They meet in a new one, with those that come later."""
    serve, train = server(stage), trainer(stage)
    (device,) = package.status()
    if what == "the table":
        device.path.unlink()
    else:
        shutil.rmtree(device.path.parent)
    late = trainer(stage)
    eventually(lambda: set(clients()) == {serve.pid, train.pid, late.pid}, "they meet in the new table")
    for _ in range(2):
        serve.call(ENTER)
        for program in (train, late):
            program.send("gpu.launch()")
        wait_at_the_gate(train, late)
        serve.call(LEAVE)
        for program in (train, late):
            program.answer()
    assert [program.end() for program in (serve, train, late)] == [0, 0, 0]
    for program in (serve, train):
        (line,) = program.stderr.splitlines()
        assert line.startswith("cudasched: warning: the client table ") and "was deleted or replaced" in line
    assert late.stderr == ""
    assert clients() == {}


def test_an_active_latency_client_moves_with_its_table(stage: Stage) -> None:
    serve, train = server(stage), trainer(stage)
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    (device,) = package.status()
    device.path.unlink()
    eventually(lambda: set(clients()) == {serve.pid, train.pid}, "they meet in the new table")
    wait_at_the_gate(train)
    serve.kill()
    train.answer()


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_the_table_is_cut_short_under_its_clients(stage: Stage, size: int) -> None:
    """Idle clients extend it before they look at it; docs/faults.md says what is not protected."""
    serve, train = server(stage), trainer(stage)
    (device,) = package.status()
    whole = device.path.stat().st_size
    time.sleep(0.5)  # both idle: none looks at the table in the moment in which it is short
    os.truncate(device.path, size)
    eventually(lambda: device.path.stat().st_size == whole, "it has its size again")
    eventually(lambda: set(clients()) == {serve.pid, train.pid}, "its clients are in it again")
    serve.call(ENTER)
    train.send("gpu.launch()")
    wait_at_the_gate(train)
    serve.call(LEAVE)
    train.answer()
    assert [program.end() for program in (serve, train)] == [0, 0]
    lines = (serve.stderr + train.stderr).splitlines()
    assert 1 <= len(lines) <= 2
    assert all("did not have its size any more; cudasched has repaired the table" in line for line in lines)


@pytest.mark.parametrize("fill", [b"\xff", b"\0"])
def test_the_table_is_overwritten_under_its_clients(stage: Stage, fill: bytes) -> None:
    """A client's own bit among the active ones, for one, held it for good."""
    serve, *trainers = server(stage), trainer(stage), trainer(stage)
    for train in trainers:
        train.call("feeder = Feeder(gpu)")
        goes_on(train)
    (device,) = package.status()
    with device.path.open("r+b") as table:
        table.write(fill * device.path.stat().st_size)
    eventually(lambda: set(clients()) == {serve.pid, *(train.pid for train in trainers)}, "they are in it again")
    for train in trainers:
        goes_on(train)
    assert not any(client.active for client in clients().values())
    serve.call(ENTER)
    wait_at_the_gate(*trainers)
    serve.call(LEAVE)
    for train in trainers:
        goes_on(train)
        train.call("feeder.stop()")


CROWD = """
import sys, os
import cudasched
from program import *
for _ in range(21):
    reader, writer = os.pipe()
    if os.fork() == 0:
        gpu = Gpu()
        for name in ("latency", "normal", "best_effort"):
            with cudasched.region(name):
                gpu.launch(); gpu.synchronize()
        os.write(writer, b"x")
        sys.stdin.read()
        os._exit(0)
    assert os.read(reader, 1) == b"x"
gpu = Gpu(); gpu.launch(); gpu.synchronize()
print(state()["scheduling"], flush=True)
sys.stdin.read()
"""


def test_the_sixty_fifth_client_runs_unscheduled(stage: Stage, misbehaving: Run, cudasched: Run) -> None:
    crowd = subprocess.Popen([sys.executable, "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert crowd.stdin is not None and crowd.stdout is not None
    try:
        assert crowd.stdout.readline() == "True\n"
        (device,) = package.status()
        assert len(device.clients) == 64
        runs_unscheduled(misbehaving(LAUNCH_AND_SAY), "all 64 slots", "cudasched status")
    finally:
        crowd.stdin.close()
        crowd.wait(PATIENCE_S)
    eventually(lambda: shown(cudasched) == set(), "the crowd has gone")
    said(misbehaving(LAUNCH_AND_SAY), "True False\n", 7)


# ---- the driver ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_class", ["latency", "best-effort"])
def test_a_driver_that_is_too_old(
    misbehaving: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch, client_class: str
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DRIVER_VERSION", "12020")
    code = (
        "gpu = Gpu(); gpu.launch(3); gpu.synchronize(); gpu.call('cuInit', 0); s = state()\n"
        "print(s['scheduling'], s['launches'], s['gated_launches'], s['driver_version'], s['off_reason'][-11:])\n"
        "sys.exit(7)"
    )
    done = misbehaving(code, client_class)
    assert (done.returncode, done.stdout) == (7, "False 3 0 12020 unscheduled\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("cudasched: warning: ")
    for word in (str(simulated), "12.2", "12.4", "550", "unscheduled"):
        assert word in line
    assert package.status() == []


def test_a_driver_without_a_function_that_scheduling_needs(
    misbehaving: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = tmp_path / "libcuda.so.1"
    lacking.write_bytes(simulated.read_bytes().replace(b"\0cuGraphClone\0", b"\0cuGraphCl0ne\0"))
    monkeypatch.setenv("CUDASCHED_DRIVER", str(lacking))
    code = "gpu = Gpu(); gpu.launch(3); gpu.synchronize(); print(state()['scheduling'], state()['launches'])"
    done = misbehaving(code, "best-effort")
    assert (done.returncode, done.stdout) == (0, "False 3\n")
    (line,) = done.stderr.splitlines()
    for word in ("cudasched: warning: ", str(lacking), "has no cuGraphClone", "12.4", "unscheduled"):
        assert word in line


def test_a_region_under_a_driver_that_is_too_old(stage: Stage) -> None:
    program = stage.importing(CUDASCHED_SIM_DRIVER_VERSION="12020")
    program.call("gpu = Gpu()")
    program.call("with cudasched.region('latency'): gpu.launch(3); gpu.synchronize()")
    assert "12.2" in str(program.call("state()['off_reason']"))
    assert program.end() == 0
    assert len(program.stderr.splitlines()) == 1


@pytest.mark.parametrize("devices", ["0", "nonsense"])
def test_the_drivers_own_answer_where_it_has_no_device(
    misbehaving: Run, simulated: Path, python: Run, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", devices)
    code = (
        "import ctypes\n"
        "{library} = ctypes.CDLL({path!r}); count = ctypes.c_int(-1)\n"
        "print(driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value,"
        " driver.cuDeviceGet(ctypes.byref(count), 0))"
    )
    bare = python(code.format(library="driver", path=str(simulated)))
    assert bare.returncode == 0
    assert "-1 " in bare.stdout or " 0 0 " in bare.stdout
    said(misbehaving(code.format(library="driver", path="libcuda.so.1")), bare.stdout)
