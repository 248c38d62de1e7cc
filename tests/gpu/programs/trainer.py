"""A best-effort program: launches kernels for ever (or S seconds) and says every so often how many it has finished."""

import sys
import time

import torch

x = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
end = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else 1e9)
steps = 0
while time.monotonic() < end:
    for _ in range(20):
        y = torch.relu(x @ x)
    torch.cuda.synchronize()
    steps += 20
    print(f"{time.monotonic_ns()} {steps}", flush=True)
