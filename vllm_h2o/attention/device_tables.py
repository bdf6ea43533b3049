"""Placements as the Triton kernels read them, on the pages' device.

A copy of a layer's part of a `PlacementTable`, made once: all placements that an engine
on a device has are in the table by then, so that no step, and no capture of one, waits
for a copy. But for those of requests that split their slots each in its own way, see
`request_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm_h2o.attention.placements import LayerPlacements

NUM_SIZES = 8
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


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Budgets by placement and KV head, for the kernels and for who sizes their grids.

    Attributes:
        sizes: `[capacity * num_kv_heads, NUM_SIZES]` int32, of a KV head:

            * 0: budget;
            * 1: heavy slots;
            * 2: the budget before it grew to this one;
            * 3: the budgets of the placement's KV heads before this one, summed;
            * 4: where its pages begin in `pages`;
            * 5: the layer's largest budget, in this placement and once the request has
              filled its budget;
            * 6 and 7: number and budget of the KV head that has the i-th largest budget
              of the placement, in the place of head i.
        pages: None where no head of any layer borrows a page, or leaves one out.
        budgets: `[num_placements, num_kv_heads]` int64 budgets of the placements that
            there are, on CPU.
        richest: `[num_placements, 1]` int64, number 5 of their sizes.
        most_slots: Where requests bring placements: slots that the layer's KV heads
            have together in any. None: there are no other placements.
    """

    sizes: torch.Tensor
    pages: PageLists | None
    budgets: npt.NDArray[np.int64]
    richest: npt.NDArray[np.int64]
    most_slots: int | None = None
    _most: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def most_splits(self, max_splits: int, least: int, tile: int) -> int:
        """Splits of all KV heads together, in the placement that has the most.

        Cut as by `split_slots_of` of the Triton kernels.

        Args:
            max_splits: Of the richest head of each placement.
            least: No split has fewer slots, but for the last of a head.
            tile: Slots of a split are a multiple of.
        """
        if self.most_slots is not None:
            heads = self.budgets.shape[1]
            return min(heads * max_splits, self.most_slots // least + heads)
        key = "splits", max_splits, least, tile
        if key not in self._most:
            slots = _cdiv(_cdiv(self.richest, max_splits), tile) * tile
            self._most[key] = self._count(np.maximum(slots, least), 1)
        return self._most[key]

    def most_parts(self, part_slots: int, fewest: int) -> int:
        """Parts of all KV heads together, in the placement that has the most.

        Args:
            part_slots: Slots of a part.
            fewest: Parts of a head, at least.
        """
        if self.most_slots is not None:
            return self.most_slots // part_slots + self.budgets.shape[1] * fewest
        key = "parts", part_slots, fewest
        if key not in self._most:
            self._most[key] = self._count(part_slots, fewest)
        return self._most[key]

    def _count(self, part_slots: npt.NDArray[np.int64] | int, fewest: int) -> int:
        parts = np.maximum(_cdiv(self.budgets, part_slots), fewest)
        return int(parts.sum(axis=1).max())


def _cdiv(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64] | int) -> Any:
    return -(a // -b)


def device_tables(own: LayerPlacements) -> DeviceTables:
    """Copy a layer's part of a table to its pages' device.

    Of lists that begin alike only the longest is kept: a head's budgets, one grown from
    the other, have one, and so have all heads in pages of their own.
    """
    pages, table = own.layers[own.layer], own.table
    if table.first_own is not None:
        return table.on_device.of_layer(own.layer)
    num_kv_heads = own.sizes.shape[1]
    sizes, slots = described(own.sizes, own.order), own.sizes[..., :1]
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
    indices = table.indices()
    return DeviceTables(
        sizes.flatten(0, 1).to(device),
        of_pages,
        budgets=own.sizes[indices, :, 0].numpy(),
        richest=sizes[indices, :1, 5].long().numpy(),
    )


def described(sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`[.., num_kv_heads, NUM_SIZES]` int32, see `DeviceTables.sizes`.

    Without where pages begin, and as if no placement came after these.

    Args:
        sizes: `[.., num_kv_heads, 3]`, see `PlacementTable`.
        order: `[.., num_kv_heads]`, see there.
    """
    slots = sizes[..., 0]
    found = torch.zeros(*slots.shape, NUM_SIZES, dtype=torch.int32)
    found[..., :3] = sizes
    found[..., 3] = slots.cumsum(dim=-1) - slots
    found[..., 5] = slots.amax(dim=-1, keepdim=True)
    found[..., 6] = order
    found[..., 7] = slots.gather(-1, order)
    return found


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
