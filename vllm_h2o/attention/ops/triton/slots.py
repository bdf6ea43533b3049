"""Device functions shared by the kernels: from positions to slots to addresses.

Slot numbers are int32, addresses int64: a layer's cache passes 2**31 elements.

`heads`, budgets by head, is None or the device tensors of `DecodeParams.head_tables`:
`(sizes, columns, kv_offsets, state_offsets)`, each with an entry for each KV head of
each placement: four sizes, and `head_blocks` of the others. `places` is where the
pages of one row and KV head are: `(table, columns, offsets)`, the row's block ids, and
of each page its column and its distance from this layer's pages, in elements of what
is addressed; the latter two are None where page i is block i.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sizes_of(heads, entry, HEAVY: tl.constexpr, BUDGET: tl.constexpr):
    """`(heavy slots, budget)` of a KV head, of that entry in the tables."""
    if heads is not None:
        return tl.load(heads[0] + 4 * entry + 1), tl.load(heads[0] + 4 * entry)
    else:
        return HEAVY, BUDGET


@triton.jit
def logits_before(heads, entry, head, position, BUDGET: tl.constexpr):
    """Slots of a row's KV heads before this one that have a logit.

    The smaller sum of two is never below the sum of the smaller ones: heads that are
    `min(before, head * (position + 1))` apart have room for their
    `min(budget, position + 1)` logits each.
    """
    before = head * BUDGET
    if heads is not None:
        before = tl.load(heads[0] + 4 * entry + 3)
    return tl.minimum(before, head * (position + 1))


@triton.jit
def places_of(table, heads, entry, head_blocks):
    """`(places in K and V, places in the state)` of a KV head of a row, by head.

    Only where there are `heads`: Triton 3.6 can not return None in a tuple.
    """
    row = entry * head_blocks
    columns = heads[1] + row
    return (table, columns, heads[2] + row), (table, columns, heads[3] + row)


@triton.jit
def place_of(position, heads, entry, grown_at, row):
    """`policy.layout.place_of`: the position, until the row's budget grows."""
    place = position
    if grown_at is not None:
        place = place_after(position, heads, entry, tl.load(grown_at + row))
    return place


@triton.jit
def place_after(position, heads, entry, grown_at):
    """The same where the count is at hand."""
    before = tl.load(heads[0] + 4 * entry + 2)
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
        # They are multiples of 16 elements (`DecodeParams.head_tables`): said here, or
        # the compiler would read K and V element by element.
        offsets += tl.load(lent + page, mask=mask, other=0) // 16 * 16
    return offsets


@triton.jit
def soft_capped(logits, softcap, SOFTCAP: tl.constexpr):
    """`softcap * tanh(logits / softcap)`, where there is one."""
    if SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits
