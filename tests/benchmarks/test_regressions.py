"""The benchmark of regressions, rehearsed on the simulated driver, and what it makes of what was recorded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="baselines need SciPy")
pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

from benchmarks.lab.run import run
from benchmarks.lab.session import judged
from benchmarks.regressions import benchmark as regressions


@pytest.fixture(scope="module")
def measured(simulated_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One measurement of two processes of each kind; a rerun does nothing, and one of more what is missing."""
    out = tmp_path_factory.mktemp("measured") / "observe.json"
    options = ["--rehearse", "--out", str(out), "--only", "1", "--processes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDASCHED_COMMIT", "0" * 12)
        patch.setattr(regressions, "VICTIM_NAMES", regressions.VICTIM_NAMES | {"softmax": "none"})
        assert run("regressions", [*options, "1"]) == 0
        first = json.loads(out.with_suffix(".cells").read_text())["done"]
        assert run("regressions", [*options, "2"]) == 0
    done: dict[str, Any] = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert {key: done[key] for key in first} == first and not out.exists()
    return done


def test_a_rehearsal_records_each_process_once_and_goes_on_where_it_stopped(measured: dict[str, Any]) -> None:
    assert sorted(measured) == [f"1/sin/{arm} {number}" for arm in ("changed", "plain") for number in ("00", "01")]
    (one,) = regressions.measurements(measured)
    kernels = one.runs["plain"][0].runs[0].measured
    assert one.victim == "sin" and len(kernels) == 14
    assert set(regressions.VICTIMS) <= {kernel.name for kernel in kernels}


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_15sin_kernel_cudaERNS_18TensorIteratorBaseEENKUl",
            "sin",
        ),
        ("_ZN43_GLOBAL__N__00000000_10_SoftMax_cu_00000000_020softmax_warp_forwardIfffLi10ELb0ELb0EEEvPT0_", "softmax"),
        ("_ZN2at6native12_GLOBAL__N_119cunn_SoftMaxForwardILi4EfffNS1_22SoftMaxForwardEpilogueEEEvPT2_", "softmax"),
        ("_ZN2at6native12_GLOBAL__N_128vectorized_layer_norm_kernelIffLb0EEEviT0_PKT_", "layer_norm"),
        ("_ZN2at6native12_GLOBAL__N_126LayerNormForwardCUDAKernelIfEEvl", "layer_norm"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_16asin_kernel_cudaERNS_18TensorIteratorBaseE", ""),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_16tanh_kernel_cudaERNS_18TensorIteratorBaseE", ""),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", ""),
    ],
)
def test_a_victim_is_known_by_pytorchs_names(name: str, victim: str) -> None:
    assert [each for each in regressions.VICTIMS if regressions.is_victim(name, each)] == ([victim] if victim else [])


def many(measured: dict[str, Any], shift: float) -> dict[str, Any]:
    """Three measurements of eight processes of each kind, each a little different from the recorded ones."""
    done = {}
    for number, victim in enumerate(regressions.VICTIMS, 1):
        for arm in regressions.ARMS:
            for process in range(8):
                one = copy.deepcopy(measured["1/sin/plain 00"])
                for place, each in enumerate(one["runs"][0]["measured"]):
                    each["each_ns"] *= 1 + 0.0005 * ((process * 7 + place * 3 + number) % 8)
                    if arm == regressions.CHANGED and each["name"] == victim:
                        each["each_ns"] *= 1 + shift
                done[f"{number}/{victim}/{arm} {process:02d}"] = one
    return done


def test_figures_are_of_all_ordered_pairs(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = regressions.find(many(measured, 0.05), 5, 3)
    rows = judged(regressions.BENCHMARK.goals, found, {})
    assert [(row.figure, row.value, row.n, row.met) for row in rows] == [
        ("regressions_found", 1.0, 48, True),
        ("false_alarms", 0.0, 48, True),
    ]
    said = capsys.readouterr().out
    assert "over 9 ordered pairs of measurements, 27 checks" in said
    assert "over 6 ordered pairs of measurements, 18 checks" in said, "8 processes make no two groups of 5"


def test_what_is_not_found_is_a_missed_goal(measured: dict[str, Any]) -> None:
    found = regressions.find(many(measured, 0.001), 5, 2)
    (row, _) = judged(regressions.BENCHMARK.goals, found, regressions.BENCHMARK.limits)
    assert row.value == 0 and not row.met and "runs a side" in row.limited_by


def test_what_cannot_be_evaluated_is_said(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert regressions.find(measured) == {}
    assert "1 measurements, and it takes 3" in capsys.readouterr().out
    assert regressions.find(many(measured, 0.05), 9, 3) == {}
    assert "9 runs a side: too few processes" in capsys.readouterr().out
