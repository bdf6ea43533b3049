"""Refused drafts are undone: pages are as if they had not been."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.drafts import (
    VARYING,
    copy_lost,
    log_arguments,
    slots_of,
    tiles_of,
)
from vllm_h2o.attention.ops.triton.graduate import graduate
from vllm_h2o.attention.ops.triton.launch import (
    logit_starts_of,
    page_arguments,
    table_arguments,
)
from vllm_h2o.attention.ops.triton.slots import (
    logits_before,
    page_offsets,
    places_of,
    slot_of,
)
from vllm_h2o.attention.ops.types import LoggedLayer, ResidentRows


@triton.jit(do_not_specialize=VARYING[1:])
def take_back_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, table, table_stride, sizes, lists,
    positions, counts, first_queries, placements, grown_at, logit_starts, refused,
    log_keys, log_values, log_scales, log_births, log_losers, log_attention,
    most_drafts, log_slots,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Undo the refused drafts of each row, newest first; then their attention.

    Grid as of `note_kernel`. Program 0 of a KV head moves keys, values, scales and
    births, all of them its tile of attention. Reference: `reference.take_back`.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, undone = tl.load(counts + row), tl.load(refused + row)
    start = tl.load(positions + row).to(tl.int32)
    position, first_query = start + count - undone, tl.load(first_queries + row)
    if (start < 0) | (undone <= 0) | (position < first_query.to(tl.int32)):
        return  # padding, nothing was refused, or it stays dense
    entry, heavy, budget, place, slot = slots_of(
        row, head, position, sizes, placements, grown_at, NUM_KV_HEADS, HEAVY, BUDGET
    )
    table += row.to(tl.int64) * table_stride
    places, state = (table, None, None), (table, None, None)
    if lists is not None:
        places, state = places_of(table, sizes, lists, entry)
    if part == 0:
        for i in range(undone):
            later = undone - 1 - i
            at = row.to(tl.int64) * most_drafts + count - 2 - i
            at = at * NUM_KV_HEADS + head
            if place + later >= budget:
                undo_draft(
                    keys, keys_strides, values, values_strides, births, state_strides,
                    key_scales, value_scales, places, state, head,
                    slot_of(place + later, heavy, budget),
                    log_keys, log_values, log_scales, log_births, log_losers, at,
                    HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
                )  # fmt: skip
    draft = count - undone
    first = tl.load(logit_starts + row) + (draft - 1).to(tl.int64) * log_slots
    first += logits_before(sizes, entry, head, position, BUDGET)
    t = part * BLOCK_T + tl.arange(0, BLOCK_T)
    held = t < tl.minimum(place, budget)
    so_far = tl.load(log_attention + first + t, mask=held)
    in_state = page_offsets(state, t, held, head, state_strides, BLOCK_SIZE)
    tl.store(attention + in_state, so_far, mask=held)


@triton.jit
def undo_draft(
    keys, keys_strides, values, values_strides, births, state_strides,
    key_scales, value_scales, places, state, head, slot,
    log_keys, log_values, log_scales, log_births, log_losers, at,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Undo one draft's graduation: the inverse of `graduate`, but for attention."""
    loser = tl.load(log_losers + at)
    if loser >= 0:
        graduate(
            keys, keys_strides, values, values_strides, births, state_strides,
            key_scales, value_scales, places, state, head, loser, slot,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE, 1, 1,
        )  # fmt: skip
        # All have read the winner before any overwrites it.
        tl.debug_barrier()
    lost = tl.where(loser >= 0, loser, slot)
    copy_lost(
        keys, keys_strides, values, values_strides, births, state_strides,
        key_scales, value_scales, places, state, head, lost,
        log_keys, log_values, log_scales, log_births, at,
        True, HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    # The next one may read what this one has put back.
    tl.debug_barrier()


def take_back(
    layers: Sequence[LoggedLayer], rows: ResidentRows, refused: torch.Tensor
) -> None:
    """See `Kernels.take_back`; one launch for each layer."""
    num_rows = len(rows.positions)
    for pages, params, log in layers:
        _, num_kv_heads, head_size, _ = pages.keys.shape
        layout = params.layout
        tables = None if rows.placements is None else params.device_tables
        tiles = tiles_of(num_rows, num_kv_heads, params.largest_budget)
        take_back_kernel[tiles.pop("grid")](
            **page_arguments(pages), **table_arguments(tables), **log_arguments(log),
            table=rows.block_table, table_stride=rows.block_table.stride(0),
            positions=rows.positions, counts=rows.counts,
            first_queries=rows.first_queries, placements=rows.placements,
            grown_at=None if rows.placements is None else rows.grown_at,
            logit_starts=logit_starts_of(rows, num_kv_heads, params),
            refused=refused,
            NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size,
            BLOCK_SIZE=layout.block_size, HEAVY=layout.heavy_slots,
            BUDGET=layout.budget, BLOCK_D=triton.next_power_of_2(head_size),
            num_warps=4, **tiles,
        )  # fmt: skip
