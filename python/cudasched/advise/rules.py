"""The rules: faults of a kernel's launch shape or of the program, their reasons, remedies and possible gains.

Each rule is a pure function of one kernel. Gains are estimates from the launch shape alone: the kernel's code is not
looked at. docs/advise.md explains each constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cudasched.advise.occupancy import MAX_THREADS_PER_BLOCK, WARP_THREADS, Architecture, Occupancy, occupancy
from cudasched.advise.origins import Origin
from cudasched.advise.peaks import Peaks, arithmetic_of
from cudasched.advise.profile import Group
from cudasched.advise.report import Affected, Finding, Level
from cudasched.status import LEVELS

__all__ = [
    "CRITICAL_GAIN",
    "CRITICAL_SHARE",
    "KERNEL_RULES",
    "SHOWN",
    "WARNING_GAIN",
    "Subject",
    "achieved",
    "block_efficiency",
    "bytes_per_s",
    "find",
    "flops_per_s",
    "launch_bound",
    "level",
    "level_of",
    "peak_share",
    "slower_than_predicted",
    "sm_utilisation",
    "tail_fill",
    "tiny_launches",
    "unknown_to_the_model",
    "waves",
]

WARNING_GAIN = 0.05
"""Less gain is not worth a word."""
CRITICAL_GAIN = 0.25
CRITICAL_SHARE = 0.01
"""Of the run's device time: a kernel with less is never critical."""

SHOWN = frozenset(
    {
        "block_size",
        "launch_bound",
        "local_memory",
        "partial_warp",
        "registers",
        "shared_memory",
        "small_grid",
        "tail",
        "tiny_launches",
    }
)
"""Rules whose advice was measured to help a kernel made for it, before and after (docs/advise.md)."""

_LOW_OCCUPANCY = 0.5
_HALF_SPEED_OCCUPANCY = 0.125  # speed = o / (o + this): memory latency is hidden with diminishing returns
_TRADED = 0.5  # of the gain: fewer registers or less shared memory cost something elsewhere
_SPLIT = 0.5  # of the gain: more blocks mean more work to combine
_LOCKSTEP = 0.5  # of the gain: blocks of a wave do not all end together
_FLOOR_NS = 1500  # of a kernel that does nothing
_BACK_TO_BACK_NS = 1300  # between two kernels of one stream
_MOST_WAVES_WITH_TAIL = 8
_SPILL_BYTES, _MANY_SPILL_BYTES = 32, 256
_SPILL_GAIN, _MANY_SPILL_GAIN = 0.1, 0.2
_MAX_REGISTERS = 255
_TINY_NS, _TINY_LAUNCHES = 5000, 100
_BLOCK_SIZES = (64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024)
_USUAL_SIZES = (128, 256)
_RECOMPILED = {"Triton", "torch.compile"}  # built for one block size: the function's own limit is no limit
_LESS_OFTEN = (
    'a CUDA graph (torch.cuda.CUDAGraph, torch.compile with mode="reduce-overhead"), larger batches, fused kernels'
)
_SLOW, _SLOW_LAUNCHES = 2.0, 3
_SLOW_RUN, _SLOW_KERNELS = 1.5, 5  # of 327 recordings on an idle GPU the most was 1.3
_BOUND_LAUNCHES, _BOUND_IDLE, _BOUND_SHORT = 50, 0.3, 0.5


@dataclass(frozen=True)
class Subject:
    """A kernel for the rules.

    Attributes:
        group: The kernel's launches.
        origin: The owner.
        sm_count: Of the device; 0 if not known.
        max_warps_per_sm: 0 if not known.
        architecture: None if the compute capability is not in the table.
        share: Of the run's device time; None if not known.
        peaks: Of the GPU; None if they are not in the table.
    """

    group: Group
    origin: Origin
    sm_count: int
    max_warps_per_sm: int
    architecture: Architecture | None
    share: float | None
    peaks: Peaks | None = None

    @property
    def each_ns(self) -> float | None:
        """Measured time of one launch, else the predicted one."""
        return self.group.mean_ns if self.group.timed else self.group.predicted_ns


