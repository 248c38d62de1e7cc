"""Search: which configuration to try next. Pure: a strategy is asked for places and told scores, and touches no GPU.

A strategy sees the features of the enumerated configurations (`Problem.features`) and, where there is one, a prior:
other shapes' or the predictor's estimate of each configuration. Scores are costs (less is better); None is a
configuration that gave none. The default, `Bayesian`, models the logarithm of the cost by a Gaussian process over the
features and proposes by expected improvement (Jones, Schonlau and Welch, 1998).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cudasched._text import closest
from cudasched.errors import ConfigError
from cudasched.tune._need import need

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

__all__ = ["STRATEGIES", "Bayesian", "BoTorch", "Exhaustive", "Optuna", "Random", "Strategy", "make"]


_BAD = 1.5
"""Logarithm of how much worse than the best a prior may call a configuration: its exact time says nothing more."""
_BELIEF = 0.5
"""How much the priors are believed, as a sum of squares of evidence for them."""


class Strategy(Protocol):
    """Proposes configurations by place."""

    def ask(self, count: int) -> list[int]:
        """Up to so many places that were not asked for before; none: all were."""
        ...

    def tell(self, index: int, score: float | None) -> None:
        """A configuration's cost; None: no result. A place may be told again, with a better estimate."""
        ...

    def refuse(self, index: int) -> None:
        """A configuration that is never proposed, and says nothing about others."""
        ...


class _Base:
    """The places asked for, and their known scores."""

    def __init__(self, features: NDArray[float64], seed: int) -> None:
        self._np = need("numpy", "the tuner")
        self.features = features
        self.count = len(features)
        self.random = self._np.random.default_rng(seed)
        self.asked = self._np.zeros(self.count, dtype=bool)
        self.refused = self._np.zeros(self.count, dtype=bool)
        self.scores: dict[int, float | None] = {}

    def tell(self, index: int, score: float | None) -> None:
        """See `Strategy`."""
        self.asked[index] = True
        self.scores[index] = score if score is not None and math.isfinite(score) and score > 0 else None

    def refuse(self, index: int) -> None:
        """See `Strategy`."""
        self.refused[index] = True

    def _take(self, places: Sequence[int]) -> list[int]:
        taken = [int(place) for place in places]
        self.asked[taken] = True
        return taken

    def _left(self) -> Any:
        return self._np.flatnonzero(~(self.asked | self.refused))


class Random(_Base):
    """Each configuration that was not tried is as likely as any other."""

    def ask(self, count: int) -> list[int]:
        """See `Strategy`."""
        left = self._left()
        return self._take(self.random.choice(left, min(count, len(left)), replace=False))


class Exhaustive(_Base):
    """All configurations, in order."""

    def ask(self, count: int) -> list[int]:
        """See `Strategy`."""
        return self._take(self._left()[:count])


