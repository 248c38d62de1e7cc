"""The host-bound benchmark: paired ratios, what --only takes, and a rehearsal on the simulated driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import plots
from benchmarks.colocation.cells import Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.rows import results
from benchmarks.host_bound import benchmark as host_bound
from benchmarks.host_bound import replayed
from benchmarks.lab.run import load_benchmark, main, parse, run
from benchmarks.results.schema import RESULTS, ColocationRow, Latency, Meta, Results, load
from benchmarks.tables import table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

META = Meta(
    gpu="some GPU",
    driver=None,
    cuda=None,
    torch=None,
    python="3.12",
    commit=None,
    date="2026-01-01T00:00:00+00:00",
    sm_clock_mhz=None,
    command="python -m benchmarks.host_bound",
)


def test_ratios_are_of_the_pairs_of_a_repeat(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)

    def keep(arm: str, repeat: int, ms: float) -> None:
        cell = Cell(arm, "bert_eager", "gemm", "poisson", "60", 8.0, 0.0, repeat)
        served = {"latency_ms": [ms] * 400, "wait_ms": [], "unserved": 0}
        result = {"latency": {"bert_eager": served}, "best_effort_per_s": {"gemm": 500.0}}
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))

    # A machine that slows down: each repeat is 10% slower than alone, and medians of unpaired times say 32%.
    for repeat, alone_ms in enumerate((5.0, 6.0, 9.0)):
        keep("latency_alone", repeat, alone_ms)
        if repeat:
            keep("cudasched_mps", repeat, 1.1 * alone_ms)
    rows = {row.arm: row for row in results(cells, arms=host_bound.ARMS, paired=True).rows}
    row = rows["cudasched_mps"]
    assert row.policy == "harvest" and row.p50_ratio == pytest.approx(1.1)
    assert row.p50_ratio_per_repeat == pytest.approx([1.1, 1.1])
    assert row.latency_ms.p99 == pytest.approx(9.9) and row.latency_ms.n == 800
    unpaired = {row.arm: row for row in results(cells, arms=host_bound.ARMS).rows}
    assert unpaired["cudasched_mps"].p50_ratio == pytest.approx(1.375)


def test_ratios_are_of_latencies_at_one_pace_of_the_host(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)

    def keep(arm: str, repeat: int, ms: list[float], pace_us: list[float]) -> None:
        cell = Cell(arm, "decode_eager", "gemm", "poisson", "3", 8.0, 0.0, repeat)
        served = {"latency_ms": ms, "request_ms": ms[::2], "wait_ms": [], "unserved": 0, "pace_us": pace_us}
        result = {"latency": {"decode_eager": served}, "best_effort_per_s": {"gemm": 500.0}}
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))

    # Two tokens a request; the host is half as fast for some requests, more of them beside best effort, which costs a
    # tenth; and one pace of 900 is of a probe that was interrupted.
    keep("latency_alone", 0, [2.0] * 1600 + [4.0] * 400, [20.0] * 800 + [40.0] * 200)
    keep("cudasched_mps", 0, [2.2] * 800 + [4.4] * 1200, [20.0] * 100 + [900.0] + [20.0] * 299 + [40.0] * 600)
    row = {row.arm: row for row in results(cells, arms=host_bound.ARMS, paired=True).rows}["cudasched_mps"]
    assert row.p50_ratio == pytest.approx(1.1) and row.p99_ratio == pytest.approx(1.1)
    assert row.host_pace == pytest.approx(2.0)
    assert row.latency_ms.p50 == pytest.approx(4.4) and row.alone_ms.p50 == pytest.approx(2.0)  # as they were


def test_an_arm_is_compared_with_the_one_under_strict_repeat_by_repeat(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)

    def keep(arm: str, repeat: int, ms: float, per_s: float) -> None:
        cell = Cell(arm, "recommender", "transformer", "poisson", "200", 4.0, 0.0, repeat)
        served = {"latency_ms": [ms] * 400, "wait_ms": [], "unserved": 0, "pace_us": [50.0] * 400}
        result = {"latency": {"recommender": served}, "best_effort_per_s": {"transformer": per_s}}
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))

    for repeat in range(3):
        keep("latency_alone", repeat, 1.0, 1.0)
        keep("cudasched_mps", repeat, 1.1 + repeat, 12.0)
        if repeat:
            keep("cudasched_mps_strict", repeat, 1.0 + repeat, 10.0)
    rows = {row.arm: row for row in results(cells, arms=host_bound.ARMS, paired=True).rows}
    over = rows["cudasched_mps"].over_strict
    assert over is not None
    assert over.p50 == over.p99 == [pytest.approx(2.1 / 2.0), pytest.approx(3.1 / 3.0)]
    assert over.best_effort == [pytest.approx(1.2)] * 2
    assert rows["cudasched_mps_strict"].over_strict is None and rows["latency_alone"].over_strict is None


def measured_row(**other: object) -> ColocationRow:
    """An eager BERT beside GEMMs under MPS, with what is stated otherwise."""
    row = {
        "arm": "cudasched_mps",
        "mode": "mps",
        "latency_load": "bert_eager",
        "best_effort_load": "gemm",
        "arrivals": "poisson",
        "rate_hz": 60.0,
        "policy": "harvest",
        "lead_us": 20.0,
        "repeats": 3,
        "latency_ms": {"p50": 5.1, "p95": 9.0, "p99": 11.0, "mean": 6.0, "n": 1080},
        "alone_ms": {"p50": 5.0, "p95": 8.0, "p99": 10.0, "mean": 5.5, "n": 1080},
        "p50_ratio": 1.02,
        "p99_ratio": 1.1,
        "bound_p99_ms": None,
        "best_effort_per_s": 500.0,
        "best_effort_alone_per_s": 660.0,
        "duty": 0.3,
        "best_effort_ratio": 1.0,
        "best_effort_gpu_ratio": 0.5,
        "attainment": None,
    }
    return ColocationRow.model_validate({**row, **other})


def test_the_figures_say_what_is_met_and_what_is_not():
    def row(arm: str, server: str, beside: str, p50: float, kept: float) -> ColocationRow:
        modes = {"processes": "two_processes", "mps_priority": "mps"}
        mode = modes.get(arm) or arm.removeprefix("cudasched_").removesuffix("_strict")
        loads = {"arm": arm, "mode": mode, "latency_load": server, "best_effort_load": beside}
        return measured_row(**loads, p50_ratio=p50, best_effort_gpu_ratio=kept)

    rows = [
        row("cudasched_mps", "bert_eager", "transformer", 1.02, 0.94),
        row("cudasched_two_processes", "bert_eager", "transformer", 1.2, 0.8),
        row("processes", "bert_eager", "transformer", 1.1, 0.9),
        row("mps_priority", "bert_eager", "transformer", 3.0, 0.99),
    ]
    table = table_of(Results(meta=META, rows=rows), "figures")
    assert "1.02 (<= 1.05) met | 1.1 (<= 1.15) met | 0.94 (>= 0.95) **missed**" in table
    assert "| time slices: 1.1, 1.1, 0.9 **worse in both** |" in table
    assert "| MPS, priorities: 3, 1.1, 0.99 |" in table
    several = measured_row(p50_ratio_per_repeat=[1.02, 1.15, 0.975])
    assert "| 1.02 (0.975 to 1.15; <= 1.1) met |" in table_of(Results(meta=META, rows=[several]), "figures")
    graph = measured_row(latency_load="bert_graph", p50_ratio_per_repeat=[1.02, 1.15, 0.975])
    assert "| 1.02 (0.975 to 1.15) |" in table_of(Results(meta=META, rows=[graph]), "figures")


@pytest.mark.parametrize(
    "over_strict, said",
    [
        (
            {"p50": [0.9, 1.1, 1.02], "p99": [1.2, 0.8, 0.9], "best_effort": [1.02, 1.01, 1.03]},
            "P50 1.02 (0.9 to 1.1), P99 0.9 (0.8 to 1.2), best effort 1.02 (1.01 to 1.03)",
        ),
        (
            {"p50": [1.02, 1.1, 1.01], "p99": [0.9, 0.8, 0.7], "best_effort": [0.9, 0.99, 0.8]},
            "P50 1.02 (1.01 to 1.1) **worse**, P99 0.8 (0.7 to 0.9), best effort 0.9 (0.8 to 0.99) **worse**",
        ),
    ],
)
def test_some_servers_are_to_be_as_under_strict(over_strict: dict[str, list[float]], said: str):
    graph = {"latency_load": "bert_graph", "best_effort_load": "transformer"}
    ours = measured_row(over_strict=over_strict, **graph)
    assert f"| over strict: {said} |" in table_of(Results(meta=META, rows=[ours]), "figures")
    assert "over strict" not in table_of(Results(meta=META, rows=[measured_row(**graph)]), "figures")


def test_the_plot_has_a_line_a_pair_and_a_mark_an_arm(tmp_path: Path, drawn: list[Figure]) -> None:
    made = load(RESULTS / "host_bound.json")
    assert plots.plot_host_bound(made, tmp_path / "host_bound.png")
    pairs = {(row.latency_load, row.best_effort_load) for row in made.rows}
    assert pairs == {*host_bound.SERVED, host_bound.GRAPH}
    for axes, figure_of in zip(drawn[0].axes[:3], ("p50_ratio", "p99_ratio", "best_effort_gpu_ratio"), strict=True):
        assert len(axes.get_yticks()) == len(pairs)
        marks = {line.get_label(): len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() != "None"}
        for arm, (name, _, _) in plots.HOST_BOUND_ARMS.items():
            rows = [row for row in made.rows if row.arm == arm and getattr(row, figure_of) is not None]
            assert (
                marks[name] == len(rows) >= len(host_bound.SERVED) - (arm == "one_process_priority")
            )  # no recommender


def test_the_new_policy_has_the_plain_names_and_strict_a_suffix():
    for mode in host_bound.MODES:
        assert host_bound.ARMS[f"cudasched_{mode}"].policy == "harvest"
        assert host_bound.ARMS[f"cudasched_{mode}_strict"].policy == "strict"


def test_a_part_has_all_pairs_of_its_servers_and_the_most_important_come_first():
    benchmark = load_benchmark("host_bound")
    parts = [parse("host_bound", benchmark, ["--out", "x.json", "--part", f"{number}/2"]).only for number in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(benchmark.groups)
    assert not {name.split("/")[0] for name in parts[0]} & {name.split("/")[0] for name in parts[1]}
    assert parts[0][0] == "bert_eager/transformer/1" and parts[1][0] == "decode_eager/transformer/1"
    of_one = parse("host_bound", benchmark, ["--out", "x.json", "--only", "bert_eager/gemm"])
    assert of_one.only == ["bert_eager/gemm/1", "bert_eager/gemm/2"]


def test_parts_are_put_together(tmp_path, capsys):
    for number, server in ((1, "bert_eager"), (2, "decode_eager")):
        cells = CellFile(tmp_path / f"{number}.cells", META)
        cell = Cell("latency_alone", server, "gemm", "poisson", "60", 8.0, 0.0, 0)
        served = {"latency_ms": [5.0] * 400, "wait_ms": [], "unserved": 0}
        result = {"latency": {server: served}, "best_effort_per_s": {}}
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))
        cells.save()
    merge = ["merge", "host_bound", "--out", str(tmp_path / "all.json")]
    assert main([*merge, *(str(tmp_path / f"{number}.cells") for number in (1, 2))]) == 0
    assert [row.latency_load for row in load(tmp_path / "all.json").rows] == ["bert_eager", "decode_eager"]
    assert main([*merge, str(tmp_path / "none.cells")]) == 1
    assert "none.cells" in capsys.readouterr().err


def test_programs_have_cores_of_their_own_where_there_are_any():
    assert host_bound.halves([0, 1, 2, 3]) == {"latency": [0, 1], "best_effort": [2, 3]}
    assert host_bound.halves([5]) == {"latency": [5], "best_effort": [5]}


def test_the_threads_of_a_core_stay_together(tmp_path):
    for thread, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        (tmp_path / f"cpu{thread}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{thread}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert host_bound.by_core({0, 1, 2, 3}, tmp_path) == [0, 2, 1, 3]
    assert host_bound.by_core({7, 5}, tmp_path) == [5, 7]


def test_every_arm_is_in_a_group_and_what_is_compared_is_measured_together():
    assert {arm for one in host_bound.GROUPS.values() for arm in one.arms} == set(host_bound.ARMS)
    pairs = [(one.latency, one.best_effort) for one in host_bound.GROUPS.values()]
    assert set(pairs) == {*host_bound.SERVED, host_bound.GRAPH} and pairs.count(host_bound.GRAPH) == 1
    assert all("latency_alone" in one.arms for one in host_bound.GROUPS.values())


def test_a_cell_is_as_long_as_a_thousand_latencies_take():
    assert host_bound.cell_seconds(5, 60.0) == host_bound.LEAST_S
    assert host_bound.cell_seconds(3, 60.0) * 3 * 60.0 >= 1000
    assert host_bound.cell_seconds(1, 1.0) == host_bound.MOST_S


def recorded_cells(tmp_path) -> CellFile:
    """An eager BERT: 250 kernels of 5 us, 20 us on the host, recorded at 30 us; GEMMs of 1.5 ms beside it."""
    cells = CellFile(tmp_path / "run.cells", META)
    launches = [[[30_000 + 40 * request, 4_000 + 8 * n, 0] for n in range(250)] for request in range(20)]
    served = {"launches": launches, "request_ms": [5.0] * 20, "busy_us": 1500.0}
    kernels = {"kernel_us": [[1500.0, 3]], "per_item_us": 1500.0}
    for cell, result in ((Cell.busy("bert_eager"), served), (Cell.kernels("gemm"), kernels)):
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))
    return cells


def test_what_was_recorded_is_packed_and_a_request_takes_what_it_takes_unrecorded(tmp_path):
    recorded = replayed.packed(recorded_cells(tmp_path))
    path = replayed.recording_path(tmp_path / "run.json")
    replayed.save(recorded, path)
    assert path.stat().st_size < 4096
    assert replayed.read(path) == recorded
    trace = replayed.server_trace(recorded["servers"]["bert_eager"], "bert_eager")
    assert len(trace.ends) == 20 and trace.launches == 20 * 250
    alone = replayed.simulate.compare(
        [replayed.simulate.latency(trace, rate_hz=20, seconds=5)], [replayed.simulate.Arm()], seconds=5
    )[0]
    assert alone.latency_ms is not None and alone.latency_ms.p50 == pytest.approx(5.0, rel=0.03)
    path.write_bytes(b"no recording")
    with pytest.raises(ValueError, match="no recording of requests"):
        replayed.read(path)


def test_waits_inside_a_request_are_replayed(tmp_path):
    server = {"gpu_ns": [100_000] * 4, "waits": [2], "gaps": [[100] * 4] * 3, "request_ms": 0.25}
    trace = replayed.server_trace(server, "decode_eager")
    alone = replayed.simulate.compare(
        [replayed.simulate.latency(trace, rate_hz=20, seconds=5)], [replayed.simulate.Arm()], seconds=5
    )[0]
    unwaited = replayed.server_trace({**server, "waits": []}, "decode_eager")
    shorter = replayed.simulate.compare(
        [replayed.simulate.latency(unwaited, rate_hz=20, seconds=5)], [replayed.simulate.Arm()], seconds=5
    )[0]
    assert alone.latency_ms.p50 > shorter.latency_ms.p50 + 0.002


def test_a_program_that_keeps_the_gpu_busy_waits_for_it_and_another_for_its_host():
    gemm = {"kernel_us": [[1500.0, 3]], "per_item_us": 1500.0}
    for alone_per_s, kernel_us, gap_us in ((600.0, 1667, 12), (300.0, 1500, 3333), (None, 1500, 12)):
        trace = replayed.beside_trace(gemm, "gemm", alone_per_s)
        alone = replayed.simulate.compare([replayed.simulate.best_effort(trace)], [replayed.simulate.Arm()], seconds=2)
        assert alone[0].utilisation == pytest.approx(min(1.0, kernel_us / gap_us), abs=0.02)


def test_a_replayed_request_takes_what_it_took_beside_the_row():
    def row(**measured: object) -> ColocationRow:
        return ColocationRow.model_construct(rate_hz=50.0, **measured)

    alone = {"alone_ms": Latency(p50=7.0, p95=8.0, p99=9.0, mean=7.0, n=10), "duty": 0.4}
    assert replayed.alone_request_ms(row(**alone), {"waits": []}) == 7.0
    assert replayed.alone_request_ms(row(**alone), {"waits": [3]}) == pytest.approx(8.0)  # latencies are of tokens
    assert replayed.alone_request_ms(row(alone_ms=None, duty=None), {"waits": []}) is None


def test_the_simulation_is_held_against_what_was_measured(tmp_path, capsys):
    recorded = replayed.packed(recorded_cells(tmp_path))
    replayed.save(recorded, replayed.recording_path(tmp_path / "run.json"))
    row = measured_row()
    out = tmp_path / "run.json"
    Results(meta=META, rows=[row, row.model_copy(update={"arm": "processes", "policy": None})]).write(out)
    assert run("host_bound_simulated", ["--measured", str(out), "--out", str(tmp_path / "off.json")]) == 0
    p50, ratio = [one for one in load(tmp_path / "off.json").figures]
    assert p50.figure == "p50 bert_eager gemm cudasched_mps" and p50.value < 0.1 and p50.limited_by == ""
    assert ratio.value > 0.5 and "measured 0.500" in ratio.limited_by  # harvest keeps about 90% of the GPU time
    assert "missed" in capsys.readouterr().out


def test_it_rehearses_and_goes_on_where_it_stopped(simulated_driver, tmp_path, capsys):
    out = tmp_path / "rehearsal.json"
    common = ["--rehearse", "--out", str(out), "--only", "decode_eager/transformer/1", "--arms"]
    assert run("host_bound", [*common, "latency_alone"]) == 0
    names = ("best_effort_alone_hooked", "cudasched_two_processes", "cudasched_one_process")
    assert run("host_bound", [*common, ",".join(("latency_alone", *names))]) == 0
    rows = {row.arm: row for row in load(out).rows}
    assert set(rows) == {"latency_alone", *names}
    for name in names[1:]:
        row = rows[name]
        assert row.latency_load == "decode_eager" and row.policy == "harvest"
        assert row.p50_ratio and row.gpu_duty and row.best_effort_gpu_ratio and row.host_pace
    # Latencies are of tokens: seven between the eight of a request.
    cells = CellFile(cells_path(out)).outcomes
    alone = next(known.result for cell, known in cells.items() if cell.arm == "latency_alone")
    served = alone["latency"]["decode_eager"]
    assert len(served["latency_ms"]) == 7 * len(served["request_ms"])
    # Its requests are recorded beside the results, and the simulator takes them.
    recorded = replayed.read(replayed.recording_path(out))
    assert recorded["servers"]["decode_eager"]["waits"] == list(range(40, 320, 40))
    assert run("host_bound_simulated", ["--measured", str(out), "--out", str(tmp_path / "off.json")]) == 0
    capsys.readouterr()
    assert len(load(tmp_path / "off.json").rows) == 4
