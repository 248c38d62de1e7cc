"""Servers of models in several processes: each is replaced where it ends by itself, and all end with the first."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, Run, eventually, stop

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
rpc = pytest.importorskip("grpc")

from cudasched.inference._kserve_grpc import RPC  # noqa: E402

MODELS = """
import numpy
from cudasched.inference import Batcher

models = {"double": Batcher(lambda inputs: [2 * x for x in inputs], slo_ms=None, example=numpy.zeros(2))}
"""
#: Each says its process, and waits for a file to go on. A part of a file is run again in each process.
APART = """
import os, time
from pathlib import Path
import numpy
from cudasched.inference import Batcher

def run(inputs):
    while Path("hold").exists() and inputs[0][0] == 9:
        if not Path("held").exists():
            Path("forked").write_text(str(os.getpid()))
            if not os.fork():
                time.sleep(60)
                os._exit(0)
        Path("held").touch()
        time.sleep(0.01)
    return [x + os.getpid() for x in inputs]

def make(name):
    if Path("none").exists():
        raise MemoryError("none is left, said at length: " + 100_000 * "x")
    return Batcher(run, slo_ms=None, example=numpy.zeros(2))

models = {name: lambda name=name: make(name) for name in ("double", "other")}
"""


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    return [int(child) for child in " ".join(found).split()]


class Command:
    """`cudasched models serve` with fronts, and clients of it."""

    def __init__(self, command: str, models: str, *options: str) -> None:
        Path("models.py").write_text(models)
        served = ["models.py", "--port", "0", "--grpc-port", "0", "--token-file", "token", *options]
        self.process = subprocess.Popen([command, "models", "serve", *served], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        self.stderr = self.process.stderr
        lines = [self.stderr.readline() for _ in range(3)]
        url = re.fullmatch(r"cudasched: (http://127\.0\.0\.1:(\d+)/v2/models/)\{double(,other)?\}\n", lines[0])
        grpc = re.fullmatch(r"cudasched: gRPC at (127\.0\.0\.1:\d+)\n", lines[1])
        assert url and grpc, lines
        self.url, self.port, self.grpc = url[1], url[2], grpc[1]
        self.token = Path("token").read_text().strip()

    def others(self) -> list[int]:
        """The other processes."""
        return children(self.process.pid)

    def ask(self, path: str, data: object = None) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", data and json.dumps(data).encode())
        request.add_header("authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def post(self, *values: float, model: str = "double") -> list[float]:
        tensor = {"name": "input", "shape": [1, 2], "datatype": "FP64", "data": values}
        data: list[float] = self.ask(f"{model}/infer", {"inputs": [tensor]})["outputs"][0]["data"]
        return data

    def place(self, model: str) -> int:
        """The process of a model."""
        return int(self.post(0, 0, model=model)[0])

    def call(self) -> bool:
        with rpc.insecure_channel(self.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ready = RPC.messages["ModelReadyRequest"](name="double")
            given = [("authorization", f"Bearer {self.token}")]
            answer = RPC.stub(channel).ModelReady(ready, metadata=given, timeout=PATIENCE_S, wait_for_ready=True)
        return bool(answer.ready)


@pytest.fixture
def start(
    command: str, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Command]]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def started(*options: str, models: str = APART) -> Command:
            running = Command(command, models, *options)
            for end in (running.stderr.close, running.process.wait, running.process.kill):
                stack.callback(end)
            return running

        yield started


@pytest.fixture
def serving(start: Callable[..., Command]) -> Command:
    return start("--fronts", "2", models=MODELS)


def test_a_signal_that_another_thread_gets_ends_it_too(serving: Command) -> None:
    """Guards against a main thread that waits for ever: Python runs handlers there alone, and only once it wakes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):
        pytest.skip("needs glibc 2.30")
    process = serving.process.pid
    other = max(int(path.name) for path in Path(f"/proc/{process}/task").iterdir())
    assert other != process and libc.tgkill(process, other, signal.SIGTERM) == 0
    assert serving.process.wait(PATIENCE_S) == 0


def test_fronts_share_the_ports_and_one_that_is_killed_is_replaced(serving: Command, cudasched: Run) -> None:
    first = serving.others()
    assert len(first) == 2
    assert all(serving.post(number, 1) == [2 * number, 2] and serving.call() for number in range(8))
    again = ["models.py", "--port", serving.port, "--token-file", "token", "--fronts", "1"]
    taken = cudasched("models", "serve", *again)
    assert taken.returncode != 0 and f"port {serving.port} is in use by another program" in taken.stderr
    os.kill(first[0], signal.SIGKILL)
    assert "a front of the models ended by itself; another takes its place" in serving.stderr.readline()

    def answers() -> bool:
        try:
            return serving.post(3, 4) == [6, 8] and len({*serving.others()} - {*first}) == 1
        except (urllib.error.URLError, ConnectionError):  # its connections, until the port is the other's alone
            return False

    eventually(answers)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE_S) == 0
    assert serving.stderr.read() == ""


