"""Servers of the breadth benchmark beside those of the demo: a vision transformer, a recommender that copies, others.

Each answers to the `Workload` protocol of cudasched/demo/client.py. Seeded random weights, plain torch but for
ONNX Runtime's, no downloads.
"""

# What type checkers see of torch depends on whether and which torch is installed.
# mypy: ignore-errors

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from workloads import SEED, Block, Decoder, Decoding, Encoder, Requests, default_device, latency_workload


class VisionTransformer(nn.Module):
    """ViT-B/16: patches of an image, 12 layers of 768, class scores."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, side: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, side, side) to scores (batch, 1000)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Recommender(nn.Module):
    """Sums of embeddings from several tables and dense features, then a small network."""

    def __init__(self, tables: int = 8, rows: int = 500_000, width: int = 64, dense: int = 13) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(
            nn.Linear(tables * width + dense, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Ids (batch, tables, bag) and features (batch, dense) to probabilities (batch, 1)."""
        found = [embedding(ids[:, table]) for table, embedding in enumerate(self.embeddings)]
        return torch.sigmoid(self.top(torch.cat([*found, dense], dim=1)))


class CopyingRequests(Requests):
    """A request whose inputs come from pinned host memory and whose outputs go back there; eager kernels between."""

    def __init__(self, model: Recommender, inputs: tuple[Tensor, ...], device: torch.device, own_stream: bool) -> None:
        super().__init__(model, torch.zeros(1, device=device), graph=False, own_stream=own_stream)
        pinned = device.type == "cuda"
        self.inputs = [one.pin_memory() if pinned else one for one in inputs]
        self.scores = torch.empty(len(inputs[0]), 1, pin_memory=pinned)

    def step(self) -> None:
        """Submits one request."""
        with torch.no_grad():
            inputs = [one.to(self.device, non_blocking=True) for one in self.inputs]
            self.scores.copy_(self.model(*inputs), non_blocking=True)


class ShortDecoding(Decoding):
    """A request of eight tokens, each handed to the host before the next begins."""

    TOKENS = 8


class OnnxRequests(Requests):
    """A request to ONNX Runtime, on a stream of its own; its input and its answer are on the host."""

    def __init__(self, model: nn.Module, ids: Tensor, device: torch.device) -> None:
        import onnxruntime

        super().__init__(model, torch.zeros(1, device=device), graph=False, own_stream=False)
        file = io.BytesIO()
        torch.onnx.export(self.model, (ids,), file, input_names=["ids"], output_names=["scores"], dynamo=False)
        provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        self.session = onnxruntime.InferenceSession(file.getvalue(), providers=[provider])
        if provider not in self.session.get_providers():
            raise RuntimeError(f"ONNX Runtime has no {provider}: it could not be loaded")
        self.ids = ids.numpy()

    def step(self) -> None:
        """One request, to its end."""
        self.session.run(None, {"ids": self.ids})


def server(name: str, tiny: bool = False) -> Requests:
    """Builds a server.

    Args:
        name: `vit_graph`, `recommender`, `decode_short` (a small GPT, eagerly), `bert_onnx` (onnxruntime, onnx), or
            a latency load of the demo.
        tiny: Shapes for a test.

    Raises:
        ValueError: No such server.
    """
    device = default_device()
    torch.manual_seed(SEED)
    if name == "vit_graph":
        half = torch.float16 if device.type == "cuda" else torch.float32
        layers, width, heads, side = (2, 64, 2, 32) if tiny else (12, 768, 12, 224)
        with torch.device(device):
            model = VisionTransformer(layers, width, heads, side).to(half)
            return Requests(model, torch.randn(1, 3, side, side, dtype=half), graph=True, own_stream=False)
    if name == "decode_short":
        half = torch.float16 if device.type == "cuda" else torch.float32
        sizes = (2, 32, 2, 64, 16) if tiny else (4, 512, 8, 50_257, 512)
        with torch.device(device):
            return ShortDecoding(Decoder(*sizes).to(half), torch.zeros(1, 1, dtype=torch.long), False, False)
    if name == "recommender":
        tables, rows, batch = (3, 100, 4) if tiny else (8, 500_000, 512)
        with torch.device(device):
            model = Recommender(tables, rows)
        inputs = torch.randint(rows, (batch, tables, 4)), torch.randn(batch, 13)
        return CopyingRequests(model, inputs, device, own_stream=False)
    if name == "bert_onnx":
        return OnnxRequests(Encoder(), torch.randint(30_522, (1, 16 if tiny else 128)), device)
    return latency_workload(name)
