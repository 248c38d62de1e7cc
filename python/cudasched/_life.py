"""A process that ends with the one that started it, however that ends: by a signal, too, and while this one is busy.

The starter keeps one end of a pipe or socket open, which the kernel closes when the starter ends. `end_with` waits for
that on a thread of its own. The thread runs beside a kernel that hangs, and beside Python code that never returns.
"""

from __future__ import annotations

import os
import select
import signal
import threading

__all__ = ["end_with"]

_PEER_CLOSED = (
    0x2000  # POLLRDHUP, which the module `select` has no name for everywhere; of pipes POLLHUP is told always
)


def end_with(descriptor: int, events: int = _PEER_CLOSED) -> None:
    """Kills this process, or its group where it leads one, when the other end of a descriptor is closed.

    Args:
        descriptor: A pipe's reading end, or a connected socket; nothing is read from it.
        events: 0: a socket's other end may shut down one direction, which does not kill this process.
    """
    threading.Thread(target=_watch, args=(descriptor, events), name="cudasched-life", daemon=True).start()


def _watch(descriptor: int, events: int) -> None:
    poll = select.poll()
    poll.register(descriptor, events)
    poll.poll()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
