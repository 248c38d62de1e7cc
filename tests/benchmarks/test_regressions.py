"""The benchmark of regressions, rehearsed on the simulated driver, and what it makes of what was recorded."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="baselines need SciPy")
pytest.importorskip("pyarrow", reason="recordings are read with pyarrow")

from benchmarks.regressions import __main__ as regressions
from benchmarks.results.schema import FigureRow, load


@pytest.fixture(scope="module")
def measured_once(simulated_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One measurement of two processes of each kind."""
    out = tmp_path_factory.mktemp("measured") / "out"
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, simulated_driver, out.parent)
        options = ["measure", "--out", str(out), "--simulate", "--processes", "2", "--only", "1"]
        assert regressions.main(options) == 0
    return out


@pytest.fixture
def measured(measured_once: Path, simulated_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where more can be measured."""
    simulate(monkeypatch, simulated_driver, tmp_path)
    return Path(shutil.copytree(measured_once, tmp_path / "out"))


def simulate(patch: pytest.MonkeyPatch, driver: Path, directory: Path) -> None:
    """A device of this directory's own, for what is measured from now on."""
    patch.setenv("CUDASCHED_DRIVER", str(driver))
    patch.setenv("CUDASCHED_SIM_DIR", str(directory))
    patch.setenv("CUDASCHED_RUN_DIR", str(directory / "run"))
    patch.setenv("CUDASCHED_SIM_SCALE", "1")
    patch.setenv("CUDASCHED_COMMIT", "0" * 12)
    directory.chmod(0o700)


def test_a_rehearsal_records_each_process_once_and_goes_on_where_it_stopped(measured: Path) -> None:
    path = measured / "measurement-1.json"
    first = regressions.read_measurement(path)
    assert sorted(first.runs) == ["changed 00", "changed 01", "plain 00", "plain 01"]
    assert len(first.runs["plain 00"].runs[0].measured) == 14
    before = path.stat().st_mtime_ns
    assert regressions.main(["measure", "--out", str(measured), "--simulate", "--processes", "2", "--only", "1"]) == 0
    assert path.stat().st_mtime_ns == before
    names = {one.name for one in first.runs["plain 00"].runs[0].measured}
    assert set(regressions.VICTIMS) <= names


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_15sin_kernel_cudaERNS_18TensorIteratorBaseEENKUl",
            "sin",
        ),
        ("_ZN43_GLOBAL__N__00000000_10_SoftMax_cu_00000000_020softmax_warp_forwardIfffLi10ELb0ELb0EEEvPT0_", "softmax"),
        ("_ZN2at6native12_GLOBAL__N_119cunn_SoftMaxForwardILi4EfffNS1_22SoftMaxForwardEpilogueEEEvPT2_", "softmax"),
        ("_ZN2at6native12_GLOBAL__N_128vectorized_layer_norm_kernelIffLb0EEEviT0_PKT_", "layer_norm"),
        ("_ZN2at6native12_GLOBAL__N_126LayerNormForwardCUDAKernelIfEEvl", "layer_norm"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_16asin_kernel_cudaERNS_18TensorIteratorBaseE", ""),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_16tanh_kernel_cudaERNS_18TensorIteratorBaseE", ""),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", ""),
    ],
)
def test_a_victim_is_known_by_pytorchs_names(name: str, victim: str) -> None:
    assert [each for each in regressions.VICTIMS if regressions.is_victim(name, each)] == ([victim] if victim else [])


def test_a_victim_without_a_kernel_is_said_while_it_is_measured(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regressions, "VICTIMS", (*regressions.VICTIMS[:2], "cumsum"))
    monkeypatch.setitem(regressions.VICTIM_NAMES, "cumsum", "scan")
    options = ["measure", "--out", str(measured), "--simulate", "--processes", "3", "--only", "1"]
    assert regressions.main(options) == 0
    assert "no kernel is called as cumsum is" in capsys.readouterr().err


def many(measured: Path, shift: float) -> list[Path]:
    """Three measurements of eight processes of each kind, each a little different from the recorded ones."""
    content = json.loads((measured / "measurement-1.json").read_text())
    places = []
    for number in range(1, 4):
        made = copy.deepcopy(content)
        made["victim"] = victim = regressions.VICTIMS[number - 1]
        made["runs"] = {}
        for arm in regressions.ARMS:
            for process in range(8):
                one = copy.deepcopy(content["runs"]["plain 00"])
                for place, each in enumerate(one["runs"][0]["measured"]):
                    each["each_ns"] *= 1 + 0.0005 * ((process * 7 + place * 3 + number) % 8)
                    if arm == regressions.CHANGED and each["name"] == victim:
                        each["each_ns"] *= 1 + shift
                made["runs"][f"{arm} {process:02d}"] = one
        place = measured / f"machine-{number}"
        place.mkdir()
        (place / f"measurement-{number}.json").write_text(json.dumps(made))
        places.append(place)
    return places


def test_figures_are_of_all_ordered_pairs_and_others_stay(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "observe.json"
    places = [str(place) for place in many(measured, 0.05)]
    options = ["evaluate", *places, "--sizes", "5", "--comparisons", "3", "--out", str(out)]
    assert regressions.main(options) == 0
    rows = {row.figure: row for row in load(out).rows if isinstance(row, FigureRow)}
    assert (rows["regressions_found"].value, rows["regressions_found"].n) == (1.0, 48)
    assert rows["false_alarms"].value == 0.0
    assert all(row.met and row.limited_by == "" for row in rows.values())
    said = capsys.readouterr().out
    assert "over 9 ordered pairs of measurements, 27 checks" in said
    assert "over 6 ordered pairs of measurements, 18 checks" in said  # 8 processes make no two groups of 5
    assert regressions.main([*options[:-2], "--out", str(out)]) == 0
    assert len(load(out).rows) == 2


def test_what_is_not_found_is_a_missed_goal(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "observe.json"
    places = [str(place) for place in many(measured, 0.001)]
    assert regressions.main(["evaluate", *places, "--sizes", "5", "--comparisons", "2", "--out", str(out)]) == 0
    (row,) = [row for row in load(out).rows if isinstance(row, FigureRow) and row.figure == "regressions_found"]
    assert row.value == 0 and not row.met and "5 runs a side" in row.limited_by


def test_what_cannot_be_evaluated_is_said(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regressions.main(["evaluate", str(measured)]) == 1
    assert "1 measurements, and it takes 3" in capsys.readouterr().err
    for number in (2, 3):
        (measured / f"measurement-{number}.json").write_text((measured / "measurement-1.json").read_text())
    assert regressions.main(["evaluate", str(measured)]) == 1
    assert "too few processes" in capsys.readouterr().err
    (measured / "measurement-2.json").write_text("{")
    assert regressions.main(["evaluate", str(measured)]) == 1
    assert "measurement-2.json is no measurement" in capsys.readouterr().err
