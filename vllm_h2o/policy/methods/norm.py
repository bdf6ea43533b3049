"""The mean of the attention that a token has got, times the length of its value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.policy.methods.base import Queries, State
from vllm_h2o.policy.methods.mean import Mean


@dataclass(frozen=True)
class Norm(Mean):
    """Mean attention times the L1 norm of the value: what a token adds to the output.

    Source: VATP (Guo et al., arXiv 2406.12335), there with summed attention.
    """

    name = "norm"
    fields = ("attention", "norm")

    def start(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> State:
        """See the base class."""
        norm = values.float().abs().sum(dim=-1)
        return {"attention": torch.zeros_like(norm), "norm": norm}

    def score(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        return super().score(state, queries) * state["norm"]
