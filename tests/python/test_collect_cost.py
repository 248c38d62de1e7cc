"""What recording costs the host, and when that is said."""

from __future__ import annotations

from pathlib import Path

import parquet_recordings as recordings
import pytest
from cudasched import advise, collect, simulate
from cudasched._output import Output
from cudasched.collect._cost import slowed
from cudasched.collect._dataset import fact
from support import Run

pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

CUPTI = {"timing": "cupti"}
HOST_BOUND = [(0.01 * number, 0.002) for number in range(1000)]
LAUNCHES = {
    "bound by the host": (HOST_BOUND, CUPTI),
    "bound by the host, timed by events": (HOST_BOUND, {"timing": "events"}),
    "timed by nobody": (HOST_BOUND, {}),
    "far ahead of the GPU": ([(0.01 * number, 0.02) for number in range(1000)], CUPTI),
    "a graph now and then": ([(0.5 * number, 0.4) for number in range(1000)], CUPTI),
    "requests with pauses": ([(25.0 * number, 0.4) for number in range(1000)], CUPTI),
    "one launch": ([(0, 1.0)], CUPTI),
    "nothing": ([], CUPTI),
}
SLOWED = {
    "bound by the host": "the GPU waits 80% of the time: the known 1.7 us for each launch are 17% of the time",
    "bound by the host, timed by events": "the known 3 us for each launch are 30% of the time",
}


@pytest.mark.parametrize("what", LAUNCHES)
def test_a_program_that_its_recording_slowed_is_told_from_others(tmp_path: Path, what: str) -> None:
    launches, metadata = LAUNCHES[what]
    table = collect.read(recordings.write(tmp_path, "program", launches, metadata))
    said = slowed([table], fact(table, "timing"))
    assert SLOWED.get(what, "") in said and bool(said) == (what in SLOWED), said


def test_launches_without_times_and_of_other_processes_do_not_count(tmp_path: Path) -> None:
    others = [(20.0, 0.002), (40.0, 0.002)]
    durations = [2_000, None] * 500 + [2_000] * 2
    path = recordings.write(
        tmp_path, "program", HOST_BOUND + others, CUPTI, pid=[7] * 1000 + [8] * 2, duration_ns=durations
    )
    table = collect.read(path)
    said = slowed([table], "cupti")
    assert "waits 90% of the time" in said, "of 20 us the GPU ran for 2"
    assert slowed([table.slice(0, 401), table.slice(400)], "cupti") == said


def test_readers_say_it_where_the_cost_is_not_given(cudasched: Run, tmp_path: Path) -> None:
    path = recordings.write(tmp_path, "train", HOST_BOUND, CUPTI, label="step")
    assert "--recording-us" in simulate.read_trace(path).slowed
    assert simulate.read_trace(path, recording_us=2).slowed == ""
    assert simulate.read_trace(path, label="step").slowed == "", "the launches between are not known"
    assert any("recording slowed its host" in note for note in advise(path).notes)
    done = cudasched("simulate", str(path), "--seconds", "0.1")
    assert done.returncode == 0 and "train: recording slowed its host" in done.stdout, done.stderr


@pytest.mark.parametrize(("quiet", "stays"), [(False, True), (True, True), (False, False)])
def test_collect_says_it_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool,
    stays: bool,
) -> None:
    """Of a recording that stays: in others, kernels' times alone count."""
    from cudasched.cli import collect as command

    path = recordings.write(tmp_path, "data", HOST_BOUND, CUPTI)
    metadata = {"rows": "1000", "cudasched.processes": "1", "cudasched.timing": "cupti"}
    monkeypatch.setattr(command, "convert", lambda directory, target: metadata)
    assert command._finish(tmp_path / "none", Output(path), 0, quiet, stays) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "recording slowed its host" in line]
    assert len(said) == (stays and not quiet) and all(line.startswith("cudasched: ") for line in said)
