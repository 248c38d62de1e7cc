"""The kernels on a real GPU: defaults and other configurations against float64, streams, graphs, compiled code.

tests/python/test_kernels_plan.py and test_kernels_torch.py are their twins without a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cudasched.kernels import KernelError, _catalog, _plan
from cudasched.kernels._catalog import KERNELS
from cudasched.kernels._choose import Choice

torch = pytest.importorskip("torch")

from cudasched import kernels  # noqa: E402

kernels.register()

#: Relative and absolute error that is allowed: half a unit in the last place, rounded twice, and float32 sums.
BOUNDS = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.2e-2, 4e-3)}
TYPES = list(BOUNDS)
RANDOM = 4
ROWS = [(64, 4096), (7, 1000), (3, 77), (1, 1), (1000, 1026), (5, 40000), (4, 100_000)]
PRODUCTS = [(128, 256, 512), (1, 8, 8), (1000, 1000, 1000), (257, 72, 136), (2048, 1024, 4096)]
ATTENDED = [(2, 4, 4, 256, 256, 64), (1, 8, 2, 333, 77, 128), (1, 2, 1, 1, 1000, 128), (2, 2, 2, 1024, 1024, 128)]
CONVOLVED = [(2, 64, 28, 64, 3, 1, 1), (1, 3, 33, 24, 7, 2, 3), (3, 256, 14, 128, 1, 2, 0)]


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shared by the tests of this file, which compile each configuration once; no measurements of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kernels"))
    _plan.reset()
    yield
    _plan.reset()


def normal(*shape: int, kind: Any = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(kind)


def near(made: Any, expected: Any, bounds: tuple[float, float], scale: float = 1.0) -> None:
    relative, absolute = bounds
    torch.testing.assert_close(made.double(), expected, rtol=relative, atol=absolute * scale)


def wide_rows(name: str, x: Any, weight: Any, bias: Any) -> Any:
    functional = torch.nn.functional
    x, weight, bias = x.double(), weight.double(), bias.double()
    if name == "softmax":
        return torch.softmax(x, -1)
    if name == "layer_norm":
        return functional.layer_norm(x, x.shape[-1:], weight, bias)
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def call_rows(name: str, x: Any, weight: Any, bias: Any) -> Any:
    given = {"softmax": (x,), "layer_norm": (x, weight, bias), "rms_norm": (x, weight)}[name]
    return getattr(kernels, name)(*given)


def check_rows(name: str, kind: Any, rows: int, cols: int) -> None:
    x, weight, bias = (
        normal(rows, cols, kind=kind) + 0.5,
        normal(cols, kind=kind, seed=1),
        normal(cols, kind=kind, seed=2),
    )
    near(call_rows(name, x, weight, bias), wide_rows(name, x, weight, bias), BOUNDS[kind], 2.0)


def check_product(kind: Any, m: int, n: int, k: int, tf32: bool = False) -> None:
    a, b = normal(m, k, kind=kind), normal(k, n, kind=kind, seed=1)
    relative, absolute = BOUNDS[kind]
    bounds = (0.0, 6e-2 * (k / 1024) ** 0.5) if tf32 else (relative, absolute + 1e-6 * k)
    near(kernels.matmul(a, b, tf32), a.double() @ b.double(), bounds)


def attended(
    kind: Any, batches: int, heads: int, key_heads: int, queries: int, keys: int, head: int
) -> tuple[Any, ...]:
    """Heads of a row side by side, as a layer has them."""
    sizes = ((queries, heads), (keys, key_heads), (keys, key_heads))
    return tuple(
        normal(batches, rows, count, head, kind=kind, seed=seed).transpose(1, 2)
        for seed, (rows, count) in enumerate(sizes)
    )


def check_attention(kind: Any, causal: bool, *sizes: int) -> None:
    q, k, v = attended(kind, *sizes)
    made, lse = torch.ops.cudasched.attention(q, k, v, causal, 0.11)
    group = q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, 1) for one in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * 0.11
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    near(made, scores.softmax(-1) @ v, (1e-2, 4e-3))
    near(lse, scores.logsumexp(-1), (1e-4, 1e-3))


def check_convolution(kind: Any, images: int, channels: int, size: int, filters: int, rows: int, *how: int) -> None:
    x, w = normal(images, channels, size, size, kind=kind), normal(filters, channels, rows, rows, kind=kind, seed=1)
    bias = normal(filters, kind=kind, seed=2)
    expected = torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), *how)
    made = kernels.conv2d(x, w, bias, stride=how[0], padding=how[1])
    assert made.is_contiguous(memory_format=torch.channels_last)
    relative, absolute = BOUNDS[kind]
    near(made, expected, (relative, absolute + 1e-6 * channels * rows * rows))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
def test_rows_are_right_for_all_sizes(name: str, kind: Any) -> None:
    for rows, cols in ROWS:
        check_rows(name, kind, rows, cols)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_products_are_right_for_all_sizes(kind: Any) -> None:
    for m, n, k in PRODUCTS:
        check_product(kind, m, n, k)
    if kind == torch.float32:
        for m, n, k in PRODUCTS:
            check_product(kind, m, n, k, tf32=True)
    else:
        check_product(kind, 100, 70, 34)  # rows of 4 bytes alone


def test_int8_products_are_exact() -> None:
    for m, n, k in ((128, 128, 128), (100, 48, 272), (1, 16, 16)):
        a, b = (torch.randint(-128, 128, size, dtype=torch.int8, device="cuda") for size in ((m, k), (k, n)))
        assert torch.equal(kernels.matmul(a, b), (a.double() @ b.double()).int())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES[1:], ids=str)
def test_attention_is_right_for_all_sizes(kind: Any, causal: bool) -> None:
    for sizes in ATTENDED:
        check_attention(kind, causal, *sizes)


@pytest.mark.parametrize("kind", TYPES[1:], ids=str)
def test_convolution_is_right_for_all_sizes(kind: Any) -> None:
    for sizes in CONVOLVED:
        check_convolution(kind, *sizes)


CHECKS: dict[str, tuple[dict[str, int], Callable[[Any], None]]] = {
    "layer_norm": ({"rows": 515, "cols": 2048}, lambda kind: check_rows("layer_norm", kind, 515, 2048)),
    "rms_norm": ({"rows": 515, "cols": 2048}, lambda kind: check_rows("rms_norm", kind, 515, 2048)),
    "softmax": ({"rows": 515, "cols": 2048}, lambda kind: check_rows("softmax", kind, 515, 2048)),
    "gemm": ({"m": 300, "n": 516, "k": 1000}, lambda kind: check_product(kind, 300, 516, 1000)),
    "gemm_mma": ({"m": 300, "n": 520, "k": 1000}, lambda kind: check_product(kind, 300, 520, 1000)),
    "gemm_sm90": ({"m": 600, "n": 520, "k": 1000}, lambda kind: check_product(kind, 600, 520, 1000)),
    "gemm_tf32": ({"m": 300, "n": 516, "k": 1000}, lambda kind: check_product(kind, 300, 516, 1000, True)),
    "flash_attention": (
        {"batches": 2, "heads": 4, "group": 2, "queries": 300, "keys": 300, "head": 128, "causal": 1},
        lambda kind: check_attention(kind, True, 2, 4, 2, 300, 300, 128),
    ),
    "conv2d": (
        {
            **{"images": 2, "height": 30, "width": 30, "channels": 64, "filters": 96, "rows": 3, "columns": 3},
            **{"out_height": 30, "out_width": 30},
        },
        lambda kind: check_convolution(kind, 2, 64, 30, 96, 3, 1, 1),
    ),
}
CHECKS["flash_attention_sm90"] = CHECKS["flash_attention"]
CHECKS["conv2d_sm90"] = CHECKS["conv2d"]


@pytest.mark.parametrize("name", CHECKS)
def test_other_configurations_are_right_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _plan.gpu_of(0)
    kernel = KERNELS[name]
    if kernel.refusal(gpu):
        pytest.skip(kernel.refusal(gpu))
    if (
        name in ("gemm_mma", "flash_attention", "conv2d") and gpu.capability == "9.0"
    ):  # where others are taken by default
        from cudasched.kernels.operators import _attention, _conv2d, _matmul

        plain = _matmul.kernel_for
        monkeypatch.setattr(_matmul, "kernel_for", lambda *given: plain(*given[:-1], "8.0"))
        monkeypatch.setattr(_attention, "kernel_for", lambda _: "flash_attention")
        monkeypatch.setattr(_conv2d, "kernel_for", lambda _: "conv2d")
    shape, check = CHECKS[name]
    kind = list(kernel.types)[-1]
    problem = _catalog.variant(name, kind).problem(gpu, shape)
    seen = []
    for configuration in random.Random(name).sample(problem.configurations, RANDOM):
        seen.clear()

        def chosen(given: Any, *_: Any, configuration: Any = configuration) -> Choice:
            seen.append(given.name)
            return Choice(configuration, "database")

        monkeypatch.setattr(_plan, "choose", chosen)
        _plan.reset()
        check(getattr(torch, kind))
        assert seen == [name], configuration


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_gradients_are_right(kind: Any) -> None:
    for name in ("layer_norm", "rms_norm", "softmax"):
        for rows, cols in ((300, 1024), (7, 77), (3, 40000)):
            given = [normal(rows, cols, kind=kind), normal(cols, kind=kind, seed=1), normal(cols, kind=kind, seed=2)]
            leaves = [one.clone().requires_grad_() for one in given]
            wide = [one.double().requires_grad_() for one in given]
            dy = normal(rows, cols, kind=kind, seed=3)
            call_rows(name, *leaves).backward(dy)
            wide_rows(name, *wide).backward(dy.double())
            for one, other in zip(leaves, wide, strict=True):
                if other.grad is not None:
                    near(one.grad, other.grad, BOUNDS[kind], 20.0)


def test_a_nan_spoils_its_row_alone() -> None:
    for name in ("layer_norm", "rms_norm", "softmax"):
        x = normal(64, 4096)
        x[3, 77] = float("nan")
        made = call_rows(name, x, normal(4096), normal(4096))
        assert made[3].isnan().all() and not made[torch.arange(64) != 3].isnan().any()
    a = normal(256, 64, kind=torch.bfloat16)
    a[5, 5] = float("nan")
    made = kernels.matmul(a, normal(64, 128, kind=torch.bfloat16))
    assert made[5].isnan().all() and not made[torch.arange(256) != 5].isnan().any()


def test_arrays_that_are_not_aligned_or_not_contiguous() -> None:
    storage = normal(64 * 1024 + 1, kind=torch.bfloat16)
    x = storage[1:].view(64, 1024)
    weight = normal(1025, kind=torch.bfloat16)[1:]
    near(kernels.rms_norm(x, weight), wide_rows("rms_norm", x, weight, weight), BOUNDS[torch.bfloat16], 2.0)
    near(kernels.softmax(x.t()), torch.softmax(x.t().double(), -1), BOUNDS[torch.bfloat16])
    near(kernels.matmul(x, x.t()), x.double() @ x.t().double(), (1.2e-2, 2e-2))


def test_launches_are_in_the_order_of_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(8192, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            x += 1  # no kernel of ours sees a sum that is not there yet
        made = kernels.rms_norm(x)
        x.zero_()
    stream.synchronize()
    torch.testing.assert_close(made, torch.ones_like(made))


def test_a_graph_keeps_the_launches() -> None:
    x, weight = normal(64, 1024), normal(1024, seed=1)
    a = normal(256, 256, kind=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, c = kernels.rms_norm(x, weight), kernels.matmul(a, a)  # first use: loaded while the stream is captured
    x.copy_(normal(64, 1024, seed=5))
    a.copy_(normal(256, 256, kind=torch.bfloat16, seed=6))
    graph.replay()
    torch.cuda.synchronize()
    near(y, wide_rows("rms_norm", x, weight, weight), BOUNDS[torch.float32])
    near(c, a.double() @ a.double(), (1.2e-2, 4e-3))


def test_compiled_code_keeps_the_operators() -> None:
    def layer(x: Any, weight: Any, bias: Any, matrix: Any) -> Any:
        return torch.nn.functional.gelu(kernels.matmul(kernels.layer_norm(x, weight, bias), matrix)) + x

    given = [normal(512, 256, kind=torch.bfloat16), *(normal(256, kind=torch.bfloat16, seed=one) for one in (1, 2))]
    given.append(normal(256, 256, kind=torch.bfloat16, seed=3) / 16)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(*given), layer(*given), rtol=2e-2, atol=2e-2)
    leaves = [one.clone().requires_grad_() for one in given]
    again = [one.clone().requires_grad_() for one in given]
    compiled(*leaves).float().square().sum().backward()
    layer(*again).float().square().sum().backward()
    for one, other in zip(leaves, again, strict=True):
        # Sums over 512 rows of what one rounds to bfloat16 on the way and the other does not; typically 45.
        torch.testing.assert_close(one.grad, other.grad, rtol=5e-2, atol=1.5)


def test_pytorch_finds_the_operators_well_made() -> None:
    x, weight = normal(8, 64).requires_grad_(), normal(64, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.cudasched.layer_norm.default, (x, weight, weight, 1e-5))
    torch.library.opcheck(torch.ops.cudasched.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(torch.ops.cudasched.softmax.default, (x,))
    torch.library.opcheck(torch.ops.cudasched.matmul.default, (x, normal(64, 32), False), rtol=1e-3, atol=1e-3)


def test_cupy_arrays_stay_where_they_are() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.random.default_rng(0).standard_normal((64, 512), dtype=cupy.float32)
    for _ in range(20):
        made = kernels.softmax(x)
        assert isinstance(made, cupy.ndarray)
        x = x + made  # on CuPy's stream: in order with PyTorch's
    expected = cupy.exp(x - x.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    cupy.testing.assert_allclose(kernels.softmax(x), expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(KernelError, match="arrays of one library"):
        kernels.rms_norm(x, normal(512))


def test_numpy_arrays_are_computed_on_the_gpu() -> None:
    np = pytest.importorskip("numpy")
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    made = kernels.matmul(x, x.T.copy())
    assert isinstance(made, np.ndarray)
    np.testing.assert_allclose(made, x.astype(np.float64) @ x.T.astype(np.float64), rtol=1e-4, atol=1e-4)


def test_what_does_not_go_together_is_said() -> None:
    with pytest.raises(KernelError, match="weight is on cpu, and the first array on cuda:0"):
        kernels.rms_norm(normal(4, 8), torch.ones(8))
    with pytest.raises(KernelError, match="both must be multiples of 4"):
        kernels.matmul(normal(4, 8), normal(8, 7))
    with pytest.raises(KernelError, match="layer_norm takes float32"):
        kernels.layer_norm(normal(4, 8).double())
    gpu = _plan.gpu_of(0)
    if gpu.capability != "9.0":
        with pytest.raises(KernelError, match=r"needs a GPU of compute capability 9.0"):
            kernels.configuration("gemm_sm90", "bfloat16", m=256, n=256, k=256)


def test_threads_launch_at_once_and_a_second_gpu_where_there_is_one() -> None:
    import threading

    wrong: list[Any] = []

    def work(device: int) -> None:
        try:
            x = torch.randn(64, 512, device=f"cuda:{device}")
            for _ in range(50):
                made = kernels.softmax(x)
            torch.testing.assert_close(made, torch.softmax(x, -1), rtol=1e-4, atol=1e-6)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(place % torch.cuda.device_count(),)) for place in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
