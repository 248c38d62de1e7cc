"""Compiles configurations of the Triton twins for GPUs that are not here; a process of its own, as Triton caches."""

from __future__ import annotations

import random
import sys
from typing import Any

import triton
from cudasched.kernels import _triton_kernels as kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTEGERS = ("rows", "queries", "keys", "heads", "group")


def kind_of(name: str, element: str) -> str:
    """Of an argument, as Triton writes it."""
    if name in ("epsilon", "scale"):
        return "fp32"
    if name == "lse":
        return "*fp32"
    return "i32" if name in INTEGERS or "_" in name else f"*{element}"


def build(kernel: Any, chosen: Any, constants: dict[str, Any], element: str, capability: int) -> None:
    function = kernel.fn
    values = {**constants, **chosen.kwargs}
    signature = {name: "constexpr" if name in values else kind_of(name, element) for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"][:4] == b"\x7fELF"


if __name__ == "__main__":
    generator = random.Random(1)
    for kernel, constants, element, capability in (
        (kernels.layer_norm, {"COLS": 1000}, "fp32", 80),
        (kernels.layer_norm, {"COLS": 20000}, "bf16", 120),
        (kernels.flash_attention, {"HEAD": 64, "CAUSAL": True}, "fp16", 80),
        (kernels.flash_attention, {"HEAD": 128, "CAUSAL": False}, "bf16", 90),
    ):
        build(kernel, generator.choice(kernel.configs), constants, element, capability)
    print("compiled")
    sys.stdout.flush()
