"""Triton's own client against the models' server, over HTTP and gRPC."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from cudasched.inference import Batcher
from support import PATIENCE_S, ROOT, eventually

for needed in ("fastapi", "uvicorn", "grpc", "tritonclient", "geventhttpclient"):
    if importlib.util.find_spec(needed) is None:  # looked for alone: gevent is not loaded for other tests
        pytest.skip(f"needs {needed}", allow_module_level=True)

from cudasched.inference._kserve import Models  # noqa: E402
from cudasched.inference._kserve_grpc import RPC, grpc_server  # noqa: E402
from cudasched.inference._kserve_http import PUBLIC, application  # noqa: E402
from cudasched.serve._guard import Limits  # noqa: E402
from cudasched.serve._server import Server  # noqa: E402

TOKEN = "t" * 32
HEADERS = {"authorization": f"Bearer {TOKEN}"}
DTYPES = [
    bool,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float32,
    np.float64,
]
STATUS = {
    "400": "StatusCode.INVALID_ARGUMENT",
    "404": "StatusCode.NOT_FOUND",
    "500": "StatusCode.INTERNAL",
    "503": "StatusCode.UNAVAILABLE",
    "504": "StatusCode.DEADLINE_EXCEEDED",
}


def words(inputs: list[Any]) -> list[Any]:
    return [{"text": x["text"], "upper": x["text"].item().upper(), "length": len(x["text"].item())} for x in inputs]


class Faulty:
    """Answers the example, and what it is told to."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.held.set()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        assert self.held.wait(PATIENCE_S)
        if any(x == 1 for x in inputs):
            raise ZeroDivisionError("a fault")
        return [np.float32("nan") if x == 2 else x for x in inputs]


@dataclass
class Serving:
    http: int
    grpc: int
    faulty: Faulty
    batchers: dict[str, Batcher]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with ExitStack() as stack:
        faulty = Faulty()
        made = {
            "words": Batcher(words, slo_ms=None, example={"text": np.array(b"", object)}),
            "faulty": Batcher(faulty, (1,), slo_ms=None, max_queue=4, example=np.float32(0)),
            **{
                f"same_{np.dtype(kind).name}": Batcher(lambda inputs: inputs, (4,), None, example=np.zeros(2, kind))
                for kind in (*DTYPES, np.float16)
            },
        }
        batchers = {name: stack.enter_context(batcher) for name, batcher in made.items()}
        limits = Limits(body_bytes=1 << 20, per_s=1e6, burst=1_000_000)
        models = Models(batchers)
        grpc = partial(grpc_server, models)
        server = Server(application(models), TOKEN, public=PUBLIC, grpc=grpc, grpc_port=0, limits=limits)
        running = threading.Thread(target=server.run)
        running.start()
        stack.callback(running.join, PATIENCE_S)
        stack.callback(server.stop)
        assert server.grpc_port is not None
        yield Serving(server.port, server.grpc_port, faulty, batchers)


@dataclass
class Client:
    """One of Triton's clients; both have the same functions."""

    module: Any
    client: Any
    serving: Serving

    def tensor(self, name: str, array: Any, datatype: str | None = None, **options: Any) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        made = self.module.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
        return made.set_data_from_numpy(array, **options)

    def infer(self, model: str, *tensors: Any, **options: Any) -> Any:
        return self.client.infer(model, list(tensors), headers=dict(HEADERS), **options)

    def ask(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self.client, name)(*arguments, headers=dict(HEADERS))
        if not hasattr(answer, "DESCRIPTOR"):
            return answer
        from google.protobuf import json_format

        return json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    def refused(self, status: str, said: str, model: str, *tensors: Any, **options: Any) -> None:
        from tritonclient.utils import InferenceServerException

        with pytest.raises(InferenceServerException, match=said) as error:
            self.infer(model, *tensors, **options)
        assert error.value.status() in (status, STATUS[status])


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, serving: Serving) -> Iterator[Client]:
    module = importlib.import_module(f"tritonclient.{request.param}")
    client = module.InferenceServerClient(f"127.0.0.1:{getattr(serving, request.param)}")
    yield Client(module, client, serving)
    client.close()


