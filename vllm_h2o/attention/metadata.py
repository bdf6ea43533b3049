"""Per-step metadata: which rows go to the stock backend and which to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_h2o.attention.ops import ResidentRows
from vllm_h2o.core.plan import ResidencyPlan, RowPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.layout import SlotLayout, first_observer

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

logger = init_logger(f"vllm.{__name__}")

PartialScores = dict[str, torch.Tensor]
"""Scores of a prompt whose observation window spans steps, by layer name."""


@dataclass
class ObservedPrompt:
    """A prefilling row with observation queries in this step.

    Attributes:
        tokens: The row's tokens in the batch.
        plan: The row's counts.
        first_query: Position of the first prompt query that scores.
        dense_blocks: `[cdiv(seq_len, block_size)]` int32 block ids.
        resident_blocks: `[num_resident]` int32 block ids in the transition
            step, else None.
        partial: Scores of earlier steps.
    """

    tokens: slice
    plan: RowPlan
    first_query: int
    dense_blocks: torch.Tensor
    resident_blocks: torch.Tensor | None
    partial: PartialScores


@dataclass
class H2OMetadata:
    """A batch split by row.

    Attributes:
        num_actual_tokens: Tokens of the batch, without padding.
        layout: The slots of a resident request.
        stock: Metadata of the prefilling rows for the stock backend, or None.
        stock_tokens: `[n]` int64 indices of their tokens; None: the whole batch.
        observed: Those of them with observation queries.
        resident: The resident rows, or None.
        resident_tokens: `[num_rows]` int64 indices; None: the whole batch.
        filled: Resident rows that have just filled the budget and whose heads have
            not parted ways yet.
    """

    num_actual_tokens: int
    layout: SlotLayout
    stock: CPUAttentionMetadata | None = None
    stock_tokens: torch.Tensor | None = None
    observed: list[ObservedPrompt] = field(default_factory=list)
    resident: ResidentRows | None = None
    resident_tokens: torch.Tensor | None = None
    filled: list[int] = field(default_factory=list)


class StepRows:
    """The step that the worker executes: hands the plan to the builders."""

    def __init__(self, request_ids: Callable[[], Sequence[str]]) -> None:
        """Args:
        request_ids: Returns the request ids in the row order of the batch.
        """
        self._request_ids = request_ids
        self._plan: ResidencyPlan | None = None
        self._partial: dict[str, PartialScores] = {}

    def begin(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """Start a step.

        Args:
            plan: The scheduler's plan.
            gone: Requests that finished or were preempted since the last step.
        """
        self._plan = plan
        for request_id in gone:
            self._partial.pop(request_id, None)

    def end(self) -> None:
        """Finish the step: what runs now is a dummy run."""
        self._plan = None

    def rows(self, num_reqs: int) -> list[tuple[str, RowPlan]] | None:
        """The rows of the batch in order, or None in a dummy run."""
        if self._plan is None:
            return None
        request_ids = self._request_ids()[:num_reqs]
        return [(request_id, self._plan.rows[request_id]) for request_id in request_ids]

    def partial_scores(self, request_id: str, keep: bool) -> PartialScores:
        """Scores of earlier steps of this prompt.

        Args:
            request_id: The request.
            keep: Whether a later step will ask again.
        """
        if keep:
            return self._partial.setdefault(request_id, {})
        return self._partial.pop(request_id, {})


class H2OMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a batch by row; groups that H2O leaves alone get stock metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.step: StepRows | None = None
        self.compresses = isinstance(kv_cache_spec, H2OAttentionSpec)
        if not self.compresses:
            return
        self.spec: H2OAttentionSpec = kv_cache_spec
        self.layout = kv_cache_spec.layout
        if self.isa == "amx":
            # AMX packs keys in tiles, which the transition could not gather.
            logger.info_once("H2O uses the vec layout of the KV cache instead of amx")
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)
        if self.isa not in ("vec", "vec16"):
            raise ValueError(
                f"H2O on CPU reads the KV cache layouts vec and vec16, not "
                f"{self.isa!r} of this processor: drop --kv-policy"
            )

    def bind(self, step: StepRows) -> None:
        """Connect the builder to the worker's steps."""
        assert self.compresses
        self.step = step

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata | H2OMetadata:
        """Build the metadata of a step for one KV cache group."""
        common = common_attn_metadata
        rows = self.step.rows(common.num_reqs) if self.step else None
        if rows is None:
            return super().build(common_prefix_len, common, fast_build)
        is_resident = torch.tensor([row.is_resident for _, row in rows])
        metadata = H2OMetadata(common.num_actual_tokens, self.layout)
        starts = common.query_start_loc_cpu
        if not is_resident.all():
            dense, token_index = _select_rows(common, ~is_resident)
            metadata.stock = super().build(common_prefix_len, dense, fast_build)
            metadata.stock_tokens = token_index
            metadata.observed = self._observed(common, rows)
        if is_resident.any():
            index = is_resident.nonzero().flatten()
            tokens = starts[index].long()
            metadata.resident = self._resident(
                common, [rows[i][1] for i in index], index
            )
            at_budget = metadata.resident.positions == self.layout.budget
            metadata.filled = at_budget.nonzero().flatten().tolist()
            if len(tokens) < common.num_actual_tokens:
                metadata.resident_tokens = tokens
            # Our kernel writes these tokens; the stock update skips slot -1.
            common.slot_mapping[tokens] = -1
        return metadata

    def _resident(
        self, common: CommonAttentionMetadata, rows: list[RowPlan], index: torch.Tensor
    ) -> ResidentRows:
        first = self.spec.dense_columns
        table = common.block_table_tensor
        columns = table[:, first : first + self.layout.budget_blocks]
        if len(index) < len(columns):
            columns = columns[index]
        assert all(row.num_scheduled_tokens == 1 for row in rows)
        return ResidentRows(
            columns,
            torch.tensor([row.num_computed_tokens for row in rows]),
            torch.tensor([first_observer(self.spec.h2o, r.prefill_end) for r in rows]),
        )

    def _observed(
        self, common: CommonAttentionMetadata, rows: list[tuple[str, RowPlan]]
    ) -> list[ObservedPrompt]:
        assert self.step is not None
        observed = []
        starts = common.query_start_loc_cpu.tolist()
        size, first_column = self.spec.block_size, self.spec.dense_columns
        for i, (request_id, row) in enumerate(rows):
            first_query = first_observer(self.spec.h2o, row.prefill_end)
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if row.is_resident or end <= first_query:
                continue
            table = common.block_table_tensor[i]
            resident = None
            if row.is_transition:
                used = cdiv(min(end, self.layout.budget), size)
                resident = table[first_column : first_column + used]
            observed.append(
                ObservedPrompt(
                    tokens=slice(starts[i], starts[i + 1]),
                    plan=row,
                    first_query=first_query,
                    dense_blocks=table[: cdiv(end, size)],
                    resident_blocks=resident,
                    partial=self.step.partial_scores(
                        request_id, keep=not row.is_transition
                    ),
                )
            )
        return observed


def _select_rows(
    common: CommonAttentionMetadata, chosen: torch.Tensor
) -> tuple[CommonAttentionMetadata, torch.Tensor | None]:
    """The batch of the chosen rows, and their token indices in the old batch."""
    if chosen.all():
        return common, None
    index = chosen.nonzero().flatten()
    starts = common.query_start_loc_cpu
    lengths = starts.diff()[index]
    bounds = starts.tolist()
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in index.tolist()])
    query_start_loc = torch.zeros(len(index) + 1, dtype=starts.dtype)
    query_start_loc[1:] = lengths.cumsum(0)
    return common.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=common.seq_lens[index],
        num_reqs=len(index),
        num_actual_tokens=len(tokens),
        max_query_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[index],
        slot_mapping=common.slot_mapping[tokens],
    ), tokens
