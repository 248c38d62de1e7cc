"""Results that one thread computes and another uses: the user's stream waits on the GPU, and the memory is kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from cudasched.errors import ConfigError
from cudasched.torch import _adapter
from cudasched.torch._streams import Streams

__all__ = ["Handover", "Parcel", "hand_over", "handover"]

_Value = TypeVar("_Value")


class Parcel:
    """Tensors of one device, and the end of the work that computes them."""

    def __init__(self, device: int, tensors: list[Any], event: Any) -> None:
        self.tensors = tensors
        self._device = device
        self._event = event

    def take(self, streams: Streams) -> None:
        """The calling thread uses them from here on, in and out of regions."""
        mine = streams.of_thread(self._device)
        current = streams.backend.current(self._device)
        self._wait(streams, current)
        mine.use(current)
        mine.keep(self.tensors)
        if current == mine.default:  # `keep` is for the thread's own
            for tensor in self.tensors:
                streams.backend.keep(tensor, current)

    def _wait(self, streams: Streams, stream: Hashable) -> None:
        streams.backend.wait(stream, self._event)


def hand_over(streams: Streams, device: int, tensors: Iterable[Any]) -> Parcel:
    """The present work of the calling thread's current stream computes the tensors."""
    event = streams.backend.event(device)
    streams.backend.record(event, streams.backend.current(device))
    return Parcel(device, list(tensors), event)


class Handover(Generic[_Value]):
    """The result of `handover`: one or several other threads take the value."""

    def __init__(self, value: _Value, parcels: list[Parcel], streams: Streams | None) -> None:
        self._value = value
        self._parcels = parcels
        self._streams = streams

    def take(self) -> _Value:
        """The value, for the calling thread to use from here on, in and out of regions.

        On the GPU, the thread's current stream waits for the work before the handover; the host does not. The tensors'
        memory is not used again before this thread's work on them is over, also where another thread frees them.
        """
        if self._streams is not None:
            for parcel in self._parcels:
                parcel.take(self._streams)
        return self._value


def handover(value: _Value) -> Handover[_Value]:
    """Hands tensors from one thread to others: call this on the computing thread, and `take()` on the using one.

    ::

        queue.put(cudasched.torch.handover(batch))       # the thread that computed it
        batch = queue.get().take()                       # the thread that uses it

    The work that this thread has launched so far comes first. Its later work on the tensors is not ordered with the
    takers' use. Hand over a copy of tensors that go on changing, as weights in training.

    Args:
        value: A tensor, a module (its parameters and buffers), or lists, tuples and dictionaries of these. Tensors
            that are not on a GPU need no order and pass through.

    Returns:
        The object whose ``take()`` the takers call, each on its own thread.

    Raises:
        ConfigError: There is no tensor in `value`.
    """
    tensors = list(_tensors(value))
    if not tensors:
        raise ConfigError(
            f"handover of a {type(value).__name__}: there is no tensor in it; it takes tensors, modules, and lists, "
            "tuples and dictionaries of them"
        )
    streams = _adapter.streams()
    parcels = []
    if streams is not None:
        by_device: dict[int, list[Any]] = {}
        for tensor in tensors:
            if tensor.is_cuda:
                by_device.setdefault(tensor.get_device(), []).append(tensor)
        parcels = [hand_over(streams, device, mine) for device, mine in by_device.items()]
    return Handover(value, parcels, streams)


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "record_stream"):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors(each)
    elif callable(getattr(value, "parameters", None)) and callable(getattr(value, "buffers", None)):
        yield from value.parameters()
        yield from value.buffers()
