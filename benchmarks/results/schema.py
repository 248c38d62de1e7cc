"""The one form of results: `NAME.json` beside this file is a `Results`. Latencies are ms, rates are per second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

RESULTS = Path(__file__).parent

#: What a figure that misses its goal says as long as no reason is known.
NOT_EXPLAINED = "not explained yet"

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Interval = tuple[float, float]
Better = Literal["less", "more"]
Goal = tuple[float, Better]
Figure = tuple[float, float, float, int]
"""The value, the least and the most of its parts, and the number of requests or samples."""
Mode = Literal["one_process", "two_processes", "mps"]
LatencyLoad = Literal[
    "bert_graph",
    "bert_eager",
    "resnet50_b4",
    "resnet50_eager",
    "gpt_decode",
    "decode_eager",
    "mlp",
    "decode_short",
    "bert_onnx",
    "vit_graph",
    "recommender",
    "tensor_parallel_graph",
    "tensor_parallel_eager",
]
#: Loads of the colocation benchmark, and programs of the breadth benchmark, which begin with their library.
_PROGRAM = r"(torch|torchvision|transformers|cupy|jax|triton)_\w+"
#: Programs of the graphs benchmark.
_GRAPHS = "compiled_inference|compiled_training|(whole_step|jax|decode|piecewise)(_updated)?"
_BEST_EFFORT = f"(bert_training|bert_varying|transformer|resnet50|gemm|elementwise|{_GRAPHS}|{_PROGRAM})"
#: One load, or several that run at once, joined by +.
BestEffortLoads = Annotated[str, Field(pattern=rf"^{_BEST_EFFORT}(\+{_BEST_EFFORT})*$")]
ArrivalKind = Literal["poisson", "periodic", "bursts", "hinted"]


class Strict(BaseModel):
    """Unknown fields are errors: a misspelt one would be lost without a word."""

    model_config = ConfigDict(extra="forbid")


class Meta(Strict):
    """Where and when results were measured; None where the machine could not say."""

    gpu: str
    driver: str | None
    cuda: str | None
    torch: str | None
    python: str
    commit: str | None
    date: str
    sm_clock_mhz: int | None
    command: str


class Latency(Strict):
    """Latencies of `n` requests from when they were due, ms; of several repeats, the medians of their percentiles."""

    p50: Positive
    p95: Positive
    p99: Positive
    max: Positive | None = None
    mean: Positive
    n: Annotated[int, Field(gt=0)]


class OverStrict(Strict):
    """An arm's figures over those of the same arm under `strict`, repeat by repeat, which had the same arrivals."""

    p50: list[float]
    p99: list[float]
    best_effort: list[float]


