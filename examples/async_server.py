"""Requests as coroutines in latency regions, beside training in a thread; with FastAPI where it is installed.

    uvicorn examples.async_server:app          # with FastAPI and uvicorn
    python examples/async_server.py            # without: some requests at once, in this process

The region decorates the coroutine. It is in the region while its own code runs, and not while it awaits something, so
requests of one event loop do not end up in each other's regions. What waits for the GPU does so without blocking
the loop: it queries an event.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import cudasched  # before torch
import torch
from torch import nn

DEVICE, WIDTH = ("cuda", 2048) if torch.cuda.is_available() else ("cpu", 32)
model = nn.Linear(WIDTH, WIDTH).to(DEVICE).eval()


@cudasched.region("latency", slo_ms=20)
async def answer(seed: int) -> float:
    """One request."""
    x = torch.full((1, WIDTH), float(seed), device=DEVICE)
    with torch.no_grad():
        y = model(x).sum()
    result = y.to("cpu", non_blocking=True)
    if DEVICE == "cuda":
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            await asyncio.sleep(0.0002)
    else:
        await asyncio.sleep(0)
    return float(result)


def train(stop: threading.Event) -> None:
    """Best-effort work of the same process."""
    other = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    while not stop.is_set():
        with cudasched.region("best_effort"):
            other(torch.randn(256, WIDTH, device=DEVICE)).square().mean().backward()
            other.zero_grad()
            if DEVICE == "cuda":
                torch.cuda.current_stream().synchronize()


@contextlib.asynccontextmanager
async def training(_: Any = None) -> AsyncIterator[None]:
    """The training runs as long as the server."""
    sys.setswitchinterval(1e-4)  # a request waits no longer than that for the trainer's Python
    stop = threading.Event()
    thread = threading.Thread(target=train, args=(stop,), name="trainer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


try:
    from fastapi import FastAPI
except ImportError:
    app = None
else:
    app = FastAPI(lifespan=training)

    @app.get("/answer/{seed}")
    async def get_answer(seed: int) -> dict[str, float]:
        """What the model says."""
        return {"answer": await answer(seed)}


async def main() -> None:
    """Some requests at once."""
    async with training():
        answers = await asyncio.gather(*(answer(seed) for seed in range(16)))
        again = await asyncio.gather(*(answer(seed) for seed in range(16)))
    assert answers == again, "the same request has the same answer"
    print(f"{len(answers)} requests answered, twice the same")


if __name__ == "__main__":
    asyncio.run(main())
