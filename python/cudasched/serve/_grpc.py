"""The operations over gRPC.

``control.proto`` says what there is, and clients in any language are generated from it. Here, the messages come from
its compiled form, ``control.binpb``, which a test compares with it: code that protoc generates would need the versions
of grpcio and protobuf that it was generated with.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent import futures
from importlib import resources
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ValidationError

from cudasched._text import one_line
from cudasched.errors import ConfigError
from cudasched.serve._guard import Callers
from cudasched.serve._service import Changes, Clients, Failure, OperationError, Service, TraceRequest, Usage

__all__ = ["grpc_server", "messages", "stub"]

_SERVICE = "cudasched.v1.Control"
_WORKERS = 8
_HEADER_BYTES = 8 * 1024
_HANDSHAKE_S, _IDLE_S = 10.0, 60.0


def _grpc() -> Any:
    # Else its C library writes lines of its own to standard error, beside the messages here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import google.protobuf.message_factory
        import grpc
    except ImportError:
        raise ConfigError("gRPC needs grpcio and protobuf: pip install 'cudasched[serve]'") from None
    del google
    return grpc


@functools.cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    found = descriptor_pb2.FileDescriptorSet.FromString(
        resources.files("cudasched.serve").joinpath("control.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return pool


@functools.cache
def messages() -> Mapping[str, Any]:
    """The classes of the messages of control.proto, by name.

    Raises:
        ConfigError: protobuf is not installed.
    """
    _grpc()
    from google.protobuf import message_factory

    file = _pool().FindFileByName("cudasched/serve/control.proto")
    return {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}


def stub(channel: Any) -> SimpleNamespace:
    """What a client calls: a function for each operation, as generated code would have.

    Args:
        channel: gRPC's.

    Raises:
        ConfigError: grpcio or protobuf is not installed.
    """
    known = messages()
    return SimpleNamespace(
        **{
            method.name: channel.unary_unary(
                f"/{_SERVICE}/{method.name}",
                request_serializer=known[method.input_type.name].SerializeToString,
                response_deserializer=known[method.output_type.name].FromString,
            )
            for method in _pool().FindServiceByName(_SERVICE).methods
        }
    )


def _message(name: str, model: BaseModel) -> Any:
    from google.protobuf import json_format

    values = model.model_dump(mode="json", exclude_none=True)
    return json_format.ParseDict(values, messages()[name]())


def _usage(usage: Usage) -> Any:
    message = messages()["Usage"](interval_s=usage.interval_s, kept=usage.kept, names=usage.names)
    for sample in usage.samples:
        added = message.samples.add(number=sample.number, at_s=sample.at_s)
        for client, (share, wait_ms, attainment, held) in sample.clients.items():
            _set(added.clients[client], gpu_share=share, gate_wait_ms=wait_ms, attainment=attainment, memory_bytes=held)
        for uuid, (sm_ratio, memory) in sample.gpus.items():
            _set(added.gpus[uuid], sm_ratio=sm_ratio, memory_used_bytes=memory)
    return message


def _set(message: Any, **values: float | int | None) -> None:
    message.SetInParent()
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


_CHANGES = ("client_class", "priority", "weight", "policy", "memory_limit_bytes")


class _Operations:
    """The operations as functions of messages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def ListClients(self, request: Any, caller: str) -> Any:  # noqa: N802
        clients: Clients = self._service.clients()
        return _message("Clients", clients)

    def GetClient(self, request: Any, caller: str) -> Any:  # noqa: N802
        return _message("Client", self._service.client(request.id))

    def ChangeClient(self, request: Any, caller: str) -> Any:  # noqa: N802
        given = {name: getattr(request, name) for name in _CHANGES if request.HasField(name)}
        return _message("Client", self._service.change(request.id, Changes(**given), caller))

    def TraceClient(self, request: Any, caller: str) -> Any:  # noqa: N802
        given = {name: getattr(request, name) for name in ("seconds", "format") if request.HasField(name)}
        content = self._service.trace(request.id, TraceRequest(**given), caller)
        return messages()["Trace"](content=content)

    def GetUsage(self, request: Any, caller: str) -> Any:  # noqa: N802
        return _usage(self._service.usage(request.after))

    def GetMetrics(self, request: Any, caller: str) -> Any:  # noqa: N802
        return messages()["Metrics"](text=self._service.metrics())


