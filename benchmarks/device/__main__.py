"""Work queues on the device and graphs of a program's own: six figures of kernels.json, in one run of a few minutes.

    python -m benchmarks.device --out DIR --limit-s 240
    python -m benchmarks.device --out DIR --only graphs
    python -m benchmarks.device --simulate --out DIR
    python -m benchmarks.device merge DIR/kernels.json benchmarks/results/kernels.json
    python -m benchmarks.device merge DIR/device.json benchmarks/results/device.json

Writes DIR/kernels.json, whose other figures stay, DIR/device.json with figures that have no goal, and DIR/parts.json
with the times behind both. Each part is a
process of its own that ends with its time: one that fails or hangs costs its figures and no other. Kernels are compiled
here, by NVRTC or nvcc; what measures graphs is compiled by g++. The exit status is 0 when all figures are there, 4 when
there is no GPU (the text says so), 1 when a part failed. --simulate rehearses what of graphs the simulated driver can
do, in little; its figures are no results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched import graphs, hook
from cudasched.errors import Error
from cudasched.tune import compile as compilation

from benchmarks import meta, tables
from benchmarks.device.gpu import INCLUDE, ROOT, Gpu, NoGpuError
from benchmarks.device.queues import IMBALANCES, OTHER_STATIC
from benchmarks.results.schema import FigureRow, Meta, load, merge_figures, replace

HERE = Path(__file__).parent
NO_GPU = 4
PARTS = ("queues", "graphs")
#: Each is better when it is more: times the speed of the rival that docs/device.md names.
GOALS = {
    "queue_severe": 2.0,
    "queue_moderate": 1.2,
    "queue_balanced": 0.97,
    "graph_pipeline": 1.5,
    "device_launch": 2.0,
    "conditional_loop": 2.0,
}
#: What `device_launch` is the least of.
LAUNCHES = ("decided_by_the_one_before", "fire_and_forget_latency")
#: Figures without a goal, in device.json: the group that each is of, and what it is called there.
REPORTED = {
    "graph_update": ("pipeline", "update_of_instantiation"),
    "device_launches_in_a_row": ("device", "in_a_row"),
    "sibling_launch": ("device", "sibling_latency"),
    "child_kernels": ("device", "child_kernels"),
    "graph_pool": ("pool", "pool_of_allocation_nodes"),
    "captured_sums": ("peers", "captured_sums"),
}
#: And these, of the queues: the best of them against the best static distribution that is written as one loop.
FLAT = {f"{name}_of_flat": name for name in IMBALANCES}
NO_GOALS = dict.fromkeys((*FLAT, *REPORTED), 0.0)
#: Groups that figures come from; of the others, those that this machine has no GPUs or libraries for are left out.
FIGURED = ("pipeline", "loop", "device")
IMAGE = """cudasched-sim 1
kernel stage params=8,4 block_us=1
kernel turn params=8,8 block_us=1 effect=countdown
kernel turn_for_host params=8 block_us=1
"""


class PartFailedError(Exception):
    """A part ended without all of its figures; the message is what it said."""


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> tuple[str, str, int]:
    """Output, errors and status of a process, 124 where it was ended because its time was over."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(limit_s, 1),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return (output.decode(errors="replace") if isinstance(output, bytes) else output), "its time was over", 124
    return done.stdout, done.stderr.strip(), done.returncode