def achieved(subject: Subject) -> Occupancy | None:
    """This kernel's blocks on an SM: the driver's number where known, else by our own arithmetic."""
    group, table = subject.group, subject.architecture
    if group.kind != "kernel" or group.threads < 1:
        return None
    ours = occupancy(table, group.threads, group.registers, group.shared_bytes) if table is not None else None
    if group.blocks_per_sm and subject.max_warps_per_sm:
        warps = -(-group.threads // WARP_THREADS)
        agrees = ours is not None and ours.blocks_per_sm == group.blocks_per_sm
        limited = ours.limited_by if ours is not None and agrees else ()
        return Occupancy(group.blocks_per_sm, warps, subject.max_warps_per_sm, limited)
    # Clusters need room for all their blocks at once, which only the driver knows.
    return ours if group.cluster in ((0, 0, 0), (1, 1, 1)) else None


def waves(subject: Subject) -> float | None:
    """Blocks of the grid / blocks that the device holds."""
    fits = achieved(subject)
    if fits is None or not fits.blocks_per_sm or not subject.sm_count:
        return None
    return subject.group.blocks / (fits.blocks_per_sm * subject.sm_count)


def tail_fill(subject: Subject) -> float | None:
    """How full the last wave is."""
    count = waves(subject)
    return None if count is None or not count else count - math.ceil(count) + 1


def sm_utilisation(subject: Subject) -> float | None:
    """Below one wave the SMs that have a block, above it waves / waves rounded up."""
    count = waves(subject)
    if count is None or not count:
        return None
    return min(1.0, subject.group.blocks / subject.sm_count) if count <= 1 else count / math.ceil(count)


def block_efficiency(subject: Subject) -> float | None:
    """Threads of a block / threads of its warps."""
    threads = subject.group.threads
    if subject.group.kind != "kernel" or threads < 1:
        return None
    return threads / (-(-threads // WARP_THREADS) * WARP_THREADS)


def _per_second(subject: Subject, amount: float | None) -> float | None:
    each = subject.group.mean_ns
    return None if amount is None or not each else amount / each * 1e9


def bytes_per_s(subject: Subject) -> float | None:
    """The least bytes that a launch moves, over its measured time."""
    return _per_second(subject, subject.group.bytes)


def flops_per_s(subject: Subject) -> float | None:
    """The additions and multiplications, over the measured time."""
    return _per_second(subject, subject.group.flops)


def peak_share(subject: Subject) -> float | None:
    """The kernel's share of the peak of the memory or of its arithmetic, whichever is higher.

    Operands that lie in the cache move faster than the memory could: not more than 1 is said.
    """
    if subject.peaks is None:
        return None
    moved, computed = bytes_per_s(subject), flops_per_s(subject)
    kind = arithmetic_of(subject.group.function)
    shares = [] if moved is None else [moved / subject.peaks.bytes_per_s]
    if computed is not None and kind is not None:
        shares.append(computed / subject.peaks.flops_per_s[kind])
    return min(1.0, max(shares)) if shares else None


def level_of(gain: float, share: float | None) -> Level:
    """The level: by the possible gain, and by the kernel's share of the run."""
    if gain >= CRITICAL_GAIN and (share is None or share >= CRITICAL_SHARE):
        return "critical"
    return "warning" if gain >= WARNING_GAIN else "good"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _kib(size: int) -> str:
    return f"{size} bytes" if size < 1024 else f"{size / 1024:.4g} KiB"


def _microseconds(time_ns: float) -> str:
    return f"{time_ns / 1000:.3g} us"


def _by(origin: Origin) -> str:
    """The user's means to change the shape, where that is not the launch itself."""
    return f" (by {origin.how})" if origin.name != "own" and origin.how else ""


def _finding(subject: Subject, rule: str, gain: float, reason: str, recommendation: str) -> Finding | None:
    """A finding whose gain is cut to the time that the kernel can lose at all; None if too little is left."""
    each = subject.each_ns
    if each is not None:
        gain *= max(0.0, 1 - _FLOOR_NS / each) if each > 0 else 0.0
    if gain < WARNING_GAIN:
        return None
    gain = round(gain, 3)
    time = subject.group.time_ns
    return Finding(
        rule=rule,
        level=level_of(gain, subject.share),
        reason=reason,
        recommendation=recommendation,
        expected_gain=gain,
        time_at_stake_ns=None if time is None else round(time * gain),
        shown=rule in SHOWN,
    )


def _speed(fraction: float) -> float:
    return fraction / (fraction + _HALF_SPEED_OCCUPANCY)


def _gain(now: float, then: float) -> float:
    return 1 - _speed(now) / _speed(then) if then > now > 0 else 0.0


def _most_threads(subject: Subject) -> int:
    limit = subject.group.max_threads
    return limit if limit and subject.origin.name not in _RECOMPILED else MAX_THREADS_PER_BLOCK


def _better_sizes(subject: Subject, table: Architecture) -> tuple[list[int], Occupancy] | None:
    """The block sizes with the best occupancy, if possible near the usual ones, and that occupancy.

    Shared memory is taken to grow with the block.
    """
    group = subject.group
    found: dict[int, Occupancy] = {}
    for threads in _BLOCK_SIZES:
        shared = math.ceil(group.shared_bytes * threads / group.threads)
        if (
            threads != group.threads
            and threads <= _most_threads(subject)
            and shared <= table.max_shared_bytes_per_block
        ):
            found[threads] = occupancy(table, threads, group.registers, shared)
    if not found:
        return None
    best = max(found.values(), key=lambda fits: fits.fraction)
    sizes = [threads for threads, fits in found.items() if fits.fraction == best.fraction]
    usual = [threads for threads in sizes if _USUAL_SIZES[0] <= threads <= _USUAL_SIZES[1]]
    return usual or sizes, best


def _say_sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _partial_warp(subject: Subject) -> Finding | None:
    threads, efficiency = subject.group.threads, block_efficiency(subject)
    if efficiency is None or efficiency == 1:
        return None
    warps = -(-threads // WARP_THREADS)
    below, above = (warps - 1) * WARP_THREADS, warps * WARP_THREADS
    sizes = f"{below} or {above}" if below and above <= _most_threads(subject) else str(below or above)
    return _finding(
        subject,
        "partial_warp",
        1 - efficiency,
        f"{_count(threads, 'thread')} a block fill {_percent(efficiency)} of its {_count(warps, 'warp')}",
        f"make the block a multiple of {WARP_THREADS}: try {sizes} threads{_by(subject.origin)}",
    )


def _low_occupancy(subject: Subject) -> Finding | None:
    """Few resident warps, and a grid that would use more of them."""
    group, table, fits, count = subject.group, subject.architecture, achieved(subject), waves(subject)
    if (
        fits is None
        or count is None
        or count <= 1
        or fits.fraction > _LOW_OCCUPANCY
        or not fits.limited_by
        or table is None
    ):
        return None
    held = f"at most {fits.resident_warps} of {_count(fits.max_warps_per_sm, 'warp')} resident"
    if "shared_memory" in fits.limited_by:
        return _too_much_shared(subject, table, fits, held)
    better = _better_sizes(subject, table)
    if better and ({"warps", "blocks"} & set(fits.limited_by) or better[1].fraction >= 1.25 * fits.fraction):
        sizes, then = better
        cause = f" ({_count(group.registers, 'register')} a thread)" if "registers" in fits.limited_by else ""
        found = _finding(
            subject,
            "block_size",
            _gain(fits.fraction, then.fraction),
            f"{_count(group.threads, 'thread')} a block{cause}: {held}",
            f"try {_say_sizes(sizes)} threads a block{_by(subject.origin)}: "
            f"{then.resident_warps} of {fits.max_warps_per_sm} warps",
        )
        if found:
            return found
    if "registers" in fits.limited_by:
        return _too_many_registers(subject, table, fits, held)
    return None


def _too_much_shared(subject: Subject, table: Architecture, fits: Occupancy, held: str) -> Finding | None:
    group = subject.group
    more = fits.blocks_per_sm + 1
    unit = table.shared_granularity_bytes
    size = table.shared_bytes_per_sm // more // unit * unit - table.reserved_shared_bytes
    if size <= 0:
        return None
    then = occupancy(table, group.threads, group.registers, size)
    return _finding(
        subject,
        "shared_memory",
        _TRADED * _gain(fits.fraction, then.fraction),
        f"{_kib(group.shared_bytes)} of shared memory a block: {_count(fits.blocks_per_sm, 'block')} an SM, {held}",
        f"with at most {_kib(size)} a block {more} fit ({then.resident_warps} warps): smaller tiles or fewer stages; "
        "kernels built round tensor cores may be best as they are",
    )


def _too_many_registers(subject: Subject, table: Architecture, fits: Occupancy, held: str) -> Finding | None:
    group = subject.group
    limits = range(group.registers - 1, 15, -1)
    fitting = ((limit, occupancy(table, group.threads, limit, group.shared_bytes)) for limit in limits)
    found = next(((limit, then) for limit, then in fitting if then.blocks_per_sm > fits.blocks_per_sm), None)
    if found is None:
        return None
    limit, then = found
    return _finding(
        subject,
        "registers",
        _TRADED * _gain(fits.fraction, then.fraction),
        f"{_count(group.registers, 'register')} a thread: {_count(fits.blocks_per_sm, 'block')} an SM, {held}",
        f"with at most {limit} registers {then.blocks_per_sm} blocks fit ({then.resident_warps} warps): "
        f"__launch_bounds__({group.threads}, {then.blocks_per_sm}) or smaller tiles a thread; "
        "kernels built round tensor cores may be best as they are",
    )


def _small_grid(subject: Subject) -> Finding | None:
    """Fewer blocks than SMs. Not for kernels that ran beside others: those SMs had work."""
    group, sms = subject.group, subject.sm_count
    if not sms or not 0 < group.blocks < sms or 2 * group.overlapped > group.launches:
        return None
    threads = max(2 * WARP_THREADS, group.blocks * group.threads // sms // WARP_THREADS * WARP_THREADS)
    spread = math.ceil(group.blocks * group.threads / threads)
    smaller = f"blocks of {threads} threads make {spread} of it" if threads < group.threads else ""
    return _finding(
        subject,
        "small_grid",
        _SPLIT * (1 - group.blocks / sms),
        f"{_count(group.blocks, 'block')} for {sms} SMs: {_count(sms - group.blocks, 'SM')} without work",
        (f"{smaller}; or " if smaller else "")
        + "split the work into more blocks (smaller tiles, a split of the sum), or run it beside other work, "
        "on a second stream",
    )


def _tail(subject: Subject) -> Finding | None:
    count, fill, fits = waves(subject), tail_fill(subject), achieved(subject)
    if count is None or fill is None or fits is None or not 1 < count <= _MOST_WAVES_WITH_TAIL or fill >= 0.5:
        return None
    capacity = fits.blocks_per_sm * subject.sm_count
    return _finding(
        subject,
        "tail",
        _LOCKSTEP * (1 - count / math.ceil(count)),
        f"{_count(subject.group.blocks, 'block')} are {count:.2f} waves of {capacity}: "
        f"the last wave fills {_percent(fill)} of the device",
        f"launch at most {math.floor(count) * capacity} blocks and let each loop over its share (a grid-stride loop), "
        "or make blocks smaller, so that the last wave weighs less",
    )


def _spills(subject: Subject) -> Finding | None:
    group = subject.group
    if group.local_bytes < _SPILL_BYTES:
        return None
    many = group.local_bytes >= _MANY_SPILL_BYTES or group.registers >= _MAX_REGISTERS
    remedy = (
        "it has all the registers there are: smaller tiles or more threads for the same work"
        if group.registers >= _MAX_REGISTERS
        else "allow it more registers (__launch_bounds__, -maxrregcount, Numba's max_registers), index by constants"
    )
    return _finding(
        subject,
        "local_memory",
        _MANY_SPILL_GAIN if many else _SPILL_GAIN,
        f"{group.local_bytes} bytes of local memory a thread at {_count(group.registers, 'register')}: spills, "
        "or arrays indexed at run time, go through L1 and to memory",
        remedy,
    )


def _against_prediction(subjects: Sequence[Subject]) -> list[tuple[float, Subject]]:
    """The ratios of the libraries' kernels' times to their predictions, the least first.

    By the median of a kernel's launches, so that neither warm-up nor an interruption counts. Without the user's own
    kernels, of which the model knows too little, and without kernels that ran beside other launches.
    """
    found = []
    for subject in subjects:
        group = subject.group
        if group.kind != "kernel" or subject.origin.changeable or group.timed < _SLOW_LAUNCHES:
            continue
        if 2 * group.overlapped > group.launches or group.typical_ns is None:
            continue
        if group.predicted_ns is not None and group.predicted_ns >= _FLOOR_NS:
            found.append((group.typical_ns / group.predicted_ns, subject))
    return sorted(found, key=lambda pair: pair[0])


def _affected(stakes: Sequence[tuple[Group, int]], name_of: Callable[[str], str]) -> tuple[Affected, ...]:
    """The kernels under a finding on the program, by function, those with the most time at stake first."""
    by_function: dict[str, tuple[int, int]] = {}
    for group, stake in stakes:
        launches, before = by_function.get(group.function, (0, 0))
        by_function[group.function] = launches + group.launches, before + stake
    return tuple(
        Affected(name=name_of(function), launches=launches, time_at_stake_ns=stake)
        for function, (launches, stake) in sorted(by_function.items(), key=lambda item: (-item[1][1], item[0]))
    )


def slower_than_predicted(subjects: Sequence[Subject], name_of: Callable[[str], str]) -> Finding | None:
    """A run that takes far longer than such launches took where the model was trained: one finding on the program.

    A slow GPU slows all kernels. A single kernel that takes longer than predicted shows only a gap of the model, which
    has not seen all shapes (`unknown_to_the_model`).

    Args:
        subjects: All kernels of the run.
        name_of: From the driver's name of a kernel to a report's.
    """
    against = _against_prediction(subjects)
    if len(against) < _SLOW_KERNELS:
        return None
    times = against[len(against) // 4][0]
    if times < _SLOW_RUN:
        return None
    gain = _TRADED * (1 - 1 / times)
    slow = [subject.group for ratio, subject in against if ratio >= _SLOW_RUN]
    return Finding(
        rule="slower_than_predicted",
        level=level_of(gain, None),
        reason=f"three quarters of {len(against)} library kernels take {times:.1f} times as long as predicted and more",
        recommendation="look at the clocks and the power limit while it runs (nvidia-smi -q -d CLOCK,PERFORMANCE), and "
        "at other programs on the GPU",
        expected_gain=round(gain, 3),
        time_at_stake_ns=round(gain * sum(subject.group.time_ns or 0 for subject in subjects)),
        shown="slower_than_predicted" in SHOWN,
        kernels=_affected([(group, round((group.time_ns or 0) * gain)) for group in slow], name_of),
    )


def unknown_to_the_model(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """A note on kernels whose prediction is no measure, because the others match theirs; else nothing."""
    against = _against_prediction(subjects)
    slow = [subject for times, subject in against if times >= _SLOW]
    share = sum(subject.share or 0.0 for subject in slow)
    if len(against) < _SLOW_KERNELS or against[len(against) // 4][0] >= _SLOW_RUN or share < CRITICAL_SHARE:
        return ()
    takes = "takes" if len(slow) == 1 else "take"
    return (
        f"{_count(len(slow), 'library kernel')} ({_percent(share)} of the time) {takes} twice as long as predicted and "
        "more, the others do not: the model does not know such shapes, or their operands are laid out badly",
    )


def _idle_at_stake(group: Group) -> int:
    """Idle time before many launches that are shorter than that time; else 0. Of library kernels too."""
    each = group.mean_ns
    if each is None or group.idle_before_ns is None or group.launches < _TINY_LAUNCHES or each >= _TINY_NS:
        return 0
    if group.idle_before_ns / group.timed <= max(each, _BACK_TO_BACK_NS):
        return 0
    return group.idle_before_ns - _BACK_TO_BACK_NS * group.timed


def tiny_launches(subjects: Sequence[Subject], name_of: Callable[[str], str]) -> Finding | None:
    """Many launches, each shorter than the pause before it: one finding on the program, which makes the launches.

    Args:
        subjects: All kernels of the run.
        name_of: From the driver's name of a kernel to a report's.
    """
    at_stake = [
        (subject.group, _idle_at_stake(subject.group)) for subject in subjects if subject.group.kind == "kernel"
    ]
    tiny = [(group, stake) for group, stake in at_stake if stake > 0]
    busy = sum(subject.group.duration_ns for subject in subjects)
    idle = sum(subject.group.idle_before_ns or 0 for subject in subjects)
    stake = sum(stake for _, stake in tiny)
    if not tiny or busy + idle <= 0 or stake / (busy + idle) < WARNING_GAIN:
        return None
    kernels = _affected(tiny, name_of)
    launches = sum(group.launches for group, _ in tiny)
    each = sum(group.duration_ns for group, _ in tiny) / sum(group.timed for group, _ in tiny)
    pause = sum(group.idle_before_ns or 0 for group, _ in tiny) / sum(group.timed for group, _ in tiny)
    gain = stake / (busy + idle)
    return Finding(
        rule="tiny_launches",
        level=level_of(gain, None),
        reason=f"{launches} launches of {_count(len(kernels), 'kernel')} take {_microseconds(each)} each, "
        f"and the device is idle for {_microseconds(pause)} before each",
        recommendation=f"launch less often: {_LESS_OFTEN}",
        expected_gain=round(gain, 3),
        time_at_stake_ns=stake,
        shown="tiny_launches" in SHOWN,
        kernels=kernels,
    )


Rule = Callable[[Subject], "Finding | None"]

KERNEL_RULES: tuple[Rule, ...] = (_partial_warp, _low_occupancy, _small_grid, _tail, _spills)
"""On the launch shape and resources; only for kernels whose shape the user can change."""


def find(subject: Subject) -> tuple[Finding, ...]:
    """The findings on a kernel, the most time at stake first.

    None on kernels that the user cannot change, nor on graphs: one row holds many kernels.
    """
    if subject.group.kind != "kernel" or not subject.origin.changeable:
        return ()
    found = [finding for finding in (rule(subject) for rule in KERNEL_RULES) if finding is not None]
    return tuple(sorted(found, key=lambda finding: (-(finding.time_at_stake_ns or 0), -finding.expected_gain)))


def level(subject: Subject, findings: Sequence[Finding]) -> Level:
    """A kernel's level: its worst finding's; without one, good only if the rules on launch shapes apply."""
    if findings:
        return min((finding.level for finding in findings), key=LEVELS.index)
    return "good" if subject.origin.changeable else "not judged"


def launch_bound(launches: int, short: int, busy_ns: int, idle_ns: int, interval_ns: float | None) -> Finding | None:
    """Whether the host cannot launch as fast as the device runs.

    Args:
        launches: Timed ones.
        short: How many of them are shorter than the interval.
        busy_ns: Of the device.
        idle_ns: Of the device between launches, pauses of the program left out.
        interval_ns: From one launch call to the next.
    """
    if launches < _BOUND_LAUNCHES or interval_ns is None or busy_ns + idle_ns <= 0:
        return None
    idle = idle_ns / (busy_ns + idle_ns)
    if idle < _BOUND_IDLE or short < _BOUND_SHORT * launches:
        return None
    stake = max(0, idle_ns - _BACK_TO_BACK_NS * launches)
    gain = stake / (busy_ns + idle_ns)
    if gain < WARNING_GAIN:
        return None
    return Finding(
        rule="launch_bound",
        level=level_of(gain, None),
        reason=f"{_percent(short / launches)} of {launches} launches are shorter than the {_microseconds(interval_ns)} "
        f"from one launch to the next, and the device stands idle {_percent(idle)} of the time between",
        recommendation=f"the host is the limit: {_LESS_OFTEN}, or less Python between launches",
        expected_gain=round(gain, 3),
        time_at_stake_ns=stake,
        shown="launch_bound" in SHOWN,
    )
