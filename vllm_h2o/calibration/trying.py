"""What the ways to choose lose on texts that nothing was learned from.

`vllm_h2o.policy.trials` has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_h2o.policy.profile import HeadProfile, allocate
from vllm_h2o.policy.trials import SHARES, Trials, Way

_BLOCK = 32
"""Tokens in which heads get their budgets here."""


def trials_of(
    grid: Sequence[int],
    length: int,
    past: npt.NDArray[np.float64],
    by_rule: Mapping[str, npt.NDArray[np.float64]],
) -> Trials:
    """Try the ways, with the budgets of each text by a profile of the others.

    Args:
        grid: Budgets in tokens.
        length: Of the texts, in tokens.
        past: `[texts, layers, KV heads, grid]` errors that profiles are made of.
        by_rule: Likewise what is lost by `policy.trials.RULES`, or by one of them.
    """
    lost: dict[str, list[list[float]]] = {}
    for share in SHARES:
        budget = max(1, round(share * length / _BLOCK))
        found: dict[str, list[float]] = {}
        for text in range(len(past)):
            others = np.delete(past, text, axis=0).mean(axis=0)
            profile = HeadProfile([*grid], others.tolist(), "", length)
            profile = profile.stretched(length, budget * _BLOCK)
            own = np.array(allocate(profile, _BLOCK, budget, -(-length // _BLOCK), 1))
            alike = np.full_like(own, budget)
            for rule, curves in by_rule.items():
                for by_head, blocks in ((True, own), (False, alike)):
                    tokens = blocks * _BLOCK
                    errors = _errors_at(curves[text], grid, tokens) * (tokens < length)
                    total = float(f"{errors.sum():.4g}")
                    found.setdefault(Way(rule, by_head).name, []).append(total)
        for name, by_text in found.items():
            lost.setdefault(name, []).append(by_text)
    return Trials(lost)


def _errors_at(
    curves: npt.NDArray[np.float64], grid: Sequence[int], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """`[layers, KV heads]` errors of budgets, between two of the grid by logarithms."""
    at, logs = np.log(tokens), np.log(np.maximum(curves, 1e-30))
    known = np.log(np.asarray(grid, float))
    found = [
        np.interp(x, known, curve)
        for x, curve in zip(at.ravel(), logs.reshape(-1, len(grid)), strict=True)
    ]
    return np.exp(found).reshape(tokens.shape)
