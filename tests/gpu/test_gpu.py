"""The real driver, real PyTorch programs, real processes that get killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE_S, PROGRAMS, Start, finish, gpus, line_of


@pytest.mark.parametrize("client_class", ["normal", "best-effort"])
def test_the_hook_sees_every_launch(start: Start, client_class: str) -> None:
    output = finish(start("coverage_mix.py", client_class=client_class, options=("--check-coverage",)))
    assert "done" in output
    counts = re.findall(r"coverage_mix\.py\W+(\d+)\W+(\d+)\W+100\.00 %", output)
    assert counts, output
    hook, device = map(int, counts[0])
    assert hook == device > 200


@pytest.mark.parametrize(
    "model",
    ["attention", "convolution", "attention_graph", "convolution_graph", "compiled", "side_streams", "ddp"],
)
@pytest.mark.parametrize("time_slice_us", ["auto", "off"])
def test_ten_steps_beside_requests_have_the_bits_of_ten_steps_alone(
    start: Start, model: str, time_slice_us: str
) -> None:
    """Losses, parameters and buffers, of two models with graphs, one compiled, one on two GPUs, and others."""
    if model == "ddp" and gpus() < 2:
        pytest.skip("needs two GPUs")
    bare = finish(start("checksums.py", model))
    server = start("server.py", "100000", client_class="latency")
    line_of(server, "ready")
    managed = finish(
        start("checksums.py", model, client_class="best-effort", options=("--time-slice-us", time_slice_us))
    )
    assert server.poll() is None
    assert said(bare, model) == said(managed, model)
    assert int(said(managed, "offloaded")) > 0


def said(output: str, name: str) -> str:
    """What a program printed after a name, on the one line that begins with it."""
    (found,) = [line.removeprefix(f"{name} ") for line in output.splitlines() if line.startswith(f"{name} ")]
    return found


def test_in_process_regions_streams_threads_graphs_and_the_profiler(start: Start) -> None:
    assert finish(start("in_process.py")).splitlines()[-1].strip() == "done"


def test_import_after_torch_warns_and_the_program_goes_on() -> None:
    code = (
        "import warnings, torch\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import cudasched\n"
        "assert any('before torch' in str(w.message) for w in caught), [str(w.message) for w in caught]\n"
        "try:\n    cudasched.install()\n    raise SystemExit('no HookError')\n"
        "except cudasched.HookError: pass\n"
        "with cudasched.region('latency'):\n    assert float(torch.ones(10, device='cuda').sum()) == 10\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_what_programs_do(start: Start) -> None:
    server = start("server.py", "100000", client_class="latency")
    line_of(server, "ready")
    names = ("workers", "fork_after_cuda", "compiled", "ddp", "leave_in_mid_work")
    output = finish(start("misbehaving.py", *names, client_class="best-effort"))
    assert [line.split()[0] for line in output.splitlines() if line.endswith("done")] == list(names)


def said_so_far(process: subprocess.Popen[str]) -> str:
    """What it has written since the last call; of a text file that has nothing, Python's read fails."""
    assert process.stdout is not None
    out = process.stdout.fileno()
    os.set_blocking(out, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(out, 1 << 16):
            said += more
    return said.decode()


def test_an_active_latency_client_holds_best_effort_work_and_its_death_frees_it(start: Start) -> None:
    # Held by the gate alone: other programs of these tests use the GPU, and slices give way to them, too.
    trainer = start("trainer.py", client_class="best-effort", options=("--time-slice-us", "off"))
    line_of(trainer, "")
    server = start("server.py", "stuck", client_class="latency")
    line_of(server, "ready")
    time.sleep(1.0)
    said_so_far(trainer)
    time.sleep(1.0)
    during = said_so_far(trainer)
    killed_ns = time.monotonic_ns()
    pids = subprocess.run(["pgrep", "-f", "server.py stuck"], capture_output=True, text=True).stdout.split()
    for pid in pids or [str(server.pid)]:
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(1.0)
    after = said_so_far(trainer).splitlines()
    # Held while it was active; going again afterwards.
    assert len(after) > 20 * max(1, len(during.splitlines())), (during, len(after))
    first_ns = min(int(line.split()[0]) for line in after if int(line.split()[0]) > killed_ns)
    print(f"best-effort work was back {(first_ns - killed_ns) / 1e6:.1f} ms after the kill")


def test_killed_best_effort_clients_leave_the_others_running(start: Start) -> None:
    server = start("server.py", "300", client_class="latency")
    line_of(server, "ready")
    victims = [start("trainer.py", client_class="best-effort") for _ in range(2)]
    survivor = start("trainer.py", "6", client_class="best-effort")
    for process in (*victims, survivor):
        line_of(process, "")
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    assert "served" in finish(server)
    finish(survivor)
    clients = subprocess.run(
        [sys.executable, "-m", "cudasched", "status", "--json"], capture_output=True, text=True, timeout=60
    )
    assert clients.returncode == 0, clients.stderr


def test_two_best_effort_programs_take_turns(start: Start) -> None:
    server = start("server.py", "100000", client_class="latency")
    line_of(server, "ready")
    shares = []
    for _ in range(3):  # what else runs on this GPU may favour one of them
        trainers = [start("trainer.py", "5", client_class="best-effort") for _ in range(2)]
        steps = [int(finish(trainer).splitlines()[-1].split()[1]) for trainer in trainers]
        shares.append(min(steps) / max(steps))
        if shares[-1] > 1 / 4:
            return
    pytest.fail(f"one has this share of the other's steps: {shares}")


def test_memcheck_finds_nothing_of_ours(tmp_path: Path) -> None:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("compute-sanitizer is not installed")
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "99",
        sys.executable,
        "-m",
        "cudasched",
        "run",
        "--class",
        "best-effort",
        "--",
        sys.executable,
        str(PROGRAMS / "coverage_mix.py"),
        "aten",
        "graphs",
    ]
    environment = dict(os.environ, CUDASCHED_RUN_DIR=str(tmp_path / "run"))
    done = subprocess.run(
        [*command[:1], "--target-processes", "all", *command[1:]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    # Calls that fail are reported, too. How many parameters a kernel has, the driver tells by refusing the next one.
    refused = [
        line for line in done.stdout.splitlines() if re.search(r"INVALID_VALUE.* (cuKernel|cuFunc)GetParamInfo\.", line)
    ]
    assert f"ERROR SUMMARY: {len(refused)} error" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == (99 if refused else 0), done.stderr[-3000:]
