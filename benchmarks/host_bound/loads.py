"""The servers of the host-bound benchmark, for the workers of cudasched/demo/client.py (`--loads` names this file).

`bert_eager` is Hugging Face's BERT-base (without transformers the demo's encoder, which is said), `resnet50_eager` the
demo's ResNet-50 on four images, `decode_eager` 32 tokens of a small GPT, each read by the host before the next, and
`recommender` the breadth benchmark's. None of these is a CUDA graph; `bert_graph`, the demo's, is. On the simulated
driver they are lists of kernels.
"""

# What type checkers see of torch depends on whether and which torch is installed.
# mypy: ignore-errors

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

#: What takes their places on the simulated driver: the kernels of a step in us, how many steps a request has, and what
#: the host takes for each launch in us.
SIMULATED = {
    "bert_eager": ((3,) * 200, 1, 20.0),
    "resnet50_eager": ((14,) * 60, 1, 20.0),
    "decode_eager": ((5,) * 40, 8, 15.0),
    "recommender": ((10,) * 6, 2, 8.0),
}


def latency_workload(name: str, own_stream: bool = False) -> Any:
    """Builds a server on the GPU.

    Args:
        name: Of `SIMULATED`, or `bert_graph`.
        own_stream: On a high-priority stream of its own, for a process that it shares with another role.

    Raises:
        ValueError: No such server.
    """
    import torch
    from torch import nn
    from workloads import SEED, Decoder, Requests, default_device
    from workloads import latency_workload as of_the_demo

    device = default_device()
    torch.manual_seed(SEED)
    half = torch.float16 if device.type == "cuda" else torch.float32
    if name == "bert_eager":
        try:
            from transformers import BertConfig, BertModel
        except ImportError:
            print("transformers is not installed: bert_eager is the demo's encoder", file=sys.stderr)
            return of_the_demo("bert_eager", own_stream)
        model = BertModel(BertConfig()).to(device=device, dtype=half)
        return Requests(model, torch.randint(30_522, (1, 128), device=device), False, own_stream)
    if name == "resnet50_eager":
        return of_the_demo("resnet50_b4", own_stream)
    if name == "bert_graph":
        return of_the_demo(name, own_stream)
    if name == "recommender":
        sys.path.insert(0, str(Path(__file__).parents[1] / "breadth"))
        from servers import CopyingRequests, Recommender

        tables, rows, batch = 8, 500_000, 512
        with torch.device(device):
            recommender = Recommender(tables, rows)
        inputs = torch.randint(rows, (batch, tables, 4)), torch.randn(batch, 13)
        return CopyingRequests(recommender, inputs, device, own_stream)
    if name != "decode_eager":
        raise ValueError(f"unknown server {name!r}: one of {', '.join(SIMULATED)}")

    class EagerDecoding(Requests):
        """Tokens one after the other, with the times at which the host had each."""

        TOKENS = 32
        warm_up_steps = 10

        def __init__(self, decoder: nn.Module, ids: torch.Tensor) -> None:
            super().__init__(decoder, ids, False, own_stream)
            self._had_ns: list[int] = []

        def step(self) -> None:
            self._had_ns = []
            for token in range(self.TOKENS):
                if token:
                    self.synchronize()
                super().step()

        def synchronize(self) -> None:
            super().synchronize()
            self._had_ns.append(time.monotonic_ns())

        def intervals_ns(self) -> list[int]:
            """Between one token and the next of the last request."""
            return [after - before for before, after in zip(self._had_ns, self._had_ns[1:], strict=False)]

    with torch.device(device):
        decoder = Decoder(layers=12, width=768, heads=12, length=512).to(half)
        return EagerDecoding(decoder, torch.randint(50_257, (1, 1)))


def simulated_workload(name: str, own_stream: bool = False) -> Any:
    """Builds a server's stand-in on the simulated driver.

    Raises:
        ValueError: No such server.
    """
    from simulated import HIGH_PRIORITY, QUARTER_GRID, SimulatedWorkload
    from simulated import latency_workload as of_the_demo

    if name == "bert_graph":
        return of_the_demo(name, own_stream)
    if name not in SIMULATED:
        raise ValueError(f"unknown server {name!r}: one of {', '.join(SIMULATED)}")
    durations_us, steps, host_us = SIMULATED[name]
    gap_ns = int(host_us * float(os.environ["CUDASCHED_SIM_SCALE"]) * 1e3)

    class Stand(SimulatedWorkload):
        """Launched kernel by kernel, with the host at work before each, and waited for after each step."""

        def __init__(self) -> None:
            super().__init__(durations_us, QUARTER_GRID, HIGH_PRIORITY if own_stream else 0, graph=False, steps=steps)
            self._had_ns: list[int] = []

        def _launch_all(self) -> None:
            for us in self._durations_us:
                ready_ns = time.monotonic_ns() + gap_ns
                while time.monotonic_ns() < ready_ns:
                    pass
                self._driver.launch(self._functions[us], self._blocks, self._stream)

        def step(self) -> None:
            self._had_ns = []
            super().step()

        def synchronize(self) -> None:
            super().synchronize()
            self._had_ns.append(time.monotonic_ns())

    if name != "decode_eager":
        return Stand()

    class Decoding(Stand):
        """With the times between its tokens."""

        def intervals_ns(self) -> list[int]:
            """Between one token and the next of the last request."""
            return [after - before for before, after in zip(self._had_ns, self._had_ns[1:], strict=False)]

    return Decoding()
