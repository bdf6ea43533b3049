"""The mean of the attention that a token has got."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.policy.methods.base import Queries, State
from vllm_h2o.policy.methods.sum import Sum


@dataclass(frozen=True)
class Mean(Sum):
    """Attention received, over the queries that could see the token.

    Takes away the head start of old tokens, which more queries have looked at.
    """

    name = "mean"
    fused_form = "mean"

    def recounted(self, state: State, was: torch.Tensor, now: torch.Tensor) -> State:
        """See the base class: the mean remains."""
        return state | {"attention": state["attention"] * (now / was)}

    def score(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        return state["attention"] / queries.count()
