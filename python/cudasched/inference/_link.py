"""Messages between two processes over a socket. Any thread sends, and one thread reads all sockets of its process.

A message is a header, a description, and the bytes of arrays; each begins at a multiple of eight bytes. The description
is pickled. Descriptions of arrays repeat, so that each is pickled once. An array is a view of the memory that the
socket's bytes were read into.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cudasched.inference._errors import QueueFullError, UseError
from cudasched.log import logger

__all__ = ["Link", "Links", "Message", "packed", "pickled"]

_HEAD = struct.Struct("<QQII")
"""Bytes of the message, its number, whether it has arrays, and bytes of its description."""
_MOST_BYTES = 1 << 36
_CHUNK_BYTES, _LEAST_BYTES = 1 << 16, 1 << 12
"""Read into one piece of memory, and at once."""
_ROOM_BYTES = 1 << 22
"""In the socket, if the system lets it have so many."""
_MOST_PARTS = 256
"""Sent as they are: the system takes four times as many."""
_UNSENT_BYTES = 1 << 28
"""So many wait for another end that does not read: no more may."""
_EMPTY = memoryview(b"")

Arrays = Sequence[tuple[str, Any]]
_Layout = tuple[tuple[str, Any, tuple[int, ...]], ...]


class Message(NamedTuple):
    """One that has come.

    Attributes:
        link: From which.
        number: The sender's.
        about: What it says.
        arrays: Their names and they; None: it has none.
    """

    link: Any
    number: int
    about: Any
    arrays: Arrays | None


def pickled(number: int, about: Any) -> list[Any]:
    """A message without arrays, in parts."""
    return _parts(number, False, _aligned(pickle.dumps(about, 5)), 0)


def packed(number: int, about: Any, arrays: Arrays, once: bool = False) -> list[Any] | None:
    """A message with arrays, in parts; None: one has Python's objects.

    Args:
        number: The sender's.
        about: Is hashable.
        arrays: Names, and NumPy's arrays.
        once: No other message is about the same.
    """
    layout = tuple([(name, array.dtype, array.shape) for name, array in arrays])
    described = _described.__wrapped__(about, layout) if once else _described(about, layout)
    if described is None:
        return None
    description, pads, count = described
    parts = _parts(number, True, description, count)
    for (_, array), pad in zip(arrays, pads, strict=True):
        parts += (array if array.flags.c_contiguous else np.ascontiguousarray(array), pad)
    return parts


def _parts(number: int, has_arrays: bool, description: bytes, count: int) -> list[Any]:
    return [_HEAD.pack(_HEAD.size + len(description) + count, number, has_arrays, len(description)), description]


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


@lru_cache(1024)
def _described(about: Any, layout: _Layout) -> tuple[bytes, list[bytes], int] | None:
    """The description, bytes after each array, and bytes of all; None: there are objects."""
    if any(dtype.hasobject for _, dtype, _ in layout):
        return None
    places, pads, count = [], [], 0
    for name, dtype, shape in layout:
        places.append((name, dtype, shape, count))
        size = dtype.itemsize * math.prod(shape)
        pads.append(bytes(-size % 8))
        count += size + len(pads[-1])
    return _aligned(pickle.dumps((about, places, count), 5)), pads, count


_description = lru_cache(1024)(pickle.loads)


class Link:
    """One end of a socket between two processes.

    Args:
        links: Those that one thread reads.
        own: The socket, which is the link's from here on.

    Attributes:
        why: The reason of an end, for those that wait for the other end.
    """

    def __init__(self, links: Links, own: socket.socket) -> None:
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        self.socket, self._links, self.why = own, links, "the process of the model is gone"
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._over = False
        self._chunk, self._begin, self._end = _EMPTY, 0, 0  # of the bytes that came, those that are no message yet
        self._make_room(_HEAD.size)
        links._add(self)

    def check_room(self) -> None:
        """Raises QueueFullError where the other end does not read."""
        if self._unsent_bytes > _UNSENT_BYTES:
            raise QueueFullError("the process at the other end does not keep up")

    def send(self, parts: list[Any], checked: bool = False) -> None:
        """Returns at once.

        Args:
            parts: Of one or several messages.
            checked: `check_room` was called for what is large of them.

        Raises:
            UseError: The other end is gone.
            QueueFullError: The other end does not read.
        """
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        with self._lock:
            if self._over:
                raise UseError(self.why)
            if not checked:
                self.check_room()
            sent = 0
            if not self._unsent:
                sent = self._write(parts)
                if sent == sum([part.nbytes if type(part) is np.ndarray else len(part) for part in parts]):
                    return
                self._links._await_room(self, True)
            data = memoryview(b"".join(parts))[sent:]
            self._unsent.append(data)
            self._unsent_bytes += len(data)

    def drop(self) -> None:
        """The other end is as good as gone: `Links.read` says so."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _write(self, parts: list[Any]) -> int:
        try:
            return self.socket.sendmsg(parts)
        except OSError:  # there is no room; or the other end is gone, which the thread that reads finds
            return 0

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                data = self._unsent.popleft()
                sent = self._write([data])
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent.appendleft(data[sent:])
                    return
            self._links._await_room(self, False)

    def _read(self, messages: list[Message]) -> bool:
        """Appends those that have come; whether the other end is there. Raises Exception where a message is damaged."""
        try:
            count = self.socket.recv_into(self._chunk[self._end :])
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._end += count
        needed = _HEAD.size
        while self._end - self._begin >= _HEAD.size:
            needed, number, has_arrays, described = _HEAD.unpack_from(self._chunk, self._begin)
            place = self._begin + _HEAD.size + described
            if not _HEAD.size + described <= needed <= _MOST_BYTES or needed % 8 or has_arrays > 1:
                raise ValueError("the header is none")
            if self._begin + needed > self._end:
                break
            data = bytes(self._chunk[self._begin + _HEAD.size : place])
            self._begin += needed
            messages.append(self._message(number, data, place) if has_arrays else self._pickled(number, data))
            needed = _HEAD.size
        self._make_room(needed)
        return count > 0

    def _pickled(self, number: int, data: bytes) -> Message:
        return Message(self, number, pickle.loads(data), None)

    def _message(self, number: int, data: bytes, place: int) -> Message:
        about, places, count = _description(data)
        if place + count != self._begin:
            raise ValueError("the arrays are not of the message's length")
        chunk = self._chunk
        return Message(
            self,
            number,
            about,
            [(name, np.ndarray(shape, dtype, chunk, place + at)) for name, dtype, shape, at in places],
        )

    def _make_room(self, needed: int) -> None:
        """For the rest of a message of so many bytes. The memory of those before it is theirs."""
        has = self._end - self._begin
        if len(self._chunk) - self._end < max(needed - has, _LEAST_BYTES):
            chunk = np.empty(max(_CHUNK_BYTES, needed + _LEAST_BYTES), np.uint8).data
            chunk[:has] = self._chunk[self._begin : self._end]
            self._chunk, self._begin, self._end = chunk, 0, has

    def _close(self) -> None:
        with self._lock:
            self._over = True
            self._unsent.clear()
            self._links._remove(self)
            self.socket.close()


