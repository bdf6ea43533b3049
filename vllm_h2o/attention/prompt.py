"""Prompts: score them while they are read, compress them when they end."""

from __future__ import annotations

import torch

from vllm_h2o.attention.metadata import ObservedPrompt
from vllm_h2o.attention.ops import DecodeParams
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.scores import observe
from vllm_h2o.policy.selection import select_residents


def observe_prompt(
    query: torch.Tensor,
    pages: Pages,
    prompt: ObservedPrompt,
    layer_name: str,
    config: H2OConfig,
    params: DecodeParams,
) -> None:
    """Score the prompt with this step's queries; in its last step compress it.

    Args:
        query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
            keys and values are in the dense pages already.
        pages: The layer's pages; only resident blocks are written.
        prompt: The row.
        layer_name: Whose partial scores these are.
        config: The policy.
        params: The layer's constants.
    """
    plan = prompt.plan
    end = plan.num_computed_tokens + plan.num_scheduled_tokens
    start = max(plan.num_computed_tokens, prompt.first_query)
    keys = pages.keys[prompt.dense_blocks].permute(1, 2, 0, 3).flatten(2)
    scores = prompt.partial.pop(layer_name, None)
    if scores is None or start == prompt.first_query:
        # The first step with observation queries, also after a restart.
        scores = torch.zeros(keys.shape[0], plan.prefill_end)
    scores = observe(
        query[start - plan.num_computed_tokens :],
        keys[:, :, :end],
        start,
        scale=params.scale,
        score_decay=params.score_decay,
        softcap=params.softcap,
        scores=scores,
    )
    if prompt.resident_blocks is None:
        prompt.partial[layer_name] = scores
    else:
        compress_prompt(scores, pages, prompt, config, params)


def compress_prompt(
    scores: torch.Tensor,
    pages: Pages,
    prompt: ObservedPrompt,
    config: H2OConfig,
    params: DecodeParams,
) -> None:
    """Copy each KV head's choice from the dense into the resident pages.

    Args:
        scores: `[num_kv_heads, prefill_end]` float32.
        pages: The layer's pages.
        prompt: The row, in its transition step.
        config: The policy.
        params: The layer's constants.
    """
    assert prompt.resident_blocks is not None
    size = pages.block_size
    positions, slots = select_residents(
        scores, config, params.layout, prompt.first_query
    )
    heads = torch.arange(scores.shape[0])[:, None]
    source = prompt.dense_blocks[positions // size]
    i = positions % size
    target = prompt.resident_blocks[slots // size]
    j = slots % size
    pages.keys[target, heads, :, j] = pages.keys[source, heads, :, i]
    pages.values[target, heads, j] = pages.values[source, heads, i]
    pages.scores[target, heads, j] = scores.gather(1, positions)
    pages.births[target, heads, j] = positions.int()
