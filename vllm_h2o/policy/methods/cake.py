"""CAKE: how much attention a prompt's token gets, and how much that varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_h2o.policy.methods.base import Bounds, Queries, State
from vllm_h2o.policy.methods.sum import Sum
from vllm_h2o.policy.sharing import share_out


@dataclass(frozen=True)
class Cake(Sum):
    """Mean attention plus a multiple of its variance, over the last prompt queries.

        value[t] = mean[t] + gamma * variance[t], average-pooled over neighbours
        P[l, g]  = H[l, g]^(1/t1) * V[l, g]^(1/t2)

    with the mean and the variance over the observed queries and the query heads of a
    KV head together, H the entropy of their attention and V the sum of the variances,
    both over the tokens before the observed queries. Layers share blocks in the
    proportion of P. While it generates, a token is worth the last query's attention.

    Differs from the authors' code: P is of a KV head and not a mean over those of its
    layer, so that tensor-parallel ranks need not talk; nothing is pooled while it
    generates, where neighbours in the cache are strangers in the text; the prompt is
    compressed once, at its end, and not layer by layer while it is read.

    Attributes:
        score_decay: See the base class.
        cake_gamma: Weight of the variance.
        cake_t1: What a wide attention counts in P: the less, the larger.
        cake_t2: What a changing attention counts in P.

    Source: CAKE (Qin et al., arXiv 2503.12491), `antgroup/cakekv`.
    """

    name = "cake"
    fused_form = "sum"
    prompt_fields = ("square", "entropy")
    score_decay: float = 0.0
    cake_gamma: float = 200.0
    cake_t1: float = 1.0
    cake_t2: float = 1.0

    def observe_prompt(self, state: State, probs: torch.Tensor) -> None:
        """See the base class; plain sums, so that chunks do not matter."""
        state["score"].add_(probs.sum(dim=(-3, -2)))
        state["square"].add_(probs.square().sum(dim=(-3, -2)))
        state["entropy"].sub_(torch.special.xlogy(probs, probs).sum(dim=(-3, -2)))

    def variance(self, state: State, queries: Queries) -> torch.Tensor:
        """`[..., n]` of a token's attention, over queries and query heads."""
        count = queries.count() * queries.group
        spread = state["square"] - state["score"].square() / count
        return spread / (count - 1).clamp(min=1)

    def prompt_value(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        mean = state["score"] / (queries.count() * queries.group)
        return mean + self.cake_gamma * self.variance(state, queries)

    def pool(self, value: torch.Tensor, width: int) -> torch.Tensor:
        """See the base class: the mean, with zeros beyond both ends."""
        return F.avg_pool1d(value.unsqueeze(1), width, 1, width // 2).squeeze(1)

    def split(
        self, states: Sequence[State], queries: Queries, bounds: Bounds
    ) -> list[list[int]]:
        """See the base class."""
        by_layer = [self.preference(state, queries).tolist() for state in states]
        shares = [
            share_out(by_head, bounds.total, bounds.fewest, bounds.most)
            for by_head in zip(*by_layer, strict=True)
        ]
        return [list(layer) for layer in zip(*shares, strict=True)]

    def preference(self, state: State, queries: Queries) -> torch.Tensor:
        """`[num_kv_heads]` P of a layer."""
        entropy = state["entropy"][:, : queries.first].sum(dim=1)
        variance = self.variance(state, queries)[:, : queries.first].sum(dim=1)
        return entropy ** (1 / self.cake_t1) * variance ** (1 / self.cake_t2)
