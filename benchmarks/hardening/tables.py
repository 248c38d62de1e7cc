"""How many of a number of damaged client tables harm the three programs that use them.

A server and two trainers share a simulated device. Their table is overwritten, again and again, each time in another
way; after each, all that the table says must be right again within 100 ms, and each program must go on. The table is
read as bytes, so that looking at it repairs nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cudasched import hook
from cudasched.demo.harness import CUDASCHED, Child

__all__ = ["measure"]

CLASSES = ("latency", "best_effort", "best_effort")
GOAL_S = 0.1
"""So soon after the damage the table is right again."""

# csrc/arbiter/table.hpp, layout version 8
HEADER_BYTES = 80
WORDS = 128
ACTIVE, LATENCY, BEST_EFFORT, WAITING, TURN = 128, 192, 200, 256, 320
SLOTS, SLOT_BYTES, SLOT_COUNT = 448, 448, 64
TURN_SLOT_SHIFT = 56
CLASS_NUMBERS = {"normal": 0, "latency": 1, "best_effort": 2}


class _Client(Child):
    """One program, and how often it came to the end of what it does."""

    def __init__(self, client_class: str, counter: Path, environment: dict[str, str]) -> None:
        self._counter = counter
        counter.write_bytes(bytes(8))
        program = [sys.executable, str(Path(__file__).with_name("client.py")), client_class, str(counter)]
        command = [*CUDASCHED, "run", "--class", client_class.replace("_", "-"), "--", *program]
        super().__init__(client_class, command, environment)

    @property
    def count(self) -> int:
        """How often."""
        return int.from_bytes(self._counter.read_bytes(), sys.byteorder)


@contextmanager
def _clients() -> Iterator[tuple[list[_Client], Path]]:
    """A server, two trainers and their run directory."""
    directory = Path(tempfile.mkdtemp(prefix="cudasched-hardening-"))
    clients: list[_Client] = []
    try:
        (directory / "device").mkdir(mode=0o700)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDASCHED_")}
        environment = {
            **inherited,
            "CUDASCHED_DRIVER": str(hook.locate().simulated_driver),
            "CUDASCHED_SIM_DIR": str(directory / "device"),
            "CUDASCHED_SIM_SCALE": "4",
            "CUDASCHED_RUN_DIR": str(directory / "run"),
            "CUDASCHED_CACHE_DIR": "off",
        }
        clients += [_Client(name, directory / f"counter-{place}", environment) for place, name in enumerate(CLASSES)]
        yield clients, directory / "run"
    finally:
        for client in clients:
            client.stop(grace_s=0.0)
        shutil.rmtree(directory)


def _word(table: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", table, offset)[0])


def _slots_of(table: bytes) -> dict[int, tuple[int, int, int]]:
    """Of each slot with a client: occupied, class and pid."""
    found = {}
    for slot in range(SLOT_COUNT):
        occupied, client_class, _, pid = struct.unpack_from("<IIii", table, SLOTS + slot * SLOT_BYTES)
        if occupied != 0:
            found[slot] = (occupied, client_class, pid)
    return found


def _why_wrong(table: bytes, sound: bytes) -> str:
    """What a table says that its clients did not; empty: nothing."""
    clients = _slots_of(sound)
    bits = {
        name: sum(1 << slot for slot, client in clients.items() if client[1] == number)
        for name, number in CLASS_NUMBERS.items()
    }
    if len(table) != len(sound):
        return "its size"
    if table[:HEADER_BYTES] != sound[:HEADER_BYTES]:
        return "its header"
    if _slots_of(table) != clients:
        return "who is there"
    words = {name: _word(table, offset) for name, offset in (("latency", LATENCY), ("best_effort", BEST_EFFORT))}
    for name, word in words.items():
        if word != bits[name]:
            return f"who is {name}"
    if _word(table, ACTIVE) & ~bits["latency"]:
        return "who is active"
    if _word(table, WAITING) & ~bits["best_effort"]:
        return "who waits"
    owner = (_word(table, TURN) >> TURN_SLOT_SHIFT) - 1
    return "" if owner == -1 or bits["best_effort"] >> owner & 1 else "whose turn it is"


def _damage(sound: bytes, chance: random.Random) -> list[tuple[int, bytes]]:
    """What to write where: all of it, a part of it, a few bytes, or what was in another place."""
    whole = len(sound)
    kind = chance.randrange(8)
    if kind == 0:
        return [(0, bytes([chance.choice((0, 0xFF))]) * whole)]
    if kind == 1:
        return [(0, chance.randbytes(whole))]
    if kind == 2:
        return [(WORDS, bytes([chance.choice((0, 0xFF))]) * (SLOTS - WORDS))]
    if kind == 3:
        return [(SLOTS, bytes([chance.choice((0, 0xFF))]) * (whole - SLOTS))]
    if kind == 4:  # a word that looks sound: the bits of clients that are there
        return [(chance.choice((ACTIVE, LATENCY, BEST_EFFORT, WAITING)), struct.pack("<Q", chance.randrange(16)))]
    if kind == 5:  # what one client says, as another one's
        source = SLOTS + chance.randrange(len(CLASSES)) * SLOT_BYTES
        target = SLOTS + chance.randrange(SLOT_COUNT) * SLOT_BYTES
        return [(target, sound[source : source + SLOT_BYTES])]
    if kind == 6:  # a time that looks sound
        offset = SLOTS + chance.randrange(len(CLASSES)) * SLOT_BYTES + 8 * chance.randrange(3, 29)
        near_ns = time.monotonic_ns() + chance.randrange(-(10**9), 10**10)
        return [(offset, struct.pack("<q", near_ns))]
    reach = chance.choice((SLOTS + len(CLASSES) * SLOT_BYTES, whole))
    return [(chance.randrange(reach), chance.randbytes(1)) for _ in range(chance.randrange(1, 65))]


def _until(happens: Any, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _all_went_on(clients: list[_Client], before: list[int]) -> bool:
    return all(client.count > count for client, count in zip(clients, before, strict=True))


def measure(
    *, count: int = 5000, seed: int = 19, patience_s: float = 30.0, goal_s: float | None = GOAL_S
) -> tuple[int, list[str]]:
    """Damages the table of three programs so often.

    Args:
        count: How often.
        seed: Decides what is written where.
        patience_s: A program that does not go on for so long hangs.
        goal_s: Within that time of the damage the table is to be right; None: within ``patience_s`` (a busy machine).

    Returns:
        How many harmed a program, and in which ways.

    Raises:
        HarnessError: The programs did not come up.
    """
    chance = random.Random(seed)
    failed: dict[str, int] = {}
    done = 0
    with _clients() as (clients, run):
        if not _until(lambda: all(client.count > 0 for client in clients), patience_s):
            for client in clients:
                if client.count == 0:
                    client.answer(0.0)  # an error with its stderr
        (path,) = run.glob("*.arbiter")
        sound = path.read_bytes()
        with path.open("r+b", buffering=0) as table:
            for done in range(1, count + 1):
                before = [client.count for client in clients]
                began = time.monotonic()
                for offset, data in _damage(sound, chance):
                    os.pwrite(table.fileno(), data[: len(sound) - offset], offset)
                whole = _until(lambda: not _why_wrong(path.read_bytes(), sound), patience_s)
                took_s = time.monotonic() - began
                on = whole and _until(partial(_all_went_on, clients, before), patience_s)
                if not whole:
                    why = "the table says wrong " + _why_wrong(path.read_bytes(), sound)
                elif not on:
                    why = "a program hangs"
                elif goal_s is not None and took_s > goal_s:
                    why = f"the table was wrong for over {1000 * goal_s:.0f} ms"
                else:
                    continue
                if not all(client.alive for client in clients):
                    why = "a program died"
                failed[why] = failed.get(why, 0) + 1
                if not (whole and on):
                    failed["not tried after that"] = count - done
                    break
    return sum(failed.values()), [f"{number} x {why}" for why, number in failed.items()]