def objects(output: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # a line that was cut off
    return found


def measure_queues(limit_s: float) -> tuple[dict[str, Any], str]:
    """The figures of the queues, and what went wrong.

    Raises:
        NoGpuError: There is none.
    """
    command = [sys.executable, "-m", "benchmarks.device.queues", "--seconds", str(max(limit_s - 25, 10))]
    output, errors, status = run(command, limit_s, {"CUDASCHED_OFF": "1"})
    if status == NO_GPU:
        raise NoGpuError(errors)
    found = objects(output)
    return (found[-1] if found else {}), errors if status else ""


def build_measure(directory: Path) -> Path:
    """Compiles what measures graphs.

    Raises:
        PartFailedError: It does not compile.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or "g++"
    program = directory / "measure"
    sources = [str(HERE / "measure.cpp"), *sorted(map(str, (ROOT / "csrc" / "device_graph").glob("*.cpp")))]
    includes = [f"-I{INCLUDE}", f"-I{ROOT / 'csrc'}", *(f"-isystem{one}" for one in cuda_includes())]
    command = [compiler, "-O2", "-std=c++20", *includes, *sources, "-ldl", "-pthread", "-o", str(program)]
    _, errors, status = run(command, 120)
    if status:
        raise PartFailedError(f"measure.cpp does not compile: {errors[-1500:]}")
    return program


def cuda_includes() -> list[Path]:
    """Where cuda.h is."""
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += [
        Path("/usr/local/cuda/include"),
        *Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/cu13/include"),
    ]
    if nvcc := shutil.which("nvcc"):
        places.append(Path(nvcc).resolve().parents[1] / "include")
    try:
        import nvidia

        places += [Path(one) / "cu13" / "include" for one in nvidia.__path__]
    except ImportError:
        pass
    return [one for one in dict.fromkeys(places) if (one / "cuda.h").is_file()]


def measure_graphs(limit_s: float, simulate: bool) -> tuple[dict[str, Any], str]:
    """The figures of graphs, and what went wrong.

    Raises:
        NoGpuError: There is none.
        PartFailedError: It cannot be measured here.
    """
    begin = time.monotonic()
    found: dict[str, Any] = {}
    wrong = []
    with tempfile.TemporaryDirectory(prefix="cudasched.device-") as name:
        directory = Path(name)
        image = directory / "graphs.image"
        environment = library_paths()
        if runtime := graphs._device_runtime():
            environment["CUDA_HOME"] = str(Path(runtime).parents[1])
        if simulate:
            image.write_text(IMAGE)
            device = directory / "device"
            device.mkdir(mode=0o700)
            environment = {
                "LD_LIBRARY_PATH": str(hook.locate().simulated_driver.parent),
                "CUDASCHED_SIM_DIR": str(device),
                "CUDASCHED_SIM_SCALE": "1",
            }
        else:
            image.write_bytes(relocatable(Gpu().target))
        program = build_measure(directory)
        for group in ("pipeline", "loop", "pool") if simulate else ("pipeline", "loop", "device", "pool", "peers"):
            left = limit_s - (time.monotonic() - begin)
            output, errors, status = run([str(program), str(image), group], left, environment)
            for made in objects(output):
                found[group] = made
            if status == NO_GPU and not found and "needs a GPU" in errors:
                raise NoGpuError(errors)
            if status and (group in FIGURED or status != NO_GPU):
                wrong.append(f"{group}: {errors[-600:]}")
            elif status:
                print(f"{errors}; left out", file=sys.stderr)
    return found, "\n".join(wrong)


def library_paths() -> dict[str, str]:
    """What the loader needs to find the NCCL that came with PyTorch."""
    found = [str(path) for one in sys.path for path in Path(one or ".").glob("nvidia/nccl/lib")]
    usual = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join([*([usual] if usual else []), *found])} if found else {}


def relocatable(target: str) -> bytes:
    """The kernels of graphs.cu for CUDA's device runtime."""
    compiler = compilation.choose()
    option = "--relocatable-device-code=true" if compiler == "nvrtc" else "-rdc=true"
    return compilation.compile_source(HERE / "graphs.cu", (), target, compiler, [option]).image


def figures(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each figure is made of, from what was measured."""
    found = dict(parts.get("queues", {}))
    graphs = parts.get("graphs", {})
    for group, figure in (("pipeline", "graph_pipeline"), ("loop", "conditional_loop")):
        if figure in graphs.get(group, {}):
            found[figure] = graphs[group][figure]
    ways = [graphs.get("device", {}).get(name) for name in LAUNCHES]
    if all(ways):
        found["device_launch"] = {
            "value": min(way["value"] for way in ways),
            "low": min(way["low"] for way in ways),
            "high": max(way["high"] for way in ways),
            "n": sum(way["n"] for way in ways),
        }
    return found


def reported(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each figure without a goal is made of."""
    groups = parts.get("graphs", {})
    found = {name: groups[group][part] for name, (group, part) in REPORTED.items() if part in groups.get(group, {})}
    for name, figure in FLAT.items():
        if figure in parts.get("queues", {}):
            one = parts["queues"][figure]
            value = min(one["ms"][flat] for flat in OTHER_STATIC) / one["ms"][one["queue"]]
            found[name] = {"value": value, "low": value, "high": value, "n": one["n"]}
    return found


def rows(
    found: Mapping[str, Mapping[str, Any]], limited_by: Mapping[str, str], goals: Mapping[str, float] = GOALS
) -> list[FigureRow]:
    """Rows of the figures that were measured, in the order of the goals."""
    made = []
    for name, goal in goals.items():
        if name not in found:
            continue
        one = found[name]
        made.append(
            FigureRow.judged(
                figure=name,
                value=one["value"],
                goal=goal,
                better="more",
                low=min(one["low"], one["value"]),
                high=max(one["high"], one["value"]),
                n=one["n"],
                limited_by=limited_by.get(name, ""),
            )
        )
    return made


def merge(arguments: Sequence[str]) -> int:
    """`merge FROM INTO`: the figures of one file into another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device merge")
    parser.add_argument("source", type=Path)
    parser.add_argument("into", type=Path)
    options = parser.parse_args(arguments)
    try:
        measured = load(options.source)
        found = [row for row in measured.rows if isinstance(row, FigureRow) and row.figure in {*GOALS, *NO_GOALS}]
        merge_figures(options.into, measured.meta, found)
    except (OSError, ValueError) as error:
        print(f"device: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["merge"]:
        return merge(given[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="gets kernels.json, device.json and parts.json"
    )
    parser.add_argument("--limit-s", type=float, default=240, help="all of it ends by then")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, by commas")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="what limits a figure")
    parser.add_argument("--simulate", action="store_true", help="no GPU, no results: graphs on the simulated driver")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(given)
    wanted = [name for name in options.only.split(",") if name]
    if not wanted or set(wanted) - set(PARTS):
        parser.error(f"--only: there are {', '.join(PARTS)}")
    begin = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    status = 0
    for name in wanted:
        if name == "queues" and options.simulate:
            print("queues: left out, the simulated driver runs no machine code")
            continue
        left = options.limit_s - (time.monotonic() - begin) - 5
        share = left if name == wanted[-1] else left * 0.6
        try:
            if name == "queues":
                parts[name], wrong = measure_queues(share)
            else:
                parts[name], wrong = measure_graphs(share, options.simulate)
        except NoGpuError as missing:
            print(f"{name}: {missing}", file=sys.stderr)
            status = status or NO_GPU
            continue
        except (PartFailedError, Error, RuntimeError, OSError) as error:
            parts[name], wrong = {}, str(error)
        if wrong:
            print(f"{name}: {wrong}", file=sys.stderr)
            status = 1
    if not any(parts.values()):
        return status
    replace(options.out / "parts.json", json.dumps(parts, indent=1) + "\n")
    made = rows(figures(parts), dict(one.split("=", 1) for one in options.limited_by))
    for row in made:
        print(f"{row.figure}: {row.value:.3g} (goal {row.goal:g}, {row.low:.3g} to {row.high:.3g} of {row.n})")
    described = describe(options)
    for name, figured in (("kernels.json", made), ("device.json", rows(reported(parts), {}, NO_GOALS))):
        if figured:
            merged = merge_figures(options.out / name, described, figured)
            if name == "kernels.json":
                tables.plot_figures(merged, options.out)
    return status


def describe(options: argparse.Namespace) -> Meta:
    """The machine and its versions; the GPU's name without PyTorch, which this needs nothing of."""
    about = meta.describe(True, options.commit)
    if options.simulate:
        return about
    told = {
        "gpu": meta.nvidia_smi("name") or "unknown",
        "driver": meta.nvidia_smi("driver_version"),
        "sm_clock_mhz": meta.sm_clock_mhz(),
    }
    return Meta(**{**about.model_dump(), **told})


if __name__ == "__main__":
    sys.exit(main())
