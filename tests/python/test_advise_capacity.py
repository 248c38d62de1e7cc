"""The load that a GPU bears: the file of programs, the knee, its limit, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from cudasched import ConfigError, Error, simulate
from cudasched.advise import beside, capacity
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Run

pytest.importorskip("pyarrow", reason="forecasts read recordings with pyarrow")

STEP = 2 ** (1 / 16)
MIX = """
[serve]
recording = "serve.parquet"
class = "latency"
rate_hz = 60
slo_ms = 5

[train]
recording = "train.parquet"
class = "best_effort"
"""


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """A tenth of the launches of each simulation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "_MOST_LAUNCHES", 20_000)
        yield


def served(request_ms: float = 0.5, name: str = "serve", **options: Any) -> capacity.Program:
    recording = beside.unrecorded(simulate.request(request_ms, name=name))
    return capacity.Program(recording, "latency", **{"rate_hz": 50.0, "slo_ms": 5.0, **options})


def trained(each_ms: float = 1.0) -> capacity.Program:
    trace = simulate.host_trace([6_000], [round(each_ms * 1e6)], [False], name="train")
    return capacity.Program(beside.unrecorded(trace), "best_effort")


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    """A file of a server and a training, and their recordings."""
    recordings.write(tmp_path, "serve", recordings.requests(), kind="graph", function="graph", waves=0.0, pid=3)
    recordings.write(tmp_path, "train", recordings.steps())
    path = tmp_path / "models.toml"
    path.write_text(MIX)
    return path


def test_periodic_requests_that_meet_nothing_fill_the_gpu() -> None:
    found = capacity.fit({"serve": served(1.0, rate_hz=50.0, arrivals="periodic")})
    for name, load in found.modes.items():
        assert load.scale.value == pytest.approx(1e3 / 50, rel=0.05), name
        assert load.best_effort is None
    assert found.gpu == "" and found.memory.fits is None


@settings(deadline=None, max_examples=4)
@given(
    request_ms=st.sampled_from([0.2, 1.0, 3.0]),
    each_ms=st.sampled_from([0.05, 1.0, 4.0]),
    slo_ms=st.floats(1.5, 40.0),
    seed=st.integers(1, 99),
)
def test_a_knee_is_where_the_next_step_misses(request_ms: float, each_ms: float, slo_ms: float, seed: int) -> None:
    server, training = served(request_ms, slo_ms=slo_ms), trained(each_ms)
    found = capacity.fit({"serve": server, "train": training}, seed=seed)
    for name, load in found.modes.items():
        assert 0 <= load.scale.low <= load.scale.value <= load.scale.high < math.inf
        for scale, meets in ((load.scale.value, True), (load.scale.value * STEP, False)):
            at = replace(server, rate_hz=server.rate_hz * scale)
            if scale and (meets or not load.limit.startswith("the GPU's time")):
                p99_ms = capacity.fit({"serve": at, "train": training}, slo=False, seed=seed).modes[name].p99_ms
                assert (p99_ms["serve"].value <= slo_ms) is meets, (name, scale)


@settings(deadline=None, max_examples=4)
@given(factor=st.floats(0.2, 5.0), slo_ms=st.floats(2.0, 20.0))
def test_the_load_is_that_of_the_rates_and_grows_with_the_slo(factor: float, slo_ms: float) -> None:
    training = trained()
    first, faster, patient = (
        capacity.fit({"serve": served(rate_hz=rate_hz, slo_ms=limit), "train": training})
        for rate_hz, limit in ((50.0, slo_ms), (50.0 * factor, slo_ms), (50.0, 1.5 * slo_ms))
    )
    for name, load in first.modes.items():
        assert faster.modes[name].scale.value * factor == pytest.approx(load.scale.value, rel=0.1), name
        assert patient.modes[name].scale.value >= load.scale.value / STEP, name


def test_the_limit_that_binds_has_a_name() -> None:
    long = capacity.fit({"serve": served(0.5), "train": trained(8.0)})
    assert "serve: P99 is over 5 ms" in long.modes["cudasched_mps"].limit
    assert "because of best effort: without best effort it is" in long.modes["cudasched_mps"].limit
    assert long.modes["cudasched_mps"].scale.low == 0, "a kernel of 8 ms, if it fills the GPU"
    assert long.choice == "cudasched_slices"
    short = capacity.fit({"serve": served(0.5), "rerank": served(2.0, "rerank", slo_ms=6.0), "train": trained(0.01)})
    assert "rerank: P99 is over 6 ms" in short.modes["cudasched_mps"].limit
    assert "because of requests alone" in short.modes["cudasched_mps"].limit
    assert any("of other mixes nothing was measured" in note for note in short.notes)


def test_a_mix_as_it_is_agrees_with_the_forecast_of_a_pair(mix: Path) -> None:
    programs = capacity.read(mix)
    found = capacity.fit(programs, slo=False)
    pair = beside.forecast(programs["serve"].recording, programs["train"].recording, rate_hz=60)
    for name, load in found.modes.items():
        assert load.scale == beside.Interval(1.0, 1.0, 1.0)
        assert load.p99_ms["serve"].value == pytest.approx(pair.modes[name].p99_ms.value, rel=0.1), name
        assert load.best_effort and load.best_effort.value == pytest.approx(
            pair.modes[name].best_effort.value, abs=0.03
        )
        assert bool(load.limit) is (load.p99_ms["serve"].value > 5), name


def test_a_program_has_a_cost_of_recording_of_its_own(mix: Path) -> None:
    recordings.write(mix.parent, "train", [(0.01 * number, 0.002) for number in range(1000)])  # bound by the host
    per_s = []
    for more in ("", "\nrecording_us = 5"):
        mix.write_text(MIX.replace('"best_effort"', f'"best_effort"{more}'))
        client = simulate.best_effort(capacity.read(mix)["train"].recording.trace)
        per_s.append(simulate.run([client], simulate.Arm("open", offload=False), seconds=1).best_effort_per_s)
    assert per_s == pytest.approx([100, 200], rel=0.02)


