"""The best-effort programs of the scenes: long kernels, graphs, many streams, and none of these; and all others.

Each is a generator like those of benchmarks/breadth/programs.py, and is run by path as those are: as a worker of the
benchmark, which benchmarks/breadth/program.py describes.
"""

# What type checkers see of these libraries depends on whether and which of them are installed.
# mypy: ignore-errors

from __future__ import annotations

import os
import sys
import tempfile
from ctypes import c_float, c_int32, c_uint32, c_uint64
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / each) for each in ("", "python/cudasched/demo", "benchmarks/breadth")]

from benchmarks.breadth import program  # noqa: E402
from benchmarks.breadth.programs import PROGRAMS as OF_LIBRARIES  # noqa: E402
from benchmarks.breadth.programs import (  # noqa: E402
    SEED,
    Program,
    Steps,
    jax_transformer,
    learned,
    torch_device,
    torch_long_kernels,
    train_classifier,
)
from benchmarks.graphs.loads import ABLATED, LOADS  # noqa: E402
from benchmarks.graphs.program import Beside, simulated_steps  # noqa: E402

#: Each thread multiplies and adds; two blocks of 1,024 threads fill a multiprocessor, which takes 9.5 ns a turn then.
WORK = """
extern "C" __global__ void work(float* out, float factor, float summand, int turns) {
  float x = threadIdx.x;
#pragma unroll 16
  for (int turn = 0; turn < turns; ++turn) x = x * factor + summand;
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
"""
LOOP = """
extern "C" __global__ void begin(unsigned* left, unsigned turns) { *left = turns; }
extern "C" __global__ void follow(cudaGraphConditionalHandle condition, unsigned* left) {
  cudaGraphSetConditional(condition, --*left > 0);
}
"""
BLOCKS_PER_SM, THREADS, FACTOR, SUMMAND = 2, 1024, 0.999, 0.001


