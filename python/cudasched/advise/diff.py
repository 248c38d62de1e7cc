"""The changes between two runs: two reports, kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass

from cudasched.advise.report import Function, Report
from cudasched.errors import Error

__all__ = ["Change", "diff"]


@dataclass(frozen=True)
class Change:
    """One kernel function in two runs.

    Attributes:
        function: The driver's name.
        name: Namespaces and name alone.
        before_ns: Device time of all its launches; None: not timed; 0: not launched.
        after_ns: The same in the second run.
        before_launches: How many.
        after_launches: How many in the second run.
    """

    function: str
    name: str
    before_ns: int | None
    after_ns: int | None
    before_launches: int
    after_launches: int

    @property
    def change_ns(self) -> int:
        """The increase of the time; below 0 a decrease. 0 where either run was not timed."""
        return 0 if self.before_ns is None or self.after_ns is None else self.after_ns - self.before_ns

    @property
    def each(self) -> float | None:
        """Time of one launch after / before; None where either is not known."""
        if not self.before_ns or not self.after_ns or not self.before_launches or not self.after_launches:
            return None
        return (self.after_ns / self.after_launches) / (self.before_ns / self.before_launches)


def diff(before: Report, after: Report) -> tuple[Change, ...]:
    """The kernels of two runs, those whose time changed most first. Graphs are told apart by number.

    Raises:
        Error: The runs were on different GPUs, whose times cannot be compared.
    """
    if before.gpu != after.gpu:
        raise Error(
            f"the reports are of different GPUs, {before.gpu or '?'} and {after.gpu or '?'}: record both on one"
        )

    def known(report: Report) -> dict[tuple[str, str], Function]:
        return {(one.function, one.name): one for one in report.functions}

    first, second = known(before), known(after)

    def change(key: tuple[str, str]) -> Change:
        one, other = first.get(key), second.get(key)
        return Change(
            function=key[0],
            name=key[1],
            before_ns=one.time_ns if one else 0,
            after_ns=other.time_ns if other else 0,
            before_launches=one.launches if one else 0,
            after_launches=other.launches if other else 0,
        )

    found = [change(key) for key in dict.fromkeys([*first, *second])]
    return tuple(sorted(found, key=lambda one: (-abs(one.change_ns), one.name, one.function)))