class Bayesian(_Base):
    """Expected improvement on a Gaussian process, after a first few that cover the space or that the prior likes.

    Configurations that gave no result count as bad ones near which there are others. The length scale of each feature
    is fitted anew as results come, more and more seldom.
    """

    def __init__(
        self,
        features: NDArray[float64],
        seed: int,
        *,
        prior: NDArray[float64] | None = None,
        first: int = 16,
    ) -> None:
        """A search.

        Args:
            features: A row for each configuration.
            seed: For the strategy's choices.
            prior: Each configuration's expected cost, in any unit: only ratios count. NaN: not known. Each of several
                rows is an estimate of its own; the k-th is believed 1/k as much as the first.
            first: How many are tried before the model is asked.
        """
        super().__init__(features, seed)
        rows = [] if prior is None else [self._standard(row) for row in self._np.atleast_2d(prior)]
        self._priors = [row for row in rows if row is not None]
        self._asked_of = [0] * len(self._priors)
        self._first = max(4, first // 2) if self._priors else first
        self._kernel: Any = None
        self._fitted_at = 0

    def _standard(self, prior: NDArray[float64]) -> Any:
        """Logarithms from 0 on; None: it says nothing."""
        np = self._np
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm = np.log(np.asarray(prior, dtype=np.float64))
        known = np.isfinite(logarithm)
        if known.sum() < 2 or logarithm[known].std() == 0:
            return None
        logarithm[~known] = logarithm[known].max()
        return logarithm - logarithm.min()

    def ask(self, count: int) -> list[int]:
        """See `Strategy`."""
        chosen: list[int] = []
        while len(chosen) < count:
            left = self._left()
            if not len(left):
                break
            known = sum(one is not None for one in self.scores.values())
            begins = self.asked.sum() < self._first or known < 2
            place = self._begin(left) if begins else self._propose(left, chosen)
            chosen += self._take([place])
        return chosen

    def _begin(self, left: Any) -> int:
        """The best of a prior, of each as often as it is believed, or the farthest of some that are drawn.

        With priors by turns, once two of theirs were tried: configurations that priors call bad show whether they are
        right.
        """
        np = self._np
        asked_of = sum(self._asked_of)
        if self._priors and (asked_of < 2 or self.asked.sum() - asked_of >= asked_of - 1):
            # The largest quotient of belief, 1/k of the k-th, and how often it has been asked (D'Hondt).
            turn = min(range(len(self._priors)), key=lambda k: (k + 1) * (self._asked_of[k] + 1))
            self._asked_of[turn] += 1
            return int(left[self._priors[turn][left].argmin()])
        drawn = self.random.choice(left, min(len(left), 64), replace=False)
        asked = np.flatnonzero(self.asked)
        if not len(asked):
            return int(drawn[0])
        apart = ((self.features[drawn][:, None, :] - self.features[asked][None, :, :]) ** 2).sum(-1).min(axis=1)
        return int(drawn[apart.argmax()])

    def _costs(self) -> tuple[Any, Any]:
        """Places and the logarithms of their costs, with bad or missing ones brought near to the rest."""
        np = self._np
        places = np.array(sorted(self.scores))
        known = np.log([one for place in places if (one := self.scores[place]) is not None])
        # A configuration several times slower than most is just bad: its exact time would bend the model.
        ceiling = np.quantile(known, 0.5) + 1.0
        costs = np.array([math.log(one) if (one := self.scores[place]) is not None else math.inf for place in places])
        return places, np.minimum(costs, max(ceiling, known.min() + 1.0))

    def _propose(self, left: Any, pending: Sequence[int]) -> int:
        np = self._np
        places, costs = self._costs()
        base = self._trend(places, costs)
        residual = costs - base[places]
        mean, deviation = self._model(places, residual, left, pending)
        mean = mean + base[left]
        best = costs.min()
        spread = np.maximum(deviation, 1e-9)
        gain = (best - mean) / spread
        # Expected improvement; its logarithm is not needed, since only the largest counts.
        density = np.exp(-0.5 * gain**2) / math.sqrt(2 * math.pi)
        cumulated = 0.5 * (1 + _erf(np, gain / math.sqrt(2)))
        improvement = spread * (gain * cumulated + density)
        if improvement.max() <= 1e-12:
            return int(left[mean.argmin()])
        return int(left[improvement.argmax()])

    def _trend(self, places: Any, costs: Any) -> Any:
        """A level and a slope from 0 to 1.5 for each prior, fitted to the measurements by least squares."""
        np = self._np
        if not self._priors:
            return np.full(self.count, costs.mean())
        every = np.minimum(np.array(self._priors), _BAD)
        x = every[:, places]
        belief = 1 / np.arange(1.0, len(every) + 1)
        # As if a few others had the slopes that are believed: a few results do not throw a prior away.
        rows = np.vstack([(x - x.mean(axis=1, keepdims=True)).T, math.sqrt(_BELIEF) * np.eye(len(every))])
        wanted = np.concatenate([costs - costs.mean(), math.sqrt(_BELIEF) * belief / belief.sum()])
        slopes = np.minimum(need("scipy.optimize", "a warm start").nnls(rows, wanted)[0], 1.5)
        return costs.mean() + slopes @ (every - x.mean(axis=1, keepdims=True))

    def _model(self, places: Any, residual: Any, left: Any, pending: Sequence[int]) -> tuple[Any, Any]:
        np = self._np
        process = need("sklearn.gaussian_process", "the tuner's default search")
        kernels = need("sklearn.gaussian_process.kernels", "the tuner's default search")
        scale = residual.std() or 1.0
        known = len(places)
        fit = self._kernel is None or known >= self._fitted_at * 1.2 + 2
        if self._kernel is None:
            width = self.features.shape[1]
            self._kernel = kernels.ConstantKernel(1.0, (0.05, 20.0)) * kernels.Matern(
                length_scale=np.full(width, 2.0), length_scale_bounds=(0.3, 30.0), nu=2.5
            ) + kernels.WhiteKernel(0.01, (1e-5, 0.3))
        model = process.GaussianProcessRegressor(
            self._kernel, optimizer="fmin_l_bfgs_b" if fit else None, random_state=int(self.random.integers(1 << 31))
        )
        # Of some hundred points: more threads are no faster, and would take the cores of a server beside it.
        threads = need("threadpoolctl", "the tuner's default search").threadpool_limits(1)
        with threads, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a feature without effect has a length scale at its bound
            model.fit(self.features[places], residual / scale)
            if fit:
                self._kernel, self._fitted_at = model.kernel_, known
            waiting = [place for place in pending if place not in self.scores]
            if waiting:  # believed to come out as they are expected to
                expected = model.predict(self.features[waiting])
                model.optimizer = None
                model.kernel = self._kernel
                model.fit(
                    np.vstack([self.features[places], self.features[waiting]]),
                    np.concatenate([residual / scale, expected]),
                )
            mean, deviation = model.predict(self.features[left], return_std=True)
        noise = self._kernel.k2.noise_level
        # A configuration's real cost varies by less than its measurements do.
        deviation = np.sqrt(np.maximum(deviation**2 - noise, 1e-12))
        return mean * scale, deviation * scale


def _erf(np: Any, x: Any) -> Any:
    """The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    y = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return np.sign(x) * (1 - y * np.exp(-(x**2)))


class Optuna(_Base):
    """Optuna's sampler (TPE unless another is given), which proposes a point; the nearest configuration is tried."""

    def __init__(self, features: NDArray[float64], seed: int, *, sampler: Any = None) -> None:
        super().__init__(features, seed)
        optuna = need("optuna", "this search", "optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = sampler or optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._study = optuna.create_study(sampler=chosen)
        self._state = optuna.trial.TrialState
        values = [sorted(set(column.tolist())) for column in features.T]
        self._distributions = {
            f"x{i}": optuna.distributions.CategoricalDistribution(tuple(range(len(one))))
            if len(one) <= 2
            else optuna.distributions.IntDistribution(0, len(one) - 1)
            for i, one in enumerate(values)
        }
        self._values = values
        self._trials: dict[int, Any] = {}

    def ask(self, count: int) -> list[int]:
        """See `Strategy`."""
        chosen: list[int] = []
        while len(chosen) < count and len(self._left()):
            trial = self._study.ask(self._distributions)
            point = self._np.array([one[trial.params[f"x{i}"]] for i, one in enumerate(self._values)])
            left = self._left()
            place = int(left[((self.features[left] - point) ** 2).sum(axis=1).argmin()])
            self._trials[place] = trial
            chosen += self._take([place])
        return chosen

    def tell(self, index: int, score: float | None) -> None:
        """See `Strategy`."""
        super().tell(index, score)
        trial = self._trials.pop(index, None)
        known = self.scores[index]
        if trial is None:
            return
        if known is None:
            self._study.tell(trial, state=self._state.FAIL)
        else:
            self._study.tell(trial, math.log(known))


class BoTorch(Bayesian):
    """As `Bayesian`, with BoTorch's Gaussian process in the place of scikit-learn's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        need("botorch.models", "this search", "botorch")  # before anything is measured
        super().__init__(*arguments, **options)

    def _model(self, places: Any, residual: Any, left: Any, pending: Sequence[int]) -> tuple[Any, Any]:
        np = self._np
        torch = need("torch", "this search", "botorch")
        models = need("botorch.models", "this search", "botorch")
        fit = need("botorch.fit", "this search", "botorch")
        likelihoods = need("gpytorch.mlls", "this search", "botorch")
        scale = residual.std() or 1.0
        x = torch.as_tensor(self.features[places], dtype=torch.float64)
        y = torch.as_tensor(residual / scale, dtype=torch.float64)[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = models.SingleTaskGP(x, y)
            fit.fit_gpytorch_mll(likelihoods.ExactMarginalLogLikelihood(model.likelihood, model))
            waiting = [place for place in pending if place not in self.scores]
            if waiting:
                extra = torch.as_tensor(self.features[waiting], dtype=torch.float64)
                with torch.no_grad():
                    model = model.condition_on_observations(extra, model.posterior(extra).mean)
            with torch.no_grad():
                posterior = model.posterior(torch.as_tensor(self.features[left], dtype=torch.float64))
                mean = posterior.mean[:, 0].numpy() * scale
                deviation = np.sqrt(posterior.variance[:, 0].numpy()) * scale
        return mean, deviation


STRATEGIES: Mapping[str, Callable[..., Strategy]] = {
    "bayesian": Bayesian,
    "random": Random,
    "exhaustive": Exhaustive,
    "optuna": Optuna,
    "botorch": BoTorch,
}
"""By the name that the command line has for them."""


def make(name: str, features: NDArray[float64], seed: int, prior: NDArray[float64] | None = None) -> Strategy:
    """A strategy.

    Raises:
        ConfigError: There is none of that name.
        Error: A required package is not installed.
    """
    if name not in STRATEGIES:
        hint = closest(name, STRATEGIES) or f"; there are {', '.join(STRATEGIES)}"
        raise ConfigError(f"no strategy {name!r}{hint}")
    if name in ("bayesian", "botorch"):
        return STRATEGIES[name](features, seed, prior=prior)
    return STRATEGIES[name](features, seed)
