"""JAX: what XLA makes of a network's training, of attention, of images, and of arithmetic over arrays."""

# mypy: ignore-errors

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from training.record import Parts


def layers_of(key, widths):
    """Weights of a chain of layers."""
    keys = jax.random.split(key, len(widths))
    pairs = zip(keys, widths[:-1], widths[1:], strict=False)
    return [(jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)) for k, a, b in pairs]


def chain(weights, x):
    """The chain's answer."""
    for w, b in weights[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = weights[-1]
    return x @ w + b


@jax.jit
def chain_step(state, x, y):
    """A step of Adam, written out."""
    weights, first, second, count = state

    def loss(w):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(chain(w, x)), y[:, None], 1))

    value, gradient = jax.value_and_grad(loss)(weights)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradient)
    weights = jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return (weights, first, second, count + 1), value


def train(batch: int, widths: tuple[int, ...], steps: int) -> None:
    """Steps."""
    weights = layers_of(jax.random.key(1), widths)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, nothing, nothing, 0)
    x = jax.random.normal(jax.random.key(2), (batch, widths[0]))
    y = jax.random.randint(jax.random.key(3), (batch,), 0, widths[-1])
    for _ in range(steps):
        state, value = chain_step(state, x, y)
    value.block_until_ready()


@functools.partial(jax.jit, static_argnums=2)
def block(x, w, heads):
    """A transformer's block in bfloat16."""
    batch, length, width = x.shape
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5)
    q, k, v = jnp.moveaxis((y @ w["qkv"]).reshape(batch, length, 3, heads, width // heads), 2, 0)
    score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    score = jnp.where(jnp.tril(jnp.ones((length, length), bool)), score, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score.astype(jnp.float32)).astype(x.dtype), v)
    x = x + y.reshape(batch, length, width) @ w["out"]
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def transform(batch: int, length: int, width: int, layers: int) -> None:
    """Blocks in a row."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = jax.random.split(jax.random.key(4), len(shapes))
    w = {
        n: (jax.random.normal(k, s) * 0.02).astype(jnp.bfloat16) for (n, s), k in zip(shapes.items(), keys, strict=True)
    }
    x = jax.random.normal(jax.random.key(5), (batch, length, width)).astype(jnp.bfloat16)
    for _ in range(layers):
        x = block(x, w, width // 64 if width >= 64 else 1)
    x.block_until_ready()


@jax.jit
def see(images, kernels):
    """Convolutions and pooling."""
    x = images
    for kernel in kernels:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.mean((1, 2))


def look(batch: int, side: int, widths: tuple[int, ...], steps: int) -> None:
    """Images."""
    keys = jax.random.split(jax.random.key(6), len(widths))
    kernels = [jax.random.normal(k, (3, 3, a, b)) * 0.1 for k, a, b in zip(keys, widths[:-1], widths[1:], strict=False)]
    images = jax.random.normal(jax.random.key(7), (batch, side, side, widths[0]))
    for _ in range(steps):
        out = see(images, kernels)
    out.block_until_ready()


@jax.jit
def arithmetic(x):
    """Sorting, scans, spectra, quantiles, a few of them in one program."""
    ranked = jnp.sort(x, axis=-1)
    running = jnp.cumsum(x, axis=-1)
    best = lax.top_k(x, 8)[0]
    power = jnp.abs(jnp.fft.rfft(x, axis=-1)) ** 2
    spread = jnp.std(x, axis=0) + jnp.percentile(x, 90, axis=0)
    return ranked[:, ::7].sum() + running.max() + best.mean() + power.mean() + spread.sum()


def arrays(rows: int, columns: int, times: int) -> None:
    """Arithmetic."""
    x = jax.random.normal(jax.random.key(8), (rows, columns))
    for _ in range(times):
        arithmetic(x).block_until_ready()


@functools.partial(jax.jit, static_argnums=1)
def orbit(state, steps):
    """A loop that XLA keeps on the device."""

    def step(state, _):
        x, v = state
        pull = -x / (jnp.sum(x * x, -1, keepdims=True) + 0.01) ** 1.5
        v = v + 0.01 * pull
        return (x + 0.01 * v, v), None

    return lax.scan(step, state, None, length=steps)[0]


def orbits(count: int, steps: int) -> None:
    """Many bodies round one."""
    x = jax.random.normal(jax.random.key(9), (count, 3))
    orbit((x, jnp.zeros_like(x)), steps)[0].block_until_ready()


def groups(count: int, kinds: int) -> None:
    """Operations one by one, as they are tried out."""
    kind = jnp.asarray(np.random.default_rng(10).integers(0, kinds, count))
    value = jax.random.uniform(jax.random.key(11), (count,))
    sums = jax.ops.segment_sum(value, kind, kinds)
    sums = sums / jnp.maximum(jnp.bincount(kind, length=kinds), 1)
    jnp.where(value > sums[kind], value, 0).sum().block_until_ready()


def scaled(factor: float, value: int) -> int:
    """A size, scaled."""
    return max(8, int(value * factor))


def parts(tiny: bool) -> Parts:
    """Each compiled for two shapes at first, and for another now and then."""
    if tiny:
        yield "train", lambda: train(8, (16, 32, 10), 2)
        yield "transform", lambda: transform(1, 16, 64, 1)
        yield "look", lambda: look(1, 16, (3, 8, 8), 1)
        yield "arrays", lambda: arrays(8, 64, 1)
        yield "orbits", lambda: orbits(16, 4)
        yield "groups", lambda: groups(100, 7)
        return
    for turn in range(4):
        s = (1.0, 1.0, 0.45, 1.9)[turn]
        n = functools.partial(scaled, s)
        yield f"train {turn}", lambda n=n: train(n(512), (784, 1024, 1024, 256, 10), 60)
        yield f"transform {turn}", lambda n=n: transform(4, n(256), 768, 24)
        yield f"look {turn}", lambda n=n: look(n(32), 96, (3, 32, 64, 128), 20)
        yield f"arrays {turn}", lambda n=n: arrays(n(600), 2048, 8)
        yield f"orbits {turn}", lambda n=n: orbits(n(20_000), 150)
        yield f"groups {turn}", lambda n=n: groups(n(300_000), 1000)
