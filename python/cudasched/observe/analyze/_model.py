"""An analysis: the documented, versioned schema of its JSON (docs/analyze.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cudasched.advise import Report

__all__ = ["SCHEMA_VERSION", "Analysis", "Conclusion", "Counters", "Measured"]

SCHEMA_VERSION: Literal[1] = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Counters(_Frozen):
    """The hardware's counters; null where missing. Of several launches, the means by their times."""

    duration_ns: float | None = Field(description="Of a launch under Nsight Compute, with caches flushed before it.")
    sm_percent: float | None = Field(description="Of the most that the SMs can do.")
    dram_percent: float | None = Field(description="Of the memory's greatest throughput.")
    dram_bytes: float | None = Field(description="Read and written, a launch.")
    l1_hit_percent: float | None
    l2_hit_percent: float | None
    load_sectors: float | None = Field(description="Sectors of 32 bytes a global load of a warp.")
    store_sectors: float | None = Field(description="And a global store.")
    tensor_percent: float | None = Field(description="Of the cycles in which the tensor cores can work.")
    warps_percent: float | None = Field(description="Warps in flight, of those that an SM can hold.")
    stalls: dict[str, float] = Field(description="Cycles that a warp waits between two instructions, by reason.")


class Conclusion(_Frozen):
    """A conclusion from the counters."""

    rule: str
    reason: str
    recommendation: str


class Measured(_Frozen):
    """A kernel whose counters were read."""

    function: str
    name: str
    profiled: int = Field(description="Launches that were profiled.")
    launches: int = Field(description="Of the whole run.")
    time_ns: int | None = Field(description="Of all its launches in the run, without the profiler.")
    share: float | None
    counters: Counters
    conclusions: tuple[Conclusion, ...]


class Analysis(_Frozen):
    """The advice on a run, and the counters of the kernels that matter most."""

    schema_version: Literal[1] = SCHEMA_VERSION
    cudasched_version: str
    profiler: str = Field(description="Path of ncu.")
    kernels: tuple[Measured, ...] = Field(description="The most time first.")
    notes: tuple[str, ...]
    problem: str = Field(description="Why there are no counters; empty if there are.")
    advice: Report
