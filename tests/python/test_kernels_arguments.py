"""What the operators hand to the kernels on a GPU: each argument, by its name in the space; launches are recorded."""

from __future__ import annotations

from typing import Any

import pytest
from cudasched.kernels import _plan
from cudasched.kernels._catalog import KERNELS
from cudasched.tune.space import Gpu

torch = pytest.importorskip("torch")

from cudasched import kernels  # noqa: E402

kernels.register()

from cudasched.kernels.operators import _attention, _conv2d, _matmul, _rows  # noqa: E402

HOPPER = Gpu("NVIDIA H200", "9.0", 132, 60 << 20)
AMPERE = Gpu("NVIDIA A100", "8.0", 108, 40 << 20)
Launches = list[tuple[str, dict[str, Any]]]


class Recorder:
    """In the place of the driver."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, *_: object) -> None:
        self.launches += 1

    def encode(self, into: Any, address: int, *_: object) -> None:
        into.address = address


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Launches:
    """Kernels that were launched, with their arguments; tensors of the CPU stand for those of a GPU."""
    gpu = getattr(request, "param", HOPPER)
    made: Launches = []

    def plan(name: str, kind: str, shape: Any, ordinal: Any, alignment: int = 16) -> Any:
        recorder = Recorder()
        resolved = _plan.resolve(KERNELS[name], kind, shape, gpu, alignment)
        ready = _plan.Plan(resolved, None, recorder)  # type: ignore[arg-type]
        run = ready.run

        def recorded(stream: int, places: Any, values: Any) -> None:
            assert len(places) == len(values)
            run(stream, places, values)
            assert recorder.launches == 1
            held = ready._local.arguments[0]
            given = {
                name: getattr(cell, "value", None) or getattr(cell, "address", 0)
                for name, cell in zip(ready._names, held, strict=True)
            }
            made.append((name, given))

        ready.run = recorded  # type: ignore[method-assign]
        return ready

    for module in (_rows, _matmul, _attention, _conv2d):
        monkeypatch.setattr(module, "plan", plan)
        monkeypatch.setattr(module, "stream_of", lambda _: 0)
        if hasattr(module, "gpu_of"):
            monkeypatch.setattr(module, "gpu_of", lambda _: gpu)
    return made


def half(*shape: int) -> Any:
    return torch.ones(*shape, dtype=torch.bfloat16)


def at(**tensors: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_rows(launches: Launches) -> None:
    x, weight, bias = torch.ones(2, 3, 8), torch.ones(8), torch.ones(8)
    y = _rows.layer_norm_cuda(x, weight, bias, 0.25)
    assert launches.pop() == ("layer_norm", at(y=y, x=x, weight=weight, bias=bias) | {"rows": 6, "epsilon": 0.25})
    y = _rows.rms_norm_cuda(x, weight, 0.5)
    assert launches.pop() == ("rms_norm", at(y=y, x=x, weight=weight, bias=weight) | {"rows": 6, "epsilon": 0.5})
    y = _rows.softmax_cuda(x)
    assert launches.pop() == ("softmax", at(y=y, x=x) | {"rows": 6})


def test_backward_passes(launches: Launches) -> None:
    dy, x, weight = torch.ones(6, 8), torch.ones(6, 8), torch.ones(8)
    dx, dweight, dbias = _rows._layer_norm_backward_cuda(dy, x, weight, 0.25)
    name, given = launches.pop()
    assert given.pop("workspace") and name == "layer_norm_backward"
    told = at(dx=dx, dweight=dweight, dbias=dbias, dy=dy, x=x, weight=weight) | {"rows": 6, "epsilon": 0.25}
    assert given == told
    dx, dweight = _rows._rms_norm_backward_cuda(dy, x, weight, 0.25)
    name, given = launches.pop()
    assert given.pop("workspace") and name == "rms_norm_backward"
    assert given == at(dx=dx, dweight=dweight, dy=dy, x=x, weight=weight) | {"rows": 6, "epsilon": 0.25}
    long = torch.ones(1, 32769)
    assert _rows._rms_norm_backward_cuda(long, long, long[0], 0.1)[0].shape == long.shape and not launches


@pytest.mark.parametrize(
    ("kind", "tf32", "m", "n", "k", "name"),
    [
        (torch.float32, False, 6, 8, 4, "gemm"),
        (torch.float32, True, 6, 8, 4, "gemm_tf32"),
        (torch.bfloat16, False, 6, 8, 8, "gemm_mma"),
        (torch.float16, False, 6, 10, 8, "gemm_mma_narrow"),
        (torch.int8, False, 6, 16, 16, "gemm_int8"),
    ],
)
def test_products(kind: Any, tf32: bool, m: int, n: int, k: int, name: str, launches: Launches) -> None:
    a, b = torch.ones(m // 2, 2, k, dtype=kind), torch.ones(k, n, dtype=kind)
    c = _matmul.matmul_cuda(a, b, tf32)
    assert launches.pop() == (name, at(c=c, a=a, b=b) | {"workspace": 0, "m": m, "n": n, "k": k})
    assert c.shape == (m // 2, 2, n) and c.dtype == (torch.int32 if kind == torch.int8 else kind)


def test_products_by_tensor_maps(launches: Launches) -> None:
    a, b = half(64, 64), half(64, 128)
    c = _matmul.matmul_cuda(a, b, False)
    maps = {f"map_{name}": address for name, address in at(c=c, a=a, b=b).items()}
    assert launches.pop() == ("gemm_sm90", at(c=c, a=a, b=b) | maps | {"m": 64, "n": 128, "k": 64})


@pytest.mark.parametrize(
    ("launches", "name"), [(HOPPER, "flash_attention_sm90"), (AMPERE, "flash_attention")], indirect=["launches"]
)
def test_attention(name: str, launches: Launches) -> None:
    """Strides are those of the arrays as they are: heads of a row side by side, keys that are a part of a row."""
    q = half(2, 6, 4, 64).transpose(1, 2)
    both = half(2, 2, 10, 128)
    k, v = both[..., :64], both[..., 64:]
    out, lse = _attention.attention_cuda(q, k, v, True, 0.5)
    launched, given = launches.pop()
    assert launched == name and out.transpose(1, 2).is_contiguous() and lse.shape == (2, 4, 6)
    sizes = {"queries": 6, "keys": 10, "group": 2, "scale": 0.5}
    assert given == at(out=out, lse=lse, q=q, k=k, v=v) | sizes | {
        f"{array}_{what}": stride
        for array, strides in (
            ("out", (6 * 256, 64, 256)),
            ("q", (6 * 256, 64, 256)),
            ("k", (2 * 1280, 1280, 128)),
            ("v", (2 * 1280, 1280, 128)),
        )
        for what, stride in zip(("batch", "head", "row"), strides, strict=True)
    }
    _attention.attention_cuda(q, both[..., 1:65], v, False, 0.5)  # rows begin at no multiple of 16 bytes
    assert launches.pop()[1]["k_row"] == 64


@pytest.mark.parametrize("launches", [HOPPER, AMPERE], indirect=True)
def test_attention_of_more_batches_than_a_grid_has(launches: Launches) -> None:
    """They were refused: 65,535 is the most of the last dimension."""
    batches, most = 2 * 65535 + 1, 65535
    q, k = half(1, 1, 1, 64).expand(batches, 1, 1, 64), half(1, 1, 1, 64).expand(batches, 1, 1, 64)
    out, lse = _attention.attention_cuda(q, k, k, False, 0.5)
    assert [given["out"] for _, given in launches] == [out[begin:].data_ptr() for begin in (0, most, 2 * most)]
    assert [given["lse"] for _, given in launches] == [lse[begin:].data_ptr() for begin in (0, most, 2 * most)]
    assert all(given["q"] == q.data_ptr() and given["q_batch"] == 0 for _, given in launches)
    launches.clear()
    _attention.attention_cuda(q[:most], k[:most], k[:most], False, 0.5)
    assert len(launches) == 1


@pytest.mark.parametrize(("launches", "name"), [(HOPPER, "conv2d_sm90"), (AMPERE, "conv2d")], indirect=["launches"])
def test_convolution(name: str, launches: Launches) -> None:
    x, w, bias = half(2, 8, 9, 7), half(16, 8, 3, 2), half(16)
    y = _conv2d.conv2d_cuda(x, w, bias, [2, 1], [1, 0], [1, 2])
    launched, given = launches.pop()
    assert launched == name and y.shape == (2, 16, 5, 5) and y.is_contiguous(memory_format=torch.channels_last)
    assert given.pop("x") != x.data_ptr() and given.pop("w") != w.data_ptr()  # copied: channels were not last
    assert given == at(y=y, bias=bias) | {
        **{"workspace": 0, "images": 2, "height": 9, "width": 7, "channels": 8, "filters": 16, "rows": 3, "columns": 2},
        **{"out_height": 5, "out_width": 5, "stride_y": 2, "stride_x": 1, "padding_y": 1, "padding_x": 0},
        **{"dilation_y": 1, "dilation_x": 2},
    }


def test_a_workspace_is_zeros_that_live_until_the_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plain = _matmul.workspace_of
    monkeypatch.setattr(_matmul, "workspace_of", lambda nbytes, like: made.append(plain(nbytes, like)) or made[-1])
    default = KERNELS["gemm"].default
    split = type(KERNELS["gemm"])(
        **{**vars(KERNELS["gemm"]), "default": lambda wanted: {**default(wanted), "SPLIT_K": 2}}
    )
    monkeypatch.setitem(KERNELS, "gemm", split)
    _matmul.matmul_cuda(torch.ones(8, 1024), torch.ones(1024, 8), False)
    (workspace,) = made
    assert launches.pop()[1]["workspace"] == workspace.data_ptr() and not workspace.any()
    assert workspace.numel() == 4 * (2 * 8 * 8 + 1)
