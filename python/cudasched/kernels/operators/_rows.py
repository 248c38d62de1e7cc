"""Operators over rows: layer normalisation, RMS normalisation, their gradients, softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._catalog import BACKWARD_COLS
from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import plan
from cudasched.kernels.operators._common import (
    as_new,
    in_forward_mode,
    kind_of,
    low_bits,
    register,
    same,
    stream_of,
    workspace_of,
)

__all__ = ["layer_norm_cuda", "rms_norm_cuda", "softmax_cuda"]

_NORM = ("y", "x", "weight", "bias", "epsilon")
_SOFTMAX = ("y", "x")
_LAYER_NORM_BACKWARD = ("dx", "dweight", "dbias", "dy", "x", "weight", "workspace", "epsilon")
_RMS_NORM_BACKWARD = ("dx", "dweight", "dy", "x", "weight", "workspace", "epsilon")


def _check(name: str, x: Tensor, **of_columns: Tensor) -> str:
    """That x has rows, and the others a value for each of its columns. Returns the type."""
    kind = kind_of(name, x)
    if x.dim() < 1:
        raise KernelError(f"{name} takes arrays of one dimension or more, not a single number")
    same(name, x, **of_columns)
    for other, tensor in of_columns.items():
        if tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]:
            raise KernelError(
                f"{name}: {other} has the shape {tuple(tensor.shape)}; it is ({x.shape[-1]},), a value for each column"
            )
    return kind


def _new(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run(
    name: str, kind: str, x: Tensor, names: tuple[str, ...], arrays: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> Tensor:
    """Launches a kernel of rows: y, x, other arrays and scalars, in the order of `names`."""
    y = _new(x)
    cols = x.shape[-1]
    if y.numel() == 0:
        return y
    addresses = (y.data_ptr(), x.data_ptr(), *[one.data_ptr() for one in arrays])
    index = x.device.index
    ready = plan(name, kind, (("cols", cols), ("rows", y.numel() // cols)), index, low_bits(*addresses))
    ready.run(stream_of(index), ready.places(names), (*addresses, *scalars))
    return y


def layer_norm_cuda(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``cudasched::layer_norm`` on CUDA."""
    kind = _check("layer_norm", x, weight=weight, bias=bias)
    weight, bias = weight.contiguous(), bias.contiguous()
    return _run("layer_norm", kind, x.contiguous(), _NORM, (weight, bias), (eps,))


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``cudasched::rms_norm`` on CUDA."""
    kind = _check("rms_norm", x, weight=weight)
    weight = weight.contiguous()
    return _run("rms_norm", kind, x.contiguous(), _NORM, (weight, weight), (eps,))


def softmax_cuda(x: Tensor) -> Tensor:
    """``cudasched::softmax`` on CUDA."""
    kind = _check("softmax", x)
    return _run("softmax", kind, x.contiguous(), _SOFTMAX, (), ())


def _layer_norm_host(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    _check("layer_norm", x, weight=weight, bias=bias)
    made = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return as_new(made, x.dtype)


def _rms_norm_host(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", x, weight=weight)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return as_new(wide * scale * weight.float(), x.dtype)


def _softmax_host(x: Tensor) -> Tensor:
    _check("softmax", x)
    return as_new(torch.softmax(x.float(), -1), x.dtype)


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    _check("layer_norm", x, weight=weight, bias=bias)
    return _new(x)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", x, weight=weight)
    return _new(x)


def _softmax_fake(x: Tensor) -> Tensor:
    _check("softmax", x)
    return _new(x)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and of the bias, by PyTorch's operators in float32."""
    wide, of_y = x.float(), dy.float()
    scaled = of_y * weight.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    inner = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if centred:
        inner = inner - scaled.mean(-1, keepdim=True)
    over_rows = list(range(x.dim() - 1))
    of_weight = of_y * unit
    if over_rows:
        of_weight, of_bias = of_weight.sum(over_rows), of_y.sum(over_rows)
    else:
        of_bias = of_y.clone()  # an operator gives none of its arguments back
    return as_new(inner * scale, x.dtype), as_new(of_weight, x.dtype), as_new(of_bias, x.dtype)


