"""Models over HTTP: tensors as JSON, or as bytes after it (the extension ``binary_tensor_data``)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cudasched.errors import Error
from cudasched.inference._batcher import awaited
from cudasched.inference._errors import InputError, UseError
from cudasched.inference._kserve import VERSION, Asked, Models, check, datatype, decoded, numbers, raw, refusal
from cudasched.serve._guard import Application, Receive, Scope, Send

__all__ = ["PUBLIC", "application"]

Headers = list[tuple[bytes, bytes]]

PUBLIC = frozenset({"/v2", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token."""

_LENGTH_HEADER = b"inference-header-content-length"
_INFER = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_UNWATCHED_S = 0.01  # an answer that comes before needs no task that waits for its caller to leave
_ENCODED = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


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


def application(models: Models) -> Application:
    """The application, without its guard.

    Args:
        models: Those of this process, or of another one.
    """

    async def server(_: Request) -> Any:
        return models.server()

    async def live(_: Request) -> Any:
        return {}

    async def all_ready(_: Request) -> Any:
        if not models.ready():
            raise UseError("the process of a model starts again")
        return {}

    async def ready(request: Request) -> Any:
        name, version = _model(request)
        models.known(name, version)
        return {"name": name, "ready": True}

    async def metadata(request: Request) -> Any:
        return await asyncio.to_thread(models.metadata, *_model(request))

    async def statistics(request: Request) -> Any:
        return {"model_stats": await asyncio.to_thread(models.statistics, *_model(request))}

    async def index(_: Request) -> Any:
        return models.index()

    async def infer(name: str, version: str, scope: Scope, receive: Receive) -> tuple[bytes, Headers]:
        header, data = _split(scope["headers"], await _body(receive))
        asked = _asked(name, version, header, data)
        answers = models.submit(asked)
        try:
            arrays = models.outputs(asked, await _answers(answers, receive))
        finally:
            for answer in answers:
                answer.cancel()  # those that wait, where one failed
        return _response(asked, header, arrays)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        """A request for inference without Starlette, which takes longer than all else; others with it."""
        path = _INFER.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await app(scope, receive, send)
            return
        try:
            body, headers = await infer(path[1], path[2] or "", scope, receive)
        except (Error, asyncio.CancelledError) as error:
            said = error if isinstance(error, Error) else UseError("the server ends")
            await _failed(None, said)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def json_of(function: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(await function(request))
            except asyncio.CancelledError:
                raise UseError("the server ends") from None

        return answer

    routes = [
        Route("/v2", json_of(server)),
        Route("/v2/health/live", json_of(live)),
        Route("/v2/health/ready", json_of(all_ready)),
        Route("/v2/models/stats", json_of(statistics)),
        Route("/v2/repository/index", json_of(index), methods=["POST"]),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, json_of(metadata)),
            Route(f"{model}/ready", json_of(ready)),
            Route(f"{model}/stats", json_of(statistics)),
        ]
    app = Starlette(routes=routes, exception_handlers={Error: _failed, HTTPException: _unknown})
    app.router.redirect_slashes = False
    return serve


def _model(request: Request) -> tuple[str, str]:
    """Name and version in the path; empty: none."""
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _failed(_: object, error: Exception) -> JSONResponse:
    status, _code, said = refusal(error) or (500, "", "the server failed")
    return JSONResponse({"error": said}, status_code=status)


def _unknown(request: Request, error: Any) -> JSONResponse:
    said = f"{error.detail}: {request.method} {request.url.path}"
    return JSONResponse({"error": said}, status_code=error.status_code, headers=error.headers)


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UseError("the caller is gone")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _answers(answers: list[Any], receive: Receive) -> list[Any]:
    """Waits for all; a caller that is gone cancels those that wait."""
    if all(answer.done() for answer in answers):
        return [answer.result() for answer in answers]
    loop, watching = asyncio.get_running_loop(), []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for answer in answers:
            answer.cancel()

    timer = loop.call_later(_UNWATCHED_S, lambda: watching.append(loop.create_task(watch())))
    try:
        # Most of a batch is done when the first of it is heard of: it costs the event loop no turn.
        return [await awaited(answer) for answer in answers]
    except CancelledError:
        raise UseError("the caller is gone") from None
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


def _split(fields: Headers, body: bytes) -> tuple[_Infer, bytes]:
    """The JSON of a body, and the bytes after it."""
    headers = dict(fields)
    if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
        raise InputError(f"content-encoding {encoding.decode('latin-1')!r} is not supported")
    given = headers.get(_LENGTH_HEADER, b"%d" % len(body))
    if not given.isdigit() or len(given) > 12 or int(given) > len(body):
        said = f"{_LENGTH_HEADER.decode()} = {given.decode('latin-1')!r}"
        raise InputError(f"{said}: the body has {len(body)} bytes")
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


def _response(asked: Asked, header: _Infer, arrays: dict[str, Any]) -> tuple[bytes, Headers]:
    """The body of an answer and its headers."""
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
    said = _ENCODED(answer).encode()
    kind = b"application/octet-stream" if parts else b"application/json"
    body = b"".join([said, *parts])
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if parts:
        headers.append((_LENGTH_HEADER, str(len(said)).encode()))
    return body, headers
