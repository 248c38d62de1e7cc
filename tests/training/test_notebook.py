"""The notebook runs from top to bottom on the committed data, and prints what it has, but for figures."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'cudasched[training]'")
for name in ("nbclient", "xgboost", "scipy", "matplotlib", "ipykernel"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'cudasched[training]'")

from cudasched import errors, hook  # noqa: E402

from scripts import run_notebooks  # noqa: E402

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "predictor.ipynb"


def test_it_runs_on_the_committed_data() -> None:
    try:
        hook.load_core()
    except errors.HookError as error:
        pytest.skip(f"the package is not built: {error}")
    notebook = run_notebooks.executed(NOTEBOOK)
    text = run_notebooks.printed(notebook)
    assert "launches of" in text
    assert "within the bound" in text
    assert "shapes" in text
    assert run_notebooks.differences(nbformat.read(NOTEBOOK, as_version=4), notebook) == []
