"""The transition: which prompt tokens each KV head keeps, and in which slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods.base import max_pool


def select_residents(
    scores: torch.Tensor,
    pooling: int,
    layout: SlotLayout,
    pool: Callable[[torch.Tensor, int], torch.Tensor] = max_pool,
    gone: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the resident tokens of a prompt, per KV head.

    The recent window and the sinks stay; the other heavy slots go to the
    highest scores among what is older, ties to the lower position.

    Args:
        scores: `[num_kv_heads, n]` float32 of the tokens, in the order of their
            positions: a prompt's, or those that are held and a chunk's.
        pooling: Width (odd) of the pool over neighbouring positions; 1: none.
        layout: The slots.
        pool: How neighbours share their scores.
        gone: Tokens of the sequence that are not among these, none of them recent.

    Returns:
        `(positions, slots)`: `[num_kv_heads, m]` int64 indices of tokens, their
        positions if none is gone, and `[m]` int64 slots, the same for every head, `m`
        the resident tokens.
    """
    num_kv_heads, num_tokens = scores.shape
    everything = torch.arange(num_tokens, device=scores.device)
    if num_tokens <= layout.budget:
        return everything.expand(num_kv_heads, -1), everything
    ring_start = _ring_start(layout, num_tokens)
    recent = everything[ring_start:]
    recent_slots = (
        layout.heavy_slots + (recent + gone - layout.heavy_slots) % layout.recent_slots
    )
    if pooling > 1:
        scores = pool(scores, pooling)
    scores = scores[:, :ring_start]
    if layout.whole_blocks:
        heavy = _heaviest_blocks(scores, layout)
    else:
        heavy = _heaviest(scores, layout.heavy_slots, layout.sinks)
    positions = torch.cat([heavy, recent.expand(num_kv_heads, -1)], dim=1)
    slots = torch.cat([everything[: layout.heavy_slots], recent_slots])
    return positions, slots


def _ring_start(layout: SlotLayout, num_tokens: int) -> int:
    """First position that the ring holds after `num_tokens > budget` tokens."""
    end = num_tokens
    if layout.whole_blocks:
        end += -num_tokens % layout.block_size
    return end - layout.recent_slots


def _heaviest(scores: torch.Tensor, count: int, pinned: int) -> torch.Tensor:
    """Indices `[num_kv_heads, count]` of the highest scores, ascending.

    The first `pinned` are in whatever their score is. NaN counts as infinite.
    """
    if count == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    scores = scores.nan_to_num(math.inf, math.inf, -math.inf)
    scores[:, :pinned] = math.inf
    # A whole stable sort would do too, at several times the cost.
    lowest = scores.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen, ties = scores > lowest, scores == lowest
    room = count - chosen.sum(dim=1, keepdim=True)
    chosen |= ties & (ties.cumsum(dim=1) <= room)
    # By scatter instead of nonzero, which on a GPU would wait for the result.
    place = torch.where(chosen, chosen.cumsum(dim=1) - 1, count)
    indices = place.new_empty(len(scores), count + 1)
    everything = torch.arange(scores.shape[1], device=scores.device)
    return indices.scatter_(1, place, everything.expand_as(place))[:, :count]


def _heaviest_blocks(scores: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    """Positions `[num_kv_heads, heavy_slots]` of the heaviest whole blocks."""
    size = layout.block_size
    block_scores = scores.unflatten(1, (-1, size)).sum(dim=2)
    blocks = _heaviest(
        block_scores, layout.heavy_slots // size, layout.pinned_slots // size
    )
    within = torch.arange(size, device=scores.device)
    return (blocks[:, :, None] * size + within).flatten(1)