#: Drops the connections of its process, as of fronts that do not read, once.
DROPS = """
import gc
import numpy
from cudasched.inference import Batcher

def run(inputs):
    if inputs[0][0] == 9:
        for each in gc.get_objects():
            if type(each).__name__ == "_Front":
                each.drop()
    return [2 * x for x in inputs]

models = {"double": lambda: Batcher(run, slo_ms=None, example=numpy.zeros(2))}
"""


def test_a_front_whose_connection_is_lost_is_replaced(start: Callable[..., Command]) -> None:
    serving = start("--fronts", "1", models=DROPS)
    before = serving.others()
    with pytest.raises(urllib.error.HTTPError) as refused:
        serving.post(9, 9)
    assert refused.value.code == 503

    def answered() -> bool:
        try:
            return serving.post(1, 2) == [2, 4]
        except (urllib.error.URLError, ConnectionError):  # it is lost, or no front listens
            return False

    eventually(answered)
    assert len(set(serving.others()) & set(before)) == 1, "the front alone is another"


def test_fronts_end_with_the_process_of_the_models(serving: Command) -> None:
    fronts = serving.others()
    serving.process.kill()
    eventually(lambda: not any(Path(f"/proc/{front}/cmdline").exists() for front in fronts))


def test_a_front_that_cannot_listen_says_why(
    cudasched: Run, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    Path("none.pem").write_text("none")
    options = ["--port", "0", "--token-file", "token", "--tls-cert", "none.pem", "--tls-key", "none.pem"]
    done = cudasched("models", "serve", "models.py", "--fronts", "3", *options)
    assert done.returncode != 0 and done.stderr.count("are no certificate and key") == 1, done.stderr


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_port_that_is_taken_is_named_by_its_option(
    option: str, cudasched: Run, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "0", "--grpc-port": "0", option: str(taken.getsockname()[1])}
        options = [text for pair in ports.items() for text in pair]
        done = cudasched("models", "serve", "models.py", "--fronts", "1", "--token-file", "token", *options)
    assert done.returncode != 0 and f"another with {option}, or end that program" in done.stderr, done.stderr


def test_each_model_that_a_function_makes_has_a_process(start: Callable[..., Command]) -> None:
    serving = start()  # one front
    places = {model: serving.place(model) for model in ("double", "other")}
    assert len({*places.values(), serving.process.pid}) == 3 and len(serving.others()) == 3
    assert {*places.values()} < {*serving.others()}
    assert serving.ask("other/stats")["model_stats"][0]["inference_count"] == 1
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE_S) == 0
    assert serving.stderr.read() == ""


def test_a_model_whose_process_is_killed_comes_again_and_others_are_served(start: Callable[..., Command]) -> None:
    serving = start("--fronts", "2")
    first, other = serving.place("double"), serving.place("other")
    Path("hold").touch()
    with ThreadPoolExecutor() as threads:
        held = threads.submit(serving.post, 9, 9)
        eventually(Path("held").exists)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            held.result(PATIENCE_S)
    assert "the process of the model is gone" in raised.value.read().decode()
    assert "the process of the model double ended by itself; another takes its place" in serving.stderr.readline()
    health = serving.url.replace("models/", "health/ready")

    def again() -> bool:
        assert serving.place("other") == other
        try:
            urllib.request.urlopen(health, timeout=PATIENCE_S).close()
            return serving.place("double") not in (first, other)
        except urllib.error.HTTPError as error:
            assert error.code == 503 and "starts again" in error.read().decode()
            return False

    eventually(lambda: all(again() for _ in range(8)))  # by each front


def test_requests_that_run_are_answered_before_the_processes_end(start: Callable[..., Command]) -> None:
    serving = start()
    Path("hold").touch()
    with ThreadPoolExecutor() as threads:
        held = threads.submit(serving.post, 9, 9)
        eventually(Path("held").exists)
        serving.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        Path("hold").unlink()
        assert held.result(PATIENCE_S)[0] > 9
    assert serving.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_of_models_end_with_the_first(start: Callable[..., Command], killed: signal.Signals) -> None:
    """A terminal sends SIGINT to all, and systemd SIGTERM, of which only the first is to end the others."""
    serving = start()
    others = serving.others()
    if killed != signal.SIGKILL:
        os.kill(serving.place("other"), killed)
        assert serving.place("other") in others
    serving.process.send_signal(killed)
    eventually(lambda: not any(Path(f"/proc/{other}/cmdline").exists() for other in others))


