"""The same kernels over and over; with `profile PATH`, under torch.profiler, which writes their times there."""

import json
import sys

import torch

ITERATIONS = 40
x = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
big = torch.randn(16 << 20, device="cuda")
weight = torch.ones(2048, device="cuda", dtype=torch.float16)


def iteration() -> None:
    y = x @ x
    torch.relu(y)
    torch.softmax(y, -1)
    torch.nn.functional.layer_norm(y, (2048,), weight)
    big.mul(2.0)
    big.sum()


def work() -> None:
    for _ in range(ITERATIONS):
        iteration()
    torch.cuda.synchronize()


for _ in range(8):
    work()  # to full clocks
if sys.argv[1:2] == ["profile"]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in events if not event.name.startswith(("Mem", "cuda"))]
    kernels.sort(key=lambda event: event.time_range.start)
    with open(sys.argv[2], "w") as file:
        json.dump([[event.name, event.time_range.elapsed_us()] for event in kernels], file)
else:
    work()
print("done", ITERATIONS)
