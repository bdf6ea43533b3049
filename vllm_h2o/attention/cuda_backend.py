"""The attention backends on CUDA: FlashAttention or Triton for prompts.

Tests run these classes over real vLLM classes on CPU tensors, with the Triton kernels
interpreted (tests/gpu_path); what was seen on a GPU is in docs/gpus.md.

CUDA graphs: batches of decodes alone run under full graphs, all others piecewise,
where attention is outside the graphs. The worker sees to it that a
prompt's step of one token is not taken for a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_h2o.attention.backend import H2OBackend, H2OImpl
from vllm_h2o.attention.drafts import KeptLogs, Logs
from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.ops import LoggedLayer, ResidentRows
from vllm_h2o.attention.ops.triton import (
    DecodeScratch,
    check_supported,
    draft_log,
    slots_with_logits,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.attention.step import StepRows
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.geometry import BlockCut

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


_SCRATCH: WeakValueDictionary[int, DecodeScratch] = WeakValueDictionary()
"""By the id of the engine's config, which its builders hold as long as the scratch."""


class _CUDAImpl(H2OImpl):
    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """The resident kernels write the output as it is."""
        return False

    def view(self, kv_cache: torch.Tensor) -> Pages:
        """See the base class."""
        return Pages.view_rows(kv_cache, self.h2o.method.fields, self.h2o.reads_part)

    def view_dense(self, kv_cache: torch.Tensor) -> Pages:
        """See the base class."""
        return Pages.view_rows(kv_cache, ())

    def view_cut(self, kv_cache: torch.Tensor, page_slots: int, cut: BlockCut) -> Pages:
        """See the base class."""
        h2o = self.h2o
        return Pages.view_rows_cut(
            kv_cache, page_slots, cut, h2o.method.fields, h2o.reads_part, h2o.quantizes
        )


class _CUDABuilder(H2OMetadataBuilder):
    num_heads_q: int  # as both stock builders set it
    has_graphs = True

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Full graphs hold decodes, and nothing else: a token of each request, and as
        many drafts."""
        if isinstance(kv_cache_spec, H2OAttentionSpec):
            if vllm_config.num_speculative_tokens:
                return AttentionCGSupport.UNIFORM_BATCH
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def _decode_scratch(self, vllm_config: VllmConfig, max_rows: int) -> DecodeScratch:
        # Before vLLM measures what graphs take: the worker counts it itself, once,
        # since layers of all KV cache groups run one after the other. By identity:
        # a second engine of this process may run beside this one.
        spec = self.spec
        budget = spec.layout.budget
        # None while vLLM measures graphs, in which all rows are padding.
        pool = (vllm_config.cache_config.num_gpu_blocks or 0) * spec.block_slots
        self._logit_slots = slots_with_logits(
            max_rows, spec.most_slots, pool, spec.most_slots_per_token
        )
        scratch = _SCRATCH.get(id(vllm_config))
        group = self.num_heads_q // spec.num_kv_heads
        if scratch is None or scratch.logits.numel() < self._logit_slots * group:
            scratch = _SCRATCH[id(vllm_config)] = DecodeScratch.allocate(
                max_rows, self.num_heads_q, spec.num_kv_heads, spec.head_size, budget,
                spec.largest_budget, self.device, logit_slots=self._logit_slots,
                dense_budget=spec.dense_budget,
                page_slots=spec.page_slots * spec.h2o.reads_part,
            )  # fmt: skip
        return scratch

    def bind(
        self,
        step: StepRows,
        layers: Sequence[Any] = (),
        placements: RowPlacements | None = None,
    ) -> None:
        """See the base class."""
        parts = [layer.impl.placements for layer in layers]
        self._table = parts[0].table if parts and parts[0] is not None else None
        # By placement, those of the layer that has the most.
        self._slots = np.array([self.spec.num_kv_heads * self.layout.budget])
        if self._table is not None:
            self._slots = self._table.most_slots(slice(None))
        assert self._slots.max() <= self.spec.most_slots, "the scratch is too small"
        super().bind(step, layers, placements)
        if self._most_tokens > 1:
            bound = [x.impl.scored_layer(x.kv_cache, self.spec) for x in layers]
            size = self._tensors.max_rows, self._most_tokens - 1, self._logit_slots
            self._kept_logs = KeptLogs(
                [
                    LoggedLayer(x.pages, x.params, draft_log(x.pages, *size))
                    for x in bound
                ]
            )

    def _logs(self, rows: ResidentRows) -> Logs:
        return self._kept_logs

    def _slots_of(self, placements: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Slots of a row's KV heads, in the layer where they have the most."""
        if self._table is None or not self.placements.splits_each_request:
            return self._slots[placements]
        return self._table.most_slots(placements)

    def _pack(
        self, plan: ResidencyPlan, placements: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        # Of the last draft.
        positions = plan.num_computed_tokens + plan.num_scheduled_tokens - 1
        slots = self._slots_of(placements)
        slots = np.minimum(self.spec.num_kv_heads * (positions + 1), slots)
        slots = np.where(plan.num_computed_tokens >= plan.first_queries, slots, 0)
        ends = slots.cumsum()
        assert ends[-1] <= self._logit_slots, "rows that score have more than the pool"
        return ends - slots


class _CUDABackend(H2OBackend):
    # Blocks are longer beside layers with a state: heads share out parts of them.
    most_page_slots = 64
    # Our kernels take keys and values of resident rows: no fused operation may have
    # written them by vLLM's slots and leave them out (vLLM >= 0.33 asks).
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enum that is left to others."""
        return "CUSTOM"

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Splits, and so the order of sums, depend on the number of rows."""
        return False

    @classmethod
    def check_supported(cls, spec: FullAttentionSpec, vllm_config: VllmConfig) -> None:
        """See the base class."""
        num_heads = vllm_config.model_config.get_num_attention_heads(
            vllm_config.parallel_config
        )
        check_supported(
            spec.dtype, spec.head_size, spec.block_size, num_heads, spec.num_kv_heads
        )


class H2OFlashAttentionImpl(_CUDAImpl, FlashAttentionImpl):
    """FlashAttention for prompts."""


class H2OFlashAttentionBuilder(_CUDABuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata for prompts."""


class H2OFlashAttentionBackend(_CUDABackend, FlashAttentionBackend):
    """float16 and bfloat16."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See the base class."""
        return H2OFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See the base class."""
        return H2OFlashAttentionBuilder


class H2OTritonAttentionImpl(_CUDAImpl, TritonAttentionImpl):
    """vLLM's Triton attention for prompts."""


class H2OTritonAttentionBuilder(_CUDABuilder, TritonAttentionMetadataBuilder):
    """vLLM's Triton metadata for prompts."""


class H2OTritonAttentionBackend(_CUDABackend, TritonAttentionBackend):
    """Where FlashAttention can not run: float32, older GPUs."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See the base class."""
        return H2OTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See the base class."""
        return H2OTritonAttentionBuilder
