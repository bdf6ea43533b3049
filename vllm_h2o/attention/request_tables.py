"""Placements of requests that split their slots each in its own way, on a device.

The kernels' grids and pointers are those of the start: a captured graph has them. So
what a request brings is written into places that are reserved for it, by copies that no
step waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_h2o.attention.device_tables import (
    NUM_SIZES,
    DeviceTables,
    PageLists,
    described,
)

if TYPE_CHECKING:
    from vllm_h2o.attention.placements import PlacementTable

PAGE_BYTES = 4 + 8 + 8
"""Of a page in `PageLists`."""


class RequestTables:
    """What the kernels read of a table's placements, those of requests at its end.

    A request has as many pages as one whose heads are alike, all layers together, so
    that the layers share room for them.
    """

    def __init__(self, table: PlacementTable) -> None:
        """Reserve the room, and copy what never changes.

        Args:
            table: With a placement of alike heads at all indices before
                `table.first_own`.

        Raises:
            ValueError: More pages than an index can number.
        """
        assert table.first_own is not None
        num_layers, capacity, num_kv_heads = table.order.shape
        keys = table.layers[0].keys
        self._table, self._item = table, keys.element_size()
        self._alike = int(table.sizes[0, 0, 0, 0]) // table.page_slots
        self._room = num_layers * num_kv_heads * self._alike
        num_pages = self._alike + (capacity - table.first_own) * self._room
        if num_pages >= 2**31:
            raise ValueError(
                "h2o_head_budgets='request' (--h2o-head-budgets) needs "
                f"{num_pages:,} entries for the pages of {capacity - table.first_own} "
                "requests, and their numbers have 32 bits: use a smaller "
                "--max-num-seqs or --h2o-budget"
            )
        self._sizes = torch.zeros(
            num_layers, capacity, num_kv_heads, NUM_SIZES,
            dtype=torch.int32, device=keys.device,
        )  # fmt: skip
        self._pages = PageLists(
            *(
                torch.zeros(num_pages, dtype=dtype, device=keys.device)
                for dtype in (torch.int32, torch.int64, torch.int64)
            )
        )
        in_order = torch.arange(self._alike, dtype=torch.int32)
        _copy(in_order, out=self._pages.columns[: self._alike])
        for index in table.indices():
            self.put(index)

    @staticmethod
    def bytes_of(
        num_layers: int, num_kv_heads: int, pages: int, alike: int, own: int
    ) -> int:
        """Bytes that all layers take together.

        Args:
            num_layers: That evict.
            num_kv_heads: Of a layer.
            pages: Of a KV head on average.
            alike: Placements of alike heads.
            own: Requests that split their slots.
        """
        heads = num_layers * num_kv_heads
        sizes = 4 * NUM_SIZES * heads * (alike + own)
        return sizes + PAGE_BYTES * (pages + own * heads * pages)

    def put(self, index: int) -> None:
        """Copy a placement that has been put into the table.

        Args:
            index: Where it is.
        """
        table, first = self._table, self._table.first_own
        assert first is not None
        sizes = described(table.sizes[:, index], table.order[:, index])
        if index < first:
            assert (table.sizes[:, index, :, 0] <= self._alike * table.page_slots).all()
            assert not table.offsets[:, index].any(), "heads that are not alike"
        else:
            start = self._alike + (index - first) * self._room
            count = table.sizes[:, index, :, 0] // table.page_slots
            ends = count.flatten().cumsum(0).view_as(count)
            sizes[..., 4] = start + ends - count
            used = torch.arange(table.columns.shape[-1]) < count[..., None]
            offsets = table.offsets[:, index][used]
            assert len(offsets) <= self._room, "more pages than a request has"
            assert not (offsets % (16 * 4)).any(), "caches of layers start anywhere"
            mine = slice(start, start + len(offsets))
            columns = table.columns[:, index][used]
            for each, of_pages in zip(
                (columns, offsets // self._item, offsets // 4), self._pages, strict=True
            ):
                _copy(each, out=of_pages[mine])
        _copy(sizes, out=self._sizes[:, index])

    def of_layer(self, layer: int) -> DeviceTables:
        """A layer's part.

        Args:
            layer: Index of the layer among the evicting ones.
        """
        table = self._table
        num_kv_heads = table.order.shape[2]
        most = min(num_kv_heads * max(table.most_blocks), self._room)
        assert most >= num_kv_heads * self._alike, "a head may have fewer than all have"
        nothing: Any = torch.zeros(0, num_kv_heads, dtype=torch.int64).numpy()
        return DeviceTables(
            self._sizes[layer].flatten(0, 1), self._pages, nothing, nothing,
            most_slots=most * table.page_slots,
        )  # fmt: skip


def _copy(tensor: torch.Tensor, out: torch.Tensor) -> None:
    tensor = tensor.to(out.dtype)
    out.copy_(tensor.pin_memory() if out.is_cuda else tensor, non_blocking=True)
