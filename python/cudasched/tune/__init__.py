"""The fastest configuration of a kernel: `cudasched.tune(kernel, space=...)`.

::

    tuned = cudasched.tune("layernorm.cu", space="layernorm.toml", shape={"rows": 4096, "cols": 1024})
    tuned.configuration, tuned.time_us

    from cudasched.tune import as_header
    Path("layernorm_tuned.h").write_text(as_header(tuned))

The module itself is the function, so that the parts are attributes. Kernels are compiled and run in processes of their
own, as a best-effort client; docs/tuning.md has the whole.
"""

from __future__ import annotations

import sys
from types import ModuleType

from cudasched.tune._face import tune
from cudasched.tune.database import Database
from cudasched.tune.measurement import Measurement
from cudasched.tune.output import as_header, as_json
from cudasched.tune.quiet import Quiet, quiet
from cudasched.tune.recording import Recording, Replay
from cudasched.tune.space import Gpu, Problem, Space, read
from cudasched.tune.triton import triton
from cudasched.tune.tuner import Objective, Progress, Settings, Tuned, run
from cudasched.tune.workers import Limits, Live

__all__ = [
    "Database",
    "Gpu",
    "Limits",
    "Live",
    "Measurement",
    "Objective",
    "Problem",
    "Progress",
    "Quiet",
    "Recording",
    "Replay",
    "Settings",
    "Space",
    "Tuned",
    "as_header",
    "as_json",
    "quiet",
    "read",
    "run",
    "triton",
    "tune",
]


class _Callable(ModuleType):
    """This package, which may be called."""

    __call__ = staticmethod(tune)


sys.modules[__name__].__class__ = _Callable
