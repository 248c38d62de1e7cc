"""Ray Serve beside Ray Train on halves of a simulated GPU, through what the example does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import PATIENCE_S, ROOT

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("ray", "pandas", "starlette")), reason="needs ray[serve,train]"
)

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


def test_serve_beside_train_on_halves_of_a_gpu(simulated: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    script = tmp_path / "rehearsal.py"
    script.write_text(REHEARSAL)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(ROOT / "examples/fractions_with_ray.py"), str(told)],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(told.read_text()) == [["best_effort", "latency"], "0"]


def test_workers_are_started_with_their_class() -> None:
    spec = importlib.util.spec_from_file_location("fractions_with_ray", ROOT / "examples/fractions_with_ray.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (started,) = example.managed("best_effort").values()
    assert started.split()[1:-1] == ["-m", "cudasched", "run", "--class", "best_effort", "--"]
