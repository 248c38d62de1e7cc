"""torchvision: its models, classifying, trained, finding objects and outlining them; no weights are fetched."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torchvision import models
from torchvision.models import detection, segmentation
from torchvision.transforms import v2

from training.record import Parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEPT: dict[str, torch.nn.Module] = {}


def model_of(name: str) -> torch.nn.Module:
    """A model without weights, made once."""
    if name not in KEPT:
        torch.manual_seed(1)
        make = {
            "fasterrcnn": lambda: detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None),
            "lraspp": lambda: segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None),
        }.get(name, lambda: getattr(models, name)(weights=None))
        KEPT[name] = make().to(DEVICE)
    return KEPT[name]


@torch.no_grad()
def classify(name: str, batch: int, side: int, half: bool) -> None:
    """Images that were turned and scaled on the GPU, classified."""
    model = model_of(name).eval()
    pictures = torch.randint(0, 256, (batch, 3, side + 16, side + 32), device=DEVICE, dtype=torch.uint8)
    ready = v2.functional.center_crop(v2.functional.horizontal_flip(pictures), [side, side]).float() / 255
    ready = v2.functional.normalize(ready, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
        for _ in range(3):
            model(ready).softmax(1).topk(5)


def train(name: str, batch: int, side: int, steps: int) -> None:
    """Steps of training."""
    model = model_of(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        images = torch.rand(batch, 3, side, side, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), torch.randint(1000, (batch,), device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def find(count: int, height: int, width: int) -> None:
    """Objects in images of any size."""
    model = model_of("fasterrcnn").eval()
    for _ in range(2):
        model([torch.rand(3, height, width + 32 * i, device=DEVICE) for i in range(count)])


@torch.no_grad()
def outline(batch: int, height: int, width: int) -> None:
    """A class a pixel."""
    model = model_of("lraspp").eval()
    for _ in range(3):
        model(torch.rand(batch, 3, height, width, device=DEVICE))["out"].argmax(1)


def parts(tiny: bool) -> Parts:
    """Models in turn, with batches and sizes that change now and then."""
    if tiny:
        yield "classify", lambda: classify("mobilenet_v3_small", 1, 64, True)
        yield "train", lambda: train("mobilenet_v3_small", 2, 64, 1)
        yield "outline", lambda: outline(1, 64, 96)
        return
    for turn in range(3):
        for batch, side in ((16, 224), (5, 192 + 32 * turn), (64, 160)):
            yield f"mobilenet {batch} {side}", lambda b=batch, s=side: classify("mobilenet_v3_large", b, s, False)
            yield f"efficientnet {batch} {side}", lambda b=batch, s=side: classify("efficientnet_b0", b, s, True)
            yield f"convnext {batch} {side}", lambda b=batch, s=side: classify("convnext_tiny", b, s, True)
            yield f"swin {batch} {side}", lambda b=batch, s=side: classify("swin_t", b, s, True)
        yield f"train shufflenet {turn}", lambda t=turn: train("shufflenet_v2_x1_0", 32 + 16 * t, 224, 4)
        yield f"train regnet {turn}", lambda t=turn: train("regnet_y_400mf", 48, 160 + 32 * t, 4)
        yield f"find {turn}", lambda t=turn: find(1 + t, 320 + 32 * t, 400)
        yield f"outline {turn}", lambda t=turn: outline(2 + 3 * t, 320, 384 + 64 * t)
    torch.cuda.synchronize()
