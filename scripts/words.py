"""Holds the documents, and the code's comments, docstrings and messages, to plain words.

Of README.md and docs/, code, generated tables and comments are not looked at. A message is a literal of four plain
words or more: a log line, an error, a help text.

    words.py             fails where a figure is over its limit
    words.py --figures   the figures of all documents, as JSON
    words.py FILE...     the figures of each file, of a source those of its messages behind, and long sentences and free
                         "what" by line

A sentence ends with its mark, its paragraph, its list item or its table cell; fewer than five words are a label and no
sentence. "What" is free outside of a question. "This", "that", "these" and "those" are pronouns where no noun follows
and no noun before them asks for the clause: "beside this.", "than that of".
"""

from __future__ import annotations

import ast
import io
import json
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: A figure may fall and not rise. All are at their targets but `sentences_over_25`, a value reached.
LIMITS = {
    "documents": {
        "free_what_per_100": 0.15,
        "pronouns_per_100": 3.0,
        "words_per_sentence": 20.0,
        "sentences_over_25": 145,
        "docs_words": 40_000,
    },
    "headers": {"free_what_per_100": 0.15, "pronouns_per_100": 3.0, "words_per_sentence": 20.0},
    "sources": {"free_what_per_100": 0.15, "pronouns_per_100": 3.0, "words_per_sentence": 20.0},
    "package": {"free_what_per_100": 0.15, "pronouns_per_100": 3.0, "words_per_sentence": 20.0},
    "messages": {"free_what_per_100": 0.15, "pronouns_per_100": 3.0, "words_per_sentence": 20.0},
}
FILES = {
    "documents": ["README.md", "docs/**/*.md"],
    "headers": [
        "csrc/**/*.h",
        "csrc/**/*.hpp",
        "csrc/**/*.cuh",
        "include/**/*.h",
        "include/**/*.hpp",
        "include/**/*.cuh",
    ],
    "sources": ["csrc/**/*.cpp", "csrc/**/*.cu"],
    "package": ["python/**/*.py"],
    "messages": [
        "python/**/*.py",
        "benchmarks/**/*.py",
        "csrc/**/*.[ch]",
        "csrc/**/*.[ch]pp",
        "csrc/**/*.cu*",
        "include/**/*.[hi]*",
    ],
}
LONG = 25
LABEL = 5
PLAIN_WORDS = 4

