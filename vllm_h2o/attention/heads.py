"""Budgets by KV head: from a model's profile to the slots of each layer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import PageOf, Placement, lend_by_budget
from vllm_h2o.policy.profile import (
    HeadProfile,
    Spending,
    SpendingOrder,
    spending_order,
)


class HeadBudgets:
    """How a model's KV heads split the budgets of an engine's requests.

    The budgets that requests climb are split one from the other, for the lengths that
    each serves; any other is split on its own.
    """

    def __init__(
        self,
        profile: HeadProfile,
        config: H2OConfig,
        ladder: Ladder,
        kv_heads: slice = slice(None),
    ) -> None:
        """Split the ladder's budgets.

        Args:
            profile: The model's profile.
            config: The policy.
            ladder: The budgets of requests that ask for none.
            kv_heads: This rank's of the model's KV heads.
        """
        self._profile, self._config, self._ladder = profile, config, ladder
        self._kv_heads = kv_heads
        order = self._order(ladder.budgets, ladder.lengths)
        self._blocks = [order.blocks(blocks).tolist() for blocks in ladder.budgets]

    def _order(self, budgets: Sequence[int], lengths: Sequence[int]) -> SpendingOrder:
        size = self._ladder.block_size
        fewest = SlotLayout.fewest_blocks(self._config, size)
        profile = self._profile
        curves = json.dumps(
            [profile.grid_tokens, profile.errors, "", profile.context_tokens]
        )
        order = _ordered(curves, tuple(budgets), tuple(lengths), size, fewest)
        return order.of_heads(self._kv_heads)

    @functools.cached_property
    def _pages(self) -> list[list[list[PageOf]]]:
        return lend_by_budget(self._blocks, self._ladder.budgets)

    def blocks(self, budget_blocks: int) -> list[list[int]]:
        """`[num_layers][num_kv_heads]` blocks of a budget.

        Args:
            budget_blocks: Of a head on average.
        """
        ladder = self._ladder
        if budget_blocks in ladder.budgets:
            return self._blocks[ladder.budgets.index(budget_blocks)]
        longest = ladder.lengths[-1]
        if ladder.share is not None:
            served = int(budget_blocks * ladder.block_size / ladder.share)
            longest = min(served, longest)
        blocks = self._order([budget_blocks], [longest]).blocks(budget_blocks)
        return blocks.tolist()

    def placement(self, budget_blocks: int) -> Placement:
        """Where these are; argument as of `blocks`."""
        config, size = self._config, self._ladder.block_size
        if budget_blocks not in self._ladder.budgets:
            wanted = self.blocks(budget_blocks)
            return Placement.of_blocks(wanted, budget_blocks, config, size)
        placement = None
        for blocks in self._ladder.up_to(budget_blocks)[-2:]:
            wanted = self.blocks(blocks)
            pages = [
                [mine[:count] for mine, count in zip(heads, counts, strict=True)]
                for heads, counts in zip(self._pages, wanted, strict=True)
            ]
            split = Placement.of_blocks(wanted, blocks, config, size)
            placement = replace(split, pages=pages, grown_from=placement)
        assert placement is not None
        return placement

    def richest_slots(self, num_kv_heads: int) -> tuple[int, int]:
        """Slots of the richest KV head, and of the heads of the richest layer.

        Args:
            num_kv_heads: Of a layer, on a rank. Which of the model's these are does not
                matter: the result is the same on all ranks.
        """
        size, blocks = self._ladder.block_size, self._blocks[-1]
        own = [sum(sorted(layer)[-num_kv_heads:]) for layer in blocks]
        return size * max(map(max, blocks)), size * max(own)


@functools.lru_cache(maxsize=8)
def _ordered(
    curves: str,
    budgets: tuple[int, ...],
    lengths: tuple[int, ...],
    block_size: int,
    fewest: int,
) -> SpendingOrder:
    """Once for all that ask at startup: long contexts and many layers take seconds."""
    profile = HeadProfile(*json.loads(curves))
    stages: list[Spending] = []
    for blocks, length in zip(budgets, lengths, strict=True):
        # Blocks that a request can fill before it grows once more, or has at most.
        more = None
        if stages:
            more = length // block_size - stages[-1].max_blocks
        most = -(-length // block_size)
        stretched = profile.stretched(most * block_size, blocks * block_size)
        stages.append(Spending(stretched, blocks, most, more))
    return spending_order(stages, block_size, fewest)
