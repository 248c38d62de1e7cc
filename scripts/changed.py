"""The part of the tests that a change needs, for `scripts/test.sh changed`.

    changed.py rooms      rooms of csrc whose tests run
    changed.py sources    sources that clang-tidy looks at
    changed.py lines      the changed lines of csrc, as clang-tidy's --line-filter takes them
    changed.py tests      files of Python tests

A change is what differs from the point where the branch left `main` (BASE names another revision), committed or not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Whole programs over the engine, for a change of any room of it.
ENGINE_TESTS = ("tests/python/test_hook.py", "tests/python/test_sharing.py", "tests/python/test_boundary.py")
#: Of the Python package, where no test has the name of a module.
PACKAGE_TESTS = ("tests/python/test_api.py", "tests/python/test_cli.py")


def git(*arguments: str) -> list[str]:
    """The lines that a command of git's prints."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _base() -> str:
    (left,) = git("merge-base", os.environ.get("BASE", "main"), "HEAD")
    return left


def changed() -> list[str]:
    """The files that differ from the base, and those that git does not know yet."""
    return sorted({*git("diff", "--name-only", _base()), *git("ls-files", "--others", "--exclude-standard")})


def lines(files: list[str]) -> list[str]:
    """The changed lines of csrc, as one line of JSON; of a file that git does not know, all."""
    found: list[dict[str, object]] = []
    for file in (file for file in files if file.startswith("csrc/") and (ROOT / file).is_file()):
        hunks = [re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line) for line in git("diff", "-U0", _base(), "--", file)]
        spans = [(int(hunk[1]), int(hunk[2] or 1)) for hunk in hunks if hunk]
        spans = [[first, first + count - 1] for first, count in spans if count]
        if spans or not any(hunks):  # not where lines have gone alone
            found.append({"name": file, "lines": spans} if spans else {"name": file})
    return [json.dumps(found)]


def rooms(files: list[str]) -> list[str]:
    """The rooms that files, or their tests, are in."""
    found = {match[1] for file in files if (match := re.match(r"(?:tests/)?csrc/(\w+)/", file))}
    found |= {"include" for file in files if file.startswith("include/")}
    return sorted(found & {path.name for path in (ROOT / "tests/csrc").iterdir() if path.is_dir()})


def sources(files: list[str]) -> list[str]:
    """The sources of csrc among them, and those of their headers' names."""
    ours = [Path(file) for file in files if file.startswith("csrc/")]
    named = {path.with_suffix(".cpp") if path.suffix == ".hpp" else path for path in ours}
    return sorted(str(path) for path in named if path.suffix in (".cpp", ".c") and (ROOT / path).is_file())


def _of_module(module: Path) -> Iterator[str]:
    """The tests of a module of the package: those with the longest part of its name in theirs."""
    names = [part.strip("_") for part in module.with_suffix("").parts if part != "__init__"]
    if "cli" in names:
        yield "tests/python/test_cli.py"
    pieces = [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]
    for piece in sorted(pieces, key=len, reverse=True):
        if found := sorted((ROOT / "tests/python").glob(f"test_{'_'.join(piece)}*.py")):
            yield from (str(path.relative_to(ROOT)) for path in found)
            return
    yield from PACKAGE_TESTS


def _that_name(file: str) -> Iterator[str]:
    """The tests whose text names a file, or a module beside them."""
    path = Path(file)
    beside = rf"(?:import|from) {path.stem}\b" if file.startswith("tests/") and path.suffix == ".py" else r"$^"
    wanted = re.compile(rf"{re.escape(path.name)}|{beside}")
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        if "gpu" not in test.parts and wanted.search(test.read_text(encoding="utf-8")):
            yield str(test.relative_to(ROOT))


def tests(files: list[str]) -> list[str]:
    """The files of Python tests for a change."""
    found: set[str] = set()
    for file in files:
        path = Path(file)
        if file.startswith("tests/gpu/"):
            continue
        if file.startswith("tests/") and re.fullmatch(r"test_\w+\.py", path.name):
            found.add(file)
        elif file.startswith("python/cudasched/"):
            found.update(_of_module(path.relative_to("python/cudasched")))
        elif file.startswith(("csrc/", "include/")):
            found.update(ENGINE_TESTS)
            found.update(_that_name(file))
        elif file.startswith(("benchmarks/", "training/")):
            found.add(f"tests/{path.parts[0]}")
        else:
            found.update(_that_name(file))
        if path.suffix == ".md":
            found.update(("tests/packaging/test_site.py", "tests/packaging/test_words.py"))
    return sorted(test for test in found if (ROOT / test).exists())


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    what = {"rooms": rooms, "sources": sources, "lines": lines, "tests": tests}
    if len(arguments) != 1 or arguments[0] not in what:
        print(__doc__, file=sys.stderr)
        return 2
    print(*what[arguments[0]](changed()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
