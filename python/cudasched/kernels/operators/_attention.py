"""Attention without its matrix of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import gpu_of, plan
from cudasched.kernels.operators._common import contiguous, kind_of, register, same, stream_of

__all__ = ["HEAD_SIZES", "attention_cuda"]

HEAD_SIZES = (64, 128)
_TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ARGUMENTS = (
    *("out", "lse", "q", "k", "v", "scale", "out_batch", "out_head", "out_row", "q_batch", "q_head", "q_row"),
    *("k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row"),
)
_ALIGNED_ELEMENTS = 8
_MOST_BATCHES = 65535  # of a launch: the last dimension of a grid


def _check(q: Tensor, k: Tensor, v: Tensor) -> str:
    kind = kind_of("attention", q, _TYPES)
    same("attention", q, k=k, v=v)
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise KernelError(
            "attention takes q of (batches, heads, queries, head) and k and v of (batches, key heads, keys, head), "
            f"not {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    rest = q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or rest:
        raise KernelError(
            f"attention: q of {tuple(q.shape)} and k of {tuple(k.shape)}: batches and head are the same, and the heads "
            "of q are a multiple of those of k"
        )
    if q.shape[3] not in HEAD_SIZES:
        raise KernelError(f"attention takes heads of {' or '.join(map(str, HEAD_SIZES))}, not {q.shape[3]}")
    return kind


def kernel_for(capability: str) -> str:
    """Which kernel computes it on GPUs of a compute capability."""
    return "flash_attention_sm90" if capability == "9.0" else "flash_attention"


def _new(q: Tensor) -> tuple[Tensor, Tensor]:
    """The output, whose heads lie side by side in a row, ready for the next layer; and a sum a row."""
    batches, heads, queries, head = q.shape
    out = q.new_empty((batches, queries, heads, head)).transpose(1, 2)
    return out, q.new_empty((batches, heads, queries), dtype=torch.float32)


def _readable(x: Tensor) -> Tensor:
    """As it is, where rows are contiguous and begin at multiples of 16 bytes."""
    strides = x.stride()
    if strides[3] == 1 and all(one % _ALIGNED_ELEMENTS == 0 for one in strides[:3]) and x.data_ptr() % 16 == 0:
        return x
    return contiguous(x)


def attention_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``cudasched::attention`` on CUDA."""
    kind = _check(q, k, v)
    out, lse = _new(q)
    if out.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = _readable(q), _readable(k), _readable(v)
    for begin in range(0, q.shape[0], _MOST_BATCHES):
        _launch(kind, [one[begin : begin + _MOST_BATCHES] for one in (out, lse, q, k, v)], causal, scale)
    return out, lse


def _launch(kind: str, arrays: list[Tensor], causal: bool, scale: float) -> None:
    out, _, q, k, v = arrays
    batches, heads, queries, head = q.shape
    shape = [("batches", batches), ("group", heads // k.shape[1]), ("head", head), ("heads", heads)]
    shape += [("keys", k.shape[2]), ("queries", queries)]
    if causal:
        shape.insert(1, ("causal", 1))
    index = q.device.index
    ready = plan(kernel_for(gpu_of(index).capability), kind, tuple(shape), index)
    strides = [stride for one in (out, q, k, v) for stride in one.stride()[:3]]
    addresses = [one.data_ptr() for one in arrays]
    ready.run(stream_of(index), ready.places(_ARGUMENTS), (*addresses, scale, *strides))


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Of float32 arrays with equally many heads; minus infinity where a query sees a key not."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores


def _wide(x: Tensor, group: int) -> Tensor:
    """In float32, each head of keys as often as heads of queries share it."""
    return x.float().repeat_interleave(group, 1) if group > 1 else x.float()


def _host(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    out, lse = _new(q)
    if q.shape[1] == 0 or k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    group = q.shape[1] // k.shape[1]
    scores = _scores(q.float(), _wide(k, group), causal, scale)
    lse.copy_(scores.logsumexp(-1))
    out.copy_(torch.matmul(scores.softmax(-1), _wide(v, group)))
    return out, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    return _new(q)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """By PyTorch's operators, with the whole matrix of scores."""
    q, k, v, out, lse = ctx.saved_tensors
    if q.shape[1] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None
    group = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v, of_out = q.float(), _wide(k, group), _wide(v, group), dout.float()
    scores = _scores(wide_q, wide_k, ctx.causal, ctx.scale)
    # Gradients of gradients go through the sums of the rows, too, and those that are kept have none.
    weights = scores.softmax(-1) if torch.is_grad_enabled() else (scores - lse.unsqueeze(-1)).exp()
    of_weights = torch.matmul(of_out, wide_v.transpose(-1, -2))
    of_scores = weights * (of_weights - (of_out * out.float()).sum(-1, keepdim=True)) * ctx.scale
    of_q = torch.matmul(of_scores, wide_k)
    of_k = torch.matmul(of_scores.transpose(-1, -2), wide_q)
    of_v = torch.matmul(weights.transpose(-1, -2), of_out)
    if group > 1:
        shape = (k.shape[0], k.shape[1], group, *k.shape[2:])
        of_k, of_v = of_k.reshape(shape).sum(2), of_v.reshape(shape).sum(2)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


register(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
    attention_cuda,
    _host,
    _fake,
    _autograd,
    _context,
)