_BLOCKS = re.compile(
    r"<!-- (?:table|generated):.*?<!-- end -->"
    r"|^```.*?^```"
    r"|(?<=\n\n) {4}[^\n]*(?:\n(?: {4}[^\n]*)?)*"  # an indented block of code
    r"|<!--.*?-->"  # what a span says stays
    r"|^\|[ :|-]+\|$"  # the rule under a table's head
    r"|(?<=\])\([^)\s]*\)"  # targets of links
    r"|`[^`\n]*(?:\n[^`\n]*)?`",
    re.DOTALL | re.MULTILINE,
)
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s|\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[#|])|(?<=\S)\s*\|")
_WORD = re.compile(r"[^\W_][\w'/.,%-]*")
_FUNCTION_WORD = (
    r"(?:is|are|was|were|has|have|had|can|may|must|do|does|did|will|would|also|not|of|in|on|at|by|for|to|from|with"
    r"|and|or|but|which|who|when|where|while|as|than|so|if|alone|too|only)\b"
)
_PRONOUN = re.compile(
    r"\b(?:it|its|they|them|their)\b"
    rf"|\b(?:this|these|those)(?=\s*(?:[^\w\s]|$|{_FUNCTION_WORD}))"
    rf"|(?:^|[.,:;(]\s*|\b(?:of|for|than|and|or|but|with|in|by|to|from|at|as|before|after|beside|under|over|is)\s+)"
    rf"that(?=\s*(?:[^\w\s]|$|{_FUNCTION_WORD}))",
    re.IGNORECASE,
)


_PLAIN = re.compile(r"(?<!\S)[A-Za-z][a-z']*[,.:;]?(?!\S)")
_CODE = re.compile(r"^\s*(?:import|def|for|CREATE TABLE|[{}#<]|.* = .*\n)|[;{]$|[{};]\n", re.MULTILINE)
# Literals of C++ that make one message: a value between them is a word of it. What looks like one in a comment, a
# character or a raw literal is passed over.
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\+[^"+;]+\+')
_LITERALS = re.compile(
    r"//[^\n]*|/\*.*?\*/|\bR\"(\w*)\(.*?\)\1\"|'(?:[^'\\\n]|\\.)+'"
    r'|("(?:[^"\\\n]|\\.)*"(?:\s*(?:\+[^"+;]+\+\s*)?"(?:[^"\\\n]|\\.)*")*)',
    re.DOTALL,
)
_COMMENT = re.compile(r"(?:^|(?<=[;{}),(\\]))\s*//+[/!<]*\s?(.*)$")


def _comments_of_cpp(text: str) -> str:
    found = [_COMMENT.search(line) for line in text.split("\n")]
    return "\n".join(match[1] if match else "" for match in found)


def _comments_of_python(text: str) -> str:
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for place, line in enumerate(node.value.value.split("\n"), node.lineno - 1):
                lines[place] = line.strip()
    return "\n".join(lines)


def _literals_of_cpp(text: str) -> Iterator[tuple[int, str]]:
    for match in _LITERALS.finditer(text):
        if match[2] is not None:
            parts = ["X" if part[1] is None else part[1] for part in _LITERAL.finditer(match[2])]
            yield text.count("\n", 0, match.start()), "".join(parts).replace(r"\n", "\n").replace(r"\"", '"')


def _literals_of_python(text: str) -> Iterator[tuple[int, str]]:
    def said(node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(said(part) or "X" for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = said(node.left), said(node.right)
            return None if parts == (None, None) else "".join(part or "X" for part in parts)
        return None

    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        literal = said(node)
        if literal is None:
            left.extend(ast.iter_child_nodes(node))
        else:
            yield node.lineno - 1, literal


def messages(path: pathlib.Path) -> str:
    """The messages of a source, each on the line where it begins."""
    text = path.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for place, literal in (_literals_of_python if path.suffix == ".py" else _literals_of_cpp)(text):
        if len(_PLAIN.findall(literal)) >= PLAIN_WORDS and not _CODE.search(literal):
            lines[place] += literal.strip().replace("\n", " | ") + " | "
    return "\n".join(lines)


def read(path: pathlib.Path) -> str:
    """A document; of code, the comments and docstrings, each line where it is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return _comments_of_python(text) if path.suffix == ".py" else _comments_of_cpp(text)


def texts_of(group: str) -> list[str]:
    """The texts of `FILES`."""
    reader = messages if group == "messages" else read
    return [reader(path) for pattern in FILES[group] for path in sorted(ROOT.glob(pattern))]


def prose(text: str) -> str:
    """The text written by hand, each line where it was."""
    shown = _BLOCKS.sub(lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"^#.*", r"\g<0> |", shown, flags=re.MULTILINE)  # a heading ends like a cell


def sentences(text: str) -> list[tuple[int, str]]:
    """Each piece of a text's prose and its line, labels included."""
    found, start, shown = [], 0, prose(text)
    for end in [*(match.end() for match in _END.finditer(shown)), len(shown)]:
        piece = shown[start:end]
        lead = len(piece) - len(piece.lstrip())
        if said := " ".join(piece.strip(" \n|").split()):
            found.append((shown.count("\n", 0, start + lead) + 1, said))
        start = end
    return found


def free_what(said: str) -> int:
    """How many a sentence has."""
    return 0 if said.rstrip("\"')*_").endswith("?") else len(re.findall(r"\bwhat\b", said, re.IGNORECASE))


def words(said: str) -> int:
    """How many a sentence has."""
    return len(_WORD.findall(said))


def figures(texts: list[str]) -> dict[str, float]:
    """The figures of `LIMITS`."""
    pieces = [said for text in texts for _, said in sentences(text)]
    total = sum(map(words, pieces))
    lengths = [length for length in map(words, pieces) if length >= LABEL]
    return {
        "free_what_per_100": round(100 * sum(map(free_what, pieces)) / max(1, total), 2),
        "pronouns_per_100": round(100 * sum(len(_PRONOUN.findall(said)) for said in pieces) / max(1, total), 2),
        "words_per_sentence": round(sum(lengths) / max(1, len(lengths)), 1),
        "sentences_over_25": sum(length > LONG for length in lengths),
        "docs_words": total,
    }


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    for name in [] if arguments == ["--figures"] else arguments:
        path = pathlib.Path(name)
        for text in [read(path)] if path.suffix == ".md" else [read(path), messages(path)]:
            for line, said in sentences(text):
                if words(said) > LONG or free_what(said):
                    print(f"{name}:{line}: {words(said)} words: {said}")
            print(f"{name}: {json.dumps(figures([text]))}")
    if arguments == ["--figures"]:
        print(json.dumps(figures(texts_of("documents"))))
    if arguments:
        return 0
    over = 0
    for group, limits in LIMITS.items():
        found = figures(texts_of(group))
        for name, limit in limits.items():
            if found[name] > limit:
                over += 1
                print(f"{name} is {found[name]:,} in the {group}, over {limit:,}: words.py FILE names the places")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
