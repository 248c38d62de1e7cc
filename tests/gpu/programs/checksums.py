"""Ten deterministic training steps of each model that is named; prints a checksum of its losses and parameters.

    checksums.py [--steps N] attention convolution attention_graph convolution_graph compiled side_streams lstm \\
        triton_attention fp8 ddp

Under cudasched also prints, at the end, how many launches were offloaded.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class SideStreams(nn.Module):
    """Two branches on two streams, and inputs from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for stream, branch in zip(self.streams, (self.left, self.right), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                parts.append(branch(x).tanh())
                x.record_stream(stream)
        for stream, part in zip(self.streams, parts, strict=True):
            torch.cuda.current_stream().wait_stream(stream)
            part.record_stream(torch.cuda.current_stream())
        return (parts[0] * parts[1]).mean()


class Lstm(nn.Module):
    """Of cuDNN, which runs its layers on streams of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(64, 128, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0].mean()


class StraightThrough(torch.autograd.Function):
    """Kernels without a derivative; what comes back goes on as it is."""

    @staticmethod
    def forward(context: object, x: Tensor, kernels: Callable[[Tensor], Tensor]) -> Tensor:
        return kernels(x)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TritonAttention(nn.Module):
    """A layer, and a flash attention in Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(self.body(x), self.attention).square().mean()

    @staticmethod
    def attention(x: Tensor) -> Tensor:
        from benchmarks.preempt.triton_attention import attention

        half = x.half().contiguous()
        out = torch.empty_like(half)
        attention(half, half, half, out)
        return out.float()


class Fp8(nn.Module):
    """A layer, and a product of its outputs in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(self.body(x), self.product).square().mean()

    @staticmethod
    def product(x: Tensor) -> Tensor:
        small, one = x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
        return torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16).float()


Step = Callable[[], Tensor]
"""Trains on what lies in the input; returns the loss, on the GPU."""


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def graph_of_all(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    """Forward, backward and optimizer in one graph."""
    step = eager(model, optimizer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(x)
        loss.backward()
        optimizer.step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def graph_of_model(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    """A graph forward and one backward, launches of their own between them."""
    return eager(torch.cuda.make_graphed_callables(model, (x,)), optimizer, x)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    return eager(torch.compile(model), optimizer, x)


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    return eager(nn.parallel.DistributedDataParallel(model, device_ids=[x.device.index]), optimizer, x)


Shape = tuple[int, ...]
MODELS: dict[str, tuple[type[nn.Module], Shape, Callable[[nn.Module, torch.optim.Optimizer, Tensor], Step]]] = {
    "attention": (Attention, (8, 64, 32), eager),
    "convolution": (Convolution, (8, 3, 32, 32), eager),
    "attention_graph": (Attention, (8, 64, 32), graph_of_all),
    "convolution_graph": (Convolution, (8, 3, 32, 32), graph_of_model),
    "compiled": (Perceptron, (256, 64), compiled),
    "side_streams": (SideStreams, (256, 64), eager),
    "lstm": (Lstm, (32, 16, 64), eager),
    "triton_attention": (TritonAttention, (4, 1024, 64), eager),
    "fp8": (Fp8, (256, 64), eager),
    "ddp": (Attention, (8, 64, 32), distributed),
}


def checksum(name: str, steps: int, seed: int = 1) -> str:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(3)
    make, shape, stepper = MODELS[name]
    model = make().cuda()
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random).cuda()
    step = stepper(model, optimizer, x)
    digest = hashlib.sha256()
    for _ in range(steps):
        # From pinned memory, which is filled anew only once the copy is done.
        x.copy_(torch.randn(shape, generator=random).pin_memory(), non_blocking=True)
        digest.update(step().detach().cpu().numpy().tobytes())
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def offloaded() -> int:
    """Launches that cudasched's launcher thread made in this process; 0 without cudasched."""
    if "CUDASCHED_CLASS" not in os.environ:
        return 0
    import cudasched

    return int(cudasched.state().offloaded_launches)


def rank_of_two(rank: int, directory: str, steps: int) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    store = f"file://{directory}/store"
    dist.init_process_group("nccl", store, world_size=2, rank=rank, device_id=torch.device("cuda", rank))
    digest = checksum("ddp", steps, seed=1 + rank)
    dist.barrier()
    dist.destroy_process_group()
    with open(f"{directory}/{rank}", "w") as file:
        file.write(f"{digest} {offloaded()}")


def two_ranks(steps: int) -> tuple[str, int]:
    """The checksums of both ranks, and what was offloaded in both."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(rank_of_two, (directory, steps), nprocs=2)
        found = []
        for rank in range(2):
            with open(f"{directory}/{rank}") as file:
                found.append(file.read().split())
    return " ".join(digest for digest, _ in found), sum(int(count) for _, count in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("models", nargs="+", choices=MODELS)
    options = parser.parse_args()
    in_ranks = 0
    for name in options.models:
        if name == "ddp":
            digest, in_ranks = two_ranks(options.steps)
        else:
            digest = checksum(name, options.steps)
        print(name, digest, flush=True)
    if "CUDASCHED_CLASS" in os.environ:
        print("offloaded", in_ranks or offloaded(), flush=True)


if __name__ == "__main__":
    main()
