"""A tuner as its user would write it: 30 Triton kernels, each in several configurations, timed by do_bench.

    python benchmarks/tune/quiet_program.py [--quiet] [--simulate]

With --quiet in `cudasched.tune.quiet()`, else cudasched is not imported. With --simulate, kernels of the simulated
driver stand for them. Commands come as JSON lines on stdin, answers go as JSON lines to stdout:

                              <- {"event": "imported"}
    -> {"command": "build"}   <- {"event": "ready"}           all is compiled
    -> {"command": "tune"}    <- {"event": "result", "times_ms": {"scale 1048576": [0.011, ...], ...}, "discarded": 0}
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

if "--quiet" in sys.argv:
    from cudasched import tune  # before torch

WARM_UP_MS, TIMED_MS = 5, 20
Calls = dict[str, list[Callable[[], object]]]
"""Of each kernel, the configurations."""


def triton_calls() -> Calls:
    """Five kernels of six shapes."""
    import torch
    from triton_kernels import matmul, row_sum, scale, softmax, transpose

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    calls: Calls = {}
    for count in (2**24, 3 * 2**23, 2**25, 3 * 2**24, 2**26, 2**27):
        x, y = tensor(count), tensor(count)
        calls[f"scale {count}"] = [
            lambda x=x, y=y, n=count, block=block, warps=warps: scale[(-(-n // block),)](
                x, y, n, BLOCK=block, num_warps=warps
            )
            for block, warps in itertools.product((256, 1024, 4096), (1, 4, 8))
        ]
    for name, kernel in (("row_sum", row_sum), ("softmax", softmax)):
        for rows, columns in ((4096, 8192), (8192, 4096), (16384, 4096), (32768, 1024), (4096, 32768), (65536, 512)):
            x, y = tensor(rows, columns), tensor(rows, columns)
            calls[f"{name} {rows}x{columns}"] = [
                lambda kernel=kernel, x=x, y=y, rows=rows, n=columns, block=block, warps=warps: kernel[(rows,)](
                    x, y, n, BLOCK=block, num_warps=warps
                )
                for block, warps in itertools.product((256, 1024, 4096), (1, 4, 8))
            ]
    for rows, columns in ((4096, 4096), (8192, 4096), (8192, 8192), (2048, 16384), (16384, 2048), (16384, 8192)):
        x, y = tensor(rows, columns), tensor(columns, rows)
        calls[f"transpose {rows}x{columns}"] = [
            lambda x=x, y=y, m=rows, n=columns, tile=tile, warps=warps: transpose[(-(-m // tile), -(-n // tile))](
                x, y, m, n, TILE=tile, num_warps=warps
            )
            for tile, warps in itertools.product((16, 32, 64), (2, 4, 8))
        ]
    for m, n, k in (
        *((2048, 2048, 2048), (4096, 4096, 1024), (4096, 4096, 4096)),
        *((2048, 8192, 2048), (8192, 2048, 2048), (8192, 8192, 1024)),
    ):
        a, b, c = (tensor(*shape, dtype=torch.float16) for shape in ((m, k), (k, n), (m, n)))
        calls[f"matmul {m}x{n}x{k}"] = [
            lambda a=a, b=b, c=c, m=m, n=n, k=k, tile=tile, warps=warps, stages=stages: matmul[
                (-(-m // tile[0]), -(-n // tile[1]))
            ](a, b, c, m, n, k, M=tile[0], N=tile[1], K=tile[2], num_warps=warps, num_stages=stages)
            for tile, warps, stages in itertools.product(((64, 64, 32), (128, 64, 32), (128, 128, 32)), (4, 8), (2, 4))
        ]
    return calls


def simulated_calls() -> Calls:
    """Kernels of known times."""
    from cudasched.demo.simulated import Driver

    driver = Driver()
    driver.make_current()
    functions = driver.functions([200, 300, 400], blocks=1)
    stream = driver.stream(priority=0)

    def run(us: int) -> None:
        driver.launch(functions[us], 1, stream)
        driver.synchronize(stream)

    return {f"kernel {number}": [lambda us=us: run(us) for us in functions] for number in range(10)}


def main() -> None:
    """Answers commands until the end of its input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    calls: Calls = {}
    bench: Callable[..., Any] = host_bench
    if not options.simulate:
        import triton

        bench = triton.testing.do_bench
    say("imported")
    for line in sys.stdin:
        command = json.loads(line)["command"]
        if command == "build":
            calls = simulated_calls() if options.simulate else triton_calls()
            for call in itertools.chain.from_iterable(calls.values()):
                call()
            say("ready")
        if command == "tune":
            with tune.quiet() if options.quiet else nullcontext() as quiet:
                if quiet is not None and options.simulate:
                    quiet.samples_ms = lambda call, warmup, rep, _: quiet._kept(samples_of(call), 5, 1, 1e-3)
                timer = bench if quiet is None else quiet.do_bench
                times = {
                    name: [timer(call, warmup=WARM_UP_MS, rep=TIMED_MS, return_mode="median") for call in each]
                    for name, each in calls.items()
                }
                say("result", times_ms=times, discarded=0 if quiet is None else quiet.discarded)


def samples_of(call: Callable[[], object]) -> Callable[[int], list[float]]:
    """Times of calls by the host's clock, ms."""
    import time

    def timed(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - began))
        return taken

    return timed


def host_bench(call: Callable[[], object], **_: object) -> float:
    """The median of five calls."""
    return sorted(samples_of(call)(5))[2]


def say(event: str, **more: object) -> None:
    """An answer."""
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    main()
