"""The figures of `benchmarks run reach` that scripts print."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cudasched.demo.harness import HarnessError

from benchmarks.reach import benchmark as reach

SESSION: Any = SimpleNamespace()
SIZES = "localhost/base:latest   170 MB\nlocalhost/cudasched:demo          294.5 MB\nrequests 3\n"


@pytest.mark.parametrize(
    ("measure", "text", "found"),
    [
        (reach.image, SIZES, {"image_MB": 124.5, "image_demo_ok": 1.0}),
        (reach.roots, "==> a\n1 roots failed of: a b\n", {"roots_failed": 1.0}),
        (
            reach.arm64,
            "99% tests passed, 2 tests failed out of 900\nTotal Test time (real) = 329.53 sec\n",
            {"arm64_tests_failed": 2.0, "arm64_suite_s": 329.53},
        ),
        (
            reach.arm64,
            "100% tests passed out of 900\nTotal Test time (real) = 329.53 sec\n",
            {"arm64_tests_failed": 0.0, "arm64_suite_s": 329.53},
        ),
    ],
)
def test_figures_are_those_that_the_script_prints(
    measure: Any, text: str, found: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "said", lambda command: (text, 1.0))
    assert {name: value[0] for name, value in measure(SESSION).items()} == found
    monkeypatch.setattr(reach, "said", lambda command: ("nothing", 1.0))
    with pytest.raises(HarnessError, match="in 'nothing'"):
        measure(SESSION)


def test_a_script_that_fails_is_named() -> None:
    with pytest.raises(HarnessError, match="false: status 1"):
        reach.said(["false"])
