"""The site that `make site` builds: its pages and links, and that each command in the documents exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts/site_pages.py")
assert spec is not None and spec.loader is not None
site_pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_pages)

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize(
    ("document", "text", "page"),
    [
        ("README.md", "[docs/order.md](docs/order.md#terms)", "[Order](order.md#terms)"),
        ("README.md", "![a](docs/images/a.png) `[b](docs/b.md)`", "![a](images/a.png) `[b](docs/b.md)`"),
        (
            "docs/order.md",
            "[the examples](../examples/README.md), [here](#terms)",
            "[the examples](examples.md), [here](#terms)",
        ),
        ("docs/cpp.md", "[`examples/cpp`](../examples/cpp)", "`examples/cpp`"),
        ("docs/cpp.md", "[gone](../gone.md)", "[gone](../gone.md)"),
        ("docs/cpp.md", "`a` is [order.md](order.md), `b`", "`a` is [Order](order.md), `b`"),
        ("examples/README.md", "[docs/order.md](../docs/order.md)", "[Order](order.md)"),
        ("docs/order.md", "at <!-- figure:core count -->14<!-- end --> ms", "at 14 ms"),
        (
            "docs/order.md",
            "So:\n- one\n  more\n  - two\n- three\n\nEnd",
            "So:\n\n- one\n  more\n    - two\n- three\n\nEnd",
        ),
        ("docs/order.md", "```\nSo:\n- <!-- a -->\n```", "```\nSo:\n- <!-- a -->\n```"),
    ],
)
def test_a_page_is_its_document_with_links_between_pages(document: str, text: str, page: str) -> None:
    assert site_pages.rewritten(text, document, {"order.md": "Order"}) == page


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">, <a href="b.html#gone">, <a href="c.html">, <a href="#x">'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="https://example.org/"><img src="a.html">')
    assert site_pages.broken_links(tmp_path) == ["a.html: #x", "a.html: b.html#gone", "a.html: c.html"]


def test_each_document_is_in_the_navigation() -> None:
    """`make site` finds this, too, but is no part of `make test`."""
    pages = set(re.findall(r"^ +- .*?([\w./]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")} - {"package.md"}
    assert documents | set(site_pages.PAGES) == {page for page in pages if not page.startswith("reference/")}


def calls(text: str) -> Iterator[str]:
    """Calls of `cudasched` in indented code and in sentences, without their programs."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"^    .*|`[^`\n]+`", text, re.MULTILINE):
        if match := re.match(r"[` ]*cudasched ([a-z][^#|`;&]*)", code):
            yield match[1].partition(" -- ")[0]


@pytest.fixture(scope="module")
def commands() -> Any:
    import typer
    from cudasched.cli.app import application

    return typer.main.get_command(application(""))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_each_command_of_a_document_exists(document: Path, commands: Any) -> None:
    for call in calls(document.read_text()):
        command, words = commands, shlex.split(call)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command is not commands, f"{document.name}: cudasched {call}"
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if word.startswith("-") and word != "--"}
        assert asked <= known | {"--help"}, f"{document.name}: cudasched {call}"


def test_the_calls_of_a_document_are_found() -> None:
    text = (
        "`cudasched run --mps -- a`, `x`\n\n    cudasched top   # all\n\n```\n    cudasched no\n```\ncudasched is `x`\n"
    )
    assert [call.strip() for call in calls(text)] == ["run --mps", "top"]


def test_the_site_builds() -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs the extra site: `make site` installs it")
    done = subprocess.run([ROOT / "scripts/site.sh"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
