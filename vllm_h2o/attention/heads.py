"""Budgets by KV head: from a model's profile to the slots of each layer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder, lengths_of
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import PageOf, Placement, layouts_of, lend_by_budget
from vllm_h2o.policy.profile import (
    HeadProfile,
    Spending,
    splits,
)


class HeadBudgets:
    """How a model's KV heads split the budgets of an engine's requests.

    The budgets that requests climb are split one from the other, for the lengths that
    each serves; a number of tokens on its own, for a class of lengths.
    """

    def __init__(
        self,
        profile: HeadProfile,
        config: H2OConfig,
        ladder: Ladder,
        page_slots: int,
        kv_heads: slice = slice(None),
        rounds: bool = False,
    ) -> None:
        """Split the ladder's budgets.

        Args:
            profile: The model's profile.
            config: The policy.
            ladder: The budgets of requests that ask for none.
            page_slots: Slots of a page, in which heads have theirs.
            kv_heads: This rank's of the model's KV heads.
            rounds: Whether a request's own budget is one of the ladder; its heads then
                have what they have there, and no layer more.
        """
        self._rounds = rounds
        self._profile, self._config, self._ladder = profile, config, ladder
        self._page_slots, self._kv_heads = page_slots, kv_heads
        budgets = [self._pages_of(blocks) for blocks in ladder.budgets]
        of_model = self._splits_of(budgets, ladder.lengths)
        # Of any of the model's heads, or ranks would split differently.
        self._richest = int(of_model[-1].max())
        self._splits = [split[:, kv_heads].tolist() for split in of_model]

    def _pages_of(self, budget_blocks: int) -> int:
        return budget_blocks * self._ladder.block_size // self._page_slots

    def _splits_of(
        self, budgets: Sequence[int], lengths: Sequence[int], most: int | None = None
    ) -> list[npt.NDArray[np.int64]]:
        size = self._page_slots
        fewest = SlotLayout.fewest_blocks(self._config, size)
        profile = self._profile
        curves = json.dumps(
            [profile.grid_tokens, profile.errors, "", profile.context_tokens]
        )
        return _splits(curves, tuple(budgets), tuple(lengths), size, fewest, most)

    @functools.cached_property
    def _pages(self) -> list[list[list[PageOf]]]:
        budgets = [self._pages_of(blocks) for blocks in self._ladder.budgets]
        return lend_by_budget(self._splits, budgets)

    def split(
        self, budget_blocks: int, climbs: bool = True, length_class: int = 0
    ) -> list[list[int]]:
        """`[num_layers][num_kv_heads]` pages of a budget.

        Args:
            budget_blocks: Blocks of a head on average.
            climbs: Whether it is on the ladder.
            length_class: See `vllm_h2o.policy.ladder.Climb`.
        """
        ladder = self._ladder
        if (climbs or self._rounds) and not length_class:
            return self._splits[ladder.budgets.index(budget_blocks)]
        slots, longest = budget_blocks * ladder.block_size, ladder.lengths[-1]
        length = lengths_of(slots, longest)[length_class]
        budget = self._pages_of(budget_blocks)
        (of_model,) = self._splits_of([budget], [length], self._richest)
        return of_model[:, self._kv_heads].tolist()

    def placement(
        self, budget_blocks: int, climbs: bool = True, length_class: int = 0
    ) -> Placement:
        """Where these are; arguments as of `split`."""
        config, size = self._config, self._page_slots
        if not climbs or length_class:
            wanted = self.split(budget_blocks, climbs, length_class)
            budget = self._pages_of(budget_blocks)
            return Placement.of_blocks(wanted, budget, config, size)
        placement = None
        for blocks in self._ladder.up_to(budget_blocks)[-2:]:
            wanted = self.split(blocks)
            pages = [
                [mine[:count] for mine, count in zip(heads, counts, strict=True)]
                for heads, counts in zip(self._pages, wanted, strict=True)
            ]
            layouts = layouts_of(wanted, config, size)
            slots = self._pages_of(blocks) * size
            placement = Placement(slots, layouts, pages, placement)
        assert placement is not None
        return placement

    def richest_slots(self, num_kv_heads: int) -> tuple[int, int]:
        """Slots of the richest KV head, and of the heads of the richest layer.

        Args:
            num_kv_heads: Of a layer, on a rank. Which of the model's these are does not
                matter: the result is the same on all ranks.
        """
        size, most = self._page_slots, max(map(max, self._splits[-1]))
        layers = (_richest_layer(split, num_kv_heads) for split in self._of_engines)
        return size * most, size * max(layers)

    def slots_per_token(self, num_kv_heads: int) -> float:
        """Slots that the heads of one layer have for a token of a request's budget.

        At most, whatever the budget.

        Args:
            num_kv_heads: See `richest_slots`.
        """
        return max(
            _richest_layer(split, num_kv_heads) / self._pages_of(budget)
            for budget, split in [
                *zip(self._ladder.budgets, self._splits, strict=True),
                *((self._ladder.budgets[-1], split) for split in self._of_engines),
            ]
        )

    @functools.cached_property
    def _of_engines(self) -> list[list[list[int]]]:
        """Splits of the engine's budget, for all length classes."""
        blocks = self._ladder.budgets[-1]
        return [
            self.split(blocks, True, each) for each in range(self._ladder.num_classes)
        ]


def _richest_layer(split: Sequence[Sequence[int]], num_kv_heads: int) -> int:
    """Pages that so many heads of one layer have together at most."""
    return max(sum(sorted(layer)[-num_kv_heads:]) for layer in split)


@functools.lru_cache(maxsize=128)
def _splits(
    curves: str,
    budgets: tuple[int, ...],
    lengths: tuple[int, ...],
    block_size: int,
    fewest: int,
    richest: int | None,
) -> list[npt.NDArray[np.int64]]:
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
        if richest is not None:
            most = min(most, richest)
        stages.append(Spending(stretched, blocks, most, more))
    return splits(stages, block_size, fewest)
