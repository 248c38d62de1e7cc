"""Fronts: requests of other processes reach the batchers, and each end outlives the other as it should."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cudasched.inference import Batcher, DeadlineError, InputError, QueueFullError, RunError, UseError
from support import PATIENCE_S, Run, eventually

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
rpc = pytest.importorskip("grpc")

from cudasched.inference import _link  # noqa: E402
from cudasched.inference._fronts import RemoteModels, Requests, _Call  # noqa: E402
from cudasched.inference._kserve import Asked, Models  # noqa: E402
from cudasched.inference._kserve_grpc import RPC  # noqa: E402

# ---- both ends in one process


class Model:
    """Doubles, fails for -1, gives no array for -2, and runs only while it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()
        self.seen: list[float] = []

    def __call__(self, inputs: list[Any]) -> list[Any]:
        assert self.may.wait(PATIENCE_S)
        self.seen += [float(x) for x in inputs]
        if any(x == -1 for x in inputs):
            raise ValueError("no")
        return [threading if x == -2 else 2 * x for x in inputs]


@dataclass
class Both:
    model: Model
    batcher: Batcher
    requests: Requests
    remote: RemoteModels
    front: socket.socket

    def further(self) -> socket.socket:
        """The end of another front."""
        own, other = socket.socketpair()
        threading.Thread(target=self.requests.serve, args=(own, lambda problem: None), daemon=True).start()
        other.settimeout(PATIENCE_S)
        return other


@contextmanager
def connected(batcher: Batcher) -> Iterator[tuple[Requests, RemoteModels, socket.socket]]:
    """Both ends of a front, and the front's socket."""
    one, other = socket.socketpair()
    kept = socket.fromfd(one.fileno(), one.family, one.type)
    requests, remote = Requests(Models({"m": batcher})), RemoteModels(one)
    reading = [
        threading.Thread(target=requests.serve, args=(other, lambda problem: None), daemon=True),
        threading.Thread(target=remote.read, daemon=True),
    ]
    for thread in reading:
        thread.start()
    try:
        yield requests, remote, kept
    finally:
        kept.shutdown(socket.SHUT_RDWR)
        for thread in reading:
            thread.join(PATIENCE_S)
        kept.close()
    assert not any(thread.is_alive() for thread in reading)
    requests.close()


@pytest.fixture
def both() -> Iterator[Both]:
    model = Model()
    with (
        Batcher(model, (1, 2, 4), slo_ms=None, example=np.float64(0), max_queue=1000) as batcher,
        connected(batcher) as ends,
    ):
        yield Both(model, batcher, *ends)
        model.may.set()


def asked(*values: float, **parameters: float) -> Asked:
    return Asked("m", "", [("input", np.array(values, float))], (), parameters)


def answer(both: Both, request: Asked) -> Any:
    (answer,) = both.remote.submit(request)
    return both.remote.outputs(request, [answer.result(PATIENCE_S)])["output_0"].tolist()


