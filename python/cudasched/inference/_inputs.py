"""Whether an input is like the example."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from cudasched._text import shown
from cudasched.inference._errors import InputError

__all__ = ["check_input", "number"]


def check_input(x: Any, example: Any, max_bytes: int | None) -> None:
    """Compares structure, dtypes and shapes of an input with those of an example; None: any will do.

    Raises:
        InputError: The input differs from the example, or its arrays have more than `max_bytes`.
    """
    if example is not None:
        _compare(x, example, "x")
    if max_bytes is not None and (nbytes := sum(map(_nbytes, _leaves(x)))) > max_bytes:
        raise InputError(f"x has {nbytes:,} bytes; at most {max_bytes:,} (max_bytes)")


def number(name: str, value: object) -> float:
    """Raises InputError."""
    try:
        if isinstance(value, (float, int, Real)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer
        pass
    raise InputError(f"{name} = {shown(value)}: a finite number is needed")


def _compare(x: Any, example: Any, name: str) -> None:
    if hasattr(example, "shape") and hasattr(example, "dtype"):
        for attribute in ("dtype", "shape"):
            has, needs = getattr(x, attribute, None), getattr(example, attribute)
            if has != needs:
                raise InputError(f"{name} has {attribute} {_written(has)}; {_written(needs)} is needed")
    elif isinstance(example, Mapping):
        if not isinstance(x, Mapping):
            raise InputError(
                f"{name} is a {type(x).__name__}; a mapping with {', '.join(map(shown, example))} is needed"
            )
        for key in (*example, *x):
            if key not in x or key not in example:
                raise InputError(f"{name} {'has no' if key in example else 'has an unknown'} input {shown(key)}")
            _compare(x[key], example[key], f"{name}[{shown(key)}]")
    elif isinstance(example, (list, tuple)):
        if not isinstance(x, type(example)) or len(x) != len(example):
            raise InputError(f"{name} is {shown(x)}; a {type(example).__name__} of {len(example)} inputs is needed")
        for place, (one, other) in enumerate(zip(x, example, strict=True)):
            _compare(one, other, f"{name}[{place}]")
    elif not isinstance(x, type(example)):
        raise InputError(f"{name} is a {type(x).__name__}; a {type(example).__name__} is needed")


def _written(value: Any) -> str:
    return str(tuple(value) if isinstance(value, tuple) else value)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (Mapping, list, tuple)) or getattr(getattr(x, "dtype", None), "kind", "") == "O":
        for value in x.values() if isinstance(x, Mapping) else getattr(x, "flat", x):
            yield from _leaves(value)
    else:
        yield x


def _nbytes(x: Any) -> int:
    return len(x) if isinstance(x, (bytes, bytearray, str)) else int(getattr(x, "nbytes", 0))
