"""Space files: what is enumerated, and what is refused, with the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from cudasched.errors import ConfigError
from cudasched.tune._expression import Expression
from cudasched.tune.space import Gpu, Space, parse_shape, read, with_includes
from synthetic_spaces import GPU, KERNELS, SMALL, small


def test_configurations_meet_the_constraints_and_what_a_block_may_have() -> None:
    problem = small()
    assert len(problem.configurations) == 5 * 3 * 4 * 2  # not those of 1,024 threads
    for one in problem.configurations:
        launch = problem.launch(one)
        assert launch.threads == one["THREADS"] <= 512
        assert launch.blocks * launch.threads * int(one["VECTOR"]) * int(one["UNROLL"]) >= 1048576
        assert ("THREADS", str(one["THREADS"])) in launch.macros
    assert problem.features.shape[0] == len(problem.configurations)
    assert abs(problem.features.mean(axis=0)).max() < 1e-9
    few = small(n=64)
    assert all(int(one["VECTOR"]) * int(one["THREADS"]) <= 64 for one in few.configurations)


def test_shared_memory_that_no_block_may_have_is_known_before_the_run() -> None:
    text = SMALL.replace('block = "THREADS"', 'block = "THREADS"\nshared_bytes = "THREADS * 512"')
    sizes = {
        capability: max(
            problem.launch(one).shared_bytes
            for problem in [Space(text, Path("s.toml")).problem(Gpu("x", capability, 1))]
            for one in problem.configurations
        )
        for capability in ("8.6", "9.0")
    }
    assert sizes == {"8.6": 64 * 1024, "9.0": 128 * 1024}


@pytest.mark.parametrize("kernel", ["layernorm", "softmax", "gemm"])
def test_the_spaces_of_the_kernels_have_a_thousand_to_five_thousand_configurations(kernel: str) -> None:
    problem = read(KERNELS / f"{kernel}.toml").problem(GPU)
    assert 1000 <= len(problem.configurations) <= 5000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kernel = "scale"', "", "names no kernel"),
        ("THREADS = [32, 64, 128, 256, 512, 1024]", "THREADS = []", "THREADS has no value: the space is empty"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = [1, 1]", "UNROLL has a value twice"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = [nan]", "UNROLL: nan is no finite number"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = {from = 1, to = inf}", "the range has no end"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = {from = 1, to = 9, step = 0}", "the range has no end"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = {from = 0, to = 9, times = 2}", "the range has no end"),
        ("UNROLL = [1, 2, 4, 8]", "UNROLL = {from = 1, to = 9e9}", "more than"),
        ("UNROLL = [1, 2, 4, 8]", 'UNROLL = ["a; rm -rf /"]', "no plain text"),
        ('"threads <= 512"', '"thread <= 512"', "did you mean 'threads'?"),
        ('"threads <= 512"', "\"__import__('os')\"", "calls another function than"),
        ('"threads <= 512"', '"THREADS.real"', "Attribute, which expressions may not have"),
        ('"threads <= 512"', '"THREADS // (VECTOR - VECTOR)"', "cannot be computed"),
        ('grid = "ceil_div(n, THREADS * VECTOR * UNROLL)"', 'grid = "n / 3"', "ceil_div(a, b) rounds up"),
        ('role = "output"', 'role = "result"', "role is one of"),
        ('role = "output"', 'role = "input"', "nothing could be checked"),
        ('size = "n"', 'sizes = "n"', "did you mean 'size'?"),
        ("[shape]", "[shape]\nTHREADS = 1", "THREADS is in shape and in parameters"),
        ("[parameters]", "[parameters]\nthreads = [1]", "threads is in parameters and in every expression"),
        ("[shape]", "[shape]\nmin = 1", "min is in shape and in every expression"),
        ("[launch]", "[launch]\ncolour = 1", "colour is not known"),
        ('source = "scale.cu"', "source = [", "not TOML"),
        ('source = "scale.cu"', f"deep = {'[' * 5000}", "not TOML"),
        ('source = "scale.cu"', f"n = {'9' * 5000}", "not TOML"),
        ('source = "scale.cu"', 'source = "a\\u0000b"', "the name of a file, is a text"),
        ("n = 1048576", f"n = 1{'0' * 40}", "an integer of 133 bits is too large"),
        ("n = 1048576", 'n = "many"', "n is a number, not 'many'"),
        ("UNROLL = [1, 2, 4, 8]", f"UNROLL = {{from = 1, to = {'9' * 400}}}", "too large"),
        ('role = "output"', 'role = "output"\ntype = ["float32"]', "type is one of"),
        ('role = "output"', 'role = "output"\nmean = "high"', "mean is a finite number, not 'high'"),
        ('role = "output"', 'role = "output"\nmean = inf', "mean is a finite number, not inf"),
        ('name = "y"', "name = {a = 1}", "its name is a text, not a table"),
        ('size = "n"', 'size = "THREADS"', "name 'THREADS' is not defined"),
        ('work = "8 * n"', "work = \"'much'\"", "work: ''much'' is a finite number"),
        ('work = "8 * n"', 'work = "power(n, 60)"', "is a finite number"),
        ('grid = "ceil_div(n, THREADS * VECTOR * UNROLL)"', 'grid = ["1", "n"]', "at most 2147483647 x 65535 x 65535"),
        ('"threads <= 512"', '"power(power(power(10, 64), 64), 64) > 0"', "the number is too large"),
        ('"threads <= 512"', f'"{" * ".join(["n"] * 220)} > 0"', "the number is too large"),
        ('"threads <= 512"', "\"'a' * 1000000000 == 'a'\"", "'a' is no number"),
        ('"threads <= 512"', "\"'%1000000000d' % 1 == 'a'\"", "is no number"),
        ('"threads <= 512"', '"(1, 2) * 1000000000 == 1"', "(1, 2) is no number"),
        ('"threads <= 512"', f'"{"-" * 3000}1 > 0"', "is nested too deep"),
        ('"threads <= 512"', f'"{"1 + " * 3000}1 > 0"', "at most 4096 characters"),
        ("[shape]", "[check]\nrelative = inf\n[shape]", "check: relative is a finite number, not inf"),
        ("[shape]", "[check]\nrelative = 1.0\n[shape]", "nothing would be checked"),
        ("[shape]", "[check]\nabsolute = nan\n[shape]", "check: absolute is a finite number, not nan"),
        ("[shape]", "[check]\nabsolute = -1\n[shape]", "tolerances are 0 or more"),
        ("[shape]", '[check]\nrelative = "much"\n[shape]', "check: relative is a finite number"),
        ("[shape]", "[check]\nreference = 3\n[shape]", "check: reference, file.py:function, is a text"),
    ],
)
def test_a_wrong_space_is_refused_with_its_reason(old: str, new: str, said: str) -> None:
    text = SMALL.replace(old, new, 1)
    assert text != SMALL
    with pytest.raises(ConfigError) as refused:
        _ = Space(text, Path("wrong.toml")).problem(GPU).configurations
    assert said in str(refused.value) and "wrong.toml" in str(refused.value)


def test_an_empty_space_says_which_constraint_emptied_it() -> None:
    with pytest.raises(ConfigError, match=r"the space is empty: .* by 'VECTOR \* threads <= n'"):
        _ = small(n=1).configurations


def test_too_many_combinations_are_refused_before_they_are_made() -> None:
    more = "\n".join(f"P{i} = {{from = 1, to = 100}}" for i in range(6))
    with pytest.raises(ConfigError, match="combinations, more than"):
        Space(SMALL.replace("[launch]", f"{more}\n[launch]"), Path("s.toml"))


def test_shapes_that_differ_have_keys_that_differ() -> None:
    keys = [small(n=n).key() for n in (1048576, 1048577, 1048580)]
    assert keys == ["n=1048576", "n=1048577", "n=1048580"]


def test_what_a_shape_has_switched_off_may_be_said() -> None:
    space = Space(SMALL.replace("[shape]", "[shape]\nmasked = 0"), Path("s.toml"))
    assert space.problem(GPU, {"masked": 0}).key() == space.problem(GPU).key()
    assert space.problem(GPU, {"masked": 1}).key() != space.problem(GPU).key()
    with pytest.raises(ConfigError, match="masked of a shape is a number over 0, not -1"):
        space.problem(GPU, {"masked": -1})
    with pytest.raises(ConfigError, match="n of a shape is a number over 0, not 0"):
        space.problem(GPU, {"n": 0})


def test_shapes_are_checked() -> None:
    assert parse_shape(["rows=16", "scale=0.5"]) == {"rows": 16, "scale": 0.5}
    for wrong in ("rows", "rows=", "rows=nan", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="NAME=NUMBER"):
            parse_shape([wrong])
    with pytest.raises(ConfigError, match="--shape n=5: n is said twice"):
        parse_shape(["n=4", "n=5"])
    with pytest.raises(ConfigError, match="the shape has no m; it has n"):
        small(m=3)
    with pytest.raises(ConfigError, match="a number over 0"):
        small(n=-1)


def test_expressions_compute_what_they_say() -> None:
    def value(text: str) -> object:
        return Expression(text, where="here", known=["a", "b"])({"a": 7, "b": 2})

    assert value("ceil_div(a, b)") == 4 and value("a // b if b > 1 else 0") == 3
    assert value("min(a, b) + max(a, b)") == 9 and value("log2(b)") == 1 and value("power(b, 10)") == 1024
    assert value("a in (7, 8) and not b == 3") is True
    with pytest.raises(ConfigError, match="too large"):
        value("power(a, 1000000)")


def test_a_scalar_is_a_value_of_its_type() -> None:
    """Guards against values that wrapped around on their way to the kernel."""
    for kind, value, said in (
        ("int32", "2147483648", "2147483648 is no int32"),
        ("uint8", "-1", "-1 is no uint8"),
        ("int32", "0.5", "0.5 is no int32"),
        ("float32", "'a'", "'a' is no float32"),
    ):
        more = f'[[arguments]]\nname = "a"\nrole = "scalar"\ntype = "{kind}"\nvalue = "{value}"\n'
        with pytest.raises(ConfigError, match=f"s.toml: argument a: {said}"):
            _ = Space(SMALL + more, Path("s.toml")).problem(GPU).configurations


def test_headers_that_include_each_other_are_read_once(tmp_path: Path) -> None:
    """Guards against a circle of includes, which grew a name by a directory in each turn."""
    (tmp_path / "a").mkdir()
    (tmp_path / "kernel.cu").write_text('#include "a/one.cuh"\n')
    (tmp_path / "a" / "one.cuh").write_text('#include "../a/two.cuh"\n#include "../kernel.cu"\n')
    (tmp_path / "a" / "two.cuh").write_text('#include "../a/../a/one.cuh"\n')
    assert [path.name for path in with_includes(tmp_path / "kernel.cu")] == ["kernel.cu", "two.cuh", "one.cuh"]
    for i in range(1001):
        (tmp_path / f"{i}.cuh").write_text(f'#include "{i + 1}.cuh"\n')
    with pytest.raises(ConfigError, match="more than 1000 files"):
        with_includes(tmp_path / "0.cuh")


def test_the_fingerprint_follows_the_source_and_not_the_ranges(tmp_path: Path) -> None:
    source = tmp_path / "scale.cu"
    source.write_text('#include "common.cuh"\nkernel')
    (tmp_path / "common.cuh").write_text("header")
    first = Space(SMALL, tmp_path / "s.toml").fingerprint(source)
    assert Space(SMALL.replace("[1, 2, 4, 8]", "[1, 2]"), tmp_path / "s.toml").fingerprint(source) == first
    assert Space(SMALL.replace('"THREADS"', '"THREADS // 1"'), tmp_path / "s.toml").fingerprint(source) != first
    (tmp_path / "tuned.h").write_text("not included, such as what a run has written")
    assert Space(SMALL, tmp_path / "s.toml").fingerprint(source) == first
    (tmp_path / "common.cuh").write_text("another header")
    assert Space(SMALL, tmp_path / "s.toml").fingerprint(source) != first


def test_the_fingerprint_follows_the_reference(tmp_path: Path) -> None:
    """Guards a mended reference: the verdicts of the wrong one stayed."""
    source, reference = tmp_path / "scale.cu", tmp_path / "right.py"
    source.write_text("kernel")
    text = SMALL.replace("[shape]", '[check]\nreference = "right.py:scale"\n[shape]', 1)
    found = set()
    for content in ("wrong", "mended"):
        reference.write_text(content)
        found.add(Space(text, tmp_path / "s.toml").fingerprint(source))
    assert len(found) == 2
