"""A server that becomes a latency client with its first request: it is built and warm before, in no class.

Driven as a worker of the demo is (cudasched/demo/client.py), but what is measured begins `--join-s` after its first
request may come, not after the demo's half second.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import cudasched  # before torch, which loads CUDA

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latency", default="bert_graph")
    parser.add_argument("--join-s", type=float, default=0.15, help="from the first request to what is measured")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes")
    args = parser.parse_args()
    sys.path.insert(0, str(DEMO))
    import client

    answer = client.take_protocol()
    if args.simulate:
        import simulated as loads
    else:
        import workloads as loads
    server = loads.latency_workload(args.latency)
    warm = client.Client({args.latency: server}, {}, args.time_scale, (lambda slo_ms: nullcontext(), nullcontext))
    warm.warm_up()
    client.LEAD_IN_S = args.join_s
    serving = client.Client(
        {args.latency: server},
        {},
        args.time_scale,
        (lambda slo_ms: cudasched.region("latency"), nullcontext),
    )
    answer({"event": "ready", "pid": os.getpid()})
    client.serve(serving, sys.stdin, answer)
    os._exit(0)  # its CUDA context goes with the process


if __name__ == "__main__":
    sys.exit(main())
