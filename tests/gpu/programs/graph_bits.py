"""Launches each graph program that is named 200 times, and prints a checksum of all that it computed on the way.

    graph_bits.py training nodes branches host children changed_children

`training`: a whole step, updated before each launch to the other of two captures by cuGraphExecUpdate. `nodes`: layers
whose kernels are set one by one, at random, by cuGraphExecKernelNodeSetParams. `branches`: four streams joined. `host`:
functions on the host between kernels. `children`: child graphs. `changed_children`: the same, one of which becomes
another before each launch, by cuGraphExecChildGraphNodeSetParams. Under cudasched also prints how many launches went
in slices.
"""

import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor, nn

from benchmarks.graphs.driver import Graphs

LAUNCHES = 200
LAYERS, SIDE = 40, 1024
THREAD_LOCAL = 1

driver = Graphs()
chance = random.Random(11)


def launch(executable: int) -> None:
    driver.launch(executable, torch.cuda.current_stream().cuda_stream)


def captured(work: Callable[[], None], side: torch.cuda.Stream) -> int:
    """A graph of work that allocates nothing."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # libraries take their workspaces before
        torch.cuda.synchronize()
        graph = ctypes.c_void_p()
        driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(side.cuda_stream), THREAD_LOCAL)
        work()
        driver.call("cuStreamEndCapture", ctypes.c_void_p(side.cuda_stream), ctypes.byref(graph))
    torch.cuda.synchronize()
    return graph.value or 0


class Layers:
    """Matrix products and tanh in place, over weights that a capture chooses between."""

    def __init__(self, sets: int = 1) -> None:
        self.weights = [torch.randn(LAYERS, SIDE, SIDE, device="cuda") / SIDE**0.5 for _ in range(sets)]
        self.hidden, self.product = torch.randn(2, SIDE, SIDE, device="cuda").unbind()

    def run(self, weights: Tensor, first: int = 0, last: int = LAYERS) -> None:
        for layer in range(first, last):
            torch.mm(self.hidden, weights[layer], out=self.product)
            torch.tanh(self.product, out=self.hidden)


Program = tuple[Callable[[], None], Callable[[], Tensor]]
"""Launches once; what to look at when all that was launched is done."""


def training() -> Program:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    x = torch.randn(8, 256, 512, device="cuda")
    side = torch.cuda.Stream()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    captures, pool = [], None
    for _ in range(2):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            step()
        pool = graph.pool()
        captures.append(graph)
    executable = driver.instantiate(captures[0].raw_cuda_graph())
    turn = 0

    def replay() -> None:
        nonlocal turn
        turn += 1
        driver.update(executable, captures[turn % 2].raw_cuda_graph())
        launch(executable)

    return replay, lambda: torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def nodes() -> Program:
    layers = Layers(sets=2)
    side = torch.cuda.Stream()
    graphs = [captured(lambda weights=weights: layers.run(weights), side) for weights in layers.weights]
    executable = driver.instantiate(graphs[0])
    first, second = map(driver.kernel_nodes, graphs)
    assert len(first) == len(second) >= LAYERS

    def replay() -> None:
        for place in chance.sample(range(len(first)), 5):
            node, parameters = first[place]
            if chance.random() < 0.5:
                _, parameters = second[place]
            driver.set_kernel(executable, node, parameters)
        launch(executable)

    return replay, lambda: layers.hidden


def branches() -> Program:
    sides = [torch.cuda.Stream() for _ in range(4)]
    each = [Layers() for _ in sides]
    total = torch.zeros(SIDE, SIDE, device="cuda")
    torch.cuda.synchronize()  # what was made on the default stream is there for the others

    def work() -> None:
        for side in sides[1:]:
            side.wait_stream(sides[0])
        for side, layers in zip(sides, each, strict=True):
            with torch.cuda.stream(side):
                layers.run(layers.weights[0], 0, 10)
        for side in sides[1:]:
            sides[0].wait_stream(side)
        for layers in each:
            torch.add(total, layers.hidden, alpha=0.5, out=total)
        torch.tanh(total, out=total)
        torch.add(each[0].hidden, total, out=each[0].hidden)

    for side, layers in zip(sides, each, strict=True):
        with torch.cuda.stream(side):
            layers.run(layers.weights[0], 0, 1)  # a workspace for each stream
    torch.cuda.synchronize()
    graph = captured(work, sides[0])
    executable = driver.instantiate(graph)
    return lambda: launch(executable), lambda: total


called = 0


def host() -> Program:
    layers = Layers()
    side = torch.cuda.Stream()
    pinned = torch.zeros(64).pin_memory()
    row = layers.hidden[0, :64]

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(_: int | None) -> None:
        global called
        called += 1
        pinned.mul_(0.5).add_(0.25)

    def work() -> None:
        for part in range(4):
            layers.run(layers.weights[0], part * 8, part * 8 + 8)
            pinned.copy_(row, non_blocking=True)
            driver.call("cuLaunchHostFunc", ctypes.c_void_p(side.cuda_stream), function, None)
            row.copy_(pinned, non_blocking=True)

    graph = captured(work, side)
    executable = driver.instantiate(graph)
    kept.append(function)
    return lambda: launch(executable), lambda: layers.hidden


def children(changed: bool = False) -> Program:
    layers = Layers(sets=2)
    side = torch.cuda.Stream()
    inner = [captured(lambda weights=weights: layers.run(weights, 0, 16), side) for weights in layers.weights]
    graph = ctypes.c_void_p()
    driver.call("cuGraphCreate", ctypes.byref(graph), 0)
    before = ctypes.c_void_p()
    places = []
    for turn in range(4):
        node = ctypes.c_void_p()
        count = ctypes.c_size_t(1 if turn else 0)
        after = ctypes.byref(before) if turn else None
        inside = ctypes.c_void_p(inner[turn % 2])
        driver.call("cuGraphAddChildGraphNode", ctypes.byref(node), graph, after, count, inside)
        before = node
        places.append(node)
    executable = driver.instantiate(graph.value or 0)

    def replay() -> None:
        if changed:
            place, inside = chance.choice(places), chance.choice(inner)
            set_child = "cuGraphExecChildGraphNodeSetParams"
            driver.call(set_child, ctypes.c_void_p(executable), place, ctypes.c_void_p(inside))
        launch(executable)

    if not changed:
        for each in (graph.value, *inner):
            driver.call("cuGraphDestroy", ctypes.c_void_p(each))
    return replay, lambda: layers.hidden


PROGRAMS: dict[str, Callable[[], Program]] = {
    "training": training,
    "nodes": nodes,
    "branches": branches,
    "host": host,
    "children": children,
    "changed_children": lambda: children(changed=True),
}
kept: list[object] = []


def checksum(name: str) -> str:
    torch.manual_seed(3)
    replay, look = PROGRAMS[name]()
    torch.cuda.synchronize()
    digest, left = hashlib.sha256(), LAUNCHES
    while left:
        together = min(left, chance.randint(1, 6))  # launches behind one another, nothing waited for
        for _ in range(together):
            replay()
        left -= together
        torch.cuda.synchronize()
        digest.update(look().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    torch.use_deterministic_algorithms(True)
    managed = "CUDASCHED_CLASS" in os.environ
    for name in sys.argv[1:]:
        before = state() if managed else {}
        print(name, checksum(name), flush=True)
        if managed:
            after = state()
            print(f"{name}_sliced", after["sliced_launches"] - before["sliced_launches"], flush=True)
            print(f"{name}_slices", after["slice_launches"] - before["slice_launches"], flush=True)
            print(f"{name}_whole", after["graphs_whole"], flush=True)
    if "host" in sys.argv[1:]:
        print("called", called, flush=True)


def state() -> dict[str, object]:
    from dataclasses import asdict

    import cudasched

    return asdict(cudasched.state())


if __name__ == "__main__":
    main()
