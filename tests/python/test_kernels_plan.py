"""What a kernel is launched with, what is kept of it on disk, and launches over the simulated driver."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axpy_space import IMAGE, SPACE
from cudasched.errors import DriverError, Error
from cudasched.kernels import KernelError, _cache, _catalog, _choose, _driver, _plan
from cudasched.kernels._catalog import KERNELS
from cudasched.tune import _bench
from cudasched.tune import compile as compilation
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from cudasched.tune.space import Gpu, configuration_key, read
from support import PATIENCE_S, Run

H200 = Gpu("NVIDIA H200", "9.0", 132, 60 << 20)
T4 = Gpu("Tesla T4", "7.5", 40)
A10 = Gpu("NVIDIA A10", "8.6", 72)
IMAGES = ("images", "height", "width", "channels", "filters", "rows", "columns")
SHAPES: dict[str, list[dict[str, int]]] = {
    "rows": [
        *({"rows": 8192, "cols": cols} for cols in (1, 7, 32, 100, 1000, 1024, 4096, 12288, 65536, 1_000_003)),
        {"rows": 1, "cols": 4096},
        {"rows": 2_000_000_000, "cols": 8},
    ],
    "attention": [
        {"batches": 2, "heads": 16, "queries": queries, "keys": keys, "head": head, "group": group, **causal}
        for queries, keys, head, group, causal in (
            (4096, 4096, 128, 1, {}),
            (1, 77, 64, 4, {}),
            (1000, 1000, 64, 1, {"causal": 1}),
            (16384, 16384, 128, 4, {"causal": 1}),
        )
    ],
    "images": [
        {
            **dict(zip(("images", "height", "width", "channels", "filters", "rows", "columns"), sizes, strict=True)),
            **out,
        }
        for *sizes, out in (
            (64, 28, 28, 128, 128, 3, 3, {"out_height": 28, "out_width": 28}),
            (1, 5, 5, 1, 1, 1, 1, {"out_height": 5, "out_width": 5}),
            (64, 224, 224, 3, 64, 7, 7, {"out_height": 112, "out_width": 112, "stride": 2}),
            (2, 7, 9, 8, 24, 3, 3, {"out_height": 5, "out_width": 7, "dilation": 1}),
        )
    ],
    "gemm": [
        *({"m": size, "n": size, "k": size} for size in (4, 64, 1000, 2048, 8192)),
        {"m": 1, "n": 4096, "k": 4},
        {"m": 100_001, "n": 4, "k": 12},
    ],
}


def shapes_of(name: str) -> list[dict[str, int]]:
    sizes = _catalog.variant(name, next(iter(KERNELS[name].types))).shape
    found = SHAPES[
        "gemm" if "k" in sizes else "attention" if "queries" in sizes else "images" if "images" in sizes else "rows"
    ]
    return [one for one in found if all(value <= KERNELS[name].most.get(size, value) for size, value in one.items())]


CASES = [(name, kind) for name, kernel in KERNELS.items() for kind in kernel.types]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything shipped, unless a test says so."""
    monkeypatch.setattr(_choose, "SHIPPED", "of_the_test.json")
    _plan.reset()


