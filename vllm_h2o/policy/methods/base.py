"""What all methods have: how attention adds up, and what a token is worth by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

State = dict[str, torch.Tensor]
"""What is kept of tokens or slots, by field: `[..., n]` float32. Leading dimensions are
a layer's KV heads, or none."""


@dataclass(frozen=True)
class Queries:
    """Who has looked at some tokens.

    Attributes:
        positions: `[..., n]` integer positions of the tokens.
        first: Position of the first query that scored.
        seen: Queries `first .. seen - 1` have scored: the position of the token to be
            decoded, or the number of tokens of a prompt that has been read.
    """

    positions: torch.Tensor
    first: int
    seen: int

    def count(self) -> torch.Tensor:
        """`[..., n]` how many could see each token, at least 1."""
        return (self.seen - self.positions.clamp(min=self.first)).clamp(min=1)


@dataclass(frozen=True)
class Method:
    """What a token in a slot is worth. Those with a name are in `METHODS`.

    A subclass needs a `name`, `observe` and `value`. Dataclass fields of its own are
    options: those that `H2OConfig` has too are what a user sets.

    """

    name: ClassVar[str]
    """What `--h2o-score` calls it."""
    fused_form: ClassVar[str | None] = None
    """Which of the kernels' own forms computes it, `sum` or `mean`; None: only the
    torch reference does. Of a class itself, never of its base: what a subclass changes
    no kernel knows."""
    fields: ClassVar[tuple[str, ...]] = ("score",)
    """What a slot keeps beside K and V in each KV head, a float32 each: a page grows by
    them. The first is `score`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.fields[:1] != ("score",):
            raise TypeError(f"{cls.__name__}.fields must begin with 'score'")
        if taken := {"keys", "values", "births"} & {*cls.fields}:
            raise TypeError(f"{cls.__name__}.fields has {taken}, which a slot has")
        keeps_more = cls.fields != ("score",) or cls.start is not Method.start
        if "fused_form" in vars(cls) and keeps_more:
            raise TypeError(
                f"{cls.__name__} has a fused form, whose kernels keep a score that "
                "starts at 0, and nothing else"
            )

    def start(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> State:
        """State of tokens that no query has looked at; 0, if it is not overridden.

        Args:
            keys: `[num_kv_heads, n, head_size]` after RoPE, in the cache's dtype.
            values: `[num_kv_heads, n, head_size]`.
            positions: `[n]` int64.

        Returns:
            `[num_kv_heads, n]` float32 for each of `fields`.
        """
        zeros = torch.zeros(keys.shape[:-1], device=keys.device)
        return {name: zeros.clone() for name in self.fields}

    def observe(self, state: State, probs: torch.Tensor) -> None:
        """Add consecutive queries to the state, in place.

        The result must not depend on how queries are cut into calls.

        Args:
            state: Of the tokens that the last of these queries sees.
            probs: `[..., group, m, n]` float32 attention of `m` queries, in each of
                the query heads that share the KV head, on the `n` tokens of the state;
                0 on those that a query does not see.
        """
        raise NotImplementedError

    def value(self, state: State, queries: Queries) -> torch.Tensor:
        """What tokens are compared by.

        Args:
            state: Of the tokens.
            queries: Who has looked at them.

        Returns:
            `[..., n]` float32, the higher the better to keep.
        """
        raise NotImplementedError


def starts_at_zero(method: Method) -> bool:
    """Whether tokens that nobody has looked at have a state of zeros."""
    return type(method).start is Method.start


def fused_form_of(method: Method) -> str | None:
    """The kernels' form of a method, None: they have none."""
    return vars(type(method)).get("fused_form")
