"""The kernels that there are: the space of each, its types, and the configuration where none is known to be better.

A kernel is a source with a space (``NAME.cu``, ``NAME.toml``) and an entry here. The space has a configuration's
launch. An entry has the macros for each type of elements, and a configuration that works for any shape. No GPU is
needed, and nothing here calls one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudasched.config import read_toml
from cudasched.errors import ConfigError
from cudasched.kernels._errors import KernelError
from cudasched.tune.space import TYPES, Configuration, Gpu, Space

__all__ = ["BACKWARD_COLS", "KERNELS", "Kernel", "Shape", "Wanted", "sources", "space_text", "variant"]

_HERE = Path(__file__).resolve().parent
Shape = Mapping[str, int]


@dataclass(frozen=True)
class Wanted:
    """The use of a wanted configuration.

    Attributes:
        shape: The values.
        type: Of the elements: "float32".
        gpu: The GPU.
        alignment: The common alignment of the arrays' addresses, at most 16 bytes.
    """

    shape: Shape
    type: str
    gpu: Gpu
    alignment: int = 16

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return TYPES[self.type]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the public functions.

    Attributes:
        name: Users' name.
        file: Of the space, without .toml.
        types: The macros of each type of elements that it takes.
        default: A configuration that works for a shape.
        constants: Macros that are the same for all types.
        typed: The arrays whose elements are of the type; None: all.
        values: Values of parameters that the tuner may try, by type, in place of those in the space.
        fits: Whether a configuration of another shape works for this one, beside the space's constraints.
        most: The largest values that sizes of a shape may have.
        reference: The function of references.py for the right outputs; None: the one that the space names.
        since: The compute capability that it needs at least.
        only: Those of the kernel, where later ones cannot run it, either.
    """

    name: str
    file: str
    types: Mapping[str, Mapping[str, int]]
    default: Callable[[Wanted], Configuration]
    constants: Mapping[str, int] = field(default_factory=dict)
    typed: tuple[str, ...] | None = None
    values: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    fits: Callable[[Wanted, Configuration], bool] = lambda wanted, configuration: True
    most: Mapping[str, int] = field(default_factory=dict)
    reference: str | None = None
    since: str = "8.0"
    only: tuple[str, ...] = ()

    def refusal(self, gpu: Gpu) -> str:
        """Why the kernel does not run on a GPU; empty if it does."""
        if self.only and gpu.capability not in self.only:
            return f"{self.name} needs a GPU of compute capability {' or '.join(self.only)}; {_named(gpu)}"
        if _number(gpu.capability) < _number(self.since):
            return f"{self.name} needs a GPU of compute capability {self.since} or later; {_named(gpu)}"
        return ""


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} has {gpu.capability}"


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def sources() -> Path:
    """The directory with the kernels' sources: in an installation, or in a clone.

    Raises:
        KernelError: The files are missing.
    """
    for candidate in (_HERE / "sources", _HERE.parents[2] / "csrc" / "kernels", *_installed()):
        if (candidate / "common.cuh").is_file():
            return candidate
    raise KernelError(f"the kernels' sources are not at {_HERE / 'sources'}: install cudasched anew")


def _installed() -> list[Path]:
    """The place of an editable installation's files: beside the compiled module."""
    from cudasched.errors import HookError
    from cudasched.hook import locate

    try:
        return [locate().core.parent / "kernels" / "sources"]
    except HookError:
        return []


