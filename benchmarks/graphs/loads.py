"""The best-effort programs of the graphs benchmark: what captures, compiles or updates CUDA graphs, as users write it.

Each is a generator like those of benchmarks/breadth/programs.py: up to its first `yield` it imports its libraries, and
each `yield` after that is one step submitted, whose value is read now and then. Those whose names end in `_updated`
change their graphs' parameters before every launch. To run one until it is interrupted:

    cudasched run --class best-effort -- python benchmarks/graphs/loads.py whole_step

With `tiny` the shapes are small enough for a test on a CPU, where nothing is captured.
"""

# What type checkers see of these libraries depends on whether and which of them are installed.
# mypy: ignore-errors

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.breadth.programs import (  # noqa: E402
    SEED,
    Program,
    Steps,
    batches,
    jax_training,
    learned,
    run_as_a_user,
    torch_device,
)
from benchmarks.graphs.driver import Graphs  # noqa: E402

#: Kernel nodes that the decode loop sets before each launch.
NODES_SET = 32
#: Graphs of a step of the piecewise program, as vLLM has: one between any two attentions.
PIECES = 40


class Captured:
    """A step captured as a CUDA graph, and captured a second time where it is to be updated: two sets of buffers.

    Args:
        step: Submits the work; what it returns stays where the graph puts it.
        updated: Before each launch, the executable graph takes over the other capture's parameters.
    """

    def __init__(self, step: Callable[[], Any], updated: bool = False) -> None:
        import torch

        self._step, self._updated = step, updated
        self._captures: list[tuple[Any, Any]] = []
        if not torch.cuda.is_available():
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        pool = None
        for _ in range(2 if updated else 1):
            graph = torch.cuda.CUDAGraph(keep_graph=updated)
            # In the arm of one process the server is at work on a thread of its own while the program is built anew.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                value = step()
            pool = graph.pool()
            self._captures.append((graph, value))
        if updated:
            self._driver = Graphs()
            self._executable = self._driver.instantiate(self._captures[0][0].raw_cuda_graph())
            self._turns = itertools.cycle([1, 0])

    def replay(self) -> Any:
        """Launches it on the current stream; returns what the step returned."""
        import torch

        if not self._captures:
            return self._step()
        graph, value = self._captures[0]
        if not self._updated:
            graph.replay()
            return value
        graph, value = self._captures[next(self._turns)]
        self._driver.update(self._executable, graph.raw_cuda_graph())
        self._driver.launch(self._executable, torch.cuda.current_stream().cuda_stream)
        return value


