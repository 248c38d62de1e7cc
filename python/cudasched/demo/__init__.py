"""`cudasched demo`: a latency-critical and a best-effort program, alone, unmanaged and managed, in about 20 seconds."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._document import document
from cudasched._output import Output
from cudasched.demo.harness import (
    ARMS,
    Backend,
    HarnessError,
    Pool,
    Run,
    WorkerSpec,
    probe,
    summary,
    workers_of,
)
from cudasched.demo.plot import FORMATS, HOW_TO_GET_MATPLOTLIB, plot
from cudasched.demo.simulated import BEST_EFFORT_LOADS, LATENCY_LOADS
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The names of the demo's rows, and the arms of each.
ROWS = {
    "alone": ("latency_alone", "best_effort_alone"),
    "unmanaged": ("processes",),
    "managed": ("cudasched_two_processes",),
}
REPEATS = 2
#: The least requests beyond a percentile, so that no single one decides.
BEYOND = 3


@dataclass(frozen=True)
class Scene:
    """The demo's loads on one kind of device."""

    latency: str
    best_effort: str
    rate_hz: float
    description: str


GPU_SCENE = Scene("bert_graph", "transformer", 60.0, "BERT-base requests beside transformer training")
# A slow device sees fewer requests in the same wall-clock time, so they come closer together.
SIMULATED_SCENE = Scene("bert_graph", "transformer", 300.0, "requests of 24 kernels beside an endless loop of kernels")


class _EndedError(BaseException):
    """A signal asked the demo to end. As an `Exception`, Thread.start() could take it for a failure of its own."""


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as an error does, so that programs and directories are not left behind."""

    def end(number: int, frame: object) -> None:
        raise _EndedError(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(seconds: float, output: Path, simulate: bool, as_json: bool = False) -> int:
    """Runs the demo, prints a table, and writes a plot and a JSON file.

    Args:
        seconds: Wall-clock time of all measured runs together.
        output: The plot, a PNG; the JSON file is beside it with the suffix `.json`.
        simulate: Take the simulated driver even where there is a GPU.
        as_json: Print the report in place of the table, which goes to standard error with everything else.

    Returns:
        The exit status: 0, 1 after a worker failed (its stderr is shown), 130 after Ctrl-C, 128 + n after signal n.

    Raises:
        ConfigError: The time is out of range, or the output is nothing that a plot can be written to.
    """
    from rich.console import Console

    console = Console(soft_wrap=True, stderr=as_json)
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--seconds {seconds:g}: the demo measures for 1 to 3600 s")
    picture = Output(output, option="--output", parents=True, formats=FORMATS)
    numbers = None if picture.is_stream else Output(output.with_suffix(".json"), option="--output")
    backend: Backend | None = None
    try:
        with _ending_in_order():
            device, on_gpu = _choose_device(console, simulate)
            backend = Backend() if on_gpu else Backend.simulated()
            scene = GPU_SCENE if on_gpu else SIMULATED_SCENE
            rows = _measure(console, backend, scene, seconds)
    except _EndedError as ended:
        return 128 + int(ended.args[0])
    except HarnessError as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted")
        return 130
    finally:
        if backend:
            backend.close()
    console.print(_table(rows, scene, backend.scale))
    title = f"{scene.description}, {device}"
    report = {
        "device": device,
        "simulated": not on_gpu,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ran": scene.description,
        "latency_load": scene.latency
        if on_gpu
        else f"simulated: {len(LATENCY_LOADS[scene.latency])} kernels a request",
        "best_effort_load": (
            scene.best_effort if on_gpu else f"simulated: {len(BEST_EFFORT_LOADS[scene.best_effort])} kernels a step"
        ),
        "rate_hz": scene.rate_hz,
        "rows": rows,
    }
    if as_json:
        print(document("demo", report))
    if numbers:
        numbers.write(json.dumps(report, indent=2) + "\n")
    plotted = plot(rows, picture, title, percentiles(min(row["latency_ms"]["n"] for row in rows)))
    console.print(f"plot: {output}" if plotted else HOW_TO_GET_MATPLOTLIB, markup=False)
    if numbers:
        console.print(f"numbers: {numbers.path}", markup=False)
    return 0


def _choose_device(console: Console, simulate: bool) -> tuple[str, bool]:
    """The device's name and whether it is a GPU; the demo's first line says which and why."""
    if simulate:
        console.print("running on the simulated driver, as asked")
        return "simulated driver", False
    found = probe()
    if found["device"] is None:
        console.print("no NVIDIA driver found: running on the simulated driver")
        return "simulated driver", False
    if found["torch"] is None:
        console.print(
            f"{found['device']}, but PyTorch is not installed here (pip install torch): running on the simulated driver"
        )
        return "simulated driver", False
    console.print(f"running on {found['device']}", markup=False)
    return str(found["device"]), True


def _measure(console: Console, backend: Backend, scene: Scene, seconds: float) -> list[dict[str, Any]]:
    """Runs every arm in turn, `REPEATS` times, and puts each arm's repeats together."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    arms = [(label, ARMS[name]) for label, names in ROWS.items() for name in names]
    cell_s = max(seconds / (len(arms) * REPEATS), 0.5)
    latencies: dict[str, list[float]] = {label: [] for label in ROWS}
    throughputs: dict[str, list[float]] = {label: [] for label in ROWS}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, Pool(backend) as pool:
        task = progress.add_task("starting the programs", total=len(arms) * REPEATS)
        _start(pool, [spec for _, arm in arms for spec in workers_of(arm, scene.latency, scene.best_effort)])
        for repeat in range(REPEATS):
            for label, arm in arms:
                progress.update(task, description=f"{label}: {arm.name.replace('_', ' ')}")
                specs = workers_of(arm, scene.latency, scene.best_effort)
                result = pool.run(specs, Run(cell_s, f"{scene.rate_hz:g}", "poisson", seed=repeat))
                for served in result["latency"].values():
                    latencies[label] += served["latency_ms"]
                throughputs[label] += result["best_effort_per_s"].values()
                progress.advance(task)
    if not latencies["alone"] or not sum(throughputs["alone"]):
        raise HarnessError("too little happened in the time given: run the demo for more seconds")
    alone = summary(latencies["alone"])
    duty = scene.rate_hz * alone["mean"] / 1e3
    alone_per_s = sum(throughputs["alone"]) / REPEATS
    rows: list[dict[str, Any]] = []
    for label in ROWS:
        measured = summary(latencies[label])
        per_s = sum(throughputs[label]) / REPEATS
        left_over = 1.0 if label == "alone" else 1 - duty
        rows.append(
            {
                "arm": label,
                "latency_ms": measured,
                "p99_ratio": measured["p99"] / alone["p99"],
                "best_effort_per_s": per_s,
                "best_effort_ratio": per_s / alone_per_s / left_over,
                "seconds": seconds,
            }
        )
    return rows


