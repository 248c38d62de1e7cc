"""A file of models, which a server of models runs."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import cudasched
from cudasched._text import shown
from cudasched.errors import ConfigError
from cudasched.inference import Batcher

__all__ = ["loaded", "made"]

_Made = TypeVar("_Made")


def loaded(file: Path) -> dict[str, Any]:
    """The models of a file, which runs here: batchers, or functions that make one.

    Raises:
        ConfigError: There is no such file, it raises, or it has no models.
    """
    cudasched._activate(as_program=True)  # before the file loads CUDA
    sys.setswitchinterval(1e-4)  # else a batch that the GPU has done may wait 5 ms for another thread's Python
    if not file.is_file():
        raise ConfigError(f"{file} is no file")
    sys.path.insert(0, str(file.parent.absolute()))  # as `python FILE` has it
    found = _checked(file, lambda: runpy.run_path(str(file)).get("models"))
    models: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    kinds = [(isinstance(each, Batcher), callable(each)) for each in models.values()]
    if not all(models) or not any(map(all, zip(*kinds, strict=True))):
        raise ConfigError(
            f'{file} has no batchers: it sets models = {{"name": Batcher(...)}}, or functions that make one each'
        )
    for name in models:
        if not isinstance(name, str) or "/" in name:
            raise ConfigError(f"{file} names a model {shown(name)}: a string without / is needed, as URLs have it")
    return models


def made(file: Path, name: str) -> Batcher:
    """A batcher by the file's function for it.

    Raises:
        ConfigError: As of `loaded`; or the function raises, or returns something else.
    """
    batcher = _checked(file, loaded(file)[name])
    if not isinstance(batcher, Batcher):
        raise ConfigError(f"{file} made {shown(batcher)}: a Batcher is needed")
    return batcher


def _checked(file: Path, run: Callable[[], _Made]) -> _Made:
    try:
        return run()
    except ConfigError:
        raise
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
        at = f" at line {lines[-1]}" if lines else ""
        raise ConfigError(f"{file} raised {type(error).__name__}{at}: {error}") from error
