"""The exception tree and the warnings, the same names as in C++ (``csrc/base/error.hpp``).

A message states the fault, the place and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ArbiterError",
    "ConfigError",
    "ConfigWarning",
    "DriverError",
    "Error",
    "HookError",
    "HookWarning",
    "ModelError",
    "StateError",
]


class Error(Exception):
    """Base of all that cudasched raises."""


class HookError(Error):
    """The driver shim could not be installed, or CUDA was there first."""


class ConfigError(Error, ValueError):
    """A setting has no meaning; the message says where it came from."""


class ArbiterError(Error):
    """The shared table of clients cannot be opened or read, or is full."""


class ModelError(Error, ValueError):
    """Saved trees cannot be used; the message names the place in the file and the supported forms."""


class StateError(Error, ValueError):
    """A predictor's saved state cannot be used: it is corrupt, or of another version, user or GPU."""


class DriverError(Error):
    """A call of the CUDA driver failed."""


class HookWarning(RuntimeWarning):
    """The program goes on, but cudasched has no effect in it."""


class ConfigWarning(RuntimeWarning):
    """A setting was ignored, and the program goes on without it."""
