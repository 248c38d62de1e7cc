"""The command line of all benchmarks, and what it does with a benchmark's groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cudasched.demo.harness import HarnessError
from support import eventually

from benchmarks.lab import run as lab
from benchmarks.lab.processes import output_of
from benchmarks.lab.session import Done, Found, OutOfTimeError, Session
from benchmarks.results.schema import NOT_EXPLAINED, load


def keeps(session: Session) -> None:
    session.need(1.0)
    session.store.keep("kept/part", session.options.seconds)


def finds(session: Session) -> Found:
    return {"found": (2.0, 1.0, 3.0, 7)}


def fails(session: Session) -> None:
    raise HarnessError("no such thing")


def is_late(session: Session) -> None:
    raise OutOfTimeError


def of_parts(done: Done) -> Found:
    return {"kept": (done["kept/part"],) * 3 + (1,)} if "kept/part" in done else {}


BENCHMARK = lab.Benchmark(
    about="nothing",
    groups={"keeps": keeps, "finds": finds, "fails": fails, "late": is_late},
    goals={"kept": (3.0, "less"), "found": (1.0, "less"), "never": (1.0, "more")},
    find=of_parts,
    settings={"seconds": (8.0, 2.0), "rounds": 3, "log": Path, "fast": bool},
)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "load_benchmark", lambda name: BENCHMARK)


@pytest.mark.parametrize(
    ("only", "status", "names"),
    [
        ("keeps,finds", 0, ["kept", "found"]),
        ("late,keeps", lab.TIME_RAN_OUT, ["kept"]),
        ("fails,late,finds", 1, ["found"]),
    ],
)
def test_a_group_that_fails_or_is_late_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str, status: int, names: list[str]
) -> None:
    out = tmp_path / "x.json"
    assert lab.run("x", ["--rehearse", "--out", str(out), "--only", only]) == status
    rows = load(out).figures
    assert [row.figure for row in rows] == names
    assert all(row.limited_by == ("" if row.met else NOT_EXPLAINED) for row in rows)
    said = capsys.readouterr().out
    assert ("fails failed: no such thing" in said) == (status == 1) and f"| `{names[0]}` |" in said


def test_figures_that_were_not_measured_now_stay_and_a_miss_has_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    assert lab.run("x", ["--rehearse", "--out", str(out), "--only", "finds", "--limited-by", "found=a lock"]) == 0
    assert lab.run("x", ["--rehearse", "--out", str(out), "--only", "keeps", "--minutes", "0.05"]) == lab.TIME_RAN_OUT
    assert lab.run("x", ["--rehearse", "--out", str(out), "--only", "keeps"]) == 0
    rows = load(out).figures
    assert [(row.figure, row.value, row.limited_by) for row in rows] == [("found", 2.0, "a lock"), ("kept", 2.0, "")]


def test_settings_have_defaults_of_a_measurement_and_of_a_rehearsal() -> None:
    measured, rehearsed, given = (
        lab.parse("x", BENCHMARK, arguments)
        for arguments in (
            [],
            ["--rehearse", "--out", "x.json", "--part", "2/3"],
            ["--rehearse", "--out", "x", "--seconds", "8"],
        )
    )
    assert (measured.seconds, measured.rounds, measured.log, measured.fast) == (8.0, 3, None, False)
    assert rehearsed.seconds == 2.0 and rehearsed.only == ["finds"] and given.seconds == 8.0
    assert measured.out.name == "x.json" and measured.only == list(BENCHMARK.groups)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--only", "nothing"],
        ["--rehearse"],
        ["--part", "3/2"],
        ["--part", "a"],
        ["--limited-by", "nothing=x"],
        ["--limited-by", "kept"],
    ],
)
def test_options_that_have_no_meaning_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        lab.parse("x", BENCHMARK, wrong)


def test_a_file_of_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.cells").write_text("[]")
    assert lab.run("x", ["--rehearse", "--out", str(tmp_path / "x.json")]) == 1
    assert "not from this benchmark" in capsys.readouterr().err


def test_what_is_no_benchmark_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main(["run", "nothing"]) == 2 and "core" in capsys.readouterr().out
    assert lab.main(["--help"]) == 0 and lab.main(["merge", "core", "--out", "x.json", "y.cells"]) == 1


def test_every_benchmark_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in lab.MODULES:
        try:
            benchmark = lab.load_benchmark(name)
        except HarnessError as error:
            assert f"{name} needs " in str(error)
            continue
        assert benchmark.about and benchmark.groups
        assert lab.parse(name, benchmark, ["--out", "x.json"]).only == list(benchmark.groups)


def test_a_program_that_is_late_is_gone_with_all_that_it_started(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"]
    with pytest.raises(HarnessError, match="a shell: no answer within 1 s"):
        output_of("a shell", command, timeout_s=1.0)
    pid = (tmp_path / "pid").read_text().strip()
    status = Path(f"/proc/{pid}/stat")
    eventually(lambda: not status.exists() or status.read_text().rpartition(") ")[2][0] == "Z")


@pytest.mark.usefixtures("simulated_driver")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_every_gpu_has_a_part_and_what_is_there_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    out = tmp_path / "out" / "preempt.json"
    options = ["--rehearse", "--out", str(out), "--arms", "latency_alone", "--seconds", "0.5"]
    only = ["--only", "torch_lstm,torch_attention", "--servers", "vit_graph"]
    assert lab.main(["spread", "preempt", *options, *only]) == 0
    said = capfd.readouterr().out
    assert "1: " in said and "2: " in said
    assert {row.best_effort_load for row in load(out).colocations} == {"torch_lstm", "torch_attention"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["preempt.cells", "preempt.json"]
    assert lab.main(["spread", "core", "--rehearse", "--out", str(out)]) == 1
    assert "its runs are not put together" in capfd.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lab.main(["spread", "preempt", "--out", str(out)]) == 1
    assert "cores for 0 GPUs" in capfd.readouterr().err
