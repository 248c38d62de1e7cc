"""The pool on a real driver, alone and as best-effort work; tests/python/test_memory_pool.py is the twin."""

from __future__ import annotations

import pytest
from conftest import Start, finish


@pytest.mark.parametrize("client_class", ["", "best-effort"])
@pytest.mark.parametrize("what", ["scattered", "torch", "graph"])
def test_a_pool_serves_a_program(what: str, client_class: str, start: Start) -> None:
    process = start("memory_pool.py", what, client_class=client_class)
    assert finish(process).splitlines()[-1].startswith("done")
