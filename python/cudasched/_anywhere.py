"""pydantic, imported wherever the process is.

On Python 3.13 its extension module cannot be loaded from a working directory that has been removed. The process is
moved out of there for the length of that one import, and back.
"""

from __future__ import annotations

import os

__all__ = ["pydantic"]

try:
    os.getcwd()
except OSError:
    _gone = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir("/")
        import pydantic
    finally:
        os.fchdir(_gone)
        os.close(_gone)
else:
    import pydantic
