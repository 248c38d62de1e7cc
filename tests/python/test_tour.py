"""The tour runs from top to bottom on the committed recording, with whatever PyTorch is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT

for name in ("nbformat", "nbclient", "matplotlib", "ipykernel", "pyarrow"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[test]' in a clone")

from notebooks import printed  # noqa: E402


def test_it_runs_on_the_recorded_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = printed(ROOT / "notebooks" / "tour.ipynb", monkeypatch, tmp_path)
    assert "program:gpt_decode: " in text and "kernels in 50 ms" in text
    assert "latency launches" in text
