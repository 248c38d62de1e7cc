"""The best-effort programs of the breadth benchmark: training and processing loops, written as users write them.

Each is a generator. Up to its first `yield` it imports its libraries, and nothing touches the GPU. Each `yield` after
that is one step submitted; its value is the step's loss, still on the GPU. Weights and data are random and made here.
To run one until it is interrupted, reading the loss every 50 steps:

    cudasched run --class best-effort -- python benchmarks/breadth/programs.py transformers_gpt2

With `tiny` the shapes are small enough for a test on a CPU.
"""

# What type checkers see of these libraries depends on whether and which of them are installed.
# mypy: ignore-errors

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"
SEED = 20_261_122
#: A loop reads its loss this often, and waits for the GPU only then.
READ_EVERY = 50

Steps = Iterator[Any]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        steps: Makes its generator; the argument is `tiny`.
        compiles: It compiles and tunes its kernels when it starts, so its first process fills a cache for the others.
        read_every: Steps from one reading of its loss to the next, where that is not `READ_EVERY`.
    """

    steps: Callable[[bool], Steps]
    compiles: bool = False
    read_every: int = READ_EVERY


def torch_device() -> str:
    """Where PyTorch runs: the GPU, or the CPU in tests."""
    import torch

    torch.manual_seed(SEED)
    return "cuda" if torch.cuda.is_available() else "cpu"


def batches(*tensors: Any, count: int = 4) -> Iterator[tuple[Any, ...]]:
    """Batches in pinned memory, over and over, as a DataLoader with `pin_memory` hands them out."""
    import torch

    shuffled = [tuple(tensor[torch.randperm(len(tensor))] for tensor in tensors) for _ in range(count)]
    if torch.cuda.is_available():
        shuffled = [tuple(tensor.pin_memory() for tensor in batch) for batch in shuffled]
    return itertools.cycle(shuffled)


def learned(loss: Any, *optimizers: Any) -> Any:
    """Learns from a step's loss, and returns it: it is still on the GPU."""
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train_vision(model: Any, images: Any, targets: Any, loss_of: Callable[[Any, Any], Any], device: str) -> Steps:
    """Trains a torchvision model in bf16 with batches that are copied from the host."""
    import torch

    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for inputs, wanted in batches(images, targets):
        inputs = inputs.to(device, memory_format=torch.channels_last, non_blocking=True)
        wanted = wanted.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model(inputs), wanted)
        yield learned(loss, optimizer)


def train_classifier(make: Callable[[], Any], tiny: bool, batch: int = 32) -> Steps:
    """Trains a model that `make` builds to tell 1,000 kinds of images apart."""
    import torch

    device = torch_device()
    batch, side = (2, 32) if tiny else (batch, 224)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    yield from train_vision(make(), images, labels, torch.nn.functional.cross_entropy, device)


def train_language(make: Callable[[], Any], inputs: dict[str, Any], device: str) -> Steps:
    """Trains a transformers model, which computes its loss itself, in bf16 with batches copied from the host."""
    import torch

    with torch.device(device):
        model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    for values in batches(*inputs.values()):
        batch = {name: value.to(device, non_blocking=True) for name, value in zip(inputs, values, strict=True)}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def torchvision_resnet50(tiny: bool) -> Steps:
    """Classification by convolutions."""
    import torchvision

    yield
    yield from train_classifier(lambda: torchvision.models.resnet50(weights=None), tiny)


def torchvision_deeplabv3(tiny: bool) -> Steps:
    """Segmentation."""
    import torch
    import torchvision

    yield
    device = torch_device()
    batch, side = (2, 64) if tiny else (4, 224)
    images, masks = torch.randn(batch, 3, side, side), torch.randint(21, (batch, side, side))
    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)

    def loss_of(outputs: Any, wanted: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs["out"], wanted)

    yield from train_vision(model, images, masks, loss_of, device)


