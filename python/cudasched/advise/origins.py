"""A kernel's owner, and whether the user can change its launch shape: by rules on names in ``origins.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudasched.advise.names import qualified_name
from cudasched.config import read_toml

__all__ = ["Origin", "origin_of", "rules"]

_FILE = Path(__file__).with_name("origins.toml")


@dataclass(frozen=True)
class Origin:
    """Where kernels of certain names come from.

    Attributes:
        name: Of the library or compiler; "own" for a kernel that no rule names.
        changeable: The user can change the launch shape.
        how: The means of change; empty where the shape cannot be changed.
    """

    name: str
    changeable: bool
    how: str = ""


def rules() -> dict[str, Any]:
    """The rules as they are written: ``origin``, a list of tables, and ``origin_own``, a table."""
    return read_toml(_FILE)[0]


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


@lru_cache(maxsize=1)
def _compiled() -> tuple[list[tuple[re.Pattern[str], re.Pattern[str] | None, re.Pattern[str] | None, Origin]], Origin]:
    written = rules()
    compiled = [
        (
            _any_of(rule["patterns"]),
            _any_of(rule["mangled"]) if "mangled" in rule else None,
            _any_of(rule["modules"]) if "modules" in rule else None,
            Origin(rule["name"], rule["shape"] == "user", rule.get("how", "")),
        )
        for rule in written["origin"]
    ]
    return compiled, Origin(written["origin_own"]["name"], True, written["origin_own"]["how"])


def origin_of(function: str, module: str = "") -> Origin:
    """A kernel's owner: by the file that it was loaded from, where that is a known library's; else by its name.

    Args:
        function: The kernel's name, mangled or not. A leading anonymous namespace does not count.
        module: A path, or its last part; empty where not known.
    """
    compiled, own = _compiled()
    file = module.rpartition("/")[2]
    for _, _, modules, origin in compiled:
        if file and modules is not None and modules.search(file):
            return origin
    name = qualified_name(function).removeprefix("(anonymous namespace)::")
    for pattern, mangled, _, origin in compiled:
        if pattern.search(name) or (mangled is not None and mangled.search(function)):
            return origin
    return own
