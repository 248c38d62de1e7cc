"""Writes the table of docs/metrics.md from the metrics that are exported (`cudasched.observe.names`)."""

from __future__ import annotations

import re
from pathlib import Path

from cudasched.observe import names

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
MARKED = re.compile(r"(?<=<!-- generated: scripts/metrics_table.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """One row a metric, in the order of the export."""
    rows = ["| name | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for each in names.exports():
        total = "_total" if each.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}{total}` | {each.kind} | {each.unit or 'number'} | {labels} | {each.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(MARKED.sub(lambda _: table(), text), encoding="utf-8")
