"""Models of any size for `training.workloads` and `training.programs`: vision, language, recommendation, diffusion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from cudasched.demo.workloads import Block, resnet50
from torch import Tensor, nn

if TYPE_CHECKING:
    from training.operations import Draw

PLAIN = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Basic(nn.Module):
    """ResNet-18's block of two convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, width, h / stride, w / stride)."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(width: int = 64, depths: tuple[int, ...] = (2, 2, 2, 2), classes: int = 1000) -> nn.Module:
    """ResNet-18 for (batch, 3, h, w), of any width and depth."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Basic(inputs, width << stage, 2 if stage and not block else 1))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Transformer(nn.Module):
    """Tokens in, logits or a pooled output out; with a dropout behind each layer."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal, norm_first=causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary if causal else 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens) to logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = self.dropout(block(x))
        x = self.norm(x)
        return self.head(x if self.head.out_features > 2 else x[:, 0])


class Vit(nn.Module):
    """A vision transformer with square patches and a class token; any image size up to `side`."""

    def __init__(self, layers: int, width: int, heads: int, patch: int, side: int, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, h, w) to logits."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Recommender(nn.Module):
    """As DLRM: bags of embeddings, dense features through an MLP, pairwise products, and an MLP on top."""

    def __init__(self, tables: int, rows: int, width: int, dense: int = 13, top: int = 512) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, top), nn.ReLU(), nn.Linear(top, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, top), nn.ReLU(), nn.Linear(top, top // 2), nn.ReLU())
        self.out = nn.Linear(top // 2, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Dense (batch, dense), indices (tables, n), offsets (batch,) to a logit each."""
        low = self.bottom(dense)
        rows = [low] + [bag(index, offsets).to(low.dtype) for bag, index in zip(self.bags, indices, strict=True)]
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.out(self.top(torch.cat([low, products], 1)))[:, 0]


class Residual(nn.Module):
    """A UNet's block: group norm, SiLU, convolution, twice, with a time embedding between."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.time = nn.Linear(time, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(batch, inputs, h, w) and (batch, time) to (batch, outputs, h, w)."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class Unet(nn.Module):
    """A small diffusion model: three resolutions, attention at the lowest."""

    def __init__(self, width: int, channels: int = 4) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.width, widths = width, (width, 2 * width, 4 * width)
        self.first = nn.Conv2d(channels, width, 3, 1, 1)
        ins = (width, *widths[:-1])
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in zip(ins, widths, strict=True))
        self.middle1, self.middle2 = Residual(widths[-1], widths[-1], time), Residual(widths[-1], widths[-1], time)
        self.attention = Block(widths[-1], 4, causal=False, norm_first=True)
        self.up = nn.ModuleList(Residual(2 * b, a, time) for a, b in zip(reversed(ins), reversed(widths), strict=True))
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, channels, 3, 1, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Noisy (batch, channels, h, w) and steps (batch,) to the noise."""
        angles = step[:, None].float() * torch.exp(-torch.arange(self.width // 2, device=x.device) / self.width)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(self.time[0].weight.dtype))
        x, kept = self.first(x), []
        for down in self.down:
            x = down(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle1(x, time)
        batch, width, h, w = x.shape
        x = self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(batch, width, h, w)
        x = self.middle2(x, time)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, kept.pop()], 1), time)
        return self.last(F.silu(self.norm(x)))


def draw_sizes(name: str, draw: Draw) -> dict[str, int]:
    """Sizes of a model and its batch, such that a step takes some ms."""
    if name in ("bert", "gpt"):
        heads, head = draw.size(1, 16), draw.choice((32, 64, 64, 128)) if not draw.largest else 8
        return {"b": draw.size(1, 16), "t": draw.size(8, 768), "l": draw.size(1, 3), "h": heads, "w": heads * head}
    if name == "resnet":
        side, kind = max(32, draw.size(32, 224, 32)), draw.choice((18, 50))
        return {"b": draw.size(1, 64), "s": side, "w": draw.size(16, 96, 16), "d": draw.size(1, 2), "k": kind}
    if name == "vit":
        heads, head = draw.size(1, 12), draw.choice((32, 64)) if not draw.largest else 8
        patch = draw.choice((8, 16, 32))
        side = patch * draw.choice((4, 7, 8, 12, 14))
        return {"b": draw.size(1, 32), "s": side, "p": patch, "l": draw.size(1, 3), "h": heads, "w": heads * head}
    if name == "recommender":
        return {
            "b": draw.size(8, 8192),
            "n": draw.size(2, 26),
            "r": draw.size(100, 200_000),
            "w": draw.size(8, 128, 8),
            "m": draw.size(1, 20),
        }
    if name == "unet":
        return {"b": draw.size(1, 16), "s": max(8, draw.size(8, 64, 8)), "w": max(16, draw.size(16, 128, 16))}
    return {"b": draw.size(1, 8192), "w": draw.size(16, 4096, 8), "l": draw.size(2, 6)}


def make(name: str, sizes: dict[str, int]) -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """The model, a batch for it, and the loss of what it makes of that batch; on the current device."""
    b = sizes["b"]
    if name in ("bert", "gpt"):
        vocabulary = 8192 if name == "gpt" else 30_522
        ids = torch.randint(vocabulary, (b, sizes["t"]))
        module = Transformer(sizes["l"], sizes["w"], sizes["h"], vocabulary, name == "gpt")
        targets = torch.randint(vocabulary, (b * sizes["t"],)) if name == "gpt" else torch.randint(2, (b,))
        return module, (ids,), lambda y: F.cross_entropy(y.flatten(0, -2), targets)
    if name in ("resnet", "vit"):
        images, classes = torch.randn(b, 3, sizes["s"], sizes["s"]), torch.randint(1000, (b,))
        if name == "vit":
            network: nn.Module = Vit(sizes["l"], sizes["w"], sizes["h"], sizes["p"], sizes["s"])
        elif sizes["k"] == 50:
            network = resnet50((sizes["d"],) * 4)
        else:
            network = resnet18(sizes["w"], (sizes["d"],) * 4)
        return network, (images,), lambda y: F.cross_entropy(y, classes)
    if name == "recommender":
        recommender = Recommender(sizes["n"], sizes["r"], sizes["w"])
        indices = torch.randint(sizes["r"], (sizes["n"], b * sizes["m"]))
        clicks = torch.rand(b)
        inputs = torch.randn(b, 13), indices, torch.arange(0, b * sizes["m"], sizes["m"])
        return recommender, inputs, lambda y: F.binary_cross_entropy_with_logits(y.float(), clicks)
    if name == "unet":
        noise = torch.randn(b, 4, sizes["s"], sizes["s"])
        return Unet(sizes["w"]), (noise, torch.randint(1000, (b,))), lambda y: F.mse_loss(y, noise.to(y.dtype))
    layers = [layer for _ in range(sizes["l"]) for layer in (nn.Linear(sizes["w"], sizes["w"]), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(b, sizes["w"]),), lambda y: y.float().square().mean()


def build(
    name: str, sizes: dict[str, int], dtype: str, train: bool, way: str, device: torch.device
) -> Callable[[], Any]:
    """What runs one step, or one forward pass."""
    with torch.device(device):
        module, batch, loss = make(name, sizes)
    if dtype in PLAIN:
        module = module.to(PLAIN[dtype])
        batch = tuple(tensor.to(PLAIN[dtype]) if tensor.is_floating_point() else tensor for tensor in batch)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if dtype == "amp" else contextlib.nullcontext()

    if not train:
        module.eval().requires_grad_(False)

        def forward() -> None:
            with torch.no_grad(), autocast():
                module(*batch)

        return forward
    optimizer = torch.optim.AdamW(module.train().parameters(), lr=1e-5, fused=way == "fused", foreach=way == "foreach")

    def step() -> None:
        with autocast():
            value = loss(module(*batch))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