class ColocationRow(Strict):
    """One latency load in one arm, beside what else runs there.

    `latency_ms` and what follows from it is None where no requests were served, best-effort figures where no best
    effort ran, figures against an alone arm where that was not measured. Figures of several repeats are medians;
    per-repeat values keep the order of repeats. What arms with a hint are compared with is prepared as their requests
    are.

    Attributes:
        latency_load: The load whose requests this row is about.
        other_latency: Latency loads that run at once, joined by +.
        scene: Where the same loads and arms are measured in several surroundings, which of them.
        repeat: Which, where each repeat has rows of its own.
        gpus: How many best effort runs on, where these are several.
        bound_p99_ms: The physical bound (bound.py).
        bound_from: What the remainder of a kernel is added to: requests of the hinted arm, or of the arm alone.
        best_effort_per_s: Items a second; of several loads, the seconds of GPU time in a second's items.
        duty: Share of the GPU's time that all latency loads take by themselves.
        best_effort_ratio: Of what it does alone in the time that requests leave.
        gpu_duty: Share of the time in which the GPU is busy with the latency loads by themselves, by the profiler.
        best_effort_gpu_ratio: Of what best effort does alone, offloaded, in the GPU time that requests leave.
        best_effort_mps_ratio: Under MPS: of what it does alone as an MPS client under cudasched in the time that
            requests leave. MPS by itself costs some programs several percent.
        attainment: Share of requests within `slo_ms`.
        wait_ms: Mean time from when requests were due to their first work on the GPU, by events around some of them.
        gpu_alone: Share of the time in which best effort by itself keeps the GPU busy.
        gate_wait: Share of the time in which the gate held back best effort.
        launcher_cpu: CPU time of the launcher thread outside driver calls, over the time that passed.
        building_p99_ms: P99 of the requests that met the building of slices of graphs.
        building_requests: How many those are.
        useful_gpu: Share of the time in which the GPU does requests' or best effort's work, by what either takes alone.
        host_pace: What a fixed piece of host work took beside the requests, over what it took beside them alone; where
            it is known, ratios of latencies are of those at one pace of the host.
        over_strict: Of an arm that was measured under `strict`, too.
        p50_ratio_per_repeat: What `p50_ratio` is the median of, where repeats are paired.
        predictor: What predicts, where this is compared.
        p50: With `p95`, `p99` and `max`, of `requests` requests, ms; P99 is None for fewer than 1,000.
        best_effort_of_time_slices: Best effort over that in plain time slices of the same repeat.
        p50_ratio_interval: 95% interval of `p50_ratio`, by the bootstrap over the requests of both.
        p99_ratio_interval: The same of `p99_ratio`; None for fewer than 1,000 requests.
    """

    arm: str
    mode: Mode
    latency_load: LatencyLoad
    other_latency: str = ""
    scene: str = ""
    repeat: int | None = None
    gpus: Annotated[int, Field(gt=0)] | None = None
    best_effort_load: BestEffortLoads
    arrivals: ArrivalKind
    rate_hz: Positive
    policy: str | None
    lead_us: float | Literal["auto"] | None
    repeats: Annotated[int, Field(gt=0)]
    latency_ms: Latency | None
    alone_ms: Latency | None
    p50_ratio: Positive | None = None
    p95_ratio: Positive | None = None
    p99_ratio: Positive | None
    bound_p99_ms: Positive | None
    bound_from: Literal["hint", "alone"] | None = None
    best_effort_per_s: Positive | None
    best_effort_alone_per_s: Positive | None
    duty: Share | None
    best_effort_ratio: Positive | None
    gpu_duty: Share | None = None
    best_effort_gpu_ratio: Positive | None = None
    best_effort_alone_mps_per_s: Positive | None = None
    best_effort_mps_ratio: Positive | None = None
    attainment: Share | None
    slo_ms: Positive | None = None
    wait_ms: NotNegative | None = None
    gpu_alone: Share | None = None
    gate_wait: NotNegative | None = None
    launcher_cpu: NotNegative | None = None
    building_p99_ms: Positive | None = None
    building_requests: Annotated[int, Field(gt=0)] | None = None
    useful_gpu: NotNegative | None = None
    seconds: Positive | None = None
    unserved: int = 0
    host_pace: Positive | None = None
    over_strict: OverStrict | None = None
    p50_ratio_per_repeat: list[float] = []
    p99_ms_per_repeat: list[float] = []
    predictor: Literal["trees", "history", "constant", "oracle"] | None = None
    p50: Positive | None = None
    p95: Positive | None = None
    p99: Positive | None = None
    max: Positive | None = None
    requests: Annotated[int, Field(gt=0)] | None = None
    best_effort_of_time_slices: Positive | None = None
    p50_ratio_interval: Interval | None = None
    p99_ratio_interval: Interval | None = None
    best_effort_per_s_per_repeat: list[float] = []
    alone_p99_ms_per_repeat: list[float] = []

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialized: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in serialized(self).items() if value != fields[name].default}


class OverheadRow(Strict):
    """CPU time of one call, ns: with what is measured, and without it, from runs that took turns."""

    what: str
    ns_median: float
    ns_p99: float
    baseline_ns_median: float
    baseline_ns_p99: float | None = None
    added_ns_median: float | None = None
    rounds: int | None = None


PredictorEngine = Literal[
    "cudasched",
    "xgboost-inplace",
    "xgboost-capi",
    "onnxruntime",
    "treelite",
    "tl2cgen",
]


class PredictorSpeedRow(Strict):
    """One prediction on one core, hot, one distinct row a call.

    A rival's `isa` says how it is called, c or python.
    """

    kind: Literal["speed"] = "speed"
    engine: PredictorEngine
    ns_per_row_median: Positive
    isa: str
    cpu: str


