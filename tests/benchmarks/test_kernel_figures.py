"""benchmarks/kernels: the arithmetic of its figures, a rehearsal, and what is shipped of a database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cudasched.kernels import _catalog, _choose
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from cudasched.tune.space import Gpu

from benchmarks.kernels import layers, ship
from benchmarks.kernels.benchmark import KERNELS
from benchmarks.kernels.figures import FIGURES, LAYER_GOALS, find, find_layers, for_dashboard, ratio
from benchmarks.kernels.parts import Scene, parts, share_of_allowed
from benchmarks.kernels.timing import GpuTimer, in_turns
from benchmarks.lab.run import TIME_RAN_OUT, run
from benchmarks.lab.session import judged
from benchmarks.results.schema import NOT_EXPLAINED, load


def part(samples: int = 10, **arms: list[float]) -> dict[str, Any]:
    return {"arms": arms, "samples": samples, "error": 0.1}


def test_a_ratio_is_of_medians_and_its_spread_of_rounds() -> None:
    measured = part(ours=[10.0, 20.0, 10.0], memcpy=[9.0, 9.0, 12.0], copy=[8.0, 8.0, 16.0])
    value, low, high = ratio(measured, ("memcpy", "copy"))
    assert (value, low, high) == pytest.approx((0.8, 0.4, 1.6))  # the copy is the faster one by its median
    assert ratio(measured, ("memcpy", "absent"))[0] == pytest.approx(0.9)
    with pytest.raises(ValueError, match="none of flash was measured; there are ours, memcpy, copy"):
        ratio(measured, ("flash",))


def test_a_figure_is_its_worst_part_with_all_rounds_and_says_what_limits_it() -> None:
    done = {
        "softmax_of_copy/small": part(ours=[10.0, 10.0], memcpy=[10.0, 10.0], copy=[20.0, 20.0]),
        "softmax_of_copy/large": part(ours=[10.0, 10.0], memcpy=[9.0, 9.2], copy=[20.0, 20.0]),
        "gemm_bf16_of_cublas/8192": part(ours=[10.0], cublas=[9.0]),
    }
    rows = {row.figure: row for row in judged(KERNELS.goals, find(done), {})}
    softmax = rows["softmax_of_copy"]
    assert (softmax.value, softmax.low, softmax.high, softmax.n) == pytest.approx((0.91, 0.9, 1.0, 20))
    assert (softmax.goal, softmax.better, softmax.limited_by) == (0.95, "more", NOT_EXPLAINED)
    assert rows["gemm_bf16_of_cublas"].limited_by == ""
    assert list(rows) == ["gemm_bf16_of_cublas", "softmax_of_copy"]


def test_figures_of_the_same_parts_are_of_their_other_arms() -> None:
    done = {
        "softmax_of_copy/small": part(ours=[10.0], memcpy=[10.0], copy=[20.0], compiled=[12.0]),
        "softmax_of_copy/large": part(ours=[10.0], memcpy=[10.0], copy=[20.0], compiled=[9.0]),
        "flash_attention_of_flash/4096": part(ours=[10.0], flash=[12.0], cudnn=[7.0]),
        "flash_attention_of_flash/8192": part(ours=[10.0], flash=[12.0]),  # PyTorch's build may have no cuDNN
    }
    rows = {row.figure: row for row in judged(KERNELS.goals, find(done), {})}
    assert list(rows) == [name for name in FIGURES if name.startswith(("softmax", "flash"))]
    compiled, cudnn = rows["softmax_of_compiled"], rows["flash_attention_of_cudnn"]
    assert (compiled.value, compiled.high, compiled.goal, compiled.n) == pytest.approx((0.9, 1.2, 1.0, 20))
    assert compiled.limited_by == NOT_EXPLAINED
    assert (cudnn.value, cudnn.n, cudnn.limited_by) == pytest.approx((0.7, 10, "")) and cudnn.only_reported
    del done["flash_attention_of_flash/4096"]
    assert "flash_attention_of_cudnn" not in {row.figure for row in judged(KERNELS.goals, find(done), {})}


def test_a_layer_counts_by_its_faster_way_and_opens_in_the_dashboard() -> None:
    done = {
        "bert/whole": part(ours=[10.0], ours_compiled=[8.0], eager=[12.0], compiled=[4.0]),
        "bert/attention": part(ours=[2.0], pytorch=[3.0]),
        "llama/out": part(ours=[2.0], pytorch=[1.0]),
    }
    rows = {name: value for name, (value, *_) in find_layers(done).items()}
    assert set(rows) <= set(LAYER_GOALS)
    expected = {"bert_layer_of_eager": 1.5, "bert_layer_of_compiled": 0.5, "bert_attention_of_pytorch": 1.5}
    assert rows == pytest.approx(expected | {"llama_out_of_pytorch": 0.5})
    told = for_dashboard(done, "bert")
    assert told == {"kernels": [{"kernel": "attention", "baseline_us": 3.0, "tuned_us": 2.0}]}


def test_what_the_gpu_reached_before_it_was_launched_is_timed_again_behind_more_fills() -> None:
    gpu_us, host_us = 0.0, 0.0

    def fill() -> None:
        nonlocal gpu_us
        gpu_us = max(gpu_us, host_us) + 40

    def call() -> None:
        nonlocal gpu_us, host_us
        host_us += 300
        gpu_us = max(gpu_us, host_us) + 50

    class Event:
        def record(self) -> None:
            self.at_us = gpu_us

        def query(self) -> bool:
            return self.at_us <= host_us

        def synchronize(self) -> None:
            nonlocal host_us
            host_us = max(host_us, self.at_us)

        def elapsed_time(self, end: Event) -> float:
            return (end.at_us - self.at_us) / 1e3

    room = SimpleNamespace(zero_=fill)
    cuda = SimpleNamespace(Event=lambda **_: Event(), get_device_properties=lambda _: SimpleNamespace(L2_cache_size=1))
    timer = GpuTimer(SimpleNamespace(cuda=cuda, uint8=None, empty=lambda *_, **__: room))
    assert timer(call) == pytest.approx(50)
    assert timer._fills == 8
    host_us += 1e6  # what is never hidden, as on a busy machine, ends all the same
    timer.MOST_FILLS = 8  # type: ignore[misc]
    assert timer(lambda: (call(), call())) > 50


def test_arms_are_timed_in_turns_each_first_as_often() -> None:
    called: list[str] = []

    def clock(call: Callable[[], Any]) -> float:
        call()
        return float(len(called))

    arms = {name: lambda name=name: called.append(name) for name in "abc"}  # type: ignore[misc]
    found = in_turns(clock, arms, rounds=3, samples=2, warm_up=1)
    assert called == list("abc") + list("aabbcc") + list("bbccaa") + list("ccaabb")
    assert found == {"a": [4.5, 14.5, 18.5], "b": [6.5, 10.5, 20.5], "c": [8.5, 12.5, 16.5]}


def test_every_figure_has_parts_whose_kernels_can_be_launched() -> None:
    pytest.importorskip("torch")
    found = parts()
    assert len({one.key for one in found}) == len(found)
    gpu = Gpu("NVIDIA H200", "9.0", 132, 60 << 20)
    for name, kind, shape in ship.shapes():
        problem = _catalog.variant(name, kind).problem(gpu, shape)
        wanted = _catalog.Wanted(shape, kind, gpu)
        assert problem.launch(_catalog.KERNELS[name].default(wanted)).blocks > 0
    assert {name for name, _, _ in ship.shapes()} >= {
        "gemm",
        "gemm_sm90",
        "softmax",
        "flash_attention_sm90",
        "conv2d_sm90",
    }
    assert {one.figure for one in found} == {one.parts or name for name, one in FIGURES.items()}


@pytest.fixture
def scene() -> Scene:
    torch = pytest.importorskip("torch")
    import cudasched.kernels

    torch.set_num_threads(1)
    return Scene(torch, cudasched.kernels, "cpu", True)


def test_an_error_is_a_share_of_what_is_allowed(scene: Scene) -> None:
    torch = scene.torch
    expected = torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert share_of_allowed(torch, torch.tensor([1.0, 101.0]), expected, 0.01, 1.0) == pytest.approx(0.5)
    assert share_of_allowed(torch, torch.tensor([float("nan"), 100.0]), expected, 0.01, 1.0) > 1e30


REHEARSED = (
    "conv2d_of_cudnn/conv5_3x3,gemm_fp32_of_cublas,softmax_of_copy/bfloat16_64MiB,flash_attention_of_flash/4096_causal"
)


def test_a_rehearsal_measures_writes_and_goes_on(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rehearse", "--out", str(tmp_path / "kernels.json")]
    assert run("kernels", [*arguments, "--only", REHEARSED]) == 0
    assert capsys.readouterr().out.count(" of the error allowed") == 4
    rows = load(tmp_path / "kernels.json").figures
    assert [row.figure for row in rows] == [name for name, one in FIGURES.items() if (one.parts or name) in REHEARSED]
    assert all(row.n == 2 and row.low <= row.value <= row.high for row in rows)
    assert run("kernels", [*arguments, "--only", REHEARSED]) == 0
    assert " of the error allowed" not in capsys.readouterr().out, "nothing is measured twice"
    assert run("kernels", [*arguments, "--minutes", "0"]) == TIME_RAN_OUT
    assert (tmp_path / "kernels.png").exists()


def test_a_kernel_of_a_layer_is_rehearsed(scene: Scene, tmp_path: Path) -> None:
    arguments = ["--rehearse", "--out", str(tmp_path / "layers.json"), "--only", "bert/layer_norm,llama/whole"]
    assert run("layers", arguments) == 0
    names = [row.figure for row in load(tmp_path / "layers.json").figures]
    assert names == ["bert_layer_norm_of_pytorch", "llama_layer_of_eager", "llama_layer_of_compiled"]
    assert json.loads((tmp_path / "layer-bert.json").read_text())["kernels"][0]["kernel"] == "layer_norm"


@pytest.mark.parametrize("name", layers.LAYERS)
def test_a_layer_with_our_kernels_is_the_layer(name: str, scene: Scene) -> None:
    layer = layers.build(name, scene)
    pytorch, ours = layers.PyTorch(scene), layers.Ours(scene)
    with scene.torch.no_grad():
        assert layers.error(scene, layer.run(ours, layer.x), layer.run(pytorch, layer.x)) < 1
        assert set(layer.kernels) == set(layers.KERNELS[name])
        for call in layer.kernels.values():
            assert layers.error(scene, call(ours), call(pytorch)) < 1


def test_a_wrong_kernel_is_not_timed(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scene.kernels, "softmax", lambda x: x)
    arguments = ["--rehearse", "--out", str(tmp_path / "kernels.json")]
    assert run("kernels", [*arguments, "--only", "softmax_of_copy/float32_64MiB"]) == 1
    assert "softmax_of_copy/float32_64MiB is wrong" in capsys.readouterr().out
    assert not (tmp_path / "kernels.json").exists()


def test_the_best_of_a_database_is_shipped_in_place_of_older(tmp_path: Path) -> None:
    space = _catalog.variant("rms_norm", "bfloat16")
    gpu = Gpu("NVIDIA H200", "9.0", 132, 60 << 20)
    problem = space.problem(gpu, {"rows": 4096, "cols": 4096})
    assert space.source is not None
    key = Key.of(problem, space.fingerprint(space.source))
    out = tmp_path / "best.json"
    old = {"gpu": gpu.name, "capability": "9.0", "kernel": "rms_norm", "type": "bfloat16"}
    others = {**old, "shape": {"rows": 1, "cols": 8}, "configuration": {}, "time_us": 1.0}
    older = {**old, "shape": {"rows": 4096, "cols": 4096}, "configuration": {}, "time_us": 99.0}
    out.write_text(json.dumps({"version": 1, "best": [others, older]}))
    with Database(tmp_path / "tune.sqlite") as database:
        for place, time_us in ((0, 30.0), (1, 20.0), (2, 25.0)):
            made = Measurement("ok", samples_us=(time_us,) * 5)
            database.put(key, problem.configurations[place], made)
        database.put(Key(key.gpu, key.kernel, "stale", key.shape), problem.configurations[3], made)
    assert ship.main(["--database", str(tmp_path / "tune.sqlite"), "--out", str(out)]) == 0
    shipped = json.loads(out.read_text())["best"]
    assert len(shipped) == 2 and others in shipped
    (made_entry,) = (one for one in shipped if one != others)
    assert made_entry["configuration"] == dict(problem.configurations[1]) and made_entry["time_us"] == 20.0
    assert made_entry["shape"] == {"rows": 4096, "cols": 4096} and made_entry["kernel"] == "rms_norm"
    _choose.forget()
    assert len(_choose._shipped(out)) == 2