@pytest.mark.parametrize("kind", [*DTYPES, np.float16])
def test_tensors_of_each_datatype(client: Client, kind: Any) -> None:
    array = np.array([[0, 1], [1, 0], [3, 100]]).astype(kind)
    answer = client.infer(f"same_{array.dtype.name}", client.tensor("input", array), request_id="7")
    assert np.array_equal(answer.as_numpy("output_0"), array)
    got = answer.get_response()
    said = (got["id"], got["model_version"]) if isinstance(got, dict) else (got.id, got.model_version)
    assert said == ("7", "1")


@pytest.mark.parametrize("kind", DTYPES)
def test_tensors_without_the_extension(serving: Serving, kind: Any) -> None:
    """Numbers in JSON, and in the contents of gRPC."""
    array = np.array([[0, 1], [3, 100]]).astype(kind)
    http = importlib.import_module("tritonclient.http")
    with http.InferenceServerClient(f"127.0.0.1:{serving.http}") as plain:
        client = Client(http, plain, serving)
        given = client.tensor("input", array, binary_data=False)
        wanted = [http.InferRequestedOutput("output_0", binary_data=False)]
        answer = client.infer(f"same_{array.dtype.name}", given, outputs=wanted)
        assert np.array_equal(answer.as_numpy("output_0"), array)
    grpc = importlib.import_module("grpc")
    from cudasched.inference._kserve_grpc import _CONTENTS

    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc}") as channel:
        datatype = given.datatype()
        request = RPC.messages["ModelInferRequest"](model_name=f"same_{array.dtype.name}")
        request.inputs.add(
            name="input", datatype=datatype, shape=[2, 2], contents={_CONTENTS[datatype]: array.ravel().tolist()}
        )
        call = RPC.stub(channel).ModelInfer
        answer = call(request, metadata=tuple(HEADERS.items()), timeout=PATIENCE_S)
        assert answer.raw_output_contents == [array.tobytes()]


def test_strings(client: Client) -> None:
    text = np.array(["a", "", "ü and more"], object)
    answer = client.infer("words", client.tensor("text", text))
    assert list(answer.as_numpy("upper")) == [each.encode().upper() for each in text]
    assert list(answer.as_numpy("text")) == [each.encode() for each in text]
    assert list(answer.as_numpy("length")) == [len(each.encode()) for each in text]


def test_strings_as_json(serving: Serving) -> None:
    http = importlib.import_module("tritonclient.http")
    with http.InferenceServerClient(f"127.0.0.1:{serving.http}") as plain:
        client = Client(http, plain, serving)
        text = client.tensor("text", np.array(["ü"], object), binary_data=False)
        wanted = http.InferRequestedOutput("text", binary_data=False)
        assert client.infer("words", text, outputs=[wanted]).get_response()["outputs"][0]["data"] == ["ü"]
        no_text = client.tensor("text", np.array([b"\xff"], object))
        client.refused("500", "text is no UTF-8", "words", no_text, outputs=[wanted])


def test_outputs_that_are_asked_for(client: Client) -> None:
    wanted = [client.module.InferRequestedOutput("length")]
    answer = client.infer("words", client.tensor("text", np.array([b"abc"], object)), outputs=wanted)
    assert answer.as_numpy("length").tolist() == [3] and answer.as_numpy("text") is None
    wanted = [client.module.InferRequestedOutput("more")]
    text = client.tensor("text", np.array([b"abc"], object))
    client.refused(
        "400", "no output is named 'more'; the outputs are text, upper, length", "words", text, outputs=wanted
    )


def test_numbers_that_json_has_not(client: Client) -> None:
    answer = client.infer("faulty", client.tensor("input", np.float32([2])))
    assert np.isnan(answer.as_numpy("output_0")).all()


