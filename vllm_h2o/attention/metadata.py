"""Per-step metadata: which rows go to the stock backend and which to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
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
from vllm_h2o.policy.layout import SlotLayout, first_observer, observed_queries

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


@dataclass
class BatchRows:
    """The plan in the row order of the batch.

    Attributes:
        request_ids: By row.
        num_computed_tokens: `[num_rows]` int64, and so are the next two; see
            `RowPlan`.
        num_scheduled_tokens: By row.
        prefill_ends: By row.
    """

    request_ids: list[str]
    num_computed_tokens: torch.Tensor
    num_scheduled_tokens: torch.Tensor
    prefill_ends: torch.Tensor

    @classmethod
    def of(cls, plan: ResidencyPlan, request_ids: list[str]) -> BatchRows:
        """Order a plan by row."""
        # By numpy: torch.tensor takes ten times as long for a list.
        counts = np.array(
            [plan.num_computed_tokens, plan.num_scheduled_tokens, plan.prefill_ends]
        )
        if request_ids != plan.request_ids:
            place = {name: i for i, name in enumerate(plan.request_ids)}
            counts = counts[:, [place[name] for name in request_ids]]
        return cls(request_ids, *torch.from_numpy(counts))

    @property
    def is_resident(self) -> torch.Tensor:
        """`[num_rows]` bool."""
        return self.num_computed_tokens >= self.prefill_ends

    def row(self, i: int) -> RowPlan:
        """The counts of one row."""
        return RowPlan(
            int(self.num_computed_tokens[i]),
            int(self.num_scheduled_tokens[i]),
            int(self.prefill_ends[i]),
        )


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

    def rows(self, num_reqs: int) -> BatchRows | None:
        """The rows of the batch in order, or None in a dummy run."""
        if self._plan is None:
            return None
        return BatchRows.of(self._plan, list(self._request_ids()[:num_reqs]))

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
        is_resident = rows.is_resident
        metadata = H2OMetadata(common.num_actual_tokens, self.layout)
        if not is_resident.all():
            dense, token_index = _select_rows(common, ~is_resident)
            metadata.stock = super().build(common_prefix_len, dense, fast_build)
            metadata.stock_tokens = token_index
            metadata.observed = self._observed(common, rows, ~is_resident)
        if is_resident.any():
            self._add_resident(metadata, common, rows, is_resident)
        return metadata

    def _add_resident(
        self,
        metadata: H2OMetadata,
        common: CommonAttentionMetadata,
        rows: BatchRows,
        is_resident: torch.Tensor,
    ) -> None:
        first = self.spec.dense_columns
        table = common.block_table_tensor
        columns = table[:, first : first + self.layout.budget_blocks]
        positions, ends = rows.num_computed_tokens, rows.prefill_ends
        # Our kernel writes the tokens of these rows; the stock update skips slot -1.
        if metadata.stock is None:
            assert common.num_actual_tokens == len(positions)
            columns = columns[: len(positions)]
            common.slot_mapping[: common.num_actual_tokens] = -1
        else:
            index = is_resident.nonzero().flatten()
            assert (rows.num_scheduled_tokens[index] == 1).all()
            columns, positions, ends = columns[index], positions[index], ends[index]
            metadata.resident_tokens = common.query_start_loc_cpu[index].long()
            common.slot_mapping[metadata.resident_tokens] = -1
        first_queries = (ends - observed_queries(self.spec.h2o)).clamp_(min=0)
        metadata.resident = ResidentRows(columns, positions, first_queries)
        at_budget = positions == self.layout.budget
        metadata.filled = at_budget.nonzero().flatten().tolist()

    def _observed(
        self, common: CommonAttentionMetadata, rows: BatchRows, is_dense: torch.Tensor
    ) -> list[ObservedPrompt]:
        assert self.step is not None
        observed = []
        starts = common.query_start_loc_cpu.tolist()
        size, first_column = self.spec.block_size, self.spec.dense_columns
        for i in is_dense.nonzero().flatten().tolist():
            row = rows.row(i)
            first_query = first_observer(self.spec.h2o, row.prefill_end)
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if end <= first_query:
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
                        rows.request_ids[i], keep=not row.is_transition
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
