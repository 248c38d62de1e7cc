"""Layer normalisation and flash attention as Triton kernels, tuned by the same search as the CUDA ones.

They are for comparison: the speed of a Triton kernel on this GPU with the same effort, and the effect of the decorator
`cudasched.tune.triton`. The first call for a shape times some configurations; Triton keeps the result on disk.

::

    from cudasched.kernels import triton_twins

    y = triton_twins.layer_norm(x, weight, bias)
    out, lse = triton_twins.flash_attention(q, k, v, causal=True)

PyTorch and Triton are imported when a function is first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from cudasched.errors import ConfigError
from cudasched.tune._need import need

__all__ = ["flash_attention", "layer_norm"]

_HEADS = (16, 32, 64, 128, 256)


def _kernels() -> Any:
    need("triton", "a Triton kernel", "triton")
    return importlib.import_module("cudasched.kernels._triton_kernels")


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    """Layer normalisation over the last dimension.

    Args:
        x: A tensor, contiguous.
        weight: As long as its last dimension, contiguous.
        bias: Likewise.
        epsilon: Added to the variance.

    Returns:
        A tensor like `x`.

    Raises:
        ConfigError: Shapes do not fit, or a tensor is not contiguous.
        Error: PyTorch or Triton is not installed.
    """
    torch = need("torch", "a Triton kernel", "torch")
    cols = x.shape[-1] if x.dim() else 0
    if tuple(weight.shape) != (cols,) or tuple(bias.shape) != (cols,):
        raise ConfigError(f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} are not those of {cols} columns")
    if not (x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()):
        raise ConfigError("x, weight and bias are contiguous")
    y = torch.empty_like(x)
    if not x.numel():
        return y
    rows = x.numel() // cols

    def grid(chosen: Mapping[str, Any]) -> tuple[int]:
        return (-(-rows // chosen["ROWS"]),)

    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _kernels().layer_norm[grid](y, x, weight, bias, rows, epsilon, COLS=cols)
    return y


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> tuple[Any, Any]:
    """Attention without its matrix of scores.

    Args:
        q: batches x heads x queries x head size, in float16 or bfloat16; any strides, if the last one is 1.
        k: batches x heads x keys x head size, or with fewer heads, each of which is shared by as many of `q`.
        v: Like `k`.
        causal: Query i sees keys 0 to i.
        scale: Of the scores; 1 / sqrt(head size) by default.

    Returns:
        The attention, like `q`, and the logarithm of the sum of each row's exponentials, batches x heads x queries.

    Raises:
        ConfigError: Shapes, types or strides do not fit.
        Error: PyTorch or Triton is not installed.
    """
    torch = need("torch", "a Triton kernel", "torch")
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        raise ConfigError(f"q, k and v have four dimensions, k and v the same: {q.shape}, {k.shape}, {v.shape}")
    batches, heads, queries, head = q.shape
    heads_k, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batches or k.shape[3] != head or heads_k == 0 or heads % heads_k:
        raise ConfigError(f"k {tuple(k.shape)} does not fit q {tuple(q.shape)}")
    if head not in _HEADS:
        raise ConfigError(f"head size {head}: it is one of {', '.join(map(str, _HEADS))}")
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ConfigError(f"q, k and v are all float16 or all bfloat16, not {q.dtype}, {k.dtype}, {v.dtype}")
    if any(one.stride(-1) != 1 for one in (q, k, v)):
        raise ConfigError("the elements of a row of q, k and v are contiguous")
    out = torch.empty((batches, heads, queries, head), dtype=q.dtype, device=q.device)
    lse = torch.empty((batches, heads, queries), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    strides = [one.stride(i) for one in (out, q, k, v) for i in range(3)]
    factor = head**-0.5 if scale is None else scale

    def grid(chosen: Mapping[str, Any]) -> tuple[int, int]:
        return -(-queries // chosen["TILE_Q"]), batches * heads

    given = (out, lse, q, k, v, queries, keys, heads, heads // heads_k, factor)
    with torch.cuda.device_of(q):
        _kernels().flash_attention[grid](*given, *strides, HEAD=head, CAUSAL=causal)
    return out, lse
