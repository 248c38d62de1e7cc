"""Text decoded token by token with a CUDA graph, beside training in another thread.

    python examples/decode_beside_training.py --requests 20

The graph of one token is captured once, in the latency region's thread, and replayed for each token. Each token is a
request of its own: it is on the host before the next begins.
"""

import argparse
import sys
import threading
import time

import cudasched  # before torch
import torch
from torch import Tensor, nn


class TinyDecoder(nn.Module):
    """One step of a decoder with a fixed state: enough to have a graph worth replaying."""

    def __init__(self, width: int, layers: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, token: Tensor) -> Tensor:
        """The next token, greedily."""
        x = self.tokens(token)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return (x @ self.tokens.weight.T).argmax(-1)


class Decoder:
    """Decodes with a graph where there is a GPU, else eagerly."""

    def __init__(self, model: TinyDecoder, device: str) -> None:
        self.model, self.token = model.eval(), torch.zeros(1, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device == "cuda":
            with torch.no_grad():
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self.model(self.token)  # libraries allocate at their first use, which a capture forbids
                side.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                # Other threads allocate meanwhile.
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.token.copy_(self.model(self.token))

    def next(self) -> int:
        """One token, on the host."""
        with cudasched.region("latency"), torch.no_grad():
            if self.graph is not None:
                self.graph.replay()
            else:
                self.token.copy_(self.model(self.token))
            return int(self.token)


def train(width: int, device: str, stop: threading.Event) -> None:
    """Another model's training."""
    model = nn.Linear(width, width).to(device)
    while not stop.is_set():
        with cudasched.region("best_effort"):
            model(torch.randn(256, width, device=device)).square().mean().backward()
            model.zero_grad()
            if device == "cuda":
                torch.cuda.current_stream().synchronize()


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    if min(options.requests, options.tokens) < 1:
        parser.error("--requests and --tokens are at least 1")
    device, width = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 32)
    decoder = Decoder(TinyDecoder(width // 4, 8).to(device), device)
    sys.setswitchinterval(1e-4)  # a token waits no longer than that for the trainer's Python
    stop = threading.Event()
    trainer = threading.Thread(target=train, args=(width, device, stop), name="trainer")
    trainer.start()
    times = []
    try:
        for _ in range(options.requests):
            began = time.perf_counter()
            for _ in range(options.tokens):
                decoder.next()
            times.append((time.perf_counter() - began) * 1e3 / options.tokens)
    finally:
        stop.set()
        trainer.join()
    times.sort()
    print(f"{options.requests} requests, {times[len(times) // 2]:.3f} ms a token (median)")


if __name__ == "__main__":
    main()
