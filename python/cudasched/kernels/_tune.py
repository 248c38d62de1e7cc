"""Tuning the kernels of this package: results go where the kernels read them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cudasched._scratch import Scratch
from cudasched.kernels import _catalog
from cudasched.kernels._errors import KernelError
from cudasched.kernels._plan import gpu_of, reset, resolve
from cudasched.tune.space import read

if TYPE_CHECKING:
    from cudasched.tune import Settings, Tuned

__all__ = ["configuration", "tune"]


def _kernel(name: str) -> _catalog.Kernel:
    if name not in _catalog.KERNELS:
        raise KernelError(f"there is no kernel {name}; there are {', '.join(_catalog.KERNELS)}")
    return _catalog.KERNELS[name]


def tune(
    name: str,
    type: str = "float32",
    *,
    settings: Settings | None = None,
    database: str | os.PathLike[str] | None = None,
    device: int = 0,
    **shape: int,
) -> Tuned:
    """Finds the fastest configuration of a kernel for a shape, and uses it from then on.

    Args:
        name: "layer_norm", "rms_norm", "softmax", "gemm", and so on.
        type: Of the elements.
        settings: How is searched (`cudasched.tune.Settings`).
        database: Where measurements are kept; None: where the kernels look.
        device: The GPU's ordinal.
        shape: Its values: rows and cols, or m, n and k.

    Raises:
        KernelError: There is no such kernel, or not for that type.
        Error: From `cudasched.tune`.
    """
    from cudasched.tune import tune as run

    _kernel(name)
    with Scratch("tune") as directory:
        file = _catalog.variant_file(name, type, directory)
        tuned = run(space=read(file), shape=shape, settings=settings, database=database, device=device)
    reset()
    return tuned


def configuration(name: str, type: str = "float32", *, device: int = 0, **shape: int) -> dict[str, Any]:
    """A kernel's launch for a shape, and the choice's origin; nothing is compiled.

    Returns:
        ``configuration``, ``origin`` ("database", "shipped", "nearest" or "default"), ``grid``, ``block``,
        ``shared_bytes``.

    Raises:
        KernelError: There is no such kernel, or it does not take that.
    """
    kernel = _kernel(name)
    made = resolve(kernel, type, tuple(sorted(shape.items())), gpu_of(device), 16)
    return {
        "configuration": dict(made.choice.configuration),
        "origin": made.choice.origin,
        "grid": made.launch.grid,
        "block": made.launch.block,
        "shared_bytes": made.launch.shared_bytes,
    }
