"""Advice on recorded launches: grouping, rules, order, and what of it a report holds."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from cudasched.advise import Finding, Kernel, Report, advise, diff, html, rules
from cudasched.advise.peaks import arithmetic_of
from cudasched.advise.view import terminal
from cudasched.cli import advise as cli
from cudasched.errors import ConfigError, Error
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support import PATIENCE_S, Run

pa = pytest.importorskip("pyarrow", reason="advice reads recordings with pyarrow")

TEXT = pa.dictionary(pa.int32(), pa.string())
SHAPE = [(f"{what}_{axis}", pa.uint32()) for what in ("grid", "block", "cluster") for axis in "xyz"]
SCHEMA = pa.schema(
    [
        ("launch", pa.uint64()),
        ("pid", pa.uint32()),
        ("thread", pa.uint32()),
        ("device", pa.uint8()),
        ("stream", pa.uint32()),
        ("kind", TEXT),
        ("function", TEXT),
        ("identity", pa.uint64()),
        ("graph", pa.uint32()),
        *SHAPE,
        ("dynamic_shared_bytes", pa.uint32()),
        ("static_shared_bytes", pa.uint32()),
        ("local_bytes", pa.uint32()),
        ("registers", pa.uint16()),
        ("max_threads", pa.uint16()),
        ("blocks_per_sm", pa.uint16()),
        ("waves", pa.float32()),
        ("parameter_bytes", pa.uint32()),
        ("words", pa.list_(pa.uint32())),
        ("pointers", pa.list_(pa.uint16())),
        ("submitted_ns", pa.int64()),
        ("start_ns", pa.int64()),
        ("duration_ns", pa.int64()),
        ("overlapped", pa.bool_()),
        ("sm_clock_mhz", pa.uint16()),
        ("label", TEXT),
    ]
)
METADATA = {
    "schema": "1",
    "version": "0.1.0",
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "sm_count": "132",
    "driver_version": "13000",
    "timing": "cupti",
    "max_threads_per_sm": "2048",
    "command": '["python", "program.py"]',
}


def launch(
    grid: tuple[int, int, int] = (132 * 64, 1, 1),
    block: tuple[int, int, int] = (256, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    **values: Any,
) -> dict[str, Any]:
    """A row: a kernel of the user's with nothing wrong, but for what is said."""
    shape = {
        f"{what}_{axis}": size
        for what, sizes in (("grid", grid), ("block", block), ("cluster", cluster))
        for axis, size in zip("xyz", sizes, strict=True)
    }
    row = {name: 0 for name in SCHEMA.names} | {
        "kind": "kernel",
        "function": "own_kernel",
        "identity": 7,
        "registers": 32,
        "max_threads": 1024,
        "blocks_per_sm": 8,
        "words": [],
        "pointers": [],
        "start_ns": 0,
        "duration_ns": 100_000,
        "overlapped": False,
        "label": "",
    }
    return row | shape | values


def recording(rows: Sequence[dict[str, Any]], **metadata: str | None) -> Any:
    said = {f"cudasched.{key}": value for key, value in (METADATA | metadata).items() if value is not None}
    return pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(said))


def only(*rows: dict[str, Any], **metadata: str | None) -> Kernel:
    (kernel,) = advise(recording(rows, **metadata)).kernels
    return kernel


def finding(kernel: Kernel, rule: str) -> Finding:
    return next(found for found in kernel.findings if found.rule == rule)


def rules_of(kernel: Kernel) -> set[str]:
    return {found.rule for found in kernel.findings}


def test_a_kernel_with_nothing_wrong_is_good() -> None:
    kernel = only(launch())
    assert (kernel.level, kernel.findings, kernel.time_at_stake_ns) == ("good", (), 0)
    assert (kernel.occupancy, kernel.block_efficiency, kernel.sm_utilisation) == (1, 1, 1)
    assert (kernel.waves, kernel.tail_fill) == (8, 1)
    assert (kernel.origin, kernel.changeable) == ("own", True)
    assert set(kernel.limited_by) == {"warps", "registers"}


def test_launches_are_put_together_by_function_and_shape() -> None:
    rows = [
        launch(duration_ns=10_000),
        launch(duration_ns=30_000, overlapped=True),
        launch(grid=(64, 1, 1)),
        launch(block=(128, 2, 1)),
        launch(dynamic_shared_bytes=64),
        launch(cluster=(2, 1, 1)),
        launch(function="other"),
    ]
    report = advise(recording(rows))
    assert len(report.kernels) == 6
    (both,) = [kernel for kernel in report.kernels if kernel.launches == 2]
    assert (both.time_ns, both.mean_ns, both.overlapped_launches) == (40_000, 20_000, 1)
    assert report.launches == report.timed_launches == 7
    assert sum(kernel.share or 0 for kernel in report.kernels) == pytest.approx(1)
    assert any("1 launches ran beside others" in note for note in report.notes)


def test_chunks_with_dictionaries_of_their_own() -> None:
    parts = [recording([launch(function=name)]) for name in ("a", "b", "a")]
    kernels = advise(pa.concat_tables(parts)).kernels
    assert {kernel.function: kernel.launches for kernel in kernels} == {"a": 2, "b": 1}


def test_32_threads_a_block() -> None:
    kernel = only(launch(grid=(132 * 32 * 4, 1, 1), block=(32, 1, 1), blocks_per_sm=32))
    found = finding(kernel, "block_size")
    assert found.reason == "32 threads a block: at most 32 of 64 warps resident"
    assert found.recommendation == "try 128 to 256 threads a block: 64 of 64 warps"
    assert found.level == kernel.level == "warning"
    assert found.time_at_stake_ns == kernel.time_at_stake_ns == round(100_000 * found.expected_gain)


