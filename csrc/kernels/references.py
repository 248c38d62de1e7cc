"""What the kernels of this directory compute, in float64: the spaces beside them name these functions.

Each is given the inputs by name, as float64 arrays of one dimension, and the shape; it returns the outputs by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def layernorm(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Each row less its mean, over its standard deviation, scaled and shifted."""
    x = inputs["x"].reshape(int(shape["rows"]), int(shape["cols"]))
    x = x - x.mean(axis=1, keepdims=True)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    return {"y": x * inputs["weight"] + inputs["bias"]}


def rmsnorm(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Each row over the root of its mean square, scaled."""
    x = inputs["x"].reshape(int(shape["rows"]), int(shape["cols"]))
    return {"y": x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * inputs["weight"]}


def softmax(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """The exponentials of each row over their sum."""
    x = inputs["x"].reshape(int(shape["rows"]), int(shape["cols"]))
    y = np.exp(x - x.max(axis=1, keepdims=True))
    return {"y": y / y.sum(axis=1, keepdims=True)}


def gemm(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """The product of two matrices."""
    m, n, k = (int(shape[name]) for name in "mnk")
    return {"c": inputs["a"].reshape(m, k) @ inputs["b"].reshape(k, n)}


def gemm_tf32(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """The product of two matrices of fp32, whose elements the kernel rounds to tf32 first."""

    def rounded(values: Any) -> Any:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x1000) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)

    return gemm({name: rounded(inputs[name]) for name in "ab"}, shape)


def layernorm_backward(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of `layernorm`: of x, and of weight and bias, summed over the rows."""
    return _norm_backward(inputs, shape, centred=True)


def rmsnorm_backward(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of each row over the root of its mean square, scaled."""
    gradients = _norm_backward(inputs, shape, centred=False)
    return {name: gradients[name] for name in ("dx", "dweight")}


def _norm_backward(inputs: Mapping[str, Any], shape: Mapping[str, Any], *, centred: bool) -> dict[str, Any]:
    rows, cols = int(shape["rows"]), int(shape["cols"])
    x, dy = inputs["x"].reshape(rows, cols), inputs["dy"].reshape(rows, cols)
    normal = x - x.mean(axis=1, keepdims=True) if centred else x
    scale = 1 / np.sqrt((normal * normal).mean(axis=1, keepdims=True) + 1e-5)
    normal = normal * scale
    g = dy * inputs["weight"]
    dx = g - normal * (g * normal).mean(axis=1, keepdims=True)
    if centred:
        dx -= g.mean(axis=1, keepdims=True)
    return {"dx": dx * scale, "dweight": (dy * normal).sum(axis=0), "dbias": dy.sum(axis=0)}


_ROWS = 1024  # of scores at a time


def flash_attention(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Attention of each batch and head, and the logarithm of the sum of each row's exponentials."""
    batches, heads, queries, keys, head, group = (
        int(shape[name]) for name in ("batches", "heads", "queries", "keys", "head", "group")
    )
    q = inputs["q"].reshape(batches, heads, queries, head)
    k, v = (inputs[name].reshape(batches, heads // group, keys, head) for name in "kv")
    out, lse = np.empty_like(q), np.empty((batches, heads, queries))
    for batch, place in np.ndindex(batches, heads):
        for first in range(0, queries, _ROWS):
            rows = slice(first, min(first + _ROWS, queries))
            scores = q[batch, place, rows] @ k[batch, place // group].T / np.sqrt(head)
            if shape["causal"]:
                scores[np.arange(first, rows.stop)[:, None] < np.arange(keys)] = -np.inf
            largest = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            out[batch, place, rows] = weights / total @ v[batch, place // group]
            lse[batch, place, rows] = (largest + np.log(total))[:, 0]
    return {"out": out, "lse": lse}


def conv2d(inputs: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """The convolution of images with their channels last, padded as little as gives the size of the output."""
    images, height, width, channels, filters, rows, columns, out_height, out_width, stride, dilation = (
        int(shape[name])
        for name in (
            *("images", "height", "width", "channels", "filters", "rows", "columns"),
            *("out_height", "out_width", "stride", "dilation"),
        )
    )
    x = inputs["x"].reshape(images, height, width, channels)
    w = inputs["w"].reshape(filters, rows, columns, channels)
    pad_y = ((out_height - 1) * stride + dilation * (rows - 1) + 2 - height) // 2
    pad_x = ((out_width - 1) * stride + dilation * (columns - 1) + 2 - width) // 2
    padded = np.pad(x, ((0, 0), (pad_y, pad_y), (pad_x, pad_x), (0, 0)))
    y = np.zeros((images, out_height, out_width, filters))
    for row, column in np.ndindex(rows, columns):
        down = slice(row * dilation, row * dilation + (out_height - 1) * stride + 1, stride)
        across = slice(column * dilation, column * dilation + (out_width - 1) * stride + 1, stride)
        y += padded[:, down, across] @ w[:, row, column].T
    return {"y": y + inputs["bias"]}
