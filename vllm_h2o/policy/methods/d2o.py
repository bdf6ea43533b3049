"""D2O: more of the budget for layers whose attention is spread evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.policy.methods.base import Bounds, Queries, State
from vllm_h2o.policy.methods.sum import Sum
from vllm_h2o.policy.sharing import share_out


@dataclass(frozen=True)
class D2O(Sum):
    """Attention received, and layers share the budget by how evenly it is spread.

        F[l, g]     = variance over the prompt's tokens of their sums, scaled over the
                      layers to 0 .. 1
        share[l, g] = softmax over the layers of -F[l, g]

    The first two layers that evict and the last never get less than the average: of
    three all get the same. The other half of D2O, what becomes of the values that are
    dropped, is `vllm_h2o.policy.merging`.

    Differs from the authors' code: F is scaled over layers and not over the heads of a
    layer, whose mean they take, so that tensor-parallel ranks need not talk; they keep
    the first two layers and the last whole.

    Attributes:
        score_decay: See the base class.

    Source: D2O (Wan et al., arXiv 2406.13035), `AIoT-MLSys-Lab/D2O`.
    """

    name = "d2o"
    fused_form = "sum"

    def split(
        self, states: Sequence[State], queries: Queries, bounds: Bounds
    ) -> list[list[int]]:
        """See the base class."""
        count = len(states)
        spread = torch.stack(
            [state["attention"].var(-1, correction=0) for state in states]
        )
        low, high = spread.amin(dim=0), spread.amax(dim=0)
        shares = torch.softmax(-(spread - low) / (high - low + 1e-6), dim=0)
        fewest = [bounds.fewest] * count
        for layer in (0, 1, -1):
            fewest[layer % count] = bounds.total // count
        by_head = [
            share_out(mine, bounds.total, fewest, bounds.most)
            for mine in shares.T.tolist()
        ]
        return [list(layer) for layer in zip(*by_head, strict=True)]
