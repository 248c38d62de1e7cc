"""From times to figures: ratios of speeds, the worst part of each figure, and what it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels.layers import KERNELS, LAYERS
from benchmarks.lab.session import Done, Found, Goals

OURS = "ours"


@dataclass(frozen=True)
class Figure:
    """A share of the speed of others.

    Attributes:
        goal: What is promised; 0: nothing is, and the share is reported.
        against: The arms that it is a share of: the fastest of them counts.
        parts: The figure whose parts it is made of; empty: it has parts of its own.
    """

    goal: float
    against: tuple[str, ...]
    parts: str = ""


COPIES = ("memcpy", "copy")
FIGURES: dict[str, Figure] = {
    "gemm_bf16_of_cublas": Figure(0.85, ("cublas",)),
    "gemm_fp32_of_cublas": Figure(0.9, ("cublas",)),
    "layernorm_of_copy": Figure(0.95, COPIES),
    "layernorm_of_compiled": Figure(1.0, ("compiled",), "layernorm_of_copy"),
    "rmsnorm_of_copy": Figure(0.95, COPIES),
    "rmsnorm_of_compiled": Figure(1.0, ("compiled",), "rmsnorm_of_copy"),
    "softmax_of_copy": Figure(0.95, COPIES),
    "softmax_of_compiled": Figure(1.0, ("compiled",), "softmax_of_copy"),
    "flash_attention_of_flash": Figure(1.0, ("flash",)),
    "flash_attention_of_cudnn": Figure(0.0, ("cudnn",), "flash_attention_of_flash"),
    "conv2d_of_cudnn": Figure(0.6, ("cudnn",)),
}

LAYER_GOALS: Goals = {
    f"{layer}_{what}": (1.0, "more")
    for layer in LAYERS
    for what in (*(f"{kernel}_of_pytorch" for kernel in KERNELS[layer]), "layer_of_eager", "layer_of_compiled")
}

Measured = Mapping[str, Any]
"""One part: "arms", the medians of rounds by arm, us; "samples", how many calls of ours were timed."""


def ratio(part: Measured, against: Sequence[str]) -> tuple[float, float, float]:
    """Our speed as a share of the fastest of other arms, over all rounds; and its least and most in one round.

    Raises:
        ValueError: None of these arms was measured.
    """
    arms = part["arms"]
    others = {name: arms[name] for name in against if arms.get(name)}
    if not others:
        raise ValueError(f"none of {', '.join(against)} was measured; there are {', '.join(arms)}")
    fastest = others[min(others, key=lambda name: statistics.median(others[name]))]
    each = [other / ours for ours, other in zip(arms[OURS], fastest, strict=True)]
    return statistics.median(fastest) / statistics.median(arms[OURS]), min(each), max(each)


def worst(parts: Sequence[Measured], against: Sequence[str]) -> tuple[float, float, float, int]:
    """A figure of several parts: that of the worst one, with the least and the most of all rounds of all."""
    ratios = [ratio(part, against) for part in parts]
    value = min(one for one, _, _ in ratios)
    low = min(value, *(low for _, low, _ in ratios))
    return value, low, max(value, *(high for _, _, high in ratios)), sum(part["samples"] for part in parts)


def find(done: Done) -> Found:
    """The figures of the parts that are measured, from FIGURE/PART; of those that have such an arm."""
    found: Found = {}
    for name, figure in FIGURES.items():
        parts = [
            part
            for key, part in done.items()
            if key.startswith(f"{figure.parts or name}/") and any(part["arms"].get(arm) for arm in figure.against)
        ]
        if parts:
            found[name] = worst(parts, figure.against)
    return found


def find_layers(done: Done) -> Found:
    """Layers as a whole against eager and compiled PyTorch, and each kernel against PyTorch's, from LAYER/WHAT."""
    found: Found = {}
    for name, part in done.items():
        layer, _, what = name.partition("/")
        if what == "whole":
            for against in ("eager", "compiled"):
                found[f"{layer}_layer_of_{against}"] = worst([_best_of_ours(part)], (against,))
        else:
            found[f"{layer}_{what}_of_pytorch"] = worst([part], ("pytorch",))
    return found


def _best_of_ours(part: Measured) -> Measured:
    """A layer with our kernels, eager or compiled: the faster way."""
    ways = {name: times for name, times in part["arms"].items() if name.startswith(OURS)}
    best = min(ways.values(), key=statistics.median)
    return {**part, "arms": {**part["arms"], OURS: best}}


def for_dashboard(done: Mapping[str, Measured], layer: str) -> dict[str, Any]:
    """A layer as `cudasched dashboard` opens it."""
    kernels = []
    for name, part in done.items():
        of, _, what = name.partition("/")
        if of == layer and what != "whole":
            medians = {arm: statistics.median(times) for arm, times in part["arms"].items()}
            kernels.append({"kernel": what, "baseline_us": medians["pytorch"], "tuned_us": medians[OURS]})
    return {"kernels": kernels}
