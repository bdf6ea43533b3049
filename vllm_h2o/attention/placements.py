"""The placements of requests, where the kernels read them.

The tensors of a table stay where they are and are written in place: kernels, and graphs
that are captured of them, keep their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import PageOf, Placement

OWN = 1
"""Where the placement is that requests have from the position `layout.budget` on."""


class PlacementTable:
    """The placements of a KV cache group.

    Attributes:
        layers: Pages of all evicting layers.
        placements: By index, None where there is none: at index 0 all heads are alike,
            and page i of a head is in the resident block of column i.
        sizes: `[num_layers, capacity, num_kv_heads, 2]` int64: budget, heavy slots.
        order: `[num_layers, capacity, num_kv_heads]` int64 heads, those with the
            largest budget first.
        columns: `[num_layers, capacity, num_kv_heads, most_blocks]` int32 resident
            block of each page.
        offsets: The same, int64 bytes from our pages to the lender's.
    """

    def __init__(
        self, layers: Sequence[Pages], most_blocks: int, capacity: int = OWN + 1
    ) -> None:
        """Make an empty table.

        Args:
            layers: Pages of all evicting layers.
            most_blocks: Of a head, in any placement.
            capacity: How many placements there is room for.
        """
        shape = len(layers), capacity, layers[0].keys.shape[1]
        self.layers = layers
        self.placements: list[Placement | None] = [None] * capacity
        self.sizes = torch.zeros(*shape, 2, dtype=torch.int64)
        self.order = torch.zeros(shape, dtype=torch.int64)
        self.columns = torch.zeros(*shape, most_blocks, dtype=torch.int32)
        self.offsets = torch.zeros(*shape, most_blocks, dtype=torch.int64)

    @classmethod
    def of(cls, layers: Sequence[Pages], placement: Placement) -> PlacementTable:
        """A table of one placement, at `OWN`."""
        most = max(len(pages) for heads in placement.pages for pages in heads)
        table = cls(layers, most)
        table.put(OWN, placement)
        return table

    def parts(self) -> list[LayerPlacements]:
        """Each layer's part."""
        return [LayerPlacements(self, layer) for layer in range(len(self.layers))]

    def put(self, index: int, placement: Placement) -> None:
        """Write a placement, `1 <= index < capacity`."""
        assert index
        self.placements[index] = placement
        starts = [pages.keys.data_ptr() for pages in self.layers]
        sizes = [
            [(layout.budget, layout.heavy_slots) for layout in layer]
            for layer in placement.layouts
        ]
        self.sizes[:, index] = torch.tensor(sizes)
        budgets = self.sizes[:, index, :, 0]
        self.order[:, index] = budgets.argsort(descending=True, stable=True)
        for layer, heads in enumerate(placement.pages):
            for head, pages in enumerate(heads):
                at = layer, index, head, slice(len(pages))
                self.columns[at] = torch.tensor([page.column for page in pages]).int()
                from_here = [starts[page.layer] - starts[layer] for page in pages]
                self.offsets[at] = torch.tensor(from_here)


@dataclass(frozen=True, eq=False)
class LayerPlacements:
    """One layer's part of a table, of the placement at `OWN`.

    Attributes:
        table: The table.
        layer: Index of the layer among the evicting ones.
    """

    table: PlacementTable
    layer: int

    @property
    def layouts(self) -> Sequence[SlotLayout]:
        """`[num_kv_heads]` the slots of each head."""
        return self._placement.layouts[self.layer]

    @property
    def pages(self) -> Sequence[Sequence[PageOf]]:
        """`[num_kv_heads][blocks of the head]` where they are."""
        return self._placement.pages[self.layer]

    @property
    def layers(self) -> Sequence[Pages]:
        """Pages of all evicting layers."""
        return self.table.layers

    @property
    def sizes(self) -> torch.Tensor:
        """`[num_kv_heads, 2]`, see the table, as are the next three."""
        return self.table.sizes[self.layer, OWN]

    @property
    def order(self) -> torch.Tensor:
        """`[num_kv_heads]`."""
        return self.table.order[self.layer, OWN]

    @property
    def columns(self) -> torch.Tensor:
        """`[num_kv_heads, most_blocks]`."""
        return self.table.columns[self.layer, OWN]

    @property
    def offsets(self) -> torch.Tensor:
        """`[num_kv_heads, most_blocks]`."""
        return self.table.offsets[self.layer, OWN]

    @property
    def _placement(self) -> Placement:
        placement = self.table.placements[OWN]
        assert placement is not None
        return placement
