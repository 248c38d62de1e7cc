"""Flash attention, convolution and the gradients of norms: what these kernels of csrc/kernels compute, emulated on the
host, and that they compile for three targets. `test_kernels.py` has the others."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cudasched.errors import ConfigError, Error
from cudasched.kernels._catalog import KERNELS as KERNELS_BY_NAME
from cudasched.kernels._catalog import Wanted
from cudasched.tune import compile as compilation
from cudasched.tune.compile import compile_source
from cudasched.tune.space import Gpu, Problem, read
from emulated import Builder
from support import PATIENCE_S
from synthetic_spaces import KERNELS


def run(program: Path, *arguments: Any) -> list[float]:
    """The numbers that it prints."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done
    return [float(one) for one in done.stdout.split()]


def a_compiler() -> compilation.Compiler:
    try:
        return compilation.choose()
    except Error as error:
        pytest.skip(str(error))


def compiles(problem: Problem, source: str, places: tuple[int, ...]) -> None:
    for place in places:
        macros = problem.launch(problem.configurations[place]).macros
        made = compile_source(KERNELS / source, macros, problem.gpu.target, a_compiler())
        assert made.image[:4] == b"\x7fELF"


ROWS = {"COLS": 1000, "KERNEL_ROWS": 23, "STREAM_LOADS": 1, "STREAM_STORES": 0, "MIN_BLOCKS": 1, "UNROLL": 1}
ROWS |= {"TYPE": 0, "RMS": 0, "STATISTICS": 0, "GROUP": 2}
NORM_BACKWARD = [
    {"KEEP": 0, "ACCUMULATE": 0, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 2, "VECTOR": 4},
    {"KEEP": 1, "ACCUMULATE": 1, "WARPS_PER_ROW": 2, "ROWS_PER_BLOCK": 3, "VECTOR": 2, "STATISTICS": 1},
    {"KEEP": 2, "ACCUMULATE": 0, "WARPS_PER_ROW": 1, "ROWS_PER_BLOCK": 4, "VECTOR": 8, "STATISTICS": 1, "TYPE": 2},
    {"KEEP": 2, "ACCUMULATE": 1, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 1, "VECTOR": 1, "RMS": 1},
    {"KEEP": 1, "ACCUMULATE": 0, "WARPS_PER_ROW": 4, "ROWS_PER_BLOCK": 2, "VECTOR": 1, "RMS": 1, "COLS": 997},
    {"KEEP": 0, "ACCUMULATE": 1, "WARPS_PER_ROW": 2, "ROWS_PER_BLOCK": 2, "VECTOR": 1, "COLS": 61},
]


@pytest.mark.parametrize("macros", NORM_BACKWARD, ids=lambda one: "-".join(map(str, one.values())))
def test_the_gradients_of_a_norm_are_what_they_should_be(
    build: Builder, macros: dict[str, int], tmp_path: Path
) -> None:
    """Rows that no block divides, columns that no warp divides, groups of blocks that are not whole, any order."""
    program = build("check_norm_backward.cpp", ROWS | macros, tmp_path)
    for blocks in (1, 3, 5):
        dx, sums = run(program, blocks)
        assert max(dx, sums) < (1e-2 if macros.get("TYPE") else 1e-5), blocks


