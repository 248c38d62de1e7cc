"""What commands say to others: the line of JSON that `--json` prints (docs/json.md), and pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudasched._output import Output
from cudasched._text import printable
from cudasched._version import __version__
from cudasched.errors import Error

__all__ = ["SCHEMA_VERSION", "document", "page", "report_file"]

SCHEMA_VERSION = 1


def document(kind: str, data: Any) -> str:
    """A command's result as one line of JSON, with ASCII alone in it.

    Args:
        kind: The command.
        data: The command's findings; docs/json.md has the fields for each kind.
    """
    return json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "version": __version__, "data": data})


def report_file(path: Path | None, extra: str) -> Output | None:
    """Where a command writes its report, HTML or JSON, looked at before a program runs for it.

    Args:
        path: The option's; None: there is no report.
        extra: As for `page`.

    Raises:
        ConfigError: The file cannot be written, or its name ends otherwise.
        Error: An HTML report needs jinja2, which is not installed.
    """
    target = None if path is None else Output(path, option="-o", formats=(".html", ".json"))
    if target is not None and target.path.suffix.lower() == ".html":
        _require_jinja2(extra)
    return target


def _require_jinja2(extra: str) -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise Error(f"HTML reports need jinja2: pip install 'cudasched[{extra}]'") from None


def page(template: Path, extra: str, filters: dict[str, Callable[..., Any]], **values: object) -> str:
    """One HTML document of a template: all values are escaped.

    Args:
        template: Jinja's; it fetches nothing.
        extra: Of cudasched, with jinja2 in it.
        filters: The template's, beside `printable`.
        values: Of the template's names.

    Raises:
        Error: jinja2 is not installed.
    """
    _require_jinja2(extra)
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters, printable=printable)
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)
