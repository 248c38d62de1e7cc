"""Convolution of images, channels last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import gpu_of, plan
from cudasched.kernels.operators._common import kind_of, register, same, stream_of, workspace_of

__all__ = ["conv2d_cuda"]

_TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ARGUMENTS = (
    *("y", "x", "w", "bias", "workspace", "stride_y", "stride_x", "padding_y", "padding_x"),
    *("dilation_y", "dilation_x"),
)
_LAST = torch.channels_last
_ALIGNED = 16
_MOST_PIXELS = 2**31 - 1024  # the kernels count them in 32 bits, up to the end of the last tile


def _check(x: Tensor, w: Tensor, bias: Tensor, *pairs: list[int]) -> str:
    kind = kind_of("conv2d", x, _TYPES)
    same("conv2d", x, w=w, bias=bias)
    if x.dim() != 4 or w.dim() != 4 or x.shape[1] != w.shape[1]:
        raise KernelError(
            f"conv2d takes x of (images, channels, height, width) and w of (filters, channels, rows, columns), not "
            f"{tuple(x.shape)} and {tuple(w.shape)}; it knows no groups"
        )
    if bias.dim() != 1 or bias.shape[0] != w.shape[0]:
        raise KernelError(f"conv2d: bias has the shape {tuple(bias.shape)}; it is ({w.shape[0]},), one of each filter")
    stride, padding, dilation = pairs
    for name, pair, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(pair) != 2 or min(pair) < least:
            raise KernelError(f"conv2d: {name} is two numbers of {least} or more, not {list(pair)}")
    if min(_size(x, w, *pairs)) < 1:
        raise KernelError(f"conv2d: filters of {tuple(w.shape[2:])} are larger than images of {tuple(x.shape[2:])}")
    return kind


def _size(x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> tuple[int, int]:
    """Height and width of the output."""
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )
    return height, width


def _new(x: Tensor, w: Tensor, *pairs: list[int]) -> Tensor:
    shape = (x.shape[0], w.shape[0], *_size(x, w, *pairs))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)


def kernel_for(capability: str) -> str:
    """Which kernel computes it on GPUs of a compute capability."""
    return "conv2d_sm90" if capability == "9.0" else "conv2d"


def _readable(x: Tensor) -> Tensor:
    """Channels last and at a multiple of 16 bytes: a copy where it is not."""
    x = x.contiguous(memory_format=_LAST)
    return x.clone() if x.data_ptr() % _ALIGNED else x


def conv2d_cuda(
    x: Tensor, w: Tensor, bias: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """``cudasched::conv2d`` on CUDA."""
    kind = _check(x, w, bias, stride, padding, dilation)
    height, width = _size(x, w, stride, padding, dilation)
    if x.shape[0] * height * width > _MOST_PIXELS:
        raise KernelError(
            f"conv2d takes up to {_MOST_PIXELS} pixels of the output, not {x.shape[0]} images of {height} x {width}; "
            "give it fewer images at once"
        )
    y = _new(x, w, stride, padding, dilation)
    if 0 in (y.numel(), x.numel(), w.numel()):
        return y.copy_(bias.reshape(-1, 1, 1).expand(y.shape))
    x, w, bias = _readable(x), _readable(w), bias.contiguous()
    shape = {
        **{"images": x.shape[0], "channels": x.shape[1], "height": x.shape[2], "width": x.shape[3]},
        **{"filters": w.shape[0], "rows": w.shape[2], "columns": w.shape[3]},
        **{"out_height": y.shape[2], "out_width": y.shape[3], "stride": stride[0], "dilation": dilation[0]},
    }
    index = x.device.index
    ready = plan(kernel_for(gpu_of(index).capability), kind, tuple(sorted(shape.items())), index)
    workspace = workspace_of(ready.workspace_bytes, x)
    room = workspace.data_ptr() if workspace is not None else 0
    addresses = (y.data_ptr(), x.data_ptr(), w.data_ptr(), bias.data_ptr(), room)
    ready.run(stream_of(index), ready.places(_ARGUMENTS), (*addresses, *stride, *padding, *dilation))
    return y


def _host(x: Tensor, w: Tensor, bias: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    _check(x, w, bias, stride, padding, dilation)
    y = _new(x, w, stride, padding, dilation)
    if 0 in (y.numel(), x.numel(), w.numel()):
        return y.copy_(bias.reshape(-1, 1, 1).expand(y.shape))
    return y.copy_(torch.nn.functional.conv2d(x.float(), w.float(), bias.float(), stride, padding, dilation))


def _fake(x: Tensor, w: Tensor, bias: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    _check(x, w, bias, stride, padding, dilation)
    return _new(x, w, stride, padding, dilation)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.stride, ctx.padding, ctx.dilation = inputs
    ctx.save_for_backward(x, w)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """By PyTorch's operator."""
    x, w = ctx.saved_tensors
    if 0 in (x.numel(), w.numel()):  # most of which PyTorch's refuses
        return torch.zeros_like(x), torch.zeros_like(w), dy.sum((0, 2, 3)), None, None, None
    sizes = (ctx.stride, ctx.padding, ctx.dilation, False, [0, 0], 1)
    made = torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], *sizes, [True, True, True])
    return (*made, None, None, None)


register(
    "conv2d(Tensor x, Tensor w, Tensor bias, int[] stride, int[] padding, int[] dilation) -> Tensor",
    conv2d_cuda,
    _host,
    _fake,
    _autograd,
    _context,
)
