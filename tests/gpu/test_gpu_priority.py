"""Kernel-node priorities on the real driver: what the simulated one was told of them is so."""

from __future__ import annotations

from conftest import Start, finish


def test_graphs_of_regions_have_their_priority_and_nobody_notices(start: Start) -> None:
    assert finish(start("node_priority.py")).splitlines()[-1] == "done"
