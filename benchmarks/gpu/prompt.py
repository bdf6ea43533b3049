"""The end of a prompt: scoring and transition against the prompt's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.measure import microseconds
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.state import random_pages, random_tokens
from vllm_h2o.attention.ops import DecodeParams
from vllm_h2o.attention.ops.triton import compress, observe
from vllm_h2o.attention.prompt import choose
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout


def measure_all(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Issue 5's comparison 3: microseconds of one layer."""
    attention = prompt_attention(sizes, device)
    window, every = scoring(sizes, device)
    moved = transition(sizes, device)
    return [
        {"part": part, "us_per_layer": duration, "of_attention": duration / attention}
        for part, duration in (
            ("prompt attention, torch SDPA", attention),
            (f"scores of the last {sizes.window} queries", window),
            ("transition: selection and copy", moved),
            ("both", window + moved),
            ("scores of all queries, given their log-sum-exp", every),
        )
    ]


def prompt_attention(sizes: Sizes, device: torch.device) -> float:
    """Microseconds of causal attention over the prompt."""

    def heads(num_heads: int) -> torch.Tensor:
        tokens = random_tokens(sizes.context, num_heads, sizes, device)
        return tokens.transpose(0, 1).contiguous().unsqueeze(0)

    query, key = heads(sizes.num_heads), heads(sizes.num_kv_heads)
    return microseconds(
        lambda: F.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        ),
        device,
    )


def scoring(sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Microseconds of scoring with the window, and with all queries."""
    num_blocks = sizes.context // sizes.block_size
    pages = random_pages(num_blocks + 1, sizes, device)
    blocks = torch.randperm(num_blocks, device=device) + 1
    query = random_tokens(sizes.context, sizes.num_heads, sizes, device)
    scores = torch.zeros(sizes.num_kv_heads, sizes.context, device=device)
    params = params_of(sizes)
    first = sizes.context - sizes.window
    lse = torch.zeros(sizes.num_heads, sizes.context, device=device)
    window = microseconds(
        lambda: observe(query[first:], pages, blocks, first, scores, params),
        device,
    )
    every = microseconds(
        lambda: observe(query, pages, blocks, 0, scores, params, lse),
        device,
    )
    return window, every


def transition(sizes: Sizes, device: torch.device) -> float:
    """Microseconds of selecting and copying."""
    params = params_of(sizes)
    layout = params.layout
    dense = sizes.context // sizes.block_size
    pages = random_pages(dense + layout.budget_blocks + 1, sizes, device)
    blocks = torch.randperm(dense + layout.budget_blocks, device=device) + 1
    scores = torch.rand(sizes.num_kv_heads, sizes.context, device=device)
    config = H2OConfig(observation_window=sizes.window)

    def move() -> None:
        last = sizes.context
        chosen = choose(scores, last, last - sizes.window, config, params)
        compress(pages, blocks[:dense], blocks[dense:], last, chosen, scores, params)

    return microseconds(move, device)


def params_of(sizes: Sizes) -> DecodeParams:
    """Half of the budget heavy, half recent."""
    layout = SlotLayout(
        sizes.block_size, sizes.budget // 2, sizes.budget // 2, 4, whole_blocks=False
    )
    return DecodeParams(layout, sizes.head_size**-0.5, 0.0, 1.0, mean=True)
