"""Puts the repository root, from which the benchmarks are run, and the helpers of tests/python on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cudasched.demo.harness import Backend, HarnessError, installed_simulated_driver
from hypothesis import settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "python")]
# How long an example takes says something of the machine alone.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results name a commit wherever there is no clone, and git is not asked in one."""
    monkeypatch.setenv("CUDASCHED_COMMIT", "0" * 12)


@pytest.fixture(scope="session")
def simulated_driver() -> Path:
    try:
        return installed_simulated_driver()
    except HarnessError as error:
        pytest.skip(f"the package is not built: {error}")


@pytest.fixture
def backend(simulated_driver: Path) -> Iterator[Backend]:
    """A simulated device of this test's own."""
    made = Backend.simulated(simulated_driver)
    yield made
    made.close()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The plots that are written from here on; their files are empty."""
    figure = pytest.importorskip("matplotlib.figure")
    made: list[Figure] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: (made.append(self), path.touch()))
    return made
