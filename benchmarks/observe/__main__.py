"""What it costs to be seen: counting and tracing on the launch path, and a scrape of 64 clients.

    python -m benchmarks.observe --out benchmarks/results/observe.json

`counters_ns`: what counting adds to a gated best-effort launch that the launcher thread makes (counters.cpp does what
is counted on its way and nothing else), without a GPU or a driver. The least of many batches, which a machine that does
other work beside it disturbs least; `low` is the same, `high` their median.

`trace_ns`: what tracing adds to a best-effort launch that the launcher thread makes: two records, one on each thread
(trace.cpp makes them and nothing else, while the tracer's own thread writes them to a file). As `counters_ns`.
`trace_bytes_a_record`: what a record takes in memory, before it is written.

`scrape_ms_64_clients`: from the request to the last byte of `cudasched metrics serve`, by HTTP on loopback, with 64
processes that each have counted in every bucket (clients.cpp) and publish every 10 ms. The median of ten scrapes in a
row, of those ten that other work on the machine disturbed least; `low` and `high` are the least and the 95th percentile
of all scrapes. How many lines a scrape has is printed.

Figures that the file has and that were not measured now stay. Needs g++ and prometheus-client; takes a quarter of a
minute.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks import meta
from benchmarks.results.schema import FigureRow, Meta, merge_figures

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = 64
#: What is promised.
GOALS = {"counters_ns": 15.0, "trace_ns": 250.0, "trace_bytes_a_record": 48.0, "scrape_ms_64_clients": 60.0}
LIMITS = {
    "counters_ns": "two atomic additions of about 5 ns each on this machine",
    "trace_ns": "four looks at the clock, and what the writer's thread takes from the caches",
    "trace_bytes_a_record": "what is said of a launch",
    "scrape_ms_64_clients": "Python's making of the text, a line at a time",
}
TIMEOUT_S = 300
PARTS = ("counters", "trace", "scrape")


class BenchmarkError(Exception):
    """The benchmark cannot be run; the text says why."""


def cuda_headers() -> list[str]:
    """Options of the compiler for cuda.h, from a toolkit or from PyPI."""
    homes = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvidia = importlib.util.find_spec("nvidia")
    homes += [Path(home) / "cu13" / "include" for home in (nvidia.submodule_search_locations or [] if nvidia else [])]
    homes += [Path("/usr/local/cuda/include")]
    return [option for home in homes if (home / "cuda.h").is_file() for option in ("-isystem", str(home))]


def build(directory: Path, name: str, *sources: Path, together: bool = False) -> Path:
    """Compiles a program of this directory.

    Args:
        directory: Where the program is put.
        name: Of the program and its source.
        sources: What else it consists of.
        together: All but journal.cpp is compiled as one, in half of the time; for a rehearsal, because the compiler
            sees more of it than the product's does.

    Raises:
        BenchmarkError: There is no g++, or it refuses.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise BenchmarkError("needs g++")
    program = directory / name
    sources = (HERE / f"{name}.cpp", *sources)
    if together:
        unit = directory / f"{name}_together.cpp"
        alone = [source for source in sources if source.name == "journal.cpp"]  # its names are trace_file.cpp's, too
        unit.write_text("".join(f'#include "{source}"\n' for source in sources if source not in alone))
        sources = (unit, *alone)
    command = [compiler, "-std=c++20", "-O2", "-DNDEBUG", '-DCUDASCHED_VERSION="benchmark"', "-pthread"]
    command += [*cuda_headers(), f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'include'}"]
    command += map(str, sources)
    done = subprocess.run([*command, "-o", str(program), "-ldl"], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"{name}.cpp does not compile:\n{done.stderr}")
    return program


def row(figure: str, value: float, low: float, high: float, n: int) -> FigureRow:
    """A figure beside its goal."""
    goal = GOALS[figure]
    limited_by = ""
    if value > goal:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        busy = f"other work on this machine (a load of {load:.0f} on {cores} cores)"
        limited_by = busy if load > cores else LIMITS[figure]
    return FigureRow(
        figure=figure, value=value, goal=goal, better="less", low=low, high=high, n=n, limited_by=limited_by
    )


def counters(directory: Path, rounds: int) -> FigureRow:
    """`counters_ns`."""
    program = build(directory, "counters")
    done = subprocess.run([str(program), str(10 * rounds)], capture_output=True, text=True, check=True)
    batches = [float(line) for line in done.stdout.split()]
    return row("counters_ns", min(batches), min(batches), statistics.median(batches), len(batches))


