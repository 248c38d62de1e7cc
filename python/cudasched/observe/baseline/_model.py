"""A baseline and a comparison: the documented, versioned schema of their JSON (docs/baselines.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SCHEMA_VERSION", "Baseline", "Compared", "Comparison", "Kind", "Measured", "Run", "Uncompared", "Verdict"]

SCHEMA_VERSION: Literal[1] = 1

#: "region": requests of a latency region. "wait": at the gate, in the launch queue, or for the GPU to be a request's.
#: "program": the device time of a whole run.
Kind = Literal["kernel", "graph", "region", "wait", "program"]

#: "slower": beyond noise, and by at least the limit. "below the limit": beyond noise, and by less.
Verdict = Literal["slower", "below the limit", "no change", "faster"]


#: A time, ns. Others are damage, and would overflow when they are compared.
_Ns = Annotated[float, Field(ge=1e-12, le=1e21)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Measured(_Frozen):
    """One kernel, graph, region or wait in one run."""

    kind: Kind
    name: str = Field(description="A kernel as the driver names it (mangled); a region by its name.")
    count: int = Field(gt=0, lt=2**63, description="Launches, requests or waits.")
    each_ns: _Ns = Field(description="Of one, ns: of kernels and graphs the mean without outliers.")


class Run(_Frozen):
    """One run of the program: one observation of each quantity."""

    recorded: str = Field(description="When, ISO 8601.")
    session: str = Field(description="Runs that were recorded by one command, one after another, share it.")
    driver_version: str
    cudasched_version: str
    time_ns: _Ns = Field(description="Device time of all its launches.")
    measured: tuple[Measured, ...]


class Baseline(_Frozen):
    """Runs of one program on one kind of GPU."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["cudasched baseline"] = "cudasched baseline"
    gpu: str
    compute_capability: str
    sm_count: int
    timing: str = Field(description="cupti or events.")
    command: str
    runs: tuple[Run, ...] = Field(min_length=1)


class Compared(_Frozen):
    """One quantity that both sides have in every run."""

    kind: Kind
    name: str
    label: str = Field(description="Namespaces and name alone.")
    verdict: Verdict
    before_ns: float = Field(description="Of one launch, request or wait: the geometric mean of the runs.")
    after_ns: float
    change: float = Field(description="after / before - 1.")
    low: float = Field(description="Least change of its 95% interval, by runs.")
    high: float = Field(description="Greatest change of it.")
    p_slower: float = Field(description="Adjusted for all quantities together.")
    p_faster: float
    noise: float = Field(description="Standard deviation from run to run, as a share.")
    detectable: float | None = Field(description="The least change that 95% of such checks find; null: over 100%.")
    share: float | None = Field(description="Of the device time of the runs of both sides; null for regions and waits.")
    count_before: float = Field(description="Launches, requests or waits a run, mean.")
    count_after: float
    before_runs_ns: tuple[float, ...] = Field(description="Of each run.")
    after_runs_ns: tuple[float, ...]


class Uncompared(_Frozen):
    """One quantity that is not judged."""

    kind: Kind
    name: str
    label: str
    why: str
    share: float | None


class Comparison(_Frozen):
    """The slowdowns beyond noise, the greatest change first."""

    schema_version: Literal[1] = SCHEMA_VERSION
    cudasched_version: str
    gpu: str
    command: str
    command_before: str
    before_runs: int
    after_runs: int
    alpha: float = Field(description="How probable one or more false findings are, of all quantities together.")
    least_change: float = Field(description="A change that is smaller is no regression.")
    slower: int = Field(description="How many quantities got slower.")
    runs_for_5_percent: int | None = Field(
        description="Runs a side that find 5% in 95% of checks, in the compared kernel with the most noise; null: over "
        "200, or nothing was compared."
    )
    notes: tuple[str, ...]
    compared: tuple[Compared, ...]
    uncompared: tuple[Uncompared, ...]
