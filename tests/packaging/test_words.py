"""scripts/words.py, which holds the documents to plain words."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("words", ROOT / "scripts/words.py")
assert spec is not None and spec.loader is not None
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)

DOCUMENT = """\
# A title of its own
The gate closes at 1.5 ms: <!-- figure:core count -->14<!-- end --> `launches` of
[a program](docs/what.md) wait. Why?

    what a command prints

- one item, which is long enough
- a label

<!-- table:core -->
| what | it |
<!-- end -->

<!-- generated: script.py -->
| what | it |
<!-- end -->

| command | its meaning |
|---|---|
| `run --what` | starts the program with a class |

```python
# what it does
```
"""


def test_only_prose_that_a_hand_wrote_is_looked_at() -> None:
    assert words.sentences(DOCUMENT) == [
        (1, "# A title of its own"),
        (2, "The gate closes at 1.5 ms: 14 of [a program] wait."),
        (3, "Why?"),
        (7, "- one item, which is long enough"),
        (8, "- a label"),
        (18, "command"),
        (18, "its meaning"),
        (20, "starts the program with a class"),
    ]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "a.hpp",
            '// What is\n/// said.\nint a;  // here\nurl("http://x");  ///< member\n',
            "What is\nsaid.\nhere\nmember\n",
        ),
        ("a.py", '"""Doc\n\nmore."""\nx = "# no"  #: attribute\n"""Of x."""\n', "Doc\n\nmore.\nattribute\nOf x.\n"),
        ("a.md", "# A\n", "# A\n"),
    ],
)
def test_of_code_the_comments_and_docstrings_are_looked_at(tmp_path: Path, name: str, code: str, said: str) -> None:
    (tmp_path / name).write_text(code)
    assert words.read(tmp_path / name) == said


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "a.py",
            '"""No message, four words."""\nraise Error(f"{n} launches of one kernel" + " were " + lost)\nrun("a b")\n',
            "\nX launches of one kernel were X | \n\n",
        ),
        (
            "a.cpp",
            '// "it is no message"\nError("the table " + path + " is not "\n  "one of\\nours");\nchar c = \'"\';\n',
            "\nthe table X is not one of | ours | \n\n\n",
        ),
    ],
)
def test_messages_are_literals_of_four_words(tmp_path: Path, name: str, code: str, said: str) -> None:
    (tmp_path / name).write_text(code)
    assert words.messages(tmp_path / name) == said


@pytest.mark.parametrize(
    ("said", "count"),
    [("It does what it says.", 1), ("What does it say?", 0), ('"What next?"', 0), ("What a launch costs", 1)],
)
def test_what_is_free_outside_of_questions(said: str, count: int) -> None:
    assert words.free_what(said) == count


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("It keeps its lead, and they keep theirs.", 3),
        ("This is new, and these are too; this gate is old.", 2),
        ("The P99 is that of the server, and that is all.", 2),
        ("A kernel that is long, and a wait that ends it.", 1),
    ],
)
def test_pronouns_are_told_from_articles_and_clauses(said: str, count: int) -> None:
    assert round(words.figures([said])["pronouns_per_100"] * words.words(said) / 100) == count


def test_a_label_is_no_sentence() -> None:
    figures = words.figures(["one two three four\n\n" + "word " * 30 + ".\n\none two three four five six."])
    assert figures["words_per_sentence"] == 18.0
    assert figures["sentences_over_25"] == 1
    assert figures["docs_words"] == 40


def test_a_figure_over_its_limit_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(words.LIMITS["documents"], "docs_words", 10)
    assert words.main([]) == 1
    assert "docs_words is" in capsys.readouterr().out


def test_figures_are_json() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts/words.py", "--figures"], stdout=subprocess.PIPE, check=True
    )
    assert json.loads(printed.stdout).keys() == words.LIMITS["documents"].keys()
