"""A server and the fine-tuning of its model in one process: two threads, two regions, and weights that are handed over.

    python examples/serve_and_finetune.py --seconds 10

The trainer never changes what the server reads: after some steps it hands over a copy of the weights, and the server
takes the newest before it answers. A request waits for that copy to be complete, and for no later step.
"""

import argparse
import sys
import threading
import time

import cudasched  # before torch
import cudasched.torch
import torch
from torch import nn

HAND_OVER_EVERY = 5


def build(width: int, device: str) -> nn.Sequential:
    """The model that is served and trained."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)


class Newest:
    """The weights that were handed over last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handover: cudasched.torch.Handover[dict[str, torch.Tensor]] | None = None

    def give(self, weights: dict[str, torch.Tensor]) -> None:
        """The trainer's."""
        with self._lock:
            self._handover = cudasched.torch.handover(weights)

    def take(self) -> dict[str, torch.Tensor] | None:
        """The server's: None if there is nothing newer."""
        with self._lock:
            handover, self._handover = self._handover, None
        return None if handover is None else handover.take()


def train(model: nn.Module, width: int, device: str, newest: Newest, stop: threading.Event) -> int:
    """Trains until told to stop. Returns the steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    while not stop.is_set():
        with cudasched.region("best_effort"):
            x = torch.randn(256, width, device=device)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % HAND_OVER_EVERY == 0:
                newest.give({name: value.detach().clone() for name, value in model.state_dict().items()})
                loss.item()  # in the region: what waits for training is training's
    return steps


def serve(model: nn.Module, width: int, device: str, newest: Newest, until: float) -> list[float]:
    """Answers a request every 15 ms or so. Returns the latencies, ms."""
    latencies = []
    while time.monotonic() < until:
        began = time.perf_counter()
        with cudasched.region("latency", slo_ms=10), torch.no_grad():
            if (weights := newest.take()) is not None:
                model.load_state_dict(weights)
            answer = model(torch.randn(1, width, device=device)).cpu()
        assert answer.isfinite().all()
        latencies.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.015)
    return latencies


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--width", type=int, default=2048 if torch.cuda.is_available() else 32)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    served, trained = build(options.width, device), build(options.width, device)
    trained.load_state_dict(served.state_dict())
    sys.setswitchinterval(1e-4)  # a request waits no longer than that for the trainer's Python
    newest, stop, steps = Newest(), threading.Event(), []
    trainer = threading.Thread(
        target=lambda: steps.append(train(trained, options.width, device, newest, stop)), name="trainer"
    )
    trainer.start()
    try:
        latencies = sorted(serve(served, options.width, device, newest, time.monotonic() + options.seconds))
    finally:
        stop.set()
        trainer.join()
    print(f"{len(latencies)} requests, median {latencies[len(latencies) // 2]:.2f} ms; {steps[0]} training steps")


if __name__ == "__main__":
    main()
