"""One process of the regressions benchmark: kernels of many kinds, one of them with 5% more work if so told.

    python -m benchmarks.regressions.program RECORDING [VICTIM]

With PyTorch on a GPU; with --simulate on the simulated driver, whose kernels last what a random process makes of them:
all of a process's are longer or shorter together, and each by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections.abc import Callable
from pathlib import Path

import cudasched  # before torch

from benchmarks.graphs.driver import Graphs

STEPS, WARM_UP = 150, 20
ROWS, COLUMNS = 16_000, 1024
SMALL_ROWS = 6_000
#: What can be given 5% more rows. The last one takes 10 to 20 us.
VICTIMS = ("sin", "softmax", "layer_norm")
#: Simulated kernels: us, and how much they vary from process to process, as a share.
SIMULATED = {name: (100 + 40 * place, 0.002 + 0.0005 * place) for place, name in enumerate((*VICTIMS, *"abcdefghijk"))}
TOGETHER, SESSION = 0.003, 0.004


def more(rows: int, name: str, victim: str) -> int:
    """The rows of a kernel."""
    return rows + rows // 20 if name == victim else rows


def torch_step(victim: str) -> Callable[[], None]:
    """A step of 15 kernels of PyTorch's."""
    import torch

    torch.manual_seed(1)

    def filled(rows: int, columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=dtype)

    x = filled(ROWS)
    for_sin, for_softmax = (filled(more(ROWS, name, victim)) for name in VICTIMS[:2])
    for_norm = filled(more(SMALL_ROWS, "layer_norm", victim))
    a, b = (filled(4096, 4096, torch.bfloat16) for _ in range(2))
    c, d = (filled(2048, 2048) for _ in range(2))
    out, sines = torch.empty_like(x), torch.empty_like(for_sin)
    table = torch.randint(ROWS, (ROWS,), device="cuda")

    def step() -> None:
        torch.sin(for_sin, out=sines)
        torch.softmax(for_softmax, -1)
        torch.nn.functional.layer_norm(for_norm, (COLUMNS,))
        a @ b
        c @ d
        torch.add(x, 1.0, out=out)
        torch.mul(x, x, out=out)
        torch.exp(x, out=out)
        torch.tanh(x, out=out)
        torch.sigmoid(x, out=out)
        x.sum(-1)
        x.amax(0)
        x.cumsum(-1)
        x.index_select(0, table)
        x.t().contiguous()

    return step


def run_torch(victim: str) -> None:
    """Steps on the GPU."""
    import torch

    with torch.no_grad():
        step = torch_step(victim)
        for number in range(WARM_UP + STEPS):
            step()
            if number % 10 == 9:
                torch.cuda.synchronize()
        torch.cuda.synchronize()


def simulated_step(victim: str, session: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step on the simulated driver, and how to wait for it."""
    call = Graphs().call
    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    image = "cudasched-sim 1\n" + "".join(f"kernel {name} params=4 block_us=param:0\n" for name in SIMULATED)
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image.encode()))
    process, of_session = random.Random(), random.Random(session)
    together = 1 + process.gauss(0, TOGETHER)
    launches = []
    for name, (us, varies) in SIMULATED.items():
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        factor = together * (1 + process.gauss(0, varies)) * (1 + of_session.gauss(0, SESSION))
        launches.append((function, ctypes.c_uint32(round(us * factor * (1.05 if name == victim else 1.0)))))

    def step() -> None:
        for function, duration in launches:
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
            call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, arguments, None)

    return step, lambda: call("cuCtxSynchronize")


def main() -> None:
    """Records one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recording", type=Path)
    parser.add_argument("victim", nargs="?", default="", choices=["", *VICTIMS])
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--session", type=int, default=0)
    options = parser.parse_args()
    if options.simulate:
        step, wait = simulated_step(options.victim, options.session)
        with cudasched.collect.recording(options.recording, timing="events"):
            for _ in range(10):
                step()
                wait()
    else:
        import torch

        torch.cuda.init()
        with cudasched.collect.recording(options.recording):
            run_torch(options.victim)


if __name__ == "__main__":
    sys.exit(main())
