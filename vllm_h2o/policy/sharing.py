"""Whole blocks in proportion to what is preferred."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def share_out(
    preferences: Sequence[float], total: int, fewest: Sequence[int], most: int
) -> list[int]:
    """Split blocks in proportion to preferences, within bounds.

    Shares past a bound are cut to it, and what that gives or takes is shared by the
    others in their proportion; fractions of blocks go to the largest remainders, of
    equal ones to the first.

    Args:
        preferences: `[n]`, none negative, with a finite sum; what is not finite counts
            as 0.
        total: Blocks to split, `sum(fewest) <= total <= n * most`.
        fewest: `[n]` blocks that each gets at least.
        most: Blocks that each gets at most.

    Returns:
        `[n]` blocks, `total` in all.
    """
    assert sum(fewest) <= total <= len(preferences) * most
    finite = (x if math.isfinite(x) else 0.0 for x in preferences)
    wished = dict(enumerate(finite))
    shares, at_a_bound = _in_proportion(wished, total), dict[int, int]()
    while True:
        low = [i for i, share in shares.items() if share < fewest[i]]
        high = [i for i, share in shares.items() if share > most]
        if not low and not high:
            break
        lack = sum(fewest[i] - shares[i] for i in low)
        excess = sum(shares[i] - most for i in high)
        # The greater first: what the others then have to share they can hold.
        if lack >= excess:
            at_a_bound |= {i: fewest[i] for i in low}
        else:
            at_a_bound |= dict.fromkeys(high, most)
        free = {i: wish for i, wish in wished.items() if i not in at_a_bound}
        shares = _in_proportion(free, total - sum(at_a_bound.values()))
    blocks = at_a_bound | {i: math.floor(share) for i, share in shares.items()}
    by_remainder = sorted(shares, key=lambda i: blocks[i] - shares[i])
    for i in by_remainder[: total - sum(blocks.values())]:
        blocks[i] += 1
    return [blocks[i] for i in range(len(wished))]


def _in_proportion(wished: Mapping[int, float], total: float) -> dict[int, float]:
    """Equal shares where nobody wishes anything."""
    weight = sum(wished.values())
    if not weight:
        return dict.fromkeys(wished, total / max(len(wished), 1))
    return {i: total * wish / weight for i, wish in wished.items()}
