"""Prompts: score them while they are read, compress them when they end."""

from __future__ import annotations

import functools

import torch

from vllm_h2o.attention.metadata import ObservedPrompt
from vllm_h2o.attention.ops import (
    DecodeParams,
    ScoredLayer,
    attend_observed,
    observe,
    score_by_gate,
    start,
    transition,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig


def observe_prompt(
    query: torch.Tensor,
    pages: Pages,
    prompt: ObservedPrompt,
    layer_name: str,
    config: H2OConfig,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """Score the prompt with this step's queries, if any; in its last step compress it.

    On CPU it is compressed between this step and the next, all layers at once: the
    first token does not wait for it, and the heads of all layers share out the
    threads. A GPU's launches gain nothing by that, and its memory for scores is dear.

    Args:
        query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
            keys and values are in the dense pages already.
        pages: The layer's pages; only resident blocks are written.
        prompt: The row.
        layer_name: Whose state of earlier steps this is.
        config: The policy.
        params: The layer's constants.
        output: `[num_tokens, num_heads, head_size]` attention of the row's queries,
            written if the stock kernel has not done so.
    """
    plan = prompt.plan
    if config.gated:
        assert params.gate is not None, "the worker gives it before the cache"
        _compress_by_gate(pages, prompt, config, params)
        return
    first_scoring = max(plan.num_computed_tokens, plan.first_query)
    state = prompt.partial.pop(layer_name, None)
    new = plan.num_computed_tokens
    if state is None or first_scoring == plan.first_query:
        # The first step with observation queries, also after a restart.
        shape, new = (pages.keys.shape[1], plan.prefill_end), 0
        fields = (*pages.state, *params.method.prompt_fields)
        state = {name: torch.zeros(shape, device=query.device) for name in fields}
    end = plan.num_computed_tokens + len(query)
    start(pages, prompt.dense_blocks, new, end, state, params)
    if prompt.attends:
        attend_observed(
            query, pages, prompt.dense_blocks, plan.num_computed_tokens,
            first_scoring - plan.num_computed_tokens, state, params, output,
        )  # fmt: skip
    elif plan.num_scoring:
        query = query[-plan.num_scoring :]
        observe(query, pages, prompt.dense_blocks, first_scoring, state, params)
    if prompt.resident_blocks is None:
        prompt.partial[layer_name] = state
        return
    _compress_when_due(prompt, ScoredLayer(pages, state, params), config)


def _compress_by_gate(
    pages: Pages, prompt: ObservedPrompt, config: H2OConfig, params: DecodeParams
) -> None:
    """The transition of a prompt that no query has scored."""
    shape, device = (pages.keys.shape[1], prompt.plan.prefill_end), pages.keys.device
    state = {name: torch.zeros(shape, device=device) for name in pages.state}
    _compress_when_due(prompt, ScoredLayer(pages, state, params), config)


def _compress_when_due(
    prompt: ObservedPrompt, layer: ScoredLayer, config: H2OConfig
) -> None:
    prompt.layers.append(layer)
    if prompt.dense_blocks.is_cpu:
        if len(prompt.layers) == 1:
            prompt.later.append(functools.partial(compress_prompt, prompt, config))
    else:
        compress_prompt(prompt, config)


def compress_prompt(prompt: ObservedPrompt, config: H2OConfig) -> None:
    """Copy each KV head's choice from the dense into the resident pages.

    Args:
        prompt: The row in its transition step, with the layers that are due.
        config: The policy.
    """
    assert prompt.resident_blocks is not None
    first_query = prompt.plan.first_query
    if config.gated:
        score_by_gate(prompt.layers, prompt.dense_blocks, first_query)
    transition(
        prompt.layers,
        prompt.dense_blocks,
        prompt.resident_blocks,
        prompt.split(prompt.layers) if prompt.split else prompt.placement,
        first_query,
        config,
    )
    prompt.layers.clear()
