"""How many requests a second of four models two servers answer in time: cudasched's, and Triton at its best.

Both run the same models (models.py) on one GPU and answer over gRPC. Triton has a process of its Python back end a
model, the only back end of its package; cudasched has one process, or one a model (`apart`). Where there are several,
they share the GPU in time slices or, in arms that end in `mps`, as clients of MPS. Goodput is the highest offered rate
at which 99% of all offered requests meet the deadline; refused and failed ones do not.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HarnessError

from benchmarks.inference.triton import CONFIG, ROOT, Serving, cudasched, triton
from benchmarks.lab.processes import mps_client
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Session, brief, median_of

SLO_MS = 25.0
ATTAINED = 0.99
RATES = tuple(round(100 * 1.2**step) for step in range(27))
"""Requests a second of all models together, from 100 to 11,400; above the highest in time, half a step is tried."""
HALF_STEP = 1.1
LEAST_REQUESTS = 1000
"""Of a load: fewer bear no share of 99%."""
BURSTS = {"poisson": 1.0, "bursts": 4.0}
"""The mean number of requests that come at once."""
GRID = {
    f"triton_{delay_us}_{preferred}": (delay_us, preferred)
    for delay_us, preferred in itertools.product((0, 1000, 2000, 5000), (0, 8, 16))
} | {f"triton_{delay_us}_0_mps": (delay_us, 0) for delay_us in (0, 2000)}
"""Triton's longest delay in its queue, us, and its preferred size of a batch, 0 for none."""
OURS = {"cudasched": 4, "cudasched_apart": 10, "cudasched_apart_mps": 10}
"""Of our servers: processes that carry the protocol."""

_BATCHERS = """
from benchmarks.inference.models import SIZES, make
from cudasched.inference import Batcher

models = {{}}
for name in {names}:
    def made(name=name):
        model = make(name)
        return Batcher(model, SIZES, slo_ms={slo_ms}, example=model.example)
    models[name] = made{now}
"""
_BATCHING = "dynamic_batching {{ {preferred} max_queue_delay_microseconds: {delay_us} }}\n"
_PYTHON = """
import torch
import triton_python_backend_utils as triton
from benchmarks.inference.models import MODELS, SIZES, make

class TritonPythonModel:
    def initialize(self, arguments):
        self.name = arguments["model_name"]
        self.model = make(self.name)
        for size in reversed(SIZES):
            self.model([MODELS[self.name][1]] * size)

    def execute(self, requests):
        inputs = [torch.from_dlpack(triton.get_input_tensor_by_name(one, "input").to_dlpack()) for one in requests]
        outputs = iter(self.model([row for rows in inputs for row in rows]))
        answers = [torch.stack([next(outputs) for _ in rows]) for rows in inputs]
        return [triton.InferenceResponse([triton.Tensor.from_dlpack("output_0", one)]) for one in answers]
"""


def batchers(names: Sequence[str], apart: bool = False) -> str:
    """The file of `cudasched models serve` for some of the models; or for a process each."""
    return _BATCHERS.format(names=list(names), slo_ms=SLO_MS, now="" if apart else "()")


def _triton_files(delay_us: int, preferred: int) -> dict[str, dict[str, str]]:
    """The files of each model."""
    import torch

    from benchmarks.inference.models import KINDS, MODELS

    half = torch.cuda.is_available()
    return {
        name: {
            "config.pbtxt": (CONFIG + _BATCHING).format(
                name=name,
                kind=f"TYPE_{KINDS[example.dtype]}",
                out="TYPE_FP16" if half and name != "recommender" else "TYPE_FP32",
                dims=", ".join(map(str, example.shape)),
                out_dims=-1,
                preferred=f"preferred_batch_size: [ {preferred} ]" if preferred else "",
                delay_us=delay_us,
            ),
            "1/model.py": _PYTHON,
        }
        for name, (_, example) in MODELS.items()
    }


