"""Conclusions from a kernel's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cudasched.observe.analyze._model import Conclusion, Counters
from cudasched.observe.analyze._ncu import METRICS, Launch

__all__ = ["conclusions", "counters"]

_WIDEST_SECTORS = 16.0  # a warp's loads of 16 bytes a thread, all in a row
_NEAR_PEAK = 60.0
_FAR_FROM_PEAK = 40.0
_HARDLY_TENSOR = 1.0
_LOW_L2 = 50.0
_LEAST_STALL = 1.0
_MATRIX_PRODUCTS = ("gemm", "matmul", "nvjet", "cutlass", "conv", "wgrad", "dgrad", "fprop", "flash", "attention")

_STALLS = {
    "long_scoreboard": (
        "global or local memory",
        "more loads in flight: more warps an SM, several independent loads a thread, asynchronous copies ahead of use",
    ),
    "short_scoreboard": (
        "shared memory or special functions",
        "fewer bank conflicts, wider accesses to shared memory, fewer special functions",
    ),
    "mio_throttle": ("the queue to shared memory and special functions", "wider and fewer such instructions"),
    "lg_throttle": ("the queue to global and local memory", "wider and fewer loads and stores; look for spills"),
    "math_pipe_throttle": ("the arithmetic pipe", "it is busy: other precision, tensor cores or less arithmetic"),
    "barrier": ("other warps at a barrier", "smaller blocks, or work that is even between the warps of a block"),
    "wait": ("the fixed latency of the instruction before", "independent instructions in between: unroll"),
    "not_selected": ("the scheduler, which chose another warp", "nothing: there is enough to run"),
    "no_instruction": ("instructions that are not in the cache", "shorter code: less unrolling, fewer branches"),
    "membar": ("a memory barrier", "fewer or narrower fences"),
    "drain": ("stores at the end of the kernel", "stores that are coalesced, and earlier"),
    "imc_miss": ("constants that are not in the cache", "constants that all threads of a warp read alike"),
}


def counters(launches: Sequence[Launch], time_of: Mapping[tuple[int, ...], int | None] | None = None) -> Counters:
    """The mean of several launches, weighted by their shapes' times in the program.

    As many launches of each shape are profiled, and a program makes a hundred of one and six of another.

    Args:
        launches: Of one kernel.
        time_of: The time of all launches of a shape in the program, ns, by grid and block. A launch of none of these
            counts with its own time.
    """

    def mean(pairs: Sequence[tuple[float, float]]) -> float | None:
        weight = sum(time for time, _ in pairs)
        return sum(time * value for time, value in pairs) / weight if weight > 0 else None

    profiled = Counter(launch.shape for launch in launches)

    def of(launch: Launch) -> float:
        in_program = (time_of or {}).get(launch.shape) if launch.shape is not None else None
        return in_program / profiled[launch.shape] if in_program else launch.values.get("duration_ns") or 1.0

    found: dict[str, float | None] = {
        name: mean([(of(launch), launch.values[name]) for launch in launches if name in launch.values])
        for name in METRICS
    }
    for name in ("duration_ns", "dram_bytes"):  # of a launch, not of a moment
        known = [launch.values[name] for launch in launches if name in launch.values]
        found[name] = sum(known) / len(known) if known else None
    reasons = dict.fromkeys(reason for launch in launches for reason in launch.stalls)
    stalls = {
        reason: mean([(of(launch), launch.stalls[reason]) for launch in launches if reason in launch.stalls]) or 0.0
        for reason in reasons
    }
    return Counters(**found, stalls=dict(sorted(stalls.items(), key=lambda pair: -pair[1])))


def conclusions(name: str, seen: Counters, library: str = "") -> tuple[Conclusion, ...]:
    """A kernel's limits, with remedies.

    Args:
        name: The kernel's, as the driver or a person has it.
        seen: The kernel's counters.
        library: The kernel's library, if the user cannot change its code.
    """
    made = []
    for kind, sectors in (("load", seen.load_sectors), ("store", seen.store_sectors)):
        if sectors is not None and sectors > _WIDEST_SECTORS:
            made.append(
                Conclusion(
                    rule="sectors",
                    reason=f"a global {kind} of a warp touches {sectors:.1f} sectors of 32 bytes, where 4 do for 4 "
                    "bytes a thread and 16 for 16 bytes",
                    recommendation=f"the code is {library}'s: give it operands of another layout (contiguous, channels "
                    "last)"
                    if library
                    else "let neighbouring threads use neighbouring addresses: another layout or order of loops, or a "
                    "detour through shared memory",
                )
            )
    if seen.dram_percent is not None and seen.dram_percent >= _NEAR_PEAK:
        cached = seen.l2_hit_percent is not None and seen.l2_hit_percent < _LOW_L2
        hits = f", and {seen.l2_hit_percent:.0f}% of sectors come from the L2 cache" if cached else ""
        made.append(
            Conclusion(
                rule="memory",
                reason=f"the memory is busy at {seen.dram_percent:.0f}% of its throughput{hits}",
                recommendation="move fewer bytes: a smaller type, kernels fused so that results stay in registers"
                + ("; let blocks that share data run close together" if cached and not library else ""),
            )
        )
    is_product = any(word in name.lower() for word in _MATRIX_PRODUCTS)
    if is_product and seen.tensor_percent is not None and seen.tensor_percent < _HARDLY_TENSOR:
        made.append(
            Conclusion(
                rule="tensor_cores",
                reason="its name is of a matrix product, and the tensor cores work in "
                f"{seen.tensor_percent:.1f}% of the cycles",
                recommendation="use bf16, fp16 or TF32, and sizes that are multiples of 8",
            )
        )
    busy = [value for value in (seen.dram_percent, seen.sm_percent) if value is not None]
    worst = next(iter(seen.stalls.items()), None)
    if busy and max(busy) < _FAR_FROM_PEAK and worst is not None and worst[1] >= _LEAST_STALL:
        about, remedy = _STALLS.get(worst[0], (worst[0].replace("_", " "), "see Nsight Compute's source view"))
        made.append(
            Conclusion(
                rule="latency",
                reason=f"neither memory nor SMs are busy (at most {max(busy):.0f}%): a warp waits {worst[1]:.1f} "
                f"cycles between two instructions for {about}",
                recommendation=f"the code is {library}'s: give it more work at once (larger batches), or put a fused "
                "kernel in its place (torch.compile)"
                if library
                else remedy,
            )
        )
    return tuple(made)
