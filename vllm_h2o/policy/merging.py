"""What becomes of a token that is dropped: its value goes into a similar one's.

After D2O (arXiv 2406.13035): a lost token's value is averaged into the value of the
kept token with the most similar key, if they are similar enough. Keys stay as they are:
they are held after RoPE, and an average of keys rotated by different angles is the key
of no position. So does the attention that a token received.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import normalize

NO_THRESHOLD = -math.inf
"""The threshold of a head that has lost nothing yet."""

_NEWEST_SHARE = 0.7
"""Weight of the newest loss in the running threshold (the authors' beta)."""
_TILE = 1024
"""Lost tokens that are compared at a time."""


def merged(
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    lost_keys: torch.Tensor,
    lost_values: torch.Tensor,
    threshold: float | None,
) -> tuple[torch.Tensor, float]:
    """Average lost values into kept ones, in one KV head.

    With the cosine u of a lost key and the nearest kept key, lost tokens with
    u >= threshold count:

        v = (e v + sum_lost exp(u) v_lost) / (e + sum_lost exp(u))

    Args:
        kept_keys: `[m, head_size]` float32, after RoPE; m >= 1.
        kept_values: `[m, head_size]` float32.
        lost_keys: `[n, head_size]` float32, after RoPE.
        lost_values: `[n, head_size]` float32.
        threshold: The running one, for one token that generation lost
            (`NO_THRESHOLD`: it is the first); None: what a prompt loses at once, whose
            mean cosine then is the threshold.

    Returns:
        The kept tokens' new values and the new threshold.
    """
    if not len(lost_keys):
        return kept_values, NO_THRESHOLD if threshold is None else threshold
    directions = normalize(kept_keys, dim=-1).T
    parts = [
        (normalize(part, dim=-1) @ directions).max(dim=-1)
        for part in lost_keys.split(_TILE)
    ]
    cosine = torch.cat([part.values for part in parts])
    nearest = torch.cat([part.indices for part in parts])
    if threshold is None:
        threshold = new_threshold = float(cosine.mean())
    elif threshold == NO_THRESHOLD:
        new_threshold = float(cosine)
    else:
        new_threshold = threshold + _NEWEST_SHARE * (float(cosine) - threshold)
    weight = torch.where(cosine >= threshold, cosine.exp(), 0.0)
    total = torch.full((len(kept_keys),), math.e).index_add(0, nearest, weight)
    gained = torch.zeros_like(kept_values).index_add(
        0, nearest, weight[:, None] * lost_values
    )
    return (math.e * kept_values + gained) / total[:, None], new_threshold