class Gpt:
    """Makes a decoder of plain torch modules with its optimizer, and trains it on tokens; in bf16 on a GPU."""

    def __init__(self, device: str, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        import torch
        from torch import nn

        self.device, self.vocabulary = device, vocabulary
        with torch.device(device):
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.model = nn.ModuleDict(
                {
                    "tokens": nn.Embedding(vocabulary, width),
                    "blocks": nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
                    "head": nn.Linear(width, vocabulary),
                }
            )
            self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def loss(self, ids: Any, wanted: Any) -> Any:
        """Cross entropy of what follows each token; ids and what is wanted are (batch, length)."""
        import torch

        # Without its cache, which would keep casts of one capture for another.
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            x = self.model["blocks"](self.model["tokens"](ids), mask=self.mask, is_causal=True)
            scores = self.model["head"](x)
        return torch.nn.functional.cross_entropy(scores.float().view(-1, self.vocabulary), wanted.view(-1))


def whole_step(tiny: bool, updated: bool = False) -> Steps:
    """Forward, backward and optimizer of a transformer in one graph, fed from pinned memory."""
    import torch

    yield
    device = torch_device()
    layers, width, heads, vocabulary = (2, 32, 2, 128) if tiny else (16, 1024, 16, 32_000)
    batch, length = (2, 8) if tiny else (8, 512)
    gpt = Gpt(device, layers, width, heads, vocabulary, length)
    fast = device == "cuda"
    optimizer = torch.optim.AdamW(gpt.model.parameters(), lr=1e-5, fused=fast, capturable=fast)
    ids = torch.randint(vocabulary, (batch, length), device=device)
    wanted = torch.randint(vocabulary, (batch, length), device=device)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = gpt.loss(ids, wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = Captured(step, updated)
    for some_ids, some_wanted in batches(ids.cpu(), wanted.cpu()):
        ids.copy_(some_ids, non_blocking=True)
        wanted.copy_(some_wanted, non_blocking=True)
        yield captured.replay()


def compiled_inference(tiny: bool) -> Steps:
    """torch.compile in the mode reduce-overhead, which replays a graph a call: an encoder of about 3.5 ms."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    layers, width, heads, batch, length = (2, 32, 2, 2, 8) if tiny else (12, 1024, 16, 16, 256)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval().requires_grad_(False)
        inputs = torch.randn(batch, length, width)
    if device == "cuda":
        model, inputs = model.to(torch.bfloat16), inputs.to(torch.bfloat16)
    compiled = model if tiny else torch.compile(model, mode="reduce-overhead")
    while True:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            outputs = compiled(inputs)
        yield outputs[0, 0, 0].clone()  # the next call's graph writes where this one's did


def compiled_training(tiny: bool) -> Steps:
    """torch.compile in the mode reduce-overhead around a model that is trained: a graph forward, one backward."""
    import torch

    yield
    device = torch_device()
    layers, width, heads, vocabulary = (2, 32, 2, 128) if tiny else (8, 1024, 16, 32_000)
    batch, length = (2, 8) if tiny else (8, 512)
    gpt = Gpt(device, layers, width, heads, vocabulary, length)
    optimizer = torch.optim.AdamW(gpt.model.parameters(), lr=1e-5, fused=device == "cuda")
    loss_of = gpt.loss if tiny else torch.compile(gpt.loss, mode="reduce-overhead")
    ids, wanted = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    for some_ids, some_wanted in batches(ids, wanted):
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(some_ids.to(device, non_blocking=True), some_wanted.to(device, non_blocking=True))
        yield learned(loss, optimizer).clone()


def decode(tiny: bool, updated: bool = False) -> Steps:
    """A GPT that decodes token after token, a graph each; an update sets some kernel nodes before each launch."""
    import torch

    sys.path.insert(0, str(ROOT / "python" / "cudasched" / "demo"))
    from workloads import Decoder

    yield
    device = torch_device()
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16} if tiny else {}
    with torch.device(device):
        model = Decoder(**sizes).eval().requires_grad_(False)
        ids = torch.zeros(1, 1, dtype=torch.long)
    if device == "cuda":
        model = model.to(torch.float16)

    def step() -> Any:
        with torch.no_grad():
            ids.copy_(model(ids).view(1, 1))
        return ids

    if not updated or device != "cuda":
        captured = Captured(step)
        while True:
            yield captured.replay()
    kept = Captured(step, updated=True)
    driver, executable = kept._driver, kept._executable
    graph = kept._captures[0][0].raw_cuda_graph()
    nodes = driver.kernel_nodes(graph)
    chosen = nodes[:: max(1, len(nodes) // NODES_SET)][:NODES_SET]
    while True:
        for node, parameters in chosen:
            driver.set_kernel(executable, node, parameters)
        driver.launch(executable, torch.cuda.current_stream().cuda_stream)
        yield ids


def piecewise(tiny: bool, updated: bool = False) -> Steps:
    """A forward pass as vLLM cuts it: graphs of all between two attentions, and attention launched between them."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    count, tokens, width, heads = (3, 8, 32, 2) if tiny else (PIECES, 512, 1024, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def piece() -> Any:
        return nn.ModuleDict(
            {
                "out": nn.Linear(width, width),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
                "norm": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width),
            }
        )

    with torch.device(device):
        layers = [piece().to(dtype).requires_grad_(False) for _ in range(count)]
        hidden = torch.randn(tokens, width, dtype=dtype)
        attended = [torch.randn(tokens, width, dtype=dtype) for _ in range(count)]
        qkv = [torch.empty(tokens, 3 * width, dtype=dtype) for _ in range(count)]

    def step_of(number: int) -> Callable[[], Any]:
        layer = layers[number]

        def step() -> Any:
            with torch.no_grad():
                x = hidden + layer["out"](attended[number])
                x = x + layer["down"](nn.functional.gelu(layer["up"](layer["norm"](x))))
                hidden.copy_(layer["norm"](x))
                qkv[number].copy_(layer["qkv"](hidden))
            return hidden

        return step

    graphs = [Captured(step_of(number), updated) for number in range(count)]
    while True:
        for number, graph in enumerate(graphs):
            graph.replay()
            q, k, v = qkv[number].view(tokens, 3, heads, width // heads).permute(1, 2, 0, 3).unsqueeze(1)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended[(number + 1) % count].copy_(seen[0].transpose(0, 1).reshape(tokens, width))
        yield hidden[0, 0]


def torch_varying(tiny: bool) -> Steps:
    """A transformer trained on sentences whose lengths keep changing, so that the shapes of most launches are new."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    width, heads, layers, batch, longest = (32, 2, 1, 2, 16) if tiny else (768, 12, 12, 16, 512)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        sentences = torch.randn(batch, longest, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=device == "cuda")
    lengths = random.Random(SEED)
    while True:
        inputs = sentences[:, : lengths.randint(longest // 16, longest)]
        loss = nn.functional.mse_loss(model(inputs), inputs)
        yield learned(loss, optimizer)


LOADS = {
    "whole_step": Program(whole_step, read_every=24),
    "compiled_inference": Program(compiled_inference, compiles=True),
    "compiled_training": Program(compiled_training, compiles=True),
    "jax": Program(jax_training, compiles=True),
    "decode": Program(decode),
    "piecewise": Program(piecewise),
    "whole_step_updated": Program(partial(whole_step, updated=True)),
    # Fresh buffers at each step: XLA sets the parameters of its graphs' nodes each time.
    "jax_updated": Program(partial(jax_training, donate=False), compiles=True),
    "decode_updated": Program(partial(decode, updated=True)),
    "piecewise_updated": Program(partial(piecewise, updated=True)),
}
#: Those of the ablation of the predictor.
ABLATED = {name: LOADS[name] for name in ("whole_step", "decode", "piecewise")} | {
    "torch_varying": Program(torch_varying, read_every=20)
}


if __name__ == "__main__":
    run_as_a_user(LOADS)
