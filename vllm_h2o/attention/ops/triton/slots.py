"""Device functions shared by the kernels: from positions to slots to addresses.

Slot numbers are int32, addresses int64: a layer's cache passes 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_of(position, HEAVY: tl.constexpr, RECENT: tl.constexpr):
    """`SlotLayout.slot`: appended below HEAVY, then round the ring."""
    return tl.where(position < HEAVY, position, HEAVY + (position - HEAVY) % RECENT)


@triton.jit
def is_occupied(slots, position, slot, BUDGET: tl.constexpr, UNIT: tl.constexpr):
    """Which `slots` hold a token once the one at `position` is in `slot`."""
    occupied = (slots <= position) & (slots < BUDGET)
    if UNIT > 1:
        # The ring block that is being rewritten holds only its new tokens.
        last = tl.where(position >= BUDGET, slot, BUDGET)
        occupied = occupied & ((slots <= last) | (slots // UNIT != last // UNIT))
    return occupied


@triton.jit
def page_offsets(table, slots, mask, head, strides, BLOCK_SIZE: tl.constexpr):
    """Offsets of slots of a KV head, for strides `(block, head, slot, ...)`."""
    block = tl.load(table + slots // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return block * strides[0] + head * strides[1] + (slots % BLOCK_SIZE) * strides[2]


@triton.jit
def soft_capped(logits, softcap, SOFTCAP: tl.constexpr):
    """`softcap * tanh(logits / softcap)`, where there is one."""
    if SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits
