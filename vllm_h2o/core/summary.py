"""What an engine's log says when H2O is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import INT8

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_h2o.policy.request import RequestLimits


def summary(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    spec: H2OAttentionSpec,
    limits: RequestLimits,
) -> str:
    """The line `H2O is on`.

    Args:
        vllm_config: Of the engine.
        kv_cache_config: Its pool.
        spec: Of the layers that are compressed.
        limits: What requests may ask for.
    """
    config, longest = spec.h2o, vllm_config.model_config.max_model_len
    usable, others = kv_cache_config.num_blocks - 1, 0
    full, count = cdiv(longest, spec.block_size), 0
    for group in kv_cache_config.kv_cache_groups:
        is_ours = isinstance(group.kv_cache_spec, H2OAttentionSpec)
        count += is_ours
        others += 0 if is_ours else _blocks_of_other(vllm_config, group.kv_cache_spec)
    most = limits.climb(None, longest, longest).budget
    blocks = most // spec.block_slots
    layout = SlotLayout.of_blocks(config, spec.page_slots, most // spec.page_slots)
    resident = usable // (blocks * count + others)
    decay = getattr(config.method, "score_decay", None)
    observing = (
        "prompts by the gate"
        if config.gated
        else f"observation window {config.observation_window}, pooling {config.pooling}"
    )
    decay = "" if decay is None else f", decay {decay:g}"
    reading = f", reading {config.read}" if config.reads_part else ""
    merging = f", merging {config.merge}s" if config.merges else ""
    rounded = f" in {INT8}" if config.quantizes else ""
    if config.resident_why:
        stored = rounded or " in the model's type"
        rounded = f"{stored}, {config.resident_why}"
    chosen = f"It goes by {config.chosen}. " if config.chosen else ""
    chunks = ""
    asked, held = config.prefill_chunk, config.slots_per_token
    if tokens := chunk_tokens(asked, most, spec.block_size, held):
        tokens = min(tokens, longest)
        chunks = f"Prompts are read {tokens} tokens at once. "
        full = spec.blocks_while_reading(longest, most, asked)
    budget = f"budget {most} tokens"
    ladder = limits.ladder
    if len(ladder.budgets) > 1:
        of_tokens = f"{100 * (config.share or 0):.3g}% of its tokens"
        budget = (
            f"budget {config.budget} of what a request takes in stock's cache "
            f"({of_tokens}), at least {ladder.budgets[0] * ladder.block_size} "
            f"tokens, of the longest {most}"
        )
    return (
        f"H2O is on: policy {config.policy}, {budget} "
        f"({blocks} blocks of {spec.block_slots}{rounded}): "
        f"{layout.heavy_slots} heavy ({layout.sinks} sinks) + "
        f"{layout.recent_slots} recent, unit {config.eviction_unit}, "
        f"score {config.score}{decay}, "
        f"{observing}{reading}{merging}. {chosen}{chunks}"
        f"After its prompt a request holds at most {most} KV tokens (stock: "
        f"{longest}); the pool of {usable} blocks fits {resident} such "
        f"requests, or {usable // (full * count + others)} full-length ones."
    )


def _blocks_of_other(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Most blocks of a request in layers with a window or a state."""
    if window := getattr(spec, "sliding_window", None):
        return cdiv(window, spec.block_size) + 1
    if isinstance(spec, MambaSpec):
        most = spec.max_memory_usage_bytes(vllm_config)
        return cdiv(most, spec.page_size_bytes)
    return 0