def llama_layer(width: int, inner: int, heads: int, groups: int) -> Any:
    """A layer of a Llama, for (batch, tokens, width)."""
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv = nn.Linear(width, width + 2 * groups * (width // heads), bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: Any) -> Any:
            qkv = self.qkv(self.norm1(x)).unflatten(-1, (heads + 2 * groups, width // heads)).transpose(1, 2)
            q, k, v = qkv.split([heads, groups, groups], dim=1)
            k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            y = self.norm2(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    return Layer()


def torch_llama_layers(tiny: bool) -> Steps:
    """Two layers of an 8B Llama, trained on four sequences of 4,096 tokens."""
    import torch
    from torch import nn
    from torch.nn import functional

    yield
    device = torch_device()
    width, inner, heads, groups, batch, length = (64, 128, 4, 2, 2, 16) if tiny else (4096, 14_336, 32, 8, 4, 4096)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = nn.Sequential(*(llama_layer(width, inner, heads, groups) for _ in range(2))).to(dtype)
        inputs = torch.randn(batch, length, width, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    while True:
        loss = functional.mse_loss(model(inputs), inputs)
        yield learned(loss, optimizer)


def torch_attention(tiny: bool) -> Steps:
    """Attention over 32k tokens, forward and backward: a few kernels of many milliseconds."""
    import torch
    from torch.nn import functional

    yield
    device = torch_device()
    shape = (1, 2, 64, 16) if tiny else (1, 16, 32_768, 128)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    while True:
        loss = functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().mean()
        torch.autograd.grad(loss, (q, k, v))
        yield loss.detach()


def torch_graph_network(tiny: bool) -> Steps:
    """A graph network: what nodes send along two million edges is gathered and summed, forward and backward."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    nodes, edges, width = (50, 200, 8) if tiny else (200_000, 2_000_000, 256)
    source, target = torch.randint(nodes, (2, edges), device=device)
    features, labels = torch.randn(nodes, width, device=device), torch.randint(16, (nodes,), device=device)
    with torch.device(device):
        layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 16)])
    optimizer = torch.optim.Adam(layers.parameters())
    while True:
        x = features
        for layer in layers:
            sent = layer(x)
            x = torch.relu(sent.index_add(0, target, sent.index_select(0, source)))
        loss = nn.functional.cross_entropy(x, labels)
        yield learned(loss, optimizer)


def torch_resnet50(tiny: bool) -> Steps:
    """ResNet-50, trained on batches from pinned memory."""
    sys.path.append(str(ROOT / "python" / "cudasched" / "demo"))
    from workloads import resnet50

    yield
    yield from train_classifier(resnet50, tiny, batch=64)


def torch_lstm(tiny: bool) -> Steps:
    """An LSTM of cuDNN, trained: its kernels are short, and on several streams inside."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    layers, width, batch, length = (2, 16, 4, 8) if tiny else (4, 1024, 64, 128)
    with torch.device(device):
        model = nn.LSTM(width, width, layers)
        series = torch.randn(length + 1, batch, width)
    optimizer = torch.optim.Adam(model.parameters(), fused=device == "cuda")
    while True:
        outputs, _ = model(series[:-1])
        loss = nn.functional.mse_loss(outputs, series[1:])
        yield learned(loss, optimizer)


def cupy_scan_sort(tiny: bool) -> Steps:
    """Sorts 2^28 numbers and sums them up one by one, with CuPy."""
    import cupy

    yield
    values = cupy.random.default_rng(SEED).standard_normal((1 << (10 if tiny else 28),), dtype=cupy.float32)
    while True:
        ordered = cupy.sort(values)
        yield cupy.cumsum(ordered)[-1]


def cupy_persistent(tiny: bool) -> Steps:
    """One kernel of 100 ms on an H100, which fills the GPU and never ends a block before it ends."""
    import cupy

    yield
    kernel = cupy.RawKernel(WORK, "work")
    blocks = BLOCKS_PER_SM * cupy.cuda.Device().attributes["MultiProcessorCount"]
    out = cupy.empty(blocks * THREADS, dtype=cupy.float32)
    turns = 1000 if tiny else 10_000_000
    arguments = (out, cupy.float32(FACTOR), cupy.float32(SUMMAND), cupy.int32(turns))
    while True:
        kernel((blocks,), (THREADS,), arguments)
        yield out[0]


def torch_conditional_graph(tiny: bool) -> Steps:
    """A CUDA graph whose WHILE node runs a kernel of 0.2 ms a hundred times; it cannot be cut."""
    if "cudasched" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["CUDASCHED_OFF"] = "1"  # only its graphs are used: a bare program stays bare
    import torch
    from cudasched import graphs
    from cudasched.tune.compile import choose, compile_source

    yield
    torch.zeros(1, device="cuda")  # the context is there, and current
    properties = torch.cuda.get_device_properties(0)
    compiler = choose()
    relocatable = "--relocatable-device-code=true" if compiler == "nvrtc" else "-rdc=true"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "loop.cu"
        source.write_text(WORK + LOOP)
        target = f"sm_{properties.major}{properties.minor}"
        image = compile_source(source, (), target, compiler, [relocatable]).image
    module = graphs.LinkedModule([image])
    begin, work, follow = (module.function(name) for name in ("begin", "work", "follow"))
    blocks = BLOCKS_PER_SM * properties.multi_processor_count
    out = torch.zeros(blocks * THREADS, device="cuda")
    left = torch.zeros(1, dtype=torch.int32, device="cuda")
    out_pointer, left_pointer = c_uint64(out.data_ptr()), c_uint64(left.data_ptr())
    times, turns = (2, 100) if tiny else (100, 20_000)
    graph = graphs.Graph()
    condition = graph.condition(1)
    begun = graph.add_kernel(begin, 1, 1, [left_pointer, c_uint32(times)])
    (body,) = graph.add_while(condition, after=[begun]).bodies
    arguments = [out_pointer, c_float(FACTOR), c_float(SUMMAND), c_int32(turns)]
    worked = body.add_kernel(work, blocks, THREADS, arguments)
    body.add_kernel(follow, 1, 1, [c_uint64(condition), left_pointer], after=[worked])
    replay = graph.instantiate()
    torch.cuda.synchronize()
    while True:
        replay.launch(torch.cuda.current_stream())
        yield out[0]


def triton_attention(tiny: bool) -> Steps:
    """A flash attention in Triton, forward, over 16k tokens."""
    import torch

    from benchmarks.preempt.triton_attention import attention

    yield
    device = torch_device()
    heads, length, width = (2, 256, 32) if tiny else (32, 16_384, 128)
    q, k, v = (torch.randn(heads, length, width, dtype=torch.float16, device=device) for _ in range(3))
    out = torch.empty_like(q)
    while True:
        attention(q, k, v, out)
        yield out[0, 0, 0]


#: A loss is read about twice a second, at the same steps in every arm. Each GPU of four takes three in a row.
PROGRAMS = {
    "torch_llama_layers": Program(torch_llama_layers, read_every=4),
    "cupy_scan_sort": Program(cupy_scan_sort, read_every=12),
    "torch_conditional_graph": Program(torch_conditional_graph, read_every=24),
    "torch_attention": Program(torch_attention, read_every=16),
    "jax_transformer": Program(jax_transformer, compiles=True, read_every=40),
    "torch_lstm": Program(torch_lstm, read_every=16),
    "whole_step": LOADS["whole_step"],
    "triton_attention": Program(triton_attention, compiles=True, read_every=40),
    "torch_graph_network": Program(torch_graph_network, read_every=16),
    "torch_resnet50": Program(torch_resnet50, read_every=16),
    "cupy_persistent": Program(cupy_persistent, read_every=5),
    "torch_long_kernels": Program(torch_long_kernels, read_every=300),
}
#: Those whose kernels last for most of a millisecond and more.
LONG_KERNELS = tuple(name for name in PROGRAMS if name not in ("jax_transformer", "torch_lstm", "torch_resnet50"))
#: Other people's models.
LIBRARIES = {name: each for name, each in OF_LIBRARIES.items() if name != "torch_long_kernels"}
#: All that a worker may run; those of `PROGRAMS` are as in `main`.
RUNNABLE = PROGRAMS | LIBRARIES | LOADS | ABLATED | PROGRAMS

if __name__ == "__main__":
    sys.exit(program.main(RUNNABLE, simulated_steps, Beside))
