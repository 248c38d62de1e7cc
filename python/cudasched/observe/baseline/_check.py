"""Two sides of runs to one comparison: compared quantities, those left out and why, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from cudasched._version import __version__
from cudasched.errors import Error
from cudasched.observe.baseline._compare import Difference, compare, runs_needed
from cudasched.observe.baseline._model import (
    Baseline,
    Compared,
    Comparison,
    Kind,
    Measured,
    Run,
    Uncompared,
    Verdict,
)
from cudasched.observe.baseline._runs import DEVICE_WORK, same_setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ALPHA", "LEAST_CHANGE", "LEAST_SHARE", "check"]

ALPHA = 0.01
LEAST_CHANGE = 0.03
LEAST_SHARE = 0.005
_WHOLE = ("program", "device time of a run")

_Key = tuple[str, str]


def _by_key(run: Run) -> dict[_Key, Measured]:
    whole = Measured(kind="program", name=_WHOLE[1], count=1, each_ns=run.time_ns)
    return {**{(one.kind, one.name): one for one in run.measured}, _WHOLE: whole}


def _label(key: _Key) -> str:
    from cudasched.advise.names import qualified_name

    return qualified_name(key[1]) if key[0] == "kernel" else key[1]


def _share(key: _Key, runs: Sequence[dict[_Key, Measured]]) -> float | None:
    """The share of the device time of all runs of both sides, so that the choice of quantities depends on no side."""
    if key[0] not in DEVICE_WORK:
        return None
    own = sum(run[key].count * run[key].each_ns for run in runs if key in run)
    return own / sum(run[_WHOLE].each_ns for run in runs)


def _why_not(
    key: _Key,
    before: Sequence[dict[_Key, Measured]],
    after: Sequence[dict[_Key, Measured]],
    share: float | None,
    least_share: float,
) -> str:
    """Why a quantity is not judged; empty if it is."""
    then, now = (sum(key in run for run in side) for side in (before, after))
    if not now:
        return "only in the baseline"
    if not then:
        return "not in the baseline"
    if then < len(before) or now < len(after):
        return f"not in every run: {then} of {len(before)} in the baseline, {now} of {len(after)} now"
    if share is not None and share < least_share:
        return f"under {100 * least_share:g}% of the device time"
    return ""


def _verdict(slower: Difference, faster: Difference, alpha: float, least_change: float) -> Verdict:
    if slower.p <= alpha:
        return "slower" if slower.ratio - 1 >= least_change else "below the limit"
    return "faster" if faster.p <= alpha else "no change"


def _notes(before: Baseline, after: Baseline, uncompared: Sequence[Uncompared], found_in_every: bool) -> list[str]:
    notes = []

    def versions(side: Baseline, name: str) -> set[str]:
        return {cast(str, getattr(run, name)) for run in side.runs}

    for name, what in (("driver_version", "driver"), ("cudasched_version", "cudasched")):
        then, now = versions(before, name), versions(after, name)
        if then != now:
            notes.append(f"another version of the {what}: {', '.join(sorted(then))}, now {', '.join(sorted(now))}")
    if before.command != after.command:
        notes.append(f"the baseline is of another command: {before.command or '(unknown)'}")
    one_sided = [one for one in uncompared if one.why in ("only in the baseline", "not in the baseline")]
    share = sum(one.share or 0.0 for one in one_sided)
    if one_sided:
        notes.append(
            f"{len(one_sided)} kernels, regions or waits are on one side only, {100 * share:.1f}% of the device time: "
            "nothing is said of them"
        )
    if len({run.session for run in before.runs}) == 1:
        notes.append(
            "all runs of the baseline were recorded in one go: differences from day to day or machine to machine are "
            "not in its noise; `cudasched baseline save --add` adds runs of another day"
        )
    if not found_in_every:
        notes.append("some of the quantities vary too much for 5% to be found: see the column `finds`")
    return notes


def check(
    before: Baseline,
    after: Baseline,
    *,
    alpha: float = ALPHA,
    least_change: float = LEAST_CHANGE,
    least_share: float = LEAST_SHARE,
) -> Comparison:
    """The slowdowns between two sets of runs, beyond the noise from run to run.

    A quantity is ``slower`` if its adjusted p is at most `alpha` and its mean over the runs grew by `least_change` or
    more. See ``docs/baselines.md`` for the test.

    Args:
        before: The baseline.
        after: The runs now.
        alpha: How probable one or more false findings may be, of all quantities together.
        least_change: As a share.
        least_share: Kernels with a smaller share of the device time are not compared.

    Raises:
        Error: The sides are of different GPUs, timings or programs, have too few runs, or SciPy or NumPy is missing.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise Error(f"baselines need NumPy ({error}): pip install 'cudasched[baseline]'") from None
    same_setting(before, after, "the baseline", "this run")
    then, now = ([_by_key(run) for run in side.runs] for side in (before, after))
    keys = list(dict.fromkeys(key for run in [*then, *now] for key in run))
    shares = {key: _share(key, [*then, *now]) for key in keys}
    why = {key: _why_not(key, then, now, shares[key], least_share) for key in keys}
    chosen = [key for key in keys if not why[key]]

    def logarithms(side: Sequence[dict[_Key, Measured]]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.log(np.array([[run[key].each_ns for key in chosen] for run in side]))
        return found

    first, second = logarithms(then), logarithms(now)
    groups = [int(key[0] in ("region", "wait")) for key in chosen]
    slower = compare(first, second, alpha=alpha, groups=groups)
    faster = compare(-first, -second, alpha=alpha, groups=groups)
    compared = [
        Compared(
            kind=cast(Kind, key[0]),
            name=key[1],
            label=_label(key),
            verdict=_verdict(up, down, alpha, least_change),
            before_ns=math.exp(first[:, place].mean()),
            after_ns=math.exp(second[:, place].mean()),
            change=up.ratio - 1,
            low=up.low - 1,
            high=up.high - 1,
            p_slower=up.p,
            p_faster=down.p,
            noise=up.deviation,
            detectable=up.detectable,
            share=shares[key],
            count_before=sum(run[key].count for run in then) / len(then),
            count_after=sum(run[key].count for run in now) / len(now),
            before_runs_ns=tuple(run[key].each_ns for run in then),
            after_runs_ns=tuple(run[key].each_ns for run in now),
        )
        for place, (key, up, down) in enumerate(zip(chosen, slower, faster, strict=True))
    ]
    order = ("slower", "below the limit", "no change", "faster")
    compared.sort(key=lambda one: (order.index(one.verdict), -one.change, one.name))
    uncompared = sorted(
        (
            Uncompared(kind=cast(Kind, key[0]), name=key[1], label=_label(key), why=why[key], share=shares[key])
            for key in keys
            if why[key]
        ),
        key=lambda one: (-(one.share or 0.0), one.kind, one.name),
    )
    device_work = [one for one in compared if one.kind in DEVICE_WORK]
    noisiest = max((one.noise for one in device_work), default=None)
    found_in_every = all(one.detectable is not None and one.detectable <= 0.05 for one in device_work)
    return Comparison(
        cudasched_version=__version__,
        gpu=after.gpu,
        command=after.command,
        command_before=before.command,
        before_runs=len(then),
        after_runs=len(now),
        alpha=alpha,
        least_change=least_change,
        slower=sum(one.verdict == "slower" for one in compared),
        runs_for_5_percent=None if noisiest is None else runs_needed(noisiest, len(compared), change=0.05, alpha=alpha),
        notes=tuple(_notes(before, after, uncompared, found_in_every)),
        compared=tuple(compared),
        uncompared=tuple(uncompared),
    )
