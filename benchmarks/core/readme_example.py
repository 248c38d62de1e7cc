"""README's example of two classes in one process: a server in a thread of its own, and a trainer.

The server's requests are in `with cudasched.region("latency")`, the trainer's steps in
`with cudasched.region("best_effort")`; PyTorch's autograd launches the backward pass from threads that are in no
region. Neither makes a stream or binds one: regions have streams of their own. Driven as a worker of the demo is
(cudasched/demo/client.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import cudasched  # before torch, which loads CUDA

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latency", default="bert_graph")
    parser.add_argument("--best-effort", default="transformer")
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
    trainer = loads.best_effort_workload(args.best_effort)
    sys.setswitchinterval(1e-4)  # else a thread may hold the interpreter for 5 ms
    both = client.Client(
        {args.latency: server},
        {args.best_effort: trainer},
        args.time_scale,
        (lambda slo_ms: cudasched.region("latency"), lambda: cudasched.region("best_effort")),
    )
    both.warm_up()
    answer({"event": "ready", "pid": os.getpid()})
    client.serve(both, sys.stdin, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
