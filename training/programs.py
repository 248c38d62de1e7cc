"""Whole programs that no sweep has seen: evaluation is held to them.

Each is a generator that yields after every step. `label` names what comes; shapes change on the way, as they do in
real programs: batches that are not full, sequences of any length, caches that grow, images of several sizes. Steps
are counted, not timed, so that two recordings hold the same launches: 15,000 to 30,000 each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from cudasched.demo.workloads import Block, Encoder, resnet50
from torch import Tensor, nn

from training.models import Recommender, Unet, Vit

Label = Callable[[str], Any]
Program = Callable[[torch.device, Label, bool], Iterator[None]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Registers a program by its function's name."""
    PROGRAMS[function.__name__] = function
    return function


@program
def resnet50_train(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """ResNet-50 under autocast with dropout, fused Adam and a Triton kernel on the images; then validation."""
    on_gpu = device.type == "cuda"
    with torch.device(device):
        layers = list(resnet50((1, 1, 1, 1) if tiny else (3, 4, 6, 3)).children())
        model = nn.Sequential(*layers[:-1], nn.Dropout(0.2), layers[-1]).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=on_gpu)
        batch, side = (2, 32) if tiny else (64, 224)
        images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
        noise, classes = torch.randn_like(images), torch.randint(1000, (batch,))
    for step in range(2 if tiny else 22):
        count = batch if step % 8 != 7 else batch // 2 + 1
        model.train(step % 8 != 6)
        label(f"b{count} step{step}{'' if model.training else ' validation'}")
        x = images[:count] + noise[:count]
        if on_gpu:
            from training.triton_kernels import add

            x = add(images[:count], noise[:count], 1024)
        with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(model.training):
            loss = F.cross_entropy(model(x), classes[:count])
        if model.training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield


@program
def bert_variable(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """BERT-base inference in fp16 on batches of any size and length."""
    draw = random.Random(7)
    half = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Encoder(2 if tiny else 12).to(half).eval()
    for _ in range(2 if tiny else 130):
        batch, tokens = draw.choice((1, 1, 2, 4, 8, 16)), 8 if tiny else draw.randint(8, 512)
        label(f"b{batch} t{tokens}")
        with torch.no_grad():
            model(torch.randint(30_522, (batch, tokens), device=device))
        yield


@program
def gpt_decode(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """A GPT that reads prompts and decodes with caches that grow by a token a step, in bf16."""
    draw = random.Random(8)
    width, heads, layers, vocabulary = (64, 2, 2, 128) if tiny else (1024, 16, 16, 50_257)
    dtype = torch.bfloat16
    with torch.device(device):
        tokens, positions = nn.Embedding(vocabulary, width).to(dtype), nn.Embedding(2048, width).to(dtype)
        blocks = [Block(width, heads, causal=True, norm_first=True).to(dtype).eval() for _ in range(layers)]
        norm = nn.LayerNorm(width).to(dtype)

    def attend(block: Block, x: Tensor, cache: list[Tensor]) -> Tensor:
        batch, count, _ = x.shape
        shape = batch, count, 3, heads, width // heads
        q, k, v = block.attention.qkv(block.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=count > 1)
        x = x + block.attention.out(y.transpose(1, 2).reshape(batch, count, width))
        return x + block.down(F.gelu(block.up(block.norm2(x))))

    for _ in range(1 if tiny else 14):
        batch, length = draw.choice((1, 2, 4, 8)), 4 if tiny else draw.randint(16, 900)
        ids = torch.randint(vocabulary, (batch, length), device=device)
        caches: list[list[Tensor]] = [[] for _ in blocks]
        past = 0
        for step in range(2 if tiny else 7):
            label(f"b{batch} t{length} s{step}")
            with torch.no_grad():
                x = tokens(ids) + positions.weight[past : past + ids.shape[1]]
                for block, cache in zip(blocks, caches, strict=True):
                    x = attend(block, x, cache)
                past += ids.shape[1]
                logits = norm(x[:, -1:]) @ tokens.weight.T
                best = logits.float().topk(40).values[..., -1:]
                chances = torch.softmax(logits.float().masked_fill(logits < best, -float("inf")), -1)
                ids = torch.multinomial(chances[:, 0], 1)
            yield


@program
def vit_train(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """ViT-B/16 training under autocast, images growing from 128 to 224, with AdamW for each and clipped gradients."""
    layers, width, heads = (1, 64, 2) if tiny else (12, 768, 12)
    with torch.device(device):
        model = Vit(layers, width, heads, 16, 224)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        batch = 2 if tiny else 24
        images, classes = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    for step in range(2 if tiny else 26):
        side = (128, 160, 192, 224)[step * 4 // 26]
        count = batch if step % 6 != 5 else batch // 3
        label(f"b{count} s{side}")
        x = F.interpolate(images[:count], (side, side), mode="bilinear") if side != 224 else images[:count]
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), classes[:count], label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


@program
def recommender_train(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """A DLRM in fp32: 26 tables, bags of any size, SGD."""
    draw = random.Random(9)
    tables, rows, width = (3, 100, 8) if tiny else (26, 200_000, 64)
    with torch.device(device):
        model = Recommender(tables, rows, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2 if tiny else 60):
        batch, bag = draw.choice((512, 1024, 2048, 4096, 8192)) if not tiny else 4, draw.randint(1, 12)
        label(f"b{batch} m{bag}")
        with torch.device(device):
            indices = torch.randint(rows, (tables, batch * bag))
            offsets, dense, clicks = torch.arange(0, batch * bag, bag), torch.rand(batch, 13), torch.rand(batch)
        loss = F.binary_cross_entropy_with_logits(model(dense, indices, offsets), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


@program
def unet_train(device: torch.device, label: Label, tiny: bool) -> Iterator[None]:
    """A diffusion model's training in bf16 autocast on latents of several sizes, with averaged weights."""
    draw = random.Random(10)
    with torch.device(device):
        model, average = Unet(16 if tiny else 96), Unet(16 if tiny else 96)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    for _ in range(2 if tiny else 46):
        batch, h, w = draw.choice((4, 8, 16)), *(8 * draw.randint(3, 9) for _ in range(2))
        batch, h, w = (1, 8, 8) if tiny else (batch, h, w)
        label(f"b{batch} {h}x{w}")
        with torch.device(device):
            clean, noise = torch.randn(batch, 4, h, w), torch.randn(batch, 4, h, w)
            steps = torch.randint(1000, (batch,))
        share = torch.cos(steps / 1000 * 1.5)[:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.mse_loss(model(share * clean + (1 - share * share).sqrt() * noise, steps).float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        yield
