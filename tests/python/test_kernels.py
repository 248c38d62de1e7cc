"""The kernels of csrc/kernels: they compute what they should (on the host, emulated), and compile for three targets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cudasched.errors import Error
from cudasched.tune import compile as compilation
from cudasched.tune.compile import CompileError, compile_source
from cudasched.tune.space import Gpu, read
from emulated import Builder
from support import PATIENCE_S
from synthetic_spaces import KERNELS

ROWS = {"COLS": 1000, "KERNEL_ROWS": 7, "STREAM_LOADS": 1, "STREAM_STORES": 0, "MIN_BLOCKS": 1, "UNROLL": 2}
BF16 = ROWS | {"TYPE": 2}
RMS = ROWS | {"RMS": 1}
ODD = {"SIZE_M": 100, "SIZE_N": 92, "SIZE_K": 36, "ALIGNED": 0}
WHOLE = {"SIZE_M": 128, "SIZE_N": 128, "SIZE_K": 64, "ALIGNED": 1}
CASES = [
    ("layernorm", ROWS | {"KEEP": 0, "STATISTICS": 1, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 2, "VECTOR": 4}, 1e-5),
    ("layernorm", ROWS | {"KEEP": 1, "STATISTICS": 0, "WARPS_PER_ROW": 1, "ROWS_PER_BLOCK": 2, "VECTOR": 2}, 1e-5),
    (
        "layernorm",
        ROWS | {"KEEP": 2, "STATISTICS": 0, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 2, "VECTOR": 8, "TYPE": 2},
        1e-2,
    ),
    (
        "layernorm",
        ROWS | {"KEEP": 1, "STATISTICS": 0, "RMS": 1, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 1, "VECTOR": 4},
        1e-5,
    ),
    ("softmax", ROWS | {"KEEP": 0, "ONLINE": 1, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 2, "VECTOR": 4}, 1e-5),
    ("softmax", ROWS | {"KEEP": 1, "ONLINE": 0, "WARPS_PER_ROW": 1, "ROWS_PER_BLOCK": 2, "VECTOR": 2}, 1e-5),
    ("softmax", ROWS | {"KEEP": 2, "ONLINE": 1, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 1, "VECTOR": 8, "TYPE": 2}, 1e-2),
    *(
        (
            "gemm",
            sizes
            | {"TILE_M": 32, "TILE_N": 64, "TILE_K": 8, "THREAD_M": 4, "THREAD_N": 8, "MIN_BLOCKS": 1}
            | {"BUFFERS": buffers, "GROUP": 2, "SPLIT_K": split},
            1e-4,
        )
        for sizes, buffers, split in ((WHOLE, 1, 1), (WHOLE, 2, 3), (ODD, 2, 1), (ODD, 1, 2))
    ),
]


@pytest.mark.parametrize(
    ("kernel", "macros", "tolerance"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_kernel_computes_what_it_should(
    build: Builder, kernel: str, macros: dict[str, int], tolerance: float, tmp_path: Path
) -> None:
    """Blocks forwards and backwards, a grid smaller than the rows, rows and tiles that are not whole."""
    program = build("check.cpp", macros | {"KERNEL_SOURCE": f'"{kernel}.cu"'}, tmp_path)
    run = subprocess.run([str(program), "3"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0 and float(run.stdout) < tolerance, run


def a_compiler() -> compilation.Compiler:
    try:
        return compilation.choose()
    except Error as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("kernel", ["layernorm", "softmax", "gemm"])
def test_a_kernel_compiles_for(kernel: str, capability: str) -> None:
    problem = read(KERNELS / f"{kernel}.toml").problem(Gpu("any", capability, 100))
    count = len(problem.configurations)
    for place in (count // 3, count - 1):
        macros = problem.launch(problem.configurations[place]).macros
        made = compile_source(KERNELS / f"{kernel}.cu", macros, problem.gpu.target, a_compiler())
        assert made.image[:4] == b"\x7fELF" and made.seconds > 0


@pytest.mark.parametrize("kind", ["1", "2"])
def test_half_types_compile(kind: str) -> None:
    problem = read(KERNELS / "layernorm.toml").problem(Gpu("any", "9.0", 132))
    macros = dict(problem.launch(problem.configurations[0]).macros) | {"TYPE": kind, "VECTOR": "8"}
    assert compile_source(KERNELS / "layernorm.cu", list(macros.items()), "sm_90a", a_compiler()).image


def test_what_compares_outputs_compiles() -> None:
    compare = Path(compilation.__file__).parent / "compare.cu"
    for target in ("sm_80", "sm_90a", "sm_120a"):
        assert b"compare_bfloat16" in compile_source(compare, (), target, a_compiler()).image


def test_compiling_writes_over_no_object_of_python(tmp_path: Path) -> None:
    """A log of one byte used to go into the b" " that all of the process shares."""
    (tmp_path / "empty.cu").write_text('extern "C" __global__ void nothing() {}\n')
    assert compile_source(tmp_path / "empty.cu", (), "sm_90", a_compiler()).image
    assert bytes([32])[0] == 32


def test_the_log_of_what_does_not_compile_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad() { int x = WIDTH; undeclared(x); }')
    with pytest.raises(CompileError, match="undeclared"):
        compile_source(tmp_path / "bad.cu", [("WIDTH", "4")], "sm_90", a_compiler())
