"""How tokens are scored: one file for each method, all methods by name."""

from __future__ import annotations

from vllm_h2o.policy.methods.base import (
    Bounds,
    Method,
    Queries,
    State,
    fused_form_of,
    fused_prompt_form_of,
    splits,
    starts_at_zero,
)
from vllm_h2o.policy.methods.cake import Cake
from vllm_h2o.policy.methods.d2o import D2O
from vllm_h2o.policy.methods.mean import Mean
from vllm_h2o.policy.methods.norm import Norm
from vllm_h2o.policy.methods.sum import Sum

__all__ = [
    "D2O", "METHODS", "Bounds", "Cake", "Mean", "Method", "Norm", "Queries", "State",
    "Sum", "fused_form_of", "fused_prompt_form_of", "splits", "starts_at_zero",
    "summaries",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Sum, Mean, Norm, Cake, D2O)
}
"""The methods, by what `--h2o-score` calls them."""


def summaries() -> str:
    """The methods, each with the first line of its description."""
    first_lines = {
        name: (cls.__doc__ or name).splitlines()[0].rstrip(".")
        for name, cls in METHODS.items()
    }
    return "; ".join(f"{name}: {line}" for name, line in first_lines.items())