class PredictorAccuracyRow(Strict):
    """Errors of one model on held-out launches: median and mean of |predicted / measured - 1|, as fractions.

    `ours` is the model that ships; `corrected` is with what the predictor learns while it runs, from times by events.
    Splits: launches of a known key; first launches of new shapes, and of kernels of unseen name families; whole
    programs.

    Attributes:
        scope: `all`, an operation family, a range of durations ("over 100 us") or a program ("program:bert_variable").
        time_weighted: Sum of |predicted - measured| over the sum of measured.
        bias: Sum of predicted - measured over the sum of measured.
        low: End of the 95% interval of `mdape`, from resampling `groups`.
        high: Its other end.
        groups: Shapes, name families or programs.
    """

    kind: Literal["accuracy"] = "accuracy"
    split: Literal["repeat", "new_shape", "unseen_kernel", "program"]
    model: str
    scope: str = "all"
    corrected: bool
    mdape: NotNegative
    mape: NotNegative
    time_weighted: NotNegative | None = None
    bias: float | None = None
    low: NotNegative | None = None
    high: NotNegative | None = None
    n: Annotated[int, Field(gt=0)]
    groups: Annotated[int, Field(gt=0)] | None = None


class PredictorCoverageRow(Strict):
    """How often the bound held in one tenth of held-out launches by predicted duration, 1 the shortest.

    `low` and `high` are the ends of a 95% interval, clustered by key.
    """

    kind: Literal["coverage"] = "coverage"
    decile: Annotated[int, Field(ge=1, le=10)]
    coverage: Share
    n: Annotated[int, Field(gt=0)]
    low: Share | None = None
    high: Share | None = None


PredictorRow = Annotated[
    PredictorSpeedRow | PredictorAccuracyRow | PredictorCoverageRow,
    Field(discriminator="kind"),
]


class SoakRow(Strict):
    """What programs did in a soak on the simulated device (tests/soak), what was done to them, and what went wrong.

    `launches` are those whose effects were looked at; `ended` programs came to their own end; `failed` ones lost or
    reordered something, ended otherwise than they should, or said something.
    """

    minutes: Positive
    seed: int
    programs: int
    rounds: int
    launches: int
    captures: int
    graph_updates: int
    sliced_launches: int = 0
    regions: int
    threads: int
    forks: int
    execs: int
    resets: int
    broken_contexts: int
    killed: int
    terminated: int
    stopped: int
    ended: int
    failed: int
    hung: int
    slots_left: int
    processes_left: int


class TracingRow(Strict):
    """A training that was traced for long (benchmarks.observe.tracing): is memory flat, are files bounded?

    `gpu` is the one that the file's `meta_by_kind` has by this name. `resident_mb` are the program's: the median of
    each tenth of the time, in order; `growth_mb` is that of the last third over the second. `parts_mb` is what its
    records took at most of the disk, of which `limit_mb` is the bound.
    """

    gpu: str
    seconds: Positive
    steps: int
    steps_per_s: Positive
    resident_mb: list[float]
    growth_mb: float
    limit_mb: Positive
    parts_mb: float
    dropped: int
    rotated_away: int
    launches_kept: int
    converted_s: float


class FigureRow(Strict):
    """One figure that is promised (benchmarks/core, benchmarks/graphs).

    Attributes:
        figure: Its name.
        value: What was measured.
        goal: What is promised; 0 where more is better: nothing is, and the value is reported.
        better: Whether less or more than the goal is better.
        low: The least of the parts that the value is made of: repeats, starts, GPUs; of pairs of turns, a quartile.
        high: The most of them; the other quartile.
        n: Of how many requests, starts, runs or pairs of turns, or of how many seconds, it is made.
        limited_by: Where the goal is missed, what limits it; else empty.
        interval: 95% interval of the value, by the bootstrap over repeats; the goal is met where all of it meets it.
    """

    kind: Literal["figures"] = "figures"
    figure: str
    value: float
    goal: float
    better: Better
    low: float
    high: float
    n: Annotated[int, Field(gt=0)]
    limited_by: str
    interval: Interval | None = None

    @classmethod
    def judged(
        cls, name: str, found: Figure, goal: Goal, limited_by: str = "", interval: Interval | None = None
    ) -> FigureRow:
        """A figure with the reason, or that there is none yet, where it misses its goal, and without it elsewhere."""
        given = dict(zip(("value", "low", "high", "n", "goal", "better"), (*found, *goal), strict=True))
        met = _meets(found[0], *goal, interval)
        reason = "" if met else limited_by or NOT_EXPLAINED
        return cls.model_validate({"figure": name, **given, "limited_by": reason, "interval": interval})

    @model_validator(mode="after")
    def _says_what_limits_it(self) -> FigureRow:
        if self.met == bool(self.limited_by):
            said = "meets its goal and has" if self.met else "misses its goal and does not say"
            raise ValueError(f"{self.figure} {said} its limit")
        return self

    @property
    def met(self) -> bool:
        """Whether the goal is."""
        return _meets(self.value, self.goal, self.better, self.interval)

    @property
    def only_reported(self) -> bool:
        """Whether there is no goal."""
        return self.better == "more" and self.goal == 0


