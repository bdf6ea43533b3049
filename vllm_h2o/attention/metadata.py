"""Per-step metadata: which rows go to the stock backend and which to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_h2o.attention.drafts import Drafted, Logs, StepLogs
from vllm_h2o.attention.ops import Chunk, DraftLog, Held, ResidentRows
from vllm_h2o.attention.placements import Budget
from vllm_h2o.attention.prompts import PromptRow
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.attention.rows import RowTensors, select_rows, tokens_of
from vllm_h2o.attention.step import StepRows
from vllm_h2o.attention.upkeep import Upkeep
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.chunks import first_scoring
from vllm_h2o.policy.life import RowPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadataBuilder as _Stock
else:
    # The stock builder comes next among the bases of a platform's class.
    _Stock = object


@dataclass
class H2OMetadata:
    """A batch split by row.

    Attributes:
        spec: Of the layers.
        stock: Metadata of the prefilling rows that the stock backend attends to, or
            None.
        stock_tokens: `[n]` int64 indices of their tokens; None: the whole batch.
        prompts: Rows whose prompts score, are read on, or are compressed.
        resident: The resident rows, or None.
        resident_tokens: `[n]` int64 indices of their tokens; None: the whole batch.
        drafted: What takes back of them what is refused, if some have drafts.
        dense: Rows that decode and stay dense, where their pages are not those of
            resident rows; else they are among the latter. Where both are the whole
            batch, a row has position -1 in one of them.
        dense_tokens: As of the resident rows.
    """

    spec: H2OAttentionSpec
    stock: Any = None
    stock_tokens: torch.Tensor | None = None
    prompts: list[PromptRow] = field(default_factory=list)
    resident: ResidentRows | None = None
    resident_tokens: torch.Tensor | None = None
    drafted: Drafted | None = None
    dense: ResidentRows | None = None
    dense_tokens: torch.Tensor | None = None


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
    # Whether a batch of decodes is decoded as it is, since graphs are: where pages of
    # rows that stay dense are other than residents', by both calls.
    has_graphs = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.step: StepRows | None = None
        self.compresses = isinstance(kv_cache_spec, H2OAttentionSpec)
        if not self.compresses:
            return
        self.spec: H2OAttentionSpec = kv_cache_spec
        self.layout = kv_cache_spec.page_layout
        self.placements = RowPlacements()
        self.upkeep = Upkeep(self.spec, (), self.placements)
        # No graph of decodes has more rows, in either model runner.
        max_rows = vllm_config.scheduler_config.max_num_seqs
        scratch = self._decode_scratch(vllm_config, max_rows)
        blocks = self.layout.budget_blocks
        self._most_tokens = 1 + vllm_config.num_speculative_tokens
        self._known_logs: dict[int, DraftLog] = {}
        speculates = self._most_tokens > 1
        self._tensors = RowTensors(
            max_rows, blocks, device, scratch, speculates=speculates
        )
        # Rows that stay dense, where resident pages are other than vLLM's blocks.
        self._dense_tensors: RowTensors | None = None
        if not self.spec.pages_are_blocks:
            dense = cdiv(self.spec.dense_layout.budget, self.spec.block_size)
            self._dense_tensors = RowTensors(
                max_rows, dense, device, scratch, True, speculates
            )

    def _decode_scratch(self, vllm_config: VllmConfig, max_rows: int) -> Any:
        """What the platform's decode kernels need beside their rows."""
        return None

    def _pack(
        self, plan: ResidencyPlan, placements: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """`ResidentRows.logit_starts` of the rows, where there is a scratch."""
        raise NotImplementedError

    def bind(
        self,
        step: StepRows,
        layers: Sequence[Any] = (),
        placements: RowPlacements | None = None,
    ) -> None:
        """Connect the builder to the worker's steps.

        Args:
            step: The steps.
            layers: vLLM's `Attention` modules, in order.
            placements: Of the slots of rows; None: all heads of all requests have the
                engine's budget.
        """
        assert self.compresses
        self.step, self.placements = step, placements or RowPlacements()
        step.groups.append(self.placements)
        self.upkeep = Upkeep(self.spec, layers, self.placements)
        self._num_layers = len(layers)
        self._tensors.bind(self.placements.has_several)
        self._known_logs = {}

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
        metadata = H2OMetadata(self.spec)
        decodes = rows.decodes
        if not decodes.all():
            metadata.prompts = [*self._prompts(common, rows)]
            dense = np.flatnonzero(~decodes & (rows.chunk_starts == 0)).tolist()
            stock = [i for i in dense if not self._attends(common, rows.row(i))]
            if stock:
                index = torch.tensor(stock)
                part, metadata.stock_tokens = select_rows(common, index)
                metadata.stock = super().build(common_prefix_len, part, fast_build)
        if decodes.any():
            self.upkeep.run(rows, common.block_table_tensor)
            self._add_decodes(metadata, common, rows, decodes)
        for watcher in self.step.watchers:
            watcher(self, common.block_table_tensor, rows)
        return metadata

    def _add_decodes(
        self,
        metadata: H2OMetadata,
        common: CommonAttentionMetadata,
        rows: ResidencyPlan,
        decodes: npt.NDArray[np.bool_],
    ) -> None:
        """Those that stay dense apart, where their pages are not alike."""
        dense = decodes & rows.stay_dense
        self._skip_stock_update(common, decodes & ~dense)
        if self._dense_tensors is not None and self.has_graphs and decodes.all():
            metadata.resident = self._resident(common, rows)
            metadata.dense = self._dense(common, rows)
            self._note_drafts(metadata, decodes)
            return
        if self._dense_tensors is not None:
            decodes = decodes & ~dense
            if dense.any():
                metadata.dense, metadata.dense_tokens = self._rows_of(
                    dense, common, rows, self._dense
                )
        if decodes.any():
            metadata.resident, metadata.resident_tokens = self._rows_of(
                decodes, common, rows, self._resident
            )
            self._note_drafts(metadata, decodes)

    def _note_drafts(
        self, metadata: H2OMetadata, decodes: npt.NDArray[np.bool_]
    ) -> None:
        """Have drafts of rows that decode be taken back, if there are any."""
        assert metadata.resident is not None and self.step is not None
        if metadata.resident.most_tokens > 1:
            index = torch.from_numpy(np.flatnonzero(decodes))
            index = async_tensor_h2d(index, self.device)
            logs = self._logs(metadata.resident)
            metadata.drafted = Drafted(metadata.resident, index, logs)
            self.step.drafted.append(metadata.drafted)

    def _logs(self, rows: ResidentRows) -> Logs:
        """Where layers note what drafts of these rows change."""
        return StepLogs(self._known_logs, len(rows.positions), rows.most_tokens - 1)

    def _rows_of(
        self,
        chosen: npt.NDArray[np.bool_],
        common: CommonAttentionMetadata,
        rows: ResidencyPlan,
        make: Callable[[CommonAttentionMetadata, ResidencyPlan], ResidentRows],
    ) -> tuple[ResidentRows, torch.Tensor | None]:
        """Chosen rows that decode, and their tokens; None: the whole batch."""
        if chosen.all():
            return make(common, rows), None
        index = np.flatnonzero(chosen)
        part, tokens = select_rows(common, torch.from_numpy(index))
        return make(part, rows.select(index.tolist())), tokens

    def _skip_stock_update(
        self, common: CommonAttentionMetadata, residents: npt.NDArray[np.bool_]
    ) -> None:
        """Let vLLM not write the tokens of rows: slot -1 says so.

        Our kernel writes them, to their slots. What stays dense vLLM writes too, before
        any row attends: a block may be another request's hit in the very step that
        fills it.
        """
        if residents.all():
            common.slot_mapping[: common.num_actual_tokens].fill_(-1)
        elif residents.any():
            rows = torch.from_numpy(np.flatnonzero(residents))
            tokens = tokens_of(common.query_start_loc_cpu, rows)
            on_device = async_tensor_h2d(tokens, common.slot_mapping.device)
            common.slot_mapping.index_fill_(0, on_device, -1)

    def _dense(
        self, common: CommonAttentionMetadata, plan: ResidencyPlan
    ) -> ResidentRows:
        """Those of a batch of decodes that stay dense, by their dense blocks."""
        assert self._dense_tensors is not None
        rows = self._dense_tensors.begin(common, plan)
        if not plan.stay_dense.all():
            rows.positions.masked_fill_(rows.positions >= rows.first_queries, -1)
        table = common.block_table_tensor[: common.num_reqs]
        rows.block_table.copy_(table[:, : rows.block_table.shape[1]])
        return rows

    def _build_dummy(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> Any:
        """Metadata of a warm-up, of the capture of a graph, or of an idle rank.

        Batches of one token per request, and of its drafts where vLLM speculates, are
        what decode graphs are captured from: they run the resident kernels over rows of
        padding, which touch no page.
        """
        if not self._is_uniform(common):
            return super().build(common_prefix_len, common, fast_build)
        size = common.num_reqs, common.max_query_len
        dense, resident = self._dense_tensors, self._tensors.padding(*size)
        return H2OMetadata(
            self.spec,
            resident=resident,
            drafted=self._drafted_padding(resident),
            dense=None if dense is None else dense.padding(*size),
        )

    def _is_uniform(self, common: CommonAttentionMetadata) -> bool:
        """Whether all rows have as many tokens, and no more than those that decode."""
        size = common.max_query_len
        alike = common.num_actual_tokens == common.num_reqs * size
        return alike and size <= self._most_tokens

    def _drafted_padding(self, rows: ResidentRows) -> Drafted | None:
        """What takes back drafts of padding, where it has some and layers are known."""
        if rows.most_tokens == 1 or self.step is None:
            return None
        everyone = torch.arange(len(rows.positions), device=self.device)
        return Drafted(rows, everyone, self._logs(rows))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Any:
        """Build the metadata that a graph is captured with."""
        if not self.compresses:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        assert self._is_uniform(common_attn_metadata), "H2O captures decodes only"
        return self._build_dummy(0, common_attn_metadata, False)

    def _resident(
        self, common: CommonAttentionMetadata, plan: ResidencyPlan
    ) -> ResidentRows:
        """The rows of a batch of decodes; rows after those of the plan are padding."""
        rows = self._tensors.begin(common, plan)
        if rows.logit_starts is not None or rows.placements is not None:
            placements = self.placements.of_rows(plan)
        if rows.logit_starts is not None:
            starts = self._pack(plan, placements)
            async_tensor_h2d(starts, out=rows.logit_starts[: len(starts)])
        if rows.placements is not None:
            async_tensor_h2d(placements, out=rows.placements[: len(placements)])
            assert rows.grown_at is not None
            async_tensor_h2d(plan.grown_at, out=rows.grown_at[: len(placements)])
        table = common.block_table_tensor[: common.num_reqs]
        resident = self.spec.resident_pages(table, self.layout.budget)
        rows.block_table.copy_(resident)
        if plan.stay_dense.any():
            # No query has scored what is in dense blocks.
            stay = rows.positions < rows.first_queries
            if self._dense_tensors is None:
                dense = table[:, : resident.shape[1]]
                torch.where(stay[:, None], dense, resident, out=rows.block_table)
            else:
                rows.positions.masked_fill_(stay, -1)
        return rows

    def padding(self) -> Iterator[tuple[ResidentRows, Drafted | None]]:
        """Batches of 1, 2, 4 .. rows that touch no page; with drafts if there are."""
        num_rows = 1
        while num_rows <= self._tensors.max_rows:
            rows = self._tensors.padding(num_rows, self._most_tokens)
            yield rows, self._drafted_padding(rows)
            if self._dense_tensors is not None:
                yield self._dense_tensors.padding(num_rows, self._most_tokens), None
            num_rows *= 2

    def _attends(self, common: CommonAttentionMetadata, row: RowPlan) -> bool:
        """Whether our kernel, which is causal, attends in this step of a prompt."""
        scores = row.mostly_scores and not self.spec.h2o.gated
        return self.attends_observed and scores and common.causal is True

    def _prompts(
        self, common: CommonAttentionMetadata, rows: ResidencyPlan
    ) -> Iterator[PromptRow]:
        """Rows whose prompts score, are read on, or are compressed in this step."""
        assert self.step is not None
        starts, size = common.query_start_loc_cpu.tolist(), self.spec.block_size
        for i in np.flatnonzero(~rows.decodes).tolist():
            row, resident = rows.row(i), None
            end = row.num_computed_tokens + row.num_scheduled_tokens
            scores = row.num_scoring and not self.spec.h2o.gated
            if not scores and not row.is_transition and not row.chunk_start:
                continue
            table, chunk = common.block_table_tensor[i], None
            if row.chunk_start:
                end = row.chunk_end
                chunk = self._later_chunk(rows.request_ids[i], row, table)
            elif row.is_transition:
                resident = self.spec.resident_pages(table, min(end, row.budget))
            yield PromptRow(
                request_id=rows.request_ids[i],
                transitions=self.step.transitions,
                placements=self.placements,
                tokens=slice(starts[i], starts[i + 1]),
                plan=row,
                num_layers=self._num_layers,
                blocks=table[: cdiv(end, size)],
                resident=resident,
                attends=self._attends(common, row),
                chunk=chunk,
            )

    def _later_chunk(self, request_id: str, row: RowPlan, table: torch.Tensor) -> Chunk:
        """What a row reads beside what is held."""
        return Chunk(
            row.chunk_end,
            first_scoring(row.chunk_start, row.first_query, self.spec.h2o.gated),
            row.scored_from,
            row.first_query,
            table[: cdiv(row.chunk_end, self.spec.block_size)],
            Held(
                self.spec.resident_pages(table, row.budget),
                self.placements.index(request_id, Budget.of(row), True),
                row.chunk_start,
                row.grown_at,
            ),
        )
