"""Families of operations with log-uniform shapes, for `training.workloads`.

A family is an endless generator of cases; the same seed gives the same cases. Each shape comes with two data types, so
that groups by operation and shape span types and passes. Operands are views into one pool of random numbers, so that
preparing a case launches next to nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
ALL = ("fp32", "tf32", "fp16", "bf16")
PLAIN = ("fp32", "fp16", "bf16")
#: Elements of the largest tensor; bytes moved stay under about 0.5 ms a kernel.
MOST_ELEMENTS = 1 << 27


class UnsupportedError(Exception):
    """This machine or this PyTorch cannot run a case; it is counted and left out."""


class Case(NamedTuple):
    """One operation of one shape. `prepare` allocates and returns what runs it once; that returns a Tensor or None."""

    operation: str
    shape: str
    dtype: str
    prepare: Callable[[Inputs], Callable[[], Any]]
    what: str = "forward"


class Draw:
    """Random sizes and choices. `largest` bounds every size (for rehearsals)."""

    def __init__(self, seed: str, largest: int | None = None) -> None:
        self.random = Random(seed)
        self.largest = largest

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Log-uniform in [low, high]: half of them rounded to what programs use (powers of two, multiples of 8)."""
        high = min(high, max(low, self.largest)) if self.largest else high
        value = math.exp(self.random.uniform(math.log(low), math.log(high + 0.99)))
        kind = self.random.random()
        if kind < 0.25:
            value = 2.0 ** round(math.log2(value))
        elif kind < 0.6 and value >= 16:
            value = round(value / 8) * 8
        whole = max(low, min(high, int(value)))
        return max(multiple, whole // multiple * multiple)

    def choice(self, options: Sequence[Any]) -> Any:
        """One of `options`."""
        return self.random.choice(options)

    def dtypes(self, options: Sequence[str] = PLAIN, count: int = 2) -> list[str]:
        """A few different data types by name."""
        return self.random.sample(list(options), min(count, len(options)))

    def shape(self, ranges: Sequence[tuple[int, int]], most: float = MOST_ELEMENTS) -> tuple[int, ...]:
        """A size for each range, with at most `most` elements in all."""
        while True:
            sizes = tuple(self.size(low, high) for low, high in ranges)
            if math.prod(sizes) <= most:
                return sizes

    def flat(self, dimensions: int, low: float = 64, most: float = MOST_ELEMENTS) -> tuple[int, ...]:
        """A shape of so many dimensions whose number of elements is log-uniform."""
        high = min(most, self.largest**2) if self.largest else most
        elements = math.exp(self.random.uniform(math.log(min(low, high)), math.log(high)))
        sizes: list[int] = []
        for left in range(dimensions, 1, -1):
            here = self.size(1, max(1, int(elements ** (1.6 / left))))
            sizes.append(here)
            elements = max(1.0, elements / here)
        sizes.append(self.size(1, max(1, int(elements))))
        self.random.shuffle(sizes)
        return tuple(sizes)


class Inputs:
    """Operands: views into a pool of random numbers of each type, one behind the other, going round."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device, self.elements = device, elements
        self.pools: dict[torch.dtype, Tensor] = {}
        self.position = 0
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int, dtype: torch.dtype | str = torch.float32) -> Tensor:
        """Normal random numbers; never write into them."""
        kind = DTYPES[dtype] if isinstance(dtype, str) else dtype
        if kind not in self.pools:
            self.pools[kind] = torch.randn(self.elements, device=self.device, dtype=kind)
        count = math.prod(shape)
        if count > self.elements:
            raise UnsupportedError(f"{count} elements")
        if self.position + count > self.elements:
            self.position = 0
        view = self.pools[kind][self.position : self.position + count].view(shape)
        self.position += (count + 127) // 128 * 128
        return view

    def leaf(self, *shape: int, dtype: torch.dtype | str = torch.float32) -> Tensor:
        """As above, with a gradient wanted."""
        tensor = self(*shape, dtype=dtype).detach().requires_grad_()
        self.leaves.append(tensor)
        return tensor

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform in [0, high), int64."""
        return torch.randint(max(1, high), shape, device=self.device)

    def fresh(self) -> None:
        """Forgets the leaves of the case before."""
        self.leaves = []

    def release(self) -> None:
        """Gives cached memory back, after running out of it."""
        self.leaves = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for the device; raises what went wrong there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Lets float32 products use TF32 where the type is named tf32, and nowhere else."""
    allowed = dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    yield


def by(sizes: Sequence[int]) -> str:
    """Sizes as labels have them."""
    return "x".join(str(size) for size in sizes)


Family = Callable[[Draw], Iterator[Case]]
FAMILIES: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Registers a family by its function's name."""
    FAMILIES[function.__name__] = function
    return function


# ---- matrix products ------------------------------------------------------------------------------------------------

#: Most floating-point operations of one product: a few ms.
MOST_FLOPS = {"fp32": 2e11, "tf32": 6e11, "fp16": 1.2e12, "bf16": 1.2e12, "fp8": 2e12}


@family
def gemm(draw: Draw) -> Iterator[Case]:
    """mm, addmm, bmm, linear with bias, and scaled fp8 products, in all layouts."""
    while True:
        operation = draw.choice(("mm", "mm", "addmm", "bmm", "linear", "linear", "scaled_mm"))
        if operation == "bmm":
            b, m, n, k = draw.shape(((2, 512), (1, 2048), (8, 2048), (8, 2048)), 1e12)
        else:
            b, (m, n, k) = 1, draw.shape(((1, 32768), (8, 32768), (8, 16384)), 1e12)
        a_by, b_by = draw.choice("nt"), draw.choice("nt")
        for dtype in ("fp8",) if operation == "scaled_mm" else draw.dtypes(ALL):
            if 2.0 * b * m * n * k > MOST_FLOPS[dtype] or b * max(m * n, m * k, n * k) > MOST_ELEMENTS:
                continue
            if operation == "scaled_mm":
                m8, n8, k8 = (max(16, size // 16 * 16) for size in (m, n, k))
                yield Case("gemm.scaled_mm", by((m8, n8, k8)), "fp8", _scaled_mm(m8, n8, k8))
            elif operation == "linear":
                yield Case("gemm.linear", by((m, n, k)), dtype, _linear(m, n, k, dtype))
            else:
                name = f"gemm.{operation}_{a_by}{b_by}"
                yield Case(name, by((b, m, n, k)), dtype, _product(operation, b, m, n, k, a_by + b_by, dtype))


def _product(operation: str, b: int, m: int, n: int, k: int, layout: str, dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        batch = (b,) if operation == "bmm" else ()
        left = inputs(*batch, m, k, dtype=dtype) if layout[0] == "n" else inputs(*batch, k, m, dtype=dtype).mT
        right = inputs(*batch, k, n, dtype=dtype) if layout[1] == "n" else inputs(*batch, n, k, dtype=dtype).mT
        if operation == "bmm":
            return lambda: torch.bmm(left, right)
        if operation == "mm":
            return lambda: torch.mm(left, right)
        bias = inputs(m, n, dtype=dtype)
        return lambda: torch.addmm(bias, left, right)

    return prepare


def _linear(m: int, n: int, k: int, dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x, weight, bias = (inputs.leaf(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
        return lambda: F.linear(x, weight, bias)

    return prepare


def _scaled_mm(m: int, n: int, k: int) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        left = inputs(m, k, dtype="bf16").to(torch.float8_e4m3fn)
        right = inputs(n, k, dtype="bf16").to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=inputs.device)
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return prepare


# ---- attention ------------------------------------------------------------------------------------------------------

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@family
def attention(draw: Draw) -> Iterator[Case]:
    """Scaled dot-product attention by each backend: self, causal, masked, and decoding over a cache."""
    while True:
        # cuDNN builds a plan for each shape, which takes as long as a hundred launches.
        backend = draw.choice(("flash",) * 6 + ("efficient",) * 4 + ("math",) * 3 + ("cudnn",))
        style = draw.choice(("full", "causal", "mask", "decode"))
        if style == "mask" and backend == "flash":
            style = "causal"
        head = draw.choice((32, 64, 64, 80, 96, 128, 128, 256)) if not draw.largest else 16
        most = 1 << 24 if backend == "math" else 1 << 28
        while True:
            b, h, keys = draw.size(1, 64), draw.size(1, 40), draw.size(16, 8192)
            queries = draw.choice((1, 1, draw.size(1, 8))) if style == "decode" else keys
            if b * h * queries * keys <= most and b * h * keys * head <= MOST_ELEMENTS // 8:
                break
        types = ("fp16", "bf16") if backend in ("flash", "cudnn") else PLAIN
        train = style != "decode" and draw.random.random() < 0.5
        shape = by((b, h, queries, keys, head))
        for dtype in draw.dtypes(types):
            prepare = _attention(backend, style, b, h, queries, keys, head, dtype, train)
            yield Case(f"attention.{backend}_{style}", shape, dtype, prepare)


def _attention(
    backend: str, style: str, b: int, h: int, queries: int, keys: int, head: int, dtype: str, train: bool
) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        make = inputs.leaf if train else inputs
        q = make(b, h, queries, head, dtype=dtype)
        k, v = make(b, h, keys, head, dtype=dtype), make(b, h, keys, head, dtype=dtype)
        mask = inputs(b, 1, queries, keys, dtype=dtype) if style == "mask" else None
        chosen = BACKENDS[backend]

        def forward() -> Tensor:
            with sdpa_kernel(chosen):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=style == "causal")

        return forward

    return prepare


# ---- convolution, pooling -------------------------------------------------------------------------------------------


@family
def convolution(draw: Draw) -> Iterator[Case]:
    """1d, 2d and 3d; plain, grouped, depthwise, strided, transposed; both memory formats in 2d."""
    while True:
        kind = draw.choice(("1d", "2d", "2d", "2d", "2d", "3d", "depthwise", "grouped", "transposed"))
        n = {"1d": 1, "3d": 3}.get(kind, 2)
        batch, cin, cout = draw.size(1, 128), draw.size(3, 1024), draw.size(8, 1024)
        sides = tuple(draw.size(4, {1: 8192, 2: 256, 3: 48}[n]) for _ in range(1))
        sides = sides * n
        kernel = draw.choice((1, 3, 3, 5, 7)) if n < 3 else draw.choice((1, 3))
        stride = draw.choice((1, 1, 2))
        groups = 1
        if kind == "depthwise":
            cout = groups = cin
        if kind == "grouped":
            groups = draw.choice((2, 4, 8, 32))
            cin, cout = max(groups, cin // groups * groups), max(groups, cout // groups * groups)
        larger = stride**n if kind == "transposed" else 1 / stride**n
        outputs = int(batch * cout * math.prod(sides) * larger)
        flops = 2.0 * outputs * cin / groups * kernel**n
        if max(outputs, batch * cin * math.prod(sides)) > MOST_ELEMENTS // 16:
            continue
        last = n == 2 and draw.random.random() < 0.5
        name = f"convolution.{kind}{'_last' if last else ''}"
        shape = f"{by((batch, cin, cout, *sides))}k{kernel}s{stride}g{groups}"
        train = draw.random.random() < 0.6
        for dtype in draw.dtypes(ALL):
            # What is not a plain product is slow for its operations.
            if flops * (16 if groups > 1 or n == 3 else 1) <= MOST_FLOPS[dtype] / 8:
                prepare = _convolution(kind, n, batch, cin, cout, sides, kernel, stride, groups, last, dtype, train)
                yield Case(name, shape, dtype, prepare)


def _convolution(
    kind: str,
    n: int,
    batch: int,
    cin: int,
    cout: int,
    sides: tuple[int, ...],
    kernel: int,
    stride: int,
    groups: int,
    last: bool,
    dtype: str,
    train: bool,
) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs(batch, cin, *sides, dtype=dtype)
        transposed = kind == "transposed"
        weight_shape = (cin, cout, *(kernel,) * n) if transposed else (cout, cin // groups, *(kernel,) * n)
        weight = inputs(*weight_shape, dtype=dtype)
        if last:  # the same memory, read as (batch, h, w, channels)
            x = inputs(batch, *sides, cin, dtype=dtype).permute(0, 3, 1, 2)
            weight = weight.contiguous(memory_format=torch.channels_last)
        if train:
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            inputs.leaves += [x, weight]
        plain = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
        if transposed:
            return lambda: F.conv_transpose2d(x, weight, None, stride, kernel // 2)
        return lambda: plain(x, weight, None, stride, kernel // 2, 1, groups)

    return prepare


@family
def pooling(draw: Draw) -> Iterator[Case]:
    """Pooling and resampling of images."""
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "max": lambda x: F.max_pool2d(x, 3, 2, 1),
        "average": lambda x: F.avg_pool2d(x, 2),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive7": lambda x: F.adaptive_avg_pool2d(x, 7),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        "bicubic": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
        "shuffle": lambda x: F.pixel_unshuffle(x, 2),
        "unfold": lambda x: F.unfold(x, 3, padding=1),
        "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    }
    while True:
        name = draw.choice(list(operations))
        batch, channels, side = draw.shape(((1, 128), (1, 512), (8, 256)), 1 << 22)
        side = side // 2 * 2
        if batch * channels * side * side > MOST_ELEMENTS // 4:
            continue
        last = draw.random.random() < 0.4
        shape, train = by((batch, channels, side, side)), draw.random.random() < 0.6
        for dtype in draw.dtypes():
            label = f"pooling.{name}{'_last' if last else ''}"
            yield Case(label, shape, dtype, _image(operations[name], batch, channels, side, last, dtype, train))


def _image(
    operation: Callable[[Tensor], Tensor], batch: int, channels: int, side: int, last: bool, dtype: str, train: bool
) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs(batch, channels, side, side, dtype=dtype)
        if last:
            x = inputs(batch, side, side, channels, dtype=dtype).permute(0, 3, 1, 2)
        if train:
            x = x.detach().requires_grad_()
            inputs.leaves.append(x)
        return lambda: operation(x)

    return prepare


# ---- normalisation --------------------------------------------------------------------------------------------------


@family
def normalisation(draw: Draw) -> Iterator[Case]:
    """Layer, RMS, batch (training and evaluation), group and instance normalisation."""
    while True:
        name = draw.choice(("layer", "layer", "rms", "batch", "batch", "batch_eval", "group", "instance"))
        train = draw.random.random() < 0.6
        if name in ("layer", "rms"):
            rows, width = draw.shape(((1, 1 << 17), (16, 16384)), MOST_ELEMENTS // 2)
            shape: tuple[int, ...] = (rows, width)
        else:
            batch, channels, side = draw.shape(((1, 128), (4, 1024), (2, 256)), 1 << 22)
            channels = max(4, channels // 4 * 4)
            if batch * channels * side * side > MOST_ELEMENTS // 2:
                continue
            shape = (batch, channels, side, side)
        last = len(shape) == 4 and draw.random.random() < 0.5
        label = f"normalisation.{name}{'_last' if last else ''}"
        for dtype in draw.dtypes():
            yield Case(label, by(shape), dtype, _normalisation(name, shape, last, dtype, train))


def _normalisation(name: str, shape: tuple[int, ...], last: bool, dtype: str, train: bool) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        channels = shape[1]
        x = inputs(*shape, dtype=dtype)
        if last:
            x = inputs(shape[0], *shape[2:], channels, dtype=dtype).permute(0, 3, 1, 2)
        weight, bias = inputs(channels, dtype=dtype), inputs(channels, dtype=dtype)
        if train:
            x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
            inputs.leaves += [x, weight] + ([bias] if name != "rms" else [])
        if name == "layer":
            return lambda: F.layer_norm(x, (channels,), weight, bias)
        if name == "rms":
            return lambda: F.rms_norm(x, (channels,), weight)
        if name == "group":
            groups = max(g for g in (1, 2, 4, 8, 16, 32) if channels % g == 0)
            return lambda: F.group_norm(x, groups, weight, bias)
        if name == "instance":
            return lambda: F.instance_norm(x, None, None, weight, bias)
        mean, variance = torch.zeros(channels, device=x.device), torch.ones(channels, device=x.device)
        return lambda: F.batch_norm(x, mean, variance, weight.float(), bias.float(), name == "batch")

    return prepare


# ---- element by element ---------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x * x),
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "sin": torch.sin,
    "erf": torch.erf,
    "neg": torch.neg,
    "pow": lambda x: x**3,
    "clamp": lambda x: x.clamp(-1, 1),
    "scalar": lambda x: x * 1.5 + 0.25,
    "hardswish": F.hardswish,
    "round": torch.round,
    "isnan": torch.isnan,
    "glu": lambda x: F.glu(x, 0) if x.shape[0] % 2 == 0 else F.silu(x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "less": torch.lt,
    "atan2": torch.atan2,
    "swiglu": lambda x, y: F.silu(x) * y,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.1),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
}
CASTS = (
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.int32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.bool),
    (torch.bfloat16, torch.float8_e4m3fn),
)


@family
def elementwise(draw: Draw) -> Iterator[Case]:
    """Unary, binary, broadcast, strided, in-place and casting operations."""
    while True:
        kind = draw.choice(("unary", "unary", "binary", "binary", "broadcast", "strided", "cast", "in_place"))
        dimensions = draw.choice((1, 2, 2, 3, 4))
        shape = draw.flat(max(2, dimensions) if kind in ("broadcast", "strided") else dimensions)
        if kind == "cast":
            source, target = draw.choice(CASTS)
            name = f"{source}_{target}".replace("torch.", "")
            yield Case(f"elementwise.cast_{name}", by(shape), name, _cast(shape, source, target))
            continue
        train = draw.random.random() < 0.4
        table: dict[str, Callable[..., Tensor]] = UNARY if kind == "unary" else BINARY
        name = draw.choice(("add", "mul", "relu", "fill", "copy")) if kind == "in_place" else draw.choice(list(table))
        axis = draw.random.randrange(1 << len(shape))
        for dtype in draw.dtypes():
            prepare = _pointwise(kind, name, shape, axis, dtype, train)
            yield Case(f"elementwise.{kind}_{name}", by(shape), dtype, prepare)


def _cast(shape: tuple[int, ...], source: torch.dtype, target: torch.dtype) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs(*shape, dtype=source)
        return lambda: x.to(target)

    return prepare


def _pointwise(
    kind: str, name: str, shape: tuple[int, ...], axis: int, dtype: str, train: bool
) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        if kind == "in_place":
            x, y = torch.empty(shape, device=inputs.device, dtype=DTYPES[dtype]), inputs(*shape, dtype=dtype)
            return {
                "add": lambda: x.add_(y),
                "mul": lambda: x.mul_(0.5),
                "relu": x.relu_,
                "fill": lambda: x.fill_(1),
                "copy": lambda: x.copy_(y),
            }[name]
        make = inputs.leaf if train else inputs
        x = make(*shape, dtype=dtype)
        if kind == "unary":
            return lambda: UNARY[name](x)
        other = tuple(1 if kind == "broadcast" and axis >> i & 1 else size for i, size in enumerate(shape))
        y = inputs(*reversed(other), dtype=dtype).permute(*reversed(range(len(shape)))) if kind == "strided" else None
        second = make(*other, dtype=dtype) if y is None else y
        return lambda: BINARY[name](x, second)

    return prepare


REDUCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "amax": lambda x, d: x.amax(d),
    "var": lambda x, d: x.var(d, correction=0),
    "norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "logsumexp": lambda x, d: torch.logsumexp(x, d),
    "max": lambda x, d: x.max(d[0]).values,
    "argmax": lambda x, d: x.argmax(d[0]),
    "any": lambda x, d: (x > 4).any(d[0]),
    "prod": lambda x, d: x.prod(d[0]),
    "median": lambda x, d: x.median(d[0]).values,
    "count": lambda x, d: torch.count_nonzero(x, d),
    "aminmax": lambda x, d: torch.aminmax(x).max,
}


@family
def reduction(draw: Draw) -> Iterator[Case]:
    """Sums, means, extremes, norms over one or several dimensions, or all."""
    while True:
        name = draw.choice([name for name in REDUCTIONS if name != "median"] * 3 + ["median"])
        shape = draw.flat(draw.choice((1, 2, 2, 3, 4)), most=1 << 23 if name == "median" else MOST_ELEMENTS)
        if name == "median" and max(shape) > 1 << 17:
            continue
        dimensions = sorted(draw.random.sample(range(len(shape)), draw.random.randint(1, len(shape))))
        train = name in ("sum", "mean", "var", "norm", "logsumexp") and draw.random.random() < 0.4
        for dtype in draw.dtypes():
            label = f"reduction.{name}_{''.join(map(str, dimensions))}of{len(shape)}"
            yield Case(label, by(shape), dtype, _reduction(name, shape, dimensions, dtype, train))


def _reduction(name: str, shape: tuple[int, ...], over: list[int], dtype: str, train: bool) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = (inputs.leaf if train else inputs)(*shape, dtype=dtype)
        return lambda: REDUCTIONS[name](x, over)

    return prepare


@family
def softmax(draw: Draw) -> Iterator[Case]:
    """Softmax and losses."""
    while True:
        losses = "cross_entropy", "cross_entropy", "mse", "bce", "kl"
        name = draw.choice(("softmax", "log_softmax", "softmax_dim0", *losses))
        rows, width = draw.shape(((1, 1 << 17), (2, 1 << 17)), MOST_ELEMENTS // 2)
        train = draw.random.random() < 0.6
        for dtype in draw.dtypes():
            yield Case(f"softmax.{name}", by((rows, width)), dtype, _softmax(name, rows, width, dtype, train))


def _softmax(name: str, rows: int, width: int, dtype: str, train: bool) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = (inputs.leaf if train else inputs)(rows, width, dtype=dtype)
        if name == "softmax":
            return lambda: F.softmax(x, -1)
        if name == "softmax_dim0":
            return lambda: F.softmax(x, 0)
        if name == "log_softmax":
            return lambda: F.log_softmax(x, -1)
        if name == "cross_entropy":
            targets = inputs.integers(width, rows)
            return lambda: F.cross_entropy(x, targets)
        y = inputs(rows, width, dtype=dtype)
        if name == "mse":
            return lambda: F.mse_loss(x, y)
        if name == "bce":
            share = y.sigmoid()
            return lambda: F.binary_cross_entropy_with_logits(x, share)
        return lambda: F.kl_div(x, y, reduction="batchmean", log_target=True)

    return prepare


# ---- sorting, indexing, memory, random numbers ----------------------------------------------------------------------


@family
def sorting(draw: Draw) -> Iterator[Case]:
    """Sort, top k, scans, searches, histograms."""
    operations: dict[str, Callable[[Tensor], Any]] = {
        "sort": lambda x: x.sort(-1),
        "argsort": lambda x: x.argsort(dim=-1, stable=True),
        "topk5": lambda x: x.topk(min(5, x.shape[-1]), -1),
        "topk50": lambda x: x.topk(min(50, x.shape[-1]), -1),
        "cumsum": lambda x: x.cumsum(-1),
        "cumsum0": lambda x: x.cumsum(0),
        "cummax": lambda x: x.cummax(-1),
        "cumprod": lambda x: x.cumprod(-1),
        "logcumsumexp": lambda x: x.logcumsumexp(-1),
        "kthvalue": lambda x: x.kthvalue(1 + x.shape[-1] // 2, -1),
        "unique": lambda x: torch.unique(x[0]),
        "histogram": lambda x: torch.histc(x[0].float(), 64),
        "searchsorted": lambda x: torch.searchsorted(x[0].float(), x.float()),
        "bucketize": lambda x: torch.bucketize(x, x[0, : min(16, x.shape[1])]),
    }
    while True:
        name = draw.choice(list(operations))
        most = 1 << 22 if name in ("sort", "argsort", "kthvalue") else 1 << 24
        rows, width = draw.shape(((1, 1 << 14), (4, 1 << 20)), most)
        for dtype in draw.dtypes():
            yield Case(f"sorting.{name}", by((rows, width)), dtype, _rows(operations[name], rows, width, dtype))


def _rows(operation: Callable[[Tensor], Any], rows: int, width: int, dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs(rows, width, dtype=dtype)

        def forward() -> None:
            operation(x)

        return forward

    return prepare


@family
def indexing(draw: Draw) -> Iterator[Case]:
    """Gathers, scatters, embeddings and bags of them, masks."""
    while True:
        reads = "embedding", "embedding", "bag", "bag", "gather", "select", "take", "index", "one_hot"
        name = draw.choice((*reads, "scatter_add", "put", "add", "index_copy", "masked_fill", "masked_select"))
        rows, width = draw.shape(((16, 1 << 20), (1, 2048)), MOST_ELEMENTS // 4)
        count = draw.size(1, 1 << 18)
        while count * width > MOST_ELEMENTS // 4:
            count = max(1, count // 4)
        if name == "one_hot":
            rows = min(rows, 4096)
            count = min(count, (MOST_ELEMENTS >> 4) // rows)
        train = name in ("embedding", "bag", "gather", "select", "index") and draw.random.random() < 0.6
        for dtype in draw.dtypes():
            prepare = _indexing(name, rows, width, count, dtype, train)
            yield Case(f"indexing.{name}", by((rows, width, count)), dtype, prepare)


def _indexing(name: str, rows: int, width: int, count: int, dtype: str, train: bool) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        table = (inputs.leaf if train else inputs)(rows, width, dtype=dtype)
        indices = inputs.integers(rows, count)
        values = inputs(count, width, dtype=dtype)
        if name == "embedding":
            return lambda: F.embedding(indices, table)
        if name == "bag":
            offsets = torch.arange(0, count, max(1, count // max(1, count // 16)), device=inputs.device)
            return lambda: F.embedding_bag(indices, table, offsets, mode="sum")
        if name == "select":
            return lambda: table.index_select(0, indices)
        if name == "index":
            return lambda: table[indices]
        if name == "one_hot":
            return lambda: F.one_hot(indices, rows)
        if name == "masked_fill":
            return lambda: values.masked_fill(values > 0, 0.5)
        if name == "masked_select":
            return lambda: values.masked_select(values > 0)
        if name == "take":
            return lambda: table.take(indices)
        wide = indices[:, None].expand(count, width)
        if name == "gather":
            return lambda: table.gather(0, wide)
        target = torch.empty(rows, width, device=inputs.device, dtype=DTYPES[dtype])
        if name == "scatter_add":
            return lambda: target.scatter_add_(0, wide, values)
        if name == "add":
            return lambda: target.index_add_(0, indices, values)
        if name == "index_copy":
            return lambda: target.index_copy_(0, indices, values)
        return lambda: target.index_put_((indices,), values, accumulate=True)

    return prepare


@family
def memory(draw: Draw) -> Iterator[Case]:
    """Copies, transposes, concatenations and other rearrangements."""
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "transpose": lambda x: x.transpose(0, -1).contiguous(),
        "permute": lambda x: x.permute(*range(1, x.dim()), 0).contiguous(),
        "swap": lambda x: x.transpose(-1, -2).contiguous() if x.dim() > 1 else x.clone(),
        "clone": lambda x: x.clone(),
        "cat": lambda x: torch.cat([x, x], -1),
        "cat0": lambda x: torch.cat([x, x, x], 0),
        "stack": lambda x: torch.stack([x, x]),
        "flip": lambda x: x.flip(0),
        "roll": lambda x: x.roll(1, -1),
        "repeat": lambda x: x.repeat(2, *([1] * (x.dim() - 1))),
        "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
        "pad": lambda x: F.pad(x, (1, 2)),
        "slice": lambda x: x[..., ::2].contiguous(),
        "half": lambda x: x[..., : max(1, x.shape[-1] // 2)].contiguous(),
        "tril": lambda x: x.tril() if x.dim() > 1 else x.clone(),
        "zeros": torch.zeros_like,
        "full": lambda x: torch.full_like(x, 2.0),
        "arange": lambda x: torch.arange(x.numel(), device=x.device),
        "diag": lambda x: torch.diag_embed(x.flatten()[:1024]),
    }
    while True:
        name = draw.choice(list(operations))
        shape = draw.flat(draw.choice((1, 2, 2, 3, 4)), most=MOST_ELEMENTS // 2)
        for dtype in draw.dtypes():
            yield Case(f"memory.{name}", by(shape), dtype, _whole(operations[name], shape, dtype))


def _whole(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs(*shape, dtype=dtype)
        return lambda: operation(x)

    return prepare


@family
def random(draw: Draw) -> Iterator[Case]:
    """Dropout and random numbers."""
    operations: dict[str, Callable[[Tensor], Any]] = {
        "dropout": lambda x: F.dropout(x, 0.1),
        "dropout2d": lambda x: F.dropout2d(x[None, :, None], 0.2),
        "rand": torch.rand_like,
        "randn": torch.randn_like,
        "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.3),
        "randint": lambda x: torch.randint(100, x.shape, device=x.device),
        "exponential": lambda x: torch.empty_like(x).exponential_(),
        "multinomial": lambda x: torch.multinomial(torch.rand(8, min(4096, x.numel() + 1), device=x.device), 1),
        "randperm": lambda x: torch.randperm(min(1 << 20, x.numel()), device=x.device),
    }
    while True:
        name = draw.choice(["dropout"] * 4 + list(operations))
        shape = draw.flat(draw.choice((1, 2, 3)), most=MOST_ELEMENTS // 2)
        if name == "dropout2d":
            shape = (shape[0], math.prod(shape[1:]))
        train = name == "dropout" and draw.random.random() < 0.6
        for dtype in draw.dtypes():
            prepare = _leaf(operations[name], shape, dtype) if train else _whole(operations[name], shape, dtype)
            yield Case(f"random.{name}", by(shape), dtype, prepare)


def _leaf(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x = inputs.leaf(*shape, dtype=dtype)
        return lambda: operation(x)

    return prepare


# ---- recurrent layers, Fourier transforms ---------------------------------------------------------------------------


@family
def recurrent(draw: Draw) -> Iterator[Case]:
    """LSTM and GRU, of one or two layers."""
    while True:
        kind = draw.choice((torch.nn.LSTM, torch.nn.GRU))
        steps, batch, width, hidden = draw.size(2, 64), draw.size(1, 128), draw.size(8, 1024), draw.size(8, 1024)
        layers, train = draw.choice((1, 2)), draw.random.random() < 0.5
        for dtype in draw.dtypes():
            shape = by((steps, batch, width, hidden, layers))
            yield Case(f"recurrent.{kind.__name__.lower()}", shape, dtype, _recurrent(kind, shape, dtype, train))


def _recurrent(kind: Any, shape: str, dtype: str, train: bool) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        steps, batch, width, hidden, layers = map(int, shape.split("x"))
        module = kind(width, hidden, layers, device=inputs.device, dtype=DTYPES[dtype]).requires_grad_(train)
        x = inputs(steps, batch, width, dtype=dtype)
        inputs.leaves = list(module.parameters()) if train else []
        return lambda: module(x)[0]

    return prepare


@family
def fft(draw: Draw) -> Iterator[Case]:
    """Complex and real transforms."""
    operations: dict[str, Callable[[Tensor], Any]] = {
        "fft": lambda x: torch.fft.fft(x),
        "rfft": lambda x: torch.fft.rfft(x),
        "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        "rfft2": lambda x: torch.fft.rfft2(x),
    }
    while True:
        name = draw.choice(list(operations))
        rows, width = draw.shape(((1, 1 << 13), (8, 1 << 14)), 1 << 24)
        if draw.random.random() < 0.7:
            width = 1 << max(3, round(math.log2(width)))
        yield Case(f"fft.{name}", by((rows, width)), "fp32", _rows(operations[name], rows, width, "fp32"))


# ---- optimizers -----------------------------------------------------------------------------------------------------


@family
def optimizer(draw: Draw) -> Iterator[Case]:
    """SGD, Adam and AdamW: fused, for each, or a loop; and clipping of gradients."""
    while True:
        kind = draw.choice(("SGD", "Adam", "AdamW"))
        way = draw.choice(("fused", "fused", "foreach", "foreach", "loop"))
        count = draw.size(1, 160 if way != "loop" else 12)
        sizes = [math.prod(draw.flat(2, 16, min(1 << 24, (1 << 27) / count))) for _ in range(count)]
        clip = draw.random.random() < 0.3
        label = f"optimizer.{kind}_{way}{'_clip' if clip else ''}"
        for dtype in draw.dtypes(("fp32", "bf16")):
            yield Case(label, f"{count}x{sum(sizes)}", dtype, _optimizer(kind, way, sizes, clip, dtype), "step")


def _optimizer(kind: str, way: str, sizes: list[int], clip: bool, dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        parameters = [inputs(size, dtype=dtype).clone().requires_grad_() for size in sizes]
        for parameter in parameters:
            parameter.grad = inputs(parameter.numel(), dtype=dtype).clone()
        options: dict[str, Any] = {"lr": 1e-3, "foreach": way == "foreach"}
        if way == "fused":
            options["fused"] = True
        if kind == "SGD":
            options["momentum"] = 0.9
        chosen = getattr(torch.optim, kind)(parameters, **options)

        def step() -> None:
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            chosen.step()

        return step

    return prepare


# ---- Triton ---------------------------------------------------------------------------------------------------------


@family
def triton(draw: Draw) -> Iterator[Case]:
    """Hand-written Triton kernels, with several block sizes."""
    while True:
        name = draw.choice(("add", "add", "softmax", "softmax", "matmul", "matmul", "layer_norm"))
        if name == "add":
            shape: tuple[int, ...] = (draw.size(256, MOST_ELEMENTS // 2),)
            block = draw.choice((256, 1024, 4096))
        elif name == "matmul":
            m, n, k = draw.shape(((16, 8192), (16, 8192), (16, 8192)), 6e10)
            shape, block = tuple(size // 16 * 16 for size in (m, n, k)), draw.choice((32, 64, 128))
        else:
            shape = draw.shape(((1, 1 << 16), (16, 4096)), MOST_ELEMENTS // 4)
            block = max(256, 1 << (shape[1] - 1).bit_length())
        for dtype in ("bf16",) if name == "matmul" else ("fp32", "bf16"):
            yield Case(f"triton.{name}{block}", by(shape), dtype, _triton(name, shape, block, dtype))


def _triton(name: str, shape: tuple[int, ...], block: int, dtype: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        if inputs.device.type != "cuda":
            raise UnsupportedError("Triton needs a GPU")
        from training import triton_kernels

        if name == "matmul":
            m, n, k = shape
            a, b = inputs(m, k, dtype=dtype), inputs(k, n, dtype=dtype)
            return lambda: triton_kernels.matmul(a, b, block)
        x = inputs(*shape, dtype=dtype)
        if name == "add":
            y = inputs(*shape, dtype=dtype)
            return lambda: triton_kernels.add(x, y, block)
        run = triton_kernels.softmax if name == "softmax" else triton_kernels.layer_norm
        return lambda: run(x, block)

    return prepare


# ---- small models ---------------------------------------------------------------------------------------------------


@family
def model(draw: Draw) -> Iterator[Case]:
    """Forward, or forward, backward and optimizer step, of models of drawn sizes."""
    from training import models

    while True:
        name = draw.choice(("bert", "bert", "gpt", "gpt", "resnet", "resnet", "vit", "recommender", "unet", "mlp"))
        train = draw.random.random() < 0.6
        sizes = models.draw_sizes(name, draw)
        shape = "x".join(f"{key}{value}" for key, value in sizes.items())
        dtype = draw.choice(("fp32", "tf32", "bf16", "amp", "amp", "fp16" if not train else "bf16"))
        prepare = _model(name, sizes, dtype, train, draw.choice(("fused", "foreach")))
        yield Case(f"model.{name}", shape, dtype, prepare, "step" if train else "forward")


def _model(name: str, sizes: dict[str, int], dtype: str, train: bool, way: str) -> Callable[[Inputs], Any]:
    def prepare(inputs: Inputs) -> Callable[[], Any]:
        from training import models

        return models.build(name, sizes, dtype, train, way, inputs.device)

    return prepare
