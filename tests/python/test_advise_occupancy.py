"""Occupancy against cases worked out by hand and against a brute force; whose a kernel is, by its name."""

from __future__ import annotations

import pytest
from cudasched.advise.names import qualified_name, signature
from cudasched.advise.occupancy import ARCHITECTURES, Architecture, occupancy
from cudasched.advise.origins import origin_of, rules
from hypothesis import example, given
from hypothesis import strategies as st

KIB = 1024


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared_bytes", "blocks", "warps", "limited_by"),
    [
        ("9.0", 32, 16, 0, 32, 32, {"blocks"}),
        ("9.0", 64, 32, 0, 32, 64, {"warps", "blocks", "registers"}),
        ("9.0", 256, 32, 0, 8, 64, {"warps", "registers"}),
        ("9.0", 1024, 33, 0, 1, 32, {"registers"}),  # 40 registers a thread, 12 warps a partition: 48 warps
        ("9.0", 768, 16, 0, 2, 48, {"warps"}),
        ("9.0", 256, 255, 0, 1, 8, {"registers"}),
        ("9.0", 1024, 65, 0, 0, 0, {"registers"}),  # 72 x 1024 registers are more than there are
        ("9.0", 33, 255, 0, 4, 8, {"registers"}),  # 2 warps a partition: 8 warps, 2 a block
        ("9.0", 128, 16, 227 * KIB, 1, 4, {"shared_memory"}),
        ("9.0", 128, 16, 113 * KIB, 2, 8, {"shared_memory"}),  # with the reserved KiB, just two
        ("9.0", 128, 16, 113 * KIB + 1, 1, 4, {"shared_memory"}),
        ("9.0", 128, 16, 227 * KIB + 1, 0, 0, {"shared_memory"}),
        ("7.5", 64, 16, 0, 16, 32, {"warps", "blocks"}),
        ("7.5", 32, 16, 64 * KIB, 1, 1, {"shared_memory"}),  # nothing is reserved before sm_80
        ("7.5", 32, 16, 32 * KIB + 1, 1, 1, {"shared_memory"}),
        ("8.0", 1024, 32, 0, 2, 64, {"warps", "registers"}),
        ("8.6", 1024, 32, 0, 1, 32, {"warps"}),
        ("8.9", 32, 16, 0, 24, 24, {"blocks"}),
        ("12.0", 128, 40, 49 * KIB, 2, 8, {"shared_memory"}),
        ("9.0", 1025, 16, 0, 0, 0, {"warps"}),
    ],
)
def test_occupancy_of_known_cases(
    capability: str,
    threads: int,
    registers: int,
    shared_bytes: int,
    blocks: int,
    warps: int,
    limited_by: set[str],
) -> None:
    fits = occupancy(ARCHITECTURES[capability], threads, registers, shared_bytes)
    assert (fits.blocks_per_sm, fits.resident_warps, set(fits.limited_by)) == (blocks, warps, limited_by)
    assert fits.fraction == warps / ARCHITECTURES[capability].max_warps_per_sm


@pytest.mark.parametrize(("threads", "registers", "shared_bytes"), [(0, 16, 0), (32, -1, 0), (32, 16, -1)])
def test_no_such_block(threads: int, registers: int, shared_bytes: int) -> None:
    with pytest.raises(ValueError, match="no such block"):
        occupancy(ARCHITECTURES["9.0"], threads, registers, shared_bytes)


def place_blocks(architecture: Architecture, threads: int, registers: int, shared_bytes: int) -> int:
    """Puts one block after the other on an SM, warp by warp, until one does not fit."""
    warps = len(range(0, threads, 32))
    per_warp = next(size for size in range(0, 1 << 20, 256) if size >= 32 * registers)
    per_block = next(
        size
        for size in range(0, 1 << 20, architecture.shared_granularity_bytes)
        if size >= shared_bytes + architecture.reserved_shared_bytes
    )
    together = next(count for count in range(0, 64, 4) if count >= warps)
    if threads > 1024 or registers > 256 or together * per_warp > 65536:
        return 0
    free, slots, shared, blocks = [16384] * 4, architecture.max_warps_per_sm, architecture.shared_bytes_per_sm, 0
    while blocks < architecture.max_blocks_per_sm and slots >= warps and shared >= per_block:
        for _ in range(warps):
            partition = free.index(max(free))
            if free[partition] < per_warp:
                return blocks
            free[partition] -= per_warp
        slots, shared, blocks = slots - warps, shared - per_block, blocks + 1
    return blocks