def test_metadata(client: Client) -> None:
    assert client.ask("is_server_live") and client.ask("is_server_ready") and client.ask("is_model_ready", "words", "1")
    server = client.ask("get_server_metadata")
    assert (server["name"], server["extensions"]) == ("cudasched", ["binary_tensor_data", "statistics"])
    words = client.ask("get_model_metadata", "words", "1")
    assert words["versions"] == ["1"]
    assert [(each["name"], each["datatype"]) for each in words["inputs"]] == [("text", "BYTES")]
    assert [(each["name"], each["datatype"]) for each in words["outputs"]] == [
        ("text", "BYTES"),
        ("upper", "BYTES"),
        ("length", "INT64"),
    ]
    same = client.ask("get_model_metadata", "same_int8")
    assert [int(size) for size in same["inputs"][0]["shape"]] == [-1, 2]


def test_index(client: Client) -> None:
    models = client.ask("get_model_repository_index")
    models = models["models"] if isinstance(models, dict) else models
    assert {each["name"] for each in models} == set(client.serving.batchers)
    assert {(each["version"], each["state"]) for each in models} == {("1", "READY")}


def test_statistics(client: Client) -> None:
    def of_model() -> Any:
        (found,) = client.ask("get_inference_statistics", "same_int32")["model_stats"]
        return found

    before = of_model()
    client.infer("same_int32", client.tensor("input", np.zeros((3, 2), np.int32)))
    after = of_model()
    assert int(after["inference_count"]) - int(before["inference_count"]) == 3
    assert 1 <= int(after["execution_count"]) - int(before["execution_count"]) <= 3
    assert int(after["last_inference"]) > 0 and after["version"] == "1"
    took = after["inference_stats"]
    assert int(took["success"]["count"]) == int(after["inference_count"])
    assert int(took["success"]["ns"]) >= int(took["queue"]["ns"]) + int(took["compute_infer"]["ns"]) - 1000
    assert sum(int(each["compute_infer"]["count"]) for each in after["batch_stats"]) == int(after["execution_count"])
    assert len(client.ask("get_inference_statistics")["model_stats"]) == len(client.serving.batchers)


def test_what_is_wrong_is_said(client: Client) -> None:
    def wrong(status: str, said: str, model: str, *arrays: Any, name: str = "input", **options: Any) -> None:
        client.refused(status, said, model, *(client.tensor(name, array) for array in arrays), **options)

    right = np.zeros((1, 2), np.int8)
    wrong("404", "no model is named 'none'; there are faulty", "none", right)
    wrong("404", "the model 'same_int8' has no version '2'; it has 1", "same_int8", right, model_version="2")
    wrong("400", r"input has rows of INT16 \[2\]; INT8 \[2\] is needed", "same_int8", right.astype(np.int16))
    wrong("400", r"input has rows of INT8 \[3\]; INT8 \[2\] is needed", "same_int8", np.zeros((1, 3), np.int8))
    wrong("400", "the inputs are input; given are other", "same_int8", right, name="other")
    wrong("400", "given once", "same_int8", right, right)
    wrong("400", "257 rows; at most 256", "same_int8", np.zeros((257, 2), np.int8))
    wrong("500", "run raised ZeroDivisionError: a fault", "faulty", np.float32([1]))
    short = client.tensor("input", right)
    short.set_shape([2, 2])
    client.refused("400", r"no INT8 of shape \[2, 2\]", "same_int8", short)
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=r"at most 1048576 bytes|larger than max"):
        client.infer("same_int8", client.tensor("input", np.zeros((1 << 19, 3), np.int8)))
    with pytest.raises(InferenceServerException, match="token"):
        client.client.infer("same_int8", [client.tensor("input", right)])


def test_refusals_can_be_read(client: Client) -> None:
    from tritonclient.utils import InferenceServerException

    large = client.tensor("input", np.zeros((200_000, 2)))
    for headers, tensor, said in (
        ({}, client.tensor("input", np.zeros((1, 2))), "a bearer token is needed"),
        ({"authorization": "Bearer wrong"}, client.tensor("input", np.zeros((1, 2))), "token"),
        (dict(HEADERS), large, "1048576"),
    ):
        with pytest.raises(InferenceServerException, match=said) as error:
            client.client.infer("same_float64", [tensor], headers=headers)
        assert "while decoding" not in str(error.value)
    with pytest.raises(InferenceServerException, match=r"(?i)not found") as error:
        client.ask("get_model_config", "same_float64")
    assert "while decoding" not in str(error.value)


