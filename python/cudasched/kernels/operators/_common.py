"""The operators' shared parts: checks of arrays, the current stream, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudasched.kernels._errors import KernelError

__all__ = [
    "TYPES",
    "as_new",
    "contiguous",
    "in_forward_mode",
    "kind_of",
    "low_bits",
    "register",
    "same",
    "stream_of",
    "workspace_of",
]

TYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The types of most operators, by the spaces' names."""
_ALIGNED = 16
_torch: Any = torch  # for names without type hints
_forward_ad: Any = forward_ad
_LIBRARY = _torch.library.Library("cudasched", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def kind_of(name: str, x: Tensor, types: dict[torch.dtype, str] = TYPES) -> str:
    """The type of the elements, one of those that an operator takes."""
    kind = types.get(x.dtype)
    if kind is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in types)
        raise KernelError(f"{name} takes {known}, not {str(x.dtype).removeprefix('torch.')}")
    return kind


def same(name: str, x: Tensor, **others: Tensor) -> None:
    """That all are on one device and of one type."""
    for other, tensor in others.items():
        if tensor.device != x.device:
            raise KernelError(f"{name}: {other} is on {tensor.device}, and the first array on {x.device}")
        if tensor.dtype != x.dtype:
            raise KernelError(
                f"{name}: {other} has {tensor.dtype}, and the first array {x.dtype}; they are of one type"
            )


def low_bits(*addresses: int) -> int:
    """The common alignment of the addresses, at most 16."""
    together = _ALIGNED
    for one in addresses:
        together |= one
    return together & -together


def stream_of(index: int) -> int:
    """PyTorch's current stream of a GPU, as the driver knows it."""
    return int(_torch._C._cuda_getCurrentRawStream(index))


def contiguous(x: Tensor) -> Tensor:
    """Contiguous and at a multiple of 16 bytes: a copy where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


def workspace_of(nbytes: int, like: Tensor) -> Tensor | None:
    """Zeros that a kernel needs for itself. The caller keeps them until the launch is submitted."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=like.device) if nbytes else None


def as_new(made: Tensor, kind: torch.dtype) -> Tensor:
    """A contiguous tensor of a type: the same one where possible, so never pass an operator's own argument."""
    new: Tensor = made.to(kind).contiguous()
    return new


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: PyTorch's forward-mode differentiation is under way."""
    return int(_forward_ad._current_level) >= 0


class _Refusing:
    """In the place of a library, for `register_autograd`: its operators refuse tangents, which were lost silently.

    This has to be asked where gradients are, at every level of ``torch.func``'s transformations. PyTorch computes the
    gradients of ``torch.func`` for no operator of a library.
    """

    def impl(self, name: str, kernel: Any, key: str, **named: Any) -> None:
        def checked(keyset: Any, *arguments: Any, **others: Any) -> Any:
            if in_forward_mode() and _torch._C._is_fwd_grad_enabled():
                for one in arguments:
                    if isinstance(one, Tensor) and _forward_ad.unpack_dual(one).tangent is not None:
                        raise KernelError(
                            f"{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); take "
                            "the reverse mode, or PyTorch's own operator"
                        )
            transformed = _torch._C._are_functorch_transforms_active() and torch.is_grad_enabled()
            if transformed and any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
                raise KernelError(
                    f"{name} has no derivatives in torch.func (grad, vjp, jacrev); take torch.autograd.grad or "
                    "backward(), or PyTorch's own operator"
                )
            return kernel(keyset, *arguments, **others)

        _LIBRARY.impl(name, checked, key, **named)


def register(schema: str, cuda: Any, host: Any, fake: Any, backward: Any = None, context: Any = None) -> None:
    """Makes ``torch.ops.cudasched.NAME``.

    Args:
        schema: In PyTorch's form.
        cuda: The function that launches the kernel.
        host: The same by PyTorch's operators, for tensors of the CPU.
        fake: The function that makes outputs without data.
        backward: The gradients; None: there are none.
        context: Keeps the data for `backward`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, host, "CPU")
    full = f"cudasched::{name}"
    torch.library.register_fake(full, fake, lib=_LIBRARY)
    if backward is not None:
        _torch.library.register_autograd(full, backward, setup_context=context, lib=_Refusing())
