"""Per-step metadata: which rows go to the stock backend and which to ours."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_h2o.attention.ops import ResidentRows, ScoredLayer, transition
from vllm_h2o.attention.placements import (
    BY_HEAD,
    UNIFORM,
    BudgetPlacements,
    RequestPlacements,
)
from vllm_h2o.core.plan import ResidencyPlan, RowPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Queries, State

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PartialStates = dict[str, State]
"""Of a prompt whose observation window spans steps, by layer name."""


@dataclass
class ObservedPrompt:
    """A prefilling row with observation queries or its transition in this step.

    Attributes:
        tokens: The row's tokens in the batch.
        plan: The row's counts.
        dense_blocks: `[cdiv(seq_len, block_size)]` int32 block ids.
        resident_blocks: `[num_resident]` int32 block ids in the transition
            step, else None.
        placement: Index of the placement that the transition is to.
        attends: Whether our kernel attends too; else stock's has done so.
        split: Gives the request a placement of its own, by the layers that have run;
            returns its index, if the request fills it. None: see `placement`.
        partial: State of earlier steps.
        later: What the next step begins with, for this request; takes more.
        layers: Layers that have run and are to be compressed.
    """

    tokens: slice
    plan: RowPlan
    dense_blocks: torch.Tensor
    resident_blocks: torch.Tensor | None
    placement: int
    attends: bool
    partial: PartialStates
    later: list[Callable[[], None]]
    split: Callable[[list[ScoredLayer]], int] | None = None
    layers: list[ScoredLayer] = field(default_factory=list)


@dataclass
class H2OMetadata:
    """A batch split by row.

    Attributes:
        layout: The slots of a resident request.
        stock: Metadata of the prefilling rows that the stock backend attends to, or
            None.
        stock_tokens: `[n]` int64 indices of their tokens; None: the whole batch.
        observed: Prefilling rows with observation queries or their transition.
        resident: The resident rows, or None.
        resident_tokens: `[num_rows]` int64 indices; None: the whole batch, one
            token per row.
    """

    layout: SlotLayout
    stock: Any = None
    stock_tokens: torch.Tensor | None = None
    observed: list[ObservedPrompt] = field(default_factory=list)
    resident: ResidentRows | None = None
    resident_tokens: torch.Tensor | None = None


class StepRows:
    """The step that the worker executes: hands the plan to the builders."""

    def __init__(self) -> None:
        self.request_ids: Callable[[], Sequence[str]] = tuple
        """Returns the request ids in the row order of the batch."""
        self.later: dict[str, list[Callable[[], None]]] = {}
        """What the next step begins with, by request id: its transition."""
        self.by_request: RequestPlacements | None = None
        """The placements of requests that split their slots each in its own way."""
        self.seconds: list[float] = []
        """That transitions between steps have taken; for whoever takes them out."""
        self.watchers: list[Callable[[Any, torch.Tensor, ResidencyPlan], None]] = []
        """Told of each step by each builder, with its block table; see watch.py."""
        self._plan: ResidencyPlan | None = None
        self._partial: dict[str, PartialStates] = {}

    def begin(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """Start a step.

        Args:
            plan: The scheduler's plan.
            gone: Requests that have finished, or whose prompt is read again, since the
                last step.
        """
        self._plan = plan
        for request_id in gone:
            self._partial.pop(request_id, None)
            self.later.pop(request_id, None)
            if self.by_request:
                self.by_request.drop(request_id)
        self.run_due()

    def run_due(self) -> None:
        """Run the transitions that the last step put off.

        Freed blocks may have new owners, but these write only in the step that begins
        now.
        """
        if not self.later:
            return  # most steps; inference mode takes longer than all else here
        with torch.inference_mode():
            for request_id in list(self.later):
                start, works = time.perf_counter(), self.later.pop(request_id)
                for work in works:
                    work()
                if works:
                    self.seconds.append(time.perf_counter() - start)

    def end(self) -> None:
        """Forget the plan: what runs now is a dummy run."""
        self._plan = None

    def clear(self) -> None:
        """Forget all requests: the KV cache goes."""
        self.later.clear()
        self.watchers.clear()
        self._partial.clear()
        self.by_request = None

    @property
    def all_decode(self) -> bool:
        """Whether every row decodes, or is a dummy."""
        return not self._plan or bool(self._plan.decodes.all())

    def rows(self, num_reqs: int) -> ResidencyPlan | None:
        """The plan in the order of the batch's rows, or None in a dummy run."""
        if self._plan is None:
            return None
        return self._plan.ordered(list(self.request_ids()[:num_reqs]))

    def partial_states(self, request_id: str) -> PartialStates:
        """State of earlier steps of a prompt; each layer takes its own out."""
        return self._partial.setdefault(request_id, {})


