"""Baselines end to end: from recordings to runs, refusals, verdicts, reports, the commands and the pytest plugin."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cudasched.errors import Error
from support import PATIENCE_S, Run

np = pytest.importorskip("numpy", reason="baselines need NumPy")
pytest.importorskip("scipy", reason="baselines need SciPy")
pa = pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

import pyarrow.parquet as pq  # noqa: E402
from cudasched._document import document  # noqa: E402
from cudasched.observe import Metrics, RegionMetrics, Times, baseline, metrics  # noqa: E402
from cudasched.observe.baseline import Baseline, Comparison  # noqa: E402
from cudasched.observe.baseline._runs import of_counters, of_launches  # noqa: E402
from test_advise import launch, recording  # noqa: E402

HERE = Path(__file__).parent

# Kernels of known lengths on the simulated driver, a little different in each run: program.py FACTOR [in a region]
PROGRAM = """
import contextlib, ctypes, random, sys
import cudasched
from launcher import Gpu
factor, in_region = float(sys.argv[1]), len(sys.argv) > 2
gpu, module, run = Gpu(), ctypes.c_void_p(), random.Random()
names = [b"first", b"second", b"third", b"rare"]
image = b"cudasched-sim 1\\n" + b"".join(b"kernel %s params=4 block_us=param:0\\n" % name for name in names)
gpu.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
launches = []
for place, name in enumerate(names[:3]):
    function = ctypes.c_void_p()
    gpu.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
    us = 500 * (1 + place) * (1 + run.gauss(0, 0.002)) * (factor if name == b"second" else 1)
    launches.append((function, ctypes.c_uint32(round(us))))
stream = ctypes.c_void_p(gpu.stream())
for step in range(60):
    with cudasched.region("latency", name="step") if in_region else contextlib.nullcontext():
        for function, us in launches:
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(us))
            gpu.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, None)
        gpu.synchronize()
