"""The functions for users, `layer_norm` and the others, on arrays of PyTorch, CuPy or NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from cudasched.kernels import operators
from cudasched.kernels._arrays import over_tensors
from cudasched.kernels._errors import KernelError
from cudasched.kernels.operators._common import in_forward_mode

__all__ = ["attention", "conv2d", "layer_norm", "matmul", "rms_norm", "softmax"]


def _directly(*tensors: Tensor) -> bool:
    """Whether nothing would be lost without PyTorch's dispatcher, which takes microseconds: no tracing, no gradient."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or in_forward_mode():
        return False
    gradients = torch.is_grad_enabled()
    for one in tensors:
        if not one.is_cuda or type(one) not in (Tensor, torch.nn.Parameter) or (gradients and one.requires_grad):
            return False
    return True


def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Layer normalisation over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Sums are float32 for all types.

    Args:
        x: (..., columns), float32, float16 or bfloat16. An array that is not contiguous is copied.
        weight: (columns,), of the same type; None: ones.
        bias: (columns,), of the same type; None: zeros.
        eps: Added to the variance.

    Returns:
        An array like x, contiguous.

    Raises:
        KernelError: Shapes, types or devices do not go together, or the GPU cannot run the kernel.
    """
    if not isinstance(x, Tensor):
        return over_tensors("layer_norm", layer_norm, (x, weight, bias), eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    _tensors("layer_norm", weight)
    if bias is None:
        bias = torch.zeros_like(weight)
    _tensors("layer_norm", bias)
    if _directly(x, weight, bias):
        return operators.layer_norm_cuda(x, weight, bias, eps)
    _dense("layer_norm", x, weight, bias)
    return torch.ops.cudasched.layer_norm.default(x, weight, bias, eps)


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6) -> Any:
    """Division of the last dimension by its root mean square: ``x / sqrt(mean(x * x) + eps) * weight``.

    Args:
        x: (..., columns), float32, float16 or bfloat16. An array that is not contiguous is copied.
        weight: (columns,), of the same type; None: ones.
        eps: Added to the mean of the squares.

    Returns:
        An array like x, contiguous.

    Raises:
        KernelError: As `layer_norm`.
    """
    if not isinstance(x, Tensor):
        return over_tensors("rms_norm", rms_norm, (x, weight), eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    _tensors("rms_norm", weight)
    if _directly(x, weight):
        return operators.rms_norm_cuda(x, weight, eps)
    _dense("rms_norm", x, weight)
    return torch.ops.cudasched.rms_norm.default(x, weight, eps)


def softmax(x: Any, dim: int = -1) -> Any:
    """Exponentials over their sum along one dimension.

    Args:
        x: Of one dimension or more, float32, float16 or bfloat16. Another dimension than the last is brought there by
            a copy.
        dim: Which.

    Returns:
        An array like x.

    Raises:
        KernelError: As `layer_norm`; there is no such dimension.
    """
    if not isinstance(x, Tensor):
        return over_tensors("softmax", softmax, (x,), dim)
    if not -x.dim() <= dim < x.dim():
        raise KernelError(f"softmax: dim = {dim} of an array of {x.dim()} dimensions")
    if dim % x.dim() != x.dim() - 1:
        return softmax(x.movedim(dim, -1)).movedim(-1, dim)
    if _directly(x):
        return operators.softmax_cuda(x)
    _dense("softmax", x)
    return torch.ops.cudasched.softmax.default(x)


def matmul(a: Any, b: Any, tf32: bool = False) -> Any:
    """The product of matrices: (..., m, k) and (k, n) give (..., m, n).

    float32 is multiplied unrounded on the SIMT cores, or rounded to tf32 on the tensor cores, which also multiply
    float16, bfloat16 and int8. Sums are float32, those of int8 int32.

    Args:
        a: The first; one that is not contiguous, or not at a multiple of 16 bytes, is copied.
        b: The second, of the same type; alike. k and n are multiples of 4 (float32), 2 (float16, bfloat16) or 16
            (int8).
        tf32: Whether float32 is rounded to tf32.

    Returns:
        A contiguous array of the same type; int32 where they are int8.

    Raises:
        KernelError: As `layer_norm`.
    """
    if not isinstance(a, Tensor):
        return over_tensors("matmul", lambda one, other: matmul(one, other, tf32=tf32), (a, b))
    _tensors("matmul", b)
    if _directly(a, b):
        return operators.matmul_cuda(a, b, tf32)
    _dense("matmul", a, b)
    return torch.ops.cudasched.matmul.default(a, b, tf32)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Attention, ``softmax(q @ k.T * scale) @ v``, without its matrix of scores.

    Args:
        q: (batches, heads, queries, head), float16 or bfloat16, head 64 or 128. Any strides, if rows are contiguous and
            at multiples of 16 bytes; otherwise it is copied.
        k: (batches, key heads, keys, head); the heads of q are a multiple of these.
        v: Like k.
        causal: Whether query i sees keys 0 to i alone.
        scale: Of the scores; None: 1 / sqrt(head).

    Returns:
        An array of q's shape, whose heads lie side by side: ``transpose(1, 2).flatten(2)`` copies nothing.

    Raises:
        KernelError: As `layer_norm`.
    """
    if not isinstance(q, Tensor):
        return over_tensors("attention", lambda *all: attention(*all, causal=causal, scale=scale), (q, k, v))
    _tensors("attention", k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0  # an array without a head is refused below
    if _directly(q, k, v):
        return operators.attention_cuda(q, k, v, causal, scale)[0]
    _dense("attention", q, k, v)
    return torch.ops.cudasched.attention.default(q, k, v, causal, scale)[0]


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Any:
    """Convolution of images, as ``torch.nn.functional.conv2d`` without groups; channels are last in memory.

    Args:
        x: (images, channels, height, width), float16 or bfloat16; copied where its memory format is not channels_last.
        w: (filters, channels, rows, columns), of the same type; alike.
        bias: (filters,); None: zeros.
        stride: Of the patches; one number, or those of height and width.
        padding: Zeros around an image.
        dilation: Between the pixels of a patch.

    Returns:
        (images, filters, out height, out width), channels_last.

    Raises:
        KernelError: As `layer_norm`.
    """
    pairs = [_pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation)]
    if not isinstance(x, Tensor):
        return over_tensors(
            "conv2d", lambda *all: conv2d(*all, stride=stride, padding=padding, dilation=dilation), (x, w, bias)
        )
    _tensors("conv2d", w)
    if bias is None:
        bias = w.new_zeros(w.shape[:1])
    _tensors("conv2d", bias)
    if _directly(x, w, bias):
        return operators.conv2d_cuda(x, w, bias, *pairs)
    _dense("conv2d", x, w, bias)
    return torch.ops.cudasched.conv2d.default(x, w, bias, *pairs)


def _pair(name: str, given: Any) -> list[Any]:
    pair = list(given) if isinstance(given, Sequence) else [given, given]
    if not all(isinstance(one, (Integral, torch.SymInt)) for one in pair):
        raise KernelError(f"conv2d: {name} is one whole number or two, not {given!r}")
    return [one if isinstance(one, torch.SymInt) else int(one) for one in pair]


def _dense(name: str, *tensors: Tensor) -> None:
    """PyTorch looks for no operator of ours where a layout is none that we have."""
    for one in tensors:
        if one.layout is not torch.strided:
            raise KernelError(f"{name} takes dense arrays, not {one.layout}")


def _tensors(name: str, *others: Any) -> None:
    for one in others:
        if not isinstance(one, Tensor):
            raise KernelError(f"{name} takes arrays of one library; the first is PyTorch's, and there is a {type(one)}")
