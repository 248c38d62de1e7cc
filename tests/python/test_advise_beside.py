"""Forecasts of a server beside best-effort programs: recordings, intervals, the choice, the ranking, the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from cudasched import ConfigError, Error
from cudasched.advise import beside
from cudasched.cli.advise import EXAMPLE
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_recordings import requests, steps
from support import Run

pa = pytest.importorskip("pyarrow", reason="forecasts read recordings with pyarrow")

MS = 1_000_000
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recording (`recordings.write`)."""
    return partial(recordings.write, tmp_path)


def pair(write: Write, **server: Any) -> tuple[beside.Recording, beside.Recording]:
    return (
        beside.read(write("serve", requests(), kind="graph", function="graph", waves=0.0, pid=3, **server)),
        beside.read(write("train", steps())),
    )


def test_a_recording_tells_rate_gaps_and_the_longest_kernels(write: Write) -> None:
    server, program = pair(write)
    assert server.request_hz == pytest.approx(60) and server.requests == 120
    assert server.idle == pytest.approx(1 - 0.4 * 60 / 1e3, abs=0.01) and server.untold == 1
    assert program.idle < 0.02 and program.untold == 0 and program.longest_ms == 1
    (kernel,) = program.kernels
    assert (kernel.name, kernel.longest_ms, kernel.share) == ("gemm", 1, 1)


@pytest.mark.parametrize(("timing", "cost_ms"), [("cupti", 0.0017), ("events", 0.003), ("", 0)])
def test_what_a_recording_costs_is_not_the_programs(write: Write, timing: str, cost_ms: float) -> None:
    from cudasched import simulate

    launches = [(0.01 * number, 0.002) for number in range(1000)]  # bound by the host
    program = beside.read(write(f"train{timing}", launches, {"timing": timing}))
    alone, *_ = simulate.compare([simulate.best_effort(program.trace)], [simulate.Arm("open")], seconds=1)
    assert alone.best_effort_per_s == pytest.approx(1 / (10 - 1e3 * cost_ms) * 1e3, rel=0.02)


def test_time_slices_of_cudasched_are_taken_beside_long_kernels(write: Write) -> None:
    found = beside.forecast(*pair(write), seconds=10)
    ratios = {name: mode.p99_ratio.value for name, mode in found.modes.items()}
    assert found.rate_hz == pytest.approx(60) and found.requests > 500
    assert ratios["cudasched_slices"] < ratios["cudasched_mps"] < ratios["time_slices"]
    assert found.choice == "cudasched_slices" and "cudasched run" in found.modes[found.choice].settings
    assert "gemm 1 ms (100%)" in found.why[0] and "0.13 ms" in found.why[-1]
    excess_ms = found.modes["cudasched_slices"].p50_ms.value - found.alone_p50_ms
    assert 0.13 < excess_ms < 0.25, "a change of contexts and cold caches"
    assert found.memory.fits is None


@pytest.mark.parametrize(("graph_ms", "said"), [(1.9, False), (5, True)])
def test_a_server_of_long_requests_is_to_run_under_cudasched(write: Write, graph_ms: float, said: bool) -> None:
    server = write("serve", requests(each_ms=graph_ms), kind="graph", function="graph", waves=0.0, pid=3)
    found = beside.forecast(beside.read(server), beside.read(write("train", steps(each_ms=20))), seconds=10, rate_hz=20)
    assert found.choice == "cudasched_slices"
    told = re.search(r"cudasched run --class latency`: .* P50 of ([\d.]+) ms then, and train (\d+)%", found.why[-1])
    assert bool(told) == said
    if told:
        slices = found.modes["cudasched_slices"]
        assert float(told[1]) < slices.p50_ms.value - 0.26 and int(told[2]) >= 100 * slices.best_effort.value - 1