class Links:
    """Those that one thread reads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._waker = os.eventfd(0)
        self._epoll.register(self._waker, select.EPOLLIN)

    def read(self) -> tuple[list[Message], list[Any], bool]:
        """Waits for the other ends.

        Returns:
            Messages that have come, links that are closed as the other end is gone, and whether to go on.
        """
        messages: list[Message] = []
        gone: list[Link] = []
        goes_on = True
        for descriptor, events in self._epoll.poll():
            if descriptor == self._waker:
                goes_on = False
                continue
            link = self._links[descriptor]
            if events & select.EPOLLOUT:
                link._flush()
            if events & ~select.EPOLLOUT and not self._readable(link, messages):
                link._close()
                gone.append(link)
        return messages, gone, goes_on

    def _readable(self, link: Link, messages: list[Message]) -> bool:
        try:
            return link._read(messages)
        except Exception as error:
            link.why = f"a message of another process is damaged, and its connection is closed: {error!r}"
            logger.error("%s", link.why)
            return False

    def wake(self) -> None:
        """The thread that reads does not go on."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Of the thread that has read. Other threads that send get UseError from here on."""
        for link in list(self._links.values()):
            link._close()
        self._epoll.close()
        os.close(self._waker)

    def _add(self, link: Link) -> None:
        self._links[link.socket.fileno()] = link
        self._epoll.register(link.socket, select.EPOLLIN)

    def _remove(self, link: Link) -> None:
        self._epoll.unregister(link.socket)
        del self._links[link.socket.fileno()]

    def _await_room(self, link: Link, awaited: bool) -> None:
        self._epoll.modify(link.socket, select.EPOLLIN | select.EPOLLOUT * awaited)
