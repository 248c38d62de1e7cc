"""Histories of physical memory and allocations, many calls of which the driver refuses: ``refused_memory.py COUNT``.

A program with the hook and a memory limit of 1 GiB. Each history creates, maps, unmaps, releases, allocates and frees
at random: too much, twice, in part, somewhere else. The model holds to the statuses that the driver returned; after
each call cuMemGetInfo must say what the model holds. Prints how many histories were run, and how many differed.
"""

import ctypes
import random
import sys
from typing import Any

MIB = 1 << 20
SPACE = 4096 * MIB
UNIT = 32 * MIB
NOT_SUPPORTED = 801  # the simulated driver maps anywhere
Address, Size = ctypes.c_ulonglong, ctypes.c_size_t


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Memory:
    """The memory of a program by the statuses that the driver returned."""

    def __init__(self, driver: Any, chance: random.Random) -> None:
        self._driver, self._chance = driver, chance
        self._properties = _Properties(1, 0, 1, 0, None)
        self._space = Address(1 << 45)
        status = driver.cuMemAddressReserve(ctypes.byref(self._space), Size(SPACE), Size(0), Address(0), Address(0))
        assert status in (0, NOT_SUPPORTED), status
        self._reserved = status == 0
        self._bytes: dict[int, int] = {}  # of each handle that is held
        self._references: dict[int, list[str | int]] = {}  # of each handle: the creation's, mappings' offsets
        self._mapped: dict[int, int] = {}  # offset: handle
        self._allocated: dict[int, int] = {}
        self._gone: list[int] = []

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(self._bytes.values()) + sum(self._allocated.values())

    def _drop(self, handle: int, reference: str | int) -> None:
        self._references[handle].remove(reference)
        if not self._references[handle]:
            del self._references[handle], self._bytes[handle]
            self._gone.append(handle)

    def create(self) -> None:
        """Physical memory, at times more than there may be."""
        handle, size = Address(), self._chance.choice((1, 2, 4, 64)) * UNIT
        if self._driver.cuMemCreate(ctypes.byref(handle), Size(size), ctypes.byref(self._properties), Address(0)) == 0:
            self._bytes[handle.value], self._references[handle.value] = size, ["own"]

    def map(self) -> None:
        """It, at an address that may be another's."""
        if not self._bytes:
            return
        handle = self._chance.choice(list(self._bytes))
        offset = self._chance.randrange(SPACE // (4 * UNIT)) * 4 * UNIT
        at = Address(self._space.value + offset)
        if self._driver.cuMemMap(at, Size(self._bytes[handle]), Size(0), Address(handle), Address(0)) == 0:
            self._references[handle].append(offset)
            self._mapped[offset] = handle

    def unmap(self) -> None:
        """A mapping, a part of one, or what is none."""
        offset = self._chance.choice([*self._mapped, self._chance.randrange(SPACE // UNIT) * UNIT])
        size = self._bytes[self._mapped[offset]] if offset in self._mapped else UNIT
        if self._chance.random() < 0.3:
            size = max(UNIT, size // 2)
        if self._driver.cuMemUnmap(Address(self._space.value + offset), Size(size)) == 0:
            self._drop(self._mapped.pop(offset), offset)

    def release(self) -> None:
        """A reference, or one that was released already."""
        handle = self._chance.choice([*self._bytes, *self._gone[-3:], 12345])
        if self._driver.cuMemRelease(Address(handle)) == 0:
            self._drop(handle, "own")

    def allocate(self) -> None:
        """Plain memory, at times more than there may be."""
        at, size = Address(), self._chance.choice((1, 2, 64)) * UNIT
        if self._driver.cuMemAlloc_v2(ctypes.byref(at), Size(size)) == 0:
            self._allocated[at.value] = size

    def free(self) -> None:
        """It, or a place in it, or what is none."""
        at = self._chance.choice([*self._allocated, 4096])
        if self._chance.random() < 0.2:
            at += 512
        if self._driver.cuMemFree_v2(Address(at)) == 0:
            self._allocated.pop(at)

    def end(self) -> None:
        """Gives all of it back."""
        for offset, handle in self._mapped.items():
            status = self._driver.cuMemUnmap(Address(self._space.value + offset), Size(self._bytes[handle]))
            assert status == 0, status
        for handle, references in self._references.items():
            assert "own" not in references or self._driver.cuMemRelease(Address(handle)) == 0
        for at in self._allocated:
            assert self._driver.cuMemFree_v2(Address(at)) == 0
        assert not self._reserved or self._driver.cuMemAddressFree(self._space, Size(SPACE)) == 0


def main() -> None:
    """Entry point; see the module's text."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0

    def held() -> int:
        free, total = Size(), Size()
        assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return total.value - free.value

    differed, base = 0, held()
    for seed in range(int(sys.argv[1])):
        chance = random.Random(seed)
        memory = Memory(driver, chance)
        calls = [memory.create, memory.map, memory.map, memory.unmap, memory.release, memory.allocate, memory.free]
        for call in chance.choices(calls, k=30):
            call()
            if held() - base != memory.held:
                print(f"{seed}: {call.__name__}: {held() - base} held, {memory.held} are", file=sys.stderr)
                differed += 1
                break
        memory.end()
        if held() != base:
            print(f"{seed}: {held() - base} left", file=sys.stderr)
            differed += 1
    print(sys.argv[1], differed)


main()
