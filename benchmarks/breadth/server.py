"""One server: imported early, built when told, then driven as a worker of the demo is.

Run by path, so that nothing of cudasched is imported: under `cudasched run` it is an unmodified program. With
`--regions` it is README's example, in which each request is in a region, and each step of `--best-effort`, a trainer in
a thread of its own; neither makes a stream or binds one. With `--join-s` it is built and warm in no class, becomes a
latency client with its first request, and is measured so long after that.

                                       <- {"event": "imported"}     nothing has touched the GPU
    -> {"command": "build"}            <- {"event": "ready"}
    -> {"command": "run", ...}         <- {"event": "result", ...}  as in cudasched/demo/client.py
    -> {"command": "quit"}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"


def main(made: Callable[[str], Any] | None = None) -> int:
    """Entry point.

    Args:
        made: Makes a server by its name; those of this benchmark by default.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="a server")
    parser.add_argument("--regions", action="store_true")
    parser.add_argument("--best-effort", help="a load of the demo")
    parser.add_argument("--join-s", type=float, help="from the first request to those that are measured")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes")
    args = parser.parse_args()
    bare: Any = (lambda slo_ms: nullcontext(), nullcontext)
    scopes = bare
    if args.regions:
        import cudasched  # before torch, which loads CUDA

        scopes = (
            lambda slo_ms: cudasched.region("latency", slo_ms=slo_ms or None),
            lambda: cudasched.region("best_effort"),
        )
    sys.path.insert(0, str(DEMO))
    import client

    answer = client.take_protocol()
    if args.simulate:
        import simulated as loads
    else:
        import workloads as loads

        if made is None:
            from servers import server as made
    answer({"event": "imported", "pid": os.getpid()})
    if json.loads(sys.stdin.readline() or '{"command": "quit"}')["command"] != "build":
        return 0
    requests = {args.name: loads.latency_workload(args.name) if args.simulate else made(args.name)}
    steps = {}
    if args.best_effort:
        steps = {args.best_effort: loads.best_effort_workload(args.best_effort)}
        sys.setswitchinterval(1e-4)  # else a thread may hold the interpreter for 5 ms
    served = client.Client(requests, steps, args.time_scale, scopes)
    if args.join_s:
        client.Client(requests, {}, args.time_scale, bare).warm_up()
        client.LEAD_IN_S = args.join_s
    else:
        served.warm_up()
    answer({"event": "ready"})
    client.serve(served, sys.stdin, answer)
    os._exit(0)  # its CUDA context goes with the process


if __name__ == "__main__":
    sys.exit(main())
