"""What the programs of kernels of their own share: they are compiled here, and called by the driver's functions."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cudasched
import torch
from cudasched.tune.compile import choose, compile_source

torch.cuda.init()
torch.zeros(1, device="cuda")  # the context is there, and current
cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """One call of the driver; ends the program where it fails."""
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        raise SystemExit(f"{name}: {status}")


def target() -> str:
    """What is compiled for."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def compiled(source: str, options: Sequence[str] = (), relocatable: bool = False) -> bytes:
    """Machine code of a source, which may include the package's headers."""
    compiler = choose()
    if relocatable:
        options = [*options, "--relocatable-device-code=true" if compiler == "nvrtc" else "-rdc=true"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernels.cu"
        path.write_text(source)
        return compile_source(path, (), target(), compiler, [f"-I{cudasched.get_include()}", *options]).image


def load(image: bytes) -> ctypes.c_void_p:
    """A module."""
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), image)
    return module


def function(module: ctypes.c_void_p, name: str) -> int:
    """A kernel of it."""
    found = ctypes.c_void_p()
    call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
    assert found.value
    return found.value


def launch(kernel: int, blocks: int, threads: int, arguments: Sequence[ctypes._SimpleCData], stream: int = 0) -> None:
    """Launches it; sizes in x alone."""
    table = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
    call(
        "cuLaunchKernel", ctypes.c_void_p(kernel), blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), table, None
    )


def pointer(tensor: torch.Tensor) -> ctypes.c_uint64:
    """Where a tensor is."""
    return ctypes.c_uint64(tensor.data_ptr())