def resolved(name: str, kind: str, gpu: Gpu = H200, alignment: int = 16, **shape: int) -> _plan.Resolved:
    return _plan.resolve(KERNELS[name], kind, tuple(sorted(shape.items())), gpu, alignment)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_default_is_a_configuration_that_runs(name: str, kind: str) -> None:
    """For shapes and alignments of all kinds, within what the smallest GPU's blocks may have."""
    for gpu in (H200, A10):
        if KERNELS[name].refusal(gpu):
            continue
        for shape in shapes_of(name):
            for alignment in (16, 4, 2):
                made = resolved(name, kind, gpu, max(alignment, 4 if kind == "float32" else 2), **shape)
                assert made.choice.origin == "default"
                assert set(made.choice.configuration) == set(made.space.parameters), name
                assert 32 <= made.launch.threads <= 1024
                assert made.launch.shared_bytes <= gpu.architecture.max_shared_bytes_per_block


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_default_compiles(name: str, kind: str) -> None:
    try:
        compiler = compilation.choose()
    except Error as error:
        pytest.skip(str(error))
    shapes = shapes_of(name)
    for capability, shape in (("8.0", shapes[3]), ("9.0", shapes[-1]), ("12.0", shapes[1])):
        gpu = Gpu("any", capability, 100)
        if KERNELS[name].refusal(gpu):
            continue
        made = resolved(name, kind, gpu, **shape)
        assert made.space.source is not None
        image = compilation.compile_source(made.space.source, made.launch.macros, gpu.target, compiler).image
        assert image[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", KERNELS)
def test_each_space_has_so_many_configurations_that_a_search_is_worth_its_time(name: str) -> None:
    kind = list(KERNELS[name].types)[-1]
    assert 1000 <= len(_catalog.variant(name, kind).problem(H200).configurations) <= 5000


def test_vectors_are_no_wider_than_the_arrays_are_aligned() -> None:
    vector = lambda **given: resolved("layer_norm", "bfloat16", **given).choice.configuration["VECTOR"]  # noqa: E731
    assert vector(rows=8, cols=1024) == 8
    assert vector(rows=8, cols=1024, alignment=4) == 2
    assert vector(rows=8, cols=1023) == 1
    assert vector(rows=8, cols=1026) == 2


def test_a_type_is_the_macros_and_the_arrays_of_its_space() -> None:
    space = _catalog.variant("rms_norm", "bfloat16")
    assert (space.constants["TYPE"], space.constants["RMS"]) == (2, 1)
    assert {one.type for one in space.arguments if one.role != "scalar"} == {"bfloat16"}
    assert 8 in space.parameters["VECTOR"]
    plain = read(_catalog.sources() / "layernorm.toml")
    assert plain.source is not None and space.source is not None
    assert space.fingerprint(space.source) != plain.fingerprint(plain.source)
    products = read(_catalog.sources() / "gemm.toml")
    variant = _catalog.variant("gemm", "float32")
    assert products.source is not None and variant.source is not None
    # What one of them has measured, both know.
    assert variant.fingerprint(variant.source) == products.fingerprint(products.source)
    same = _catalog.variant("layer_norm", "float32")
    assert [one.text for one in same.constraints] == [one.text for one in plain.constraints]


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_right_and_rounded_to_the_type_passes_the_check_and_what_is_not_fails(name: str) -> None:
    for kind in KERNELS[name].types:
        space = _catalog.variant(name, kind)
        assert space.reference is not None
        small = {size: min(value, 16) for size, value in space.shape.items()}
        if "head" in small:
            small |= {"head": 64, "causal": 1}
        if "rows" in small and "columns" in small:
            small |= {"rows": 1, "columns": 1}
        problem = space.problem(H200, small)
        random, sizes = np.random.default_rng(0), problem.sizes()
        inputs = {
            one.name: _bench.widened(
                _bench.rounded(random.standard_normal(sizes[one.name]) + one.mean, one.type), one.type
            )
            for one in space.arguments
            if one.role == "input"
        }
        right = _bench.load_reference(*space.reference)(inputs, dict(problem.shape))
        for one in space.arguments:
            if one.role != "output":
                continue
            values = np.asarray(right[one.name], dtype=np.float64).ravel()
            assert values.size == sizes[one.name]
            made = _bench.widened(_bench.rounded(values, one.type), one.type)
            assert _bench.wrong_values(made, values, space.relative, space.absolute)[0] == 0, (kind, one.name)
            assert _bench.wrong_values(made + 0.25 * values.std() + 1, values, space.relative, space.absolute)[0]


def test_rows_over_their_root_mean_square_are_checked_as_such() -> None:
    space = _catalog.variant("rms_norm", "float32")
    assert space.reference is not None
    inputs = {"x": np.array([3.0, 4.0, 0.0, 0.0]), "weight": np.array([1.0, 2.0]), "bias": np.array([5.0, 5.0])}
    made = _bench.load_reference(*space.reference)(inputs, {"rows": 2, "cols": 2})["y"]
    np.testing.assert_allclose(made, [[3 / 12.5**0.5, 8 / 12.5**0.5], [0, 0]], rtol=1e-6)


def test_a_variant_as_a_file_is_the_same_to_the_database(tmp_path: Path) -> None:
    made = read(_catalog.variant_file("softmax", "float16", tmp_path))
    variant = _catalog.variant("softmax", "float16")
    assert made.source is not None and variant.source is not None and made.source.parent.parent == tmp_path
    assert made.fingerprint(made.source) == variant.fingerprint(variant.source)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "gpu", "said"),
    [
        ("softmax", "float32", {"rows": 4, "cols": 8}, T4, "softmax needs .* 8.0 or later; Tesla T4 has 7.5"),
        ("softmax", "float64", {"rows": 4, "cols": 8}, H200, "softmax takes float32 and .*, not float64"),
        ("softmax", "float32", {"rows": 4, "columns": 8}, H200, "the shape has no columns"),
        ("softmax", "float32", {"rows": 4, "cols": "8"}, H200, "cols of a shape is a number over 0, not '8'"),
        ("softmax", "float32", {"rows": 1 << 31, "cols": 8}, H200, "argument rows: 2147483648 is no int32"),
        ("softmax", "float32", {"rows": 4, "cols": 8}, Gpu("New", "42.0", 1), "compute capability 42.0 is not known"),
        ("rms_norm_backward", "float16", {"rows": 4, "cols": 32769}, H200, "takes cols up to 32768, not 32769"),
        ("gemm", "float32", {"m": 1 << 30, "n": 1 << 30, "k": 4}, H200, "a grid of"),
    ],
)
def test_what_cannot_be_launched_is_said(name: str, kind: str, shape: dict[str, Any], gpu: Gpu, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        resolved(name, kind, gpu, **shape)


def tuned(database: Path, shape: dict[str, int], time_us: float, samples: int = 5, **changes: Any) -> dict[str, Any]:
    """Puts a configuration into a database as the tuner does."""
    space = _catalog.variant("softmax", "float32")
    assert space.source is not None
    problem = space.problem(H200, shape)
    configuration = {**problem.configurations[0], **changes}
    with Database(database) as opened:
        key = Key.of(problem, space.fingerprint(space.source))
        opened.put(key, configuration, Measurement("ok", samples_us=(time_us,) * samples))
    return configuration


def database_of(home: Path) -> Path:
    return home / ".cache" / "cudasched" / "tune.sqlite"


def test_the_users_database_is_asked_first(private_home: Path) -> None:
    shape = {"rows": 8192, "cols": 4096}
    tuned(database_of(private_home), shape, 30.0, ROWS_PER_BLOCK=2)
    best = tuned(database_of(private_home), shape, 20.0, ROWS_PER_BLOCK=4)
    tuned(database_of(private_home), shape, 10.0, samples=1, ROWS_PER_BLOCK=1, VECTOR=2)  # hardly measured
    made = resolved("softmax", "float32", **shape)
    assert (made.choice.configuration, made.choice.origin) == (best, "database")
    assert resolved("softmax", "float16", **shape).choice.origin == "default"
    assert resolved("softmax", "float32", A10, **shape).choice.origin == "default"


def test_a_near_shape_lends_its_configuration_where_that_is_one_of_this_shape(private_home: Path) -> None:
    best = tuned(database_of(private_home), {"rows": 8192, "cols": 4096}, 20.0)
    near = resolved("softmax", "float32", rows=4096, cols=8192)
    assert (near.choice.configuration, near.choice.origin) == (best, "nearest")
    assert resolved("softmax", "float32", rows=4096, cols=1 << 20).choice.origin == "default"  # far away
    odd = resolved("softmax", "float32", rows=8192, cols=4098).choice
    assert odd.origin == ("nearest" if best["VECTOR"] in (1, 2) else "default")
    assert resolved("softmax", "float32", alignment=4, rows=8192, cols=4095).choice.configuration["VECTOR"] == 1


def test_a_configuration_of_wide_vectors_is_not_lent_to_arrays_that_are_not_aligned(private_home: Path) -> None:
    shape = {"rows": 8192, "cols": 4096}
    tuned(database_of(private_home), shape, 20.0, VECTOR=4)
    assert resolved("softmax", "float32", **shape).choice.origin == "database"
    assert resolved("softmax", "float32", alignment=8, **shape).choice.origin == "default"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of this test's own, whose best.json may be written."""
    directory = tmp_path / "sources"
    directory.mkdir()
    for path in _catalog.sources().iterdir():
        if path.is_file():
            (directory / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(_catalog, "sources", lambda: directory)
    monkeypatch.setattr(_choose, "sources", lambda: directory)
    return directory / _choose.SHIPPED


def test_what_is_shipped_comes_after_the_users_own_and_holds_for_gpus_alike(shipped: Path, private_home: Path) -> None:
    shape = {"rows": 8192, "cols": 4096}
    configuration = dict(_catalog.variant("softmax", "float32").problem(H200, shape).configurations[5])
    entry = _choose.shipped_entry(
        "softmax", "float32", H200, "cols=4096,rows=8192", configuration_key(configuration), 12.3456
    )
    shipped.write_text(json.dumps({"version": 1, "best": [entry, {"kernel": 3}, "text"]}))
    _plan.reset()
    for gpu in (H200, Gpu("NVIDIA H100 80GB HBM3", "9.0", 132)):
        made = resolved("softmax", "float32", gpu, **shape).choice
        assert (made.configuration, made.origin) == (configuration, "shipped")
    assert resolved("softmax", "float32", A10, **shape).choice.origin == "default"
    tuned(database_of(private_home), shape, 20.0)
    _plan.reset()
    assert resolved("softmax", "float32", **shape).choice.origin == "database"


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 2, "best": []}', '{"version": 1}', "[]", '{"version":1,"best":[{}]}']
)
def test_a_shipped_file_that_cannot_be_used_is_passed_over(shipped: Path, text: str) -> None:
    shipped.write_text(text)
    _plan.reset()
    assert resolved("softmax", "float32", rows=8192, cols=4096).choice.origin == "default"


