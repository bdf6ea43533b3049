"""A method that draws: what any score has to be better than."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.policy.methods import METHODS
from vllm_h2o.policy.methods.base import Method, Queries, State

OPTIONS = {
    "kv_policy": "h2o",
    "h2o_score": "random",
    "h2o_prompt_score": "attention",
    "h2o_pooling": 1,
    "h2o_head_budgets": "uniform",
}
"""Engine arguments of random eviction; sinks and recent tokens are those of `h2o`."""


@dataclass(frozen=True)
class Random(Method):
    """Each token's score is drawn once, whoever looks at it.

    Of its key, so that it is the same however a prompt is cut into steps.
    """

    name = "random"

    def start(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> State:
        """See the base class."""
        drawn = (keys.double().sum(dim=-1) * 1e3).sin() * 1e4
        return {"attention": drawn.frac().abs().float()}

    def observe(self, state: State, probs: torch.Tensor) -> None:
        """See the base class."""

    def score(self, state: State, queries: Queries) -> torch.Tensor:
        """See the base class."""
        return state["attention"]


def register() -> None:
    """Let engines of this process have it."""
    METHODS[Random.name] = Random
