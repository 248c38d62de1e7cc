"""`cudasched serve`: its operations over HTTP and gRPC, who is let in, and what it survives."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from support import PATIENCE_S, ROOT, Run, stop

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
grpc = pytest.importorskip("grpc")

from cudasched import ConfigError, Error  # noqa: E402
from cudasched.advise import capacity  # noqa: E402
from cudasched.serve import _grpc, _server  # noqa: E402
from cudasched.serve._guard import Callers, Guard, Limits, RateLimiter, hosts_of  # noqa: E402
from cudasched.serve._secret import AuditLog, token_from  # noqa: E402
from cudasched.serve._server import is_loopback  # noqa: E402
from cudasched.serve._service import Failure, ForecastRequest, OperationError, Service  # noqa: E402
from test_control import eventually, program  # noqa: E402

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> 'quoted' \\ é"


@dataclass
class Serving:
    """A server that runs; `grpc` is its port for that."""

    url: str
    token: str
    grpc: int
    process: subprocess.Popen[str]
    audit: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rstrip("/").rpartition(":")
        return host, int(port)

    def ask(
        self, path: str, method: str = "GET", body: object = None, **headers: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        """A request with the token, unless `authorization` says otherwise; None: without that header."""
        given: dict[str, str | None] = {"authorization": f"Bearer {self.token}", **headers}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if body is not None:
            given.setdefault("content-type", "application/json")
        request = urllib.request.Request(self.url + path, data=data, method=method)
        for name, value in given.items():
            if value is not None:
                request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                text, status, found = answer.read(), answer.status, dict(answer.headers)
        except urllib.error.HTTPError as error:
            text, status, found = error.read(), error.code, dict(error.headers)
        is_json = found.get("content-type", "").startswith("application/json")
        return status, json.loads(text) if is_json else text.decode(), found

    def client(self, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def there() -> bool:
            status, answer, _ = self.ask("api/v1/clients")
            assert status == 200, answer
            found[:] = [client for client in answer["clients"] if client["name"] == name]
            return bool(found)

        eventually(there)
        return found[0]

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@contextmanager
def serving(command: str, home: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[Serving]:
    with subprocess.Popen(
        [*before, command, "serve", "--port", "0", "--grpc-port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr and running.stdout
        lines = [running.stderr.readline() for _ in range(3)]
        url = re.fullmatch(r"cudasched: (https?://127\.0\.0\.1:\d+/)\n", lines[0])
        port = re.fullmatch(r"cudasched: gRPC at 127\.0\.0\.1:(\d+)\n", lines[1])
        assert url and port, "".join(lines) + running.stderr.read()
        state = home / ".local" / "state" / "cudasched"
        assert lines[2] == f"cudasched: the token is in {state / 'serve.token'}\n"
        token = (state / "serve.token").read_text().strip()
        try:
            yield Serving(url[1], token, int(port[1]), running, state / "audit.jsonl")
        finally:
            running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE_S) == 0
        assert (running.stdout.read(), running.stderr.read()) == ("", "")


@pytest.fixture
def server(command: str, private_home: Path, simulated: Path, quick_device: None) -> Iterator[Serving]:
    """`cudasched serve` on free ports, over a simulated device. It ends without a word."""
    with serving(command, private_home) as running:
        yield running


def test_a_client_is_seen_and_changed_by_http(server: Serving) -> None:
    with program(HOSTILE) as running:
        client = server.client(HOSTILE)
        assert (client["pid"], client["client_class"], client["policy"]) == (running.pid, "best_effort", "strict")
        path = f"api/v1/clients/{client['id']}"
        changes = {"client_class": "normal", "priority": 2, "weight": 0.5, "policy": "slack"}
        status, changed, _ = server.ask(path, "PATCH", changes)
        assert status == 200 and {name: changed[name] for name in changes} == changes
        assert server.ask(path)[1]["weight"] == 0.5
        entries = [entry for entry in server.audited() if entry.get("client") == client["id"]]
        assert [entry["event"] for entry in entries] == ["asked", "answered"]
        assert entries[0]["changes"] == changes and entries[1]["outcome"] == f"applied to {HOSTILE}"
        assert entries[0]["caller"] == "http 127.0.0.1"
        running.kill()
        running.wait()
        status, answer, _ = server.ask(path, "PATCH", {"weight": 1.0})
        assert status == 404 and "may have ended" in answer["detail"]
        assert server.ask(path)[0] == 404


def test_a_body_without_its_type_is_told_so(server: Serving) -> None:
    plain = {"content-type": "text/plain"}
    status, answer, _ = server.ask("api/v1/clients/" + "1" * 16, "PATCH", {"weight": 2}, **plain)
    assert status == 422 and "content-type: application/json" in answer["detail"]


def test_a_client_that_is_stopped_during_the_request(server: Serving) -> None:
    with program("train.py") as running:
        client = server.client("train.py")
        stop(running.pid)
        status, answer, _ = server.ask(f"api/v1/clients/{client['id']}", "PATCH", {"weight": 2.0})
        assert status == 504 and "nothing was changed" in answer["detail"]
        # Others are served meanwhile, and afterwards it is as it was.
        running.send_signal(signal.SIGCONT)
        assert server.ask(f"api/v1/clients/{client['id']}", "PATCH", {"priority": 1})[1]["weight"] == 1.0


def test_a_client_with_regions(server: Serving) -> None:
    with program("serve.py", "region"):
        client = server.client("serve.py")
        eventually(lambda: server.client("serve.py")["regions"] != [])
        status, answer, _ = server.ask(f"api/v1/clients/{client['id']}", "PATCH", {"client_class": "latency"})
        assert status == 409 and "regions decide the class of the client" in answer["detail"]


BODIES: list[tuple[object, int, str]] = [
    ({"client_class": "urgent"}, 422, "'latency', 'normal' or 'best_effort'"),
    ({"client_class": "best-effort"}, 422, "client_class"),
    ({"priority": None}, 422, "nothing is to be changed"),
    ({"priority": 9}, 422, "less than or equal to 8"),
    ({"priority": "2"}, 422, "priority"),
    ({"weight": 1e300}, 422, "less than or equal to 100"),
    ({"memory_limit_bytes": -1}, 422, "greater than or equal to 0"),
    ({}, 422, "nothing is to be changed"),
    ({"colour": "red"}, 422, "colour"),
    ([], 422, "body"),
    (b"{", 422, "JSON"),
    (b"\xff\xfe", 422, "body"),
    ({"policy": "x" * 5_000}, 422, "policy"),
    (b"[" * 10_000, 400 if sys.version_info < (3, 14) else 422, ""),
    (b"x" * 20_000, 413, "at most 16384 bytes"),
]


def test_bodies_without_meaning(server: Serving) -> None:
    """One server answers all, as it would: what a body leaves behind would show in the answers after it."""
    for body, status, message in BODIES:
        found, answer, _ = server.ask("api/v1/clients/" + "1" * 16, "PATCH", body)
        assert (found, message in answer["detail"]) == (status, True), (body, answer)
        assert len(answer["detail"]) < 600, body
        assert server.ask("api/v1/clients")[0] == 200, body


def test_ids_without_meaning(server: Serving) -> None:
    for path in ("api/v1/clients/1", "api/v1/clients/" + "%0a" * 16, "api/v1/clients/" + "x" * 8_000):
        status, answer, _ = server.ask(path)
        assert status == 422 and len(answer["detail"]) < 600, path


def test_a_trace_on_demand(server: Serving) -> None:
    with program("train.py"):
        client = server.client("train.py")
        path = f"api/v1/clients/{client['id']}/trace"
        status, text, headers = server.ask(path, "POST", {"seconds": 0.2, "format": "json"})
        assert status == 200, text
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-disposition"] == f'attachment; filename="{client["id"]}.json"'
        assert json.loads(text)
        assert server.ask(path, "POST", {"seconds": 21})[0] == 422
        assert server.ask(path, "POST", {"format": "pdf"})[0] == 422
        assert server.ask("api/v1/clients/" + "1" * 16 + "/trace", "POST", {})[0] == 404
        assert server.audited()[-1]["event"] == "traces"


def test_usage_and_metrics(server: Serving) -> None:
    with program("train.py"):
        client = server.client("train.py")
        found: dict[str, Any] = {}

        def shares() -> bool:
            found.update(server.ask("api/v1/usage")[1])
            time.sleep(0.1)
            return any((each["clients"].get(client["id"]) or [None, None])[1] for each in found["samples"])

        eventually(shares)
        assert found["names"][client["id"]] == "train.py"
        newest = found["samples"][-1]["number"]
        numbers = [each["number"] for each in found["samples"]]
        assert numbers == list(range(numbers[0], newest + 1))
        later = server.ask(f"api/v1/usage?after={newest}")[1]["samples"]
        assert all(each["number"] > newest for each in later)
        status, text, _ = server.ask("api/v1/metrics")
        assert status == 200 and 'cudasched_launches_total{pid="' in text


def test_a_damaged_table_is_no_fault_of_the_server(tmp_path: Path) -> None:
    """Guards against a server that called itself broken beside the table of an older version, without clients."""
    run = tmp_path / "tables"
    run.mkdir(mode=0o700)
    (run / "GPU-old.arbiter").write_text("no table")
    service = Service(AuditLog(tmp_path / "audit.jsonl"), run, interval_s=3600)
    try:
        for readable in (True, False):
            if not readable:
                run.rename(tmp_path / "away")
                run.write_text("no directory")
            service._looked_at -= 1e6
            service.look()
            if readable:
                service.check()
                assert [gpu.uuid for gpu in service.clients().gpus] == ["GPU-old"] and not service.usage().samples
            else:
                with pytest.raises(OperationError, match="not been looked at"):
                    service.check()
    finally:
        service.close()


MODELS = """
serve = { recording = "serve.parquet", class = "latency", slo_ms = 5 }
train = { recording = "train.parquet", class = "best_effort" }
other = { recording = "other.parquet", class = "best_effort" }
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A file of a server and two trainings, with their recordings."""
    pytest.importorskip("pyarrow", reason="forecasts read recordings with pyarrow")
    recordings.write(tmp_path, "serve", recordings.requests(), pid=3)
    recordings.write(tmp_path, "train", recordings.steps(each_ms=8, count=300))
    recordings.write(tmp_path, "other", recordings.steps(), pid=9)
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    return path


def test_forecasts_of_loaded_programs(
    command: str, cudasched: Run, private_home: Path, simulated: Path, models: Path
) -> None:
    with serving(command, private_home, "--models", str(models)) as server:
        path = "api/v1/forecast"
        status, found, _ = server.ask(path, "POST", {"server": "serve", "programs": ["train", "other"]})
        assert status == 200, found
        files = [str(models.with_name(f"{name}.parquet")) for name in ("serve", "train", "other")]
        done = cudasched("advise", "--json", "--slo-ms", "5", "--rank", *files)
        assert found == json.loads(done.stdout)["data"] and {one["program"] for one in found} == {"train", "other"}
        faster = server.ask(path, "POST", {"server": "serve", "programs": ["other"], "rate_hz": 90})[1]
        assert faster[0]["rate_hz"] == 90
        for body, expected, message in [
            ({"server": "../serve", "programs": ["train"]}, 404, "no program '../serve' is loaded; loaded are serve"),
            ({"server": "serve", "programs": [files[1]]}, 404, "is loaded"),
            ({"server": "train", "programs": ["other"]}, 422, "train is of class best_effort, not latency"),
            ({"server": "serve", "programs": []}, 422, "programs"),
            ({"server": "serve", "programs": ["train"] * 17}, 422, "programs"),
            ({"server": "serve", "programs": ["train"], "rate_hz": -1}, 422, "rate_hz"),
            ({"server": "serve", "programs": ["train"], "rate_hz": 9_000}, 422, "does not keep up"),
            ({"server": "serve", "programs": ["train"], "seconds": 9}, 422, "seconds"),
        ]:
            status, answer, _ = server.ask(path, "POST", body)
            assert (status, message in answer["detail"]) == (expected, True), (body, answer)
        assert server.ask(path, "POST", {"server": "serve", "programs": ["train"]}, authorization=None)[0] == 401


def test_one_forecast_at_a_time_and_not_for_long(
    tmp_path: Path, simulated: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(AuditLog(tmp_path / "audit.jsonl"), programs=capacity.read(models))
    wanted = ForecastRequest(server="serve", programs=["train", "other"])

    def refused() -> Failure:
        with pytest.raises(OperationError) as error:
            service.forecast(wanted)
        return error.value.failure

    with service._forecasting:
        assert refused() is Failure.REFUSED
    monkeypatch.setattr("cudasched.serve._service.FORECAST_S", 1e-9)
    assert refused() is Failure.TIMEOUT
    assert not service._forecasting.locked()
    service.close()


def test_grpc_has_the_same_operations(server: Serving) -> None:
    messages = _grpc.messages()
    with program(HOSTILE) as running, grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        control = _grpc.stub(channel)
        token = [("authorization", f"Bearer {server.token}")]
        client = server.client(HOSTILE)

        def ask(name: str, message: Any, metadata: Any = token) -> Any:
            return getattr(control, name)(message, metadata=metadata, timeout=PATIENCE_S)

        def refused(name: str, message: Any, metadata: Any = token) -> Any:
            with pytest.raises(grpc.RpcError) as error:
                ask(name, message, metadata)
            return error.value.code(), error.value.details()

        (found,) = ask("ListClients", messages["ListClientsRequest"]()).clients
        assert (found.id, found.name, found.pid) == (client["id"], HOSTILE, running.pid)
        change = messages["ChangeClientRequest"]
        changed = ask("ChangeClient", change(id=found.id, weight=2.5, policy="open"))
        assert (changed.weight, changed.policy, changed.priority) == (2.5, "open", 0)
        assert ask("GetClient", messages["GetClientRequest"](id=found.id)).weight == 2.5

        def looked_at() -> bool:
            time.sleep(0.1)  # it looks each second, and a caller may ask twenty times in one
            return bool(ask("GetUsage", messages["GetUsageRequest"]()).names[found.id] == HOSTILE)

        eventually(looked_at)
        assert "cudasched_client_up" in ask("GetMetrics", messages["GetMetricsRequest"]()).text
        assert server.audited()[-1]["caller"].startswith("grpc ipv4:127.0.0.1")

        traced = ask("TraceClient", messages["TraceClientRequest"](id=found.id, seconds=0.1, format="json"))
        assert json.loads(traced.content)

        code = grpc.StatusCode
        assert refused("GetClient", messages["GetClientRequest"](id="1" * 16))[0] is code.NOT_FOUND
        assert refused("ChangeClient", change(id=found.id, priority=99))[0] is code.INVALID_ARGUMENT
        assert refused("ChangeClient", change(id=found.id))[0] is code.INVALID_ARGUMENT
        assert refused("ChangeClient", change(id=found.id, memory_limit_bytes=1))[0] is code.INVALID_ARGUMENT
        limited = ask("ChangeClient", change(id=found.id, memory_limit_bytes=1 << 30))
        assert limited.memory_limit_bytes == 1 << 30
        assert not ask("ChangeClient", change(id=found.id, memory_limit_bytes=0)).HasField("memory_limit_bytes")
        assert refused("ChangeClient", change(id="x" * 20_000))[0] is code.RESOURCE_EXHAUSTED
        for metadata in ([], [("authorization", "Bearer wrong")], token + token):
            assert refused("ListClients", messages["ListClientsRequest"](), metadata)[0] is code.UNAUTHENTICATED


def test_the_compiled_proto_is_that_of_the_proto(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf import descriptor_pb2

    directory = ROOT / "python"
    out = tmp_path / "control.binpb"
    command = [
        "protoc",
        f"-I{directory}",
        f"--descriptor_set_out={out}",
        str(directory / "cudasched/serve/control.proto"),
    ]
    assert protoc.main(command) == 0
    fresh, kept = (
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        for path in (out, directory / "cudasched" / "serve" / "control.binpb")
    )
    assert fresh == kept, " ".join(command)


# ---- who is let in -------------------------------------------------------------------------------------------------


def test_without_a_token_there_is_nothing_of_the_clients(server: Serving) -> None:
    with program("secret-name"):
        server.client("secret-name")
        for path in ("api/v1/clients", "api/v1/usage", "api/v1/metrics", "api/v1/clients/" + "1" * 16, "nowhere"):
            assert server.ask(path, authorization=f"bearer {server.token}")[0] in (200, 404)  # a scheme has no case
            for authorization in (None, "", "Bearer", "Bearer wrong", "Basic " + server.token, f"bearer{server.token}"):
                status, answer, headers = server.ask(path, authorization=authorization)
                if status == 429:  # too many wrong ones by now
                    break
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
                assert "secret-name" not in answer["detail"] and server.token not in answer["detail"]
        for path in ("", "page.js", "page.css", "api/openapi.json"):
            status, answer, headers = server.ask(path, authorization=None)
            assert status == 200 and "secret-name" not in str(answer)
            assert headers["x-frame-options"] == "DENY" and "default-src 'none'" in headers["content-security-policy"]


def test_wrong_tokens_are_noted_and_soon_refused_unseen(server: Serving) -> None:
    statuses = [server.ask("api/v1/clients", authorization="Bearer " + "x" * 43)[0] for _ in range(14)]
    assert statuses[:10] == [401] * 10 and 429 in statuses[10:]
    status, answer, headers = server.ask("api/v1/clients", authorization="Bearer wrong")
    assert (status, answer["detail"]) == (429, "too many wrong tokens") and int(headers["retry-after"]) >= 1
    # All users of a machine have its loopback address: a user who guesses must not shut out the one with the token.
    assert server.ask("api/v1/clients")[0] == 200
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        message = _grpc.messages()["ListClientsRequest"]()
        for token, code in [("wrong", grpc.StatusCode.UNAUTHENTICATED)] * 10 + [
            ("wrong", grpc.StatusCode.RESOURCE_EXHAUSTED),
            (server.token, None),
        ]:
            try:
                metadata = [("authorization", f"Bearer {token}")]
                _grpc.stub(channel).ListClients(message, metadata=metadata, timeout=PATIENCE_S)
                assert code is None
            except grpc.RpcError as error:
                # One more wrong one each 5 s, and this machine may be slow.
                assert error.code() in (code, grpc.StatusCode.UNAUTHENTICATED) and code is not None
    noted = [entry for entry in server.audited() if entry["event"] == "wrong token"]
    assert 20 <= len(noted) <= 28 and {entry["caller"] for entry in noted} == {"127.0.0.1", "ipv4:127.0.0.1"}
    assert "xxx" not in server.audit.read_text()


def test_a_name_that_is_not_its_own_is_refused(server: Serving) -> None:
    for host in ("evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil.example:80"):
        status, answer, _ = server.ask("api/v1/clients", host=host)
        assert status == 421 and "not called by that name" in answer["detail"], host


def test_its_own_names(server: Serving) -> None:
    port = server.address[1]
    for name in (f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}", f"127.0.0.1:{port}"):
        assert server.ask("api/v1/clients", host=name)[0] == 200, name


def test_pages_of_other_origins_are_refused(server: Serving) -> None:
    own = server.url.rstrip("/")
    for origin in ("https://evil.example", "null", own.replace("http:", "https:"), own + "0", "file://"):
        status, answer, headers = server.ask("api/v1/clients", "PATCH", {}, origin=origin)
        assert status == 403 and "another origin" in answer["detail"]
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert server.ask("", origin=origin)[0] == 403
    # A form, or an image of another page, says no origin in every browser.
    assert server.ask("api/v1/clients", sec_fetch_site="cross-site")[0] == 403
    assert server.ask("api/v1/clients", origin=own, sec_fetch_site="same-origin")[0] == 200
    # A browser asks before it sends a page's request elsewhere; the answer permits nothing.
    status, _, headers = server.ask("api/v1/clients", "OPTIONS", origin="https://evil.example")
    assert status == 403 and not [name for name in headers if name.lower().startswith("access-control")]


def test_slow_and_broken_requests_hang_nobody(server: Serving) -> None:
    def connect() -> socket.socket:
        return socket.create_connection(server.address, timeout=PATIENCE_S)

    with connect() as silent, connect() as slow, connect() as endless, connect() as garbage:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0")
        garbage.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert garbage.recv(1 << 16).startswith(b"HTTP/1.1 400")
        with_head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"x" * 100_000
        with suppress(ConnectionError):  # the server may have ended it before it has all
            endless.sendall(with_head)
        assert b"400" in endless.recv(1 << 16)
        assert server.ask("api/v1/clients")[0] == 200
        assert silent.recv(1) == b"" and _ends(slow)  # after ten seconds


def test_an_answer_that_is_read_slowly_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    size, part = 32 << 20, 1 << 20
    connections: list[Any] = []
    made = _server._Impatient.connection_made
    monkeypatch.setattr(
        _server._Impatient, "connection_made", lambda self, its: connections.append(self) or made(self, its)
    )
    monkeypatch.setattr(_server, "_HEAD_S", 3600)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    def look() -> None:
        looked = threading.Event()
        connections[0].loop.call_soon_threadsafe(lambda: (connections[0]._look(), looked.set()))
        assert looked.wait(PATIENCE_S)

    server = _server.Server(application, 32 * "t", public=frozenset({"/"}))
    running = threading.Thread(target=server.run)
    running.start()
    with ExitStack() as stack, socket.socket() as caller:
        stack.callback(running.join, PATIENCE_S)
        stack.callback(server.stop)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, part // 16)
        caller.settimeout(PATIENCE_S)
        caller.connect(("127.0.0.1", server.port))
        caller.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.port)
        with caller.makefile("rb") as answer:
            while answer.readline() != b"\r\n":
                pass
            eventually(lambda: connections[0].cycle.response_complete)
            for _ in range(size // part):
                assert len(answer.read(part)) == part
                look()
            eventually(lambda: look() or connections[0].transport.is_closing())  # nothing is read any more


def test_the_head_of_an_answer_is_had_alone(server: Serving) -> None:
    for path in ("api/v1/clients", "", "api/v1/nowhere"):
        status, _, headers = server.ask(path)
        connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
        connection.request("HEAD", f"/{path}", headers={"authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
        assert answer.headers["content-length"] == headers["content-length"]
        connection.close()


def test_whether_it_works_is_told_without_a_token(server: Serving) -> None:
    assert server.ask("api/v1/health", authorization=None)[:2] == (200, {"status": "ok"})


def test_a_wrong_token_is_told_so(server: Serving) -> None:
    for authorization, said in ((None, "a bearer token is needed"), ("Bearer wrong", "that is not the token")):
        status, answer, _ = server.ask("api/v1/clients", authorization=authorization)
        assert status == 401 and answer["detail"].startswith(said)


def resting(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(count)]


def test_connections_that_say_nothing_shut_nobody_out(
    command: str, private_home: Path, simulated: Path, quick_device: None
) -> None:
    """Guards against a limit that those without the token could use up, and against none for gRPC."""
    before = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    with serving(command, private_home, before=before) as server, program("train.py"):
        server.client("train.py")
        held = resting(server.address, 200) + resting((server.address[0], server.grpc), 300)
        for _ in range(10):
            status, answer, _ = server.ask("api/v1/clients")
            assert status == 200 and [client["name"] for client in answer["clients"]] == ["train.py"]
            held += resting(server.address, 20)
        for each in held:
            each.close()
        seen: list[bool] = []
        until = time.monotonic() + PATIENCE_S
        while True not in seen:
            assert time.monotonic() < until
            time.sleep(0.1)
            seen = [bool(sample["clients"]) for sample in server.ask("api/v1/usage")[1]["samples"]]
        assert all(seen[seen.index(True) :]), seen


def test_grpc_calls_without_the_token_hold_no_thread(server: Serving) -> None:
    """Guards against calls whose message never comes: each held one of few threads until it came."""
    never = threading.Event()

    def no_message() -> Iterator[bytes]:
        never.wait(PATIENCE_S)
        return
        yield b""

    message = _grpc.messages()["ListClientsRequest"]()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.stream_unary("/cudasched.v1.Control/ListClients")
        held = [call.future(no_message()) for _ in range(40)]
        for each in held:  # while these run, any other may be one too many
            assert each.code() is grpc.StatusCode.UNAUTHENTICATED or each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = [("authorization", f"Bearer {server.token}")]
        _grpc.stub(channel).ListClients(message, metadata=metadata, timeout=PATIENCE_S)
        never.set()


def _ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_body_in_pieces_is_bounded(server: Serving) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
    headers = {"authorization": f"Bearer {server.token}", "content-type": "application/json"}
    connection.request("PATCH", "/api/v1/clients/" + "1" * 16, iter([b"x" * 4_096] * 8), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def scope_of(address: str = "1.2.3.4", token: bytes | None = b"t" * 32) -> dict[str, Any]:
    """A request, as the guard gets it."""
    headers = [(b"host", b"h:1"), *([] if token is None else [(b"authorization", b"Bearer " + token)])]
    return {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": (address, 5)}


@pytest.mark.parametrize("parts, received", [(8, 8), (1_000, 257)])
def test_a_body_that_is_too_large_is_received_before_it_is_refused(parts: int, received: int) -> None:
    # Else the connection is closed with bytes unread, which resets it, and its sender may never see why.
    events: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing hears of this request")

    async def receive() -> dict[str, Any]:
        events.append("part")
        return {"type": "http.request", "body": b"x" * 4_096, "more_body": len(events) < parts}

    async def send(message: dict[str, Any]) -> None:
        events.append(message.get("status", "body"))

    guard = Guard(behind, Callers("t" * 32, Limits()), hosts=frozenset({"h:1"}))
    asyncio.run(guard(scope_of(), receive, send))
    assert events == ["part"] * received + [413, "body"]


async def received() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def through(
    guard: Guard, address: str = "1.2.3.4", token: bytes | None = b"t" * 32, receive: Any = received, **scope: Any
) -> dict[str, Any]:
    """The head of the answer to a request."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guard({**scope_of(address, token), **scope}, receive, send))
    return sent[0]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing hears of this request")

    async def never() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    guard = Guard(behind, Callers("t" * 32, Limits(request_s=0.01)), hosts=frozenset({"h:1"}))
    assert through(guard, receive=never)["status"] == 408