def test_what_is_shipped_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose, "SHIPPED", "best.json")
    entries = _choose._shipped(_catalog.sources() / _choose.SHIPPED)
    assert entries
    for entry in entries:
        kernel, kind = entry["kernel"], entry["type"]
        gpu = Gpu(entry["gpu"], entry["capability"], 132, 60 << 20)
        made = resolved(kernel, kind, gpu, **entry["shape"])
        assert (made.choice.configuration, made.choice.origin) == (entry["configuration"], "shipped"), entry


@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_a_database_that_cannot_be_read_is_passed_over(private_home: Path, content: bytes | None) -> None:
    path = database_of(private_home)
    path.parent.mkdir(parents=True)
    path.mkdir() if content is None else path.write_bytes(content)
    assert resolved("softmax", "float32", rows=8192, cols=4096).choice.origin == "default"


def test_sizes_that_are_not_given_are_the_spaces() -> None:
    for gpu in (H200, A10):
        part, whole = (resolved("softmax", "float32", gpu, **shape) for shape in ({}, {"rows": 8192, "cols": 4096}))
        assert part.choice == whole.choice and part.launch == whole.launch


def test_an_image_is_made_once_and_again_where_its_file_is_damaged(tmp_path: Path) -> None:
    images, made = _cache.Images(tmp_path / "cache"), []

    def make() -> bytes:
        made.append(1)
        return b"image" * 100

    assert [images.get("key", make) for _ in range(3)] == [b"image" * 100] * 3 and len(made) == 1
    (file,) = (tmp_path / "cache").iterdir()
    for damaged in (b"", b"x" * 10, file.read_bytes()[:-1], file.read_bytes()[::-1]):
        file.write_bytes(damaged)
        assert images.get("key", make) == b"image" * 100
    assert len(made) == 5 and [one.name for one in (tmp_path / "cache").iterdir()] == ["key.cubin"]


