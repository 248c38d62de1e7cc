"""What MkDocs builds beside docs/, and how it reads the pages: a hook of mkdocs.yml.

Documents outside docs/ become pages, with links that lead to pages; so do notebooks, with their outputs. A name under
``reference/`` becomes a page: of a Python module, from its docstrings; of a header, its text; ``commands``, from the
commands' own help. The documents are in GitHub's Markdown, which begins a list without an empty line before it.
"""

from __future__ import annotations

import html.parser
import inspect
import json
import logging
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).resolve().parent.parent

#: Documents outside docs/, by their page.
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "tour.md": "notebooks/tour.ipynb",
    "predictor.md": "notebooks/predictor.ipynb",
    "layernorm.md": "notebooks/tuning.ipynb",
}
_PAGE_OF = {document: page for page, document in PAGES.items()}
_TOKEN = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]*(?:\n[^`\n]*)?`)"
    r"|(?P<marker><!--.*?-->)"  # of figures and generated tables
    r"|\[(?P<shown>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
_ITEM = re.compile(r"( *)([-*]|\d+\.) ")

logger = logging.getLogger("mkdocs.hooks.site_pages")


def _text(document: str) -> str:
    """A document's Markdown; of a notebook that of its cells, their code and outputs."""
    path = ROOT / document
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                data = "".join(picture).replace("\n", "")
                parts.append(f'<p><img alt="the figure of this cell" src="data:image/png;base64,{data}"></p>')
            elif text := "".join(output.get("text", [])).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def _lists(text: str) -> str:
    """Lists as Python's Markdown wants them: an empty line before each, four blanks a level."""
    lines: list[str] = []
    in_code = in_list = False
    for line in text.split("\n"):
        in_code ^= line.startswith("```")
        item = None if in_code else _ITEM.match(line)
        if item:
            if not in_list and lines and lines[-1].strip():
                lines.append("")
            line = item[1] + line
        in_list = bool(item) or (in_list and bool(line.strip()) and not line.startswith(("#", "|", "```")))
        lines.append(line)
    return "\n".join(lines)


def rewritten(text: str, document: str, titles: Mapping[str, str]) -> str:
    """A document's Markdown as its page has it.

    Args:
        text: The Markdown.
        document: Its path in the tree.
        titles: Of pages; a link shows one in the place of a file's name.
    """
    page = _PAGE_OF.get(document, document.removeprefix("docs/"))

    def changed(match: re.Match[str]) -> str:
        shown, target = match["shown"], match["target"]
        if match["marker"]:
            return ""
        if match["code"] or not urlsplit(target).path or urlsplit(target).scheme:
            return match[0]
        path, fragment = urldefrag(target)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
        to = _PAGE_OF.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if to is None:  # a source: it has no page
            return f"`{path}`" if (ROOT / path).exists() else match[0]
        shown = titles.get(to, shown) if shown.endswith(".md") else shown
        return f"[{shown}]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{'#' if fragment else ''}{fragment})"

    return _lists(_TOKEN.sub(changed, text))


def pages_of(nav: Any, title: str = "") -> Iterator[tuple[str, str]]:
    """The pages of a navigation, and their titles; of one without a title that of its section."""
    if isinstance(nav, str):
        yield nav, title
    elif isinstance(nav, dict):
        for name, below in nav.items():
            yield from pages_of(below, name)
    else:
        for each in nav:
            yield from pages_of(each, title)


def _commands() -> str:
    """Each command with its arguments and options, as its help has them."""
    import typer
    from cudasched.cli.app import application

    def described(name: str, command: Any) -> Iterator[str]:
        yield f"## {name}\n\n{command.help or ''}\n"
        rows = []
        for each in command.params:
            is_option = each.param_type_name == "option"
            names = [*each.opts, *each.secondary_opts] if is_option else [each.metavar or each.name]
            about = (getattr(each, "help", None) or "").replace("|", "\\|")
            if each.name not in ("help", "install_completion", "show_completion"):
                rows.append(f"| `{'`, `'.join(names)}` | {about} |")
        yield "\n".join(["| option or argument | meaning |", "|---|---|", *rows, ""] if rows else [])
        for below in sorted(getattr(command, "commands", {})):
            yield from described(f"{name} {below}", command.commands[below])

    return "# Commands\n\n" + "\n".join(described("cudasched", typer.main.get_command(application(""))))


def _names() -> Iterator[str]:
    """The functions and classes of the package itself, errors last."""
    import cudasched

    values = {each: getattr(cudasched, each) for each in cudasched.__all__}
    own = {each: value for each, value in values.items() if callable(value) and not inspect.ismodule(value)}
    for each in sorted(own, key=lambda each: inspect.isclass(own[each]) and issubclass(own[each], Exception)):
        where = f"cudasched.{each}"
        is_module = (ROOT / "python/cudasched" / f"{each}.py").is_file()  # of the same name
        yield f"::: {where}.{each}\n    options: {{heading: {where}}}\n" if is_module else f"::: {where}\n"


def _reference(name: str) -> str:
    """A page under ``reference/``."""
    header = Path("include/cudasched", name)
    if name == "commands":
        return _commands()
    if (ROOT / header).is_file():
        return f"# cudasched/{name}\n\n```cpp\n{(ROOT / header).read_text(encoding='utf-8')}```\n"
    if name == "cudasched":
        return "\n".join([f"# {name}\n", *_names()])
    return f"# {name}\n\n::: {name}\n    options: {{show_root_heading: false}}\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT / "python"))  # the package is looked at and not used: it need not be built
    os.environ["CUDASCHED_OFF"] = "1"
    for page, document in PAGES.items():
        files.append(File.generated(config, page, content=_text(document)))
    for page, _ in pages_of(config.nav):
        if page.startswith("reference/"):
            content = _reference(page.removeprefix("reference/").removesuffix(".md"))
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """As `rewritten`; a reference page is as it should be."""
    where = page.file.src_uri
    if where.startswith("reference/"):
        return markdown
    return rewritten(markdown, PAGES.get(where, f"docs/{where}"), dict(pages_of(config.nav)))


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Without the marks that docstrings have before code."""
    return content.replace("<p>::</p>", "").replace("::</p>", ":</p>")


class _Page(html.parser.HTMLParser):
    """The places of a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken_links(site: Path) -> list[str]:
    """Links of built pages that lead nowhere within the site; those to other sites are not looked at."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def on_post_build(config: Any) -> None:
    """Warns of links that lead nowhere; under ``strict`` a warning is an error."""
    for link in broken_links(Path(config.site_dir)):
        logger.warning("a link leads nowhere: %s", link)