@settings(deadline=None, max_examples=15)
@given(rate_hz=st.sampled_from([20.0, 60.0, 150.0]), each_ms=st.sampled_from([0.05, 0.4, 3.0]), seed=st.integers(1, 99))
def test_every_interval_holds_its_value(rate_hz: float, each_ms: float, seed: int) -> None:
    from cudasched import simulate

    server = beside.unrecorded(simulate.request(0.4, name="server"))
    program = beside.unrecorded(simulate.host_trace([6_000], [round(each_ms * MS)], [False], name="program"))
    found = beside.forecast(server, program, rate_hz=rate_hz, seconds=2, seed=seed)
    for mode in found.modes.values():
        for interval in (mode.p50_ms, mode.p99_ms, mode.p50_ratio, mode.p99_ratio, mode.best_effort):
            assert 0 <= interval.low <= interval.value <= interval.high < math.inf
        assert mode.best_effort.value < 1.3
    assert found.choice in found.modes


def test_beside_next_to_nothing_a_server_is_as_alone(write: Write) -> None:
    server = beside.read(write("serve", requests(), pid=3))
    nothing = beside.read(write("nothing", [(number * 500.0, 0.001) for number in range(20)]))
    found = beside.forecast(server, nothing, seconds=10)
    for name, mode in found.modes.items():
        assert mode.p50_ratio.value == pytest.approx(beside.MODES[name].errors["p50"][1], rel=0.01)
        assert mode.p99_ratio.value == pytest.approx(beside.MODES[name].errors["p99"][1], rel=0.05)


def test_more_requests_wait_longer(write: Write) -> None:
    server, program = pair(write)
    found = [beside.forecast(server, program, rate_hz=rate_hz, seconds=10) for rate_hz in (20, 100, 400)]
    for name in beside.MODES:
        p99_ms = [one.modes[name].p99_ms.value for one in found]
        assert p99_ms == sorted(p99_ms), name


def test_a_request_has_a_hosts_part_where_its_time_alone_is_known(write: Write) -> None:
    server, program = pair(write)
    bare, whole = (beside.forecast(server, program, seconds=5, alone_ms=ms) for ms in (None, 0.9))
    assert bare.alone_p50_ms == pytest.approx(0.4, abs=0.01) and whole.alone_p50_ms == pytest.approx(0.9, abs=0.01)
    assert whole.modes["cudasched_slices"].p50_ratio.value < bare.modes["cudasched_slices"].p50_ratio.value


def test_a_forecast_says_that_recording_slowed_a_program(write: Write) -> None:
    """At half speed a forecast was off by more than two, without a word."""
    server = beside.read(write("serve", requests(), pid=3))
    launches = [(0.02 * number, 0.002) for number in range(1000)]
    path = write("train", launches, {"timing": "cupti"})
    found = beside.forecast(server, beside.read(path), seconds=1)
    assert any(note.startswith("train: recording slowed its host") for note in found.notes)
    found = beside.forecast(server, beside.read(path, recording_us=10), seconds=1, alone_ms=0.4)
    assert not any("slow" in note for note in found.notes)
    found = beside.forecast(server, beside.read(path, recording_us=10), seconds=1, alone_ms=0.2)
    assert any("not 0.2. If that is of this rate, its host was slower" in note for note in found.notes)


def test_kernels_that_leave_room_overlap_and_unknown_ones_widen_the_interval(write: Write) -> None:
    small = {"grid_x": 33, "waves": 0.25}
    shapes: dict[str, dict[str, Any]] = {"full": {}, "small": small, "graph": {"kind": "graph", "waves": 0.0}}
    server = beside.read(write("serve", requests(each_ms=0.4), pid=3, **small))
    found = {
        name: beside.forecast(server, beside.read(write(name, steps(), **shape)), seconds=5)
        for name, shape in shapes.items()
    }
    p99_ms = {name: one.modes["cudasched_mps"].p99_ms for name, one in found.items()}
    assert p99_ms["small"].value < 0.9 * p99_ms["full"].value
    assert p99_ms["graph"].high == pytest.approx(p99_ms["full"].high, rel=0.05), "it may fill the GPU"
    assert p99_ms["graph"].low < 0.9 * p99_ms["full"].low, "or may not"
    assert [name for name, one in found.items() if any("how much of the GPU" in note for note in one.notes)] == [
        "graph"
    ]


def mode_of(p99_ms: float, best_effort: float) -> beside.ModeForecast:
    def around(value: float) -> beside.Interval:
        return beside.Interval(0.9 * value, value, 1.1 * value)

    p99 = around(p99_ms)
    return beside.ModeForecast(p99, p99, p99, p99, around(best_effort), "")


