"""Text that is shown to a person: nothing in it moves a cursor, and nothing is longer than one reads."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["closest", "counted", "duration", "one_line", "printable", "shown"]

_LONGEST = 80


def printable(text: str, *, newlines: bool = False) -> str:
    r"""The text with everything that a terminal would obey written out: ``"\x1b[2J"`` as ``\\x1b[2J``.

    Args:
        text: A name, a path, a message: any text that another program may have chosen.
        newlines: Leave newlines unchanged.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or (newlines and character == "\n") else _written(character)
        for character in text
    )


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def counted(number: int, one: str, several: str) -> str:
    """A number and its noun: "1 process", "3,000 processes"."""
    return f"{number:,} {one if number == 1 else several}"


def duration(time_ns: float | None) -> str:
    """A time with its unit: "1.24 ms", "850 us"; "-" where there is none."""
    if time_ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.3g} {unit}" if time_ns < 1000 * size else f"{time_ns / size:.0f} {unit}"
    return f"{time_ns:.0f} ns"


def one_line(text: str) -> str:
    """A message as one line."""
    return printable(" ".join(text.split()))


def shown(value: object) -> str:
    """A value in a message, as Python writes it, and never long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    try:
        text = repr(value if not isinstance(value, str) else value[: 2 * _LONGEST])
    except Exception:  # an object of the caller's
        return f"a {type(value).__name__}"
    return printable(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")


def closest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'x'?"``, or nothing if no known word is near."""
    if not isinstance(word, str) or len(word) > _LONGEST:
        return ""
    import difflib

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""
