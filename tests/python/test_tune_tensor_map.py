"""Tensor maps as arguments of a kernel that is tuned: what a space says of them, and what the driver is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from axpy_space import ARGUMENTS, CHECK, REFERENCE
from cudasched.errors import ConfigError
from cudasched.tune import read
from cudasched.tune.space import Gpu, Space
from cudasched.tune.warm import _words
from cudasched.tune.workers import Live, Request
from support import PATIENCE_S

GPU = Gpu("simulated", "9.0", 132)
IMAGE = """cudasched-sim 1
kernel axpy params=8,8,4,4,128 regs=32 threads_max=1024 block_us=2 effect=axpy
"""
SPACE = f"""
kernel = "axpy"
source = "axpy.cubin"
[shape]
rows = 16
cols = 64
[parameters]
ROWS = [8, 512]
[launch]
block = 256
grid = "ceil_div(rows * cols, 256)"
{ARGUMENTS.replace('"n"', '"rows * cols"')}
[[arguments]]
name = "map_x"
role = "tensor_map"
of = "x"
dims = ["cols", "rows"]
box = [32, "ROWS"]
swizzle = 128
{CHECK}"""


def test_sizes_and_boxes_are_of_the_configuration() -> None:
    problem = Space(SPACE, Path("axpy.toml")).problem(GPU, {"rows": 32})
    seen = problem.tensor_maps({"ROWS": 8})["map_x"]
    assert (seen.of, seen.type, seen.dims, seen.box, seen.swizzle) == ("x", "float32", (64, 32), (32, 8), 128)
    assert "map_x" not in problem.sizes() and "map_x" not in problem.scalars()


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('of = "x"', 'of = "z"', "map of 'z', which is no array; there are y, x"),
        ('of = "x"', 'of = "count"', "which is no array"),
        ('of = "x"', "", "which is no array"),
        ('dims = ["cols", "rows"]', "", "dims is a list of one to five"),
        ('box = [32, "ROWS"]', "box = [32]", "2 dims and 1 sizes of the box"),
        ('box = [32, "ROWS"]', 'box = [32, "ROW"]', "not known"),
        ("swizzle = 128", "swizzle = 100", "swizzle is one of 0, 32, 64, 128"),
        ('name = "a"', 'name = "a"\nbox = [1]', "box is not known"),
    ],
)
def test_a_map_that_is_none_is_refused(old: str, new: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Space(SPACE.replace(old, new, 1), Path("axpy.toml"))


def test_the_predictor_takes_a_map_for_addresses() -> None:
    words, pointers = _words(Space(SPACE, Path("axpy.toml")).problem(GPU))
    assert len(words) == (64 + 128) // 4 and set(range(16, 48)) <= set(pointers)


@pytest.fixture
def axpy(tmp_path: Path, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "1")
    (tmp_path / "axpy.cubin").write_text(IMAGE)
    (tmp_path / "axpy.toml").write_text(SPACE)
    (tmp_path / "reference.py").write_text(REFERENCE)
    return tmp_path


def test_a_kernel_with_a_map_runs_and_a_box_that_tma_does_not_take_costs_its_configuration_alone(axpy: Path) -> None:
    chosen = read(axpy / "axpy.toml")
    assert chosen.source is not None
    with Live(chosen, chosen.source, processes=1) as live:
        requests = [Request(i, 3) for i in range(len(live.problem.configurations))]
        found = {live.problem.configurations[request.index]["ROWS"]: made for request, made in live.measure(requests)}
    assert found[8].status == "ok", found
    assert found[512].status == "launch_error" and "the tensor map of x, box (32, 512)" in found[512].message


ASK = """
import ctypes, struct, sys
from cudasched.tune._driver import Arguments, Device
from cudasched.tune.space import TensorMap
made = Device().tensor_map(0x7000, TensorMap("x", "bfloat16", (72, 20, 3), (64, 8, 1), 128))
given = Arguments([("int32", 7), ("tensor_map", made)])
table = ctypes.cast(given.address, ctypes.POINTER(ctypes.c_void_p))
print(*struct.unpack("16Q", made), table[1] % 64, ctypes.string_at(table[1], 128) == made)
"""


@pytest.mark.usefixtures("axpy")
def test_the_driver_is_given_address_sizes_and_box_and_the_kernel_an_aligned_copy() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    *words, aligned, same = done.stdout.split()
    bfloat16 = 9
    assert [int(word) for word in words[:11]] == [0x7000, bfloat16, 3, 72, 20, 3, 0, 0, 64, 8, 1]
    assert (aligned, same) == ("0", "True")
