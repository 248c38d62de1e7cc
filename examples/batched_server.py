"""Requests of many tasks, collected into batches by their deadlines, beside training in a thread.

    python examples/batched_server.py --requests 200 --per-second 500

On a GPU the model is one CUDA graph a size. Takes a few seconds.
"""

import argparse
import asyncio
import random
import sys
import threading

import cudasched  # before torch
import torch
from cudasched.inference import Batcher, DeadlineError
from cudasched.inference.torch import Model
from torch import nn

GPU = torch.cuda.is_available()
DEVICE, WIDTH = ("cuda", 2048) if GPU else ("cpu", 32)


def train(stop: threading.Event) -> None:
    """Best-effort work of the same process."""
    other = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    while not stop.is_set():
        with cudasched.region("best_effort"):
            other(torch.randn(256, WIDTH, device=DEVICE)).square().mean().backward()
            other.zero_grad()
            if GPU:
                torch.cuda.current_stream().synchronize()


async def serve(batcher: Batcher, requests: int, per_second: float) -> int:
    """Requests at random times; how many had an answer in time."""

    async def ask(after_s: float, important: bool) -> bool:
        await asyncio.sleep(after_s)
        try:
            y = await batcher.submit(torch.randn(WIDTH), priority=1 if important else 0)
        except DeadlineError:  # it says when the answer would have come
            return False
        return bool(y.shape == (WIDTH,))

    after_s = [random.uniform(0, requests / per_second) for _ in range(requests)]
    async with batcher:
        return sum(await asyncio.gather(*(ask(after, number % 10 == 0) for number, after in enumerate(after_s))))


def main() -> None:
    """Serves beside training, and counts requests by their outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--per-second", type=float, default=500)
    parser.add_argument("--slo-ms", type=float, default=50)
    options = parser.parse_args()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(DEVICE).eval()
    model = Model(module, example=torch.zeros(WIDTH), sizes=(1, 2, 4, 8, 16), graphs=GPU)
    batcher = Batcher(model, sizes=model.sizes, slo_ms=options.slo_ms, name="demo")
    sys.setswitchinterval(1e-4)  # a request waits no longer than that for the trainer's Python
    stop = threading.Event()
    trainer = threading.Thread(target=train, args=(stop,), name="trainer")
    trainer.start()
    try:
        answered = asyncio.run(serve(batcher, options.requests, options.per_second))
    finally:
        stop.set()
        trainer.join()
    counts = batcher.statistics()
    sizes = ", ".join(f"{number} of {size}" for size, number in sorted(counts.batches.items()))
    print(f"{answered} of {counts.submitted} requests answered, {counts.missed} of them late; batches: {sizes}")


if __name__ == "__main__":
    main()
