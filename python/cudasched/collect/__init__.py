"""Records the launches of this process, with their times, into a data set (docs/dataset.md).

::

    with cudasched.collect("data.parquet"):      # the same as cudasched.collect.recording("data.parquet")
        cudasched.collect.label("gemm|4096x4096x512|bf16|forward")
        train()
    table = cudasched.collect.read("data.parquet")
    cudasched.collect.write(table.filter(...), "some.parquet")

Unmodified programs are recorded by ``cudasched collect``. Needs pyarrow: ``pip install 'cudasched[collect]'``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from cudasched import hook
from cudasched._output import Output, claimed, unwritten
from cudasched.collect._dataset import FORMATS, SCHEMA_VERSION, arrow, convert, journals_of, read, schema, write
from cudasched.errors import HookError, HookWarning

__all__ = ["SCHEMA_VERSION", "label", "read", "recording", "schema", "write"]


class recording:  # noqa: N801  used like a function
    """Records every launch of this process from entry to exit; a context manager.

    One recording a process at a time. Leaving waits for the device. Launches that fail, and those that are captured
    into a graph, are not recorded; a graph's launch is one row.

    Args:
        path: The Parquet file, written at the block's end. Until then the launches are in ``<path>.journals``, where
            `read` finds them if the process is killed.
        timing: ``"cupti"``: the device's own times, by CUPTI, which admits one profiler at a time. ``"events"``: CUDA
            events around each launch, without CUPTI and coarser, calibrated with an empty kernel. ``"both"``: CUPTI's
            times, and in a column ``elapsed_ns`` the time between two events around the launch, as in the scheduler.
        capacity_mb: Most memory for launches that wait to be written, MiB; launches beyond it are lost, and counted.

    Attributes:
        rows: Launches that were recorded; 0 until the recording is left.
        lost: Launches that were not, for want of memory or disk.

    Raises:
        HookError: On entry: the hook is not in this process.
        Error: On entry: a recording runs already, CUPTI is not available, pyarrow is missing, or journals of an
            unfinished recording are in the way. At the end: the data set cannot be written; the journals stay.
    """

    def __init__(self, path: str | os.PathLike[str], *, timing: str = "cupti", capacity_mb: int = 64) -> None:
        self._path = Path(path).absolute()
        self._timing = timing
        self._capacity_mb = capacity_mb
        self.rows = 0
        self.lost = 0

    def __enter__(self) -> recording:
        arrow()
        if not hook.installed():
            raise HookError(
                "launches cannot be recorded: cudasched's hook is not in this process (cudasched.state() says why)"
            )
        self._output = Output(self._path, formats=FORMATS)
        directory = journals_of(self._path)
        self._claim = claimed(directory, self._path, "collect", new=True)
        self._claim.__enter__()
        try:
            hook.load_core().collect_start(str(directory), self._timing, None, self._capacity_mb << 20)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            self._claim.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        directory = journals_of(self._path)
        try:
            _, _, self.lost = hook.load_core().collect_stop()
            made = convert(directory, self._output)
        except OSError as failure:
            raise unwritten(self._path, failure, directory, "collect") from failure
        finally:
            with contextlib.suppress(OSError):
                directory.rmdir()  # of a recording that could not begin
            self._claim.__exit__(None, None, None)
        shutil.rmtree(directory, ignore_errors=True)
        self.rows = int(made["rows"])
        if self.rows == 0 and not self._output.is_stream:
            kept = ", which was there before, is kept as it was" if "kept" in made else " is not written"
            warnings.warn(
                f"no launch was recorded, so {self._path}{kept}",
                HookWarning,
                stacklevel=2,
            )


def label(text: str) -> None:
    """Labels the process's launches from here on, in the column ``label``. ``""``: no label.

    Labels are for kinds of work, "gemm|4096x4096x512|bf16|forward", not for single launches: there may be about a
    million different ones a process.

    Raises:
        Error: There are more.
    """
    hook.load_core().collect_label(text)


class _Collect(ModuleType):
    """This package, which may be called: ``cudasched.collect(path)`` is ``cudasched.collect.recording(path)``."""

    def __call__(self, path: str | os.PathLike[str], *, timing: str = "cupti", capacity_mb: int = 64) -> recording:
        return recording(path, timing=timing, capacity_mb=capacity_mb)

    if TYPE_CHECKING:
        label, read, schema, write = staticmethod(label), staticmethod(read), staticmethod(schema), staticmethod(write)


sys.modules[__name__].__class__ = _Collect