def test_the_choice_keeps_most_of_those_that_meet_the_target() -> None:
    modes = {"fast": mode_of(1.0, 0.5), "kind": mode_of(2.0, 0.9), "near": mode_of(1.1, 0.7), "slow": mode_of(9.0, 1.0)}
    assert beside.choose(modes, slo_ms=2.5) == "kind"
    assert beside.choose(modes, slo_ms=2.1) == "near", "2.0 may be 2.2"
    assert beside.choose(modes) == beside.choose(modes, slo_ms=0.1) == "near", "the least P99 for the program's speed"


def test_requests_at_one_time_have_no_rate(write: Write) -> None:
    server = beside.read(write("serve", requests(), kind="graph", submitted_ns=5, pid=3))
    assert server.requests == 120 and server.request_hz is None


def test_rare_requests_are_simulated_as_long_as_can_be(write: Write) -> None:
    """One each two seconds beside long kernels wanted more hours than are simulated."""
    server = beside.read(write("serve", requests(rate_hz=0.9, count=40, each_ms=30), pid=3))
    program = beside.read(write("long", steps(each_ms=1000, count=20)))
    found = beside.forecast(server, program, rate_hz=0.5)
    assert 1_500 < found.requests < 2_000


def test_a_server_with_pauses_between_its_requests_is_told(write: Write) -> None:
    """The longest request stood for all of them, without a word."""
    rare = [(2_000.0 * number, 1.0 + number % 7) for number in range(40)]
    program = beside.read(write("train", steps()))
    found = beside.forecast(beside.read(write("serve", rare, pid=3)), program, rate_hz=0.5, seconds=20)
    (note,) = (note for note in found.notes if "record more" in note)
    assert "serve: 1 recorded request stands for all (process 3 on GPU 0, launches 7 to 7 of 40)" in note
    found = beside.forecast(beside.read(write("often", requests(), pid=3)), program, seconds=1)
    assert not any("record more" in note for note in found.notes)


def test_memory_fits_or_does_not(write: Write) -> None:
    server = write("serve", requests(), pid=3, metadata={"memory_peak": str(30 << 30)})
    for held, fits in ((40 << 30, True), (55 << 30, False)):
        program = write("train", steps(), metadata={"memory_peak": str(held)})
        found = beside.forecast(beside.read(server), beside.read(program), seconds=1)
        assert found.memory.fits is fits


def test_partners_are_ranked(write: Write) -> None:
    huge = {"memory_peak": str(90 << 30)}
    programs = [
        beside.read(write("long", steps(each_ms=8, count=300))),
        beside.read(write("huge", steps(each_ms=0.05), metadata=huge)),
        beside.read(write("idle", [(number * 5.0, 0.05) for number in range(300)])),
    ]
    server = beside.read(write("known", requests(), pid=3, metadata={"memory_peak": str(1 << 30)}))
    found = beside.rank(server, programs, seconds=3)
    assert [one.program for one in found] == ["idle", "long", "huge"], "what does not fit comes last"


def test_recordings_that_do_not_go_together_are_refused(write: Write, tmp_path: Path) -> None:
    server, program = pair(write)
    other = beside.read(write("other", steps(), metadata={"gpu": "NVIDIA H200"}))
    with pytest.raises(Error, match=r"serve\.parquet was recorded on NVIDIA H100.*other\.parquet on NVIDIA H200"):
        beside.forecast(server, other)
    with pytest.raises(Error, match="of one process"):
        beside.forecast(server, server)
    (tmp_path / "copy.parquet").write_bytes((tmp_path / "serve.parquet").read_bytes())
    with pytest.raises(Error, match="of one process"):
        beside.forecast(server, beside.read(tmp_path / "copy.parquet"))
    with pytest.raises(ConfigError, match="does not keep up with 5000 requests a second"):
        beside.forecast(server, program, rate_hz=5000, seconds=1)
    once = beside.read(write("once", [(0, 1.0)], pid=4))
    with pytest.raises(ConfigError, match=r"once\.parquet holds 1 request: name the rate with --rate-hz"):
        beside.forecast(once, program)
    unknown = {"gpu": "NVIDIA L4"}
    server = beside.read(write("a", requests(), metadata=unknown, pid=3))
    found = beside.forecast(server, beside.read(write("b", steps(), metadata=unknown)), seconds=1)
    assert any("on NVIDIA L4 nothing was measured" in note for note in found.notes)


