"""Saved trees as a Python object."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cudasched import hook
from cudasched._output import Output
from cudasched.errors import ModelError
from cudasched.predictor._contributions import Contributions
from cudasched.predictor._numpy import numpy
from cudasched.predictor._recording import feature_names, feature_rows, is_recording

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy import float32, float64
    from numpy.typing import ArrayLike, NDArray

    from cudasched.predictor import _onnx

    #: A recording (a path, or a table with metadata), or rows of features of shape (launches, features).
    Launches: TypeAlias = str | os.PathLike[str] | pa.Table | ArrayLike

__all__ = ["Model"]


class Model:
    """Gradient-boosted trees over a launch's features; the margin is the natural logarithm of the duration in ns.

    Immutable, and safe to ask from several threads; batches are walked without the GIL.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes | bytearray, *, isa: str | None = None) -> None:
        """Reads a model of XGBoost 2.1 to 3.x (JSON or UBJSON), or of `save`.

        Rows that the model carries are replayed: one other bit in a margin, and it is refused.

        Args:
            source: A file, or a file's content, as `Booster.save_raw` gives it.
            isa: One of `isas`; None is the fastest that this processor and the model allow.

        Raises:
            ModelError: The model cannot be read, is broken, or has an unsupported part; the message names the fault and
                its place.
            HookError: The package was not built.
            Error: numpy is not installed.
        """
        numpy()
        hook.load_core()
        from cudasched import _core

        source = bytes(source) if isinstance(source, bytearray) else source
        self._trees: _core.Trees | _onnx.Session = _core.Trees(source, isa)
        self._saved = source if isinstance(source, bytes) else Path(source).read_bytes()
        self._source = "bytes" if isinstance(source, bytes) else os.fspath(source)

    @classmethod
    def from_xgboost(cls, booster: Any, replay: ArrayLike | None = None) -> Model:
        """A trained XGBoost model, evaluated here with the same bits and without XGBoost.

        Args:
            booster: An ``xgboost.Booster`` or a fitted ``xgboost.XGBRegressor``, trained on the natural logarithm of
                the duration in ns. Objectives: squared, absolute, pseudo-Huber or one quantile's error. Of a regressor
                that was stopped early, the trees up to its best iteration are taken, as by its own ``predict``. Of a
                Booster all trees are taken, as by its own; ``booster[: booster.best_iteration + 1]`` are those up to
                the best.
            replay: Rows, shape (n, features), that the saved model is to carry with XGBoost's margins for them. At each
                load, the machine is then checked to compute the same.

        Raises:
            ModelError: The model is of a kind that is not supported, as is a regressor with a `missing` other than NaN;
                `replay` has another shape; or the margins are not XGBoost's.
            TypeError: `booster` is no XGBoost model.
        """
        get_booster = getattr(booster, "get_booster", None)
        missing = getattr(booster, "missing", None)
        if missing is not None and missing == missing:  # the trees do not know it
            raise ModelError(f"the regressor takes {missing!r} for a missing value: train it with NaN there")
        best = getattr(booster, "best_iteration", None) if get_booster is not None else None
        booster = get_booster() if get_booster is not None else booster
        if best is not None:
            booster = booster[: best + 1]
        if not hasattr(booster, "save_raw"):
            raise TypeError(f"an xgboost.Booster or a fitted xgboost.XGBRegressor is needed, not {type(booster)!r}")
        saved = bytes(booster.save_raw("ubj"))
        if replay is not None:
            rows = _rows(replay, tuple(booster.feature_names or ()))
            if rows.ndim != 2 or rows.shape[1] != booster.num_features():
                raise ModelError(f"rows to replay have the shape {rows.shape}; (n, {booster.num_features()}) is needed")
            margins = booster.inplace_predict(rows, predict_type="margin", validate_features=False)
            saved = _carrying(saved, rows, margins)
        return cls(saved)

    @classmethod
    def from_onnx(cls, source: str | os.PathLike[str] | bytes) -> Model:
        """A model in ONNX: one input of float32 rows, one output with the natural logarithm of the duration in ns.

        A TreeEnsembleRegressor by itself (XGBoost's, LightGBM's and scikit-learn's converted regressors) becomes trees
        that are walked here. They follow its float32 attributes exactly, with leaves added in the file's order. `save`
        writes a file of them that the scheduler takes. An installed ONNX Runtime runs any other graph, in Python alone
        (`isa` is "onnxruntime"). The scheduler does not take such a model, and `explain` does not explain it.

        Args:
            source: A file, or a file's content.

        Raises:
            ModelError: It is no ONNX model, is damaged, or has operators that nothing here runs; says which.
            Error: onnx is not installed: ``pip install 'cudasched[onnx]'``.
            OSError: The file cannot be read.
        """
        numpy()
        hook.load_core()
        from cudasched.predictor import _onnx

        document, session = _onnx.from_onnx(source)
        name = "bytes" if isinstance(source, bytes) else os.fspath(source)
        if document is not None:
            try:
                model = cls(document)
            except ModelError as error:
                raise ModelError(f"{name} does not hold together: {error}") from None
        else:
            assert session is not None
            model = cls.__new__(cls)
            model._trees, model._saved = session, session.content
        model._source = name
        return model

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> bytes:
        """The model as an ONNX file: one TreeEnsembleRegressor (ai.onnx.ml 3), whose output is the margin.

        The file has names of features, architecture and GPU among its properties. `from_onnx` gives the same bits for
        this file; another runtime may add the leaves in another order, and differ in the last digits.

        Args:
            path: Where it is written too; None: nowhere.

        Raises:
            Error: onnx is not installed (``pip install 'cudasched[onnx]'``), or the file cannot be written.
        """
        from cudasched.predictor import _onnx

        content = (
            self._saved if isinstance(self._trees, _onnx.Session) else _onnx.to_onnx(self._trees, self.feature_names)
        )
        if path is not None:
            Output(path).write(content)
        return content

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for each feature, in the order of a row's values; f0, f1, ... where the file has none."""
        return tuple(self._trees.feature_names) or tuple(f"f{i}" for i in range(self._trees.features))

    @property
    def architecture(self) -> str:
        """The GPU architecture that it was trained for, such as "sm_90"; "" where the file does not say."""
        return self._trees.architecture

    @property
    def gpu(self) -> str:
        """The GPU that it was trained on; "" where the file does not say."""
        return self._trees.gpu

    @property
    def trees(self) -> int:
        """How many there are."""
        return self._trees.trees

    @property
    def depth(self) -> int:
        """Splits on the longest way."""
        return self._trees.depth

    @property
    def isa(self) -> str:
        """The code that walks the trees: avx512vbmi, avx2, portable, nodes (trees deeper than 8); or onnxruntime."""
        return self._trees.isa

    @property
    def isas(self) -> tuple[str, ...]:
        """The codes that could: those that this processor and this model allow."""
        return tuple(self._trees.isas())

    def margins(self, rows: ArrayLike) -> NDArray[float32]:
        """The trees' sums, bit for bit XGBoost's own: shape (launches,), natural logarithms of ns.

        Args:
            rows: Shape (launches, features), taken as float32; NaN is a missing value.

        Raises:
            ModelError: Another shape, other values than numbers, or a table with other columns than the features.
        """
        return self._trees.margins(self._rows(rows))

    def predict(self, launches: Launches) -> NDArray[float64]:
        """Durations in ns, shape (launches,).

        Args:
            launches: A recording, as a path or a ``pyarrow.Table`` with metadata, or rows of features of shape
                (launches, features). A graph launch of a recording has no features, and a duration of NaN.

        Raises:
            ModelError: Rows of another shape, or a recording where the model was not trained on the features that
                cudasched makes of launches (`cudasched.predictor` needs a model from ``python -m training.train``).
            Error: It is no recording, or pyarrow is not installed.
        """
        np = numpy()
        rows, known = self._features(launches)
        durations: NDArray[float64] = np.exp(self.margins(rows).astype(np.float64))
        if known is not None:
            durations[~known] = np.nan
        return durations

    def explain(self, launches: Launches) -> Contributions:
        """Each feature's contribution to each prediction; a fraction of a millisecond each.

        Args:
            launches: As `predict` takes them. The values of a graph launch are NaN.

        Raises:
            ModelError: As by `predict`, or the trees are too deep to explain.
            Error: It is no recording, or pyarrow is not installed.
        """
        rows, known = self._features(launches)
        values = self._trees.contributions(rows)
        # The bias is the model's, the same for all rows.
        bias = float(self._trees.contributions(numpy().full((1, self._trees.features), numpy().nan, "float32"))[0, -1])
        values = values[:, :-1]
        if known is not None:
            values[~known] = numpy().nan
        return Contributions(self.feature_names, values, bias)

    def save(self, path: str | os.PathLike[str] | Output) -> None:
        """Writes the file that was read, or the booster's, with the rows that it carries; whole, or not at all.

        Raises:
            Error: The file cannot be written.
        """
        output = path if isinstance(path, Output) else Output(path)
        output.write(self._saved)

    def __repr__(self) -> str:
        return f"<Model of {self.trees} trees, {self._trees.features} features, {self.isa}, from {self._source}>"

    def _rows(self, rows: Any) -> NDArray[float32]:
        return _rows(rows, tuple(self._trees.feature_names))

    def _features(self, launches: Launches) -> tuple[NDArray[float32], NDArray[Any] | None]:
        """Rows, and which of them are kernels of a recording; None where rows were given."""
        if not is_recording(launches):
            return self._rows(launches), None
        wanted = feature_names()
        if self.feature_names != wanted:
            raise ModelError(
                f"the model ({self._source}) was trained on other features than cudasched {hook.load_core().version()} "
                f"makes of launches: {_difference(self.feature_names, wanted)}; train it anew (python -m "
                "training.train, or cudasched train), or give rows of its own features"
            )
        return feature_rows(launches)


