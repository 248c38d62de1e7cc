"""Where benchmarks keep their parts, so that a run can stop anywhere and the next one does what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results.schema import Meta, replace


class Store:
    """What was measured, in a JSON file that is replaced after each part.

    Args:
        path: The file; read where it is there.
        described: Of the run that adds to it; None keeps the file's own.

    Raises:
        OSError: It is not there, and no run adds to it.
        ValueError: The file is not one of these.
    """

    def __init__(self, path: Path, described: Meta | None = None) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        if path.exists() or described is None:
            stored = path.read_text()
            try:
                kept = json.loads(stored)
                self.done = dict(kept["done"])
                described = described or Meta.model_validate(kept["meta"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: not from this benchmark ({error}); remove it or name another --out"
                ) from error
        self.meta = described

    def keep(self, key: str, value: Any) -> None:
        """Adds a part and saves."""
        self.done[key] = value
        replace(self.path, json.dumps({"meta": self.meta.model_dump(), "done": self.done}) + "\n")
