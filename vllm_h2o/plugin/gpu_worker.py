"""The worker on CUDA."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_gib
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_worker import Worker

from vllm_h2o.attention.device_tables import NUM_SIZES
from vllm_h2o.attention.ops import SCRATCH_BYTES
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.plugin.worker import H2OWorker
from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.methods import fused_prompt_form_of
from vllm_h2o.policy.options import REQUEST
from vllm_h2o.policy.quantization import NUM_SCALES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from vllm_h2o.calibration.resolve import Resolved

logger = init_logger(f"vllm.{__name__}")

BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: "H2OFlashAttentionBackend",
    AttentionBackendEnum.TRITON_ATTN: "H2OTritonAttentionBackend",
}
"""H2O's backends by the stock one that prompts go through."""


class H2OGPUWorker(H2OWorker, Worker):
    """vLLM's CUDA worker with H2O's attention backend, on runner V1 or V2."""

    overridden = AttentionBackendEnum.CUSTOM

    @staticmethod
    def choose_backend(vllm_config: VllmConfig) -> str:
        """See the base class; the config names H2O's backend from now on."""
        stock = stock_backend(vllm_config)
        vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        logger.info_once("H2O reads prompts with %s", stock.name)
        return f"vllm_h2o.attention.cuda_backend.{BACKENDS[stock]}"

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: without what the resident kernels hand around.

        vLLM's profile run has no KV cache yet, so it does not see that. Bytes that
        the user names (`--kv-cache-memory`) are taken as they are.
        """
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return available
        specs = self.get_kv_cache_spec()
        num_blocks = most_blocks(specs, available)
        scratch = scratch_bytes(self.vllm_config, specs, num_blocks)
        assert self._resolved is not None
        scratch += table_bytes(self.vllm_config, specs, self._resolved)
        scratch += log_bytes(self.vllm_config, specs, num_blocks)
        scratch += reading_bytes(self.vllm_config, specs, num_blocks)
        scratch += transition_bytes(self.vllm_config, specs)
        logger.info_once(
            "H2O's steps take %s GiB beside the KV cache, for up to %d rows "
            "(--max-num-seqs)",
            format_gib(scratch), self.vllm_config.scheduler_config.max_num_seqs,
        )  # fmt: skip
        return available - scratch

    def _maybe_activate_jit_monitor(self) -> None:
        """Compile H2O's kernels too, before vLLM complains of what is compiled."""
        self.warm_up_kernels()
        super()._maybe_activate_jit_monitor()


def stock_backend(vllm_config: VllmConfig) -> AttentionBackendEnum:
    """What prompts go through: the user's choice, else FlashAttention, else Triton."""
    given = vllm_config.attention_config.backend
    # CUSTOM: of an engine before this one, which had the same config.
    if given not in (None, AttentionBackendEnum.CUSTOM):
        return given
    model, cache = vllm_config.model_config, vllm_config.cache_config
    capability = current_platform.get_device_capability()
    assert isinstance(model.dtype, torch.dtype) and capability is not None
    selector = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        use_mm_prefix=model.is_mm_prefix_lm,
        has_sink=_has_sinks(model.hf_text_config),
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
    )
    try:
        reasons = FlashAttentionBackend.validate_configuration(
            device_capability=capability, **selector._asdict()
        )
    except (ImportError, OSError) as error:
        reasons = [str(error)]
    if not reasons:
        return AttentionBackendEnum.FLASH_ATTN
    logger.info_once("FlashAttention is out: %s", "; ".join(reasons))
    return AttentionBackendEnum.TRITON_ATTN


def _has_sinks(text_config: Any) -> bool:
    """Whether layers of a model have sinks in their softmax (policy/softmax.py).

    As vLLM's models decide it: layers show it when they are made, which is too late for
    the choice between backends.
    """
    kind = text_config.model_type
    if kind == "laguna":
        return getattr(text_config, "swa_attention_sink_enabled", False)
    if kind.startswith("granite") and kind != "granitemoehybrid":
        has_kinds = getattr(text_config, "layer_types", None) is not None
        return getattr(text_config, "attention_sinks", has_kinds)
    return kind == "gpt_oss"