def _rows(rows: Any, names: tuple[str, ...]) -> NDArray[float32]:
    """Rows of features of these names, if the model has names; a table's columns have them, too, in this order."""
    np = numpy()
    columns = getattr(rows, "columns", None)
    found = names if columns is None else tuple(str(column) for column in columns)
    if names and found != names:
        raise ModelError(
            f"the table's columns are not the model's features: {_difference(found, names)}; a recording is given as "
            "a path, or as a pyarrow.Table with its metadata"
        )
    try:
        array: NDArray[float32] = np.ascontiguousarray(rows, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ModelError(f"rows of features are numbers, of shape (launches, features): {error}") from None
    return array


def _difference(found: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    parts = {
        "lacks": [name for name in wanted if name not in found],
        "has": [name for name in found if name not in wanted],
    }
    told = [f"it {verb} {', '.join(names[:5])}" for verb, names in parts.items() if names]
    return " and ".join(told) or "they are in another order"


def _carrying(model: bytes, rows: NDArray[float32], margins: Any) -> bytes:
    """UBJSON of a model with rows and their margins as bits; see csrc/predict/trees/model.hpp."""
    np = numpy()

    def length(count: int) -> bytes:
        return b"L" + struct.pack(">q", count)

    def key(text: str) -> bytes:
        return length(len(text)) + text.encode()

    def bits(values: Any) -> bytes:
        words = np.asarray(values, dtype=np.float32).view(np.uint32)
        return b"".join([b"[$L#", length(len(words)), words.astype(">i8").tobytes()])

    stored = [bits(row) for row in rows]
    return b"".join(
        [
            *(b"{", key("cudasched"), b"U\x01", key("model"), model, key("rows"), b"[", *stored, b"]"),
            *(key("margins"), bits(margins), b"}"),
        ]
    )
