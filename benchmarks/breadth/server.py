"""One server of the breadth benchmark: imported early, built when told, then driven as a worker of the demo is.

Run by path, so that nothing of cudasched is imported: under `cudasched run` it is an unmodified program.

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
from contextlib import nullcontext
from pathlib import Path

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="a server")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall-clock seconds a second of the device takes")
    args = parser.parse_args()
    sys.path.insert(0, str(DEMO))
    import client

    answer = client.take_protocol()
    if args.simulate:
        import simulated
    else:
        from servers import server
    answer({"event": "imported", "pid": os.getpid()})
    if json.loads(sys.stdin.readline() or '{"command": "quit"}')["command"] != "build":
        return 0
    workload = simulated.latency_workload(args.name) if args.simulate else server(args.name)
    served = client.Client({args.name: workload}, {}, args.time_scale, (lambda slo_ms: nullcontext(), nullcontext))
    served.warm_up()
    answer({"event": "ready"})
    client.serve(served, sys.stdin, answer)
    os._exit(0)  # its CUDA context goes with the process


if __name__ == "__main__":
    sys.exit(main())