def most_blocks(specs: dict[str, KVCacheSpec], num_bytes: int) -> int:
    """Blocks that fit in so many bytes, or more.

    A block is a page of each layer of a KV cache group, and groups have as many layers
    as there are of the rarest kind, or more.
    """
    kinds = Counter(
        spec
        if isinstance(spec, MambaSpec)
        else (type(spec), getattr(spec, "sliding_window", None))
        for spec in specs.values()
    )
    ours = [spec for spec in specs.values() if isinstance(spec, H2OAttentionSpec)]
    if not ours:
        return 0
    page = min(spec.page_size_bytes for spec in ours)
    return max(0, num_bytes) // (page * min(kinds.values()))


def scratch_bytes(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int
) -> int:
    """Bytes that a decode step hands from kernel to kernel, in a pool of that size.

    Args:
        vllm_config: The engine's.
        specs: Of all layers.
        num_blocks: Of the pool.
    """
    from vllm_h2o.attention.ops.triton import DecodeScratch

    ours = [spec for spec in specs.values() if isinstance(spec, H2OAttentionSpec)]
    if not ours:
        return 0
    spec, budget = ours[0], ours[0].layout.budget
    max_rows = vllm_config.scheduler_config.max_num_seqs
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return DecodeScratch.bytes_of(
        max_rows,
        model.get_num_attention_heads(parallel),
        spec.num_kv_heads,
        spec.head_size,
        budget,
        spec.largest_budget,
        _logit_slots(vllm_config, spec, num_blocks),
        current_platform.device_type,
        spec.dense_budget,
        spec.page_slots * spec.h2o.reads_part,
    )


def _logit_slots(
    vllm_config: VllmConfig, spec: H2OAttentionSpec, num_blocks: int
) -> int:
    """Slots of rows that score, over KV heads, in a pool of so many blocks."""
    from vllm_h2o.attention.ops.triton import slots_with_logits

    max_rows = vllm_config.scheduler_config.max_num_seqs
    pool = num_blocks * spec.block_slots
    return slots_with_logits(max_rows, spec.most_slots, pool, spec.most_slots_per_token)


def log_bytes(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int
) -> int:
    """Bytes that say what drafts have changed, of all layers; see `DraftLog`.

    Args:
        vllm_config: The engine's.
        specs: Of all layers.
        num_blocks: Of the pool.
    """
    most_drafts = vllm_config.num_speculative_tokens
    max_rows = vllm_config.scheduler_config.max_num_seqs
    num_bytes = 0
    for spec in specs.values():
        if most_drafts and isinstance(spec, H2OAttentionSpec):
            slots = _logit_slots(vllm_config, spec, num_blocks)
            item = 1 if spec.h2o.quantizes else spec.dtype.itemsize
            lost = 2 * spec.head_size * item + 4 * (2 + NUM_SCALES)
            num_bytes += 4 * slots + max_rows * spec.num_kv_heads * lost
    return most_drafts * num_bytes


def reading_bytes(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int
) -> int:
    """Bytes of reading a later chunk or a turn that goes on.

    One layer's at a time, or of several where the chunk ends. And states of all layers:
    of a chunk that spans steps, and of chunks that wait for their last layer.

    Args:
        vllm_config: The engine's.
        specs: Of all layers.
        num_blocks: Of the pool, which has all tokens that are read at once.
    """
    from vllm_h2o.attention.ops.triton import (
        chunk_end_bytes,
        move_bytes,
        read_bytes,
    )

    longest = vllm_config.model_config.max_model_len
    step = vllm_config.scheduler_config.max_num_batched_tokens
    max_rows = vllm_config.scheduler_config.max_num_seqs
    num_heads = vllm_config.model_config.get_num_attention_heads(
        vllm_config.parallel_config
    )
    ours = [spec for spec in specs.values() if isinstance(spec, H2OAttentionSpec)]
    most = 0
    for spec in ours:
        if not spec.h2o.reads_on:
            continue
        chunk = chunk_tokens(
            spec.h2o.prefill_chunk, spec.layout.budget, spec.block_size,
            spec.h2o.slots_per_token,
        )  # fmt: skip
        fresh = min(longest if spec.h2o.keeps else chunk, num_blocks * spec.block_size)
        held = min(spec.largest_budget, longest)
        seen = min(held + fresh, longest)
        heads = spec.num_kv_heads, spec.head_size, spec.dtype.itemsize
        read = read_bytes(seen, min(step, fresh), num_heads, *heads)
        end = chunk_end_bytes(held, seen, *heads)
        end = min(len(ours) * end, max(end, SCRATCH_BYTES))
        if spec.reach is not None:
            end += move_bytes(held, spec.head_size)
        states = len(ours) * 4 * spec.num_kv_heads * seen
        states += min(max_rows * states, SCRATCH_BYTES)
        most = max(most, states + max(read, end))
    return most