def test_answered_requests_keep_no_memory(both: Both) -> None:
    """Without Python's collector, which a server of models has little use for. The last batch stays until the next."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert answer(both, asked(1, 2)) == [2, 4]
        eventually(lambda: sum(type(each) is _Call for each in gc.get_objects()) <= 1)
        (last,) = [each for each in gc.get_objects() if type(each) is _Call]
        assert last.inputs == () and last.requests == []
    finally:
        gc.enable()


def test_each_of_many_requests_gets_its_own_answer(both: Both) -> None:
    requests = [asked(*range(first, first + 1 + first % 3)) for first in range(1, 300)]
    answers = [both.remote.submit(request)[0] for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        ((_, inputs),) = request.inputs
        assert (answer.result(PATIENCE_S)["output_0"] == 2 * inputs).all()


def test_strings_cross() -> None:
    strings = Asked("m", "1", [("input", np.array([[b"one", b""], [b"", b"two"]], object))], ["output_0"])
    with Batcher(list, slo_ms=None, example=np.array([b"", b""], object)) as batcher, connected(batcher) as ends:
        (answer,) = ends[1].submit(strings)
        assert answer.result(PATIENCE_S)["output_0"].tolist() == [[b"one", b""], [b"", b"two"]]


def test_questions_are_answered_by_the_other_process(both: Both) -> None:
    both.remote.known("m", "1")
    assert both.remote.server()["name"] == "cudasched" and both.remote.index()[0]["name"] == "m"
    assert both.remote.metadata("m", "")["inputs"][0]["shape"] == [-1]
    assert answer(both, asked(3)) == [6]
    assert both.remote.statistics("", "")[0]["inference_stats"]["success"]["count"] == 1


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (Asked("m", "", [("other", np.zeros(1))]), InputError, "the inputs are input"),
        (asked(1, 2, -1), RunError, "ValueError"),
        (asked(-2), RunError, "numbers or strings of one shape are needed"),
        (asked(1, timeout=float("nan")), InputError, "a number is needed"),
        (Asked("none", "", []), Exception, "no model is named 'none'; there are m"),
        (Asked("m", "", None), RunError, "the server failed"),  # type: ignore[arg-type]
    ],
)
def test_errors_are_of_the_same_class_on_both_sides(
    both: Both, request_: Asked, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        answer(both, request_)
    if request_.model == "none":
        with pytest.raises(error, match=said):
            both.remote.known("none")
    assert answer(both, asked(1)) == [2]


def message(number: int, *values: float) -> bytes:
    parts = _link.packed(number, ("m", "", (), ()), asked(*values).inputs)
    assert parts
    return b"".join(parts)


def received(front: socket.socket) -> tuple[int, Any]:
    """A message's number, and all after its header."""
    length, number, *_ = _link._HEAD.unpack(front.recv(_link._HEAD.size, socket.MSG_WAITALL))
    return number, front.recv(length - _link._HEAD.size, socket.MSG_WAITALL)


def test_requests_that_come_together_are_one_batch_and_are_answered_together(both: Both) -> None:
    both.model.may.clear()
    first = both.remote.submit(asked(9))[0]
    eventually(lambda: both.batcher.statistics().running == 1)
    with both.further() as front:
        front.sendall(b"".join(message(number, number) for number in range(4)))
        eventually(lambda: both.batcher.statistics().waiting == 4)
        both.model.may.set()
        assert first.result(PATIENCE_S)["output_0"] == [18]
        assert [received(front)[0] for _ in range(4)] == [0, 1, 2, 3]
    assert both.batcher.statistics().batches == {1: 1, 4: 1}


