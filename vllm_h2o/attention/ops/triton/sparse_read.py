"""Which pages a query reads: those whose keys can give it most, by a bound of each.

A kernel before `attend_kernel` ranks the pages of a row and KV head, and lists those
that are read. Bounds of pages are made where tokens enter them, one of a step's many.

Reference: policy/sparse_read.py. Difference: a bound passes over keys with NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.decode import VARYING
from vllm_h2o.attention.ops.triton.graduate import NOBODY, find_loser
from vllm_h2o.attention.ops.triton.selection import find_threshold, image_of
from vllm_h2o.attention.ops.triton.slots import (
    first_page_of,
    page_offsets,
    place_of,
    places_of,
    sizes_of,
    slot_of,
)
from vllm_h2o.policy.sparse_read import HIGHEST_SHARE

BILLION = 10**9
"""A share is a number of billionths: what it makes of a count is rounded as decimals
are."""
_HIGHEST = tl.constexpr(HIGHEST_SHARE)
_BILLION = tl.constexpr(BILLION)
PAGE_TILE = 1024
"""Pages of a loop step that ranks them."""


@triton.jit
def bound_of(
    keys, keys_strides, key_scales, state_strides, places, state, head, page, count,
    slot, loser,
    UNIT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_D]` alpha * highest + (1 - alpha) * lowest key of a page, by element.

    Of its slots below `count`; what is in `slot` stands for what is in `loser`.
    """
    d = tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_D], float("-inf"), tl.float32)
    lowest = tl.full([BLOCK_D], float("inf"), tl.float32)
    for start in range(0, BLOCK_SIZE, ROWS):
        within = start + tl.arange(0, ROWS)
        slots = page * BLOCK_SIZE + within
        held = (within < BLOCK_SIZE) & (slots < count)
        moved = (slots >= loser) & (slots < loser + UNIT)
        slots = tl.where(moved, slots - loser + slot, slots)
        at = page_offsets(places, slots, held, head, keys_strides, BLOCK_SIZE)
        mask = held[:, None] & (d < HEAD_SIZE)[None, :]
        at = keys + at[:, None] + d[None, :] * keys_strides[3]
        k = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if key_scales is not None:
            at = page_offsets(state, slots, held, head, state_strides, BLOCK_SIZE)
            k *= tl.load(key_scales + at, mask=held, other=0.0)[:, None]
        counts = mask & (k == k)
        high = tl.max(tl.where(counts, k, float("-inf")), axis=0)
        highest = tl.maximum(highest, high)
        lowest = tl.minimum(lowest, tl.min(tl.where(counts, k, float("inf")), axis=0))
    return _HIGHEST * highest + (1 - _HIGHEST) * lowest


@triton.jit
def bound_offsets(state, pages, exists, head, state_strides, HEAD_SIZE: tl.constexpr):
    """Where the bounds of pages of a KV head begin."""
    table, columns, lent = state
    column = pages
    if columns is not None:
        column = tl.load(columns + pages, mask=exists, other=0)
    block = tl.load(table + column, mask=exists, other=0).to(tl.int64)
    at = block * state_strides[0] + head * HEAD_SIZE
    if lent is not None:
        at += tl.load(lent + pages, mask=exists, other=0)
    return at