def _value(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _toml(data: Mapping[str, Any]) -> str:
    """A space as text: values first, then tables, then lists of tables."""
    values = [f"{key} = {_value(one)}" for key, one in data.items() if not _is_table(one) and not _is_tables(one)]
    lines = [*values]
    for name, table in data.items():
        for one in [table] if _is_table(table) else table if _is_tables(table) else []:
            lines.append(f"\n[{name}]" if _is_table(table) else f"\n[[{name}]]")
            lines += [f"{key} = {_value(value)}" for key, value in one.items()]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def space_text(kernel: Kernel, kind: str, directory: Path | None = None) -> str:
    """The space of a kernel for one type of elements, as text.

    Args:
        kernel: The kernel.
        kind: The type: "float16".
        directory: Where its file is; None: `sources`.

    Raises:
        KernelError: The kernel does not take that type, or its file cannot be read.
    """
    if kind not in kernel.types:
        raise KernelError(f"{kernel.name} takes {' and '.join(kernel.types)}, not {kind}")
    path = (directory or sources()) / f"{kernel.file}.toml"
    try:
        data, _ = read_toml(path)
    except ConfigError as error:
        raise KernelError(f"the space of {kernel.name}: {error}") from None
    constants = {**data.get("constants", {}), **kernel.constants, **kernel.types[kind]}
    if constants:
        data["constants"] = constants
    check = data.setdefault("check", {})
    for one in data["arguments"]:
        is_typed = one["role"] in ("input", "output", "inout") if kernel.typed is None else one["name"] in kernel.typed
        if is_typed and one.get("type", "float32") != kind:  # nothing is said anew: the tuner's measurements are found
            one["type"] = kind
            _allow_rounding(check, kind)
    data["parameters"].update({name: list(values) for name, values in kernel.values.get(kind, {}).items()})
    if kernel.reference is not None:
        check["reference"] = f"references.py:{kernel.reference}"
    return _toml(data)


_ROUNDING = {"float16": (1e-3, 6e-8), "bfloat16": (8e-3, 0.0)}
"""A unit in the last place of a type, as a share of the number, and of numbers below normals by itself."""


def _allow_rounding(check: dict[str, Any], kind: str) -> None:
    """A space's tolerances are for the types that its file has; a shorter one rounds the results more."""
    for name, least in zip(("relative", "absolute"), _ROUNDING.get(kind, ()), strict=False):
        if check.get(name, 0.0) < least:
            check[name] = least


@functools.cache
def variant(kernel_name: str, kind: str) -> Space:
    """The space of a kernel for one type of elements.

    Raises:
        KernelError: As `space_text`.
    """
    kernel = KERNELS[kernel_name]
    return Space(space_text(kernel, kind), sources() / f"{kernel.file}.toml")


def variant_file(kernel_name: str, kind: str, directory: Path) -> Path:
    """The same as a file in a directory of its own, beside the sources, which the tuner's processes read.

    Raises:
        KernelError: As `space_text`.
        OSError: The file cannot be written.
    """
    text = space_text(KERNELS[kernel_name], kind)
    origin = sources()
    parts = {path.name: path.read_bytes() for path in origin.iterdir() if path.suffix in (".cu", ".cuh", ".py")}
    digest = hashlib.sha256(text.encode())
    for name in sorted(parts):
        digest.update(name.encode() + b"\0" + parts[name])
    made = directory / f"{kernel_name}-{kind}-{digest.hexdigest()[:16]}"
    made.mkdir(parents=True, exist_ok=True)
    for name, content in {**parts, f"{KERNELS[kernel_name].file}.toml": text.encode()}.items():
        (made / name).write_bytes(content)
    return made / f"{KERNELS[kernel_name].file}.toml"


_TYPES = {"float32": {"TYPE": 0}, "float16": {"TYPE": 1}, "bfloat16": {"TYPE": 2}}
_WIDER = {"float16": {"VECTOR": (1, 2, 4, 8)}, "bfloat16": {"VECTOR": (1, 2, 4, 8)}}
_STATIC_SHARED_BYTES = 1024
_KEPT_FLOATS = 64
_SUMMED_FLOATS = 32
BACKWARD_COLS = 32768
"""The longest rows whose gradients the kernels compute: the sums of their columns are in registers."""


def _power_of_two(at_least: int, most: int) -> int:
    """The power of two that is not less, but at most so much."""
    return min(1 << max(at_least - 1, 0).bit_length(), most)


def _vector(wanted: Wanted) -> int:
    """The widest vectors of which rows are whole numbers, and at whose multiples the arrays are."""
    cols, size = wanted.shape["cols"], wanted.element_bytes
    return next(
        one for one in (8, 4, 2, 1) if one * size <= 16 and cols % one == 0 and wanted.alignment % (one * size) == 0
    )


def _rows(wanted: Wanted) -> dict[str, int]:
    """How a kernel of rows (row.cuh) is laid out: about four vectors a thread, in registers where they fit."""
    cols, size = wanted.shape["cols"], wanted.element_bytes
    vector = _vector(wanted)
    vectors = cols // vector
    warps = _power_of_two(-(-vectors // 128), 16)
    rows_a_block = max(1, 4 // warps)
    items = -(-vectors // (32 * warps))
    room = wanted.gpu.architecture.max_shared_bytes_per_block - _STATIC_SHARED_BYTES
    keep = 1 if items * vector <= _KEPT_FLOATS else 2 if rows_a_block * cols * size <= room else 0
    return {
        "WARPS_PER_ROW": warps,
        "ROWS_PER_BLOCK": rows_a_block,
        "VECTOR": vector,
        "KEEP": keep,
        "UNROLL": 1 if keep == 1 else 4,
        "STREAM_LOADS": 0,
        "STREAM_STORES": 0,
        "WAVES": 0,
    }


def _whole_vectors(wanted: Wanted, configuration: Configuration) -> bool:
    vector = int(configuration["VECTOR"])
    return wanted.shape["cols"] % vector == 0 and wanted.alignment % (vector * wanted.element_bytes) == 0


def _layer_norm(wanted: Wanted) -> Configuration:
    return {**_rows(wanted), "STATISTICS": 0}


def _softmax(wanted: Wanted) -> Configuration:
    return {**_rows(wanted), "ONLINE": 0}


def _gemm(wanted: Wanted) -> Configuration:
    """The largest tiles that give each multiprocessor one."""
    m, n = wanted.shape["m"], wanted.shape["n"]
    tile, thread_m, thread_n = 32, 4, 4
    for size, in_m, in_n in ((128, 8, 8), (64, 4, 8)):
        if -(-m // size) * -(-n // size) >= wanted.gpu.sms:
            tile, thread_m, thread_n = size, in_m, in_n
            break
    return {
        "TILE_M": tile,
        "TILE_N": tile,
        "TILE_K": 16,
        "THREAD_M": thread_m,
        "THREAD_N": thread_n,
        "LANES_N": 8,
        "BUFFERS": 3,
        "GROUP": 8,
        "SPLIT_K": 1,
        "MIN_BLOCKS": 1,
    }


def _backward(wanted: Wanted) -> dict[str, int]:
    """The backward kernels' layout: sums over the rows, and a row if it fits, in registers."""
    cols = wanted.shape["cols"]
    vector = _vector(wanted)
    warps = max(2, _power_of_two(-(-cols // (32 * 8)), 32))
    held = -(-cols // (vector * 32 * warps)) * vector
    return {
        "WARPS_PER_ROW": warps,
        "ROWS_PER_BLOCK": 1,
        "VECTOR": vector,
        "KEEP": 1 if 2 * held <= _SUMMED_FLOATS else 0,
        "ACCUMULATE": 0,
        "STREAM_LOADS": 0,
        "STREAM_STORES": 0,
        "WAVES": 2,
    }


def _layer_norm_backward(wanted: Wanted) -> Configuration:
    return {**_backward(wanted), "STATISTICS": 0}


def _mma(bytes_deep: int, least_n: int = 64) -> Callable[[Wanted], Configuration]:
    """For the tensor cores: the largest tiles that give each multiprocessor one; tiles of so many bytes of depth."""

    def default(wanted: Wanted) -> Configuration:
        m, n = wanted.shape["m"], wanted.shape["n"]
        large = -(-m // 128) * -(-n // 128) >= wanted.gpu.sms
        return {
            "TILE_M": 128 if large else 64,
            "TILE_N": 128 if large else least_n,
            "TILE_K": bytes_deep // wanted.element_bytes,
            "WARPS_M": 2,
            "WARPS_N": 4 if large else 2,
            "STAGES": 4,
            "GROUP": 8,
            "SPLIT_K": 1,
            "MIN_BLOCKS": 1,
        }

    return default


def _wgmma(wanted: Wanted) -> Configuration:
    """For Hopper: two groups of warps multiply, each tiles of 64 or 128 rows, and a third loads."""
    m, n = wanted.shape["m"], wanted.shape["n"]
    tile_m, tile_n, consumers = 64, 64, 1
    for rows, columns in ((128, 256), (128, 128)):
        if -(-m // rows) * -(-n // columns) >= wanted.gpu.sms:
            tile_m, tile_n, consumers = rows, columns, 2
            break
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": 64,
        "CONSUMERS": consumers,
        "STAGES": 4,
        "CLUSTER": 1,
        "GROUP": 8,
        "PERSISTENT": 1,
        "STORE_BOX": 0,
    }


def _conv2d(wanted: Wanted) -> Configuration:
    filters = wanted.shape["filters"]
    return {
        "TILE_M": 128,
        "TILE_N": 32 if filters <= 32 else 64 if filters <= 64 else 128,
        "TILE_K": 32,
        "WARPS_M": 2,
        "WARPS_N": 2,
        "STAGES": 3,
        "SPLIT_K": 1,
        "ORDER": 0,
        "MIN_BLOCKS": 1,
    }


def _conv2d_sm90(wanted: Wanted) -> Configuration:
    filters = wanted.shape["filters"]
    tile_n = 64 if filters <= 64 else 128
    return {
        **{"GROUPS": 2, "PARTS": 1, "TILE_N": tile_n, "STAGES": 4, "SPLIT_K": 1, "ORDER": 0},
        **{"MIN_BLOCKS": 1, "PENDING": 1, "LATE": 1, "BY_L1": 0, "OUT_BY_SHARED": 1},
    }


def _attention(wanted: Wanted) -> Configuration:
    return {
        "TILE_Q": 128,
        "TILE_K": 64,
        "WARPS": 8,
        "STAGES": 2,
        "QUERIES_IN": 1,
        "RESCALE": 0,
        "ORDER": 0,
        "MIN_BLOCKS": 1,
    }


def _attention_sm90(wanted: Wanted) -> Configuration:
    return {
        **{"GROUPS": 2, "TILE_K": 128, "STAGES": 2, "ORDER": 0, "MIN_BLOCKS": 1},
        **{"RESCALE": 0, "POLYNOMIAL": 0, "LATE": 0},
    }


_HALVES = {"float16": {"TYPE": 1}, "bfloat16": {"TYPE": 2}}
_MATRICES = ("c", "a", "b")
_CONVOLVED = ("y", "x", "w", "bias")
_ATTENDED = ("out", "q", "k", "v")


def _of_rows(
    name: str,
    file: str,
    default: Callable[[Wanted], Configuration],
    *,
    most_cols: int = 2**31 - 1,
    reference: str | None = None,
    **constants: int,
) -> Kernel:
    return Kernel(
        *(name, file, _TYPES, default, constants),
        values=_WIDER,
        fits=_whole_vectors,
        most={"cols": most_cols},
        reference=reference,
    )


KERNELS: dict[str, Kernel] = {
    one.name: one
    for one in (
        _of_rows("layer_norm", "layernorm", _layer_norm, RMS=0),
        _of_rows("rms_norm", "layernorm", _layer_norm, reference="rmsnorm", RMS=1),
        _of_rows("softmax", "softmax", _softmax),
        _of_rows("layer_norm_backward", "layernorm_backward", _layer_norm_backward, most_cols=BACKWARD_COLS),
        _of_rows("rms_norm_backward", "rmsnorm_backward", _backward, most_cols=BACKWARD_COLS),
        Kernel("gemm", "gemm", {"float32": {}}, _gemm),
        Kernel("gemm_mma", "gemm_mma", _HALVES, _mma(64), typed=_MATRICES),
        # Rows of A and of B that are whole numbers of 4 bytes alone.
        Kernel("gemm_mma_narrow", "gemm_mma", _HALVES, _mma(64), {"COPY_BYTES": 4}, typed=_MATRICES),
        Kernel("gemm_sm90", "gemm_sm90", _HALVES, _wgmma, typed=_MATRICES, only=("9.0",)),
        Kernel("gemm_tf32", "gemm_mma_tf32", {"float32": {}}, _mma(64), typed=_MATRICES),
        Kernel("gemm_int8", "gemm_mma_int8", {"int8": {}}, _mma(64, least_n=128), typed=("a", "b")),
        Kernel("conv2d", "conv2d", _HALVES, _conv2d, typed=_CONVOLVED),
        Kernel("conv2d_sm90", "conv2d_sm90", _HALVES, _conv2d_sm90, typed=_CONVOLVED, only=("9.0",)),
        Kernel("flash_attention", "flash_attention", _HALVES, _attention, typed=_ATTENDED),
        Kernel(
            "flash_attention_sm90", "flash_attention_sm90", _HALVES, _attention_sm90, typed=_ATTENDED, only=("9.0",)
        ),
    )
}
"""The kernels by name."""
