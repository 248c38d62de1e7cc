#!/usr/bin/env bash
# A program that frees GPU memory holds up the copies of other programs: the driver zeroes freed memory with a copy engine.
#
# cuMemFree of 10 GiB returns after some milliseconds. The zeroing goes on behind it (mem_scrub.c of NVIDIA's open kernel
# modules), and copies from the host to the GPU that another process makes meanwhile wait: each of 1 MiB takes a
# millisecond in place of 29 us. Kernels do not wait. So a server beside programs that end, empty a caching allocator or
# unload models has its slowest copies then.
#
# Needs a GPU with 16 GiB that is free. Seen with cupy-cuda13x 14.2.0, CPython 3.12.3, driver 580.159, H200, 2026-11-29:
#     10 GiB freed: 1 MiB to the GPU in 29 us before, 1077 us behind it, at most 1080 us
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=python3
if ! python3 -c 'import cupy; assert cupy.__version__ == "14.2.0"' 2> /dev/null; then # 80 MB, where it is not there
  python3 -m venv "$folder/venv"
  python="$folder/venv/bin/python"
  "$python" -m pip install -q --disable-pip-version-check cupy-cuda13x==14.2.0
fi
cat > "$folder/free.py" <<'PYTHON'
import multiprocessing
import platform
import statistics
import sys
import time

BYTES = 10 << 30


def hold(taken, may_free, freed, may_end):
    from cupy.cuda import runtime

    memory = runtime.malloc(BYTES)
    runtime.memset(memory, 1, BYTES)
    runtime.deviceSynchronize()
    taken.set()
    may_free.wait()
    runtime.free(memory)
    freed.set()
    may_end.wait()


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

    def beside():
        """Copies while another process has the memory, and in the 10 ms behind the call that frees it."""
        taken, may_free, freed, may_end = events = [context.Event() for _ in range(4)]
        holder = context.Process(target=hold, args=events)
        holder.start()
        taken.wait()
        before = [copy_us() for _ in range(500)]
        may_free.set()
        freed.wait()
        after = []
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            after.append(copy_us())
        may_end.set()
        holder.join()
        return statistics.median(before), statistics.median(after), max(after)

    name = runtime.getDeviceProperties(0)["name"].decode()
    print(f"cupy {__version__}, Python {platform.python_version()}, {name}, CUDA {runtime.driverGetVersion()}")
    held, after, longest = (statistics.median(one) for one in zip(*(beside() for _ in range(3)), strict=True))
    print(f"10 GiB freed: 1 MiB to the GPU in {held:.0f} us before, {after:.0f} us behind it, at most {longest:.0f} us")
    return 0 if after > 4 * held else 1


if __name__ == "__main__":
    sys.exit(main())
PYTHON
"$python" "$folder/free.py"
