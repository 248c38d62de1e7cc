"""Uses that nothing orders are named, with both places; over PyTorch on the host, with numbers for streams."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from cudasched.torch._check import Order, Use, wanted
from support import PATIENCE_S

A, B, EVENT, X = 0xA, 0xB, 1, 0x1000


def pairs(found: list[tuple[Use, Use]]) -> list[tuple[str, str]]:
    return [(use.name, other.name) for use, other in found]


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [("read", "read", False), ("read", "write", True), ("write", "read", True), ("write", "write", True)],
)
def test_two_streams_without_an_event(first: str, second: str, named: bool) -> None:
    order = Order()
    use = {"read": ([X], []), "write": ([], [X])}
    assert order.launched("first", A, *use[first]) == []
    found = order.launched("second", B, *use[second])
    assert pairs(found) == ([("second", "first")] if named else [])


def test_an_event_orders_them() -> None:
    order = Order()
    order.launched("first", A, [], [X])
    order.recorded(EVENT, A)
    order.waited(EVENT, B)
    assert order.launched("second", B, [], [X]) == []


def test_an_event_from_before_the_use_does_not() -> None:
    order = Order()
    order.recorded(EVENT, A)
    order.launched("first", A, [], [X])
    order.waited(EVENT, B)
    assert pairs(order.launched("second", B, [X], [])) == [("second", "first")]


def test_order_goes_through_a_third_stream() -> None:
    order = Order()
    order.launched("first", A, [], [X])
    order.recorded(EVENT, A)
    order.waited(EVENT, 0xC)
    order.recorded(2, 0xC)
    order.waited(2, B)
    assert order.launched("second", B, [X], []) == []


@pytest.mark.parametrize("what", [{"stream": A}, {"event": EVENT}, {}])
def test_what_the_host_has_waited_for_is_over(what: dict[str, int]) -> None:
    order = Order()
    order.launched("first", A, [], [X])
    order.recorded(EVENT, A)
    order.host_waited(**what)
    assert order.launched("second", B, [], [X]) == []


def test_a_read_stays_of_interest_beside_another_streams() -> None:
    order = Order()
    order.launched("write", A, [], [X])
    order.recorded(EVENT, A)
    order.waited(EVENT, B)
    order.launched("theirs", B, [X], [])
    assert pairs(order.launched("mine", A, [], [X])) == [("mine", "theirs")]


def test_other_memory_at_the_address_is_another_tensor() -> None:
    order = Order()
    order.launched("first", A, [], [X])
    order.allocated(X)
    assert order.launched("second", B, [X], []) == []


def test_both_places_are_named_once() -> None:
    order = Order()

    def where_it_is_written() -> None:
        order.launched("add_", A, [], [X])

    def where_it_is_read() -> None:
        order.tell(order.launched("mul", B, [X], []))

    where_it_is_written()
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            where_it_is_read()
    (warning,) = caught
    text = str(warning.message)
    assert "where_it_is_written" in text and "where_it_is_read" in text
    assert "mul on stream 0xb" in text and "add_ on stream 0xa" in text
    assert threading.current_thread().name in text


def test_a_collected_objects_own_work_is_heard_inside_an_operations() -> None:
    order = Order()

    def writes() -> Iterator[int]:  # as Python's collector may at any allocation
        order.recorded(EVENT, A)
        yield X

    worker = threading.Thread(target=order.launched, args=("add", A, [], writes()), daemon=True)
    worker.start()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_it(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_CHECK_STREAMS", value)
    assert wanted() is expected


ON_THE_HOST = """
import sys, threading, warnings
import torch
from cudasched.torch import _check

streams = threading.local()
caught = []
warnings.showwarning = lambda message, *rest: caught.append(str(message))
warnings.simplefilter("always")
begun, left = [], []
leave = torch.utils._python_dispatch.TorchDispatchMode.__exit__
torch.utils._python_dispatch.TorchDispatchMode.__exit__ = (
    lambda mode, *error: (left.append(threading.get_ident()), leave(mode, *error)))


def on(number, action):
    def body():
        begun.append(threading.get_ident())
        streams.current = number
        _check.watch(torch, lambda: streams.current, lambda tensor: True)
        action()
    thread = threading.Thread(target=body, name=f"thread {number}")
    thread.start()
    thread.join()


shared = torch.zeros(4)
mine = torch.ones(4, requires_grad=True)


def train():
    (mine * 2).sum().backward()      # autograd's threads are looked at for this one
    shared.add_(1)
    shared.view(2, 2)


def read():
    shared.view(2, 2)                # a view reads nothing
    assert not caught, caught
    shared.mul(2)


on(1, train)
on(2, read)
assert len(caught) == 1, caught
assert "mul on stream 0x2, by thread thread 2" in caught[0] and "add_ on stream 0x1" in caught[0], caught[0]
assert "in train" in caught[0] and "in read" in caught[0], caught[0]
# As PyTorch's C layer tells of events; it imports the module when it has something to tell.
trace = sys.modules["torch.cuda._gpu_trace"]
trace.EventRecordCallbacks.fire_callbacks(1, 2)
trace.EventWaitCallbacks.fire_callbacks(1, 1)
trace.EventRecordCallbacks.fire_callbacks(2, 1)
trace.EventWaitCallbacks.fire_callbacks(2, 2)
on(2, lambda: shared.mul(2))
on(2, lambda: mine.grad.add(1))
assert len(caught) == 1, caught
assert left == begun             # by the threads themselves: PyTorch frees a mode that is left too late


def higher():
    called.append(float(torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(()),))))
    called.append(float(torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(()))))


called = []
on(3, higher)
assert called == [2, 2], called
print("done")
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_operations_of_pytorch_are_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", ON_THE_HOST], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr
