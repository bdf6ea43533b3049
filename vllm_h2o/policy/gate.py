"""The gate: how much attention a token will get, read off its key and value.

    x        = [sqrt(d) k/|k|, sqrt(d) v/|v|, log|k|, log|v|, log(n - t), 1]
    expected = max(w . x, 0)^4

for the token at position t of a prompt of n, with k its key before RoPE and w the
weights of its KV head: a ridge regression to the fourth root of the attention that it
gets, on average, of each query head and each of the queries after the prompt. They are
fitted while texts are read to measure the heads; nothing but forward passes is needed.

Source: the idea of Attention-Gate (arXiv 2410.12876); attention that is paid later as
the target is KVzip's (arXiv 2505.23416). Theirs are trained end to end and flag tokens;
this one expects an amount, and the budget says how many tokens that keeps.
"""

from __future__ import annotations

import math

import torch

NUM_QUERIES = 64
"""An expected score counts as much as the attention of this many queries."""
POWER = 4
"""The target is this root of the attention: what is rare and large is not all."""
LEAST_NORM = 1e-6
"""A key or value is divided by its norm, or by this where that is smaller."""


def num_features(head_size: int, head_size_v: int) -> int:
    """How many numbers the expectation is linear in, of a token and KV head."""
    return head_size + head_size_v + 4


def features(
    key: torch.Tensor, value: torch.Tensor, ages: torch.Tensor
) -> torch.Tensor:
    """What the expectation is linear in.

    Args:
        key: `[n, num_kv_heads, head_size]` float32 before RoPE.
        value: `[n, num_kv_heads, head_size_v]` float32.
        ages: `[n]` int64 tokens from each one to the end of the prompt, at least 1.

    Returns:
        `[num_kv_heads, n, num_features(head_size, head_size_v)]`.
    """
    norms = [x.norm(dim=-1, keepdim=True).clamp(min=LEAST_NORM) for x in (key, value)]
    units = [
        x / y * math.sqrt(x.shape[-1]) for x, y in zip((key, value), norms, strict=True)
    ]
    age = ages.float().log()[:, None, None].expand_as(norms[0])
    parts = [*units, *(norm.log() for norm in norms), age, torch.ones_like(age)]
    return torch.cat(parts, dim=-1).transpose(0, 1)


def expected(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Attention that tokens are expected to get of a query head and a query.

    Args:
        x: `[num_kv_heads, n, F]` float32 features of the tokens.
        weights: `[num_kv_heads, F]` float32.

    Returns:
        `[num_kv_heads, n]`.
    """
    return (x @ weights[..., None])[..., 0].clamp(min=0.0) ** POWER
