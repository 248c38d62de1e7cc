# mypy: ignore-errors
"""Layer normalisation and flash attention in Triton, tuned by cudasched's search. `triton_twins` calls them.

The import needs Triton. mypy's messages on a kernel's code are no help: that is no Python.
"""

import triton
import triton.language as tl

from cudasched import tune

LAYER_NORM_SPACE = {
    "ROWS": [1, 2, 4, 8],  # of a program
    "CHUNK": [256, 512, 1024, 2048, 4096, 8192, 16384],  # columns at a time; a row that fits is read once
    "num_warps": [1, 2, 4, 8, 16],
}
FLASH_ATTENTION_SPACE = {
    "TILE_Q": [32, 64, 128],
    "TILE_K": [32, 64, 128],
    "num_warps": [2, 4, 8],
    "num_stages": [1, 2, 3, 4],
}


def _fits_registers(one):
    """4 to 64 values a thread."""
    return 4 <= one["ROWS"] * one["CHUNK"] // (32 * one["num_warps"]) <= 64


def _fits_tile(one):
    """A warp has 16 to 32 rows, the height of one or two fragments."""
    return 16 <= one["TILE_Q"] // one["num_warps"] <= 32


@tune.triton(space=LAYER_NORM_SPACE, key=["COLS"], constraint=_fits_registers)
@triton.jit
def layer_norm(y, x, weight, bias, rows, epsilon, COLS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):  # noqa: N803
    """``ROWS`` rows of layer normalisation."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = (index < rows)[:, None]
    columns = tl.arange(0, CHUNK)
    if COLS <= CHUNK:
        inside = (columns < COLS)[None, :]
        places = index[:, None] * COLS + columns[None, :]
        values = tl.load(x + places, mask=exists & inside, other=0.0).to(tl.float32)
        mean = tl.sum(values, 1) / COLS
        centred = tl.where(inside, values - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / COLS + epsilon)
        factors = tl.load(weight + columns, mask=columns < COLS, other=0.0).to(tl.float32)
        shifts = tl.load(bias + columns, mask=columns < COLS, other=0.0).to(tl.float32)
        made = centred * scale[:, None] * factors[None, :] + shifts[None, :]
        tl.store(y + places, made.to(y.dtype.element_ty), mask=exists & inside)
    else:
        # Both sums in one pass, of values less the row's first one: a large mean does not cancel the variance.
        first = tl.load(x + index * COLS, mask=index < rows, other=0.0).to(tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for begin in range(0, COLS, CHUNK):
            inside = (begin + columns < COLS)[None, :]
            places = index[:, None] * COLS + begin + columns[None, :]
            values = tl.load(x + places, mask=exists & inside, other=0.0).to(tl.float32)
            shifted = tl.where(inside, values - first[:, None], 0.0)
            total += tl.sum(shifted, 1)
            squares += tl.sum(shifted * shifted, 1)
        mean = total / COLS
        scale = tl.rsqrt(tl.maximum(squares / COLS - mean * mean, 0.0) + epsilon)
        mean += first
        for begin in range(0, COLS, CHUNK):
            column = begin + columns
            inside = column < COLS
            places = index[:, None] * COLS + column[None, :]
            values = tl.load(x + places, mask=exists & inside[None, :], other=0.0).to(tl.float32)
            factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            shifts = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            made = (values - mean[:, None]) * scale[:, None] * factors[None, :] + shifts[None, :]
            tl.store(y + places, made.to(y.dtype.element_ty), mask=exists & inside[None, :])


@triton.jit
def _tiles(
    sums,
    maxima,
    totals,
    queries,
    k,
    v,
    k_row,
    v_row,
    rows,
    begin,
    end,
    keys,
    scale2,
    HEAD: tl.constexpr,  # noqa: N803
    CAUSAL: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
    TILE_K: tl.constexpr,  # noqa: N803
):
    """Adds the keys from `begin` to `end` to the rows' present sums."""
    columns = tl.arange(0, HEAD)
    for first in range(begin, end, TILE_K):
        key = first + tl.arange(0, TILE_K)
        k_places = k + key[:, None].to(tl.int64) * k_row + columns[None, :]
        v_places = v + key[:, None].to(tl.int64) * v_row + columns[None, :]
        if MASKED:
            tile_k = tl.load(k_places, mask=key[:, None] < keys, other=0.0)
            tile_v = tl.load(v_places, mask=key[:, None] < keys, other=0.0)
        else:
            tile_k = tl.load(k_places)
            tile_v = tl.load(v_places)
        scores = tl.dot(queries, tl.trans(tile_k)) * scale2
        if MASKED:
            seen = key[None, :] < keys
            if CAUSAL:
                seen = seen & (key[None, :] <= rows[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(maxima, tl.max(scores, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # the difference of two infinities would be NaN
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(maxima - shift)
        totals = totals * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(tile_v.dtype), tile_v, sums * fade[:, None])
        maxima = largest
    return sums, maxima, totals


@tune.triton(space=FLASH_ATTENTION_SPACE, key=["queries", "keys", "HEAD", "CAUSAL"], constraint=_fits_tile)
@triton.jit
def flash_attention(
    out,
    lse,
    q,
    k,
    v,
    queries,
    keys,
    heads,
    group,
    scale,
    out_batch,
    out_head,
    out_row,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    HEAD: tl.constexpr,  # noqa: N803
    CAUSAL: tl.constexpr,  # noqa: N803
    TILE_Q: tl.constexpr,  # noqa: N803
    TILE_K: tl.constexpr,  # noqa: N803
):
    """``TILE_Q`` rows of attention for one batch and head; the arguments are those of flash_attention.cu."""
    place = tl.program_id(0)
    if CAUSAL:  # those that see most keys begin first
        place = tl.num_programs(0) - 1 - place
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    row0 = place * TILE_Q
    rows = row0 + tl.arange(0, TILE_Q)
    columns = tl.arange(0, HEAD)
    exists = (rows < queries)[:, None]
    q += batch * q_batch + head.to(tl.int64) * q_head
    k += batch * k_batch + (head // group).to(tl.int64) * k_head
    v += batch * v_batch + (head // group).to(tl.int64) * v_head
    out += batch * out_batch + head.to(tl.int64) * out_head
    loaded = tl.load(q + rows[:, None].to(tl.int64) * q_row + columns[None, :], mask=exists, other=0.0)

    maxima = tl.full((TILE_Q,), float("-inf"), tl.float32)
    totals = tl.zeros((TILE_Q,), tl.float32)
    sums = tl.zeros((TILE_Q, HEAD), tl.float32)
    scale2 = scale * 1.4426950408889634
    end = keys
    whole = keys // TILE_K * TILE_K  # keys up to here are seen by all rows
    if CAUSAL:
        end = tl.minimum(keys, row0 + TILE_Q)
        whole = tl.minimum(row0 + 1, keys) // TILE_K * TILE_K
    sums, maxima, totals = _tiles(
        sums, maxima, totals, loaded, k, v, k_row, v_row, rows, 0, whole, keys, scale2, HEAD, CAUSAL, False, TILE_K
    )
    sums, maxima, totals = _tiles(
        sums, maxima, totals, loaded, k, v, k_row, v_row, rows, whole, end, keys, scale2, HEAD, CAUSAL, True, TILE_K
    )
    none = totals == 0.0
    made = sums / tl.where(none, 1.0, totals)[:, None]
    places = out + rows[:, None].to(tl.int64) * out_row + columns[None, :]
    tl.store(places, made.to(out.dtype.element_ty), mask=exists)
    found = (maxima + tl.log2(tl.where(none, 1.0, totals))) * 0.6931471805599453
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + rows, found, mask=rows < queries)
