"""`cudasched simulate`: what would a policy, a lead or an SLO do to recorded programs?"""

from __future__ import annotations

import contextlib
import importlib
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudasched._document import document
from cudasched._output import Output
from cudasched._table import Column, fitted, terminal_columns
from cudasched._text import printable
from cudasched.cli._options import refuse
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.simulate import Policy, Row, Trace

__all__ = ["EXAMPLE", "command"]

EXAMPLE = (
    "Examples: cudasched simulate train.parquet --rate-hz 60 --slo-ms 2 --policy strict --policy slack; "
    "cudasched simulate --fit models.toml --slo"
)


@contextlib.contextmanager
def _blamed(text: str) -> Iterator[None]:
    """Has whatever a user's policy raises name the policy."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"--policy {text}: {type(error).__name__}: {error}") from error


def _policy(text: str) -> str | Policy:
    """A policy's name as it is; ``module:function`` or ``file.py:function`` as the function."""
    place, _, name = text.rpartition(":")
    if not place:
        return text
    with _blamed(text):
        found = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
        if name not in found:
            raise AttributeError(f"{place} has no {name}")
        policy: Policy = found[name]
    if not callable(policy):
        raise ConfigError(f"--policy {text}: {name} is no function")
    return _blamed(text)(policy)


def _trace(text: str, recording_us: float | None, request_gap_ms: float | None = None) -> Trace:
    from cudasched import simulate

    path, _, label = text.partition("#")
    return simulate.read_trace(path, label=label, recording_us=recording_us, request_gap_ms=request_gap_ms)


