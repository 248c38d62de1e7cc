"""The tensor-core instructions and matrix products of csrc/kernels: right on the host, emulated, and compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cudasched.errors import ConfigError
from cudasched.tune.compile import compile_source
from cudasched.tune.space import Gpu, read
from emulated import EMULATED, Builder
from support import PATIENCE_S
from synthetic_spaces import KERNELS
from test_kernels import a_compiler

FP16, BF16, TF32, INT8 = 1, 2, 3, 4
#: Of the rounding of C, or of fp32 sums of a few hundred products; int8 is exact.
BOUNDS = {FP16: 2**-11, BF16: 2**-8, TF32: 1e-5, INT8: 0.0}


def product(
    kind: int, sizes: tuple[int, ...], tile: tuple[int, ...], warps: tuple[int, ...], **more: int
) -> dict[str, int]:
    names = ("SIZE_M", "SIZE_N", "SIZE_K", "TILE_M", "TILE_N", "TILE_K", "WARPS_M", "WARPS_N")
    whole = all(size % part == 0 for size, part in zip(sizes, tile, strict=True))
    fixed = {"TYPE": kind, "WIDE_OUTPUT": 0, "STAGES": 3, "GROUP": 2, "SPLIT_K": 1, "COPY_BYTES": 16, "MIN_BLOCKS": 1}
    return fixed | dict(zip(names, (*sizes, *tile, *warps), strict=True)) | {"ALIGNED": int(whole)} | more


PRODUCTS = [
    product(BF16, (128, 128, 128), (64, 64, 32), (2, 2)),
    product(BF16, (128, 128, 256), (32, 128, 64), (1, 4), STAGES=2, SPLIT_K=3),
    product(BF16, (128, 64, 96), (64, 32, 32), (4, 2), STAGES=5, GROUP=1),
    product(BF16, (100, 90, 70), (64, 64, 64), (2, 2), WIDE_OUTPUT=1, COPY_BYTES=4),
    product(BF16, (33, 264, 24), (32, 256, 128), (1, 4), STAGES=2),
    product(FP16, (100, 104, 200), (32, 128, 64), (1, 4), STAGES=4, SPLIT_K=3),
    product(FP16, (96, 64, 64), (32, 32, 32), (1, 1), WIDE_OUTPUT=1),
    product(TF32, (64, 128, 128), (64, 32, 32), (2, 2), SPLIT_K=2),
    product(TF32, (70, 93, 101), (32, 64, 16), (1, 2), STAGES=2, COPY_BYTES=4),
    product(INT8, (64, 256, 128), (64, 256, 64), (2, 4), STAGES=2),
    product(INT8, (40, 140, 300), (32, 128, 128), (1, 4), SPLIT_K=3, COPY_BYTES=4),
]


def warpgroups(
    kind: int, sizes: tuple[int, ...], tile: tuple[int, ...], consumers: int, blocks: int, **more: int
) -> dict[str, int]:
    names = ("SIZE_M", "SIZE_N", "SIZE_K", "TILE_M", "TILE_N", "TILE_K")
    fixed = {"TYPE": kind, "CONSUMERS": consumers, "BLOCKS": blocks, "STAGES": 3, "CLUSTER": 1, "GROUP": 2}
    return fixed | dict(zip(names, (*sizes, *tile), strict=True)) | {"STORE_BOX": 1} | more


WARPGROUPS = [
    warpgroups(BF16, (128, 64, 128), (64, 64, 64), 1, 2, STORE_BOX=0),
    warpgroups(BF16, (256, 128, 192), (128, 128, 64), 2, 3),
    warpgroups(BF16, (200, 200, 136), (64, 64, 64), 1, 4),
    warpgroups(FP16, (200, 200, 136), (64, 128, 64), 1, 2, CLUSTER=2, STAGES=2),
    warpgroups(BF16, (320, 136, 264), (128, 128, 128), 1, 4, CLUSTER=2, STAGES=2, STORE_BOX=0),
    warpgroups(BF16, (256, 256, 200), (128, 256, 64), 2, 2, CLUSTER=2, GROUP=8),
    warpgroups(FP16, (200, 192, 200), (192, 192, 64), 3, 1, STAGES=2),
]


def simt(sizes: tuple[int, ...], tile: tuple[int, ...], thread: tuple[int, int], **more: int) -> dict[str, int]:
    names = ("SIZE_M", "SIZE_N", "SIZE_K", "TILE_M", "TILE_N", "TILE_K", "THREAD_M", "THREAD_N")
    whole = all(size % part == 0 for size, part in zip(sizes, tile, strict=True))
    fixed = {"LANES_N": 8, "BUFFERS": 3, "GROUP": 2, "SPLIT_K": 1, "MIN_BLOCKS": 1, "ALIGNED": int(whole)}
    return fixed | dict(zip(names, (*sizes, *tile, *thread), strict=True)) | more


SIMT = [
    simt((128, 128, 64), (128, 128, 16), (8, 8)),
    simt((128, 128, 64), (128, 128, 16), (8, 8), LANES_N=16, BUFFERS=2),
    simt((128, 128, 192), (64, 64, 16), (4, 8), BUFFERS=4, SPLIT_K=3),
    simt((100, 92, 36), (32, 64, 8), (4, 8), LANES_N=4, SPLIT_K=2),
    simt((100, 92, 132), (64, 64, 16), (8, 8), LANES_N=4, BUFFERS=4, SPLIT_K=2),
    simt((70, 68, 20), (64, 64, 32), (8, 4), LANES_N=16, BUFFERS=2),
    simt((70, 68, 20), (64, 64, 32), (8, 4), LANES_N=16),
]


def test_the_emulated_instructions_do_what_their_documentation_says(build: Builder, tmp_path: Path) -> None:
    program = build("check_mma.cpp", {}, tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_emulated_instructions_of_hopper_do_what_their_documentation_says(build: Builder, tmp_path: Path) -> None:
    program = build("check_hopper.cpp", {}, tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_the_instructions_compile(target: str) -> None:
    probe = EMULATED / "probe_mma.cu"
    made = compile_source(probe, (), target, a_compiler(), [f"-I{KERNELS}"])
    assert made.image[:4] == b"\x7fELF"


@pytest.mark.parametrize("macros", PRODUCTS, ids=lambda macros: "-".join(map(str, macros.values())))
def test_a_product_by_mma_is_right(build: Builder, macros: dict[str, int], tmp_path: Path) -> None:
    """Blocks and copies early and late, tiles that are not whole; no bank conflict, and nothing is written beyond C."""
    program = build("check_gemm.cpp", macros | {"KERNEL_SOURCE": '"gemm_mma.cu"'}, tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run
    error, conflicts = run.stdout.split()
    bound = 1e-5 if macros["WIDE_OUTPUT"] else BOUNDS[macros["TYPE"]]
    assert float(error) <= bound and int(conflicts) == 0, run.stdout


@pytest.mark.parametrize("macros", SIMT, ids=lambda macros: "-".join(map(str, macros.values())))
def test_a_product_by_multipliers_is_right(build: Builder, macros: dict[str, int], tmp_path: Path) -> None:
    """By registers and by copies early and late, lanes in different shapes, tiles that are not whole."""
    program = build("check.cpp", macros | {"KERNEL_SOURCE": '"gemm.cu"'}, tmp_path)
    run = subprocess.run([str(program), "3"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0 and float(run.stdout) < 2e-5, run


@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("space", ["gemm_mma", "gemm_mma_tf32", "gemm_mma_int8"])
def test_a_product_compiles_for(space: str, capability: str) -> None:
    problem = read(KERNELS / f"{space}.toml").problem(Gpu("any", capability, 100))
    count = len(problem.configurations)
    assert 900 <= count <= 5000
    for place in (count // 3, count - 1):
        macros = problem.launch(problem.configurations[place]).macros
        made = compile_source(KERNELS / "gemm_mma.cu", macros, problem.gpu.target, a_compiler())
        assert made.image[:4] == b"\x7fELF" and not made.log, made.log


@pytest.mark.parametrize("macros", WARPGROUPS, ids=lambda macros: "-".join(map(str, macros.values())))
def test_a_product_by_warpgroups_is_right(build: Builder, macros: dict[str, int], tmp_path: Path) -> None:
    """Blocks, warps, loads and products early and late; fewer blocks than tiles, tiles that are not whole, clusters."""
    program = build("check_gemm_sm90.cpp", macros, tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run
    error, conflicts = run.stdout.split()
    assert float(error) <= BOUNDS[macros["TYPE"]] and int(conflicts) == 0, run.stdout


def test_a_product_by_warpgroups_compiles() -> None:
    problem = read(KERNELS / "gemm_sm90.toml").problem(Gpu("any", "9.0", 132))
    found = problem.configurations
    assert 1000 <= len(found) <= 5000
    wide = {"TILE_M": 128, "TILE_N": 256, "CONSUMERS": 2, "CLUSTER": 2, "STORE_BOX": 0}
    chosen = [found[len(found) // 3], found[-1], next(one for one in found if one.items() >= wide.items())]
    for configuration in chosen:
        macros = problem.launch(configuration).macros
        made = compile_source(KERNELS / "gemm_sm90.cu", macros, problem.gpu.target, a_compiler())
        assert made.image[:4] == b"\x7fELF" and not made.log, made.log


def test_a_product_by_warpgroups_is_for_hopper_alone() -> None:
    with pytest.raises(ConfigError, match=r"capability == 9\.0"):
        assert read(KERNELS / "gemm_sm90.toml").problem(Gpu("any", "12.0", 188)).configurations
