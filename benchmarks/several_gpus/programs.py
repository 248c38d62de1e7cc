"""Training across several GPUs, a process on each: the benchmark's worker is rank 0, and the others step with it.

The environment is that which torchrun gives rank 0. Run by path, as benchmarks/breadth/program.py is.
"""

# Types of torch depend on whether and which torch is installed.
# mypy: ignore-errors

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / each) for each in ("", "python/cudasched/demo", "benchmarks/breadth")]

from benchmarks.breadth import program  # noqa: E402
from benchmarks.breadth.programs import (  # noqa: E402
    SEED,
    Program,
    Steps,
    join_ranks,
    learned,
    torch_ddp_resnet50,
    torch_device,
)
from benchmarks.preempt.programs import llama_layer  # noqa: E402


class Ranks:
    """The ranks beside rank 0: processes of the same command, each of which takes a step for a byte on its stdin."""

    def __init__(self) -> None:
        self._others = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),  # answers on stdout are rank 0's alone
                bufsize=0,
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(1, int(os.environ.get("WORLD_SIZE", "1")))
        ]
        for other in self._others:
            threading.Thread(target=self._end_with, args=(other,), daemon=True).start()

    def step(self) -> None:
        """Has each take a step; returns at once."""
        for other in self._others:
            other.stdin.write(b".")

    @staticmethod
    def _end_with(other: subprocess.Popen[bytes]) -> NoReturn:
        os._exit(other.wait() or 1)  # else this rank waits in a collective for ever


def led(own: Iterator[Any]) -> Iterator[Any]:
    """The steps of rank 0, in each of which all ranks take one: where rank 0 pauses, all do."""
    ranks = Ranks()
    yield next(own)
    while True:
        ranks.step()
        yield next(own)


def follow(own: Iterator[Any]) -> NoReturn:
    """Takes the steps of another rank, until rank 0 is gone."""
    next(own)
    while os.read(sys.stdin.fileno(), 1):
        next(own)
    os._exit(0)


def torch_fsdp_llama(tiny: bool) -> Steps:
    """A Llama of 1.1 billion parameters in bf16, sharded by FSDP2."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    yield
    device = torch_device()
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:  # set where losses are to be equal
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cuda.enable_cudnn_sdp(False)
    rank = join_ranks(device)
    layers, vocabulary, batch, length = (2, 128, 2, 16) if tiny else (16, 32_000, 2, 1536)
    sizes = (64, 128, 4, 2) if tiny else (2048, 8192, 32, 8)
    with torch.device(device):
        made = [llama_layer(*sizes) for _ in range(layers)]
        ends = nn.RMSNorm(sizes[0]), nn.Linear(sizes[0], vocabulary, bias=False)
        model = nn.Sequential(nn.Embedding(vocabulary, sizes[0]), *made, *ends).to(torch.bfloat16)
    for module in (*made, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    torch.manual_seed(SEED + rank)
    while True:
        ids = torch.randint(vocabulary, (batch, length + 1), device=device)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        yield learned(loss, optimizer)


#: A loss is read about three times a second.
PROGRAMS = {
    "torch_ddp_resnet50": Program(torch_ddp_resnet50, read_every=16),
    "torch_fsdp_llama": Program(torch_fsdp_llama, read_every=5),
}


def simulated(load: str) -> tuple[Iterator[Any], Any, Any]:
    """A load of the simulated driver in every rank."""
    steps, *others = program.simulated_steps(load)
    return led(steps), *others


if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        name, *options = sys.argv[1:]
        simulate, tiny = "--simulate" in options, "--tiny" in options
        follow(program.simulated_steps(name)[0] if simulate else PROGRAMS[name].steps(tiny))
    in_step = {
        name: dataclasses.replace(one, steps=lambda tiny, one=one: led(one.steps(tiny)))
        for name, one in PROGRAMS.items()
    }
    sys.exit(program.main(in_step, simulated))
