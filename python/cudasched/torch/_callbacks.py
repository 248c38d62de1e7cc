"""Training loops of libraries as best effort: a callback that holds a region open while they train."""

from __future__ import annotations

import importlib
from typing import Any

from cudasched import _region

__all__ = ["lightning_callback", "trainer_callback"]


class _WhileTraining:
    """A region on the training thread, open from the training's begin to its end of any kind."""

    def __init__(self, client_class: str, priority: int) -> None:
        self._region = _region.region(client_class, priority=priority)

    def _is_open(self) -> bool:
        return any(entry.region is self._region for entry in _region._thread.regions)

    def begin(self) -> None:
        """Enters, unless a training that failed left it open."""
        if not self._is_open():
            self._region.__enter__()

    def end(self) -> None:
        """Leaves the region, if open here."""
        if self._is_open():
            self._region.__exit__()


def trainer_callback(client_class: str = "best_effort", *, priority: int = 0) -> Any:
    """A callback for Hugging Face's ``Trainer``: training and evaluation are of a class.

    ::

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[cudasched.torch.trainer_callback()])

    A ``train()`` that raises leaves the region open on its thread until the trainer trains again: leave the thread, or
    the process, as one does.

    Args:
        client_class: ``"best_effort"``, ``"normal"`` or ``"latency"``.
        priority: As in `cudasched.region`.

    Raises:
        ConfigError: An argument has no meaning.
        ImportError: transformers is not installed.
    """
    scope = _WhileTraining(client_class, priority)
    base = importlib.import_module("transformers").TrainerCallback

    class Callback(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            scope.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            scope.end()

    return Callback()


def lightning_callback(client_class: str = "best_effort", *, priority: int = 0) -> Any:
    """A callback for Lightning's ``Trainer``: the work of ``fit`` is of a class, to its end or failure.

    ::

        trainer = lightning.Trainer(callbacks=[cudasched.torch.lightning_callback()])

    Args:
        client_class: ``"best_effort"``, ``"normal"`` or ``"latency"``.
        priority: As in `cudasched.region`.

    Raises:
        ConfigError: An argument has no meaning.
        ImportError: Neither lightning nor pytorch_lightning is installed.
    """
    scope = _WhileTraining(client_class, priority)
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback

    class Callback(base):  # type: ignore[misc, valid-type]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            scope.begin()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            scope.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            scope.end()

    return Callback()