def test_messages_may_come_in_any_pieces(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_CHUNK_BYTES", 0)  # memory for little more than a message
    sent = b"".join(message(number, *range(number, number + 3)) for number in range(200))
    with both.further() as front:
        for size in (1, 7, 100, 4096):
            for place in range(0, len(sent), size):
                front.sendall(sent[place : place + size])
            answers = dict(received(front) for _ in range(200))
            for number, data in answers.items():
                assert data[-24:] == np.arange(2.0 * number, 2 * number + 6, 2).tobytes()
            assert len(answers) == 200


def test_arrays_of_all_kinds_cross(both: Both) -> None:
    one, other = socket.socketpair()
    links = _link.Links()
    sender, reader = _link.Link(_link.Links(), one), _link.Link(links, other)
    arrays = [
        ("columns", np.arange(6.0).reshape(2, 3).T),
        ("none", np.zeros((0, 3), np.float16)),
        ("odd", np.array([True, False, True])),
        ("large", np.arange(100_000, dtype=np.uint8)),
    ]
    parts = _link.packed(5, ("about",), arrays)
    assert parts
    messages: list[_link.Message] = []
    sending = threading.Thread(target=sender.send, args=(parts,))
    sending.start()
    while not messages:
        messages, gone, goes_on = links.read()
        assert goes_on and not gone
    sending.join()
    ((link, number, about, found),) = messages
    assert link is reader and number == 5 and about == ("about",) and found is not None
    for (name, array), (other_name, other_array) in zip(arrays, found, strict=True):
        assert name == other_name and array.dtype == other_array.dtype and (array == other_array).all()
        assert other_array.flags.writeable and other_array.flags.aligned
    one.close()
    other.close()
    assert _link.packed(0, None, [("strings", np.array([b"s"], object))]) is None


def test_a_request_that_is_cancelled_does_not_run(both: Both) -> None:
    both.model.may.clear()
    (first,) = both.remote.submit(asked(1))
    eventually(lambda: both.batcher.statistics().running == 1)
    (second,) = both.remote.submit(asked(5, 6))
    (late,) = both.remote.submit(asked(7, timeout=1))
    eventually(lambda: both.batcher.statistics().submitted == 4)
    assert second.cancel()
    eventually(lambda: both.batcher.statistics().cancelled == 2)
    time.sleep(0.01)  # the third one's time in the queue
    both.model.may.set()
    assert first.result(PATIENCE_S)["output_0"] == [2]
    with pytest.raises(DeadlineError):
        late.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        second.result()
    assert answer(both, asked(9)) == [18] and not {5.0, 6.0, 7.0} & {*both.model.seen}


def test_a_front_that_is_gone_has_its_requests_cancelled(both: Both) -> None:
    both.model.may.clear()
    (first,) = both.remote.submit(asked(1))
    eventually(lambda: both.batcher.statistics().running == 1)
    (second,) = both.remote.submit(asked(5))
    eventually(lambda: both.batcher.statistics().submitted == 2)
    both.front.shutdown(socket.SHUT_RDWR)
    for each in (first, second):
        with pytest.raises(UseError, match="the process of the models is gone"):
            each.result(PATIENCE_S)
    eventually(lambda: both.batcher.statistics().cancelled == 1)
    with pytest.raises(UseError, match="the process of the models is gone"):
        both.remote.submit(asked(1))


@pytest.mark.parametrize(
    "damaged",
    [
        _link._HEAD.pack(8, 1, 0, 0),
        _link._HEAD.pack(1 << 60, 1, 0, 0),
        _link._HEAD.pack(32, 1, 0, 64),
        _link._HEAD.pack(32, 1, 2, 8),
        _link._HEAD.pack(32, 1, 0, 8) + b"no pickl",
        _link._HEAD.pack(_link._HEAD.size + 8, 1, 1, 0) + bytes(8),
        _link._HEAD.pack(len(message(1, 5)) + 8, *_link._HEAD.unpack_from(message(1, 5))[1:])
        + message(1, 5)[24:]
        + bytes(8),
    ],
)
def test_a_front_whose_message_is_damaged_is_dropped_and_others_are_served(
    both: Both, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with both.further() as front:
        front.sendall(damaged)
        assert front.recv(1) == b""
    assert "a message of another process is damaged" in caplog.text
    assert answer(both, asked(1)) == [2]


def test_a_front_that_ends_in_the_middle_of_a_message_is_gone(both: Both) -> None:
    both.model.may.clear()
    both.remote.submit(asked(1))
    eventually(lambda: both.batcher.statistics().running == 1)
    with both.further() as front:
        front.sendall(message(1, 5) + message(2, 6)[:-3])
        eventually(lambda: both.batcher.statistics().waiting == 1)
    eventually(lambda: both.batcher.statistics().cancelled == 1)
    both.model.may.set()
    assert answer(both, asked(1)) == [2] and not {5.0, 6.0} & {*both.model.seen}


def test_a_front_that_does_not_read_is_dropped_and_others_are_served(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_link, "_UNSENT_BYTES", 1 << 16)
    with both.further() as front, suppress(OSError):  # it is dropped
        for number in range(100_000):
            front.sendall(b"".join(_link.pickled(number, ("index", ()))))
            assert number % 100 or answer(both, asked(1)) == [2]
    assert "a front of the models does not read its answers, and is dropped" in caplog.text
    assert answer(both, asked(1)) == [2]


def test_answers_that_a_socket_has_no_room_for_come_later(both: Both) -> None:
    count = 600
    with both.further() as front:
        for number in range(count):
            front.sendall(message(number, *[1.0] * 100))
            eventually(lambda number=number: both.batcher.statistics().completed >= 100 * (number - 5))  # type: ignore[misc]
        assert [received(front)[0] for _ in range(count)] == [*range(count)]


def test_a_front_refuses_requests_that_the_other_process_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_UNSENT_BYTES", 1 << 16)
    own, other = socket.socketpair()
    remote = RemoteModels(own)
    with own, other, pytest.raises(QueueFullError, match="does not keep up"):
        while True:
            remote.submit(asked(*range(10_000)))


# ---- the command

MODELS = """
import numpy
from cudasched.inference import Batcher

models = {"double": Batcher(lambda inputs: [2 * x for x in inputs], slo_ms=None, example=numpy.zeros(2))}
"""


class Command:
    """`cudasched models serve` with fronts, and clients of it."""

    def __init__(self, command: str, *options: str) -> None:
        Path("models.py").write_text(MODELS)
        served = ["models.py", "--port", "0", "--grpc-port", "0", "--token-file", "token", *options]
        self.process = subprocess.Popen([command, "models", "serve", *served], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        self.stderr = self.process.stderr
        lines = [self.stderr.readline() for _ in range(3)]
        url = re.fullmatch(r"cudasched: (http://127\.0\.0\.1:(\d+)/v2/models/)\{double\}\n", lines[0])
        grpc = re.fullmatch(r"cudasched: gRPC at (127\.0\.0\.1:\d+)\n", lines[1])
        assert url and grpc, lines
        self.url, self.port, self.grpc = url[1], url[2], grpc[1]
        self.token = Path("token").read_text().strip()

    def fronts(self) -> list[int]:
        pid = self.process.pid
        found = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for child in " ".join(found).split()]

    def post(self, *values: float) -> list[float]:
        tensor = {"name": "input", "shape": [1, 2], "datatype": "FP64", "data": values}
        request = urllib.request.Request(f"{self.url}double/infer", json.dumps({"inputs": [tensor]}).encode())
        request.add_header("authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            data: list[float] = json.load(answer)["outputs"][0]["data"]
        return data

    def call(self) -> bool:
        with rpc.insecure_channel(self.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ready = RPC.messages["ModelReadyRequest"](name="double")
            given = [("authorization", f"Bearer {self.token}")]
            answer = RPC.stub(channel).ModelReady(ready, metadata=given, timeout=PATIENCE_S, wait_for_ready=True)
        return bool(answer.ready)


@pytest.fixture
def serving(command: str, no_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        running = Command(command, "--fronts", "2")
        stack.callback(running.process.wait)
        stack.callback(running.process.kill)
        yield running
    running.stderr.close()


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
    first = serving.fronts()
    assert len(first) == 2
    assert all(serving.post(number, 1) == [2 * number, 2] and serving.call() for number in range(8))
    again = ["models.py", "--port", serving.port, "--token-file", "token", "--fronts", "1"]
    taken = cudasched("models", "serve", *again)
    assert taken.returncode != 0 and f"port {serving.port} is in use by another program" in taken.stderr
    os.kill(first[0], signal.SIGKILL)
    assert "a front of the models ended by itself; another takes its place" in serving.stderr.readline()

    def answers() -> bool:
        try:
            return serving.post(3, 4) == [6, 8] and len({*serving.fronts()} - {*first}) == 1
        except (urllib.error.URLError, ConnectionError):  # its connections, until the port is the other's alone
            return False

    eventually(answers)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE_S) == 0
    assert serving.stderr.read() == ""


def test_fronts_end_with_the_process_of_the_models(serving: Command) -> None:
    fronts = serving.fronts()
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
