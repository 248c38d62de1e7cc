"""Libraries of the extras, imported when first used: `import cudasched` loads none of them."""

from __future__ import annotations

import importlib
from typing import Any

from cudasched.errors import Error


def need(module: str, what_for: str, install: str = "'cudasched[tune]'") -> Any:
    """The module.

    Args:
        module: The full name.
        what_for: For the message: "the tuner's default search".
        install: The argument for `pip install`.

    Raises:
        Error: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Error(f"{what_for} needs {module.split('.')[0]} ({error}): pip install {install}") from None