@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
@pytest.mark.parametrize("space", ["layernorm_backward", "rmsnorm_backward"])
def test_the_gradients_of_a_norm_compile_for(space: str, capability: str) -> None:
    problem = read(KERNELS / f"{space}.toml").problem(Gpu("any", capability, 100))
    count = len(problem.configurations)
    assert 500 <= count <= 5000
    compiles(problem, "layernorm_backward.cu", (0, count // 3, count - 1))


def test_the_references_of_the_norms_gradients_are_derivatives() -> None:
    """By differences of the forward references, which need not be right for anything else."""
    np = pytest.importorskip("numpy")
    references = load_references()
    random = np.random.default_rng(1)
    shape = {"rows": 3, "cols": 5}
    given = {name: random.standard_normal(15) for name in ("x", "dy")} | {
        name: random.standard_normal(5) for name in ("weight", "bias")
    }

    def rms(inputs: Mapping[str, Any], _: Any) -> dict[str, Any]:
        x = inputs["x"].reshape(3, 5)
        return {"y": x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * inputs["weight"]}

    for forward, backward, names in (
        (references.layernorm, references.layernorm_backward, ("x", "weight", "bias")),
        (rms, references.rmsnorm_backward, ("x", "weight")),
    ):
        gradients = backward(given, shape)
        for name in names:
            for place in range(given[name].size):
                step = np.zeros(given[name].size)
                step[place] = 1e-6
                ahead = forward(given | {name: given[name] + step}, shape)["y"]
                behind = forward(given | {name: given[name] - step}, shape)["y"]
                difference = ((ahead - behind).ravel() * given["dy"]).sum() / 2e-6
                assert gradients["d" + name].ravel()[place] == pytest.approx(difference, rel=1e-6, abs=1e-8)


def load_references() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("references", KERNELS / "references.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ATTENTION = {"TYPE": 2, "HEAD": 64, "CAUSAL": 0, "ORDER": 0, "RESCALE": 0, "MIN_BLOCKS": 1, "POLYNOMIAL": 0, "LATE": 0}
FLASH = [
    {"TILE_Q": 64, "TILE_K": 32, "WARPS": 4, "STAGES": 1, "QUERIES_IN": 0},
    {"TILE_Q": 64, "TILE_K": 64, "WARPS": 4, "STAGES": 2, "QUERIES_IN": 1, "TYPE": 1, "RESCALE": 1, "CAUSAL": 1},
    {"TILE_Q": 128, "TILE_K": 32, "WARPS": 4, "STAGES": 3, "QUERIES_IN": 2, "TYPE": 1, "CAUSAL": 1},
    {"TILE_Q": 64, "TILE_K": 32, "WARPS": 2, "STAGES": 2, "QUERIES_IN": 0, "HEAD": 128, "ORDER": 1, "CAUSAL": 1},
    {"TILE_Q": 128, "TILE_K": 32, "WARPS": 4, "STAGES": 1, "QUERIES_IN": 1, "TYPE": 1, "RESCALE": 1},
]


@pytest.mark.parametrize("macros", FLASH, ids=lambda one: "-".join(map(str, one.values())))
def test_flash_attention_computes_what_it_should(build: Builder, macros: dict[str, int], tmp_path: Path) -> None:
    """Lengths that no tile divides, several batches and heads at strides, heads that share keys, fewer keys than
    queries and the other way round, none at all; copies that arrive at once and at the last moment."""
    macros = ATTENTION | macros
    program = build("check_flash_attention.cpp", macros, tmp_path)
    for problem in ("2 2 2 70 77", "1 2 1 33 130", "1 1 1 150 20", "1 1 1 5 0"):
        out, lse, conflicts = run(program, *problem.split())
        assert out < (1.5e-2 if macros["TYPE"] == 2 else 2e-3) and lse < 1e-5 and conflicts == 0, problem


HOPPER = [
    {"GROUPS": 1, "TILE_K": 64, "STAGES": 2},
    {"GROUPS": 2, "TILE_K": 96, "STAGES": 3, "HEAD": 128, "TYPE": 1, "CAUSAL": 1, "ORDER": 1},
    {"GROUPS": 3, "TILE_K": 64, "STAGES": 2, "TYPE": 1, "CAUSAL": 1},
    {"GROUPS": 1, "TILE_K": 128, "STAGES": 4, "HEAD": 128, "TYPE": 1},
    {"GROUPS": 4, "TILE_K": 32, "STAGES": 2, "RESCALE": 1, "POLYNOMIAL": 4},
    {"GROUPS": 1, "TILE_K": 48, "STAGES": 3, "TYPE": 1, "RESCALE": 2, "LATE": 1, "CAUSAL": 1},
    {"GROUPS": 2, "TILE_K": 80, "STAGES": 2, "TYPE": 1, "RESCALE": 2, "POLYNOMIAL": 8, "LATE": 1},
    {"GROUPS": 1, "TILE_K": 112, "STAGES": 2, "HEAD": 128, "RESCALE": 1, "POLYNOMIAL": 8, "LATE": 1, "CAUSAL": 1},
    {"GROUPS": 2, "TILE_K": 144, "STAGES": 3, "TYPE": 1, "POLYNOMIAL": 4, "LATE": 1},
    {"GROUPS": 1, "TILE_K": 160, "STAGES": 2, "TYPE": 1, "RESCALE": 2, "POLYNOMIAL": 4, "CAUSAL": 1},
    {"GROUPS": 1, "TILE_K": 176, "STAGES": 2, "HEAD": 128, "RESCALE": 1},
    {"GROUPS": 2, "TILE_K": 192, "STAGES": 2, "TYPE": 1, "RESCALE": 2, "ORDER": 1},
]


def test_an_exponential_by_a_polynomial_is_near_masks_weigh_nothing_and_nan_stays(
    build: Builder, tmp_path: Path
) -> None:
    error, infinite, small, nan = run(build("check_exponential.cpp", {"TYPE": 2}, tmp_path))
    assert error < 3e-6 and (infinite, small) == (0, 0) and nan != nan


@pytest.mark.parametrize("macros", HOPPER, ids=lambda one: "-".join(map(str, one.values())))
def test_flash_attention_of_hopper_computes_what_it_should(
    build: Builder, macros: dict[str, int], tmp_path: Path
) -> None:
    """The same, with products that read shared memory at once and at the last moment."""
    macros = ATTENTION | macros
    program = build("check_flash_attention.cpp", macros | {"HOPPER": 1}, tmp_path)
    for problem in ("2 2 2 70 77", "1 2 1 33 300", "1 1 1 150 20", "1 1 1 5 0"):
        out, lse, _ = run(program, *problem.split())
        assert out < (1.5e-2 if macros["TYPE"] == 2 else 2e-3) and lse < 1e-5, problem


@pytest.mark.parametrize("shape", [{}, {"head": 64, "causal": 1}], ids=str)
def test_flash_attention_of_hopper_compiles_for_it_alone(shape: dict[str, int]) -> None:
    space = read(KERNELS / "flash_attention_sm90.toml")
    problem = space.problem(Gpu("any", "9.0", 132), shape)
    count = len(problem.configurations)
    assert 1000 <= count <= 5000
    compiles(problem, "flash_attention_sm90.cu", (0, count // 3, count // 2, count - 1))
    assert [one.name for one in space.arguments] == [
        one.name for one in read(KERNELS / "flash_attention.toml").arguments
    ]
    with pytest.raises(ConfigError, match="capability"):
        _ = space.problem(Gpu("any", "12.0", 100), shape).configurations


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("shape", [{}, {"head": 64, "causal": 1}], ids=str)
def test_flash_attention_compiles_for(shape: dict[str, int], capability: str) -> None:
    problem = read(KERNELS / "flash_attention.toml").problem(Gpu("any", capability, 100), shape)
    count = len(problem.configurations)
    assert 200 <= count <= 5000
    compiles(problem, "flash_attention.cu", (0, count // 2))


def test_the_reference_of_attention_agrees_with_the_definition() -> None:
    np = pytest.importorskip("numpy")
    random = np.random.default_rng(1)
    shape = {"batches": 2, "heads": 4, "queries": 5, "keys": 7, "head": 16, "group": 2, "causal": 1}
    q, k, v = random.standard_normal((2, 4, 5, 16)), random.standard_normal((2, 2, 7, 16)), random.random((2, 2, 7, 16))
    found = load_references().flash_attention({"q": q.ravel(), "k": k.ravel(), "v": v.ravel()}, shape)
    for batch, head, row in np.ndindex(2, 4, 5):
        scores = np.exp([q[batch, head, row] @ k[batch, head // 2, key] / 4 for key in range(row + 1)])
        wanted = sum(scores[key] * v[batch, head // 2, key] for key in range(row + 1)) / scores.sum()
        assert found["out"][batch, head, row] == pytest.approx(wanted)
        assert found["lse"][batch, head, row] == pytest.approx(np.log(scores.sum()))


IMAGES = {"TYPE": 1, "TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "WARPS_M": 2, "WARPS_N": 2, "STAGES": 2, "SPLIT_K": 1}
IMAGES |= {"ORDER": 0, "CHUNK": 8, "MIN_BLOCKS": 1}
SAME, STRIDED, SMALL = "2 9 11 24 40 3 3 1 1 1 1", "1 13 10 8 20 3 5 2 3 2 0", "1 7 7 16 8 1 1 1 0 1 0"
ODD = "1 17 14 3 20 7 7 2 3 1 1"
UNEVEN = "1 9 7 8 21 3 3 1 1 1 1"
CONVOLUTIONS: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"TYPE": 2, "TILE_N": 32, "WARPS_N": 1}, (SAME, STRIDED, SMALL)),
    ({"TILE_K": 64, "STAGES": 3, "SPLIT_K": 3, "ORDER": 1}, (SAME, STRIDED, SMALL)),
    ({"TILE_M": 128, "TILE_N": 32, "WARPS_M": 4, "WARPS_N": 1, "STAGES": 4, "SPLIT_K": 2}, (SAME, SMALL)),
    ({"CHUNK": 1, "ORDER": 1}, (ODD, "2 6 6 5 9 3 3 1 1 1 1")),
]
HOPPER_CONVOLUTIONS: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"GROUPS": 1, "PARTS": 2, "TILE_N": 64, "STAGES": 3, "SPLIT_K": 2, "ORDER": 1}, (SAME, STRIDED, SMALL)),
    ({"GROUPS": 2, "PARTS": 1, "TILE_N": 128, "STAGES": 4, "TYPE": 2, "CHUNK": 1}, (SAME, ODD)),
    ({"GROUPS": 2, "PARTS": 1, "TILE_N": 256, "STAGES": 3}, (SAME,)),
    ({"GROUPS": 1, "PARTS": 3, "TILE_N": 64, "STAGES": 2, "PENDING": 0, "BY_L1": 1}, (SAME, STRIDED)),
    ({"GROUPS": 1, "PARTS": 1, "TILE_N": 64, "STAGES": 4, "PENDING": 0, "LATE": 0, "OUT_BY_SHARED": 0}, (SAME, SMALL)),
    (
        {"GROUPS": 2, "PARTS": 1, "TILE_N": 64, "STAGES": 3, "LATE": 0, "OUT_BY_SHARED": 0, "SPLIT_K": 2},
        (SAME, UNEVEN),
    ),
]


@pytest.mark.parametrize(("macros", "problems"), CONVOLUTIONS, ids=lambda one: "-".join(map(str, one)))
def test_a_convolution_is_what_it_should_be(
    build: Builder, macros: dict[str, int], problems: tuple[str, ...], tmp_path: Path
) -> None:
    """Padding, strides and dilation, other ones in y and x; pixels, filters and depths that no tile divides; channels
    that are no multiple of eight; more blocks for a tile than it has steps."""
    program = build("check_conv2d.cpp", IMAGES | macros, tmp_path)
    for problem in problems:
        error, conflicts = run(program, *problem.split())
        assert error < (8e-3 if macros.get("TYPE") == 2 else 1e-3) and conflicts == 0, problem


@pytest.mark.parametrize(("macros", "problems"), HOPPER_CONVOLUTIONS, ids=lambda one: "-".join(map(str, one)))
def test_a_convolution_of_hopper_is_what_it_should_be(
    build: Builder, macros: dict[str, int], problems: tuple[str, ...], tmp_path: Path
) -> None:
    """The same, with products that read shared memory at once and at the last moment."""
    given = {"HOPPER": 1, "TYPE": 1, "SPLIT_K": 1, "ORDER": 0, "CHUNK": 8, "MIN_BLOCKS": 1}
    given |= {"PENDING": 1, "LATE": 1, "BY_L1": 0, "OUT_BY_SHARED": 1} | macros
    program = build("check_conv2d.cpp", given, tmp_path)
    for problem in problems:
        error, conflicts = run(program, *problem.split())
        assert error < (8e-3 if given["TYPE"] == 2 else 1e-3) and conflicts == 0, problem


def test_a_convolution_of_hopper_compiles_for_it_alone() -> None:
    space = read(KERNELS / "conv2d_sm90.toml")
    problem = space.problem(Gpu("any", "9.0", 132))
    count = len(problem.configurations)
    assert 1000 <= count <= 5000
    compiles(problem, "conv2d_sm90.cu", (0, count // 3, count - 1))
    assert [one.name for one in space.arguments] == [one.name for one in read(KERNELS / "conv2d.toml").arguments]
    with pytest.raises(ConfigError, match="capability"):
        _ = space.problem(Gpu("any", "8.0", 100)).configurations


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("channels", [128, 3])
def test_a_convolution_compiles_for(channels: int, capability: str) -> None:
    problem = read(KERNELS / "conv2d.toml").problem(Gpu("any", capability, 100), {"channels": channels})
    count = len(problem.configurations)
    assert 200 <= count <= 5000
    compiles(problem, "conv2d.cu", (0, count // 2))


def test_the_layers_that_the_space_of_conv2d_names_have_configurations() -> None:
    text = (KERNELS / "conv2d.toml").read_text()
    layers = [line.split("--shape ")[1].split("  ")[0] for line in text.splitlines() if line.startswith("#   --shape")]
    assert len(layers) == 5
    space = read(KERNELS / "conv2d.toml")
    for layer in layers:
        shape = {name: int(value) for name, value in (item.split("=") for item in layer.split())}
        problem = space.problem(Gpu("any", "9.0", 132), shape)
        assert len(problem.configurations) > 200
        assert problem.scalars()["padding_y"] == (problem.shape["rows"] - 1) // 2


def test_the_reference_of_convolution_agrees_with_the_definition() -> None:
    np = pytest.importorskip("numpy")
    random = np.random.default_rng(1)
    shape = {"images": 2, "height": 9, "width": 8, "channels": 3, "filters": 4, "rows": 3, "columns": 2}
    shape |= {"out_height": 4, "out_width": 4, "stride": 2, "dilation": 2}
    x, w, bias = random.random((2, 9, 8, 3)), random.random((4, 3, 2, 3)), random.random(4)
    found = load_references().conv2d({"x": x.ravel(), "w": w.ravel(), "bias": bias}, shape)["y"]
    pad_y, pad_x = (6 + 4 + 2 - 9) // 2, (6 + 2 + 2 - 8) // 2
    for image, p, q, f in np.ndindex(2, 4, 4, 4):
        wanted = bias[f]
        for row, column in np.ndindex(3, 2):
            y, z = p * 2 + row * 2 - pad_y, q * 2 + column * 2 - pad_x
            if 0 <= y < 9 and 0 <= z < 8:
                wanted += x[image, y, z] @ w[f, row, column]
        assert found[image, p, q, f] == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["flash_attention_sm90", "conv2d_sm90"])
def test_each_parameter_of_the_kernels_for_hopper_changes_the_code(name: str) -> None:
    """Else the tuner would measure the same kernel twice."""
    gpu = Gpu("any", "9.0", 132)
    space = read(KERNELS / f"{name}.toml")
    shape = (
        {"filters": 256} if name == "conv2d_sm90" else {}
    )  # with more tiles of filters than one there are two orders
    problem = space.problem(gpu, shape)
    default = KERNELS_BY_NAME[name].default(Wanted({**space.shape, **shape}, "bfloat16", gpu))
    assert not problem.refusal(default)

    @functools.cache
    def code_of(macros: tuple[tuple[str, str], ...]) -> bytes:
        return compile_source(KERNELS / f"{name}.cu", macros, gpu.target, compiler).image

    compiler = a_compiler()
    for parameter, values in space.parameters.items():
        pair = next(
            (one, {**one, parameter: other})
            for one in (default, *problem.configurations)
            for other in values
            if other != one[parameter] and not problem.refusal({**one, parameter: other})
        )
        assert code_of(problem.launch(pair[0]).macros) != code_of(problem.launch(pair[1]).macros), pair


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        ("layernorm_backward", {"cols": 33, "rows": 1}),
        ("rmsnorm_backward", {"cols": 5, "rows": 3}),
        ("flash_attention", {"keys": 1, "queries": 1}),
        ("flash_attention_sm90", {"keys": 1, "queries": 1}),
        ("conv2d", {"filters": 1, "channels": 1, "images": 1}),
        ("conv2d_sm90", {"filters": 1, "channels": 1, "images": 1}),
    ],
)
def test_small_shapes_have_configurations(space: str, shape: dict[str, int]) -> None:
    problem = read(KERNELS / f"{space}.toml").problem(Gpu("any", "9.0", 132), shape)
    assert problem.configurations
    assert all(problem.launch(one).blocks >= 1 for one in problem.configurations)
