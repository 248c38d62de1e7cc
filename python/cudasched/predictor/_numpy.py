"""numpy, imported at the first need: importing cudasched must not import numpy, and the base installation has none."""

from __future__ import annotations

from types import ModuleType

from cudasched.errors import Error


def numpy() -> ModuleType:
    """The module numpy.

    Raises:
        Error: numpy is not installed.
    """
    try:
        import numpy as module
    except ImportError:
        raise Error("the predictor's Python face needs numpy: pip install 'cudasched[predictor]'") from None
    return module
