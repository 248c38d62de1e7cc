"""`sm_fraction` on the real driver: kernels stay on their SMs, in order, and compute what they compute elsewhere."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import Start, finish


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy, which compiles the kernel that looks")
def test_a_region_stays_on_its_part_of_the_sms(start: Start) -> None:
    output = finish(start("partition.py"))
    print(output)
    assert output.splitlines()[-1] == "done"
