"""The outlook of a kernel's launch before the run, beside its time: how full the GPU will be, and advice.

By the rules of `cudasched.advise`, from the trace's data on the launch: its shape, the kernel's resources, the GPU.
Made once for each kernel, shape and GPU when the trace is converted, never while a program runs.
"""

from __future__ import annotations

from dataclasses import replace

from cudasched.advise import rules
from cudasched.advise.occupancy import ARCHITECTURES, WARP_THREADS
from cudasched.advise.origins import origin_of
from cudasched.advise.profile import Group
from cudasched.observe.trace._file import ProcessTrace, Shape

__all__ = ["Outlooks"]

Args = list[tuple[str, object]]


class Outlooks:
    """Of the launches of one process."""

    def __init__(self, trace: ProcessTrace) -> None:
        self._trace = trace
        self._known: dict[tuple[int, int], tuple[Args, rules.Subject | None]] = {}
        self._advised: dict[tuple[int, int, int], Args] = {}

    def args(self, what: int, device: int, each_ns: int) -> Args:
        """The arguments of a launch's slice; empty where the trace has no shape.

        Args:
            what: The record's field: the kernel's number and, above, the shape's.
            device: Ordinal.
            each_ns: The launch's time, predicted or measured; 0: not known. A finding's weight depends on the time:
                without one a level is given only where there is no finding at all.
        """
        found = self._known.get((what, device))
        if found is None:
            found = self._known[what, device] = self._outlook(what, device)
        args, subject = found
        if subject is None or each_ns <= 0:
            return args
        # Corrections change predictions. Two digits of the time are enough to judge by.
        unit = 10 ** max(0, len(str(each_ns)) - 2)
        key = what, device, each_ns // unit * unit
        advised = self._advised.get(key)
        if advised is None:
            timed = replace(subject, group=replace(subject.group, predicted_ns=float(key[2])))
            advised = self._advised[key] = args + _recommendation(timed)
        return advised

    def _outlook(self, what: int, device: int) -> tuple[Args, rules.Subject | None]:
        """The part that does not depend on the time; and the launch, if the recommendation does."""
        shape = self._trace.shapes.get(what >> 32)
        if shape is None:
            return [], None
        subject = self._subject(what & 0xFFFFFFFF, shape, device)
        args: Args = [("grid", "x".join(map(str, shape.grid))), ("block", "x".join(map(str, shape.block)))]
        fits = rules.achieved(subject)
        for name, value in (
            ("occupancy", fits.fraction if fits is not None else None),
            ("waves", rules.waves(subject)),
            ("sm_utilisation", rules.sm_utilisation(subject)),
            ("block_efficiency", rules.block_efficiency(subject)),
        ):
            if value is not None:
                args.append((name, round(value, 4)))
        if rules.find(subject):
            return args, subject
        return args + _recommendation(subject), None

    def _subject(self, kernel: int, shape: Shape, device: int) -> rules.Subject:
        name, resources = self._trace.kernels.get(kernel, ""), self._trace.resources.get(kernel)
        gpu = self._trace.devices.get(device)
        architecture = ARCHITECTURES.get(gpu.compute_capability) if gpu is not None and resources is not None else None
        return rules.Subject(
            group=Group(
                kind="kernel",
                function=name,
                graph=0,
                grid=shape.grid,
                block=shape.block,
                cluster=shape.cluster,
                dynamic_shared_bytes=shape.dynamic_shared_bytes,
                static_shared_bytes=resources.static_shared_bytes if resources is not None else 0,
                local_bytes=resources.local_bytes if resources is not None else 0,
                registers=resources.registers if resources is not None else 0,
                max_threads=resources.max_threads if resources is not None else 0,
                blocks_per_sm=0,
                launches=1,
                timed=0,
                overlapped=0,
                duration_ns=0,
                predicted_ns=None,
                idle_before_ns=None,
            ),
            origin=origin_of(name, self._trace.modules.get(kernel, "")),
            sm_count=gpu.sm_count if gpu is not None else 0,
            max_warps_per_sm=gpu.max_threads_per_sm // WARP_THREADS if gpu is not None else 0,
            architecture=architecture,
            share=None,
        )


def _recommendation(subject: rules.Subject) -> Args:
    """The level, and the rule that has it, if one has."""
    findings = rules.find(subject)
    level = rules.level(subject, findings)
    args: Args = [("recommendation", level)]
    if findings:
        args.append(("rule", next(found.rule for found in findings if found.level == level)))
    return args
