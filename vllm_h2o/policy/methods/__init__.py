"""How tokens are scored: one file for each method, all methods by name."""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points

from vllm_h2o.policy.methods.base import (
    Bounds,
    Method,
    Queries,
    State,
    fused_form_of,
    fused_prompt_form_of,
    has_prompt_rules,
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
    "Sum", "add_from_packages", "fused_form_of", "fused_prompt_form_of", "splits",
    "has_prompt_rules", "starts_at_zero", "summaries",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Sum, Mean, Norm, Cake, D2O)
}
"""The methods, by what `--h2o-score` calls them."""
ENTRY_POINTS = "vllm_h2o.methods"
"""The group of entry points by which other packages bring methods."""


def add_from_packages() -> None:
    """Add the methods of installed packages; idempotent.

    An entry point is `name = "module:Class"`, with the name of the method. One that can
    not be used is left out with a warning: nobody may have asked for its method.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            METHODS.setdefault(point.name, _method_of(point))
        except Exception as error:
            warnings.warn(
                f"vllm-h2o does without the method {point.name!r} of the entry point "
                f"{point.value!r} ({ENTRY_POINTS}): {type(error).__name__}: {error}",
                stacklevel=2,
            )


def _method_of(point: EntryPoint) -> type[Method]:
    cls = point.load()
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"{cls!r} is no subclass of {Method.__module__}.Method")
    if getattr(cls, "name", None) != point.name:
        raise ValueError(f"its name is {getattr(cls, 'name', None)!r}")
    if METHODS.get(point.name, cls) is not cls:
        raise ValueError("there is another method of that name")
    return cls


def summaries() -> str:
    """The methods, each with the first line of its description."""
    first_lines = {
        name: (cls.__doc__ or name).splitlines()[0].rstrip(".")
        for name, cls in METHODS.items()
    }
    return "; ".join(f"{name}: {line}" for name, line in first_lines.items())


add_from_packages()
