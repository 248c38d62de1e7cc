"""Traces of recordings: the launches that belong together, where requests end, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parquet_recordings as recordings
import pytest
from cudasched import ConfigError, Error, simulate
from cudasched.simulate import _recording
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT

pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

DATA = ROOT / "training/data"


def test_reads_what_collect_writes(tmp_path: Path) -> None:
    recorded = recordings.training(tmp_path)
    trace = simulate.read_trace(recorded)
    assert (trace.name, trace.launches, trace.load) == ("training", 500, "resnet50")
    assert 0.8 * 500 * 0.047 < trace.gpu_ms < 1.2 * 500 * 0.047
    cheaper = simulate.read_trace(recorded, recording_us=2)
    assert cheaper.launches == 500 and cheaper.gpu_ms == pytest.approx(trace.gpu_ms)
    fast, slow = (simulate.best_effort(one) for one in (cheaper, trace))
    bare = [simulate.compare([one], [simulate.Arm("open")], seconds=1)[0].best_effort_per_s for one in (fast, slow)]
    assert bare[0] and bare[1] and bare[0] >= bare[1]
    with pytest.raises(Error, match="begins with 'other'"):
        simulate.read_trace(recorded, label="other")
    assert simulate.read_trace(recorded, label="program:resnet50").launches == 500
    with pytest.raises(Error, match="nowhere"):
        simulate.read_trace(recorded.with_name("nowhere.parquet"))


@pytest.mark.parametrize(("timing", "cost_us"), [("cupti", 1.7), ("events", 3.0), ("both", 0), ("", 0)])
def test_the_cost_of_recording_is_taken_off(tmp_path: Path, timing: str, cost_us: float) -> None:
    """By the timing that the recording names, or as the caller says."""
    launches = [(0.01 * number, 0.002) for number in range(1000)]  # bound by the host
    path = recordings.write(tmp_path, "train", launches, {"timing": timing})
    for asked, taken_us in ((None, cost_us), (0.0, 0.0), (4.0, 4.0)):
        trace = simulate.read_trace(path, recording_us=asked)
        alone = simulate.run([simulate.best_effort(trace)], simulate.Arm("open", offload=False), seconds=1)
        assert alone.best_effort_per_s == pytest.approx(1e3 / (10 - taken_us), rel=0.02)


def test_what_is_left_out_leaves_no_hole() -> None:
    # Launches 2 to 9 were another program's, a second long; before them the GPU was done at 300 us.
    submitted = [0, 10_000, 1_000_000_000, 1_000_010_000]
    started: list[int | None] = [3_000, 200_000, 1_000_003_000, None]
    _recording._without_holes([0, 1, 10, 11], submitted, started, [100_000, 100_000, 5_000, 5_000])
    assert submitted == [0, 10_000, 300_000, 310_000]
    assert started == [3_000, 200_000, 303_000, None]


def test_start_up_is_not_replayed_and_what_is_has_a_name() -> None:
    trace = simulate.read_trace(DATA / "h200_programs.parquet")
    assert trace.source == "process 1343 on GPU 0, 1 of 6, launches 38 to 39552 of 39552"
    alone = simulate.compare([simulate.best_effort(trace)], [simulate.Arm()], seconds=2)[0]
    assert alone.best_effort_per_s and alone.best_effort_per_s > 0.5


def launches_of(rows: str, pause_ms: float = 2) -> tuple[list[tuple[float, float]], list[int]]:
    """Launches of 50 us, 10 us apart, with a pause at each space; of a kernel for each letter."""
    launches: list[tuple[float, float]] = []
    at_ms = 0.0
    for letter in rows:
        if letter == " ":
            at_ms += pause_ms
        else:
            launches.append((at_ms, 0.05))
            at_ms += 0.06
    return launches, [ord(letter) for letter in rows if letter != " "]


@pytest.mark.parametrize(
    ("rows", "kept", "requests"),
    [
        # A start-up, a warm-up, requests of which some queued, and one that was cut off.
        ("xyzxyzx xabcabcabc abc abc abcabc abc abc ab", (17, 35), [3] * 6),
        ("abcabcabc abc abc abcabc abc abc", (0, 27), [3] * 9),
        # Two kinds of requests.
        ("ab c abc c ab cab ab c", (0, 15), [2, 1, 2, 1, 1, 2, 1, 2, 2, 1]),
        # As of a model that writes words; the host pauses in two requests.
        ("abb abbb abbbb a bbbbb abbbbbb a bb abbbbbbb", (0, 36), [3, 4, 5, 1, 5, 7, 1, 2, 8]),
        # The host pauses in some: its pieces are no requests.
        (" ".join(["abcd"] * 5 + ["ab cd"] + ["abcd"] * 5 + ["ab cd"]), (0, 48), [4] * 5 + [2, 2] + [4] * 5 + [2, 2]),
        # No two are alike, as of a model that writes words.
        ("abb abbb abbbb abbbbb", (0, 18), [3, 4, 5, 6]),
        ("abcabcabc", (0, 9), [9]),
        ("a", (0, 1), [1]),
    ],
)
def test_requests_are_found_in_a_recording(
    tmp_path: Path, rows: str, kept: tuple[int, int], requests: list[int]
) -> None:
    launches, kernels = launches_of(rows)
    trace = simulate.read_trace(recordings.write(tmp_path, "server", launches, identity=kernels))
    assert trace.launches == kept[1] - kept[0]
    assert [end - begin for begin, end in zip([0, *trace.ends], trace.ends, strict=False)] == requests
    assert trace.source.endswith(f"launches {kept[0] + 1} to {kept[1]} of {len(launches)}") or kept == (
        0,
        len(launches),
    )
    given = simulate.read_trace(tmp_path / "server.parquet", request_gap_ms=1)
    assert given.launches == len(launches) and len(given.ends) == len(rows.split())


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), min_size=1, max_size=30))
def test_requests_divide_what_is_kept(rows: list[list[str]]) -> None:
    what = [letter for row in rows for letter in row]
    ends = [sum(map(len, rows[: place + 1])) for place in range(len(rows))]
    kept, found = _recording._requests(what, ends)
    assert 0 <= kept.start < kept.stop <= len(what)
    assert found == sorted(set(found)) and found[0] > 0 and found[-1] == len(kept)
    pauses = {end - kept.start for end in ends if kept.start < end <= kept.stop}
    assert pauses <= set(found)  # what a pause divides stays so


def test_of_several_parts_the_one_of_most_gpu_time_is_replayed(tmp_path: Path) -> None:
    start_up = [(0.01 * launch, 0.004) for launch in range(600)]
    served_later = [(2000 + 20.0 * request, 0.6) for request in range(100)]
    trace = simulate.read_trace(recordings.write(tmp_path, "server", start_up + served_later))
    assert trace.source.endswith("launches 601 to 700 of 700") and len(trace.ends) == 100


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"duration_ns": -5}, "3 launches have times below 0"),
        ({"start_ns": [5, -5, None]}, "1 launch has times below 0"),
        ({"submitted_ns": [-(1 << 62), 0, 1 << 62]}, "2 launches have times below 0, or beyond any clock's"),
        ({"start_ns": (1 << 63) - 10}, "3 launches have times below 0, or beyond any clock's"),
        ({"duration_ns": 0}, "its launches took no time on the GPU"),
        ({"duration_ns": None}, "no timed launch"),
    ],
)
def test_times_without_meaning_are_refused_by_file(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    """A simulation of them told to simulate more seconds, or named a client."""
    path = recordings.write(tmp_path, "damaged", recordings.steps(count=3), **columns)
    with pytest.raises(Error, match=rf"damaged\.parquet.*{says}.*record it"):
        simulate.read_trace(path)


def test_recordings_of_different_gpus_are_not_simulated_together(tmp_path: Path) -> None:
    server = simulate.read_trace(recordings.write(tmp_path, "serve", recordings.requests(count=20)))
    other = simulate.read_trace(recordings.write(tmp_path, "train", recordings.steps(), {"gpu": "NVIDIA H200"}))
    clients = [simulate.latency(server, rate_hz=60, seconds=0.1), simulate.best_effort(other)]
    with pytest.raises(
        ConfigError, match="serve on NVIDIA H100 80GB HBM3, train on NVIDIA H200; record all on the GPU"
    ):
        simulate.compare(clients, [simulate.Arm()], seconds=0.1)
    clients[0] = simulate.latency(simulate.request(0.5), rate_hz=60, seconds=0.1)
    assert len(simulate.compare(clients, [simulate.Arm()], seconds=0.1)) == 3


def test_a_recording_without_launches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"empty\.parquet has no launches: record the program"):
        simulate.read_trace(recordings.write(tmp_path, "empty", []))


def test_a_recording_without_times_of_submission_is_refused() -> None:
    with pytest.raises(Error, match="does not say when its launches were submitted"):
        simulate.read_trace(DATA / "h200.parquet")
