"""docs/graphs.md knows every reason for which a graph stays whole, and every setting of slices."""

from __future__ import annotations

import re
from dataclasses import fields

from cudasched.config import Config
from cudasched.status import State
from support import ROOT

DOCUMENT = (ROOT / "docs/graphs.md").read_text(encoding="utf-8")


def test_every_reason_to_stay_whole_is_explained() -> None:
    header = (ROOT / "csrc/graph/reason.hpp").read_text(encoding="utf-8")
    names = re.search(r"kNames\{(.*?)\};", header, re.DOTALL)
    assert names
    reasons = set(re.findall(r'"(\w+)"', names[1])) - {"none"}
    table = DOCUMENT.split("## What stays whole, and why")[1].split("\n## ")[0]
    explained = {name for line in table.splitlines() if line.startswith("| `") for name in words(line.split("|")[1])}
    assert explained == reasons


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_settings_and_counters_of_slices_are_named() -> None:
    settings = {field.name for field in fields(Config) if field.name.startswith("graph_")}
    assert settings and all(f"| `{name}` |" in DOCUMENT for name in settings)
    counters = {field.name for field in fields(State) if "slice" in field.name or "whole" in field.name}
    missing = [name for name in counters if f"`{name}`" not in DOCUMENT]
    assert missing == []
