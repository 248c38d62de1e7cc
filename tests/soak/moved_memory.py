"""Histories of programs whose memory moves: ``python -m tests.soak.moved_memory [--count N] [--out FILE]``.

Three best-effort programs with pageable memory, which does not fit together, share a simulated GPU of 1 GB. A server
asks for most of it now and then, a controller parks programs, and one is killed at times. A history allocates, launches
kernels that read and write, fills, copies and frees at random, on a stream of its program's; the driver checks each
access against its map. A history fails where a call fails that may not, or a byte is not the one that was written last.
What is printed: histories that ran, that failed, kills, and requests of the server and those that were refused.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import queue
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PART = 1 << 18  # a thousandth of the GPU
PAGE = 4096
FLOATS = PAGE // 4
MOST_BYTES = 450 * PART
STEPS = 40
PATIENCE_S = 120.0
OUT_OF_MEMORY = 2
IMAGE = b"""cudasched-sim 1
kernel work params=4 block_us=param:0
kernel axpy params=8,8,4,4 block_us=5 effect=axpy
"""
KILL_EACH = 40
"""Histories."""


class CallError(Exception):
    """A call of the driver's failed that may not."""


class Driver:
    """The driver of a program, with a context and three streams."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context, module = c_void_p(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", byref(module), ctypes.c_char_p(IMAGE))
        self._functions = {}
        for name in (b"work", b"axpy"):
            self._functions[name] = c_void_p()
            self.call("cuModuleGetFunction", byref(self._functions[name]), module, ctypes.c_char_p(name))
        self.streams = [c_void_p() for _ in range(3)]
        for stream in self.streams:
            self.call("cuStreamCreate", byref(stream), 1)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CallError."""
        if status := getattr(self._library, name)(*arguments):
            raise CallError(f"{name}: status {status}")

    def allocate(self, bytes: int) -> int:
        """Where the memory is; 0: there is none."""
        pointer = c_uint64()
        status = self._library.cuMemAlloc_v2(byref(pointer), c_size_t(bytes))
        if status not in (0, OUT_OF_MEMORY):
            raise CallError(f"cuMemAlloc_v2 of {bytes} bytes: status {status}")
        return pointer.value if status == 0 else 0

    def launch(self, name: bytes, stream: c_void_p, *values: Any) -> None:
        """A kernel with these parameters."""
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", self._functions[name], 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)


@dataclass(eq=False)
class Block:
    """Memory, and what is in some of its pages: so many floats of one value each."""

    pointer: int
    bytes: int
    pages: dict[int, float] = field(default_factory=dict)


