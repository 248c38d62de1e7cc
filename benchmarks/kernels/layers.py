"""A BERT layer and a Llama layer, as PyTorch has them and with our kernels: as a whole, and kernel by kernel.

Shapes are those of BERT-large (hidden 1024, 16 heads of 64) and of Llama 3 8B (hidden 4096, 32 heads of 128 that share
8 of keys), in bfloat16. Matrices that our kernels take are stored with rows of outputs turned to columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels.parts import Scene, share_of_allowed

LAYERS = ("bert", "llama")
KIND = "bfloat16"
KERNELS = {
    "bert": ("qkv", "attention", "out", "layer_norm", "up", "down"),
    "llama": ("rms_norm", "qkv", "attention", "out", "gate_up", "down"),
}
"""What a layer is made of."""


@dataclass(frozen=True)
class Size:
    """Of a layer.

    Attributes:
        batches: Sequences at once.
        rows: Tokens of each.
        heads: Of queries.
        key_heads: Of keys and values.
        head: Numbers of a head.
        inner: Width of the second half.
    """

    batches: int
    rows: int
    heads: int
    key_heads: int
    head: int
    inner: int

    @property
    def hidden(self) -> int:
        """Numbers of a token."""
        return self.heads * self.head


SIZES = {"bert": Size(16, 512, 16, 16, 64, 4096), "llama": Size(1, 4096, 32, 8, 128, 14336)}
SMALL = {"bert": Size(2, 16, 2, 2, 64, 128), "llama": Size(1, 16, 4, 2, 64, 192)}


class PyTorch:
    """A layer's parts by PyTorch."""

    def __init__(self, scene: Scene) -> None:
        self._torch = scene.torch

    def product(self, x: Any, weight: tuple[Any, Any]) -> Any:
        """Times a matrix, which is there both ways round."""
        return self._torch.nn.functional.linear(x, weight[0])

    def attention(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """Of heads."""
        grouped = q.shape[1] != k.shape[1]
        return self._torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any:
        """Over the last dimension."""
        return self._torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """Over the last dimension."""
        return self._torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


class Ours:
    """The same by our kernels."""

    def __init__(self, scene: Scene) -> None:
        self._kernels = scene.kernels

    def product(self, x: Any, weight: tuple[Any, Any]) -> Any:
        """Times a matrix, which is there both ways round."""
        return self._kernels.matmul(x, weight[1])

    def attention(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """Of heads."""
        return self._kernels.attention(q, k, v, causal=causal)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any:
        """Over the last dimension."""
        return self._kernels.layer_norm(x, weight, bias)

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """Over the last dimension."""
        return self._kernels.rms_norm(x, weight)


@dataclass(frozen=True)
class Layer:
    """A layer with its weights.

    Attributes:
        run: The whole, given an implementation of its parts and the input.
        kernels: Each kernel of it alone, by name, given an implementation.
        x: The input.
    """

    run: Callable[[Any, Any], Any]
    kernels: dict[str, Callable[[Any], Any]]
    x: Any


def _heads(x: Any, count: int, size: Size) -> Any:
    return x.view(size.batches, size.rows, count, size.head).transpose(1, 2)


def _joined(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def build(name: str, scene: Scene) -> Layer:
    """One of `LAYERS`."""
    return {"bert": _bert, "llama": _llama}[name](scene, (SMALL if scene.small else SIZES)[name])


def _weights(scene: Scene, **shapes: tuple[int, int]) -> dict[str, tuple[Any, Any]]:
    """Matrices of (outputs, inputs), and the same turned."""
    made = {}
    for place, (name, (outputs, inputs)) in enumerate(shapes.items()):
        matrix = scene.normal(outputs, inputs, kind=KIND, seed=10 + place) * inputs**-0.5
        made[name] = (matrix, matrix.t().contiguous())
    return made


def _bert(scene: Scene, size: Size) -> Layer:
    torch, hidden = scene.torch, size.hidden
    x = scene.normal(size.batches, size.rows, hidden, kind=KIND)
    weights = _weights(
        scene,
        qkv=(3 * hidden, hidden),
        out=(hidden, hidden),
        up=(size.inner, hidden),
        down=(hidden, size.inner),
    )
    norms = [scene.normal(hidden, kind=KIND, seed=seed) for seed in range(4)]
    gelu = torch.nn.functional.gelu

    def attended(by: Any, qkv: Any) -> Any:
        q, k, v = (_heads(one, size.heads, size) for one in qkv.split(hidden, -1))
        return _joined(by.attention(q, k, v, False))

    def run(by: Any, x: Any) -> Any:
        attention = by.product(attended(by, by.product(x, weights["qkv"])), weights["out"])
        x = by.layer_norm(x + attention, norms[0], norms[1])
        inner = by.product(gelu(by.product(x, weights["up"])), weights["down"])
        return by.layer_norm(x + inner, norms[2], norms[3])

    qkv, wide = torch.matmul(x, weights["qkv"][1]), torch.matmul(x, weights["up"][1])
    kernels: dict[str, Callable[[Any], Any]] = {
        "qkv": lambda by: by.product(x, weights["qkv"]),
        "attention": lambda by: attended(by, qkv),
        "out": lambda by: by.product(x, weights["out"]),
        "layer_norm": lambda by: by.layer_norm(x, norms[0], norms[1]),
        "up": lambda by: by.product(x, weights["up"]),
        "down": lambda by: by.product(wide, weights["down"]),
    }
    return Layer(run, kernels, x)


def _llama(scene: Scene, size: Size) -> Layer:
    torch, hidden = scene.torch, size.hidden
    x = scene.normal(size.batches, size.rows, hidden, kind=KIND)
    keys = size.key_heads * size.head
    weights = _weights(
        scene,
        qkv=(hidden + 2 * keys, hidden),
        out=(hidden, hidden),
        gate_up=(2 * size.inner, hidden),
        down=(hidden, size.inner),
    )
    norms = [scene.normal(hidden, kind=KIND, seed=seed) for seed in range(2)]
    half = size.head // 2
    turns = torch.outer(
        torch.arange(size.rows, device=scene.device), 10000.0 ** (-torch.arange(half, device=scene.device) / half)
    )
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)

    def rotated(x: Any) -> Any:
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def split(qkv: Any) -> tuple[Any, Any, Any]:
        q, k, v = qkv.split([hidden, keys, keys], -1)
        return _heads(q, size.heads, size), _heads(k, size.key_heads, size), _heads(v, size.key_heads, size)

    def run(by: Any, x: Any) -> Any:
        q, k, v = split(by.product(by.rms_norm(x, norms[0]), weights["qkv"]))
        attention = _joined(by.attention(rotated(q), rotated(k), v, True))
        x = x + by.product(attention, weights["out"])
        gate, up = by.product(by.rms_norm(x, norms[1]), weights["gate_up"]).chunk(2, -1)
        return x + by.product(torch.nn.functional.silu(gate) * up, weights["down"])

    q, k, v = split(torch.matmul(x, weights["qkv"][1]))
    wide = scene.normal(size.batches, size.rows, size.inner, kind=KIND, seed=5)
    kernels: dict[str, Callable[[Any], Any]] = {
        "rms_norm": lambda by: by.rms_norm(x, norms[0]),
        "qkv": lambda by: by.product(x, weights["qkv"]),
        "attention": lambda by: by.attention(q, k, v, True),
        "out": lambda by: by.product(x, weights["out"]),
        "gate_up": lambda by: by.product(x, weights["gate_up"]),
        "down": lambda by: by.product(wide, weights["down"]),
    }
    return Layer(run, kernels, x)


#: What a layer's results may differ from PyTorch's, which are no nearer to what is right: some roundings of bfloat16.
RELATIVE, ABSOLUTE = 5e-2, 5e-2


def error(scene: Scene, made: Any, expected: Any) -> float:
    """How far a result is from PyTorch's, as a share of what is allowed."""
    return share_of_allowed(scene.torch, made, expected.double(), RELATIVE, ABSOLUTE)


def tuned_shapes(name: str) -> list[tuple[str, str, dict[str, int]]]:
    """The kernels of a layer with their types and shapes: what is tuned before it is measured."""
    size = SIZES[name]
    rows, hidden = size.batches * size.rows, size.hidden
    attention = {"batches": size.batches, "heads": size.heads, "queries": size.rows, "keys": size.rows}
    attention |= {"head": size.head, "group": size.heads // size.key_heads}
    qkv = hidden + 2 * size.key_heads * size.head
    up = size.inner * (2 if name == "llama" else 1)
    products = [(qkv, hidden), (hidden, hidden), (up, hidden), (hidden, size.inner)]
    made: list[tuple[str, str, dict[str, int]]] = [
        ("gemm_bf16", KIND, {"m": rows, "n": outputs, "k": inputs}) for outputs, inputs in products
    ]
    made.append(("flash_attention", KIND, {**attention, **({"causal": 1} if name == "llama" else {})}))
    made.append(("rms_norm" if name == "llama" else "layer_norm", KIND, {"rows": rows, "cols": hidden}))
    return made
