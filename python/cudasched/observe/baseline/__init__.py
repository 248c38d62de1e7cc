"""Which kernels, regions or waits of a program got slower, beyond the noise from run to run.

::

    from cudasched.observe import baseline

    before = baseline.load("baseline.json")                       # of `cudasched baseline save`
    now = baseline.record(["python", "train.py"], runs=6)
    found = baseline.check(before, now)
    [one.label for one in found.compared if one.verdict == "slower"]

`cudasched baseline` and the pytest fixture ``gpu_baseline`` do this for unmodified programs; ``docs/baselines.md`` has
the test, and the necessary number of runs. Needs pyarrow, NumPy, SciPy and jinja2: ``pip install
'cudasched[baseline]'``.
"""

from __future__ import annotations

import os
from pathlib import Path

from cudasched._output import Output
from cudasched.errors import Error
from cudasched.observe.baseline._check import ALPHA, LEAST_CHANGE, LEAST_SHARE, check
from cudasched.observe.baseline._model import (
    SCHEMA_VERSION,
    Baseline,
    Compared,
    Comparison,
    Measured,
    Run,
    Uncompared,
)
from cudasched.observe.baseline._record import new_session, record
from cudasched.observe.baseline._runs import from_recordings, merged
from cudasched.observe.baseline._view import html, terminal

__all__ = [
    "ALPHA",
    "LEAST_CHANGE",
    "LEAST_SHARE",
    "SCHEMA_VERSION",
    "Baseline",
    "Compared",
    "Comparison",
    "Measured",
    "Run",
    "Uncompared",
    "check",
    "from_recordings",
    "html",
    "load",
    "merged",
    "new_session",
    "record",
    "save",
    "terminal",
]

_MOST_BYTES = 256 << 20


def load(path: str | os.PathLike[str]) -> Baseline:
    """Reads a baseline.

    Raises:
        Error: There is no such file, or it is damaged, cut short or of another version.
    """
    import json

    file = Path(path)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise Error(f"{file} is no baseline: it has over {_MOST_BYTES >> 20} MiB")
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Error(
            f"there is no baseline at {file}; `cudasched baseline save -o {file} -- PROGRAM` makes one"
        ) from None
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Error(f"{file} is no baseline, or is cut short: it is not JSON; save it again") from None
    if not isinstance(document, dict) or document.get("kind") != "cudasched baseline":
        raise Error(f"{file} is no baseline: save one with `cudasched baseline save`")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise Error(
            f"{file} has schema version {version!r:.40}, and this cudasched reads {SCHEMA_VERSION}: save it again with "
            "this version"
        )
    try:
        return Baseline.model_validate(document, strict=False)
    except ValueError as error:
        details = error.errors() if hasattr(error, "errors") else []
        where = ".".join(map(str, details[0]["loc"])) if details else ""
        what = details[0]["msg"] if details else str(error).splitlines()[0]
        raise Error(f"{file} is damaged: {where}: {what}; save it again") from None


def save(baseline: Baseline, path: str | os.PathLike[str]) -> None:
    """Writes a baseline; the file appears whole, and replaces an earlier one.

    Raises:
        Error: The file cannot be written.
    """
    Output(path).write(baseline.model_dump_json(indent=1) + "\n")
