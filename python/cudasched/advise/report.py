"""The results of `cudasched.advise` as data: the documented, versioned schema of its JSON (docs/advise.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SCHEMA_VERSION", "Affected", "Finding", "Function", "Kernel", "Level", "Report"]

SCHEMA_VERSION: Literal[3] = 3

#: "not judged": a kernel whose launch shape is not the user's to change, and a graph.
Level = Literal["critical", "warning", "good", "not judged"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Affected(_Frozen):
    """A kernel that a finding on the program is about."""

    name: str
    launches: int
    time_at_stake_ns: int


class Finding(_Frozen):
    """One thing to change, and the possible gain."""

    rule: str = Field(description="The rule; docs/advise.md lists all rules.")
    level: Level
    reason: str = Field(description="The fault, with the figures.")
    recommendation: str = Field(description="The change that helps.")
    expected_gain: float = Field(ge=0, le=1, description="Part of the time that may be saved; an estimate.")
    time_at_stake_ns: int | None = Field(
        description="Time x expected gain over the run, ns; null if nothing was timed."
    )
    shown: bool = Field(description="Whether the advice was measured to help a kernel made for it (docs/advise.md).")
    kernels: tuple[Affected, ...] = Field(
        default=(), description="Of a finding on the program: the kernels, the most time at stake first."
    )


class Kernel(_Frozen):
    """All launches of one kernel, or of one graph, with one launch shape."""

    function: str = Field(description="As the driver names it (mangled).")
    name: str = Field(description="Namespaces and name alone; of graphs, number and process.")
    signature: str = Field(description="The whole name, demangled where that can be done.")
    kind: Literal["kernel", "graph"]
    graph: int = Field(description="Number of the executable graph in its process; 0 for kernels.")
    origin: str = Field(description="The library or compiler whose kernel it is, or own.")
    changeable: bool = Field(
        description="Whether the user can change the launch shape; only then is there advice on the shape."
    )
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    registers: int = Field(description="A thread.")
    local_bytes: int = Field(description="Local memory of a thread: spills, and arrays not kept in registers.")
    static_shared_bytes: int
    dynamic_shared_bytes: int
    launches: int
    timed_launches: int
    overlapped_launches: int = Field(
        description="Ran beside other launches of the process, whose time is in the kernel's time."
    )
    time_ns: int | None = Field(
        description="Device time of all launches; untimed ones count as the mean, or as predicted."
    )
    mean_ns: float | None = Field(description="Measured, of one launch.")
    predicted_ns: float | None = Field(description="Predicted, of one launch, mean; null without a model.")
    share: float | None = Field(description="Of the device time of the run.")
    blocks_per_sm: int | None = Field(description="That are resident together, exact; null if not known.")
    occupancy: float | None = Field(description="Resident warps of a full SM / warps that it can hold; exact.")
    limited_by: tuple[str, ...] = Field(
        description="The resource that allows no more blocks: warps, blocks, registers, shared_memory."
    )
    waves: float | None = Field(description="Blocks / blocks that the whole device holds.")
    tail_fill: float | None = Field(description="How full the last wave is, 0 to 1.")
    sm_utilisation: float | None = Field(
        description="Below one wave: SMs that have a block; above: waves / waves rounded up."
    )
    block_efficiency: float | None = Field(description="Threads of a block / threads of its warps.")
    bytes_per_s: float | None = Field(
        description="The bytes that a launch has to move, over its measured time; null where its work is not known."
    )
    flops_per_s: float | None = Field(
        description="Additions and multiplications over the measured time; null where its work is not known."
    )
    peak_share: float | None = Field(
        description="The greater of both over the GPU's peak, 0 to 1; null where either is not known."
    )
    idle_before_ns: int | None = Field(
        description="Time that the device stood idle before these launches but the first, gaps up to 1 ms."
    )
    level: Level
    time_at_stake_ns: int | None = Field(
        description="Of the finding with the most; 0 if there is none, null if untimed."
    )
    findings: tuple[Finding, ...]


class Function(_Frozen):
    """All launches of one kernel function, of all shapes."""

    function: str = Field(description="As the driver names it (mangled).")
    name: str
    origin: str
    launches: int
    time_ns: int | None
    share: float | None = Field(description="Of the device time of the run.")
    level: Level = Field(description="The worst of its launch shapes'.")
    time_at_stake_ns: int | None
    shapes: tuple[int, ...] = Field(description="Places in the report's `kernels`, the most time first.")


class Report(_Frozen):
    """The advice on one run, the most time first."""

    schema_version: Literal[3] = SCHEMA_VERSION
    cudasched_version: str
    command: str
    gpu: str
    compute_capability: str
    sm_count: int
    timing: str = Field(description="How the run was timed: cupti or events.")
    launches: int
    timed_launches: int
    time_ns: int | None = Field(description="Device time of all launches, null if nothing was timed or predicted.")
    notes: tuple[str, ...] = Field(description="Limits of this report.")
    program: tuple[Finding, ...] = Field(description="On the program as a whole.")
    functions: tuple[Function, ...] = Field(description="The most time first.")
    kernels: tuple[Kernel, ...] = Field(description="By launch shape, the most time first.")
