"""Records two training steps of ResNet-50 with dropout, fused Adam and a Triton kernel into the file that is named."""

import sys

import cudasched
import torch
import triton
import triton.language as tl
from cudasched.demo.workloads import resnet50
from torch import nn


@triton.jit
def add(x, y, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


BATCH = 32
layers = list(resnet50().children())
model = nn.Sequential(*layers[:-1], nn.Dropout(0.2), layers[-1]).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
images = torch.randn(BATCH, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
noise = torch.randn_like(images)
classes = torch.randint(1000, (BATCH,), device="cuda")
torch.cuda.synchronize()
with cudasched.collect(sys.argv[1]) as recording:
    for step in range(2):
        cudasched.collect.label(f"program:resnet50|step {step}")
        x = torch.empty_like(images)
        add[(triton.cdiv(images.numel(), 1024),)](images, noise, x, images.numel(), block=1024)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
print("recorded", recording.rows, recording.lost)
