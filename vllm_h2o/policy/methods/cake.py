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

        score[t] = mean[t] + gamma * variance[t], average-pooled over neighbours
        P[l, g]  = H[l, g]^(1/t1) * V[l, g]^(1/t2)

    with the mean and the variance over the observed queries and the query heads of a
    KV head together, H the entropy of their attention and V the sum of the variances,
    both over the tokens before the observed queries, or over all if all queries are
    observed. Layers share blocks in the proportion of P, and none gets more than a
    prompt beyond the budget has. While it generates, a token's score is the last
    query's attention, as it is for a prompt within the budget.

    Differs from the authors' code: the variance is over the query heads of a KV head
    too, where they take the mean of each query head's; P is of a KV head and not of its
    layer, so that tensor-parallel ranks need not talk; half of a head's slots are
    recent, where they keep the observed queries' 32; nothing is pooled while it
    generates, where neighbours in the cache are strangers in the text; the prompt is
    compressed once, at its end, and not layer by layer while it is read. They tune t1
    and t2 for each model and budget, where these are 1.

    Attributes:
        score_decay: See the base class.
        gamma: Weight of the variance.
        t1: 1 over the power of the entropy in P.
        t2: 1 over the power of the variance in P.

    Source: CAKE (Qin et al., arXiv 2503.12491), `antgroup/cakekv`.
    """

    name = "cake"
    fused_form = "sum"
    prompt_fields = ("square", "entropy")
    score_decay: float = 0.0
    gamma: float = 200.0
    t1: float = 1.0
    t2: float = 1.0

    def observe_prompt(self, state: State, probs: torch.Tensor) -> None:
        """See the base class; plain sums, so that chunks do not matter."""
        state["attention"].add_(probs.sum(dim=(-3, -2)))
        state["square"].add_(probs.square().sum(dim=(-3, -2)))
        state["entropy"].sub_(torch.special.xlogy(probs, probs).sum(dim=(-3, -2)))

    def variance(self, state: State, queries: Queries) -> torch.Tensor:
        """`[..., n]` of a token's attention, over queries and query heads."""
        count = queries.count() * queries.group
        spread = state["square"] - state["attention"].square() / count
        return spread / (count - 1).clamp(min=1)

    def score_prompt(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        mean = state["attention"] / (queries.count() * queries.group)
        return mean + self.gamma * self.variance(state, queries)

    def pool(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """See the base class: the mean, with zeros beyond both ends."""
        return F.avg_pool1d(scores.unsqueeze(1), width, 1, width // 2).squeeze(1)

    def split(
        self, states: Sequence[State], queries: Queries, bounds: Bounds
    ) -> list[list[int]]:
        """See the base class."""
        logs = torch.stack([self.log_preference(state, queries) for state in states])
        # Small t1 and t2 make powers that float32 has not: the highest is 1.
        preferences = (logs - logs.amax(dim=0)).exp()
        fewest = [bounds.fewest] * len(states)
        by_head = [
            share_out(mine, bounds.total, fewest, bounds.most)
            for mine in preferences.T.tolist()
        ]
        return [list(layer) for layer in zip(*by_head, strict=True)]

    def log_preference(self, state: State, queries: Queries) -> torch.Tensor:
        """`[num_kv_heads]` log P of a layer."""
        old = slice(queries.first or queries.seen)
        entropy = state["entropy"][:, old].sum(dim=1).clamp(min=0)
        variance = self.variance(state, queries)[:, old].sum(dim=1).clamp(min=0)
        return entropy.log() / self.t1 + variance.log() / self.t2
