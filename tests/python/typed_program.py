"""A program that type checkers see as its author does: modules that are called, and the types of what they return.

Lint checks it, strictly; an error that is expected is one that must be there. Nothing runs it.
"""

import cudasched

with cudasched.collect("data.parquet") as recorded:
    cudasched.collect.label("a")
report: str = cudasched.advise("data.parquet").gpu
time_us: float = cudasched.tune("k.cu", space="k.toml", shape={"rows": 4096}).time_us
wrong: str = recorded.rows  # type: ignore[assignment]