def test_few_resident_warps_do_not_matter_to_a_grid_that_is_resident_at_once() -> None:
    assert "block_size" not in rules_of(only(launch(grid=(132 * 32, 1, 1), block=(32, 1, 1), blocks_per_sm=32)))


def test_block_sizes_stay_below_what_the_function_allows() -> None:
    shape = {"grid": (132 * 32 * 4, 1, 1), "block": (32, 1, 1), "blocks_per_sm": 32}
    assert "try 64 threads" in finding(only(launch(**shape, max_threads=64)), "block_size").recommendation
    assert "block_size" not in rules_of(only(launch(**shape, max_threads=32)))
    triton = only(launch(**shape, max_threads=32, function="triton_poi_fused_add_0"))
    assert "128 to 256" in finding(triton, "block_size").recommendation
    assert "max-autotune" in finding(triton, "block_size").recommendation


def test_a_block_too_coarse_for_its_registers() -> None:
    found = finding(only(launch(block=(1024, 1, 1), registers=40, blocks_per_sm=1)), "block_size")
    assert "(40 registers a thread): at most 32 of 64 warps" in found.reason
    assert "48 of 64 warps" in found.recommendation


def test_too_many_registers() -> None:
    kernel = only(launch(block=(256, 1, 1), registers=200, blocks_per_sm=1))
    found = finding(kernel, "registers")
    assert "200 registers a thread: 1 block an SM, at most 8 of 64 warps" in found.reason
    assert "at most 128 registers 2 blocks fit (16 warps): __launch_bounds__(256, 2)" in found.recommendation
    assert "registers" not in rules_of(only(launch(block=(256, 1, 1), registers=56, blocks_per_sm=4)))


def test_too_much_shared_memory() -> None:
    kernel = only(launch(dynamic_shared_bytes=150 * 1024, blocks_per_sm=1))
    found = finding(kernel, "shared_memory")
    assert found.reason == "150 KiB of shared memory a block: 1 block an SM, at most 8 of 64 warps resident"
    assert "with at most 113 KiB a block 2 fit (16 warps)" in found.recommendation
    assert "shared_memory" not in rules_of(only(launch(dynamic_shared_bytes=16 * 1024, blocks_per_sm=8)))


def test_no_what_if_where_the_driver_knows_a_limit_that_we_do_not() -> None:
    kernel = only(launch(block=(32, 1, 1), grid=(132 * 64, 1, 1), blocks_per_sm=4))
    assert (kernel.occupancy, kernel.limited_by) == (4 / 64, ())
    assert not rules_of(kernel) & {"block_size", "registers", "shared_memory"}


def test_occupancy_is_computed_where_the_driver_did_not_say() -> None:
    assert only(launch(blocks_per_sm=0)).occupancy == 1
    assert only(launch(blocks_per_sm=0, cluster=(2, 1, 1))).occupancy is None
    assert only(launch(blocks_per_sm=0), compute_capability="5.2").occupancy is None


@pytest.mark.parametrize(("threads", "fires"), [(33, True), (100, True), (1000, False), (96, False), (16, True)])
def test_blocks_with_part_of_a_warp(threads: int, fires: bool) -> None:
    kernel = only(launch(block=(threads, 1, 1), blocks_per_sm=0))
    assert ("partial_warp" in rules_of(kernel)) == fires
    if threads == 33:
        found = finding(kernel, "partial_warp")
        assert found.reason == "33 threads a block fill 52% of its 2 warps"
        assert "try 32 or 64 threads" in found.recommendation
        assert found.level == "critical"
        assert kernel.block_efficiency == 33 / 64


def test_a_grid_smaller_than_the_device() -> None:
    kernel = only(launch(grid=(12, 1, 1), block=(1024, 1, 1), blocks_per_sm=2))
    found = finding(kernel, "small_grid")
    assert found.reason == "12 blocks for 132 SMs: 120 SMs without work"
    assert "blocks of 64 threads make 192 of it" in found.recommendation
    assert kernel.sm_utilisation == 12 / 132
    assert "small_grid" not in rules_of(only(launch(grid=(132, 1, 1))))
    assert "small_grid" not in rules_of(only(launch(grid=(12, 1, 1), overlapped=True)))
    assert "small_grid" not in rules_of(
        only(launch(grid=(12, 1, 1), duration_ns=1600))
    )  # nearly an empty kernel's time


@pytest.mark.parametrize(
    ("blocks", "fires"), [(1057, True), (1056, False), (1056 + 700, False), (2 * 1056, False), (1056 * 20 + 1, False)]
)
def test_a_last_wave_that_is_nearly_empty(blocks: int, fires: bool) -> None:
    kernel = only(launch(grid=(blocks, 1, 1)))
    assert ("tail" in rules_of(kernel)) == fires
    if fires:
        assert kernel.sm_utilisation == pytest.approx(0.5, abs=0.01)
        assert kernel.tail_fill == pytest.approx(1 / 1056)
        assert "launch at most 1056 blocks" in finding(kernel, "tail").recommendation
        assert finding(kernel, "tail").expected_gain == pytest.approx(0.5 * 0.5 * 0.985, abs=0.001)


@pytest.mark.parametrize(("local_bytes", "registers", "gain"), [(0, 32, 0), (16, 32, 0), (64, 32, 0.1), (512, 32, 0.2)])
def test_local_memory(local_bytes: int, registers: int, gain: float) -> None:
    kernel = only(launch(local_bytes=local_bytes, registers=registers))
    assert ("local_memory" in rules_of(kernel)) == bool(gain)
    if gain:
        assert finding(kernel, "local_memory").expected_gain == pytest.approx(gain, rel=0.05)


