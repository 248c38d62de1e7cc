"""What a trace's files become: Perfetto's protobuf, JSON, a flame graph; and what is made of files that are damaged."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from cudasched._output import Output
from cudasched.errors import ConfigError, Error
from cudasched.observe.trace._file import ProcessTrace, processes
from cudasched.observe.trace._flame import Flame
from cudasched.observe.trace._json import JsonSink
from cudasched.observe.trace._parts import check_limit, convert, format_of
from cudasched.observe.trace._perfetto import varint
from cudasched.observe.trace._timeline import Summary, add_process
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from trace_support import (
    COUNTER,
    LAUNCH,
    PUSH,
    REGION_BEGIN,
    REGION_END,
    TIMED,
    WAIT,
    Parsed,
    block,
    parse,
    record,
    text,
    trace_file,
)

HOSTILE = "a \"quote\", a 'quote', </script><script>alert(1)</script>, a\nnewline, \\, \x1b[2J, \u2028 & <b>"
TEXTS = [
    text(0, 1, "_ZN2at6native4gemmIfEEvPT_"),
    text(1, 1, "latency\0request"),
    text(1, 2, f"best_effort\0{HOSTILE}"),
    text(1, 3, "latency\0"),
]


def converted(directory: Path, form: str = "perfetto", flame: Path | None = None) -> Summary:
    picture = Output(flame) if flame is not None else None
    return convert(directory, Output(directory.parent / f"out.{form}"), form, picture)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    directory = tmp_path / "parts"
    directory.mkdir()
    return directory


def perfetto(parts: Path) -> Parsed:
    pytest.importorskip("perfetto", reason="perfetto is not installed")
    converted(parts)
    return parse(parts.parent / "out.perfetto")


def everything() -> list[bytes]:
    """A request and a best-effort program in one process."""
    graph = 1
    return [
        record(REGION_BEGIN, 1000, what=5, class_number=1, region=1),
        record(LAUNCH, 1100, duration_ns=50, class_number=1, region=1, stream=1),
        record(REGION_END, 2000, what=5, class_number=1, region=1),
        record(PUSH, 2100, duration_ns=10, class_number=2, region=2, thread=2),
        record(WAIT, 2200, duration_ns=500, class_number=2, region=2, thread=0, detail=1),
        record(LAUNCH, 2700, duration_ns=60, class_number=2, region=2, thread=0, detail=4, value=900),
        record(LAUNCH, 2800, duration_ns=60, thread=0, what=77, detail=4 | 8 | graph, value=3 << 16 | 1),
        record(LAUNCH, 2900, duration_ns=60, class_number=2, thread=0, detail=2),
        record(TIMED, 4000, duration_ns=1000, class_number=2, region=2, value=900),
        record(COUNTER, 5100, what=3 << 30, detail=0, device=1),
        record(COUNTER, 5200, what=20_000, detail=1),
        record(REGION_BEGIN, 5300, what=6, class_number=1, region=3),
    ]


def test_everything_is_on_its_track(parts: Path) -> None:
    trace_file(parts, everything(), texts=TEXTS)
    parsed = perfetto(parts)
    assert parsed.processes == {7: "python train.py"}
    request, unfinished = parsed.of("region")
    assert (request.name, request.begin_ns, request.end_ns) == ("request", 2000, 3000), "on the clock since boot"
    assert request.track == "process 7 / thread 1"
    assert unfinished.name == "(latency)"
    assert unfinished.args["unfinished"] is True
    direct, late, sliced, refused = parsed.of("launch")
    assert direct.track == "process 7 / GPU 0, the default stream / launches of thread 1"
    assert (direct.name, direct.args["kernel"]) == ("at::native::gemm", "_ZN2at6native4gemmIfEEvPT_")
    assert (direct.args["class"], direct.args["region"]) == ("latency", "request")
    assert late.track == "process 7 / GPU 0, stream 2 (0x10) / launches by cudasched's launcher thread"
    assert late.args["predicted_ns"] == 900
    assert late.args["deferred"] is True
    assert sliced.name == "graph 1, slice 2 of 3"
    assert refused.args["refused"] is True
    (wait,) = parsed.of("wait")
    assert wait.name == "waits: latency work is active"
    assert (wait.begin_ns, wait.end_ns) == (3200, 3700)
    assert wait.args["region"] == HOSTILE
    (push,) = parsed.of("deferred")
    assert push.track.endswith("launches of thread 2")
    (timed,) = parsed.of("timed")
    assert (timed.begin_ns, timed.end_ns) == (5000, 6000)
    assert (timed.args["predicted_ns"], timed.args["measured_ns"], timed.args["off_by_percent"]) == (900, 1000, -10)
    assert parsed.counters == {
        "process 7 / GPU 1: GPU memory in use, all processes": [(6100, 3 << 30)],
        "process 7 / GPU 0: GPU time in flight, predicted": [(6200, 20_000)],
    }


def test_several_processes_and_files_are_one_timeline(parts: Path) -> None:
    trace_file(parts, [record(LAUNCH, 500)], pid=8, texts=TEXTS, meta={"boottime_ns": 5100})
    trace_file(parts, [record(LAUNCH, 1000)], pid=7, number=3, texts=TEXTS, end=False)
    trace_file(parts, [record(LAUNCH, 2000)], pid=7, number=4, texts=TEXTS, meta={"rotated_away": 12}, dropped=5)
    parsed = perfetto(parts)
    assert [each.begin_ns for each in parsed.on("process 7")] == [2000, 3000]
    assert [each.begin_ns for each in parsed.on("process 8")] == [5500], "by its own reading of the clocks"
    summary = converted(parts)
    assert (summary.processes, summary.launches, summary.rotated_away, summary.dropped) == (2, 3, 12, 5)
    assert (summary.cut_short, summary.damaged) == (0, 0)


def test_json_is_what_chrome_tracing_reads(parts: Path) -> None:
    trace_file(parts, everything(), texts=TEXTS)
    converted(parts, "json")
    document = json.loads((parts.parent / "out.json").read_text())
    events = document["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 9
    request = next(event for event in slices if event["name"] == "request")
    assert (request["ts"], request["dur"], request["pid"]) == (1.0, 1.0, 7)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[request["tid"]] == "thread 1"
    assert {event["ph"] for event in events} == {"M", "X", "C"}


def test_hostile_names_are_text_in_every_form(parts: Path, tmp_path: Path) -> None:
    long = "x" * 10_000
    texts = [text(0, 1, HOSTILE), text(0, 2, long), text(1, 1, f"latency\0{long}"), text(1, 2, f"latency\0{HOSTILE}")]
    records = [record(LAUNCH, 10 * i, what=1 + i % 2, region=1 + i % 2, value=1000) for i in range(4)]
    trace_file(parts, records, texts=texts, meta={"command": [HOSTILE]})
    page = tmp_path / "flame.html"
    converted(parts, "json", page)
    events = json.loads((parts.parent / "out.json").read_text())["traceEvents"]
    assert {HOSTILE, long} <= {event["name"] for event in events}
    written = page.read_text()
    assert written.count("<script") == 2, "the page's own"
    assert "alert(1)</script>" not in written
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', written, re.DOTALL)[1])  # type: ignore[index]
    assert {child["name"] for child in data["children"]} == {HOSTILE, long[:1024]}


def test_a_flame_graph_has_measured_time_where_there_is_any() -> None:
    flame = Flame()
    for _ in range(10):
        flame.launch("train", "gemm", "gemm", 100)
    flame.timed("train", "gemm", "gemm", 300)
    flame.timed("train", "gemm", "gemm", 500)
    flame.launch("train", "copy", "copy", 70)
    flame.launch("train", "unknown", "unknown", 0)
    tree = flame.tree()
    (train,) = tree["children"]
    (own,) = train["children"]
    assert [(kernel["name"], kernel["ns"]) for kernel in own["children"]] == [
        ("gemm", 4000),
        ("copy", 70),
        ("unknown", 0),
    ]
    assert tree["ns"] == train["ns"] == flame.gpu_ns == 4070
    assert flame.without_time == 1
    page = flame.page("@DATA@ of <b>")
    assert "1 launches have no GPU time" in page
    assert page.count("@DATA@ of &lt;b&gt;") == 2, "in its title and its heading"
    assert not re.search("@(TITLE|NOTE)@", page)


def test_a_graph_in_slices_is_one_launch_of_the_flame_graph(parts: Path) -> None:
    graph, sliced = 1, 1 | 8
    slices = [record(LAUNCH, 3000 + 100 * part, what=77, detail=sliced, value=2 << 16 | part) for part in range(2)]
    unknown = [record(LAUNCH, 4000 + 100 * part, what=78, detail=sliced, value=2 << 16 | part) for part in range(2)]
    trace_file(parts, [record(LAUNCH, 2000, what=77, detail=graph, value=900), *slices, *unknown])
    flame = Flame()
    (trace,) = processes(parts)
    add_process(trace, JsonSink(io.BytesIO()), Summary(), flame, None)
    ((graphs,),) = (region["children"] for region in flame.tree()["children"])
    found = [(kernel["name"], kernel["launches"], kernel["ns"]) for kernel in graphs["children"]]
    assert found == [("graph 1", 2, 1800), ("graph 2", 1, 0)]


# ---- what was predicted of a launch


def kernel(number: int, name: str, *, registers: int = 32, local_bytes: int = 0, shared_bytes: int = 0) -> bytes:
    return text(0, number, f"{name}\0\0{registers} {local_bytes} {shared_bytes} 1024")


def shape(number: int, grid: str, block: str, *, cluster: str = "1 1 1", dynamic_shared_bytes: int = 0) -> bytes:
    return text(2, number, f"{grid} {block} {cluster} {dynamic_shared_bytes}")


H200 = text(3, 0, "9 0 132 2048")
OUTLOOK = ("grid", "block", "occupancy", "waves", "sm_utilisation", "block_efficiency", "recommendation", "rule")


def outlook(args: dict[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in OUTLOOK if name in args}


def launch_of(kernel_number: int, shape_number: int, time_ns: int = 1000, **more: Any) -> bytes:
    return record(LAUNCH, time_ns, what=shape_number << 32 | kernel_number, **more)


def only_launch(parts: Path, texts: list[bytes], **more: Any) -> dict[str, Any]:
    trace_file(parts, [launch_of(1, 1, **more)], texts=texts)
    (launch,) = perfetto(parts).of("launch")
    return outlook(launch.args)


# 48 threads are one and a half warps of two; 32 blocks, the most that an SM holds, are 64 of its 64 warps.
FULL = {"grid": "66x1x1", "block": "48x1x1", "occupancy": 1.0, "waves": 0.0156, "sm_utilisation": 0.5}
FULL |= {"block_efficiency": 0.75}


def test_a_launch_has_what_was_predicted_of_it_in_both_forms(parts: Path) -> None:
    texts = [kernel(1, "mine"), shape(1, "66 1 1", "48 1 1"), H200]
    found = only_launch(parts, texts, value=100_000)
    assert found == FULL | {"recommendation": "warning", "rule": "partial_warp"}
    converted(parts, "json")
    events = json.loads((parts.parent / "out.json").read_text())["traceEvents"]
    (launch,) = (event for event in events if event["ph"] == "X")
    assert launch["name"] == "mine", "the shape is no part of the kernel's number"
    assert outlook(launch["args"]) == found


def test_the_same_is_said_where_a_launch_was_timed(parts: Path) -> None:
    texts = [kernel(1, "mine"), shape(1, "66 1 1", "48 1 1"), H200]
    records = [record(TIMED, 1000, what=1 << 32 | 1, duration_ns=9, value=5000), record(PUSH, 1000)]
    trace_file(parts, records, texts=texts)
    parsed = perfetto(parts)
    (timed,), (deferred,) = parsed.of("timed"), parsed.of("deferred")
    assert outlook(timed.args) == FULL | {"recommendation": "warning", "rule": "partial_warp"}
    assert outlook(deferred.args) == {}, "the launcher thread's own call has it"


def test_waves_and_the_blocks_that_fit_go_by_all_that_limits_them(parts: Path) -> None:
    # 128 registers: 16 warps an SM, of 8 each: 2 blocks. 396 blocks of 264 that the GPU holds: one wave and a half.
    texts = [kernel(1, "mine", registers=128), shape(1, "11 12 3", "16 16 1"), H200]
    found = only_launch(parts, texts, value=1_000_000)
    assert (found["grid"], found["block"]) == ("11x12x3", "16x16x1")
    assert (found["occupancy"], found["waves"], found["sm_utilisation"]) == (0.25, 1.5, 0.75)
    assert found["block_efficiency"] == 1
    # 100 KiB of shared memory, static and dynamic: 2 blocks again.
    texts = [kernel(1, "mine", shared_bytes=4096), shape(1, "132 1 1", "256 1 1", dynamic_shared_bytes=96 << 10), H200]
    assert only_launch(parts, texts)["occupancy"] == 0.25


def test_a_level_is_given_only_where_the_trace_can_tell(parts: Path) -> None:
    full, partial = shape(1, "1056 1 1", "256 1 1"), shape(1, "66 1 1", "48 1 1")
    assert only_launch(parts, [kernel(1, "mine"), full, H200])["recommendation"] == "good", "whatever it takes"
    assert "recommendation" not in only_launch(parts, [kernel(1, "mine"), partial, H200]), "that depends on its time"
    assert only_launch(parts, [kernel(1, "mine"), partial, H200], value=1600)["recommendation"] == "good"
    gemm = kernel(1, "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64")
    assert only_launch(parts, [gemm, partial, H200], value=100_000)["recommendation"] == "not judged"


def test_what_is_not_known_is_not_said(parts: Path) -> None:
    assert only_launch(parts, [kernel(1, "mine"), H200]) == {}, "no shape"
    shapes = shape(1, "66 1 1", "48 1 1")
    by_shape = {"grid": "66x1x1", "block": "48x1x1", "block_efficiency": 0.75}
    assert only_launch(parts, [kernel(1, "mine"), shapes]) == by_shape, "no GPU"
    assert only_launch(parts, [text(0, 1, "mine"), shapes, H200]) == by_shape, "nothing of the kernel's resources"
    clusters = shape(1, "66 1 1", "48 1 1", cluster="2 1 1")
    assert only_launch(parts, [kernel(1, "mine"), clusters, H200]) == by_shape, "only the driver knows how many fit"
    trace_file(parts, [record(LAUNCH, 1000, what=1 << 32 | 1, detail=1)], texts=[kernel(1, "mine"), shapes, H200])
    (graph,) = perfetto(parts).of("launch")
    assert (graph.name, outlook(graph.args)) == ("graph 1", {})


@pytest.mark.parametrize("sizes", ["", "1 1 1", "1 1 1 0 1 1 1 1 1 0", "1 1 1 x 1 1 1 1 1 0", "9" * 50 + " 1" * 9])
def test_a_shape_that_is_none_is_left_out(parts: Path, sizes: str) -> None:
    assert only_launch(parts, [kernel(1, "mine"), text(2, 1, sizes), H200], value=5000) == {}


@given(numbers=some.lists(some.integers(0, 1 << 33), min_size=18, max_size=18), takes_ns=some.integers(0, 1 << 31))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_numbers_make_a_trace(parts: Path, numbers: list[int], takes_ns: int) -> None:
    words = list(map(str, numbers))
    texts = [text(0, 1, "mine\0\0" + " ".join(words[:4])), text(2, 1, " ".join(words[4:14]))]
    texts.append(text(3, 0, " ".join(["9", "0", *words[16:]])))
    trace_file(parts, [launch_of(1, 1, value=takes_ns)], texts=texts)
    assert converted(parts, "json").launches == 1


# ---- files that are damaged


def test_a_cut_file_is_read_up_to_its_last_whole_block(parts: Path) -> None:
    path = trace_file(parts, [record(LAUNCH, 1000)], texts=TEXTS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        summary = converted(parts)
        assert summary.launches in (0, 1)
        assert summary.processes == 1
        assert summary.cut_short == 1
    assert summary.launches == 1
    assert summary.damaged == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=some.lists(some.tuples(some.integers(0, 2000), some.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_ends_where_it_is_damaged(parts: Path, changes: list[tuple[int, int]]) -> None:
    path = trace_file(parts, everything(), texts=TEXTS)
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    path.write_bytes(content)
    try:
        converted(parts, "json")
    except Error as error:
        assert str(path) in str(error)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=some.lists(
        some.tuples(
            some.integers(-(1 << 63), (1 << 63) - 1),
            some.integers(0, (1 << 64) - 1),
            some.integers(0, (1 << 64) - 1),
            some.integers(0, (1 << 32) - 1),
            *[some.integers(0, 255)] * 4,
            *[some.integers(0, (1 << 16) - 1)] * 2,
            some.integers(0, (1 << 32) - 1),
        ),
        max_size=20,
    ),
    names=some.lists(some.text(max_size=50), max_size=5),
)
def test_any_records_make_a_trace_that_the_schema_reads(
    parts: Path, fields: list[tuple[int, ...]], names: list[str]
) -> None:
    from cudasched.observe.trace._file import RECORD

    texts = [text(i % 2, i, name) for i, name in enumerate(names)]
    # Kinds that there are, most of the time.
    records = [RECORD.pack(*each[:5], each[5] % 9, *each[6:]) for each in fields]
    trace_file(parts, records, texts=texts)
    perfetto(parts)
    converted(parts, "json")
    json.loads((parts.parent / "out.json").read_text())


@pytest.mark.parametrize(
    "meta",
    [
        {"pid": "x", "command": "rm -rf", "boottime_ns": None},
        {"pid": 1 << 80, "command": [1, {}, None] * 1000, "monotonic_ns": -(1 << 62)},
        {"started_ns": [], "realtime_ns": {"a": 1}},
    ],
)
def test_what_a_file_says_of_its_process_is_not_believed(parts: Path, meta: dict[str, Any]) -> None:
    trace_file(parts, everything(), texts=TEXTS, meta=meta)
    assert len(perfetto(parts).of("launch")) == 4


def test_a_block_that_claims_more_than_there_is_ends_the_file(parts: Path) -> None:
    path = trace_file(parts, [record(LAUNCH, 1)], end=False)
    with path.open("ab") as file:
        file.write(struct.pack("<4sIQII", b"TBLK", 3, 1 << 60, 5, 0))
        file.write(b"x" * 200)
    summary = converted(parts)
    assert (summary.launches, summary.damaged) == (1, 1)
    path.write_bytes(path.read_bytes()[:16] + block(3, b"x" * 79, 2))
    assert converted(parts).launches == 0, "records that do not fit their number"


def test_other_files_are_refused_or_left_alone(parts: Path) -> None:
    (parts / "trace-1-0-000000.records").write_bytes(b"\x89PNG" * 20)
    with pytest.raises(Error, match="is no file of a trace"):
        processes(parts)
    (parts / "trace-1-0-000000.records").write_bytes(struct.pack("<8sII", b"CSDTRACE", 9, 40))
    with pytest.raises(Error, match="version 9; this cudasched reads version 2"):
        processes(parts)
    (parts / "trace-1-0-000000.records").unlink()
    (parts / "notes.txt").write_text("x")
    (parts / "trace-x.records").write_text("x")
    assert processes(parts) == []


def test_a_full_disk_leaves_the_parts_and_what_was_there(parts: Path) -> None:
    trace_file(parts, everything(), texts=TEXTS)
    full = parts.parent / "out.pftrace"
    full.symlink_to("/dev/full")
    with pytest.raises(
        Error, match=r"cannot be written .*; the recorded launches stay in .*parts, and `cudasched trace"
    ):
        convert(parts, Output(full), "perfetto", None)
    assert processes(parts)


def test_nothing_traced_changes_nothing(parts: Path) -> None:
    there = parts.parent / "out.perfetto"
    there.write_text("mine")
    assert converted(parts).processes == 0
    assert there.read_text() == "mine"


def test_options_are_checked() -> None:
    assert format_of(Path("a.json"), None) == "json"
    assert format_of(Path("a.pftrace"), None) == format_of(Path("a.json"), "perfetto") == "perfetto"
    with pytest.raises(ConfigError, match="one of perfetto, json; got 'svg'"):
        format_of(Path("a"), "svg")
    assert check_limit(2) == 2 << 20
    for wrong in (0, -1, 1 << 30):
        with pytest.raises(ConfigError, match="between 1 and"):
            check_limit(wrong)


@given(number=some.integers(0, (1 << 64) - 1))
def test_numbers_are_written_as_protobuf_has_them(number: int) -> None:
    encoder = pytest.importorskip("google.protobuf.internal.encoder", reason="protobuf is not installed")
    assert varint(number) == encoder._VarintBytes(number)


def test_records_of_a_process_that_is_gone_are_read(parts: Path) -> None:
    os.truncate(trace_file(parts, [record(LAUNCH, 1)]), 8)
    (trace,) = processes(parts)
    assert isinstance(trace, ProcessTrace)
    assert list(trace.records()) == []