def transition_bytes(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """Bytes of compressing the longest prompt, or of heads that part, all layers.

    States of all layers where heads part, scores of those that a gate compresses at
    once; and scratch, of which rings that are put in order take no more. Where layers
    share out a request's slots, the states of what waits for them.

    Args:
        vllm_config: The engine's.
        specs: Of all layers.
    """
    from vllm_h2o.attention.ops.triton import (
        layer_bytes,
        own_observe_bytes,
        own_score_bytes,
    )

    longest = vllm_config.model_config.max_model_len
    num_heads = vllm_config.model_config.get_num_attention_heads(
        vllm_config.parallel_config
    )
    ours = [spec for spec in specs.values() if isinstance(spec, H2OAttentionSpec)]
    num_bytes = 0
    for spec in ours:
        heads, held = spec.num_kv_heads, min(spec.largest_budget, longest)
        vectors = 2 * spec.head_size * spec.dtype.itemsize
        scores, scratch, of_switch = (
            min(len(ours) * x, max(x, SCRATCH_BYTES))
            for x in (
                4 * heads * longest,
                layer_bytes(heads, longest, held, 0),
                layer_bytes(heads, held, held, vectors),
            )
        )
        switch = len(ours) * 4 * heads * held + of_switch
        method = spec.h2o.method
        if spec.h2o.head_budgets == REQUEST:
            state = heads * 4 * (1 + len(method.prompt_fields)) * longest
            scores = max(state, SCRATCH_BYTES) + SCRATCH_BYTES
            scratch += min(len(ours) * 4 * heads * longest, SCRATCH_BYTES)
        if fused_prompt_form_of(method) is None:
            own = own_score_bytes(heads, longest)
            scratch += min(len(ours) * own, max(own, SCRATCH_BYTES))
            of_head = num_heads // heads, spec.head_size, spec.dtype.itemsize
            scratch = max(scratch, own_observe_bytes(longest, *of_head))
        num_bytes = max(num_bytes, scores + scratch, switch)
    return num_bytes


def table_bytes(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], resolved: Resolved
) -> int:
    """Bytes that say where requests have their slots, see `DeviceTables`.

    Args:
        vllm_config: The engine's.
        specs: Of all layers.
        resolved: What the start has decided.
    """
    from vllm_h2o.attention.request_tables import RequestTables

    num_bytes, requests = 0, vllm_config.scheduler_config.max_num_seqs
    ours = [spec for spec in specs.values() if isinstance(spec, H2OAttentionSpec)]
    for spec in ours:
        limits = resolved.limits(spec)
        if spec.h2o.head_budgets == REQUEST:
            alike = 2 * (1 + limits.rounds) * len(limits.ladder.budgets)
            pages = spec.page_layout.budget_blocks
            size = len(ours), spec.num_kv_heads, pages, alike, requests
            return RequestTables.bytes_of(*size)
        if not resolved.by_head and not limits.has_several:
            continue
        classes = limits.ladder.num_classes if resolved.by_head else 1
        # Before and after heads part. Pages: a head has the budget's on average.
        budgets = limits.ladder.budgets
        placements, blocks = 2 * len(budgets) * classes, budgets[-1] * classes
        if limits.rounds:
            placements, blocks = 2 * placements, blocks + sum(budgets)
        sizes = placements * 4 * NUM_SIZES
        of_block = spec.page_layout.budget_blocks / budgets[-1]
        pages = math.ceil(of_block * blocks) * (4 + 8 + 8)
        num_bytes += spec.num_kv_heads * (sizes + pages)
    return num_bytes
