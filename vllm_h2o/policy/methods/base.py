"""What all methods have: how attention adds up, and how tokens are scored by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

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
        group: Query heads of a KV head.
    """

    positions: torch.Tensor
    first: int
    seen: int
    group: int = 1

    def count(self) -> torch.Tensor:
        """`[..., n]` how many could see each token, at least 1."""
        return (self.seen - self.positions.clamp(min=self.first)).clamp(min=1)


@dataclass(frozen=True)
class Bounds:
    """Blocks that the heads of one KV head index share, over all layers.

    Attributes:
        total: Blocks to split.
        fewest: Blocks of a head at least.
        most: Blocks of a head at most.
    """

    total: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Method:
    """A rule that scores tokens: a slot is won by the score. `METHODS` has all by name.

    A subclass needs a `name`, `observe` and `score`. Dataclass fields of its own are
    options: those that `H2OConfig` has too are what a user sets.
    """

    name: ClassVar[str]
    """What `--h2o-score` calls it."""
    fused_form: ClassVar[str | None] = None
    """Which of the kernels' own forms computes it, `sum` or `mean`; None: only the
    torch reference does. Not inherited: a subclass may change the formula, and then no
    kernel computes it."""
    fields: ClassVar[tuple[str, ...]] = ("attention",)
    """What a slot keeps beside K and V in each KV head, a float32 each: a page grows by
    them. The first is `attention`."""

    prompt_fields: ClassVar[tuple[str, ...]] = ()
    """What is kept beside of each prompt token in each KV head, until the prompt is
    compressed."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.fields[:1] != ("attention",):
            raise TypeError(f"{cls.__name__}.fields must begin with 'attention'")
        if taken := {"keys", "values", "births"} & {*cls.fields}:
            raise TypeError(f"{cls.__name__}.fields has {taken}, which a slot has")
        keeps_more = cls.fields != ("attention",) or cls.start is not Method.start
        if "fused_form" in vars(cls) and keeps_more:
            raise TypeError(
                f"{cls.__name__} has a fused form, whose kernels keep attention that "
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

    def score(self, state: State, queries: Queries) -> torch.Tensor:
        """Scores that tokens compete by.

        Args:
            state: Of the tokens.
            queries: Who has looked at them.

        Returns:
            `[..., n]` float32, the higher the better to keep.
        """
        raise NotImplementedError

    def recounted(self, state: State, was: torch.Tensor, now: torch.Tensor) -> State:
        """State that stands for another number of queries than have looked.

        A prompt that is read in chunks is scored at the end of each, and what stays
        then counts as looked at by the last chunk's last queries.

        Args:
            state: Of the tokens.
            was: `[n]` queries that have looked at each.
            now: `[n]` that it is to stand for.

        Returns:
            The same state, where `score` does not count queries, as by default.
        """
        return state

    def observe_prompt(self, state: State, probs: torch.Tensor) -> None:
        """Add queries of a prompt, as `observe`; the state has `prompt_fields` too."""
        self.observe(state, probs)

    def score_prompt(self, state: State, queries: Queries) -> torch.Tensor:
        """Scores as `score`, for what is selected at the end of a prompt."""
        return self.score(state, queries)

    def pool(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """Let neighbouring prompt tokens share their scores, the highest by default.

        Args:
            scores: `[num_kv_heads, n]` float32 of `score_prompt`.
            width: Odd, in tokens, above 1.

        Returns:
            The same shape.
        """
        return max_pool(scores, width)

    def split(
        self, states: Sequence[State], queries: Queries, bounds: Bounds
    ) -> list[list[int]] | None:
        """How a request's blocks are split over layers and KV heads.

        Args:
            states: Of all layers that evict, at the end of the prompt.
            queries: Who has looked at its tokens.
            bounds: How many blocks there are to split.

        Returns:
            `[num_layers][num_kv_heads]` blocks, for each KV head `bounds.total` in
            all; None: the method leaves that to others.
        """
        return None


def max_pool(scores: torch.Tensor, width: int) -> torch.Tensor:
    """The highest of `width` (odd) neighbours, `[num_kv_heads, n]`."""
    pooled = F.max_pool1d(scores.unsqueeze(1), width, stride=1, padding=width // 2)
    return pooled.squeeze(1)


def splits(method: Method) -> bool:
    """Whether a method splits a request's blocks over layers and heads."""
    return type(method).split is not Method.split


def has_prompt_rules(method: Method) -> bool:
    """Whether a method scores prompts in another way than what is generated."""
    hooks, cls = ("observe_prompt", "score_prompt"), type(method)
    own = any(getattr(cls, name) is not getattr(Method, name) for name in hooks)
    return own or bool(method.prompt_fields)


def starts_at_zero(method: Method) -> bool:
    """Whether tokens that nobody has looked at have a state of zeros."""
    return type(method).start is Method.start


def fused_form_of(method: Method) -> str | None:
    """The kernels' form of a method while it generates, None: they have none."""
    return vars(type(method)).get("fused_form")


def fused_prompt_form_of(method: Method) -> str | None:
    """Their form for prompts, None: these are torch's, once per request."""
    hooks, cls = ("observe_prompt", "score_prompt", "pool"), type(method)
    own = any(getattr(cls, name) is not getattr(Method, name) for name in hooks)
    return None if own else fused_form_of(method)
