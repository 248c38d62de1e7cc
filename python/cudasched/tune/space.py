"""A kernel's choices: parameters, constraints, its launch and arguments; read from TOML.

``docs/tuning.md`` has the form of the file. A `Space` is the file; a `Problem` is a space with a shape and a GPU, whose
configurations are enumerated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cudasched._text import closest, shown
from cudasched.advise.occupancy import ARCHITECTURES, MAX_THREADS_PER_BLOCK, Architecture, occupancy
from cudasched.config import parse_toml
from cudasched.errors import ConfigError
from cudasched.tune._expression import FUNCTIONS, Expression
from cudasched.tune._fields import (
    MOST_CONFIGURATIONS,
    Value,
    finite,
    is_number,
    refuse_large,
    refuse_unknown,
    table_of,
    text_of,
    values_of,
)
from cudasched.tune._need import need

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

__all__ = ["Argument", "Configuration", "Gpu", "Launch", "Problem", "Space", "TensorMap", "read", "with_includes"]

Configuration = Mapping[str, Value]

_MOST_COMBINATIONS = 5_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE_BYTES = 1 << 20
_MOST_INCLUDES = 1000
_MOST_GRID = (2**31 - 1, 65535, 65535)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]{1,200})"', re.MULTILINE)
TYPES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
}
"""Bytes of an element."""
_WHOLE: Mapping[str, str] = {"int8": "b", "uint8": "B", "int32": "i", "uint32": "I", "int64": "q"}
"""struct's format of an element: a number that does not fit is no value of the type."""
Role = Literal["input", "output", "inout", "scalar", "workspace", "tensor_map"]
_ROLES = ("input", "output", "inout", "scalar", "workspace", "tensor_map")
_MAPPED = ("input", "output", "inout")
_SWIZZLES = (0, 32, 64, 128)
_FILLS = ("normal", "uniform", "zeros", "ones", "index")


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that decide which configurations there are.

    Attributes:
        name: The driver's name.
        capability: Such as "9.0".
        sms: Multiprocessors.
        l2_bytes: Of the L2 cache.
    """

    name: str
    capability: str
    sms: int
    l2_bytes: int = 50 << 20

    @property
    def architecture(self) -> Architecture:
        """The limits of one multiprocessor.

        Raises:
            ConfigError: The compute capability is not known.
        """
        found = ARCHITECTURES.get(self.capability)
        if found is None:
            raise ConfigError(
                f"compute capability {self.capability} is not known; there are {', '.join(ARCHITECTURES)}"
            )
        return found

    @property
    def target(self) -> str:
        """The compilers' name of the architecture: "sm_90a"."""
        suffix = "a" if self.capability in ("9.0", "10.0", "10.3", "11.0", "12.0", "12.1") else ""
        return f"sm_{self.capability.replace('.', '')}{suffix}"


@dataclass(frozen=True)
class Argument:
    """One argument of the kernel, in its order.

    Attributes:
        name: The name.
        role: An array that is read, written or both; a scalar; the kernel's own working memory (zeros before the first
            launch); or a tensor map by which TMA reads or writes an array.
        type: Of the elements.
        size: Elements of an array; bytes of a workspace.
        value: Of a scalar.
        fill: The initial values of an input: normal, uniform (0 to 1), zeros, ones or index.
        mean: Added to each element of such an input.
        of: The array of a tensor map.
        dims: The sizes, the innermost first.
        box: The part that one load takes of each.
        swizzle: Bytes over which a box is swizzled in shared memory: 0, 32, 64 or 128.
    """

    name: str
    role: Role
    type: str
    size: Expression | None
    value: Expression | None
    fill: str
    mean: float
    of: str = ""
    dims: tuple[Expression, ...] = ()
    box: tuple[Expression, ...] = ()
    swizzle: int = 0


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees an array, for one configuration.

    Attributes:
        of: The array's name.
        type: Of the elements.
        dims: Its sizes, the innermost first; the array is dense.
        box: The part that one load takes of each.
        swizzle: Bytes over which a box is swizzled in shared memory.
    """

    of: str
    type: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    """How a configuration is launched.

    Attributes:
        grid: Blocks in x, y and z.
        block: Threads in x, y and z.
        shared_bytes: Dynamic shared memory.
        workspace_bytes: Device memory that the kernel needs for itself.
        macros: The compiler's macros.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    workspace_bytes: int
    macros: tuple[tuple[str, str], ...]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


