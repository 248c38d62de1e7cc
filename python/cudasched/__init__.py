"""One GPU, several programs: latency-critical work hardly notices best-effort work.

::

    import cudasched  # before torch, or any other library that loads CUDA
    import torch

    with cudasched.region("latency", slo_ms=5):
        y = model(x)

Importing the package puts a shim in front of the CUDA driver in this process, unless ``CUDASCHED_OFF=1`` says not to.
On a machine without a driver the import does nothing (`state` says so); where CUDA is loaded already, the import warns,
and regions do nothing. The import never makes a driver call and never raises. Settings of the environment or a TOML
file (`cudasched.config`) are put into this process's environment for the engine.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from cudasched import _region, _text, config, hook, log
from cudasched._cpp import get_cmake_dir, get_include
from cudasched._region import bind_stream, expect, region, set_class, unbind_stream
from cudasched._version import __version__
from cudasched.errors import (
    ArbiterError,
    ConfigError,
    ConfigWarning,
    DriverError,
    Error,
    HookError,
    HookWarning,
    ModelError,
    StateError,
)
from cudasched.status import Client, Device, State, note_not_installed, state, status

if TYPE_CHECKING:
    from cudasched import control, graphs, inference, kernels, memory, mps, observe, predictor, simulate, torch
    from cudasched.advise import _Callable as _Advise
    from cudasched.collect import _Collect
    from cudasched.observe import metrics
    from cudasched.observe.trace import trace
    from cudasched.tune import _Callable as _Tune

    # These are called like functions; type checkers know no module that may be.
    advise: _Advise
    collect: _Collect
    tune: _Tune

_LOADED_WHEN_USED = (
    "advise",
    "collect",
    "control",
    "graphs",
    "inference",
    "kernels",
    "memory",
    "mps",
    "observe",
    "predictor",
    "simulate",
    "torch",
    "tune",
)

__all__ = [
    "ArbiterError",
    "Client",
    "ConfigError",
    "ConfigWarning",
    "Device",
    "DriverError",
    "Error",
    "HookError",
    "HookWarning",
    "ModelError",
    "State",
    "StateError",
    "__version__",
    "advise",
    "bind_stream",
    "collect",
    "config",
    "control",
    "expect",
    "get_cmake_dir",
    "get_include",
    "graphs",
    "inference",
    "install",
    "kernels",
    "memory",
    "metrics",
    "mps",
    "observe",
    "predictor",
    "region",
    "set_class",
    "simulate",
    "state",
    "status",
    "torch",
    "trace",
    "tune",
    "unbind_stream",
]


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_USED:
        return importlib.import_module(f"cudasched.{name}")
    if name == "metrics":
        return importlib.import_module("cudasched.observe").metrics
    if name == "trace":
        return importlib.import_module("cudasched.observe.trace").trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Puts the driver shim in front of CUDA in this process, as importing the package does, and says why it cannot.

    Does nothing if that is done already, or under ``CUDASCHED_OFF=1``.

    Raises:
        HookError: CUDA is loaded already, there is no driver (the message lists the searched places), another
            installation of cudasched is in this process, or the package was not built. The process goes on unmanaged.
    """
    hook.install()
    _region.guard_ends(hook.load_core())
    note_not_installed("")
    log.logger.debug("cudasched %s stands in front of the driver", __version__)


def _is_command_line() -> bool:
    """Whether this process is the ``cudasched`` command itself, which makes no CUDA call and reports errors itself."""
    program = (getattr(sys, "argv", None) or [""])[0]
    # "-m" stands there until the module that it names has been found.
    return os.path.basename(program) == "cudasched" or (program == "-m" and "cudasched" in sys.orig_argv)


def _configure() -> None:
    """Puts the settings into this process's environment, for the engine, and warns of invalid ones. Never raises."""
    try:
        resolved = config.resolve(tolerant=True)
        if resolved.chosen_class is not None:
            from cudasched import mps

            os.environ.update(mps.priority(os.environ, resolved.chosen_class))
        for field, variable in config.VARIABLES.items():
            if field not in resolved.origins:
                os.environ.pop(variable, None)  # refused: the engine need not say so again
        os.environ.update(resolved.environment())
        refused = [f"{text}; the default is used" for text in resolved.refused]
        said = config.untold([*refused, *resolved.notes], os.environ)
    except Exception as error:  # an unforeseen error costs the settings, not the program
        said = [f"{type(error).__name__}: {_text.printable(str(error))[:200]}; settings of files have no effect here"]
    log.configure()  # as the file of settings has it, if one does
    for text in said:
        warnings.warn(text, ConfigWarning, stacklevel=4)


def _activate(as_program: bool = False) -> None:
    """Activates the package as its import does; `as_program`: also in the command, where that runs models."""
    if hook.switched_off() or (_is_command_line() and not as_program):
        log.configure()
        return
    try:
        core = hook.load_core()
        _configure()
        try:
            core.find_driver()
        except HookError as error:
            note_not_installed(str(error))
            # Silent where there is none; not where the user says that there is one.
            if os.environ.get("CUDASCHED_DRIVER") and config.untold([str(error)], os.environ):
                warnings.warn(_text.one_line(str(error)), HookWarning, stacklevel=3)
            return
        install()
    except (Error, OSError) as error:
        log.configure()
        note_not_installed(str(error))
        place = "interpreter" if "sub-interpreter" in str(error) else "process"
        text = f"{error}; cudasched has no effect in this {place}"
        if "ipykernel" in sys.modules and str(error).startswith("CUDA is loaded already"):
            text = "CUDA is loaded already, so cudasched has no effect in this notebook.\n" + (
                "Restart the kernel and import cudasched first, before torch."
            )
        warnings.warn(text, HookWarning, stacklevel=3)


_activate()
