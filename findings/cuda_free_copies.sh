#!/usr/bin/env bash
# A program that frees GPU memory holds up the copies of other programs: the driver zeroes freed memory with a copy engine.
#
# cuMemFree of 10 GiB returns after some milliseconds. The zeroing goes on behind it (mem_scrub.c of NVIDIA's open kernel
# modules), and copies from the host to the GPU that another process makes meanwhile wait: 1 MiB takes a millisecond in
# place of 40 us. Kernels do not wait. The same memory freed in parts of 32 MiB, one each 0.7 ms, holds up nothing. So
# a server beside programs that end, empty a caching allocator or unload models has its worst copies then.
#
# Needs a GPU with 16 GiB that is free. Seen with cupy-cuda13x 14.2.0, CPython 3.12.3, driver 580.159.04, H200, 2026-11-29:
#     @@
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv --system-site-packages "$folder/venv" # CuPy has 80 MB: where it is installed, that one serves
"$folder/venv/bin/pip" install -q --disable-pip-version-check cupy-cuda13x==14.2.0
cat > "$folder/free.py" <<'PYTHON'
import multiprocessing
import platform
import statistics
import sys
import time

GIB = 1 << 30
PART = 32 << 20


def hold(size, parts, pause_s, taken, may_free, freed):
    from cupy.cuda import runtime

    each = size // parts
    memory = [runtime.malloc(each) for _ in range(parts)]
    for address in memory:
        runtime.memset(address, 1, each)
    runtime.deviceSynchronize()
    taken.set()
    may_free.wait()
    for address in memory:
        runtime.free(address)
        time.sleep(pause_s)
    freed.set()
    may_free.clear()
    may_free.wait()  # so that the end of the process is not measured


def main():
    from cupy import __version__, cuda
    from cupy.cuda import runtime

    context = multiprocessing.get_context("spawn")
    host, device = cuda.alloc_pinned_memory(1 << 20), cuda.alloc(1 << 20)
    stream = cuda.Stream(non_blocking=True)

    def copy_us():
        began = time.perf_counter_ns()
        runtime.memcpyAsync(device.ptr, host.ptr, 1 << 20, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()
        return (time.perf_counter_ns() - began) / 1e3

    def beside(parts, pause_s):
        """Copies while another process has the memory, and from the call that frees it to 10 ms behind it."""
        taken, may_free, freed = (context.Event() for _ in range(3))
        arguments = 10 * GIB, parts, pause_s, taken, may_free, freed
        holder = context.Process(target=hold, args=arguments)
        holder.start()
        taken.wait()
        before = [copy_us() for _ in range(500)]
        may_free.set()
        while not freed.is_set() and parts == 1:
            copy_us()
        after = []
        until = time.perf_counter() + (0.01 if parts == 1 else parts * pause_s)
        while time.perf_counter() < until:
            after.append(copy_us())
        may_free.set()
        holder.join()
        return statistics.median(before), statistics.median(after), max(after)

    name = runtime.getDeviceProperties(0)["name"].decode()
    print(f"cupy {__version__}, Python {platform.python_version()}, {name}, CUDA {runtime.driverGetVersion()}")
    slow = []
    for label, parts, pause_s in (("at once", 1, 0.0), ("32 MiB each 0.7 ms", 10 * GIB // PART, 0.0007)):
        turns = [beside(parts, pause_s) for _ in range(3)]
        held, after, longest = (statistics.median(one) for one in zip(*turns, strict=True))
        slow.append(after > 4 * held)
        print(f"10 GiB freed {label}: 1 MiB to the GPU in {held:.0f} us before, {after:.0f} us behind it, at most {longest:.0f} us")
    return 0 if slow == [True, False] else 1


if __name__ == "__main__":
    sys.exit(main())
PYTHON
"$folder/venv/bin/python" "$folder/free.py"
