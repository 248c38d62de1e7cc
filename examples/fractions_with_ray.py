"""Ray Serve beside Ray Train on halves of one GPU: the deployment is of class latency, the training best effort.

    python examples/fractions_with_ray.py --seconds 10

Ray counts fractions of a GPU and leaves it to the programs to share it. Ray starts its workers with `py_executable` of
a runtime environment: `cudasched run` gives each its class, and neither the deployment nor the training has a line of
cudasched in it. `import cudasched` in the loop would come too late, because Ray Train imports torch before it.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve, train
from ray.train.torch import TorchTrainer


def managed(client_class: str) -> dict[str, Any]:
    """A runtime environment whose workers have that class."""
    return {"py_executable": f"{sys.executable} -m cudasched run --class {client_class} -- {sys.executable}"}


class Server:
    """An ordinary deployment."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device, self.width = ("cuda", 2048) if torch.cuda.is_available() else ("cpu", 32)
        self.model = torch.nn.Linear(self.width, self.width).to(self.device).eval()

    def __call__(self, seed: int) -> float:
        """One request."""
        with self.torch.no_grad():
            x = self.torch.full((1, self.width), float(seed), device=self.device)
            return float(self.model(x).sum())


def train_loop(config: dict[str, Any]) -> None:
    """An ordinary training loop."""
    import torch

    device, width = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 32)
    model = torch.nn.Linear(width, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, until = 0, time.monotonic() + config["seconds"]
    while time.monotonic() < until:
        loss = model(torch.randn(256, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 10 == 0:
            loss.item()
    print(f"trained {steps} steps", flush=True)


def share(
    server: type,
    loop: Callable[[dict[str, Any]], None],
    seconds: float,
    *,
    gpu_each: float = 0.5,
    more: dict[str, Any] | None = None,
    trainer: type[Any] = TorchTrainer,
) -> list[tuple[Any, float]]:
    """Serves while it trains. Returns the answers and their ms."""
    options = {"num_cpus": 1, "num_gpus": gpu_each, "runtime_env": managed("latency")}
    serve.start(proxy_location="Disabled")
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    handle = serve.run(serve.deployment(server, ray_actor_options=options, logging_config=quiet).bind())
    answers: list[tuple[Any, float]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            answer = handle.remote(len(answers)).result()
            answers.append((answer, (time.perf_counter() - began) * 1e3))
            time.sleep(0.015)

    asks = threading.Thread(target=ask, name="requests")
    asks.start()
    try:
        resources = {"CPU": 1.0, **({"GPU": gpu_each} if gpu_each else {})}
        settings = {"seconds": seconds, **(more or {})}
        scaling = train.ScalingConfig(num_workers=1, use_gpu=gpu_each > 0, resources_per_worker=resources)
        run = train.RunConfig(worker_runtime_env=managed("best_effort"))
        trainer(loop, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
    finally:
        stop.set()
        asks.join()
        serve.shutdown()
    return answers


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error", num_cpus=max(4, os.cpu_count() or 1))
    gpu_each = 0.5 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    answers = share(Server, train_loop, options.seconds, gpu_each=gpu_each)
    times = sorted(took for _, took in answers)
    print(f"served {len(times)}, median {times[len(times) // 2]:.2f} ms")
    ray.shutdown()


if __name__ == "__main__":
    main()
