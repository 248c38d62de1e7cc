"""The notebook runs from top to bottom on the committed data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'cudasched[training]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'cudasched[training]'")
for name in ("xgboost", "scipy", "matplotlib", "ipykernel"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'cudasched[training]'")

from cudasched import errors, hook  # noqa: E402

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "predictor.ipynb"


def test_it_runs_on_the_committed_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        hook.load_core()
    except errors.HookError as error:
        pytest.skip(f"the package is not built: {error}")
    # The kernel is to be the Python, and to find the packages, of this test.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path)]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed: they would go stale"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    text = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "launches of" in text
    assert "within the bound" in text
    assert "shapes" in text
