"""What events add is rehearsed on the simulated driver; CUPTI has no part in that."""

from __future__ import annotations

import re

import pytest

from benchmarks.predictor import events


@pytest.mark.usefixtures("simulated_driver")
def test_both_cases_are_timed(capsys):
    assert events.main(["--simulate", "--samples", "40"]) == 0
    said = capsys.readouterr().out
    for case in events.CASES:
        assert len(re.findall(rf"^  {case}: events add -?\d+ ns .*; 40 launches\)$", said, re.M)) == len(
            events.WAITS_NS
        )
    assert "the least difference" in said


def test_what_events_add_is_said_as_median_and_spread(capsys):
    events.say("queued", [22_700.0] * 50 + [22_500.0] * 25 + [23_300.0] * 25, 20_000.0)
    assert capsys.readouterr().out == "queued: events add 2700 ns (2500 to 3300; 100 launches)\n"


def test_a_program_that_fails_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(events, "SOURCE", tmp_path / "none.c")
    assert events.main(["--simulate"]) == 1
    assert "does not compile" in capsys.readouterr().err
