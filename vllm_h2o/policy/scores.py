"""Prompt scores: the attention that the observation queries put on each token."""

from __future__ import annotations

import torch

_QUERY_TILE = 128
"""Queries per tile: bounds the probability matrix to a few MB per layer."""


def observe(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    *,
    scale: float,
    score_decay: float,
    softcap: float = 0.0,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the attention of consecutive queries to the scores of the prompt.

        A[h,q,t] = softmax over t <= q of scale * query[q,h] . keys[h's KV head,t]
        scores[g,t] = scores[g,t] * decay^m + sum_{i<m} decay^(m-1-i) sum_{h in g} A

    Args:
        query: `[m, num_heads, head_size]`, queries at positions
            `first_position ..+ m`, after RoPE.
        keys: `[num_kv_heads, head_size, n]`, keys of positions `0 .. n-1`
            (transposed as the CPU cache stores them), `n >= first_position + m`.
        first_position: Position of `query[0]`.
        scale: Softmax scale.
        score_decay: Factor per newer query, 1.0 accumulates.
        softcap: Logit soft cap, 0 for none.
        scores: `[num_kv_heads, >= n]` float32 partial sums of earlier queries,
            updated in place; None starts from zero.

    Returns:
        `scores`, or a new `[num_kv_heads, n]` float32 tensor.

    Source: H2O (arXiv 2306.14048), query heads of a KV head summed.
    """
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, _, num_keys = keys.shape
    if scores is None:
        scores = torch.zeros(num_kv_heads, num_keys, device=query.device)
    elif score_decay != 1.0:
        scores.mul_(score_decay**num_queries)
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_size) * scale
    keys = keys.float()
    for start in range(0, num_queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, num_queries)
        visible = first_position + stop
        # [num_kv_heads, tile * group, head_size] @ [num_kv_heads, head_size, n]
        tile = grouped[start:stop].permute(1, 0, 2, 3).flatten(1, 2)
        logits = (tile @ keys[:, :, :visible]).unflatten(1, (stop - start, -1))
        if softcap > 0.0:
            logits = softcap * torch.tanh(logits / softcap)
        positions = torch.arange(visible, device=query.device)
        query_positions = torch.arange(
            first_position + start, visible, device=query.device
        )
        hidden = positions[None, :] > query_positions[:, None]
        logits.masked_fill_(hidden[None, :, None, :], float("-inf"))
        probs = logits.softmax(dim=-1)
        if score_decay != 1.0:
            age = torch.arange(
                num_queries - 1 - start, num_queries - 1 - stop, -1, device=query.device
            )
            weight = torch.pow(torch.tensor(score_decay, device=query.device), age)
            probs = probs * weight[None, :, None, None]
        scores[:, :visible] += probs.sum(dim=(1, 2))
    return scores


def comparable(
    scores: torch.Tensor, positions: torch.Tensor, first_query: int, seen: int
) -> torch.Tensor:
    """Divide summed scores by the number of queries that could see each token.

    Args:
        scores: `[..., n]` float32 sums.
        positions: `[..., n]` positions of the tokens, broadcastable.
        first_query: Position of the first query that scored.
        seen: Number of tokens so far: queries `first_query .. seen-1` scored.

    Returns:
        `[..., n]` float32, higher = keep.
    """
    queries = seen - positions.clamp(min=first_query)
    return scores / queries.clamp(min=1)
