"""PyTorch workloads of the demo and of the colocation benchmark: seeded random weights, plain torch, no downloads.

Each answers to the `Workload` protocol of client.py. Latency loads serve one request a step. Best-effort loads run one
training step, and run ahead of the GPU as far as such programs do.
"""

# Type checkers' view of torch depends on the installed version, if any; the rest is checked without it.
# mypy: disable-error-code="import-not-found,misc,union-attr,call-overload,no-any-return,no-untyped-call,attr-defined"

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torch import Tensor, nn

SEED = 20_240_601
#: torch maps this to its highest priority.
HIGH_PRIORITY = -5
#: A training loop reads its loss this often, and waits for the GPU there.
LOSS_EVERY = 10


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, width); with a cache, of one new token over all before it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Returns (batch, tokens, width); `cache` is keys, values (batch, heads, length, head) and a position (1,)."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values, position = cache
            k, v = keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and cache is None)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """One transformer layer, normalised before (GPT) or after its parts (BERT)."""

    def __init__(self, width: int, heads: int, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Returns the input, one layer on: (batch, tokens, width)."""
        if self.norm_first:
            x = x + self.attention(self.norm1(x), cache)
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x, cache))
        return self.norm2(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """BERT-base's encoder: token and position embeddings, 12 layers of 768, a pooled output."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30_522) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, norm_first=False) for _ in range(layers))
        self.pool = nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens) to pooled states (batch, width)."""
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.pool(x[:, 0]))


class Decoder(nn.Module):
    """A GPT of about 350 million parameters that decodes one token over a full cache of `length`."""

    cache: Tensor
    position: Tensor

    def __init__(
        self, layers: int = 24, width: int = 1024, heads: int = 16, vocabulary: int = 50_257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        cache = torch.randn(layers, 2, 1, heads, length, width // heads) * 0.1
        self.register_buffer("cache", cache)
        self.register_buffer("position", torch.tensor([length - 1]))

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (1, 1) to the next ones, greedily."""
        x = self.tokens(ids) + self.positions(self.position)
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x = block(x, (cache[0], cache[1], self.position))
        return (self.norm(x) @ self.tokens.weight.T).argmax(-1)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, the middle one with the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, 4 x width, h / stride, w / stride)."""
        y: Tensor = self.relu(self.path(x) + self.shortcut(x))
        return y


def resnet50(depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """ResNet-50 for (batch, 3, 224, 224)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class TorchWorkload:
    """The common part: a stream of its own, or the default one as in a program that never heard of streams."""

    warm_up_steps = 10
    profiled_steps = 3

    def __init__(self, device: torch.device, own_stream: bool, priority: int) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority) if own_stream else torch.cuda.default_stream()
            torch.cuda.synchronize(device)  # weights were made on the default stream

    @property
    def stream(self) -> int:
        """The CUstream it launches on, 0 for the default stream."""
        return int(self._stream.cuda_stream) if self._stream else 0

    def context(self) -> AbstractContextManager[Any]:
        """Makes the stream current on the calling thread."""
        return torch.cuda.stream(self._stream) if self.stream else nullcontext()

    def step(self) -> None:
        """Submits one request or step."""
        raise NotImplementedError

    def timed_step(self) -> Callable[[], float]:
        """One request or step between two events on the stream."""
        if self._stream is None:
            self.step()
            return lambda: 0.0
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.step()
        end.record()
        return lambda: start.elapsed_time(end)

    def synchronize(self) -> None:
        """Waits for the stream; other streams of the process go on."""
        if self._stream:
            # A region moves work that is not on a stream of its own.
            (self._stream if self.stream else torch.cuda.current_stream(self.device)).synchronize()

    def busy_spans(self) -> tuple[list[tuple[int, int]], int]:
        """Start and length in ns of every kernel, copy and fill of `profiled_steps`, each waited for, and the steps."""
        self.synchronize()

        def run() -> None:
            for _ in range(self.profiled_steps):
                self.step()
                self.synchronize()

        spans = [(event.start_ns(), event.duration_ns()) for event in device_events(run) if not _is_annotation(event)]
        return spans, self.profiled_steps


def kernel_durations_us(run: Callable[[], None]) -> list[float]:
    """Durations in us of every kernel that `run` launches and waits for, as CUPTI records them."""
    return [event.duration_ns() / 1e3 for event in device_events(run) if _is_kernel(event)]


def device_events(run: Callable[[], None]) -> list[Any]:
    """The GPU's work that `run` submits and waits for, as CUPTI records it.

    Raises:
        RuntimeError: No kernel was recorded.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = list(profiler.profiler.kineto_results.events())
    if not any(map(_is_kernel, events)):
        raise RuntimeError("torch.profiler recorded no kernels (is another CUPTI subscriber in this process?)")
    return [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]


def _is_annotation(event: Any) -> bool:
    """Whether a profiler's event is a name laid over others, which takes no time of the GPU's own."""
    if hasattr(event, "activity_type"):
        return "annotation" in event.activity_type() or "overhead" in event.activity_type()
    return bool(event.is_user_annotation()) or event.name().startswith("Optimizer.")


def _is_kernel(event: Any) -> bool:
    """Whether a profiler's event is a kernel on the GPU: not a copy, and not an annotation laid over kernels."""
    if event.device_type() != torch.autograd.DeviceType.CUDA:
        return False
    if hasattr(event, "activity_type"):  # newer than some versions of torch that work otherwise
        return "kernel" in event.activity_type()
    return not (event.is_user_annotation() or event.name().startswith(("Memcpy", "Memset", "Optimizer.")))


