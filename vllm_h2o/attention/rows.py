"""The rows of a batch: some of them alone, and the tensors of those that decode."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_h2o.attention.ops import ResidentRows
from vllm_h2o.core.plan import ResidencyPlan


class RowTensors:
    """What the resident kernels read of a step.

    The tensors live as long as the builder and are written in place, since captured
    graphs read them.
    """

    def __init__(
        self,
        max_rows: int,
        budget_blocks: int,
        device: torch.device,
        scratch: Any,
        stay_dense: bool = False,
        speculates: bool = False,
    ) -> None:
        """Make the tensors.

        Args:
            max_rows: Of a batch.
            budget_blocks: Pages of a request.
            device: Of the kernels.
            scratch: What the kernels hand to each other; None: nothing.
            stay_dense: See `ResidentRows`.
            speculates: Whether rows may have several tokens.
        """
        self.max_rows, self._scratch = max_rows, scratch
        self._stay_dense, self._speculates = stay_dense, speculates
        self._scores = scratch is not None and not stay_dense
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._first_queries = torch.zeros_like(self._positions)
        self._placements = torch.zeros_like(self._positions, dtype=torch.int32)
        self._grown_at = torch.zeros_like(self._positions)
        self._logit_starts = torch.zeros_like(self._positions)
        self._counts = torch.ones_like(self._positions, dtype=torch.int32)
        self._starts = torch.zeros_like(self._counts)
        self._block_table = torch.zeros(
            max_rows, budget_blocks, dtype=torch.int32, device=device
        )
        self._has_placements = False
        self._views: dict[tuple[int, int], ResidentRows] = {}

    def bind(self, has_placements: bool) -> None:
        """Say whether rows may have other placements than the uniform one."""
        self._has_placements = has_placements
        self._views.clear()

    def rows(self, num_rows: int, most_tokens: int = 1) -> ResidentRows:
        """The first rows, to be written; each with so many tokens at most."""
        key = num_rows, most_tokens
        if key not in self._views:
            self._views[key] = ResidentRows(
                self._block_table[:num_rows],
                self._positions[:num_rows],
                self._first_queries[:num_rows],
                self._scratch,
                self._placements[:num_rows] if self._has_placements else None,
                self._logit_starts[:num_rows] if self._scores else None,
                self._grown_at[:num_rows] if self._has_placements else None,
                self._stay_dense,
                self._counts[:num_rows] if self._speculates else None,
                self._starts[:num_rows] if self._speculates else None,
                most_tokens,
            )
        return self._views[key]

    def begin(
        self, common: CommonAttentionMetadata, plan: ResidencyPlan
    ) -> ResidentRows:
        """The rows of a batch, with what all have of a step.

        Args:
            common: The batch. Of padding `seq_lens` is 0, which makes its position -1.
            plan: Of rows that are no padding; that comes last.
        """
        num_rows, first_queries = common.num_reqs, plan.first_queries
        most_tokens = int(plan.num_scheduled_tokens.max())
        assert most_tokens == 1 or self._speculates, "a row that decodes has one token"
        rows = self.rows(num_rows, most_tokens)
        ends = common.seq_lens[:num_rows]
        if rows.counts is None or rows.starts is None:
            torch.sub(ends, 1, out=rows.positions)
        else:
            rows.starts.copy_(starts := common.query_start_loc[:num_rows])
            after = common.query_start_loc[1 : num_rows + 1]
            torch.sub(after, starts, out=rows.counts).clamp_(min=1)
            torch.sub(ends, rows.counts, out=rows.positions)
        async_tensor_h2d(first_queries, out=rows.first_queries[: len(first_queries)])
        return rows

    def padding(self, num_rows: int, most_tokens: int = 1) -> ResidentRows:
        """Rows that touch no page, in a batch with so many tokens of each."""
        rows = self.rows(num_rows, most_tokens)
        rows.positions.fill_(-1)
        if rows.counts is not None and rows.starts is not None:
            rows.counts.fill_(most_tokens)
            torch.arange(num_rows, out=rows.starts).mul_(most_tokens)
        return rows


def tokens_of(starts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[n]` int64 indices of some rows' tokens in a batch.

    Args:
        starts: `[num_reqs + 1]` int32 of each row's first, then behind the last.
        rows: `[m]` int64.
    """
    lengths = starts.diff()[rows]
    before = lengths.cumsum(0) - lengths
    moved = (starts[rows] - before).long()
    return moved.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def select_rows(
    common: CommonAttentionMetadata, chosen: torch.Tensor
) -> tuple[CommonAttentionMetadata, torch.Tensor | None]:
    """The batch of the chosen rows, and their token indices in the old batch.

    `chosen` has int64 rows; the indices are None where these are all.
    """
    if len(chosen) == common.num_reqs:
        return common, None
    starts = common.query_start_loc_cpu
    lengths = starts.diff()[chosen]
    start_loc_cpu = torch.zeros(len(chosen) + 1, dtype=starts.dtype)
    start_loc_cpu[1:] = lengths.cumsum(0)
    tokens_cpu = tokens_of(starts, chosen)
    device = common.seq_lens.device
    index = async_tensor_h2d(chosen, device)
    tokens = async_tensor_h2d(tokens_cpu, device)

    def picked(rows: Any, by: Any = chosen) -> Any:
        return None if rows is None else rows[by]

    ranges = common.mm_req_doc_ranges
    if ranges is not None:
        ranges = {i: ranges.get(old, []) for i, old in enumerate(chosen.tolist())}
    causal = common.causal
    if isinstance(causal, torch.Tensor):
        causal = causal[index]

    return common.replace(
        query_start_loc=async_tensor_h2d(start_loc_cpu, device),
        query_start_loc_cpu=start_loc_cpu,
        seq_lens=common.seq_lens[index],
        seq_lens_cpu_upper_bound=picked(common.seq_lens_cpu_upper_bound),
        is_prefilling=picked(common.is_prefilling),
        positions=picked(common.positions, by=tokens),
        req_idx=picked(common.req_idx, by=chosen.tolist()),
        mm_req_doc_ranges=ranges,
        causal=causal,
        num_reqs=len(chosen),
        num_actual_tokens=len(tokens_cpu),
        max_query_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[index],
        slot_mapping=common.slot_mapping[tokens],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    ), tokens