class History:
    """One, on one stream: each step is one of its methods."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self._driver, self._chance = driver, random.Random(seed)
        self._stream = self._chance.choice(driver.streams)
        self._blocks: list[Block] = []

    def run(self) -> None:
        """Raises CallError, and AssertionError where memory has something else."""
        steps = (self.allocate, self.fill, self.upload, self.add, self.copy, self.work, self.check, self.free)
        for _ in range(STEPS):
            self._chance.choices(steps, (4, 4, 2, 4, 3, 3, 2, 1))[0]()
        while self._blocks:
            for page in list(self._blocks[0].pages):
                self._check(self._blocks[0], page)
            self.free()

    def allocate(self) -> None:
        """A block, whose pages are its first, its last and some between."""
        size = self._chance.choice((8, 12, 20, 64, 150)) * PART
        if sum(block.bytes for block in self._blocks) + size > MOST_BYTES:
            return
        if pointer := self._driver.allocate(size):
            self._blocks.append(Block(pointer, size))
            for at in (0, size - PAGE, *(self._chance.randrange(size // PAGE) * PAGE for _ in range(3))):
                self._fill(self._blocks[-1], at)

    def _page(self) -> tuple[Block, int] | None:
        if not self._blocks:
            return None
        block = self._chance.choice(self._blocks)
        return block, self._chance.choice(list(block.pages))

    def _fill(self, block: Block, at: int) -> None:
        block.pages[at] = float(self._chance.randrange(1, 100))
        (word,) = struct.unpack("<I", struct.pack("<f", block.pages[at]))
        self._driver.call(
            "cuMemsetD32Async", c_uint64(block.pointer + at), c_uint32(word), c_size_t(FLOATS), self._stream
        )

    def fill(self) -> None:
        """A page, by the driver."""
        if found := self._page():
            self._fill(*found)

    def upload(self) -> None:
        """A page, from the host."""
        if found := self._page():
            block, at = found
            block.pages[at] = float(self._chance.randrange(1, 100))
            values = (ctypes.c_float * FLOATS)(*[block.pages[at]] * FLOATS)
            self._driver.call("cuStreamSynchronize", self._stream)
            self._driver.call("cuMemcpyHtoD_v2", c_uint64(block.pointer + at), values, c_size_t(PAGE))

    def add(self) -> None:
        """By a kernel: one page to another."""
        one, other = self._page(), self._page()
        if one and other and one[0].pages[one[1]] < 1e5 and one != other:
            (block, at), (of, place) = one, other
            addresses = c_uint64(block.pointer + at), c_uint64(of.pointer + place)
            self._driver.launch(b"axpy", self._stream, *addresses, ctypes.c_float(2), c_uint32(FLOATS))
            block.pages[at] += 2 * of.pages[place]

    def copy(self) -> None:
        """One page to another."""
        one, other = self._page(), self._page()
        if one and other and one != other:
            (block, at), (of, place) = one, other
            addresses = c_uint64(block.pointer + at), c_uint64(of.pointer + place)
            self._driver.call("cuMemcpyDtoDAsync_v2", *addresses, c_size_t(PAGE), self._stream)
            block.pages[at] = of.pages[place]

    def work(self) -> None:
        """Kernels that take time."""
        for _ in range(self._chance.choice((1, 1, 4))):
            self._driver.launch(b"work", self._stream, c_uint32(self._chance.choice((5, 50, 500))))

    def check(self) -> None:
        """A page."""
        if found := self._page():
            self._check(*found)

    def _check(self, block: Block, at: int) -> None:
        into = (ctypes.c_float * FLOATS)()
        self._driver.call("cuStreamSynchronize", self._stream)
        self._driver.call("cuMemcpyDtoH_v2", into, c_uint64(block.pointer + at), c_size_t(PAGE))
        found, wanted = set(into), block.pages[at]
        assert found == {wanted}, f"page {at // PAGE} of {block.bytes} bytes has {sorted(found)[:4]}, not {wanted}"

    def free(self) -> None:
        """A block, at once or on the stream."""
        if not self._blocks:
            return
        block = self._blocks.pop(self._chance.randrange(len(self._blocks)))
        if self._chance.random() < 0.5:
            self._driver.call("cuMemFree_v2", c_uint64(block.pointer))
        else:
            self._driver.call("cuMemFreeAsync", c_uint64(block.pointer), self._stream)


def play(seed: int) -> None:
    """The program: histories one after another, a line each."""
    driver = Driver()
    driver.launch(b"work", driver.streams[0], c_uint32(5))
    while True:
        seed += 1
        wrong = ""
        try:
            History(driver, seed).run()
        except (CallError, AssertionError) as error:
            wrong = str(error)
        print(json.dumps([seed, wrong]), flush=True)
        if wrong:
            return  # an error may stay


def ask(seed: int) -> None:
    """The server: memory that others hold, for a moment; a line for each request, whether it got it."""
    driver, chance = Driver(), random.Random(seed)
    driver.launch(b"work", driver.streams[0], c_uint32(5))
    while True:
        time.sleep(chance.uniform(0.02, 0.3))
        pointer = driver.allocate(chance.choice((300, 600, 850)) * PART)
        print(json.dumps([0, "" if pointer else "refused"]), flush=True)
        if pointer:
            time.sleep(chance.uniform(0, 0.05))
            driver.call("cuMemFree_v2", c_uint64(pointer))


class Program:
    """One that runs."""

    def __init__(self, client_class: str, what: str, seed: int, environment: dict[str, str], said: queue.Queue[Any]):
        command = [sys.executable, "-m", "cudasched", "run", "--class", client_class, "--"]
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__, what, str(seed)], env=environment, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, args=(said,), daemon=True).start()

    def _read(self, said: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # cut off by a kill
                said.put((self, *json.loads(line)))
        said.put((self, None, ""))

    def kill(self) -> None:
        """Returns when it is gone."""
        self.process.kill()
        self.process.wait()


def park(pid: int, parked: bool, directory: str) -> None:
    """As a controller does; a program that is gone, or is not yet there, is not parked."""
    from cudasched import control
    from cudasched.errors import Error

    with suppress(Error):
        for client in control.clients(directory=directory):
            if client.pid == pid:
                control.change(client.id, parked=parked, directory=directory, timeout_s=5)


def histories(count: int, seed: int, environment: dict[str, str], report: Callable[[str], None]) -> dict[str, int]:
    """Runs so many, and says how many of what there were."""
    environment = {
        **environment,
        "CUDASCHED_SIM_MEMORY_MB": "250",
        "CUDASCHED_SIM_SCALE": "1",
        "CUDASCHED_STALE_HEARTBEAT_MS": "60000",
        "CUDASCHED_GIVE_BACK_MS": "50000",
    }
    pageable = {"CUDASCHED_PAGEABLE": "on", "CUDASCHED_PARK": "1GiB", "CUDASCHED_MEMORY_TURN_MS": "100"}
    chance, said = random.Random(seed), queue.Queue[Any]()
    seeds = iter(range(seed, sys.maxsize, 1_000_000))

    def player() -> Program:
        return Program("best_effort", "play", next(seeds), environment | pageable, said)

    players = [player() for _ in range(3)]
    server = Program("latency", "ask", seed, environment, said)
    done = {"histories": 0, "failed": 0, "kills": 0, "requests": 0, "refused": 0}
    parked: Program | None = None
    try:
        while done["histories"] < count:
            try:
                program, number, wrong = said.get(timeout=PATIENCE_S)
            except queue.Empty:
                done["failed"] += 1
                report(f"nothing was said for {PATIENCE_S:.0f} s")
                break
            if program is server:
                done["requests"] += number is not None
                done["refused"] += wrong == "refused"
                if number is None:
                    report("the server ended")
                    done["failed"] += 1
                    break
                continue
            if program not in players:
                continue  # of one that was killed
            if number is None:
                wrong = wrong or f"a program ended with {program.process.wait()}"
            done["histories"] += 1
            if wrong:
                done["failed"] += 1
                report(f"history {number}: {wrong}")
                program.kill()
                players[players.index(program)] = player()
            elif done["histories"] % KILL_EACH == 0:
                done["kills"] += 1
                victim = chance.randrange(len(players))
                players[victim].kill()
                players[victim] = player()
            elif chance.random() < 0.02:
                if parked in players:
                    park(parked.process.pid, False, environment["CUDASCHED_RUN_DIR"])
                parked = chance.choice([None, *players])
                if parked:
                    park(parked.process.pid, True, environment["CUDASCHED_RUN_DIR"])
    finally:
        for each in (*players, server):
            each.kill()
    return done


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.moved_memory", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="histories")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a results file, into which the figure goes")
    options = parser.parse_args()

    from tests.soak.mutations import figure, meta_here, on_a_simulated_gpu

    with tempfile.TemporaryDirectory(prefix="cudasched-moved-") as scratch:
        environment = on_a_simulated_gpu(Path(scratch))
        done = histories(options.count, options.seed, environment, lambda text: print(text, file=sys.stderr))
    print(json.dumps(done))
    failed = done["failed"] + done["refused"]
    if options.out:
        from benchmarks.results.schema import merge

        merge(options.out, meta_here(), [figure("histories_failed", [failed], 0, done["histories"])])
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["play"], ["ask"]):
        {"play": play, "ask": ask}[sys.argv[1]](int(sys.argv[2]))
    sys.exit(main())
