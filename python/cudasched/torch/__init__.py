"""cudasched and PyTorch: regions with streams of their own, and what crosses between threads.

Nothing here need be called for ``with cudasched.region(...)`` to put a program's PyTorch work on streams of its class;
``docs/pytorch.md`` says what that means. Importing this module does not import PyTorch.
"""

from __future__ import annotations

__all__: list[str] = []
