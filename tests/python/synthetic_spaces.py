"""Synthetic recordings for tests of the tuner: times by a model, not of any GPU. No figure is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cudasched.tune.measurement import Measurement
from cudasched.tune.recording import Recording
from cudasched.tune.space import Gpu, Problem, Space, read
from support import ROOT

KERNELS = ROOT / "csrc" / "kernels"
GPU = Gpu("synthetic GPU", "9.0", 132, 60 << 20)
SMALL = """
kernel = "scale"
source = "scale.cu"
work = "8 * n"
constraints = ["threads <= 512", "VECTOR * threads <= n"]
[shape]
n = 1048576
[parameters]
THREADS = [32, 64, 128, 256, 512, 1024]
VECTOR = [1, 2, 4]
UNROLL = [1, 2, 4, 8]
STREAM = [0, 1]
[launch]
block = "THREADS"
grid = "ceil_div(n, THREADS * VECTOR * UNROLL)"
[[arguments]]
name = "y"
role = "output"
size = "n"
[[arguments]]
name = "x"
role = "input"
size = "n"
"""


def small(path: Path = Path("small.toml"), **shape: int) -> Problem:
    return Space(SMALL, path).problem(GPU, shape)


def of_kernel(name: str, shape: Mapping[str, int] | None = None) -> Problem:
    return read(KERNELS / f"{name}.toml").problem(GPU, shape)


def recording(problem: Problem, seed: int = 0, samples: int = 7, noise: float = 0.01) -> Recording:
    """A rugged landscape: occupancy, the tail of the grid, and effects of parameters alone and in pairs.

    The effects are of the seed and the kernel alone, so that shapes of one kernel resemble one another.
    """
    random = np.random.default_rng([seed, *problem.space.kernel.encode()])
    parameters = problem.space.parameters
    names = [name for name in parameters if len(parameters[name]) > 1]
    single = {name: np.sort(random.gamma(1.0, 0.15, len(parameters[name]))) for name in names}
    for values in single.values():
        turn = int(random.integers(len(values)))
        values[:] = values[np.abs(np.arange(len(values)) - turn).argsort().argsort()]
    pairs = {
        (a, b): random.gamma(0.5, 0.08, (len(parameters[a]), len(parameters[b])))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    ideal_us = max(5.0, problem.work / 1e6)
    noisy = np.random.default_rng([seed, 1, *problem.key().encode()])
    made = []
    for configuration in problem.configurations:
        launch = problem.launch(configuration)
        place = {name: parameters[name].index(configuration[name]) for name in names}
        slow = sum(single[name][place[name]] for name in names)
        slow += sum(values[place[a], place[b]] for (a, b), values in pairs.items())
        full = problem.occupancy(launch, 32)
        waves = launch.blocks * launch.threads / (GPU.sms * 2048 * max(full, 0.03))
        tail = math.ceil(waves) / waves if waves > 0.2 else 3.0
        time = ideal_us * math.exp(slow) * (1 + 0.3 * max(0.0, 0.4 - full)) * (1 + 0.1 * (min(tail, 4.0) - 1))
        crowded = place[names[0]] + place[names[-1]] == 0 and place[names[1]] == 1
        measured = time * np.exp(np.abs(noisy.normal(0, noise, samples)))
        made.append(
            Measurement("does_not_fit", message="synthetic", compile_s=0.4, run_s=0.001)
            if crowded
            else Measurement(
                "ok",
                samples_us=tuple(float(one) for one in measured),
                registers=32,
                occupancy=full,
                compile_s=float(noisy.uniform(0.3, 0.8)),
                run_s=0.01 + float(measured.sum()) * 1e-6,
            )
        )
    best = sorted((one.time_us or math.inf, i) for i, one in enumerate(made))[:20]
    again = {i: tuple(float(made[i].samples_us[0]) for _ in range(3)) for _, i in best}
    return Recording(problem, tuple(made), again, "synthetic", {"origin": "synthetic"})
