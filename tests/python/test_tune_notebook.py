"""The notebook that tunes layernorm runs from top to bottom: on the recorded spaces, or on stand-ins, which it says."""

from __future__ import annotations

import pytest
from support import ROOT

for name in ("nbformat", "nbclient", "matplotlib", "ipykernel", "sklearn"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[test]' in a clone")

from notebooks import printed  # noqa: E402


def test_it_tunes_layernorm_without_a_gpu() -> None:
    text = printed(ROOT / "notebooks" / "tuning.ipynb")
    recorded = list((ROOT / "benchmarks" / "tune" / "recorded").glob("layernorm-*.npz"))
    assert ("has not been recorded on a GPU yet" in text) != bool(recorded)
    assert "are within 2% of the best" in text and "times the best time; by chance" in text
    assert "#define WARPS_PER_ROW " in text and ("warm: " in text or "there is none to learn from" in text)
