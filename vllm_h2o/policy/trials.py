"""Which way loses least: by a gate or by attention, with equal heads or by a profile.

Each is tried on texts that nothing was learned from (`vllm_h2o.calibration.trying`):

    lost[way, text, B]  =  sum over layers and KV heads g of e[g, rule, B_g]
    regret[way, B]      =  max over texts of lost[way, text, B] / min over ways

with the errors e of `vllm_h2o.calibration.sensitivity`, and the budgets B_g that a
profile of the other texts gives the heads, or B alike. Errors are squares of changes:
those of heads that change apart add up, and so does the divergence of the answers,
which is quadratic in small changes. Of their roots, whose sum is a bound, equal heads
have hardly more than a profile where the divergence is twice as large, or eight times
(docs/benchmarks/log/quality.md). A start takes the way with the least regret
at the share of the context that its budget is: what is best on most texts and does harm
on one is not used (Savage, The Theory of Statistical Decision, 1951).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vllm_h2o.policy.options import ATTENTION, GATE

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
"""Budgets that are tried, as shares of the context."""
RULES = ATTENTION, GATE


class Way(NamedTuple):
    """What prompts and budgets go by.

    Attributes:
        rule: One of `RULES`.
        by_head: Whether heads have budgets by a profile.
    """

    rule: str
    by_head: bool

    @property
    def name(self) -> str:
        """For people and files."""
        heads = "heads by profile" if self.by_head else "equal heads"
        return f"{self.rule} and {heads}"


WAYS = tuple(Way(rule, by_head) for rule in RULES for by_head in (True, False))


@dataclass(frozen=True)
class Trials:
    """What the ways lost on texts that nothing was learned from.

    Attributes:
        errors: By the name of a way, `[len(SHARES)][texts]`.
    """

    errors: Mapping[str, Sequence[Sequence[float]]]

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Of what `as_json` has made.

        Raises:
            ValueError: It is damaged, or of a version that added up other numbers.
        """
        if set(fields) != {"errors"}:
            raise ValueError(f"trials have {sorted(fields)}: measure it again")
        return cls(**fields)

    def __post_init__(self) -> None:
        if not self.errors or not {*self.errors} <= {way.name for way in WAYS}:
            raise ValueError(f"trials are of {sorted(self.errors)}: measure it again")
        tables = [*self.errors.values()]
        shapes = {(len(table), *map(len, table)) for table in tables}
        rows = [row for table in tables for row in table]
        if len(shapes) != 1 or len(tables[0]) != len(SHARES) or not all(rows):
            raise ValueError(f"trials must be of {len(SHARES)} budgets and some texts")
        if not all(isinstance(x, float) and 0 <= x < math.inf for y in rows for x in y):
            raise ValueError("what trials lost must be finite numbers, not negative")

    def regrets(self, ways: Sequence[Way], share: float) -> dict[Way, float]:
        """Of those of these ways that were tried, the least first.

        Args:
            ways: Which are compared.
            share: Of the context, that a budget is; the nearest of `SHARES` counts.
        """
        apart = [abs(math.log(each / share)) for each in SHARES]
        nearest = apart.index(min(apart))
        lost = {w: self.errors[w.name][nearest] for w in ways if w.name in self.errors}
        least = [max(min(text), 1e-30) for text in zip(*lost.values(), strict=True)]
        regrets = {
            way: max(x / y for x, y in zip(mine, least, strict=True))
            for way, mine in lost.items()
        }
        return dict(sorted(regrets.items(), key=lambda item: item[1]))

    def as_json(self) -> dict[str, Any]:
        """What `HeadProfile.trials` keeps: this class's fields."""
        return {"errors": self.errors}
