"""The placements of requests, where the kernels read them.

The tensors of a table stay where they are and are written in place: the C kernels keep
their addresses. A GPU's kernels read a copy that is made when a layer first runs, see
`device_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.request_tables import RequestTables
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.methods import Bounds, Queries, State
from vllm_h2o.policy.placement import PageOf, Placement

UNIFORM, BY_HEAD = 0, 1
"""Indices in a table: of a request that does not fill its budget, whose heads are all
alike; and of one that does, where all requests split their slots over heads alike."""


class PlacementTable:
    """The placements of a KV cache group.

    At the index `UNIFORM` all heads have the slots of the engine's layout, and page i
    of a head is in the resident block of column i. What is at the others is said by
    `BY_HEAD`, `BudgetPlacements` and `RequestPlacements`.

    What no placement has been put into takes no memory yet.

    Attributes:
        layers: Pages of all evicting layers.
        most_blocks: `[num_layers]` of a head, in any placement.
        capacity: How many placements there is room for.
        page_slots: Slots of a page.
        has_own_pages: Whether page i of every head is its own of column i, in all
            placements.
        first_own: Index from which on they are of requests that split their slots each
            in its own way; None: there are none.
        sizes: `[num_layers, capacity, num_kv_heads, 3]` int64: budget, heavy slots, and
            the budget before it grew to this one.
        order: `[num_layers, capacity, num_kv_heads]` int64 heads, those with the
            largest budget first.
        columns: `[num_layers, capacity, num_kv_heads, max(most_blocks)]` int32 resident
            block of each page.
        offsets: The same, int64 bytes from our pages to the lender's.
    """

    def __init__(
        self,
        layers: Sequence[Pages],
        layout: SlotLayout,
        most_blocks: Sequence[int],
        capacity: int = BY_HEAD + 1,
    ) -> None:
        """Make a table that has no placement but that at `UNIFORM`.

        Args:
            layers: Pages of all evicting layers.
            layout: The slots of a head on average.
            most_blocks: `[num_layers]` of a head, in any placement.
            capacity: How many placements there is room for.
        """
        shape = len(layers), capacity, layers[0].keys.shape[1]
        self.layers, self.most_blocks = layers, most_blocks
        self.capacity, self.page_slots = capacity, layout.block_size
        self.has_own_pages = True
        self.first_own: int | None = None
        self._placements: dict[int, Placement] = {}
        width = max(*most_blocks, layout.budget_blocks)
        self.sizes = _zeros(np.int64, *shape, 3)
        self.order = _zeros(np.int64, *shape)
        self.columns = _zeros(np.int32, *shape, width)
        self.offsets = _zeros(np.int64, *shape, width)
        self.sizes[:, UNIFORM] = torch.tensor(
            [layout.budget, layout.heavy_slots, layout.budget]
        )
        self.order[:, UNIFORM] = torch.arange(shape[2])
        self.columns[:, UNIFORM] = torch.arange(width)

    @classmethod
    def of(
        cls, layers: Sequence[Pages], layout: SlotLayout, placement: Placement
    ) -> PlacementTable:
        """A table of one placement, at `BY_HEAD`."""
        most = [max(len(pages) for pages in heads) for heads in placement.pages]
        table = cls(layers, layout, most)
        table.put(BY_HEAD, placement)
        return table

    @cached_property
    def on_device(self) -> RequestTables:
        """What a device's kernels read, where requests bring placements."""
        return RequestTables(self)

    def has(self, index: int) -> bool:
        """Whether a placement has been put there."""
        return index in self._placements

    def placement(self, index: int) -> Placement:
        """The placement that has been put there."""
        return self._placements[index]

    def indices(self) -> list[int]:
        """Where there are placements."""
        return [UNIFORM, *self._placements]

    def filled_index(self, index: int) -> int:
        """Where the placement is of the same requests once they fill their budget."""
        return index | BY_HEAD if self.has(index | BY_HEAD) else index

    def most_slots(self, indices: Any) -> npt.NDArray[np.int64]:
        """Slots of all KV heads of the layer that has the most, by placement.

        Args:
            indices: Of placements, anything that an array takes.
        """
        return self.sizes[..., 0].numpy()[:, indices].sum(axis=-1).max(axis=0)

    def parts(self) -> list[LayerPlacements]:
        """Each layer's part."""
        return [LayerPlacements(self, layer) for layer in range(len(self.layers))]

    def grows_from(self, budget: int) -> None:
        """Say which budget grows to the engine's, where all heads are alike."""
        self.sizes[:, UNIFORM, :, 2] = budget

    def put(self, index: int, placement: Placement) -> None:
        """Write a placement, anywhere but at `UNIFORM`."""
        assert index != UNIFORM
        self._placements[index] = placement
        starts = [pages.keys.data_ptr() for pages in self.layers]
        sizes = [
            [
                (layout.budget, layout.heavy_slots, held.budget)
                for layout, held in zip(layer, before_it, strict=True)
            ]
            for layer, before_it in zip(
                placement.layouts,
                (placement.grown_from or placement).layouts,
                strict=True,
            )
        ]
        self.sizes[:, index] = torch.tensor(sizes)
        budgets = self.sizes[:, index, :, 0]
        self.order[:, index] = budgets.argsort(descending=True, stable=True)
        for layer, heads in enumerate(placement.pages):
            for head, pages in enumerate(heads):
                at = layer, index, head, slice(len(pages))
                columns = torch.tensor([page.column for page in pages])
                from_here = [starts[page.layer] - starts[layer] for page in pages]
                offsets = torch.tensor(from_here)
                self.columns[at], self.offsets[at] = columns.int(), offsets
                in_order = torch.equal(columns, torch.arange(len(pages)))
                self.has_own_pages &= in_order and not bool(offsets.any())
        if "on_device" in self.__dict__:
            self.on_device.put(index)

    def remove(self, index: int) -> None:
        """Take a placement that no request has any more."""
        del self._placements[index]


