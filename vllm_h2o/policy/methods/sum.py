"""The sum of the attention that a token has got."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.policy.methods.base import Method, Queries, State


@dataclass(frozen=True)
class Sum(Method):
    """Attention received, all queries together.

        attention[t] = attention[t] * decay^m
                       + sum_{i<m} decay^(m-1-i) sum_{h in g} A[h,i,t]

    Attributes:
        score_decay: What old attention is multiplied by per new query; 1 accumulates,
            at 0 only the newest query counts.

    Source: H2O (arXiv 2306.14048), the query heads of a KV head summed.
    """

    name = "sum"
    fused_form = "sum"
    score_decay: float = 1.0

    def observe(self, state: State, probs: torch.Tensor) -> None:
        """See the base class."""
        received = probs.sum(dim=-3)
        if self.score_decay != 1.0:
            num_queries = received.shape[-2]
            ages = torch.arange(num_queries - 1, -1, -1, device=probs.device)
            # Filled on the device: a copy of a value to it would wait for it.
            decay = torch.full((), self.score_decay, device=probs.device)
            received = received * torch.pow(decay, ages)[:, None]
            state["attention"].mul_(self.score_decay**num_queries)
        state["attention"].add_(received.sum(dim=-2))

    def score(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        return state["attention"]
