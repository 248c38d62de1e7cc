"""Metrics for Prometheus: what is exported, by a real Prometheus too, and the dashboard's queries."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cudasched import ConfigError, hook
from cudasched.observe import names
from cudasched.observe._metrics import Device, Metrics, Predictions, Process, RegionMetrics, Times
from cudasched.status import Client
from support import PATIENCE_S, ROOT, Run, filled

prometheus_client = pytest.importorskip("prometheus_client")

from cudasched.observe import prometheus  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

WORKS = """
import sys, threading, time, cudasched, launcher
name = sys.argv[1]
gpu = launcher.Gpu()
stream = gpu.stream()
def serve():
    with cudasched.region("latency", slo_ms=60_000, name=name):
        gpu.launch(2, stream)
        gpu.synchronize()
serve()
with cudasched.region("best_effort"):
    gpu.launch(50)
    gpu.synchronize()
print("ready", flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.02):
    serve()
    with cudasched.region("best_effort"):
        gpu.launch(20)
"""
HOSTILE = 'sea"rch\\ {x="y"} é #'


@pytest.fixture
def program(simulated: Path, quick_device: None) -> Iterator[subprocess.Popen[str]]:
    """A process of two classes that works until it is told to end."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKS, HOSTILE],
        env={**os.environ, "CUDASCHED_MEMORY_LIMIT": "1GiB"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdin and running.stdout
        assert running.stdout.readline() == "ready\n"
        yield running
        running.stdin.close()


@pytest.fixture
def server(command: str) -> Iterator[str]:
    """`cudasched metrics serve` on a free port; its URL. It ends without a word."""
    with subprocess.Popen(
        [command, "metrics", "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout and serving.stderr
        said = re.fullmatch(r"cudasched: metrics at (http://127\.0\.0\.1:\d+/metrics)\n", serving.stderr.readline())
        assert said
        yield said[1]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(PATIENCE_S) == 0
        assert (serving.stdout.read(), serving.stderr.read()) == ("", "")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
        return text


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def exported_names() -> set[str]:
    """Of all samples that a scrape can have."""
    found = {"cudasched_scrape_failed", "cudasched_scrape_duration_seconds"}
    for exported in names.exports():
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[exported.kind]
        found.update(exported.name + suffix for suffix in suffixes)
    return found


def test_a_scrape_has_every_client(program: subprocess.Popen[str], server: str) -> None:
    found = samples(fetch(server))
    assert set(found) <= exported_names()
    pid = str(program.pid)
    classes = {labels["class"]: value for labels, value in found["cudasched_launches_total"] if labels["pid"] == pid}
    assert classes["best_effort"] >= 50 and classes["latency"] >= 2
    assert {labels["class"] for labels, _ in found["cudasched_client_up"]} == {"latency", "best_effort"}
    assert {labels["region"] for labels, _ in found["cudasched_slo_met_total"]} == {HOSTILE}
    for name in ("cudasched_request_seconds", "cudasched_queue_wait_seconds"):
        buckets = [value for labels, value in found[f"{name}_bucket"] if labels["pid"] == pid]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"{name}_count"][0][1]
    assert found["cudasched_scrape_failed"] == [({}, 0.0)]


def test_what_is_exported_is_as_prometheus_wants_it(program: subprocess.Popen[str], cudasched: Run) -> None:
    shown = cudasched("metrics", "show")
    assert shown.returncode == 0, shown.stderr
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    checked = subprocess.run([promtool, "check", "metrics"], input=shown.stdout, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_clients_that_die_during_scrapes_do_no_harm(simulated: Path, server: str) -> None:
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WORKS, "dies"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout and running.stdout.readline() == "ready\n"
            fetch(server)
            running.kill()
            for _ in range(10):
                assert samples(fetch(server))["cudasched_scrape_failed"] == [({}, 0.0)]
    assert "cudasched_launches_total" not in samples(fetch(server))


def test_a_damaged_table_is_said_and_hides_no_other(program: subprocess.Popen[str], server: str) -> None:
    run = Path(os.environ["CUDASCHED_RUN_DIR"])
    (run / "GPU-broken.arbiter").write_bytes(b"CUSCHED1" + b"\xff" * 100)
    found = samples(fetch(server))
    readable = {labels["gpu"]: value for labels, value in found["cudasched_gpu_table_readable"]}
    assert readable.pop("GPU-broken") == 0 and list(readable.values()) == [1]
    assert found["cudasched_launches_total"]


def test_a_port_that_cannot_be_had(cudasched: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = cudasched("metrics", "serve", "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"cudasched: error: 127.0.0.1 port {port} is in use by another program: choose another with --port, or end "
        "that program\n"
    )
    elsewhere = cudasched("metrics", "serve", "--host", "192.0.2.1", "--port", "0")
    assert elsewhere.returncode == 2 and "no address of this machine" in elsewhere.stderr


@pytest.mark.parametrize("host", ["", "\u00e9" * 80])
def test_a_host_without_meaning_is_refused(host: str) -> None:
    """Guards against an empty text, as of a variable that is not set, which listened on all addresses."""
    with pytest.raises(ConfigError, match="no address of this machine"):
        prometheus.Server(host, 0)


def test_the_server_answers_nothing_else(server: str) -> None:
    for url, method, code in ((server + "x", "GET", 404), (server, "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, method=method, data=b"" if method == "POST" else None))
        assert refused.value.code == code
        refused.value.close()


def test_head_is_answered_with_the_head_alone(server: str) -> None:
    address = urllib.parse.urlsplit(server)
    with socket.create_connection((address.hostname, address.port), PATIENCE_S) as connection:
        connection.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0] and b"Content-Length: " in head and body == b""


def test_a_program_serves_its_own(simulated: Path, python: Run) -> None:
    done = python(
        "import launcher, prometheus_client as p, cudasched.observe.prometheus as c\n"
        "gpu = launcher.Gpu(); gpu.launch(3); gpu.synchronize()\n"
        "registry = p.CollectorRegistry(auto_describe=True); collector = c.register(registry)\n"
        "print(p.generate_latest(registry).decode())\n"
        "try: c.register(registry)\n"
        "except ValueError as error: print('twice')\n"
        "registry.unregister(collector); print(p.generate_latest(registry))\n"
    )
    assert "cudasched_client_up{" in done.stdout, done.stderr
    assert done.stdout.endswith("twice\nb''\n")


def test_without_the_library_the_extra_is_named(python: Run) -> None:
    done = python(
        "import sys; sys.modules['prometheus_client'] = None; sys.modules['prometheus_client.core'] = None\n"
        "import cudasched.observe.prometheus as c\n"
        "try: c.register()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    assert done.stdout == (
        "ConfigError metrics for Prometheus need prometheus-client: pip install 'cudasched[observe]'\n"
    )


def _process(pid: int, name: str, regions: int = 1) -> Process:
    client = filled(
        Client, pid=pid, name=name, client_class="latency", slo_ms=5.0, alive=True, hook_attached=True, launches=3
    )
    times = Times((0,) * 20 + (2,) + (0,) * 76 + (1,), 0.5)
    metrics = filled(
        Metrics,
        launches={"normal": 1, "latency": 2, "best_effort": 3},
        regions=tuple(RegionMetrics(f"{name} {i}", 5.0, 1, 1, times) for i in range(regions)),
        gate_wait=times,
        queue_wait=times,
        preemption=times,
        predictions=Predictions(10, 9, 1.0, 1.0, 0.1, (1,) * 10),
        numbers=dict.fromkeys(hook.load_core().counted(), 1),
    )
    return Process(pid, pid, name, "0", metrics, (("GPU-1", client),))


def test_hostile_names_stay_one_line_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = ["a\nb", 'x"} 1\n# TYPE y counter', "\x1b[2J", "n" * 10_000, "\ud800", ""]
    processes = [_process(i, name) for i, name in enumerate(hostile)]
    monkeypatch.setattr(prometheus, "clients", lambda directory: ([Device("GPU-1", "H200\n")], processes))
    found = samples(prometheus.text())
    assert set(found) <= exported_names()
    labels = {labels["client"] for labels, _ in found["cudasched_launches_total"]}
    assert len(labels) == len(hostile)
    assert all(len(text) <= 64 and text.isprintable() for text in labels)


def test_the_text_is_what_the_library_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [_process(1, "a"), _process(2, HOSTILE, 3), _process(3, 'x\\"\n')]
    monkeypatch.setattr(prometheus, "clients", lambda directory: ([Device("GPU-1", "H200")], processes))
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    prometheus.register(registry)
    ours, theirs = samples(prometheus.text()), samples(prometheus_client.generate_latest(registry).decode())
    for each in (ours, theirs):
        del each["cudasched_scrape_duration_seconds"]
    assert ours == theirs


def test_the_same_pid_and_name_in_two_namespaces_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = [_process(7, "serve"), _process(7, "serve")]
    monkeypatch.setattr(prometheus, "clients", lambda directory: ([], twins))
    found = samples(prometheus.text())
    assert sorted(value for _, value in found["cudasched_launches_total"]) == [2, 4, 6]
    assert found["cudasched_gate_wait_seconds_sum"][0][1] == 1.0


def test_a_client_has_about_a_hundred_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Label sets are bounded: 64 clients with all the regions that they can have."""
    monkeypatch.setattr(prometheus, "clients", lambda directory: ([], [_process(i, "x") for i in range(64)]))
    assert sum(map(len, samples(prometheus.text()).values())) < 64 * 160
    monkeypatch.setattr(prometheus, "clients", lambda directory: ([], [_process(i, "x", 12) for i in range(64)]))
    assert sum(map(len, samples(prometheus.text()).values())) < 64 * 420


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("cudasched.observe").joinpath("dashboard.json").read_text())
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def alerts() -> str:
    return resources.files("cudasched.observe").joinpath("alerts.yaml").read_text(encoding="utf-8")


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported(cudasched: Run) -> None:
    known = exported_names() | {"cudasched_slo_"}  # begins a pattern
    assert set(re.findall(r"\bcudasched_\w+", alerts())) <= known
    assert cudasched("metrics", "alerts").stdout == alerts()
    for query in queries():
        assert set(re.findall(r"\bcudasched_\w+", query)) <= known, query
    variables = json.dumps(dashboard()["templating"])
    assert set(re.findall(r"\bcudasched_\w+", variables)) <= known
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    assert json.loads(cudasched("metrics", "dashboard").stdout) == dashboard()


ON = 'instance="a", gpu="GPU-1", pid="7", client="x", class='
FIRES = {
    "CudaschedNotMeasured": {"cudasched_scrape_failed": "1+0x60"},
    "CudaschedTableUnreadable": {'cudasched_gpu_table_readable{gpu="GPU-1"}': "0+0x60"},
    "CudaschedTargetsMissed": {
        'cudasched_slo_met_total{client="x", region="r"}': "0+60x60",
        'cudasched_slo_missed_total{client="x", region="r"}': "0+1x60",
    },
    "CudaschedNotInterrupted": {f'cudasched_client_up{{{ON}"best_effort"}}': "1+0x60"},
    "CudaschedOverdue": {f'cudasched_client_overdue_seconds{{{ON}"best_effort"}}': "0+60x60"},
    "CudaschedPastTheGate": {'cudasched_normal_beside_best_effort_launches_total{client="x"}': "0+120x60"},
    "CudaschedMemoryLimitNear": {
        f'cudasched_client_memory_bytes{{{ON}"latency"}}': "96+0x60",
        f'cudasched_client_memory_limit_bytes{{{ON}"latency"}}': "100+0x60",
    },
    "CudaschedForeignPrograms": {
        'cudasched_gpu_foreign_processes{instance="a", gpu="GPU-1"}': "1+0x60",
        f'cudasched_client_up{{{ON}"latency"}}': "1+0x60",
    },
}
"""Series in which each alert fires, a sample a minute."""
OF_TWO_CLASSES = {
    f'cudasched_client_memory_bytes{{{ON}"latency"}}': "48+0x60",
    f'cudasched_client_memory_bytes{{{ON}"best_effort"}}': "48+0x60",
    f'cudasched_client_memory_limit_bytes{{{ON}"latency"}}': "100+0x60",
    f'cudasched_client_memory_limit_bytes{{{ON}"best_effort"}}': "100+0x60",
}
"""A process near its memory limit with the memory of two classes together, and far from it with each."""
QUIET = {
    "cudasched_scrape_failed": "0+0x60",
    'cudasched_gpu_table_readable{gpu="GPU-1"}': "1+0x60",
    'cudasched_slo_met_total{client="x", region="r"}': "0+6000x60",
    'cudasched_slo_missed_total{client="x", region="r"}': "0+1x60",
    f'cudasched_client_up{{{ON}"best_effort"}}': "1+0x60",
    f'cudasched_client_time_slice_seconds{{{ON}"best_effort"}}': "1+0x60",
    f'cudasched_client_overdue_seconds{{{ON}"best_effort"}}': "1+0x60",
    'cudasched_normal_beside_best_effort_launches_total{client="x"}': "0+1x60",
    f'cudasched_client_memory_bytes{{{ON}"latency"}}': "90+0x60",
    f'cudasched_client_memory_limit_bytes{{{ON}"latency"}}': "100+0x60",
    'cudasched_gpu_foreign_processes{instance="a", gpu="GPU-2"}': "1+0x60",
    f'cudasched_client_up{{{ON}"latency"}}': "1+0x60",
}
"""A machine on which all is well."""


def test_each_alert_fires_where_it_must_and_no_other(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    assert set(re.findall(r"alert: (\w+)", alerts())) == set(FIRES)
    (tmp_path / "alerts.yaml").write_text(alerts())

    def case(given: dict[str, str], firing: str) -> dict[str, Any]:
        return {
            "name": firing or "quiet",
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "1h",
                    "exp_samples": [{"labels": f'{{alertname="{firing}"}}', "value": 1}] if firing else [],
                }
            ],
        }

    tests = [case(given, name) for name, given in FIRES.items()]
    tests += [case(OF_TWO_CLASSES, "CudaschedMemoryLimitNear"), case(QUIET, "")]
    (tmp_path / "tests.yaml").write_text(json.dumps({"rule_files": ["alerts.yaml"], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_is_documented() -> None:
    script = runpy.run_path(str(ROOT / "scripts/metrics_table.py"))
    shown = script["MARKED"].search((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    assert shown and shown[0] == script["table"](), "python scripts/metrics_table.py writes it anew"
    assert all(each.help in shown[0] for each in names.exports())


@pytest.fixture
def prometheus_server(server: str, tmp_path: Path) -> Iterator[str]:
    """Debian's Prometheus, which scrapes `server` several times a second; its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    target = urllib.parse.urlsplit(server).netloc
    config = tmp_path / "prometheus.yml"
    job = {"job_name": "gpu", "static_configs": [{"targets": [target]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "200ms"}, "scrape_configs": [job]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    log = tmp_path / "prometheus.log"
    with log.open("w") as output, subprocess.Popen([program, *arguments], stdout=output, stderr=output) as running:
        limit = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=PATIENCE_S).close()
                break
            except OSError:
                assert running.poll() is None and time.monotonic() < limit, log.read_text()
                time.sleep(0.05)
        yield f"http://{address}"
        running.terminate()


def ask(url: str, query: str) -> list[Any]:
    with urllib.request.urlopen(
        f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=PATIENCE_S
    ) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
        return found


def test_a_real_prometheus_answers_every_query_of_the_dashboard(
    program: subprocess.Popen[str], nvml: Callable[..., None], prometheus_server: str
) -> None:
    nvml((program.pid, 2 << 30), used=5 << 30)
    limit = time.monotonic() + PATIENCE_S
    while len(ask(prometheus_server, "cudasched_slo_met_total > 5")) < 1:
        assert time.monotonic() < limit
        time.sleep(0.1)
    for query in queries():
        asked = query.replace("$__rate_interval", "30s").replace("$client", ".*")
        while not (found := ask(prometheus_server, asked)):
            assert time.monotonic() < limit, query
            time.sleep(0.1)
        for series in found:
            assert set(series["metric"]) <= {"client", "class", "region", "gpu", "pid"}, query
    (met,) = ask(
        prometheus_server, 'cudasched_slo_met_total{region="' + HOSTILE.replace("\\", "\\\\").replace('"', '\\"') + '"}'
    )
    assert met["metric"]["region"] == HOSTILE
    assert ask(prometheus_server, "cudasched_scrape_failed")[0]["value"][1] == "0"


def test_opentelemetry_has_the_same_names(program: subprocess.Popen[str], python: Run) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    done = python(
        "import json\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "from opentelemetry.sdk.metrics.export import InMemoryMetricReader\n"
        "import cudasched.observe.opentelemetry as o\n"
        "reader = InMemoryMetricReader(); o.register(MeterProvider([reader]))\n"
        "(resource,) = reader.get_metrics_data().resource_metrics\n"
        "found = resource.scope_metrics[0].metrics\n"
        "print(json.dumps({m.name: [[dict(p.attributes), p.value] for p in m.data.data_points] for m in found}))\n"
    )
    found = json.loads(done.stdout)
    assert set(found) <= exported_names(), done.stderr
    shown = samples(prometheus.text())
    assert set(found) == set(shown) - {"cudasched_scrape_failed", "cudasched_scrape_duration_seconds"}
    classes = {point["class"]: value for point, value in found["cudasched_launches_total"]}
    assert classes["best_effort"] >= 50
    assert {point["le"] for point, _ in found["cudasched_request_seconds_bucket"]} == set(names.BUCKET_LABELS)


def test_a_scrape_names_an_address_that_is_no_word() -> None:
    with pytest.raises(ConfigError, match="no address of this machine"):
        prometheus.Server("no such host.invalid", 0)


def test_a_head_that_comes_by_bytes_is_not_waited_for_and_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests of a byte a second, whose connections were never closed."""
    monkeypatch.setattr(prometheus, "_REQUEST_S", 0.5)
    server = prometheus.Server("127.0.0.1", 0)
    try:
        held = [socket.create_connection((server.host, server.port), timeout=PATIENCE_S) for _ in range(200)]
        with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        slow = held[-1]
        with pytest.raises(OSError):
            for byte in b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        for each in held:
            each.close()
    finally:
        server.close()
