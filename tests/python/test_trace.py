"""Traces, end to end: `cudasched trace` and `cudasched.trace` over the simulated driver."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cudasched.observe.trace._parts import parts_of
from support import PATIENCE_S, Run
from test_collect import fake_cupti, with_cupti  # noqa: F401  fixtures
from trace_support import parse

pytest.importorskip("perfetto", reason="perfetto is not installed")

LAUNCHER = Path(__file__).with_name("launcher.py")
TRACE = Path("out.pftrace")

PROGRAM = """
import os, signal, sys, threading, time
import cudasched
from program import Gpu
gpu = Gpu()
stream = gpu.stream()
"""

ONE_BLOCK = {"grid": "1x1x1", "block": "32x1x1", "occupancy": 0.5, "block_efficiency": 1.0}
"""What was predicted of a launch of the programs here: 32 of the 64 warps, as an SM holds no more than 32 blocks."""


def traced(cudasched: Run, code: str, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
    return cudasched("trace", "-o", str(TRACE), *options, "--", sys.executable, "-c", PROGRAM + code, **more)


def flame_data(path: str) -> Any:
    page = Path(path).read_text()
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]


# ---- what is recorded


def test_each_launch_of_an_unmodified_program_is_on_the_timeline(cudasched: Run, simulated: Path) -> None:
    ended = cudasched("trace", "-o", str(TRACE), "--", sys.executable, str(LAUNCHER), "50")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "launched 50\n"
    assert ended.stderr.splitlines()[-1] == "cudasched: out.pftrace: 50 launches of 1 process"
    parsed = parse(TRACE)
    (name,) = parsed.processes.values()
    assert name.endswith("launcher.py")
    launches = parsed.of("launch")
    assert [each.name for each in launches] == ["work"] * 50
    assert {each.args["class"] for each in launches} == {"normal"}
    assert all("the default stream" in each.track for each in launches)
    assert all(ONE_BLOCK.items() <= each.args.items() for each in launches)
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert all(now - PATIENCE_S * 10**9 < each.begin_ns <= each.end_ns < now for each in launches)
    assert not parts_of(TRACE).exists()


def test_regions_nest_and_launches_have_them(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        """
with cudasched.region("latency", slo_ms=50, name='a "request"'):
    gpu.launch(2, stream=stream)
    with cudasched.region("latency", name="its end"):
        gpu.launch(1, stream=stream)
gpu.launch(1, stream=stream)
gpu.synchronize()
""",
    )
    assert ended.returncode == 0, ended.stderr
    parsed = parse(TRACE)
    outer, inner = parsed.of("region")
    assert (outer.name, inner.name) == ('a "request"', "its end")
    assert outer.begin_ns < inner.begin_ns < inner.end_ns < outer.end_ns
    assert outer.args == {"class": "latency"}
    launches = parsed.of("launch")
    assert [each.args.get("region") for each in launches] == ['a "request"', 'a "request"', "its end", None]
    assert [each.args["class"] for each in launches] == ["latency"] * 3 + ["normal"]
    assert outer.begin_ns <= launches[0].begin_ns
    assert launches[2].end_ns <= inner.end_ns


def test_a_wait_says_why_and_a_timed_launch_what_was_predicted(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_MAX_IDLE_HOLD_MS", "3600000")
    ended = traced(
        cudasched,
        """
other = gpu.stream()
launched = threading.Event()
def work():
    gpu.use()
    with cudasched.region("best_effort", name="train"):
        for _ in range(40):
            gpu.launch(1, stream=other)
        gpu.synchronize()
request = cudasched.region("latency", name="request")
request.__enter__()
gpu.launch(1, stream=stream)
thread = threading.Thread(target=work)
thread.start()
while cudasched.state().gated_launches == 0:
    time.sleep(0.001)
time.sleep(0.05)
request.__exit__(None, None, None)
thread.join()
with cudasched.region("latency", name="request"):
    gpu.launch(1, stream=stream)
    gpu.synchronize()
""",
    )
    assert ended.returncode == 0, ended.stderr
    parsed = parse(TRACE)
    waits = [each for each in parsed.of("wait") if each.name == "waits: latency work is active"]
    assert waits
    assert waits[0].args == {"class": "best_effort", "region": "train", "launch": "work"}
    assert waits[0].end_ns - waits[0].begin_ns >= 10_000_000, "for as long as the request was open"
    best_effort = [each for each in parsed.of("launch") if each.args["class"] == "best_effort"]
    assert len(best_effort) == 40
    assert {each.args["region"] for each in best_effort} == {"train"}
    deferred = [each for each in best_effort if each.args.get("deferred")]
    assert len(deferred) == len(parsed.of("deferred")) >= 30, "each is there twice: as the program's call, and as made"
    assert all("launcher thread" in each.track for each in deferred)
    assert all(each.args["predicted_ns"] > 0 for each in best_effort)
    timed = parsed.of("timed")
    assert timed
    assert {"predicted_ns", "measured_ns", "off_by_percent"} <= set(timed[0].args)
    for each in (*best_effort, *timed):
        assert ONE_BLOCK.items() <= each.args.items()
    assert all(each.args["recommendation"] for each in (*best_effort, *timed)), "their time was predicted"
    assert timed[0].end_ns - timed[0].begin_ns == timed[0].args["measured_ns"] > 0
    assert ended.stderr.count("waits at the gate") == 1


def test_graphs_and_their_slices(cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_CLASS", "best_effort")
    monkeypatch.setenv("CUDASCHED_GRAPH_SLICES", "always")
    monkeypatch.setenv("CUDASCHED_GRAPH_SLICE_US", "100")
    ended = traced(
        cudasched,
        """
