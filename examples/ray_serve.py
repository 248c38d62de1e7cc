"""A Ray Serve deployment whose requests run in batches by deadline.

    python examples/ray_serve.py --requests 200 --per-second 200

Ray places and scales the replicas and takes the requests; in each replica a batcher decides when a batch starts. On a
GPU the model is one CUDA graph a size. Needs ray[serve]; takes half a minute.
"""

import argparse
import asyncio
import random
import sys
from typing import Any

import ray
import torch
from cudasched.inference import Batcher, DeadlineError
from cudasched.inference.torch import Model
from ray import serve
from torch import nn

GPU = torch.cuda.is_available()
DEVICE, WIDTH = ("cuda", 2048) if GPU else ("cpu", 32)


# Replicas import torch before cudasched, so that `cudasched run` starts them. Ray lets no more requests into a replica
# than this: fewer than the largest batch would never fill one.
RUN = {"py_executable": f"{sys.executable} -m cudasched run -- {sys.executable}"} if GPU else {}
OPTIONS = {"num_cpus": 1, "num_gpus": int(GPU), "runtime_env": RUN}


@serve.deployment(max_ongoing_requests=256, ray_actor_options=OPTIONS)
class Server:
    """One replica: a model and its batcher."""

    def __init__(self, slo_ms: float) -> None:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(DEVICE).eval()
        model = Model(module, example=torch.zeros(WIDTH), sizes=(1, 2, 4, 8, 16), graphs=GPU)
        self.batcher = Batcher(model, sizes=model.sizes, slo_ms=slo_ms, name="ray")

    async def answer(self, x: torch.Tensor) -> torch.Tensor | None:
        """The model's output; None: it would come too late."""
        try:
            return await self.batcher.submit(x)
        except DeadlineError:  # it says when the answer would have come
            return None

    async def batches(self) -> dict[int, int]:
        """How many batches had how many requests."""
        return self.batcher.statistics().batches


async def ask(server: Any, requests: int, per_second: float) -> int:
    """Requests at random times; how many had an answer."""

    async def one(after_s: float) -> bool:
        await asyncio.sleep(after_s)
        y = await server.answer.remote(torch.randn(WIDTH))
        return y is not None and y.shape == (WIDTH,)

    return sum(await asyncio.gather(*(one(random.uniform(0, requests / per_second)) for _ in range(requests))))


def main() -> None:
    """Serves on a cluster of this machine, and counts requests by their outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--per-second", type=float, default=200)
    parser.add_argument("--slo-ms", type=float, default=1000)
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    serve.start(proxy_location="Disabled")  # requests come by the handle, not over HTTP
    server = serve.run(Server.bind(options.slo_ms))
    answered = asyncio.run(ask(server, options.requests, options.per_second))
    sizes = ", ".join(f"{number} of {size}" for size, number in sorted(server.batches.remote().result().items()))
    print(f"{answered} of {options.requests} requests answered; batches: {sizes}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
