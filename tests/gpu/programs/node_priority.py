"""Graphs instantiated in regions: their results, their updates, flags and priorities as the driver has them."""

import ctypes

import cudasched
import torch
from torch import Tensor, nn

ATTRIBUTE_PRIORITY = 8
THREAD_LOCAL = 1
UPDATE_FAILURE = 910
HIGHEST = -5


class UpdateResult(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p)]


class AttributeValue(ctypes.Structure):
    _fields_ = [("priority", ctypes.c_int), ("rest", ctypes.c_char * 60)]


def graphs() -> int:
    return cudasched.state().prioritised_graphs


# ---- by the driver's own functions, with and without what stands in front of it

x, y = torch.ones(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
torch.mul(x, 2, out=y)
side = torch.cuda.Stream()
torch.cuda.synchronize()
hooked = ctypes.CDLL("libcuda.so.1")
driver = ctypes.CDLL(cudasched.state().driver_path)


def ok(status: int) -> None:
    assert status == 0, status


def capture(factor: float) -> ctypes.c_void_p:
    """A graph of three kernels: y = (x * factor) + 1 + 1."""
    graph = ctypes.c_void_p()
    with torch.cuda.stream(side):
        ok(hooked.cuStreamBeginCapture_v2(ctypes.c_void_p(side.cuda_stream), THREAD_LOCAL))
        torch.mul(x, factor, out=y)
        y.add_(1)
        y.add_(1)
        ok(hooked.cuStreamEndCapture(ctypes.c_void_p(side.cuda_stream), ctypes.byref(graph)))
    return graph


def nodes(graph: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    ok(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)))
    found = (ctypes.c_void_p * count.value)()
    ok(driver.cuGraphGetNodes(graph, found, ctypes.byref(count)))
    return [ctypes.c_void_p(node) for node in found]


def priorities(graph: ctypes.c_void_p) -> list[int]:
    values = []
    for node in nodes(graph):
        value = AttributeValue()
        ok(driver.cuGraphKernelNodeGetAttribute(node, ATTRIBUTE_PRIORITY, ctypes.byref(value)))
        values.append(value.priority)
    return values


def set_priorities(graph: ctypes.c_void_p, priority: int) -> None:
    for node in nodes(graph):
        value = AttributeValue(priority=priority)
        ok(driver.cuGraphKernelNodeSetAttribute(node, ATTRIBUTE_PRIORITY, ctypes.byref(value)))


def instantiate(graph: ctypes.c_void_p) -> ctypes.c_void_p:
    executable = ctypes.c_void_p()
    ok(hooked.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    return executable


def flags(library: ctypes.CDLL, executable: ctypes.c_void_p) -> int:
    value = ctypes.c_uint64()
    ok(library.cuGraphExecGetFlags(executable, ctypes.byref(value)))
    return value.value


def update(library: ctypes.CDLL, executable: ctypes.c_void_p, graph: ctypes.c_void_p) -> int:
    return int(library.cuGraphExecUpdate_v2(executable, graph, ctypes.byref(UpdateResult())))


def replayed(executable: ctypes.c_void_p) -> float:
    y.zero_()
    torch.cuda.synchronize()
    ok(hooked.cuGraphLaunch(executable, ctypes.c_void_p(side.cuda_stream)))
    side.synchronize()
    assert bool((y == y[0]).all())
    return float(y[0])


three, five = capture(3), capture(5)
assert priorities(three) == [0, 0, 0], priorities(three)
with cudasched.region("latency"):
    executable = instantiate(three)
assert graphs() == 1, cudasched.state()
assert flags(hooked, executable) == 0
assert priorities(three) == [0, 0, 0], priorities(three)
assert replayed(executable) == 5
# The driver refuses other priorities than those that it was instantiated with: which shows them.
assert update(driver, executable, five) == UPDATE_FAILURE
set_priorities(five, HIGHEST)
assert update(driver, executable, five) == 0
set_priorities(five, 0)
assert replayed(executable) == 7
# The hook gives the user's graph the priorities for the length of the update.
assert update(hooked, executable, three) == 0
assert priorities(three) == [0, 0, 0]
assert replayed(executable) == 5

with cudasched.region("best_effort"):
    lowest = instantiate(five)
assert update(driver, lowest, five) == 0
assert replayed(lowest) == 7

parent, child = ctypes.c_void_p(), ctypes.c_void_p()
ok(hooked.cuGraphCreate(ctypes.byref(parent), 0))
ok(hooked.cuGraphAddChildGraphNode(ctypes.byref(child), parent, None, ctypes.c_size_t(0), three))
with cudasched.region("latency"):
    nested = instantiate(parent)
assert update(driver, nested, parent) == UPDATE_FAILURE
assert replayed(nested) == 5
ok(hooked.cuGraphExecChildGraphNodeSetParams(nested, child, five))
assert replayed(nested) == 7
assert update(hooked, nested, parent) == 0
assert replayed(nested) == 5

plain = instantiate(three)
assert flags(driver, plain) == 0
for each in (executable, lowest, nested, plain):
    ok(hooked.cuGraphExecDestroy(each))


# ---- as PyTorch captures them

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).cuda()
sample = torch.randn(32, 256, device="cuda")


def captured() -> list[Tensor]:
    """Two graphs in one private pool, replayed in turns; and a model whose forward and backward passes are graphs."""
    pool = torch.cuda.graph_pool_handle()
    with torch.no_grad():
        for _ in range(3):
            model(sample)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            hidden = model(sample)
        with torch.cuda.graph(second, pool=pool):
            result = model(hidden) * 2
        for _ in range(10):
            first.replay()
            second.replay()
    graphed = torch.cuda.make_graphed_callables(model, (sample.clone().requires_grad_(),))
    model.zero_grad()
    inputs = sample.clone().requires_grad_()
    for _ in range(3):
        graphed(inputs).square().mean().backward()
    torch.cuda.synchronize()
    del model.forward  # which make_graphed_callables replaced
    return [hidden.clone(), result.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


expected = captured()
before = graphs()
for client_class in ("latency", "best_effort"):
    with cudasched.region(client_class):
        found = captured()
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs), client_class
# PyTorch asks for node priorities for every graph, which is no choice: two graphs, and a forward and a backward pass.
state = cudasched.state()
assert state.prioritised_graphs == before + 2 * 4, (before, state)
assert state.unprioritised_graphs == 0 and not state.off_reason, state
print("done")
