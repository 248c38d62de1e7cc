"""Products of matrices: fp32 on the SIMT cores, tf32, fp16, bf16 and int8 on the tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import gpu_of, plan
from cudasched.kernels.operators._common import (
    TYPES,
    as_new,
    contiguous,
    kind_of,
    register,
    same,
    stream_of,
    workspace_of,
)

__all__ = ["matmul_cuda"]

_ARGUMENTS = ("c", "a", "b", "workspace")
_ALL_TYPES = {**TYPES, torch.int8: "int8"}
_INT8 = "int8"
_LEAST_SM90 = 64  # smaller matrices are less than a tile


def _check(a: Tensor, b: Tensor) -> str:
    kind = kind_of("matmul", a, _ALL_TYPES)
    same("matmul", a, b=b)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise KernelError(
            f"matmul takes (..., m, k) and (k, n), not {tuple(a.shape)} and {tuple(b.shape)}; torch.matmul takes "
            "batches of both"
        )
    return kind


def kernel_for(kind: str, tf32: bool, m: int, n: int, k: int, capability: str) -> str:
    """Which kernel multiplies matrices of a type on GPUs of a compute capability.

    Raises:
        KernelError: None does: of the sizes k and n both must be multiples of a number.
    """
    if kind == "float32":
        name, multiple = ("gemm_tf32" if tf32 else "gemm"), 4
    elif kind == _INT8:
        name, multiple = "gemm_int8", 16
    else:
        name, multiple = ("gemm_mma", 8) if k % 8 == 0 and n % 8 == 0 else ("gemm_mma_narrow", 2)
        if name == "gemm_mma" and capability == "9.0" and min(m, n, k) >= _LEAST_SM90:
            name = "gemm_sm90"
    if k % multiple or n % multiple:
        raise KernelError(
            f"matmul of {kind}: k = {k} and n = {n}: both must be multiples of {multiple}; torch.matmul takes any"
        )
    return name


def _new(a: Tensor, b: Tensor, kind: str) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=torch.int32 if kind == _INT8 else a.dtype)


def matmul_cuda(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    """``cudasched::matmul`` on CUDA."""
    kind = _check(a, b)
    k, n = b.shape
    c = _new(a, b, kind)
    if c.numel() == 0 or k == 0:
        return c.zero_()
    a, b = contiguous(a), contiguous(b)
    index = a.device.index
    m = c.numel() // n
    name = kernel_for(kind, tf32, m, n, k, gpu_of(index).capability)
    ready = plan(name, kind, (("k", k), ("m", m), ("n", n)), index)
    addresses = (c.data_ptr(), a.data_ptr(), b.data_ptr())
    if name == "gemm_sm90":
        ready.run(stream_of(index), ready.places(_ARGUMENTS[:3]), addresses)
        return c
    workspace = workspace_of(ready.workspace_bytes, a)
    room = workspace.data_ptr() if workspace is not None else 0
    ready.run(stream_of(index), ready.places(_ARGUMENTS), (*addresses, room))
    return c


def _host(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    kind = _check(a, b)
    if kind == _INT8:
        return as_new(torch.matmul(a.int(), b.int()), torch.int32)
    return as_new(torch.matmul(a.float(), b.float()), a.dtype)


def _fake(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    return _new(a, b, _check(a, b))


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _autograd(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    rows, of_rows = a.flatten(0, -2), dc.flatten(0, -2)
    return torch.matmul(dc, b.t()), torch.matmul(rows.t(), of_rows), None


register("matmul(Tensor a, Tensor b, bool tf32) -> Tensor", matmul_cuda, _host, _fake, _autograd, _context)
