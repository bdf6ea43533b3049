"""The selection at the transition: the heaviest tokens of each KV head.

Two kernels for all heads of all layers, whatever their budgets. `image_kernel` turns
what tokens (or whole blocks) compete by into integers of the same order,
`select_kernel` finds each head's threshold digit by digit and compacts what is above
it. Counts alone say how many tokens a head keeps, so nothing here waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Kept
from vllm_h2o.attention.ops.triton.layers import SIZES, LayerBatch, of_layer
from vllm_h2o.attention.ops.triton.slots import sizes_of, slot_of
from vllm_h2o.policy.config import H2OConfig

_IMAGE_TILE = 1024
"""Tokens per program of `image_kernel`."""
_SELECT_TILE = 4096
"""Units per loop step of `select_kernel`."""
# Differ from prompt to prompt: one compilation must serve them all.
_VARYING = [
    "layer_stride", "head_stride", "images_stride", "num_tokens", "most", "placement",
    "average", "first_query",
]  # fmt: skip


@triton.jit
def heavy_part(num_tokens, heavy, budget, UNIT: tl.constexpr):
    """`(competing tokens, how many of them are kept)`; none where all fit."""
    evicts = num_tokens > budget
    ring_start = tl.cdiv(num_tokens, UNIT) * UNIT - (budget - heavy)
    return tl.where(evicts, ring_start, 0), tl.where(evicts, heavy, 0)


@triton.jit
def pooled_scores(
    attention, tokens, competes, num_tokens, first_query, reach, MEAN: tl.constexpr
):
    """Highest of what the tokens within `reach` are compared by, NaN as infinite.

    score(t) = attention, or attention / (num_tokens - max(t, first_query)) for MEAN.
    """
    pooled = tl.full(tokens.shape, float("-inf"), tl.float32)
    for offset in range(-reach, reach + 1):
        at = tokens + offset
        exists = competes & (at >= 0) & (at < num_tokens)
        score = tl.load(attention + at, mask=exists, other=float("-inf"))
        if MEAN:
            seen = tl.maximum(num_tokens - tl.maximum(at, first_query), 1)
            # Rounded as torch rounds, or equal scores would stop being equal.
            score = tl.div_rn(score, seen.to(tl.float32))
        score = tl.where(score == score, score, float("inf"))
        pooled = tl.maximum(pooled, score)
    return pooled


@triton.jit
def image_of(score):
    """int32 of the same order as float32 without NaN, equal for both zeros."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["attention"])
