"""The least that a GPU of so many multiprocessors takes for a launch: what trees may be trained over.

Trees over log(time / roofline) learn what a kernel makes of the hardware, and the hardware enters by its figures: a
launch on fewer multiprocessors, or on another GPU, has another roofline and the same rest. The figures here are the
H200's, and what a part of it has follows from its multiprocessors alone. Bytes and operations come from the features,
where a launch's work is known; elsewhere bytes go by its threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data import Floats


@dataclass(frozen=True)
class Hardware:
    """What a GPU of `sm_count` multiprocessors can do, per ns.

    Attributes:
        sm_count: Of the whole GPU.
        bytes_per_ns: Of its memory.
        sm_bytes_per_ns: What one multiprocessor can take of that.
        sm_flops_per_ns: One multiprocessor's additions and multiplications, by bytes of an element; dense.
        launch_ns: What a kernel takes that does nothing.
    """

    sm_count: int
    bytes_per_ns: float
    sm_bytes_per_ns: float
    sm_flops_per_ns: dict[int, float]
    launch_ns: float


#: 4.8 TB/s, 989 TFLOP/s of 16 bits; of 32 bits those of TF32. A multiprocessor can have more than its part of the
#: bandwidth: an addition to 90 million numbers took 1.5 TB/s on 16 of them, and all that there is from 64 on.
H200 = Hardware(132, 4800.0, 94.0, {1: 15_000.0, 2: 7_500.0, 4: 3_750.0, 8: 500.0}, 1000.0)


def roofline_ns(rows: NDArray[np.float32], names: Sequence[str], hardware: Hardware = H200) -> Floats:
    """The least that each launch takes, ns.

    Args:
        rows: Features of launches, shape (n, features); `sm_count` among them is the count that they ran on.
        names: Of the features.
        hardware: The GPU's figures.
    """

    def column(name: str) -> Floats:
        return rows[:, list(names).index(name)].astype(np.float64)

    m, n, k = (column(f"log_work_{side}") for side in "mnk")
    known = column("log_work") > 0
    element = np.where(column("element_bytes") > 0, column("element_bytes"), 4)
    sides = np.exp2(m + k) * (k > 0) + np.exp2(n + k) * (k > 0) + np.exp2(m + n)
    moved = np.where(known, sides * element, np.exp2(column("log_thread_work")))
    # A multiplication and an addition for each of m x n x k; of what is not known, one operation a byte.
    flops = np.where(known & (k > 0), 2 * np.exp2(column("log_work")), moved)
    blocks = np.exp2(column("log_blocks"))
    used = np.minimum(np.maximum(blocks, 1), column("sm_count"))
    bandwidth = np.minimum(hardware.bytes_per_ns, used * hardware.sm_bytes_per_ns)
    rate = np.array([hardware.sm_flops_per_ns.get(int(size), 3_750.0) for size in element])
    return hardware.launch_ns + np.maximum(moved / bandwidth, flops / (used * rate))
