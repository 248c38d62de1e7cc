"""GPU time by region, module and kernel, as one interactive HTML file without anything from elsewhere."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched.advise.origins import origin_of

__all__ = ["Flame"]

_PAGE = Path(__file__).with_name("flame.html")
_MOST_KERNELS = 4096


@dataclass
class _Kernel:
    launches: int = 0
    predicted_ns: int = 0
    measured: int = 0
    measured_ns: int = 0

    def gpu_ns(self) -> int:
        """The time of all its launches: by the timed ones, else as predicted."""
        if self.measured:
            return self.measured_ns * max(self.launches, self.measured) // self.measured
        return self.predicted_ns


class Flame:
    """Gathers GPU time while a timeline is made."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str, str], _Kernel] = {}

    def _kernel(self, region: str, name: str, full: str, file: str) -> _Kernel:
        # By the file that the kernel was loaded from, else by the owner that its name tells. Slices belong to the
        # graph.
        graph = not full and name.startswith("graph ")
        module = "graphs" if graph else file.rpartition("/")[2] or origin_of(full or name).name
        key = region, module, name.partition(",")[0] if module == "graphs" else name
        if key not in self._kernels and len(self._kernels) >= _MOST_KERNELS:
            key = region, "(others)", "(others)"
        return self._kernels.setdefault(key, _Kernel())

    def launch(self, region: str, name: str, full: str, predicted_ns: int, file: str = "") -> None:
        """A launch, and its predicted time; 0: not known."""
        kernel = self._kernel(region, name, full, file)
        kernel.launches += 1
        kernel.predicted_ns += predicted_ns

    def timed(self, region: str, name: str, full: str, measured_ns: int, file: str = "") -> None:
        """A launch's measured time, in addition to `launch`."""
        kernel = self._kernel(region, name, full, file)
        kernel.measured += 1
        kernel.measured_ns += measured_ns

    @property
    def gpu_ns(self) -> int:
        """In all."""
        return sum(kernel.gpu_ns() for kernel in self._kernels.values())

    @property
    def without_time(self) -> int:
        """Launches of which nothing is known."""
        return sum(kernel.launches for kernel in self._kernels.values() if kernel.gpu_ns() == 0)

    def tree(self) -> dict[str, Any]:
        """Name, GPU time, launches and the number of timed ones, and the children."""
        root: dict[str, Any] = {"name": "all", "ns": 0, "launches": 0, "timed": 0, "children": {}}
        for path, kernel in self._kernels.items():
            node = root
            for level in (None, *path):
                if level is not None:
                    empty: dict[str, Any] = {"name": level, "ns": 0, "launches": 0, "timed": 0, "children": {}}
                    node = node["children"].setdefault(level, empty)
                node["ns"] += kernel.gpu_ns()
                node["launches"] += kernel.launches
                node["timed"] += min(kernel.measured, kernel.launches)
        return _listed(root)

    def page(self, title: str) -> str:
        """The HTML file."""
        note = (
            f"{self.without_time:,} launches have no GPU time: neither was one of their kind timed, nor did the gate "
            "predict them. Trace with --device-times to have all."
            if self.without_time
            else ""
        )
        # A name may hold characters that end a script.
        data = json.dumps(self.tree()).replace("<", "\\u003c").replace("&", "\\u0026")
        text = _PAGE.read_text(encoding="utf-8")
        values = {"@TITLE@": html.escape(title), "@NOTE@": html.escape(note), "@DATA@": data}
        # At once: a title or a name may look like one of the places.
        return re.sub("|".join(values), lambda place: values[place[0]], text)


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    children = sorted((_listed(child) for child in node["children"].values()), key=lambda child: -int(child["ns"]))
    return {**node, "children": children}
