"""Compiling and measuring in worker processes, over the simulated driver, whose kernels are text (double.hpp)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axpy_space
import pytest
from axpy_space import REFERENCE, SPACE
from cudasched.errors import ConfigError, Error
from cudasched.tune import Settings, as_header, read, tune, workers
from cudasched.tune import compile as compilation
from cudasched.tune import profile as tools
from cudasched.tune.compile import Compiled
from cudasched.tune.measurement import Measurement
from cudasched.tune.workers import Limits, Live, Request, Worker
from support import PATIENCE_S, Run
from test_control import eventually

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

IMAGE = (
    axpy_space.IMAGE
    + """kernel none params=8,8,4,4 regs=32 threads_max=1024 block_us=2 effect=none
kernel slow params=8,8,4,4 block_us=900000 effect=axpy
"""
)


@pytest.fixture
def axpy(tmp_path: Path, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the kernel, its space and its reference; the device is as fast as a real one."""
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "1")
    (tmp_path / "axpy.cubin").write_text(IMAGE)
    (tmp_path / "axpy.toml").write_text(SPACE)
    (tmp_path / "reference.py").write_text(REFERENCE)
    return tmp_path


def measured(directory: Path, space: str = SPACE, **options: object) -> dict[tuple[int, int], Measurement]:
    (directory / "axpy.toml").write_text(space)
    chosen = read(directory / "axpy.toml")
    assert chosen.source is not None
    with Live(chosen, chosen.source, processes=2, **options) as live:  # type: ignore[arg-type]
        requests = [Request(i, 3) for i in range(len(live.problem.configurations))]
        found = {}
        for request, made in live.measure(requests):
            configuration = live.problem.configurations[request.index]
            found[int(configuration["THREADS"]), int(configuration["PER"])] = made
    return found


def test_arrays_are_copied_in_parts(axpy: Path) -> None:
    space = read(axpy / "axpy.toml")
    assert space.source is not None
    # Four parts, of which the last is shorter: one that is lost or elsewhere makes the result wrong.
    with Live(space, space.source, {"n": 200_001}, processes=1) as live:
        assert [made.status for _, made in live.measure([Request(0, 1)])] == ["ok"]


def test_a_server_goes_first_on_the_cores_too(axpy: Path) -> None:
    space = read(axpy / "axpy.toml")
    assert space.source is not None
    with Live(space, space.source, processes=1) as live:
        assert [made.status for _, made in live.measure([Request(0, 1)])] == ["ok"]
        compiles, measures = live._compilers[0]._process, live._gpu_worker._process
        assert compiles is not None and measures is not None
        nice = [os.getpriority(os.PRIO_PROCESS, process.pid) for process in (compiles, measures)]
        assert nice == [19, max(10, os.getpriority(os.PRIO_PROCESS, 0))]


def test_each_configuration_is_checked_and_timed_and_what_does_not_fit_is_said(axpy: Path) -> None:
    found = measured(axpy)
    assert len(found) == 6
    for (threads, _), made in found.items():
        if threads == 512:
            assert made.status == "does_not_fit" and "512 threads" in made.message
        else:
            assert made.status == "ok" and len(made.samples_us) == 3 and made.time_us, made
            assert made.registers == 32 and 0 < made.occupancy <= 1 and made.run_s > 0