def test_local_memory_of_a_kernel_that_has_all_registers() -> None:
    found = finding(only(launch(local_bytes=64, registers=255, blocks_per_sm=1)), "local_memory")
    assert "all the registers there are" in found.recommendation


@pytest.mark.parametrize(
    "function",
    [
        "_ZN2at6native29vectorized_elementwise_kernelEv",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "cudnn_generated_fort_native_sdpa",
        "_ZN7cutlass7Kernel2Ev",
    ],
)
def test_kernels_of_libraries_are_listed_without_advice_on_their_shape(function: str) -> None:
    bad = {"grid": (12, 1, 1), "block": (33, 1, 1), "local_bytes": 4000, "blocks_per_sm": 20}
    kernel = only(launch(function=function, **bad))
    assert (kernel.changeable, kernel.findings, kernel.level, kernel.share) == (False, (), "not judged", 1)
    assert len(only(launch(**bad)).findings) >= 3


def train(count: int, duration_ns: int, gap_ns: int, **values: Any) -> list[dict[str, Any]]:
    """Launches one after the other on one stream, each called when the last has ended."""
    period = duration_ns + gap_ns
    return [
        launch(submitted_ns=i * period - 3000, start_ns=i * period, duration_ns=duration_ns, **values)
        for i in range(count)
    ]


def tiny(*rows: dict[str, Any]) -> Finding | None:
    """The program's finding on its launches."""
    return next((found for found in advise(recording(rows)).program if found.rule == "tiny_launches"), None)


def test_many_tiny_launches_are_one_finding_with_their_kernels_under_it() -> None:
    function = "_ZN2at6native29vectorized_elementwise_kernelEv"
    report = advise(recording(train(200, 2000, 8000, function=function)))
    found = tiny(*train(200, 2000, 8000, function=function))
    assert found is not None
    assert found.reason == "200 launches of 1 kernel take 2 us each, and the device is idle for 7.96 us before each"
    assert report.kernels[0].idle_before_ns == 199 * 8000
    assert not report.kernels[0].findings
    assert found.time_at_stake_ns == 199 * 8000 - 200 * 1300
    assert "CUDA graph" in found.recommendation
    (affected,) = found.kernels
    assert (affected.name, affected.launches) == ("at::native::vectorized_elementwise_kernel", 200)
    assert affected.time_at_stake_ns == found.time_at_stake_ns
    assert tiny(*train(50, 2000, 8000, function=function)) is None  # few
    assert tiny(*train(200, 2000, 1000, function=function)) is None  # one right behind the other
    assert tiny(*train(200, 1200, 1350, function=function)) is None  # nothing to gain
    assert tiny(*train(200, 20_000, 80_000, function=function)) is None  # not tiny


def test_the_kernels_of_a_finding_are_sorted_and_put_together_by_function() -> None:
    rows = train(600, 2000, 8000)
    for number, row in enumerate(rows):
        row["function"] = "seldom" if number % 4 == 0 else "often"
        row["grid_x"] = 132 * 64 + number % 2  # two shapes of each, of 150 launches and more
    found = tiny(*rows)
    assert found is not None
    assert [(one.name, one.launches) for one in found.kernels] == [("often", 450), ("seldom", 150)]
    assert sum(one.time_at_stake_ns for one in found.kernels) == found.time_at_stake_ns


def test_a_program_that_the_host_holds_back() -> None:
    found = advise(recording(train(200, 2000, 8000))).program[0]
    assert (found.rule, found.level) == ("launch_bound", "critical")
    assert "100% of 200 launches are shorter than the 10 us from one launch to the next" in found.reason
    assert not advise(recording(train(200, 100_000, 8000))).program
    assert not advise(recording(train(20, 2000, 8000))).program
    assert not advise(recording(train(200, 2000, 2_000_000))).program  # the program does something else


def test_gaps_of_one_process_and_device_are_its_own() -> None:
    rows = [launch(pid=pid, device=device, start_ns=1000 * i, duration_ns=500) for i, (pid, device) in
            enumerate([(1, 0), (2, 0), (1, 1), (1, 0), (2, 0), (1, 1)])]  # fmt: skip
    assert only(*rows).idle_before_ns == 3 * 2500
    inside = [launch(start_ns=0, duration_ns=10_000), launch(start_ns=1000, duration_ns=100), launch(start_ns=12_000)]
    assert only(*inside).idle_before_ns == 2000
    pause = [launch(start_ns=0, duration_ns=1000), launch(start_ns=2_000_000), launch(start_ns=2_150_000)]
    assert only(*pause).idle_before_ns == 50_000


def test_the_most_time_comes_first() -> None:
    small, large = {"grid": (12, 1, 1)}, {"block": (100, 1, 1), "blocks_per_sm": 16}
    rows = [
        launch(function="worse_but_short", duration_ns=10_000, **small),
        launch(function="long_and_good", duration_ns=50_000_000),
        launch(function="bad_and_long", duration_ns=9_000_000, **large),
        launch(function="short_and_good", duration_ns=5_000),
    ]
    report = advise(recording(rows))
    order = [kernel.name for kernel in report.kernels]
    assert order == ["long_and_good", "bad_and_long", "worse_but_short", "short_and_good"]
    assert [function.name for function in report.functions] == order
    # Nearly half of it could go, but it is less than 1% of the run.
    assert report.kernels[2].findings[0].expected_gain > 0.25
    assert report.kernels[2].level == "warning"


