"""What the operations on resident rows take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_h2o.attention.device_tables import DeviceTables, device_tables
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import UNIFORM, LayerPlacements
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Method, State, fused_form_of, fused_prompt_form_of
from vllm_h2o.policy.reach import MovingKeys

if TYPE_CHECKING:
    from vllm_h2o.attention.ops.contract import Kernels


@dataclass(frozen=True)
class ResidentRows:
    """The decoding rows of a batch, one new token each, or more where vLLM speculates.

    Attributes:
        block_table: `[num_rows, >= budget_blocks]` int32 pages, numbers in the first
            dimension of `Pages`: of resident blocks, or dense ones of a request that
            stays dense.
        positions: `[num_rows]` int64 position of the first new token; -1: the row is
            padding, touches no page and gets an output of 0.
        first_queries: `[num_rows]` int64 position of the first query that
            scores; a row that has not come to it leaves all attention alone.
        scratch: What the Triton kernels hand to each other, for at least these
            rows; None: made for each call.
        placements: `[num_rows]` int32 where each row's slots are, an index into the
            `PlacementTable`; None: `UNIFORM` for all.
        logit_starts: `[num_rows]` int64 slots of KV heads in the scratch before a
            row's own; None: as many for each as a row could have.
        grown_at: `[num_rows]` int64 tokens of the sequence when its budget last grew,
            see `policy.layout.place_of`; 0: it never has, as all whose placement is
            `UNIFORM`; None: no row's has.
        stay_dense: Whether all rows stay dense and are read by pages of their own:
            no query scores, and nothing competes. A row of position -1 is then
            another call's, and its output is left as it is.
        counts: `[num_rows]` int32 new tokens of each row, which are decoded in turn;
            None: one each, and a row is a token.
        starts: `[num_rows]` int32 the first of them among the batch's tokens; None
            where `counts` is.
        most_tokens: New tokens of a row, at most.
    """

    block_table: torch.Tensor
    positions: torch.Tensor
    first_queries: torch.Tensor
    scratch: Any = None
    placements: torch.Tensor | None = None
    logit_starts: torch.Tensor | None = None
    grown_at: torch.Tensor | None = None
    stay_dense: bool = False
    counts: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    most_tokens: int = 1

    def tokens_of(self, row: int) -> range:
        """A row's new tokens among the batch's."""
        if self.counts is None or self.starts is None:
            return range(row, row + 1)
        start = int(self.starts[row])
        return range(start, start + int(self.counts[row]))


SCRATCH_BYTES = 64 << 20
"""Of scratch, at most, for the layers that a GPU compresses at once, and as many for
their scores, and for those of layers that wait for it; a single one may need more."""
RING, NOTHING = -1, -2
"""In place of a slot in `DraftLog.losers`, see there."""


@dataclass(frozen=True, eq=False)
class DraftLog:
    """What a layer's decode of drafts has changed, so that it can be taken back.

    A step decodes a row's first token, which is certain, then its drafts in turn. What
    draft j (from 1) has changed is at `[row, j - 1, head]` of each tensor. A log is of
    one step.

    Attributes:
        keys: `[num_rows, most_drafts, num_kv_heads, head_size]` of the token that the
            draft has displaced for good, as pages have it.
        values: The same.
        scales: `[.., 2]` float32 of this key and value, where they are int8; else None.
        births: `[num_rows, most_drafts, num_kv_heads]` int32 of this token.
        losers: The same shape, int32: the heavy slot that this token was in, and that
            the token which left the ring went to; `RING`: it was the one that left the
            ring; `NOTHING`: the head had room.
        attention: `[num_rows, most_drafts, num_kv_heads, slots]` float32 that all slots
            had got before the draft; of the Triton kernels `[most_drafts, slots]`,
            those of a row and KV head where its logits are in the scratch.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None
    births: torch.Tensor
    losers: torch.Tensor
    attention: torch.Tensor

    @classmethod
    def of(
        cls, pages: Pages, num_rows: int, most_drafts: int, attention: torch.Tensor
    ) -> DraftLog:
        """An empty log of a layer.

        Args:
            pages: The layer's.
            num_rows: Of the batch.
            most_drafts: Of a row.
            attention: Room for it.
        """
        _, num_kv_heads, head_size, _ = pages.keys.shape
        size = num_rows, most_drafts, num_kv_heads
        return cls(
            keys=pages.keys.new_empty(*size, head_size),
            values=pages.keys.new_empty(*size, head_size),
            scales=attention.new_empty(*size, 2) if pages.quantized else None,
            births=pages.births.new_empty(size),
            losers=pages.births.new_empty(size),
            attention=attention,
        )

    def has_room(self, num_rows: int, most_drafts: int) -> bool:
        """Whether it is large enough."""
        rows, drafts = self.births.shape[:2]
        return rows >= num_rows and drafts >= most_drafts

    @classmethod
    def by_row(
        cls, pages: Pages, params: LayerParams, num_rows: int, most_drafts: int
    ) -> DraftLog:
        """An empty log whose attention has room for each row's largest budget."""
        size = num_rows, most_drafts, pages.keys.shape[1], params.largest_budget
        floats = torch.empty(size, device=pages.keys.device)
        return cls.of(pages, num_rows, most_drafts, floats)


