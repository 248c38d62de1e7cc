"""Fields of a kernel's TOML file: each is read with a check, whose error says where and what was expected."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from cudasched._text import closest, shown
from cudasched.errors import ConfigError

Value = int | float | str | bool

MOST_CONFIGURATIONS = 200_000
"""Of a space, and values of a parameter."""
_LARGEST = 1 << 63  # TOML's guaranteed range of whole numbers


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            hint = closest(key, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{where}: {key} is not known{hint}")


def table_of(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a table, not {shown(value)}")
    return value


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(value: object, where: str) -> float:
    with contextlib.suppress(OverflowError):
        if is_number(value) and math.isfinite(value):
            return float(value)
    raise ConfigError(f"{where} is a finite number, not {shown(value)}")


def text_of(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ConfigError(f"{where} is a text, not {shown(value)}")
    return value


def refuse_large(data: object) -> None:
    """Whole numbers beyond 64 bits, which TOML and JSON can write, are refused wherever they are."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int) and not -_LARGEST <= one < _LARGEST:
            raise ConfigError(f"{shown(one)} is too large: whole numbers have up to 63 bits")
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []


def values_of(name: str, given: Any) -> tuple[Value, ...]:
    """The values of a parameter: a list, or a range."""
    where = f"parameter {name}"
    if isinstance(given, dict):
        refuse_unknown(given, ("from", "to", "step", "times"), where)
        begin, end = given.get("from"), given.get("to")
        step, times = given.get("step", 0 if "times" in given else 1), given.get("times", 1)
        if not (is_number(begin) and is_number(end) and is_number(step) and is_number(times)):
            raise ConfigError(f"{where}: a range has numbers `from` and `to`, and `step` or `times`")
        if not all(map(math.isfinite, (begin, end, step, times))):
            raise ConfigError(f"{where}: the range has no end")
        if step < 0 or times < 1 or (step == 0 and (times <= 1 or begin <= 0)):
            raise ConfigError(f"{where}: the range has no end: step {step}, times {times}; steps go up")
        made: list[Value] = []
        value = begin
        while value <= end:
            made.append(value)
            value = value * times + step
            if len(made) > MOST_CONFIGURATIONS:
                raise ConfigError(f"{where}: the range has more than {MOST_CONFIGURATIONS} values")
        given = made
    if not isinstance(given, list):
        raise ConfigError(f"{where} is a list of values or a range, not {shown(given)}")
    if not given:
        raise ConfigError(f"{where} has no value: the space is empty")
    for value in given:
        if not isinstance(value, (bool, int, float, str)):
            raise ConfigError(f"{where}: {shown(value)} is no number, text or truth value")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {value} is no finite number")
        if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_.:+<>, *-]{1,100}", value):
            raise ConfigError(f"{where}: {shown(value)} is no plain text, and a compiler would be given it")
    if len(set(map(repr, given))) != len(given):
        raise ConfigError(f"{where} has a value twice")
    return tuple(given)