class Callers:
    """A process a model that sends requests to the server that has it."""

    def __init__(self, servers: Mapping[str, Serving], directory: Path, stack: ExitStack) -> None:
        from tritonclient.grpc import InferInput, service_pb2

        from benchmarks.inference.models import KINDS, MODELS

        self._shares = {name: share for name, (share, _) in MODELS.items()}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for name, (_, example) in MODELS.items():
            tensor = InferInput("input", [1, *example.shape], KINDS[example.dtype]).set_data_from_numpy(
                example[None].numpy()
            )
            request = service_pb2.ModelInferRequest(model_name=name, inputs=[tensor._get_tensor()])
            request.raw_input_contents.append(tensor._get_content())
            path = directory / f"{name}.request"
            path.write_bytes(request.SerializeToString())
            server, command = servers[name], [sys.executable, str(Path(__file__).with_name("caller.py"))]
            self._processes[name] = stack.enter_context(
                subprocess.Popen(
                    [*command, str(server.grpc), server.token, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(self._processes[name].kill)
        for name in self._processes:
            self._answer(name)
        self.offer(RATES[0], 1.0, 1.0)  # warms up

    def _answer(self, name: str) -> Any:
        stdout = self._processes[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise HarnessError(f"{name}: no requests can be sent")
        return json.loads(line)

    def offer(self, rate: float, seconds: float, burst: float) -> dict[str, dict[str, Any]]:
        """A load of all models at once."""
        for seed, (name, process) in enumerate(self._processes.items()):
            load = {"rate": rate * self._shares[name], "seconds": seconds, "seed": seed}
            assert process.stdin is not None
            process.stdin.write(json.dumps({**load, "burst": burst, "slo_ms": SLO_MS}) + "\n")
            process.stdin.flush()
        return {name: self._answer(name) for name in self._processes}


def served(loads: Mapping[str, dict[str, Any]]) -> tuple[float, list[float]]:
    """The share of requests that were in time, and the latencies of those that were answered."""
    offered = sum(load["offered"] for load in loads.values())
    in_time = sum(load["in_time"] for load in loads.values())
    return in_time / offered, [each for load in loads.values() for each in load["latency_ms"]]


@contextmanager
def of_mps(session: Session) -> Iterator[dict[str, str]]:
    """The environment of a daemon's clients; in a rehearsal there is none."""
    if session.rehearsal:
        yield {}
        return
    membership = mps_client(session.scratch / "mps")
    try:
        yield membership.environment
    finally:
        membership.leave()


def _server(
    arm: str, directory: Path, environment: Mapping[str, str], rehearsal: bool
) -> AbstractContextManager[Serving]:
    from benchmarks.inference.models import MODELS

    if arm in OURS:
        models = batchers(list(MODELS), apart="apart" in arm)
        return cudasched(directory, models, environment, 1 if rehearsal else OURS[arm])
    return triton(directory, _triton_files(*GRID[arm]), {**environment, "CUDASCHED_OFF": "1"})


def highest(rates: Sequence[int], in_time: Callable[[int], bool]) -> int:
    """The highest rate at which requests are in time; 0 where they are at none. One that is missed ends no search."""
    return next((rate for rate in reversed(rates) if in_time(rate)), 0)


def goodput(arm: str, kind: str, callers: Callers, session: Session, rates: Sequence[int] = RATES) -> int:
    """The highest of these rates of such arrivals at which requests are in time; a rehearsal looks at the least."""

    def in_time(rate: int) -> bool:
        seconds = session.options.seconds
        if not session.rehearsal:
            seconds = max(seconds, LEAST_REQUESTS / rate)
        session.need(2 * seconds)
        loads = callers.offer(rate, seconds, BURSTS[kind])
        share, latency_ms = served(loads)
        each = ", ".join(f"{name} {served({name: load})[0]:.0%}" for name, load in loads.items())
        session.say(f"{arm} {kind}: {rate}/s, {share:.1%} in time ({each}), {brief(latency_ms)}")
        return share >= ATTAINED

    found = highest(rates[:4] if session.rehearsal else rates, in_time)
    between = round(HALF_STEP * found)
    return between if found and in_time(between) else found


def measure(arm: str, session: Session) -> None:
    """Looks for the goodput of one server."""
    from benchmarks.inference.models import MODELS

    if arm in session.store.done:
        return
    directory = session.builds / arm
    directory.mkdir()
    with ExitStack() as stack:
        environment = {"PYTHONPATH": str(ROOT)}
        if arm.endswith("_mps"):
            environment |= stack.enter_context(of_mps(session))
        server = stack.enter_context(_server(arm, directory, environment, session.rehearsal))
        callers = Callers(dict.fromkeys(MODELS, server), directory, stack)
        kept = {kind: [goodput(arm, kind, callers, session)] for kind in BURSTS}
    session.store.keep(arm, kept)


def find(done: Done) -> Found:
    """Goodput over Triton's best, of each kind of arrivals: ours at its best of those that were measured, likewise.

    The median of several runs, where there are any.
    """
    ours, settings = ({arm: kept for arm, kept in done.items() if arm in arms} for arms in (OURS, GRID))
    if not ours or not settings:
        return {}
    found: Found = {}
    for kind in BURSTS:
        rates = {arm: median_of(kept[kind]) for arm, kept in ours.items()}
        theirs = [statistics.median(kept[kind]) for kept in settings.values()]
        best = max(theirs)
        found |= {f"{arm}_{kind}_per_s": rate for arm, rate in rates.items()}
        found[f"triton_{kind}_per_s"] = (best, min(theirs), best, len(theirs))
        if best:
            at_best = max(rates, key=lambda arm: rates[arm][0])
            found[f"goodput_of_triton_{kind}"] = median_of([each / best for each in ours[at_best][kind]])
    return found


def merge(runs: Sequence[Done]) -> Done:
    """Every goodput of each server."""
    together: dict[str, dict[str, list[int]]] = {}
    for arm, rates in itertools.chain.from_iterable(run.items() for run in runs):
        for kind, found in rates.items():
            together.setdefault(arm, {}).setdefault(kind, []).extend(found)
    return together


GOODPUT = Benchmark(
    about="requests in time of four models, beside Triton Inference Server at its best of fourteen settings",
    groups={arm: partial(measure, arm) for arm in (*OURS, *GRID)},
    find=find,
    goals={
        **{f"goodput_of_triton_{kind}": (1.4, "more") for kind in BURSTS},
        **{f"{who}_{kind}_per_s": (0.0, "more") for kind in BURSTS for who in (*OURS, "triton")},
    },
    settings={"seconds": (2.5, 0.4)},
    limits=dict.fromkeys(
        [f"goodput_of_triton_{kind}" for kind in BURSTS],
        "Python fronts: 0.5 ms of a core a request; rates are 10% apart",
    ),
    results="inference",
    merge=merge,
)
