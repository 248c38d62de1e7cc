"""The operations over gRPC; see ``control.proto``."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ValidationError

from cudasched._text import one_line
from cudasched.serve._guard import Callers
from cudasched.serve._rpc import Rpc, caller
from cudasched.serve._service import Changes, Clients, Failure, OperationError, Service, TraceRequest, Usage

__all__ = ["grpc_server", "messages", "stub"]

_RPC = Rpc("cudasched.serve", "control", "cudasched.v1.Control")
_CODES = {
    Failure.INVALID: "INVALID_ARGUMENT",
    Failure.NOT_FOUND: "NOT_FOUND",
    Failure.REFUSED: "FAILED_PRECONDITION",
    Failure.TIMEOUT: "DEADLINE_EXCEEDED",
    Failure.INTERNAL: "INTERNAL",
}


def messages() -> Mapping[str, Any]:
    """The classes of the messages of control.proto, by name.

    Raises:
        ConfigError: grpcio or protobuf is not installed.
    """
    return _RPC.messages


def stub(channel: Any) -> SimpleNamespace:
    """A client's stub: a function for each operation, as in generated code.

    Args:
        channel: gRPC's.

    Raises:
        ConfigError: grpcio or protobuf is not installed.
    """
    return _RPC.stub(channel)


def _message(name: str, model: BaseModel) -> Any:
    from google.protobuf import json_format

    values = model.model_dump(mode="json", exclude_none=True)
    return json_format.ParseDict(values, messages()[name]())


_OF_CLIENT = ("sm_ratio", "best_effort_ratio", "gate_wait_ms", "attainment", "memory_bytes")


def _usage(usage: Usage) -> Any:
    message = messages()["Usage"](interval_s=usage.interval_s, kept=usage.kept, names=usage.names)
    for sample in usage.samples:
        added = message.samples.add(number=sample.number, at_s=sample.at_s)
        for client, values in sample.clients.items():
            _set(added.clients[client], **dict(zip(_OF_CLIENT, values, strict=True)))
        for uuid, (sm_ratio, memory) in sample.gpus.items():
            _set(added.gpus[uuid], sm_ratio=sm_ratio, memory_used_bytes=memory)
    return message


def _set(message: Any, **values: float | int | None) -> None:
    message.SetInParent()
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


_CHANGES = ("client_class", "priority", "weight", "policy", "memory_limit_bytes")


def _name(context: Any) -> str:
    return f"grpc {caller(context)}"


class _Operations:
    """The operations as functions of messages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def ListClients(self, request: Any, context: Any) -> Any:  # noqa: N802
        clients: Clients = self._service.clients()
        return _message("Clients", clients)

    def GetClient(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _message("Client", self._service.client(request.id))

    def ChangeClient(self, request: Any, context: Any) -> Any:  # noqa: N802
        given = {name: getattr(request, name) for name in _CHANGES if request.HasField(name)}
        return _message("Client", self._service.change(request.id, Changes(**given), _name(context)))

    def TraceClient(self, request: Any, context: Any) -> Any:  # noqa: N802
        given = {name: getattr(request, name) for name in ("seconds", "format") if request.HasField(name)}
        content = self._service.trace(request.id, TraceRequest(**given), _name(context))
        return messages()["Trace"](content=content)

    def GetUsage(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _usage(self._service.usage(request.after))

    def GetMetrics(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages()["Metrics"](text=self._service.metrics())


def _refusal(error: Exception) -> tuple[str, str] | None:
    if isinstance(error, OperationError):
        return _CODES[error.failure], str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "changes"
        return "INVALID_ARGUMENT", one_line(f"{where}: {first['msg']}")[:500]
    return None


def grpc_server(
    service: Service, callers: Callers, host: str, port: int, pem: tuple[bytes, bytes] | None, connections: int
) -> tuple[Any, int]:
    """A server of the operations that listens, and is to be started; its port. Arguments and errors as of `Rpc.server`.

    Args:
        service: The operations.
        callers: See there.
        host: See there.
        port: See there.
        pem: See there.
        connections: See there.
    """
    return _RPC.server(_Operations(service), _refusal, callers, host, port, pem, connections)
