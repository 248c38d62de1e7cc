"""A GPU's peak rates, by the data sheet, and a kernel's kind of arithmetic, by name.

Peaks are of dense matrices at boost clocks. A GPU that is not in the table has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Peaks", "arithmetic_of", "peaks_of"]

Arithmetic = Literal["8-bit", "half", "tf32", "fp32", "fp64"]

_TERA = 1e12


@dataclass(frozen=True)
class Peaks:
    """A GPU's most.

    Attributes:
        bytes_per_s: Of the memory.
        flops_per_s: Of each kind of arithmetic; on matrix units where possible.
    """

    bytes_per_s: float
    flops_per_s: dict[Arithmetic, float]


def _hopper(memory: float, part: float = 1.0) -> Peaks:
    most: dict[Arithmetic, float] = {"8-bit": 1979, "half": 989, "tf32": 494, "fp32": 67, "fp64": 67}
    return Peaks(memory * _TERA, {kind: rate * part * _TERA for kind, rate in most.items()})


#: The first that the GPU's name has, as the driver gives it.
_GPUS: tuple[tuple[str, Peaks], ...] = (
    ("H200 NVL", _hopper(4.8, 0.844)),
    ("H200", _hopper(4.8)),
    ("H100 PCIe", _hopper(2.0, 0.764)),
    ("H100 NVL", _hopper(3.9, 0.844)),
    ("H100 80GB HBM3", _hopper(3.35)),
    (
        "A100-SXM4-80GB",
        Peaks(2.04e12, {"8-bit": 624e12, "half": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}),
    ),
    (
        "A100-SXM4-40GB",
        Peaks(1.56e12, {"8-bit": 624e12, "half": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}),
    ),
)

#: Of a kernel's name, in this order; nvjet's first letter is the first factor's type.
_KINDS: tuple[tuple[str, Arithmetic], ...] = (
    (r"nvjet_sm\d+_[qr]|e4m3|e5m2|_s8|i8816", "8-bit"),
    (r"nvjet_sm\d+_[ht]|bf16bf16|f16f16|tensorop_(bf16|f16|h)|[hs]16816gemm|[hs]1688gemm_(bf16|fp16|f16)", "half"),
    (r"tf32|nvjet_sm\d+_s|s1688gemm", "tf32"),
    (r"simt|sgemm|ffma", "fp32"),
    (r"dgemm|d884|nvjet_sm\d+_d|f64f64", "fp64"),
)


def peaks_of(gpu: str) -> Peaks | None:
    """The peaks of a GPU by name; None if the table lacks that GPU."""
    return next((peaks for name, peaks in _GPUS if name in gpu), None)


def arithmetic_of(function: str) -> Arithmetic | None:
    """The arithmetic of a kernel of matrix products or convolutions; None where its name does not tell."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, function)), None)
