"""Models as the open inference protocol (KServe v2) has them, whatever carries it.

The rows of a request's tensors are requests of the batcher, each of which may be in another batch. A batcher here has
an example: an array, or a mapping of arrays by the names of the inputs. An array of objects is one of BYTES. Each model
has one version, "1".
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudasched import __version__
from cudasched._text import one_line, shown
from cudasched.errors import ConfigError, Error
from cudasched.inference._batcher import Batcher
from cudasched.inference._errors import DeadlineError, InputError, QueueFullError, RunError, UseError
from cudasched.inference._inputs import number

__all__ = [
    "VERSION",
    "Asked",
    "Models",
    "check",
    "check_known",
    "datatype",
    "decoded",
    "indexed",
    "numbers",
    "raw",
    "refusal",
    "server",
]

VERSION = "1"
"""Of every model."""

_DATATYPES = {
    "bool": "BOOL",
    **{f"{'u' * unsigned}int{bits}": f"{'U' * unsigned}INT{bits}" for bits in (8, 16, 32, 64) for unsigned in (0, 1)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "object": "BYTES",
}
_DTYPES = {datatype: np.dtype(dtype) for dtype, datatype in _DATATYPES.items()}
_ELEMENTS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {bytes, str}}
"""The types of a list's elements, by the dtype's kind."""
_LENGTH = struct.Struct("<I")
_UNSUPPORTED = ("classification", "shared_memory_region")


class _UnknownModelError(Error):
    """There is no such model, or no such version of it."""


_CODES: dict[type[Exception], tuple[int, str]] = {
    _UnknownModelError: (404, "NOT_FOUND"),
    InputError: (400, "INVALID_ARGUMENT"),
    QueueFullError: (503, "UNAVAILABLE"),
    UseError: (503, "UNAVAILABLE"),
    DeadlineError: (504, "DEADLINE_EXCEEDED"),
    RunError: (500, "INTERNAL"),
}


def refusal(error: Exception) -> tuple[int, str, str] | None:
    """Of a request's error: the status of HTTP, the code of gRPC, and the message; None: it is of another kind."""
    codes = next((codes for kind, codes in _CODES.items() if isinstance(error, kind)), None)
    return codes and (*codes, one_line(str(error))[:500])


