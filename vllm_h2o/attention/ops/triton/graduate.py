"""Graduation: what leaves the ring competes with the lowest of the heavy set."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.quantization import quantized
from vllm_h2o.attention.ops.triton.slots import page_offsets

# So far below that no slot is in the unit that begins there.
NOBODY = tl.constexpr(-(2**30))
_NEVER_BORN = tl.constexpr(2**31 - 1)


@triton.jit
def unit_scores(
    attention, births, state_strides, state, first_slots, exists, head,
    position, first_query,
    MEAN: tl.constexpr, UNIT: tl.constexpr, BLOCK_U: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """What units (tokens or blocks) are compared by, `[len(first_slots)]`.

    score(unit) = sum over its slots of attention, or of
    attention / (position - max(birth, first_query)) for MEAN.
    """
    within = tl.arange(0, BLOCK_U)[None, :]
    slots = first_slots[:, None] + within
    mask = exists[:, None] & (within < UNIT)
    offsets = page_offsets(state, slots, mask, head, state_strides, BLOCK_SIZE)
    score = tl.load(attention + offsets, mask=mask, other=0.0)
    if MEAN:
        birth = tl.load(births + offsets, mask=mask, other=0)
        seen = position - tl.maximum(birth, first_query)
        # Rounded as torch rounds, or equal scores would stop being equal.
        score = tl.div_rn(score, tl.where(mask, seen, 1).to(tl.float32))
    return tl.sum(score, axis=1)


@triton.jit
def find_lowest(
    attention, births, state_strides, state, head, position, first_query, heavy,
    PINNED: tl.constexpr, MEAN: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """`(score, first slot)` of the lowest heavy unit; of equals the oldest."""
    candidate = tl.arange(0, CANDIDATES) * UNIT
    lowest = tl.full([CANDIDATES], float("inf"), tl.float32)
    oldest = tl.full([CANDIDATES], _NEVER_BORN, tl.int32)
    loser = tl.full([CANDIDATES], 0, tl.int32) + heavy
    for start in range(PINNED, heavy, CANDIDATES * UNIT):
        slots = start + candidate
        exists = slots < heavy
        score = unit_scores(
            attention, births, state_strides, state, slots, exists, head,
            position, first_query, MEAN, UNIT, BLOCK_U, BLOCK_SIZE,
        )  # fmt: skip
        offsets = page_offsets(state, slots, exists, head, state_strides, BLOCK_SIZE)
        birth = tl.load(births + offsets, mask=exists, other=_NEVER_BORN)
        older = (score == lowest) & (birth < oldest)
        better = exists & ((score < lowest) | older)
        lowest = tl.where(better, score, lowest)
        oldest = tl.where(better, birth, oldest)
        loser = tl.where(better, slots, loser)
    minimum = tl.min(lowest, axis=0)
    oldest = tl.where(lowest == minimum, oldest, _NEVER_BORN)
    loser = tl.where(oldest == tl.min(oldest, axis=0), loser, heavy)
    return minimum, tl.min(loser, axis=0)


@triton.jit
def find_loser(
    attention, births, state_strides, state, head, position, first_query, slot, heavy,
    PINNED: tl.constexpr, MEAN: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """First slot of the heavy unit that the unit in `slot` replaces, or NOBODY."""
    lowest, loser = find_lowest(
        attention, births, state_strides, state, head, position, first_query, heavy,
        PINNED, MEAN, UNIT, BLOCK_U, BLOCK_SIZE, CANDIDATES,
    )  # fmt: skip
    leaving_slot = tl.full([1], 0, tl.int32) + slot
    leaving = unit_scores(
        attention, births, state_strides, state, leaving_slot, leaving_slot >= 0, head,
        position, first_query, MEAN, UNIT, BLOCK_U, BLOCK_SIZE,
    )  # fmt: skip
    return tl.where(tl.max(leaving, axis=0) > lowest, loser, NOBODY)


@triton.jit
def copy_rows(
    rows, strides, places, source, target, mask, head,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Copy keys or values between slots of a request."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    along = dim * strides[3]
    mask_2d = mask[:, None] & (dim < HEAD_SIZE)
    origin = page_offsets(places, source, mask, head, strides, BLOCK_SIZE)
    data = tl.load(rows + origin[:, None] + along, mask=mask_2d)
    destination = page_offsets(places, target, mask, head, strides, BLOCK_SIZE)
    tl.store(rows + destination[:, None] + along, data, mask=mask_2d)


@triton.jit
def graduate(
    keys, key_strides, values, value_strides, births, state_strides,
    key_scales, value_scales, places, state, head, slot, loser,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Move K, V, scales and births of the unit in `slot` over the one in `loser`.

    The caller moves the attention: it rewrites all of them anyway.
    """
    within = tl.arange(0, BLOCK_U)
    mask = within < UNIT
    source, target = slot + within, loser + within
    copy_rows(
        keys, key_strides, places, source, target, mask, head,
        HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    copy_rows(
        values, value_strides, places, source, target, mask, head,
        HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    origin = page_offsets(state, source, mask, head, state_strides, BLOCK_SIZE)
    birth = tl.load(births + origin, mask=mask)
    destination = page_offsets(state, target, mask, head, state_strides, BLOCK_SIZE)
    tl.store(births + destination, birth, mask=mask)
    if key_scales is not None:
        scale = tl.load(key_scales + origin, mask=mask)
        tl.store(key_scales + destination, scale, mask=mask)
        scale = tl.load(value_scales + origin, mask=mask)
        tl.store(value_scales + destination, scale, mask=mask)


@triton.jit
def write_token(
    key, value, keys, key_strides, values, value_strides, births, state_strides,
    key_scales, value_scales, places, state, head, slot, position, scores_now,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Put K, V and, if its query scores, the birth of the new token into `slot`.

    Dense pages have no births.

    `key` and `value` point to its `[HEAD_SIZE]` vectors of this KV head.
    """
    dim = tl.arange(0, BLOCK_D)
    mask = dim < HEAD_SIZE
    at = page_offsets(state, slot, True, head, state_strides, BLOCK_SIZE)
    if births is not None:
        tl.store(births + at, position, mask=scores_now)
    in_keys = page_offsets(places, slot, True, head, key_strides, BLOCK_SIZE)
    in_keys = keys + in_keys + dim * key_strides[3]
    in_values = page_offsets(places, slot, True, head, value_strides, BLOCK_SIZE)
    in_values = values + in_values + dim * value_strides[3]
    new_k = tl.load(key + dim, mask=mask, other=0.0)
    new_v = tl.load(value + dim, mask=mask, other=0.0)
    if key_scales is not None:
        new_k, scale = quantized(new_k.to(tl.float32)[None, :])
        new_k = tl.reshape(new_k, dim.shape).to(tl.int8)
        tl.store(key_scales + at, tl.max(scale, axis=0))
        new_v, scale = quantized(new_v.to(tl.float32)[None, :])
        new_v = tl.reshape(new_v, dim.shape).to(tl.int8)
        tl.store(value_scales + at, tl.max(scale, axis=0))
    tl.store(in_keys, new_k, mask=mask)
    tl.store(in_values, new_v, mask=mask)
