"""The directory of processes' records until they become one file: ``<output>.parts``."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from cudasched._output import Output, unwritten
from cudasched.errors import ConfigError
from cudasched.observe.trace._device import DeviceTimes, journals
from cudasched.observe.trace._file import processes
from cudasched.observe.trace._flame import Flame
from cudasched.observe.trace._json import JsonSink
from cudasched.observe.trace._perfetto import PerfettoSink
from cudasched.observe.trace._timeline import Summary, add_process

__all__ = ["FORMATS", "check_limit", "convert", "format_of", "parts_of"]

FORMATS = {"perfetto": PerfettoSink, "json": JsonSink}
_LEAST_MB, _MOST_MB = 1, 1 << 20


def format_of(path: Path, chosen: str | None) -> str:
    """The form of a trace: as chosen, else by the file's name.

    Raises:
        ConfigError: There is no such form.
    """
    if chosen is None:
        return "json" if path.suffix == ".json" else "perfetto"
    if chosen not in FORMATS:
        raise ConfigError(f"a trace's form is one of {', '.join(FORMATS)}; got {chosen!r}")
    return chosen


def check_limit(limit_mb: int) -> int:
    """Bytes.

    Raises:
        ConfigError: The limit is out of range.
    """
    if not _LEAST_MB <= limit_mb <= _MOST_MB:
        raise ConfigError(f"a trace's limit is between {_LEAST_MB} and {_MOST_MB:,} MiB; got {limit_mb}")
    return limit_mb << 20


def parts_of(path: Path) -> Path:
    """The directory of the parts of the trace `path`."""
    return path.with_name(path.name + ".parts")


class _NothingTracedError(Exception):
    pass


def convert(directory: Path, output: Output, form: str, flame: Output | None) -> Summary:
    """Makes the trace, with memory for names alone (and, of device times, for the launches).

    Args:
        directory: The processes' records, which stay.
        output: The trace, which appears when whole. If nothing was traced, an earlier file stays.
        form: Of `FORMATS`.
        flame: The flame graph; None: there is none.

    Raises:
        Error: A file is of another version, or the trace or the flame graph cannot be written; the parts stay.
    """
    summary = Summary()
    graph = Flame() if flame is not None else None
    with_times = journals(directory)
    try:
        with contextlib.suppress(_NothingTracedError), output.replacing() as unfinished:
            with unfinished.open("wb") as file:
                sink = FORMATS[form](file)
                traces = processes(directory)
                for trace in traces:
                    times = DeviceTimes(directory, trace, traces) if with_times else None
                    add_process(trace, sink, summary, graph, times)
                sink.close()
            if summary.processes == 0:
                raise _NothingTracedError
    except OSError as error:
        raise unwritten(output.path, error, directory, "trace") from error
    if flame is not None and graph is not None and summary.processes:
        flame.write(graph.page(output.path.name))
        summary.without_time = graph.without_time
    return summary


def remove(directory: Path) -> None:
    """Takes the parts away."""
    shutil.rmtree(directory, ignore_errors=True)
