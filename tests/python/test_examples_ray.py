"""The examples with Ray on simulated GPUs: Serve beside Train on halves, trainings placed by forecast, measuring."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from support import PATIENCE_S, ROOT

#: A cluster is a dozen processes, each of which imports Ray, one after another.
LIMIT_S = 8 * PATIENCE_S

pytestmark = [
    pytest.mark.timeout(LIMIT_S + PATIENCE_S),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("ray", "pandas", "starlette")), reason="needs ray[serve,train]"
    ),
]

#: What runs in a process of its own: Ray leaves threads and signal handlers behind.
REHEARSAL = """
import importlib.util, json, os, sys, time
from pathlib import Path

import ray

spec = importlib.util.spec_from_file_location("fractions_with_ray", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
told = Path(sys.argv[2])


class Server:
    def __init__(self):
        from program import Gpu

        self.gpu = Gpu()

    def __call__(self, number):
        self.gpu.use()  # Serve calls it on whichever thread
        self.gpu.launch(3)
        self.gpu.synchronize()
        return os.environ["CUDA_VISIBLE_DEVICES"]


def loop(config):
    import cudasched
    from program import Gpu

    gpu = Gpu()
    seen = set()
    until = time.monotonic() + 60
    while time.monotonic() < until and len(seen) < 2:
        gpu.launch(10)
        gpu.synchronize()
        seen |= {one.client_class for device in cudasched.status() for one in device.clients if one.launches > 0}
    Path(config["told"]).write_text(json.dumps([sorted(seen), os.environ["CUDA_VISIBLE_DEVICES"]]))


ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, logging_level="error")
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # as TorchTrainer, without PyTorch

answers = example.share(Server, loop, 0, gpu_each=0.5, trainer=DataParallelTrainer, more={"told": str(told)})
assert {answer for answer, _ in answers} == {"0"}, answers
print("done")
"""


def rehearsed(*command: str) -> str:
    """The last line that a program with a Ray cluster of its own prints."""
    # Ray Train gives up on workers that do not start within a minute, and begins again, without end.
    patient = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT_S)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, **patient},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_serve_beside_train_on_halves_of_a_gpu(simulated: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    script = tmp_path / "rehearsal.py"
    script.write_text(REHEARSAL)
    rehearsed(str(script), str(ROOT / "examples/fractions_with_ray.py"), str(told))
    assert json.loads(told.read_text()) == [["best_effort", "latency"], "0"]


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_workers_are_started_with_their_class() -> None:
    (started,) = loaded("fractions_with_ray").managed("best_effort").values()
    assert started.split()[1:-1] == ["-m", "cudasched", "run", "--class", "best_effort", "--"]


def test_replicas_on_a_gpu_are_hooked_whatever_they_import_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against regions that did nothing: a replica imports torch before cudasched."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = loaded("ray_serve").OPTIONS
    assert options["num_gpus"] == 1 and "-m cudasched run --" in options["runtime_env"]["py_executable"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("measure_with_ray.py --model m.ubj -- true", "the cluster has no GPU"),
        ("place_with_ray.py --servers a --trainings b", "fewer GPUs than there are servers"),
    ],
)
def test_a_cluster_without_gpus_is_refused_and_not_waited_for(tmp_path: Path, command: str, said: str) -> None:
    script, *words = command.split()
    code = (
        "import runpy, sys, ray; ray.init = lambda **_: None; ray.cluster_resources = dict\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "examples" / script), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2 and said in done.stderr


def test_trainings_go_where_they_cost_least_in_all() -> None:
    placed = loaded("place_with_ray").placed
    assert placed({"a": {"x": 1.0, "y": 1.1}, "b": {"x": 2.0, "y": 5.0}}, ["x", "y"]) == {"x": "b", "y": "a"}
    assert placed({"a": {"x": 1.0}, "b": {"x": float("inf")}}, ["x"]) == {"x": "a"}


PLACING = """
import importlib.util, json, os, sys

import ray

spec = importlib.util.spec_from_file_location("place_with_ray", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
url, token = sys.argv[2:]


class Server:
    def __init__(self):
        from program import Gpu

        self.gpu = Gpu()
        self.gpu.launch(3)
        self.gpu.synchronize()


def train(name, seconds):
    import cudasched
    from program import Gpu

    gpu = Gpu()
    gpu.launch(10)
    gpu.synchronize()
    clients = [client for device in cudasched.status() for client in device.clients]
    return [os.environ["CUDA_VISIBLE_DEVICES"], [each.client_class for each in clients if each.pid == os.getpid()]]


cost = {name: example.costs(url, token, name, ["long", "short"]) for name in ("chat", "search")}
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="error")
print(json.dumps([cost, example.run(cost, ["long", "short"], Server, train, 0)]))
"""


def test_two_trainings_are_placed_beside_servers(
    command: str, private_home: Path, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_serve import serving

    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    launches = {
        "chat": ("latency", recordings.requests()),
        "search": ("latency", recordings.requests(each_ms=6)),
        "long": ("best_effort", recordings.steps(each_ms=8, count=300)),
        "short": ("best_effort", recordings.steps(each_ms=0.2)),
    }
    models = tmp_path / "models.toml"
    with models.open("w") as file:
        for pid, (name, (client_class, each)) in enumerate(launches.items()):
            recordings.write(tmp_path, name, each, pid=pid)
            file.write(f'[{name}]\nrecording = "{name}.parquet"\nclass = "{client_class}"\n')
    example = str(ROOT / "examples/place_with_ray.py")
    with serving(command, private_home, "--models", str(models)) as server:
        cost, found = json.loads(rehearsed("-c", PLACING, example, server.url.rstrip("/"), server.token))
    places = {name: place for name, (place, _) in found.items()}
    assert set(places.values()) == {"chat", "search"}
    other = dict(zip(places, reversed(list(places.values())), strict=True))
    chosen, swapped = (sum(cost[server][name] for name, server in each.items()) for each in (places, other))
    assert chosen <= swapped
    assert {gpu for _, (gpu, _) in found.values()} == {"0", "1"}, "each has a GPU of its own"
    assert all(own == ["best_effort"] for _, (_, own) in found.values())


MEASURING = """
import importlib.util, json, sys

import ray

spec = importlib.util.spec_from_file_location("measure_with_ray", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="error")
model, (report,) = example.run(json.loads(sys.argv[2]), [sys.argv[3]], "events", 6, "")
try:
    example.run(["false"], [], "events", 6, "")
except Exception as error:
    print(json.dumps([len(model), report["best"], str(error)]))
"""

#: Launches of many kernels' worth of shapes, each alone, on the one GPU that there is.
RECORDED = """
import os, sys
from program import Gpu

gpu = Gpu()
for us in range(int(sys.argv[1]), 1_000, 5):
    gpu.launch(us=us)
    gpu.synchronize()
assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")
"""


def test_programs_are_recorded_and_kernels_tuned_on_whole_gpus(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_tune_live import IMAGE, REFERENCE, SPACE

    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    for name, text in {"axpy.cubin": IMAGE, "axpy.toml": SPACE, "reference.py": REFERENCE, "p.py": RECORDED}.items():
        (tmp_path / name).write_text(text)
    example = str(ROOT / "examples/measure_with_ray.py")
    programs = [shlex.join([sys.executable, str(tmp_path / "p.py"), str(first)]) for first in (1, 2)]
    size, best, error = json.loads(
        rehearsed("-c", MEASURING, example, json.dumps(programs), str(tmp_path / "axpy.toml"))
    )
    assert size > 1000 and set(best) == {"THREADS", "PER"}
    assert "cudasched collect" in error and "ended with" in error
