"""How the slots of a request are split over layers and KV heads, and where they are.

Uneven heads in even blocks: pages that one layer lends another.

A resident block is a page per layer and KV head. A head that wants fewer pages
than the request has blocks lends those of its last columns; a head that wants
more borrows them from heads of the same index in other layers, column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout


@dataclass(frozen=True)
class PageOf:
    """Where a head finds one of its pages.

    Attributes:
        layer: Whose page it is, as an index into the evicting layers.
        column: Which of the request's resident blocks.
    """

    layer: int
    column: int


@dataclass(frozen=True)
class Placement:
    """The slots of one request on this rank.

    Attributes:
        budget: Slots of a head on average.
        layouts: `[num_layers][num_kv_heads]` the slots of each head.
        pages: `[num_layers][num_kv_heads][blocks of the head]` where they are.
        grown_from: What grows to this, whose pages are the first of these; None:
            nothing does.
    """

    budget: int
    layouts: Sequence[Sequence[SlotLayout]]
    pages: Sequence[Sequence[Sequence[PageOf]]]
    grown_from: Placement | None = None

    @classmethod
    def of_blocks(
        cls,
        blocks: Sequence[Sequence[int]],
        budget_blocks: int,
        config: H2OConfig,
        block_size: int,
    ) -> Placement:
        """Give every head as many blocks as it wants; see `lend`.

        Args:
            blocks: `[num_layers][num_kv_heads]` blocks wanted.
            budget_blocks: Resident blocks of a request.
            config: The policy, which splits a head's slots.
            block_size: Slots of a block.
        """
        layouts = layouts_of(blocks, config, block_size)
        return cls(budget_blocks * block_size, layouts, lend(blocks, budget_blocks))

    @classmethod
    def alike(
        cls,
        shape: tuple[int, int],
        budgets: Sequence[int],
        config: H2OConfig,
        block_size: int,
    ) -> Placement:
        """Give every head as many blocks, of its own.

        Args:
            shape: Layers and KV heads.
            budgets: Blocks of a head: that which grows to the other, if there is one,
                and the other.
            config: The policy.
            block_size: Slots of a block.
        """
        placement = None
        for blocks in budgets:
            layouts = layouts_of([[blocks]], config, block_size)[0] * shape[1]
            own = [
                [PageOf(layer, column) for column in range(blocks)]
                for layer in range(shape[0])
            ]
            pages = [[mine] * shape[1] for mine in own]
            slots = blocks * block_size
            placement = cls(slots, [layouts] * shape[0], pages, placement)
        assert placement is not None
        return placement

    def grown(
        self, budget_blocks: int, config: H2OConfig, block_size: int
    ) -> Placement:
        """Give every head as many blocks more, of its own.

        Args:
            budget_blocks: Of a head on average, from then on.
            config: The policy.
            block_size: Slots of a block.
        """
        first = self.budget // block_size
        layouts = [
            [
                SlotLayout.of_blocks(
                    config, block_size, layout.budget_blocks + budget_blocks - first
                )
                for layout in layer
            ]
            for layer in self.layouts
        ]
        pages = [
            [
                [*mine, *(PageOf(layer, n) for n in range(first, budget_blocks))]
                for mine in heads
            ]
            for layer, heads in enumerate(self.pages)
        ]
        return Placement(budget_blocks * block_size, layouts, pages, self)


def layouts_of(
    blocks: Sequence[Sequence[int]], config: H2OConfig, block_size: int
) -> list[list[SlotLayout]]:
    """The slots of heads that have so many blocks, `[num_layers][num_kv_heads]`."""
    return [
        [SlotLayout.of_blocks(config, block_size, wanted) for wanted in layer]
        for layer in blocks
    ]


def lend(
    blocks: Sequence[Sequence[int]], budget_blocks: int
) -> list[list[list[PageOf]]]:
    """Give every head its pages: its own first, then borrowed ones.

    Args:
        blocks: `[num_layers][num_kv_heads]` pages wanted; for every KV head their
            sum over the layers is at most `num_layers * budget_blocks`.
        budget_blocks: Resident blocks of a request.

    Returns:
        `[num_layers][num_kv_heads][blocks]` pages, no page twice.
    """
    return lend_by_budget([blocks], [budget_blocks])


def lend_by_budget(
    blocks: Sequence[Sequence[Sequence[int]]], budgets: Sequence[int]
) -> list[list[list[PageOf]]]:
    """Give every head the pages of the largest budget; of a smaller one the first.

    The pages of a budget are in as many columns as it has blocks, so that a request
    whose budget grows leaves everything where it is.

    Args:
        blocks: `[num_budgets][num_layers][num_kv_heads]` pages wanted, see `lend`; of a
            larger budget no head wants less.
        budgets: Resident blocks of a request, ascending.

    Returns:
        See `lend`; of the smallest budget they are the same.
    """
    pages: list[list[list[PageOf]]] = [[[] for _ in layer] for layer in blocks[0]]
    for head in range(len(blocks[0][0])):
        mine, first = [layer[head] for layer in pages], 0
        for wanted, budget in zip(blocks, budgets, strict=True):
            _deal(mine, [layer[head] for layer in wanted], range(first, budget))
            first = budget
    return pages


def _deal(pages: list[list[PageOf]], wanted: Sequence[int], columns: range) -> None:
    """Deal the pages of some columns to the heads of one index, by layer.

    Args:
        pages: `[num_layers]` what each has, appended to.
        wanted: `[num_layers]` how many each is to have.
        columns: Whose pages are dealt.
    """
    free: list[PageOf] = []
    for layer, (mine, count) in enumerate(zip(pages, wanted, strict=True)):
        own = [PageOf(layer, column) for column in columns]
        lacking = count - len(mine)
        mine += own[:lacking]
        free += own[lacking:]
    borrowed = iter(free)
    for mine, count in zip(pages, wanted, strict=True):
        while len(mine) < count:
            mine.append(next(borrowed))
