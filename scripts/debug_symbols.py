"""Writes the debug information of a build's libraries, from which the wheel's were stripped, to files of its own.

`debug_symbols.py BUILD OUT` makes OUT/.build-id/xx/yyy.debug of each library of the build directory, where gdb finds
them after `set debug-file-directory OUT`: the library and the file have the same build id.
"""

import pathlib
import re
import subprocess
import sys


def build_id(library: pathlib.Path) -> str:
    """The build id of a library; raises ValueError where it has none."""
    notes = subprocess.run(["readelf", "-nW", library], check=True, capture_output=True, text=True).stdout
    found = re.search(r"Build ID: ([0-9a-f]+)", notes)
    if not found:
        raise ValueError(f"{library} has no build id: link it with --build-id")
    return found[1]


def write(build: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the debug file of each library of a build directory and returns the files."""
    written = []
    for library in sorted((build / "lib").rglob("*.so*")):
        name = build_id(library)
        target = out / ".build-id" / name[:2] / f"{name[2:]}.debug"
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["objcopy", "--only-keep-debug", "--compress-debug-sections", library, target], check=True)
        written.append(target)
    if not written:
        raise ValueError(f"{build} has no libraries: build a wheel first")
    return written


def main() -> None:
    """Writes the files that the command line asks for and prints where they are."""
    build, out = (pathlib.Path(argument) for argument in sys.argv[1:])
    print(*write(build, out), sep="\n")


if __name__ == "__main__":
    main()