def _zeros(dtype: Any, *shape: int) -> torch.Tensor:
    """Torch would write them, and so take the memory."""
    return torch.from_numpy(np.zeros(shape, dtype))


class Budget(NamedTuple):
    """A request's budget.

    Attributes:
        slots: Of a KV head on average, whole blocks.
        is_fixed: Whether the request has asked for them; else it is on the engine's
            ladder.
        length_class: See `vllm_h2o.policy.ladder.Climb`.
    """

    slots: int
    is_fixed: bool = False
    length_class: int = 0

    @classmethod
    def of(cls, row: RowPlan) -> Budget:
        """That of a row."""
        return cls(row.budget, bool(row.is_fixed), row.length_class)


class BudgetPlacements:
    """The placements of requests by their budgets, made when one is asked for.

    Those of the engine's budget are at `UNIFORM` and `BY_HEAD`, any other's are next
    to each other in the same way. There is room for as many budgets as requests can
    have in one step; one that no request has in a step may be overwritten later.
    """

    def __init__(
        self,
        table: PlacementTable,
        config: H2OConfig,
        ladder: Ladder,
        end: int,
        split: Callable[[int, bool, int], Placement] | None = None,
    ) -> None:
        """Use the table's indices before `end`.

        Args:
            table: Of all evicting layers.
            config: The policy.
            ladder: The budgets of requests that ask for none; the last is the engine's.
            end: See `indices`.
            split: Gives heads budgets of their own, by the blocks of one on average,
                whether that is on the ladder, and the length class; None: all are
                alike, or each request is split in its own way.
        """
        self._table, self._config, self._ladder = table, config, ladder
        self._split = split
        self._free = list(range(2, end, 2))
        # By blocks, whether these are on the ladder, and length class; the last used is
        # the last.
        self._index: dict[tuple[int, bool, int], int] = {}
        if len(ladder.budgets) > 1:
            table.grows_from(ladder.budgets[-2] * ladder.block_size)

    @staticmethod
    def indices(layout: SlotLayout, classes: int, max_requests: int) -> int:
        """How many indices budgets up to the engine's need, of so many length classes
        at most, and requests: one that grows has two in a step."""
        return 2 + 2 * max(min(2 * layout.budget_blocks * classes, 2 * max_requests), 0)

    def make_all(self, classes: int, fixed: bool) -> None:
        """Make those of all budgets of the ladder, or of all length classes of the only
        one, which are then never overwritten.

        Args:
            classes: How many.
            fixed: Whether requests may ask for these budgets, too.
        """
        for blocks in self._ladder.budgets:
            slots = blocks * self._ladder.block_size
            for each in range(classes):
                self.uniform_index(Budget(slots, length_class=each))
            if fixed:
                self.uniform_index(Budget(slots, is_fixed=True))

    def uniform_index(self, budget: Budget) -> int:
        """Where the placement of a request is that does not fill its budget yet.

        The one that it has from then on, where heads have budgets of their own, is at
        the next index.

        Args:
            budget: Of a request.
        """
        blocks, ladder = budget.slots // self._ladder.block_size, self._ladder.budgets
        # Only a ladder's first split keeps a head in its own pages until the switch. A
        # budget that a request has asked for gets its own split, unless it is the
        # engine's.
        climbs = not budget.is_fixed or (blocks,) == ladder
        length_class = budget.length_class if self._split else 0
        if climbs and blocks == ladder[-1] and not length_class:
            return UNIFORM
        key = blocks, climbs, length_class
        index = self._index.pop(key, None)
        if index is None:
            oldest = None if self._free else next(iter(self._index))
            index = self._free.pop() if oldest is None else self._index.pop(oldest)
            self._make(index, *key)
        self._index[key] = index
        return index

    def _make(self, index: int, blocks: int, climbs: bool, length_class: int) -> None:
        num_layers, _, num_kv_heads = self._table.order.shape
        budgets = self._ladder.up_to(blocks)[-2:] if climbs else (blocks,)
        size = self._table.page_slots
        pages = [budget * self._ladder.block_size // size for budget in budgets]
        shape = num_layers, num_kv_heads
        alike = Placement.alike(shape, pages, self._config, size)
        self._table.put(index + UNIFORM, alike)
        if self._split:
            self._table.put(index + BY_HEAD, self._split(blocks, climbs, length_class))


class RequestPlacements:
    """Who has which placement of a table, where each request has its own."""

    def __init__(
        self,
        table: PlacementTable,
        config: H2OConfig,
        layout: SlotLayout,
        first: int = BY_HEAD,
    ) -> None:
        """Hand out the indices of the table from `first` on.

        Args:
            table: Of all evicting layers.
            config: The policy, whose method splits a request's blocks.
            layout: The slots of a head on average.
            first: What is before it is somebody else's.
        """
        self.table, self.config, self.layout = table, config, layout
        table.first_own = first
        self._free = list(range(table.capacity - 1, first - 1, -1))
        self._index: dict[str, int] = {}

    def split(
        self,
        request_id: str,
        states: Sequence[State],
        queries: Queries,
        budget: Budget,
    ) -> None:
        """Give a request its placement, in the place of one that it had.

        Args:
            request_id: The request, whose prompt has been read.
            states: Of all evicting layers.
            queries: Who has looked at its tokens.
            budget: Of a head on average.
        """
        config, size = self.config, self.layout.block_size
        # More than the prompt no head has to keep, unless all of it fits the budget:
        # then it is what is generated that heads will have to choose from.
        of_prompt, most = -(-queries.seen // size), self.table.most_blocks[0]
        budget_blocks = budget.slots // size
        if not budget.is_fixed:  # whatever a head has, it grows by as much as all
            most -= self.layout.budget_blocks - budget_blocks
        bounds = Bounds(
            len(states) * budget_blocks,
            SlotLayout.fewest_blocks(config, size),
            of_prompt if of_prompt > budget_blocks else most,
        )
        blocks = config.method.split(states, queries, bounds)
        assert blocks is not None, f"{config.score} splits no budget"
        if request_id not in self._index:
            self._index[request_id] = self._free.pop()
        self.table.put(
            self._index[request_id],
            Placement.of_blocks(blocks, budget_blocks, config, size),
        )

    def grow(self, request_id: str, budget: int) -> None:
        """Give a request the placement that its own grows to, in its place.

        Every head gets as many slots more.

        Args:
            request_id: The request.
            budget: Slots of a head on average from then on.
        """
        index, size = self._index[request_id], self.layout.block_size
        before = replace(self.table.placement(index), grown_from=None)
        self.table.put(index, before.grown(budget // size, self.config, size))

    def has(self, request_id: str) -> bool:
        """Whether the request has one."""
        return request_id in self._index

    def index(self, request_id: str) -> int:
        """Where the request's is."""
        return self._index[request_id]

    def drop(self, request_id: str) -> None:
        """Take it from a request that has gone, if it had one."""
        index = self._index.pop(request_id, None)
        if index is not None:
            self.table.remove(index)
            self._free.append(index)


@dataclass(frozen=True, eq=False)
class LayerPlacements:
    """One layer's part of a table; its tensors are views of the table's.

    Attributes:
        table: The table.
        layer: Index of the layer among the evicting ones.
    """

    table: PlacementTable
    layer: int

    def layouts(self, index: int) -> Sequence[SlotLayout]:
        """`[num_kv_heads]` the slots of each head, by the placement at `index`."""
        return self.table.placement(index).layouts[self.layer]

    def held(self, index: int, head: int) -> int:
        """Slots that a head had before its budget grew to that at `index`."""
        return int(self.sizes[index, head, 2])

    def pages(self, index: int) -> Sequence[Sequence[PageOf]]:
        """`[num_kv_heads][blocks of the head]` where they are."""
        return self.table.placement(index).pages[self.layer]

    @property
    def grows(self) -> bool:
        """Whether there is a budget that grows to another."""
        return bool((self.sizes[..., 2] < self.sizes[..., 0]).any())

    @property
    def layers(self) -> Sequence[Pages]:
        """Pages of all evicting layers."""
        return self.table.layers

    @property
    def most_blocks(self) -> int:
        """Of a head of this layer, in any placement."""
        return self.table.most_blocks[self.layer]

    @property
    def sizes(self) -> torch.Tensor:
        """`[capacity, num_kv_heads, 3]`, see the table, as are the next three."""
        return self.table.sizes[self.layer]

    @property
    def order(self) -> torch.Tensor:
        """`[capacity, num_kv_heads]`."""
        return self.table.order[self.layer]

    @property
    def columns(self) -> torch.Tensor:
        """`[capacity, num_kv_heads, width]`."""
        return self.table.columns[self.layer]

    @property
    def offsets(self) -> torch.Tensor:
        """`[capacity, num_kv_heads, width]`."""
        return self.table.offsets[self.layer]