def image_kernel(
    attention, layer_stride, head_stride, images, images_stride, sizes, distances,
    num_tokens, placement, average, first_query,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr, PINNED: tl.constexpr,
    MEAN: tl.constexpr, POOLING: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_U: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the units (tokens or blocks) of a KV head compete by, as integers.

        images[head, u] = image(sum over t in unit u of max-pooled score(t)),
                          image(inf) for the first PINNED tokens

    A head with less than the request has on average has no room for spans: its scores
    are not pooled.
    Grid `(tiles of units, num_kv_heads, num_layers)`.

    Reference: select_residents of policy/selection.py; the sum of a block has an
    order of its own.
    """
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = placement * tl.num_programs(1) + head
    if sizes is not None:
        sizes = of_layer(sizes, distances, SIZES)
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    end, _ = heavy_part(num_tokens, heavy, budget, UNIT)
    if tile * TILE * UNIT >= end:
        return
    units, within = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_U)
    tokens = units[:, None] * UNIT + within[None, :]
    competes = (tokens < end) & (within < UNIT)[None, :]
    reach = POOLING // 2
    if sizes is not None:
        reach = tl.where(budget < average, 0, reach)
    attention += layer.to(tl.int64) * layer_stride + head.to(tl.int64) * head_stride
    score = pooled_scores(
        attention, tokens, competes, num_tokens, first_query, reach, MEAN
    )
    score = tl.sum(tl.where(competes, score, 0.0), axis=1)
    score = tl.where(units * UNIT < PINNED, float("inf"), score)
    row = layer.to(tl.int64) * tl.num_programs(1) + head
    images += row * images_stride
    tl.store(images + units, image_of(score), mask=units * UNIT < end)


@triton.jit
def count_digits(images, num_units, known, LEVEL: tl.constexpr, TILE: tl.constexpr):
    """How many of the images that begin with the `known` digits have which one next."""
    SHIFT: tl.constexpr = 24 - 8 * LEVEL
    counts = tl.zeros([256], tl.int32)
    for start in range(0, num_units, TILE):
        at = start + tl.arange(0, TILE)
        matches = at < num_units
        image = tl.load(images + at, mask=matches, other=0)
        if LEVEL == 0:
            # With the sign: what is below zero comes first.
            digit = (image >> SHIFT) + 128
        else:
            digit = (image >> SHIFT) & 255
            matches &= (image >> (SHIFT + 8)) == known
        counts += tl.histogram(digit, 256, mask=matches)
    return counts


@triton.jit
def find_threshold(images, num_units, count, TILE: tl.constexpr):
    """`(threshold, room)`: the `count` highest of `num_units` images are those over
    the threshold and the first `room` that equal it.

    A radix select: four passes, 8 bits each.
    """
    digits = tl.arange(0, 256)
    known = 0
    for level in tl.static_range(4):
        counts = count_digits(images, num_units, known, level, TILE)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        found = tl.sum((at_least >= count).to(tl.int32), axis=0) - 1
        count -= tl.sum(tl.where(digits > found, counts, 0), axis=0)
        known = found - 128 if level == 0 else known * 256 + found
    return known, count


@triton.jit
def compact(
    images, num_units, threshold, room, positions,
    UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the tokens of the kept units in ascending order."""
    taken, num_ties = 0, 0
    for start in range(0, num_units, TILE):
        unit = start + tl.arange(0, TILE)
        exists = unit < num_units
        image = tl.load(images + unit, mask=exists, other=0)
        ties = (exists & (image == threshold)).to(tl.int32)
        wins = (image == threshold) & (num_ties + tl.cumsum(ties, axis=0) <= room)
        kept = exists & ((image > threshold) | wins)
        counted = kept.to(tl.int32)
        place = taken + tl.cumsum(counted, axis=0) - 1
        for i in range(UNIT):
            tl.store(positions + place * UNIT + i, unit * UNIT + i, mask=kept)
        num_ties += tl.sum(ties, axis=0)
        taken += tl.sum(counted, axis=0)


@triton.jit(do_not_specialize=_VARYING)
def select_kernel(
    images, images_stride, positions, slots, sizes, distances,
    num_tokens, most, placement,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the tokens of one KV head: the highest images, then the recent window.

        positions[head] = ascending(top heavy/UNIT units, ties to the lower), recent
        slots[head]     = 0 .. heavy - 1, slot_of(recent)

    or all tokens in order where they fit the head's budget; -1 up to `most`.

    Grid `(1, num_kv_heads, num_layers)`: a head is one program's, which reads its
    images five times. At 128k tokens these are 512 KiB, from the L2, and a scan over
    more programs would need a kernel per pass.

    Reference: select_residents of policy/selection.py.
    """
    head, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    entry = placement * tl.num_programs(1) + head
    row = layer * tl.num_programs(1) + head
    if sizes is not None:
        sizes = of_layer(sizes, distances, SIZES)
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    end, kept = heavy_part(num_tokens, heavy, budget, UNIT)
    images += row * images_stride
    positions += row * most
    slots += row * most
    num_units = end // UNIT
    threshold, room = find_threshold(images, num_units, kept // UNIT, TILE)
    compact(images, num_units, threshold, room, positions, UNIT, TILE)
    for start in range(0, most, TILE):
        i = start + tl.arange(0, TILE)
        token = tl.where(i < kept, i, i - kept + end)
        held = token < num_tokens
        slot = slot_of(token, heavy, budget)
        tl.store(slots + i, tl.where(held, slot, -1), mask=i < most)
        recent = (i >= kept) & (i < most)
        tl.store(positions + i, tl.where(held, token, -1), mask=recent)


def select(
    batch: LayerBatch,
    attention: torch.Tensor,
    placement: int,
    first_query: int,
    config: H2OConfig,
    are_scores: bool = False,
) -> Kept:
    """See `vllm_h2o.attention.ops.reference.select`.

    Args:
        batch: The layers.
        attention: `[num_layers, num_kv_heads, num_tokens]` that tokens have got.
        placement: As there.
        first_query: As there.
        config: As there.
        are_scores: Whether they are what tokens compete by, pooled where they are.

    Returns:
        `[num_layers, num_kv_heads, most]`, of the head with the most in any layer.
    """
    assert attention.stride(2) == 1 and attention.dtype == torch.float32
    num_layers, num_kv_heads, num_tokens = attention.shape
    params = batch.first.params
    layout, tables = params.layout, params.device_tables
    unit = layout.block_size if layout.whole_blocks else 1
    block_u = triton.next_power_of_2(unit)
    most = min(num_tokens, batch.largest_of(placement))
    heads = num_layers, num_kv_heads
    images = attention.new_empty(*heads, num_tokens // unit, dtype=torch.int32)
    positions = attention.new_empty(*heads, most, dtype=torch.int64)
    slots = torch.empty_like(positions)  # aligned as it is, whatever their size
    shared = {
        "images": images, "images_stride": images.stride(1),
        "sizes": tables and tables.sizes, "distances": batch.distances,
        "num_tokens": num_tokens, "placement": placement,
        "HEAVY": layout.heavy_slots, "BUDGET": layout.budget, "UNIT": unit,
    }  # fmt: skip
    tile = max(_IMAGE_TILE // block_u, 1)
    tiles = triton.cdiv(num_tokens // unit, tile)
    image_kernel[(tiles, num_kv_heads, num_layers)](
        attention=attention, layer_stride=attention.stride(0),
        head_stride=attention.stride(1), first_query=first_query,
        average=params.budget_of(placement), PINNED=layout.pinned_slots,
        MEAN=params.fused_form == "mean" and not are_scores,
        POOLING=1 if are_scores else config.prompt_pooling,
        BLOCK_U=block_u, TILE=tile, num_warps=4,
        **shared,
    )  # fmt: skip
    select_kernel[(1, num_kv_heads, num_layers)](
        positions=positions, slots=slots, most=most, TILE=_SELECT_TILE, num_warps=8,
        **shared,
    )  # fmt: skip
    return Kept(positions, slots)