def _run_backward(
    name: str, kind: str, names: tuple[str, ...], dy: Tensor, x: Tensor, weight: Tensor, eps: float, made: list[Tensor]
) -> None:
    """Launches a backward kernel: it fills `made`."""
    cols = x.shape[-1]
    x, dy, weight = x.contiguous(), dy.contiguous(), weight.contiguous()
    addresses = [one.data_ptr() for one in (*made, dy, x, weight)]
    index = x.device.index
    shape = (("cols", cols), ("rows", x.numel() // cols))
    ready = plan(name, kind, shape, index, low_bits(*addresses))
    workspace = workspace_of(ready.workspace_bytes, x)
    room = workspace.data_ptr() if workspace is not None else 0
    ready.run(stream_of(index), ready.places(names), (*addresses, room, eps))


def _layer_norm_backward_cuda(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    kind = _check_backward("layer_norm_backward", dy, x, weight)
    if x.shape[-1] > BACKWARD_COLS or x.numel() == 0:
        return _gradients(dy, x, weight, eps, centred=True)
    made = [_new(x), _new(weight), _new(weight)]
    _run_backward("layer_norm_backward", kind, _LAYER_NORM_BACKWARD, dy, x, weight, eps, made)
    return made[0], made[1], made[2]


def _rms_norm_backward_cuda(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = _check_backward("rms_norm_backward", dy, x, weight)
    if x.shape[-1] > BACKWARD_COLS or x.numel() == 0:
        return _gradients(dy, x, weight, eps, centred=False)[:2]
    made = [_new(x), _new(weight)]
    _run_backward("rms_norm_backward", kind, _RMS_NORM_BACKWARD, dy, x, weight, eps, made)
    return made[0], made[1]


def _check_backward(name: str, dy: Tensor, x: Tensor, weight: Tensor) -> str:
    kind = _check(name, x, weight=weight)
    same(name, x, dy=dy)
    if dy.shape != x.shape:
        raise KernelError(f"{name}: dy has the shape {tuple(dy.shape)}, and x {tuple(x.shape)}")
    return kind


def _layer_norm_backward_host(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward("layer_norm_backward", dy, x, weight)
    return _gradients(dy, x, weight, eps, centred=True)


def _rms_norm_backward_host(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_backward("rms_norm_backward", dy, x, weight)
    return _gradients(dy, x, weight, eps, centred=False)[:2]


def _layer_norm_backward_fake(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward("layer_norm_backward", dy, x, weight)
    return _new(x), _new(weight), _new(weight)


def _rms_norm_backward_fake(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_backward("rms_norm_backward", dy, x, weight)
    return _new(x), _new(weight)


def _layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _layer_norm_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    if torch.is_grad_enabled() or in_forward_mode():  # the kernel's output has no derivatives
        return (*_gradients(dy, x, weight, ctx.eps, centred=True), None)
    return (*torch.ops.cudasched.layer_norm_backward.default(dy, x, weight, ctx.eps), None)


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    if torch.is_grad_enabled() or in_forward_mode():
        return (*_gradients(dy, x, weight, ctx.eps, centred=False)[:2], None)
    return (*torch.ops.cudasched.rms_norm_backward.default(dy, x, weight, ctx.eps), None)


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_autograd(ctx: Any, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    wide, of_y = y.float(), dy.float()
    of_x: Tensor = (wide * (of_y - (wide * of_y).sum(-1, keepdim=True))).to(y.dtype)
    return of_x


register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_cuda,
    _layer_norm_backward_host,
    _layer_norm_backward_fake,
)
register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm_backward_cuda,
    _rms_norm_backward_host,
    _rms_norm_backward_fake,
)
register(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    layer_norm_cuda,
    _layer_norm_host,
    _layer_norm_fake,
    _layer_norm_autograd,
    _layer_norm_context,
)
register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    rms_norm_cuda,
    _rms_norm_host,
    _rms_norm_fake,
    _rms_norm_autograd,
    _rms_norm_context,
)
register("softmax(Tensor x) -> Tensor", softmax_cuda, _softmax_host, _softmax_fake, _softmax_autograd, _softmax_context)
