"""Every operation that is recorded on a GPU is built and run here first, on the CPU, with small shapes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from training import record, workloads  # noqa: E402
from training.operations import FAMILIES, MOST_ELEMENTS, Draw, Inputs, UnsupportedError  # noqa: E402
from training.programs import PROGRAMS  # noqa: E402

torch.set_num_threads(1)

#: What the CPU has not: kernels of Triton's, and attention by backends of the GPU's.
GPU_ALONE = "triton", "attention"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(family: str) -> None:
    inputs, recorder = Inputs(torch.device("cpu"), 1 << 20), workloads.Recorder(None)
    done: set[str] = set()
    tried: set[str] = set()
    for case in itertools.islice(FAMILIES[family](Draw("test", 12)), 24 if family in ("model", "recurrent") else 150):
        tried.add(case.operation)
        try:
            workloads.run_case(case, inputs, recorder)
        except (RuntimeError, UnsupportedError, ValueError) as error:
            # Batch normalisation of one value a channel is refused wherever it is asked for.
            assert family in GPU_ALONE or "more than 1" in str(error), f"{case.operation} {case.shape}: {error}"
            continue
        done.add(case.operation)
    assert family == "triton" or len(done) > len(tried) / 3


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_the_same_in_every_run_and_not_too_large(family: str) -> None:
    def cases() -> list[tuple[str, str, str]]:
        return [(c.operation, c.shape, c.dtype) for c in itertools.islice(FAMILIES[family](Draw("seed")), 200)]

    first = cases()
    assert first == cases()
    assert len({shape for _, shape, _ in first}) > 30
    for operation, shape, dtype in first:
        assert operation.split(".")[0] == family
        assert "|" not in operation + shape + dtype
    assert len({f"{operation}|{shape}" for operation, shape, _ in first}) < len(first) or family in ("model", "fft")


def test_sizes_are_log_uniform_within_their_range() -> None:
    draw = Draw("sizes")
    sizes = [draw.size(16, 16384) for _ in range(4000)]
    assert min(sizes) >= 16
    assert max(sizes) <= 16384
    below = sum(size < 512 for size in sizes) / len(sizes)  # the middle, in logarithms
    assert 0.4 < below < 0.6
    assert all(torch.Size(draw.flat(3)).numel() <= MOST_ELEMENTS * 1.5 for _ in range(500))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs(name: str) -> None:
    said: list[str] = []
    steps = sum(1 for _ in PROGRAMS[name](torch.device("cpu"), said.append, True))
    assert steps >= 2
    assert len(said) == steps


def test_a_recording_is_rehearsed_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--largest", "8", "--only", "softmax", "--seconds", "4"]
    assert workloads.main(arguments) == 0
    for name in ("sweep-pointwise", "again"):
        tally = json.loads((tmp_path / f"{name}.json").read_text())
        assert tally["complete"]
        assert sum(tally["cases"].values()) > 0
    (tmp_path / "again.json").unlink()
    capsys.readouterr()
    assert workloads.main([*arguments, "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "again: done" in shown
    assert "sweep-pointwise" not in shown


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--programs", "nothing"]])
def test_unknown_names_are_refused(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workloads.main(["--out", str(tmp_path), *arguments])
    assert "nothing; there are" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "5", "null", '"complete"', "{", "{}", '{"complete": false}'])
def test_a_tally_that_is_none_is_not_complete(text: str, tmp_path: Path) -> None:
    (tmp_path / "again.json").write_text(text)
    assert not workloads.is_complete(tmp_path / "again.json")


@pytest.mark.parametrize("main", [workloads.main, record.main])
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
def test_a_time_that_is_none_is_refused(
    main: Callable[[list[str]], int], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), "--programs", "gpt_decode", f"--seconds={text}"])
    assert f"argument --seconds: invalid duration value: '{text}'" in capsys.readouterr().err


def test_a_crashed_process_is_started_again_behind_the_case_that_killed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run_child(options: object, name: str, arguments: list[str], seconds: float) -> bool:
        asked.append([name, *arguments])
        (tmp_path / f"{name}.json").write_text(json.dumps({"started": {"gemm": 7 * len(asked)}}))
        return len(asked) >= 3

    monkeypatch.setattr(workloads, "run_child", run_child)
    workloads.main(["--out", str(tmp_path), "--only", "gemm", "--seconds", "60"])
    assert [call[0] for call in asked] == ["sweep-matrix", "sweep-matrix-part2", "sweep-matrix-part3", "again"]
    assert [json.loads(call[-1]) for call in asked] == [{}, {"gemm": 7}, {"gemm": 14}, {}]


@pytest.mark.parametrize("what", [("--only", "gemm"), ("--programs", "gpt_decode")])
def test_processes_that_all_failed_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: tuple[str, str]
) -> None:
    monkeypatch.setattr(workloads, "run_child", lambda *_: False)
    assert workloads.main(["--out", str(tmp_path), *what, "--seconds", "1"]) == 1
