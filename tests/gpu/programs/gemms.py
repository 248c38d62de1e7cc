"""Records products of matrices that differ in their inner dimension alone: `gemms.py DATA.parquet`."""

import sys

import cudasched
import torch

SIZES = (1024, 1536, 2048, 2560, 3072, 3584, 4096)
ROUNDS = 5

a = torch.randn(1024, max(SIZES), device="cuda", dtype=torch.float16)
b = torch.randn(max(SIZES), 1024, device="cuda", dtype=torch.float16)
left = {k: a[:, :k].contiguous() for k in SIZES}
right = {k: b[:k].contiguous() for k in SIZES}
torch.mm(left[1024], right[1024])
torch.cuda.synchronize()
with cudasched.collect(sys.argv[1]) as recording:
    for round_ in range(ROUNDS):
        for k in SIZES:
            cudasched.collect.label(f"gemm|1024x1024x{k}|f16|{round_}")
            torch.mm(left[k], right[k])
print("recorded", recording.rows, recording.lost)
