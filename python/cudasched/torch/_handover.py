"""What one thread computes and another uses: the other's stream waits for it on the GPU, and its memory is kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from cudasched.torch._streams import Streams

__all__ = ["Parcel", "hand_over"]


class Parcel:
    """Tensors, and the end of the work that computes them."""

    def __init__(self, tensors: list[Any], device: int | None, event: Any) -> None:
        self._tensors = tensors
        self._device = device
        self._event = event

    def take(self, streams: Streams) -> None:
        """The calling thread uses them from here on, in and out of regions."""
        if self._device is None:
            return
        mine = streams.of_thread(self._device)
        current = streams.backend.current(self._device)
        self._wait(streams, current)
        if current == mine.default:  # a thread without regions: of its streams only this one is known
            for tensor in self._tensors:
                streams.backend.keep(tensor, current)
        else:
            mine.use(current)
        mine.keep(self._tensors)

    def _wait(self, streams: Streams, stream: Hashable) -> None:
        streams.backend.wait(stream, self._event)


def hand_over(streams: Streams, tensors: Iterable[Any]) -> Parcel:
    """What the calling thread's current stream has now computes them."""
    device = streams.backend.device()
    if device is None:
        return Parcel(list(tensors), None, None)
    event = streams.backend.event(device)
    streams.backend.record(event, streams.backend.current(device))
    return Parcel(list(tensors), device, event)