def test_recordings_without_meaning_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"empty\.parquet has no launches: record the program"):
        beside.read(write("empty", []))
    with pytest.raises(Error, match=r"nan\.parquet is damaged: column duration_ns holds double"):
        beside.read(write("nan", steps(count=3), types={"duration_ns": pa.float64()}, duration_ns=math.nan))
    with pytest.raises(Error, match=r"past\.parquet: 3 launches have times below 0"):
        beside.read(write("past", steps(count=3), duration_ns=-5))
    with pytest.raises(Error, match="no timed launch"):
        beside.read(write("untimed", steps(count=3), duration_ns=None))
    with pytest.raises(Error, match="there is no data set"):
        beside.read(tmp_path / "none.parquet")


def test_a_pair_of_many_launches_takes_seconds(write: Write) -> None:
    server = beside.read(write("serve", requests(), pid=3))
    program = beside.read(write("short", steps(each_ms=0.004, count=50_000, gap_ms=0.003)))
    simulated = beside.forecast(server, program)
    assert simulated.requests < beside.REQUESTS and any("fewer than" in note for note in simulated.notes)


def test_the_command(cudasched: Run, write: Write, tmp_path: Path) -> None:
    server, program = write("serve", requests(), pid=3), write("train", steps())
    done = cudasched("advise", "--beside", str(server), str(program))
    assert done.returncode == 0, done.stderr
    assert "cudasched, time slices *" in done.stdout and "* take cudasched, time slices: cudasched run" in done.stdout
    example = EXAMPLE.rsplit("; ", 1)[1].split()[1:]
    assert cudasched(*example, cwd=tmp_path).returncode == 0, example
    assert "memory: not known" in done.stdout and "gemm 1 ms (100%)" in done.stdout
    write("other", steps(each_ms=0.1))
    files = [str(path) for path in sorted(tmp_path.glob("*.parquet"))]
    done = cudasched("advise", "--json", "--rate-hz", "30", "--rank", str(server), *files)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kind"] == "forecast" and {one["program"] for one in told["data"]} == {"train", "other"}
    costs = [one["cost"] for one in told["data"]]
    assert costs == sorted(costs)
    write("slow", [(0.01 * number, 0.002) for number in range(1000)], {"timing": "cupti"})
    ranked = cudasched("advise", "--rank", str(server), *files, "slow.parquet", cwd=tmp_path).stdout
    assert "other" in ranked and "\nslow: recording slowed its host" in ranked
    assert re.search(r"beside \w+(, \w+)*: P99 is of \d+ simulated requests", ranked), "of some alone"
    assert ranked.count("copies between host and GPU are not in a recording") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--beside", "serve.parquet"], "name the recording of a best-effort program"),
        (["--rank", "serve.parquet", "serve.parquet"], "name the recording of a best-effort program"),
        (["--beside", "serve.parquet", "a.parquet", "b.parquet"], "--rank compares several"),
        (["--beside", "serve.parquet", "--rank", "serve.parquet", "a.parquet"], "no other option's input"),
        (["--beside", "serve.parquet", "train.parquet", "--rate-hz", "2"], "--rate-hz: options come before"),
        *(
            ([f"--{name.replace('_', '-')}", value, "--beside", "serve.parquet", "train.parquet"], f"{name} = ")
            for name, values in (
                ("rate_hz", ("nan", "0")),
                ("slo_ms", ("nan", "0")),
                ("alone_ms", ("nan", "-3")),
                ("request_gap_ms", ("nan", "0")),
                ("recording_us", ("nan", "-1")),
            )
            for value in values
        ),
        (["--arrivals", "daily", "--beside", "serve.parquet", "train.parquet"], "daily"),
        (["train.parquet"], "is a recording: --data train.parquet"),
        (["--", "serve.parquet", "train.parquet"], "--beside SERVER for forecasts"),
    ],
)
def test_the_command_refuses_what_has_no_meaning(
    cudasched: Run, write: Write, tmp_path: Path, arguments: list[str], says: str
) -> None:
    write("serve", requests(), pid=3)
    write("train", steps())
    done = cudasched("advise", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
