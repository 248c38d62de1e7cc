"""A persistent kernel that takes its items from a work queue: Collatz's steps of the first numbers.

Compiled by NVRTC (pip install cuda-bindings nvidia-cuda-nvrtc) or nvcc, run through cuda-bindings. It is launched
twice without a fill in between: the last block makes the queue ready again. Without a GPU it compiles and says so.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import cudasched
from cudasched.errors import Error
from cudasched.tune import compile as compilation

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
QUEUE_BYTES = 16


def steps(number: int) -> int:
    """What the kernel is to find."""
    taken = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        taken += 1
    return taken


def main() -> None:
    """Compiles it, runs it, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=10_000_000)
    parser.add_argument("--checked", type=int, default=2000, help="numbers that the host computes, too")
    options = parser.parse_args()

    compiler = compilation.choose()
    include = f"-I{cudasched.get_include()}"
    try:
        from cuda.bindings import driver as cuda

        def call(name: str, *arguments: object) -> object:
            status, *values = getattr(cuda, name)(*arguments)
            if int(status) != 0:
                raise Error(f"{name}: {status.name}")
            return values[0] if values else None

        call("cuInit", 0)
        device = call("cuDeviceGet", 0)
    except (ImportError, RuntimeError, Error) as missing:
        made = compilation.compile_source(SOURCE, (), "sm_90", compiler, [include])
        print(f"needs a GPU to run ({missing}); compiled for sm_90: {len(made.image)} bytes")
        return

    attributes = cuda.CUdevice_attribute
    major = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    sms = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    image = compilation.compile_source(SOURCE, (), f"sm_{major}{minor}", compiler, [include]).image
    kernel = call("cuModuleGetFunction", call("cuModuleLoadData", image), b"collatz")
    # As many blocks as the GPU holds at once: they stay until all items are done.
    per_sm = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, THREADS, 0)

    queue = call("cuMemAlloc", QUEUE_BYTES)
    found = call("cuMemAlloc", 4 * options.numbers)
    call("cuMemsetD8", queue, 0, QUEUE_BYTES)  # once, before its first launch
    begin, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    arguments = ((int(queue), options.numbers, int(found)), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64))
    for launch in (1, 2):
        call("cuMemsetD8", found, 0, 4 * options.numbers)
        call("cuEventRecord", begin, 0)
        call("cuLaunchKernel", kernel, sms * per_sm, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)
        call("cuEventRecord", end, 0)
        call("cuCtxSynchronize")
        ms = call("cuEventElapsedTime", begin, end)
        host = (ctypes.c_uint32 * options.numbers)()
        call("cuMemcpyDtoH", ctypes.addressof(host), found, 4 * options.numbers)
        for i in range(min(options.checked, options.numbers)):
            if host[i] != steps(i + 1):
                raise SystemExit(f"launch {launch}: {i + 1} takes {steps(i + 1)} steps, the kernel says {host[i]}")
        print(f"launch {launch}: {options.numbers} numbers in {ms:.3f} ms, the longest {max(host)} steps")


if __name__ == "__main__":
    main()
