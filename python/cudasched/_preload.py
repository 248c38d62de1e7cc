"""How a program without cudasched loads the shim: by the dynamic loader's environment variables.

The shim is preloaded, and its directory is the first of the library path. So a start script that sets ``LD_PRELOAD``
anew still finds the shim by name. The user's preloads come before the shim.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cudasched import hook
from cudasched.errors import HookError

__all__ = ["added", "preloads", "removed"]

_SHIMS = ("hook/libcuda.so.1", "hook/libcuda.so")
_LIMITERS = ("libvgpu.so", "libvgpu-control.so")
"""Libraries in front of the driver that limit a program's GPU resources: HAMi-core, vgpu-manager."""
_LINK_ORDER = "verify_asan_link_order"


def added(files: hook.Files, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that put the shim in front of the driver in a program and in those that it starts.

    Args:
        files: Where our libraries are.
        environment: The user's.

    Raises:
        HookError: The installation's path cannot stand in LD_PRELOAD.
    """
    kept = _library_path(environment)
    options = environment.get("ASAN_OPTIONS", "")
    made = {
        "LD_PRELOAD": preloads(files, environment.get("LD_PRELOAD", "")),
        "LD_LIBRARY_PATH": ":".join([str(files.shim.parent), *kept]),
    }
    if _LINK_ORDER not in options:
        # AddressSanitizer's library does not start behind a preloaded one unless told; ours has nothing that it has.
        made["ASAN_OPTIONS"] = ":".join(filter(None, [options, f"{_LINK_ORDER}=0"]))
    return made


def removed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is to load the driver itself, without the variables of `added`."""
    made = dict(environment)
    for name, parts in (
        ("LD_PRELOAD", [path for path in _paths(made.get("LD_PRELOAD", "")) if not path.endswith(_SHIMS)]),
        ("LD_LIBRARY_PATH", _library_path(made)),
    ):
        made.pop(name, None)
        if parts:
            made[name] = ":".join(parts)
    return made


def preloads(files: hook.Files, already: str, system: Path = Path("/etc/ld.so.preload")) -> str:
    """The value of LD_PRELOAD: the user's libraries, then ours.

    A limiter of all programs of the system goes first, or calls of programs that link the driver would bypass the
    limiter.

    Args:
        files: Where our libraries are.
        already: The user's LD_PRELOAD. Shims in it, as another `cudasched run` has put there, are left out: one engine
            a process.
        system: The file that names the libraries preloaded into every program, after LD_PRELOAD.

    Raises:
        HookError: The installation's path cannot stand in LD_PRELOAD.
    """
    ours = [str(files.shim), str(files.stub)]
    for path in ours:
        if any(character in path for character in " :;\t\n"):
            raise HookError(
                f"{path} cannot stand in LD_PRELOAD, which is split at spaces and colons: install cudasched in a "
                "directory without them, or `import cudasched` in the program"
            )
    kept = [path for path in _paths(already) if not path.endswith(_SHIMS)]
    limiting = [path for path in _everywhere(system) if os.path.basename(path) in _LIMITERS and path not in kept]
    return ":".join([*limiting, *kept, *ours])


def _paths(value: str) -> list[str]:
    return value.replace(":", " ").split()


def _library_path(environment: Mapping[str, str]) -> list[str]:
    """The directories of LD_LIBRARY_PATH, without those of shims; an empty one is the working directory."""
    value = environment.get("LD_LIBRARY_PATH", "")
    return [directory for directory in re.split("[:;]", value) if not _has_shim(directory)] if value else []


def _has_shim(directory: str) -> bool:
    return os.path.basename(directory) == "hook" and os.path.isfile(os.path.join(directory, "../libcudasched.so"))


def _everywhere(system: Path) -> list[str]:
    try:
        lines = system.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [path for line in lines for path in _paths(line.partition("#")[0])]
