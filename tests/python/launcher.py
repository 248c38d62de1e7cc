"""A small driver-API program: launches kernels on whatever libcuda.so.1 the loader finds.

As a script: `launcher.py N` launches N kernels of 20 us, waits for them and prints how many it launched.
"""

from __future__ import annotations

import ctypes
import sys

IMAGE = b"cudasched-sim 1\nkernel work params=8 regs=32 shared=0 threads_max=1024 block_us=20 blocks_per_sm=4\n"


class Gpu:
    """The first device, its primary context and one kernel. For one thread."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self.call("cuInit", 0)
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(IMAGE))
        self._function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"work"))

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value
        return stream.value

    def launch(self, count: int = 1, stream: int = 0) -> None:
        argument = ctypes.c_uint64(0)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        for _ in range(count):
            self.call("cuLaunchKernel", self._function, 1, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream), arguments, None)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")


if __name__ == "__main__":
    gpu = Gpu()
    gpu.launch(int(sys.argv[1]))
    gpu.synchronize()
    print(f"launched {sys.argv[1]}")
