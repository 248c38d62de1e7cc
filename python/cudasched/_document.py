"""The document that `--json` prints: one line, one form for every command (docs/json.md)."""

from __future__ import annotations

import json
from typing import Any

from cudasched._version import __version__

__all__ = ["SCHEMA_VERSION", "document"]

SCHEMA_VERSION = 1


def document(kind: str, data: Any) -> str:
    """A command's result as one line of JSON, with ASCII alone in it.

    Args:
        kind: The command.
        data: The command's findings; docs/json.md has the fields for each kind.
    """
    return json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "version": __version__, "data": data})
