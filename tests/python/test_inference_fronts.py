"""Fronts: requests of other processes reach the batchers, and each end outlives the other as it should."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from cudasched.inference import Batcher, DeadlineError, InputError, QueueFullError, RunError, UseError
from support import PATIENCE_S, eventually

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
rpc = pytest.importorskip("grpc")

from cudasched.inference import _link  # noqa: E402
from cudasched.inference._fronts import RemoteModels, Requests, _Call  # noqa: E402
from cudasched.inference._kserve import Asked, Models  # noqa: E402

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
        self.requests.connect(own)
        other.settimeout(PATIENCE_S)
        return other


@contextmanager
def connected(batcher: Batcher) -> Iterator[tuple[Requests, RemoteModels, socket.socket]]:
    """Both ends of a front, and the front's socket."""
    one, other = socket.socketpair()
    kept = socket.fromfd(one.fileno(), one.family, one.type)
    requests, remote = Requests(Models({"m": batcher})), RemoteModels(["m"])
    requests.connect(other)
    remote.connect(["m"], one)
    reading = threading.Thread(target=remote.read, daemon=True)
    reading.start()
    try:
        yield requests, remote, kept
    finally:
        remote.close()
        reading.join(PATIENCE_S)
        kept.close()
    assert not reading.is_alive()
    requests.close()


