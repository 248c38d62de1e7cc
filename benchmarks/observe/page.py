"""How soon the page of `cudasched serve` is painted, and how large it is.

    python -m benchmarks.observe.page --out benchmarks/results/observe.json

`page_first_paint_s`: from the navigation to the first contentful paint, as Chromium says it, with the browser and the
server on two cores, a new profile and an empty cache each time. The median; `low` and `high` are the least and the
greatest. `page_kB`: all that the page loads before it asks for data, compressed with gzip.

Figures that the file has and that were not measured now stay. Needs Chromium and what `cudasched serve` needs; takes
half a minute.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from benchmarks import meta
from benchmarks.observe.__main__ import ROOT, machine
from benchmarks.results.schema import FigureRow, Meta, merge_figures

CORES = 2
GOALS = {"page_first_paint_s": 1.0, "page_kB": 300.0}
FIRST_PAINT = """
new Promise((done) => {
  const found = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (found()) done(found().startTime);
  else new PerformanceObserver(() => found() && done(found().startTime)).observe({ type: "paint", buffered: true });
})
"""


class BenchmarkError(Exception):
    """The benchmark cannot be run; the text says why."""


def row(figure: str, values: Sequence[float]) -> FigureRow:
    """A figure beside its goal."""
    value = statistics.median(values)
    busy = f"other work on this machine (a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
    return FigureRow(
        figure=figure,
        value=value,
        goal=GOALS[figure],
        better="less",
        low=min(values),
        high=max(values),
        n=len(values),
        limited_by="" if value <= GOALS[figure] else busy,
    )


def size_kb() -> float:
    """Of the page's files."""
    files = resources.files("cudasched.serve").joinpath("assets").iterdir()
    return sum(len(gzip.compress(file.read_bytes(), 9, mtime=0)) for file in files) / 1000


def first_paints(place: Path, rounds: int) -> list[float]:
    """Seconds, of new browsers.

    Raises:
        BenchmarkError: There is no Chromium, or the server does not start.
    """
    sys.path.insert(0, str(ROOT / "tests" / "python"))  # the browser that the tests lead
    from chromium import FOUND, Browser

    if FOUND is None:
        raise BenchmarkError("needs Chromium: apt-get install chromium")
    environment = {**os.environ, "HOME": str(place), "CUDASCHED_RUN_DIR": str(place / "run")}
    environment.pop("XDG_STATE_HOME", None)
    server = [sys.executable, "-m", "cudasched", "serve", "--port", "0"]
    times = []
    with subprocess.Popen(server, env=environment, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr
        try:
            said = serving.stderr.readline()
            if "http://" not in said:
                raise BenchmarkError(f"the server does not start: {said}{serving.stderr.read()}")
            serving.stderr.readline()
            token = (place / ".local" / "state" / "cudasched" / "serve.token").read_text().strip()
            for number in range(rounds):
                browser = Browser(place / f"profile{number}")
                try:
                    browser.open(f"{said.split()[-1]}#token={token}")
                    browser.wait_for("document.documentElement?.dataset.ready === '1'")
                    times.append(browser.evaluate(FIRST_PAINT) / 1000)
                finally:
                    browser.close()
        finally:
            serving.terminate()
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe.page", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results file; its other figures stay")
    parser.add_argument("--rounds", type=int, default=11, help="browsers that open the page")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    try:
        with tempfile.TemporaryDirectory() as place:
            rows = [row("page_first_paint_s", first_paints(Path(place), options.rounds)), row("page_kB", [size_kb()])]
    except BenchmarkError as error:
        print(f"page: {error}", file=sys.stderr)
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
