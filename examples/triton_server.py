"""Triton Inference Server under `cudasched run`, with a model of its Python back end.

    python examples/triton_server.py --requests 100 --client-class latency

The tritonserver is that of the package nvidia-pytriton (0.7), which needs NumPy 1. Triton runs each instance of the
model in a process of its own, and all of them inherit the class. Without a GPU the model computes on the CPU.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """
backend: "python"
max_batch_size: 16
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""
MODEL = """
import torch
import triton_python_backend_utils as triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

class TritonPythonModel:
    def execute(self, requests):
        inputs = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        doubled = [(2 * torch.from_numpy(x).to(DEVICE)).cpu().numpy() for x in inputs]
        return [triton.InferenceResponse([triton.Tensor("y", y)]) for y in doubled]
"""


def prepare(directory: Path, model: str = MODEL) -> tuple[list[str], dict[str, str], str]:
    """Writes a model repository. Returns the server's command, its environment, and its URL."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        sys.exit("Triton Inference Server is not installed: pip install nvidia-pytriton==0.7.0")
    package = Path(spec.origin).parent
    stub = f"tritonserver/python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(package / "tritonserver/backends", directory / "backends")
    shutil.copy(package / stub / "triton_python_backend_stub", directory / "backends/python")
    (directory / "models/double/1").mkdir(parents=True)
    (directory / "models/double/config.pbtxt").write_text(CONFIG)
    (directory / "models/double/1/model.py").write_text(model)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports.append(taken.getsockname()[1])
    command = [str(package / "tritonserver/bin/tritonserver"), f"--model-repository={directory}/models"]
    command += [f"--backend-directory={directory}/backends", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    command += [f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", "--allow-metrics=false"]
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = {"LD_LIBRARY_PATH": ":".join(libraries), "PATH": path, "PYTHONPATH": str(package.parent)}
    return command, {**os.environ, **found}, f"http://127.0.0.1:{ports[0]}/v2"


@contextmanager
def serving(directory: Path, options: list[str], model: str = MODEL) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Triton under `cudasched run` with these options: its process and URL. SIGTERM ends it."""
    command, environment, url = prepare(directory, model)
    run = [sys.executable, "-m", "cudasched", "run", *options, "--", *command]
    with (directory / "log").open("w") as log, subprocess.Popen(run, env=environment, stderr=log, text=True) as process:
        try:
            while not ready(url):
                if process.poll() is not None:
                    sys.exit(f"Triton does not start: {(directory / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)


def ready(url: str) -> bool:
    """Whether the server and its models are."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, x: list[float]) -> list[float]:
    """The answer to one request."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(x)], "data": x}]}
    with urllib.request.urlopen(f"{url}/models/double/infer", json.dumps(body).encode()) as answer:
        return list(json.load(answer)["outputs"][0]["data"])


def main() -> None:
    """Serves, asks, and ends the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--client-class", default="latency", choices=("latency", "normal", "best_effort"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        with serving(Path(directory), ["--class", options.client_class]) as (process, url):
            right = sum(ask(url, [float(number), 1.0]) == [2.0 * number, 2.0] for number in range(options.requests))
        print(f"{right} of {options.requests} answers are right; Triton ended with {process.returncode}")


if __name__ == "__main__":
    main()
