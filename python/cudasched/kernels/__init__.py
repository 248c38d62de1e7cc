"""cudasched's kernels, for PyTorch, CuPy and NumPy: normalisation, softmax, products, attention, convolution.

::

    import cudasched.kernels as kernels                  # before torch

    y = kernels.layer_norm(x, weight, bias)              # on x's GPU and the current stream
    kernels.tune("layer_norm", "bfloat16", rows=8192, cols=4096)

Kernels are compiled at their first use, and kept on disk. Each is launched with the best known configuration for its
shape on this GPU. PyTorch programs may also call kernels as ``torch.ops.cudasched.NAME``, and ``torch.compile`` keeps
them. ``docs/kernels.md`` has the whole. PyTorch is imported when a function is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudasched.kernels._errors import KernelError
from cudasched.kernels._tune import configuration, tune
from cudasched.tune._need import need

if TYPE_CHECKING:
    from cudasched.kernels._functions import attention, conv2d, layer_norm, matmul, rms_norm, softmax

__all__ = [
    "KernelError",
    "attention",
    "configuration",
    "conv2d",
    "layer_norm",
    "matmul",
    "register",
    "rms_norm",
    "softmax",
    "tune",
]

_FUNCTIONS = ("attention", "conv2d", "layer_norm", "matmul", "rms_norm", "softmax")


def register() -> None:
    """Makes ``torch.ops.cudasched.NAME``; the first use of a function here does so, too.

    Raises:
        Error: PyTorch is not installed.
    """
    need("torch", "the kernels", "torch")
    importlib.import_module("cudasched.kernels.operators")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        register()
        found = getattr(importlib.import_module("cudasched.kernels._functions"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS])
