"""What is laid out anew between steps: budgets grow, heads part, keys move up.

By counts alone, before a step's rows are built: a page that a layer borrows must not be
written before its lender's heads have switched. So all layers come first, and no graph
contains it. Whatever is written lies in the row's own pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.attention.ops import Held, ScoredLayer
from vllm_h2o.attention.placements import Budget
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.life import RowPlan


class Upkeep:
    """Of the decoding rows of a KV cache group."""

    def __init__(
        self, spec: H2OAttentionSpec, layers: Sequence[Any], placements: RowPlacements
    ) -> None:
        """Keep the layers of a group.

        Args:
            spec: Of the layers.
            layers: vLLM's `Attention` modules, in order.
            placements: Of the rows' slots.
        """
        self._spec, self._layers, self._placements = spec, layers, placements

    def run(self, plan: ResidencyPlan, table: torch.Tensor) -> None:
        """Lay out what is due in a step.

        Args:
            plan: Of the step, in the order of the batch.
            table: `[>= num_rows, columns]` int32, vLLM's block table.
        """
        decodes, computed = plan.decodes, plan.num_computed_tokens
        # A row that reads on is laid out when its chunk ends.
        for row, name, blocks in _due(
            plan, table, decodes & (computed == plan.grown_at)
        ):
            self._grow(row, name, blocks)
        if self._placements.by_head:
            fills = decodes & (computed == plan.budgets) & (plan.grown_at == 0)
            for row, name, blocks in _due(plan, table, fills):
                self._switch_to_head_budgets(row, name, blocks)
        if (reach := self._spec.reach) is not None:
            moves = decodes & ~plan.stay_dense & reach.moves_at(computed)
            for row, name, blocks in _due(plan, table, moves):
                self._move_keys(row, name, blocks)

    def _grow(self, row: RowPlan, request_id: str, blocks: torch.Tensor) -> None:
        layers, before = self._scored(), Budget(row.grown_from)
        held = self._held(request_id, before, blocks, row.grown_at, row.grown_before)
        layers[0].params.operations.order_rings(layers, held)
        self._placements.grow(request_id, row.budget)

    def _switch_to_head_budgets(
        self, row: RowPlan, request_id: str, blocks: torch.Tensor
    ) -> None:
        """Give heads their own slots in a row that has just filled its budget."""
        held = self._held(request_id, Budget.of(row), blocks, row.num_computed_tokens)
        layers = self._scored(held.pages)
        layers[0].params.operations.transition(
            layers, held.pages, held, row.first_query, self._spec.h2o
        )

    def _move_keys(self, row: RowPlan, request_id: str, blocks: torch.Tensor) -> None:
        """Move up the keys of a row that gets out of reach."""
        layers, num_tokens = self._scored(), row.num_computed_tokens
        held = self._held(request_id, Budget.of(row), blocks, num_tokens, row.grown_at)
        layers[0].params.operations.move_keys(layers, held)

    def _held(
        self,
        request_id: str,
        budget: Budget,
        blocks: torch.Tensor,
        num_tokens: int,
        grown_at: int = 0,
    ) -> Held:
        """What a request holds that has filled a budget."""
        pages = self._spec.resident_pages(blocks, budget.slots)
        placement = self._placements.index(request_id, budget, True)
        return Held(pages, placement, num_tokens, grown_at)

    def _scored(self, filled: torch.Tensor | None = None) -> list[ScoredLayer]:
        """The layers; with the state of a request that has filled these pages."""
        return [
            layer.impl.scored_layer(layer.kv_cache, self._spec, filled)
            for layer in self._layers
        ]


def _due(
    plan: ResidencyPlan, table: torch.Tensor, rows: npt.NDArray[np.bool_]
) -> Iterator[tuple[RowPlan, str, torch.Tensor]]:
    """Counts, id and row of the block table of the chosen requests."""
    for i in np.flatnonzero(rows).tolist():
        yield plan.row(i), plan.request_ids[i], table[i]
