"""The numbers that a simulation takes."""

from __future__ import annotations

from collections.abc import Mapping

from cudasched._text import shown
from cudasched.errors import ConfigError

__all__ = ["LIMITS", "checked"]

LIMITS: Mapping[str, tuple[float, float]] = {
    "rate_hz": (0.001, 100_000),
    "seconds": (0.001, 3_600),
    "seed": (0, 2**63 - 1),
    "gpu_ms": (1e-6, 3_600_000),
    "kernels": (1, 1_000_000),
    "slo_ms": (0.001, 3_600_000),
    "alone_ms": (0, 3_600_000),
    "request_ms": (1e-6, 3_600_000),
    "request_gap_ms": (0.001, 3_600_000),
    "prepare_ms": (0, 3_600_000),
    "expect_ms": (0, 1000),
    "recording_us": (0, 1_000_000),
    "lead_us": (0, 3_600_000_000),
    "arrivals": (0, 1_000_000),
}
"""The range of each number: beyond it a simulation means nothing, or would not end."""


def checked(what: str, value: object) -> float:
    """The value. Raises ConfigError where it is out of its limits (`LIMITS`), or no number."""
    least, most = LIMITS[what]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{what} = {shown(value)}: must be a number from {least:.12g} to {most:.19g}")
    return value
