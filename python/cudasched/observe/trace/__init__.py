"""Records a process's use of the GPU into a timeline for Perfetto and chrome://tracing (docs/traces.md).

::

    with cudasched.trace("out.pftrace", flame="flame.html"):
        train()

Unmodified programs, and several processes in one timeline: ``cudasched trace -o out.pftrace -- python train.py``. Needs
nothing beyond cudasched, but for device times.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import TracebackType

from cudasched import hook
from cudasched._output import Output, claimed
from cudasched.errors import HookError, HookWarning
from cudasched.observe.trace._device import check
from cudasched.observe.trace._parts import check_limit, convert, format_of, parts_of, remove
from cudasched.observe.trace._timeline import Summary

__all__ = ["Summary", "trace"]


class trace:  # noqa: N801  used like a function
    """Traces this process from entry to exit; a context manager.

    Launches and their driver calls' times, gate waits and reasons, regions, slices of graphs, the gate's measured and
    predicted times, the GPU's memory. One trace a process at a time. Without a trace, a launch pays for one branch.

    Args:
        path: The trace, written at the block's end. Until then the records are in ``<path>.parts``, where ``cudasched
            trace -o <path>`` finds them if the process is killed.
        format: ``"perfetto"`` or ``"json"``; None: by the file's name, Perfetto unless that ends in ``.json``.
        device_times: Have CUPTI time each launch on the device. Costs about 2 us a launch, and best-effort launches are
            made on the program's own threads meanwhile. Needs numpy.
        limit_mb: Most space for records, MiB; the oldest go. A launch takes 40 to 120 bytes.
        flame: An HTML file with the GPU time by region, library and kernel; None: none.

    Attributes:
        summary: The numbers of records that the trace has and lacks; None until the block's end.

    Raises:
        HookError: On entry: the hook is not in this process.
        ConfigError: On entry: an argument has no meaning, or a file cannot be written.
        Error: On entry: a trace runs already, or parts of one that was never finished are in the way. On leaving: the
            trace cannot be written; the parts stay.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        device_times: bool = False,
        limit_mb: int = 256,
        flame: str | os.PathLike[str] | None = None,
    ) -> None:
        self._path = Path(path).absolute()
        self._format = format_of(self._path, format)
        self._limit_bytes = check_limit(limit_mb)
        self._device_times = device_times
        self._flame_path = flame
        self.summary: Summary | None = None

    def __enter__(self) -> trace:
        if not hook.installed():
            raise HookError(
                "nothing can be traced: cudasched's hook is not in this process (cudasched.state() says why)"
            )
        if self._device_times:
            check()
        self._output = Output(self._path)
        self._flame = Output(self._flame_path) if self._flame_path is not None else None
        if self._flame is not None:
            self._flame.refuse(self._path, "the trace goes there")
        directory = parts_of(self._path)
        core = hook.load_core()
        self._claim = claimed(directory, self._path, "trace", new=True)
        self._claim.__enter__()
        try:
            core.trace_start(str(directory), self._limit_bytes)
            try:
                if self._device_times:
                    core.collect_start(str(directory), "cupti", None, 64 << 20)
            except BaseException:
                core.trace_stop()
                raise
        except BaseException:
            remove(directory)
            self._claim.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        directory = parts_of(self._path)
        core = hook.load_core()
        try:
            try:
                if self._device_times:
                    core.collect_stop()
            finally:
                core.trace_stop()
            self.summary = convert(directory, self._output, self._format, self._flame)
        finally:
            self._claim.__exit__(None, None, None)
        remove(directory)
        if self.summary.dropped:
            warnings.warn(
                f"{self.summary.dropped:,} records of the trace {self._path} were dropped, for want of room in memory",
                HookWarning,
                stacklevel=2,
            )
