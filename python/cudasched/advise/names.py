"""Kernel names for readers."""

from __future__ import annotations

from cudasched import hook
from cudasched.errors import HookError

__all__ = ["qualified_name", "signature"]


def qualified_name(mangled: str) -> str:
    """A kernel's name with namespaces, up to the first template arguments, without parameters.

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


def signature(mangled: str) -> str:
    """The whole demangled name with template arguments and parameters; `qualified_name` where that cannot be had."""
    if not mangled.startswith("_Z"):
        return mangled
    try:
        hook.load_core()
    except HookError:  # the package was not built
        return qualified_name(mangled)
    from cudasched import _core

    plain = _core.demangled(mangled.encode(errors="replace"))
    return qualified_name(mangled) if plain.startswith("_Z") else plain