def test_launch_shapes_are_grouped_by_their_function() -> None:
    rows = [
        launch(function="a", duration_ns=30_000),
        launch(function="b", duration_ns=100_000),
        launch(function="a", grid=(12, 1, 1), duration_ns=90_000),
        launch(function="nvjet_x", duration_ns=10_000),
    ]
    report = advise(recording(rows))
    found = {function.name: function for function in report.functions}
    assert [function.name for function in report.functions] == ["a", "b", "nvjet_x"]
    assert (found["a"].launches, found["a"].time_ns, found["a"].level) == (2, 120_000, "critical")
    assert [report.kernels[place].grid[0] for place in found["a"].shapes] == [12, 132 * 64]
    assert (found["b"].level, found["nvjet_x"].level) == ("good", "not judged")
    assert sum(function.share or 0 for function in report.functions) == pytest.approx(1)


def test_a_kernel_is_its_modules_where_that_was_recorded() -> None:
    def owned_by(function: str, module: str) -> str:
        table = recording([launch(function=function)])
        table = table.append_column("module", pa.array([module]))
        return advise(table).kernels[0].origin

    assert owned_by("a_name_that_no_rule_has", "/opt/cuda/lib64/libcublasLt.so.13") == "cuBLAS"
    assert owned_by("add_kernel", "/site-packages/torch/lib/libtorch_cuda.so") == "ATen"
    assert owned_by("my_kernel", "/home/me/program") == "own"
    assert owned_by("nvjet_x", "") == "cuBLAS"


def test_what_changed_between_two_runs() -> None:
    before = advise(recording([launch(function="a"), launch(function="b"), launch(function="gone")]))
    after = advise(recording([launch(function="a", duration_ns=40_000), launch(function="b"), launch(function="b")]))
    changed = {change.name: change for change in diff(before, after)}
    assert [change.name for change in diff(before, after)][-1] == "a"
    assert changed["a"].change_ns == -60_000
    assert changed["a"].each == pytest.approx(0.4)
    assert (changed["b"].change_ns, changed["b"].each) == (100_000, 1)
    assert (changed["gone"].after_launches, changed["gone"].change_ns, changed["gone"].each) == (0, -100_000, None)
    assert not diff(before, before)[0].change_ns
    with pytest.raises(Error, match="different GPUs"):
        diff(before, advise(recording([], gpu="NVIDIA A100")))


def test_no_rule_is_said_to_help_that_was_not_measured_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SHOWN", rules.SHOWN - {"tiny_launches", "small_grid"})
    report = nasty()
    found = [*report.program, *(one for kernel in report.kernels for one in kernel.findings)]
    assert {one.rule for one in found if one.shown} == {one.rule for one in found} & rules.SHOWN
    assert any(one.shown for one in found) and not all(one.shown for one in found)
    file = io.StringIO()
    Console(file=file, width=400).print(terminal(report, columns=400, top=0))
    assert "an estimate, not yet measured on a kernel" in file.getvalue()
    assert "the advice helped a kernel made for it" in file.getvalue()


def test_untimed_launches_count_as_the_mean_of_the_timed() -> None:
    untimed = launch(start_ns=None, duration_ns=None)
    report = advise(recording([launch(duration_ns=10_000), untimed, untimed]))
    assert (report.launches, report.timed_launches, report.time_ns) == (3, 1, 30_000)
    assert "2 of 3 launches were not timed" in report.notes


class Model:
    """Predicts 20 us for kernels."""

    def predict(self, launches: Any) -> list[float]:
        return [20_000.0 if kind == "kernel" else float("nan") for kind in launches["kind"].to_pylist()]


class NoModel:
    """Predicts nothing, where the package ships a model that would."""

    def predict(self, launches: Any) -> list[float]:
        return [float("nan")] * len(launches)


def test_a_recording_without_times_still_gets_advice() -> None:
    untimed = recording([launch(start_ns=None, duration_ns=None, grid=(12, 1, 1))])
    (kernel,) = advise(untimed, model=NoModel()).kernels
    assert (kernel.time_ns, kernel.share, kernel.time_at_stake_ns) == (None, None, None)
    found = finding(kernel, "small_grid")
    assert (found.level, found.time_at_stake_ns) == ("critical", None)


def test_the_pause_before_a_kernels_first_launch_is_not_the_programs() -> None:
    """Its code is loaded then, and libraries try which of their kernels is fastest."""
    first = [launch(function=f"k{number}", start_ns=number * 500_000, duration_ns=1_000) for number in range(60)]
    again = [launch(function=f"k{number}", start_ns=10**9 + number * 2_000, duration_ns=1_000) for number in range(60)]
    report = advise(recording([*first, *again]), model=NoModel())
    assert sum(kernel.idle_before_ns or 0 for kernel in report.kernels) == 59 * 1_000
    assert all(kernel.idle_before_ns is not None for kernel in report.kernels[1:])


def test_predicted_times() -> None:
    rows = [launch(), launch(function="untimed", start_ns=None, duration_ns=None), launch(kind="graph", graph=1)]
    report = advise(recording(rows), model=Model())
    assert [kernel.predicted_ns for kernel in sorted(report.kernels, key=lambda kernel: kernel.kind)] == [
        None,
        2e4,
        2e4,
    ]
    assert next(kernel for kernel in report.kernels if kernel.name == "untimed").time_ns == 20_000


