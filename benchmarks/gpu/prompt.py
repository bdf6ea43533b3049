"""The end of a prompt: scoring and transition against the prompt's attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.measure import microseconds
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.state import random_pages, random_tokens
from benchmarks.heads import placements_of
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import LayerParams, ScoredLayer
from vllm_h2o.attention.ops.triton import (
    batches,
    copy_kept,
    observe,
    score_by_gate,
    select,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, LayerPlacements
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.rotation import Rotation

SCORING_AND_TRANSITION = "scores, selection and copy"
"""The part that the transition's target is about."""
ATTENTION = "prompt attention, torch SDPA"

Timed = Callable[[Callable[[], Any]], float]
"""Takes a call, returns its microseconds."""


def measure_all(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Issue 5's comparison 3: microseconds of one layer.

    Shares of the prompt's attention are of kernels that are launched each time, as
    an engine does with a prompt; `us_replayed` is what the GPU alone takes.
    """
    times = {
        launched: _parts(
            functools.partial(microseconds, device=device, launched=launched),
            sizes,
            device,
        )
        for launched in (False, True)
    }
    attention = times[True][ATTENTION]
    return [
        {
            "part": part,
            "us_per_layer": duration,
            "us_replayed": times[False][part],
            "of_attention": duration / attention,
        }
        for part, duration in times[True].items()
    ]


def _parts(timed: Timed, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Microseconds by part."""
    attention = prompt_attention(timed, sizes, device)
    window, every = scoring(timed, sizes, device)
    kept, moved = transition(timed, sizes, device, by_head=False)
    chosen_by_head, moved_by_head = transition(timed, sizes, device, by_head=True)
    return {
        ATTENTION: attention,
        f"scores of the last {sizes.window} queries": window,
        "scores by the gate": gate(timed, sizes, device),
        "selection": kept,
        "selection and copy": moved,
        SCORING_AND_TRANSITION: window + moved,
        "selection, budgets by head": chosen_by_head,
        "selection and copy, budgets by head": moved_by_head,
        "scores of all queries, given their log-sum-exp": every,
    }


def prompt_attention(timed: Timed, sizes: Sizes, device: torch.device) -> float:
    """Microseconds of causal attention over the prompt."""

    def heads(num_heads: int) -> torch.Tensor:
        tokens = random_tokens(sizes.context, num_heads, sizes, device)
        return tokens.transpose(0, 1).contiguous().unsqueeze(0)

    query, key = heads(sizes.num_heads), heads(sizes.num_kv_heads)
    return timed(
        lambda: F.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )
    )


def scoring(timed: Timed, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Microseconds of scoring with the window, and with all queries."""
    num_blocks = sizes.context // sizes.block_size
    pages = random_pages(num_blocks + 1, sizes, device)
    blocks = torch.randperm(num_blocks, device=device) + 1
    query = random_tokens(sizes.context, sizes.num_heads, sizes, device)
    state = {"attention": torch.zeros(sizes.num_kv_heads, sizes.context, device=device)}
    params = params_of(sizes)
    first = sizes.context - sizes.window
    lse = torch.zeros(sizes.num_heads, sizes.context, device=device)
    window = timed(lambda: observe(query[first:], pages, blocks, first, state, params))
    every = timed(lambda: observe(query, pages, blocks, 0, state, params, lse))
    return window, every


def gate(timed: Timed, sizes: Sizes, device: torch.device) -> float:
    """Microseconds of scoring the prompt by a gate."""
    num_blocks, head_size = sizes.context // sizes.block_size, sizes.head_size
    pages = random_pages(num_blocks + 1, sizes, device)
    blocks = torch.randperm(num_blocks, device=device).int() + 1
    weights = torch.randn(
        sizes.num_kv_heads, num_features(head_size, head_size), device=device
    )
    rotation = Rotation(torch.randn(sizes.context, head_size, device=device))
    own = LayerGate(weights, rotation, sizes.num_heads // sizes.num_kv_heads)
    state = {"attention": torch.zeros(sizes.num_kv_heads, sizes.context, device=device)}
    params = dataclasses.replace(params_of(sizes), gate=own)
    layers, first = [ScoredLayer(pages, state, params)], sizes.context - sizes.window
    return timed(lambda: score_by_gate(layers, blocks, first))


def transition(
    timed: Timed, sizes: Sizes, device: torch.device, by_head: bool
) -> tuple[float, float]:
    """Microseconds of selecting, and of selecting and copying."""
    params, config = params_of(sizes), H2OConfig(observation_window=sizes.window)
    dense, resident = sizes.context // sizes.block_size, params.layout.budget_blocks
    num_blocks = dense + resident
    num_layers = sizes.num_kv_heads if by_head else 1
    layers = [random_pages(num_blocks + 1, sizes, device) for _ in range(num_layers)]
    if by_head:
        params = dataclasses.replace(params, placements=uneven_heads(layers, sizes)[0])
    blocks = torch.randperm(num_blocks, device=device) + 1
    state = {"attention": torch.rand(sizes.num_kv_heads, sizes.context, device=device)}
    placement = BY_HEAD if by_head else UNIFORM
    first_query = sizes.context - sizes.window
    (batch,) = batches([ScoredLayer(layers[0], state, params)])
    scores = state["attention"][None]
    arguments = (batch, scores, placement, first_query, config)

    def move() -> None:
        kept = select(*arguments)
        copy_kept(batch, scores, blocks[:dense], blocks[dense:], placement, kept)

    return timed(lambda: select(*arguments)), timed(move)


def uneven_heads(layers: list[Pages], sizes: Sizes) -> list[LayerPlacements]:
    """Every layer of as many as there are heads has one rich head, each another.

    It gets what the others save of half of their budgets, in pages of all layers.
    """
    assert len(layers) == sizes.num_kv_heads
    common, num_heads = sizes.budget // sizes.block_size, sizes.num_kv_heads
    poor = max(common // 2, 2)
    rich = common + (num_heads - 1) * (common - poor)
    blocks = [
        [poor] * i + [rich] + [poor] * (num_heads - 1 - i) for i in range(num_heads)
    ]
    return placements_of(layers, blocks, common, H2OConfig())


def params_of(sizes: Sizes) -> LayerParams:
    """Half of the budget heavy, half recent."""
    layout = SlotLayout(
        sizes.block_size, sizes.budget // 2, sizes.budget // 2, 4, whole_blocks=False
    )
    return LayerParams(layout, sizes.head_size**-0.5, 0.0, Mean())
