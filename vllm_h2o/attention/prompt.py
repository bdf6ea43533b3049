"""Prompts: score them while they are read, compress them when they end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_h2o.attention.metadata import ObservedPrompt
from vllm_h2o.attention.ops import (
    DecodeParams,
    attend_observed,
    choose,
    compress,
    observe,
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

    Args:
        query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
            keys and values are in the dense pages already.
        pages: The layer's pages; only resident blocks are written.
        prompt: The row.
        layer_name: Whose partial scores these are.
        config: The policy.
        params: The layer's constants.
        output: `[num_tokens, num_heads, head_size]` attention of the row's queries,
            written if the stock kernel has not done so.
    """
    plan = prompt.plan
    start = max(plan.num_computed_tokens, plan.first_query)
    scores = prompt.partial.pop(layer_name, None)
    if scores is None or start == plan.first_query:
        # The first step with observation queries, also after a restart.
        num_kv_heads = pages.keys.shape[1]
        scores = torch.zeros(num_kv_heads, plan.prefill_end, device=query.device)
    skipped = start - plan.num_computed_tokens
    if prompt.attends:
        attend_observed(
            query, pages, prompt.dense_blocks, plan.num_computed_tokens, skipped,
            scores, params, output,
        )  # fmt: skip
    elif skipped < len(query):
        observe(query[skipped:], pages, prompt.dense_blocks, start, scores, params)
    if prompt.resident_blocks is None:
        prompt.partial[layer_name] = scores
    else:
        _after_the_layers(
            prompt, compress_prompt, scores, pages, prompt, config, params
        )


def _after_the_layers(
    prompt: ObservedPrompt, work: Callable[..., None], *args: Any
) -> None:
    """On CPU do what only the next step needs when all layers have run.

    One layer after the other it finds its code and tables in the caches, between two
    matrix products it does not. A GPU's launches gain nothing, and its memory is dear.
    """
    if prompt.dense_blocks.is_cpu:
        prompt.later.append(functools.partial(work, *args))
    else:
        work(*args)


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
    last = scores.shape[1] - 1
    chosen = choose(scores, last, prompt.plan.first_query, config, params)
    compress(
        pages, prompt.dense_blocks, prompt.resident_blocks, last, chosen, scores, params
    )


def part_ways(
    pages: Pages,
    blocks: torch.Tensor,
    first_query: int,
    config: H2OConfig,
    params: DecodeParams,
) -> None:
    """Give the heads of a row that has just filled the budget their own slots.

    Until now every head held all tokens, the one at position p in slot p.

    Args:
        pages: The layer's pages.
        blocks: `[budget_blocks]` int32 resident blocks of the row.
        first_query: Position of the first prompt query that scored.
        config: The policy.
        params: The layer's constants, with budgets by head.
    """
    position = params.layout.budget
    scores = pages.scores[blocks.long()].transpose(0, 1).flatten(1)
    chosen = choose(scores, position, first_query, config, params)
    compress(pages, blocks, blocks, position, chosen, scores, params)