def test_a_cache_that_cannot_be_written_is_gone_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path in (None, tmp_path / "file" / "below", Path("/proc/nowhere")):
        assert _cache.Images(path).get("key", lambda: b"image") == b"image"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert _cache.Images(tmp_path / "full").get("key", lambda: b"image") == b"image"
    assert list((tmp_path / "full").iterdir()) == []
    monkeypatch.setenv("HOME", "")
    assert _cache.directory() is None
    assert resolved("softmax", "float32", rows=4, cols=64).choice.origin == "default"


def test_images_that_another_user_could_have_put_there_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    images = _cache.Images(path)
    assert images.get("key", lambda: b"planted") == b"planted"
    kept = (path / "key.cubin").read_bytes()
    for which, mode in ((path / "key.cubin", 0o620), (path, 0o777), (path, 0o770)):
        before = which.stat().st_mode
        which.chmod(mode)
        assert images.get("key", lambda: b"made anew") == b"made anew"
        which.chmod(before)
        (path / "key.cubin").write_bytes(kept)
    assert images.get("key", lambda: b"made anew") == b"planted"
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid != 0:  # the administrator's are taken
        assert images.get("key", lambda: b"made anew") == b"made anew"
        assert (path / "key.cubin").read_bytes() == kept
    monkeypatch.setattr(_cache, "ours", lambda seen: not stat.S_ISREG(seen.st_mode))
    assert images.get("key", lambda: b"of this user") == b"of this user"