def product(m: int, n: int, k: int, **values: Any) -> dict[str, Any]:
    """A matrix product of half precision by CUTLASS, whose block is known."""
    name = "_ZN7cutlass7Kernel2I48cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_tnEEvNT_6ParamsE"
    return launch(function=name, words=[m, n, k, *[0] * 87], parameter_bytes=360, **values)


def test_rates_of_a_kernel_whose_work_is_known() -> None:
    kernel = only(product(4096, 4096, 4096, duration_ns=200_000), product(4096, 4096, 4096, duration_ns=400_000))
    assert kernel.flops_per_s == pytest.approx(2 * 4096**3 / 300e-6)
    assert kernel.bytes_per_s == pytest.approx(3 * 4096**2 * 2 / 300e-6)
    assert kernel.peak_share == pytest.approx(2 * 4096**3 / 300e-6 / 989e12)
    assert only(product(4096, 4096, 4096), gpu="NVIDIA Unheard").peak_share is None
    unknown = only(launch())
    assert (unknown.bytes_per_s, unknown.flops_per_s, unknown.peak_share) == (None, None, None)
    # One launch of which nothing is known, and nothing is known of the mean.
    assert only(product(4096, 4096, 4096), product(4096, 4096, 4096) | {"words": []}).flops_per_s is None
    # What lies in the cache moves faster than the memory could.
    assert only(product(64, 64, 64, duration_ns=1)).peak_share == 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("nvjet_sm90_qqtst_144x128_128x6_1x2_h_bz_coopA_algo2_TNN", "8-bit"),
        ("nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_NNN", "half"),
        ("_ZN7cutlass7Kernel2I48cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_tnEE", "half"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "half"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x32", "tf32"),
        ("ampere_sgemm_32x32_sliced1x4_tn", "fp32"),
        ("my_kernel", None),
    ],
)
def test_arithmetic_by_name(function: str, kind: str | None) -> None:
    assert arithmetic_of(function) == kind


def slow_run(duration_ns: int = 60_000, sizes: Sequence[int] = (128, 256, 384, 512, 640)) -> list[dict[str, Any]]:
    """Products of several sizes, three of each, which the model says take 20 us."""
    one_after_another = [size for size in sizes for _ in range(3)]
    return [
        product(size, size, size, grid=(size, 1, 1), duration_ns=duration_ns, start_ns=place * 1_000_000)
        for place, size in enumerate(one_after_another)
    ]


def slower(rows: Sequence[dict[str, Any]]) -> Finding | None:
    report = advise(recording(rows), model=Model())
    assert "slower_than_predicted" not in {one for kernel in report.kernels for one in rules_of(kernel)}
    return next((found for found in report.program if found.rule == "slower_than_predicted"), None)


def test_a_run_far_slower_than_predicted_is_said_once() -> None:
    found = slower(slow_run())
    assert found is not None
    assert "three quarters of 5 library kernels take 3.0 times as long as predicted and more" in found.reason
    assert "clocks" in found.recommendation and "power limit" in found.recommendation
    assert found.expected_gain == pytest.approx((1 - 1 / 3) / 2, abs=1e-3)
    assert found.time_at_stake_ns == pytest.approx(15 * 60_000 * found.expected_gain, rel=0.01)
    assert (found.level, found.shown, len(found.kernels)) == ("critical", False, 1)
    assert found.kernels[0].launches == 15
    for others in (
        slow_run(sizes=(128, 256, 384, 512)),  # too few
        slow_run(29_000),  # not half as long again
        [row | {"overlapped": True} for row in slow_run()],  # beside others
        [row | {"function": "own_kernel"} for row in slow_run()],  # the user's own, which the model knows too little of
        [row | {"duration_ns": 21_000 if number % 3 else 900_000} for number, row in enumerate(slow_run())],  # warm-up
    ):
        assert slower(others) is None


def test_a_few_kernels_slower_than_predicted_are_the_models_fault() -> None:
    rows = [row | {"duration_ns": 20_000} for row in slow_run()[3:]] + slow_run()[:3]
    assert slower(rows) is None
    notes = " ".join(advise(recording(rows), model=Model()).notes)
    assert "1 library kernel (43% of the time) takes twice as long as predicted and more, the others do not" in notes
    assert not any("as predicted" in note for note in advise(recording(slow_run()), model=Model()).notes)


def test_training_alone_on_a_gpu_is_not_called_slow() -> None:
    """Six steps of ResNet50 on an H200 that ran nothing else: its kernels of batch normalisation, which the model does
    not know, took two to three times what it said, and its other kernels what it said."""
    seen = json.loads((Path(__file__).parents[1] / "data" / "resnet50_h200.json").read_text())
    predictions = {(one["function"], *one["grid"]): one["predicted_ns"] for one in seen}

    class Seen:
        def predict(self, launches: Any) -> list[float]:
            names = ("function", "grid_x", "grid_y", "grid_z")
            return [predictions[key] for key in zip(*(launches[name].to_pylist() for name in names), strict=True)]

    def run(scale: float) -> Report:
        rows = [
            launch(
                tuple(one["grid"]),
                tuple(one["block"]),
                function=one["function"],
                duration_ns=round(scale * one["mean_ns"]),
            )
            for one in seen
            for _ in range(6)
        ]
        return advise(recording(rows), model=Seen())

    assert sum(one["mean_ns"] > 2 * one["predicted_ns"] for one in seen) == 6
    report = run(1)
    assert "slower_than_predicted" not in {found.rule for found in report.program}
    assert not any(kernel.findings for kernel in report.kernels)
    assert any("takes twice as long" in note or "take twice as long" in note for note in report.notes)
    # The same on a GPU whose clocks are half as fast.
    (found,) = [one for one in run(2.2).program if one.rule == "slower_than_predicted"]
    assert found.level in ("critical", "warning")