def _meets(value: float, goal: float, better: Better, interval: Interval | None) -> bool:
    """Whether a figure, with all of its interval, meets a goal."""
    every = (value, *(interval or ()))
    return max(every) <= goal if better == "less" else min(every) >= goal


Row = FigureRow | OverheadRow | TracingRow | PredictorSpeedRow | PredictorAccuracyRow | PredictorCoverageRow
"""A row of a file that several runs may make, each with rows of its own."""


class Results(Strict):
    """One results file.

    `rows` are all of one class, the predictor's of several kinds. Where several runs make one file, each with rows of
    its own, `meta_by_kind` tells of them (`merge`).
    """

    meta: Meta
    meta_by_kind: dict[str, Meta] = {}
    rows: (
        list[ColocationRow]
        | list[OverheadRow]
        | list[PredictorRow]
        | list[SoakRow]
        | list[TracingRow]
        | list[FigureRow]
    )

    @property
    def colocations(self) -> list[ColocationRow]:
        """The rows of colocations."""
        return [row for row in self.rows if isinstance(row, ColocationRow)]

    @property
    def figures(self) -> list[FigureRow]:
        """The figures."""
        return [row for row in self.rows if isinstance(row, FigureRow)]

    def write(self, path: Path) -> None:
        """Replaces `path` at once, so that no reader sees half of it."""
        replace(path, self.model_dump_json(indent=1) + "\n")


def load(path: Path) -> Results:
    """Reads a results file.

    Raises:
        OSError: It cannot be read.
        ValueError: It does not meet the schema, as a file of an older one may; names the file and the field.
    """
    try:
        return Results.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ValueError(
            f"{path}: not of this schema; measure anew, or read it with its own commit: {error}"
        ) from error


def kind_of(row: Row) -> str:
    """What a run replaces at once: a figure, a way of overhead, the traced trainings of a GPU, a predictor's kind."""
    if isinstance(row, FigureRow):
        return row.figure
    if isinstance(row, OverheadRow):
        return row.what
    return row.gpu if isinstance(row, TracingRow) else row.kind


def merge(path: Path, meta: Meta, rows: Sequence[Row]) -> Results:
    """Puts rows into a file: they take the place of those of their kinds there, and the other kinds stay.

    The file's own meta names the GPU that something ran on, if anything did.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: What is there does not meet the schema.
    """
    kinds: dict[str, list[Any]] = {}
    measured: dict[str, Meta] = {}
    if path.exists():
        before = load(path)
        for row in before.rows:
            kind = kind_of(row)  # type: ignore[arg-type]
            kinds.setdefault(kind, []).append(row)
            measured[kind] = before.meta_by_kind.get(kind, before.meta)
    kinds |= {kind_of(row): [] for row in rows}
    for row in rows:
        kinds[kind_of(row)].append(row)
        measured[kind_of(row)] = meta
    on_gpu = (one for one in reversed(list(measured.values())) if not one.gpu.startswith(("none", "simulated")))
    results = Results(
        meta=next(on_gpu, meta),
        meta_by_kind=dict(sorted(measured.items())),
        rows=[row for same in kinds.values() for row in same],
    )
    results.write(path)
    return results


def replace(path: Path, text: str) -> None:
    """Writes `text` to a file that takes the place of `path` in one step.

    Raises:
        OSError: It cannot be written, on a full disk for example; names the file, which is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"not written, and as before: {error.strerror}", str(path)) from error
