"""The kernels as PyTorch operators, ``torch.ops.cudasched.NAME``: torch.compile keeps them, autograd knows them.

Each has an implementation for CUDA, which launches the kernel on the current stream; one for the host, by PyTorch's
own operators in the precision of the kernel, which tests compare with; and one without data for tracing. Backward
passes are PyTorch's operators, which torch.compile fuses. Importing this module imports PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import plan

__all__ = ["TYPES", "layer_norm_cuda", "matmul_cuda", "rms_norm_cuda", "softmax_cuda"]

TYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_ALIGNED = 16
_torch: Any = torch  # what its type hints do not have
_LIBRARY = _torch.library.Library("cudasched", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _kind(name: str, x: Tensor) -> str:
    kind = TYPES.get(x.dtype)
    if kind is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in TYPES)
        raise KernelError(f"{name} takes {known}, not {str(x.dtype).removeprefix('torch.')}")
    return kind


def _same(name: str, x: Tensor, **others: Tensor) -> None:
    """That all are on one device and of one type."""
    for other, tensor in others.items():
        if tensor.device != x.device:
            raise KernelError(f"{name}: {other} is on {tensor.device}, and the first array on {x.device}")
        if tensor.dtype != x.dtype:
            raise KernelError(
                f"{name}: {other} has {tensor.dtype}, and the first array {x.dtype}; they are of one type"
            )


def _check_rows(name: str, x: Tensor, **of_columns: Tensor) -> str:
    """That x has rows, and the others a value for each of its columns. Returns the type."""
    kind = _kind(name, x)
    if x.dim() < 1:
        raise KernelError(f"{name} takes arrays of one dimension or more, not a single number")
    _same(name, x, **of_columns)
    for other, tensor in of_columns.items():
        if tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
            raise KernelError(
                f"{name}: {other} has the shape {tuple(tensor.shape)}; it is ({x.shape[-1]},), a value for each column"
            )
    return kind


def _low_bits(*addresses: int) -> int:
    """What all the addresses are a multiple of, at most 16."""
    together = _ALIGNED
    for one in addresses:
        together |= one
    return together & -together


def _stream(index: int) -> int:
    return int(_torch._C._cuda_getCurrentRawStream(index))


def _run_rows(
    name: str, kind: str, x: Tensor, names: tuple[str, ...], arrays: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> Tensor:
    """Launches a kernel of rows: y, x, other arrays and scalars, in the order of `names`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    cols = x.shape[-1]
    if y.numel() == 0:
        return y
    addresses = (y.data_ptr(), x.data_ptr(), *[one.data_ptr() for one in arrays])
    index = x.device.index
    shape = (("cols", cols), ("rows", y.numel() // cols))
    ready = plan(name, kind, shape, index, _low_bits(*addresses))
    ready.run(_stream(index), ready.places(names), (*addresses, *scalars))
    return y


_LAYER_NORM = ("y", "x", "weight", "bias", "epsilon")
_SOFTMAX = ("y", "x")
_MATMUL = ("c", "a", "b", "workspace")


def layer_norm_cuda(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``cudasched::layer_norm`` on CUDA."""
    kind = _check_rows("layer_norm", x, weight=weight, bias=bias)
    weight, bias = weight.contiguous(), bias.contiguous()
    return _run_rows("layer_norm", kind, x.contiguous(), _LAYER_NORM, (weight, bias), (eps,))


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``cudasched::rms_norm`` on CUDA."""
    kind = _check_rows("rms_norm", x, weight=weight)
    weight = weight.contiguous()
    return _run_rows("rms_norm", kind, x.contiguous(), _LAYER_NORM, (weight, weight), (eps,))


def softmax_cuda(x: Tensor) -> Tensor:
    """``cudasched::softmax`` on CUDA."""
    kind = _check_rows("softmax", x)
    return _run_rows("softmax", kind, x.contiguous(), _SOFTMAX, (), ())


def _layer_norm_host(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    _check_rows("layer_norm", x, weight=weight, bias=bias)
    made = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return _as_new(made, x)


def _rms_norm_host(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check_rows("rms_norm", x, weight=weight)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _as_new(wide * scale * weight.float(), x)


def _softmax_host(x: Tensor) -> Tensor:
    _check_rows("softmax", x)
    return _as_new(torch.softmax(x.float(), -1), x)


def _as_new(made: Tensor, like: Tensor) -> Tensor:
    """Of the type of another and contiguous, and never one of the arguments."""
    new: Tensor = made.to(like.dtype).contiguous()
    return new


def _rows_fake(name: str) -> Any:
    def fake(x: Tensor, *others: Any) -> Tensor:
        of_columns = dict(zip(("weight", "bias"), others, strict=False))
        _check_rows(name, x, **{key: one for key, one in of_columns.items() if isinstance(one, Tensor)})
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return fake


def _normal_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, in float32."""
    wide, scaled = x.float(), grad.float() * weight.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    inner = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if centred:
        inner = inner - scaled.mean(-1, keepdim=True)
    return inner * scale, (grad.float() * unit).flatten(0, -2).sum(0) if x.dim() > 1 else grad.float() * unit


def _layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _layer_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = _normal_backward(x, weight, grad, ctx.eps, centred=True)
    of_bias = grad.float().flatten(0, -2).sum(0) if grad.dim() > 1 else grad
    return of_x.to(x.dtype), of_weight.to(x.dtype), of_bias.to(x.dtype), None


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = _normal_backward(x, weight, grad, ctx.eps, centred=False)
    return of_x.to(x.dtype), of_weight.to(x.dtype), None


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    wide, of_y = y.float(), grad.float()
    of_x: Tensor = (wide * (of_y - (wide * of_y).sum(-1, keepdim=True))).to(y.dtype)
    return of_x


def _check_matmul(a: Tensor, b: Tensor) -> str:
    kind = _kind("matmul", a)
    _same("matmul", a, b=b)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise KernelError(
            f"matmul takes (..., m, k) and (k, n), not {tuple(a.shape)} and {tuple(b.shape)}; torch.matmul takes "
            "batches of both"
        )
    return kind


def matmul_cuda(a: Tensor, b: Tensor) -> Tensor:
    """``cudasched::matmul`` on CUDA."""
    kind = _check_matmul(a, b)
    k, n = b.shape
    c = a.new_empty((*a.shape[:-1], n))
    if c.numel() == 0:
        return c
    if k == 0:
        return c.zero_()
    kernel = _gemm_for(kind)
    if k % 4 or n % 4:
        raise KernelError(f"matmul: k = {k} and n = {n}: both are multiples of 4; torch.matmul takes any")
    a, b = _aligned(a), _aligned(b)
    index = a.device.index
    shape = (("k", k), ("m", c.numel() // n), ("n", n))
    ready = plan(kernel, kind, shape, index)
    addresses = [c.data_ptr(), a.data_ptr(), b.data_ptr(), 0]
    if ready.workspace_bytes:
        workspace = torch.zeros(ready.workspace_bytes, dtype=torch.uint8, device=a.device)
        addresses[3] = workspace.data_ptr()
    ready.run(_stream(index), ready.places(_MATMUL), addresses)
    return c


def _gemm_for(kind: str) -> str:
    if kind != "float32":
        raise KernelError(f"matmul takes float32, not {kind}")
    return "gemm"


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and at a multiple of 16 bytes: a copy where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


def _matmul_host(a: Tensor, b: Tensor) -> Tensor:
    _check_matmul(a, b)
    return _as_new(torch.matmul(a.float(), b.float()), a)


def _matmul_fake(a: Tensor, b: Tensor) -> Tensor:
    _check_matmul(a, b)
    return a.new_empty((*a.shape[:-1], b.shape[1]))


def _matmul_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    rows = a.reshape(-1, a.shape[-1])
    return torch.matmul(grad, b.t()), torch.matmul(rows.t(), grad.reshape(-1, grad.shape[-1]))


def _register(schema: str, cuda: Any, host: Any, fake: Any, backward: Any, context: Any) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, host, "CPU")
    full = f"cudasched::{name}"
    torch.library.register_fake(full, fake, lib=_LIBRARY)
    torch.library.register_autograd(full, backward, setup_context=context, lib=_LIBRARY)


_register(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    layer_norm_cuda,
    _layer_norm_host,
    _rows_fake("layer_norm"),
    _layer_norm_backward,
    _layer_norm_context,
)
_register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    rms_norm_cuda,
    _rms_norm_host,
    _rows_fake("rms_norm"),
    _rms_norm_backward,
    _rms_norm_context,
)
_register(
    "softmax(Tensor x) -> Tensor",
    softmax_cuda,
    _softmax_host,
    _rows_fake("softmax"),
    _softmax_backward,
    _softmax_context,
)
_register(
    "matmul(Tensor a, Tensor b) -> Tensor",
    matmul_cuda,
    _matmul_host,
    _matmul_fake,
    _matmul_backward,
    _matmul_context,
)
