"""Models over HTTP: tensors as JSON, or as bytes after it (the extension ``binary_tensor_data``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cudasched.errors import Error
from cudasched.inference._batcher import Batcher
from cudasched.inference._errors import InputError, UseError
from cudasched.inference._kserve import VERSION, Asked, Models, check, datatype, decoded, numbers, raw, refusal

__all__ = ["PUBLIC", "application"]

PUBLIC = frozenset({"/v2", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token."""

_LENGTH_HEADER = "inference-header-content-length"


class _Input(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Output(BaseModel):
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Infer(BaseModel):
    id: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[_Input] = Field(min_length=1)
    outputs: list[_Output] = Field(default_factory=list)


def application(batchers: Mapping[str, Batcher]) -> Starlette:
    """The application, without its guard. Argument and errors as of `Models`.

    Args:
        batchers: See there.
    """
    models = Models(batchers)

    async def server(_: Request) -> Any:
        return models.server()

    async def live(_: Request) -> Any:
        return {}

    async def ready(request: Request) -> Any:
        name, version = _model(request)
        models.known(name, version)
        return {"name": name, "ready": True}

    async def metadata(request: Request) -> Any:
        return models.metadata(*_model(request))

    async def statistics(request: Request) -> Any:
        return {"model_stats": models.statistics(*_model(request))}

    async def index(_: Request) -> Any:
        return models.index()

    async def infer(request: Request) -> Response:
        header, data = _split(request, await request.body())
        asked = _asked(*_model(request), header, data)
        answers = models.submit(asked)
        try:
            arrays = models.outputs(asked, await _answers(answers, request))
        finally:
            for answer in answers:
                answer.cancel()  # those that wait, where one failed
        return _response(asked, header, arrays)

    def json_of(function: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(await function(request))

        return answer

    routes = [
        Route("/v2", json_of(server)),
        Route("/v2/health/live", json_of(live)),
        Route("/v2/health/ready", json_of(live)),
        Route("/v2/models/stats", json_of(statistics)),
        Route("/v2/repository/index", json_of(index), methods=["POST"]),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(f"{model}/infer", infer, methods=["POST"]),
            Route(model, json_of(metadata)),
            Route(f"{model}/ready", json_of(ready)),
            Route(f"{model}/stats", json_of(statistics)),
        ]
    app = Starlette(routes=routes, exception_handlers={Error: _failed})
    app.router.redirect_slashes = False
    return app


def _model(request: Request) -> tuple[str, str]:
    """Name and version in the path; empty: none."""
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _failed(_: Request, error: Exception) -> JSONResponse:
    status, _code, said = refusal(error) or (500, "", "the server failed")
    return JSONResponse({"error": said}, status_code=status)


async def _answers(answers: list[Any], request: Request) -> list[Any]:
    """Waits for all; a caller that is gone cancels them."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waited = asyncio.gather(*map(asyncio.wrap_future, answers))
    waited.add_done_callback(lambda _: waited.cancelled() or waited.exception())  # else asyncio logs it as lost
    watched = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((waited, watched), return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            raise UseError("the caller is gone")
        return waited.result()
    finally:
        waited.cancel()
        watched.cancel()


def _split(request: Request, body: bytes) -> tuple[_Infer, bytes]:
    """The JSON of a body, and the bytes after it."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise InputError(f"content-encoding {encoding!r} is not supported")
    given = request.headers.get(_LENGTH_HEADER, str(len(body)))
    if not given.isdecimal() or int(given[:12]) > len(body):
        raise InputError(f"{_LENGTH_HEADER} = {given!r}: the body has {len(body)} bytes")
    try:
        return _Infer.model_validate_json(body[: int(given)]), body[int(given) :]
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None


def _asked(model: str, version: str, header: _Infer, data: bytes) -> Asked:
    inputs, place = [], 0
    for tensor in header.inputs:
        check(tensor.parameters)
        elements: Any = tensor.data
        if (size := tensor.parameters.get("binary_data_size")) is not None:
            if elements is not None or not isinstance(size, int) or not 0 <= size <= len(data) - place:
                raise InputError(f"{tensor.name}: binary_data_size = {size}; {len(data) - place} bytes are left of it")
            elements, place = data[place : place + size], place + size
        if elements is None:
            raise InputError(f"{tensor.name} has no data")
        inputs.append((tensor.name, decoded(tensor.name, tensor.datatype, tensor.shape, elements)))
    if place != len(data):
        raise InputError(f"{len(data) - place} bytes after the last input")
    for output in header.outputs:
        check(output.parameters)
    return Asked(model, version, inputs, [output.name for output in header.outputs], header.parameters)


def _response(asked: Asked, header: _Infer, arrays: dict[str, Any]) -> Response:
    all_binary = header.parameters.get("binary_data_output", False)
    binary = {output.name: output.parameters.get("binary_data", all_binary) for output in header.outputs}
    parts: list[bytes] = []

    def tensors() -> Iterator[dict[str, Any]]:
        for name, array in arrays.items():
            tensor = {"name": name, "datatype": datatype(array), "shape": list(array.shape)}
            if binary.get(name, all_binary):
                parts.append(raw(array))
                yield {**tensor, "parameters": {"binary_data_size": len(parts[-1])}}
            else:
                yield {**tensor, "data": numbers(name, array)}

    answer = {"model_name": asked.model, "model_version": VERSION, "id": header.id, "outputs": list(tensors())}
    said = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()
    if not parts:
        return Response(said, media_type="application/json")
    headers = {_LENGTH_HEADER: str(len(said))}
    return Response(b"".join([said, *parts]), headers=headers, media_type="application/octet-stream")