def test_the_simulated_driver_is_told_before_anything_is_compiled(axpy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (axpy / "axpy.cu").write_text("")
    monkeypatch.setattr(compilation, "choose", lambda _="auto": "nvcc")
    monkeypatch.setattr(compilation, "compile_source", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(Error, match="the simulated driver runs no compiled kernel: tune on a GPU"):
        Live(read(axpy / "axpy.toml"), axpy / "axpy.cu", processes=1)


def test_a_wrong_result_is_never_timed(axpy: Path) -> None:
    found = measured(axpy, SPACE.replace('"axpy"', '"none"', 1))
    assert {made.status for made in found.values()} == {"wrong"}
    assert "elements of y are wrong: [" in found[64, 1].message and not found[64, 1].samples_us
    with pytest.raises(Error, match=r"none of 6 configurations can be used \(6 wrong\).*THREADS.*are wrong"):
        tune(space=axpy / "axpy.toml", settings=Settings(warm=False), database=axpy / "d.sqlite")


def test_what_writes_behind_its_array_is_found(axpy: Path) -> None:
    beyond = SPACE.replace('value = "n"', 'value = "n + 64"')
    assert {made.status for made in measured(axpy, beyond).values()} == {"out_of_bounds", "does_not_fit"}


def test_without_a_reference_the_first_result_is_it(axpy: Path) -> None:
    text = SPACE.replace('[check]\nreference = "reference.py:axpy"\n', "")
    assert measured(axpy, text)[64, 1].status == "ok"


def test_measurements_that_are_taken_in_another_way_are_kept_apart(axpy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "choose", lambda wanted="auto": "nvrtc" if wanted == "auto" else wanted)
    space = read(axpy / "axpy.toml")
    assert space.source is not None

    def printed(**options: Any) -> str:
        with Live(space, axpy / "axpy.cubin", processes=1, **options) as live:
            return live.fingerprint

    usual = space.fingerprint(space.source)
    assert printed() == printed(compiler="nvrtc") == usual
    others = [printed(**one) for one in ({"launches": 10}, {"options": ["-G"]}, {"compiler": "nvcc"})]
    assert len({usual, *others}) == 4


def test_elements_that_are_never_written_are_no_reference(axpy: Path) -> None:
    text = SPACE.replace('"axpy"', '"none"', 1).replace('"inout"', '"output"')
    made = measured(axpy, text.replace('reference = "reference.py:axpy"\n', ""))[64, 1]
    assert made.status == "wrong" and "all elements of y are NaN" in made.message
    (axpy / "reference.py").write_text('def axpy(inputs, shape):\n    return {"y": inputs["x"] * float("nan")}\n')
    with pytest.raises(Error, match="all elements of y are NaN"):
        measured(axpy, text)
    halves = SPACE.replace('"inout"\nsize = "n"', '"inout"\ntype = "float16"\nsize = "2 * n"')  # some are NaN as such
    made = measured(axpy, halves.replace('reference = "reference.py:axpy"\n', ""))[64, 1]
    assert made.status == "wrong" and "of 1,024 elements of y are NaN: it is no reference" in made.message


def test_a_tolerance_that_any_output_would_keep_is_refused(axpy: Path) -> None:
    """Guards `absolute`: beside values that are all smaller, a wrong kernel wins."""
    text = SPACE.replace('reference.py:axpy"\n', 'reference.py:axpy"\nabsolute = 1e30\n')
    with pytest.raises(Error, match="nothing would be checked"):
        measured(axpy, text)
    made = measured(axpy, text.replace('reference = "reference.py:axpy"\n', ""))[64, 1]
    assert made.status == "wrong" and "nothing would be checked" in made.message


def test_a_fault_ends_one_configuration_and_its_worker_alone(axpy: Path) -> None:
    faulty = SPACE.replace('value = "n"', 'value = "n + 1000000000"').replace(
        "THREADS = [64, 256, 512]", "THREADS = [64]"
    )
    found = measured(axpy, faulty)
    assert {made.status for made in found.values()} == {"fault"} and "ILLEGAL_ADDRESS" in found[64, 1].message


def test_a_hang_ends_one_configuration_and_its_worker_alone(axpy: Path) -> None:
    slow = (
        SPACE.replace('"axpy"', '"slow"', 1)
        .replace("THREADS = [64, 256, 512]", "THREADS = [64, 256]")
        .replace("[1, 2]", "[1]")
    )
    found = measured(axpy, slow.replace("n = 512", "n = 65536"), limits=Limits(run_s=0.5))
    assert [made.status for made in found.values()] == ["hang", "hang"] and "0.5 s" in found[64, 1].message


def test_a_worker_that_is_killed_costs_one_configuration(axpy: Path) -> None:
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    with Live(chosen, chosen.source, processes=1) as live:
        process = live._gpu_worker._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        statuses = [made.status for _, made in live.measure([Request(i, 1) for i in range(3)])]
    assert statuses.count("crashed") == 1 and statuses.count("ok") == 2


def test_a_compiler_that_answers_while_the_gpu_is_made_ready_is_not_late(
    axpy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against images that were thrown away: after a fault, a new worker on the GPU may take minutes."""
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    compiled: deque[tuple[Request, Compiled]] = deque()
    with Live(chosen, chosen.source, processes=1) as live:
        (compiler,) = live._compilers
        measured = live._measured

        def late(*given: Any) -> Measurement:
            assert compiler.connection is not None and compiler.connection.poll(PATIENCE_S)
            compiler.deadline = 0.0
            return measured(*given)

        def collected() -> list[tuple[int, str]]:
            return [(request.index, made.status) for request, made in live._collect(compiled)]

        live._compile(compiler, Request(0, 1), compiled)
        eventually(lambda: collected() or compiled)
        live._run(*compiled.popleft())
        live._compile(compiler, Request(1, 1), compiled)
        with monkeypatch.context() as patched:
            patched.setattr(live, "_measured", late)
            patched.setattr(workers, "wait", lambda connections, timeout: [live._gpu_worker.connection])
            assert collected() == [(0, "ok")]
        assert collected() == [] and [request.index for request, _ in compiled] == [1]


def workers_of(run_directory: str) -> list[int]:
    """Worker processes of this test's tuners."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"CUDASCHED_RUN_DIR={run_directory}".encode() in (path / "environ").read_bytes().split(b"\0")
            if mine and b"cudasched.tune._worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["kernel", "reference"])
def test_a_worker_that_hangs_ends_with_its_tuner(axpy: Path, command: str, what: str, number: signal.Signals) -> None:
    """Guards against workers that kept a core and the GPU for as long as a kernel hung."""
    endless = IMAGE.replace("block_us=2 effect=axpy", "block_us=900000000 effect=axpy")
    (axpy / "axpy.cubin").write_text(endless if what == "kernel" else IMAGE)
    hangs = "import pathlib\ndef axpy(inputs, shape):\n    pathlib.Path('hangs').touch()\n    while True: pass\n"
    (axpy / "reference.py").write_text(hangs if what == "reference" else REFERENCE)
    given = [command, "tune", "--space", "axpy.toml", "--database", "d.sqlite"]
    with subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tuner:
        eventually(lambda: bool(workers_of(os.environ["CUDASCHED_RUN_DIR"])))
        if what == "reference":
            eventually(Path("hangs").exists)
        tuner.send_signal(number)
        assert tuner.wait(PATIENCE_S) == -number
    eventually(lambda: not workers_of(os.environ["CUDASCHED_RUN_DIR"]))


def test_a_compiler_ends_with_the_worker_that_started_it(axpy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compilers that ran on when compiling had taken too long."""
    (axpy / "nvcc").write_text("#!/bin/sh\necho $$ > started\nsleep 600\n")
    (axpy / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{axpy}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    (axpy / "axpy.cu").write_text("kernel")
    worker = Worker()
    given = {"source": axpy / "axpy.cu", "macros": (), "target": "sm_90a", "compiler": "nvcc", "options": ()}
    worker.ask("compile", given, 1.0, "work")
    eventually(lambda: Path("started").exists() and Path("started").read_text().strip() != "")
    worker.kill()
    compiler = int(Path("started").read_text())
    eventually(lambda: not Path(f"/proc/{compiler}").exists() or "Z" in Path(f"/proc/{compiler}/stat").read_text())


def test_a_process_under_a_tool_ends_with_its_time(axpy: Path) -> None:
    """Guards against a process that ran on when the tool that had started it was killed."""
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    hangs = (
        "import os\ndef axpy(inputs, shape):\n    open('under', 'w').write(str(os.getpid()))\n    while True: pass\n"
    )
    with Live(chosen, chosen.source, processes=1) as live:
        (axpy / "reference.py").write_text(hangs)
        for cached in live._plan.cache.glob("right-*"):
            cached.unlink()
        code, _ = live.under(lambda words: ["sh", "-c", '"$@"; true', "sh", *words], 0, 1, 8.0)
        assert code == 124
    process = int(Path("under").read_text())
    eventually(lambda: not Path(f"/proc/{process}").exists())


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("def axpy(inputs, shape):\n    return {'y': inputs['y'][:3]}", "gives 3 elements of y, not 512"),
        ("def axpy(inputs, shape):\n    return {}", "axpy gives no y"),
        ("def axpy(inputs, shape):\n    return 1 / 0", "axpy failed: ZeroDivisionError"),
        ("import nothing_of_this_name", "the reference cannot be run: ModuleNotFoundError"),
        ("def other(): pass", "has no function axpy"),
    ],
)
def test_a_reference_that_does_not_serve_is_an_error(axpy: Path, reference: str, said: str) -> None:
    (axpy / "reference.py").write_text(reference)
    with pytest.raises(Error, match=said):
        measured(axpy)


def test_nan_where_there_should_be_none_is_wrong_and_elsewhere_right(axpy: Path) -> None:
    (axpy / "reference.py").write_text(REFERENCE + "\n    # never\n")
    text = SPACE.replace('value = "2.5"', 'value = "power(10.0, 38) * 100"')  # infinite, and infinity less infinity
    found = measured(axpy, text.replace("THREADS = [64, 256, 512]", "THREADS = [64]"))
    assert {made.status for made in found.values()} == {"wrong"}


def test_the_command_tunes_and_writes_a_header_and_goes_on(axpy: Path, cudasched: Run) -> None:
    arguments = ("tune", "axpy.cubin", "--space", "axpy.toml", "--database", "d.sqlite", "--evaluations", "4", "--json")
    done = cudasched(*arguments, "-o", "tuned.h", "-o", "tuned.json", cwd=axpy)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["kind"], said["data"]["evaluations"]) == ("tune", 4)
    assert json.loads((axpy / "tuned.json").read_text())["best"] == said["data"]["best"]
    header = (axpy / "tuned.h").read_text()
    assert f"#define THREADS {said['data']['best']['THREADS']}\n" in header and "CUDASCHED_TUNED_AXPY_H" in header
    again = cudasched(*arguments[:-2], "6", cwd=axpy)
    assert again.returncode == 0 and "2 of 6 configurations were tried" in again.stdout, again.stderr
    assert "best: THREADS=" in again.stdout


SERVER = """
import sys, cudasched
from cuda.bindings import driver as cu
cu.cuInit(0)
_, context = cu.cuDevicePrimaryCtxRetain(0)
cu.cuCtxSetCurrent(context)
for line in sys.stdin:
    with cudasched.region('latency'):
        _, memory = cu.cuMemAlloc(64)
        cu.cuMemsetD8(memory, 0, 64)
        print('in', flush=True)
        sys.stdin.readline()
    print('out', flush=True)
"""
#: Measures one configuration where nothing holds it back, and asks for a request that begins between two samples, and
#: ends there if it is `within`.
BESIDE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from cudasched.tune import _bench

bench = _bench.Bench(_bench.Plan(Path('axpy.toml'), {}, 0, Path('.'), None))
take, taken, asked = bench.device.time, [], []

def ask(what):
    if what not in asked:
        asked.append(what)
        print(what, flush=True)
        sys.stdin.readline()

def timed(*given):
    taken.append(given)
    if len(taken) == 2:
        ask('begin')
        if within:
            ask('end')
    return take(*given)

def pause(seconds):
    ask('end')
    _bench_time.sleep(seconds)

bench.device.time = timed
_bench_time, _bench.time = _bench.time, SimpleNamespace(perf_counter=float, sleep=pause)  # no sample seems long
made = bench.run(_bench.Job(Path('axpy.cubin').read_bytes(), {'THREADS': 64, 'PER': 1}, 3))
print(json.dumps([made.status, len(made.samples_us), made.discarded, len(taken)]))
"""


@contextmanager
def talking(code: str, directory: Path) -> Iterator[tuple[Callable[[str], None], Callable[[], str]]]:
    """A program, a line to it, and a line of it."""
    environment = {**os.environ, "CUDASCHED_MAX_IDLE_HOLD_MS": "60000"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=directory, **pipes)  # type: ignore[call-overload]

    def tell(what: str) -> None:
        process.stdin.write(f"{what}\n")
        process.stdin.flush()

    try:
        yield tell, lambda: process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_the_tuner_waits_while_a_request_is_open(axpy: Path) -> None:
    """It is a best-effort client, and held at the gate."""
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    with talking(SERVER, axpy) as (tell, said), Live(chosen, chosen.source, processes=1) as live:
        tell("begin")
        assert said() == "in"
        ended = threading.Timer(0.5, tell, ["end"])
        began = time.monotonic()
        ended.start()
        ((_, made),) = live.measure([Request(0, 2)])
        assert made.status == "ok" and time.monotonic() - began > 0.4
        ended.join()


@pytest.mark.parametrize("within", [False, True])
def test_samples_taken_beside_a_request_are_thrown_away_and_taken_again(axpy: Path, within: bool) -> None:
    """Those before it in the same pause, too. A busy machine may begin a pause for each sample: then once more."""
    assert any(thrown_away(axpy, within) >= 2 for _ in range(5))


def thrown_away(axpy: Path, within: bool) -> int:
    """How many samples were, of which the second was taken beside a request."""
    beside = f"within = {within}\n{BESIDE}"
    with talking(SERVER, axpy) as (tell, said), talking(beside, axpy) as (go_on, asked):
        for what, answer in (("begin", "in"), ("end", "out")):
            assert asked() == what
            tell(what)
            assert said() == answer
            go_on("")
        status, samples, discarded, taken = json.loads(asked())
    assert (status, samples) == ("ok", 3)
    assert discarded >= 1 and taken == samples + discarded
    return int(discarded)


def test_without_a_compiler_or_a_driver_it_says_what_to_install(axpy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvrtc() -> None:
        raise Error("no NVRTC: it is not installed")

    monkeypatch.setattr(compilation, "_nvrtc", no_nvrtc)
    monkeypatch.setattr(compilation, "_nvcc", lambda: None)
    with pytest.raises(Error, match=r"nothing here compiles kernels: no NVRTC.*nvcc.*pip install"):
        compilation.choose()
    with pytest.raises(ConfigError, match="auto, nvrtc or nvcc"):
        compilation.choose("clang")


def test_without_a_driver_it_says_so(axpy: Path, no_driver: Path, cudasched: Run) -> None:
    done = cudasched("tune", "axpy.cubin", "--space", "axpy.toml", cwd=axpy)
    assert done.returncode == 1 and "nothing can be measured here" in done.stderr and "Traceback" not in done.stderr


def test_tools_that_are_not_there_are_named(axpy: Path, monkeypatch: pytest.MonkeyPatch, cudasched: Run) -> None:
    for option, tool in (("--sanitize", "compute-sanitizer"), ("--profile", "ncu")):
        done = cudasched(
            "tune", "axpy.cubin", "--space", "axpy.toml", option, cwd=axpy, env={**os.environ, "PATH": "/nowhere"}
        )
        assert done.returncode == 1 and f"no {tool} on the PATH" in done.stderr


def test_the_tools_run_a_configuration_in_a_process_of_its_own(axpy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the tools, which say what the real ones say."""
    tool = axpy / "tools"
    tool.mkdir()
    counters = '"ID","Metric Name","Metric Value"\n"0","lts__t_sector_hit_rate.pct","62.5"\n'
    (tool / "ncu").write_text(f"#!/bin/sh\necho '==PROF== connected'\ncat <<'END'\n{counters}END\nexec true\n")
    (tool / "compute-sanitizer").write_text(
        "#!/bin/sh\necho '========= Invalid __global__ write of size 4 bytes'\n"
        'test -e "$PWD/clean" && while [ "$1" != "--once" ]; do shift; done && exit 0\nexit 86\n'
    )
    for name in ("ncu", "compute-sanitizer"):
        (tool / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool}:{os.environ['PATH']}")
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    with Live(chosen, chosen.source, processes=1) as live:
        assert tools.profile(live, 0) == {"l2_hit_percent": 62.5}
        assert tools.sanitize(live, 0) == "compute-sanitizer: Invalid __global__ write of size 4 bytes"
        (axpy / "clean").touch()
        monkeypatch.chdir(axpy)
        assert tools.sanitize(live, 0) == ""
        assert live.under(lambda command: command, 0, 1, PATIENCE_S)[0] == 0
    with pytest.raises(Error, match="ERR_NVGPUCTRPERM"):
        tools.parse("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_a_header_has_the_macros_and_no_line_of_the_gpus_name(axpy: Path) -> None:
    tuned = tune(space=axpy / "axpy.toml", settings=Settings(evaluations=2, warm=False), database=axpy / "d.sqlite")
    assert as_header(tuned).count("//") == 2 and tuned.work_per_s > 0
