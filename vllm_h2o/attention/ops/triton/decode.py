"""Resident decode attention, split over slots."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.graduate import NOBODY, find_loser
from vllm_h2o.attention.ops.triton.quantization import rounded
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
    soft_capped,
    split_slots_of,
    token_of,
)

# Finite, so that a split without a single token merges with weight exp(-huge)
# and not exp(inf - inf).
_NO_LOGIT = tl.constexpr(-1.0e38)

# Differs by layer and by the number of rows: one compilation must serve them all.
VARYING = ["max_splits", "draft"]


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    query, query_strides, key, key_strides, value, value_strides,
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales,
    table, table_stride, sizes, lists, positions, counts, starts, draft,
    first_queries, placements, grown_at,
    logits, logit_starts, partial_outputs, partial_maxima, partial_sums,
    losers, leaving_attention, read_pages, read_flags, read_counts,
    scale, softcap, max_splits, least_split, split_slots, tile,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    PINNED: tl.constexpr, UNIT: tl.constexpr, MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr, SCORED: tl.constexpr, COMPETES: tl.constexpr,
    READ: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Attention of one split of the slots of one row and KV head.

    Of the row's token of index `draft`, where rows have several (`counts`); rows that
    have fewer return at once.

        S      = occupied slots of the split, after graduation and write
        z[h,s] = scale * q[h] . K[s], soft-capped
        m[h]   = max_s z,  l[h] = sum_s exp(z - m),  o[h] = sum_s exp(z - m) V[s]

    Grid `(num_rows, num_kv_heads, max_splits)`; by head `(num_rows, splits summed over
    KV heads)`, in the placement where the sum is largest: programs past a row's own
    return at once, and so do all of a row of position -1, which is padding. What
    depends on budgets by head and on the number of rows is no constant: each layer and
    each batch would compile anew. The GROUP query heads of a KV head share each read
    of K and V. Writes `m`, `l`, `o` of the split, the logits `z` if the row's query
    scores, and (split 0, without READ) who loses its slot.

    Reference: graduate, write and attend of ops/reference.py. Deviations: the
    pages are not written here, because other splits of the head are reading
    them; a graduate is read where it still is, the new token from `key` and
    `value`, and `combine_kernel` moves both. Every split that holds heavy slots
    finds the loser for itself. With READ `rank_kernel` has found it, and a row that
    scores reads the pages which that has listed, one after the other. exp(z - m) is
    rounded to the type of Q before it multiplies V. Keys and values in int8 are read as
    steps: z and exp(z - m) are multiplied by their scales.
    """
    row = tl.program_id(0)
    position, token = token_of(positions, counts, starts, row, draft)
    first_entry = 0
    if sizes is not None:
        first_entry = tl.load(placements + row) * NUM_KV_HEADS
    split_slots = split_slots_of(
        sizes, first_entry, max_splits, least_split, split_slots, tile
    )
    head, split = head_and_part(
        sizes, first_entry, split_slots, 1, NUM_KV_HEADS, BLOCK_H
    )
    entry = first_entry + head
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    place = place_of(position, sizes, entry, grown_at, row)
    item = row.to(tl.int64) * NUM_KV_HEADS + head
    start, length = split * split_slots, tl.minimum(place + 1, budget)
    reads_part = False
    if READ:
        reads_part = position >= tl.load(first_queries + row).to(tl.int32)
        pages_read = tl.load(read_counts + item, mask=reads_part, other=0)
        length = tl.where(reads_part, pages_read * BLOCK_SIZE, length)
    end = tl.minimum(start + split_slots, length)
    if start >= end:
        return
    table += row.to(tl.int64) * table_stride
    places, state = (table, None, None), (table, None, None)
    if lists is not None:
        places, state = places_of(table, sizes, lists, entry)
    slot = slot_of(place, heavy, budget)

    loser = tl.full((), NOBODY, tl.int32)
    if COMPETES and READ:
        loser = tl.load(losers + item)
    elif COMPETES:
        graduates = (place >= budget) & (place % UNIT == 0)
        if graduates & (start < heavy):
            loser = find_loser(
                attention, births, state_strides, state, head, position,
                tl.load(first_queries + row).to(tl.int32), slot, heavy,
                PINNED, MEAN, UNIT, BLOCK_U, BLOCK_SIZE, CANDIDATES,
            )  # fmt: skip
        if split == 0:
            leaving = page_offsets(state, slot, True, head, state_strides, BLOCK_SIZE)
            tl.store(losers + item, loser)
            # Combine reads it after another program may have zeroed it.
            tl.store(leaving_attention + item, tl.load(attention + leaving))

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_group, in_head = g < GROUP, d < HEAD_SIZE
    q_offsets = token.to(tl.int64) * query_strides[0]
    q_offsets += (head * GROUP + g)[:, None] * query_strides[1] + d[None, :]
    q_mask = in_group[:, None] & in_head[None, :]
    q = tl.load(query + q_offsets, mask=q_mask, other=0.0)

    # The new token is in no page yet: it opens the sums of the split it is in.
    at_k = token.to(tl.int64) * key_strides[0] + head * key_strides[1] + d
    at_v = token.to(tl.int64) * value_strides[0] + head * value_strides[1] + d
    new_k = tl.load(key + at_k, mask=in_head, other=0.0).to(tl.float32)
    new_v = tl.load(value + at_v, mask=in_head, other=0.0).to(tl.float32)
    if key_scales is not None:
        new_k, new_v = rounded(new_k), rounded(new_v)
    new_z = tl.sum(q.to(tl.float32) * new_k[None, :], axis=1) * scale
    new_z = soft_capped(new_z, softcap, SOFTCAP)
    holds_new = (slot >= start) & (slot < end)
    if READ:
        first_page = first_page_of(
            logit_starts, row, sizes, entry, head, position, item, BUDGET, BLOCK_SIZE
        )
        holds_new = tl.where(reads_part, split == 0, holds_new)
    z_rows = item * GROUP + g
    scored_end = end
    if SCORED:
        # Before its first query a row has no logits: its blocks may be others' too.
        scores_now = position >= tl.load(first_queries + row).to(tl.int32)
        scored_end = tl.where(scores_now, end, start)
        first_z = tl.load(logit_starts + row)
        first_z += logits_before(sizes, entry, head, position, BUDGET)
        z_rows = first_z * GROUP + g * tl.minimum(place + 1, budget)
        z_mask = g < tl.where(holds_new & scores_now, GROUP, 0)
        tl.store(logits + z_rows + slot, new_z, mask=z_mask)
    maximum = tl.where(holds_new, new_z, _NO_LOGIT)
    total = tl.zeros([BLOCK_G], tl.float32) + tl.where(holds_new, 1.0, 0.0)
    output = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    output += tl.where(holds_new, new_v, 0.0)[None, :]

    for first in range(start, end, BLOCK_S):
        at_s = first + tl.arange(0, BLOCK_S)
        s = at_s
        if READ:
            listed = at_s < tl.where(reads_part, end, 0)
            page = read_pages + first_page + at_s // BLOCK_SIZE
            page = tl.load(page, mask=listed, other=0)
            s = tl.where(listed, page * BLOCK_SIZE + at_s % BLOCK_SIZE, at_s)
        exists = at_s < end
        held = is_occupied(s, place, slot, budget, UNIT) & exists & (s != slot)
        source = s
        if COMPETES:
            replaced = (s >= loser) & (s < loser + UNIT)
            source = tl.where(replaced, s - loser + slot, s)
        at = page_offsets(places, source, held, head, keys_strides, BLOCK_SIZE)
        k_mask = in_head[:, None] & held[None, :]
        k = tl.load(
            keys + at[None, :] + d[:, None] * keys_strides[3], mask=k_mask, other=0.0
        )
        if key_scales is not None:
            k = k.to(tl.float32).to(q.dtype)  # no type between loses a step
        z = tl.dot(q, k, input_precision="ieee") * scale
        if key_scales is not None:
            scaled = page_offsets(state, source, held, head, state_strides, BLOCK_SIZE)
            z *= tl.load(key_scales + scaled, mask=held, other=0.0)[None, :]
        z = soft_capped(z, softcap, SOFTCAP)
        if SCORED:
            at_z = z_rows[:, None] + s[None, :]
            scored = held & (at_s < scored_end)
            tl.store(logits + at_z, z, mask=in_group[:, None] & scored[None, :])
        z = tl.where(held[None, :], z, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, axis=1))
        weight = tl.exp(z - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        at = page_offsets(places, source, held, head, values_strides, BLOCK_SIZE)
        v_mask = held[:, None] & in_head[None, :]
        v = tl.load(
            values + at[:, None] + d[None, :] * values_strides[3],
            mask=v_mask,
            other=0.0,
        )
        total = total * rescale + tl.sum(weight, axis=1)
        output = output * rescale[:, None]
        if value_scales is not None:
            v = v.to(tl.float32).to(q.dtype)
            scales = tl.load(value_scales + scaled, mask=held, other=0.0)
            if q.dtype == tl.float16:
                # As parts of the largest: as they are they leave it few digits.
                largest = tl.max(scales, axis=0)
                largest = tl.where(largest == 0.0, 1.0, largest)
                weight *= (scales / largest)[None, :]
                part = tl.dot(weight.to(q.dtype), v, input_precision="ieee")
                output += largest * part
            else:
                weight *= scales[None, :]
                output = tl.dot(weight.to(q.dtype), v, output, input_precision="ieee")
        else:
            output = tl.dot(weight.to(q.dtype), v, output, input_precision="ieee")
        maximum = new_maximum

    part = (item * max_splits + split) * GROUP + g
    tl.store(partial_maxima + part, maximum, mask=in_group)
    tl.store(partial_sums + part, total, mask=in_group)
    out_offsets = part[:, None] * HEAD_SIZE + d[None, :]
    tl.store(partial_outputs + out_offsets, output, mask=q_mask)
