"""Regions' streams on the real allocator and with real PyTorch programs (tests/python/test_torch_streams.py is its twin
without a GPU)."""

from __future__ import annotations

import re

import pytest
from conftest import Start, finish, run_program


def wrong(output: str) -> int:
    found = re.search(r"^programs \d+ wrong (\d+)$", output, re.MULTILINE)
    assert found, output
    return int(found[1])


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
@pytest.mark.parametrize("graphs", [[], ["--graphs"]], ids=["plain", "graphs"])
def test_random_programs_keep_their_contents(
    segments: str, graphs: list[str], monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    output = run_program("torch_regions.py", "random", "--programs", "125", *graphs)
    assert wrong(output) == 0, output


@pytest.mark.parametrize("rule", ["order", "default", "keep", "handover"])
def test_a_rule_that_is_removed_is_missed(rule: str) -> None:
    # It ends with the first that is wrong. Kernels are long: a slow host outlasts shorter ones, and then nothing shows.
    long = ["--cycles", "4000000"]
    assert wrong(run_program("torch_regions.py", "random", "--programs", "500", *long, "--without", rule)) > 0


@pytest.mark.parametrize("what", ["bits", "apart", "weights"])
def test_what_programs_do_in_regions(what: str, start: Start) -> None:
    assert finish(start("torch_regions.py", what)).splitlines()[-1] == "done"


def test_uses_that_nothing_orders_are_named_and_no_others(start: Start) -> None:
    process = start("torch_regions.py", "checked", settings={"CUDASCHED_CHECK_STREAMS": "1"})
    assert finish(process).splitlines()[-1] == "done"