@dataclass
class Asked:
    """A request for inference.

    Attributes:
        model: The model's name.
        version: Empty: the only one.
        inputs: Names and arrays.
        outputs: Names; empty: all.
        parameters: Of the request. ``priority`` (1 is the highest; 0: the lowest) and ``timeout`` (us; 0: the
            batcher's) are Triton's.
    """

    model: str
    version: str
    inputs: Sequence[tuple[str, Any]]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Models:
    """Batchers by name.

    Args:
        batchers: Each has an example.

    Raises:
        ConfigError: One has no example, or an example or answer that is no array and no mapping of arrays.
    """

    def __init__(self, batchers: Mapping[str, Batcher]) -> None:
        self._batchers = dict(batchers)
        self._inputs = {name: _inputs(name, batcher.example) for name, batcher in batchers.items()}
        self._outputs = {name: _answer(name, batcher.answer) for name, batcher in batchers.items()}

    def server(self) -> dict[str, Any]:
        """The server's metadata."""
        return server()

    def ready(self) -> bool:
        """Whether all models are."""
        return True

    def known(self, name: str, version: str = "") -> Batcher:
        """A model's batcher. Raises _UnknownModelError, which says which there are."""
        check_known(name, version, self._batchers)
        return self._batchers[name]

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """A model's inputs and outputs, with -1 for the number of rows."""
        self.known(name, version)
        inputs, outputs = (
            [
                {"name": tensor, "datatype": datatype(array), "shape": [-1, *array.shape]}
                for tensor, array in arrays.items()
            ]
            for arrays in (self._inputs[name], self._outputs[name])
        )
        return {"name": name, "versions": [VERSION], "platform": "cudasched", "inputs": inputs, "outputs": outputs}

    def index(self) -> list[dict[str, str]]:
        """The models, all of which are ready."""
        return [indexed(name, True) for name in self._batchers]

    def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Triton's, of one model or of all (no name); with `Batcher.statistics` under ``batcher``.

        Times of requests that failed, and of copies, are not known and left out.
        """
        if not name:
            return [one for each in self._batchers for one in self.statistics(each, version)]
        counts = self.known(name, version).statistics()
        ran = sum(size * batches for size, batches in counts.batches.items())
        failed = counts.failed + counts.refused + counts.full + counts.timed_out
        own = {
            "success": {"count": counts.completed, "ns": _ns(counts.answer_ms)},
            "fail": {"count": failed, "ns": 0},
            "queue": {"count": ran, "ns": _ns(counts.queue_ms)},
            "compute_infer": {"count": ran, "ns": _ns(sum(size * ms for size, ms in counts.run_ms.items()))},
        }
        sizes = [
            {"batch_size": size, "compute_infer": {"count": batches, "ns": _ns(counts.run_ms[size])}}
            for size, batches in sorted(counts.batches.items())
        ]
        return [
            {
                "name": name,
                "version": VERSION,
                "last_inference": round(1e3 * counts.last_s),
                "inference_count": ran,
                "execution_count": sum(counts.batches.values()),
                "inference_stats": own,
                "batch_stats": sizes,
                "batcher": vars(counts),
            }
        ]

    def submit(self, asked: Asked) -> list[Future[Any]]:
        """The answers to the rows of a request.

        Raises:
            Error: One that `refusal` knows; none of the rows is submitted then.
        """
        batcher, rows, deadline_ms, priority = self.checked(asked)
        return batcher._submit(rows, deadline_ms, priority)

    def checked(self, asked: Asked) -> tuple[Batcher, list[Any], float | None, float]:
        """The batcher of a request, its rows, its deadline in ms and its priority. Raises as `submit`."""
        batcher = self.known(asked.model, asked.version)
        rows = self._rows(asked, batcher)
        outputs = self._outputs[asked.model]
        if unknown := [name for name in asked.outputs if name not in outputs]:
            raise InputError(f"no output is named {shown(unknown[0])}; the outputs are {', '.join(outputs)}")
        if not asked.parameters:
            return batcher, rows, None, 0
        timeout_us, priority = (
            number(f"the parameter {name}", asked.parameters.get(name, 0)) for name in ("timeout", "priority")
        )
        if priority and priority < 1:
            raise InputError(f"the parameter priority = {priority:g}: 1 is the highest, and 0 the lowest")
        return batcher, rows, timeout_us / 1e3 if timeout_us else None, 1 / priority if priority else 0

    def outputs(self, asked: Asked, answers: list[Any]) -> dict[str, Any]:
        """Arrays of the outputs that were asked for, by name. Raises RunError where the answers are no arrays."""
        parts = [_parts(answer) for answer in answers]
        arrays = {}
        for name in asked.outputs or parts[0]:
            try:
                rows = [_array(part[name]) for part in parts]
                array = _array(np.stack(rows)) if len(rows) > 1 else rows[0][None]
            except (KeyError, RuntimeError, TypeError, ValueError):  # RuntimeError: PyTorch's, of one with gradients
                array = None
            if datatype(array) is None:
                raise RunError(
                    f"the output {name} is {shown(parts[0].get(name))}: numbers or strings of one shape are needed"
                )
            arrays[name] = array
        return arrays

    def _rows(self, asked: Asked, batcher: Batcher) -> list[Any]:
        inputs, arrays = self._inputs[asked.model], dict(asked.inputs)
        counts = {len(array) for array in arrays.values()}
        if arrays.keys() != inputs.keys():
            raise InputError(f"the inputs are {', '.join(sorted(inputs))}; given are {', '.join(sorted(arrays))}")
        if len(counts) != 1 or 0 in counts or len(arrays) != len(asked.inputs):
            raise InputError("each input is given once, and all have the same number of rows, at least one")
        count = counts.pop()
        if count > batcher.max_queue:
            raise InputError(f"{count} rows; at most {batcher.max_queue} (max_queue)")
        for name, array in arrays.items():
            kind, shape, needed = datatype(array), list(array.shape[1:]), inputs[name]
            if (kind, shape) != (datatype(needed), list(needed.shape)):
                raise InputError(
                    f"{name} has rows of {kind} {shape}; {datatype(needed)} {list(needed.shape)} is needed"
                )
            arrays[name] = _like(needed, _writable(array))
        rows = range(count)
        if isinstance(batcher.example, Mapping):
            return [{name: array[row, ...] for name, array in arrays.items()} for row in rows]
        return [arrays["input"][row, ...] for row in rows]


def server() -> dict[str, Any]:
    """The server's metadata."""
    return {"name": "cudasched", "version": __version__, "extensions": ["binary_tensor_data", "statistics"]}


def indexed(name: str, ready: bool) -> dict[str, str]:
    """A model's line of the index."""
    return {
        "name": name,
        "version": VERSION,
        "state": "READY" if ready else "UNAVAILABLE",
        "reason": "" if ready else "its process starts again",
    }


def check_known(name: str, version: str, names: Collection[str]) -> None:
    """Raises _UnknownModelError, which says which there are."""
    if name not in names:
        raise _UnknownModelError(f"no model is named {shown(name)}; there are {', '.join(sorted(names))}")
    if version not in ("", VERSION):
        raise _UnknownModelError(f"the model {shown(name)} has no version {shown(version)}; it has {VERSION}")


