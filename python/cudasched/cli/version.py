"""`cudasched --version`: the facts for a report of a problem."""

from __future__ import annotations

import platform
import zlib
from pathlib import Path

from cudasched import hook
from cudasched._text import printable
from cudasched._version import __version__
from cudasched.doctor import driver_version
from cudasched.errors import Error

__all__ = ["describe"]

_MODELS = Path(__file__).parents[1] / "predictor" / "models"


def _build() -> str:
    try:
        files = hook.locate()
        engine = hook.load_core().version()
    except Error as error:
        return str(error)
    return f"engine {engine}, Python {platform.python_version()}, {platform.machine()}, {files.core.parent}"


def _driver() -> str:
    try:
        path = hook.load_core().find_driver()
    except Error:
        return "none found"
    if hook.is_simulated(path):
        return f"simulated, {path}"
    return f"{driver_version(path) or 'of unknown version'}, {path}"


def _models() -> str:
    found = [path for path in sorted(_MODELS.glob("sm_*")) if path.suffix in (".json", ".ubj")]
    return ", ".join(f"{path.stem} ({zlib.crc32(path.read_bytes()):08x})" for path in found) or "none"


def describe() -> str:
    """The version, and below the build, the driver and the models with checksums."""
    lines = [f"cudasched {__version__}", f"build: {_build()}", f"driver: {_driver()}", f"models: {_models()}"]
    return "\n".join(map(printable, lines))
