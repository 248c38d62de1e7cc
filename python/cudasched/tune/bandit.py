"""A choice between configurations at run time, by shape: Thompson sampling over linear models of the log of the time.

Each arm is a configuration; its model is a Bayesian linear regression on the logarithms of the shape's dimensions and
their products (Agrawal and Goyal, 2013).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cudasched.errors import ConfigError
from cudasched.tune._need import need

__all__ = ["Bandit"]


class Bandit:
    """Chooses an arm for a shape and learns from its time. One thread uses a bandit, without a GPU.

    Attributes:
        names: The dimensions of a shape, in order.
    """

    def __init__(
        self, arms: int, names: Sequence[str], *, seed: int = 0, noise: float = 0.05, width: float = 1.0
    ) -> None:
        """A bandit that knows nothing.

        Args:
            arms: How many configurations.
            names: The dimensions of a shape.
            seed: For the choices.
            noise: Standard deviation of the logarithm of a time.
            width: Of the coefficients, before anything is known.
        """
        if arms < 1 or not names:
            raise ConfigError("a bandit has at least one arm, and shapes at least one dimension")
        np = need("numpy", "the bandit")
        self._np = np
        self.names = tuple(names)
        self._random = np.random.default_rng(seed)
        self._noise = noise
        size = 1 + len(names) + len(names) * (len(names) + 1) // 2
        self._precision = np.stack([np.eye(size) / width**2] * arms)
        self._moment = np.zeros((arms, size))

    def _context(self, shape: Mapping[str, float]) -> Any:
        np = self._np
        logs = np.array([math.log2(float(shape[name])) / 10 - 1 for name in self.names])
        products = [logs[i] * logs[j] for i in range(len(logs)) for j in range(i, len(logs))]
        return np.concatenate([[1.0], logs, products])

    def choose(self, shape: Mapping[str, float]) -> int:
        """The arm for a shape: the best of a sample of the possible times."""
        np = self._np
        x = self._context(shape)
        sampled = []
        for precision, moment in zip(self._precision, self._moment, strict=True):
            mean = np.linalg.solve(precision, moment)
            root = np.linalg.cholesky(precision)
            draw = np.linalg.solve(root.T, self._random.standard_normal(len(mean))) * self._noise
            sampled.append(x @ (mean + draw))
        return int(np.argmin(sampled))

    def tell(self, shape: Mapping[str, float], arm: int, time_us: float, usual_us: float) -> None:
        """An arm's time.

        Args:
            shape: The shape.
            arm: The arm.
            time_us: The arm's time.
            usual_us: The shape's time by any measure that is the same for all arms, such as a roofline's: the models
                are of the ratio.
        """
        if not (time_us > 0 and usual_us > 0 and math.isfinite(time_us) and math.isfinite(usual_us)):
            raise ConfigError(f"a time is over 0, not {time_us}")
        x = self._context(shape)
        self._precision[arm] += self._np.outer(x, x)
        self._moment[arm] += x * math.log(time_us / usual_us)