graph = gpu.capture(40, stream)
end = time.monotonic() + 60
while cudasched.state().sliced_launches < 2 and time.monotonic() < end:
    gpu.replay(graph, stream)
    gpu.synchronize()
    time.sleep(0.005)
print(cudasched.state().sliced_launches, cudasched.state().slice_launches)
""",
    )
    assert ended.returncode == 0, ended.stderr
    names = Counter(each.name for each in parse(TRACE).of("launch"))
    sliced, parts = map(int, ended.stdout.split())
    assert sliced == 2
    assert names["graph 1"] > 0, "whole, until it had slices"
    assert sum(count for name, count in names.items() if "slice" in name) == parts
    each = parts // sliced
    assert names[f"graph 1, slice 1 of {each}"] == names[f"graph 1, slice {each} of {each}"] == sliced


def test_memory_and_time_in_flight_are_counted(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        """
import ctypes
memory = ctypes.c_uint64()
gpu.call("cuMemAlloc_v2", ctypes.byref(memory), 64 << 20)
end = time.monotonic() + 0.5
with cudasched.region("best_effort"):
    while time.monotonic() < end:
        gpu.launch(1, stream=stream)
    gpu.synchronize()
""",
    )
    assert ended.returncode == 0, ended.stderr
    counters = parse(TRACE).counters
    (memory,) = [values for name, values in counters.items() if name.endswith("memory in use, all processes")]
    assert all(value >= 64 << 20 for _, value in memory[1:])
    (in_flight,) = [values for name, values in counters.items() if name.endswith("time in flight, predicted")]
    assert in_flight


# ---- several processes


def test_children_are_on_the_same_timeline(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        f"""
import subprocess
gpu.launch(3)
gpu.synchronize()
subprocess.run([sys.executable, {str(LAUNCHER)!r}, "5"], check=True)
""",
    )
    assert ended.returncode == 0, ended.stderr
    parsed = parse(TRACE)
    assert len(parsed.processes) == 2
    mine, childs = (parsed.on(f"process {pid} ") for pid in parsed.processes)
    assert (len(mine), len(childs)) == (3, 5)
    assert mine[-1].end_ns < childs[0].begin_ns


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_forked_child_has_its_own(cudasched: Run, simulated: Path, end: str) -> None:
    ended = cudasched(
        "trace", "-o", str(TRACE), "--", sys.executable, "-c",
        "import os, sys, cudasched\nfrom program import Gpu\n"
        "for count in (2, 3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        gpu = Gpu(); gpu.launch(count); gpu.synchronize(); " + end + "\n"
        "    os.waitpid(child, 0)\n",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    parsed = parse(TRACE)
    assert sorted(len(parsed.on(f"process {pid} ")) for pid in parsed.processes) == [2, 3]


# ---- in the program


def test_a_program_traces_a_part_of_itself(python: Run, simulated: Path) -> None:
    ended = python(
        PROGRAM
        + """
gpu.launch(5, stream=stream)
with cudasched.trace("part.pftrace", flame="flame.html") as first:
    with cudasched.region("latency", name="in it"):
        gpu.launch(7, stream=stream)
    gpu.synchronize()
    try:
        with cudasched.trace("other.pftrace"):
            pass
    except cudasched.Error as error:
        print(error)
gpu.launch(5, stream=stream)
with cudasched.trace("again.json") as second:
    gpu.launch(2, stream=stream)
    os.chdir("/")
print(first.summary.launches, second.summary.launches, first.summary.dropped)
"""
    )
    assert ended.returncode == 0, ended.stderr
    said, counted = ended.stdout.splitlines()
    assert said == "this process is traced already; there is one trace a process at a time"
    assert counted == "7 2 0"
    left = {name for name in os.listdir() if "trace" in name or "json" in name}
    assert left == {"part.pftrace", "again.json"}
    assert len(parse(Path("part.pftrace")).of("launch")) == 7
    events = json.loads(Path("again.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2
    assert "7 launches have no GPU time" in Path("flame.html").read_text()


def test_names_of_directories_need_be_no_utf8(
    python: Run, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run\udcff"))
    ended = python(
        PROGRAM
        + """
