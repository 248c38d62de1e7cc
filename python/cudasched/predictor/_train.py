"""From a recording to trees in use, for `cudasched train`.

The recipe is the one that the shipped model was chosen to have (``training/`` of the repository searches anew). No
labels are needed: launches with the same features are one sample to learn.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._output import Output
from cudasched.config import models_directory, resolve
from cudasched.errors import Error, ModelError
from cudasched.predictor._model import Model
from cudasched.predictor._numpy import numpy
from cudasched.predictor._recording import _metadata, _table, capability_of, feature_names, feature_rows

if TYPE_CHECKING:
    from numpy import float32, float64
    from numpy.typing import NDArray

    from cudasched.predictor._model import Launches

__all__ = ["Trained", "place_of", "train"]

#: Trees, depth and thresholds a feature: the limits of a launch's time.
TREES, DEPTH, MAX_BIN = 128, 7, 255
PARAMETERS: dict[str, Any] = {
    "objective": "reg:squarederror",
    "max_depth": DEPTH,
    "eta": 0.25,
    "min_child_weight": 10.0,
    "max_bin": MAX_BIN,
    "tree_method": "hist",
    "seed": 1,
}
#: Fewer different launches teach nothing of others.
LEAST_LAUNCHES = 100
#: Rows that the file carries with their margins, which every load replays.
REPLAYED = 64


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        path: The model's file.
        launches: Kernels with a time of their own in the recording.
        different: Of these, the different ones, which the trees learned.
        error: Median error, as a fraction, on a fifth of the different launches by trees that had not seen them.
        time_weighted: Sum of those errors in time, over the sum of the durations.
        architecture: Such as "sm_90".
        gpu: The name.
    """

    path: Path
    launches: int
    different: int
    error: float
    time_weighted: float
    architecture: str
    gpu: str


def place_of(out: str | os.PathLike[str] | None, architecture: str = "sm_XY") -> Output:
    """The file for a model of an architecture: `out`, else the one in the scheduler's directory.

    Raises:
        ConfigError: The model cannot be written there.
        Error: XGBoost is missing.
        ModelError: The scheduler has no directory.
    """
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise Error(f"{error}: training needs XGBoost: pip install xgboost-cpu") from None
    if out is not None:
        return Output(out, option="-o", parents=True)
    directory = models_directory(resolve().config)
    if directory is None:
        raise ModelError("nothing is kept between runs (CUDASCHED_CACHE_DIR=off), so name a file for the model")
    return Output(directory / f"{architecture}.ubj", parents=True)


def train(recording: Launches, out: str | os.PathLike[str] | None = None, *, threads: int = 2) -> Trained:
    """Trains trees on a recording's launches and writes them to the scheduler's directory.

    Args:
        recording: A data set of `cudasched collect`: a path, or a table with metadata.
        out: The model's file; None is ``models/sm_XY.ubj`` in the scheduler's state directory, which replaces the
            package's model.
        threads: Of XGBoost.

    Raises:
        ConfigError: The model cannot be written.
        Error: The file is no recording, has too few launches with a time of their own, or a package is missing.
        ModelError: The model cannot be put where it is found.
    """
    np = numpy()
    table = _table(recording)
    architecture, gpu = capability_of(table) or "", _metadata(table, "cudasched.gpu")
    place = place_of(out, architecture)
    if isinstance(recording, (str, os.PathLike)):
        place.refuse(recording, "the model would replace the recording")
    import xgboost

    launches, rows, logs = _launches(table)
    if len(rows) < LEAST_LAUNCHES:
        raise Error(
            f"the recording has {len(rows)} different launches with a time of their own, and {LEAST_LAUNCHES} are "
            "needed: record more of the program, or other shapes"
        )
    names = feature_names()

    def fit(x: NDArray[float32], y: NDArray[float64]) -> Any:
        data = xgboost.QuantileDMatrix(x, y, feature_names=list(names), max_bin=MAX_BIN, nthread=threads)
        return xgboost.train({**PARAMETERS, "nthread": threads}, data, TREES)

    held = np.random.default_rng(1).random(len(rows)) < 0.2
    margins = fit(rows[~held], logs[~held]).inplace_predict(rows[held], predict_type="margin", validate_features=False)
    said, lasted = np.exp(np.asarray(margins, np.float64)), np.exp(logs[held])
    booster = fit(rows, logs)
    booster.set_attr(cudasched_architecture=architecture, cudasched_gpu=gpu)
    replay = rows[np.linspace(0, len(rows) - 1, min(REPLAYED, len(rows))).astype(np.int64)]
    model = Model.from_xgboost(booster, replay=replay)
    model.save(place)
    return Trained(
        path=place.path,
        launches=launches,
        different=len(rows),
        error=float(np.median(np.abs(said / lasted - 1))),
        time_weighted=float(np.abs(said - lasted).sum() / lasted.sum()),
        architecture=architecture,
        gpu=gpu,
    )


def _launches(table: Any) -> tuple[int, NDArray[float32], NDArray[float64]]:
    """How many kernels were timed and ran alone; the different rows of features, with their median log ns."""
    import pyarrow.compute as pc

    np = numpy()
    for name in ("duration_ns", "overlapped", "kind"):
        if name not in table.column_names:
            raise Error(f"the table is no recording of `cudasched collect`: it has no column {name}")
    timed = pc.and_(pc.is_valid(table["duration_ns"]), pc.greater(pc.fill_null(table["duration_ns"], 0), 0))
    alone = pc.and_(timed, pc.invert(pc.fill_null(table["overlapped"], False)))
    kernels = table.filter(pc.and_(alone, pc.equal(table["kind"].cast("string"), "kernel")))
    rows, _ = feature_rows(kernels)
    logs = np.log(kernels["duration_ns"].to_numpy(zero_copy_only=False).astype(np.float64))
    if not len(rows):
        return 0, rows, logs
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1]]))
    ends = np.append(starts[1:], len(order))
    medians = np.array([np.median(logs[order[a:b]]) for a, b in zip(starts, ends, strict=True)])
    return len(rows), rows[order[starts]], medians