def _address(peer: str) -> str:
    """Without the port: gRPC writes ``ipv4:127.0.0.1:5``, or ``ipv6:%5B::1%5D:5``."""
    return peer.rpartition(":")[0] or peer


def grpc_server(
    service: Service, callers: Callers, host: str, port: int, pem: tuple[bytes, bytes] | None, connections: int
) -> tuple[Any, int]:
    """A server that listens, and is to be started; its port.

    Args:
        service: The operations.
        callers: Who may use them.
        host: The address.
        port: 0: any that is free.
        pem: Key and certificate, for TLS.
        connections: So many at once; those that say nothing end after ten seconds, those without a call after a minute.

    Raises:
        ConfigError: grpcio is not installed, or the address cannot be had.
    """
    grpc = _grpc()
    codes = {
        Failure.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
        Failure.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        Failure.REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
        Failure.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
        Failure.INTERNAL: grpc.StatusCode.INTERNAL,
    }
    interceptor: Any = grpc.ServerInterceptor
    operations, known = _Operations(service), messages()

    def let_in(context: Any) -> str:
        address = _address(context.peer())
        given = [str(value).encode() for name, value in context.invocation_metadata() if name == "authorization"]
        refusal = callers.refusal(address, given)
        if refusal is not None:
            too_often = refusal.wait_s > 0
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED if too_often else grpc.StatusCode.UNAUTHENTICATED, refusal.message
            )
        return f"grpc {address}"

    def refuse(requests: Any, context: Any) -> Any:
        """Answers a call without the token at once: no thread waits for a message of it."""
        let_in(context)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is needed with each call")

    class Gate(interceptor):  # type: ignore[misc]
        """Lets calls with the token in, before their messages are waited for."""

        def intercept_service(self, continuation: Any, call: Any) -> Any:
            given = [str(value).encode() for name, value in call.invocation_metadata if name == "authorization"]
            return continuation(call) if callers.knows(given) else grpc.stream_stream_rpc_method_handler(refuse)

    def handler(operation: Callable[[Any, str], Any]) -> Callable[[Any, Any], Any]:
        def handle(request: Any, context: Any) -> Any:
            caller = let_in(context)
            try:
                return operation(request, caller)
            except OperationError as refusal:
                context.abort(codes[refusal.failure], str(refusal))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "changes"
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, one_line(f"{where}: {first['msg']}")[:500])

        return handle

    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            handler(getattr(operations, method.name)),
            request_deserializer=known[method.input_type.name].FromString,
            response_serializer=known[method.output_type.name].SerializeToString,
        )
        for method in _pool().FindServiceByName(_SERVICE).methods
    }
    server = grpc.server(
        futures.ThreadPoolExecutor(_WORKERS, thread_name_prefix="cudasched-grpc"),
        interceptors=(Gate(),),
        maximum_concurrent_rpcs=4 * _WORKERS,
        options=[
            ("grpc.max_receive_message_length", callers.limits.body_bytes),
            ("grpc.max_metadata_size", _HEADER_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", int(1e3 * _HANDSHAKE_S)),
            ("grpc.max_connection_idle_ms", int(1e3 * _IDLE_S)),
        ],
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if pem is None:
            bound = server.add_insecure_port(where)
        else:
            bound = server.add_secure_port(where, grpc.ssl_server_credentials([pem]))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(f"{where} cannot be listened on for gRPC: choose another with --grpc-port")
    return server, int(bound)