def test_the_schemes_own_port_may_be_left_out() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(scheme: str, port: int, host: bytes, origin: bytes) -> int:
        guard = Guard(answers, Callers("t" * 32, Limits()), hosts=hosts_of("::1", port, ["h"]), scheme=scheme)
        headers = [(b"host", host), (b"origin", origin), (b"authorization", b"Bearer " + b"t" * 32)]
        return int(through(guard, headers=headers)["status"])

    assert status("http", 80, b"h", b"http://h") == status("https", 443, b"[::1]", b"https://[::1]") == 200
    assert status("http", 80, b"h:80", b"http://h:80") == 200
    assert status("http", 443, b"h", b"http://h") == status("https", 8443, b"h", b"https://h") == 421
    assert status("http", 80, b"h", b"https://h") == 403


def test_an_answer_that_takes_long_comes() -> None:
    """Guards against a trace of 20 s that nobody got: making it took longer than the request was given."""

    async def sleeps(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = Guard(sleeps, Callers("t" * 32, Limits(request_s=0.01)), hosts=frozenset({"h:1"}))
    assert through(guard)["status"] == 200


def test_too_many_requests_are_told_when_to_come_again() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = Guard(answers, Callers("t" * 32, Limits(per_s=0.001, burst=3)), hosts=frozenset({"h:1"}))
    assert [through(guard)["status"] for _ in range(3)] == [200, 200, 200]
    refused = through(guard)
    assert refused["status"] == 429 and int(dict(refused["headers"])[b"retry-after"]) > 100
    assert through(guard, "1.2.3.5")["status"] == 200


def test_requests_without_the_token_are_in_nobodys_way_who_has_it() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    callers = Callers("t" * 32, Limits(per_s=0.001, burst=3))
    guard = Guard(answers, callers, hosts=frozenset({"h:1"}), public=frozenset({"/"}))
    without = [through(guard, token=None)["status"] for _ in range(5)]
    assert without == [200, 200, 200, 429, 429]
    assert [through(guard)["status"] for _ in range(4)] == [200, 200, 200, 429], "and these have their own bound"


def test_rates_are_by_address_and_forget_the_oldest() -> None:
    now = [0.0]
    limiter = RateLimiter(2.0, 3, clock=lambda: now[0])
    assert [limiter.wait_s("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.wait_s("b") == 0
    now[0] = 0.5
    assert (limiter.wait_s("a"), limiter.wait_s("a")) == (0, 0.5)
    for number in range(5_000):
        limiter.wait_s(str(number))
    assert len(limiter._left) <= 1024


def test_names_of_hosts() -> None:
    assert hosts_of("127.0.0.1", 5) == {"127.0.0.1:5", "localhost:5", "[::1]:5"}
    assert hosts_of("10.0.0.1", 5, ["GPU.example"]) == {"10.0.0.1:5", "gpu.example:5"}
    # As behind `ssh -L 8000:127.0.0.1:5`.
    assert hosts_of("10.0.0.1", 5, ["Localhost:8000", "[::1]:8000", "fe80::1"]) == {
        *("10.0.0.1:5", "localhost:8000", "[::1]:8000", "[fe80::1]:5")
    }
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


# ---- starting ------------------------------------------------------------------------------------------------------


def test_answers_are_not_delayed_by_nagle() -> None:
    """The head and the body of an answer are two writes: without TCP_NODELAY the second waits 40 ms."""

    async def option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = _server._bound("127.0.0.1", 0)
        listening.listen()
        listening.waiting = _server._Waiting(8)
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            try:
                return await asyncio.wait_for(found, PATIENCE_S)
            finally:
                writer.close()

    assert asyncio.run(option()) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_is_one_programs_and_is_free_when_that_ends(shared: bool) -> None:
    """Connections that the server closed stay for a minute, and keep nobody from the port."""
    with _server.reserved("127.0.0.1", 0) if shared else nullcontext() as reserved:
        port = reserved.getsockname()[1] if reserved else 0
        if reserved:
            with pytest.raises(ConfigError, match="in use by another program"):
                _server.reserved("127.0.0.1", port)
        with _server.Server(None, 32 * "t", port=port, shared=shared)._socket as listening:
            port = listening.getsockname()[1]
            with pytest.raises(ConfigError, match="in use by another program"):
                _server.Server(None, 32 * "t", port=port)
            with pytest.raises(ConfigError, match="in use by another program"):
                _server.reserved("127.0.0.1", port)
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
                listening.accept()[0].close()
                assert connection.recv(1) == b""
    _server.reserved("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["", "\u00e9" * 80])
def test_a_host_without_meaning_is_refused(host: str) -> None:
    """Guards against an empty text, as of a variable that is not set, which listened on all addresses."""
    with pytest.raises(ConfigError, match="no address of this machine"):
        _server.reserved(host, 0)


def test_a_port_in_use_and_one_that_may_not_be_had(cudasched: Run, private_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--port", "--grpc-port"):
            other = [] if option == "--port" else ["--port", "0"]
            done = cudasched("serve", option, port, *other)
            assert done.returncode == 2 and port in done.stderr and "choose another" in done.stderr, done.stderr
            assert len(done.stderr.splitlines()) == 1
    done = cudasched("serve", "--host", "192.0.2.1", "--insecure", "--port", "0")
    assert done.returncode == 2 and "no address of this machine" in done.stderr


def test_other_addresses_need_tls_or_a_flag(cudasched: Run) -> None:
    done = cudasched("serve", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2 and "--tls-cert and --tls-key, or --insecure" in done.stderr
    done = cudasched("serve", "--tls-cert", "cert.pem")
    assert done.returncode == 2 and "needs both" in done.stderr
    Path("no.pem").write_text("no")
    done = cudasched("serve", "--port", "0", "--tls-cert", "no.pem", "--tls-key", "no.pem")
    assert done.returncode == 2 and "no certificate and key" in done.stderr


def test_with_tls(command: str, private_home: Path, tmp_path: Path) -> None:
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    made = subprocess.run(["openssl", "req", *new, *names], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no openssl to make a certificate with")
    with serving(command, private_home, "--tls-cert", "cert.pem", "--tls-key", "key.pem") as server:
        context = ssl.create_default_context(cafile="cert.pem")
        request = urllib.request.Request(server.url + "api/v1/clients")
        request.add_header("authorization", f"Bearer {server.token}")
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE_S) as answer:
            assert json.loads(answer.read()) == {"clients": [], "gpus": []}
        credentials = grpc.ssl_channel_credentials(Path("cert.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{server.grpc}", credentials) as channel:
            metadata = [("authorization", f"Bearer {server.token}")]
            asked = _grpc.messages()["ListClientsRequest"]()
            assert not _grpc.stub(channel).ListClients(asked, metadata=metadata, timeout=PATIENCE_S).clients


def test_an_encrypted_key_is_refused_and_no_pass_phrase_asked_for(cudasched: Run) -> None:
    """Guards against a question on the terminal, of which a service has none."""
    new = ["-x509", "-newkey", "rsa:2048", "-passout", "pass:phrase", "-days", "2", "-subj", "/CN=localhost"]
    made = subprocess.run(["openssl", "req", *new, "-keyout", "key.pem", "-out", "cert.pem"], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no openssl to make a certificate with")
    files = ["--tls-cert", "cert.pem", "--tls-key", "key.pem"]
    done = cudasched("serve", "--port", "0", *files, stdin=subprocess.DEVNULL, start_new_session=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "the key is encrypted" in done.stderr


def test_a_token_is_made_once_and_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "serve.token"
    token = token_from(path)
    assert len(token) >= 40 and token_from(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read or written by others.*chmod 600"):
        token_from(path)
    path.chmod(0o600)
    for content in ("", "short", "x" * 31, "x" * 300, "x" * 20 + " " + "x" * 20, "é" * 40, "x" * 100_000):
        path.write_text(content)
        with pytest.raises(ConfigError, match="no token in it"):
            token_from(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        token_from(link)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        token_from(tmp_path / "pipe")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few pages."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=0700", "none", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    with suppress(OSError), (place / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_token_is_there_whole_or_not_at_all(small_disk: Path) -> None:
    """Guards against an empty file, for which later starts were refused."""
    fill(small_disk)
    path = small_disk / "serve.token"
    with pytest.raises(ConfigError, match=r"serve\.token cannot be .*No space left on device"):
        token_from(path)
    assert os.listdir(small_disk) == ["fill"]
    (small_disk / "fill").unlink()
    assert token_from(path) == token_from(path)


def test_the_audit_log_has_whole_lines_after_a_full_disk_and_a_kill(small_disk: Path) -> None:
    path = small_disk / "audit.jsonl"
    log = AuditLog(path)
    log.write("first")
    fill(small_disk)
    noted = 1
    with pytest.raises(Error, match=r"audit\.jsonl cannot be written: .*No space left"):
        for _ in range(10_000):
            log.write("more")
            noted += 1
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == noted
    (small_disk / "fill").unlink()
    log.write("last")
    log.close()
    with path.open("a") as half:
        half.write('{"event": "ki')
    again = AuditLog(path)
    again.write("started")
    again.close()
    lines = path.read_text().splitlines()
    assert lines[-2] == '{"event": "ki' and json.loads(lines[-1])["event"] == "started"
    assert [json.loads(line)["event"] for line in lines[:-2]] == ["first", *["more"] * (noted - 1), "last"]


def test_the_audit_log_is_private_bounded_and_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudasched.serve import _secret

    monkeypatch.setattr(_secret, "_AUDIT_BYTES", 2_000)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    threads = [
        threading.Thread(target=lambda: [log.write("asked", client="two\nlines") for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [path, path.with_name("audit.jsonl.1")]
    for each in kept:
        assert stat.S_IMODE(each.stat().st_mode) == 0o600 and each.stat().st_size < 3_000
        assert {json.loads(line)["client"] for line in each.read_text().splitlines()} == {"two\nlines"}
    log.close()
    full = AuditLog.__new__(AuditLog)
    full.path, full._lock, full._file = Path("/dev/full"), threading.Lock(), os.open("/dev/full", os.O_RDWR)
    with pytest.raises(Error, match="cannot be written"):
        full.write("asked")
    os.close(full._file)


def test_an_audit_log_that_was_moved_away_or_removed_begins_anew(tmp_path: Path) -> None:
    """Guards against changes that were noted in a file without a name, which nobody can read."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.write("first")
    moved = path.rename(tmp_path / "kept")
    log.write("second")
    path.unlink()
    log.write("third")
    log.close()
    found = [json.loads(line)["event"] for each in (moved, path) for line in each.read_text().splitlines()]
    assert found == ["first", "third"]


def test_two_servers_rotate_one_audit_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudasched.serve import _secret

    monkeypatch.setattr(_secret, "_AUDIT_BYTES", 2_000)
    path = tmp_path / "audit.jsonl"
    one, other = AuditLog(path), AuditLog(path)
    one.write("asked", client="x" * 2_000)
    for log in (one, other, one):
        log.write("asked")
    assert [len(each.read_text().splitlines()) for each in (path.with_name("audit.jsonl.1"), path)] == [1, 3]
    one.close()
    other.close()


def test_a_change_that_cannot_be_noted_is_not_made(tmp_path: Path, simulated: Path, quick_device: None) -> None:
    from cudasched import control
    from cudasched.serve._service import Changes, OperationError, Service

    log = AuditLog(tmp_path / "audit.jsonl")
    service = Service(log)
    with program("train.py"):
        eventually(lambda: bool(control.clients()))
        (client,) = control.clients()
        log.close()
        with pytest.raises(OperationError, match="audit log"):
            service.change(client.id, Changes(weight=3.0), "test")
        assert control.clients()[0].weight == 1.0
    service.close()


def test_without_the_extra_it_says_what_to_install(
    cudasched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastapi.py").write_text("raise ImportError('no')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = cudasched("serve")
    assert done.returncode == 2 and "pip install 'cudasched[serve]'" in done.stderr, done.stderr


def test_a_table_that_cannot_be_read_is_shown_as_such(server: Serving, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    before = max((sample["number"] for sample in server.ask("api/v1/usage")[1]["samples"]), default=0)
    (run / "GPU-1.arbiter").write_bytes(b"x" * 100)
    Path(os.fsdecode(bytes(run) + b"/GPU-\xff.arbiter")).write_bytes(b"x")
    gpus = server.ask("api/v1/clients")[1]["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1", r"GPU-\udcff"]
    assert "GPU-1.arbiter" in gpus[0]["error"] and "its name is no UTF-8" in gpus[1]["error"]
    # Guards against a name that ended the looking for good, and samples that said there were no clients.
    with program("train.py"):
        client = server.client("train.py")
        eventually(lambda: client["id"] in server.ask("api/v1/usage")[1]["names"] or bool(time.sleep(0.1)))
        samples = server.ask("api/v1/usage")[1]["samples"]
    assert all(sample["number"] <= before + 1 or sample["clients"] for sample in samples)  # one may be under way


def test_the_openapi_document_is_whole(server: Serving) -> None:
    document = server.ask("api/openapi.json", authorization=None)[1]
    assert document["security"] == [{"bearer": []}]
    client = "/api/v1/clients/{id}"
    paths = {f"/api/v1/{name}" for name in ("health", "clients", "usage", "metrics", "forecast")}
    assert set(document["paths"]) == {*paths, client, f"{client}/trace"}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert {"401", "403", "413", "421", "422", "429"} <= set(operation["responses"])
            assert "HTTPValidationError" not in json.dumps(operation)


def test_schemathesis_finds_nothing(tmp_path: Path, simulated: Path, quick_device: None) -> None:
    pytest.importorskip("schemathesis")
    # A program of its own: its plugin would take part in this test run.
    done = subprocess.run(
        [sys.executable, "-c", SCHEMATHESIS, str(tmp_path)], capture_output=True, text=True, timeout=5 * PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-6_000:]


SCHEMATHESIS = """
import sys
from pathlib import Path

import hypothesis
import schemathesis

from cudasched.serve._guard import Callers, Guard, Limits
from cudasched.serve._http import PUBLIC, application
from cudasched.serve._secret import AuditLog
from cudasched.serve._service import Service

TOKEN = "t" * 40
service = Service(AuditLog(Path(sys.argv[1]) / "audit.jsonl"))
app = Guard(
    application(service), Callers(TOKEN, Limits(per_s=1e9, burst=10**9, wrong_tokens=10**9)),
    hosts=frozenset({"localhost", "testserver"}), public=PUBLIC,
)
schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
calls = 0
for result in schema.get_all_operations():
    operation = result.ok()

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case):
        global calls
        calls += 1
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})

    run()
service.close()
assert calls >= 100, calls
"""
