"""What is around the measurements of a benchmark of cells: the driver, the file of cells, its end and its report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from cudasched.demo.harness import Backend, HarnessError

from benchmarks import meta
from benchmarks.colocation.cells import CellFile, cells_path
from benchmarks.results.schema import Results

Item = TypeVar("Item")

Tables = Sequence[Callable[[Results], str]]
"""What is printed of results."""


def run_cells(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Backend, CellFile], int],
    finish: Callable[[CellFile], None],
) -> int:
    """Runs a benchmark.

    Args:
        name: Before what is said of errors.
        options: With ``out``, ``simulate``, ``simulated_driver`` and ``commit``.
        measure: Adds what is missing to the cells, and returns the exit status.
        finish: Writes and prints the results of the cells.

    Returns:
        The exit status: 1 where it could not be measured, 130 where it was interrupted.
    """
    signal.signal(signal.SIGTERM, interrupt)
    path = cells_path(options.out)
    backend: Backend | None = None
    try:
        described = meta.describe(options.simulate, options.commit)
        backend = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
        cells = CellFile(path, described)
        status = measure(backend, cells)
    except (HarnessError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; {path} has what is done", file=sys.stderr)
        return 130
    finally:
        if backend:
            backend.close()
    finish(cells)
    return status


def part_of(parser: argparse.ArgumentParser, part: str, items: Sequence[Item]) -> Sequence[Item]:
    """What `--part I/N` leaves of items: every Nth, from the Ith on; another text is an error of the parser."""
    number, _, parts = part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        parser.error("--part: I/N with 1 <= I <= N")
    return items[int(number) - 1 :: int(parts)]


def merge_parser(name: str) -> argparse.ArgumentParser:
    """The options of a benchmark's `merge`, to which it may add some."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name} merge",
        description="Puts the cells of several runs together; later files win.",
    )
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json; its cells go beside it")
    parser.add_argument("cells", type=Path, nargs="+", help="NAME.cells of each run, oldest first")
    return parser


def merge_cells(name: str, options: argparse.Namespace, finish: Callable[[CellFile], None]) -> int:
    """Puts the cells that `options` name together and finishes them, as run_cells() does. Returns the exit status."""
    try:
        finish(CellFile.merged(options.cells, options.out))
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def interrupt(*_: object) -> NoReturn:
    """Ends a run on SIGTERM, as Ctrl-C does."""
    raise KeyboardInterrupt


def report(cells: CellFile, out: Path, made: Results, tables: Tables) -> None:
    """Writes results, and prints what they say and what failed."""
    if made.rows:
        made.write(out)
        for table in tables:
            print(table(made))
    for outcome in cells.outcomes.values():
        if outcome.error:
            print(f"failed: {outcome.cell.arm} beside {outcome.cell.best_effort}, {outcome.error.splitlines()[0]}")
    print(f"results: {out}, cells: {cells.path}")
