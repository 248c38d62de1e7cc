"""Random copies between pinned memory and the GPU over three streams: compares the bits, and prints the pieces.

Prints "ready", and begins at a line on its standard input.
"""

from __future__ import annotations

import random
import sys

import cudasched
import torch

SIZE = (40 << 20) + 12_345
STREAMS = range(3)

random.seed(7)
host = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8).pin_memory() for _ in STREAMS]
device = [torch.zeros(SIZE, dtype=torch.uint8, device="cuda") for _ in STREAMS]
expected_host = [bytes_.clone() for bytes_ in host]
expected_device = [torch.zeros(SIZE, dtype=torch.uint8) for _ in STREAMS]
streams = [torch.cuda.Stream() for _ in STREAMS]
for _ in range(3):
    torch.ones(8, device="cuda").add_(1)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()

before = cudasched.state().copy_pieces
for _ in range(100):
    mine, other = random.choice(STREAMS), random.choice(STREAMS)
    first = random.randrange(SIZE // 2)
    part = slice(first, first + random.randrange(1, SIZE - first))
    if random.random() < 0.5:
        with torch.cuda.stream(streams[mine]):
            device[mine][part].copy_(host[mine][part], non_blocking=True)
        expected_device[mine][part] = expected_host[mine][part]
        continue
    streams[mine].wait_stream(streams[other])
    with torch.cuda.stream(streams[mine]):
        host[mine][part].copy_(device[other][part], non_blocking=True)
    streams[other].wait_stream(streams[mine])
    expected_host[mine][part] = expected_device[other][part]
torch.cuda.synchronize()
for each in STREAMS:
    assert torch.equal(host[each], expected_host[each]), f"host memory {each}"
    assert torch.equal(device[each].cpu(), expected_device[each]), f"device memory {each}"
print("pieces", cudasched.state().copy_pieces - before)
print("done")
