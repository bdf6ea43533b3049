"""Which of the held pages a query reads, by a bound on what their keys can give it.

The dynamic half of MPCache (arXiv 2501.06807), in the linear form of its authors' code;
the secure computation that the paper is about is not ours.
"""

from __future__ import annotations

import math

import torch

HIGHEST_SHARE = 0.6
"""The authors' weight of a page's highest keys, beside its lowest (their alpha)."""


def pages_read(
    query: torch.Tensor,
    keys: torch.Tensor,
    page: torch.Tensor,
    always: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """Choose the pages that a query reads, for the query heads of a KV head together.

        bound[p] = sum_h q_h . (alpha max_{t in p} k_t + (1 - alpha) min_{t in p} k_t)

    with the maximum and the minimum by element. Of the pages that are not read in any
    case those of highest bound are, of equal ones the lower.

    Args:
        query: `[group, head_size]`, after RoPE.
        keys: `[n, head_size]` of the held tokens, after RoPE.
        page: `[n]` int64 page of each token, from 0 on; none is empty.
        always: `[n]` bool, tokens whose pages are read in any case.
        share: Of the other pages, how many are read, rounded up.

    Returns:
        `[n]` bool: the tokens that are read.
    """
    num_pages = int(page.max()) + 1
    at = page[:, None].expand_as(keys)
    shape = (num_pages, keys.shape[1])
    highest = keys.new_full(shape, -math.inf).scatter_reduce(0, at, keys, "amax")
    lowest = keys.new_full(shape, math.inf).scatter_reduce(0, at, keys, "amin")
    bound = (HIGHEST_SHARE * highest + (1 - HIGHEST_SHARE) * lowest) @ query.sum(0)
    read = torch.zeros(num_pages, dtype=torch.bool)
    read[page[always]] = True
    others = (~read).nonzero().flatten()
    count = math.ceil(round(share * len(others), 9))
    best = bound[others].sort(descending=True, stable=True).indices[:count]
    read[others[best]] = True
    return read[page]
