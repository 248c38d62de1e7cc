"""Runs a notebook from top to bottom, and compares its outputs with those that it was committed with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
from support import ROOT

spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
assert spec is not None and spec.loader is not None
run_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_notebooks)


def printed(path: Path, *, as_committed: bool = True) -> str:
    """What its cells print: on a machine like that of the committed outputs the same, but for figures."""
    assert str(ROOT) not in path.read_text(encoding="utf-8")
    now = run_notebooks.executed(path)
    assert not as_committed or run_notebooks.differences(nbformat.read(path, as_version=4), now) == []
    text: str = run_notebooks.printed(now)
    return text
