"""Placements as the Triton kernels read them, on the pages' device.

A copy of a layer's part of a `PlacementTable`, made once: all placements that an engine
on a device has are in the table by then, so that no step, and no capture of one, waits
for a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm_h2o.attention.placements import LayerPlacements

NUM_SIZES = 6
"""Of a KV head in a placement, see `DeviceTables.sizes`."""


class PageLists(NamedTuple):
    """Where the pages of KV heads are, one list after the other.

    Attributes:
        columns: `[num_pages]` int32 resident block of each.
        kv_offsets: `[num_pages]` int64 elements of K and V from our pages to the
            lender's, a multiple of 16.
        state_offsets: `[num_pages]` int64 words of 4 bytes, likewise.
    """

    columns: torch.Tensor
    kv_offsets: torch.Tensor
    state_offsets: torch.Tensor


class DeviceTables(NamedTuple):
    """Budgets by placement and KV head.

    Attributes:
        sizes: `[capacity * num_kv_heads, NUM_SIZES]` int32: budget; heavy slots; the
            budget before it grew to this one; the budgets of the KV heads of the
            placement before this one; where its pages begin in `pages`; and the largest
            of the layer, in this placement and once the request has filled its budget.
        pages: None where no head of any layer borrows a page, or leaves one out.
    """

    sizes: torch.Tensor
    pages: PageLists | None


def device_tables(own: LayerPlacements) -> DeviceTables:
    """Copy a layer's part of a table to its pages' device.

    Of lists that begin alike only the longest is kept: a head's budgets, one grown from
    the other, have one, and so have all heads in pages of their own.
    """
    pages, table = own.layers[own.layer], own.table
    num_kv_heads = own.sizes.shape[1]
    sizes = torch.zeros(table.capacity, num_kv_heads, NUM_SIZES, dtype=torch.int32)
    slots = own.sizes[..., :1]
    sizes[..., :3] = own.sizes
    sizes[..., 3:4] = slots.cumsum(dim=1) - slots
    lists = _Lists()
    for index in sorted(table.indices(), key=lambda i: -int(slots[i].sum())):
        both = [index, table.filled_index(index)]
        sizes[index, :, 5] = own.sizes[both, :, 0].max()
        for head in range(num_kv_heads):
            used = int(slots[index, head]) // table.page_slots
            at = index, head, slice(used)
            sizes[index, head, 4] = lists.start(own.columns[at], own.offsets[at])
    device, item = pages.keys.device, pages.keys.element_size()
    columns, offsets = lists.joined()
    assert not (offsets % (16 * 4)).any(), "caches of layers start anywhere"
    of_pages = None
    if not table.has_own_pages:  # the same for all layers: it is compiled into kernels
        of_pages = PageLists(
            columns.to(device),
            (offsets // item).to(device),
            (offsets // 4).to(device),
        )
    return DeviceTables(sizes.flatten(0, 1).to(device), of_pages)


class _Lists:
    """Lists of pages, each said where it begins."""

    def __init__(self) -> None:
        self._lists: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []
        self._starts: list[int] = []
        self._end = 0

    def start(self, columns: torch.Tensor, offsets: torch.Tensor) -> int:
        """Where a list begins that is kept, or begins like one that is."""
        mine, count = (columns.numpy(), offsets.numpy()), len(columns)
        for kept, at in zip(self._lists, self._starts, strict=True):
            begins_alike = np.array_equal(kept[0][:count], mine[0])
            if begins_alike and np.array_equal(kept[1][:count], mine[1]):
                return at
        self._lists.append(mine)
        self._starts.append(self._end)
        self._end += count
        return self._starts[-1]

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of them."""
        columns, offsets = zip(*self._lists, strict=True)
        return (
            torch.from_numpy(np.concatenate(columns)),
            torch.from_numpy(np.concatenate(offsets)),
        )
