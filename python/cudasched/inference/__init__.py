"""Batches by deadline."""

from __future__ import annotations

from cudasched.inference._errors import DeadlineError, InputError, QueueFullError, RunError, UseError

__all__ = ["DeadlineError", "InputError", "QueueFullError", "RunError", "UseError"]
