"""Arithmetic over the parameters of a space: constraints, grids, sizes. Nothing else can be written in it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

from cudasched._text import closest
from cudasched.errors import ConfigError

__all__ = ["Expression"]

_LARGEST_EXPONENT = 64


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise OverflowError(f"the exponent {exponent} is too large")
    return float(base**exponent) if exponent < 0 or isinstance(base, float) else base**exponent


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil_div": lambda a, b: -(-a // b),
    "log2": math.log2,
    "max": max,
    "min": min,
    "power": _power,
}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.IfExp),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.List),
)


class Expression:
    """One expression: numbers, names, ``+ - * / // %``, comparisons, ``and or not in``, ``a if b else c``.

    Functions: ``min``, ``max``, ``abs``, ``ceil_div``, ``log2``, ``power``.

    Attributes:
        text: As it was written.
        names: The names in it that are values.
    """

    def __init__(self, text: str | int | float, *, where: str, known: Collection[str]) -> None:
        """Parses it.

        Args:
            text: The expression; a number stands for itself.
            where: For messages: "constraint 2".
            known: The names that values will be given for.

        Raises:
            ConfigError: It is no such expression, or has a name that is not known.
        """
        self.text = str(text)
        self._where = where
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"{where}: '{self.text}' is no expression") from None
        names = set()
        for node in ast.walk(tree):
            if not isinstance(node, _NODES):
                raise ConfigError(f"{where}: '{self.text}' has {type(node).__name__}, which expressions may not have")
            if isinstance(node, ast.Constant) and not isinstance(node.value, (bool, int, float, str)):
                raise ConfigError(f"{where}: '{self.text}' has {node.value!r}, which expressions may not have")
            if isinstance(node, ast.Call) and (
                not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords
            ):
                raise ConfigError(f"{where}: '{self.text}' calls what is none of {', '.join(_FUNCTIONS)}")
            if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
                if node.id not in known:
                    hint = closest(node.id, known) or f"; there are {', '.join(sorted(known))}"
                    raise ConfigError(f"{where}: '{self.text}' has the name {node.id}, which is not known{hint}")
                names.add(node.id)
        self.names = frozenset(names)
        self._code: CodeType = compile(tree, where, "eval")

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Its value.

        Raises:
            ConfigError: It cannot be computed: a division by zero, a number that is too large, text in a sum.
        """
        try:
            return eval(self._code, {"__builtins__": {}, **_FUNCTIONS}, dict(values))
        except (ArithmeticError, TypeError, ValueError) as error:
            used = ", ".join(f"{name} = {values[name]!r}" for name in sorted(self.names))
            raise ConfigError(f"{self._where}: '{self.text}' cannot be computed with {used}: {error}") from None

    def integer(self, values: Mapping[str, Any]) -> int:
        """Its value, which is a whole number of 0 or more.

        Raises:
            ConfigError: It is none.
        """
        value = self(values)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
            raise ConfigError(f"{self._where}: '{self.text}' is {value!r}, not a whole number of 0 or more")
        if isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"{self._where}: '{self.text}' is {value!r}, no whole number; ceil_div(a, b) rounds up")
        return int(value)
