"""Holds the documents, and the code's comments and docstrings, to plain words.

Of README.md and docs/*.md, code, generated tables and comments are not looked at.

    words.py             fails where a figure is over its limit
    words.py --figures   the figures of all documents, as JSON
    words.py FILE...     the figures of each file, and its long sentences and free "what", by line

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
}
FILES = {
    "documents": ["README.md", "docs/*.md"],
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
}
LONG = 25
LABEL = 5

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


def read(path: pathlib.Path) -> str:
    """A document; of code, the comments and docstrings, each line where it is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return _comments_of_python(text) if path.suffix == ".py" else _comments_of_cpp(text)


def texts_of(group: str) -> list[str]:
    """The texts of `FILES`."""
    return [read(path) for pattern in FILES[group] for path in sorted(ROOT.glob(pattern))]


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
        text = read(pathlib.Path(name))
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
