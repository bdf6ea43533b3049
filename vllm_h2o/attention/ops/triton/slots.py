"""Device functions shared by the kernels: from positions to slots to addresses.

Slot numbers are int32, addresses int64: a layer's cache passes 2**31 elements.

`sizes` and `lists` are what `DeviceTables` has, budgets by head and where their pages
are; `entry` is of a KV head in a placement. Both are None where all have the same
budget, and `lists` where all have pages of their own. `places` is where the pages of
one row and KV head are: `(table, columns, offsets)`, the row's block ids, and of each
page its column and its distance from this layer's pages, in elements of what is
addressed; the latter two are None where page i is block i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.device_tables import NUM_SIZES

_SIZES = tl.constexpr(NUM_SIZES)


@triton.jit
def sizes_of(sizes, entry, HEAVY: tl.constexpr, BUDGET: tl.constexpr):
    """`(heavy slots, budget)` of a KV head, of that entry in the tables."""
    if sizes is not None:
        at = sizes + _SIZES * entry
        return tl.load(at + 1), tl.load(at)
    else:
        return HEAVY, BUDGET


@triton.jit
def logits_before(sizes, entry, head, position, BUDGET: tl.constexpr):
    """Slots of a row's KV heads before this one that have a logit.

    The smaller sum of two is never below the sum of the smaller ones: heads that are
    `min(before, head * (position + 1))` apart have room for their
    `min(budget, position + 1)` logits each.
    """
    before = head * BUDGET
    if sizes is not None:
        before = tl.load(sizes + _SIZES * entry + 3)
    return tl.minimum(before, head * (position + 1))


@triton.jit
def first_page_of(
    logit_starts, row, sizes, entry, head, position, item,
    BUDGET: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where what a row that scores has of its pages in a KV head begins.

    Packed as its logits are: a page has BLOCK_SIZE of these, and each KV head one page
    more, as none begins where the last page of the one before ends.
    """
    first = tl.load(logit_starts + row)
    first += logits_before(sizes, entry, head, position, BUDGET)
    return first // BLOCK_SIZE + item


@triton.jit
def head_and_part(
    sizes, first_entry, part_slots, fewest,
    NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`(KV head, which part of its slots)` that this program of a row is for.

    Where all heads have the same budget these are the program's second and third
    number. By head the second number counts the row's programs: a head has
    `max(fewest, ceil(budget / part_slots))` of them, and those of heads with larger
    budgets start first, since they have the longest parts. A program that is one too
    many gets a part that its head does not have.

    Host side: `DeviceTables.most_splits` and `most_parts`, which count alike.

    Args:
        sizes: See above.
        first_entry: Of the first KV head in the row's placement.
        part_slots: Slots of a part.
        fewest: Programs of a head, at least.
        NUM_KV_HEADS: Of the layer.
        BLOCK_H: The least power of two that is not below `NUM_KV_HEADS`.
    """
    head, part = tl.program_id(1), tl.program_id(2)
    if sizes is not None:
        program = head
        rank = tl.arange(0, BLOCK_H)
        ranked, exists = sizes + _SIZES * (first_entry + rank) + 6, rank < NUM_KV_HEADS
        heads = tl.load(ranked, mask=exists, other=0)
        budgets = tl.load(ranked + 1, mask=exists, other=0)
        parts = tl.where(exists, tl.maximum(tl.cdiv(budgets, part_slots), fewest), 0)
        ends = tl.cumsum(parts)
        mine = (program >= ends - parts) & (program < ends)
        head = tl.sum(tl.where(mine, heads, 0))
        part = program - tl.sum(tl.where(mine, ends - parts, 0))
    return head, part


@triton.jit
def split_slots_of(sizes, entry, max_splits, least, split_slots, tile):
    """Slots of a split: the richest head of each budget has as many splits.

    Host side: `DeviceTables.most_splits`.

    Args:
        sizes: See above.
        entry: Of any KV head of the row's placement.
        max_splits: Of the richest head.
        least: No split has fewer slots, but for the last of a head.
        split_slots: Where all have the same budget.
        tile: Slots of a split are a multiple of.
    """
    if sizes is not None:
        richest = tl.load(sizes + _SIZES * entry + 5)
        split_slots = tl.cdiv(tl.cdiv(richest, max_splits), tile) * tile
        split_slots = tl.maximum(split_slots, least)
    return split_slots


@triton.jit
def places_of(table, sizes, lists, entry):
    """`(places in K and V, places in the state)` of a KV head of a row.

    Only where there are `lists`: Triton 3.6 can not return None in a tuple.
    """
    start = tl.load(sizes + _SIZES * entry + 4)
    columns = lists[0] + start
    return (table, columns, lists[1] + start), (table, columns, lists[2] + start)


@triton.jit
def token_of(positions, counts, starts, row, draft):
    """`(position, index in the batch)` of a row's token of index `draft`.

    The position is -1 where the row has no such token, or is padding.
    """
    position, token = tl.load(positions + row).to(tl.int32), row
    if counts is not None:
        exists = (position >= 0) & (draft < tl.load(counts + row))
        position = tl.where(exists, position + draft, -1)
        token = tl.load(starts + row) + draft
    return position, token


@triton.jit
def place_of(position, sizes, entry, grown_at, row):
    """`policy.layout.place_of`: the position, until the row's budget grows."""
    place = position
    if grown_at is not None:
        place = place_after(position, sizes, entry, tl.load(grown_at + row))
    return place


@triton.jit
def place_after(position, sizes, entry, grown_at):
    """The same where the count is at hand."""
    before = tl.load(sizes + _SIZES * entry + 2)
    grown_at = grown_at.to(tl.int32)
    return position - grown_at + tl.minimum(grown_at, before)


@triton.jit
def slot_of(place, heavy, budget):
    """`SlotLayout.slot`: appended below `heavy`, then round the ring."""
    return tl.where(place < heavy, place, heavy + (place - heavy) % (budget - heavy))


@triton.jit
def is_occupied(slots, place, slot, budget, UNIT: tl.constexpr):
    """Which `slots` hold a token once the one at `place` is in `slot`."""
    occupied = (slots <= place) & (slots < budget)
    if UNIT > 1:
        # The ring block that is being rewritten holds only its new tokens.
        last = tl.where(place >= budget, slot, budget)
        occupied = occupied & ((slots <= last) | (slots // UNIT != last // UNIT))
    return occupied


@triton.jit
def page_offsets(places, slots, mask, head, strides, BLOCK_SIZE: tl.constexpr):
    """Offsets of slots of a KV head, for strides `(block, head, slot, ...)`."""
    table, columns, lent = places
    page = slots // BLOCK_SIZE
    column = page
    if columns is not None:
        column = tl.load(columns + page, mask=mask, other=0)
    block = tl.load(table + column, mask=mask, other=0).to(tl.int64)
    offsets = block * strides[0] + head * strides[1] + (slots % BLOCK_SIZE) * strides[2]
    if lent is not None:
        # They are multiples of 16 elements (`device_tables`): said here, or
        # the compiler would read K and V element by element.
        offsets += tl.load(lent + page, mask=mask, other=0) // 16 * 16
    return offsets


@triton.jit
def soft_capped(logits, softcap, SOFTCAP: tl.constexpr):
    """`softcap * tanh(logits / softcap)`, where there is one."""
    if SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits
