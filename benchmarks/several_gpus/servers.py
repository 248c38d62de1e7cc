"""A server of two ranks, one process a GPU, each with half of every layer: NCCL sums the halves.

Rank 0 is driven as benchmarks/breadth/server.py is, and run by path like it.
"""

# Types of torch depend on whether and which torch is installed.
# mypy: ignore-errors

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / each) for each in ("", "python/cudasched/demo", "benchmarks/breadth")]

from benchmarks.breadth import server  # noqa: E402
from benchmarks.breadth.programs import join_ranks, torch_device  # noqa: E402
from benchmarks.several_gpus.programs import Ranks, follow  # noqa: E402


def tensor_parallel(name: str) -> Any:
    """Requests of a transformer of which this rank has its heads and its columns of the feed-forward networks.

    Args:
        name: A request is replayed as a graph where it ends in `_graph`, else run eagerly. Without a GPU it is small.
    """
    import torch
    from torch import nn
    from torch.nn import functional
    from workloads import Requests

    device, ranks = torch_device(), int(os.environ["WORLD_SIZE"])
    join_ranks(device)
    layers, width, heads, tokens = (16, 2048, 16, 256) if device == "cuda" else (2, 64, 4, 8)

    def summed(x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = width // ranks
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * own, bias=False), nn.Linear(own, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * own, bias=False), nn.Linear(4 * own, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, heads // ranks, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v)
            x = x + summed(self.out(y.transpose(1, 2).flatten(2)))
            return x + summed(self.down(functional.gelu(self.up(self.norm2(x)))))

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = nn.Sequential(*(Part() for _ in range(layers))).to(dtype)
        return Requests(model, torch.randn(1, tokens, width, dtype=dtype), name.endswith("_graph"), own_stream=False)


class Led:
    """The requests of rank 0, each of which is one of every rank."""

    def __init__(self, ranks: Ranks, own: Any) -> None:
        self._ranks, self._own = ranks, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def step(self) -> None:
        """Submits one request."""
        self._ranks.step()
        self._own.step()

    def timed_step(self) -> Callable[[], float]:
        """The same between two events."""
        self._ranks.step()
        return self._own.timed_step()


def steps(name: str) -> Iterator[None]:
    """The steps of another rank: it builds, then serves a request a step."""
    import torch  # noqa: F401  before rank 0 builds

    yield
    own = tensor_parallel(name)
    gc.disable()  # as rank 0 does while it serves
    while True:
        yield
        own.step()
        own.synchronize()


if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        follow(steps(sys.argv[1]))
    ranks = Ranks()

    def built(name: str) -> Led:
        """Rank 0's requests, once all ranks build theirs."""
        ranks.step()
        return Led(ranks, tensor_parallel(name))

    sys.exit(server.main(built))
