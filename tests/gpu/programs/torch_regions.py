"""Regions with streams of their own on the real allocator: random programs, and what PyTorch programs do in regions.

    python torch_regions.py random --programs 500 [--without order|default|keep|handover] [--seed 1]
    python torch_regions.py bits|apart|weights|checked

`random` runs threads that enter and leave regions, allocate, use, free and hand over, a step at a time, with kernels
that only take time in between. Each tensor's contents are known; a use that ran too early, or a block that was used
again too early, shows in them. `--without` takes a rule away, and something must be wrong then: it ends there.
"""

import argparse
import copy
import functools
import itertools
import os
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS promises no bits on several streams

import cudasched
import cudasched.torch
import torch
from cudasched.torch import _handover, _streams
from torch import nn

CLASSES = ("latency", "normal", "best_effort")
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20)  # elements of 4 bytes: blocks of both of the allocator's pools
MEMBERS = ("a", "b", "c")
OUTSIDER = "outsider"


class Worker:
    """A thread that does one thing at a time."""

    def __init__(self) -> None:
        self._asked: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (action := self._asked.get()) is not None:
            try:
                self._answers.put(action())
            except BaseException as error:
                self._answers.put(error)
            del action

    def run(self, action: Callable[[], Any]) -> Any:
        self._asked.put(action)
        answer = self._answers.get(timeout=200)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        self._asked.put(None)
        self._thread.join()


class Known:
    """A tensor, and what is in it."""

    def __init__(self, tensor: torch.Tensor, value: int) -> None:
        self.tensor, self.value = tensor, value


class Program:
    def __init__(self, seed: int, cycles: int, graphs: bool) -> None:
        self.rng = random.Random(seed)
        self.cycles = cycles
        self.values = itertools.count(1)
        self.workers = {name: Worker() for name in (*MEMBERS, OUTSIDER)}
        self.regions: dict[str, list[Any]] = {name: [] for name in MEMBERS}
        self.held: dict[str, list[Known]] = {name: [] for name in self.workers}
        self.parcels: list[tuple[str, Any, int]] = []
        self.wrong: dict[str, torch.Tensor] = {}
        self.graphs: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self.bad = 0
        self.use_graphs = graphs

    def run(self, steps: int) -> int:
        """How many elements were not what they should be."""
        for name, worker in self.workers.items():
            worker.run(functools.partial(self.begin, name))
        for _ in range(steps):
            name = self.rng.choice([*MEMBERS, OUTSIDER])
            actions: list[Callable[[str], None]] = [self.allocate, self.allocate, self.use, self.use, self.free]
            if name != OUTSIDER:
                actions += [self.enter, self.leave] * 2 + [self.give, self.take, self.replay]
                if self.rng.random() < 0.1:
                    actions += [self.end]
            action = self.rng.choice(actions)
            self.workers[name].run(functools.partial(action, name))
            if action == self.end and not self.regions[name]:
                self.workers[name].stop()
                self.workers[name] = Worker()
                self.workers[name].run(functools.partial(self.begin, name))
        for name, worker in self.workers.items():
            worker.run(functools.partial(self.finish, name))
            worker.stop()
        torch.cuda.synchronize()
        return self.bad

    def begin(self, name: str) -> None:
        self.wrong[name] = torch.zeros((), dtype=torch.int64, device="cuda")
        # Filled before anybody else's stream could see it.
        torch.cuda.current_stream().synchronize()

    def delay(self) -> None:
        if self.rng.random() < 0.6:
            torch.cuda._sleep(self.rng.randrange(self.cycles))

    def check(self, name: str, known: Known) -> None:
        self.wrong[name] += (known.tensor != known.value).sum()

    def allocate(self, name: str) -> None:
        value = next(self.values)
        self.held[name].append(
            Known(torch.full((self.rng.choice(SIZES),), value, dtype=torch.int32, device="cuda"), value)
        )

    def use(self, name: str) -> None:
        if self.held[name]:
            known = self.rng.choice(self.held[name])
            self.delay()
            self.check(name, known)
            known.tensor.add_(1)
            known.value += 1

    def free(self, name: str) -> None:
        if self.held[name]:
            known = self.held[name].pop(self.rng.randrange(len(self.held[name])))
            self.delay()
            self.check(name, known)

    def enter(self, name: str) -> None:
        if len(self.regions[name]) < 4:
            region = cudasched.region(self.rng.choice(CLASSES))
            region.__enter__()
            self.regions[name].append(region)

    def leave(self, name: str) -> None:
        if self.regions[name]:
            place = -1 if self.rng.random() < 0.9 else self.rng.randrange(len(self.regions[name]))
            self.regions[name].pop(place).__exit__(None, None, None)

    def give(self, name: str) -> None:
        if self.held[name]:
            known = self.held[name].pop()
            self.parcels.append((name, cudasched.torch.handover(known.tensor), known.value))

    def take(self, name: str) -> None:
        for place, (giver, parcel, value) in enumerate(self.parcels):
            if giver != name:
                del self.parcels[place]
                self.held[name].append(Known(parcel.take(), value))
                return

    def replay(self, name: str) -> None:
        """A graph of the thread's own, in a private pool, over a tensor of the thread."""
        if not self.use_graphs or not self.held[name]:
            return
        if name not in self.graphs:
            before = torch.full((SIZES[0],), 1, dtype=torch.int32, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                after = before + before
            self.graphs[name] = (graph, before, after)
        graph, before, after = self.graphs[name]
        known = self.held[name][-1]
        self.delay()
        before.copy_(known.tensor[: SIZES[0]])
        graph.replay()
        self.wrong[name] += (after != 2 * known.value).sum()

    def end(self, name: str) -> None:
        if not self.regions[name]:
            self.finish(name)

    def finish(self, name: str) -> None:
        while self.regions.get(name):
            self.leave(name)
        for known in self.held[name]:
            self.check(name, known)
        self.held[name].clear()
        self.graphs.pop(name, None)
        self.bad += int(self.wrong[name])


def without(rule: str) -> None:
    """Takes a rule of `cudasched.torch._streams` away."""
    threads = _streams.ThreadStreams
    ordering = threads.ordering
    if rule == "order":
        threads.ordering = lambda self, to, after: ordering(self, to, [s for s in after if s == self.default])
    elif rule == "default":
        threads.ordering = lambda self, to, after: ordering(self, to, [s for s in after if s != self.default])
        threads.end_of_default = lambda self: self._backend.event(self._device)
    elif rule == "keep":
        threads.keep = lambda self, tensors: None
    elif rule == "handover":
        _handover.Parcel._wait = lambda self, streams, stream: None


def random_programs(arguments: argparse.Namespace) -> None:
    if arguments.without:
        without(arguments.without)
    bad = 0
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        found = Program(seed, arguments.cycles, arguments.graphs).run(arguments.steps)
        bad += found > 0
        if found:
            print(f"seed {seed}: {found} elements are wrong")
            if arguments.without:
                break
    print(f"programs {arguments.programs} wrong {bad}")


# ---- what programs do in regions: the same bits as without


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 16)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if self.recompute:
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(lambda y: torch.relu(self.second(y)), x, use_reentrant=False)
        else:
            x = torch.relu(self.second(x))
        return self.last(x)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(64, 256, generator=generator).pin_memory() for _ in range(6)]