def test_no_predicted_times_is_a_note() -> None:
    class Broken:
        def predict(self, launches: Any) -> Any:
            raise Error("no model for sm_10")

    report = advise(recording([launch()]), model=Broken())
    assert "no predicted times: no model for sm_10" in report.notes
    assert report.kernels[0].predicted_ns is None


def test_graphs_are_listed_and_told_apart() -> None:
    graph = {"kind": "graph", "function": "graph", "grid": (0, 0, 0), "block": (0, 0, 0), "blocks_per_sm": 0}
    rows = [launch(**graph, graph=number, pid=pid) for number, pid in ((1, 1), (1, 1), (2, 1), (1, 2))]
    report = advise(recording(rows))
    named = {"graph 1": 2, "graph 2": 1, "graph 1 of process 2": 1}
    for listed in (report.kernels, report.functions, diff(report, report)):
        assert len(listed) == 3
    assert {kernel.name: kernel.launches for kernel in report.kernels} == named
    assert {one.name: one.launches for one in report.functions} == named
    assert {one.name: one.after_launches for one in diff(report, report)} == named
    for kernel in report.kernels:
        assert (kernel.kind, kernel.changeable, kernel.findings) == ("graph", False, ())
        assert kernel.level == "not judged"
        assert (kernel.occupancy, kernel.waves, kernel.block_efficiency) == (None, None, None)
    assert any("CUDA graphs" in note for note in report.notes)
    assert not any("in slices" in note for note in report.notes), "they are short"
    long = advise(recording([launch(**graph | {"duration_ns": 4_200_000}, graph=1)]))
    assert any("up to 4.2 ms" in note and "status" in note for note in long.notes)


def test_graphs_that_stay_whole_are_noted_with_their_reason_and_what_to_change() -> None:
    whole = '{"event_node": [2, 4200000, 35], "unknown_node": [1, 300000, 9], "memory_node": [5, 150000, 3]}'
    notes = advise(recording([launch()], whole_graphs=whole)).notes
    said = [note for note in notes if "launched whole" in note]
    assert len(said) == 2, "the third delays no one"
    assert "2 CUDA graphs are" in said[0] and "4.2 ms (35 nodes)" in said[0]
    assert "event_node: record behind the launch" in said[0]
    assert "1 CUDA graph is" in said[1] and "for the reason unknown_node (" in said[1]
    for damaged in ("[", "[]", "7", '{"event_node": [1]}', '{"event_node": "x"}'):
        assert not any("launched whole" in note for note in advise(recording([launch()], whole_graphs=damaged)).notes)


def test_a_recording_without_launches() -> None:
    report = advise(recording([]))
    assert (report.launches, report.time_ns, report.kernels, report.program) == (0, None, (), ())
    assert any("no launch" in note for note in report.notes)
    assert "no launch" in html(report)


def test_what_the_recording_says_of_itself() -> None:
    said = {"command": '["python", "a b.py"]', "lost": "7", "cut_short": "1", "timing": "events"}
    report = advise(recording([launch()], **said), model=Model())
    assert report.command == "python 'a b.py'"
    assert [note.split()[0] for note in report.notes] == ["7", "1", "timed"]
    for command in ("python program.py", "{}", "[broken"):
        assert advise(recording([], command=command)).command == command


def test_a_device_that_the_table_does_not_know() -> None:
    report = advise(recording([launch(grid=(12, 1, 1))], compute_capability="99.0", sm_count=None))
    (kernel,) = report.kernels
    assert (kernel.occupancy, kernel.waves, kernel.findings) == (1, None, ())
    assert sum("99.0 is not in the table" in note or "how many SMs" in note for note in report.notes) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (recording([launch()], schema="2"), "schema version 2, and this cudasched reads 1"),
        (recording([launch()], schema=None), "no recording of launches"),
        (pa.table({"a": [1]}), "no recording of launches"),
        (recording([launch()]).drop_columns(["grid_x"]), "lacks the columns grid_x"),
        (42, "not on a int"),
    ],
)
def test_what_is_no_recording_is_refused(data: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        advise(data)


@pytest.mark.parametrize(("module", "extra"), [("pyarrow", "advise"), ("jinja2", "advise")])
def test_what_is_not_installed_is_named(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, data = nasty(), recording([])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Error, match=rf"needs? {module}: pip install 'cudasched\[{extra}\]'"):
        advise(data) if module == "pyarrow" else html(report)


def nasty() -> Report:
    script = "<script>alert(1)</script>\x1b[2J\n&amp;"
    rows = [
        launch(function=script, block=(33, 1, 1), blocks_per_sm=0),
        *train(200, 2000, 8000, function="tiny"),
        launch(kind="graph", function="graph", graph=3, grid=(0, 0, 0), block=(0, 0, 0), blocks_per_sm=0),
    ]
    return advise(recording(rows, command=script, gpu=script, timing=script))


def test_json_round_trip() -> None:
    report = nasty()
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert json.loads(report.model_dump_json())["schema_version"] == 3


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="schema_version"):
        Report.model_validate({**nasty().model_dump(), "schema_version": 2})


