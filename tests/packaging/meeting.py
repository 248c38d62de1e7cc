"""Launches a kernel and waits for another client of the same GPU: run by scripts/image.sh in each of two containers."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

import launcher
from cudasched import control

gpu = launcher.Gpu()
gpu.launch()
gpu.synchronize()
end = time.monotonic() + 60
while len(classes := {client.client_class for client in control.clients()}) < 2:
    if time.monotonic() > end:
        sys.exit(f"no other client came: {classes}")
    time.sleep(0.1)
print(f"met: {', '.join(sorted(classes))}")
time.sleep(2)  # for the other to see this one
