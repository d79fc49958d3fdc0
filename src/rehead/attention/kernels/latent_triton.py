"""Absorbed MLA for one token on a GPU: the cache of latents is split into parts that are read in parallel, once.

The method is that of FlashDecoding and FlashMLA. A program handles up to 64 heads of one sequence and one part of its
rows; a tile of rows serves as keys, and its first R columns as values. The partial results are merged by the
log-sum-exp of their scores. R and P are arbitrary; sums are in float32.

Only `latent_token`, which runs the self-check, imports this file, since it needs Triton. On a CPU, tests check the
results in Triton's interpreter and compile the kernel for GPUs. It has not run on a GPU yet, and its speed is
unknown.
"""

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

TILE_BYTES = 2**15
"""Bytes of a tile of latents: two tiles fit any GPU's shared memory with 16 queries, an A100's with 64."""
LEAST_ROWS = 256
"""Minimum number of rows of a part: below it, storing and merging a part costs more than it saves (an estimate)."""


@triton.jit(do_not_specialize=["n_row", "n_row_part"])  # they grow: compile one program for all values
@no_type_check
def _part(
    query, rows, hidden, sums, logs, scale, n_row, n_row_part, n_head,
    query_b, query_h, rows_b, rows_s, hidden_b,
    rank: tl.constexpr, rope: tl.constexpr, hides: tl.constexpr, precision: tl.constexpr,
    tile_h: tl.constexpr, tile_s: tl.constexpr, tile_r: tl.constexpr, tile_p: tl.constexpr,
):  # fmt: skip
    """Attention of some heads of one sequence over one part of its rows, and the log-sum-exp to base 2.

    `scale` includes a factor 1 / ln 2, since weights are computed as powers of 2.
    """
    batch, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * tile_h + tl.arange(0, tile_h)
    column, turned = tl.arange(0, tile_r), rank + tl.arange(0, tile_p)
    is_head = (head < n_head)[:, None]
    is_column, is_turned = (column < rank)[None], (turned < rank + rope)[None]
    query += batch * query_b + head[:, None] * query_h
    latent_query = tl.load(query + column[None], mask=is_head & is_column, other=0.0)
    if rope:
        turned_query = tl.load(query + turned[None], mask=is_head & is_turned, other=0.0)
    begin = part * n_row_part
    end = tl.minimum(begin + n_row_part, n_row)
    highest = tl.full((tile_h,), float("-inf"), tl.float32)
    total = tl.zeros((tile_h,), tl.float32)
    gathered = tl.zeros((tile_h, tile_r), tl.float32)
    for start in range(begin, end, tile_s):
        row = start + tl.arange(0, tile_s)
        seen = row < end
        if hides:
            seen = seen & (tl.load(hidden + batch * hidden_b + row, mask=seen, other=float("-inf")) == 0.0)
        at = rows + batch * rows_b + row.to(tl.int64)[:, None] * rows_s
        latent = tl.load(at + column[None], mask=seen[:, None] & is_column, other=0.0)
        scores = tl.dot(latent_query, tl.trans(latent), input_precision=precision)
        if rope:
            key = tl.load(at + turned[None], mask=seen[:, None] & is_turned, other=0.0)
            scores = tl.dot(turned_query, tl.trans(key), scores, input_precision=precision)
        scores = tl.where(seen[None], scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        zero = tl.where(higher == float("-inf"), 0.0, higher)  # while nothing is seen
        weights, shrink = tl.exp2(scores - zero[:, None]), tl.exp2(highest - zero)
        total = total * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None]
        gathered = tl.dot(weights.to(latent.dtype), latent, gathered, input_precision=precision)
        highest = higher
    total = tl.where(total == 0.0, 1.0, total)
    to = (batch * n_head + head) * tl.num_programs(2) + part
    tl.store(sums + to[:, None] * rank + column[None], gathered / total[:, None], mask=is_head & is_column)
    tl.store(logs + to, highest + tl.log2(total), mask=head < n_head)


@triton.jit(do_not_specialize=["n_part"])
@no_type_check
def _join(sums, logs, out, n_part, rank: tl.constexpr, tile_r: tl.constexpr):
    """Merge the parts of one head: their mean, weighted by the softmax denominators; 0 without visible rows."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, tile_r)
    highest, total, gathered = float("-inf"), 0.0, tl.zeros((tile_r,), tl.float32)
    for part in range(n_part):
        highest = tl.maximum(highest, tl.load(logs + head * n_part + part))
    zero = tl.where(highest == float("-inf"), 0.0, highest)
    for part in range(n_part):
        at = head * n_part + part
        weight = tl.exp2(tl.load(logs + at) - zero)
        total += weight
        gathered += weight * tl.load(sums + at * rank + column, mask=column < rank, other=0.0)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * rank + column, (gathered / total).to(out.dtype.element_ty), mask=column < rank)


def attend_latent_triton(
    query: Float[Tensor, "B H RP"],
    rows: Float[Tensor, "B S RP"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
    *,
    n_part: int | None = None,
) -> Float[Tensor, "B H R"]:
    """Compute `latent_token_reference` in float32, bfloat16 or float16; a query without visible rows returns 0.

    `hidden` is 0 for visible rows and minus infinity for hidden ones, which are not read. `n_part` defaults to enough
    parts to occupy the GPU.
    """
    (n_batch, n_head, width), n_row = query.shape, rows.shape[1]
    query, rows = (t if t.stride(2) == 1 else t.contiguous() for t in (query, rows))
    mask = rows if hidden is None else hidden.contiguous()  # not read if nothing is hidden
    tile = tiles(n_head, width, rank, query.dtype)
    n_program = triton.cdiv(n_head, tile["tile_h"])
    if n_part is None:
        wanted = triton.cdiv(2 * _processors(query), n_batch * n_program)
        n_part = max(1, min(wanted, n_row // LEAST_ROWS))
    n_row_part = tile["tile_s"] * triton.cdiv(triton.cdiv(n_row, n_part), tile["tile_s"])
    sums = query.new_empty((n_batch, n_head, n_part, rank), dtype=torch.float32)
    logs = query.new_empty((n_batch, n_head, n_part), dtype=torch.float32)
    out = query.new_empty((n_batch, n_head, rank))
    with torch.cuda.device_of(query):
        _part[n_batch, n_program, n_part](
            query, rows, mask, sums, logs, scale / math.log(2), n_row, n_row_part, n_head,
            query.stride(0), query.stride(1), rows.stride(0), rows.stride(1), mask.stride(0),
            rank=rank, rope=width - rank, hides=hidden is not None, **tile,
        )  # fmt: skip
        _join[n_batch * n_head,](sums, logs, out, n_part, rank=rank, tile_r=tile["tile_r"])
    return out


def tiles(n_head: int, width: int, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes of a program: powers of 2 of at least 16, as a GPU's matrix products require."""
    tile_r = max(16, triton.next_power_of_2(rank))
    exact = dtype == torch.float32  # multiply without rounding to tf32; slower
    small = exact or n_head <= 32
    return {
        "precision": "ieee" if exact else "tf32",
        "tile_h": 16 if small else 64,
        "tile_s": min(64, max(16, TILE_BYTES // (tile_r * dtype.itemsize))),
        "tile_r": tile_r,
        "tile_p": max(16, triton.next_power_of_2(width - rank)),
        "num_warps": 4 if small else 8,
        "num_stages": 2,
    }


def _processors(tensor: Tensor) -> int:
    """Number of multiprocessors of the tensor's GPU; 16 on a CPU, in the interpreter."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 16