def test_the_oldest_images_go_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "_MOST_FILES", 3)
    images = _cache.Images(tmp_path / "cache")
    for place in range(6):
        images.get(f"{place}", lambda: b"image")
        os.utime(tmp_path / "cache" / f"{place}.cubin", (place, place))
    assert {one.name for one in (tmp_path / "cache").iterdir()} == {"3.cubin", "4.cubin", "5.cubin"}


def test_processes_that_make_the_same_image_at_once_all_get_it(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import hashlib, sys
        from pathlib import Path
        from cudasched.kernels import _cache
        images = _cache.Images(Path(sys.argv[1]))
        for place in range(40):
            image = bytes([place]) * 200_000
            assert images.get(str(place), lambda: image) == image
        """
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "cache")], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for one in running:
        assert one.communicate(timeout=PATIENCE_S)[1] == "" and one.returncode == 0
    assert len(list((tmp_path / "cache").iterdir())) == 40


def test_whatever_makes_another_image_has_another_key() -> None:
    keys = {
        _cache.key_of([("a.cu", b"x")], [("A", "1")], "sm_90a", "nvrtc 13.0"),
        _cache.key_of([("a.cu", b"y")], [("A", "1")], "sm_90a", "nvrtc 13.0"),
        _cache.key_of([("a.cu", b"x")], [("A", "2")], "sm_90a", "nvrtc 13.0"),
        _cache.key_of([("a.cu", b"x")], [("A", "1")], "sm_80", "nvrtc 13.0"),
        _cache.key_of([("a.cu", b"x")], [("A", "1")], "sm_90a", "nvrtc 12.9"),
        _cache.key_of([("a.cu", b"x"), ("b.cuh", b"")], [("A", "1")], "sm_90a", "nvrtc 13.0"),
    }
    assert len(keys) == 6


# A kernel of the simulated driver, as users of this package would add one: a space, an image, an entry.
PROGRAM = """
import ctypes, sys, threading
from pathlib import Path
import cudasched
from cudasched.kernels import _catalog, _driver, _plan
from cudasched.tune.space import Space

directory = Path(sys.argv[1])
_catalog.sources = lambda: directory
_plan._compiler = lambda: ("nvrtc", "none")
axpy = _catalog.Kernel("axpy", "axpy", {"float32": {}}, lambda wanted: {"THREADS": 64, "PER": 1})
_catalog.KERNELS["axpy"] = axpy
driver = _driver.load()
N = 512
FLOATS = ctypes.c_float * N

def memory(values, ordinal=0):
    address = ctypes.c_uint64()
    driver.call("cuCtxSetCurrent", ctypes.c_void_p(driver.context(ordinal)))
    driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * N))
    driver.call("cuMemcpyHtoD_v2", address, FLOATS(*values), ctypes.c_size_t(4 * N))
    return address.value

def content(address):
    values = FLOATS()
    driver.call("cuMemcpyDtoH_v2", values, ctypes.c_uint64(address), ctypes.c_size_t(4 * N))
    return list(values)

def run(y, x, a, ordinal=0):
    ready = _plan.plan("axpy", "float32", (("n", N),), ordinal)
    ready.run(0, ready.places(("y", "x", "a")), (y, x, a))