class LoggedLayer(NamedTuple):
    """A layer that has decoded drafts.

    Attributes:
        pages: The layer's.
        params: The layer's constants.
        log: What it has changed in the step.
    """

    pages: Pages
    params: LayerParams
    log: DraftLog


@dataclass(frozen=True, eq=False)
class Held:
    """What a request holds in resident pages.

    Attributes:
        pages: `[>= budget_blocks]` int32 numbers in the first dimension of `Pages`.
        placement: Index of how the slots are split.
        num_tokens: Of the sequence that it is of.
        grown_at: Of them when the budget last grew, see `ResidentRows`.
    """

    pages: torch.Tensor
    placement: int = UNIFORM
    num_tokens: int = 0
    grown_at: int = 0


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prompt tokens of a request that are read beside what it holds of earlier ones.

    Attributes:
        end: Position behind the last of the tokens.
        first_scoring: Position of the first of their queries that scores.
        scored_from: Position of the first query that has scored what is held.
        first_query: Of the first query that what stays will count as scored by.
        blocks: `[>= cdiv(end, block_size)]` int32 dense blocks of the chunk's tokens,
            by position.
        held: Of the tokens before them, which were compressed.
    """

    end: int
    first_scoring: int
    scored_from: int
    first_query: int
    blocks: torch.Tensor
    held: Held

    @property
    def start(self) -> int:
        """Position of the first of the tokens."""
        return self.held.num_tokens


@dataclass(frozen=True, eq=False)
class LayerParams:
    """The constants of a layer, which its operations depend on besides tensors.

    Compared by identity, so that a kernel can remember what it made of them.

    Attributes:
        layout: The slots of a request.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        method: How tokens are scored.
        read: Share of the heavy set's pages that a query reads, see
            `policy.sparse_read`.
        merge: Whether what is dropped goes into what is kept, see `policy.merging`.
        group: Query heads of a KV head.
        gate: What prompts are scored by in place of their queries, if anything.
        kernels: The operations of the layer's device; None: for them alone.
        placements: How requests split their slots, None where all heads have the same.
        sink_logits: `[num_heads]`, float32 on CPU: of each query head's sink, see
            `policy.softmax`; None: there are none.
        moving: How keys move, see `policy.reach`; None: they stay where they are.
    """

    layout: SlotLayout
    scale: float
    softcap: float
    method: Method
    placements: LayerPlacements | None = None
    sink_logits: torch.Tensor | None = None
    read: float = 1.0
    merge: bool = False
    group: int = 1
    gate: LayerGate | None = None
    kernels: Kernels | None = None
    moving: MovingKeys | None = None

    @property
    def operations(self) -> Kernels:
        """`kernels`, of a layer that has run."""
        assert self.kernels is not None
        return self.kernels

    @cached_property
    def fused_form(self) -> str | None:
        """The form in which kernels have the method, if any."""
        return fused_form_of(self.method)

    @cached_property
    def fused_prompt_form(self) -> str | None:
        """The same for prompts: what scores them and chooses what stays."""
        return fused_prompt_form_of(self.method)

    @cached_property
    def score_decay(self) -> float:
        """What the fused forms multiply old attention by, per new query."""
        return getattr(self.method, "score_decay", 1.0)

    @cached_property
    def largest_budget(self) -> int:
        """Most slots that a KV head ever has."""
        most = self.placements.most_blocks if self.placements else 0
        return max(self.layout.budget, most * self.layout.block_size)

    @cached_property
    def device_tables(self) -> DeviceTables | None:
        """Budgets by head as the Triton kernels read them, on the pages' device.

        None where all heads of all requests have the same budget.
        """
        return device_tables(self.placements) if self.placements else None

    def layouts_of(self, placement: int, num_kv_heads: int) -> Sequence[SlotLayout]:
        """The slots of each KV head, by the placement of that index."""
        if placement == UNIFORM:
            return [self.layout] * num_kv_heads
        assert self.placements is not None
        return self.placements.layouts(placement)

    def largest_of(self, placement: int, num_kv_heads: int) -> int:
        """Slots of the KV head with the largest budget, by one placement."""
        layouts = self.layouts_of(placement, num_kv_heads)
        return max(layout.budget for layout in layouts)

    def budget_of(self, placement: int) -> int:
        """Slots of a KV head on average."""
        if placement == UNIFORM:
            return self.layout.budget
        assert self.placements is not None
        return self.placements.table.placement(placement).budget


@dataclass(frozen=True)
class Kept:
    """The tokens of a request that each KV head keeps, and where.

    Of several layers both have one dimension more, in front.

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
        pages: The layer's pages that its slots are in.
        state: `[num_kv_heads, num_tokens]` float32 for each of the method's fields, by
            position; contiguous.
        params: The layer's constants.
        dense: The layer's pages that its tokens are in, by position; None: the same.
    """

    pages: Pages
    state: State
    params: LayerParams
    dense: Pages | None = None

    @property
    def source(self) -> Pages:
        """The pages that the tokens are in."""
        return self.dense or self.pages

    @property
    def state_bytes(self) -> int:
        """Of the state."""
        return sum(mine.nbytes for mine in self.state.values())
