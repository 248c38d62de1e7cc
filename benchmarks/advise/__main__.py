"""Whether each rule of advice helps: its kernel before and after, on a GPU.

    python -m benchmarks.advise --out benchmarks/results/advise.json

Takes about two minutes. For each case (cases.py) `cudasched advise` records both versions: the rule has to fire for
the first and not for the second. Then both are timed in turn, unrecorded, by events. A row a rule: what the second
takes of the first, of which 0.95 and less means that the advice helped; what `cudasched advise` calls shown is what has
such a row (python/cudasched/advise/rules.py). Without pyarrow nothing is recorded, and that rules fire is left to
tests/benchmarks/test_advise_shown.py, which needs no GPU. `slower_than_predicted` has no case: it says that
something is wrong, not what.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import meta
from benchmarks.advise.cases import Case, cases
from benchmarks.results.schema import FigureRow, merge_figures

GOAL = 0.95
TIMES = 15
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
        RuntimeError: It could not be recorded.
    """
    with tempfile.TemporaryDirectory(prefix="cudasched-advise-") as scratch:
        report = Path(scratch) / "report.json"
        program = [*PROGRAM, "--case", case.rule, "--version", version]
        command = [*ADVISE, "--timing", timing, "-o", str(report), "--", *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode != 0 or not report.exists():
            raise RuntimeError((done.stderr or done.stdout)[-500:].strip() or f"ended with {done.returncode}")
        return rules_of(json.loads(report.read_text()))


def why_not_shown(rule: str, before: set[str], after: set[str]) -> str:
    """What speaks against a case; empty: the rule fires for the first version alone."""
    if rule not in before:
        return f"the rule does not fire before ({', '.join(sorted(before)) or 'no other does'})"
    return "the rule fires after, too" if rule in after else ""


def row(rule: str, before_ms: Sequence[float], after_ms: Sequence[float]) -> FigureRow:
    """What the second version takes of the first."""
    pairs = [after / before for before, after in zip(before_ms, after_ms, strict=True)]
    value = statistics.median(pairs)
    why = (
        ""
        if value <= GOAL
        else f"{statistics.median(before_ms):.3f} ms before, {statistics.median(after_ms):.3f} after"
    )
    return FigureRow(
        figure=rule,
        value=value,
        goal=GOAL,
        better="less",
        low=min(pairs),
        high=max(pairs),
        n=len(pairs),
        limited_by=why,
    )


def timed(times: int) -> dict[str, dict[str, list[float]]]:
    """What all cases take, in ms, before and after.

    Raises:
        RuntimeError: They could not be run.
    """
    done = subprocess.run(
        [*PROGRAM, "--time", str(times)], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout)[-800:].strip())
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])["ms"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results")
    parser.add_argument("--times", type=int, default=TIMES, help="that each version is timed (15)")
    parser.add_argument("--timing", default="cupti", choices=("cupti", "events"), help="of the recordings")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(arguments)
    rows = []
    status = 0
    try:
        measured = timed(options.times)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"advise: {error}", file=sys.stderr)
        return 1
    can_record = importlib.util.find_spec("pyarrow") is not None
    if not can_record:
        print("pyarrow is not installed: that the rules fire is not looked at here")
    for case in cases():
        each = measured[case.rule]
        found = row(case.rule, each["before"], each["after"])
        against = ""
        try:
            if can_record:
                against = why_not_shown(case.rule, *(fired(case, name, options.timing) for name in ("before", "after")))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            against = f"it was not recorded: {str(error).splitlines()[-1]}"
        print(f"{case.rule:16} {found.value:6.3f} of the time before {against or found.limited_by}", flush=True)
        if against:
            status = 1
        else:
            rows.append(found)
    if rows:
        merge_figures(options.out, meta.describe(simulated=False, commit=options.commit, torch_needed=False), rows)
    return status


if __name__ == "__main__":
    sys.exit(main())
