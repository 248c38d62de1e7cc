"""Histories of allocations, as programs make them: lists of (identity, bytes), where 0 bytes are a free."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

MIB = 1 << 20
Trace = list[tuple[int, int]]


class Recorder:
    """A history in the making."""

    def __init__(self) -> None:
        self.trace: Trace = []
        self._last = 0

    def allocate(self, size: float) -> int:
        """The identity of a new block."""
        self._last += 1
        self.trace.append((self._last, max(1, int(size))))
        return self._last

    def free(self, identity: int) -> None:
        """Ends a block."""
        self.trace.append((identity, 0))


def training(steps: int) -> Trace:
    """Steps of a transformer, sequences of several lengths: activations go in the reverse order, beside temporaries."""
    chance, record, width, layers = random.Random(7), Recorder(), 2048, 24
    weights = [record.allocate(12 * width * width * size) for _ in range(layers) for size in (2, 4, 4, 4)]
    for _ in range(steps):
        tokens = 8 * chance.choice((512, 768, 1024, 1111, 2000))
        kept = []
        for _ in range(layers):
            kept.append([record.allocate(tokens * width * 2 * part) for part in (1, 3, 1, 4, 4, 1)])
            record.free(record.allocate(tokens * tokens / 8 * 2))
        for activations in reversed(kept):
            gradient = record.allocate(12 * width * width * 2)
            temporary = record.allocate(tokens * width * 8)
            for identity in reversed(activations):
                record.free(identity)
            record.free(temporary)
            record.free(gradient)
    for identity in weights:
        record.free(identity)
    return record.trace


def cache_growth(steps: int) -> Trace:
    """A server's sequences: each grows by pages of its cache until its end; the workspace grows with the batch."""
    chance, record = random.Random(8), Recorder()
    weights, pages = record.allocate(14_000 * MIB), 2.5 * MIB
    sequences: list[list[int]] = []
    for _ in range(steps * 40):
        if len(sequences) < 64 and chance.random() < 0.3:
            sequences.append([record.allocate(pages) for _ in range(chance.randint(1, 40))])
        workspace = record.allocate(MIB * (3 + 1.7 * len(sequences)))
        for sequence in sequences:
            if chance.random() < 0.25:
                sequence.append(record.allocate(pages))
        record.free(workspace)
        for sequence in [one for one in sequences if chance.random() < 0.005 * len(one) / 10]:
            sequences.remove(sequence)
            for identity in sequence:
                record.free(identity)
    for identity in [weights, *(one for sequence in sequences for one in sequence)]:
        record.free(identity)
    return record.trace


def alternating(steps: int, odd: bool = False) -> Trace:
    """Sizes that come in turns, of which every second block is freed before others come.

    Whole pages of 2 MiB, as PyTorch's allocator asks a `MemPool` for; with `odd` any sizes.
    """
    chance, record = random.Random(9), Recorder()
    live: list[int] = []
    for step in range(steps):
        size = (4 + 8 * (step % 9)) * MIB + (chance.randint(-MIB, MIB) if odd else 0)
        live += [record.allocate(size) for _ in range(6 * 70 * MIB // size)]
        for identity in live[::2]:
            record.free(identity)
        live = live[1::2]
    for identity in live:
        record.free(identity)
    return record.trace


TRACES: Mapping[str, Callable[[int], Trace]] = {
    "training": training,
    "cache_growth": cache_growth,
    "alternating": alternating,
    "odd": lambda steps: alternating(steps, odd=True),
}
