"""Batches by deadline: a library that collects requests, and starts each batch by the deadlines of its requests.

::

    from cudasched.inference import Batcher

    batcher = Batcher(run, sizes=(1, 2, 4, 8), slo_ms=20)
    y = await batcher.submit(x, deadline_ms=15)

``docs/inference.md`` has the rules, and the options of Triton Inference Server one by one. Works without a GPU.
"""

from __future__ import annotations

from cudasched.inference._batcher import Batcher, Statistics
from cudasched.inference._errors import DeadlineError, InputError, QueueFullError, RunError, UseError

__all__ = ["Batcher", "DeadlineError", "InputError", "QueueFullError", "RunError", "Statistics", "UseError"]
