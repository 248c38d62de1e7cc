"""Each feature's contribution to a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudasched.predictor._numpy import numpy

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Contributions:
    """Shapley values of the trees (TreeSHAP, path-dependent), exact, in double precision.

    A row's values and the bias add up to its margin, the natural logarithm of the predicted duration in ns. So a
    feature multiplies the prediction by `factors`: 2.0 doubled it against the model's mean launch.

    Attributes:
        feature_names: A name for each column of `values`.
        values: Shape (launches, features), added to the logarithm.
        bias: The model's prediction of the mean training launch, as a logarithm.
    """

    feature_names: tuple[str, ...]
    values: NDArray[float64]
    bias: float

    @property
    def factors(self) -> NDArray[float64]:
        """Shape (launches, features): by how much each feature multiplied the predicted duration."""
        factors: NDArray[float64] = numpy().exp(self.values)
        return factors

    def top(self, row: int, count: int = 5) -> list[tuple[str, float]]:
        """The features that moved one launch's prediction most, as (name, factor), the strongest first.

        Args:
            row: Which launch.
            count: How many features at most; those that changed nothing are left out.
        """
        values = self.values[row]
        order = numpy().argsort(-abs(values), kind="stable")[:count]
        return [(self.feature_names[i], float(numpy().exp(values[i]))) for i in order if values[i] != 0]
