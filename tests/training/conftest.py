"""The repository's root on the path, from which `python -m training.train` is run; and what the tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

for name in ("numpy", "pyarrow"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'cudasched[training]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first, so that the other processes have work while it runs."""
    items.sort(key=lambda item: item.path.name != "test_notebook.py")


@pytest.fixture(scope="session")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of sweeps by two processes."""
    import recordings

    return recordings.write_sweeps(tmp_path_factory.mktemp("data") / "sweeps.parquet")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of five programs."""
    import recordings

    return recordings.write_programs(tmp_path_factory.mktemp("data") / "programs.parquet")
