"""The tour runs from top to bottom on the committed recording, with whatever PyTorch is there."""

from __future__ import annotations

import pytest
from support import ROOT

for name in ("nbformat", "nbclient", "matplotlib", "ipykernel", "pyarrow"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[test]' in a clone")

from notebooks import printed  # noqa: E402


def test_it_runs_on_the_recorded_launches() -> None:
    try:
        import torch

        with_outputs = not torch.cuda.is_available()
    except ImportError:
        with_outputs = False
    text = printed(ROOT / "notebooks" / "tour.ipynb", as_committed=with_outputs)
    assert "program:gpt_decode: " in text and "kernels in 50 ms" in text
    assert "latency launches" in text
