"""Hardware counters through a stand-in for Nsight Compute (fake_ncu.py): its call, its answer, and what follows."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cudasched.errors import ConfigError
from rich.console import Console
from support import Run

pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

from cudasched.advise import advise
from cudasched.observe.analyze import Analysis, Counters, NcuError, find, html, merge, terminal
from cudasched.observe.analyze import _ncu as ncu
from cudasched.observe.analyze._judge import conclusions, counters
from fake_ncu import csv_text
from test_advise import launch, recording

LAUNCHER = Path(__file__).with_name("launcher.py")
FAKE = Path(__file__).with_name("fake_ncu.py")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ncu` on the PATH. Returns the file of its calls."""
    place = tmp_path / "bin"
    place.mkdir()
    program = place / "ncu"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NCU_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def analyze(cudasched: Run, *options: str, launches: int = 20) -> subprocess.CompletedProcess[str]:
    program = (sys.executable, str(LAUNCHER), str(launches))
    return cudasched("analyze", "--timing", "events", *options, "--", *program)


def calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the command


def test_counters_are_merged_with_the_advice(
    cudasched: Run, simulated: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setenv("COLUMNS", "160")
    done = analyze(cudasched, "-o", "report.html")
    assert done.returncode == 0, done.stderr
    assert "hardware counters, the most time first" in done.stdout
    for cell in ("82%", "33%", "31.5", "long scoreboard 24.0"):
        assert cell in done.stdout
    assert "a global load of a warp touches 31.5 sectors of 32 bytes" in " ".join(done.stdout.split())
    assert "occupancy" in done.stdout  # the advice's own table
    assert "31.5" in Path("report.html").read_text()
    as_json = analyze(cudasched, "--json", "-o", "report.json")
    answer = json.loads(as_json.stdout)
    assert (answer["kind"], answer["schema_version"]) == ("analyze", 1)
    analysis = Analysis.model_validate(answer["data"])
    assert analysis == Analysis.model_validate_json(Path("report.json").read_text())
    (work,) = analysis.kernels
    assert (work.function, work.profiled, work.launches) == ("work", 2, 20)
    assert work.counters.tensor_percent == 0  # by its second name: the first is n/a
    assert work.counters.dram_bytes == 134_217_728


def test_clocks_are_left_alone_and_the_hook_is_off(
    cudasched: Run, simulated: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/hook/libcuda.so.1 /nowhere/hook/libcuda.so")
    done = analyze(cudasched, "--launches", "7")
    assert done.returncode == 0, done.stderr
    (call,) = calls(fake)
    words = call["arguments"]
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--kernel-name") + 1] == "regex:^(work)$"
    assert words[words.index("--launch-count") + 1] == "7"
    assert words[words.index("--filter-mode") + 1] == "per-launch-config"
    assert words[-3:] == [sys.executable, str(LAUNCHER), "20"]
    assert call["environment"] == {"LD_PRELOAD": "", "CUDASCHED_OFF": "1", "CUDASCHED_COLLECT_DIR": ""}


def test_a_preloaded_library_of_the_users_stays() -> None:
    own = {"LD_PRELOAD": "/x/hook/libcuda.so.1:/usr/lib/libjemalloc.so", "CUDASCHED_COLLECT_DIR": "/x", "HOME": "/h"}
    assert ncu.environment(own) == {"LD_PRELOAD": "/usr/lib/libjemalloc.so", "CUDASCHED_OFF": "1", "HOME": "/h"}


def test_without_ncu_nothing_is_run(
    cudasched: Run, simulated: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("ncu") or any(list(Path("/").glob(place.lstrip("/"))) for place in ncu._PLACES):
        pytest.skip("Nsight Compute is installed here")
    done = cudasched("analyze", "--", sys.executable, "-c", "open('ran', 'w')")
    assert done.returncode == 1
    assert "Nsight Compute (ncu) is not there" in done.stderr and "--ncu" in done.stderr
    assert not Path("ran").exists()
    assert len(done.stderr.splitlines()) == 1


def test_counters_that_are_not_permitted_leave_the_advice(
    cudasched: Run, simulated: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setenv("FAKE_NCU", "no_permission")
    done = analyze(cudasched, "-o", "report.html")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        "cudasched: error: there are no counters: the driver permits hardware counters to administrators alone" in last
    )
    for remedy in ("ERR_NVGPUCTRPERM", "root", "--cap-add=SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"):
        assert remedy in last
    assert "work" in done.stdout and "hardware counters, the most time first" not in done.stdout
    assert "There are no counters" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("no_kernels", "ncu profiled no kernel: the program launched other kernels"),
        ("silent", "ncu gave no counters and no reason"),
        ("other_form", "ncu answers in a form that is not known: its columns are ID, Kernel, Thing"),
    ],
)
def test_an_answer_without_counters_is_said(
    cudasched: Run, simulated: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_NCU", behaviour)
    done = analyze(cudasched)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_metrics_that_a_gpu_does_not_know_are_left_out(
    cudasched: Run, simulated: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCU", "unknown_metric")
    done = analyze(cudasched)
    assert done.returncode == 0, done.stderr
    first, second = calls(fake)
    assert "sm__pipe_tensor_cycles_active" in " ".join(first["arguments"])
    assert "sm__pipe_tensor_cycles_active" not in " ".join(second["arguments"])
    assert "sm__inst_executed_pipe_tensor" in " ".join(second["arguments"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--ncu", "/nowhere/ncu"], 2, "--ncu /nowhere/ncu: there is no such program"),
        (["--timing", "both"], 2, "--timing both"),
        (["-o", "report.pdf"], 2, "name a file that ends in .html or .json"),
        (["-o", "/nowhere/r.html"], 2, "there is no directory"),
    ],
)
def test_options_without_a_meaning(
    cudasched: Run, simulated: Path, fake: Path, options: list[str], code: int, message: str
) -> None:
    done = analyze(cudasched, *options)
    assert done.returncode == code and message in done.stderr


def test_a_program_that_fails(cudasched: Run, simulated: Path, fake: Path) -> None:
    code = f"import runpy, sys; sys.argv = ['x', '3']; sys.path.insert(0, {str(LAUNCHER.parent)!r})\n"
    code += f"runpy.run_path({str(LAUNCHER)!r}, run_name='__main__'); sys.exit(5)"
    done = cudasched("analyze", "--timing", "events", "--", sys.executable, "-c", code)
    assert done.returncode == 1 and "ended with exit code 5" in done.stderr
    assert not fake.exists()


# ---- finding it


def test_what_is_chosen_goes_first_and_must_be_there(fake: Path, tmp_path: Path) -> None:
    assert find() == tmp_path / "bin" / "ncu"
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="there is no such program, or it cannot be run"):
        find(other)
    other.chmod(0o755)
    assert find(other) == other


def test_the_newest_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for version in ("2024.3.2", "2025.10.0", "2025.3.1"):
        place = tmp_path / "nsight-compute" / version
        place.mkdir(parents=True)
        (place / "ncu").write_text("#!/bin/sh\n")
        (place / "ncu").chmod(0o755 if version != "2025.10.1" else 0o644)
    monkeypatch.setattr(ncu, "_PLACES", (f"{tmp_path}/nsight-compute/*/ncu",))
    assert find() == tmp_path / "nsight-compute" / "2025.10.0" / "ncu"
    monkeypatch.setattr(ncu, "_PLACES", ())
    with pytest.raises(NcuError, match="is not there"):
        find()


# ---- its answer


def test_numbers_have_commas_and_may_be_missing() -> None:
    hostile = '_Z4workILi"3",x>'
    first, second = ncu.parse("==PROF== words\n" + csv_text([hostile]) + "==PROF== more\n")
    assert first.function == second.function == hostile
    assert first.values["duration_ns"] == 52352
    assert first.values["tensor_percent"] == 0
    assert first.stalls == {"long_scoreboard": 24.1, "wait": 1.5}


def test_an_answer_that_is_cut_short_has_its_whole_lines() -> None:
    text = csv_text(["a", "b"])
    for end in range(text.index("\n") + 1, len(text), 7):
        found = ncu.parse(text[:end])
        assert len(found) <= 4 and all(one.function in ("a", "b") for one in found)
    assert len(ncu.parse(text)) == 4
    assert ncu.parse("") == ncu.parse("==ERROR== nothing\n") == []


#: As versions of 2025 write their raw page: attributes of the device and of the launch beside the counters, words and
#: numbers without digits among them, and, where base units were not asked for or are not known, other units.
RAW_2025 = """\
==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "_ZN2at6native18elementwise_kernelE" - 0: 0%....50%....100% - 19 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"device__attribute_display_name","dram__bytes.sum","gpu__time_duration.sum","launch__func_cache_config",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","","","","","","","","","","","Mbyte","usecond","","%","%","%","inst","inst","inst"
"0","4711","python3.11","127.0.0.1","_ZN2at6native18elementwise_kernelE","1","7","(128, 1, 1)","(132, 1, 1)","0","9.0",\
"NVIDIA H200, 141 GB","1,342.18","412.35","CachePreferNone","21.46","78.02","(!) n/a","17.25","16.11","1"
==WARNING== Found no counters of another kernel
"""


def test_the_raw_page_of_2025() -> None:
    (launch,) = ncu.parse(RAW_2025)
    assert launch.function == "_ZN2at6native18elementwise_kernelE"
    assert launch.shape == (132, 1, 1, 128, 1, 1), "the grid, then the block"
    assert launch.values == pytest.approx(
        {"duration_ns": 412_350, "dram_bytes": 1_342_180_000, "sm_percent": 21.46, "dram_percent": 78.02}
    )
    assert launch.stalls == {"long_scoreboard": 17.25}, "of all cycles, and of waits alone"


def test_names_are_matched_exactly_whatever_is_in_them(tmp_path: Path) -> None:
    words = ncu.arguments(Path("ncu"), tmp_path / "log", ["a.b(c)|d", "x+"], 3, ["program", "--ncu-like"])
    assert words[words.index("--kernel-name") + 1] == r"regex:^(a\.b\(c\)\|d|x\+)$"
    assert words[-2:] == ["program", "--ncu-like"]


# ---- what follows


def seen(**values: Any) -> Counters:
    empty: dict[str, Any] = dict.fromkeys(set(Counters.model_fields) - {"stalls"})
    return Counters(**{**empty, "stalls": {}, **values})


def test_means_are_by_time() -> None:
    made = counters(
        [
            ncu.Launch("a", {"duration_ns": 100, "dram_percent": 10, "dram_bytes": 10}, {"wait": 1}),
            ncu.Launch("a", {"duration_ns": 300, "dram_percent": 50, "dram_bytes": 30}, {"wait": 2, "barrier": 3}),
        ]
    )
    assert (made.duration_ns, made.dram_percent, made.dram_bytes, made.sm_percent) == (200, 40, 20, None)
    assert list(made.stalls.items()) == [("barrier", 3), ("wait", 1.75)]


def test_a_shape_counts_with_its_time_in_the_program() -> None:
    """Of each shape as many launches are profiled, and the program makes ninety of one and ten of the other."""
    often, seldom = ((132, 1, 1), (256, 1, 1)), ((8, 1, 1), (256, 1, 1))
    rows = [launch(*often, function="k", duration_ns=1000) for _ in range(90)]
    rows += [launch(*seldom, function="k", duration_ns=1000) for _ in range(10)]
    profiled = [
        ncu.Launch("k", {"duration_ns": 1000, "dram_percent": percent}, {"wait": percent / 10}, (*grid, *block))
        for (grid, block), percent in ((often, 10.0), (seldom, 90.0))
        for _ in range(2)
    ]
    (one,) = merge(advise(recording(rows)), profiled, profiler="ncu", problem="", kernels=1).kernels
    assert one.counters.dram_percent == pytest.approx(0.9 * 10 + 0.1 * 90)
    assert one.counters.stalls["wait"] == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("name", "values", "rules"),
    [
        ("k", {}, []),
        ("k", {"load_sectors": 16.0, "store_sectors": 4.0}, []),
        ("k", {"load_sectors": 32.0, "store_sectors": 17.0}, ["sectors", "sectors"]),
        ("k", {"dram_percent": 85.0, "sm_percent": 20.0}, ["memory"]),
        ("nvjet_sm90_gemm", {"tensor_percent": 0.0, "sm_percent": 90.0}, ["tensor_cores"]),
        ("nvjet_sm90_gemm", {"tensor_percent": 70.0, "sm_percent": 90.0}, []),
        ("k", {"tensor_percent": 0.0, "sm_percent": 90.0}, []),
        ("k", {"dram_percent": 20.0, "sm_percent": 10.0, "stalls": {"barrier": 7.0}}, ["latency"]),
        ("k", {"dram_percent": 20.0, "sm_percent": 10.0, "stalls": {"barrier": 0.2}}, []),
        ("k", {"dram_percent": 50.0, "stalls": {"barrier": 7.0}}, []),
        ("k", {"sm_percent": 10.0, "stalls": {"never_heard_of": 7.0}}, ["latency"]),
    ],
)
def test_rules(name: str, values: dict[str, Any], rules: list[str]) -> None:
    found = conclusions(name, seen(**values))
    assert [one.rule for one in found] == rules
    assert all(one.reason and one.recommendation for one in found)


def test_nobody_is_told_to_change_a_librarys_code() -> None:
    # Of PyTorch's batch_norm_collect_statistics in ResNet50 training on an H200, and made up where that shows nothing.
    real = seen(
        sm_percent=27.1,
        dram_percent=9.0,
        l2_hit_percent=11.9,
        load_sectors=2.0,
        store_sectors=4.0,
        stalls={"long_scoreboard": 15.4, "wait": 2.6, "barrier": 1.7},
    )
    (own,) = conclusions("k", real)
    (theirs,) = conclusions("k", real, "ATen")
    assert own.reason == theirs.reason and "a warp waits 15.4 cycles" in own.reason
    assert "more loads in flight" in own.recommendation
    assert theirs.recommendation.startswith("the code is ATen's: ") and "torch.compile" in theirs.recommendation
    (sectors,) = conclusions("k", seen(load_sectors=32.0), "ATen")
    assert "the code is ATen's: give it operands of another layout" in sectors.recommendation
    (memory,) = conclusions("k", seen(dram_percent=85.0, l2_hit_percent=20.0), "ATen")
    assert "fewer bytes" in memory.recommendation and "blocks" not in memory.recommendation


def test_kernels_of_a_library_can_be_told_apart_in_a_terminal() -> None:
    names = ("collect_statistics", "backward_reduce", "backward_elemt", "transform_input")
    functions = [f"batch_norm_{name}_channels_last_kernel" for name in names]
    mangled = [f"_ZN2at6native{len(function)}{function}ILi4EEEvPKf" for function in functions]
    report = advise(recording([launch(function=name, duration_ns=9000 - 10 * n) for n, name in enumerate(mangled)]))
    slow = {"duration_ns": 9.0, "sm_percent": 27.0, "dram_percent": 9.0}
    launches = [ncu.Launch(name, slow, {"long_scoreboard": 15.4}) for name in mangled[1:]]
    analysis = merge(report, launches, profiler="ncu", problem="", kernels=4)
    assert all("the code is ATen's" in one.conclusions[0].recommendation for one in analysis.kernels)
    for columns in (80, 120, 160):
        file = io.StringIO()
        Console(file=file, width=columns).print(terminal(analysis, columns=columns, top=20))
        text = file.getvalue().partition("hardware counters, the most time first")[2]
        rows = [line for line in text.splitlines() if line.startswith("│")]
        assert [row.split()[1] for row in rows] == ["2", "3", "4"], "as in the table of the advice"
        assert all(len(line) <= columns for line in text.splitlines())
        joined = " ".join(text.split())
        for number, function in enumerate(functions[1:], 2):
            assert f"{number} {function}: neither memory nor SMs are busy" in joined


def test_a_low_hit_rate_matters_where_the_memory_is_busy() -> None:
    (low,) = conclusions("k", seen(dram_percent=85.0, l2_hit_percent=20.0))
    (high,) = conclusions("k", seen(dram_percent=85.0, l2_hit_percent=90.0))
    assert "L2" in low.reason and "L2" not in high.reason


def test_kernels_of_the_recording_that_were_not_profiled_are_named() -> None:
    report = advise(
        recording(
            [
                launch(function="a", duration_ns=3000),
                launch(function="b", duration_ns=2000),
                launch(function="c", duration_ns=1000),
                launch(kind="graph", function="graph", graph=1, duration_ns=4000),
            ]
        )
    )
    launches = [ncu.Launch("a", {"duration_ns": 10}), ncu.Launch("other", {"duration_ns": 10})]
    analysis = merge(report, launches, profiler="ncu", problem="", kernels=2)
    assert [one.function for one in analysis.kernels] == ["a"]
    assert any("no launch was profiled of b" in note for note in analysis.notes)
    assert any("40% of the device time is of graphs" in note for note in analysis.notes)


class Tags(HTMLParser):
    """The tags that are open, and those that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_reports_escape_every_name_and_fit_every_terminal() -> None:
    pytest.importorskip("jinja2")
    from rich.console import Console

    hostile = "<script>alert(1)</script>\x1b[2J" + "k" * 3000
    report = advise(recording([launch(function=hostile)], command='["<b>"]'))
    analysis = merge(report, ncu.parse(csv_text([hostile])), profiler="ncu", problem="<i>", kernels=5)
    assert analysis.kernels[0].conclusions
    tags = Tags()
    tags.feed(html(analysis))
    assert tags.open == [] and not {"script", "b", "i", "img"} & tags.seen
    for columns in (50, 80, 200):
        console = Console(width=columns, record=True, file=open(os.devnull, "w"), color_system=None)  # noqa: SIM115
        console.print(terminal(analysis, columns=columns, top=5))
        text = console.export_text()
        assert "\x1b" not in text and max(map(len, text.splitlines())) <= columns


def test_a_profiler_of_the_working_directory_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    (tmp_path / "ncu").chmod(0o755)
    for chosen in (Path("./ncu"), "./ncu", tmp_path / "ncu"):
        assert ncu.find(chosen) == tmp_path / "ncu"
