"""After the splits: outputs merged, attention updated, slots rewritten."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.decode import VARYING
from vllm_h2o.attention.ops.triton.graduate import graduate, write_token
from vllm_h2o.attention.ops.triton.slots import (
    first_page_of,
    head_and_part,
    is_occupied,
    logits_before,
    page_offsets,
    place_of,
    places_of,
    sizes_of,
    slot_of,
    split_slots_of,
    token_of,
)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    output, output_strides, key, key_strides, value, value_strides,
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales,
    table, table_stride, sizes, lists, positions, counts, starts, draft,
    first_queries, placements, grown_at,
    logits, logit_starts, partial_outputs, partial_maxima, partial_sums,
    losers, leaving_attention, read_pages, read_flags, read_counts,
    sink_logits,
    score_decay, max_splits, least_split, split_slots, tile,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    UNIT: tl.constexpr, SCORED: tl.constexpr, COMPETES: tl.constexpr,
    READ: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr,
    PADS: tl.constexpr,
):  # fmt: skip
    """Finish the decode step of one row and KV head, of its token of index `draft`.

        M[h] = max(max_i m_i[h], sink[h])
        L[h] = sum_i l_i[h] exp(m_i[h] - M[h]) + exp(sink[h] - M[h])
        out[h]   = sum_i o_i[h] exp(m_i[h] - M[h]) / L[h]
        attention[s] = attention[s] * score_decay + sum_h exp(z[h,s] - M[h]) / L[h]

    (without the sink where there is none) and `attention[s]` taken after graduation and
    write: the graduate's in the slot it won, 0 in the new token's. Before its first
    query a row scores nothing: its pages may be others' too.

    Grid `(num_rows, num_kv_heads, max(GROUP, attention tiles))`; by head `(num_rows,
    these summed over KV heads)`, in the placement where the sum is largest. A KV head's
    program i merges its query head i and updates the attention of its tile i of BLOCK_T
    slots; program 0 moves the graduate and writes the new token. A row of position -1
    is padding: its output is 0 (without PADS another call's, left alone) and none of
    its pages is touched.

    Reference: graduate, write and attend of ops/reference.py, state equal at
    the end of the step.
    """
    row = tl.program_id(0)
    position, token = token_of(positions, counts, starts, row, draft)
    output += token.to(tl.int64) * output_strides[0]
    if not PADS:  # noqa: SIM102  one is known when it is compiled
        if position < 0:
            return
    if position < 0:
        if counts is not None:  # noqa: SIM102  one is known when it is compiled
            if draft >= tl.load(counts + row):
                return  # the row has fewer tokens
        query_head = tl.program_id(1)
        if sizes is None:
            query_head = query_head * GROUP + tl.program_id(2) % GROUP
        d, out = tl.arange(0, BLOCK_D), output + query_head * output_strides[1]
        nothing = tl.zeros([BLOCK_D], out.dtype.element_ty)
        exists = query_head < NUM_KV_HEADS * GROUP
        tl.store(out + d, nothing, mask=d < tl.where(exists, HEAD_SIZE, 0))
        return
    first_entry = 0
    if sizes is not None:
        first_entry = tl.load(placements + row) * NUM_KV_HEADS
    head, part = head_and_part(
        sizes, first_entry, BLOCK_T, GROUP, NUM_KV_HEADS, BLOCK_H
    )
    entry = first_entry + head
    out = output + (head * GROUP + part) * output_strides[1]
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    place = place_of(position, sizes, entry, grown_at, row)
    slot = slot_of(place, heavy, budget)
    length = tl.minimum(place + 1, budget)
    table += row.to(tl.int64) * table_stride
    places, state = (table, None, None), (table, None, None)
    if lists is not None:
        places, state = places_of(table, sizes, lists, entry)
    item = row.to(tl.int64) * NUM_KV_HEADS + head
    split_slots = split_slots_of(
        sizes, entry, max_splits, least_split, split_slots, tile
    )
    # Splits past the length wrote nothing.
    num_splits = tl.cdiv(length, split_slots)
    first_partial = item * max_splits * GROUP
    scores_now = position >= tl.load(first_queries + row).to(tl.int32)
    if READ:
        pages_read = tl.load(read_counts + item, mask=scores_now, other=0)
        of_pages = tl.cdiv(pages_read * BLOCK_SIZE, split_slots)
        num_splits = tl.where(scores_now, of_pages, num_splits)
        read_flags += first_page_of(
            logit_starts, row, sizes, entry, head, position, item, BUDGET, BLOCK_SIZE
        )

    if part < GROUP:
        merge_head(
            out, partial_outputs, partial_maxima, partial_sums,
            first_partial + part, sink_logits, head * GROUP + part, num_splits,
            GROUP, HEAD_SIZE, BLOCK_P, BLOCK_D,
        )  # fmt: skip
    if SCORED:  # noqa: SIM102  one is known when it is compiled
        if scores_now & (part * BLOCK_T < length):
            first = tl.load(logit_starts + row)
            first += logits_before(sizes, entry, head, position, BUDGET)
            update_scores(
                attention, state_strides, state, logits + first * GROUP,
                partial_maxima + first_partial, partial_sums + first_partial,
                losers + item, leaving_attention + item, read_flags,
                sink_logits, score_decay,
                part * BLOCK_T + tl.arange(0, BLOCK_T), num_splits, head, place,
                slot, budget, length, GROUP, BLOCK_SIZE, UNIT, COMPETES, READ,
                BLOCK_G, BLOCK_P,
            )  # fmt: skip
    if part == 0:
        if COMPETES:
            loser = tl.load(losers + item)
            if loser >= 0:
                graduate(
                    keys, keys_strides, values, values_strides, births,
                    state_strides, key_scales, value_scales, places, state, head,
                    slot, loser,
                    HEAD_SIZE, BLOCK_D, BLOCK_SIZE, UNIT, BLOCK_U,
                )  # fmt: skip
            # No thread may overwrite the graduate before all have read it.
            tl.debug_barrier()
        write_token(
            key + token.to(tl.int64) * key_strides[0] + head * key_strides[1],
            value + token.to(tl.int64) * value_strides[0] + head * value_strides[1],
            keys, keys_strides, values, values_strides, births, state_strides,
            key_scales, value_scales, places, state, head, slot, position, scores_now,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit
def merge_head(
    out, partial_outputs, partial_maxima, partial_sums, first, sink_logits,
    query_head, num_splits,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head, whose partials start at `first`."""
    split, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    exists, in_head = split < num_splits, d < HEAD_SIZE
    at = first + split * GROUP
    maxima = tl.load(partial_maxima + at, mask=exists, other=float("-inf"))
    maximum, of_sink = tl.max(maxima, axis=0), 0.0
    if sink_logits is not None:
        sink = tl.load(sink_logits + query_head).to(tl.float32)
        maximum = tl.maximum(maximum, sink)
        of_sink = tl.exp(sink - maximum)
    weight = tl.exp(maxima - maximum)
    sums = tl.load(partial_sums + at, mask=exists, other=0.0)
    parts = tl.load(
        partial_outputs + at[:, None] * HEAD_SIZE + d[None, :],
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )
    total = tl.sum(sums * weight, axis=0) + of_sink
    merged = tl.sum(parts * weight[:, None], axis=0) / total
    tl.store(out + d, merged.to(out.dtype.element_ty), mask=in_head)


@triton.jit
def update_scores(
    attention, state_strides, state, logits, partial_maxima, partial_sums,
    loser, leaving_attention, read_flags, sink_logits, score_decay, slots, num_splits,
    head, place, slot, budget, length, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr, COMPETES: tl.constexpr, READ: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add this query's probabilities to the attention of `slots`.

    `logits`: of the KV head's query heads, `length` each. With READ what is in pages
    that are not read gets nothing.
    """
    g, split = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_P)
    in_group = g < GROUP
    at = split[None, :] * GROUP + g[:, None]
    exists = in_group[:, None] & (split < num_splits)[None, :]
    maxima = tl.load(partial_maxima + at, mask=exists, other=-1.0e38)
    sums = tl.load(partial_sums + at, mask=exists, other=0.0)
    maximum = tl.max(maxima, axis=1)
    if sink_logits is not None:
        mine = sink_logits + head * GROUP + g
        sink = tl.load(mine, mask=in_group, other=0.0).to(tl.float32)
        maximum = tl.maximum(maximum, sink)
    total = tl.sum(sums * tl.exp(maxima - maximum[:, None]), axis=1)
    if sink_logits is not None:
        total += tl.exp(sink - maximum)

    held = is_occupied(slots, place, slot, budget, UNIT)
    gets = held
    if READ:
        flags = tl.load(read_flags + slots // BLOCK_SIZE, mask=held, other=0)
        gets = held & (flags != 0)
    z = tl.load(
        logits + g[:, None] * length + slots[None, :],
        mask=in_group[:, None] & gets[None, :],
        other=float("-inf"),
    )
    received = tl.exp(z - maximum[:, None]) / tl.where(in_group, total, 1.0)[:, None]

    source = slots
    if COMPETES:
        lost = tl.load(loser)
        won = (slots >= lost) & (slots < lost + UNIT)
        source = tl.where(won, slots - lost + slot, slots)
    offsets = page_offsets(state, source, held, head, state_strides, BLOCK_SIZE)
    # Another program may be writing the new token's attention to `slot`.
    readable = held & (source != slot)
    so_far = tl.load(attention + offsets, mask=readable, other=0.0)
    if COMPETES:
        so_far = tl.where((source == slot) & won, tl.load(leaving_attention), so_far)
    so_far = so_far * score_decay + tl.sum(received, axis=0)
    offsets = page_offsets(state, slots, held, head, state_strides, BLOCK_SIZE)
    tl.store(attention + offsets, so_far, mask=held)
