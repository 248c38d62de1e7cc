"""What each rule is shown on: a kernel that it fires for, and the same work as the rule would have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cu")
#: Multiprocessors that grids are made for where no GPU says otherwise: an H200's.
USUAL_SMS = 132


@dataclass(frozen=True)
class Version:
    """How the kernel is compiled and launched.

    Attributes:
        blocks: Of the grid.
        threads: Of a block.
        count: Values.
        rounds: Steps of each.
        shared_bytes: Dynamic shared memory of a block.
        macros: Of the source.
        launches: One after another.
    """

    blocks: int
    threads: int
    count: int
    rounds: int
    shared_bytes: int = 0
    macros: tuple[tuple[str, str], ...] = ()
    launches: int = 20


@dataclass(frozen=True)
class Case:
    """A rule, the kernel that it is shown on, before and after; both do the same work in all."""

    rule: str
    kernel: str
    before: Version
    after: Version


def cases(sms: int = USUAL_SMS) -> tuple[Case, ...]:
    """Of a GPU with so many multiprocessors."""
    kib = 1024
    values, chased, streamed = 6_000_000, 32_000_000, 256_000_000
    threads = sms * 2048 * 4  # four times what the GPU holds
    tile = (("HELD", "96"), ("MOST_THREADS", "128"))
    half = (("HELD", "24"), ("MOST_THREADS", "128"))
    spilled = (("HELD", "64"), ("MOST_THREADS", "256"), ("LEAST_BLOCKS", "8"))
    unspilled = (("HELD", "64"), ("MOST_THREADS", "256"), ("LEAST_BLOCKS", "2"))
    staged = 16 * 1024 * sms
    return (
        Case(
            "partial_warp",
            "advised_compute",
            Version(-(-values // 33), 33, values, 2_000),
            Version(-(-values // 64), 64, values, 2_000),
        ),
        Case(
            "block_size",
            "advised_stream",
            Version(threads // 32, 32, streamed, 200),
            Version(threads // 256, 256, streamed, 200),
        ),
        Case(
            "registers",
            "advised_chase",
            Version(threads // 128, 128, chased, 1, macros=tile),
            Version(threads // 128, 128, chased, 4, macros=half),
        ),
        Case(
            "shared_memory",
            "advised_stream",
            Version(threads // 256, 256, streamed, 200, shared_bytes=100 * kib),
            Version(threads // 256, 256, streamed, 200, shared_bytes=24 * kib),
        ),
        Case(
            "small_grid",
            "advised_share",
            Version(sms // 8, 256, values, 64),
            Version(4 * sms, 256, values, 64),
        ),
        Case(
            "tail",
            "advised_share",
            Version(sms + sms // 7, 1024, staged, 2_000, shared_bytes=120 * kib),
            Version(sms, 1024, staged, 2_000, shared_bytes=120 * kib),
        ),
        Case(
            "local_memory",
            "advised_spill",
            Version(16 * sms, 256, values, 200, macros=spilled),
            Version(16 * sms, 256, values, 200, macros=unspilled),
        ),
        Case(
            "tiny_launches",
            "advised_compute",
            Version(64, 256, 64 * 256, 8, launches=4_000),
            Version(64, 256, 64 * 256, 8 * 100, launches=40),
        ),
        Case(
            # Two runs of the second version are below the number that the rule asks for.
            "launch_bound",
            "advised_compute",
            Version(sms, 256, sms * 256, 8, launches=4_000),
            Version(sms, 256, sms * 256, 8 * 200, launches=20),
        ),
    )