class Space:
    """A space file: parameters, constraints, launch, arguments.

    Attributes:
        path: The file.
        text: The file's content.
        kernel: The kernel's function.
        source: Its source file, if the space names one.
        parameters: Name to values.
        constants: Macros that are the same for all configurations.
        shape: Names and default values of a problem's dimensions: rows, columns.
        arguments: Of the kernel.
        reference: File and function that compute the right output; None: the first configuration that runs.
        relative: Tolerance relative to the right value.
        absolute: Additional tolerance.
    """

    def __init__(self, text: str, path: Path) -> None:
        """Reads a space.

        Args:
            text: TOML.
            path: The file: names of files in the text are relative to its place.

        Raises:
            ConfigError: With the fault and the place.
        """
        self.path = path
        self.text = text
        data = parse_toml(path, text.removeprefix("\ufeff"))
        try:
            refuse_large(data)
            self._read(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def _read(self, data: dict[str, Any]) -> None:
        refuse_unknown(
            data,
            (
                *("kernel", "source", "constraints", "shape", "constants", "parameters", "macros", "launch"),
                *("arguments", "check", "work"),
            ),
            "space",
        )
        self.kernel: str = data.get("kernel", "")
        if not isinstance(self.kernel, str) or not _NAME.fullmatch(self.kernel):
            raise ConfigError('it names no kernel: kernel = "name"')
        source = data.get("source")
        if source is not None:
            text_of(source, "source, the name of a file,")
        self.source = self.path.parent / source if source else None
        self.shape = self._numbers(data.get("shape", {}), "shape")
        self.constants = self._numbers(data.get("constants", {}), "constants")
        parameters = table_of(data.get("parameters", {}), "parameters")
        if not parameters:
            raise ConfigError("it has no parameters: the space is empty")
        self.parameters = {self._name(name, "parameter"): values_of(name, given) for name, given in parameters.items()}
        count = math.prod(map(len, self.parameters.values()))
        if count > _MOST_COMBINATIONS:
            raise ConfigError(
                f"its parameters have {count:,} combinations, more than {_MOST_COMBINATIONS:,}: give them fewer values"
            )
        own = ("sms", "capability", "threads")
        groups: dict[str, Iterable[str]] = {
            "shape": self.shape,
            "constants": self.constants,
            "parameters": self.parameters,
            "every expression": (*own, *FUNCTIONS),
        }
        names = {where: set(table) for where, table in groups.items()}
        for (one, first), (other, second) in itertools.combinations(names.items(), 2):
            for name in first & second:
                raise ConfigError(f"{name} is in {one} and in {other}")
        self._names = {*self.shape, *self.constants, *self.parameters, *own}
        constraints = data.get("constraints", [])
        if not isinstance(constraints, list):
            raise ConfigError("constraints is a list of expressions")
        self.constraints = [self._expression(one, f"constraint {i}") for i, one in enumerate(constraints, 1)]
        macros = table_of(data.get("macros", {}), "macros")
        self.macros = {
            self._name(name, "macro"): self._expression(one, f"macro {name}") for name, one in macros.items()
        }
        self._read_launch(table_of(data.get("launch", {}), "launch"))
        arguments = data.get("arguments", [])
        if not isinstance(arguments, list) or not arguments:
            raise ConfigError("it has no [[arguments]]: list the arguments that the kernel is called with")
        self.arguments = tuple(self._argument(table_of(one, "an argument"), i) for i, one in enumerate(arguments, 1))
        self._check_maps()
        if not any(one.role in ("output", "inout") for one in self.arguments):
            raise ConfigError("no argument is an output: nothing could be checked")
        check = table_of(data.get("check", {}), "check")
        refuse_unknown(check, ("reference", "relative", "absolute"), "check")
        self.reference = self._reference(check.get("reference"))
        self.relative = finite(check.get("relative", 1e-4), "check: relative")
        self.absolute = finite(check.get("absolute", 1e-5), "check: absolute")
        if not 0 <= self.relative < 1 or self.absolute < 0:
            raise ConfigError(
                f"check: relative = {self.relative:g}, absolute = {self.absolute:g}: tolerances are 0 or more, and "
                "with a relative one of 1 or more nothing would be checked"
            )
        self.work = self._expression(data.get("work", 0), "work")
        self._digest_of = json.dumps(
            {key: data[key] for key in sorted(data) if key not in ("parameters", "constraints", "shape")}
        )

    @staticmethod
    def _name(name: str, what: str) -> str:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{what} {shown(name)}: a name has letters, digits and _ alone")
        return name

    def _numbers(self, given: Any, where: str) -> dict[str, int | float]:
        table = table_of(given, where)
        for name, value in table.items():
            self._name(name, where)
            if not is_number(value) or not math.isfinite(value):
                raise ConfigError(f"{where}: {name} is a number, not {shown(value)}")
        return dict(table)

    def _expression(self, given: Any, where: str) -> Expression:
        if not isinstance(given, (str, int, float)) or isinstance(given, bool):
            raise ConfigError(f"{where} is an expression, not {shown(given)}")
        return Expression(given, where=where, known=self._names)

    def _read_launch(self, table: dict[str, Any]) -> None:
        refuse_unknown(table, ("grid", "block", "shared_bytes", "workspace_bytes"), "launch")

        def three(key: str) -> tuple[Expression, ...]:
            given = table.get(key)
            listed = given if isinstance(given, list) else [given]
            if given is None or not 1 <= len(listed) <= 3:
                raise ConfigError(f"launch: {key} is one to three expressions")
            return tuple(self._expression(one, f"launch: {key}") for one in [*listed, 1, 1][:3])

        self._block = three("block")
        self._grid = three("grid")
        self._shared = self._expression(table.get("shared_bytes", 0), "launch: shared_bytes")
        self._workspace = self._expression(table.get("workspace_bytes", 0), "launch: workspace_bytes")

    def _argument(self, table: dict[str, Any], place: int) -> Argument:
        name = table.get("name", f"argument {place}")
        where = f"argument {name}" if isinstance(name, str) else f"argument {place}"
        of_maps = ("of", "dims", "box", "swizzle") if table.get("role") == "tensor_map" else ()
        refuse_unknown(table, ("name", "role", "type", "size", "value", "fill", "mean", *of_maps), where)
        role, kind = table.get("role"), table.get("type", "float32" if table.get("role") != "workspace" else "uint8")
        if role not in _ROLES:
            raise ConfigError(f"{where}: role is one of {', '.join(_ROLES)}, not {shown(role)}")
        if not isinstance(kind, str) or kind not in TYPES:
            raise ConfigError(f"{where}: type is one of {', '.join(TYPES)}, not {shown(kind)}")
        fill = table.get("fill", "normal")
        if fill not in _FILLS:
            raise ConfigError(f"{where}: fill is one of {', '.join(_FILLS)}, not {shown(fill)}")
        wanted = {"scalar": "value", "workspace": "", "tensor_map": ""}.get(role, "size")
        if wanted and wanted not in table:
            raise ConfigError(f"{where}: it has no {wanted}")
        return Argument(
            name=text_of(name, f"argument {place}: its name"),
            role=role,
            type=kind,
            size=self._expression(table["size"], f"{where}: size") if wanted == "size" else None,
            value=self._expression(table["value"], f"{where}: value") if wanted == "value" else None,
            fill=fill,
            mean=finite(table.get("mean", 0.0), f"{where}: mean"),
            **(self._map(table, where) if role == "tensor_map" else {}),
        )

    def _map(self, table: dict[str, Any], where: str) -> dict[str, Any]:
        def sizes(key: str) -> tuple[Expression, ...]:
            given = table.get(key)
            if not isinstance(given, list) or not 1 <= len(given) <= 5:
                raise ConfigError(f"{where}: {key} is a list of one to five expressions, the innermost size first")
            return tuple(self._expression(one, f"{where}: {key}") for one in given)

        dims, box, swizzle = sizes("dims"), sizes("box"), table.get("swizzle", 0)
        if len(dims) != len(box):
            raise ConfigError(f"{where}: {len(dims)} dims and {len(box)} sizes of the box, which go together")
        if isinstance(swizzle, bool) or swizzle not in _SWIZZLES:
            raise ConfigError(f"{where}: swizzle is one of {', '.join(map(str, _SWIZZLES))}, not {shown(swizzle)}")
        return {"of": str(table.get("of", "")), "dims": dims, "box": box, "swizzle": swizzle}

    def _check_maps(self) -> None:
        arrays = [one.name for one in self.arguments if one.role in _MAPPED]
        for one in self.arguments:
            if one.role == "tensor_map" and one.of not in arrays:
                hint = closest(one.of, arrays) or f"; there are {', '.join(arrays)}"
                raise ConfigError(f"argument {one.name}: it is a map of {shown(one.of)}, which is no array{hint}")

    def _reference(self, given: Any) -> tuple[Path, str] | None:
        if given is None:
            return None
        file, _, function = text_of(given, "check: reference, file.py:function,").partition(":")
        path = self.path.parent / file
        if not file or not _NAME.fullmatch(function):
            raise ConfigError(f"check: reference is file.py:function, not {shown(given)}")
        return path, function

    def problem(self, gpu: Gpu, shape: Mapping[str, int | float] | None = None) -> Problem:
        """The configurations for a shape on a GPU.

        Args:
            gpu: The GPU.
            shape: The differences from the shape in the file.

        Raises:
            ConfigError: A name that the shape has not, or no configuration is left.
        """
        chosen = dict(self.shape)
        refuse_large(dict(shape or {}))
        for name, value in (shape or {}).items():
            if name not in chosen:
                raise ConfigError(f"the shape has no {name}; it has {', '.join(chosen) or 'no names'}")
            # A value that is 0 by default is switched off by 0, as a mask is.
            if not is_number(value) or not math.isfinite(value) or value < 0 or (value == 0 and chosen[name] != 0):
                raise ConfigError(f"{name} of a shape is a number over 0, not {shown(value)}")
            chosen[name] = value
        return Problem(self, gpu, chosen)

    def fingerprint(self, source: Path, unusual: str = "") -> str:
        """Which measurements belong together: a hash of the source, its includes, the reference and the launch.

        Args:
            source: The kernel's file.
            unusual: How it is compiled and timed, where not by the defaults.
        """
        digest = hashlib.sha256((self._digest_of + unusual).encode())
        reference = [self.reference[0]] if self.reference and self.reference[0].is_file() else []
        for path in [*with_includes(source), *reference]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def with_includes(source: Path) -> list[Path]:
    """A source and the files beside it that it includes, directly or not; each once, under any name.

    Raises:
        ConfigError: There are more than 1,000.
    """
    found: dict[Path, Path] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        named = path.resolve()
        if named in found or not path.is_file():
            continue
        found[named] = path
        if len(found) > _MOST_INCLUDES:
            raise ConfigError(f"{source}: it includes more than {_MOST_INCLUDES} files")
        waiting += [
            path.parent / os.fsdecode(name) for name in _INCLUDE.findall(path.read_bytes()) if b"\0" not in name
        ]
    paths = list(found.values())
    return [*paths[:1], *sorted(paths[1:])]


@dataclass(frozen=True)
class Problem:
    """A space for one shape on one GPU.

    Attributes:
        space: The space.
        gpu: The GPU.
        shape: The dimensions' values.
    """

    space: Space
    gpu: Gpu
    shape: Mapping[str, int | float]
    _launches: dict[int, Launch] = field(default_factory=dict, compare=False, repr=False)

    def _values(self, configuration: Configuration) -> dict[str, Any]:
        capability = float(self.gpu.capability)
        fixed = {"sms": self.gpu.sms, "capability": capability, "threads": 0}
        return {**fixed, **self.shape, **self.space.constants, **configuration}

    @cached_property
    def configurations(self) -> tuple[dict[str, Value], ...]:
        """All that meet the constraints and this GPU's limits of a block, in the order of the file's values.

        Raises:
            ConfigError: There is none, there are too many, or a size, a scalar or the work cannot be computed.
        """
        architecture = self.gpu.architecture
        try:
            _ = self.sizes(), self.scalars(), self.work
        except ConfigError as error:
            raise ConfigError(f"{self.space.path}: {error}") from None
        names = list(self.space.parameters)
        found: list[dict[str, Value]] = []
        refused: dict[str, int] = {}
        for values in itertools.product(*self.space.parameters.values()):
            configuration = dict(zip(names, values, strict=True))
            try:
                why = self._refusal(configuration, architecture)
            except ConfigError as error:
                raise ConfigError(f"{self.space.path}: {error}") from None
            if why:
                refused[why] = refused.get(why, 0) + 1
            else:
                found.append(configuration)
            if len(found) > MOST_CONFIGURATIONS:
                raise ConfigError(f"{self.space.path}: there are more than {MOST_CONFIGURATIONS:,} configurations")
        if not found:
            whys = ", ".join(f"{count} by {why}" for why, count in sorted(refused.items(), key=lambda one: -one[1]))
            raise ConfigError(f"{self.space.path}: no configuration is left, the space is empty: {whys}")
        return tuple(found)

    def refusal(self, configuration: Configuration) -> str:
        """Which constraint or limit of the GPU a configuration does not meet; empty: it is one of `configurations`.

        Raises:
            ConfigError: An expression cannot be computed with it.
        """
        for name, values in self.space.parameters.items():
            if configuration.get(name) not in values:
                return f"{name}, of which the space has {', '.join(map(str, values))}"
        return self._refusal(configuration, self.gpu.architecture)

    def _refusal(self, configuration: Configuration, architecture: Architecture) -> str:
        values = self._values(configuration)
        values["threads"] = math.prod(one.integer(values) for one in self.space._block) if self._blocks_first else 0
        for constraint in self.space.constraints:
            if not constraint(values):
                return f"'{constraint.text}'"
        launch = self.launch(configuration)
        if not 1 <= launch.threads <= MAX_THREADS_PER_BLOCK:
            return f"the block, which has 1 to {MAX_THREADS_PER_BLOCK} threads"
        if launch.shared_bytes > architecture.max_shared_bytes_per_block:
            return f"shared memory, of which a block has at most {architecture.max_shared_bytes_per_block} bytes"
        if launch.blocks < 1:
            return "the grid, which has no block"
        if any(one > most for one, most in zip(launch.grid, _MOST_GRID, strict=True)):
            return f"the grid, which has at most {' x '.join(map(str, _MOST_GRID))} blocks"
        return ""

    @cached_property
    def _blocks_first(self) -> bool:
        """Whether constraints speak of the threads of a block."""
        return any("threads" in one.names for one in self.space.constraints)

    def launch(self, configuration: Configuration) -> Launch:
        """How a configuration is launched.

        Raises:
            ConfigError: An expression gives no whole number.
        """
        values = self._values(configuration)
        block = tuple(one.integer(values) for one in self.space._block)
        values["threads"] = math.prod(block)
        given = {**self.space.constants, **configuration}
        macros = {name: one(values) for name, one in self.space.macros.items()}
        return Launch(
            grid=tuple(one.integer(values) for one in self.space._grid),  # type: ignore[arg-type]
            block=block,  # type: ignore[arg-type]
            shared_bytes=self.space._shared.integer(values),
            workspace_bytes=self.space._workspace.integer(values),
            macros=tuple((name, _macro(value)) for name, value in {**given, **macros}.items()),
        )

    def sizes(self) -> dict[str, int]:
        """Elements of each array."""
        values = self._values({})
        return {one.name: one.size.integer(values) for one in self.space.arguments if one.size is not None}

    def scalars(self) -> dict[str, int | float]:
        """The value of each scalar.

        Raises:
            ConfigError: A value is no number, or not one of its type.
        """
        values = self._values({})
        made = {one.name: (one.value(values), one.type) for one in self.space.arguments if one.value is not None}
        for name, (value, kind) in made.items():
            try:
                if not isinstance(value, (int, float)) or ("int" in kind and value != int(value)):
                    raise ValueError
                if "int" in kind:
                    struct.pack(_WHOLE[kind], int(value))
            except (ValueError, OverflowError, struct.error):
                raise ConfigError(f"argument {name}: {shown(value)} is no {kind}") from None
        return {name: value for name, (value, _) in made.items()}

    def tensor_maps(self, configuration: Configuration) -> dict[str, TensorMap]:
        """How TMA sees the arrays that the kernel has tensor maps of.

        Raises:
            ConfigError: An expression gives no whole number.
        """
        values = self._values(configuration)
        values["threads"] = math.prod(one.integer(values) for one in self.space._block)
        kinds = {one.name: one.type for one in self.space.arguments}
        return {
            one.name: TensorMap(
                of=one.of,
                type=kinds[one.of],
                dims=tuple(size.integer(values) for size in one.dims),
                box=tuple(size.integer(values) for size in one.box),
                swizzle=one.swizzle,
            )
            for one in self.space.arguments
            if one.role == "tensor_map"
        }

    @property
    def work(self) -> float:
        """One launch's work, in the unit of the space (bytes, operations); 0: not stated.

        Raises:
            ConfigError: The value is no number.
        """
        return finite(self.space.work(self._values({})), f"work: '{self.space.work.text}'")

    def occupancy(self, launch: Launch, registers: int = 0, static_shared_bytes: int = 0) -> float:
        """Resident threads of those that a multiprocessor can hold, 0 to 1; registers are known once it is compiled."""
        shared = launch.shared_bytes + static_shared_bytes
        return occupancy(self.gpu.architecture, launch.threads, registers, shared).fraction

    @cached_property
    def features(self) -> NDArray[float64]:
        """A surrogate's features of each configuration, a row each: parameters and launch, on comparable scales."""
        np = need("numpy", "the tuner")
        columns = []
        for name, values in self.space.parameters.items():
            if len(values) < 2:
                continue
            chosen = [one[name] for one in self.configurations]
            if all(map(is_number, values)) and len(values) > 1:
                positive = all(value > 0 for value in values)  # type: ignore[operator]
                columns.append([math.log2(value) if positive else float(value) for value in chosen])  # type: ignore[arg-type]
            elif len(values) == 2:
                columns.append([float(values.index(value)) for value in chosen])
            else:
                columns += [[float(value == one) for value in chosen] for one in values]
        launches = [self.launch(one) for one in self.configurations]
        full = [self.occupancy(launch) for launch in launches]
        columns.append([math.log2(launch.threads) for launch in launches])
        columns.append([math.log2(launch.blocks) for launch in launches])
        columns.append([math.log2(launch.shared_bytes + 1024) for launch in launches])
        columns.append(full)
        rows = np.asarray(columns, dtype=np.float64).T
        spread = rows.std(axis=0)
        kept = spread > 0
        made: NDArray[float64] = (rows[:, kept] - rows[:, kept].mean(axis=0)) / spread[kept]
        return made

    def key(self) -> str:
        """The shape as text, the same for the same shape."""
        return ",".join(f"{name}={number(value)}" for name, value in sorted(self.shape.items()))


def _macro(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def read(path: str | Path) -> Space:
    """Reads a space file.

    Raises:
        ConfigError: The file cannot be read, or has a fault.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _FILE_BYTES:
            raise ConfigError(f"{path}: a space file of more than {_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the space cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the space is no text") from None
    return Space(text, path)


def number(value: int | float) -> str:
    """A number as text, all of its digits: 1048576, 0.5."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def configuration_key(configuration: Configuration) -> str:
    """A configuration as text, the same for the same one."""
    return json.dumps(dict(configuration), sort_keys=True, separators=(",", ":"))


def parse_shape(items: Sequence[str]) -> dict[str, int | float]:
    """NAME=VALUE, as the command line has it.

    Raises:
        ConfigError: It is not of that form, or a name is said twice.
    """
    made: dict[str, int | float] = {}
    for item in items:
        name, sign, text = item.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not sign or not _NAME.fullmatch(name) or not math.isfinite(number):
            raise ConfigError(f"--shape {item}: it is NAME=NUMBER")
        if name in made:
            raise ConfigError(f"--shape {item}: {name} is said twice")
        made[name] = int(number) if number.is_integer() else number
    return made
