"""Budgets by head without a profile: the kernel benchmarks say who gets what."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h2o.attention.ops import HeadSlots
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.lending import lend


def lent_heads(
    layers: Sequence[Pages],
    blocks: list[list[int]],
    budget_blocks: int,
    block_size: int,
    config: H2OConfig,
) -> list[HeadSlots]:
    """The slots of every layer whose heads get `blocks[layer][head]`; see `lend`."""
    pages = lend(blocks, budget_blocks)
    return [
        HeadSlots(
            [SlotLayout.of_blocks(config, block_size, n) for n in mine],
            pages[i],
            layers,
            i,
        )
        for i, mine in enumerate(blocks)
    ]