def _start(pool: Pool, specs: list[WorkerSpec]) -> None:
    for error in pool.start(specs).values():
        raise error


def percentiles(requests: int) -> list[str]:
    """The percentiles for so many requests: each has at least `BEYOND` requests above. P50 always."""
    return [name for name in ("p50", "p95", "p99") if name == "p50" or requests * (100 - int(name[1:])) >= 100 * BEYOND]


def _table(rows: list[dict[str, Any]], scene: Scene, scale: float) -> Table:
    from rich.table import Table

    fewest = min(row["latency_ms"]["n"] for row in rows)
    shares = percentiles(fewest)
    highest = shares[-1]
    caption = "share: best effort, of its speed alone in the time that requests leave"
    if highest != "p99":
        caption += f"; {fewest} requests bear no P99: --seconds {_seconds_for_p99(rows)} would"
    title = f"{scene.description}, {scene.rate_hz:g} requests/s"
    if scale != 1:
        title += f" of simulated time (a second takes {scale:g})"
    table = Table(title=title, caption=caption)
    table.add_column("")
    table.add_column("requests", justify="right")
    for share in shares:
        table.add_column(f"{share.upper()} ms", justify="right")
    for column in (f"{highest.upper()} / alone", "best effort/s", "share"):
        table.add_column(column, justify="right")
    alone = rows[0]["latency_ms"][highest]
    for row in rows:
        latency = row["latency_ms"]
        times = [f"{latency[share]:.2f}" for share in shares]
        ratios = [
            f"{latency[highest] / alone:.2f}",
            f"{row['best_effort_per_s']:.1f}",
            f"{row['best_effort_ratio']:.0%}",
        ]
        table.add_row(row["arm"], str(latency["n"]), *times, *ratios)
    return table


def _seconds_for_p99(rows: list[dict[str, Any]]) -> int:
    fewest = min(row["latency_ms"]["n"] for row in rows)
    seconds: float = rows[0]["seconds"]
    return int(seconds * 100 * BEYOND / max(fewest, 1) / 10 + 1) * 10
