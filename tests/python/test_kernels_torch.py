"""The kernels as PyTorch's operators, on the host: what they compute there, gradients, tracing, and what is refused."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cudasched.kernels import KernelError
from support import Run

torch = pytest.importorskip("torch")

from cudasched import kernels  # noqa: E402
from cudasched.kernels._arrays import over_tensors  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

kernels.register()
OPERATORS = torch.ops.cudasched
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def normal(*shape: int, kind: Any = torch.float32, seed: int = 0, grad: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(kind).requires_grad_(grad)


def samples(kind: Any, grad: bool) -> dict[str, tuple[Any, ...]]:
    x, weight, bias = normal(6, 8, kind=kind, grad=grad), normal(8, kind=kind, seed=1), normal(8, kind=kind, seed=2)
    weight, bias = weight.requires_grad_(grad), bias.requires_grad_(grad)
    return {
        "layer_norm": (x, weight, bias, 1e-5),
        "rms_norm": (x, weight, 1e-6),
        "softmax": (x,),
        "matmul": (normal(2, 4, 8, kind=kind, grad=grad), normal(8, 12, kind=kind, seed=1, grad=grad), False),
    }


def attended(kind: Any = torch.float16, grad: bool = False, group: int = 2, keys: int = 6) -> tuple[Any, ...]:
    """Queries, keys and values, as a layer has them: heads of a row side by side."""

    def heads(count: int, rows: int, seed: int) -> Any:
        return normal(2, rows, count, 64, kind=kind, seed=seed).transpose(1, 2).requires_grad_(grad)

    return heads(4, 6, 0), heads(4 // group, keys, 1), heads(4 // group, keys, 2)


NAMES = list(samples(torch.float32, False))
WIDE: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, bias, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "rms_norm": lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
    "softmax": lambda x: torch.softmax(x, -1),
    "matmul": lambda a, b, tf32: torch.matmul(a, b),
}
"""What each computes, by PyTorch."""


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_host_computes_what_the_kernel_does(name: str, kind: Any) -> None:
    given = samples(kind, False)[name]
    made = getattr(OPERATORS, name)(*given)
    wide = WIDE[name](*(one.double() if isinstance(one, torch.Tensor) else one for one in given))
    assert made.dtype == kind and made.is_contiguous()
    torch.testing.assert_close(made.double(), wide, rtol=TOLERANCE[kind], atol=TOLERANCE[kind])
    assert torch.equal(getattr(kernels, name)(*given), made)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_pytorch_finds_the_operators_well_made(name: str, grad: bool) -> None:
    for kind in (torch.float32, torch.bfloat16):
        torch.library.opcheck(getattr(OPERATORS, name).default, samples(kind, grad)[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_pytorch(name: str) -> None:
    given, again = samples(torch.float32, True)[name], samples(torch.float32, True)[name]
    made, wide = getattr(kernels, name)(*given), WIDE[name](*again)
    grad = normal(*made.shape, seed=7)
    made.backward(grad)
    wide.backward(grad)
    for one, other in zip(given, again, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_attention_and_its_gradients_are_those_of_pytorch(group: int, causal: bool) -> None:
    given, again = (attended(torch.float16, True, group) for _ in range(2))
    made = kernels.attention(*given, causal=causal, scale=0.3)
    wide = torch.nn.functional.scaled_dot_product_attention(
        *(one.float() for one in again), is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(made.float(), wide, rtol=2e-3, atol=2e-3)
    assert made.transpose(1, 2).is_contiguous()
    grad = normal(*made.shape, seed=7)
    made.backward(grad.half())
    wide.backward(grad)
    for one, other in zip(given, again, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_pytorch_finds_attention_and_backward_passes_well_made(grad: bool) -> None:
    for causal in (False, True):
        given = (*attended(torch.bfloat16, grad), causal, 0.125)
        torch.library.opcheck(OPERATORS.attention.default, given, rtol=5e-2, atol=5e-2)
    x, weight = normal(6, 8), normal(8, seed=1)
    for name in ("layer_norm_backward", "rms_norm_backward"):
        torch.library.opcheck(getattr(OPERATORS, name).default, (normal(6, 8, seed=3), x, weight, 1e-5))


def images(kind: Any = torch.float16, grad: bool = False) -> tuple[Any, ...]:
    x, w = normal(2, 8, 6, 7, kind=kind), normal(16, 8, 3, 3, kind=kind, seed=1)
    return tuple(one.requires_grad_(grad) for one in (x, w, normal(16, kind=kind, seed=2)))


def test_convolution_and_its_gradients_are_those_of_pytorch() -> None:
    for sizes in ({}, {"stride": 2, "padding": (1, 0)}, {"dilation": (1, 2), "padding": 2, "stride": (1, 2)}):
        given, again = images(grad=True), images(grad=True)
        made = kernels.conv2d(*given, **sizes)
        wide = torch.nn.functional.conv2d(*(one.float() for one in again), **sizes)
        torch.testing.assert_close(made.float(), wide, rtol=2e-3, atol=2e-3)
        assert made.is_contiguous(memory_format=torch.channels_last)
        grad = normal(*made.shape, seed=7)
        made.backward(grad.half())
        wide.backward(grad)
        for one, other in zip(given, again, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(kernels.conv2d(*given[:2]), kernels.conv2d(*given[:2], torch.zeros_like(given[2])))
    assert torch.equal(kernels.conv2d(*given, stride=np.int64(2)), kernels.conv2d(*given, stride=2))


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_pytorch_finds_convolution_well_made(grad: bool) -> None:
    given = (*images(torch.bfloat16, grad), [2, 1], [1, 0], [1, 1])
    torch.library.opcheck(OPERATORS.conv2d.default, given, rtol=5e-2, atol=5e-2)


def test_more_pixels_than_the_kernels_can_count_are_refused() -> None:
    x = torch.empty(1 << 15, 1, 256, 256, dtype=torch.float16, device="meta")
    w, bias = x.new_empty(1, 1, 1, 1), x.new_empty(1)
    with pytest.raises(KernelError, match="pixels of the output, not 32768 images of 256 x 256; give it fewer images"):
        kernels.operators.conv2d_cuda(x, w, bias, [1, 1], [0, 0], [1, 1])


def test_gradients_of_gradients() -> None:
    x, weight = normal(3, 8).double().float().requires_grad_(), normal(8, seed=1, grad=True)
    for function, other in (
        (kernels.rms_norm, lambda x, weight: torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)),
        (kernels.layer_norm, lambda x, weight: torch.nn.functional.layer_norm(x, (8,), weight)),
    ):
        twice = []
        for one in (function, other):
            (first,) = torch.autograd.grad(one(x, weight).square().sum(), x, create_graph=True)
            twice.append(torch.autograd.grad(first.square().sum(), x)[0])
        torch.testing.assert_close(*twice, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_gradients_of_attention(causal: bool) -> None:
    given = [normal(1, 2, 5, 64, kind=torch.float16, seed=seed) for seed in range(3)]

    def twice(function: Callable[..., torch.Tensor], ofs: list[torch.Tensor]) -> list[torch.Tensor]:
        ofs = [one.clone().requires_grad_() for one in ofs]
        first = torch.autograd.grad(function(*ofs).float().square().sum(), ofs, create_graph=True)
        return list(torch.autograd.grad(sum(one.float().square().sum() for one in first), ofs))

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) / 8
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        return scores.softmax(-1) @ v

    made = twice(lambda *of: kernels.attention(*of, causal=causal), given)
    for one, other in zip(made, twice(exact, [one.double() for one in given]), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 1e-2


def test_gradients_of_products_of_nothing() -> None:
    for m, k, n in (((4,), 0, 8), ((2, 3), 0, 8), ((4,), 8, 0), ((2, 0), 8, 4)):
        a, b = torch.ones(*m, k, requires_grad=True), torch.ones(k, n, requires_grad=True)
        kernels.matmul(a, b).sum().backward()
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, torch.full_like(a, n)) and torch.equal(b.grad, torch.full_like(b, math.prod(m)))


def test_the_gradient_of_the_bias_of_one_row_is_not_the_argument() -> None:
    dy = normal(8)
    of_bias = OPERATORS.layer_norm_backward.default(dy, normal(8, seed=1), torch.ones(8), 1e-5)[2]
    assert torch.equal(of_bias, dy) and of_bias.data_ptr() != dy.data_ptr()


def test_int8_products_are_exact() -> None:
    a, b = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((5, 16), (16, 32)))
    made = kernels.matmul(a, b)
    assert made.dtype == torch.int32 and torch.equal(made, (a.double() @ b.double()).int())
    torch.library.opcheck(OPERATORS.matmul.default, (a, b, True))


@pytest.mark.parametrize(
    ("kind", "tf32", "k", "n", "capability", "name"),
    [
        ("float32", False, 4, 12, "9.0", "gemm"),
        ("float32", True, 4, 12, "9.0", "gemm_tf32"),
        ("bfloat16", True, 8, 16, "9.0", "gemm_mma"),
        ("float16", False, 8, 18, "9.0", "gemm_mma_narrow"),
        ("bfloat16", False, 64, 128, "9.0", "gemm_sm90"),
        ("bfloat16", False, 64, 128, "8.0", "gemm_mma"),
        ("bfloat16", False, 64, 128, "12.0", "gemm_mma"),
        ("int8", False, 16, 32, "9.0", "gemm_int8"),
        ("float32", False, 4, 7, "9.0", "both must be multiples of 4"),
        ("float16", False, 3, 8, "9.0", "both must be multiples of 2"),
        ("int8", False, 8, 16, "9.0", "both must be multiples of 16"),
    ],
)
def test_products_go_to_the_kernel_of_their_type_sizes_and_gpu(
    kind: str, tf32: bool, k: int, n: int, capability: str, name: str
) -> None:
    from cudasched.kernels.operators._matmul import kernel_for

    if " " in name:
        with pytest.raises(KernelError, match=name):
            kernel_for(kind, tf32, 256, n, k, capability)
    else:
        assert kernel_for(kind, tf32, 256, n, k, capability) == name


def test_gradients_of_one_row_without_another_dimension() -> None:
    for name, given in (("layer_norm", (normal(8, seed=4), 1e-5)), ("rms_norm", (normal(8, seed=4), 1e-6))):
        x, weight, bias = normal(8, grad=True), given[0].requires_grad_(), normal(8, seed=5, grad=True)
        arguments = (x, weight, bias) if name == "layer_norm" else (x, weight)
        getattr(kernels, name)(*arguments, given[1]).sum().backward()
        assert all(one.grad.shape == (8,) for one in arguments)


@pytest.mark.parametrize("name", [*NAMES, "attention", "conv2d"])
def test_compiled_code_keeps_the_operator_and_has_no_breaks(name: str) -> None:
    seen = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append({str(node.target) for node in module.graph.nodes})
        return module.forward

    others: dict[str, Callable[[], tuple[Any, ...]]] = {"attention": attended, "conv2d": images}
    given = others[name]() if name in others else samples(torch.float32, False)[name]
    compiled = torch.compile(getattr(kernels, name), fullgraph=True, backend=backend)
    assert torch.allclose(compiled(*given), getattr(kernels, name)(*given))
    assert [f"cudasched.{name}.default" in targets for targets in seen] == [True]


def test_compiled_models_train_through_the_operators() -> None:
    def model(x: Any, weight: Any, bias: Any, matrix: Any) -> Any:
        return kernels.softmax(kernels.matmul(kernels.layer_norm(x, weight, bias), matrix)).square().sum()

    def gradients(function: Callable[..., Any]) -> list[Any]:
        given = [normal(6, 8, grad=True), normal(8, seed=1, grad=True), normal(8, seed=2, grad=True)]
        given.append(normal(8, 12, seed=3, grad=True))
        function(*given).backward()
        return [one.grad for one in given]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(compiled), gradients(model), strict=True):
        torch.testing.assert_close(one, other)


def test_sizes_may_differ_from_call_to_call_of_compiled_code() -> None:
    breaks = []
    compiled = torch.compile(
        kernels.rms_norm, fullgraph=True, dynamic=True, backend=lambda module, _: breaks.append(1) or module.forward
    )
    for rows in (3, 5, 9):
        x = normal(rows, 8)
        assert torch.allclose(compiled(x), kernels.rms_norm(x))
    assert len(breaks) == 1


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
def test_a_nan_spoils_its_row_alone(name: str) -> None:
    x = normal(4, 8)
    x[1, 3] = float("nan")
    made = getattr(kernels, name)(x)
    assert made[1].isnan().all() and not made[[0, 2, 3]].isnan().any()


def test_what_is_left_out_and_what_is_empty() -> None:
    x = normal(3, 8)
    torch.testing.assert_close(kernels.layer_norm(x), torch.nn.functional.layer_norm(x, (8,)))
    torch.testing.assert_close(kernels.rms_norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    assert kernels.layer_norm(normal(0, 8)).shape == (0, 8)
    assert kernels.softmax(normal(3, 0)).shape == (3, 0)
    q, k, v = attended(keys=0)
    assert torch.equal(kernels.attention(q, k, v), torch.zeros_like(q))
    assert torch.equal(kernels.matmul(normal(4, 0), normal(0, 8)), torch.zeros(4, 8))
    x, w, bias = images(grad=True)
    kernels.conv2d(x, w[:0], bias[:0], padding=1).sum().backward()
    assert all(not one.grad.any() for one in (x, w, bias))
    made = kernels.conv2d(x[:, :0], w[:, :0], bias, padding=1)
    assert torch.equal(made, bias.reshape(-1, 1, 1).expand(2, 16, 6, 7))


@pytest.mark.parametrize("key_heads", [0, 2])
def test_attention_without_heads(key_heads: int) -> None:
    q, k, v = attended(grad=True)
    made = kernels.attention(q[:, :0], k[:, :key_heads], v[:, :key_heads])
    assert made.shape == (2, 0, 6, 64)
    made.sum().backward()
    assert all(not one.grad.any() for one in (q, k, v))


def test_of_images_and_filters_without_rows_the_bias_is_left() -> None:
    for empty in (0, 1):
        given = list(images(grad=True))
        given[empty] = given[empty].detach()[:, :, :0].requires_grad_()
        made = kernels.conv2d(*given, padding=2)
        assert torch.equal(made, given[2].reshape(-1, 1, 1).expand(made.shape))
        made.sum().backward()
        assert [one.grad.shape for one in given] == [one.shape for one in given]
        assert torch.equal(given[2].grad, torch.full((16,), made.numel() / 16, dtype=torch.float16))


def test_strided_arrays_and_other_dimensions_are_copied() -> None:
    x = normal(8, 6, 5)
    torch.testing.assert_close(kernels.softmax(x, 0), torch.softmax(x, 0))
    torch.testing.assert_close(kernels.softmax(x.transpose(0, 2)), torch.softmax(x.transpose(0, 2), -1))
    weight = normal(16)[::2]
    torch.testing.assert_close(
        kernels.layer_norm(x.transpose(0, 2), weight),
        kernels.layer_norm(x.transpose(0, 2).contiguous(), weight.contiguous()),
    )


META = torch.device("meta")
REFUSED = {
    "type": (lambda: kernels.layer_norm(normal(2, 8).double()), "layer_norm takes float32.*not float64"),
    "integers": (lambda: kernels.softmax(torch.arange(8)), "softmax takes float32.*not int64"),
    "other type": (lambda: kernels.rms_norm(normal(2, 8), normal(8).half()), "weight has torch.float16"),
    "shape": (lambda: kernels.layer_norm(normal(2, 8), normal(7)), r"weight has the shape \(7,\); it is \(8,\)"),
    "bias": (lambda: kernels.layer_norm(normal(2, 8), None, normal(1, 8)), r"bias has the shape \(1, 8\)"),
    "number": (lambda: kernels.softmax(torch.tensor(1.0), 0), "dimension"),
    "dimension": (lambda: kernels.softmax(normal(2, 8), 2), "dim = 2 of an array of 2 dimensions"),
    "device": (lambda: kernels.rms_norm(normal(2, 8), normal(8).to(META)), "weight is on meta.*the first array on cpu"),
    "layout": (lambda: kernels.softmax(normal(2, 8).to_sparse()), "dense arrays, not torch.sparse_coo"),
    "product": (lambda: kernels.matmul(normal(2, 8), normal(7, 4)), r"\(..., m, k\) and \(k, n\), not \(2, 8\)"),
    "batches": (lambda: kernels.matmul(normal(2, 2, 8), normal(2, 8, 4)), "torch.matmul takes batches"),
    "attended types": (lambda: kernels.attention(*attended(torch.float32)), "takes float16, bfloat16, not float32"),
    "attended shapes": (lambda: kernels.attention(*(one[0] for one in attended())), "takes q of .*, not .4, 6, 64"),
    "attended heads": (lambda: kernels.attention(*(attended()[one] for one in (1, 0, 0))), "heads of q are a multiple"),
    "head size": (lambda: kernels.attention(*(one[..., :32] for one in attended())), "heads of 64 or 128, not 32"),
    "images": (lambda: kernels.conv2d(images()[0], images()[1][:, :4]), "knows no groups"),
    "image types": (lambda: kernels.conv2d(*images(torch.float32)), "conv2d takes float16, bfloat16, not float32"),
    "filters": (
        lambda: kernels.conv2d(*images(), dilation=4),
        r"filters of \(3, 3\) are larger than images of \(6, 7\)",
    ),
    "strides": (lambda: kernels.conv2d(*images(), stride=0), r"stride is two numbers of 1 or more, not \[0, 0\]"),
    "padding": (lambda: kernels.conv2d(*images(), padding="same"), "padding is one whole number or two, not 'same'"),
    "image bias": (lambda: kernels.conv2d(*images()[:2], images()[2][:3]), r"bias has the shape \(3,\); it is \(16,\)"),
    "nothing": (lambda: kernels.layer_norm(None), "arrays of PyTorch, CuPy or NumPy, not None"),
    "nothing first": (lambda: kernels.rms_norm(None, np.ones(8, np.float32)), "PyTorch, CuPy or NumPy, not None"),
    "list": (lambda: kernels.softmax([1.0, 2.0]), "arrays of PyTorch, CuPy or NumPy, not list"),
    "libraries": (lambda: kernels.rms_norm(normal(2, 8), np.ones(8, np.float32)), "arrays of one library"),
    "other libraries": (lambda: kernels.rms_norm(np.ones((2, 8), np.float32), normal(8)), "arrays of one library"),
    "numpy's type": (lambda: kernels.softmax(np.ones((2, 8))), "not float64"),
    "numpy's text": (lambda: kernels.softmax(np.array(["a"])), "does not take this array of numpy"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_kernel_does_not_take_is_said(what: str) -> None:
    call, said = REFUSED[what]
    with pytest.raises(KernelError, match=said):
        call()


def test_numpy_arrays_give_numpy_arrays() -> None:
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    x.flags.writeable = False
    made = kernels.softmax(x)
    assert isinstance(made, np.ndarray) and made.dtype == np.float32
    np.testing.assert_allclose(made, torch.softmax(torch.tensor(x), -1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(kernels.matmul(x[:, ::2], x[:, ::2].T.copy()), x[:, ::2] @ x[:, ::2].T, rtol=1e-5)


@pytest.mark.parametrize(("handle", "wanted"), [(0, "default"), (1, "default"), (48, 48)])
def test_what_cupy_gives_is_computed_on_its_stream(handle: int, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of PyTorch's own stream would be used again there, while CuPy still reads it on another."""
    current: list[Any] = []

    @contextlib.contextmanager
    def entered(what: Any) -> Iterator[None]:
        current.append(what)
        yield
        current.pop()

    class Array:
        __module__ = "cupy"
        device = SimpleNamespace(id=3)

        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **_: object) -> Any:
            assert current == [3, wanted]
            return self.tensor.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    def from_dlpack(tensor: Any) -> Array:
        assert current == [3, wanted]
        return Array(tensor)

    def softmax(x: Any) -> Any:
        assert current == [3, wanted]
        return kernels.softmax(x)

    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=handle))
    cupy.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer: pointer)
    made = over_tensors("softmax", softmax, (Array(torch.zeros(2, 4)),))
    assert torch.equal(made.tensor, torch.full((2, 4), 0.25))


