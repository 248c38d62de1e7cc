"""Prints requirements of pyproject.toml, one a line, for pip install -r.

Groups: `build` (the build requirements, with CMake and Ninja for builds without pip), `run` (the dependencies) or the
name of an extra.
"""

import pathlib
import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(project: dict[str, Any], group: str) -> list[str]:
    """The requirements of one group; an extra that names other extras of the project takes them in."""
    if group == "build":
        return [*project["build-system"]["requires"], "cmake>=3.24", "ninja>=1.10"]
    if group == "run":
        return list(project["project"]["dependencies"])
    found = []
    for requirement in project["project"]["optional-dependencies"][group]:
        own = re.fullmatch(re.escape(project["project"]["name"]) + r"\[(.*)\]", requirement)
        if own:
            found += [inner for name in own[1].split(",") for inner in requirements(project, name.strip())]
        else:
            found.append(requirement)
    return found


def main() -> None:
    """Prints the groups that the command line names."""
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    print(*(line for group in sys.argv[1:] for line in requirements(project, group)), sep="\n")


if __name__ == "__main__":
    main()