def train(
    model: nn.Module,
    region: Any,
    *,
    amp: bool = False,
    outside: bool = False,
    call: Any = None,
    data: Iterable[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Losses and parameters after some steps. `outside`: forward in the region, backward and optimizer outside."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    call = model if call is None else call
    for batch in batches() if data is None else data:
        with region:
            x = batch.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                loss = call(x).square().mean()
            if not outside:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if outside:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad(), region:
        losses.append(model(batches()[0].cuda()).sum())
    found = [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
    torch.cuda.synchronize()  # another thread looks at them, on a stream of its own
    return found


def in_thread(action: Callable[[], Any]) -> Any:
    worker = Worker()
    try:
        return worker.run(action)
    finally:
        worker.stop()


def differences(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[str]:
    """Which tensors differ, in how many elements, and by how much at most."""
    assert len(some) == len(others)
    return [
        f"tensor {number}: {int((one != other).sum())} of {one.numel()}, {float((one - other).abs().max()):.3g}"
        for number, (one, other) in enumerate(zip(some, others, strict=True))
        if not torch.equal(one, other)
    ]


def bits() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    plain, recomputing = Net().cuda(), Net(recompute=True).cuda()
    cases: dict[str, Callable[[Any], list[torch.Tensor]]] = {
        "plain": lambda region: train(copy.deepcopy(plain), region),
        "amp": lambda region: train(copy.deepcopy(plain), region, amp=True),
        "backward outside": lambda region: train(copy.deepcopy(plain), region, outside=True),
        "checkpoint": lambda region: train(copy.deepcopy(recomputing), region),
        "compile": compiled,
        "ddp built outside": distributed,
        "fsdp2": sharded,
        "graph": graphed,
        "data loader": loaded,
    }
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for name, case in cases.items():
        expected = in_thread(lambda case=case: case(nullcontext()))
        for client_class in ("best_effort", "latency"):
            stop, found = threading.Event(), []

            def beside(stop: threading.Event = stop) -> None:
                y = torch.randn(512, 512, device="cuda")
                while not stop.wait(0.0005):  # best effort gets nothing beside requests without a pause
                    with cudasched.region("latency"):
                        (y @ y).sum()
                        torch.cuda.current_stream().synchronize()

            other = threading.Thread(target=beside)
            other.start()
            try:
                found = in_thread(lambda case=case, c=client_class: case(cudasched.region(c)))
                differ = differences(found, expected)
                again = in_thread(lambda case=case: case(nullcontext())) if differ else expected
            finally:
                stop.set()
                other.join()
            bare = differences(again, expected) or "does not"
            assert not differ, f"{name} in {client_class} differs: {differ}; without a region: {bare}"
        print("same bits:", name)
    torch.distributed.destroy_process_group()


_base = Net()


def compiled(region: Any) -> list[torch.Tensor]:
    model = copy.deepcopy(_base).cuda()
    return train(model, region, call=torch.compile(model))


def distributed(region: Any) -> list[torch.Tensor]:
    """Its AccumulateGrad nodes keep the stream that was current when it was built, outside the region."""
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(_base).cuda())
    return train(model, region)


def loaded(region: Any) -> list[torch.Tensor]:
    """Batches that a thread of the loader's pins, made by processes that are forked in the middle of it all."""
    rows = torch.cat(batches())
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=64, num_workers=2, pin_memory=True)
    return train(copy.deepcopy(_base).cuda(), region, data=loader)


def sharded(region: Any) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = copy.deepcopy(_base).cuda()
    fully_shard(model)
    found = train(model, region)
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def graphed(region: Any) -> list[torch.Tensor]:
    model = copy.deepcopy(_base).cuda()
    x = torch.zeros(64, 256, device="cuda")
    results = []
    with torch.no_grad(), region:
        model(x)
        graph = torch.cuda.CUDAGraph()
        # A region changes no streams in a capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), cudasched.region("latency"):
            y = model(x)
        for batch in batches():
            x.copy_(batch, non_blocking=True)
            graph.replay()
            results.append(y.clone())
    torch.cuda.synchronize()
    return results


def apart() -> None:
    """A request of one thread does not wait for what another thread trains."""
    training, serving = Worker(), Worker()
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()

    def step(cycles: int) -> torch.cuda.Event:
        with cudasched.region("best_effort"):
            torch.cuda._sleep(cycles)
            x.clone()
            end = torch.cuda.Event()
            end.record()
        return end

    def request() -> float:
        with cudasched.region("latency"):
            return float((x + 1).sum())

    training.run(lambda: step(1000))
    serving.run(request)
    torch.cuda.synchronize()
    ends = [training.run(lambda: step(2_000_000_000)) for _ in range(2)]  # about a second each
    assert serving.run(request) == 2048
    assert not ends[-1].query(), "the request waited for the training"
    torch.cuda.synchronize()
    training.stop()
    serving.stop()
    print("apart")


def weights() -> None:
    """A server reads weights while they are trained: each request sees one step's, whole."""
    parcels: list[Any] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def train_() -> None:
        try:
            mine = torch.zeros(1 << 20, device="cuda")
            while not stop.is_set():
                with cudasched.region("best_effort"):
                    torch.cuda._sleep(200_000)
                    mine.add_(1)
                    parcels[:] = [cudasched.torch.handover(mine.clone())]
        except BaseException as error:
            failures.append(error)

    trainer = threading.Thread(target=train_)
    trainer.start()
    while not parcels and trainer.is_alive():
        pass
    try:
        for _ in range(300):
            with cudasched.region("latency"):
                seen = parcels[0].take()
                torch.cuda._sleep(50_000)
                low, high = float(seen.min()), float(seen.max())
            del seen
            assert low == high >= 1, (low, high)
    finally:
        stop.set()
        trainer.join()
    assert not failures, failures
    print("weights")


def checked() -> None:
    """With CUDASCHED_CHECK_STREAMS=1: what is ordered is not warned of, and what is not, with both places."""
    caught: list[str] = []
    warnings.showwarning = lambda message, *rest: caught.append(str(message))  # type: ignore[assignment]
    warnings.simplefilter("always")

    def told() -> list[str]:
        return [text for text in caught if "nothing orders them" in text]

    before = torch.ones(1 << 16, device="cuda")
    torch.cuda.synchronize()
    training, serving = Worker(), Worker()
    net = training.run(lambda: Net().cuda())
    for client_class in ("best_effort", "latency"):
        training.run(lambda c=client_class: train(net, cudasched.region(c)))
        training.run(lambda c=client_class: train(net, cudasched.region(c), outside=True))

    def step(give: bool) -> Any:
        with cudasched.region("best_effort"):
            torch.cuda._sleep(2_000_000)
            made = before * 2
            return cudasched.torch.handover(made) if give else made

    def use_what_was_made(made: Any) -> float:
        with cudasched.region("latency"):
            tensor = made.take() if isinstance(made, cudasched.torch.Handover) else made
            return float(tensor.sum())

    given = training.run(lambda: step(True))
    assert serving.run(lambda: use_what_was_made(given)) == 2 << 16
    assert not told(), told()[0]
    shared = training.run(lambda: step(False))
    serving.run(lambda: use_what_was_made(shared))
    assert told(), "an unordered use was not named"
    assert all("in step" in text and "in use_what_was_made" in text for text in told()), told()
    training.stop()
    serving.stop()
    print("checked")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["random", "bits", "apart", "weights", "checked"])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=400_000)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--without", default="", choices=["", "order", "default", "keep", "handover"])
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    if arguments.what == "random":
        random_programs(arguments)
    else:
        {"bits": bits, "apart": apart, "weights": weights, "checked": checked}[arguments.what]()
    state = cudasched.state()
    assert state.attached and not state.off_reason, state
    print("done")


if __name__ == "__main__":
    main()
