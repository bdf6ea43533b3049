"""The attention of consecutive prompt queries, in tiles of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_h2o.policy.softmax import attention_of

_QUERY_TILE = 128
"""Queries per tile: bounds the probability matrix to a few MB per layer."""


def tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    *,
    scale: float,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """The attention that queries put on the tokens up to their own.

        A[h,q,t] = softmax over t <= q of scale * query[q,h] . keys[h's KV head,t],
                   beside the sink of h

    Args:
        query: `[m, num_heads, head_size]`, queries at positions
            `first_position ..+ m`, after RoPE.
        keys: `[num_kv_heads, head_size, n]`, keys of positions `0 .. n-1`
            (transposed as the CPU cache stores them), `n >= first_position + m`.
        first_position: Position of `query[0]`.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        sink_logits: `[num_heads]` float32; None: there are no sinks.

    Yields:
        `[num_kv_heads, group, queries, visible]` float32, of the next queries; what
        lies past `visible` none of them sees.
    """
    num_queries, _, head_size = query.shape
    grouped = query.float().view(num_queries, len(keys), -1, head_size) * scale
    keys = keys.float()
    sink = None if sink_logits is None else sink_logits.view(len(keys), -1, 1)
    for start in range(0, num_queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, num_queries)
        visible = first_position + stop
        # [num_kv_heads, group * tile, head_size] @ [num_kv_heads, head_size, visible]
        tile = grouped[start:stop].permute(1, 2, 0, 3).flatten(1, 2)
        logits = (tile @ keys[:, :, :visible]).unflatten(1, (-1, stop - start))
        positions = torch.arange(visible, device=query.device)
        hidden = positions > positions[first_position + start :, None]
        yield attention_of(logits, hidden, softcap=softcap, sink=sink)
