"""Batchers over the open inference protocol: in process, and as `cudasched models serve`."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cudasched.errors import ConfigError
from cudasched.inference import Batcher, InputError
from support import PATIENCE_S, Run

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
rpc = pytest.importorskip("grpc")

from cudasched.inference._kserve import Models, decoded  # noqa: E402
from cudasched.inference._kserve_grpc import RPC  # noqa: E402
from cudasched.inference._kserve_http import application  # noqa: E402

ONE = np.zeros(2, np.float32)


def named(inputs: list[Any]) -> list[Any]:
    return [{"sum": x["a"] + x["b"], "parts": x["a"]} for x in inputs]


@pytest.fixture
def models() -> Iterator[dict[str, Batcher]]:
    with ExitStack() as stack:
        made = {
            "double": Batcher(lambda inputs: [2 * x for x in inputs], slo_ms=None, example=ONE, max_queue=400),
            "named": Batcher(named, slo_ms=None, example={"a": ONE, "b": np.zeros((), np.int64)}),
        }
        yield {name: stack.enter_context(batcher) for name, batcher in made.items()}


def ask(models: dict[str, Batcher], *requests: tuple[str, object]) -> list[tuple[int, Any]]:
    """The statuses and answers of requests that are made at once; those with a body are posted."""

    async def one(client: Any, path: str, body: object) -> tuple[int, Any]:
        answer = await (client.get(path) if body is None else client.post(path, json=body))
        return answer.status_code, answer.json()

    async def everyone() -> list[tuple[int, Any]]:
        transport = httpx.ASGITransport(app=application(Models(models)))
        async with httpx.AsyncClient(transport=transport, base_url="http://models") as client:
            return await asyncio.gather(*(one(client, path, body) for path, body in requests))

    return asyncio.run(everyone())


def tensor(data: Any, name: str = "input", datatype: str = "FP32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or list(np.shape(data)), "data": data}


def test_what_it_says_of_itself_and_its_models(models: dict[str, Batcher]) -> None:
    server, live, ready, metadata = ask(
        models, ("/v2", None), ("/v2/health/live", None), ("/v2/models/named/ready", None), ("/v2/models/named", None)
    )
    assert server[1]["name"] == "cudasched" and live == (200, {})
    assert ready == (200, {"name": "named", "ready": True})
    assert metadata[1]["inputs"] == [
        {"name": "a", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "b", "datatype": "INT64", "shape": [-1]},
    ]


def test_rows_are_requests_of_the_batcher(models: dict[str, Batcher]) -> None:
    rows = {x: tensor([[x, 1], [x, 2], [x, 3]]) for x in range(100)}
    bodies = [{"id": str(x), "inputs": [rows[x]], "parameters": {"timeout": 0}} for x in rows]
    for x, (status, answer) in enumerate(ask(models, *(("/v2/models/double/infer", body) for body in bodies))):
        assert status == 200
        data = [2 * x, 2, 2 * x, 4, 2 * x, 6]
        output = {"name": "output_0", "datatype": "FP32", "shape": [3, 2], "data": data}
        assert answer == {"model_name": "double", "model_version": "1", "id": str(x), "outputs": [output]}
    ((_, counts),) = ask(models, ("/v2/models/double/stats", None))
    assert counts["model_stats"][0]["batcher"]["completed"] == 300


def test_inputs_and_outputs_have_names(models: dict[str, Batcher]) -> None:
    inputs = [tensor([7], "b", "INT64"), tensor([1.5, 2], "a", shape=[1, 2])]
    ((status, answer),) = ask(models, ("/v2/models/named/infer", {"inputs": inputs}))
    assert status == 200
    assert {output["name"]: output["data"] for output in answer["outputs"]} == {"sum": [8.5, 9], "parts": [1.5, 2]}


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from cudasched.inference.torch import Model

    example = torch.zeros(2)
    with Batcher(Model(lambda x: (x * 2, x.sum(1)), example), slo_ms=None) as batcher:
        ((status, answer),) = ask({"m": batcher}, ("/v2/models/m/infer", {"inputs": [tensor([[1, 2], [3, 4]])]}))
        text = {"inputs": [tensor([["a", "b"]], datatype="BYTES")]}
        refused = ask({"m": batcher}, ("/v2/models/m/infer", text))
    assert (status, [output["data"] for output in answer["outputs"]]) == (200, [[2, 4, 6, 8], [3, 7]])
    assert refused == [(400, {"error": "input has rows of BYTES [2]; FP32 [2] is needed"})]


def test_an_answer_of_pytorch_with_gradients_is_told() -> None:
    torch = pytest.importorskip("torch")

    def run(inputs: list[Any]) -> list[Any]:
        return [x.clone().requires_grad_(bool(x[0] > 0)) for x in inputs]

    with Batcher(run, slo_ms=None, example=torch.zeros(2)) as batcher:
        ((status, answer),) = ask({"m": batcher}, ("/v2/models/m/infer", {"inputs": [tensor([[1, 2]])]}))
    assert status == 500 and "the output output_0 is tensor(" in answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("none/infer", {"inputs": [tensor([[1, 2]])]}, 404, "no model is named 'none'; there are double, named"),
        ("double/infer", {}, 400, "inputs: Field required"),
        ("double/infer", {"inputs": []}, 400, "at least 1"),
        ("double/infer", {"inputs": [tensor([[1, 2, 3]])]}, 400, r"input has rows of FP32 \[3\]; FP32 \[2\] is needed"),
        ("double/infer", {"inputs": [tensor([[1, 2]], datatype="FP64")]}, 400, r"rows of FP64 \[2\]; FP32"),
        ("double/infer", {"inputs": [tensor([["a"]], datatype="BF16")]}, 400, "'BF16' is not supported"),
        ("double/infer", {"inputs": [tensor([[1, "a"]])]}, 400, "are no FP32"),
        ("double/infer", {"inputs": [tensor(json.loads(99 * "[" + 99 * "]"), shape=[1])]}, 400, "of type list"),
        ("double/infer", {"inputs": [tensor([[None, 1]])]}, 400, "an element is of type NoneType"),
        ("double/infer", {"inputs": [tensor([[1, 1.7]], datatype="INT32")]}, 400, "an element is of type float"),
        ("double/infer", {"inputs": [tensor([[1, True]], datatype="INT32")]}, 400, "an element is of type bool"),
        ("double/infer", {"inputs": [tensor([[1, "3"]], datatype="UINT8")]}, 400, "an element is of type str"),
        ("double/infer", {"inputs": [tensor([[1, 300]], datatype="UINT8")]}, 400, "are no UINT8"),
        ("double/infer", {"inputs": [tensor([[True, "false"]], datatype="BOOL")]}, 400, "an element is of type str"),
        ("double/infer", {"inputs": [tensor([[True, 2]], datatype="BOOL")]}, 400, "an element is of type int"),
        ("double/infer", {"inputs": [tensor([[1, 2]], shape=[3, 2])]}, 400, "cannot reshape"),
        ("double/infer", {"inputs": [tensor([[1, 2]], shape=[-1, 2])]}, 400, "a number of rows"),
        ("double/infer", {"inputs": [tensor([], shape=[0, 2])]}, 400, "at least one"),
        ("double/infer", {"inputs": [tensor([[1, 2]] * 401)]}, 400, "401 rows; at most 400"),
        ("double/infer", {"inputs": [tensor([], shape=[1 << 40, 0])]}, 400, "1099511627776 rows; at most 400"),
        ("double/infer", {"inputs": [tensor([[1, 2]], "x")]}, 400, "the inputs are input; given are x"),
        ("double/infer", {"inputs": [tensor([[1, 2]]), tensor([[1, 2]])]}, 400, "given once"),
        ("named/infer", {"inputs": [tensor([[1, 2]], "a")]}, 400, "the inputs are a, b; given are a"),
        ("double/infer", {"inputs": [tensor([[1e39, 0]])]}, 500, "numbers that are not finite"),
        ("double/infer", {"inputs": [tensor([[1, 2]])], "parameters": {"timeout": -1}}, 400, "in the past"),
        ("double/infer", {"inputs": [tensor([[1, 2]])], "parameters": {"timeout": 10**400}}, 400, "a finite number"),
        ("double/infer", {"inputs": [tensor([[1, 2]])], "parameters": {"priority": -1}}, 400, "1 is the highest"),
        ("double/infer", {"inputs": [{**tensor([[1, 2]]), "parameters": {"binary_data_size": 8}}]}, 400, "0 bytes"),
        ("double/infer", {"inputs": [{**tensor([]), "data": None}]}, 400, "input has no data"),
        (
            "double/infer",
            {"inputs": [{**tensor([[1, 2]]), "parameters": {"shared_memory_region": "a"}}]},
            400,
            "the parameter shared_memory_region is not supported",
        ),
        ("double/infer", {"inputs": [tensor([[1, 2]])], "parameters": {"priority": "high"}}, 400, "priority = 'high'"),
    ],
)
def test_what_is_wrong_is_said(models: dict[str, Batcher], path: str, body: Any, status: int, said: str) -> None:
    ((found, answer),) = ask(models, (f"/v2/models/{path}", body))
    assert found == status and re.search(said, answer["error"]), answer


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"inference-header-content-length": "1000"}, "the body has 122 bytes"),
        ({"inference-header-content-length": "-1"}, "'-1'"),
        ({"inference-header-content-length": 5000 * "0"}, "'000"),
        ({"inference-header-content-length": "119"}, "3 bytes after the last input"),
        ({"inference-header-content-length": "20"}, "Invalid JSON"),
        ({"content-encoding": "gzip"}, "content-encoding 'gzip' is not supported"),
    ],
)
def test_bodies_that_are_wrong(models: dict[str, Batcher], headers: dict[str, str], said: str) -> None:
    body = (json.dumps({"inputs": [tensor([[1.0, 2.0]])]}).ljust(119) + "abc").encode()

    async def post() -> Any:
        transport = httpx.ASGITransport(app=application(Models(models)))
        async with httpx.AsyncClient(transport=transport, base_url="http://models") as client:
            return await client.post("/v2/models/double/infer", content=body, headers=headers)

    answer = asyncio.run(post())
    assert (answer.status_code, len(body)) == (400, 122) and said in answer.json()["error"], answer.text


@pytest.mark.parametrize("data", [b"\x01", b"\x02\0\0\0a", b"\x01\0\0\0a", b"\xff\xff\xff\xffa"])
def test_damaged_strings(data: bytes) -> None:
    with pytest.raises(InputError, match=r"the data are no BYTES of shape \[2\]"):
        decoded("text", "BYTES", [2], data)


def test_the_largest_integers() -> None:
    assert decoded("x", "UINT64", [2], [1, 2**64 - 1]).tolist() == [1, 2**64 - 1]
    assert decoded("x", "FP64", [2], [1, 2.5]).tolist() == [1, 2.5]


def test_requests_are_refused_when_the_server_ends() -> None:
    begun, held, sent = threading.Event(), threading.Event(), []

    def run(inputs: list[Any]) -> list[Any]:
        begun.set()
        assert held.wait(PATIENCE_S)
        return inputs

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"inputs": [tensor([[1, 2]])]}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    async def end(batcher: Batcher) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": []}
        task = asyncio.create_task(application(Models({"m": batcher}))(scope, receive, send))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        task.cancel()
        await task

    with Batcher(run, slo_ms=None) as batcher:
        batcher.example = batcher.answer = ONE
        asyncio.run(end(batcher))
        held.set()
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"]) == {"error": "the server ends"}


def test_metadata_that_is_asked_for_while_the_server_ends_is_refused() -> None:
    """Guards against a 500 after SIGTERM, which a caller takes for a fault of the model."""
    begun, held, sent = threading.Event(), threading.Event(), []

    class Slow(Models):
        def metadata(self, name: str, version: str) -> dict[str, Any]:
            begun.set()
            assert held.wait(PATIENCE_S)
            return {}

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def end() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v2/models/m", "headers": [], "query_string": b""}
        task = asyncio.create_task(application(Slow({}))(scope, receive, send))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        held.set()

    asyncio.run(end())
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"]) == {"error": "the server ends"}


def test_deadlines_and_priorities_are_those_of_triton() -> None:
    begun, held, seen = threading.Event(), threading.Event(), []

    def run(inputs: list[Any]) -> list[Any]:
        seen.append(float(inputs[0][0]))
        if seen[-1] == 9:
            begun.set()
            assert held.wait(PATIENCE_S)
        return inputs

    def body(value: float, **parameters: int) -> tuple[str, object]:
        return "/v2/models/m/infer", {"inputs": [tensor([[value, 0]])], "parameters": parameters}

    with Batcher(run, sizes=(1,), slo_ms=None, example=ONE) as batcher:
        del seen[:]
        first = batcher.submit_future(np.array([9, 0], np.float32))
        assert begun.wait(PATIENCE_S)
        late = ask({"m": batcher}, body(1, timeout=2_000))
        assert late[0][0] == 504 and "its deadline is 2 ms" in late[0][1]["error"]

        def release() -> None:
            while batcher.statistics().waiting < 3:
                time.sleep(0.001)
            held.set()

        threading.Thread(target=release, daemon=True).start()
        answers = ask({"m": batcher}, body(3), body(1, priority=2), body(2, priority=1))
        assert [status for status, _ in answers] == [200, 200, 200]
        first.result(PATIENCE_S)
    assert seen == [9, 2, 1, 3]


@pytest.mark.parametrize("example", [None, "text", {"a": "text"}, {1: ONE}])
def test_a_model_needs_an_example_of_arrays(example: Any) -> None:
    with (
        Batcher(lambda inputs: inputs, slo_ms=None, example=example) as batcher,
        pytest.raises(ConfigError, match="the model 'm' needs an example of arrays"),
    ):
        Models({"m": batcher})


@pytest.mark.parametrize("answer", [None, {}, [1, [2, 3]], np.datetime64("2026-01-01")])
def test_a_model_answers_with_arrays(answer: Any) -> None:
    with (
        Batcher(lambda inputs: [answer for _ in inputs], slo_ms=None, example=ONE) as batcher,
        pytest.raises(ConfigError, match=r"the model 'm' answers .*: arrays are needed"),
    ):
        Models({"m": batcher})


@pytest.mark.parametrize("later", [None, np.zeros(3), "text"], ids=["none", "shape", "strings"])
def test_an_answer_is_like_those_of_the_same_request(later: Any) -> None:
    with Batcher(lambda inputs: [later if x[0] == 1 else x for x in inputs], slo_ms=None, example=ONE) as batcher:
        body = {"inputs": [tensor([[0, 0], [1, 0]])]}
        ((status, answer),) = ask({"m": batcher}, ("/v2/models/m/infer", body))
    assert status == 500 and "of one shape are needed" in answer["error"]


MODELS = """
import numpy
from cudasched.inference import Batcher

