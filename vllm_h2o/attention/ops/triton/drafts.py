"""What a draft changes, noted between the two kernels of a decode step."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.slots import (
    logits_before,
    page_offsets,
    place_of,
    places_of,
    sizes_of,
    slot_of,
    token_of,
)
from vllm_h2o.attention.ops.types import NOTHING, RING, DraftLog

TILE = 1024
"""Slots whose attention one program copies."""
VARYING = ["draft", "most_drafts", "log_slots"]
_RING, _NOTHING = tl.constexpr(RING), tl.constexpr(NOTHING)


@triton.jit(do_not_specialize=VARYING)
def note_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, table, table_stride, sizes, lists,
    positions, counts, first_queries, placements, grown_at, logit_starts, losers,
    log_keys, log_values, log_scales, log_births, log_losers, log_attention,
    draft, most_drafts, log_slots,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr, COMPETES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Note one draft of each row, before anything of it is written to pages.

    Grid `(num_rows, num_kv_heads, tiles of slots)`; `losers` is what `attend_kernel`
    has found. Reference: `Resident.graduate` with a log.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, _ = token_of(positions, counts, counts, row, draft)
    if position < tl.maximum(tl.load(first_queries + row).to(tl.int32), 0):
        return  # padding, or it stays dense
    entry, heavy, budget, place, slot = slots_of(
        row, head, position, sizes, placements, grown_at, NUM_KV_HEADS, HEAVY, BUDGET
    )
    table += row.to(tl.int64) * table_stride
    places, state = (table, None, None), (table, None, None)
    if lists is not None:
        places, state = places_of(table, sizes, lists, entry)
    first = tl.load(logit_starts + row) + (draft - 1).to(tl.int64) * log_slots
    first += logits_before(sizes, entry, head, position, BUDGET)
    t = part * BLOCK_T + tl.arange(0, BLOCK_T)
    held = t < tl.minimum(place, budget)
    in_state = page_offsets(state, t, held, head, state_strides, BLOCK_SIZE)
    so_far = tl.load(attention + in_state, mask=held)
    tl.store(log_attention + first + t, so_far, mask=held)
    if part > 0:
        return
    at = (row.to(tl.int64) * most_drafts + draft - 1) * NUM_KV_HEADS + head
    if place < budget:
        tl.store(log_losers + at, _NOTHING)
        return
    loser = tl.full((), _RING, tl.int32)
    if COMPETES:
        found = tl.load(losers + row * NUM_KV_HEADS + head)
        loser = tl.where(found >= 0, found, loser)
    tl.store(log_losers + at, loser)
    lost = tl.where(loser >= 0, loser, slot)
    copy_lost(
        keys, keys_strides, values, values_strides, births, state_strides,
        key_scales, value_scales, places, state, head, lost,
        log_keys, log_values, log_scales, log_births, at,
        False, HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def slots_of(
    row, head, position, sizes, placements, grown_at,
    NUM_KV_HEADS: tl.constexpr, HEAVY: tl.constexpr, BUDGET: tl.constexpr,
):  # fmt: skip
    """`(entry, heavy slots, budget, place, slot)` of a row's token in a KV head."""
    entry = head
    if sizes is not None:
        entry += tl.load(placements + row) * NUM_KV_HEADS
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    place = place_of(position, sizes, entry, grown_at, row)
    return entry, heavy, budget, place, slot_of(place, heavy, budget)


@triton.jit
def copy_lost(
    keys, keys_strides, values, values_strides, births, state_strides,
    key_scales, value_scales, places, state, head, slot,
    log_keys, log_values, log_scales, log_births, at,
    BACK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Copy what is in a slot, but for its attention, to place `at` of the log, or for
    BACK from there."""
    d = tl.arange(0, BLOCK_D)
    mask = d < HEAD_SIZE
    in_keys = page_offsets(places, slot, True, head, keys_strides, BLOCK_SIZE)
    in_keys = keys + in_keys + d * keys_strides[3]
    in_values = page_offsets(places, slot, True, head, values_strides, BLOCK_SIZE)
    in_values = values + in_values + d * values_strides[3]
    in_state = page_offsets(state, slot, True, head, state_strides, BLOCK_SIZE)
    move(in_keys, log_keys + at * HEAD_SIZE + d, mask, BACK)
    move(in_values, log_values + at * HEAD_SIZE + d, mask, BACK)
    move(births + in_state, log_births + at, True, BACK)
    if key_scales is not None:
        move(key_scales + in_state, log_scales + 2 * at, True, BACK)
        move(value_scales + in_state, log_scales + 2 * at + 1, True, BACK)


@triton.jit
def move(in_pages, in_log, mask, BACK: tl.constexpr):
    """Copy from pages to the log, or back."""
    if BACK:
        tl.store(in_pages, tl.load(in_log, mask=mask), mask=mask)
    else:
        tl.store(in_log, tl.load(in_pages, mask=mask), mask=mask)


def log_arguments(log: DraftLog) -> dict[str, Any]:
    """Kernel arguments that say where drafts are noted."""
    return {
        "log_keys": log.keys, "log_values": log.values, "log_scales": log.scales,
        "log_births": log.births, "log_losers": log.losers,
        "log_attention": log.attention,
        "most_drafts": log.births.shape[1], "log_slots": log.attention.shape[1],
    }  # fmt: skip


def tiles_of(num_rows: int, num_kv_heads: int, largest: int) -> dict[str, Any]:
    """The grid of a kernel over the slots of all rows, and its tiles."""
    tile = min(TILE, triton.next_power_of_2(largest))
    grid = num_rows, num_kv_heads, triton.cdiv(largest, tile)
    return {"grid": grid, "BLOCK_T": tile}


def note_drafts(
    log: DraftLog, draft: int, num_rows: int, largest: int, step: dict[str, Any]
) -> None:
    """Note the draft of that index of each row.

    Args:
        log: Of the layer.
        draft: From 1.
        num_rows: Of the batch.
        largest: Budget.
        step: Arguments of the decode step's kernels.
    """
    tiles = tiles_of(num_rows, step["NUM_KV_HEADS"], largest)
    mine = {name: step[name] for name in note_kernel.arg_names if name in step}
    note_kernel[tiles.pop("grid")](
        draft=draft, num_warps=4, **mine, **log_arguments(log), **tiles
    )
