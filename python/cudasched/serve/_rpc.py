"""Services over gRPC behind the token, from their compiled protocols.

A .proto says what a service has, and clients in any language are generated from it. Here, the messages come from its
compiled form, a .binpb beside it, which a test compares with it: code that protoc generates would need the versions of
grpcio and protobuf that it was generated with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import cached_property
from importlib import resources
from types import SimpleNamespace
from typing import Any

from cudasched.errors import ConfigError
from cudasched.serve._guard import Callers

__all__ = ["Rpc", "caller"]

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


def caller(context: Any) -> str:
    """A caller's address without the port: gRPC writes ``ipv4:127.0.0.1:5``, or ``ipv6:%5B::1%5D:5``."""
    peer = str(context.peer())
    return peer.rpartition(":")[0] or peer


class Rpc:
    """The messages and the service of a compiled .proto.

    Args:
        package: Where ``NAME.proto`` and ``NAME.binpb`` are.
        name: Their name.
        service: The service in it, with its package.
    """

    def __init__(self, package: str, name: str, service: str) -> None:
        self._package, self._name, self._service = package, name, service

    @cached_property
    def _pool(self) -> Any:
        _grpc()
        from google.protobuf import descriptor_pb2, descriptor_pool

        compiled = resources.files(self._package).joinpath(f"{self._name}.binpb").read_bytes()
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
            pool.Add(file)
        return pool

    @cached_property
    def messages(self) -> Mapping[str, Any]:
        """The classes of the messages, by name.

        Raises:
            ConfigError: grpcio or protobuf is not installed.
        """
        pool = self._pool
        from google.protobuf import message_factory

        file = pool.FindFileByName(f"{self._package.replace('.', '/')}/{self._name}.proto")
        return {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}

    @property
    def _methods(self) -> Any:
        return self._pool.FindServiceByName(self._service).methods

    def stub(self, channel: Any) -> SimpleNamespace:
        """What a client calls: a function for each operation, as generated code would have.

        Args:
            channel: gRPC's.

        Raises:
            ConfigError: grpcio or protobuf is not installed.
        """
        known = self.messages
        return SimpleNamespace(
            **{
                method.name: channel.unary_unary(
                    f"/{self._service}/{method.name}",
                    request_serializer=known[method.input_type.name].SerializeToString,
                    response_deserializer=known[method.output_type.name].FromString,
                )
                for method in self._methods
            }
        )

    def server(
        self,
        operations: object,
        refusal: Callable[[Exception], tuple[str, str] | None],
        callers: Callers,
        host: str,
        port: int,
        pem: tuple[bytes, bytes] | None,
        connections: int,
        workers: int = 8,
    ) -> tuple[Any, int]:
        """A server that listens, and is to be started; its port.

        Args:
            operations: Has a method of each operation's name, from the message and gRPC's context to the answer.
            refusal: The name of the status code, and what is said, of an error that is the caller's; None: it is not.
            callers: Who may use it.
            host: The address.
            port: 0: any that is free.
            pem: Key and certificate, for TLS.
            connections: So many at once; those that say nothing end after ten seconds, those without a call after a
                minute.
            workers: So many calls are answered at once, and three times as many wait.

        Raises:
            ConfigError: grpcio is not installed, or the address cannot be had.
        """
        grpc = _grpc()
        interceptor: Any = grpc.ServerInterceptor
        known = self.messages

        def let_in(context: Any) -> None:
            given = [str(value).encode() for name, value in context.invocation_metadata() if name == "authorization"]
            refused = callers.refusal(caller(context), given)
            if refused is not None:
                too_often = refused.wait_s > 0
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED if too_often else grpc.StatusCode.UNAUTHENTICATED,
                    refused.message,
                )

        def refuse(requests: Any, context: Any) -> Any:
            """Answers a call without the token at once: no thread waits for a message of it."""
            let_in(context)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is needed with each call")

        class Gate(interceptor):  # type: ignore[misc]
            """Lets calls with the token in, before their messages are waited for."""

            def intercept_service(self, continuation: Any, call: Any) -> Any:
                given = [str(value).encode() for name, value in call.invocation_metadata if name == "authorization"]
                return continuation(call) if callers.knows(given) else grpc.stream_stream_rpc_method_handler(refuse)

        def handler(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def handle(request: Any, context: Any) -> Any:
                let_in(context)
                try:
                    return operation(request, context)
                except Exception as error:
                    said = refusal(error)
                    if said is None:
                        raise
                    context.abort(grpc.StatusCode[said[0]], said[1])

            return handle

        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                handler(getattr(operations, method.name)),
                request_deserializer=known[method.input_type.name].FromString,
                response_serializer=known[method.output_type.name].SerializeToString,
            )
            for method in self._methods
        }
        server = grpc.server(
            futures.ThreadPoolExecutor(workers, thread_name_prefix="cudasched-grpc"),
            interceptors=(Gate(),),
            maximum_concurrent_rpcs=4 * workers,
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
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self._service, handlers),))
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
