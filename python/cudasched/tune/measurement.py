"""The results of one configuration's trial."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cudasched._text import shown

__all__ = ["STATUSES", "Measurement", "Status", "robust"]

Status = Literal[
    "ok",
    "compile_error",
    "does_not_fit",
    "launch_error",
    "wrong",
    "out_of_bounds",
    "fault",
    "hang",
    "crashed",
    "disturbed",
]
STATUSES: tuple[Status, ...] = get_args(Status)
"""ok, or why there is no time: `disturbed` is one that a latency client took the GPU from, which may be tried again."""


@dataclass(frozen=True)
class Measurement:
    """One configuration's outcome.

    Attributes:
        status: Whether it has a time, and if not, why.
        samples_us: Times of single launches, us, in order.
        message: The compiler's log, or the driver's error.
        registers: A thread.
        local_bytes: A thread: spilled registers.
        static_shared_bytes: A block.
        occupancy: Resident threads of those that a multiprocessor can hold.
        workspace_bytes: Device memory beside the arguments.
        sm_clock_mhz: The clock after the last sample; 0: not known.
        compile_s: Time that compiling took.
        run_s: Time from the loading to the last sample, with the check.
        discarded: Samples that were thrown away because a latency client was active.
    """

    status: Status
    samples_us: tuple[float, ...] = ()
    message: str = ""
    registers: int = 0
    local_bytes: int = 0
    static_shared_bytes: int = 0
    occupancy: float = 0.0
    workspace_bytes: int = 0
    sm_clock_mhz: int = 0
    compile_s: float = 0.0
    run_s: float = 0.0
    discarded: int = 0
    profile: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_file(cls, **values: Any) -> Measurement:
        """A measurement from a file, which may have any content.

        Raises:
            ValueError: There is no such status, or a value is none of its field.
        """
        made = cls(**values)
        if made.status not in STATUSES:
            raise ValueError(f"{shown(made.status)} is no status")
        if not isinstance(made.message, str) or not isinstance(made.profile, dict):
            raise ValueError("a message is a text, and a profile a table")
        for one in (*(getattr(made, name) for name in _NUMBERS), *made.profile.values()):
            if not isinstance(one, (int, float)) or not 0 <= one < _TOO_MUCH:
                raise ValueError(f"{shown(one)} is no number of 0 or more")
        for one in made.samples_us:
            if not isinstance(one, (int, float)) or not 0 < one < _TOO_MUCH:
                raise ValueError(f"{shown(one)} is no time")
        return made

    @property
    def time_us(self) -> float | None:
        """The median of the samples without outliers, us; None without a time."""
        return robust(self.samples_us) if self.status == "ok" and self.samples_us else None

    def with_samples(self, samples_us: Sequence[float], seconds: float) -> Measurement:
        """With more samples behind those that it has."""
        return replace(self, samples_us=(*self.samples_us, *samples_us), run_s=self.run_s + seconds)


_TOO_MUCH = 1e18
_NUMBERS = (
    *("registers", "local_bytes", "static_shared_bytes", "occupancy", "workspace_bytes", "sm_clock_mhz"),
    *("compile_s", "run_s", "discarded"),
)


def robust(samples: Sequence[float]) -> float:
    """The median of values within five (scaled) median deviations of the median; noise of other work goes one way."""
    middle = statistics.median(samples)
    deviation = 1.4826 * statistics.median(abs(one - middle) for one in samples)
    kept = [one for one in samples if abs(one - middle) <= 5 * deviation] if deviation else samples
    return float(statistics.median(kept or samples))
