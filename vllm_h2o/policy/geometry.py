"""How a resident block is cut into pages.

A block is the unit of vLLM's pool, and of what a request holds. A resident one is its
request's alone, so that what lies in it where is ours to say: it is pages of fewer
slots, one after the other, and heads share out pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_SLOTS_UNIT = 16
"""Slots of a page are a multiple of it: kernels read so many at once."""


def page_slots_of(block_size: int, most: int) -> int:
    """Slots of a page: as many as go into a block without a rest.

    Args:
        block_size: Slots of a block.
        most: Slots of a page; 0: pages are blocks.
    """
    for slots in range(most // _SLOTS_UNIT * _SLOTS_UNIT, 0, -_SLOTS_UNIT):
        if block_size % slots == 0:
            return slots
    return block_size


@dataclass(frozen=True)
class BlockCut:
    """The pages of all blocks of a pool, numbered by where they begin.

    Attributes:
        per_block: Pages of a block.
        block_step: From the first page of a block to that of the next.
        page_step: From a page to the next of the block.
        unit: Bytes from what has a number to what has the next.
    """

    per_block: int
    block_step: int
    page_step: int
    unit: int

    @classmethod
    def of(cls, block_bytes: int, page_bytes: int, per_block: int) -> BlockCut:
        """Cut blocks, each of which may be longer than its pages."""
        if per_block == 1:
            return cls(1, 1, 1, block_bytes)
        assert per_block * page_bytes <= block_bytes
        unit = math.gcd(block_bytes, page_bytes)
        return cls(per_block, block_bytes // unit, page_bytes // unit, unit)

    def pages(self, blocks: torch.Tensor) -> torch.Tensor:
        """Numbers of the pages of blocks, `[.., n]` to `[.., n * per_block]` int32."""
        if self.per_block == 1:
            return blocks
        first = blocks[..., None] * self.block_step
        steps = torch.arange(self.per_block, dtype=blocks.dtype, device=blocks.device)
        return (first + steps * self.page_step).flatten(-2)