def decoded(name: str, datatype: str, shape: Sequence[int], data: Any) -> Any:
    """An array of a tensor; it may be a view of the data.

    Args:
        name: Of the tensor.
        datatype: The protocol's.
        shape: Begins with the number of rows.
        data: The elements in rows: a list, nested or flat, or bytes (little-endian; of BYTES, each has its length in
            four bytes before it).

    Raises:
        InputError: The data is none of that datatype and shape.
    """
    dtype = _DTYPES.get(datatype)
    if dtype is None:
        raise InputError(f"{name}: datatype {datatype!r} is not supported; {', '.join(_DTYPES)} are")
    shape = tuple(shape)
    if not shape or min(shape) < 0:
        raise InputError(f"{name}: shape {list(shape)} does not begin with a number of rows")
    try:
        if not isinstance(data, bytes):
            array = np.array(data, object)
            if wrong := {*map(type, array.ravel())} - _ELEMENTS[dtype.kind]:
                raise TypeError(f"an element is of type {wrong.pop().__name__}")
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
            if datatype == "BYTES":
                array = np.array([_bytes(each) for each in array.ravel()], dtype)
        elif datatype == "BYTES":
            array = np.array(_split(data), dtype)
        elif datatype == "BOOL":
            array = np.frombuffer(data, np.uint8) != 0
        else:
            array = np.frombuffer(data, dtype)
        return array.reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}: the data are no {datatype} of shape {list(shape)}: {error}") from None


def raw(array: Any) -> bytes:
    """The elements of an output as bytes, as `decoded` reads them."""
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(each)) + each for each in array.ravel())
    return bytes(array.tobytes())


def numbers(name: str, array: Any) -> list[Any]:
    """The elements of an output for JSON. Raises RunError where JSON cannot have them."""
    try:
        if array.dtype == object:
            return [each.decode() for each in array.ravel()]
    except UnicodeDecodeError:
        raise RunError(f"the output {name} is no UTF-8, which JSON needs: ask for binary data") from None
    if not np.isfinite(array).all():
        raise RunError(f"the output {name} has numbers that are not finite, which JSON has not: ask for binary data")
    values: list[Any] = array.ravel().tolist()
    return values


def check(parameters: Mapping[str, Any]) -> None:
    """Raises InputError where parameters of a tensor ask for an extension that is not here."""
    for name in parameters:
        if name in _UNSUPPORTED:
            raise InputError(f"the parameter {name} is not supported")


def _inputs(name: str, example: Any) -> dict[str, Any]:
    """The example's arrays by the names of the inputs."""
    arrays = dict(example) if isinstance(example, Mapping) else {"input": example}
    for tensor, array in arrays.items():
        if not isinstance(tensor, str) or not hasattr(array, "shape") or datatype(array) is None:
            raise ConfigError(f"the model {shown(name)} needs an example of arrays, and has {shown(example)}")
    return arrays


def _answer(name: str, answer: Any) -> dict[str, Any]:
    """The arrays of the answer to the example by the names of the outputs."""
    try:
        arrays = {output: _array(part) for output, part in _parts(answer).items()}
    except (RuntimeError, TypeError, ValueError):
        arrays = {}
    if not arrays or not all(map(datatype, arrays.values())):
        raise ConfigError(f"the model {shown(name)} answers {shown(answer)}: arrays are needed")
    return arrays


def _parts(answer: Any) -> dict[str, Any]:
    """The outputs of an answer: named by a mapping's keys, else numbered."""
    if isinstance(answer, Mapping):
        return {str(name): part for name, part in answer.items()}
    return {f"output_{place}": part for place, part in enumerate(answer if isinstance(answer, tuple) else (answer,))}


def _array(part: Any) -> Any:
    """Strings become bytes. Raises TypeError, ValueError."""
    array = np.array(part, object) if isinstance(part, (bytes, str)) else np.asarray(part)
    if array.dtype.kind not in "OSU":
        return array
    return np.array([_bytes(each) for each in array.ravel()], object).reshape(array.shape)


def datatype(array: Any) -> str | None:
    """The protocol's name of an array's dtype, NumPy's or PyTorch's; None: it has none."""
    return _named(getattr(array, "dtype", None))


@functools.cache
def _named(dtype: Any) -> str | None:
    return _DATATYPES.get(str(dtype).removeprefix("torch."))


def _writable(array: Any) -> Any:
    """The model may write to its inputs."""
    return array if array.flags.writeable else array.copy()


def _like(example: Any, array: Any) -> Any:
    """PyTorch's tensor where the example is one."""
    if type(example) is np.ndarray:
        return array
    is_torch = type(example).__module__.partition(".")[0] == "torch"
    return sys.modules["torch"].from_numpy(array) if is_torch else array


def _bytes(element: Any) -> bytes:
    """Raises TypeError."""
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, bytes):
        return element
    raise TypeError(f"{shown(element)} is no string")


def _split(data: bytes) -> list[bytes]:
    """Raises ValueError."""
    elements, place = [], 0
    while place < len(data):
        start = place + _LENGTH.size
        place = start + (_LENGTH.unpack_from(data, place)[0] if start <= len(data) else 0)
        if place > len(data) or start > len(data):
            raise ValueError("an element ends after the data")
        elements.append(data[start:place])
    return elements


def _ns(value_ms: float) -> int:
    return round(value_ms * 1e6)
