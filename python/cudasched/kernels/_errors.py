"""What the kernels raise."""

from __future__ import annotations

from cudasched.errors import Error

__all__ = ["KernelError"]


class KernelError(Error, ValueError):
    """A kernel cannot be had, or does not take these arrays; the message says which, why, and what it takes."""