class Tags(HTMLParser):
    """Open tags as they are closed; every tag and link met."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.met: set[str] = set()
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.met.add(tag)
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        self.links |= {value or "" for name, value in attrs if name in ("href", "src")}
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_begins_with_the_advice_by_the_time_at_stake_and_folds() -> None:
    report = nasty()
    text = html(report)
    assert text.index("What to change") < text.index("Kernels, the most time first")
    places = [int(found) for found in re.findall(r'<details class="[^"]*" id="k(\d+)"', text)]
    stakes = [report.kernels[place].time_at_stake_ns or 0 for place in places]
    assert (
        stakes == sorted(stakes, reverse=True) and len(places) == sum(bool(one.findings) for one in report.kernels) > 0
    )
    assert text.count("<details") == text.count("</details>") > len(places)


def test_html_is_whole_escaped_and_needs_nothing_else() -> None:
    pytest.importorskip("jinja2", reason="HTML reports are written with jinja2")
    text = html(nasty())
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.met & {"script", "img", "link", "iframe"}
    assert tags.links == {f"#{name}" for name in tags.ids} != set()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x1b" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "graph 3" in text


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_columns_make_room_for_names(columns: int) -> None:
    """As of ResNet50 training: at 120 columns a name had five characters a line, because all columns were shown."""
    seen = json.loads((Path(__file__).parents[1] / "data" / "resnet50_h200.json").read_text())
    rows = [
        launch(tuple(one["grid"]), tuple(one["block"]), function=one["function"], duration_ns=one["mean_ns"])
        for one in seen
        for _ in range(100)
    ]
    file = io.StringIO()
    Console(file=file, width=columns).print(terminal(advise(recording(rows), model=Model()), columns=columns, top=20))
    lines = file.getvalue().splitlines()
    place = next(place for place, line in enumerate(lines) if "at stake" in line)
    assert len(lines[place + 1].split()[1]) >= 28, "the rest of it is in the next line"
    shown = [title for title in ("time", "each", "grid", "waves", "lanes") if f" {title}" in lines[place]]
    assert (
        shown
        == {
            80: ["time", "each"],
            100: ["time", "each"],
            120: ["time", "each", "grid"],
            200: ["time", "each", "grid", "waves", "lanes"],
        }[columns]
    ), "the least important are left out first"


@pytest.mark.parametrize("columns", [20, 40, 69, 80, 109, 160, 400])
def test_terminal_of_any_width(columns: int) -> None:
    file = io.StringIO()
    Console(file=file, width=columns, force_terminal=False).print(terminal(nasty(), columns=columns, top=0))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "\x1b" not in file.getvalue()
    assert "52%" in " ".join(file.getvalue().split())


def test_terminal_shows_as_many_kernels_as_asked() -> None:
    report = advise(recording([launch(function=f"kernel_{i}") for i in range(5)]))
    file = io.StringIO()
    Console(file=file, width=100).print(terminal(report, columns=100, top=2))
    assert "and 3 more kernels" in file.getvalue()
    assert "nothing to change" in file.getvalue()


def run(*arguments: str) -> int:
    """The command as the command line calls it, without its own process."""
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(cli.command)
    code: int = typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return code


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording in a file, read without the collector."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(recording([launch(function="histogram", grid=(12, 1, 1))]), path)
    monkeypatch.setattr("cudasched.advise._face._read", parquet.read_table)
    return path


def test_command_on_a_recording(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data", str(recorded)) == 0
    assert "12 blocks for 132 SMs" in " ".join(capsys.readouterr().out.split())
    assert run("--json", "--data", str(recorded)) == 0
    assert Report.model_validate(json.loads(capsys.readouterr().out)["data"]) == advise(recorded)


@pytest.mark.parametrize("name", ["report.json", "report.html", "Report.HTML"])
def test_command_writes_a_report(recorded: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2", reason="HTML reports are written with jinja2")
    path = tmp_path / name
    assert run("-o", str(path), "--data", str(recorded)) == 0
    assert f"report written to {path}" in capsys.readouterr().err
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>") if "json" not in name else Report.model_validate_json(text).kernels
    assert path.stat().st_mode & 0o400
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == sorted(["data.parquet", name])


def test_command_shows_what_changed_since_a_report(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    path.write_text(advise(recording([launch(function="histogram", duration_ns=400_000)])).model_dump_json())
    assert run("--data", str(recorded), "--before", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "histogram 400 us 100 us -300 us 1 0.25 x" in said
    for text in ("{}", "no report"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no report of this version"):
            run("--data", str(recorded), "--before", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the two"),
        (["--data", "x.parquet", "--", "python"], "one of the two"),
        (["--timing", "clock", "--", "python"], "cupti or events"),
        (["-o", "report.pdf", "--", "python"], r"ends in \.html or \.json"),
        (["-o", "nowhere/report.html", "--", "python"], "there is no directory"),
        (["--slo-ms", "3", "--rate-hz", "60", "--", "python"], "--rate-hz, --slo-ms: it is for forecasts"),
        (["--timing", "events", "--data", "x.parquet"], "--timing: the recording's launches are timed"),
        (["--top", "3", "--beside", "serve.parquet", "train.parquet"], "--top: .* no other option's input"),
    ],
)
def test_command_says_what_is_wrong_before_it_runs_anything(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_record", lambda *_, **__: pytest.fail("the program ran"))
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_missing_package_for_the_report_is_said_before_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(cli, "_record", lambda *_, **__: pytest.fail("the program ran"))
    with pytest.raises(Error, match=r"HTML reports need jinja2: pip install 'cudasched\[advise\]'"):
        run("-o", "report.html", "--", "python")


def test_command_ends_as_the_program_ended(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def record(program: Sequence[str], path: Path, *, timing: str, quiet: bool) -> int:
        ran.append((list(program), timing, quiet))
        path.write_bytes(recorded.read_bytes())
        return 3

    monkeypatch.setattr(cli, "_record", record)
    assert run("--", "python", "program.py", "--json", "-o", "its own") == 3
    assert ran == [(["python", "program.py", "--json", "-o", "its own"], "cupti", False)]
    assert "histogram" in capsys.readouterr().out


@pytest.mark.parametrize("quiet", [False, True])
def test_programs_are_recorded_by_the_collector(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    collected = []

    def run_collected(program: Sequence[str], **options: Any) -> int:
        collected.append((list(program), options))
        return subprocess.call(program)

    monkeypatch.setattr("cudasched.cli.collect.run_collected", run_collected)
    program = [sys.executable, "-c", "print('said'); raise SystemExit(3)"]
    path = tmp_path / "data.parquet"
    assert cli._record(program, path, timing="events", quiet=quiet) == 3
    assert collected == [(program, {"output": path, "timing": "events", "quiet": False})]
    assert capfd.readouterr() == (("", "said\n") if quiet else ("said\n", ""))


def test_recordings_are_read_by_the_collector(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert advise(recorded).kernels[0].name == "histogram"
    with pytest.raises(Error, match=r"missing\.parquet"):
        advise("missing.parquet")


ROWS = st.builds(
    launch,
    function=st.sampled_from(["own", "nvjet_x", "_ZN2at6native3addEv", "triton_poi_fused_0", ""]),
    kind=st.sampled_from(["kernel", "kernel", "graph"]),
    grid=st.tuples(st.integers(0, 5000), st.integers(1, 3), st.just(1)),
    block=st.tuples(st.integers(0, 1100), st.integers(1, 2), st.just(1)),
    registers=st.integers(0, 300),
    dynamic_shared_bytes=st.integers(0, 300_000),
    local_bytes=st.integers(0, 600),
    blocks_per_sm=st.integers(0, 40),
    max_threads=st.integers(0, 1024),
    pid=st.integers(0, 1),
    graph=st.integers(0, 2),
    submitted_ns=st.integers(0, 10**6),
    start_ns=st.none() | st.integers(-(10**6), 10**6),
    duration_ns=st.none() | st.integers(0, 10**7),
    overlapped=st.booleans(),
)


@given(
    rows=st.lists(ROWS, max_size=12),
    times=st.sampled_from([1, 60]),
    capability=st.sampled_from(["7.5", "9.0", "12.0", "1.0", ""]),
    sm_count=st.sampled_from(["132", "1", "0", "many"]),
)
@settings(max_examples=60, deadline=None)
def test_any_recording_gets_a_report_that_holds_together(
    rows: list[dict[str, Any]], times: int, capability: str, sm_count: str
) -> None:
    report = advise(recording(rows * times, compute_capability=capability, sm_count=sm_count), model=Model())
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert report.launches == sum(kernel.launches for kernel in report.kernels) == len(rows) * times
    times = [kernel.time_ns or 0 for kernel in report.kernels]
    assert times == sorted(times, reverse=True)
    assert sorted(place for one in report.functions for place in one.shapes) == list(range(len(report.kernels)))
    for kernel in report.kernels:
        assert kernel.time_ns is None or 0 <= kernel.time_ns <= (report.time_ns or 0)
        assert all(0 <= (part or 0) <= 1 for part in (kernel.tail_fill, kernel.sm_utilisation, kernel.block_efficiency))
        assert (kernel.level in ("good", "not judged")) == (not kernel.findings)
        assert (kernel.level == "not judged") == (not kernel.changeable and not kernel.findings)
        assert all(found.expected_gain >= 0.05 for found in kernel.findings)
    terminal(report, columns=80, top=0)


def test_an_unmodified_program_is_recorded_and_advised(
    simulated: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = str(Path(__file__).with_name("launcher.py"))
    path = tmp_path / "report.json"
    assert run("--timing", "events", "--json", "-o", str(path), "--", sys.executable, launcher, "20") == 0
    output = capfd.readouterr()
    assert "launched 20" in output.err
    report = Report.model_validate(json.loads(output.out)["data"])
    assert Report.model_validate_json(path.read_text()) == report
    (kernel,) = report.kernels
    assert (kernel.name, kernel.launches, kernel.grid, kernel.block) == ("work", 20, (1, 1, 1), (32, 1, 1))
    assert finding(kernel, "small_grid").level == "critical"
    assert launcher in report.command


def test_launches_that_a_full_disk_does_not_take_are_said_to_be_lost(
    simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cudasched.cli.collect.convert", full)
    launcher = str(Path(__file__).with_name("launcher.py"))
    with pytest.raises(Error, match=r"No space left on device\); the recorded launches are lost$"):
        run("--timing", "events", "--", sys.executable, launcher, "1")


def test_a_program_without_launches_ends_as_it_ended(cudasched: Run, simulated: Path) -> None:
    ended = cudasched("advise", "--timing", "events", "--", "sh", "-c", "exit 7")
    assert ended.returncode == 7 and ended.stdout == ""
    assert ended.stderr.startswith("cudasched: error: no launch was recorded") and ended.stderr.count("\n") == 1


def test_the_module_is_the_function() -> None:
    code = """
import sys, cudasched.advise
assert "pyarrow" not in sys.modules and "jinja2" not in sys.modules
from test_advise import launch, recording
assert cudasched.advise(recording([launch()])).launches == 1
assert cudasched.advise.advise(recording([launch()])) == cudasched.advise(recording([launch()]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, env=_environment())


def _environment() -> dict[str, str]:
    import os

    here = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    return {**os.environ, "CUDASCHED_OFF": "1", "PYTHONPATH": os.pathsep.join(here)}
