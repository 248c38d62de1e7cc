#!/usr/bin/env bash
# cuMemSetAccess of 2 GiB takes 3.5 ms where four handles of 512 MiB are mapped there, no less than with 64 of 32 MiB, and
# 0.3 ms where it is one handle.
#
# The virtual memory management functions are documented without a cost. One call gives access to a whole range, however many
# handles are mapped in it. Up to 512 MiB a handle its time goes by the bytes, 1.7 us a MiB; above, it falls. So a pool that maps
# a large block piece by piece pays for all of it each time, up to pieces that are larger than most pools'.
#
# Needs a GPU with 4 GiB that is free. Seen with cuda-bindings 13.5.0, CPython 3.12.3, driver 580.159, H200, 2026-11-30:
#     access to 2 GiB: 64 of 32 MiB 3570 us, 4 of 512 MiB 3473 us, 2 of 1024 MiB 2033 us, 1 of 2048 MiB 276 us
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=python3
if ! python3 -c 'import importlib.metadata as m; assert m.version("cuda-bindings") == "13.5.0"' 2> /dev/null; then
  python3 -m venv "$folder/venv"
  python="$folder/venv/bin/python"
  "$python" -m pip install -q --disable-pip-version-check cuda-bindings==13.5.0
fi
cat > "$folder/access.py" <<'PYTHON'
import platform
import statistics
import sys
import time

from cuda.bindings import __version__, driver

MIB = 1 << 20
ALL = 2048 * MIB


def called(answer):
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if values else None


def access_us(base, size, properties, access):
    """The time of the one call for all, once handles of this size are mapped side by side."""
    handles = [called(driver.cuMemCreate(size, properties, 0)) for _ in range(ALL // size)]
    for number, handle in enumerate(handles):
        called(driver.cuMemMap(int(base) + number * size, size, 0, handle, 0))
    began = time.perf_counter_ns()
    called(driver.cuMemSetAccess(base, ALL, [access], 1))
    taken = (time.perf_counter_ns() - began) / 1e3
    called(driver.cuMemUnmap(base, ALL))
    for handle in handles:
        called(driver.cuMemRelease(handle))
    return taken


def main():
    called(driver.cuInit(0))
    device = called(driver.cuDeviceGet(0))
    called(driver.cuCtxSetCurrent(called(driver.cuDevicePrimaryCtxRetain(device))))
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    base = called(driver.cuMemAddressReserve(ALL, 0, 0, 0))
    name = called(driver.cuDeviceGetName(64, device)).split(b"\0")[0].decode()
    version = called(driver.cuDriverGetVersion())
    print(f"cuda-bindings {__version__}, Python {platform.python_version()}, {name}, CUDA {version}")
    found = {}
    for mib in (32, 512, 1024, 2048):
        times = [access_us(base, mib * MIB, properties, access) for _ in range(9)]
        found[mib] = statistics.median(times[1:])
    print("access to 2 GiB: " + ", ".join(f"{2048 // mib} of {mib} MiB {us:.0f} us" for mib, us in found.items()))
    return 0 if found[512] > 3 * found[2048] and found[512] > 0.7 * found[32] else 1


sys.exit(main())
PYTHON
"$python" "$folder/access.py"
