"""What is timed for each figure: shapes, our kernel and others as calls, and whether ours is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Built:
    """One part, ready to be timed.

    Attributes:
        arms: Calls by name.
        error: How wrong our result is, as a share of what is allowed.
    """

    arms: Mapping[str, Callable[[], Any]]
    error: Callable[[], float]


@dataclass(frozen=True)
class Scene:
    """Where parts are built.

    Attributes:
        torch: PyTorch.
        kernels: `cudasched.kernels`.
        device: "cuda", or "cpu" in a rehearsal.
        small: Whether shapes are small: a rehearsal.
    """

    torch: Any
    kernels: Any
    device: str
    small: bool

    def normal(self, *shape: int, kind: str, seed: int = 0) -> Any:
        """Normal numbers."""
        generator = self.torch.Generator(self.device).manual_seed(seed)
        made = self.torch.randn(*shape, generator=generator, device=self.device)
        return made.to(getattr(self.torch, kind))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """By torch.compile; a rehearsal traces alone."""
        made: Callable[..., Any] = self.torch.compile(
            function, dynamic=False, **({"backend": "eager"} if self.small else {})
        )
        return made


@dataclass(frozen=True)
class Part:
    """One shape of a figure.

    Attributes:
        figure: Its name.
        name: Of the part.
        build: Makes it.
        kernel: Whose configuration it takes, and its type and shape: what is tuned.
    """

    figure: str
    name: str
    build: Callable[[Scene], Built]
    kernel: tuple[str, str, dict[str, int]] = field(default=("", "", {}))

    @property
    def key(self) -> str:
        """As it is stored."""
        return f"{self.figure}/{self.name}"


def share_of_allowed(torch: Any, made: Any, expected: Any, relative: float, absolute: float) -> float:
    """The largest error as a share of what is allowed, absolute + relative * |expected|; infinite where a NaN is."""
    error = (made.double() - expected).abs() / (absolute + relative * expected.abs())
    return float(torch.nan_to_num(error, nan=float("inf")).max())


#: Relative error that is allowed beside what sums need: half a unit of the type in the last place, and rounding twice.
ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


def _gemm(kind: str) -> Callable[[Scene], Built]:
    def build(scene: Scene) -> Built:
        torch, size = scene.torch, 64 if scene.small else 8192
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = scene.normal(size, size, kind=kind), scene.normal(size, size, kind=kind, seed=1)
        rows = slice(0, min(size, 256))

        def error() -> float:
            made = scene.kernels.matmul(a, b)
            expected = a[rows].double() @ b.double()
            return share_of_allowed(torch, made[rows], expected, ROUNDING[kind], 1e-6 * size)

        return Built({"ours": lambda: scene.kernels.matmul(a, b), "cublas": lambda: torch.mm(a, b)}, error)

    return build


def _rows(name: str, kind: str, mib: int) -> Callable[[Scene], Built]:
    def build(scene: Scene) -> Built:
        torch, kernels = scene.torch, scene.kernels
        rows, cols = _rows_shape(kind, mib, scene.small)
        x, weight, bias = (
            scene.normal(rows, cols, kind=kind),
            scene.normal(cols, kind=kind, seed=1),
            scene.normal(cols, kind=kind, seed=2),
        )
        room = torch.empty_like(x)
        functional = torch.nn.functional
        ours, theirs = {
            "layer_norm": (
                lambda x: kernels.layer_norm(x, weight, bias),
                lambda x: functional.layer_norm(x, (cols,), weight.to(x.dtype), bias.to(x.dtype)),
            ),
            "rms_norm": (
                lambda x: kernels.rms_norm(x, weight),
                lambda x: functional.rms_norm(x, (cols,), weight.to(x.dtype), 1e-6),
            ),
            "softmax": (kernels.softmax, lambda x: torch.softmax(x, -1)),
        }[name]
        compiled = scene.compiled(theirs)

        def error() -> float:
            made = ours(x)
            absolute = ROUNDING[kind] * (1e-3 if name == "softmax" else 1.0)
            return max(
                share_of_allowed(torch, made[some], theirs(x[some].double()), ROUNDING[kind], absolute)
                for some in (slice(0, 64), slice(rows - 64, rows))
            )

        arms = {
            "ours": lambda: ours(x),
            "memcpy": lambda: room.copy_(x),
            "copy": lambda: torch.mul(x, 1, out=room),
            "compiled": lambda: compiled(x),
        }
        return Built(arms, error)

    return build


def _rows_shape(kind: str, mib: int, small: bool) -> tuple[int, int]:
    """Rows and columns of an array of so many MiB."""
    if small:
        return 128, 64
    return mib * MIB // (4096 * (4 if kind == "float32" else 2)), 4096


@contextlib.contextmanager
def _only(torch: Any, backend: str, small: bool) -> Iterator[None]:
    """PyTorch's attention by one of its implementations; a rehearsal has another."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH if small else getattr(SDPBackend, backend)):
        yield


