"""Where benchmarks keep their parts, so that a run can stop anywhere and the next one does what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results.schema import Meta, replace


class Store:
    """What was measured, in a JSON file that is replaced after each part.

    Raises:
        ValueError: The file is not one of these.
    """

    def __init__(self, path: Path, described: Meta) -> None:
        self.path, self.meta = path, described
        self.done: dict[str, Any] = {}
        if path.exists():
            try:
                self.done = dict(json.loads(path.read_text())["done"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: not from this benchmark ({error}); remove it or name another --out"
                ) from error

    def keep(self, key: str, value: Any) -> None:
        """Adds a part and saves."""
        self.done[key] = value
        replace(self.path, json.dumps({"meta": self.meta.model_dump(), "done": self.done}) + "\n")