@given(
    capability=st.sampled_from(sorted(ARCHITECTURES)),
    threads=st.integers(1, 1100) | st.integers(1, 32).map(lambda warps: 32 * warps),
    registers=st.integers(0, 258),
    shared_bytes=st.just(0) | st.integers(0, 232 * KIB),
)
@example(capability="9.0", threads=1024, registers=64, shared_bytes=0)
def test_occupancy_is_what_placing_block_by_block_gives(
    capability: str, threads: int, registers: int, shared_bytes: int
) -> None:
    architecture = ARCHITECTURES[capability]
    expected = place_blocks(architecture, threads, registers, shared_bytes)
    assert occupancy(architecture, threads, registers, shared_bytes).blocks_per_sm == expected


def examples() -> list[tuple[str, str, bool]]:
    written = rules()
    named = [(name, rule["name"], rule["shape"] == "user") for rule in written["origin"] for name in rule["examples"]]
    return named + [(name, "own", True) for name in written["origin_own"]["examples"]]


@pytest.mark.parametrize(("function", "origin", "changeable"), examples())
def test_each_rule_on_names_knows_its_examples(function: str, origin: str, changeable: bool) -> None:
    assert (origin_of(function).name, origin_of(function).changeable) == (origin, changeable)


def test_rules_on_names_are_whole() -> None:
    for rule in rules()["origin"]:
        assert rule["shape"] in ("user", "library")
        assert ("how" in rule) == (rule["shape"] == "user")
        assert rule["patterns"]
        assert rule["examples"]


@pytest.mark.parametrize(
    "function",
    [
        "scatter_kernel",
        "data_kernel",
        "flash_attention_kernel",
        "my_gemm",
        "dot_kernel",
        "reduce_3d",
        "loop_unrolled",
        "phi_update",
        "_Z9cub_sweepPf",
        "_Z6kernelIN2at6native5AddOpEEvT_",
    ],
)
def test_own_kernels_that_sound_like_a_library_stay_own(function: str) -> None:
    assert origin_of(function).changeable


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("plain", "plain"),
        ("", ""),
        ("_Z5saxpyPfS_fi", "saxpy"),
        ("_ZN2at6native3addEv", "at::native::add"),
        ("_ZN3foo3BarIiE6kernelEv", "foo::Bar"),
        ("_ZN12_GLOBAL__N_16kernelEv", "(anonymous namespace)::kernel"),
        ("_ZN46_GLOBAL__N__00000000_7_main_cu_12345678_1234566kernelEv", "(anonymous namespace)::kernel"),
        ("_ZL6kernelPf", "kernel"),
        ("_ZNK3foo3barEv", "foo::bar"),
        ("_ZSt4sortv", "std::sort"),
        ("_Z", "_Z"),
        ("_Z99short", "_Z99short"),
        ("_Z123456789x", "_Z123456789x"),
        ("_ZN", "_ZN"),
    ],
)
def test_qualified_names(mangled: str, name: str) -> None:
    assert qualified_name(mangled) == name


@given(st.text())
def test_any_text_is_a_name(text: str) -> None:
    for name in (text, "_Z" + text, "_ZN" + text):
        assert isinstance(qualified_name(name), str)
        assert isinstance(signature(name), str)
        assert origin_of(name).name


def test_signatures() -> None:
    assert signature("plain(int)") == "plain(int)"
    assert signature("f") == "f"
    assert signature("_Z5saxpyPfS_fi") == "saxpy(float*, float*, float, int)"
    assert signature("_Z5saxpy?") == "saxpy"
