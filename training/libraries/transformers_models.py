"""transformers: its models with small configurations and no weights: text, translation, images."""

# mypy: ignore-errors

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from training.record import Parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEPT: dict[str, torch.nn.Module] = {}
TINY = {"on": False}


def model_of(name: str) -> torch.nn.Module:
    """A model, made once."""
    if name in KEPT:
        return KEPT[name]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(2)
    s = 8 if TINY["on"] else 1
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=768 // s, n_head=12 // min(s, 4), vocab_size=32_000 // s))
    elif name == "llama":
        config = LlamaConfig(
            hidden_size=1024 // s,
            intermediate_size=2816 // s,
            num_hidden_layers=8 // min(s, 4),
            num_attention_heads=16 // min(s, 4),
            num_key_value_heads=4 // min(s, 2),
            vocab_size=32_000 // s,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    elif name == "bert":
        config = BertConfig(
            num_hidden_layers=6 // min(s, 3), hidden_size=512 // s, num_attention_heads=8, intermediate_size=2048 // s
        )
        model = BertForSequenceClassification(config)
    elif name == "t5":
        config = T5Config(
            d_model=512 // s,
            d_kv=64 // s,
            d_ff=1024 // s,
            num_layers=4 // min(s, 2),
            num_heads=8,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    else:
        text = dict(
            hidden_size=512 // s, intermediate_size=2048 // s, num_hidden_layers=6 // min(s, 3), vocab_size=5000
        )
        vision = dict(
            hidden_size=768 // s, intermediate_size=3072 // s, num_hidden_layers=6 // min(s, 3), num_attention_heads=12
        )
        model = (
            CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).half()
            if DEVICE.type == "cuda"
            else CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
        )
    KEPT[name] = model.to(DEVICE)
    return KEPT[name]


@torch.no_grad()
def generate(name: str, batch: int, length: int, fresh: int, sample: bool) -> None:
    """Tokens, one after the other, with the library's own cache."""
    model = model_of(name).eval()
    ids = torch.randint(5, 1000, (batch, length), device=DEVICE)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=fresh,
        min_new_tokens=fresh,
        do_sample=sample,
        top_k=50,
        pad_token_id=0,
    )


def tune(batch: int, length: int, steps: int) -> None:
    """A classifier's training, with lengths that differ."""
    model = model_of("bert").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(steps):
        ids = torch.randint(5, 1000, (batch, max(2, length - 8 * step)), device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=torch.randint(0, 2, (batch,), device=DEVICE)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def translate(batch: int, source: int, target: int) -> None:
    """An encoder and a decoder, forward and backward."""
    model = model_of("t5").train()
    ids = torch.randint(5, 1000, (batch, source), device=DEVICE)
    for _ in range(2):
        model(input_ids=ids, labels=ids[:, : min(source, target)].contiguous()).loss.backward()
        model.zero_grad(set_to_none=True)


@torch.no_grad()
def compare(batch: int, length: int) -> None:
    """Images beside texts."""
    model = model_of("clip").eval()
    kind = next(model.parameters()).dtype
    images = torch.rand(batch, 3, 224, 224, device=DEVICE, dtype=kind)
    ids = torch.randint(5, 1000, (batch, length), device=DEVICE)
    for _ in range(2):
        model(input_ids=ids, pixel_values=images)


def parts(tiny: bool) -> Parts:
    """Models in turn, with batches and lengths that change now and then."""
    TINY["on"] = tiny
    fresh = 2 if tiny else 12
    for turn in range(1 if tiny else 3):
        yield (
            f"llama short {turn}",
            lambda t=turn: generate("llama", 1 + t, 8 if tiny else 37 + 50 * t, fresh, False),
        )
        yield f"tune {turn}", lambda t=turn: tune(2 if tiny else 16 + 8 * t, 8 if tiny else 128, 1 if tiny else 6)
        yield (
            f"gpt2 {turn}",
            lambda t=turn: generate("gpt2", 2 + 2 * t, 8 if tiny else 120 + 40 * t, fresh, True),
        )
        yield f"compare {turn}", lambda t=turn: compare(2 if tiny else 8 + 8 * t, 8 if tiny else 32 + t)
        yield f"translate {turn}", lambda t=turn: translate(2 if tiny else 8 + 4 * t, 8 if tiny else 96, 64)
        yield (
            f"llama long {turn}",
            lambda t=turn: generate("llama", 4, 8 if tiny else 500 + 111 * t, fresh, False),
        )
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
