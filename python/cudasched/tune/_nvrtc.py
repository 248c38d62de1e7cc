"""NVRTC by ctypes, to compile kernels in this process. PyTorch's CUDA builds bring the library, and so does a wheel.

The library is loaded when first used. Its functions may be called from any thread, and let others run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cudasched.errors import Error

__all__ = ["Nvrtc", "load"]

#: Majors of the library, the newest first.
_MAJORS = (13, 12)
#: Where wheels of NVIDIA's have it, below the package `nvidia`.
_IN_WHEELS = ("cu13/lib", "cuda_nvrtc/lib")


def _loaded_major() -> int | None:
    """The major CUDA version of an imported PyTorch's build: the driver runs code of that compiler."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    try:
        return int(str(version).split(".")[0]) if version else None
    except ValueError:
        return None


def _candidates() -> Iterator[str]:
    """Files and names to be tried, in order."""
    majors = sorted(_MAJORS, key=lambda one: (one != _loaded_major(), -one))
    spec = importlib.util.find_spec("nvidia")
    wheels = list(spec.submodule_search_locations or []) if spec else []
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for major in majors:
        name = f"libnvrtc.so.{major}"
        places = [Path(one, part) for one in wheels for part in _IN_WHEELS]
        places += [Path(one, part) for one in homes if one for part in ("lib64", "lib")]
        yield from (str(one / name) for one in places if (one / name).exists())
        yield name


class Nvrtc:
    """The library.

    Attributes:
        version: Major and minor.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Of a library that is loaded.

        Raises:
            Error: It lacks a function, or does not answer.
        """
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        sizes = ctypes.POINTER(ctypes.c_size_t)
        names = ctypes.POINTER(ctypes.c_char_p)
        try:
            self._functions = {
                name: getattr(library, name)
                for name in (
                    *("nvrtcVersion", "nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram"),
                    *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
                )
            }
            self._error_string = library.nvrtcGetErrorString
        except AttributeError as error:
            raise Error(f"no NVRTC: {error}") from None
        self._error_string.restype = text
        of = self._functions
        of["nvrtcVersion"].argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)]
        of["nvrtcCreateProgram"].argtypes = [ctypes.POINTER(pointer), text, text, ctypes.c_int, names, names]
        of["nvrtcCompileProgram"].argtypes = [pointer, ctypes.c_int, names]
        of["nvrtcDestroyProgram"].argtypes = [ctypes.POINTER(pointer)]
        for what in ("ProgramLog", "CUBIN"):
            of[f"nvrtcGet{what}Size"].argtypes = [pointer, sizes]
            of[f"nvrtcGet{what}"].argtypes = [pointer, text]
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def _call(self, name: str, *arguments: object) -> None:
        code = self._functions[name](*arguments)
        if code != 0:
            raise Error(f"{name}: {self._why(code)}")

    def _why(self, code: int) -> str:
        said: bytes = self._error_string(code) or b"error %d" % code
        return said.decode(errors="replace")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value + 1)
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw[: size.value]

    def compile(self, source: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Compiles a program.

        Args:
            source: CUDA C++.
            name: The name in messages.
            options: In NVRTC's form.

        Returns:
            The cubin, or None where the source does not compile; and the compiler's log.

        Raises:
            Error: NVRTC itself failed.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
            code = self._functions["nvrtcCompileProgram"](program, len(options), given)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if code != 0:
                return None, log or self._why(code)
            return self._bytes("CUBIN", program), log
        finally:
            self._functions["nvrtcDestroyProgram"](ctypes.byref(program))


@functools.cache
def load() -> Nvrtc:
    """The library; looked for beside PyTorch and in wheels, in a toolkit, and where the system looks.

    Raises:
        Error: There is none, or it does not answer.
    """
    tried = []
    for candidate in _candidates():
        try:
            # The library opens this one by name when it compiles, which fails for one in a wheel.
            for beside in sorted(Path(candidate).parent.glob("libnvrtc-builtins.so.*")) if "/" in candidate else []:
                ctypes.CDLL(str(beside))
            return Nvrtc(ctypes.CDLL(candidate))
        except (OSError, Error) as error:
            tried.append(str(error).splitlines()[0])
    raise Error(f"no NVRTC ({'; '.join(tried)})")
