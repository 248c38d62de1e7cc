"""Arithmetic over the parameters of a space: constraints, grids, sizes. All else is refused."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

from cudasched._text import closest, shown
from cudasched.errors import ConfigError

__all__ = ["FUNCTIONS", "Expression"]

_MOST_CHARACTERS = 4096
_MOST_BITS = 4096
_LARGEST_EXPONENT = 64
_TOO_MANY = 1 << 63


def _numbers(*given: Any) -> None:
    for one in given:
        if not isinstance(one, (int, float)):
            raise TypeError(f"{shown(one)} is no number")


def _refuse_large(bits: float) -> None:
    if bits > _MOST_BITS:
        raise OverflowError("the number is too large")


def _power(base: float, exponent: float) -> float:
    _numbers(base, exponent)
    if not abs(exponent) <= _LARGEST_EXPONENT:
        raise OverflowError(f"the exponent {exponent} is too large")
    if isinstance(base, int):
        _refuse_large(base.bit_length() * exponent)
    made = base**exponent
    _numbers(made)  # of a negative base it may be complex
    return float(made) if exponent < 0 or isinstance(base, float) else made


def _times(one: float, other: float) -> float:
    _numbers(one, other)
    if isinstance(one, int) and isinstance(other, int):
        _refuse_large(one.bit_length() + other.bit_length())
    return one * other


def _modulo(one: float, other: float) -> float:
    _numbers(one, other)
    return one % other


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil_div": lambda a, b: -(-a // b),
    "log2": math.log2,
    "max": max,
    "min": min,
    "power": _power,
}
# In the place of operators, which would repeat or format texts, and have no bound for numbers. A name that no parameter
# can have.
_OPERATORS: Mapping[type[ast.operator], str] = {ast.Mult: "*", ast.Mod: "%"}
_GLOBALS: dict[str, Any] = {"__builtins__": {}, "*": _times, "%": _modulo, **FUNCTIONS}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.IfExp),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.List),
)


class _Bounded(ast.NodeTransformer):
    """Calls functions in the place of operators that are to be bounded."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], []) if name else node


class Expression:
    """One expression: numbers, names, ``+ - * / // %``, comparisons, ``and or not in``, ``a if b else c``.

    Functions: ``min``, ``max``, ``abs``, ``ceil_div``, ``log2``, ``power``.

    Attributes:
        text: The source text.
        names: The names in it that are values.
    """

    def __init__(self, text: str | int | float, *, where: str, known: Collection[str]) -> None:
        """Parses the text.

        Args:
            text: The expression; a number stands for itself.
            where: For messages: "constraint 2".
            known: The names that values will be given for.

        Raises:
            ConfigError: It is no such expression, or has a name that is not known.
        """
        self.text = str(text)
        self._where = where
        if len(self.text) > _MOST_CHARACTERS:
            raise ConfigError(f"{where}: an expression has at most {_MOST_CHARACTERS} characters")
        try:
            with warnings.catch_warnings():  # of Python, about numbers beside words and calls of numbers
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text.strip(), mode="eval")
        except (RecursionError, MemoryError):  # some Pythons raise this in parsing, others in compiling
            raise ConfigError(f"{where}: {shown(self.text)} is nested too deep") from None
        except (SyntaxError, ValueError):
            raise ConfigError(f"{where}: {shown(self.text)} is no expression") from None
        names = set()
        for node in ast.walk(tree):
            if not isinstance(node, _NODES):
                raise ConfigError(f"{where}: '{self.text}' has {type(node).__name__}, which expressions may not have")
            if isinstance(node, ast.Constant) and not isinstance(node.value, (bool, int, float, str)):
                raise ConfigError(f"{where}: '{self.text}' has {shown(node.value)}, which expressions may not have")
            if isinstance(node, ast.Call) and (
                not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords
            ):
                raise ConfigError(f"{where}: '{self.text}' calls another function than {', '.join(FUNCTIONS)}")
            if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
                if node.id not in known:
                    hint = closest(node.id, known) or f"; there are {', '.join(sorted(known))}"
                    raise ConfigError(f"{where}: '{self.text}' has the name {node.id}, which is not known{hint}")
                names.add(node.id)
        self.names = frozenset(names)
        try:
            bounded = ast.fix_missing_locations(_Bounded().visit(tree))
            self._code: CodeType = compile(bounded, "<expression>", "eval")
        except (RecursionError, MemoryError, ValueError):
            raise ConfigError(f"{where}: {shown(self.text)} is nested too deep") from None

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The expression's value.

        Raises:
            ConfigError: The value cannot be computed: a division by zero, a number of over 4,096 bits, text in a sum, a
                parameter where there is no configuration.
        """
        try:
            return eval(self._code, _GLOBALS, dict(values))
        except (ArithmeticError, NameError, TypeError, ValueError) as error:
            used = ", ".join(f"{name} = {shown(values[name])}" for name in sorted(self.names) if name in values)
            beside = f" with {used}" if used else ""
            raise ConfigError(f"{self._where}: '{self.text}' cannot be computed{beside}: {error}") from None

    def integer(self, values: Mapping[str, Any]) -> int:
        """Its value, which is a whole number of 0 or more.

        Raises:
            ConfigError: It is none, or has more than 63 bits.
        """
        value = self(values)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
            raise ConfigError(f"{self._where}: '{self.text}' is {shown(value)}, not a whole number of 0 or more")
        if isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"{self._where}: '{self.text}' is {value!r}, no whole number; ceil_div(a, b) rounds up")
        if value >= _TOO_MANY:
            raise ConfigError(f"{self._where}: '{self.text}' is {shown(value)}, which is too large")
        return int(value)
