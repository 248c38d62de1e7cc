"""Recorded launches, end to end: `cudasched collect`, `cudasched.collect`, cut-short journals, the data set."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cudasched import collect, errors
from cudasched.cli.collect import _report
from cudasched.collect._dataset import _counts_agree, convert, journals_of, schema
from cudasched.collect._journal import scan
from support import PATIENCE_S, ROOT, Run

LAUNCHER = Path(__file__).with_name("launcher.py")

# Launches with a pointer, a number and a graph; says what it launched.
PROGRAM = f"""
import ctypes, sys
sys.path.insert(0, {str(LAUNCHER.parent)!r})
from launcher import Gpu
gpu = Gpu()
module, function, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
gpu.call("cuMemAlloc_v2", ctypes.byref(memory), 4096)
image = ctypes.c_char_p(b"cudasched-sim 1\\nkernel scale params=8,4,4 block_us=20\\n")
gpu.call("cuModuleLoadData", ctypes.byref(module), image)
gpu.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"scale"))
stream = ctypes.c_void_p(gpu.stream())
def launch(rows, columns, grid=(3, 2, 1), shared=0):
    values = (ctypes.c_uint64(memory.value + 256), ctypes.c_uint32(rows), ctypes.c_uint32(columns))
    pointers = (ctypes.c_void_p * 3)(*[ctypes.addressof(value) for value in values])
    gpu.call("cuLaunchKernel", function, *grid, 64, 1, 1, shared, stream, pointers, None)
"""


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcupti that the C++ tests use (tests/csrc/telemetry/fake_cupti.cpp)."""
    built = Path(os.environ.get("CUDASCHED_LIB_DIR", "/nonexistent")) / "test" / "fake_cupti.so"
    if built.is_file():
        return built
    homes = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvidia = importlib.util.find_spec("nvidia")
    homes += [Path(home) / "cu13/include" for home in (nvidia.submodule_search_locations or [] if nvidia else [])]
    homes += [Path("/usr/local/cuda/include"), Path("/usr/local/cuda/extras/CUPTI/include")]
    compiler = shutil.which("g++")
    if compiler is None or not any((home / "cupti.h").is_file() for home in homes):
        pytest.skip("needs g++ and the headers of CUPTI: pip install 'nvidia-cuda-cupti==13.0.*'")
    library = tmp_path_factory.mktemp("cupti") / "fake_cupti.so"
    source = ROOT / "tests/csrc/telemetry/fake_cupti.cpp"
    includes = [option for home in homes if home.is_dir() for option in ("-isystem", str(home))]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *includes, str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=PATIENCE_S)
    return library


