"""Models over gRPC; ``kserve.proto`` has the calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudasched.inference._errors import InputError
from cudasched.inference._kserve import VERSION, Asked, Models, check, datatype, decoded, raw, refusal
from cudasched.serve._guard import Callers
from cudasched.serve._rpc import Rpc

__all__ = ["RPC", "grpc_server"]

RPC = Rpc("cudasched.inference", "kserve", "inference.GRPCInferenceService")

_WORKERS = 1024
"""Threads at most: each request that waits for its answer has one, which is started when it is needed."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class _Operations:
    """The operations as functions of messages."""

    def __init__(self, models: Models) -> None:
        self._models, self._messages = models, RPC.messages

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._messages["ServerLiveResponse"](live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._messages["ServerReadyResponse"](ready=self._models.ready())

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._models.known(request.name, request.version)
        return self._messages["ModelReadyResponse"](ready=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._messages["ServerMetadataResponse"](**self._models.server())

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._messages["ModelMetadataResponse"](**self._models.metadata(request.name, request.version))

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._models.statistics(request.name, request.version)
        return self._messages["ModelStatisticsResponse"](
            model_stats=[{key: value for key, value in each.items() if key != "batcher"} for each in found]
        )

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._messages["RepositoryIndexResponse"](models=self._models.index())

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        for output in request.outputs:
            check(output.parameters)
        outputs = [output.name for output in request.outputs]
        asked = Asked(request.model_name, request.model_version, _inputs(request), outputs, _values(request.parameters))
        answers = self._models.submit(asked)

        def cancel() -> None:
            for answer in answers:
                answer.cancel()

        if not all(answer.done() for answer in answers):
            context.add_callback(cancel)  # the caller is gone, or one of them failed: the others need not run
        arrays = self._models.outputs(asked, [answer.result() for answer in answers])
        response = self._messages["ModelInferResponse"](
            model_name=request.model_name, model_version=VERSION, id=request.id
        )
        for name, array in arrays.items():
            response.outputs.add(name=name, datatype=datatype(array), shape=array.shape)
            response.raw_output_contents.append(raw(array))
        return response


def _inputs(request: Any) -> list[tuple[str, Any]]:
    raws = request.raw_input_contents
    if len(raws) not in (0, len(request.inputs)):
        raise InputError(f"{len(raws)} raw_input_contents for {len(request.inputs)} inputs: one for each is needed")
    inputs = []
    for place, tensor in enumerate(request.inputs):
        check(tensor.parameters)
        data: Any = raws[place] if raws else b""
        if not raws and tensor.datatype in _CONTENTS:
            data = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
        inputs.append((tensor.name, decoded(tensor.name, tensor.datatype, tensor.shape, data)))
    return inputs


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    if not parameters:
        return {}
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice is not None}


def _refusal(error: Exception) -> tuple[str, str] | None:
    found = refusal(error)
    return found and found[1:]


def grpc_server(
    models: Models,
    callers: Callers,
    host: str,
    port: int,
    pem: tuple[bytes, bytes] | None,
    connections: int,
    shared: bool = False,
) -> tuple[Any, int]:
    """A server of the models that listens, and is to be started; its port. Arguments and errors as of `Rpc.server`.

    Args:
        models: Those of this process, or of another one.
        callers: See there.
        host: See there.
        port: See there.
        pem: See there.
        connections: See there.
        shared: See there.
    """
    return RPC.server(_Operations(models), _refusal, callers, host, port, pem, connections, shared, _WORKERS)
