"""What the operations on resident rows take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.lending import PageOf
from vllm_h2o.policy.methods import Method, State, fused_form_of


@dataclass(frozen=True)
class ResidentRows:
    """The decoding rows of a batch, one new token each.

    Attributes:
        block_table: `[num_rows, >= budget_blocks]` int32 blocks: resident ones, or
            dense ones of a request that is kept whole.
        positions: `[num_rows]` int64 position of the new token; -1: the row is
            padding, touches no page and gets an output of 0.
        first_queries: `[num_rows]` int64 position of the first query that
            scores; a row that has not come to it leaves all scores alone.
        scratch: What the Triton kernels hand to each other, for at least these
            rows; None: made for each call.
    """

    block_table: torch.Tensor
    positions: torch.Tensor
    first_queries: torch.Tensor
    scratch: Any = None


@dataclass(frozen=True)
class HeadSlots:
    """Budgets of a layer's KV heads, from the position `layout.budget` on.

    Until then every head holds all tokens in its own pages. Page `i` of a head is
    in the resident block of column `pages[head][i].column`, in the pages of the
    layer `pages[head][i].layer`.

    Attributes:
        layouts: `[num_kv_heads]` the slots of each head.
        pages: `[num_kv_heads][budget blocks of the head]`.
        layers: Pages of all evicting layers.
        layer: Index of this layer.
    """

    layouts: Sequence[SlotLayout]
    pages: Sequence[Sequence[PageOf]]
    layers: Sequence[Pages]
    layer: int

    @cached_property
    def sizes(self) -> torch.Tensor:
        """`[num_kv_heads, 2]` int64: budget, heavy slots."""
        return torch.tensor([[x.budget, x.heavy_slots] for x in self.layouts])

    @cached_property
    def order(self) -> torch.Tensor:
        """`[num_kv_heads]` int64 heads, those with the largest budget first."""
        return self.sizes[:, 0].argsort(descending=True, stable=True)

    @cached_property
    def columns(self) -> torch.Tensor:
        """`[num_kv_heads, most blocks]` int32 resident block of each page."""
        return self._padded([[p.column for p in row] for row in self.pages]).int()

    @cached_property
    def offsets(self) -> torch.Tensor:
        """`[num_kv_heads, most blocks]` int64 bytes from our pages to the lender's."""
        start = [layer.keys.data_ptr() for layer in self.layers]
        own = start[self.layer]
        return self._padded([[start[p.layer] - own for p in row] for row in self.pages])

    @staticmethod
    def _padded(rows: list[list[int]]) -> torch.Tensor:
        most = max(len(row) for row in rows)
        return torch.tensor([row + [0] * (most - len(row)) for row in rows])


@dataclass(frozen=True, eq=False)
class DecodeParams:
    """What one layer's decode step depends on besides its tensors.

    Compared by identity, so that a kernel can remember what it made of them.

    Attributes:
        layout: The slots of a request.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        method: What a token in a slot is worth.
        read: Share of the heavy set's pages that a query reads, see `policy.reading`.
        merge: Whether what is dropped goes into what is kept, see `policy.merging`.
        heads: Budgets by head, None where all have the same.
    """

    layout: SlotLayout
    scale: float
    softcap: float
    method: Method
    heads: HeadSlots | None = None
    read: float = 1.0
    merge: bool = False

    @cached_property
    def fused_form(self) -> str | None:
        """The form in which kernels have the method, if any."""
        return fused_form_of(self.method)

    @cached_property
    def score_decay(self) -> float:
        """What the fused forms multiply an old score by, per new query."""
        return getattr(self.method, "score_decay", 1.0)

    @cached_property
    def largest_budget(self) -> int:
        """Most slots that a KV head ever has."""
        own = self.heads.layouts if self.heads else ()
        return max(self.layout.budget, *(layout.budget for layout in own), 0)

    @cached_property
    def head_tables(self) -> tuple[torch.Tensor, ...] | None:
        """Budgets by head as the Triton kernels read them, on the pages' device.

        Returns:
            None where all heads have the same budget, else
            `sizes`: `[num_kv_heads, 2]` int32 budget and heavy slots;
            `columns`: `[num_kv_heads + 1, most blocks]` int32 resident block of each
            page; row 0 is what all heads have until they part, row g + 1 head g's;
            `kv_offsets`, `state_offsets`: of the same shape, int64, from our pages
            to the lender's in elements of K and V, and in 4-byte words.
        """
        if self.heads is None:
            return None
        pages = self.heads.layers[self.heads.layer]
        most = self.largest_budget // self.layout.block_size
        num_kv_heads = len(self.heads.pages)
        columns = torch.arange(most, dtype=torch.int32).repeat(num_kv_heads + 1, 1)
        offsets = torch.zeros(columns.shape, dtype=torch.int64)
        for head, row in enumerate(self.heads.pages):
            columns[head + 1, : len(row)] = self.heads.columns[head, : len(row)]
            offsets[head + 1, : len(row)] = self.heads.offsets[head, : len(row)]
        item = pages.keys.element_size()
        assert not (offsets % 4).any(), "caches of layers are not aligned to words"
        tables = (self.heads.sizes.int(), columns, offsets // item, offsets // 4)
        return tuple(table.to(pages.keys.device) for table in tables)

    def layouts_at(self, position: int, num_kv_heads: int) -> Sequence[SlotLayout]:
        """The slots of each KV head when the token at `position` comes."""
        if self.heads is None or position < self.layout.budget:
            return [self.layout] * num_kv_heads
        return self.heads.layouts


@dataclass(frozen=True)
class Chosen:
    """The tokens of a request that each KV head keeps, and where.

    Attributes:
        positions: `[num_kv_heads, most]` int64, contiguous, -1 past a head's own;
            `most` is what the head with the most keeps, or more.
        slots: The same, -1 where `positions` is.
    """

    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class ScoredLayer:
    """What a layer brings to the transition of a request.

    Attributes:
        pages: The layer's pages.
        state: `[num_kv_heads, num_tokens]` float32 for each of the method's fields, by
            position; contiguous.
        params: The layer's constants.
    """

    pages: Pages
    state: State
    params: DecodeParams
