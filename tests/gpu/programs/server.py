"""A latency program: R requests of some kernels each, at random times, or one request that never ends ("stuck")."""

import random
import sys
import time

import torch

x = torch.randn(512, 512, device="cuda", dtype=torch.float16)


def request() -> None:
    y = x
    for _ in range(20):
        y = torch.relu(y @ x) * 0.01
    torch.cuda.synchronize()


for _ in range(20):
    request()
print("ready", flush=True)
if sys.argv[1] == "stuck":
    while True:
        torch.cuda._sleep(20_000_000)  # about 10 ms each; some are always queued
        if torch.cuda.current_stream().query():
            print("idle", flush=True)
        time.sleep(0.002)
for _ in range(int(sys.argv[1])):
    request()
    time.sleep(random.expovariate(100))
print("served", flush=True)