"""
MAPPED = """
[[arguments]]
name = "map_x"
role = "tensor_map"
of = "x"
dims = [16, 32]
box = [8, 4]
swizzle = 32
"""


@pytest.fixture
def launched(simulated: Path, tmp_path: Path, python: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a program over the simulated driver, with the kernel above."""
    directory = tmp_path / "kernels"
    directory.mkdir()
    (directory / "axpy.toml").write_text(SPACE)
    (directory / "axpy.cubin").write_text(IMAGE)
    monkeypatch.setenv("CUDASCHED_SIM_SCALE", "1")
    return lambda code: python(PROGRAM + textwrap.dedent(code), str(directory))


def test_launches_run_with_their_arguments_and_what_is_made_once_is_kept(launched: Run, private_home: Path) -> None:
    done = launched(
        """
        y, x = memory([1.0] * N), memory(range(N))
        run(y, x, 2.0)
        run(y, x, 1.0)
        assert content(y) == [1.0 + 3.0 * i for i in range(N)], content(y)[:4]
        assert len(_plan._plans) == len(_plan._functions) == 1
        other = memory([0.0] * N)
        _plan.plan("axpy", "float32", (("n", 256),), 0).run(0, (0, 1, 2), (other, x, 1.0))
        assert content(other) == [float(i) if i < 256 else 0.0 for i in range(N)]
        assert len(_plan._plans) == 2 and len(_plan._functions) == 1
        """
    )
    assert done.returncode == 0, done.stderr
    assert len(list((private_home / ".cache/cudasched/kernels").iterdir())) == 1


