"""From times to figures: ratios of speeds, the worst part of each figure, and what it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results.schema import FigureRow

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


def row(figure: str, goal: float, parts: Sequence[Measured], against: Sequence[str], limited_by: str) -> FigureRow:
    """A figure of several parts: that of the worst one, with the least and the most of all rounds of all."""
    ratios = [ratio(part, against) for part in parts]
    value = min(one for one, _, _ in ratios)
    return FigureRow.judged(
        figure=figure,
        value=value,
        goal=goal,
        better="more",
        low=min(value, *(low for _, low, _ in ratios)),
        high=max(value, *(high for _, _, high in ratios)),
        n=sum(part["samples"] for part in parts),
        limited_by=limited_by,
    )


def figures(done: Mapping[str, Measured], limited_by: Mapping[str, str]) -> list[FigureRow]:
    """The figures of which all is measured that was asked for, from FIGURE/PART; of parts that have such an arm."""
    made = []
    for name, figure in FIGURES.items():
        parts = [
            part
            for key, part in done.items()
            if key.startswith(f"{figure.parts or name}/") and any(part["arms"].get(arm) for arm in figure.against)
        ]
        if parts:
            made.append(row(name, figure.goal, parts, figure.against, limited_by.get(name, "")))
    return made


def of_layers(done: Mapping[str, Measured], limited_by: Mapping[str, str]) -> list[FigureRow]:
    """Layers as a whole against eager and compiled PyTorch, and each kernel against PyTorch's, from LAYER/WHAT."""
    made = []
    for name, part in done.items():
        layer, _, what = name.partition("/")
        if what == "whole":
            for against in ("eager", "compiled"):
                figure = f"{layer}_layer_of_{against}"
                made.append(row(figure, 1.0, [_best_of_ours(part)], (against,), limited_by.get(figure, "")))
        elif what:
            figure = f"{layer}_{what}_of_pytorch"
            made.append(row(figure, 1.0, [part], ("pytorch",), limited_by.get(figure, "")))
    return made


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