def torchvision_retinanet(tiny: bool) -> Steps:
    """Detection: many small kernels between convolutions, and shapes that the host has to ask for."""
    import torch
    import torchvision

    yield
    device = torch_device()
    side = 64 if tiny else 256
    model = torchvision.models.detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=20, min_size=side, max_size=side
    )
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    images = torch.rand(2, 3, side, side)
    for (inputs,) in batches(images):
        inputs = list(inputs.to(device, non_blocking=True))
        corners = torch.tensor([[4.0, 4.0, side / 2, side / 2], [side / 4, side / 4, side - 4.0, side - 4.0]])
        targets = [{"boxes": corners.to(device), "labels": torch.tensor([1, 2], device=device)} for _ in inputs]
        loss = sum(model(inputs, targets).values())
        yield learned(loss, optimizer)


def torchvision_vit(tiny: bool) -> Steps:
    """Classification by a vision transformer."""
    import torchvision
    from torchvision.models.vision_transformer import VisionTransformer

    yield
    small = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128}
    make = lambda: VisionTransformer(32, 16, **small) if tiny else torchvision.models.vit_b_16(weights=None)  # noqa: E731
    yield from train_classifier(make, tiny)


def torchvision_convnext(tiny: bool) -> Steps:
    """Classification by convolutions with large, depthwise kernels."""
    import torchvision

    yield
    yield from train_classifier(lambda: torchvision.models.convnext_tiny(weights=None), tiny, batch=16)


def transformers_gpt2(tiny: bool) -> Steps:
    """A decoder of 124 million parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    yield
    device = torch_device()
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512) if tiny else GPT2Config()
    ids = torch.randint(config.vocab_size, (2, 16) if tiny else (4, 256))
    yield from train_language(lambda: GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, device)


def transformers_llama(tiny: bool) -> Steps:
    """A decoder with rotary positions, gated layers and grouped queries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    yield
    device = torch_device()
    width, layers, vocabulary = (64, 2, 512) if tiny else (1024, 8, 32_000)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 32 if tiny else 16,
        num_key_value_heads=1 if tiny else 4,
        vocab_size=vocabulary,
    )
    ids = torch.randint(vocabulary, (2, 16) if tiny else (4, 512))
    yield from train_language(lambda: LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, device)


def transformers_t5(tiny: bool) -> Steps:
    """An encoder and a decoder."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    yield
    device = torch_device()
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=2, vocab_size=512) if tiny else T5Config()
    config.decoder_start_token_id = 0
    shape = (2, 16) if tiny else (16, 256)
    ids, labels = torch.randint(config.vocab_size, shape), torch.randint(config.vocab_size, (shape[0], shape[1] // 2))
    yield from train_language(lambda: T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}, device)


def transformers_bert(tiny: bool) -> Steps:
    """An encoder that learns to fill in words."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    yield
    device = torch_device()
    config = BertConfig()
    if tiny:
        config = BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=512
        )
    ids = torch.randint(config.vocab_size, (2, 16) if tiny else (16, 128))
    yield from train_language(lambda: BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, device)


