"""Four models on one GPU, the same for both servers: a batch is one CUDA graph of its size.

Without a GPU, in rehearsals, a batch takes a millisecond and 0.2 ms a request.
"""

from __future__ import annotations

import time

import torch
from cudasched.demo.workloads import Encoder, resnet50
from cudasched.inference.torch import Model
from torch import Tensor, nn

SIZES = (1, 2, 4, 8, 16)
MODELS: dict[str, tuple[float, Tensor]] = {
    "bert": (0.35, torch.zeros(128, dtype=torch.int64)),
    "resnet50": (0.3, torch.zeros(3, 224, 224, dtype=torch.uint8)),
    "detector": (0.1, torch.zeros(3, 448, 448, dtype=torch.uint8)),
    "recommender": (0.25, torch.zeros(8, 4, dtype=torch.int64)),
}
"""The share of requests, and an input."""
KINDS = {torch.int64: "INT64", torch.uint8: "UINT8"}
"""The protocol's names."""


class _Images(nn.Module):
    """Images of bytes to class scores, or to the 100 best of each place's scores."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        layers = list(resnet50())
        self.network = nn.Sequential(*layers[:-3], nn.Conv2d(2048, 91, 1), nn.Flatten()) if places else resnet50()
        self.places = places

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images.half() / 255)
        return scores.topk(100).values if self.places else scores


class _Clicks(nn.Module):
    """Identifiers, four of each table, to a probability."""

    def __init__(self, tables: int = 8, rows: int = 500_000, width: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 1024), nn.ReLU(), nn.Linear(1024, 1), nn.Sigmoid())

    def forward(self, ids: Tensor) -> Tensor:
        found = [embedding(ids[:, table]) for table, embedding in enumerate(self.embeddings)]
        scores: Tensor = self.top(torch.cat(found, dim=1))
        return scores


def _slow(batch: Tensor) -> Tensor:
    time.sleep(0.001 + 0.0002 * len(batch))
    return batch.flatten(1)[:, :1].float()


def _module(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return {"bert": lambda: Encoder().half(), "recommender": _Clicks}.get(
            name, lambda: _Images(name == "detector").half()
        )()


def make(name: str) -> Model:
    """The model, as a batcher runs it."""
    _, example = MODELS[name]
    if not torch.cuda.is_available():
        return Model(_slow, example, sizes=SIZES)
    return Model(_module(name, "cuda").eval(), example, sizes=SIZES, graphs=True)


def weight_bytes(name: str) -> int:
    """Of the model's parameters and buffers."""
    module = _module(name, "meta")
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
