"""What the trees are compared with: history by key, nearest neighbour, linear roofline, a small neural network.

Each is fitted on launches and answers the duration in ns of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from training.data import Codes, Floats, Launches

Baseline = Callable[[Launches, Launches], Floats]


def medians(codes: Codes, logs: Floats, count: int) -> Floats:
    """Median a code; NaN where it has none."""
    order = np.lexsort((logs, codes))
    sorted_codes, sorted_logs = codes[order], logs[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_codes[1:] != sorted_codes[:-1]]))
    ends = np.append(starts[1:], len(order))
    found = np.full(count, np.nan)
    middle = (starts + ends - 1) // 2
    found[sorted_codes[starts]] = (sorted_logs[middle] + sorted_logs[(starts + ends) // 2]) / 2
    return found


def history(train: Launches, test: Launches) -> Floats:
    """The median of the same kernel with the same grid, block and shared memory; else of the kernel; else of all."""
    logs = np.log(train.duration_ns)
    by_key = medians(train.geometry_key, logs, int(max(train.geometry_key.max(), test.geometry_key.max())) + 1)
    by_kernel = medians(train.kernel, logs, int(max(train.kernel.max(), test.kernel.max())) + 1)
    answer = by_key[test.geometry_key]
    answer = np.where(np.isnan(answer), by_kernel[test.kernel], answer)
    return np.exp(np.where(np.isnan(answer), np.median(logs), answer))


def _space(launches: Launches) -> Floats:
    return np.log2(1 + launches.launch_space)


def nearest(train: Launches, test: Launches) -> Floats:
    """The launch with the most similar geometry (logarithms), of the same kernel where it was seen."""
    from scipy.spatial import cKDTree

    logs = np.log(train.duration_ns)
    answer = np.full(len(test), np.nan)
    known, asked = _space(train), _space(test)
    order = np.argsort(train.kernel, kind="stable")
    kernels, starts = np.unique(train.kernel[order], return_index=True)
    members = dict(zip(kernels.tolist(), np.split(order, starts[1:]), strict=True))
    asked_order = np.argsort(test.kernel, kind="stable")
    asked_kernels, asked_starts = np.unique(test.kernel[asked_order], return_index=True)
    for kernel, wanted in zip(asked_kernels.tolist(), np.split(asked_order, asked_starts[1:]), strict=True):
        if kernel in members:
            mine = members[kernel]
            answer[wanted] = logs[mine[cKDTree(known[mine]).query(asked[wanted])[1]]]
    rest = np.isnan(answer)
    if rest.any():
        # One of each place is enough, and a twentieth of the time.
        distinct = np.unique(known, axis=0, return_index=True)[1]
        answer[rest] = logs[distinct[cKDTree(known[distinct]).query(asked[rest])[1]]]
    return np.exp(answer)


def roofline(train: Launches, test: Launches) -> Floats:
    """Least squares of the logarithm over logarithms of threads, blocks and block size: a line in each kernel's work.

    Where the kernel was seen often enough, with a line of its own.
    """

    def design(launches: Launches) -> Floats:
        grid = np.prod(launches.launch_space[:, :3], 1)
        block = np.prod(launches.launch_space[:, 3:6], 1)
        return np.stack([np.ones(len(launches)), np.log(np.maximum(1, grid)), np.log(np.maximum(1, block))], 1)

    x, y, asked = design(train), np.log(train.duration_ns), design(test)
    # A kernel takes no less than the device's shortest; the line is fitted to what is above that.
    answer = asked @ np.linalg.lstsq(x, y, rcond=None)[0]
    order = np.argsort(train.kernel, kind="stable")
    kernels, starts = np.unique(train.kernel[order], return_index=True)
    for kernel, mine in zip(kernels.tolist(), np.split(order, starts[1:]), strict=True):
        wanted = test.kernel == kernel
        if len(mine) >= 8 and wanted.any():
            ridge = x[mine].T @ x[mine] + 1e-3 * np.eye(x.shape[1])
            answer[wanted] = asked[wanted] @ np.linalg.solve(ridge, x[mine].T @ y[mine])
    return np.exp(np.clip(answer, y.min(), y.max()))


def mlp(train: Launches, test: Launches, seed: int = 1) -> Floats:
    """The network of the seed design: 8-16-8-4-1, ReLU, on eight values of the launch's geometry, by Adam."""
    x, y, asked = _space(train), np.log(train.duration_ns), _space(test)
    mean, scale = x.mean(0), x.std(0) + 1e-9
    x, asked = (x - mean) / scale, (asked - mean) / scale
    centre, spread = y.mean(), y.std() + 1e-9
    y = (y - centre) / spread
    random = np.random.default_rng(seed)
    steps = min(max(300, 40 * len(x) // 1024), 4000)
    sizes = (8, 16, 8, 4, 1)
    weights: list[NDArray[np.float64]] = []
    for a, b in itertools.pairwise(sizes):
        weights += [random.normal(0, np.sqrt(2 / a), (a, b)), np.zeros(b)]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]

    def forward(batch: Floats) -> list[Floats]:
        values = [batch]
        for layer in range(4):
            value = values[-1] @ weights[2 * layer] + weights[2 * layer + 1]
            values.append(np.maximum(value, 0) if layer < 3 else value)
        return values

    for step in range(1, steps + 1):
        chosen = random.integers(len(x), size=min(1024, len(x)))
        values = forward(x[chosen])
        slope = 2 * (values[-1] - y[chosen, None]) / len(chosen)
        rate = 3e-3 * 0.5 * (1 + np.cos(np.pi * step / steps))
        for layer in reversed(range(4)):
            gradients = values[layer].T @ slope, slope.sum(0)
            if layer:
                slope = (slope @ weights[2 * layer].T) * (values[layer] > 0)
            for index, gradient in zip((2 * layer, 2 * layer + 1), gradients, strict=True):
                first, second = moments[index]
                first += 0.1 * (gradient - first)
                second += 0.001 * (gradient * gradient - second)
                unbiased = first / (1 - 0.9**step), second / (1 - 0.999**step)
                weights[index] -= rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    return np.exp(np.clip(forward(asked)[-1][:, 0] * spread + centre, 0, 30))


BASELINES: dict[str, Baseline] = {"history": history, "nearest": nearest, "roofline": roofline, "mlp": mlp}
