"""A pytest plugin: the fixture ``gpu_baseline`` fails a test where a program got slower than its saved baseline.

::

    def test_training_step(gpu_baseline):
        gpu_baseline([sys.executable, "train.py", "--steps", "50"])

``pytest --gpu-baselines=save`` records baselines anew, ``add`` adds runs to them, ``skip`` leaves such tests out; the
default checks. Baselines are in ``gpu-baselines/`` beside the test's file, one a test. docs/baselines.md says more.

The package is apart from ``cudasched`` because pytest imports each plugin in every session: importing ``cudasched``
would put its hook into all sessions. ``python -m cudasched baseline`` records runs, in processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["GpuBaseline", "gpu_baseline", "pytest_addoption"]

_SLOWER = 3
_MODES = ("check", "save", "add", "skip")
_MOST_SHOWN = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("cudasched", "cudasched: GPU baselines")
    group.addoption(
        "--gpu-baselines",
        choices=_MODES,
        default="check",
        help="How tests with the fixture gpu_baseline go: check, save anew, add runs, or skip.",
    )
    group.addoption(
        "--gpu-baseline-runs",
        type=int,
        default=None,
        metavar="N",
        help="How often such a test runs its program; the default is the command's.",
    )
    group.addoption(
        "--gpu-baseline-reports",
        default=None,
        metavar="DIRECTORY",
        help="Also write each check's HTML report there.",
    )


def _name(node: str) -> str:
    """A test's name as a file's: a parameter may be any text, and two may differ in characters that file names lack."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", node).strip("-.")[:120]
    return plain if plain == node else f"{plain}-{zlib.crc32(node.encode(errors='surrogateescape')):08x}"


class GpuBaseline:
    """The fixture, to be called with a program."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._mode = str(request.config.getoption("--gpu-baselines"))
        self._runs = request.config.getoption("--gpu-baseline-runs")
        self._reports = request.config.getoption("--gpu-baseline-reports")
        node = request.node
        # A class may have a test of the same name as another one, and a directory a file as another one.
        tests = [one.name for one in node.listchain() if isinstance(one, (pytest.Class, pytest.Item))]
        name = ".".join(map(_name, [node.path.stem, *tests]))
        self._file = Path(node.path).parent / "gpu-baselines" / f"{name}.json"
        self._used: set[Path] = set()
        above = Path(node.nodeid.partition("::")[0]).parent
        self._report = f"{name}.html" if above == Path() else f"{_name(str(above))}.{name}.html"

    def __call__(
        self,
        program: str | Sequence[str | os.PathLike[str]],
        *,
        runs: int | None = None,
        least_percent: float | None = None,
        timing: str | None = None,
        baseline: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any] | None:
        """Runs a program several times, and fails the test if a kernel, a region or a wait got slower.

        Args:
            program: The name and arguments; a string is split as a shell does.
            runs: How often; ``--gpu-baseline-runs`` goes first. None: as the command does.
            least_percent: A smaller change is no regression. None: the command's default.
            timing: "cupti" or "events"; None: as the baseline's runs are timed, "cupti" for a new one.
            baseline: The file; None: one of the test's own, which a test has for one program.

        Returns:
            The comparison, as ``cudasched baseline check --json`` has it; None where a baseline was saved.
        """
        __tracebackhide__ = True
        if self._mode == "skip":
            pytest.skip("--gpu-baselines=skip")
        file = Path(baseline) if baseline is not None else self._file
        if file in self._used:
            pytest.fail(f"{file} is of another program of this test: give each its own (baseline=...)", pytrace=False)
        self._used.add(file)
        options = ["--timing", timing] if timing is not None else []
        chosen = self._runs if self._runs is not None else runs
        if chosen is not None:
            options += ["--runs", str(chosen)]
        given = shlex.split(program) if isinstance(program, str) else program
        words = ["--", *(os.fspath(word) for word in given)]
        if self._mode in ("save", "add"):
            file.parent.mkdir(parents=True, exist_ok=True)
            more = ["--add"] if self._mode == "add" else []
            self._command("save", "-o", str(file), *more, *options, *words)
            return None
        if not file.exists():
            pytest.fail(f"there is no baseline at {file}: pytest --gpu-baselines=save records it", pytrace=False)
        if least_percent is not None:
            options += ["--least", str(least_percent)]
        if self._reports is not None:
            Path(self._reports).mkdir(parents=True, exist_ok=True)
            report = Path(self._reports) / self._report
            options += ["-o", str(report if baseline is None else report.with_suffix(f".{file.stem}.html"))]
        code, output = self._command("check", str(file), "--json", *options, *words)
        found: dict[str, Any] = json.loads(output)["data"]
        if code == _SLOWER:
            pytest.fail(_said(found), pytrace=False)
        return found

    @staticmethod
    def _command(*arguments: str) -> tuple[int, str]:
        __tracebackhide__ = True
        done = subprocess.run([sys.executable, "-m", "cudasched", "baseline", *arguments], capture_output=True)
        said = done.stderr.decode(errors="replace")
        sys.stderr.write(said)
        if done.returncode not in (0, _SLOWER):
            lines = said.strip().splitlines()
            pytest.fail(f"cudasched baseline {arguments[0]}: {lines[-1] if lines else done.returncode}", pytrace=False)
        return done.returncode, done.stdout.decode(errors="replace")


def _said(found: dict[str, Any]) -> str:
    """The slower kernels, a line each."""
    slower = [one for one in found["compared"] if one["verdict"] == "slower"]
    lines = [f"{len(slower)} got slower than the baseline, beyond the noise from run to run:"]
    for one in slower[:_MOST_SHOWN]:
        lines.append(
            f"  {one['label']} ({one['kind']}): {one['before_ns'] / 1e3:.4g} -> {one['after_ns'] / 1e3:.4g} us, "
            f"{100 * one['change']:+.1f}% ({100 * one['low']:+.1f}% to {100 * one['high']:+.1f}%)"
        )
    if len(slower) > _MOST_SHOWN:
        lines.append(f"  and {len(slower) - _MOST_SHOWN} more")
    lines += [f"  note: {note}" for note in found["notes"]]
    return "\n".join(lines)


@pytest.fixture
def gpu_baseline(request: pytest.FixtureRequest) -> GpuBaseline:
    """Fails a test where a program got slower than its saved baseline; see `GpuBaseline.__call__`."""
    return GpuBaseline(request)
