"""Regions while a signal's handler raises: ``interrupted_regions.py COUNT``, a program with the hook.

The exceptions come in the entry, the body and the end of `with` blocks and of decorated functions, wherever the timer
ends. Prints how many came, and how much was left: regions of the thread, and launches of ten that went as another
class than the program's own.
"""

import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "python"))

import cudasched
import launcher
from cudasched._region import _thread


class LateError(Exception):
    """Of the handler."""


def late(*_: object) -> None:
    """The handler."""
    raise LateError


@cudasched.region("best_effort")
def body() -> None:
    """Nothing, in a region."""


def block() -> None:
    """Nothing, in another."""
    with cudasched.region("latency"):
        pass


def main() -> None:
    """Entry point; see the module's text."""
    count = int(sys.argv[1])
    gpu = launcher.Gpu()
    gpu.launch()
    gpu.synchronize()
    signal.signal(signal.SIGALRM, late)
    interrupts = 0
    while interrupts < count:
        for work in (block, body):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + interrupts % 97 * 0.000003)
                while True:
                    work()
            except LateError:
                interrupts += 1
    before = cudasched.state()
    gpu.launch(10)
    gpu.synchronize()
    after = cudasched.state()
    others = after.latency_launches - before.latency_launches + after.best_effort_launches - before.best_effort_launches
    print(interrupts, len(_thread.regions) + others + 10 - (after.launches - before.launches))


main()
