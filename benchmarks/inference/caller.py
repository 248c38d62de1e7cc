"""Sends requests of one model at random times to a server of the open inference protocol, over gRPC.

    python benchmarks/inference/caller.py PORT TOKEN REQUEST_FILE

The file has a serialized ModelInferRequest. Each line of standard input, {"rate": 100, "seconds": 3, "seed": 1,
"burst": 4, "slo_ms": 20}, is a load, answered with a line: requests offered, in time and refused or failed, and their
latencies. Times count from when a request was due.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

CONNECTIONS = 16
"""Requests take turns on them, as those of many clients."""


async def offer(call: Any, request: bytes, load: dict[str, Any]) -> dict[str, Any]:
    """Poisson arrivals of bursts, of a geometric number of requests each."""
    draw = random.Random(load["seed"])
    latency_ms: list[float] = []
    failed = 0

    async def one(due: float) -> None:
        nonlocal failed
        try:
            await call(request)
            latency_ms.append(1e3 * (time.perf_counter() - due))
        except grpc.RpcError:
            failed += 1

    began = due = time.perf_counter()
    tasks = set()
    while due < began + load["seconds"]:
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.add(asyncio.create_task(one(due)))
        while draw.random() > 1 / load["burst"]:
            tasks.add(asyncio.create_task(one(due)))
        due += draw.expovariate(load["rate"] / load["burst"])
    await asyncio.wait(tasks)
    in_time = sum(each <= load["slo_ms"] for each in latency_ms)
    return {"offered": len(tasks), "in_time": in_time, "failed": failed, "latency_ms": latency_ms}


async def main(port: str, token: str, path: str) -> None:
    """Serves loads until standard input ends."""
    request = Path(path).read_bytes()
    metadata = (("authorization", f"Bearer {token}"),)
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(CONNECTIONS):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
            await stack.enter_async_context(channel)
            calls.append(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"))
            await first(calls[-1], request, metadata)
        print(json.dumps("ready"), flush=True)
        turns = itertools.cycle(calls)
        while line := await asyncio.to_thread(sys.stdin.readline):
            done = await offer(lambda body: next(turns)(body, metadata=metadata, timeout=10), request, json.loads(line))
            print(json.dumps(done), flush=True)


async def first(call: Any, request: bytes, metadata: Any) -> None:
    """The first requests are slow, and may be refused."""
    while True:
        try:
            return await call(request, metadata=metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
