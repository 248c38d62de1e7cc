"""The kernels' error."""

from __future__ import annotations

from cudasched.errors import Error

__all__ = ["KernelError"]


class KernelError(Error, ValueError):
    """A kernel is not available, or refuses these arrays; the message has the kernel, the reason and its inputs."""
