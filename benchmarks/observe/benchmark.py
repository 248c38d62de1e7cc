"""What it costs to be seen: counting and tracing on the launch path, a scrape of 64 clients, the page of `serve`.

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

`page_first_paint_s`: from the navigation to the first contentful paint, as Chromium says it, with the browser and the
server on two cores, a new profile and an empty cache each time: the median. `page_kB`: all that the page loads before
it asks for data, compressed with gzip.
"""

from __future__ import annotations

import gzip
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO

from cudasched.demo.harness import HarnessError

from benchmarks.c_program import ROOT, compile_cpp
from benchmarks.lab.processes import output_of
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, median_of, once

HERE = Path(__file__).parent
TIMEOUT_S = 300
CORES = 2
FIRST_PAINT = """
new Promise((done) => {
  const found = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (found()) done(found().startTime);
  else new PerformanceObserver(() => found() && done(found().startTime)).observe({ type: "paint", buffered: true });
})
"""


def build(session: Session, name: str, *sources: Path) -> Path:
    """Compiles a program of this directory; for a rehearsal quickly."""
    return compile_cpp(session.builds / name, HERE / f"{name}.cpp", *sources, quickly=session.rehearsal)


@contextmanager
def serving(*command: str, environment: dict[str, str]) -> Iterator[tuple[str, IO[str]]]:
    """A server of cudasched's, on some port; its address, and what else it says.

    Raises:
        HarnessError: It does not start.
    """
    server = [sys.executable, "-m", "cudasched", *command, "--port", "0"]
    with subprocess.Popen(server, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr
        try:
            said = started.stderr.readline()
            if "http://" not in said:
                raise HarnessError(f"the server does not start: {said}{started.stderr.read()}")
            yield said.split()[-1], started.stderr
        finally:
            started.terminate()


def counters(session: Session) -> Found:
    """`counters_ns`."""
    program = build(session, "counters")
    rounds = str(10 * session.options.rounds)
    batches = [float(line) for line in output_of("counters.cpp", [str(program), rounds]).split()]
    return {"counters_ns": (min(batches), min(batches), statistics.median(batches), len(batches))}


def trace(session: Session) -> Found:
    """`trace_ns` and `trace_bytes_a_record`.

    Raises:
        HarnessError: Records were dropped, which costs less than keeping them.
    """
    sources = [ROOT / "csrc" / "telemetry" / f"{name}.cpp" for name in ("trace", "trace_file", "block_file", "journal")]
    sources += [ROOT / "csrc" / "base" / name for name in ("class.cpp", "log.cpp")]
    program = build(session, "trace", *sources)
    batches: dict[str, list[float]] = {}
    said: dict[str, int] = {}
    for state in ("off", "on"):
        place = session.builds / f"trace-{state}"
        place.mkdir()
        command = [str(program), str(10 * session.options.rounds), state, str(place)]
        lines = [line.split() for line in output_of("trace.cpp", command).splitlines()]
        batches[state] = [float(words[0]) for words in lines if len(words) == 1]
        said = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    if said["dropped"]:
        raise HarnessError(f"{said['dropped']} records were dropped: the machine is too busy to measure")
    off, on = min(batches["off"]), batches["on"]
    session.say(f"tracing off: {off:.1f} ns a launch")
    return {
        "trace_ns": (min(on) - off, min(on) - off, statistics.median(on) - off, len(on)),
        "trace_bytes_a_record": once(float(said["bytes"])),
    }


def scrape(session: Session) -> Found:
    """`scrape_ms_64_clients`.

    Raises:
        HarnessError: A program does not start.
    """
    clients = session.options.clients
    sources = [*sorted((ROOT / "csrc" / "arbiter").glob("*.cpp"))]
    sources += [ROOT / "csrc" / "base" / name for name in ("class.cpp", "log.cpp")]
    run = session.builds / "run"
    holder = [str(build(session, "clients", *sources)), str(run), str(clients)]
    with (
        subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held,
        serving("metrics", "serve", environment={"CUDASCHED_RUN_DIR": str(run)}) as (url, _),
    ):
        assert held.stdin and held.stdout
        try:
            if held.stdout.readline() != b"ready\n":
                raise HarnessError("the clients do not start")
            times = []
            for _ in range(10 * session.options.rounds):
                begin = time.perf_counter()
                with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                    text = answer.read()
                times.append(1e3 * (time.perf_counter() - begin))
            found = text.count(b"cudasched_launches_total{")
            if found != 3 * clients:
                raise HarnessError(f"a scrape has {found // 3} of {clients} clients")
        finally:
            held.stdin.close()
    session.say(f"{len([1 for line in text.splitlines() if not line.startswith(b'#')])} samples")
    value = min(statistics.median(times[first : first + 10]) for first in range(0, len(times), 10))
    times.sort()
    high = times[int(0.95 * (len(times) - 1))]
    return {"scrape_ms_64_clients": (value, times[0], high, len(times))}


def page(session: Session) -> Found:
    """`page_first_paint_s` and `page_kB`.

    Raises:
        HarnessError: There is no Chromium, or the server does not start.
    """
    sys.path.insert(0, str(ROOT / "tests" / "python"))  # the browser that the tests lead
    from chromium import FOUND, Browser

    if FOUND is None:
        raise HarnessError("needs Chromium: apt-get install chromium")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    home = session.builds
    environment = {"HOME": str(home), "CUDASCHED_RUN_DIR": str(home / "run"), "XDG_STATE_HOME": str(home / "state")}
    times = []
    with serving("serve", environment=environment) as (url, said):
        said.readline()
        token = (home / "state" / "cudasched" / "serve.token").read_text().strip()
        for number in range(session.options.browsers):
            browser = Browser(home / f"profile{number}")
            try:
                browser.open(f"{url}#token={token}")
                browser.wait_for("document.documentElement?.dataset.ready === '1'")
                times.append(browser.evaluate(FIRST_PAINT) / 1000)
            finally:
                browser.close()
    files = resources.files("cudasched.serve").joinpath("assets").iterdir()
    size = sum(len(gzip.compress(file.read_bytes(), 9, mtime=0)) for file in files) / 1000
    return {
        "page_first_paint_s": median_of(times),
        "page_kB": once(size),
    }


BENCHMARK = Benchmark(
    about="the cost of counting and tracing for a launch, a scrape of 64 clients, and the page of `cudasched serve`",
    groups={"counters": counters, "trace": trace, "scrape": scrape, "page": page},
    goals={
        "counters_ns": (15.0, "less"),
        "trace_ns": (250.0, "less"),
        "trace_bytes_a_record": (48.0, "less"),
        "scrape_ms_64_clients": (60.0, "less"),
        "page_first_paint_s": (1.0, "less"),
        "page_kB": (300.0, "less"),
    },
    limits={
        "counters_ns": "two atomic additions of about 5 ns each on this machine",
        "trace_ns": "four looks at the clock, and the cache lines that the writer's thread takes",
        "trace_bytes_a_record": "the fields of a launch",
        "scrape_ms_64_clients": "Python's making of the text, a line at a time",
    },
    settings={"rounds": (10, 1), "clients": (64, 3), "browsers": (11, 1)},
    gpu=False,
)
