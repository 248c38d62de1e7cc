"""vLLM beside a training: figures, requests that come at random, and a rehearsal."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cudasched.demo.arrivals import schedule

from benchmarks.decode.benchmark import ARMS, BENCHMARK, ENGINE, find
from benchmarks.lab.run import run


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The engine's program, which is run by path and not imported."""
    spec = importlib.util.spec_from_file_location("decode_engine", ENGINE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def kept(factor: float = 1.0, same: bool = True) -> dict[str, Any]:
    arm: dict[str, list[float]] = {"alone_ms": [2.0] * 100, "beside_ms": [2.0 * factor] * 50}
    arm |= {"alone_steps": [10.0], "beside_steps": [6.0], "left": [0.75]}
    return {"vllm": {"step_s": 0.01, "sleep": {"bare": {"same": same}}, **dict.fromkeys(ARMS, arm)}}


def test_figures_are_over_what_was_alone_and_over_the_time_that_is_left() -> None:
    found = find(kept(1.2))
    assert found["vllm_tpot_p99_ratio"] == pytest.approx((1.2, 1.2, 1.2, 50))
    assert found["vllm_training_share"][0] == pytest.approx(0.8) and found["vllm_asleep_differs"][0] == 0
    assert set(found) == set(BENCHMARK.goals)
    assert find(kept(same=False))["vllm_asleep_differs"][0] == 1 and find({}) == {}


def test_every_request_is_answered_and_timed_from_its_first_token(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    class Engine:
        """A step of 10 ms gives each request a token; three are an answer."""

        made: dict[int, int] = {}  # noqa: RUF012

        def add(self, number: int) -> None:
            self.made[number] = 0

        def step(self) -> list[tuple[int, int, bool]]:
            clock.now += 0.01
            found = [(number, made + 1, made == 2) for number, made in self.made.items()]
            self.made = {number: made for number, made, done in found if not done}
            return found

    clock = Clock()
    monkeypatch.setattr(program, "time", clock)
    found = program.serve(Engine(), schedule("poisson", rate_hz=50.0, seconds=2.0, seed=1))
    assert len(found["token_ms"]) == len(found["first_ms"]) > 60
    assert found["token_ms"] == pytest.approx([10.0] * len(found["token_ms"]))
    assert all(10 - 1e-6 <= each <= 20 + 1e-6 for each in found["first_ms"])
    assert len(program.serve(Engine(), [0.0])["token_ms"]) == 1


def test_a_rehearsal_has_all_arms(tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    assert run("vllm", ["--rehearse", "--out", str(out)]) == 0
    made = json.loads(out.with_suffix(".cells").read_text())["done"]["vllm"]
    assert all(made[arm]["alone_ms"] and made[arm]["beside_ms"] and made[arm]["beside_steps"][0] > 0 for arm in ARMS)
    assert made["step_s"] > 0 and all(0 < made[arm]["left"][0] < 1 for arm in ARMS)
    assert set(made["sleep"]) == {"bare", "latency"}
