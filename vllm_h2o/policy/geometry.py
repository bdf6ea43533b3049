"""How a resident block is cut into pages.

A block is the unit of vLLM's pool, and of what a request holds. A resident one is its
request's alone, so that what lies in it where is ours to say: it is pages of fewer
slots, one after the other, and heads share out pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import floats_of_page, state_bytes
from vllm_h2o.policy.quantization import NUM_SCALES

_SLOTS_UNIT = 16
"""Slots of a page are a multiple of it: kernels read so many at once."""
_MOST_SLOTS = 64
"""Of a page whose slots take fewer bytes than tokens: with more of them a kernel is not
faster, and heads have less to share out."""


@dataclass(frozen=True)
class ResidentBlock:
    """What a resident block is cut into.

    Attributes:
        page_slots: Slots of a page.
        num_pages: Pages of a block.
    """

    page_slots: int
    num_pages: int

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.page_slots * self.num_pages

    @classmethod
    def of(
        cls,
        config: H2OConfig,
        block_size: int,
        head_size: int,
        item_bytes: int,
        most_page_slots: int = 0,
    ) -> ResidentBlock:
        """Cut a block.

        Args:
            config: The policy.
            block_size: Tokens of a block of vLLM's.
            head_size: Of keys and of values.
            item_bytes: Of an element of vLLM's.
            most_page_slots: Slots of a page at most; 0: pages are blocks. Ignored with
                int8, where `narrow_pages` chooses.
        """
        if config.quantizes:
            block_bytes = block_size * 2 * head_size * item_bytes
            sizes = (config, head_size, item_bytes)
            return cls(
                *narrow_pages(block_bytes, lambda slots: bytes_of_page(*sizes, slots))
            )
        whole = config.eviction_unit == "block"
        slots = page_slots_of(block_size, 0 if whole else most_page_slots)
        return cls(slots, block_size // slots)


def bytes_of_page(
    config: H2OConfig, head_size: int, item_bytes: int, slots: int
) -> int:
    """Bytes of a page in one KV head: keys and values, then the state of its slots.

    Args:
        config: The policy.
        head_size: Of keys and of values.
        item_bytes: Of an element of vLLM's.
        slots: Of the page.
    """
    item, num_fields = item_bytes, len(config.method.fields)
    if config.quantizes:
        item, num_fields = 1, num_fields + NUM_SCALES
    floats = floats_of_page(head_size, slots, config.reads_part, config.merges)
    return slots * 2 * head_size * item + state_bytes(1, slots, num_fields, floats)


def slots_per_token(config: H2OConfig, head_size: int, item_bytes: int) -> float:
    """Slots that the bytes of a token in vLLM's cache hold; see `bytes_of_page`."""
    token = 2 * head_size * item_bytes
    slot = bytes_of_page(config, head_size, item_bytes, _MOST_SLOTS) / _MOST_SLOTS
    return token / slot


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


def narrow_pages(block_bytes: int, page_bytes: Callable[[int], int]) -> tuple[int, int]:
    """Slots of a page, and pages of a block, where slots take fewer bytes than tokens.

    A resident block holds as many as go into it. It may have to be longer than vLLM's,
    and so all blocks, for one more page: what is least is the product of what a block
    takes per token before and per slot after its request is compressed.

    Args:
        block_bytes: What vLLM needs of a block.
        page_bytes: Returns the bytes of a page of so many slots.
    """
    cuts = []
    for slots in range(_SLOTS_UNIT, _MOST_SLOTS + 1, _SLOTS_UNIT):
        size = page_bytes(slots)
        for count in (block_bytes // size, block_bytes // size + 1):
            longest = max(block_bytes, count * size)
            if count:
                cuts.append((longest**2 / (count * slots), -slots, count))
    _, slots, per_block = min(cuts)
    return -slots, per_block


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