def test_cudasched_sees_the_launches(launched: Run) -> None:
    done = launched(
        """
        y, x = memory([1.0] * N), memory([1.0] * N)
        run(y, x, 1.0)
        before = cudasched.hook.load_core().counts().numbers
        with cudasched.region("best_effort"):
            for _ in range(20):
                run(y, x, 1.0)
        assert content(y) == [22.0] * N
        after = cudasched.hook.load_core().counts().numbers
        print({name: after[name] - before[name] for name in after if after[name] != before[name]})
        """
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert ": 20" in done.stdout


def test_any_thread_launches_on_any_gpu(launched: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has no current context, or another GPU's; it keeps what it had."""
    monkeypatch.setenv("CUDASCHED_SIM_DEVICES", "2")
    done = launched(
        """
        pairs = {ordinal: (memory([0.0] * N, ordinal), memory([1.0] * N, ordinal)) for ordinal in (0, 1)}
        failed = []
        def work(ordinal):
            try:
                for _ in range(50):
                    run(*pairs[ordinal], 1.0, ordinal)
                current = ctypes.c_void_p()
                driver.call("cuCtxGetCurrent", ctypes.byref(current))
                assert not current.value
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=work, args=(place % 2,)) for place in range(6)]
        [one.start() for one in threads]; [one.join() for one in threads]
        assert not failed, failed
        for ordinal in (0, 1):
            driver.call("cuCtxSetCurrent", ctypes.c_void_p(driver.context(ordinal)))
            driver.call("cuCtxSynchronize")
            assert content(pairs[ordinal][0]) == [150.0] * N, content(pairs[ordinal][0])[:3]
        """
    )
    assert done.returncode == 0, done.stderr


def test_tensor_maps_are_made_anew_where_an_array_is_elsewhere(launched: Run, tmp_path: Path) -> None:
    text = SPACE.replace('[[arguments]]\nname = "a"', MAPPED + '[[arguments]]\nname = "a"')
    (tmp_path / "kernels" / "axpy.toml").write_text(text)
    (tmp_path / "kernels" / "axpy.cubin").write_text(
        IMAGE.replace("8,8,4,4", "8,8,128,4,4").replace("axpy\n", "none\n")
    )
    done = launched(
        """
        y, x, other = memory([0.0] * N), memory([1.0] * N), memory([1.0] * N)
        made = []
        encode = driver.encode
        def counted(into, address, seen, function):
            made.append((address, seen))
            encode(into, address, seen, function)
        driver.encode = counted
        for one in (x, x, other):
            run(y, one, 1.0)
        assert [address for address, _ in made] == [x, other], made
        call, contexts = driver.call, []
        def watched(name, *arguments):
            if name == "cuTensorMapEncodeTiled":
                current = ctypes.c_void_p()
                call("cuCtxGetCurrent", ctypes.byref(current))
                contexts.append(current.value)
            return call(name, *arguments)
        driver.call = watched
        thread = threading.Thread(target=run, args=(y, x, 1.0))  # has no current context
        thread.start(); thread.join()
        assert contexts == [driver.context(0)], contexts
        driver.call = call
        assert {(seen.dims, seen.box, seen.swizzle) for _, seen in made} == {((16, 32), (8, 4), 32)}
        try:
            run(y, other + 4, 1.0)
        except cudasched.Error as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "the tensor map of x, box (8, 4) of (16, 32): cuTensorMapEncodeTiled: CUDA_ERROR" in done.stdout


def test_a_kernel_that_cannot_be_loaded_leaves_the_threads_capture_mode_as_it_was() -> None:
    mode = [1]

    class Library:
        def __init__(self) -> None:
            for name in ("cuLaunchKernel", "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuGetErrorName"):
                setattr(self, name, lambda *_: 0)
            self.cuCtxGetCurrent = lambda *_: 0
            self.cuCtxPushCurrent_v2 = lambda *_: 201

        def cuThreadExchangeStreamCaptureMode(self, given: Any) -> int:  # noqa: N802
            given._obj.value, mode[0] = mode[0], given._obj.value
            return 0

    driver = _driver.Driver(Library())  # type: ignore[arg-type]
    with pytest.raises(DriverError, match="cuCtxPushCurrent"):
        driver.load(0, b"image", "kernel", 0)
    assert mode == [1]


def test_what_the_driver_refuses_is_an_error_of_its_name(launched: Run) -> None:
    done = launched(
        """
        from cudasched.errors import DriverError
        axpy.__dict__["default"] = lambda wanted: {"THREADS": 512, "PER": 1}
        y, x = memory([1.0] * N), memory([1.0] * N)
        ready = lambda: _plan.plan("axpy", "float32", (("n", N),), 0)
        for what in (lambda: run(y, x, 1.0), lambda: run(y, x, 1.0, 7), lambda: ready().places(("z",))):
            try:
                what()
                print("nothing")
            except cudasched.Error as error:
                print(type(error).__name__, error)
        (directory / "axpy.cubin").write_text("no image")
        _plan._texts.cache_clear(); _plan._functions.clear(); _plan.reset()
        try:
            run(y, x, 1.0)
        except DriverError as error:
            print(error)
        """
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 4, done.stdout + done.stderr
    assert lines[0].startswith("DriverError cuLaunchKernel: CUDA_ERROR_")
    assert lines[1].startswith("DriverError cuDeviceGet: CUDA_ERROR_INVALID_DEVICE")
    assert lines[2].startswith("KernelError the kernel has no argument z; it has y, x, a, count")
    assert lines[3] == "axpy of float32, n = 512: cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"


def test_without_a_gpu_it_says_so(python: Run, no_driver: Path) -> None:
    code = (
        "import cudasched.kernels as k\n"
        "try: k.configuration('softmax', rows=8, cols=8)\n"
        "except k.KernelError as error: print(error)\n"
        "try: k.configuration('nothing', rows=8)\n"
        "except k.KernelError as error: print(error)\n"
    )
    done = python(code)
    assert done.returncode == 0 and "the kernels need a GPU and its driver" in done.stdout, done.stderr
    assert "there is no kernel nothing; there are layer_norm, " in done.stdout


def test_with_what_a_kernel_is_launched_can_be_asked(launched: Run) -> None:
    done = launched(
        """
        import cudasched.kernels as kernels
        print(kernels.configuration("axpy", n=512))
        try: kernels.configuration("axpy", device=7, n=512)
        except cudasched.DriverError as error: print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    made = {"configuration": {"THREADS": 64, "PER": 1}, "origin": "default", "grid": (8, 1, 1), "block": (64, 1, 1)}
    asked, refused = done.stdout.splitlines()
    assert asked == str(made | {"shared_bytes": 0})
    assert refused == "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE: this process has no GPU 7"