def test_full_queues_and_deadlines(client: Client) -> None:
    faulty, batcher = client.serving.faulty, client.serving.batchers["faulty"]
    given = client.tensor("input", np.zeros(1, np.float32))
    faulty.held.clear()
    try:
        first = batcher.submit_future(np.float32(0), deadline_ms=100_000)
        eventually(lambda: batcher.statistics().running == 1)
        client.refused("504", r"its deadline is 0\.1 ms", "faulty", given, timeout=100)
        waiting = [batcher.submit_future(np.float32(0)) for _ in range(4)]
        client.refused("503", r"max_queue", "faulty", given)
    finally:
        faulty.held.set()
    for each in (first, *waiting):
        each.result(PATIENCE_S)


def test_requests_of_callers_that_vanish_do_not_run(serving: Serving) -> None:
    faulty, batcher = serving.faulty, serving.batchers["faulty"]
    before = batcher.statistics().cancelled
    faulty.held.clear()
    try:
        first = batcher.submit_future(np.float32(0))
        eventually(lambda: batcher.statistics().running == 1)
        body = b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1], "data": [0]}]}'
        with socket.create_connection(("127.0.0.1", serving.http)) as connection:
            head = f"POST /v2/models/faulty/infer HTTP/1.1\r\nhost: 127.0.0.1:{serving.http}\r\n"
            head += f"authorization: {HEADERS['authorization']}\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            eventually(lambda: batcher.statistics().waiting == 1)
        eventually(lambda: batcher.statistics().cancelled == before + 1)
        grpc = importlib.import_module("grpc")
        request = RPC.messages["ModelInferRequest"](model_name="faulty", raw_input_contents=[bytes(4)])
        request.inputs.add(name="input", datatype="FP32", shape=[1])
        with grpc.insecure_channel(f"127.0.0.1:{serving.grpc}") as channel:
            called = RPC.stub(channel).ModelInfer.future(request, metadata=tuple(HEADERS.items()))
            eventually(lambda: batcher.statistics().waiting == 1)
            called.cancel()
            eventually(lambda: batcher.statistics().cancelled == before + 2)
    finally:
        faulty.held.set()
    first.result(PATIENCE_S)


def test_head_and_body_of_an_answer_come_at_once(serving: Serving) -> None:
    with socket.create_connection(("127.0.0.1", serving.http), PATIENCE_S) as connection:
        for _ in range(20):
            connection.sendall(f"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1:{serving.http}\r\n\r\n".encode())
            assert connection.recv(1 << 16).endswith(b"\r\n\r\n{}")


def test_the_messages_are_those_of_the_client() -> None:
    from tritonclient.grpc import service_pb2

    theirs = service_pb2.DESCRIPTOR

    def compare(ours: Any, other: Any) -> None:
        for number, field in ours.fields_by_number.items():
            found = other.fields_by_number[number]
            assert (field.name, field.type, field.is_repeated) == (found.name, found.type, found.is_repeated)
        for nested in ours.nested_types:
            compare(nested, other.nested_types_by_name[nested.name])

    for name, kind in RPC.messages.items():
        compare(kind.DESCRIPTOR, theirs.message_types_by_name[name])
    service = theirs.services_by_name["GRPCInferenceService"]
    for method in RPC._methods:
        found = service.methods_by_name[method.name]
        assert method.input_type.full_name == found.input_type.full_name
        assert method.output_type.full_name == found.output_type.full_name


def test_the_compiled_protocol_is_that_of_the_proto(tmp_path: Any) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf import descriptor_pb2

    directory, out = ROOT / "python", tmp_path / "kserve.binpb"
    proto = directory / "cudasched/inference/kserve.proto"
    assert protoc.main(["protoc", f"-I{directory}", f"--descriptor_set_out={out}", str(proto)]) == 0
    fresh, kept = (
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (out, proto.with_suffix(".binpb"))
    )
    assert fresh == kept