def _attention(queries: int, causal: bool) -> Callable[[Scene], Built]:
    def build(scene: Scene) -> Built:
        torch = scene.torch
        batches, heads, rows = (1, 2, 128) if scene.small else (16384 // queries, 16, queries)
        q, k, v = (scene.normal(batches, heads, rows, 128, kind="bfloat16", seed=seed) for seed in range(3))

        def theirs(backend: str) -> Callable[[], Any]:
            def call() -> Any:
                with _only(torch, backend, scene.small):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

            return call

        def error() -> float:
            made = scene.kernels.attention(q, k, v, causal=causal)
            worst = 0.0
            for batch, head in ((0, 0), (batches - 1, heads - 1)):
                some = slice(rows - min(rows, 512), rows)
                scores = q[batch, head, some].double() @ k[batch, head].double().t() * 128**-0.5
                if causal:
                    places = torch.arange(rows, device=q.device)
                    scores = scores.masked_fill(places[None, :] > places[some, None], float("-inf"))
                expected = scores.softmax(-1) @ v[batch, head].double()
                worst = max(worst, share_of_allowed(torch, made[batch, head, some], expected, 1e-2, 2e-3))
            return worst

        arms = {"ours": lambda: scene.kernels.attention(q, k, v, causal=causal), "flash": theirs("FLASH_ATTENTION")}
        cudnn = theirs("CUDNN_ATTENTION")
        with contextlib.suppress(RuntimeError):  # not in every build
            cudnn()
            arms["cudnn"] = cudnn
        return Built(arms, error)

    return build


#: Size of the images, channels, filters, size of the filters, stride: five layers of ResNet-50.
CONVOLUTIONS = {
    "conv2_3x3": (56, 64, 64, 3, 1),
    "conv3_3x3": (28, 128, 128, 3, 1),
    "conv4_3x3": (14, 256, 256, 3, 1),
    "conv5_3x3": (7, 512, 512, 3, 1),
    "conv3_1x1": (56, 256, 512, 1, 2),
}
IMAGES = 64


def _convolution(name: str) -> Callable[[Scene], Built]:
    def build(scene: Scene) -> Built:
        torch, functional = scene.torch, scene.torch.nn.functional
        torch.backends.cudnn.benchmark = True
        size, channels, filters, rows, stride = CONVOLUTIONS[name]
        images = IMAGES
        if scene.small:
            size, channels, filters, images = 7, 8, 16, 2
        kind, padding = "bfloat16", rows // 2
        x = scene.normal(images, channels, size, size, kind=kind).contiguous(memory_format=torch.channels_last)
        w = scene.normal(filters, channels, rows, rows, kind=kind, seed=1).contiguous(memory_format=torch.channels_last)
        bias = scene.normal(filters, kind=kind, seed=2)

        def ours() -> Any:
            return scene.kernels.conv2d(x, w, bias, stride=stride, padding=padding)

        def error() -> float:
            some = x[-1:].double()
            expected = functional.conv2d(some, w.double(), bias.double(), stride, padding)
            return share_of_allowed(torch, ours()[-1:], expected, ROUNDING[kind], 1e-6 * channels * rows * rows)

        arms = {"ours": ours, "cudnn": lambda: functional.conv2d(x, w, bias, stride, padding)}
        return Built(arms, error)

    return build


def _convolution_shape(name: str) -> dict[str, int]:
    size, channels, filters, rows, stride = CONVOLUTIONS[name]
    out = (size + 2 * (rows // 2) - rows) // stride + 1
    shape = {"images": IMAGES, "height": size, "width": size, "channels": channels, "filters": filters}
    return shape | {"rows": rows, "columns": rows, "out_height": out, "out_width": out, "stride": stride}


def parts() -> list[Part]:
    """All, in the order in which they are measured."""
    made = [
        Part("gemm_bf16_of_cublas", "8192", _gemm("bfloat16"), ("gemm_bf16", "bfloat16", _cube(8192))),
        Part("gemm_fp32_of_cublas", "8192", _gemm("float32"), ("gemm", "float32", _cube(8192))),
    ]
    named = {"layernorm_of_copy": "layer_norm", "rmsnorm_of_copy": "rms_norm", "softmax_of_copy": "softmax"}
    for figure, name in named.items():
        for kind, mib in (("float32", 64), ("bfloat16", 64), ("float32", 256), ("float32", 1024), ("bfloat16", 1024)):
            rows, cols = _rows_shape(kind, mib, False)
            shape = {"rows": rows, "cols": cols}
            made.append(Part(figure, f"{kind}_{mib}MiB", _rows(name, kind, mib), (name, kind, shape)))
    for queries in (4096, 8192, 16384):
        for causal in (False, True):
            shape = {"batches": 16384 // queries, "heads": 16, "queries": queries, "keys": queries, "head": 128}
            shape |= {"group": 1, **({"causal": 1} if causal else {})}
            name = f"{queries}{'_causal' if causal else ''}"
            attention = _attention(queries, causal)
            made.append(Part("flash_attention_of_flash", name, attention, ("flash_attention", "bfloat16", shape)))
    for name in CONVOLUTIONS:
        made.append(Part("conv2d_of_cudnn", name, _convolution(name), ("conv2d", "bfloat16", _convolution_shape(name))))
    return made


def _cube(size: int) -> dict[str, int]:
    return {"m": size, "n": size, "k": size}
