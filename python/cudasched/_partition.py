"""Parts of a GPU's SMs: how ``region(..., sm_fraction=...)`` changes PyTorch's current stream."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from numbers import Real

from cudasched import hook
from cudasched.errors import ConfigError, Error, HookWarning

__all__ = ["check_fraction", "enter", "stream"]


def check_fraction(client_class: str, fraction: object) -> float | None:
    """A region's `sm_fraction`, checked; None stays None.

    Raises:
        ConfigError: It is no fraction, or the class is not best effort.
    """
    if fraction is None:
        return None
    number = isinstance(fraction, Real) and not isinstance(fraction, bool)
    if not number or not 0 < fraction < 1:  # type: ignore[operator]
        raise ConfigError(
            f"sm_fraction = {fraction!r}: must be a number of more than 0 and less than 1 (0.5 is half the SMs)"
        )
    if client_class != "best_effort":
        raise ConfigError(
            f"sm_fraction = {fraction!r}: a part of the SMs is for class best_effort, and this region's is "
            f"{client_class}; latency work has all SMs"
        )
    return float(fraction)  # type: ignore[arg-type]


def stream(fraction: float) -> int:
    """The CUstream of that part of the current device's SMs.

    Raises:
        ConfigError: The device has too few SMs for a part.
        HookError: There is no hook, or the driver has no green contexts.
        Error: The device's primary context is not current to this thread, or the driver refuses.
    """
    return hook.load_core().partition_stream(fraction)


_warned = False


def enter(fraction: float) -> Callable[[], None] | None:
    """Makes the stream of that part PyTorch's current one, ordered after the one that was.

    Returns:
        A function that goes back to the stream that was current, ordered after the part's. None where nothing was done:
        without PyTorch and a GPU, or where there can be no part, with one warning.
    """
    global _warned
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hook.installed() or cuda._is_in_bad_fork() or not cuda.is_available():
        return None
    before = cuda.current_stream()
    submitted = before.record_event()  # which also makes the device's context current to this thread
    try:
        part = cuda.ExternalStream(stream(fraction))
    except Error as error:
        if not _warned:
            _warned = True
            warnings.warn(f"sm_fraction has no effect, the region runs on all SMs: {error}", HookWarning, stacklevel=4)
        return None
    part.wait_event(submitted)
    current = cuda.stream(part)
    current.__enter__()

    def leave() -> None:
        current.__exit__(None, None, None)
        before.wait_stream(part)

    return leave