class Requests(TorchWorkload):
    """A latency load: one forward pass a request, replayed as a CUDA graph or run eagerly."""

    warm_up_steps = 30

    def __init__(self, model: nn.Module, example: Tensor, graph: bool, own_stream: bool) -> None:
        super().__init__(example.device, own_stream, HIGH_PRIORITY)
        self.model, self.example = model.eval().requires_grad_(False), example
        self.output: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if graph and example.device.type == "cuda":
            self._capture(own_stream)

    def step(self) -> None:
        """Submits one request."""
        if self._graph:
            self._graph.replay()
        else:
            with torch.no_grad():
                self.output = self.model(self.example)

    def _capture(self, own_stream: bool) -> None:
        # A captured graph keeps the priority of the stream it was captured on; the replay stream's does not count.
        side = self._stream if own_stream else torch.cuda.Stream()
        assert side is not None
        with torch.no_grad():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.model(self.example)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self.output = self.model(self.example)
        torch.cuda.synchronize()
        self._graph = graph


class Decoding(Requests):
    """A latency load of `TOKENS` a request, each handed to the host before the next begins, as a stream of text is."""

    TOKENS = 32
    warm_up_steps = 20

    def step(self) -> None:
        """Decodes the tokens of one request; the last may still be on its way."""
        for token in range(self.TOKENS):
            if token:
                self.synchronize()
            super().step()


class Training(TorchWorkload):
    """A training loop under autocast to bf16 on one batch that stays on the GPU."""

    def __init__(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(batch[0].device, own_stream=False, priority=0)
        self.model, self.batch, self.loss = model.train(), batch, loss
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
        self.steps = 0
        self.last_loss = float("nan")

    def step(self) -> None:
        """One training step; every tenth waits for the GPU, to read the loss."""
        inputs, targets = self.batch
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps % LOSS_EVERY == 0:
            self.last_loss = loss.item()


def default_device() -> torch.device:
    """The GPU where torch sees one, else the CPU (which only tests use)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def latency_workload(name: str, own_stream: bool = False, device: torch.device | None = None) -> Requests:
    """Builds a latency load.

    Args:
        name: `bert_graph`, `bert_eager`, `resnet50_b4`, `gpt_decode` or `mlp`.
        own_stream: On a high-priority stream of its own, for a process shared with another role.
        device: Where; the GPU by default.

    Raises:
        ValueError: No such load.
    """
    device = device or default_device()
    torch.manual_seed(SEED)
    half = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        if name in ("bert_graph", "bert_eager"):
            return Requests(Encoder().to(half), torch.randint(30_522, (1, 128)), name == "bert_graph", own_stream)
        if name == "resnet50_b4":
            images = torch.randn(4, 3, 224, 224, dtype=half).contiguous(memory_format=torch.channels_last)
            model = resnet50().to(half).to(memory_format=torch.channels_last)
            return Requests(model, images, False, own_stream)
        if name == "gpt_decode":
            return Decoding(Decoder().to(half), torch.randint(50_257, (1, 1)), True, own_stream)
        if name == "mlp":
            layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
            return Requests(nn.Sequential(*layers).to(half), torch.randn(16, 2048, dtype=half), True, own_stream)
    raise ValueError(f"unknown latency load {name!r}: one of {', '.join(LATENCY_LOADS)}")


def best_effort_workload(name: str, device: torch.device | None = None) -> TorchWorkload:
    """Builds a best-effort load.

    Args:
        name: `transformer` or `resnet50`.
        device: Where; the GPU by default.

    Raises:
        ValueError: No such load.
    """
    device = device or default_device()
    torch.manual_seed(SEED)
    with torch.device(device):
        if name == "transformer":
            blocks = [Block(1024, 16, causal=True, norm_first=True) for _ in range(24)]
            batch = torch.randn(16, 512, 1024), torch.randn(16, 512, 1024)
            return Training(nn.Sequential(*blocks), batch, F.mse_loss)
        if name == "resnet50":
            model = resnet50().to(memory_format=torch.channels_last)
            images = torch.randn(64, 3, 224, 224).contiguous(memory_format=torch.channels_last)
            return Training(model, (images, torch.randint(1000, (64,))), F.cross_entropy)
    raise ValueError(f"unknown best-effort load {name!r}: one of {', '.join(BEST_EFFORT_LOADS)}")


LATENCY_LOADS = ("bert_graph", "bert_eager", "resnet50_b4", "gpt_decode", "mlp")
BEST_EFFORT_LOADS = ("transformer", "resnet50")