@pytest.fixture
def with_cupti(fake_cupti: Path, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDASCHED_CUPTI", str(fake_cupti))
    return fake_cupti


def run_launcher(cudasched: Run, *options: str, launches: int = 50) -> subprocess.CompletedProcess[str]:
    return cudasched("collect", "-o", "data.parquet", *options, "--", sys.executable, str(LAUNCHER), str(launches))


def metadata(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_multiprocessing_are_recorded(cudasched: Run, simulated: Path, tmp_path: Path, method: str) -> None:
    """Forked ones end by os._exit, which runs no exit handlers."""
    program = tmp_path / "workers.py"
    program.write_text(
        "import multiprocessing\n"
        "def work():\n"
        "    from launcher import Gpu\n"
        "    gpu = Gpu(); gpu.launch(20); gpu.synchronize()\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    workers = [context.Process(target=work) for _ in range(2)]\n"
        "    for worker in workers: worker.start()\n"
        "    for worker in workers: worker.join()\n"
    )
    done = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    assert pq.read_table("data.parquet").num_rows == 40


def test_the_end_of_a_recording_waits_for_each_gpu(
    python: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    done = python(
        "import cudasched\n"
        "from program import Gpu\n"
        "gpus = [Gpu(0), Gpu(1)]\n"
        "with cudasched.collect('data.parquet', timing='events'):\n"
        "    for gpu, us in zip(gpus, (20_000, 20)): gpu.use(); gpu.launch(us=us)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert pq.read_table("data.parquet")["duration_ns"].null_count == 0


# ---- the command


@pytest.mark.parametrize("timing", ["events", "cupti", "both"])
def test_each_launch_of_an_unmodified_program_is_a_row(
    cudasched: Run, timing: str, simulated: Path, request: pytest.FixtureRequest
) -> None:
    if timing != "events":
        request.getfixturevalue("with_cupti")
    ended = run_launcher(cudasched, "--timing", timing, "--label", "work|1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "launched 50\n"
    table = collect.read("data.parquet")
    assert table.schema.remove_metadata().equals(schema(timing))
    assert ("elapsed_ns" in table.column_names) == (timing == "both")
    assert table["launch"].to_pylist() == list(range(50))
    assert set(table["function"].to_pylist()) == {"work"}
    assert set(table["kind"].to_pylist()) == {"kernel"}
    assert set(table["label"].to_pylist()) == {"work|1"}
    assert table["duration_ns"].null_count == 0
    assert pc.min(table["duration_ns"]).as_py() > 0
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["grid_x"], first["block_x"], first["registers"]) == (1, 32, 32)
    assert first["blocks_per_sm"] == 4
    assert first["waves"] == pytest.approx(1 / (4 * 132))
    about = metadata(table)
    assert about["cudasched.schema"] == "1"
    assert about["cudasched.timing"] == timing
    assert about["cudasched.compute_capability"] == "9.0"
    assert about["cudasched.sm_count"] == "132"
    assert about["cudasched.lost"] == about["cudasched.cut_short"] == about["cudasched.by_order"] == "0"
    assert not journals_of(Path("data.parquet")).exists()


def test_starts_are_on_the_clock_of_submissions(cudasched: Run, with_cupti: Path) -> None:
    run_launcher(cudasched)
    table = collect.read("data.parquet")
    waits = pc.subtract(table["start_ns"], table["submitted_ns"])
    assert pc.min(waits).as_py() > -1_000_000
    assert pc.max(waits).as_py() < PATIENCE_S * 1_000_000_000  # the stand-in's own clock is 1000 s ahead


def test_pointers_are_out_and_numbers_are_in(cudasched: Run, with_cupti: Path) -> None:
    code = PROGRAM + "launch(3, 5)\nlaunch(7, 9, shared=128)\ngpu.synchronize()\n"
    ended = cudasched("collect", "-o", "data.parquet", "--", sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    rows = collect.read("data.parquet").to_pylist()
    assert [row["words"] for row in rows] == [[0, 0, 3, 5], [0, 0, 7, 9]]
    assert [row["pointers"] for row in rows] == [[0, 1], [0, 1]]
    assert [row["parameter_bytes"] for row in rows] == [16, 16]
    assert [row["dynamic_shared_bytes"] for row in rows] == [0, 128]
    assert rows[0]["identity"] == rows[1]["identity"] != 0
    assert {row["stream"] for row in rows} == {2}


def test_the_most_memory_that_was_held_is_told(cudasched: Run, simulated: Path) -> None:
    code = (
        PROGRAM
        + """
block = ctypes.c_uint64()
for mib in (300, 500, 200):
    gpu.call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(mib << 20))
    gpu.call("cuMemFree_v2", block)
launch(1, 1)
gpu.synchronize()
"""
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    about = metadata(collect.read("data.parquet"))
    assert 500 <= int(about["cudasched.memory_peak"]) >> 20 < 600 and int(about["cudasched.memory"]) >> 30 == 64


def test_a_graph_is_one_row_and_captured_launches_none(cudasched: Run, simulated: Path) -> None:
    code = (
        PROGRAM
        + """
graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
gpu.call("cuStreamBeginCapture_v2", stream, 1)
for i in range(5): launch(1, i)
gpu.call("cuStreamEndCapture", stream, ctypes.byref(graph))
gpu.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
for _ in range(3): gpu.call("cuGraphLaunch", executable, stream)
gpu.synchronize()
"""
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    table = collect.read("data.parquet")
    whole = json.loads(metadata(table)["cudasched.whole_graphs"])
    assert {reason: (said[0], said[2]) for reason, said in whole.items()} == {"short": (1, 5)}
    rows = table.to_pylist()
    assert [(row["kind"], row["function"], row["graph"]) for row in rows] == [("graph", "graph", 1)] * 3
    assert all(row["words"] == [] and row["duration_ns"] > 0 for row in rows)


def test_overlapping_launches_say_so(cudasched: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_launcher(cudasched)
    assert not any(collect.read("data.parquet")["overlapped"].to_pylist())
    monkeypatch.setenv("FAKE_CUPTI_OVERLAP", "1")
    monkeypatch.setenv("FAKE_CUPTI_NS", "1000000000")
    run_launcher(cudasched, launches=10)
    assert all(collect.read("data.parquet")["overlapped"].to_pylist())


def test_without_correlations_order_joins_and_the_file_says_so(
    cudasched: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUPTI_SILENT", "1")
    ended = run_launcher(cudasched)
    table = collect.read("data.parquet")
    assert table["duration_ns"].null_count == 0
    assert metadata(table)["cudasched.by_order"] == "50"
    assert "by their order alone" in ended.stderr


def test_lost_records_leave_rows_without_times(
    cudasched: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUPTI_DROP", "5")
    run_launcher(cudasched)
    table = collect.read("data.parquet")
    assert table.num_rows == 50
    assert table["duration_ns"].null_count == table["start_ns"].null_count == 10


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [("FAKE_CUPTI_HELD", "1", "another profiler holds CUPTI"), ("FAKE_CUPTI_VERSION", "17", "API version 17")],
)
def test_a_program_whose_cupti_cannot_be_had_runs_all_the_same(
    cudasched: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, what: str
) -> None:
    monkeypatch.setenv(variable, value)
    ended = run_launcher(cudasched)
    assert (ended.returncode, ended.stdout) == (1, "launched 50\n")  # the program's, but nothing was recorded
    assert what in ended.stderr
    assert "no launch was recorded" in ended.stderr and not Path("data.parquet").exists()


def test_on_the_simulated_driver_cupti_is_not_tried(cudasched: Run, simulated: Path) -> None:
    """Guards against advice to stop another profiler, where there is no device to profile."""
    done = run_launcher(cudasched)
    assert done.returncode == 2 and "--timing events" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not Path("data.parquet").exists() and not Path("data.parquet.journals").exists()


def test_several_processes_are_one_data_set(cudasched: Run, simulated: Path) -> None:
    code = (
        "import subprocess, sys\n"
        f"runs = [subprocess.Popen([sys.executable, {str(LAUNCHER)!r}, str(10 * (i + 1))]) for i in range(3)]\n"
        "sys.exit(sum(run.wait() for run in runs))\n"
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    table = collect.read("data.parquet")
    counts = table.group_by("pid").aggregate([("launch", "count")])
    assert sorted(counts["launch_count"].to_pylist()) == [10, 20, 30]
    assert metadata(table)["cudasched.processes"] == "3"


def test_forked_children_record_for_themselves(cudasched: Run, simulated: Path) -> None:
    code = (
        f"import os, sys\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\nfrom launcher import Gpu\n"
        "children = []\n"
        "for i in range(2):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        gpu = Gpu(); gpu.launch(5); gpu.synchronize(); sys.exit(0)\n"
        "    children.append(pid)\n"
        "gpu = Gpu(); gpu.launch(7)\n"
        "if (pid := os.fork()) == 0: os._exit(0)\n"
        "gpu.launch(1); gpu.synchronize()\n"
        "sys.exit(max(os.waitpid(child, 0)[1] for child in [*children, pid]))\n"
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    counts = collect.read("data.parquet").group_by("pid").aggregate([("launch", "count")])
    assert sorted(counts["launch_count"].to_pylist()) == [5, 5, 8]


def test_what_a_killed_program_had_written_is_there(cudasched: Run, simulated: Path) -> None:
    code = (
        f"import os, signal, sys, time\nfrom pathlib import Path\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\n"
        "from launcher import Gpu\ngpu = Gpu(); gpu.launch(20); gpu.synchronize()\n"
        "from cudasched.collect._journal import scan\n"
        "while sum(scan(path).rows for path in Path('data.parquet.journals').iterdir()) < 20: time.sleep(0.01)\n"
        "gpu.launch(3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    table = collect.read("data.parquet")
    assert table.num_rows >= 20
    assert metadata(table)["cudasched.cut_short"] == "1"
    assert "did not come to their end" in ended.stderr


def test_a_full_disk_costs_launches_and_nothing_else(cudasched: Run, simulated: Path) -> None:
    code = (
        f"import resource, sys\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\nfrom launcher import Gpu\ngpu = Gpu()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "gpu.launch(500); gpu.synchronize(); print('done')\n"
    )
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", sys.executable, "-c", code)
    assert ended.stdout == "done\n", ended.stderr
    assert "cannot be written" in ended.stderr
    recorded = collect.read("data.parquet").num_rows if Path("data.parquet").exists() else 0
    assert recorded < 500
    assert ended.returncode == (0 if recorded else 1)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_the_programs_exit_code_is_the_commands(cudasched: Run, simulated: Path) -> None:
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", "sh", "-c", "exit 7")
    assert ended.returncode == 7
    assert not Path("data.parquet").exists()


def test_usage_errors_are_one_line(cudasched: Run, simulated: Path) -> None:
    for arguments, what in (
        (["-o", "x.parquet", "--timing", "sundial", "--", "true"], "--timing"),
        (["-o", "x.parquet"], "nothing to finish"),
        (["-o", "x.csv", "--timing", "events", "--", "true"], "-o x.csv: name a file that ends in .parquet or .pq"),
        (["-o", "nowhere/x.parquet", "--timing", "events", "--", "true"], "there is no directory"),
    ):
        ended = cudasched("collect", *arguments)
        assert ended.returncode != 0
        assert what in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
    assert not list(Path().glob("x.parquet*"))


def test_an_unfinished_collection_is_not_overwritten_and_can_be_finished(cudasched: Run, simulated: Path) -> None:
    run_launcher(cudasched, "--timing", "events")
    journals = journals_of(Path("data.parquet"))
    journals.mkdir()
    ended = run_launcher(cudasched, "--timing", "events")
    assert ended.returncode == 1
    assert "finishes it" in ended.stderr
    ended = cudasched("collect", "-o", "data.parquet")
    assert ended.returncode == 1 and "kept as it was" in ended.stderr  # nothing had been recorded
    assert not journals.exists()
    assert collect.read("data.parquet").num_rows == 50


@pytest.mark.parametrize("options", [["collect", "--timing", "events"], ["trace"]])
def test_launches_that_a_stream_does_not_take_are_said_to_be_lost(
    options: list[str], cudasched: Run, simulated: Path
) -> None:
    ended = cudasched(*options, "-o", "/dev/full", "--", sys.executable, str(LAUNCHER), "5")
    assert ended.returncode == 1
    assert ended.stderr.endswith("the recorded launches are lost: name a file with -o, beside which they stay\n")


def test_an_empty_recording_does_not_replace_a_good_one(cudasched: Run, simulated: Path) -> None:
    run_launcher(cudasched, "--timing", "events")
    before = Path("data.parquet").read_bytes()
    ended = cudasched("collect", "-o", "data.parquet", "--timing", "events", "--", "true")
    assert ended.returncode == 1
    assert "no launch was recorded" in ended.stderr and "data.parquet was there before, and is kept" in ended.stderr
    assert Path("data.parquet").read_bytes() == before
    assert not journals_of(Path("data.parquet")).exists()


def test_a_cupti_that_fails_does_not_cost_a_good_recording(
    cudasched: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_launcher(cudasched).returncode == 0
    before = Path("data.parquet").read_bytes()
    monkeypatch.setenv("FAKE_CUPTI_HELD", "1")
    ended = run_launcher(cudasched)
    assert ended.returncode == 1 and Path("data.parquet").read_bytes() == before


@pytest.mark.parametrize(("what", "option"), [("collect", "--timing"), ("collect", "--label"), ("trace", "--limit-mb")])
def test_what_is_finished_takes_no_option_of_recording(cudasched: Run, what: str, option: str) -> None:
    done = cudasched(what, "-o", "data", option, "64" if what == "trace" else "events")
    assert done.returncode == 2 and done.stderr.startswith(f"cudasched: error: {option}: the launches of a killed")


def test_a_second_collection_into_the_same_file_is_refused_while_one_runs(
    cudasched: Run, command: str, simulated: Path
) -> None:
    waits = [command, "collect", "-o", "data.parquet", "--timing", "events", "--", "sh", "-c", "echo on; read line"]
    first = subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "on\n"
        for arguments in (["--timing", "events", "--", "true"], []):  # another one, and one that would finish it
            ended = cudasched("collect", "-o", "data.parquet", *arguments)
            assert ended.returncode == 1 and "another `cudasched collect` writes into data.parquet" in ended.stderr
        assert journals_of(Path("data.parquet")).is_dir()
    finally:
        first.communicate("\n", timeout=PATIENCE_S)
    assert run_launcher(cudasched, "--timing", "events").returncode == 0


# ---- in a program


RECORDED = f"""
import os, sys
import cudasched
sys.path.insert(0, {str(LAUNCHER.parent)!r})
from launcher import Gpu
with cudasched.collect("data.parquet", timing="events") as recording:
    gpu = Gpu()
    gpu.launch(3)
    cudasched.collect.label("second")
    gpu.launch(2)
    cudasched.collect.label("")
    gpu.launch(1)
gpu.launch(10)
with cudasched.collect.recording("again.parquet", timing="events"):
    gpu.launch(4)
    os.chdir("/")
gpu.synchronize()
print(recording.rows, recording.lost)
"""


def test_a_recording_has_the_launches_of_its_block(python: Run, simulated: Path) -> None:
    ended = python(RECORDED)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["6", "0"]
    assert Path("again.parquet").is_file() and collect.read("again.parquet").num_rows == 4
    table = collect.read("data.parquet")
    assert table["label"].to_pylist() == ["", "", "", "second", "second", ""]
    assert table["duration_ns"].null_count == 0


def test_recordings_do_not_nest_and_say_why(python: Run, simulated: Path) -> None:
    ended = python(
        f"import sys, cudasched\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\nfrom launcher import Gpu\ngpu = Gpu()\n"
        "with cudasched.collect('a.parquet', timing='events'):\n"
        "    try:\n"
        "        with cudasched.collect('b.parquet', timing='events'): pass\n"
        "    except cudasched.Error as error: print(error)\n"
        "    gpu.launch(2)\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert "collected already" in ended.stdout
    assert collect.read("a.parquet").num_rows == 2
    assert not list(Path().glob("b.parquet*"))


def test_a_recording_that_could_not_begin_leaves_nothing_in_the_way(
    python: Run, with_cupti: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUPTI_HELD", "1")
    ended = python(
        f"import sys, cudasched\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\nfrom launcher import Gpu\n"
        "try:\n"
        "    with cudasched.collect('a.parquet'): gpu = Gpu(); gpu.launch(1)\n"
        "except cudasched.Error as error: print(error)\n"
        "with cudasched.collect('a.parquet', timing='events'): gpu.launch(2)\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert "another profiler holds CUPTI" in ended.stdout
    assert collect.read("a.parquet").num_rows == 2


def test_without_the_hook_a_recording_is_refused(python: Run, no_driver: Path) -> None:
    ended = python("import cudasched\nwith cudasched.collect('a.parquet'): pass")
    assert ended.returncode == 1
    assert "HookError" in ended.stderr
    assert not list(Path().glob("a.parquet*"))


@pytest.mark.parametrize("package", ["pyarrow", "numpy"])
def test_without_a_package_the_message_says_what_to_install(python: Run, simulated: Path, package: str) -> None:
    ended = python(f"import sys; sys.modules['{package}'] = None\nimport cudasched\ncudasched.collect.read('x')")
    assert ended.returncode == 1
    assert "pip install 'cudasched[collect]'" in ended.stderr


def test_importing_cudasched_loads_neither_pyarrow_nor_numpy(python: Run, no_driver: Path) -> None:
    ended = python("import cudasched, cudasched.collect, sys; print('pyarrow' in sys.modules, 'numpy' in sys.modules)")
    assert ended.stdout.split() == ["False", "False"], ended.stderr


@pytest.mark.parametrize(("stays", "said"), [(True, "kept.parquet: 3 launches"), (False, "recorded 3 launches")])
def test_a_file_that_does_not_stay_is_not_named(stays: bool, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`cudasched advise` named its own temporary file."""
    metadata = {"rows": "3", "cudasched.processes": "1", "cudasched.timing": "events"}
    assert _report(Path("kept.parquet"), metadata, quiet=False, stays=stays) == 0
    error = capsys.readouterr().err
    assert error == f"cudasched: {said} of 1 process, timed by events\n"


# ---- journals and data sets


@pytest.fixture
def journal(cudasched: Run, simulated: Path, tmp_path: Path) -> bytes:
    """A whole journal of 40 launches in several blocks."""
    directory = tmp_path / "kept"
    directory.mkdir()
    code = (
        f"import sys, time\nsys.path.insert(0, {str(LAUNCHER.parent)!r})\nfrom launcher import Gpu\ngpu = Gpu()\n"
        "from pathlib import Path\nfrom cudasched.collect._journal import scan\n"
        "path = next(Path(sys.argv[1]).iterdir())\n"
        "for turn in range(1, 5):\n"
        "    gpu.launch(10); gpu.synchronize()\n"
        "    while scan(path).rows < 10 * turn: time.sleep(0.01)\n"
    )
    environment = {**os.environ, "CUDASCHED_COLLECT_DIR": str(directory), "CUDASCHED_COLLECT_TIMING": "events"}
    ended = cudasched("run", "--", sys.executable, "-c", code, str(directory), env=environment)
    assert ended.returncode == 0, ended.stderr
    (path,) = directory.iterdir()
    assert scan(path).rows == 40
    assert scan(path).end["rows"] == 40
    return path.read_bytes()


def read_back(data: bytes, directory: Path) -> list[int]:
    directory.mkdir(exist_ok=True)
    (directory / "launches-1-0.journal").write_bytes(data)
    launches = collect.read(directory)["launch"].to_pylist()
    assert launches == list(range(len(launches)))
    return launches


def test_every_truncation_reads_up_to_the_last_whole_block(journal: bytes, tmp_path: Path) -> None:
    counts = [len(read_back(journal[:length], tmp_path / "cut")) for length in range(0, len(journal), 7)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert len(set(counts)) >= 4
    assert len(read_back(journal, tmp_path / "cut")) == 40


def test_damage_ends_a_journal_or_is_refused(journal: bytes, tmp_path: Path) -> None:
    for at in range(0, len(journal), 41):
        damaged = bytearray(journal)
        damaged[at] ^= 0x55
        try:
            assert len(read_back(bytes(damaged), tmp_path / "damaged")) <= 40
        except errors.Error as error:
            assert at < 16, "only what is no journal at all is refused"
            assert "journal" in str(error)


def test_a_journal_of_another_version_is_refused(journal: bytes, tmp_path: Path) -> None:
    with pytest.raises(errors.Error, match="version 2"):
        read_back(journal[:8] + b"\x02" + journal[9:], tmp_path / "later")
    with pytest.raises(errors.Error, match="no journal"):
        read_back(b"PAR1" + journal, tmp_path / "other")


def test_an_unfinished_data_set_is_read_from_its_journals(journal: bytes, tmp_path: Path) -> None:
    directory = journals_of(tmp_path / "data.parquet")
    directory.mkdir()
    (directory / "launches-1-0.journal").write_bytes(journal[: len(journal) * 2 // 3])
    table = collect.read(tmp_path / "data.parquet")
    assert 0 < table.num_rows < 40
    assert metadata(table)["cudasched.cut_short"] == "1"
    with pytest.raises(errors.Error, match="has no journals"):
        collect.read(tmp_path)


def test_a_data_set_that_cannot_be_written_leaves_what_was_there(journal: bytes, tmp_path: Path) -> None:
    directory = tmp_path / "journals"
    directory.mkdir()
    (directory / "launches-1-0.journal").write_bytes(journal)
    output = tmp_path / "out.parquet"
    output.write_bytes(b"before")
    (directory / "launches-1-1.journal").write_bytes(b"no journal, and long enough to tell")
    with pytest.raises(errors.Error, match="no journal"):
        convert(directory, output)
    assert output.read_bytes() == b"before"
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.Error, match="there is no data set"):
        collect.read(tmp_path / "nothing.parquet")
    (tmp_path / "text.parquet").write_text("hello, this is no Parquet")
    with pytest.raises(errors.Error, match="is no data set of launches"):
        collect.read(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(errors.Error, match="no version"):
        collect.read(tmp_path / "other.parquet")
    later = pa.table({"a": [1]}).replace_schema_metadata({"cudasched.schema": "2"})
    pq.write_table(later, tmp_path / "later.parquet")
    with pytest.raises(errors.Error, match="schema version 2"):
        collect.read(tmp_path / "later.parquet")


# ---- rows that another tool has chosen


@pytest.fixture
def recorded(journal: bytes, tmp_path: Path) -> Path:
    """A data set of the journal's launches."""
    directory = tmp_path / "some.journals"
    directory.mkdir()
    (directory / "1.journal").write_bytes(journal)
    convert(directory, tmp_path / "whole.parquet")
    return tmp_path / "whole.parquet"


def test_rows_that_pyarrow_has_chosen_are_a_recording(recorded: Path, tmp_path: Path) -> None:
    """Guards against a seal over the number of rows, by which a filtered recording was called damaged."""
    for table in (collect.read(recorded), pq.read_table(recorded)):
        chosen = table.slice(0, len(table) // 2)
        pq.write_table(chosen, tmp_path / "chosen.parquet")
        found = collect.read(tmp_path / "chosen.parquet")
        assert found.cast(chosen.schema).equals(chosen)
        assert found.schema.metadata[b"cudasched.gpu"] == table.schema.metadata[b"cudasched.gpu"]


def test_what_is_missing_of_the_rows_is_damage(recorded: Path, tmp_path: Path) -> None:
    """The footer's number of rows has no checksum, and each column says it again."""
    footer = pq.ParquetFile(recorded).metadata
    names = ("num_rows", "num_columns", "num_row_groups", "schema", "row_group")
    damaged = SimpleNamespace(**{name: getattr(footer, name) for name in names})
    assert _counts_agree(footer) and _counts_agree(damaged)
    damaged.num_rows -= 1
    assert not _counts_agree(damaged)


@pytest.mark.parametrize("tool", ["pyarrow", "pandas", "polars", "duckdb"])
def test_rows_that_another_tool_has_chosen_are_written_as_a_recording(
    tool: str, recorded: Path, tmp_path: Path
) -> None:
    module = pytest.importorskip(tool)
    table = collect.read(recorded)
    half = len(table) // 2
    chosen = {
        "pyarrow": lambda: table.filter(pc.less(table["launch"], half)),
        "pandas": lambda: table.to_pandas()[lambda frame: frame["launch"] < half],
        "polars": lambda: module.from_arrow(table).filter(module.col("launch") < half),
        "duckdb": lambda: module.sql(f"SELECT * FROM '{recorded}' WHERE launch < {half}"),
    }[tool]()
    collect.write(chosen, tmp_path / "chosen.parquet", like=None if tool == "pyarrow" else recorded)
    found = collect.read(tmp_path / "chosen.parquet")
    wanted = table.filter(pc.less(table["launch"], half))
    assert 0 < len(found) < len(table) and found.schema.equals(wanted.schema)
    assert found.to_pylist() == wanted.to_pylist()
    assert found.schema.metadata == table.schema.metadata


def test_rows_that_are_no_recordings_are_refused_by_name(recorded: Path, tmp_path: Path) -> None:
    table, path = collect.read(recorded), tmp_path / "made.parquet"
    with pytest.raises(errors.Error, match="name the recording that the rows are from"):
        collect.write(table.replace_schema_metadata(None), path)
    with pytest.raises(errors.Error, match="columns duration_ns are missing"):
        collect.write(table.drop_columns(["duration_ns"]), path)
    place = table.column_names.index("duration_ns")
    with pytest.raises(errors.Error, match="column duration_ns holds double, which is no int64"):
        collect.write(table.set_column(place, "duration_ns", pa.array([0.5] * len(table))), path)
    with pytest.raises(errors.Error, match="column launch lacks values"):
        collect.write(table.set_column(0, "launch", pa.nulls(len(table), pa.uint64())), path)
    with pytest.raises(errors.Error, match="is no table of launches"):
        collect.write("rows", path, like=table)
    twice = table.append_column("grid_x", table["grid_x"])
    with pytest.raises(errors.Error, match="columns grid_x come twice"):
        collect.write(twice, path)
    assert not path.exists()
    pq.write_table(twice, path)
    with pytest.raises(errors.Error, match=r"made\.parquet is no data set of launches: columns grid_x come twice"):
        collect.read(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(errors.Error, match=r"collect\.write\(rows, file, like=recording\)"):
        collect.read(path)


def test_the_document_lists_the_columns() -> None:
    text = (ROOT / "docs/dataset.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE)
    assert [name for name, _ in listed] == schema("both").names
    kinds = {field.name: str(field.type) for field in schema("both")}
    named = {"dictionary": "dictionary<values=string, indices=int32, ordered=0>", "float32": "float"}
    for name, kind in listed:
        wanted = named.get(kind, kind.replace("list<", "list<item: ") if kind.startswith("list<") else kind)
        assert kinds[name] == wanted.replace("list<item: ", "list<item: "), name
