"""Regions beside the real PyTorch, built for the host alone: what is loaded, compiled functions, what is said."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from support import PATIENCE_S

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_of_ours_imports_pytorch() -> None:
    run(
        "import sys, cudasched, cudasched.torch\n"
        "with cudasched.region('latency'): pass\n"
        "assert 'torch' not in sys.modules\n"
    )


@pytest.mark.skipif(find_spec("torch") is not None and "+cpu" not in version("torch"), reason="it may have CUDA")
@pytest.mark.parametrize("first", ["torch, cudasched", "cudasched, torch"])
def test_without_cuda_regions_say_so_once_whichever_comes_first(first: str) -> None:
    run(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        f"    import {first}\n"
        "    for _ in range(3):\n"
        "        with cudasched.region('latency'), torch.no_grad(): assert float(torch.ones(3).sum()) == 3\n"
        "said = [w for w in caught if 'regions do nothing here' in str(w.message)]\n"
        "assert len(said) == 1, [str(w.message) for w in caught]\n"
        "import cudasched.torch\n"
        "x = torch.ones(3)\n"
        "assert cudasched.torch.handover([x]).take()[0] is x\n"
    )


def test_gradients_that_python_has_not_seen_are_among_the_tensors_alive() -> None:
    run(
        "import torch\n"
        "from cudasched.torch import _adapter\n"
        "class OnTheGpu(torch.Tensor):\n"
        "    is_cuda, get_device = True, lambda self: 0\n"
        "weights = torch.ones(3).as_subclass(OnTheGpu).requires_grad_()\n"
        "(weights * 2).sum().backward()\n"
        "found = list(_adapter._tensors(torch, 0))\n"
        "assert any(each is weights.grad for each in found), found\n"
    )


COMPILED = """
import warnings
warnings.simplefilter("ignore")
import cudasched, torch

outer = cudasched.region("latency")


def inside(x):
    y = x + 1
    with cudasched.region("latency"):
        z = y * 2
    return z - 1


@cudasched.region("best_effort")
def decorated(x):
    return x * 3


def calls(x):
    return decorated(x) + 1


for function, expected in ((inside, 3), (calls, 4)):
    torch._dynamo.reset()
    assert float(torch.compile(function, backend="eager")(torch.ones(()))) == expected
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(()))
    except Exception as error:
        assert "enter it around the compiled function" in str(error), error
    else:
        raise SystemExit("no error")

torch._dynamo.reset()
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(lambda x: (x + 1) * 2, backend=backend, fullgraph=True)
with outer:
    assert float(compiled(torch.ones(()))) == 4
assert len(graphs) == 1
"""


def test_compiled_functions_in_regions_and_regions_in_compiled_functions() -> None:
    run(COMPILED)
