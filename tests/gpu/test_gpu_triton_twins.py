"""The Triton twins on a real GPU: tuned by the decorator, and right. tests/python/test_triton_twins.py is its twin."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("sklearn")

from cudasched.kernels import triton_twins  # noqa: E402


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No results of earlier runs: it is tuned here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def normal(*shape: int, kind: Any, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_normalised(kind: Any) -> None:
    for rows, cols in ((1000, 1000), (7, 20000)):
        x, weight, bias = normal(rows, cols, kind=kind) + 3, normal(cols, kind=kind, seed=1), normal(cols, kind=kind)
        expected = torch.nn.functional.layer_norm(x.double(), (cols,), weight.double(), bias.double())
        bound = 1e-4 if kind == torch.float32 else 2e-2
        torch.testing.assert_close(triton_twins.layer_norm(x, weight, bias).double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_attention_is_right(kind: Any, causal: bool) -> None:
    for heads, key_heads, queries, keys, head in ((4, 4, 256, 256, 64), (8, 2, 333, 77, 128)):
        q = normal(2, queries, heads, head, kind=kind).transpose(1, 2)
        k, v = (normal(2, keys, key_heads, head, kind=kind, seed=seed).transpose(1, 2) for seed in (1, 2))
        out, lse = triton_twins.flash_attention(q, k, v, causal=causal)
        k, v = (one.double().repeat_interleave(heads // key_heads, 1) for one in (k, v))
        scores = q.double() @ k.transpose(-1, -2) * head**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ v, rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)
