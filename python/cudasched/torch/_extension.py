"""The PyTorch extension (``csrc/torch``): built on the user's machine, because a wheel cannot know its PyTorch.

One shared library, called through ctypes, so that it depends on PyTorch's C++ alone and not on Python. The user's cache
keeps the library by PyTorch's version and ABI and by the sources. It is built at first use or by ``cudasched torch
build``.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cudasched import _text
from cudasched._scratch import cache_directory, ours
from cudasched.errors import Error

__all__ = ["REGIONS", "ExtensionError", "build", "built", "check", "command", "load", "place"]

_COMPILES_S = 900.0
_OLDEST, _NEWEST = (2, 4), (2, 13)
_LOST = (
    "Without the extension there is no memory by class (cudasched.torch.memory), and PyTorch keeps its cache; regions, "
    "streams, handover and scheduling do not need it"
)
_HERE = Path(__file__).resolve().parent


class ExtensionError(Error):
    """The PyTorch extension cannot be built or loaded; the message has the reason and the lost features."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the PyTorch extension cannot be had: {why}. {_LOST}.")


def _sources() -> Path:
    """The directory above ``torch/``: in an installation, or in a clone."""
    for candidate in (_HERE / "sources", _HERE.parents[2] / "csrc"):
        if (candidate / "torch" / "observe.cpp").is_file():
            return candidate
    raise ExtensionError(f"its sources are not at {_HERE / 'sources'}")


def _version(torch: Any) -> str:
    return str(torch.__version__)


def check_version(torch: Any) -> None:
    """Whether the extension is for this PyTorch.

    Raises:
        ExtensionError: It is too old, too new, or without CUDA.
    """
    if torch.version.cuda is None:
        raise ExtensionError("this PyTorch was built without CUDA")
    parts = _version(torch).split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return  # a build of one's own
    if not _OLDEST <= found <= _NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (_OLDEST, _NEWEST))
        raise ExtensionError(f"it is for PyTorch {oldest} to {newest}, and this is {_version(torch)}")


def _include_directories() -> Iterator[str]:
    """Where CUDA's headers may be: in wheels, then in a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for base in list(spec.submodule_search_locations or []) if spec else []:
        for name in ("cu13", "cuda_runtime"):
            yield str(Path(base, name, "include"))
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield str(Path(home, "include"))


#: Both are needed, and the wheel of the first does not bring the second.
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")


def _cuda_include() -> str:
    for directory in _include_directories():
        if all(Path(directory, header).is_file() for header in _CUDA_HEADERS):
            return directory
    raise ExtensionError(
        f"CUDA's headers ({' and '.join(_CUDA_HEADERS)}) were not found in one place;"
        " pip install nvidia-cuda-runtime nvidia-cuda-crt, of PyTorch's CUDA version, or set CUDA_HOME"
    )


def place(torch: Any) -> Path:
    """Where the library of this PyTorch is, or will be.

    Raises:
        ExtensionError: There is no home, or its sources are not there.
    """
    sources = _sources() / "torch"
    digest = hashlib.sha256(_version(torch).encode())
    digest.update(str(torch.compiled_with_cxx11_abi()).encode())
    for path in sorted(sources.glob("*.[ch]pp")):
        digest.update(path.read_bytes())
    cache = cache_directory()
    if cache is None:
        raise ExtensionError("neither HOME nor XDG_CACHE_HOME says where to keep it")
    name = "".join(c if c.isalnum() or c in ".+" else "_" for c in _version(torch))
    return cache / f"torch-{name}-{digest.hexdigest()[:16]}" / "libcudasched_torch.so"


def command(torch: Any, output: Path, *, link: bool = True) -> list[str]:
    """The compiler's command line; with `link` false for an object, which needs no CUDA build of PyTorch.

    Raises:
        ExtensionError: There is no compiler, or no header of CUDA.
    """
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, ("g++", "c++", "clang++"))][:1]
    except ValueError as error:
        raise ExtensionError(f"CXX={_text.shown(os.environ['CXX'])} is no command: {error}") from None
    if not compiler:
        raise ExtensionError("there is no C++ compiler (g++); install one")
    if shutil.which(compiler[0]) is None:
        raise ExtensionError(
            f"CXX={_text.shown(os.environ['CXX'])} names no command; unset it, or install that compiler"
        )
    sources = _sources()
    home = Path(torch.__file__).parent
    arguments = [
        *compiler,
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-pthread",
        "-fvisibility=hidden",
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
    ]
    arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{sources}"]
    arguments += ["-isystem", str(home / "include"), "-isystem", _cuda_include()]
    arguments += [str(sources / "torch" / "observe.cpp"), "-o", str(output)]
    if not link:
        return [*arguments, "-c"]
    return [*arguments, "-shared", f"-L{home / 'lib'}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{home / 'lib'}"]


def build(torch: Any, *, again: bool = False) -> Path:
    """The library of this PyTorch, compiled where it is not there yet.

    Raises:
        ExtensionError: It cannot be compiled, or this PyTorch is too old, too new or without CUDA.
    """
    check_version(torch)
    library = place(torch)
    if _trusted(library) and not again:
        return library
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not ours(library.parent.stat()):
            raise ExtensionError(f"{library.parent} is another user's, or another user may write to it: remove it")
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            done = subprocess.run(
                command(torch, made), capture_output=True, text=True, errors="replace", timeout=_COMPILES_S
            )
            if done.returncode != 0:
                raise ExtensionError(f"the compiler failed: {_text.printable(_first_error(done.stderr))}")
            os.replace(made, library)  # whole, also where two processes build at once
    except subprocess.TimeoutExpired:
        raise ExtensionError(f"the compiler did not end within {_COMPILES_S:g} s") from None
    except OSError as error:
        raise ExtensionError(f"{library}: {error}") from error
    return library


def _trusted(library: Path) -> bool:
    """Whether the library is there and no other user could have written it: its code will run."""
    try:
        return library.is_file() and ours(library.parent.stat()) and ours(library.lstat())
    except OSError:
        return False


def _first_error(said: str) -> str:
    """The first error of a compiler's output, else the output's end."""
    return next((line[:600] for line in said.splitlines() if "error:" in line), said.strip()[-600:])


class _Amount(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("key", "bytes", "peak")]


class Totals(ctypes.Structure):
    """As ``cudasched_torch_totals`` in csrc/torch/observe.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("requested", "requested_peak", "reserved", "reserved_peak", "lost", "unknown_frees")
        ),
        ("class_bytes", ctypes.c_uint64 * 3),
        ("class_peaks", ctypes.c_uint64 * 3),
    ]


