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

from benchmarks.decode import benchmark
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
    part = {"alone_ms": [2.0] * 100, "token_ms": [2.0 * factor] * 50, "training_alone": 10.0, "training": 6.0}
    part |= {"steps": 100, "seconds": 4.0}
    slower = {**part, "training": 3.0}
    arms = {f"{arm}/0": slower if arm == "cudasched" else part for arm in ARMS}
    return {"engines": {"step_s": 0.01, "same": [same]}, **arms, "time_slices/1": part}


def test_figures_are_over_what_was_alone_and_over_the_time_that_is_left() -> None:
    found = find(kept(1.2))
    assert found["vllm_tpot_p99_ratio"] == pytest.approx((1.2, 1.2, 1.2, 50)), "of repeats that all arms have"
    assert found["vllm_tpot_p50_ratio"][0] == pytest.approx(1.2)
    assert found["vllm_training_share"][0] == pytest.approx(0.4) and found["vllm_asleep_differs"][0] == 0
    assert found["vllm_training_of_time_slices"][0] == pytest.approx(0.5)
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


def test_a_rehearsal_has_all_arms_and_measures_none_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "inference.json"
    assert run("vllm", ["--rehearse", "--out", str(out)]) == 0
    made = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert set(made) == {"engines", *(f"{arm}/0" for arm in ARMS)}
    assert made["engines"]["step_s"] > 0 and made["engines"]["same"] == [True, True]
    assert all(made[f"{arm}/0"]["alone_ms"] and made[f"{arm}/0"]["token_ms"] for arm in ARMS)
    assert all(made[f"{arm}/0"]["training"] > 0 and made[f"{arm}/0"]["steps"] > 0 for arm in ARMS)
    monkeypatch.setattr(benchmark, "built", pytest.fail)  # nothing starts
    assert run("vllm", ["--rehearse", "--out", str(out)]) == 0
