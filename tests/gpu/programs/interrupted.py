"""`kernels`: kernels of 10 ms without end. `requests N`: N requests of some kernels each; prints their median in ms."""

import statistics
import sys
import time

import torch

if sys.argv[1] == "kernels":
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    print("ready", flush=True)
    while True:
        for _ in range(3):
            torch.cuda._sleep(18_000_000)
        torch.cuda.synchronize()
x = torch.randn(512, 512, device="cuda", dtype=torch.float16)
took = []
for _ in range(int(sys.argv[2])):
    time.sleep(0.005)
    began = time.perf_counter()
    y = x
    for _ in range(5):
        y = torch.relu(y @ x) * 0.01
    torch.cuda.synchronize()
    took.append(1e3 * (time.perf_counter() - began))
print("median", statistics.median(took), flush=True)
