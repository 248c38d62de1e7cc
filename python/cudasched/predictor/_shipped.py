"""The models that the package ships, one a GPU architecture."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from cudasched.errors import ModelError
from cudasched.predictor._contributions import Contributions
from cudasched.predictor._model import Model
from cudasched.predictor._recording import _table, capability_of, is_recording

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    from cudasched.predictor._model import Launches

MODELS = Path(__file__).parent / "models"


def load(path: str | os.PathLike[str] | None = None, *, architecture: str | None = None) -> Model:
    """A saved model; without a path, the one that the package ships for a GPU.

    Args:
        path: A model of XGBoost or `Model.save`.
        architecture: Such as "sm_90", for a model that is shipped. None: this machine's first GPU, as nvidia-smi tells
            it; on a machine without one, the newest that is shipped.

    Raises:
        ModelError: The model cannot be used, or none is shipped for that GPU; the message has the remedy.
    """
    if path is not None:
        return Model(path)
    return _load_shipped(architecture or _architecture_here(), MODELS)


def predict(launches: Launches) -> NDArray[float64]:
    """Durations in ns by the shipped model (of the GPU that a recording names); see `Model.predict`.

    Raises:
        ModelError: No model is shipped for the GPU.
        Error: As `Model.predict`.
    """
    launches = _table(launches) if is_recording(launches) else launches
    return load(architecture=capability_of(launches)).predict(launches)


def explain(launches: Launches) -> Contributions:
    """Each feature's contribution, by the shipped model (of a recording's GPU); see `Model.explain`.

    Raises:
        ModelError: No model is shipped for the GPU.
        Error: As `Model.explain`.
    """
    launches = _table(launches) if is_recording(launches) else launches
    return load(architecture=capability_of(launches)).explain(launches)


@functools.lru_cache(maxsize=4)
def _load_shipped(architecture: str | None, models: Path) -> Model:
    shipped = {path.stem: path for path in sorted(models.glob("sm_*")) if path.suffix in (".json", ".ubj")}
    if not shipped:
        raise ModelError(
            f"this build of cudasched ships no model ({models} has none); train one (python -m training.train) and "
            "load it by its path"
        )
    if architecture is None:
        architecture = max(shipped, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))
    if architecture not in shipped:
        raise ModelError(
            f"no model is shipped for {architecture}; there is {', '.join(shipped)}. Train one on recordings of this "
            "GPU (python -m training.train) and load it by its path, or name another architecture"
        )
    return Model(shipped[architecture])


@functools.lru_cache(maxsize=1)
def _architecture_here() -> str | None:
    """The first GPU's, asked of another process: a driver call here would be this program's first."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    digits = lines[0].replace(".", "") if lines else ""
    return f"sm_{digits}" if digits.isdigit() else None
