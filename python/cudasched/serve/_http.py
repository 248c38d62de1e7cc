"""The operations over HTTP, with an OpenAPI document, and the page."""

from __future__ import annotations

from importlib import resources
from typing import Any, Literal

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cudasched import __version__
from cudasched._text import one_line
from cudasched.advise.beside import Forecast
from cudasched.serve._service import (
    Changes,
    ClientInfo,
    Clients,
    Failure,
    ForecastRequest,
    OperationError,
    Service,
    TraceRequest,
    Usage,
)

__all__ = ["PUBLIC", "application"]

_ASSETS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

PUBLIC = frozenset(_ASSETS) | {"/api/openapi.json", "/api/v1/health"}
"""Paths that need no token: they are the same for everybody."""

_STATUS = {
    Failure.INVALID: 422,
    Failure.NOT_FOUND: 404,
    Failure.REFUSED: 409,
    Failure.TIMEOUT: 504,
    Failure.INTERNAL: 500,
}


class Problem(BaseModel):
    """Why a request failed."""

    detail: str


_MEANING = {
    400: "The request is no HTTP that means anything.",
    401: "There is no token, or a wrong one.",
    403: "A page of another origin asked.",
    404: "There is no such client or program.",
    408: "The request took too long.",
    409: "The client cannot be changed so: its regions decide its class, it holds more memory, it is being changed; or "
    "another forecast is being made.",
    413: "The request is too large.",
    421: "The server is not called by that name.",
    422: "A value has no meaning; nothing was changed.",
    429: "Too many requests.",
    500: "The clients cannot be read, or the change cannot be noted.",
    504: "The client did not answer in time, or the forecasts took too long.",
}


def _problems(*more: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": Problem, "description": _MEANING[status]}
        for status in sorted({400, 401, 403, 408, 413, 421, 422, 429, 500, *more})
    }


def _problems_beside(*more: int) -> dict[int | str, dict[str, Any]]:
    """Of operations whose answer is no JSON."""
    return {
        status: {
            "description": problem["description"],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status, problem in _problems(*more).items()
    }


class Health(BaseModel):
    """That the server works."""

    status: Literal["ok"]


class Api:
    """The operations as functions of requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def health(self) -> Health:
        """Whether the clients are looked at; needs no token."""
        self._service.check()
        return Health(status="ok")

    def clients(self) -> Clients:
        """Every client of this user, and the GPUs that they have used."""
        return self._service.clients()

    def client(self, id: str = Path(pattern="^[0-9a-f]{16}$")) -> ClientInfo:
        """One client."""
        return self._service.client(id)

    def change(self, changes: Changes, request: Request, id: str = Path(pattern="^[0-9a-f]{16}$")) -> ClientInfo:
        """Changes settings of a client, one after the other, and waits until they hold."""
        peer = request.client.host if request.client else "?"
        return self._service.change(id, changes, caller=f"http {peer}")

    def trace(self, wanted: TraceRequest, request: Request, id: str = Path(pattern="^[0-9a-f]{16}$")) -> Response:
        """Traces a client for a while; the answer is a file for Perfetto, or for chrome://tracing."""
        peer = request.client.host if request.client else "?"
        content = self._service.trace(id, wanted, caller=f"http {peer}")
        name = f"{id}.{'pftrace' if wanted.format == 'perfetto' else 'json'}"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    def forecast(self, wanted: ForecastRequest) -> list[Forecast]:
        """What a server and each program cost one another on one GPU, the best partner first."""
        return self._service.forecast(wanted)

    def usage(
        self, after: int = Query(default=0, ge=0, le=2**53, description="Only samples of later numbers.")
    ) -> Usage:
        """Who used the GPUs in the last minutes."""
        return self._service.usage(after)

    def metrics(self) -> PlainTextResponse:
        """The answer of `cudasched metrics serve`, in Prometheus's text format."""
        return PlainTextResponse(self._service.metrics(), media_type="text/plain; version=0.0.4")


def _asset(name: str, kind: str) -> Any:
    content = resources.files("cudasched.serve").joinpath("assets").joinpath(name).read_bytes()

    def asset() -> Response:
        return Response(content, headers={"content-type": kind, "cache-control": "no-cache"})

    return asset


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, OperationError)
    return JSONResponse({"detail": str(error)}, status_code=_STATUS[error.failure])


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    why = first["msg"]
    if where == "body" and "json" not in request.headers.get("content-type", ""):
        why = "JSON is needed, with the header content-type: application/json"
    return JSONResponse({"detail": one_line(f"{where}: {why}")[:500]}, status_code=422)


def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": str(error.detail)}, status_code=error.status_code, headers=error.headers)


def _broken(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "an error in cudasched; its log says which"}, status_code=500)


def application(service: Service) -> FastAPI:
    """The application, without the guard (`cudasched.serve._guard`).

    Args:
        service: The operations.
    """
    api = Api(service)
    app = FastAPI(
        title="cudasched",
        version=__version__,
        description="Sees and changes the programs that share this machine's GPUs (docs/control.md).",
        openapi_url="/api/openapi.json",
        docs_url=None,  # these load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    for path, (name, kind) in _ASSETS.items():
        app.add_api_route(path, _asset(name, kind), methods=["GET"], include_in_schema=False)
    v1 = "/api/v1"
    app.add_api_route(
        f"{v1}/health",
        api.health,
        methods=["GET"],
        responses=_problems(),
        operation_id="health",
        openapi_extra={"security": []},
    )
    app.add_api_route(f"{v1}/clients", api.clients, methods=["GET"], responses=_problems(), operation_id="clients")
    app.add_api_route(
        f"{v1}/clients/{{id}}", api.client, methods=["GET"], responses=_problems(404), operation_id="client"
    )
    app.add_api_route(
        f"{v1}/clients/{{id}}",
        api.change,
        methods=["PATCH"],
        responses=_problems(404, 409, 504),
        operation_id="change",
    )
    file = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    app.add_api_route(
        f"{v1}/clients/{{id}}/trace",
        api.trace,
        methods=["POST"],
        response_class=Response,
        responses={200: {"description": "The trace.", "content": file}, **_problems_beside(404, 409, 504)},
        operation_id="trace",
    )
    app.add_api_route(
        f"{v1}/forecast", api.forecast, methods=["POST"], responses=_problems(404, 409, 504), operation_id="forecast"
    )
    app.add_api_route(f"{v1}/usage", api.usage, methods=["GET"], responses=_problems(), operation_id="usage")
    app.add_api_route(
        f"{v1}/metrics",
        api.metrics,
        methods=["GET"],
        response_class=PlainTextResponse,
        responses=_problems_beside(),
        operation_id="metrics",
    )
    app.add_exception_handler(OperationError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _failed)
    app.add_exception_handler(Exception, _broken)
    document = app.openapi()
    document.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"bearer": []}]
    return app