"""


@pytest.fixture
def program(simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "1")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


# ---- from recordings to runs


def measured(*rows: dict[str, Any]) -> dict[str, Any]:
    return {one.name: one for one in of_launches(recording(rows))}


def test_a_kernel_is_its_mean_without_outliers_over_all_its_shapes() -> None:
    usual = [launch(function="a", duration_ns=1000 + place) for place in range(18)]
    outliers = [launch(function="a", duration_ns=1), launch(function="a", duration_ns=10**9)]
    other_shape = [launch(grid=(7, 1, 1), function="a", duration_ns=5000) for _ in range(20)]
    found = measured(*usual, *outliers, *other_shape)["a"]
    assert (found.kind, found.count) == ("kernel", 40)
    assert found.each_ns == pytest.approx((1008.5 + 5000) / 2)


def test_work_that_moves_to_another_shape_is_no_news_but_its_time_is() -> None:
    """5% more rows are another grid: the kernel is compared by its name, over all of its shapes."""
    before = [launch(grid=(100, 1, 1), duration_ns=1000)] * 20
    after = [launch(grid=(105, 1, 1), duration_ns=1050)] * 20
    assert measured(*after)["own_kernel"].each_ns / measured(*before)["own_kernel"].each_ns == pytest.approx(1.05)


def test_graphs_are_told_apart_by_number_and_process() -> None:
    rows = [
        launch(kind="graph", function="graph", graph=1, pid=5, duration_ns=100),
        launch(kind="graph", function="graph", graph=2, pid=5, duration_ns=200),
        launch(kind="graph", function="graph", graph=1, pid=3, duration_ns=300),
        launch(function="a", pid=3, duration_ns=400),
    ]
    found = measured(*rows)
    assert {name: one.each_ns for name, one in found.items()} == {
        "graph 1": 100,
        "graph 2": 200,
        "graph 1 of process 2": 300,
        "a": 400,
    }


def test_launches_without_a_time_are_left_out() -> None:
    assert measured(launch(duration_ns=None), launch(duration_ns=10))["own_kernel"].count == 1
    assert of_launches(recording([launch(duration_ns=None)])) == ()


def test_regions_and_waits_of_all_processes_are_means() -> None:
    def counted(count: int, total_s: float) -> Metrics:
        times = Times(buckets=(0, count), sum_s=total_s)
        region = RegionMetrics(name="step", slo_ms=None, met=0, missed=0, times=times)
        return metrics().__class__(**{**vars(metrics()), "regions": (region,), "gate_wait": times})

    found = {(one.kind, one.name): one for one in of_counters([counted(10, 1.0), counted(30, 1.0)])}
    assert {key: (one.count, one.each_ns) for key, one in found.items()} == {
        ("region", "step"): (40, pytest.approx(5e7)),
        ("wait", "at the gate"): (40, pytest.approx(5e7)),
    }
    assert of_counters([counted(9, 1.0)]) == ()  # too few to mean anything


def parquet(directory: Path, name: str, rows: list[dict[str, Any]], **said: str | None) -> Path:
    from cudasched.collect import schema

    table = recording(rows, **said)
    whole = {column: table[column] for column in table.column_names}
    form = schema().with_metadata(table.schema.metadata)
    path = directory / f"{name}.parquet"
    pq.write_table(pa.table([whole[entry.name].cast(entry.type) for entry in form], schema=form), path)
    return path


def test_recordings_make_a_baseline_that_is_read_as_it_was_written(tmp_path: Path) -> None:
    paths = [parquet(tmp_path, str(place), [launch(duration_ns=1000 + place)] * 5) for place in range(3)]
    made = baseline.from_recordings(paths, session="one")
    assert (made.gpu, made.sm_count, made.timing, len(made.runs)) == ("NVIDIA H200", 132, "cupti", 3)
    assert [run.measured[0].each_ns for run in made.runs] == [1000, 1001, 1002]
    assert made.runs[1].time_ns == 5005
    baseline.save(made, tmp_path / "b.json")
    assert baseline.load(tmp_path / "b.json") == made


@pytest.mark.parametrize(
    ("rows", "said", "message"),
    [
        ([], {}, "is empty: no launch was recorded"),
        ([launch()], {"cut_short": "1"}, "is cut short: 1 of the processes did not come to an end; record again"),
        ([launch(duration_ns=None)] * 3, {}, "lacks the times of 3 of 3 launches"),
        ([launch()] * 8, {"lost": "2"}, "lacks the times of 2 of 10 launches"),
    ],
)
def test_recordings_that_tell_nothing_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], said: dict[str, str], message: str
) -> None:
    path = parquet(tmp_path, "r", rows, **said)
    with pytest.raises(Error, match=message):
        baseline.from_recordings([path], session="one")


def test_a_recording_that_is_truncated_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, "r", [launch()] * 100)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Error, match=r"r\.parquet is no data set of launches, or is damaged"):
        baseline.from_recordings([path], session="one")


def test_recordings_of_two_gpus_are_no_baseline(tmp_path: Path) -> None:
    paths = [parquet(tmp_path, "a", [launch()]), parquet(tmp_path, "b", [launch()], gpu="NVIDIA A100")]
    with pytest.raises(Error, match=r"NVIDIA H200.*NVIDIA A100.*different GPUs cannot be compared"):
        baseline.from_recordings(paths, session="one")


# ---- baselines that are refused


def made(factors: dict[str, float] | None = None, *, seed: int = 1, runs: int = 6, **about: Any) -> Baseline:
    """Runs of kernels "a" to "f", 100 to 600 us, that vary by half a percent."""
    generator = np.random.default_rng(seed)
    times = {name: 1e5 * (place + 1) * (factors or {}).get(name, 1.0) for place, name in enumerate("abcdef")}
    times |= {name: 1e5 * factor for name, factor in (factors or {}).items() if name not in times}

    def one_run() -> dict[str, Any]:
        own = {name: time * math.exp(generator.normal(0, 0.005)) for name, time in times.items() if time > 0}
        return {
            "recorded": "2026-11-23T05:00:00+00:00",
            "session": "one",
            "driver_version": "13000",
            "cudasched_version": "0.1.0",
            "time_ns": 10 * sum(own.values()),
            "measured": [{"kind": "kernel", "name": name, "count": 10, "each_ns": time} for name, time in own.items()],
        }

    return Baseline.model_validate(
        {
            "gpu": "NVIDIA H200",
            "compute_capability": "9.0",
            "sm_count": 132,
            "timing": "cupti",
            "command": "python train.py",
            "runs": [one_run() for _ in range(runs)],
            **about,
        }
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON; save it again"),
        ("{", "is cut short"),
        ("[1, 2]", "is no baseline: save one with `cudasched baseline save`"),
        ('{"kind": "cudasched baseline", "schema_version": 2}', "has schema version 2, and this cudasched reads 1"),
        ('{"kind": "cudasched baseline", "schema_version": 1}', "is damaged: gpu: Field required; save it again"),
        ("[" * 100_000, "is no baseline"),
        ("\x00\xff", "is no baseline"),
    ],
)
def test_files_that_are_no_baseline_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(Error, match=message):
        baseline.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("count", 0),
            pytest.param("count", 10**400, id="count-400-digits"),
            ("each_ns", -1.0),
            ("each_ns", 1e308),
            ("each_ns", 1e-300),
        ),
        *(("each_ns", "NaN"), ("each_ns", None), ("kind", "thing"), ("more", 1)),
    ],
)
def test_a_damaged_value_is_refused_with_its_place(tmp_path: Path, field: str, value: object) -> None:
    content = made().model_dump(mode="json")
    content["runs"][2]["measured"][1][field] = value
    (tmp_path / "b.json").write_text(json.dumps(content))
    with pytest.raises(Error, match=rf"is damaged: runs\.2\.measured\.1\.{field}: .*; save it again"):
        baseline.load(tmp_path / "b.json")


def test_a_baseline_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"there is no baseline at .*`cudasched baseline save"):
        baseline.load(tmp_path / "b.json")
    with pytest.raises(Error, match="cannot be read: Is a directory"):
        baseline.load(tmp_path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"gpu": "NVIDIA A100"}, "NVIDIA A100.*times of different GPUs cannot be compared; save a baseline for each"),
        ({"sm_count": 16}, "16 SMs"),
        ({"timing": "events"}, "timed by events.*choose the same --timing"),
    ],
)
def test_a_baseline_of_another_gpu_or_clock_is_refused(about: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        baseline.check(made(**about), made(seed=2))


def test_a_baseline_of_another_model_is_refused() -> None:
    other = {"a": 0.0, "b": 0.0, "e": 0.0, "f": 0.0, "x": 5.0, "y": 5.0}
    with pytest.raises(Error, match=r"take only 33% of the device time of the baseline: the program or the model is"):
        baseline.check(made(), made(other, seed=2))


def test_runs_of_another_model_are_not_added() -> None:
    """Guards against a baseline of two programs: hardly a kernel is in each of its runs, and none is judged."""
    other = {"a": 0.0, "b": 0.0, "e": 0.0, "f": 0.0, "x": 5.0, "y": 5.0}
    with pytest.raises(Error, match=r"take only 33% of the device time of b\.json: the program or the model is"):
        baseline.merged(made(), made(other, seed=2), "b.json", "the new recording")
    assert len(baseline.merged(made(), made({"a": 0.0, "x": 1.0}, seed=2), "b.json", "the new recording").runs) == 12


def test_another_version_or_command_is_said() -> None:
    now = made(seed=2, command="python train.py --fast")
    runs = tuple(run.model_copy(update={"driver_version": "13010"}) for run in now.runs)
    found = baseline.check(made(), now.model_copy(update={"runs": runs}))
    assert "another version of the driver: 13000, now 13010" in found.notes
    assert "the baseline is of another command: python train.py" in found.notes
    assert any("recorded in one go" in note for note in found.notes)


# ---- verdicts


def verdicts(found: Comparison) -> dict[str, str]:
    return {one.name: one.verdict for one in found.compared}


def test_five_percent_in_one_kernel_is_slower_and_nothing_else() -> None:
    found = baseline.check(made(), made({"c": 1.05}, seed=2))
    assert found.slower == 1
    assert verdicts(found)["c"] == "slower" == found.compared[0].verdict
    assert set(verdicts(found).values()) <= {"slower", "no change", "below the limit"}
    worst = found.compared[0]
    assert worst.low < worst.change < worst.high
    assert worst.change == pytest.approx(0.05, abs=0.01) and worst.share == pytest.approx(3 / 21, abs=0.01)
    assert found.runs_for_5_percent is not None and found.runs_for_5_percent <= 8


def test_nothing_is_slower_where_nothing_changed() -> None:
    found = baseline.check(made(), made(seed=2))
    assert found.slower == 0


def test_less_than_the_limit_is_no_regression_and_can_be_made_one() -> None:
    now = made({"d": 1.02}, seed=2)
    assert verdicts(baseline.check(made(), now))["d"] == "below the limit"
    assert verdicts(baseline.check(made(), now, least_change=0.01))["d"] == "slower"


def test_faster_is_said() -> None:
    found = baseline.check(made(), made({"f": 0.9}, seed=2))
    assert verdicts(found)["f"] == "faster" and found.slower == 0


def test_kernels_of_one_side_and_of_some_runs_are_shown_and_not_judged() -> None:
    now = made({"a": 0.0, "new": 2.0}, seed=2)
    before = made()
    partly = tuple(
        run.model_copy(update={"measured": run.measured[:-1] if place == 0 else run.measured})
        for place, run in enumerate(before.runs)
    )
    found = baseline.check(before.model_copy(update={"runs": partly}), now)
    assert {one.name: one.why for one in found.uncompared} == {
        "a": "only in the baseline",
        "new": "not in the baseline",
        "f": "not in every run: 5 of 6 in the baseline, 6 of 6 now",
    }
    assert any("2 kernels, regions or waits are on one side only" in note for note in found.notes)
    assert not {"a", "new", "f"} & set(verdicts(found))


def test_kernels_that_hardly_take_time_are_left_out_whichever_side_they_grew_on() -> None:
    """By their share on both sides together: what is compared may not depend on which side is which."""
    one, other = made({"tiny": 0.01}), made({"tiny": 0.05}, seed=2)
    for before, after in ((one, other), (other, one)):
        (tiny,) = [each for each in baseline.check(before, after).uncompared if each.name == "tiny"]
        assert tiny.why == "under 0.5% of the device time"


def test_too_few_runs_say_how_many_it_takes() -> None:
    with pytest.raises(Error, match=r"6 runs in the baseline and 2 now cannot show any difference.*it takes 4 now"):
        baseline.check(made(), made(seed=2, runs=2))


# ---- reports


class Tags(HTMLParser):
    """Of a document: its tags, and whether they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line", "circle", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_report_is_whole_and_escapes_every_name() -> None:
    pytest.importorskip("jinja2")
    hostile = "<script>alert('x')</script>\n\x1b[2J" + "k" * 10_000
    before = made({hostile: 3.0, "gone": 1.0}, command="python '<b>'")
    found = baseline.check(before, made({hostile: 3.3, "c": 0.9, "new<i>": 1.0}, seed=2))
    assert found.slower == 1
    tags = Tags()
    tags.feed(baseline.html(found))
    tags.close()
    assert tags.open == []
    assert not {"script", "b", "i", "img", "link"} & set(tags.seen)
    assert tags.seen.count("svg") == 1 + sum(one.verdict != "no change" for one in found.compared)
    assert tags.seen.count("circle") >= len(found.compared) + 12
    assert "1 got slower beyond noise" in tags.text and "\x1b" not in tags.text
    assert "only in the baseline" in tags.text


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_table_fits_its_terminal(columns: int) -> None:
    from rich.console import Console

    found = baseline.check(made(), made({"c": 1.05}, seed=2))
    console = Console(width=columns, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    console.print(baseline.terminal(found, columns=columns, top=2))
    text = console.export_text()
    assert "1 got slower beyond noise" in text and "slower" in text and "+5." in text.replace("+4.", "+5.")
    assert max(map(len, text.splitlines())) <= columns
    assert "and 5 more: --top 0 shows them all" in text


def test_in_a_browser_the_report_fits_and_logs_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    page = tmp_path / "report.html"
    page.write_text(baseline.html(baseline.check(made(), made({"c": 1.05}, seed=2))))
    picture = tmp_path / "report.png"
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *("--window-size=1000,900", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert picture.stat().st_size > 10_000, done.stderr
    assert "CONSOLE" not in done.stderr


# ---- the commands


def test_save_and_check_find_five_percent_in_one_kernel(cudasched: Run, program: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    run = ("--timing", "events", "--runs", "5", "--", sys.executable, str(program))
    saved = cudasched("baseline", "save", "-o", "b.json", *run, "1", "in a region")
    assert saved.returncode == 0, saved.stderr
    assert "b.json: 5 runs of 1 session" in saved.stderr
    names = {(one.kind, one.name) for one in baseline.load("b.json").runs[0].measured}
    assert {("kernel", "first"), ("kernel", "second"), ("kernel", "third"), ("region", "step")} <= names

    checked = cudasched("baseline", "check", "b.json", "-o", "report.html", "--json", *run, "1.25", "in a region")
    assert checked.returncode == 3, checked.stderr
    answer = json.loads(checked.stdout)
    assert (answer["kind"], answer["schema_version"]) == ("baseline", 1)
    found = Comparison.model_validate(answer["data"])
    assert verdicts(found)["second"] == "slower"
    assert found.compared[0].name == "second"
    assert found.compared[0].change == pytest.approx(0.25, abs=0.12)
    assert "second" in Path("report.html").read_text()

    more = cudasched("baseline", "save", "-o", "b.json", "--add", *run, "1")
    assert more.returncode == 0, more.stderr
    assert len(baseline.load("b.json").runs) == 10
    assert len({one.session for one in baseline.load("b.json").runs}) == 2


def test_runs_that_another_command_adds_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer
    from cudasched.cli import baseline as command

    context = typer.Context(typer.main.get_command(command.app))
    file = tmp_path / "b.json"
    baseline.save(made(), file)

    def recorded(*_: object, **__: object) -> Baseline:
        lock = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def add() -> None:
            baseline.save(baseline.merged(made(), made(seed=2), "", ""), file)
            os.close(lock)

        threading.Timer(0.2, add).start()
        return made(seed=3)

    monkeypatch.setattr(command, "_measured", recorded)
    assert command.save(context, ["true"], output=file, add=True) == 0
    assert len(baseline.load(file).runs) == 18


def test_recordings_in_place_of_a_program(cudasched: Run, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)

    def options(name: str, factor: float) -> list[str]:
        made: list[str] = []
        for place in range(5):
            ns = round(1e5 * factor * math.exp(generator.normal(0, 0.003)))
            path = parquet(tmp_path, f"{name}{place}", [launch(duration_ns=ns)] * 4)
            made += ["--data", str(path)]
        return made

    assert cudasched("baseline", "save", "-o", "b.json", *options("before", 1.0)).returncode == 0
    same = cudasched("baseline", "check", "b.json", *options("same", 1.0))
    assert same.returncode == 0, same.stderr
    assert "nothing got slower beyond noise" in same.stdout
    slower = cudasched("baseline", "check", "b.json", *options("slower", 1.05))
    assert slower.returncode == 3
    assert "slower" in slower.stdout and "own_kernel" in slower.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["save"], 2, "name a program after `--`, or recordings with --data; one of the two"),
        (["save", "--data", "x.parquet", "--", "true"], 2, "one of the two"),
        (["save", "--data", "x.parquet", "--data", "x.parquet"], 2, "given twice"),
        (["save", "--data", "x.parquet"], 1, "there is no data set at x.parquet"),
        (["save", "--data", "x.parquet", "--runs", "3"], 2, "--runs: it is for a program's runs"),
        (["check", "b.json", "--data", "x.parquet", "--timing", "events"], 2, "--timing: it is for a program's runs"),
        (["save", "--timing", "both", "--", "true"], 2, "--timing both: it is cupti or events"),
        (["save", "-o", "/nowhere/b.json", "--", "true"], 2, "there is no directory /nowhere"),
        (["check", "b.json", "--", "true"], 1, "there is no baseline at b.json"),
        (["check", "b.json"], 2, "name a program after `--`"),
        (["check", "b.json", "-o", "./b.json", "--", "true"], 2, "-o b.json: a report would replace the baseline"),
        (["check", "b.json", "-o", "r.pdf", "--", "true"], 2, "name a file that ends in .html or .json"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    cudasched: Run, simulated: Path, arguments: list[str], code: int, message: str
) -> None:
    done = cudasched("baseline", *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_too_few_runs_are_refused_before_the_program_runs(cudasched: Run, simulated: Path, tmp_path: Path) -> None:
    baseline.save(made(), tmp_path / "b.json")
    done = cudasched("baseline", "check", str(tmp_path / "b.json"), "--runs", "1", "--", "touch", "ran")
    assert done.returncode == 1
    assert "cannot show any difference" in done.stderr and "now" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not Path("ran").exists()


def test_a_missing_package_is_said_before_the_program_runs(python: Run, simulated: Path, tmp_path: Path) -> None:
    """Six runs of the program were lost where SciPy was missing."""
    baseline.save(made(), tmp_path / "b.json")
    done = python(
        "import sys\nsys.modules['scipy'] = None\nfrom cudasched.cli import main\n"
        f"sys.argv = ['cudasched', 'baseline', 'check', {str(tmp_path / 'b.json')!r}, '--', 'touch', 'ran']\nmain()"
    )
    assert done.returncode == 1 and "baselines need SciPy" in done.stderr
    assert not Path("ran").exists()


def test_a_program_without_launches_is_no_observation(cudasched: Run, simulated: Path) -> None:
    done = cudasched("baseline", "save", "--timing", "events", "--runs", "2", "--", "true")
    assert done.returncode == 1
    assert "run 1 of 2 of true left no recording; nothing of it is compared or saved" in done.stderr


@pytest.mark.parametrize("words", [["check", "baseline.json"], ["save", "--add"]])
def test_another_gpu_is_told_after_the_first_run(cudasched: Run, program: Path, words: list[str]) -> None:
    """Guards against runs, six of them, of which none can be compared."""
    baseline.save(made(timing="events"), "baseline.json")
    done = cudasched("baseline", *words, "--", sys.executable, str(program), "1")
    assert done.returncode == 1 and "times of different GPUs cannot be compared" in done.stderr
    assert "run 1 of 6" in done.stderr and "run 2 of 6" not in done.stderr


def test_a_program_in_one_string_is_split_as_by_a_shell(program: Path) -> None:
    found = baseline.record(f"{sys.executable} {str(program)!r} 1", 1, timing="events")
    assert found.command.endswith(f"{program} 1")


def test_the_first_recording_is_read_no_more_often_than_others(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudasched import collect

    read, names = collect.read, list[str]()
    monkeypatch.setattr(collect, "read", lambda path: (names.append(path.name), read(path))[1])
    command = [sys.executable, str(program), "1"]
    first = baseline.record(command, 1, timing="events")
    alone = names.copy()
    names.clear()
    both = baseline.record(command, 2, timing="events", beside=first)
    assert names == [*alone, *(name.replace("1", "2") for name in alone)] and len(both.runs) == 2


def test_a_program_that_fails_is_no_observation(cudasched: Run, program: Path) -> None:
    code = "import runpy, sys; sys.argv = ['p', '1']; runpy.run_path('program.py'); sys.exit(7)"
    done = cudasched("baseline", "save", "--timing", "events", "--runs", "2", "--", sys.executable, "-c", code)
    assert done.returncode == 1
    assert "ended with exit code 7; nothing of it is compared or saved" in done.stderr
    assert not Path("baseline.json").exists()


def test_its_json_is_of_the_documented_form() -> None:
    found = baseline.check(made(), made(seed=2))
    assert Comparison.model_validate(json.loads(document("baseline", found.model_dump(mode="json")))["data"]) == found


# ---- the pytest plugin

PLUGIN_TEST = """
import sys
def test_speed(gpu_baseline):
    gpu_baseline([sys.executable, {program!r}, {factor!r}], runs=5, timing="events")
"""


def run_pytest(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    others = [f"no:{name}" for name in ("cacheprovider", "xdist", "schemathesis", "hypothesispytest", "anyio")]
    command = [sys.executable, "-m", "pytest", "-q", *(word for one in others for word in ("-p", one)), *options]
    return subprocess.run([*command, str(place)], capture_output=True, text=True, timeout=PATIENCE_S, cwd=place)


def test_the_plugin_saves_checks_and_fails_what_got_slower(program: Path, tmp_path: Path) -> None:
    place = tmp_path / "tests"
    place.mkdir()
    test = place / "test_it.py"
    test.write_text(PLUGIN_TEST.format(program=str(program), factor="1"))
    missing = run_pytest(place)
    assert missing.returncode == 1 and "pytest --gpu-baselines=save records it" in missing.stdout
    saved = run_pytest(place, "--gpu-baselines=save")
    assert saved.returncode == 0, saved.stdout
    file = place / "gpu-baselines" / "test_it.test_speed.json"
    assert len(baseline.load(file).runs) == 5
    test.write_text(PLUGIN_TEST.format(program=str(program), factor="1.3"))
    slower = run_pytest(place, "--gpu-baseline-reports=reports")
    assert slower.returncode == 1
    assert "got slower than the baseline, beyond the noise from run to run" in slower.stdout
    assert "second (kernel)" in slower.stdout
    assert (place / "reports" / "test_it.test_speed.html").is_file()
    assert "1 skipped" in run_pytest(place, "--gpu-baselines=skip").stdout


NAMES_TEST = """
import pytest
class TestOne:
    def test_speed(self, gpu_baseline): gpu_baseline(["true"])
class TestOther:
    def test_speed(self, gpu_baseline): gpu_baseline(["true"])
    class TestInner:
        @pytest.mark.parametrize("what", ["a/b", "a-b"])
        def test_speed(self, gpu_baseline, what): gpu_baseline(["true"])
def test_speed(gpu_baseline): gpu_baseline("true 'of two words'")
def test_two_programs(gpu_baseline):
    gpu_baseline(["true"], baseline="one.json")
    gpu_baseline(["true"], baseline="other.json")
    gpu_baseline(["false"], baseline="one.json")
"""

# In the place of the command: writes what it was asked for.
NAMES_CONFTEST = """
import pathlib, pytest_cudasched
def noted(*arguments):
    with open("asked", "a") as file: file.write(" ".join(arguments) + chr(10))
    return 0, '{"data": {}}'
pytest_cudasched.GpuBaseline._command = staticmethod(noted)
"""


def test_no_two_tests_of_the_plugin_share_a_file(tmp_path: Path) -> None:
    """Guards against tests of one name in two classes, or in two directories, that took each other's times."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_it.py").write_text(NAMES_TEST)
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "conftest.py").write_text(NAMES_CONFTEST)
    done = run_pytest(tmp_path, "--gpu-baselines=save")
    assert "10 passed" in done.stdout and "2 failed" in done.stdout, done.stdout
    assert "one.json is of another program of this test: give each its own" in done.stdout
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    own = [line[line.index("-o") + 1] for line in asked if "gpu-baselines" in line[2]]
    assert len(own) == len(set(own)) == 10
    assert [line[-4:] for line in asked].count(["--", "true", "of", "two", "words"][-4:]) == 2
    assert str(tmp_path / "first" / "gpu-baselines" / "test_it.test_speed.json") in own
    (tmp_path / "asked").unlink()
    run_pytest(tmp_path, "--gpu-baselines=add")  # another session may have made the files by the time of a run's end
    assert all(" --add " in line for line in (tmp_path / "asked").read_text().splitlines())
    (tmp_path / "asked").unlink()
    for file in (*own, tmp_path / "one.json", tmp_path / "other.json"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    run_pytest(tmp_path, "--gpu-baseline-reports=reports")
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    reports = [line[line.index("-o") + 1] for line in asked]
    assert len(reports) == len(set(reports)) == 14
    assert all("--timing" not in line for line in asked)


def test_a_check_times_as_its_baseline_was_timed(
    cudasched: Run, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUPTI cannot be had here: whatever is not timed by events fails."""
    monkeypatch.setenv("CUDASCHED_CUPTI", "/nowhere/libcupti.so")
    run = ("--runs", "5", "--", sys.executable, str(program), "1")
    assert cudasched("baseline", "save", *run).returncode == 1
    assert cudasched("baseline", "save", "--add", "--timing", "events", *run).returncode == 0
    checked = cudasched("baseline", "check", "baseline.json", *run)
    assert checked.returncode in (0, 3), checked.stderr
    assert cudasched("baseline", "save", "--add", *run).returncode == 0
    assert len(baseline.load("baseline.json").runs) == 10


def test_recordings_of_a_run_directory_take_turns(command: str, program: Path, tmp_path: Path) -> None:
    """Guards against two recordings at once on a GPU, under pytest-xdist for one."""
    started, go = tmp_path / "started", tmp_path / "go"
    code = (
        "import os, runpy, sys, time\nfrom pathlib import Path\nPath(sys.argv[1]).touch()\n"
        "while not Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        f"sys.argv = ['p', '1']; runpy.run_path({str(program)!r})"
    )

    def recording_of(name: str) -> subprocess.Popen[str]:
        words = [*("--timing", "events", "--runs", "1", "-o", f"{name}.json"), "--", sys.executable, "-c", code]
        return subprocess.Popen(
            [command, "baseline", "save", *words, f"{started}-{name}", str(go)], stderr=subprocess.PIPE, text=True
        )

    with recording_of("first") as first:
        while not Path(f"{started}-first").exists():
            assert first.poll() is None
        with recording_of("second") as second:
            assert second.stderr and first.stderr
            assert second.stderr.readline() == "cudasched: waits until another recording is over\n"
            assert not Path(f"{started}-second").exists()
            go.touch()
            assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
            assert Path(f"{started}-second").exists()
            first.stderr.read(), second.stderr.read()


def test_the_plugin_puts_no_hook_into_a_session(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import sys\ndef test_it():\n"
        "    assert 'pytest_cudasched' in sys.modules\n    assert 'cudasched' not in sys.modules\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
