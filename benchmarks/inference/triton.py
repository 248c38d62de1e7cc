"""Triton Inference Server, of the package nvidia-pytriton, and cudasched's own server with the same model.

The model returns its input: 2 floats. Triton runs it in one instance of its Python back end, on the CPU. It does
not batch, which makes its median 3 to 7% shorter here; cudasched's batcher does. Of its two models, `noop` runs where a
request is submitted (`inline`), and `handed` on the batcher's thread.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cudasched.demo.harness import HarnessError

START_S = 60.0

_CONFIG = """
name: "noop"
backend: "python"
max_batch_size: 16
input [{ name: "input" data_type: TYPE_FP32 dims: [ 2 ] }]
output [{ name: "output_0" data_type: TYPE_FP32 dims: [ 2 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_MODEL = """
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        inputs = [triton.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("output_0", each)]) for each in inputs]
"""
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
def triton(directory: Path) -> Iterator[Serving]:
    """Triton with the model. Raises HarnessError where it is not installed, or does not start."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise HarnessError("Triton Inference Server is not installed: pip install nvidia-pytriton")
    package = Path(spec.origin).parent
    stub = package / f"tritonserver/python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}"
    backends, model = directory / "backends", directory / "models/noop"
    shutil.copytree(package / "tritonserver/backends", backends)
    shutil.copy(stub / "triton_python_backend_stub", backends / "python")
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1/model.py").write_text(_MODEL)
    http, grpc = free_port(), free_port()
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    command = [
        *(str(package / "tritonserver/bin/tritonserver"), f"--model-repository={model.parent}"),
        *(f"--backend-directory={backends}", "--allow-metrics=false", "--http-address=127.0.0.1"),
        *("--grpc-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}"),
    ]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(package.parent),
    }
    log = directory / "triton.log"
    with log.open("w") as written:
        running = subprocess.Popen(command, env=environment, stdout=written, stderr=subprocess.STDOUT, text=True)
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
def cudasched(directory: Path) -> Iterator[Serving]:
    """`cudasched models serve` with the model. Raises HarnessError where it does not start."""
    (directory / "models.py").write_text(_MODELS)
    command = [sys.executable, "-m", "cudasched", "models", "serve", str(directory / "models.py")]
    command += ["--port", "0", "--grpc-port", "0", "--token-file", str(directory / "token")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        said = [running.stderr.readline() for _ in range(3)]
        ports = [re.search(r"127\.0\.0\.1:(\d+)", line) for line in said[:2]]
        if not all(ports):
            raise HarnessError(f"the server does not start: {''.join(said)}")
        http, grpc = (int(port[1]) for port in ports if port)
        yield Serving(http, grpc, (directory / "token").read_text().strip())
    finally:
        _end(running)
        running.stderr.close()
