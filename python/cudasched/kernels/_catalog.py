"""The kernels that there are: the space of each, its types, and the configuration where none is known to be better.

A kernel is its source with its space (``NAME.cu``, ``NAME.toml``) and an entry here. The space says how a
configuration is launched; an entry says with which macros a type of elements is compiled, and gives a configuration
that works for any shape. No GPU is needed, and nothing here calls one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudasched.kernels._errors import KernelError
from cudasched.tune.space import TYPES, Configuration, Gpu, Space

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KERNELS", "Kernel", "Shape", "Wanted", "sources", "space_text", "variant"]

_HERE = Path(__file__).resolve().parent
Shape = Mapping[str, int]


@dataclass(frozen=True)
class Wanted:
    """What a configuration is wanted for.

    Attributes:
        shape: Its values.
        type: Of the elements: "float32".
        gpu: The GPU.
        alignment: What the address of each array is a multiple of, at most 16 bytes.
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
    """One kernel, as users know it.

    Attributes:
        name: Users' name of it.
        file: Of its space, without .toml.
        types: The macros of each type of elements that it takes.
        default: A configuration that works for a shape.
        constants: Macros that are the same for all types.
        values: Values of parameters in place of those in the space, by type: what the tuner may try.
        fits: Whether a configuration of another shape works for this one, beside what the space says.
        since: The compute capability that it needs at least.
        only: Those that it is for, where later ones cannot run it, either.
    """

    name: str
    file: str
    types: Mapping[str, Mapping[str, int]]
    default: Callable[[Wanted], Configuration]
    constants: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    fits: Callable[[Wanted, Configuration], bool] = lambda wanted, configuration: True
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
        KernelError: They are not there.
    """
    for candidate in (_HERE / "sources", _HERE.parents[2] / "csrc" / "kernels", *_installed()):
        if (candidate / "common.cuh").is_file():
            return candidate
    raise KernelError(f"the kernels' sources are not at {_HERE / 'sources'}: install cudasched anew")


def _installed() -> list[Path]:
    """Where an editable installation has what was installed: beside the compiled module."""
    from cudasched.errors import HookError
    from cudasched.hook import locate

    try:
        return [locate().core.parent / "kernels" / "sources"]
    except HookError:
        return []


def _value(value: Any) -> str:
    """A value as TOML has it."""
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
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise KernelError(f"{path}: the space of {kernel.name} cannot be read: {error}") from None
    data["constants"] = {**data.get("constants", {}), **kernel.constants, **kernel.types[kind]}
    for one in data["arguments"]:
        if one["role"] in ("input", "output", "inout"):
            one.setdefault("type", kind)
    data["parameters"].update({name: list(values) for name, values in kernel.values.get(kind, {}).items()})
    return _toml(data)


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
        OSError: It cannot be written.
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


def _power_of_two(at_least: int, most: int) -> int:
    """The power of two that is not less, but at most so much."""
    return min(1 << max(at_least - 1, 0).bit_length(), most)


def _rows(wanted: Wanted) -> dict[str, int]:
    """How a kernel of rows (row.cuh) is laid out: about four vectors a thread, in registers where they fit."""
    cols, size = wanted.shape["cols"], wanted.element_bytes
    vector = next(
        one for one in (8, 4, 2, 1) if one * size <= 16 and cols % one == 0 and wanted.alignment % (one * size) == 0
    )
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
        "BUFFERS": 2,
        "GROUP": 8,
        "SPLIT_K": 1,
        "MIN_BLOCKS": 1,
    }


KERNELS: dict[str, Kernel] = {
    one.name: one
    for one in (
        Kernel("layer_norm", "layernorm", _TYPES, _layer_norm, {"RMS": 0}, _WIDER, _whole_vectors),
        Kernel("rms_norm", "layernorm", _TYPES, _layer_norm, {"RMS": 1}, _WIDER, _whole_vectors),
        Kernel("softmax", "softmax", _TYPES, _softmax, {}, _WIDER, _whole_vectors),
        Kernel("gemm", "gemm", {"float32": {}}, _gemm),
    )
}
"""By their names."""
