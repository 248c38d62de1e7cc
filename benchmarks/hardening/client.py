"""A program on the simulated driver that counts what it did: `python client.py CLASS COUNTER`.

A latency client serves a request every 5 ms in a region; a best-effort one launches and launches. The eight bytes of
the file COUNTER are how many came to their end.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

import cudasched

IMAGE = b"cudasched-sim 1\nkernel work params=4 block_us=param:0\n"
REQUEST_S = 0.005
BATCH = 10


class Gpu:
    """The first device and a kernel that takes 20 simulated microseconds."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context, module, self._function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(IMAGE))
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"work"))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def launch(self) -> None:
        """Launches the kernel once."""
        duration = ctypes.c_uint32(20)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        self._call("cuLaunchKernel", self._function, 1, 1, 1, 32, 1, 1, 0, None, arguments, None)

    def synchronize(self) -> None:
        """Waits for all that was launched."""
        self._call("cuCtxSynchronize")


def main() -> None:
    client_class, counter = sys.argv[1:]
    gpu = Gpu()
    with open(counter, "r+b") as file:
        count = ctypes.c_uint64.from_buffer(mmap.mmap(file.fileno(), 8))
    while True:
        if client_class == "latency":
            with cudasched.region("latency"):
                gpu.launch()
                gpu.synchronize()
            time.sleep(REQUEST_S)
        else:
            for _ in range(BATCH):
                gpu.launch()
            gpu.synchronize()
        count.value += 1


if __name__ == "__main__":
    main()
