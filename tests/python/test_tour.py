"""The tour runs from top to bottom on the committed recording, with whatever PyTorch is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support import ROOT

for name in ("nbformat", "nbclient", "matplotlib", "ipykernel", "pyarrow"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[test]' in a clone")

import nbclient  # noqa: E402
import nbformat  # noqa: E402

NOTEBOOK = ROOT / "notebooks" / "tour.ipynb"


def test_it_runs_on_the_recorded_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The kernel is to be the Python, and to find the packages, of this test.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path)]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed: they would go stale"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    text = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "program:gpt_decode: " in text and "kernels in 50 ms" in text
    assert "latency launches" in text
