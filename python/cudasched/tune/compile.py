"""From a kernel's source to machine code: NVRTC in this process, or nvcc. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cudasched._scratch import Scratch
from cudasched.errors import ConfigError, Error
from cudasched.tune._nvrtc import Nvrtc, load

__all__ = ["CompileError", "Compiled", "Compiler", "choose", "compile_source", "version"]

Compiler = Literal["nvrtc", "nvcc"]
_LOG_CHARACTERS = 4000
_NVCC_S = 300.0
IMAGES = (".cubin", ".fatbin", ".ptx")


class CompileError(Error):
    """A source does not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """Machine code.

    Attributes:
        image: The cubin.
        log: The compiler's output.
        seconds: The compilation's time.
    """

    image: bytes
    log: str
    seconds: float


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = [str(Path(home) / "bin")] if home else []
    return shutil.which("nvcc", path=os.pathsep.join([*beside, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))


def _nvrtc() -> Nvrtc:
    return load()


def version(compiler: Compiler) -> str:
    """A compiler's version, under which output may be cached."""
    if compiler == "nvrtc":
        return "nvrtc {}.{}".format(*_nvrtc().version)
    try:
        said = subprocess.run(
            [_nvcc() or "nvcc", "--version"], capture_output=True, text=True, timeout=_NVCC_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Error(f"nvcc does not say its version: {error}") from None
    return said.stdout.strip()


def choose(wanted: str = "auto") -> Compiler:
    """Which compiler there is: NVRTC first, which starts no process.

    Args:
        wanted: "nvrtc", "nvcc" or "auto".

    Raises:
        ConfigError: None of the name.
        Error: There is none; the text names the searched compilers and those to install.
    """
    if wanted not in ("auto", "nvrtc", "nvcc"):
        raise ConfigError(f"compiler {wanted!r}: it is auto, nvrtc or nvcc")
    reason = "nvcc is not on the PATH nor in CUDA_HOME"
    if wanted in ("auto", "nvrtc"):
        try:
            _nvrtc()
            return "nvrtc"
        except Error as error:
            if wanted == "nvrtc":
                raise Error(f"{error}; pip install nvidia-cuda-nvrtc") from None
            reason = f"{error}, and {reason}"
    if _nvcc():
        return "nvcc"
    raise Error(f"nothing here compiles kernels: {reason}. pip install nvidia-cuda-nvrtc, or CUDA's toolkit")


def _cuda_headers() -> list[str]:
    """Where cuda_fp16.h and its like may be."""
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += [Path("/usr/local/cuda/include")]
    nvcc = _nvcc()
    if nvcc:
        places.append(Path(nvcc).resolve().parent.parent / "include")
    return [str(one) for one in dict.fromkeys(places) if (one / "cuda_fp16.h").is_file()]


def compile_source(
    source: Path, macros: Sequence[tuple[str, str]], target: str, compiler: Compiler, options: Sequence[str] = ()
) -> Compiled:
    """Compiles one configuration.

    Args:
        source: The file; includes are searched beside the file and in CUDA's headers. A .cubin, .fatbin or .ptx is
            taken unchanged, without macros.
        macros: Names and values.
        target: Such as "sm_90a".
        compiler: Which.
        options: More of them, in the compiler's form.

    Raises:
        CompileError: The source does not compile.
        Error: The compiler cannot be used, or the file cannot be read.
    """
    begin = time.perf_counter()
    if source.suffix in IMAGES:
        return Compiled(source.read_bytes() + b"\0", "", time.perf_counter() - begin)
    given = [f"-D{name}={value}" for name, value in macros]
    includes = [f"-I{source.parent}", *(f"-I{one}" for one in _cuda_headers())]
    try:
        if compiler == "nvrtc":
            image, log = _by_nvrtc(source, [f"--gpu-architecture={target}", "-std=c++17", *includes, *given, *options])
        else:
            image, log = _by_nvcc(source, ["-cubin", f"-arch={target}", "-std=c++17", *includes, *given, *options])
    except OSError as error:
        raise Error(f"{source}: it cannot be compiled: {error.strerror or error}") from None
    return Compiled(image, log, time.perf_counter() - begin)


def _short(log: str) -> str:
    log = log.strip()
    return log if len(log) <= _LOG_CHARACTERS else log[:_LOG_CHARACTERS] + "\n..."


def _by_nvrtc(source: Path, options: Sequence[str]) -> tuple[bytes, str]:
    image, log = _nvrtc().compile(source.read_bytes(), source.name, options)
    if image is None:
        raise CompileError(_short(log))
    return image, _short(log)


def _by_nvcc(source: Path, options: Sequence[str]) -> tuple[bytes, str]:
    nvcc = _nvcc()
    if nvcc is None:
        raise Error("nvcc is not there any more")
    with Scratch("compile") as directory:
        made = directory / "kernel.cubin"
        try:
            done = subprocess.run(
                [nvcc, *options, "-o", str(made), str(source)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_NVCC_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"nvcc took longer than {_NVCC_S:g} s") from None
        log = _short(done.stdout + done.stderr)
        if done.returncode != 0 or not made.exists():
            raise CompileError(log or f"nvcc ended with {done.returncode}")
        return made.read_bytes(), log
