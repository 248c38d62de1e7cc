"""What results say about the command that made them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import meta


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("benchmarks/pytorch/__main__.py", "python -m benchmarks.pytorch --only costs"),
        ("benchmarks/observe/tracing.py", "python -m benchmarks.observe.tracing --only costs"),
        ("training/evaluate.py", "python -m training.evaluate --only costs"),
    ],
)
def test_the_command_is_as_one_would_type_it(path: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(meta.ROOT / path), "--only", "costs"])
    assert meta.command_line() == said


def test_a_program_from_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "pytest"), "-q"])
    assert meta.command_line() == "pytest -q"
