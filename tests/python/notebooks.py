"""Runs a notebook from top to bottom."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest


def printed(path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path) -> str:
    """What its cells print."""
    # The kernel is to be the Python, and to find the packages, of this test.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path)]))
    monkeypatch.setenv("IPYTHONDIR", str(directory))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed: they would go stale"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if "text" in output)
