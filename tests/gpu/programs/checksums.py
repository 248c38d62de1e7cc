"""Ten deterministic training steps of three models; prints a checksum of each model's parameters and losses."""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean()


class SideStreams(nn.Module):
    """Two branches on two streams, and inputs from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def checksum(model: nn.Module, shape: tuple[int, ...]) -> str:
    torch.manual_seed(7)
    model.cuda()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    host = torch.randn(shape, generator=torch.Generator().manual_seed(1)).pin_memory()
    digest = hashlib.sha256()
    for _ in range(10):
        loss = model(host.cuda(non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().cpu().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for name, model, shape in (
        ("attention", Attention, (8, 64, 32)),
        ("convolution", Convolution, (8, 3, 32, 32)),
        ("side_streams", SideStreams, (256, 64)),
    ):
        torch.manual_seed(3)
        print(name, checksum(model(), shape), flush=True)
