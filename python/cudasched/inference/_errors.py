"""Why a request has no answer."""

from __future__ import annotations

from cudasched.errors import Error

__all__ = ["DeadlineError", "InputError", "QueueFullError", "RunError", "UseError"]


class InputError(Error, ValueError):
    """A request's input, deadline or priority has no meaning; the message says which, and the limit."""


class DeadlineError(Error, TimeoutError):
    """A request cannot meet its deadline, or has waited for too long.

    Attributes:
        predicted_ms: The predicted end, ms after the submission.
        deadline_ms: The deadline, ms after the submission; None: none.
    """

    def __init__(self, message: str, predicted_ms: float, deadline_ms: float | None) -> None:
        super().__init__(message)
        self.predicted_ms = predicted_ms
        self.deadline_ms = deadline_ms

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[str, float, float | None]]:
        return type(self), (str(self), self.predicted_ms, self.deadline_ms)


class QueueFullError(Error):
    """As many requests wait as may."""


class RunError(Error, RuntimeError):
    """The model raised (``__cause__`` is its exception), hangs, or returned another number of outputs than inputs."""


class UseError(Error, RuntimeError):
    """The batcher is closed, was made before a fork, or belongs to another event loop."""
