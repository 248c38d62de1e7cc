"""benchmarks/core.sh: what it runs is what the benchmarks take, and every GPU has its part."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.breadth import __main__ as breadth
from benchmarks.lab import run as lab

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "core.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], env=os.environ | environment, capture_output=True, text=True)


def test_every_step_is_a_run_of_a_benchmark_in_the_order_of_their_weight() -> None:
    more = dict(BREADTH_OPTIONS="--keep-servers", CORE_OPTIONS="--ddp-seconds 60 --starts 4")
    done = run("out", DRY="1", LIMIT_S="500", COMMIT="0123456789ab", **more)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line)[2:] for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["benchmarks.breadth", "benchmarks", "benchmarks", "benchmarks.breadth"]
    core = lab.load_benchmark("core")
    main, servers = (breadth.parse(line[1:]) for line in (lines[0], lines[3]))
    one_gpu, ddp = (lab.parse("core", core, line[3:]) for line in lines[1:3])
    assert main.programs == list(breadth.MAIN_PROGRAMS) and main.servers == ["bert_graph"]
    assert len(servers.programs) == 4 and [*main.servers, *servers.servers] == list(breadth.SERVERS)
    assert {*one_gpu.only, *ddp.only} == {*core.groups} - {"ci"}
    assert {each.commit for each in (main, one_gpu, ddp, servers)} == {"0123456789ab"}
    assert all(490 <= seconds <= 500 for seconds in (main.limit_s, servers.limit_s, 60 * ddp.minutes))
    assert main.keep_servers and servers.keep_servers and ddp.ddp_seconds == 60 and one_gpu.starts == 4
    # Two breadth steps add to one file of cells, and both groups of the core to another.
    assert main.out == servers.out and one_gpu.out == ddp.out


def test_an_unknown_step_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "main", "nonsense")
    assert (done.returncode, done.stdout) == (2, "") and "no step nonsense" in done.stderr
    assert not (tmp_path / "out").exists()
    assert run().returncode == 2


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = run(str(tmp_path / "out"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2 and "no GPU" in done.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_each_gpu_has_its_part_and_the_parts_are_put_together(tmp_path: Path, status: int) -> None:
    tools, log, out, before = tmp_path / "tools", tmp_path / "log", tmp_path / "out", tmp_path / "before"
    tools.mkdir()
    before.mkdir()
    (before / "breadth-1.cells").write_text("first, ")
    (before / "breadth-2.cells").write_text("second of an earlier run")
    (before / "core.cells").write_text("core of an earlier run")
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tools / "python").write_text(
        "#!/bin/sh\n"
        'case "$*" in *merge*) while [ "$1" != --out ]; do shift; done; out=$2; shift 2; '
        f'echo "merge $out $*" >> {log}; cat "$@" > "${{out%.json}}.cells"; touch "$out"; exit;; esac\n'
        f'echo "$CUDA_VISIBLE_DEVICES $*" >> {log}\n'
        'while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done\n'
        f'touch "$out" "${{out%.json}}.cells"\necho measured\nexit {status}\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = dict(PATH=f"{tools}:{os.environ['PATH']}", PYTHON="python", FROM=str(before), LIMIT_S="300")
    done = run(str(out), "main", "core", **environment)
    assert done.returncode == status, "what is there is put together whatever became of a step"
    earlier, first, second, third, merge = log.read_text().splitlines()
    assert earlier == f"merge {out}/earlier.json {before}/breadth-1.cells {before}/breadth-2.cells"
    assert {first.split()[0], second.split()[0]} == {"GPU-a", "GPU-b"}
    assert {line.split("--part ")[1].split()[0] for line in (first, second)} == {"1/2", "2/2"}
    assert third.strip().startswith("-m benchmarks run core") and "--only readme_example,backlog,launcher" in third
    assert merge == f"merge {out}/breadth.json {out}/breadth-1.cells {out}/breadth-2.cells"
    assert all((out / f"breadth-{i}.cells").read_text() == "first, second of an earlier run" for i in (1, 2))
    assert (out / "core.cells").read_text() == "core of an earlier run"
    names = {path.name for path in out.iterdir()}
    assert names == {
        "breadth-1.cells",
        "breadth-2.cells",
        "breadth.cells",
        "breadth.json",
        "core.cells",
        "core.json",
        "log",
    }
    assert "breadth 1/2: measured" in (out / "log").read_text() and f"exit {status} after" in done.stdout
