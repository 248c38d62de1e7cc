"""One program of the soak: it does random things with CUDA until it is told to end, and checks what came of them.

``life.py SEED CLASS``, CLASS best_effort, latency, or both: regions of both classes, on threads of their own. It writes
a line of JSON for each round that came to its end, with what it did in that round; the end of its standard input asks
it to end. Whatever is lost, reordered or left open raises, which ends it with exit code 1 and a traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from functools import partial

from logged import Log
from program import Gpu, Worker

SPARE_DESCRIPTORS = 4
"""As many may come and go between two looks: a pipe and a file that Python has open."""


class LostError(AssertionError):
    """What ran is not what was launched."""


class Work:
    """Launches on several streams, ordered by events: what is in memory afterwards is known."""

    def __init__(self, gpu: Gpu, chance: random.Random, streams: int) -> None:
        self._gpu, self._chance = gpu, chance
        self._log = Log(gpu)
        self._streams = [gpu.stream() for _ in range(streams)]
        self._events = [self._log.event() for _ in range(streams)]
        self._mirror = self._log.allocate(8 * 1024)
        # Memory is cleared on the default stream, which these streams do not wait for.
        gpu.call("cuStreamSynchronize", None)
        self._here = 0
        self._value = 0
        self._expected: list[int] = []
        self._mirrored: list[int] = []

    def _somewhere(self) -> int:
        """A stream, ordered behind all that this work launched."""
        there = self._chance.randrange(len(self._streams))
        if there != self._here:
            self._log.record(self._events[self._here], self._streams[self._here])
            self._log.wait(self._streams[there], self._events[self._here])
            self._here = there
        return self._streams[there]

    def _values(self, count: int) -> range:
        first = self._value
        self._value += count
        return range(first, self._value)

    def launch(self, count: int) -> None:
        values = self._values(count)
        self._log.note(*values, stream=self._somewhere(), us=self._chance.choice([1, 1, 5, 40]))
        self._expected += values

    def replay(self, nodes: int, times: int) -> None:
        """Captures a graph, launches it, changes it, and launches it again."""
        stream = self._somewhere()
        values = self._values(nodes)
        executable = self._log.graph(values, stream)
        for _ in range(times):
            self._gpu.replay(executable, self._somewhere())
            self._expected += values
        others = self._values(nodes)
        graph = self._log.capture(others, self._somewhere())
        result = (ctypes.c_uint64 * 4)()
        self._gpu.call("cuGraphExecUpdate_v2", ctypes.c_void_p(executable), graph, result)
        self._gpu.call("cuGraphDestroy", graph)
        self._gpu.replay(executable, self._somewhere())
        self._expected += others
        self._gpu.call("cuStreamSynchronize", ctypes.c_void_p(self._somewhere()))
        self._gpu.call("cuGraphExecDestroy", ctypes.c_void_p(executable))

    def copy(self) -> None:
        """What was noted up to here, into memory that later notes leave alone."""
        stream = ctypes.c_void_p(self._somewhere())
        self._mirrored = self._expected[:1024]
        size = ctypes.c_size_t(8 * len(self._mirrored))
        if self._mirrored:
            self._gpu.call("cuMemcpyDtoDAsync_v2", self._mirror, self._log.values, size, stream)

    def wait(self) -> None:
        stream = self._somewhere()
        if self._chance.random() < 0.5:
            self._gpu.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        else:
            self._log.record(self._events[self._here], stream)
            self._gpu.call("cuEventSynchronize", self._events[self._here])

    def live(self, growth: int, did: Counter[str]) -> None:
        """A few random things; larger ones as `growth` goes up."""
        for _ in range(self._chance.randint(1, 12)):
            match self._chance.randrange(8):
                case 0:
                    self.copy()
                case 1:
                    self.wait()
                case 2:
                    self.replay(self._chance.randint(1, 4 * growth), self._chance.randint(1, 3))
                    did["captures"] += 2
                    did["graph_updates"] += 1
                case _:
                    self.launch(self._chance.randint(1, 16 * growth))

    def check(self) -> int:
        """Looks at everything and gives it back. Returns how many launches ran."""
        self._gpu.synchronize()
        for what, seen, wanted in (
            ("the log", self._log.read(), self._expected),
            ("the copy", self._log.copied(self._mirror, len(self._mirrored)) if self._mirrored else [], self._mirrored),
        ):
            if seen != wanted:
                at = next((i for i, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), "the end")
                raise LostError(f"{what} has {len(seen)} values, {len(wanted)} are due; other ones from {at} on")
        for stream in self._streams:
            self._gpu.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
        for event in self._events:
            self._gpu.call("cuEventDestroy_v2", event)
        self._gpu.call("cuMemFree_v2", self._mirror)
        self._log.free()
        return len(self._expected)


class Life:
    """Random rounds; `did` counts what was done in the one under way."""

    def __init__(self, chance: random.Random, client_class: str) -> None:
        self._chance, self._class = chance, client_class
        self._gpu = Gpu()
        self._growth = 1
        self.did: Counter[str] = Counter()

    def _region(self, name: str) -> contextlib.AbstractContextManager[object]:
        import cudasched

        return cudasched.region(name)

    def _inside(self) -> contextlib.AbstractContextManager[object]:
        if self._class == "latency" and self._chance.random() < 0.8:
            self.did["regions"] += 1
            return self._region("latency")
        return contextlib.nullcontext()

    def _work(self) -> Work:
        chance = random.Random(self._chance.random())
        return Work(self._gpu, chance, streams=chance.randint(1, 6))

    # ---- rounds

    def works(self) -> None:
        with self._inside():
            work = self._work()
            work.live(self._growth, self.did)
            self.did["launches"] += work.check()

    def works_on_threads(self) -> None:
        """Threads that end with what they have open: a region, default streams."""
        names = ["latency", "best_effort"] if self._class == "both" else [""] * self._chance.randint(1, 3)
        works = [self._work() for _ in names]

        def lives(name: str, work: Work) -> None:
            if name:
                self._region(name).__enter__()
            work.live(self._growth, self.did)

        threads = [Worker(self._gpu, partial(lives, *each)) for each in zip(names, works, strict=True)]
        for thread in threads:
            thread.join()
        # Not before: nobody may synchronise with a context while a thread captures.
        self.did["launches"] += sum(work.check() for work in works)
        self.did["threads"] += len(threads)

    def grows(self) -> None:
        """Longer graphs and more launches a round, to more than the ring holds."""
        self._growth = min(2 * self._growth, 32)
        self.works()

    def forks(self) -> None:
        """A child can do nothing with its parent's CUDA, and its end is none of its parent's business."""
        self._gpu.launch(self._chance.randint(0, 20))
        child = os.fork()
        if child == 0:
            os.close(0)
            try:
                self._gpu.launch()
            except RuntimeError:
                os._exit(7)
            os._exit(8)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7:
            raise LostError("a forked child's launch did not fail as CUDA's does")
        self.did["forks"] += 1

    def resets(self) -> None:
        """The device is reset with work in flight; then everything begins anew."""
        self._gpu.launch(self._chance.randint(0, 50))
        self._gpu.call("cuDevicePrimaryCtxReset_v2", 0)
        self._begin_anew()
        self.did["resets"] += 1

    def breaks(self) -> None:
        """An error that stays until the device is reset."""
        log = Log(self._gpu)
        log.note(0)
        self._gpu.synchronize()
        self._gpu.call("cuMemFree_v2", log.values)
        with contextlib.suppress(RuntimeError):
            log.note(*range(self._chance.randint(1, 20)))
        for _ in range(2):
            try:
                self._gpu.synchronize()
            except RuntimeError as error:
                if "status 700" not in str(error):
                    raise
            else:
                raise LostError("an error that stays was not told")
        self._gpu.call("cuDevicePrimaryCtxReset_v2", 0)
        self._begin_anew()
        self.did["broken_contexts"] += 1

    def _begin_anew(self) -> None:
        self._gpu.call("cuDevicePrimaryCtxRelease_v2", 0)
        self._gpu = Gpu()

    def execs(self) -> None:
        """Another program takes this one's place, with work in flight."""
        self._gpu.launch(self._chance.randint(0, 50))
        self.did["execs"] += 1
        report(self.did)
        seed = str(self._chance.randrange(2**32))
        os.execv(sys.executable, [sys.executable, __file__, seed, self._class])

    def round(self) -> None:
        self.did.clear()
        often = [self.works] * 14 + [self.works_on_threads] * 6 + [self.grows]
        seldom = [self.forks, self.forks, self.resets, self.breaks]
        if self._chance.random() < 0.02:
            self.execs()
        self._chance.choice(often + seldom)()
        if self._class == "latency":
            time.sleep(self._chance.expovariate(1 / 0.01))
        report(self.did)


def report(did: Counter[str]) -> None:
    sys.stdout.write(json.dumps(did) + "\n")
    sys.stdout.flush()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def told_to_end() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def main() -> None:
    sys.setswitchinterval(1e-4)  # as a program of both classes should
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    seed, client_class = sys.argv[1:]
    if client_class != "best_effort":
        import cudasched  # noqa: F401  (before the driver is loaded)
    chance = random.Random(int(seed))
    life = Life(chance, client_class)
    ends = chance.expovariate(1 / 60)
    rounds, begun, before = 0, time.monotonic(), 0
    while not told_to_end():
        life.round()
        rounds += 1
        if rounds == 20:
            before = descriptors()
        if time.monotonic() - begun > ends:
            break
    if rounds > 20 and descriptors() > before + SPARE_DESCRIPTORS:
        raise LostError(f"{descriptors() - before} descriptors were left open in {rounds} rounds")
    if chance.random() < 0.3:
        Gpu().launch(20, us=2_000_000)  # ends with work in flight
    if chance.random() < 0.3:
        os._exit(0)


if __name__ == "__main__":
    main()
