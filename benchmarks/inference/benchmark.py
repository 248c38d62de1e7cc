"""What a request costs, over HTTP and gRPC beside Triton, too; and what comes of many: results/inference.json.

One caller asks one server at a time, and the servers take turns: 2-core machines have no room for more. This needs no
GPU. `LOAD` does: requests at random times to a batcher.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cudasched.demo.harness import HarnessError, percentile
from cudasched.inference import Batcher

from benchmarks.inference.triton import Serving, cudasched, triton
from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, median_of

WARM = 100
"""Requests before those that are counted, in each turn."""


def submit(session: Session) -> Found:
    """From the call of `submit_future` to that of the model, where nothing else waits: a median, us.

    On the thread that submits (`inline`), and on the batcher's.
    """
    rounds, count = session.options.rounds, session.options.requests
    began = [0.0]

    def run(inputs: list[Any]) -> list[Any]:
        began[0] = time.perf_counter()
        return inputs

    found: Found = {}
    for figure, inline in (("submit_us", True), ("submit_handed_us", False)):
        medians = []
        with Batcher(run, sizes=(1,), slo_ms=None, inline=inline) as batcher:
            for _ in range(rounds):
                taken = []
                for place in range(-WARM, count):
                    submitted = time.perf_counter()
                    batcher.submit_future(0).result()
                    if place >= 0:
                        taken.append(1e6 * (began[0] - submitted))
                medians.append(statistics.median(taken))
        found[figure] = median_of(medians, rounds * count)
    return found


@contextmanager
def servers(session: Session) -> Iterator[tuple[Serving, Serving]]:
    """The two that are compared: that of cudasched, and Triton."""
    (session.builds / "triton").mkdir(exist_ok=True)  # the group before may have failed
    with cudasched(session.builds) as own, triton(session.builds / "triton") as other:
        yield own, other


def noop(protocol: str) -> Callable[[Session], Found]:
    """The median time of a request over that of the same at Triton, and P99 of all of them; `handed`: see triton.py."""

    def measure(session: Session) -> Found:
        try:
            client = importlib.import_module(f"tritonclient.{protocol}")
        except ImportError as error:
            raise HarnessError(f"{error.name} is not installed: pip install 'tritonclient[{protocol}]'") from error
        rounds, count = session.options.rounds, session.options.requests
        own, other = session.shared(servers)
        arms = {"noop": (own, "noop"), "handed": (own, "handed"), "triton": (other, "noop")}
        taken: dict[str, list[list[float]]] = {arm: [] for arm in arms}
        for number in range(rounds):
            session.need(10.0)
            for arm, (server, model) in list(arms.items())[:: 1 if number % 2 == 0 else -1]:
                taken[arm].append(_taken_us(client, server, model, protocol, count))
            said = ", ".join(f"{arm} {statistics.median(turns[-1]):.0f} us" for arm, turns in taken.items())
            session.say(f"{protocol}: {said}")
        medians = {arm: [statistics.median(turn) for turn in turns] for arm, turns in taken.items()}
        p99s = {arm: [percentile(turn, 0.99) for turn in turns] for arm, turns in taken.items()}
        p99 = float(np.divide(*(np.percentile(taken[arm], 99) for arm in ("noop", "triton"))))
        requests = rounds * count

        def of_triton(times: dict[str, list[float]], arm: str, value: float | None = None) -> tuple[float, ...]:
            ratios = [ours / its for ours, its in zip(times[arm], times["triton"], strict=True)]
            return statistics.median(ratios) if value is None else value, min(ratios), max(ratios), 2 * requests

        return {
            f"{protocol}_noop_of_triton": of_triton(medians, "noop"),
            f"{protocol}_handed_of_triton": of_triton(medians, "handed"),
            f"{protocol}_noop_p99_of_triton": of_triton(p99s, "noop", p99),
            f"{protocol}_noop_us": median_of(medians["noop"], requests),
        }

    return measure


def load(session: Session) -> Found:
    """What program.py finds, in one process."""
    command = [sys.executable, "-m", "benchmarks.inference.program", "--seconds", str(session.options.seconds)]
    command += ["--simulate"] if session.rehearsal else []
    said = output_of("the process", command, session.backend.environment(hooked=True), min(session.left_s(), 600))
    return {name: tuple(value) for name, value in json.loads(said).items()}


def _taken_us(client: Any, server: Serving, model: str, protocol: str, count: int) -> list[float]:
    """Of requests one after another, from the call of the client to its return."""
    given = np.float32([[1, 2]])
    tensor = client.InferInput("input", [1, 2], "FP32").set_data_from_numpy(given)
    taken = []
    with client.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol)}") as connection:
        for place in range(-WARM, count):
            headers = {"authorization": f"Bearer {server.token}"}  # the client adds to it
            began = time.perf_counter()
            answer = connection.infer(model, [tensor], headers=headers)
            if place >= 0:
                taken.append(1e6 * (time.perf_counter() - began))
            elif answer.get_output("output_0") is None or answer.as_numpy("output_0").tolist() != given.tolist():
                raise HarnessError("the answer is not the input (Triton's Python back end needs NumPy 1)")
    return taken


BENCHMARK = Benchmark(
    about="the cost of a request in a batcher, over HTTP and over gRPC, beside Triton Inference Server",
    groups={"submit": submit, "grpc": noop("grpc"), "http": noop("http")},
    goals={
        "submit_us": (30.0, "less"),
        "grpc_noop_of_triton": (1.2, "less"),
        "http_noop_of_triton": (1.2, "less"),
        "submit_handed_us": (0.0, "more"),
        **{
            f"{each}_{of}": (0.0, "more")
            for each in ("grpc", "http")
            for of in ("handed_of_triton", "noop_p99_of_triton", "noop_us")
        },
    },
    settings={"rounds": (20, 1), "requests": (500, 20)},
    gpu=False,
    torch=False,
)

LOAD = Benchmark(
    about="times of batches that have not run, overload, and a model beside others",
    groups={"load": load},
    goals={
        "unseen_batch_error": (0.08, "less"),
        "predicted_batch_error": (0.08, "less"),
        "unseen_batch_coverage": (0.87, "more"),
        "late_gpu_share": (0.02, "less"),
        "priority_p99_ratio": (1.2, "less"),
    },
    limits={
        "late_gpu_share": "nine of ten batches keep their bound, and of a slow one all requests are late",
        "priority_p99_ratio": "one process: kernels of the others that run are not interrupted",
    },
    settings={"seconds": (2.5, 0.1)},
    results="inference",
)