def transformers_whisper(tiny: bool) -> Steps:
    """Speech to text: convolutions over a spectrogram, then an encoder and a decoder."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    yield
    device = torch_device()
    config = WhisperConfig()
    if tiny:
        config = WhisperConfig(
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_source_positions=50,
        )
    batch = 2 if tiny else 8
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    labels = torch.randint(config.vocab_size, (batch, 8 if tiny else 64))
    yield from train_language(
        lambda: WhisperForConditionalGeneration(config), {"input_features": features, "labels": labels}, device
    )


def torch_recommender(tiny: bool) -> Steps:
    """Embedding tables of 2 GB with sparse gradients, and a small network above them."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    tables, rows, width, batch = (3, 500, 8, 16) if tiny else (8, 1_000_000, 64, 8192)
    with torch.device(device):
        embeddings = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
        top = nn.Sequential(
            nn.Linear(tables * width + 13, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
    sparse_optimizer = torch.optim.SGD(embeddings.parameters(), lr=0.1)
    dense_optimizer = torch.optim.Adam(top.parameters())
    ids, dense = torch.randint(rows, (batch, tables, 4)), torch.randn(batch, 13)
    clicks = torch.randint(2, (batch, 1)).float()
    for some_ids, some_dense, some_clicks in batches(ids, dense, clicks):
        some_ids = some_ids.to(device, non_blocking=True)
        features = [embedding(some_ids[:, table]) for table, embedding in enumerate(embeddings)]
        scores = top(torch.cat([*features, some_dense.to(device, non_blocking=True)], dim=1))
        wanted = some_clicks.to(device, non_blocking=True)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        yield learned(loss, sparse_optimizer, dense_optimizer)


def torch_sparse(tiny: bool) -> Steps:
    """A graph network: sparse times dense matrices, forward and backward."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    nodes, degree, width = (200, 4, 8) if tiny else (200_000, 16, 128)
    edges = torch.randint(nodes, (2, nodes * degree), device=device)
    weights = torch.full((nodes * degree,), 1.0 / degree, device=device)
    adjacency = torch.sparse_coo_tensor(edges, weights, (nodes, nodes)).coalesce()
    features, labels = torch.randn(nodes, width, device=device), torch.randint(16, (nodes,), device=device)
    with torch.device(device):
        first, second = nn.Linear(width, width), nn.Linear(width, 16)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    while True:
        hidden = torch.relu(torch.sparse.mm(adjacency, first(features)))
        loss = nn.functional.cross_entropy(torch.sparse.mm(adjacency, second(hidden)), labels)
        yield learned(loss, optimizer)


def torch_small_kernels(tiny: bool) -> Steps:
    """A recurrent network written out step by step: thousands of kernels of a few microseconds."""
    import torch
    from torch import nn

    yield
    device = torch_device()
    length, width, batch = (4, 16, 4) if tiny else (48, 256, 64)
    with torch.device(device):
        inputs_of, hidden_of, out = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width), nn.Linear(width, width)
        series = torch.randn(length, batch, width)
    parameters = [*inputs_of.parameters(), *hidden_of.parameters(), *out.parameters()]
    optimizer = torch.optim.Adam(parameters, foreach=False)
    while True:
        hidden, cell = torch.zeros(batch, width, device=device), torch.zeros(batch, width, device=device)
        loss = torch.zeros((), device=device)
        for now, following in itertools.pairwise(series):
            forget, update, expose, new = (inputs_of(now) + hidden_of(hidden)).chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(update) * torch.tanh(new)
            hidden = torch.sigmoid(expose) * torch.tanh(cell)
            loss = loss + (out(hidden) - following).square().mean()
        yield learned(loss, optimizer)


def cupy_fft_sort(tiny: bool) -> Steps:
    """Filters images in the frequency domain and takes a percentile of what is left, with CuPy."""
    import cupy

    yield
    count, side = (2, 32) if tiny else (32, 512)
    random = cupy.random.default_rng(SEED)
    images = random.standard_normal((count, side, side), dtype=cupy.float32)
    rows, columns = cupy.fft.fftfreq(side)[:, None], cupy.fft.rfftfreq(side)[None, :]
    keep = (cupy.hypot(rows, columns) < 0.2).astype(cupy.float32)
    noise = 0.01 * random.standard_normal(images.shape, dtype=cupy.float32)
    while True:
        filtered = cupy.fft.irfft2(cupy.fft.rfft2(images) * keep, s=(side, side))
        ordered = cupy.sort(cupy.abs(filtered).ravel())
        level = ordered[int(0.99 * ordered.size)]
        images = cupy.clip(filtered, -level, level) + noise
        yield level


def jax_transformer(tiny: bool) -> Steps:
    """A decoder trained with JAX, its kernels launched one by one: command buffers are off."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    yield from jax_training(tiny)


def jax_training(tiny: bool, donate: bool = True) -> Steps:
    """A decoder trained with JAX; without `donate`, each step puts its parameters into other buffers than the last."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    yield
    layers, width, heads, vocabulary = (2, 32, 2, 128) if tiny else (4, 768, 12, 16_384)
    batch, length = (2, 8) if tiny else (8, 256)

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.float32) * 0.02

    keys = iter(jax.random.split(jax.random.key(SEED), 2 + 4 * layers))
    parameters = {
        "embedding": normal(next(keys), vocabulary, width),
        "layers": [
            {
                "qkv": normal(next(keys), width, 3 * width),
                "out": normal(next(keys), width, width),
                "up": normal(next(keys), width, 4 * width),
                "down": normal(next(keys), 4 * width, width),
            }
            for _ in range(layers)
        ],
    }
    ids = jax.random.randint(next(keys), (batch, length + 1), 0, vocabulary)

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss_of(parameters: Any, ids: Any) -> Any:
        weights = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), parameters)
        x = weights["embedding"][ids[:, :-1]]
        for layer in weights["layers"]:
            qkv = (normed(x) @ layer["qkv"]).reshape(batch, length, 3, heads, width // heads)
            attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
            x = x + attended.reshape(batch, length, width) @ layer["out"]
            x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
        scores = jax.nn.log_softmax((normed(x) @ weights["embedding"].T).astype(jnp.float32))
        return -jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).mean()

    def train(parameters: Any, moments: Any, ids: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, ids)
        moments = jax.tree.map(lambda moment, gradient: 0.9 * moment + gradient, moments, gradients)
        parameters = jax.tree.map(lambda weight, moment: weight - 1e-3 * moment, parameters, moments)
        return parameters, moments, loss

    step = jax.jit(train, donate_argnums=(0, 1) if donate else ())
    moments = jax.tree.map(jnp.zeros_like, parameters)
    while True:
        parameters, moments, loss = step(parameters, moments, ids)
        yield loss


def join_ranks(device: str) -> int:
    """Makes this process one of the ranks that torchrun's variables name; returns which."""
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return rank


def torch_ddp_resnet50(tiny: bool) -> Steps:
    """ResNet50 on several GPUs, a process on each, whose gradients NCCL sums; started as torchrun starts it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    sys.path.append(str(DEMO))
    from workloads import resnet50

    yield
    device = torch_device()
    rank = join_ranks(device)

    def replica() -> Any:
        model = resnet50().to(device, memory_format=torch.channels_last)
        return DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)

    yield from train_classifier(replica, tiny)


def torch_long_kernels(tiny: bool) -> Steps:
    """Matrix products of more than a millisecond each, one after another."""
    import torch

    yield
    device = torch_device()
    side = 64 if tiny else 8192
    a, b, c = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(3))
    while True:
        torch.mm(a, b, out=c)
        yield c[0, 0]


PROGRAMS = {
    "torchvision_resnet50": Program(torchvision_resnet50),
    "torchvision_deeplabv3": Program(torchvision_deeplabv3),
    "torchvision_retinanet": Program(torchvision_retinanet),
    "torchvision_vit": Program(torchvision_vit),
    "torchvision_convnext": Program(torchvision_convnext),
    "transformers_gpt2": Program(transformers_gpt2),
    "transformers_llama": Program(transformers_llama),
    "transformers_t5": Program(transformers_t5),
    "transformers_bert": Program(transformers_bert),
    "transformers_whisper": Program(transformers_whisper),
    "torch_recommender": Program(torch_recommender),
    "torch_sparse": Program(torch_sparse),
    "torch_small_kernels": Program(torch_small_kernels),
    "cupy_fft_sort": Program(cupy_fft_sort),
    "jax_transformer": Program(jax_transformer, compiles=True),
    "torch_long_kernels": Program(torch_long_kernels),
}


def run_as_a_user(programs: dict[str, Program]) -> None:
    """Runs the program that is named on the command line, as its user would."""
    steps = programs[sys.argv[1]].steps(False)
    next(steps)
    for number, loss in enumerate(steps, 1):
        if number % READ_EVERY == 0:
            print(f"step {number}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    run_as_a_user(PROGRAMS)
