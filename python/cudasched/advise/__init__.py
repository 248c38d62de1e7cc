"""Advice on the kernels of a recorded run: `cudasched.advise(data)`.

::

    report = cudasched.advise("data.parquet")  # of `cudasched collect`, or its pyarrow.Table
    report.kernels[0].findings[0].recommendation

    from cudasched.advise import diff, html
    Path("report.html").write_text(html(report))
    diff(report, cudasched.advise("after.parquet"))[0]  # the kernel whose time changed most

The module itself is the function, so that `Report`, `html` and `occupancy` are its attributes. Advice makes no CUDA
call.
"""

from __future__ import annotations

import sys
from types import ModuleType

from cudasched.advise._face import advise
from cudasched.advise.diff import Change, diff
from cudasched.advise.occupancy import ARCHITECTURES, Architecture, Occupancy, occupancy
from cudasched.advise.report import SCHEMA_VERSION, Affected, Finding, Function, Kernel, Report
from cudasched.advise.view import html

__all__ = [
    "ARCHITECTURES",
    "SCHEMA_VERSION",
    "Affected",
    "Architecture",
    "Change",
    "Finding",
    "Function",
    "Kernel",
    "Occupancy",
    "Report",
    "advise",
    "diff",
    "html",
    "occupancy",
]


class _Callable(ModuleType):
    """This package, which may be called."""

    __call__ = staticmethod(advise)


sys.modules[__name__].__class__ = _Callable