def test_ctrl_c_ends_processes_that_start_without_a_word(
    command: str, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    served = [command, "models", "serve", "models.py", "--port", "0", "--token-file", "token", "--fronts", "3"]
    with subprocess.Popen(served, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stderr
        eventually(lambda: children(running.pid) or running.poll() is not None)
        os.killpg(running.pid, signal.SIGINT)
        assert running.stderr.read() == "" and running.wait(PATIENCE_S) == 0


def test_a_server_whose_words_nobody_reads_ends(
    command: str, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(APART)
    served = [command, "models", "serve", "models.py", "--port", "0", "--token-file", "token"]
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(served, stderr=writer) as running:
        os.close(writer)
        try:
            assert running.wait(PATIENCE_S) != 0
        finally:
            running.kill()


def test_a_model_that_hangs_ends_with_the_first(start: Callable[..., Command]) -> None:
    serving = start(models=APART.replace("slo_ms=None", "slo_ms=None, hang_ms=3_600_000"))
    others = serving.others()
    Path("hold").touch()
    with ThreadPoolExecutor() as threads:
        held = threads.submit(serving.post, 9, 9)
        eventually(Path("held").exists)
        serving.process.kill()
        eventually(lambda: not any(Path(f"/proc/{other}/cmdline").exists() for other in others))
        assert held.exception(PATIENCE_S)


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_ctrl_c_waits_for_no_model_that_hangs(start: Callable[..., Command], apart: bool) -> None:
    models = APART.replace("slo_ms=None", "slo_ms=None, hang_ms=3_600_000").replace("os.fork()", "True")
    serving = start(models=models if apart else models.replace("lambda name=name: make(name)", "make(name)"))
    others = serving.others()
    assert len(others) == (3 if apart else 0)
    Path("hold").touch()
    with ThreadPoolExecutor() as threads:
        held = threads.submit(serving.post, 9, 9)
        eventually(Path("held").exists)
        eventually(lambda: serving.process.poll() is not None or serving.process.send_signal(signal.SIGINT))
        assert serving.process.returncode == -signal.SIGINT and held.exception(PATIENCE_S)
        eventually(lambda: not any(Path(f"/proc/{other}/cmdline").exists() for other in others))


def test_a_model_that_cannot_be_made_ends_a_server_that_starts(start: Callable[..., Command], cudasched: Run) -> None:
    serving = start()
    Path("none").touch()
    done = cudasched("models", "serve", "models.py", "--port", "0", "--token-file", "token")
    assert done.returncode != 0
    said = r"the model \w+: \S+models.py raised MemoryError at line \d+: none is left, said at length: "
    found = re.search(said + "x+", done.stderr)
    assert found and len(found[0]) == 4000, done.stderr[:500]
    other = serving.place("other")
    os.kill(serving.place("double"), signal.SIGKILL)  # one that cannot be made again is tried again
    assert "the process of the model double ended by itself" in serving.stderr.readline()
    assert re.search(said, serving.stderr.readline())
    assert serving.place("other") == other
    Path("none").unlink()
    eventually(lambda: serves(serving, "double"))
    assert serving.place("other") == other


def serves(serving: Command, model: str) -> bool:
    try:
        return serving.place(model) > 0
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


def test_a_model_that_crashes_again_and_again_takes_no_other_with_it(start: Callable[..., Command]) -> None:
    serving = start("--fronts", "2")
    other = serving.place("other")
    for _ in range(4):
        eventually(lambda: serves(serving, "double"))
        os.kill(serving.place("double"), signal.SIGKILL)
    assert serving.place("other") == other and serving.process.poll() is None


def test_a_model_that_does_not_answer_holds_up_no_other(start: Callable[..., Command]) -> None:
    serving = start()
    stopped = serving.place("double")
    stop(stopped)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(serving.ask, "double/stats")
        assert serving.place("other") != stopped and serving.ask("double/ready")["ready"]
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            asked.result(PATIENCE_S)
    assert "the process of the model double does not answer" in raised.value.read().decode()
    os.kill(stopped, signal.SIGKILL)


def test_a_process_is_replaced_though_one_that_it_forked_lives_on(start: Callable[..., Command]) -> None:
    serving = start()
    first = serving.place("double")
    Path("hold").touch()
    with ThreadPoolExecutor() as threads:
        held = threads.submit(serving.post, 9, 9)
        eventually(Path("held").exists)
        assert serving.place("other")
        assert json.loads(Path("forked").read_text()) == first
        os.kill(first, signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            held.result(PATIENCE_S)
    eventually(lambda: serves(serving, "double"))
    assert serving.place("double") != first
