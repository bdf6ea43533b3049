"""What a token is worth: one file for each method, all methods by name."""

from __future__ import annotations

from vllm_h2o.policy.methods.base import Method, Queries, State, fused_form_of
from vllm_h2o.policy.methods.mean import Mean
from vllm_h2o.policy.methods.sum import Sum

__all__ = ["METHODS", "Mean", "Method", "Queries", "State", "Sum", "fused_form_of"]

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Sum, Mean)}
"""By what `--h2o-score` calls them."""