models = {"double": Batcher(lambda inputs: [2 * x for x in inputs], slo_ms=None, example=numpy.zeros(2))}
"""


def test_the_command_serves_a_file(command: str, no_driver: Path, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    arguments = [command, "models", "serve", "models.py", "--port", "0", "--token-file", "token", "--max-mib", "2"]
    arguments += ["--grpc-port", "0"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running, ExitStack() as stack:
        stack.callback(running.kill)  # of a test that fails
        assert running.stderr
        first = running.stderr.readline()
        url = re.fullmatch(r"cudasched: (http://127\.0\.0\.1:\d+/v2/models/)\{double\}\n", first)
        assert url, first + running.stderr.read()
        grpc = re.fullmatch(r"cudasched: gRPC at (127\.0\.0\.1:\d+)\n", running.stderr.readline())
        assert grpc and running.stderr.readline() == "cudasched: the token is in token\n"

        def post(rows: int, token: str) -> tuple[int, Any]:
            body = json.dumps({"inputs": [tensor([[1, 2]] * rows, datatype="FP64")]}).encode()
            request = urllib.request.Request(url[1] + "double/infer", body, {"content-type": "application/json"})
            request.add_header("authorization", f"Bearer {token}")
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        token = Path("token").read_text().strip()
        status, answer = post(1, token)
        assert (status, answer["outputs"][0]["data"]) == (200, [2, 4])
        assert post(1, "wrong")[0] == 401
        with rpc.insecure_channel(grpc[1]) as channel:
            ready = RPC.messages["ModelReadyRequest"](name="double")
            ask = RPC.stub(channel).ModelReady
            assert ask(ready, metadata=[("authorization", f"Bearer {token}")], timeout=PATIENCE_S).ready
            with pytest.raises(rpc.RpcError, match="token"):
                ask(ready, timeout=PATIENCE_S)
        assert post(300_000, token)[0] == 413
        assert post(150_000, token) == (400, {"error": "150000 rows; at most 256 (max_queue)"})  # over 1 MiB
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE_S) == 0
        assert running.stderr.read() == ""


@pytest.mark.parametrize("models", ["beside.models", "{'double': lambda: beside.models['double']}"])
def test_the_file_has_modules_beside_it(models: str, command: str, no_driver: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "beside.py").write_text(MODELS)
    (elsewhere / "models.py").write_text(f"import beside\nmodels = {models}")
    arguments = [command, "models", "serve", "elsewhere/models.py", "--port", "0", "--token-file", "token"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        said = running.stderr.readline()
        running.send_signal(signal.SIGTERM)
        more = running.stderr.read()
        assert "/v2/models/{double}" in said, said + more


def test_models_find_cudasched_in_front_of_the_driver(simulated: Path, cudasched: Run, tmp_path: Path) -> None:
    text = "raise SystemExit(f'{hook.installed()} {sys.getswitchinterval():.4f}')"
    (tmp_path / "models.py").write_text(f"import sys\nfrom cudasched import hook\n{text}")
    done = cudasched("models", "serve", "models.py", "--port", "0")
    assert done.stderr == "True 0.0001\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "models.py is no file"),
        ("models = {}", "has no batchers"),
        ("models = {'m': 1}", "has no batchers"),
        (
            "from cudasched.inference import Batcher\nmodels = {'m': list, 'n': Batcher(list)}",
            'has no batchers: it sets models = {"name": Batcher(...)}, or functions that make one each',
        ),
        ("models = {'': list}", "has no batchers"),
        ("models = {1: list}", "models.py names a model 1: a string without / is needed"),
        ("models = {'resnet/50': list}", "models.py names a model 'resnet/50': a string without / is needed"),
        ("models = {'m': lambda: 1}", "made 1: a Batcher is needed"),
        ("\nimport no_such_module", "models.py raised ModuleNotFoundError at line 2: No module named 'no_such_module'"),
    ],
)
def test_a_file_without_models_is_told(text: str | None, said: str, cudasched: Run, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "models.py").write_text(text)
    done = cudasched("models", "serve", "models.py", "--port", "0")
    assert done.returncode != 0 and said in done.stderr, done.stderr
