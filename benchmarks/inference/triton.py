"""Triton Inference Server, of the package nvidia-pytriton, and cudasched's own server.

By default with a model that returns its input: 2 floats. Triton runs it in one instance of its Python back end, on the
CPU. It does not batch, which makes its median 3 to 7% shorter here; cudasched's batcher does. Of its two models, `noop`
runs where a request is submitted (`inline`), and `handed` on the batcher's thread.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cudasched.demo.harness import HarnessError

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 16
input [{{ name: "input" data_type: {kind} dims: [ {dims} ] }}]
output [{{ name: "output_0" data_type: {out} dims: [ {out_dims} ] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_MODEL = """
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        inputs = [triton.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("output_0", each)]) for each in inputs]
"""
_NOOP_CONFIG = CONFIG.format(name="noop", kind="TYPE_FP32", dims=2, out="TYPE_FP32", out_dims=2)
_NOOP = {"noop": {"config.pbtxt": _NOOP_CONFIG, "1/model.py": _MODEL}}
_MODELS = """
import numpy
from cudasched.inference import Batcher

models = {
    name: Batcher(
        lambda inputs: inputs, slo_ms=None, policy="eager", example=numpy.zeros(2, numpy.float32), inline=name == "noop"
    )
    for name in ("noop", "handed")
}
"""


@dataclass(frozen=True)
class Serving:
    """A server that runs: its ports, and the token that it needs, if any."""

    http: int
    grpc: int
    token: str = ""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=START_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(running: subprocess.Popen[str]) -> None:
    running.terminate()
    try:
        running.wait(30)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


@contextmanager
def triton(
    directory: Path, models: Mapping[str, Mapping[str, str]] = _NOOP, environment: Mapping[str, str] | None = None
) -> Iterator[Serving]:
    """Triton with models: their files by their names.

    Raises:
        HarnessError: It is not installed, or does not start.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise HarnessError("Triton Inference Server is not installed: pip install nvidia-pytriton")
    package = Path(spec.origin).parent
    stub = package / f"tritonserver/python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}"
    backends, repository = directory / "backends", directory / "models"
    shutil.copytree(package / "tritonserver/backends", backends)
    shutil.copy(stub / "triton_python_backend_stub", backends / "python")
    for name, files in models.items():
        (repository / name / "1").mkdir(parents=True)
        for path, text in files.items():
            (repository / name / path).write_text(text)
    http, grpc = free_port(), free_port()
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    command = [
        *(str(package / "tritonserver/bin/tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={backends}", "--allow-metrics=false", "--http-address=127.0.0.1"),
        *("--grpc-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}"),
    ]
    given = environment or {}
    paths = [str(package.parent), given.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    everything = {
        **os.environ,
        **given,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": ":".join(filter(None, paths)),
    }
    log = directory / "triton.log"
    with log.open("w") as written:
        running = subprocess.Popen(command, env=everything, stdout=written, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + START_S
        while not _ready(http):
            if running.poll() is not None or time.monotonic() > until:
                raise HarnessError(f"Triton does not start: {log.read_text()[-1000:]}")
            time.sleep(0.1)
        yield Serving(http, grpc)
    finally:
        _end(running)


@contextmanager
def cudasched(
    directory: Path, models: str = _MODELS, environment: Mapping[str, str] | None = None, fronts: int = 0
) -> Iterator[Serving]:
    """`cudasched models serve` with a file of models. Raises HarnessError where it does not start."""
    (directory / "models.py").write_text(models)
    command = [sys.executable, "-m", "cudasched", "models", "serve", str(directory / "models.py")]
    command += ["--port", "0", "--grpc-port", "0", "--token-file", str(directory / "token"), "--fronts", str(fronts)]
    running = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        said = list(itertools.takewhile(lambda line: "the token is in" not in line, running.stderr))
        ports = [int(port[1]) for line in said if (port := re.search(r"127\.0\.0\.1:(\d+)", line))]
        if len(ports) != 2:
            raise HarnessError(f"the server does not start: {''.join(said)}")
        yield Serving(*ports, (directory / "token").read_text().strip())
    finally:
        _end(running)
        running.stderr.close()