from cudasched import _core
os.mkdir("to\\udcff")
_core.trace_start("to\\udcff", 1 << 20)
gpu.launch(3, stream=stream)
base, records, *_ = _core.trace_stop()
print(ascii(os.path.dirname(base)), records > 0, ascii(os.path.basename(_core.run_directory())))
"""
    )
    assert ended.stdout == "'to\\udcff' True 'run\\udcff'\n", ended.stderr


def test_without_a_hook_it_is_said(python: Run, no_driver: Path) -> None:
    ended = python(
        "import cudasched\ntry:\n    cudasched.trace('x').__enter__()\nexcept cudasched.HookError as e:\n    print(e)"
    )
    assert "cudasched's hook is not in this process" in ended.stdout


# ---- device times


def test_device_times_are_on_the_launch_s_stream_and_region(cudasched: Run, with_cupti: Path) -> None:  # noqa: F811
    ended = traced(
        cudasched,
        """
with cudasched.region("latency", name="request"):
    gpu.launch(4, stream=stream)
    gpu.synchronize()
gpu.launch(2)
gpu.synchronize()
""",
        "--device-times",
        "--flame",
        "flame.html",
    )
    assert ended.returncode == 0, ended.stderr
    assert "6 launches of 1 process, 6 with device times" in ended.stderr
    parsed = parse(TRACE)
    on_gpu = parsed.of("gpu")
    assert [each.args.get("region") for each in on_gpu] == ["request"] * 4 + ["(normal)"] * 2 or [
        each.args.get("region") for each in on_gpu
    ] == ["request"] * 4 + [None] * 2
    streams = {each.track.rpartition(" / ")[0] for each in parsed.of("launch")}
    assert {each.track.rpartition(" / ")[0] for each in on_gpu} == streams, "beside the launches"
    data = flame_data("flame.html")
    assert data["launches"] == data["timed"] == 6
    assert {child["name"]: child["launches"] for child in data["children"]}["request"] == 4


def test_device_times_of_a_program_that_becomes_another_are_there_once(cudasched: Run, with_cupti: Path) -> None:  # noqa: F811
    """Guards against each of both having the other's times, too: they have one pid."""
    ended = traced(
        cudasched,
        f"""
gpu.launch(4, stream=stream)
gpu.synchronize()
time.sleep(0.1)
os.execv(sys.executable, [sys.executable, {str(LAUNCHER)!r}, "7"])
""",
        "--device-times",
    )
    assert ended.returncode == 0, ended.stderr
    assert "11 launches of 2 processes, 11 with device times" in ended.stderr
    tracks = Counter(each.track for each in parse(TRACE).of("gpu"))
    assert sorted(tracks.values()) == [4, 7]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_flame_graph_of_a_program_without_a_class_says_that_it_has_no_time(cudasched: Run, simulated: Path) -> None:
    launcher = str(Path(__file__).with_name("launcher.py"))
    done = cudasched("trace", "-o", "t.pftrace", "--flame", "flame.html", "--", sys.executable, launcher, "20")
    assert done.returncode == 0
    assert "20 launches have no time in the flame graph" in done.stderr and "--device-times" in done.stderr


def test_a_flame_graph_names_the_library_that_a_kernel_is_from(cudasched: Run, simulated: Path) -> None:
    image = "cudasched-sim 1\\nkernel shipped params=4 block_us=20\\n"
    Path("kernels.c").write_text(f'char image[] = "{image}";\n')
    subprocess.run(["gcc", "-shared", "-o", "libkernels.so", "kernels.c"], check=True)
    ended = traced(
        cudasched,
        """
import ctypes
module, function = ctypes.c_void_p(), ctypes.c_void_p()
image = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL("./libkernels.so"), "image"))
gpu.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_void_p(image))
gpu.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"shipped"))
value = ctypes.c_uint32(0)
arguments = (ctypes.c_void_p * 1)(ctypes.addressof(value))
with cudasched.region("best_effort", name="train"):
    for _ in range(3):
        gpu.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream), arguments, None)
    gpu.launch(2, stream=stream)
    gpu.synchronize()
""",
        "--flame",
        "flame.html",
    )
    assert ended.returncode == 0, ended.stderr
    (region,) = flame_data("flame.html")["children"]
    found = {(module["name"], kernel["name"]) for module in region["children"] for kernel in module["children"]}
    assert found == {("libkernels.so", "shipped"), ("own", "work")}


# ---- what goes wrong


