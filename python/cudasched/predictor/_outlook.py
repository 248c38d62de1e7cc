"""The four predictions of a launch: how long, how full, how evenly, how hard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudasched.predictor._model import Model
from cudasched.predictor._numpy import numpy
from cudasched.predictor._recording import _table, capability_of, outlooks
from cudasched.status import LEVELS

if TYPE_CHECKING:
    import os

    import pyarrow as pa
    from numpy import float32, float64, str_
    from numpy.typing import NDArray

__all__ = ["Outlook", "outlook"]


@dataclass(frozen=True, eq=False)
class Outlook:
    """Launches' predicted use of the GPU; arrays of shape (launches,), NaN for a graph.

    Attributes:
        duration_ns: Predicted time.
        occupancy: Threads resident of those that a full multiprocessor can hold, 0 to 1, as the driver computes it.
        waves: Blocks over the blocks that the device holds at once.
        sm_utilisation: Up to one wave the share of multiprocessors that have a block; above, waves over whole waves,
            which shows the empty part of the last one.
        block_efficiency: Threads of a block over the threads of its warps, 0 to 1.
        bytes_per_s: The least bytes that the launch must move, over its time; NaN where its work is not known.
        flops_per_s: Alike, of additions and multiplications.
        level: The judgement of the launch shape: ``critical``, ``warning``, ``good``, or ``not judged`` for a library's
            kernel and a graph. By the possible losses from partial warps, few blocks, a tail and local memory
            (``docs/advise.md``). `cudasched.advise` also tries other block sizes, and judges all launches together.
    """

    duration_ns: NDArray[float64]
    occupancy: NDArray[float32]
    waves: NDArray[float32]
    sm_utilisation: NDArray[float32]
    block_efficiency: NDArray[float32]
    bytes_per_s: NDArray[float32]
    flops_per_s: NDArray[float32]
    level: NDArray[str_]


def outlook(launches: str | os.PathLike[str] | pa.Table, *, model: Model | None = None) -> Outlook:
    """Time, occupancy, use of the multiprocessors and rates of a recording's launches, before they run.

    A launch's work is known for the kernels of csrc/predict/work.hpp. These are NVIDIA's libraries' matrix products and
    convolutions, and PyTorch's reductions, scans, softmax and lists of tensors.

    Args:
        launches: A recording: a path, or a table with metadata.
        model: Predicts the times; None: the one that the package ships for the recording's GPU.

    Raises:
        ModelError: There is none for that GPU, or it was trained on other features.
        Error: It is no recording, or numpy or pyarrow are missing.
    """
    from cudasched.predictor._shipped import load

    np = numpy()
    table = _table(launches)
    durations = (model or load(architecture=capability_of(table))).predict(table)
    found = outlooks(table, durations)
    for name in ("bytes_per_s", "flops_per_s"):
        found[name][found[name] == 0] = np.nan
    found["occupancy"][found["waves"] == 0] = np.nan  # the driver did not say how many blocks fit
    found["sm_utilisation"][found["waves"] == 0] = np.nan
    found["waves"][found["waves"] == 0] = np.nan
    levels = found.pop("level")
    of_kernels = np.where(np.isnan(levels), LEVELS.index("not judged"), levels).astype(np.intp)
    return Outlook(duration_ns=durations, level=np.array(LEVELS)[of_kernels], **found)
