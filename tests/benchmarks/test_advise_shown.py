"""The cases that advice is shown on: rules fire for what they are made of, and the benchmark's rows. No GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cudasched.errors import Error

from benchmarks.advise import benchmark as shown
from benchmarks.advise.cases import SOURCE, Case, Version, cases
from benchmarks.lab.run import meta, run
from benchmarks.results.schema import RESULTS, load

pa = pytest.importorskip("pyarrow", reason="advice reads recordings with pyarrow")

#: Rules of whole programs, of which the kernels' own facts say nothing.
OF_PROGRAMS = ("tiny_launches", "launch_bound")


def facts_of(case: Case, version: Version) -> dict[str, int]:
    """Registers and local memory of a version's kernel, as the compiler tells them."""
    from cudasched.tune import compile as compiling

    try:
        compiling.choose("nvcc")
    except Error as error:
        pytest.skip(str(error))
    log = compiling.compile_source(SOURCE, version.macros, "sm_90", "nvcc", ["-Xptxas=-v"]).log
    part = log[log.index(f"Compiling entry function '{case.kernel}'") :]
    registers = re.search(r"Used (\d+) registers", part)
    stack = re.search(r"(\d+) bytes stack frame", part)
    assert registers and stack, part
    return {"registers": int(registers[1]), "local_bytes": int(stack[1])}


def advised(case: Case, version: Version) -> set[str]:
    """The rules that fire for a version, from what its launches are and half a millisecond each."""
    from cudasched.advise import advise
    from cudasched.advise.occupancy import ARCHITECTURES, occupancy
    from test_advise import launch, recording

    facts = facts_of(case, version)
    table = ARCHITECTURES["9.0"]
    fits = occupancy(table, version.threads, facts["registers"], version.shared_bytes)
    row = launch(
        grid=(version.blocks, 1, 1),
        block=(version.threads, 1, 1),
        function=case.kernel,
        dynamic_shared_bytes=version.shared_bytes,
        blocks_per_sm=fits.blocks_per_sm,
        duration_ns=500_000,
        **facts,
    )
    (kernel,) = advise(recording([row])).kernels
    return {finding.rule for finding in kernel.findings}


@pytest.mark.parametrize("case", [case for case in cases() if case.rule not in OF_PROGRAMS], ids=lambda case: case.rule)
def test_a_rule_fires_for_its_kernel_before_and_not_after(case: Case) -> None:
    assert shown.why_not_shown(case.rule, advised(case, case.before), advised(case, case.after)) == ""


@pytest.mark.parametrize("case", [case for case in cases() if case.rule in OF_PROGRAMS], ids=lambda case: case.rule)
def test_many_short_launches_are_advised_against_and_few_long_ones_are_not(case: Case) -> None:
    from cudasched.advise import advise
    from test_advise import launch, recording

    def rules(version: Version, each_ns: int) -> set[str]:
        rows = [
            launch(
                grid=(version.blocks, 1, 1),
                block=(version.threads, 1, 1),
                function=case.kernel,
                launch=number,
                submitted_ns=number * (each_ns + 8_000),
                start_ns=number * (each_ns + 8_000) + 4_000,
                duration_ns=each_ns,
            )
            for number in range(min(version.launches, 400))
        ]
        return shown.rules_of(json.loads(advise(recording(rows)).model_dump_json()))

    assert case.rule in rules(case.before, 2_000)
    assert case.rule not in rules(case.after, 200_000)


def test_every_rule_but_one_has_a_case() -> None:
    document = (Path(__file__).parents[2] / "docs/advise.md").read_text()
    findings = document[document.index("## Findings") :].split("\n## ")[0]
    rules = set(re.findall(r"^\| `(\w+)`", findings, re.MULTILINE))
    assert {"slower_than_predicted"} == rules - {case.rule for case in cases()}
    assert rules > {case.rule for case in cases()}


def test_both_versions_do_the_same_work() -> None:
    def steps(version: Version) -> int:
        held = int(dict(version.macros).get("HELD", 8))
        per_value = version.rounds * (held if version.shared_bytes or version.macros else 1)
        return version.launches * per_value

    for case in cases():
        before, after = case.before, case.after
        assert before.count == after.count
        assert steps(before) == steps(after), case.rule


def test_what_speaks_against_a_case_is_said() -> None:
    assert shown.why_not_shown("tail", {"tail", "local_memory"}, set()) == ""
    assert shown.why_not_shown("tail", {"local_memory"}, set()) == "the rule does not fire before (local_memory)"
    assert shown.why_not_shown("tail", {"tail"}, {"tail"}) == "the rule fires after, too"


def test_the_benchmark_keeps_rows_of_rules_that_were_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"before": [2.0, 4.0, 2.0], "after": [1.0, 2.2, 1.0]}
    monkeypatch.setattr(shown, "timed", lambda case, _: times if case.rule != "tail" else {**times, "after": [2.1] * 3})
    monkeypatch.setattr(shown, "fired", lambda case, version, timing: {case.rule} if version == "before" else set())
    monkeypatch.setattr(meta, "describe", lambda *_: load(RESULTS / "overhead.json").meta)
    out = tmp_path / "advise.json"
    assert run("advise", ["--out", str(out)]) == 0
    rows = {row.figure: row for row in load(out).figures}
    assert list(rows) == [case.rule for case in cases()]
    found = rows["block_size"]
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.5, pytest.approx(0.55), 3)
    assert found.met and found.limited_by == ""
    assert not rows["tail"].met and "2.000 ms before, 2.100 after" in rows["tail"].limited_by
    # One that does not fire any more is no row, and the others stay.
    monkeypatch.setattr(shown, "fired", lambda case, version, timing: set())
    assert run("advise", ["--out", str(out)]) == 1
    assert len(load(out).rows) == len(cases())


def test_what_is_called_shown_was_measured() -> None:
    from cudasched.advise import rules

    path = RESULTS / "advise.json"
    measured = {row.figure for row in load(path).figures if row.met} if path.exists() else set()
    assert measured >= rules.SHOWN
