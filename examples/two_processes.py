"""Two programs on one GPU that know nothing of each other: this one starts itself as a server and as a training loop.

    python examples/two_processes.py --seconds 10

Neither has a line of cudasched in it: `cudasched run` gives each its class.
"""

import argparse
import subprocess
import sys
import time


def serve(seconds: float) -> None:
    """An ordinary PyTorch server."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(1024, 1024).to(device)
    latencies, until = [], time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            began = time.perf_counter()
            model(torch.randn(1, 1024, device=device)).cpu()
            latencies.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.015)
    latencies.sort()
    print(f"served {len(latencies)}, median {latencies[len(latencies) // 2]:.2f} ms", flush=True)


def train(seconds: float) -> None:
    """An ordinary training loop."""
    import torch

    device, width = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 64)
    model = torch.nn.Linear(width, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.randn(512, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print(f"trained {steps} steps", flush=True)


def main() -> None:
    """Starts both and waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--role", choices=["serve", "train"])
    options = parser.parse_args()
    if options.role:
        {"serve": serve, "train": train}[options.role](options.seconds)
        return
    programs = []
    for role, client_class in (("serve", "latency"), ("train", "best_effort")):
        program = [sys.executable, __file__, "--role", role, "--seconds", str(options.seconds)]
        command = [sys.executable, "-m", "cudasched", "run", "--class", client_class, "--", *program]
        programs.append(subprocess.Popen(command))
    sys.exit(max(abs(program.wait()) for program in programs))  # minus the signal, of one that was killed


if __name__ == "__main__":
    main()