@triton.jit(do_not_specialize=VARYING)
def rank_kernel(
    query, query_strides, key, key_strides, value, value_strides,
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales,
    table, table_stride, sizes, lists, positions, counts, starts, draft,
    first_queries, placements, grown_at,
    logits, logit_starts, partial_outputs, partial_maxima, partial_sums,
    losers, leaving_attention, read_pages, read_flags, read_counts,
    bounds, read_images,
    max_splits, least_split, split_slots, tile,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    PINNED: tl.constexpr, UNIT: tl.constexpr, MEAN: tl.constexpr,
    SCORED: tl.constexpr, COMPETES: tl.constexpr, READ: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr, CANDIDATES: tl.constexpr,
    PAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the pages that one row's query reads in one KV head.

        bound[p]   = alpha max_{t in p} K[t] + (1 - alpha) min_{t in p} K[t]
        read_pages = those of the sinks, ceil(share * n) of the n others of the heavy
                     set by sum_h q[h] . bound, those of the ring and the new token

    after graduation and write: who loses its slot is found here, and the bound of its
    page, or of the page that the last token has filled, is made anew. Rows that do not
    score read all, and have no list.

    Grid `(num_rows, num_kv_heads)`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    if position < 0:
        return
    first_entry = 0
    if sizes is not None:
        first_entry = tl.load(placements + row) * NUM_KV_HEADS
    entry = first_entry + head
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    place = place_of(position, sizes, entry, grown_at, row)
    slot = slot_of(place, heavy, budget)
    table += row.to(tl.int64) * table_stride
    places, state = (table, None, None), (table, None, None)
    if lists is not None:
        places, state = places_of(table, sizes, lists, entry)
    item = row.to(tl.int64) * NUM_KV_HEADS + head
    first_query = tl.load(first_queries + row).to(tl.int32)

    loser = tl.full((), NOBODY, tl.int32)
    if COMPETES:
        if (place >= budget) & (place % UNIT == 0):
            loser = find_loser(
                attention, births, state_strides, state, head, position, first_query,
                slot, heavy, PINNED, MEAN, UNIT, BLOCK_U, BLOCK_SIZE, CANDIDATES,
            )  # fmt: skip
        leaving = page_offsets(state, slot, True, head, state_strides, BLOCK_SIZE)
        tl.store(losers + item, loser)
        # Combine reads it after another program may have zeroed it.
        tl.store(leaving_attention + item, tl.load(attention + leaving))
    if position < first_query:
        return

    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    fills = (place < budget) & (slot % BLOCK_SIZE == 0) & (slot <= heavy) & (slot > 0)
    renewed = tl.where(fills, slot // BLOCK_SIZE - 1, -1)
    renewed = tl.where(loser >= 0, loser // BLOCK_SIZE, renewed)
    if renewed >= 0:
        bound = bound_of(
            keys, keys_strides, key_scales, state_strides, places, state, head, renewed,
            heavy, slot, loser, UNIT, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, ROWS,
        )  # fmt: skip
        at = bound_offsets(state, renewed, True, head, state_strides, HEAD_SIZE)
        tl.store(bounds + at + d, bound, mask=in_head)
    tl.debug_barrier()

    num_pages = tl.cdiv(tl.minimum(place + 1, budget), BLOCK_SIZE)
    first = tl.cdiv(PINNED, BLOCK_SIZE)
    end = tl.minimum(heavy, slot) // BLOCK_SIZE
    # Where there are none all pages are read in any case.
    others = tl.maximum(end - first, 0)
    chosen = ((others.to(tl.int64) * READ + _BILLION - 1) // _BILLION).to(tl.int32)
    at = first_page_of(
        logit_starts, row, sizes, entry, head, position, item, BUDGET, BLOCK_SIZE
    )
    read_pages += at
    read_flags += at
    read_images += at
    g = tl.arange(0, BLOCK_G)
    q_offsets = row.to(tl.int64) * query_strides[0]
    q_offsets += (head * GROUP + g)[:, None] * query_strides[1] + d[None, :]
    q_mask = (g < GROUP)[:, None] & in_head[None, :]
    q = tl.load(query + q_offsets, mask=q_mask, other=0.0)
    q = tl.sum(q.to(tl.float32), axis=0)
    for start in range(0, others, PAGES):
        i = start + tl.arange(0, PAGES)
        exists = i < others
        of_page = bound_offsets(
            state, first + i, exists, head, state_strides, HEAD_SIZE
        )
        mask = exists[:, None] & in_head[None, :]
        bound = tl.load(bounds + of_page[:, None] + d[None, :], mask=mask, other=0.0)
        x = tl.sum(bound * q[None, :], axis=1)
        x = tl.where(x == x, x, float("inf"))
        tl.store(read_images + i, image_of(x), mask=exists)
    tl.debug_barrier()
    threshold, room = 0, 0
    if chosen > 0:
        threshold, room = find_threshold(read_images, others, chosen, TILE)
    taken, num_ties = 0, 0
    for start in range(0, num_pages, TILE):
        page = start + tl.arange(0, TILE)
        exists, i = page < num_pages, page - first
        ranked = exists & (i >= 0) & (i < others)
        image = tl.load(read_images + i, mask=ranked, other=0)
        ties = (ranked & (image == threshold)).to(tl.int32)
        wins = (image == threshold) & (num_ties + tl.cumsum(ties, axis=0) <= room)
        best = ((image > threshold) | wins) & (i * 0 < chosen)
        reads = exists & ((ranked == 0) | best)
        counted = reads.to(tl.int32)
        tl.store(read_flags + page, counted, mask=exists)
        to = taken + tl.cumsum(counted, axis=0) - 1
        tl.store(read_pages + to, page, mask=reads)
        num_ties += tl.sum(ties, axis=0)
        taken += tl.sum(counted, axis=0)
    tl.store(read_counts + item, taken)