_Stock: Any = object
"""The stock builder, which comes next among the bases of a platform's class."""


class H2OMetadataBuilder(_Stock):
    """Splits a batch by row; groups that H2O leaves alone get stock metadata.

    Stands before a platform's stock builder among the bases of a class.

    `build` runs eagerly before the forward pass, also before the replay of a CUDA
    graph. What the resident kernels read of a step is therefore in tensors that
    live as long as the builder (or the runner: its block table) and are written in
    place; nothing here waits for the device.
    """

    # Our metadata is not the stock backend's.
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False
    # Whether our kernel attends in prompts' steps in which most queries score: then
    # stock's need not compute their logits too.
    attends_observed = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.step: StepRows | None = None
        self.compresses = isinstance(kv_cache_spec, H2OAttentionSpec)
        if not self.compresses:
            return
        self.spec: H2OAttentionSpec = kv_cache_spec
        self.layout = kv_cache_spec.layout
        self.by_head: Sequence[Any] = ()
        self._budget_placements: BudgetPlacements | None = None
        # No graph of decodes has more rows, in either model runner.
        max_rows = vllm_config.scheduler_config.max_num_seqs
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._first_queries = torch.zeros_like(self._positions)
        self._placements = torch.zeros_like(self._positions, dtype=torch.int32)
        self._logit_starts = torch.zeros_like(self._positions)
        self._block_table = torch.zeros(
            max_rows, self.layout.budget_blocks, dtype=torch.int32, device=device
        )
        self._scratch = self._decode_scratch(vllm_config)
        self._views: dict[int, ResidentRows] = {}

    def _decode_scratch(self, vllm_config: VllmConfig) -> Any:
        """What the platform's decode kernels need beside their rows."""
        return None

    def _pack(self, plan: ResidencyPlan) -> npt.NDArray[np.int64]:
        """`ResidentRows.logit_starts` of the rows, where there is a scratch."""
        raise NotImplementedError

    def bind(
        self,
        step: StepRows,
        by_head: Sequence[Any] = (),
        budgets: BudgetPlacements | None = None,
    ) -> None:
        """Connect the builder to the worker's steps.

        Args:
            step: The steps.
            by_head: Layers, vLLM's `Attention` modules, whose heads have budgets of
                their own once a request fills its budget; none where all have the same.
            budgets: Where requests with budgets of their own are; None: all have the
                engine's.
        """
        assert self.compresses
        self.step, self.by_head, self._budget_placements = step, by_head, budgets
        self._views.clear()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build the metadata of a step for one KV cache group."""
        common = common_attn_metadata
        rows = self.step.rows(common.num_reqs) if self.step else None
        if rows is None:
            if self.compresses and self.device.type != "cpu":
                return self._build_dummy(common_prefix_len, common, fast_build)
            return super().build(common_prefix_len, common, fast_build)
        assert self.step is not None
        for watcher in self.step.watchers:
            watcher(self, common.block_table_tensor, rows)
        metadata = H2OMetadata(self.layout)
        decodes = rows.decodes
        if not decodes.all():
            prompts = np.flatnonzero(~decodes).tolist()
            metadata.observed = self._observed(common, rows, prompts)
            stock = [i for i in prompts if not self._attends(common, rows.row(i))]
            if stock:
                index = torch.tensor(stock)
                dense, metadata.stock_tokens = _select_rows(common, index)
                metadata.stock = super().build(common_prefix_len, dense, fast_build)
        if decodes.any():
            self._switch_to_head_budgets(common, rows)
            self._add_resident(metadata, common, rows, np.flatnonzero(decodes).tolist())
        return metadata

    def _add_resident(
        self,
        metadata: H2OMetadata,
        common: CommonAttentionMetadata,
        rows: ResidencyPlan,
        decodes: list[int],
    ) -> None:
        # Our kernel writes the tokens of these rows; the stock update skips slot -1.
        if len(decodes) == len(rows.request_ids):
            metadata.resident = self._resident(common, rows)
            common.slot_mapping[: common.num_actual_tokens].fill_(-1)
            return
        part, tokens = _select_rows(common, torch.tensor(decodes))
        assert tokens is not None
        metadata.resident = self._resident(part, rows.select(decodes))
        metadata.resident_tokens = tokens
        common.slot_mapping.index_fill_(0, tokens, -1)

    def _build_dummy(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> Any:
        """Metadata of a warm-up, of the capture of a graph, or of an idle rank.

        Batches of one token per request are what decode graphs are captured from:
        they run the resident kernels over rows of padding, which touch no page.
        """
        if common.max_query_len > 1:
            return super().build(common_prefix_len, common, fast_build)
        return H2OMetadata(self.layout, resident=self._padding(common.num_reqs))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Any:
        """Build the metadata that a graph is captured with."""
        if not self.compresses:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        assert common_attn_metadata.max_query_len == 1, "H2O captures decodes only"
        return self._build_dummy(0, common_attn_metadata, False)

    def _resident(
        self, common: CommonAttentionMetadata, plan: ResidencyPlan
    ) -> ResidentRows:
        """The rows of a batch of decodes; rows after those of the plan are padding.

        vLLM pads `seq_lens` with 0, which makes the position of padding -1.
        """
        assert (plan.num_scheduled_tokens == 1).all()
        num_rows = common.num_reqs
        rows = self._rows(num_rows)
        torch.sub(common.seq_lens[:num_rows], 1, out=rows.positions)
        first_queries = plan.first_queries
        async_tensor_h2d(first_queries, out=self._first_queries[: len(first_queries)])
        if rows.logit_starts is not None:
            starts = self._pack(plan)
            async_tensor_h2d(starts, out=rows.logit_starts[: len(starts)])
        if rows.placements is not None:
            placements = self._placements_of(plan).astype(np.int32)
            async_tensor_h2d(placements, out=rows.placements[: len(placements)])
        table, first = common.block_table_tensor[:num_rows], self.spec.dense_columns
        resident = table[:, first : first + self.layout.budget_blocks]
        if (plan.num_computed_tokens < first_queries).any():
            # Stays dense, so that no query has scored: its blocks are dense ones.
            stay = (rows.positions < rows.first_queries)[:, None]
            dense = table[:, : self.layout.budget_blocks]
            torch.where(stay, dense, resident, out=rows.block_table)
        else:
            rows.block_table.copy_(resident)
        return rows

    def padding(self) -> Iterator[ResidentRows]:
        """Batches of 1, 2, 4 .. rows that touch no page."""
        num_rows = 1
        while num_rows <= len(self._positions):
            yield self._padding(num_rows)
            num_rows *= 2

    def _padding(self, num_rows: int) -> ResidentRows:
        rows = self._rows(num_rows)
        rows.positions.fill_(-1)
        return rows

    def _rows(self, num_rows: int) -> ResidentRows:
        """The tensors that the steps write, which a captured graph reads."""
        if num_rows not in self._views:
            self._views[num_rows] = ResidentRows(
                self._block_table[:num_rows],
                self._positions[:num_rows],
                self._first_queries[:num_rows],
                self._scratch,
                self._placements[:num_rows]
                if self.by_head or self._budget_placements
                else None,
                self._logit_starts[:num_rows] if self._scratch is not None else None,
            )
        return self._views[num_rows]

    def index_of(self, request_id: str, budget: int, filled: bool) -> int:
        """Index of a request's placement, before or after it has filled its budget.

        Below the budget slot(p) is p, in pages of the head's own, whatever the split.
        """
        switched = filled and bool(self.by_head)
        if switched and self.step is not None and self.step.by_request is not None:
            return self.step.by_request.index(request_id)
        by_budget = self._budget_placements
        uniform = by_budget.uniform_index(budget) if by_budget else UNIFORM
        return uniform + BY_HEAD if switched else uniform

    def _placements_of(self, rows: ResidencyPlan) -> np.ndarray:
        """`[num_rows]` index of each row's placement."""
        filled = rows.num_computed_tokens >= rows.budgets
        placements = np.where(filled, BY_HEAD if self.by_head else UNIFORM, UNIFORM)
        others = rows.budgets != self.layout.budget
        if self.step is not None and self.step.by_request is not None:
            others |= filled
        for i in np.flatnonzero(others).tolist():
            budget = int(rows.budgets[i])
            placements[i] = self.index_of(rows.request_ids[i], budget, bool(filled[i]))
        return placements

    def _switch_to_head_budgets(
        self, common: CommonAttentionMetadata, rows: ResidencyPlan
    ) -> None:
        """Give heads their own slots in rows that have just filled the budget.

        Here and not in the forward pass: counts alone say which rows these are,
        and a page that a layer borrows must not be written before its lender's
        heads have switched. So all layers come first, and no graph contains it.
        """
        if not self.by_head:
            return
        first = self.spec.dense_columns
        filled = rows.decodes & (rows.num_computed_tokens == rows.budgets)
        for i in np.flatnonzero(filled).tolist():
            row = rows.row(i)
            used = row.budget // self.spec.block_size
            blocks = common.block_table_tensor[i, first : first + used]
            layers = [
                layer.impl.scored_layer(layer.kv_cache, self.layout, blocks)
                for layer in self.by_head
            ]
            placement = self.index_of(rows.request_ids[i], row.budget, True)
            transition(
                layers, blocks, blocks, placement, row.first_query, self.spec.h2o
            )

    def _attends(self, common: CommonAttentionMetadata, row: RowPlan) -> bool:
        """Whether our kernel, which is causal, attends in this step of a prompt."""
        scores = row.mostly_scores and not self.spec.h2o.gated
        return self.attends_observed and scores and common.causal is True

    def _observed(
        self, common: CommonAttentionMetadata, rows: ResidencyPlan, prompts: list[int]
    ) -> list[ObservedPrompt]:
        assert self.step is not None
        observed = []
        starts = common.query_start_loc_cpu.tolist()
        size, first_column = self.spec.block_size, self.spec.dense_columns
        for i in prompts:
            row = rows.row(i)
            end = row.num_computed_tokens + row.num_scheduled_tokens
            scores = row.num_scoring and not self.spec.h2o.gated
            if not scores and not row.is_transition:
                continue
            table = common.block_table_tensor[i]
            resident = None
            if row.is_transition:
                used = cdiv(min(end, row.budget), size)
                resident = table[first_column : first_column + used]
            observed.append(
                ObservedPrompt(
                    tokens=slice(starts[i], starts[i + 1]),
                    plan=row,
                    dense_blocks=table[: cdiv(end, size)],
                    resident_blocks=resident,
                    placement=UNIFORM
                    if self.step.by_request  # see `split`
                    else self._placement(rows.request_ids[i], row),
                    attends=self._attends(common, row),
                    partial=self.step.partial_states(rows.request_ids[i]),
                    later=self.step.later.setdefault(rows.request_ids[i], []),
                    split=functools.partial(self._split, rows.request_ids[i], row)
                    if self.step.by_request
                    else None,
                )
            )
        return observed

    def _placement(self, request_id: str, row: RowPlan) -> int:
        """Index of the placement that a prompt's transition is to."""
        return self.index_of(request_id, row.budget, row.prefill_end > row.budget)

    def _split(self, request_id: str, row: RowPlan, layers: list[ScoredLayer]) -> int:
        """See `ObservedPrompt.split`."""
        assert self.step is not None and self.step.by_request is not None
        num_tokens, group = row.prefill_end, layers[0].params.group
        queries = Queries(torch.arange(num_tokens), row.first_query, num_tokens, group)
        states = [layer.state for layer in layers]
        self.step.by_request.split(request_id, states, queries, row.budget)
        return self._placement(request_id, row)


def _select_rows(
    common: CommonAttentionMetadata, chosen: torch.Tensor
) -> tuple[CommonAttentionMetadata, torch.Tensor | None]:
    """The batch of the chosen rows, and their token indices in the old batch.

    `chosen` has int64 rows; the indices are None where these are all.
    """
    if len(chosen) == common.num_reqs:
        return common, None
    starts = common.query_start_loc_cpu
    lengths = starts.diff()[chosen]
    bounds = starts.tolist()
    tokens_cpu = torch.cat(
        [torch.arange(bounds[i], bounds[i + 1]) for i in chosen.tolist()]
    )
    start_loc_cpu = torch.zeros(len(chosen) + 1, dtype=starts.dtype)
    start_loc_cpu[1:] = lengths.cumsum(0)
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