def test_a_requests_host_time_takes_load_away() -> None:
    bare, hosted = (capacity.fit({"serve": served(alone_ms=alone_ms)}) for alone_ms in (None, 2.0))
    assert hosted.modes["time_slices"].scale.value < 0.5 * bare.modes["time_slices"].scale.value


def test_mixes_without_meaning_are_refused(mix: Path) -> None:
    programs = capacity.read(mix)
    with pytest.raises(ConfigError, match="no program of class latency"):
        capacity.fit({"train": programs["train"]})
    with pytest.raises(ConfigError, match="serve: name slo_ms"):
        capacity.fit({**programs, "serve": replace(programs["serve"], slo_ms=None)})
    with pytest.raises(Error, match="of one process"):
        capacity.fit({**programs, "again": programs["train"]})
    recordings.write(mix.parent, "train", recordings.steps(), metadata={"gpu": "NVIDIA H200"})
    with pytest.raises(Error, match=r"serve\.parquet was recorded on NVIDIA H100.*train\.parquet on NVIDIA H200"):
        capacity.fit(capacity.read(mix))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rate_hz = 60", "rate_hz = nan", r"line 5, \[serve\]: rate_hz = nan: must be a number from 0.001"),
        ("rate_hz = 60", "rate_hz = -1", r"line 5, \[serve\]: rate_hz = -1: must be"),
        ("rate_hz = 60", "rate_hz = true", r"line 5, \[serve\]: rate_hz = True: must be"),
        ("slo_ms", "slo", r"line 6, \[serve\]: slo is not known; did you mean 'slo_ms'"),
        ("slo_ms = 5", 'arrivals = "daily"', r"line 6, \[serve\]: arrivals = 'daily': there are poisson"),
        ("slo_ms = 5", "class = 3", "line 6.*not TOML"),
        ('"latency"', '"normal"', r"line 2, \[serve\]: class = 'normal'"),
        ('"latency"', '"urgent"', r"line 2, \[serve\]: .*unknown class"),
        ('"train.parquet"', '"none.parquet"', r"line 8, \[train\]: there is no data set"),
        ('"train.parquet"', "7", r"line 9, \[train\]: recording is a text, not 7"),
        ('"best_effort"', '"best_effort"\nslo_ms = 5', r"line 8, \[train\]: slo_ms is of latency programs"),
        ("slo_ms = 5", "request_ms = 2", r"line 2, \[serve\]: it needs a recording, or of a server request_ms"),
        ("slo_ms = 5", "recording_us = -1", r"line 6, \[serve\]: recording_us = -1: must be a number from 0"),
        (MIX, '[serve]\nrequest_ms = 1\nrequest_gap_ms = 2\nclass = "latency"', "request_gap_ms is of a recording"),
        ("[serve]", "[serve", "line 2: not TOML"),
        (MIX, "", "names no program"),
        (MIX, "serve = 1", r"line 1, \[serve\]: a program is a table, not 1"),
        (MIX, '[serve]\nrequest_ms = 1\nclass = "latency"', "line 1, .*rate_hz is needed"),
    ],
)
def test_files_without_meaning_are_refused_by_line(mix: Path, old: str, new: str, says: str) -> None:
    mix.write_text(MIX.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"models\.toml.*{says}"):
        capacity.read(mix)


def test_an_empty_recording_is_named(mix: Path) -> None:
    recordings.write(mix.parent, "train", [])
    with pytest.raises(ConfigError, match=r"\[train\]: .*train\.parquet has no launches"):
        capacity.read(mix)


def test_a_server_may_be_a_time_and_rates_are_as_recorded(mix: Path) -> None:
    mix.write_text(MIX.replace("rate_hz = 60\n", "") + '[rerank]\nrequest_ms = 2\nclass = "latency"\nrate_hz = 9\n')
    programs = capacity.read(mix)
    assert programs["serve"].rate_hz == pytest.approx(60)
    assert programs["rerank"].recording.trace.gpu_ms == pytest.approx(2) and programs["rerank"].slo_ms is None
    assert [one.recording.name for one in programs.values()] == ["serve", "train", "rerank"]


def test_the_command(cudasched: Run, mix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    done = cudasched("simulate", "--fit", str(mix), "--slo")
    assert (done.returncode, done.stderr) == (0, "")
    assert "serve 60/s, P99 within 5 ms" in done.stdout and "x the rates" in done.stdout
    assert "cudasched, MPS *" in done.stdout and "* take cudasched, MPS: cudasched run --mps" in done.stdout
    assert "time slices: serve: P99 is over 5 ms" in done.stdout
    done = cudasched("simulate", "--fit", str(mix), "--json")
    told = json.loads(done.stdout)
    assert told["kind"] == "fit" and told["data"]["rates_hz"] == {"serve": 60}
    assert told["data"]["modes"]["time_slices"]["scale"] == {"low": 1.0, "value": 1.0, "high": 1.0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fit", "models.toml", "train.parquet"], "no TRACE"),
        (["--fit", "models.toml", "--output", "plot.png", "--rate-hz", "60"], "--rate-hz, --output: --fit takes"),
        (["--fit", "none.toml"], "none.toml: cannot be read"),
        (["--slo", "train.parquet"], "a file of programs with --fit"),
        ([], "name a TRACE"),
    ],
)
def test_the_command_refuses_what_has_no_meaning(cudasched: Run, mix: Path, arguments: list[str], says: str) -> None:
    done = cudasched("simulate", *arguments, cwd=mix.parent)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
