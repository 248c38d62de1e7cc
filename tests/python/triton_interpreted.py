"""Runs the Triton twins on the CPU, by Triton's interpreter; a process of its own, as Triton asks at its import.

What times a configuration needs a GPU, so it only calls it here. The interpreter takes the bits of bfloat16 for numbers
in products of matrices, so attention is run in float16 alone.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from cudasched.kernels import _triton_kernels as kernels
from cudasched.kernels import triton_twins

CALLS: list[int] = []


def once(call: Any, *_: Any, **__: Any) -> Any:
    CALLS.append(1)
    call()
    return float(len(CALLS))


def for_autotuner(call: Any, **_: Any) -> list[float]:
    return [once(call)] * 3


def with_one(kernel: Any, chosen: dict[str, Any]) -> None:
    """Leaves one configuration, so that a call runs it."""
    kernel.configs = [next(one for one in ALL[kernel] if one.all_kwargs().items() >= chosen.items())]
    kernel.cache.clear()


def attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    q, k, v = q.double(), k.double(), v.double()
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check_layer_norm(rows: int, cols: int, kind: Any, tolerance: float) -> None:
    x = (torch.randn(rows, cols) + 3).to(kind)
    weight, bias = torch.randn(cols).to(kind), torch.randn(cols).to(kind)
    wanted = torch.nn.functional.layer_norm(x.double(), (cols,), weight.double(), bias.double())
    found = triton_twins.layer_norm(x, weight, bias).double()
    assert ((found - wanted).abs() / (wanted.abs() + 1)).max() < tolerance, (rows, cols, kind)


def check_attention(sizes: tuple[int, int, int, int, int, int], causal: bool, scale: float | None = None) -> None:
    batches, heads, heads_k, queries, keys, head = sizes
    torch.manual_seed(1)
    q = torch.randn(batches, queries, heads, head).half().transpose(1, 2)
    k, v = (torch.randn(batches, keys, heads_k, head).half().transpose(1, 2) for _ in range(2))
    out, lse = triton_twins.flash_attention(q, k, v, causal=causal, scale=scale)
    right, right_lse = attention(q, k, v, causal, head**-0.5 if scale is None else scale)
    assert (out.double() - right).abs().max() < 3e-3, (sizes, causal)
    assert (lse.double() - right_lse).abs().max() < 1e-4, (sizes, causal)


if __name__ == "__main__":
    triton.testing.do_bench = once
    ALL = {kernel: list(kernel.configs) for kernel in (kernels.layer_norm, kernels.flash_attention)}
    for kernel in ALL:
        kernel.do_bench = for_autotuner

    # The whole way: the search times some, Triton the best three of them, and the result is right.
    check_layer_norm(5, 300, torch.float32, 1e-5)
    assert len(CALLS) == 30 + 3, len(CALLS)
    check_layer_norm(7, 300, torch.float32, 1e-5)
    assert len(CALLS) == 30 + 3, "it tuned again for the same key"
    tuned = len(CALLS)

    # Then single configurations, for rows that are read once and rows that are walked over.
    for rows, chunk, cols, kind, tolerance in (
        (1, 1024, 300, torch.bfloat16, 2e-2),
        (4, 256, 1000, torch.float32, 1e-5),
        (8, 256, 257, torch.float16, 2e-3),
    ):
        with_one(kernels.layer_norm, {"ROWS": rows, "CHUNK": chunk})
        check_layer_norm(9, cols, kind, tolerance)
    generator = random.Random(1)
    for sizes, causal, scale in (
        ((2, 2, 1, 50, 77, 64), False, None),
        ((1, 2, 2, 77, 77, 128), True, None),
        ((1, 4, 2, 33, 130, 64), True, 0.2),
        ((1, 1, 1, 100, 20, 64), True, None),
        ((1, 1, 1, 64, 128, 128), False, None),
    ):
        for _ in range(2):
            with_one(kernels.flash_attention, generator.choice(ALL[kernels.flash_attention]).all_kwargs())
            check_attention(sizes, causal, scale)
    assert len(CALLS) == tuned
    print("right")
    sys.stdout.flush()
