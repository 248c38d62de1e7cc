"""A worker process: `python -m cudasched.tune._worker FD`. It compiles, or measures on a GPU, and may die of either.

The worker answers each request over its connection, and ends with the process at the other end. A fault of a kernel
loses the context, so the worker answers and ends; the starting process notices a hang or a crash (`workers`).
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cudasched._life import end_with
from cudasched.errors import DriverError, Error
from cudasched.tune._bench import Bench, Job, Plan
from cudasched.tune._driver import Device
from cudasched.tune.compile import CompileError, compile_source
from cudasched.tune.measurement import Measurement

FAULT = 3
"""Exit code after a fault."""

MEASURES_NICE, COMPILES_NICE = 10, 19
"""A server goes first; and the process that measures before those that compile, which would disturb it."""


class _Serving:
    def __init__(self) -> None:
        self.device: Device | None = None
        self.bench: Bench | None = None

    def answer(self, what: str, given: Any) -> Any:
        if what == "compile":
            _be_nice(COMPILES_NICE)
            return compile_source(**given)
        if what == "gpu":
            _be_nice(MEASURES_NICE)
            self.device = Device(given)
            return self.device.gpu, self.device.uuid
        if what == "open":
            assert isinstance(given, Plan)
            self.bench = Bench(given, self.device)
            return None
        if what == "run":
            assert self.bench is not None and isinstance(given, Job)
            return self.bench.run(given)
        raise Error(f"no such request: {what}")


def _be_nice(wanted: int) -> None:
    os.nice(max(0, wanted - os.nice(0)))


def serve(connection: Connection) -> int:
    """Answers requests until the other side is gone. Returns the exit code."""
    serving = _Serving()
    while True:
        try:
            what, given = connection.recv()
        except (EOFError, OSError):
            return 0
        try:
            connection.send(("done", serving.answer(what, given)))
        except CompileError as error:
            connection.send(("compile_error", str(error)))
        except DriverError as error:
            compile_s = given.compile_s if isinstance(given, Job) else 0.0
            connection.send(
                ("done" if what == "run" else "error", _fault(error, compile_s) if what == "run" else str(error))
            )
            return FAULT
        except Error as error:
            connection.send(("error", str(error)))
        except Exception as error:
            traceback.print_exc()
            connection.send(("error", f"{type(error).__name__}: {error}"))


def _fault(error: Exception, compile_s: float) -> Measurement:
    return Measurement("fault", message=str(error), compile_s=compile_s)


def run_once(path: Path) -> int:
    """Runs one job of a file, for tools that watch a process: compute-sanitizer, ncu. Returns the exit code."""
    plan, job = pickle.loads(path.read_bytes())  # made by the process that starts this one, in a directory of its own
    made = Bench(plan).run(job)
    print(f"{made.status} {made.message}")
    return 0 if made.status == "ok" else 1


def main() -> int:
    """Entry point."""
    if sys.argv[1] == "--once":
        end_with(sys.stdin.fileno())
        return run_once(Path(sys.argv[2]))
    end_with(int(sys.argv[1]))
    return serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a context that is lost, or a hanging kernel, would hold up an orderly exit
