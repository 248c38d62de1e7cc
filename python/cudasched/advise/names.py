"""Kernel names as people read them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

__all__ = ["qualified_name", "signature"]

_MAX_DEMANGLED_CHARS = 16_384
_RUNTIME = "libstdc++.so.6"


def qualified_name(mangled: str) -> str:
    """A kernel's name with its namespaces, up to its first template arguments, without its parameters.

    Args:
        mangled: As the driver gives it: mangled after the Itanium ABI, or plain.

    Returns:
        "at::native::vectorized_elementwise_kernel" and the like; a name that is not mangled, or not so, as it is.
    """
    if not mangled.startswith("_Z"):
        return mangled
    at, parts = 2, []
    nested = mangled[at : at + 1] == "N"
    if nested:
        at += 1
        while mangled[at : at + 1] in ("r", "V", "K"):
            at += 1
    while at < len(mangled):
        if mangled.startswith("St", at):
            parts.append("std")
            at += 2
            continue
        if mangled[at] == "L":  # internal linkage
            at += 1
        digits = at
        while digits < len(mangled) and mangled[digits] in "0123456789":
            digits += 1
        if digits == at or digits - at > 4:
            break
        end = digits + int(mangled[at:digits])
        if end > len(mangled):
            break
        part = mangled[digits:end]
        parts.append("(anonymous namespace)" if part.startswith("_GLOBAL__N_") else part)
        at = end
        if not nested and parts != ["std"]:
            break
    return "::".join(parts) if parts and parts != ["std"] else mangled


@lru_cache(maxsize=1)
def _demangler() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    try:
        runtime, libc = ctypes.CDLL(_RUNTIME), ctypes.CDLL(None)
        runtime.__cxa_demangle.restype = ctypes.c_void_p
        runtime.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        libc.free.restype = None
        libc.free.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return runtime, libc


def signature(mangled: str) -> str:
    """The whole demangled name with template arguments and parameters; `qualified_name` where that cannot be had."""
    libraries = _demangler()
    if not mangled.startswith("_Z") or len(mangled) > _MAX_DEMANGLED_CHARS or libraries is None:
        return qualified_name(mangled)
    runtime, libc = libraries
    found = runtime.__cxa_demangle(mangled.encode(errors="replace"), None, None, None)
    if not found:
        return qualified_name(mangled)
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        libc.free(found)