@pytest.fixture
def both() -> Iterator[Both]:
    model = Model()
    with (
        Batcher(model, (1, 2, 4), slo_ms=None, example=np.float64(0), policy="eager", max_queue=1000) as batcher,
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
    """Without Python's collector, which a server of models has little use for."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert answer(both, asked(1, 2)) == [2, 4]
        eventually(lambda: not any(type(each) is _Call for each in gc.get_objects()))
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
    assert both.remote.ready()
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
        (asked(1, timeout=float("nan")), InputError, "a finite number is needed"),
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


def test_a_request_is_not_cancelled_while_answers_are_counted(both: Both) -> None:
    """Guards against an answer to a call that is cleared meanwhile, which ended the batcher's thread."""
    both.model.may.clear()
    (cancelled,) = both.remote.submit(asked(1))
    eventually(lambda: both.batcher.statistics().running == 1)
    (front,) = both.requests._links._links.values()
    with front._counting:  # type: ignore[attr-defined]
        cancelled.cancel()
        time.sleep(0.1)
        assert front.running  # type: ignore[attr-defined]
    eventually(lambda: not front.running)  # type: ignore[attr-defined]
    both.model.may.set()
    assert answer(both, asked(2)) == [4]


def test_a_front_that_is_gone_has_its_requests_cancelled(both: Both) -> None:
    both.model.may.clear()
    (first,) = both.remote.submit(asked(1))
    eventually(lambda: both.batcher.statistics().running == 1)
    (second,) = both.remote.submit(asked(5))
    eventually(lambda: both.batcher.statistics().submitted == 2)
    both.front.shutdown(socket.SHUT_RDWR)
    for each in (first, second):
        with pytest.raises(UseError, match="the process of the model is gone"):
            each.result(PATIENCE_S)
    eventually(lambda: both.batcher.statistics().cancelled == 1)
    for ask in (lambda: both.remote.submit(asked(1)), lambda: both.remote.known("m")):
        with pytest.raises(UseError, match="the process of the model m is gone, and starts again"):
            ask()
    assert not both.remote.ready() and both.remote.index()[0]["state"] == "UNAVAILABLE"
    assert both.remote.statistics("", "") == []


def test_models_of_several_processes_are_asked_each_at_its_own(both: Both) -> None:
    other = Model()
    with Batcher(other, (1,), slo_ms=None, example=np.float64(0)) as batcher:
        requests, (one, two) = Requests(Models({"n": batcher})), socket.socketpair()
        remote = both.remote
        remote._names = ["n", "m"]
        assert not remote.ready() and [each["state"] for each in remote.index()] == ["UNAVAILABLE", "READY"]
        requests.connect(two)
        remote.connect(["n"], one)
        assert remote.ready() and [each["name"] for each in remote.index()] == ["n", "m"]
        (of_n,) = remote.submit(Asked("n", "", asked(7).inputs))
        assert answer(both, asked(5)) == [10] and of_n.result(PATIENCE_S)["output_0"] == [14]
        assert other.seen[-1] == 7 and both.model.seen[-1] == 5
        assert [each["name"] for each in remote.statistics("", "")] == ["n", "m"]
        with pytest.raises(Exception, match="no model is named 'o'; there are m, n"):
            remote.known("o")
        requests.close()


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


def test_a_damaged_answer_is_the_error_of_all_that_wait(both: Both) -> None:
    both.model.may.clear()
    waiting = [both.remote.submit(asked(x))[0] for x in (1, 2)]
    eventually(lambda: both.batcher.statistics().submitted == 2)
    (front,) = both.requests._links._links.values()
    front.send([_link._HEAD.pack(32, 1, 0, 8) + b"no pickl"])
    for each in waiting:
        with pytest.raises(UseError, match=r"a message of another process is damaged, .* closed: UnpicklingError"):
            each.result(PATIENCE_S)


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


@pytest.mark.parametrize("end", ["of the connection", "of the process", "of a process that comes again"])
def test_a_connection_that_ends_with_its_process_is_no_loss(
    both: Both, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    lost, looks = [], []

    class Timer:
        def __init__(self, _: float, look: Callable[[Any], None], given: list[Any]) -> None:
            self.start = lambda: looks.append(partial(look, *given))

    monkeypatch.setattr(threading, "Timer", Timer)
    both.remote.on_lost = lambda: lost.append(end)
    both.front.shutdown(socket.SHUT_RDWR)
    eventually(lambda: looks)
    assert not both.remote.ready()
    if end == "of the process":
        both.remote.drop(["m"])
    elif end != "of the connection":
        both.remote.connect(["m"], both.further())
    looks[0]()
    assert lost == ["of the connection"] * (end == "of the connection")


def test_a_front_that_does_not_read_is_dropped_and_others_are_served(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_link, "_UNSENT_BYTES", 1 << 16)
    with both.further() as front, suppress(OSError):  # it is dropped
        for number in range(100_000):
            front.sendall(b"".join(_link.pickled(number, ("index", ()))))
            assert number % 100 or answer(both, asked(1)) == [2]
    assert "a front of the models takes no answers, and is dropped: QueueFullError" in caplog.text
    assert answer(both, asked(1)) == [2]


def test_answers_that_a_socket_has_no_room_for_come_later(both: Both) -> None:
    count = 600
    with both.further() as front:
        for number in range(count):
            front.sendall(message(number, *[1.0] * 100))
            eventually(lambda number=number: both.batcher.statistics().completed >= 100 * (number - 5))  # type: ignore[misc]
        assert [received(front)[0] for _ in range(count)] == [*range(count)]


def test_answers_that_find_no_room_fail_and_the_front_is_kept(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_ROOM_BYTES", 1 << 12)
    monkeypatch.setattr(_link, "_UNSENT_BYTES", 1 << 15)
    count = 30
    with both.further() as front:
        front.settimeout(None)  # a message is read whole
        for number in range(count):
            front.sendall(message(number, *[1.0] * 1000))
            eventually(lambda number=number: both.batcher.statistics().completed == 1000 * (number + 1))  # type: ignore[misc]
        answers = dict(received(front) for _ in range(count))
        assert [*answers] == [*range(count)] and b"QueueFullError" not in answers[0]
        late = answers[count - 2]  # the last may be said while those before it are read
        assert b"QueueFullError" in late and b"does not keep up" in late
        front.sendall(message(count, 1, 2))
        assert b"QueueFullError" not in received(front)[1]


def test_answers_that_wait_for_room_fail_once_the_links_are_closed() -> None:
    """Guards against an error of epoll in the thread of a batcher, which ended it."""
    links = _link.Links()
    own, other = socket.socketpair()
    link = _link.Link(links, own)
    link.send([bytes(1 << 24)])
    links.close()
    with other, pytest.raises(UseError, match="is gone"):
        link.send([b"more"])
    assert own.fileno() == -1


def test_a_front_refuses_requests_that_the_other_process_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_UNSENT_BYTES", 1 << 16)
    own, other = socket.socketpair()
    remote = RemoteModels(["m"])
    remote.connect(["m"], own)
    with own, other, pytest.raises(QueueFullError, match="does not keep up"):
        while True:
            remote.submit(asked(*range(10_000)))
