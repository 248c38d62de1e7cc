"""Long copies in pieces on the real driver; tests/csrc/runtime/test_copies.cpp is the twin."""

from __future__ import annotations

import re

import pytest
from conftest import PATIENCE_S, Start, line_of


@pytest.mark.parametrize(("beside", "slices"), [(False, "auto"), (True, "auto"), (True, "off")])
def test_copies_have_the_same_bits_in_pieces_and_whole(beside: bool, slices: str, start: Start) -> None:
    copies = start("copies.py", client_class="best-effort", options=("--time-slice-us", slices))
    line_of(copies, "ready")
    if beside:
        line_of(start("server.py", "100000", client_class="latency"), "ready")
    output = copies.communicate("\n", timeout=PATIENCE_S)[0]
    assert copies.returncode == 0 and output.splitlines()[-1] == "done", output
    found = re.search(r"^pieces (\d+)$", output, re.MULTILINE)
    assert found, output
    print(f"pieces of 100 copies: {found[1]}")
    assert int(found[1]) > 200 if beside and slices == "off" else found[1] == "0"
