"""The same work on parts of the GPU's multiprocessors: what a smaller GPU of the same kind would make of it.

For `training.record`; each part is a green context's stream (docs/partitions.md). What is trained on some counts is
tested on others. A launch's label says on how many it ran: `program:sm_counts|64|matmul ...`. Launches of the whole
GPU are among them, as what the others are compared with.
"""

# What type checkers see of torch depends on whether and which torch is installed.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it

from training.record import Parts

#: Of 132; the driver rounds to what the GPU can divide. The middle ones are for tests, the others for training.
COUNTS = (16, 48, 96, 132, 32, 64, 112)
REPEATS = 6


def works(scale: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What runs on each part: bound by memory, by arithmetic, and by neither."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.bfloat16

    def n(size: int) -> int:
        return max(8, int(size * scale) // 8 * 8)

    for m, k in ((4096, 4096), (1024, 4096), (257, 1024), (8192, 512)):
        a, b = torch.randn(n(m), n(k), device=device, dtype=half), torch.randn(n(k), n(m), device=device, dtype=half)
        yield f"matmul {n(m)}x{n(k)}", lambda a=a, b=b: a @ b
    for count in (30_000, 1_000_000, 20_000_000, 90_000_000):
        x = torch.randn(n(count), device=device)
        yield f"add {n(count)}", lambda x=x: x + 1.5
        yield f"sum {n(count)}", lambda x=x: x.sum()
    for rows, width in ((300, 1000), (8192, 768), (2048, 8192), (60_000, 256)):
        x = torch.randn(n(rows), n(width), device=device, dtype=half)
        weight = torch.ones(n(width), device=device, dtype=half)
        yield f"softmax {n(rows)}x{n(width)}", lambda x=x: x.softmax(-1)
        yield f"norm {n(rows)}x{n(width)}", lambda x=x, w=weight: F.layer_norm(x, w.shape, w)
        yield f"means {n(rows)}x{n(width)}", lambda x=x: x.mean(0)
        yield f"transpose {n(rows)}x{n(width)}", lambda x=x: x.t().contiguous()
    for batch, length in ((1, 512), (8, 1024), (4, 3000)):
        q = torch.randn(batch, 8, n(length), 64, device=device, dtype=half)
        yield f"attention {batch}x{n(length)}", lambda q=q: F.scaled_dot_product_attention(q, q, q)
    for batch, channels, side in ((16, 64, 56), (64, 128, 28), (4, 256, 14)):
        pixels = max(8, int(side * scale))
        image = torch.randn(batch, channels, pixels, pixels, device=device, dtype=half)
        kernel = torch.randn(channels, channels, 3, 3, device=device, dtype=half)
        yield f"convolution {batch}x{channels}x{side}", lambda i=image, k=kernel: F.conv2d(i, k, padding=1)


def on_part(count: int) -> AbstractContextManager[Any]:
    """Work of the block runs on so many multiprocessors.

    Raises:
        cudasched.errors.Error: There can be no such part here.
    """
    if not torch.cuda.is_available():
        return nullcontext()
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    if count >= whole:
        return nullcontext()
    from cudasched import _partition

    return torch.cuda.stream(torch.cuda.ExternalStream(_partition.stream((count + 0.5) / whole)))


def parts(tiny: bool) -> Parts:
    """Each count, and on it each work some times over; turn by turn, so that a short run has all counts."""
    each = list(works(0.02 if tiny else 1.0))

    def run(count: int, work: Callable[[], Any]) -> None:
        with on_part(count):
            for _ in range(1 if tiny else REPEATS):
                work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for turn in range(1 if tiny else 4):
        for count in COUNTS:
            for what, work in each:
                yield f"{count}|{what} {turn}", lambda count=count, work=work: run(count, work)
