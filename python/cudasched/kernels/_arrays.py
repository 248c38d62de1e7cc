"""Arrays of other libraries, as PyTorch's tensors and back: CuPy's on the GPU as they are, NumPy's by a copy there.

By DLPack; only copies to and from the host wait there. CuPy's arrays are computed on CuPy's current stream. PyTorch's
allocator reuses memory on the stream of the allocation, which is then the one that CuPy reads on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudasched.kernels._errors import KernelError

__all__ = ["over_tensors"]

_torch: Any = torch  # for names without type hints
_DEFAULT_STREAMS = (0, 1)  # CU_STREAM_LEGACY


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0] if hasattr(value, "__dlpack__") else ""


def _given(name: str, value: Any, library: str) -> Tensor | None:
    """One argument as a tensor."""
    if value is None:
        return None
    found = _library(value)
    if found not in ("cupy", "numpy", "torch"):
        raise KernelError(f"{name} takes arrays of PyTorch, CuPy or NumPy, not {type(value).__qualname__}")
    if found != library:
        raise KernelError(f"{name} takes arrays of one library, not of {library} and {found}")
    try:
        if found == "numpy":
            tensor = torch.from_numpy(value if value.flags.writeable and value.flags.c_contiguous else value.copy())
            return tensor.cuda() if torch.cuda.is_available() else tensor
        shared: Tensor = _torch.from_dlpack(value)
        return shared
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise KernelError(f"{name} does not take this array of {found}: {error}") from None


def _stream_of(cupy: Any) -> Any:
    """CuPy's current stream of the current GPU, as PyTorch has it."""
    handle = int(cupy.cuda.get_current_stream().ptr)
    return _torch.cuda.default_stream() if handle in _DEFAULT_STREAMS else _torch.cuda.ExternalStream(handle)


def over_tensors(name: str, function: Callable[..., Tensor], arrays: tuple[Any, ...], *rest: Any) -> Any:
    """Calls a function of tensors with arrays of another library.

    Args:
        name: For messages.
        function: Takes tensors, and then the rest.
        arrays: Of CuPy or of NumPy; None stays None, but for the first.
        rest: Other arguments.

    Returns:
        An array of the same library.

    Raises:
        KernelError: An array is of no such library, or of a type that PyTorch has not.
    """
    if torch.compiler.is_compiling():
        raise KernelError(f"{name} takes PyTorch's tensors alone where it is compiled")
    if arrays[0] is None:
        raise KernelError(f"{name} takes arrays of PyTorch, CuPy or NumPy, not None")
    library = _library(arrays[0])
    with torch.no_grad():
        if library == "cupy":
            import cupy

            with torch.cuda.device(arrays[0].device.id), torch.cuda.stream(_stream_of(cupy)):
                made = function(*(_given(name, one, library) for one in arrays), *rest)
                return cupy.from_dlpack(made)
        made = function(*(_given(name, one, library) for one in arrays), *rest)
        return made.cpu().numpy()
