"""Batchers over HTTP, by the open inference protocol (KServe v2), with JSON tensors.

The rows of a request's tensors are requests of the batcher, each of which may be in another batch. A batcher here has
an example: an array, or a mapping of arrays by the names of the inputs.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from cudasched import __version__
from cudasched._text import one_line, shown
from cudasched.errors import ConfigError, Error
from cudasched.inference._batcher import Batcher
from cudasched.inference._errors import DeadlineError, InputError, QueueFullError, RunError, UseError

__all__ = ["PUBLIC", "application"]

PUBLIC = frozenset({"/v2", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token."""

_DATATYPES = {
    "bool": "BOOL",
    **{f"{'u' * unsigned}int{bits}": f"{'U' * unsigned}INT{bits}" for bits in (8, 16, 32, 64) for unsigned in (0, 1)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}
_STATUS: dict[type[Error], int] = {
    InputError: 400,
    QueueFullError: 503,
    UseError: 503,
    DeadlineError: 504,
    RunError: 500,
}


class _UnknownModelError(Error):
    """There is no such model."""


class _Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class _Infer(BaseModel):
    id: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[_Tensor] = Field(min_length=1)


def application(models: Mapping[str, Batcher]) -> FastAPI:
    """The application, without its guard.

    Args:
        models: Batchers with an example, by name.

    Raises:
        ConfigError: One has no example, or one that is no array and no mapping of arrays.
    """
    inputs = {name: _inputs(name, batcher.example) for name, batcher in models.items()}
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    def known(name: str) -> Batcher:
        if name not in models:
            raise _UnknownModelError(f"no model is named {shown(name)}; there are {', '.join(sorted(models))}")
        return models[name]

    async def server() -> dict[str, Any]:
        return {"name": "cudasched", "version": __version__, "extensions": ["statistics"]}

    async def live() -> dict[str, Any]:
        return {}

    async def ready(name: str) -> dict[str, Any]:
        known(name)
        return {"name": name, "ready": True}

    async def metadata(name: str) -> dict[str, Any]:
        known(name)
        tensors = [
            {"name": tensor, "datatype": _datatype(array), "shape": [-1, *array.shape]}
            for tensor, array in inputs[name].items()
        ]
        return {"name": name, "versions": [], "platform": "cudasched", "inputs": tensors, "outputs": []}

    async def statistics(name: str) -> dict[str, Any]:
        return {"model_stats": [{"name": name, **vars(known(name).statistics())}]}

    async def infer(name: str, request: _Infer) -> dict[str, Any]:
        batcher = known(name)
        rows = _rows(request.inputs, inputs[name], batcher.example)
        if len(rows) > batcher.max_queue:
            raise InputError(f"{len(rows)} rows; at most {batcher.max_queue} (max_queue)")
        # As Triton has them: 1 is the highest priority, and a time-out is in us; 0: the default.
        options: dict[str, Any] = {"priority": -_number(request, "priority", 0)}
        if timeout_us := _number(request, "timeout", 0):
            options["deadline_ms"] = timeout_us / 1e3
        tasks = [asyncio.ensure_future(batcher.submit(row, **options)) for row in rows]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return {"model_name": name, "id": request.id, "outputs": _outputs(answers)}

    model = "/v2/models/{name}"
    gets: dict[str, Callable[..., Any]] = {
        "/v2": server,
        "/v2/health/live": live,
        "/v2/health/ready": live,
        model: metadata,
        f"{model}/ready": ready,
        f"{model}/stats": statistics,
    }
    for path, function in gets.items():
        app.add_api_route(path, function, methods=["GET"])
    app.add_api_route(f"{model}/infer", infer, methods=["POST"])
    app.add_exception_handler(Error, _failed)
    app.add_exception_handler(RequestValidationError, _failed)
    return app


def _failed(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        said, status = f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 400
    else:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 404)
        said = str(error)
    return JSONResponse({"error": one_line(said)[:500]}, status_code=status)


def _inputs(name: str, example: Any) -> dict[str, Any]:
    """The example's arrays by the names of the inputs."""
    arrays = dict(example) if isinstance(example, Mapping) else {"input": example}
    for tensor, array in arrays.items():
        if not isinstance(tensor, str) or not hasattr(array, "shape") or _datatype(array) is None:
            raise ConfigError(f"the model {shown(name)} needs an example of numeric arrays, and has {shown(example)}")
    return arrays


def _datatype(array: Any) -> str | None:
    return _DATATYPES.get(str(getattr(array, "dtype", "")).removeprefix("torch."))


def _number(request: _Infer, name: str, default: float) -> float:
    value = request.parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"the parameter {name} = {shown(value)}: a number is needed")
    return float(value)


def _rows(tensors: list[_Tensor], inputs: dict[str, Any], example: Any) -> list[Any]:
    arrays = {tensor.name: _array(tensor, inputs) for tensor in tensors}
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1 or 0 in counts or len(arrays) != len(tensors):
        raise InputError("each input is given once, and all have the same number of rows, at least one")
    if set(arrays) != set(inputs):
        raise InputError(f"the inputs are {', '.join(sorted(inputs))}; given are {', '.join(sorted(arrays))}")
    named = [{name: array[row] for name, array in arrays.items()} for row in range(counts.pop())]
    return named if isinstance(example, Mapping) else [row["input"] for row in named]


def _array(tensor: _Tensor, inputs: dict[str, Any]) -> Any:
    """A numpy array, or PyTorch's tensor where the example has those."""
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InputError(f"{tensor.name}: datatype {tensor.datatype!r} is not supported; {', '.join(_DTYPES)} are")
    try:
        with np.errstate(over="ignore"):
            array = np.array(tensor.data, dtype).reshape(tensor.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{tensor.name}: the data are no {tensor.datatype} of shape {tensor.shape}: {error}") from None
    if not array.ndim or -1 in tensor.shape:
        raise InputError(f"{tensor.name}: shape {tensor.shape} does not begin with a number of rows")
    is_torch = type(inputs.get(tensor.name)).__module__.partition(".")[0] == "torch"
    return sys.modules["torch"].from_numpy(array) if is_torch else array


def _outputs(answers: list[Any]) -> list[dict[str, Any]]:
    """Rows of answers as tensors: named by a mapping's keys, else numbered."""
    first = answers[0]
    parts = first if isinstance(first, Mapping) else dict(enumerate(first if isinstance(first, tuple) else (first,)))
    outputs = []
    for key in parts:
        rows = [answer[key] if isinstance(first, (Mapping, tuple)) else answer for answer in answers]
        try:
            array = np.stack([np.asarray(row) for row in rows])
        except ValueError:
            array = np.array(None)
        datatype = _datatype(array)
        if datatype is None or not np.isfinite(array).all():
            raise RunError(f"the output {shown(key)} is {shown(rows[0])}: finite numbers of one shape are needed")
        name = key if isinstance(key, str) else f"output_{key}"
        outputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()})
    return outputs
