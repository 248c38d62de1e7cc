"""How many blocks of a kernel one SM holds: exactly, as the driver computes it, for launches that have not been made.

Sources of the numbers: ``cuda_occupancy.h`` of CUDA 13.0 (allocation granularities, blocks per SM) and the CUDA C++
Programming Guide 13.0, "Technical Specifications per Compute Capability" (warps, shared memory and its reserved part
per SM). The default split between L1 and shared memory is assumed, which allows all of the latter. Thread block
clusters are not modelled. Pure arithmetic: nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "MAX_THREADS_PER_BLOCK", "WARP_THREADS", "Architecture", "Occupancy", "occupancy"]

WARP_THREADS = 32
MAX_THREADS_PER_BLOCK = 1024

_KIB = 1024
_REGISTERS_PER_SM = 64 * _KIB
_REGISTERS_PER_BLOCK = 64 * _KIB
_MAX_REGISTERS_PER_THREAD = 256
_REGISTER_GRANULARITY = 256  # a warp
_PARTITIONS = 4  # of an SM; a warp's registers lie in one, and a block's check rounds its warps up to this many


@dataclass(frozen=True)
class Architecture:
    """The limits of one SM of a compute capability.

    Attributes:
        max_warps_per_sm: Resident warps.
        max_blocks_per_sm: Resident blocks.
        shared_bytes_per_sm: Shared memory of all resident blocks, the reserved part included.
        reserved_shared_bytes: The driver's own part for each block.
        shared_granularity_bytes: A block's share is rounded up to this.
    """

    max_warps_per_sm: int
    max_blocks_per_sm: int
    shared_bytes_per_sm: int
    reserved_shared_bytes: int = _KIB
    shared_granularity_bytes: int = 128

    @property
    def max_shared_bytes_per_block(self) -> int:
        """Static and dynamic shared memory of one block, with the opt-in, bytes."""
        return self.shared_bytes_per_sm - self.reserved_shared_bytes


ARCHITECTURES: Mapping[str, Architecture] = {
    "7.5": Architecture(32, 16, 64 * _KIB, reserved_shared_bytes=0, shared_granularity_bytes=256),
    "8.0": Architecture(64, 32, 164 * _KIB),
    "8.6": Architecture(48, 16, 100 * _KIB),
    "8.7": Architecture(48, 16, 164 * _KIB),
    "8.9": Architecture(48, 24, 100 * _KIB),
    "9.0": Architecture(64, 32, 228 * _KIB),
    "10.0": Architecture(64, 32, 228 * _KIB),
    "10.3": Architecture(64, 32, 228 * _KIB),
    "11.0": Architecture(48, 24, 228 * _KIB),
    "12.0": Architecture(48, 24, 100 * _KIB),
    "12.1": Architecture(48, 24, 100 * _KIB),
}
"""By compute capability."""


@dataclass(frozen=True)
class Occupancy:
    """The blocks that fit on one SM.

    Attributes:
        blocks_per_sm: Blocks that are resident together; 0 where a block does not fit at all.
        warps_per_block: Whole or partly filled warps of a block.
        max_warps_per_sm: Warps that an SM can hold.
        limited_by: Which of "warps", "blocks", "registers" and "shared_memory" allow no more blocks.
    """

    blocks_per_sm: int
    warps_per_block: int
    max_warps_per_sm: int
    limited_by: tuple[str, ...]

    @property
    def resident_warps(self) -> int:
        """Warps on an SM that is full of this kernel."""
        return self.blocks_per_sm * self.warps_per_block

    @property
    def fraction(self) -> float:
        """Resident warps of those that an SM can hold, 0 to 1."""
        return self.resident_warps / self.max_warps_per_sm


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(architecture: Architecture, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Computes the blocks that fit on one SM.

    Args:
        architecture: Of the device.
        threads: A block.
        registers: A thread.
        shared_bytes: Static and dynamic shared memory of a block, without the driver's reserved part.

    Raises:
        ValueError: A block without threads, or a negative resource.
    """
    if threads < 1 or registers < 0 or shared_bytes < 0:
        raise ValueError(f"no such block: {threads} threads, {registers} registers, {shared_bytes} bytes shared")
    warps = -(-threads // WARP_THREADS)
    limits = {
        "warps": architecture.max_warps_per_sm // warps if threads <= MAX_THREADS_PER_BLOCK else 0,
        "blocks": architecture.max_blocks_per_sm,
    }
    registers_per_warp = _round_up(registers * WARP_THREADS, _REGISTER_GRANULARITY)
    if (
        registers > _MAX_REGISTERS_PER_THREAD
        or registers_per_warp * _round_up(warps, _PARTITIONS) > _REGISTERS_PER_BLOCK
    ):
        limits["registers"] = 0
    elif registers_per_warp:
        limits["registers"] = _REGISTERS_PER_SM // _PARTITIONS // registers_per_warp * _PARTITIONS // warps
    shared = _round_up(shared_bytes + architecture.reserved_shared_bytes, architecture.shared_granularity_bytes)
    if shared:
        limits["shared_memory"] = architecture.shared_bytes_per_sm // shared
    blocks = min(limits.values())
    return Occupancy(
        blocks_per_sm=blocks,
        warps_per_block=warps,
        max_warps_per_sm=architecture.max_warps_per_sm,
        limited_by=tuple(name for name, limit in limits.items() if limit == blocks),
    )
