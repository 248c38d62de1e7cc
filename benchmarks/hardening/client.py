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
from cudasched.demo.simulated import Driver

KERNEL_US = 20
REQUEST_S = 0.005
BATCH = 10


def main() -> None:
    client_class, counter = sys.argv[1:]
    driver = Driver()
    driver.make_current()
    kernel, stream = driver.functions([KERNEL_US], 1)[KERNEL_US], driver.stream(0)
    with open(counter, "r+b") as file:
        count = ctypes.c_uint64.from_buffer(mmap.mmap(file.fileno(), 8))
    while True:
        if client_class == "latency":
            with cudasched.region("latency"):
                driver.launch(kernel, 1, stream)
                driver.synchronize(stream)
            time.sleep(REQUEST_S)
        else:
            for _ in range(BATCH):
                driver.launch(kernel, 1, stream)
            driver.synchronize(stream)
        count.value += 1


if __name__ == "__main__":
    main()
