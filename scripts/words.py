"""Holds the documents to plain words: README.md and docs/*.md, without code, generated tables and comments.

    words.py             fails where a figure is over its limit
    words.py --figures   the figures of all documents, as JSON
    words.py FILE...     the figures of each file, and its long sentences and free "what", by line

A sentence ends with its mark, its paragraph, its list item or its table cell; fewer than five words are a label and no
sentence. "What" is free outside of a question. "This", "that", "these" and "those" are pronouns where no noun follows
and no noun before them asks for the clause: "beside this.", "than that of".
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: A figure may fall and not rise. All but `sentences_over_25` are at their target; that one is the value reached.
LIMITS = {
    "free_what_per_100": 0.15,
    "pronouns_per_100": 3.0,
    "words_per_sentence": 20.0,
    "sentences_over_25": 145,
    "docs_words": 40_000,
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
        text = pathlib.Path(name).read_text(encoding="utf-8")
        for line, said in sentences(text):
            if words(said) > LONG or free_what(said):
                print(f"{name}:{line}: {words(said)} words: {said}")
        print(f"{name}: {json.dumps(figures([text]))}")
    if arguments and arguments != ["--figures"]:
        return 0
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = figures([path.read_text(encoding="utf-8") for path in documents])
    if arguments:
        print(json.dumps(found))
        return 0
    over = [name for name, limit in LIMITS.items() if found[name] > limit]
    for name in over:
        print(f"{name} is {found[name]:,} in the documents, over {LIMITS[name]:,}: words.py FILE names the places")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