def _lead(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--lead-us {text}: a lead is a number of us, or auto") from None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _columns(rows: Sequence[Row]) -> list[Column]:
    def latency(share: str) -> list[str]:
        return ["-" if row.latency_ms is None else f"{getattr(row.latency_ms, share):.3f}" for row in rows]

    requests = ["-" if row.latency_ms is None else str(row.latency_ms.n) for row in rows]
    leads = ["-" if row.lead_us is None else f"{row.lead_us:.0f}" for row in rows]
    traces = ["-" if row.best_effort_per_s is None else f"{row.best_effort_per_s:.3g}" for row in rows]
    return [
        Column("arm", [row.arm for row in rows], may_shorten=True),
        Column("lead us", leads, 2, is_number=True),
        Column("requests", requests, 1, is_number=True),
        Column("P50 ms", latency("p50"), 6, is_number=True),
        Column("P95 ms", latency("p95"), 4, is_number=True),
        Column("P99 ms", latency("p99"), 10, is_number=True),
        Column("SLO met", [_percent(row.attainment) for row in rows], 9, is_number=True),
        Column("traces/s", traces, 5, is_number=True),
        Column("of alone", [_percent(row.best_effort_ratio) for row in rows], 8, is_number=True),
        Column("GPU busy", [_percent(row.utilisation) for row in rows], 3, is_number=True),
    ]


def _show(rows: Sequence[Row], title: str, sources: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=terminal_columns())
    console.print(Text(printable(title)))
    for source in sources:
        console.print(Text(printable(source), style="dim"))
    console.print(fitted(_columns(rows), console.width))
    for row in rows:
        for one in row.comparisons:
            console.print(
                Text(
                    printable(
                        f"{row.arm}: {one.what}: simulated {one.simulated:.2f}, measured on the GPU "
                        f"{one.measured:.2f}: off by {100 * one.error:+.0f} %"
                    )
                )
            )
        if row.unserved > 0:
            console.print(Text(printable(f"{row.arm}: {row.unserved} requests were not served by the end")))
        if row.policy_refused:
            why = printable(f"{row.arm}: the policy was switched off: {row.policy_refused}")
            console.print(Text(why, style="red"))


def _fit(file: Path, slo: bool, seed: int, json: bool) -> int:
    """The load that a GPU bears of the programs in a file."""
    from dataclasses import asdict

    from cudasched.advise import capacity

    found = capacity.fit(capacity.read(file), slo=slo, seed=seed)
    if json:
        print(document("fit", asdict(found)))
        return 0

    from rich.console import Console

    from cudasched.advise.beside import MODES
    from cudasched.cli.advise import memory_text, within

    console = Console(width=terminal_columns())
    loads = list(found.modes.values())
    titles = [f"{MODES[name].title}{' *' * (name == found.choice)}" for name in found.modes]
    columns = [
        Column("mode", titles),
        *([Column("x the rates", [within(load.scale) for load in loads], 3, is_number=True)] if slo else []),
        *(
            Column(f"P99 {name} ms", [within(load.p99_ms[name]) for load in loads], 2, is_number=True)
            for name in found.rates_hz
        ),
        Column("best effort", [within(load.best_effort, ".0%") if load.best_effort else "-" for load in loads], 1),
    ]
    mix = [
        f"{name} {rate_hz:.4g}/s" + (f", P99 within {limit:g} ms" if (limit := found.slos_ms[name]) else "")
        for name, rate_hz in found.rates_hz.items()
    ]
    lines = [
        *(f"{title}: {load.limit}" for title, load in zip(titles, loads, strict=True) if load.limit),
        f"* take {MODES[found.choice].title}: {found.modes[found.choice].settings}",
        f"memory: {memory_text(found.memory)}",
        *found.notes,
    ]
    console.print(printable("; ".join(mix)), markup=False)
    console.print(fitted(columns, console.width))
    for line in lines:
        console.print(printable(line), markup=False)
    return 0


def command(
    context: typer.Context,
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE...",
            help="Best-effort programs: data sets of `cudasched collect`; FILE#LABEL: those whose label begins so.",
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file of programs (docs/advise.md): simulate them in each mode."),
    ] = None,
    slo: Annotated[
        bool, typer.Option("--slo", help="With --fit: the highest load at which each server's P99 is within its SLO.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="strict, slack, harvest, open (no gate), or FILE.py:FUNCTION; may be given again. Default: open, "
            "strict, with --slo-ms slack, and in two processes the hardware's time slices of 1 us, the server without "
            "cudasched and with it."
        ),
    ] = None,
    lead_us: Annotated[
        list[str] | None,
        typer.Option(help="Lead, us, or auto; may be given again. Default: 20 and auto."),
    ] = None,
    request_ms: Annotated[float, typer.Option(help="GPU time of a latency request that is one graph, ms.")] = 0.5,
    request_kernels: Annotated[int, typer.Option(help="Kernels of that graph; counts where nothing is gated.")] = 30,
    latency_trace: Annotated[
        str | None, typer.Option(help="Latency requests: a data set; in place of --request-ms.")
    ] = None,
    request_gap_ms: Annotated[
        float | None,
        typer.Option(help="In it, a request ends where the GPU had nothing for so long, ms; default: as found."),
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, periodic or bursts.")] = "poisson",
    rate_hz: Annotated[float, typer.Option(help="Requests a second.")] = 60.0,
    slo_ms: Annotated[float | None, typer.Option(help="Latency target, ms, from the arrival.")] = None,
    prepare_ms: Annotated[float, typer.Option(help="From a region's entry to its first launch, ms.")] = 0.0,
    expect_ms: Annotated[float, typer.Option(help="So long ahead is each arrival announced, ms.")] = 0.0,
    sharing: Annotated[str, typer.Option(help="two_processes (time slices), mps or one_process.")] = "two_processes",
    blocking: Annotated[bool, typer.Option("--blocking", help="The gate holds the programs; no offload.")] = False,
    recording_us: Annotated[
        float | None, typer.Option(help="The cost of recording for each launch, us; default: by its timing.")
    ] = None,
    foresee: Annotated[bool, typer.Option("--foresee", help="Long launches look out for periodic arrivals.")] = False,
    seconds: Annotated[float, typer.Option(help="Simulated time, s.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and predictions.")] = 1,
    measured: Annotated[
        Path | None,
        typer.Option(help="Results of a benchmark on a GPU, such as benchmarks/results/breadth.json, to compare."),
    ] = None,
    load: Annotated[str | None, typer.Option(help="The trace's name in those results.")] = None,
    output: Annotated[Path | None, typer.Option(help="A plot, PNG or SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")] = False,
) -> int:
    """Replay recorded programs under a virtual clock: what would a policy or a lead do? Needs no GPU."""
    from dataclasses import replace

    from cudasched import simulate
    from cudasched.demo.plot import FORMATS

    if fit is not None:
        if traces:
            raise ConfigError("--fit takes its programs from the file, and no TRACE")
        others = {one.name for one in context.command.params} - {"fit", "slo", "seed", "json"}
        refuse(context, others, "--fit takes programs, rates and targets from the file, and simulates each mode")
        return _fit(fit, slo, seed, json)
    if not traces or slo:
        raise ConfigError("name a TRACE of a best-effort program, or a file of programs with --fit")
    if latency_trace:
        refuse(context, ("request_ms", "request_kernels"), "the requests are those of --latency-trace")
    else:
        refuse(context, ("request_gap_ms",), "it is of the recording of --latency-trace, and there is none")
    target = None if output is None else Output(output, option="--output", parents=True, formats=FORMATS)
    if sharing not in ("two_processes", "mps", "one_process"):
        raise ConfigError(f"--sharing {sharing}: there are two_processes, mps and one_process")
    named = [_policy(text) for text in policy or ["open", "strict", *(["slack"] if slo_ms is not None else [])]]
    for one in named:
        if isinstance(one, str) and one not in simulate.policies():
            raise ConfigError(f"--policy {one}: there are {', '.join(simulate.policies())}, and FILE.py:FUNCTION")
    leads = [_lead(text) for text in lead_us or ["20", "auto"]]
    best_effort = [_trace(text, recording_us) for text in traces]
    if load is not None:
        best_effort = [replace(trace, load=load) for trace in best_effort]
    requests = (
        _trace(latency_trace, recording_us, request_gap_ms)
        if latency_trace
        else simulate.request(request_ms, kernels=request_kernels)
    )
    server = simulate.latency(
        requests,
        rate_hz=rate_hz,
        seconds=seconds,
        arrivals=arrivals,
        slo_ms=slo_ms,
        prepare_ms=prepare_ms,
        expect_ms=expect_ms,
        seed=seed,
    )
    first = simulate.Arm(sharing=sharing, offload=not blocking, foresee=foresee)  # type: ignore[arg-type]
    arms = [
        replace(first, policy=one, lead_us=lead, offload=first.offload and one != "open")
        for one in named
        for lead in (leads if one != "open" else leads[:1])
    ]
    if policy is None and sharing == "two_processes":
        # As `time_slice_us = auto` chooses them beside programs of long kernels, and beside a server under cudasched.
        own_us = 1.0 if len(traces) == 1 else 1200.0
        slices = replace(first, policy="open", lead_us=0.0, offload=False, time_slice_us=own_us)
        arms += [slices, replace(slices, latency_slice_us=simulate.LATENCY_SLICE_US)]
    rows = simulate.compare(
        [server, *(simulate.best_effort(trace) for trace in best_effort)],
        arms,
        seconds=seconds,
        seed=seed,
        results=simulate.measured(measured) if measured else (),
    )
    title = (
        f"{requests.name} ({requests.gpu_ms / len(requests.ends):.2f} ms) at {rate_hz:g}/s, {arrivals}, beside "
        + ", ".join(f"{trace.name} ({trace.launches} launches, {trace.gpu_ms:.1f} ms)" for trace in best_effort)
        + f"; {sharing}; {sum(row.launches for row in rows)} launches simulated"
    )
    replayed = [*best_effort, *([requests] if latency_trace else [])]
    sources = [f"{trace.name}: {text}" for trace in replayed for text in (trace.source, trace.slowed) if text]
    if json:
        print(document("simulate", {"title": title, "sources": sources, "rows": [row.as_dict() for row in rows]}))
    else:
        _show(rows, title, sources)
    if target is not None:
        simulate.plot(rows, target, title)
    return 0