_CLASSES, REGIONS, DEVICES = 3, 16, 64


class Point(ctypes.Structure):
    """As ``cudasched_torch_point`` in csrc/torch/observe.cpp."""

    _fields_ = [
        ("begin_ns", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("by_class", ctypes.c_uint64 * _CLASSES),
        ("by_region", ctypes.c_uint64 * REGIONS),
    ]


class Library:
    """The extension's functions."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ExtensionError(f"{path} cannot be loaded: {error}") from error
        number, size = ctypes.c_int, ctypes.c_uint64
        self.attach = self._function(library, "attach")
        self.begin_with = self._function(library, "begin_with", number, size, size, size)
        self.begin_with_reserved = self._function(library, "begin_with_reserved", number, size)
        self.name_stream = self._function(library, "name_stream", number, size, number)
        self.begin = self._function(library, "begin")
        self.scope = self._function(library, "scope", number, ctypes.c_uint32)
        self._read = self._function(library, "read", number, ctypes.POINTER(Totals))
        self._parts = self._function(library, "read_parts", number, number, ctypes.POINTER(_Amount), number)
        self._parts.restype = number
        self._timeline = self._function(library, "timeline", number, ctypes.POINTER(Point), number)
        self._timeline.restype = number
        self.limit = self._function(library, "limit", ctypes.c_uint32, size)
        self.over_limit = self._function(library, "over_limit", number, ctypes.c_uint32)
        self.over_limit.restype = size
        self.release_cache = self._function(library, "release_cache", ctypes.c_int32, ctypes.c_void_p)

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
        function = library[f"cudasched_torch_{name}"]
        function.argtypes, function.restype = arguments, None
        return function

    def read(self, device: int) -> Totals:
        """A device's totals."""
        totals = Totals()
        self._read(device, ctypes.byref(totals))
        return totals

    def timeline(self, device: int) -> list[Point]:
        """The memory held over time, the oldest first."""
        room = 4096
        points = (Point * room)()
        return list(points[: min(room, self._timeline(device, points, room))])

    def parts(self, device: int, by_region: bool) -> dict[int, int]:
        """Bytes by stream or by region."""
        room = 256
        while True:
            amounts = (_Amount * room)()
            count = self._parts(device, int(by_region), amounts, room)
            if count <= room:
                return {int(each.key): int(each.bytes) for each in amounts[:count]}
            room = count


def built(torch: Any) -> bool:
    """Whether the library of this PyTorch is there already."""
    try:
        check_version(torch)
        return _trusted(place(torch))
    except (ExtensionError, OSError):
        return False


def check(torch: Any) -> list[tuple[bool, str]]:
    """The extension's requirements and its place: whether each is met, and a text for each."""
    found: list[tuple[bool, str]] = []

    def look(what: str, find: Any) -> None:
        try:
            found.append((True, f"{what}: {find()}"))
        except ExtensionError as error:
            found.append((False, f"{what}: {error}"))

    def version() -> str:
        check_version(torch)
        return f"{_version(torch)}, CUDA {torch.version.cuda}"

    look("PyTorch", version)
    look("CUDA's headers", _cuda_include)
    look("compiler", lambda: command(torch, Path("unused"))[0])
    look("extension", lambda: place(torch) if built(torch) else "not built yet: cudasched torch build")
    return found


def load() -> Library:
    """The extension of the PyTorch that is installed, built at first use.

    Raises:
        ExtensionError: The extension is not available.
    """
    return Library(build(importlib.import_module("torch")))