def test_a_program_that_is_killed_leaves_its_trace(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        """
gpu.launch(20, stream=stream)
gpu.synchronize()
parts = "out.pftrace.parts"
while not any(os.path.getsize(os.path.join(parts, name)) > 20 * 40 for name in os.listdir(parts)):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert "1 of the processes did not come to their end; the launches written before are there" in ended.stderr
    assert len(parse(TRACE).of("launch")) == 20
    assert not parts_of(TRACE).exists()


def test_a_killed_command_is_finished_later(command: str, cudasched: Run, simulated: Path) -> None:
    code = PROGRAM + "gpu.launch(20, stream=stream)\nprint('there', flush=True)\nsys.stdin.read()\n"
    started = subprocess.Popen(
        [command, "trace", "-o", str(TRACE), "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout and started.stdin
    assert started.stdout.readline() == "there\n"
    second = cudasched("trace", "-o", str(TRACE), "--", "true")
    assert second.returncode == 1
    assert "another `cudasched trace` writes into out.pftrace now" in second.stderr
    started.kill()
    started.wait()
    started.stdin.close()  # the program ends
    started.stdout.close()
    end = time.monotonic() + PATIENCE_S
    while "did not come" in (done := cudasched("trace", "-o", "copy")).stderr and time.monotonic() < end:
        pass
    assert done.returncode == 2
    third = cudasched("trace", "-o", str(TRACE), "--", "true")
    assert "holds the files of a `cudasched trace -o out.pftrace` that was never finished" in third.stderr
    finished = cudasched("trace", "-o", str(TRACE))
    assert finished.returncode == 0, finished.stderr
    assert len(parse(TRACE).of("launch")) == 20
    assert not parts_of(TRACE).exists()


def test_files_that_cannot_be_written_are_said_before_anything_runs(cudasched: Run, simulated: Path) -> None:
    for options in (["-o", "nowhere/out.pftrace"], ["-o", "a", "--flame", "nowhere/flame.html"], ["-o", "."]):
        ended = cudasched("trace", *options, "--", sys.executable, "-c", "print('ran')")
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert re.match(r"cudasched: error: (-o|--flame) .+: ", ended.stderr), ended.stderr
    assert not list(Path().glob("*.parts"))


def test_a_trace_and_its_flame_graph_are_two_files(cudasched: Run, simulated: Path) -> None:
    """Guards against a trace that its own flame graph replaced."""
    Path("link").symlink_to("out.pftrace")
    for name in ("out.pftrace", "../" + Path().absolute().name + "/link"):
        ended = cudasched("trace", "-o", "out.pftrace", "--flame", name, "--", sys.executable, "-c", "print('ran')")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert f"--flame {name}: the trace goes there" in ended.stderr


def test_options_without_meaning_are_usage_errors(cudasched: Run, simulated: Path) -> None:
    for options, why in (
        (["--format", "svg"], "one of perfetto, json"),
        (["--limit-mb", "0"], "limit is between 1 and"),
    ):
        ended = cudasched("trace", "-o", "x", *options, "--", "true")
        assert (ended.returncode, why in ended.stderr) == (2, True), ended.stderr
    ended = cudasched("trace", "-o", "x")
    assert (ended.returncode, "there is nothing to finish in x.parts" in ended.stderr) == (2, True)


def test_a_program_without_cuda_traces_nothing(cudasched: Run, simulated: Path) -> None:
    TRACE.write_text("mine")
    ended = cudasched("trace", "-o", str(TRACE), "--", "true")
    assert ended.returncode == 1
    assert "nothing was traced" in ended.stderr
    assert TRACE.read_text() == "mine"


def test_a_directory_that_goes_while_a_process_traces_hurts_nobody(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        "import shutil\nshutil.rmtree('out.pftrace.parts')\ngpu.launch(5)\ngpu.synchronize()\nprint('ran')\n",
    )
    assert ended.stdout == "ran\n"
    assert ended.returncode == 1
    assert "nothing was traced" in ended.stderr


def test_the_limit_keeps_the_newest(cudasched: Run, simulated: Path) -> None:
    ended = traced(
        cudasched,
        "for _ in range(30):\n    gpu.launch(2000, us=1, stream=stream)\n    gpu.synchronize()\n",
        "--limit-mb",
        "1",
    )
    assert ended.returncode == 0, ended.stderr
    kept = len(parse(TRACE).of("launch"))
    found = re.search(r"([\d,]+) records, the oldest, were deleted to keep --limit-mb", ended.stderr)
    assert found
    assert kept + int(found[1].replace(",", "")) >= 60_000
    assert kept * 40 <= 1 << 20


def test_the_trace_may_go_to_standard_output(cudasched: Run, simulated: Path) -> None:
    ended = cudasched(
        "trace", "-o", "/dev/stdout", "--format", "json", "--quiet", "--", sys.executable, "-c",
        PROGRAM + "gpu.launch(3)\ngpu.synchronize()\n",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert sum(event["ph"] == "X" for event in json.loads(ended.stdout)["traceEvents"]) == 3