def dual(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, with tangents."""
    return tuple(
        forward_ad.make_dual(one, torch.ones_like(one)) if isinstance(one, torch.Tensor) else one for one in given
    )


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", [*NAMES, "attention", "conv2d"])
def test_tangents_are_refused(name: str, grad: bool) -> None:
    """They were dropped, so that derivatives came out as 0."""
    given: tuple[Any, ...] = (*attended(grad=grad), False, 0.1)
    if name == "conv2d":
        given = (*images(grad=grad), [1, 1], [0, 0], [1, 1])
    elif name != "attention":
        given = samples(torch.float32, grad)[name]
    operator = getattr(OPERATORS, name)
    with forward_ad.dual_level(), pytest.raises(KernelError, match=f"{name} has no forward-mode derivative"):
        operator(*dual(given))
    with forward_ad.dual_level():
        operator(*given)
    operator(*given)


@pytest.mark.parametrize("over", ["jvp", "jacfwd", "vmap"])
def test_tangents_of_nested_transformations_are_refused(over: str) -> None:
    x = normal(3, 8)
    function: Callable[..., Any] = torch.func.vmap(kernels.softmax) if over == "vmap" else kernels.softmax
    with pytest.raises(KernelError, match="softmax has no forward-mode derivative"):
        torch.func.jacfwd(function)(x) if over == "jacfwd" else torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev"])
def test_gradients_of_torch_func_are_refused(name: str) -> None:
    x = normal(3, 8)
    transform = getattr(torch.func, name)
    with pytest.raises(KernelError, match=r"softmax has no derivatives in torch\.func"):
        if name == "vjp":
            transform(kernels.softmax, x)
        else:
            transform(lambda x: kernels.softmax(x).sum())(x)
    x.requires_grad_()
    torch.func.vmap(kernels.softmax)(x[:, None]).sum().backward()
    assert x.grad is not None


class Names(TorchDispatchMode):
    """Which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.called.add(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_backward_passes_keep_the_tangents_of_their_gradients(name: str) -> None:
    """The kernel would drop them; what the host computes in its place does not."""
    given = samples(torch.float32, True)[name]
    again = samples(torch.float32, True)[name]
    grad, tangent = normal(6, 8, seed=7), normal(6, 8, seed=8)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(grad, tangent)
        with Names() as names:
            made = torch.autograd.grad(getattr(kernels, name)(*given), given[0], dy)[0]
        assert f"cudasched.{name}.default" in names.called
        assert f"cudasched.{name}_backward.default" not in names.called
        wide = torch.autograd.grad(WIDE[name](*again), again[0], dy)[0]
        torch.testing.assert_close(
            forward_ad.unpack_dual(made).tangent, forward_ad.unpack_dual(wide).tangent, rtol=1e-4, atol=1e-5
        )


def test_arrays_of_other_libraries_are_refused() -> None:
    class Other:
        def __dlpack__(self) -> None: ...

    with pytest.raises(KernelError, match=r"not .*Other"):
        kernels.softmax(Other())


def test_without_pytorch_it_says_what_to_install(python: Run, tmp_path: Path, no_driver: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import cudasched.kernels as k\n"
        "from cudasched.errors import Error\n"
        "try: k.softmax\n"
        "except Error as error: print(error)\n"
    )
    done = python(code)
    assert done.returncode == 0 and "pip install torch" in done.stdout, done.stderr


def test_importing_the_package_imports_no_pytorch(python: Run, no_driver: Path) -> None:
    done = python("import sys, cudasched.kernels; print('torch' in sys.modules, dir(cudasched.kernels))")
    assert done.stdout.startswith("False") and "'layer_norm'" in done.stdout, done.stderr
