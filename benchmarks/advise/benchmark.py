"""Whether each rule of advice helps: its kernel before and after, on a GPU; about two minutes.

For each case (cases.py) `cudasched advise` records both versions: the rule has to fire for the first and not for the
second. Then both are timed in turn, unrecorded, by events. A figure a rule: what the second takes of the first; 0.95
and less means that the advice helped. What `cudasched advise` calls shown is what has such a row
(python/cudasched/advise/rules.py). Without pyarrow nothing is recorded, and that rules fire is left to
tests/benchmarks/test_advise_shown.py, which needs no GPU. `slower_than_predicted` has no case: it says that something
is wrong, not what.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HarnessError

from benchmarks.advise.cases import Case, cases
from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, median_of

PATIENCE_S = 120.0
PROGRAM = (sys.executable, "-m", "benchmarks.advise.program")
ADVISE = (sys.executable, "-m", "cudasched", "advise")


def rules_of(report: dict[str, Any]) -> set[str]:
    """The rules that a report has findings of."""
    kernels = [finding for kernel in report["kernels"] for finding in kernel["findings"]]
    return {finding["rule"] for finding in (*kernels, *report["program"])}


def fired(case: Case, version: str, timing: str) -> set[str]:
    """The rules that fire for one version of a case.

    Raises:
        HarnessError: It could not be recorded.
    """
    with tempfile.TemporaryDirectory(prefix="cudasched-advise-") as scratch:
        report = Path(scratch) / "report.json"
        program = [*PROGRAM, "--case", case.rule, "--version", version]
        command = [*ADVISE, "--timing", timing, "-o", str(report), "--", *program]
        output_of(f"{case.rule} {version}", command, timeout_s=PATIENCE_S)
        return rules_of(json.loads(report.read_text()))


def why_not_shown(rule: str, before: set[str], after: set[str]) -> str:
    """What speaks against a case; empty: the rule fires for the first version alone."""
    if rule not in before:
        return f"the rule does not fire before ({', '.join(sorted(before)) or 'no other does'})"
    return "the rule fires after, too" if rule in after else ""


def timed(case: Case, times: int) -> dict[str, list[float]]:
    """What a case takes, in ms, before and after.

    Raises:
        HarnessError: It could not be run.
    """
    command = [*PROGRAM, "--case", case.rule, "--time", str(times)]
    said = output_of(case.rule, command, timeout_s=PATIENCE_S)
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return found


def measure(session: Session, case: Case) -> Found:
    """A rule's figure.

    Raises:
        HarnessError: The rule is not shown by its case.
    """
    each = timed(case, session.options.times)
    if importlib.util.find_spec("pyarrow") is None:
        session.say("pyarrow is not installed: that the rule fires is not looked at here")
    elif why := why_not_shown(case.rule, *(fired(case, name, session.options.timing) for name in ("before", "after"))):
        raise HarnessError(why)
    pairs = [after / before for before, after in zip(each["before"], each["after"], strict=True)]
    before_ms, after_ms = (statistics.median(each[name]) for name in ("before", "after"))
    session.limits[case.rule] = f"{before_ms:.3f} ms before, {after_ms:.3f} after"
    return {case.rule: median_of(pairs)}


BENCHMARK = Benchmark(
    about="each rule of `cudasched advise` on a kernel, before and after",
    groups={case.rule: partial(measure, case=case) for case in cases()},
    goals={case.rule: (0.95, "less") for case in cases()},
    settings={"times": 15, "timing": "cupti"},
    torch=False,
)
