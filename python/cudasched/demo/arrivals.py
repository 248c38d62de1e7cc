"""When requests arrive: seeded schedules, fixed before a run so that no answer can delay the next question."""

from __future__ import annotations

import random

ARRIVALS = ("poisson", "periodic", "bursts")

#: A burst period is this long, and requests arrive in its first `BURST_ON` share at the rate that keeps the mean.
BURST_PERIOD_S = 0.5
BURST_ON = 0.2


def schedule(kind: str, rate_hz: float, seconds: float, seed: int) -> list[float]:
    """Arrival times of one run.

    Args:
        kind: `poisson`, `periodic` (with a seeded phase) or `bursts` (Poisson while on, nothing while off).
        rate_hz: Mean arrivals a second, over the whole run.
        seconds: Length of the run.
        seed: Equal seeds give equal schedules.

    Returns:
        Seconds from the start of the run, ascending, all below `seconds`.

    Raises:
        ValueError: An unknown kind, or a rate or length that is not above 0.
    """
    if rate_hz <= 0 or seconds <= 0:
        raise ValueError(f"arrivals need a rate and a length above 0, not {rate_hz} Hz for {seconds} s")
    chance = random.Random(seed)
    if kind == "poisson":
        return _poisson(chance, rate_hz, seconds)
    if kind == "periodic":
        phase = chance.random()
        times = [(index + phase) / rate_hz for index in range(int(seconds * rate_hz) + 1)]
        return [time for time in times if time < seconds]
    if kind == "bursts":
        # A Poisson process on the time that is on, stretched over the periods.
        on_s = BURST_PERIOD_S * BURST_ON
        whole, rest = divmod(seconds, BURST_PERIOD_S)
        total_on_s = whole * on_s + min(rest, on_s)
        times = []
        for time in _poisson(chance, rate_hz / BURST_ON, total_on_s):
            period, within = divmod(time, on_s)
            times.append(period * BURST_PERIOD_S + within)
        return [time for time in times if time < seconds]
    raise ValueError(f"unknown arrivals {kind!r}: one of {', '.join(ARRIVALS)}")


def _poisson(chance: random.Random, rate_hz: float, seconds: float) -> list[float]:
    times = []
    time = chance.expovariate(rate_hz)
    while time < seconds:
        times.append(time)
        time += chance.expovariate(rate_hz)
    return times