def trace(directory: Path, rounds: int) -> list[FigureRow]:
    """`trace_ns` and `trace_bytes_a_record`.

    Raises:
        BenchmarkError: Records were dropped, which costs less than keeping them.
    """
    sources = [ROOT / "csrc" / "telemetry" / f"{name}.cpp" for name in ("trace", "trace_file", "journal")]
    sources += [ROOT / "csrc" / "base" / name for name in ("class.cpp", "log.cpp")]
    program = build(directory, "trace", *sources)
    batches: dict[str, list[float]] = {}
    said: dict[str, int] = {}
    for state in ("off", "on"):
        place = directory / f"trace-{state}"
        place.mkdir()
        done = subprocess.run([str(program), str(10 * rounds), state, str(place)], capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"trace.cpp: {done.stderr}")
        lines = [line.split() for line in done.stdout.splitlines()]
        batches[state] = [float(words[0]) for words in lines if len(words) == 1]
        said = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    if said["dropped"]:
        raise BenchmarkError(f"{said['dropped']} records were dropped: the machine is too busy to measure")
    off, on = min(batches["off"]), batches["on"]
    size = float(said["bytes"])
    print(f"tracing off: {off:.1f} ns a launch", file=sys.stderr)
    return [
        row("trace_ns", min(on) - off, min(on) - off, statistics.median(on) - off, len(on)),
        row("trace_bytes_a_record", size, size, size, 1),
    ]


def scrape(directory: Path, rounds: int, clients: int = CLIENTS) -> FigureRow:
    """`scrape_ms_64_clients`.

    Raises:
        BenchmarkError: A program does not start.
    """
    sources = [*sorted((ROOT / "csrc" / "arbiter").glob("*.cpp"))]
    sources += [ROOT / "csrc" / "base" / name for name in ("class.cpp", "log.cpp")]
    run = directory / "run"
    holder = build(directory, "clients", *sources)
    environment = {**os.environ, "CUDASCHED_RUN_DIR": str(run)}
    server = [sys.executable, "-m", "cudasched", "metrics", "serve", "--port", "0"]
    with (
        subprocess.Popen([str(holder), str(run), str(clients)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held,
        subprocess.Popen(server, env=environment, stderr=subprocess.PIPE, text=True) as serving,
    ):
        assert held.stdin and held.stdout and serving.stderr
        try:
            if held.stdout.readline() != b"ready\n":
                raise BenchmarkError("the clients do not start")
            said = serving.stderr.readline()
            if "http://" not in said:
                raise BenchmarkError(f"the server does not start: {said}{serving.stderr.read()}")
            url = said.split()[-1]
            times = []
            for _ in range(10 * rounds):
                begin = time.perf_counter()
                with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                    text = answer.read()
                times.append(1e3 * (time.perf_counter() - begin))
            found = text.count(b"cudasched_launches_total{")
            if found != 3 * clients:
                raise BenchmarkError(f"a scrape has {found // 3} of {clients} clients")
        finally:
            serving.terminate()
            held.stdin.close()
    print(f"{len([1 for line in text.splitlines() if not line.startswith(b'#')])} samples", file=sys.stderr)
    value = min(statistics.median(times[first : first + 10]) for first in range(0, len(times), 10))
    times.sort()
    high = times[int(0.95 * (len(times) - 1))]
    return row("scrape_ms_64_clients", value, times[0], high, len(times))


def machine() -> str:
    """The processor, which is all that these figures are of."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results file; its other figures stay")
    parser.add_argument("--rounds", type=int, default=10, help="of ten batches and ten scrapes each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as place:
            rows = []
            if "counters" in options.only:
                rows.append(counters(Path(place), options.rounds))
            if "trace" in options.only:
                rows += trace(Path(place), options.rounds)
            if "scrape" in options.only:
                rows.append(scrape(Path(place), options.rounds, options.clients))
    except BenchmarkError as error:
        print(f"observe: {error}", file=sys.stderr)
        return 1
    described = Meta(
        gpu=f"none ({machine()})",
        driver=None,
        cuda=None,
        torch=None,
        python=platform.python_version(),
        commit=os.environ.get("CUDASCHED_COMMIT") or meta.current_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        sm_clock_mhz=None,
        command=meta.command_line(),
    )
    merge_figures(options.out, described, rows)
    for each in rows:
        print(f"{each.figure}: {each.value:.3g} (goal {each.goal:g}), {each.low:.3g} to {each.high:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
