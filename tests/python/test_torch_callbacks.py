"""Callbacks for training libraries, over libraries that call them as the real ones do."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import cudasched
import cudasched.torch
import pytest
from test_torch_regions import Engine, Torch, engine, torch

__all__ = ["engine", "torch"]


class Base:
    """Their callbacks' base class."""


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.TrainerCallback = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(request.param)
    module.Callback = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # type: ignore[arg-type]
    if "." in request.param:
        monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, request.param, module)


def test_hugging_faces_trainer_trains_in_a_region(engine: Engine, torch: Torch, transformers: None) -> None:
    callback = cudasched.torch.trainer_callback()
    assert isinstance(callback, Base)
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=None)
        assert engine.current() == "best_effort" and torch.current() != 0
        callback.on_train_end(None, None, None, model=None)
        assert engine.nothing_open()


def test_a_training_that_failed_does_not_nest(engine: Engine, torch: Torch, transformers: None) -> None:
    callback = cudasched.torch.trainer_callback()
    callback.on_train_begin(None, None, None)
    callback.on_train_begin(None, None, None)
    callback.on_train_end(None, None, None)
    assert engine.nothing_open()


def test_a_training_after_one_that_failed_in_a_notebooks_cell_is_in_the_region(
    engine: Engine, torch: Torch, transformers: None
) -> None:
    callback = cudasched.torch.trainer_callback()

    async def notebook() -> None:
        callback.on_train_begin(None, None, None)  # and raises: the loop goes on, and its tasks are outside
        await asyncio.sleep(0)
        assert engine.nothing_open()
        callback.on_train_begin(None, None, None)
        assert engine.current() == "best_effort"
        callback.on_train_end(None, None, None)

    asyncio.run(notebook())
    assert engine.nothing_open()


@pytest.mark.parametrize("end", ["on_fit_end", "on_exception"])
def test_lightning_fits_in_a_region(engine: Engine, torch: Torch, lightning: None, end: str) -> None:
    callback = cudasched.torch.lightning_callback("best-effort")
    assert isinstance(callback, Base)
    callback.on_fit_start(None, None)
    assert engine.current() == "best_effort"
    getattr(callback, end)(None, None, *([KeyError()] if end == "on_exception" else []))
    assert engine.nothing_open()
    callback.on_fit_end(None, None)


def test_a_class_that_is_none_is_refused(engine: Engine, transformers: None) -> None:
    with pytest.raises(cudasched.ConfigError, match="unknown class"):
        cudasched.torch.trainer_callback("idle")
