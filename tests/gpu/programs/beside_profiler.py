"""Collecting and torch.profiler in one process: `profiler_first` or `collecting_first`, and where the data set goes."""

import sys

import cudasched
import torch

order, path = sys.argv[1:]
x = torch.randn(256, 256, device="cuda")
torch.relu(x)
torch.cuda.synchronize()
cuda = [torch.profiler.ProfilerActivity.CUDA]


def work() -> None:
    for _ in range(50):
        torch.relu(x)
    torch.cuda.synchronize()


if order == "profiler_first":
    with torch.profiler.profile(activities=cuda) as profile:
        work()
        try:
            with cudasched.collect(path):
                work()
            print("collected")
        except cudasched.Error as error:
            print("refused:", error)
        work()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    print("profiled", len(kernels))
else:
    with cudasched.collect(path) as recording:
        work()
        try:
            with torch.profiler.profile(activities=cuda):
                work()
        except RuntimeError as error:
            print("profiler refused:", error)
        work()
    print("recorded", recording.rows, recording.lost)
print("done")
