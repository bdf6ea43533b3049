"""Which placement the slots of a row are laid out by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.attention.ops import ScoredLayer
from vllm_h2o.attention.placements import (
    BY_HEAD,
    UNIFORM,
    Budget,
    BudgetPlacements,
    RequestPlacements,
)
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.methods import Queries
from vllm_h2o.policy.placement import Placement

_MOST_CLASSES = 128
"""Length classes of a budget: more than the longest request has."""


class RowPlacements:
    """Indices in the table of a KV cache group, by what rows have and ask for.

    Below the budget slot(p) is p, in pages of the head's own, whatever the split: heads
    part when a request has filled its budget.
    """

    def __init__(
        self,
        by_head: bool = False,
        by_budget: BudgetPlacements | None = None,
        by_request: RequestPlacements | None = None,
    ) -> None:
        """Choose for rows of an engine.

        Args:
            by_head: Whether heads have budgets of their own.
            by_budget: Where requests with budgets of their own are; None: all have the
                engine's.
            by_request: Where requests are that split their slots each in its own way;
                None: nowhere.
        """
        self.by_head, self._by_budget = by_head, by_budget
        self._by_request = by_request

    @property
    def has_several(self) -> bool:
        """Whether there are placements beside that of the engine's budget."""
        return self.by_head or self._by_budget is not None

    @property
    def splits_each_request(self) -> bool:
        """Whether requests split their slots each in its own way."""
        return self._by_request is not None

    def own(self, request_id: str) -> Placement | None:
        """The placement of a request that has split its slots in its own way."""
        by_request = self._by_request
        if by_request is None or not by_request.has(request_id):
            return None
        return by_request.table.placement(by_request.index(request_id))

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished, or whose prompt is read again."""
        if self._by_request is not None:
            self._by_request.drop(request_id)

    def index(self, request_id: str, budget: Budget, filled: bool) -> int:
        """Index of a request's placement, before or after it has filled its budget."""
        switched = filled and self.by_head
        by_request = self._by_request
        if switched and by_request is not None:
            return by_request.index(request_id)
        by_budget = self._by_budget
        uniform = by_budget.uniform_index(budget) if by_budget else UNIFORM
        return uniform + BY_HEAD if switched else uniform

    def of_rows(self, rows: ResidencyPlan) -> npt.NDArray[np.int32]:
        """`[num_rows]` indices of the rows of a batch of decodes."""
        filled = (rows.num_computed_tokens >= rows.budgets) | (rows.grown_at > 0)
        packed = (_MOST_CLASSES * rows.budgets + rows.length_classes) * 2
        packed += rows.is_fixed
        budgets, of_row = packed[:1], np.zeros_like(packed)
        if (packed != budgets).any():
            budgets, of_row = np.unique(packed, return_inverse=True)
        uniform = [
            self.index("", Budget(slots, bool(is_fixed), length_class), False)
            for each, is_fixed in (divmod(budget, 2) for budget in budgets.tolist())
            for slots, length_class in [divmod(each, _MOST_CLASSES)]
        ]
        switched = BY_HEAD if self.by_head else UNIFORM
        indices = np.array(uniform, np.int32)[of_row] + np.where(filled, switched, 0)
        by_request = self._by_request
        if by_request is not None:
            for i in np.flatnonzero(filled).tolist():
                indices[i] = by_request.index(rows.request_ids[i])
        return indices.astype(np.int32)

    def grow(self, request_id: str, budget: int) -> None:
        """Let a request's own placement grow, if it has one, to a budget of slots."""
        by_request = self._by_request
        if by_request is not None:
            by_request.grow(request_id, budget)

    def split(self, request_id: str, row: RowPlan, layers: list[ScoredLayer]) -> None:
        """Split the slots of a request whose prompt ends, where each does so.

        Args:
            request_id: The request.
            row: Its counts.
            layers: All evicting layers, with what the prompt's tokens have got.
        """
        if self._by_request is None:
            return
        num_tokens, group = row.chunk_end, layers[0].params.group
        device = next(iter(layers[0].state.values())).device
        tokens = torch.arange(num_tokens, device=device)
        queries = Queries(tokens, row.first_query, num_tokens, group)
        states = [layer.state for layer in layers]
        self._by_request.split(request_id, states, queries, Budget.of(row))
