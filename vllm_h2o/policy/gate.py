"""The gate: how much attention a token will get, read off its key and value.

    x        = [sqrt(d) k/|k|, sqrt(d) v/|v|, log|k|, log|v|, log(n - t), 1]
    expected = max(w . x, 0)^4

for the token at position t of a prompt of n, with k its key before RoPE and w the
weights of its KV head: a ridge regression to the fourth root of the attention that it
gets, on average, of each query head and each of the queries after the prompt. They are
fitted while texts are read to measure the heads; nothing but forward passes is needed.

Source: the idea of Attention-Gate (arXiv 2410.12876); attention that is paid later as
the target is KVzip's (arXiv 2505.23416). Theirs are trained end to end and flag tokens;
this one expects an amount, and the budget says how many tokens that keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_QUERIES = 64
"""An expected score counts as much as the attention of this many queries."""
POWER = 4
"""The target is this root of the attention: what is rare and large is not all."""
RIDGE = 1e-3
"""Of the mean of the diagonal of the normal equations."""
NEWEST = 32
"""Tokens at the end of a prompt that are no examples: they are kept anyway."""
PROMPTS = 0.375, 0.75
"""Prompt lengths used as examples, as shares of the text."""
LATER = 0.25
"""Share of the text after a prompt whose queries are its later queries."""
LEAST_EXPLAINED = 0.2
"""R^2 on a text that it did not learn from, below which a gate is of no use."""
LEAST_NORM = 1e-6
"""A key or value is divided by its norm, or by this where that is smaller."""


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys (RoPE).

    Attributes:
        angles: `[positions, rotary_dim]` cosines, then sines, of each pair's angle;
            None: it is not known how, and nothing is told from the keys' directions.
        neox: Whether pairs are `(i, i + rotary_dim / 2)`, or neighbours.
    """

    angles: torch.Tensor | None
    neox: bool = True

    @classmethod
    def of(cls, module: Any) -> Rotation:
        """That of a rotary embedding of vLLM's, by its table.

        Of several tables, or of positions that are no single number, it is not known.
        """
        table = getattr(module, "cos_sin_cache", None)
        size, whole = (getattr(module, x, 0) for x in ("rotary_dim", "head_size"))
        several = getattr(module, "mrope_section", None) is not None
        if several or not isinstance(table, torch.Tensor) or table.ndim != 2:
            return cls(None)
        if table.shape[1] != size or size > whole:
            return cls(None)
        return cls(table, bool(module.is_neox_style))

    def undone(self, key: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The keys of a text before they were rotated, but for a constant factor.

        Args:
            key: `[n, num_kv_heads, head_size]` after RoPE, of the positions from
                `first` on.
            first: A position.

        Returns:
            The same in float32; where it is not known how, keys of the same norms that
            have one direction.
        """
        if self.angles is None or len(self.angles) < first + len(key):
            alike = torch.zeros_like(key, dtype=torch.float32)
            alike[..., 0] = key.float().norm(dim=-1)
            return alike
        angles = self.angles[first : first + len(key), None]
        angles = angles.to(key.device, torch.float32)
        cos, sin = angles.chunk(2, dim=-1)
        size = self.angles.shape[1]
        turned, rest = key.float().split([size, key.shape[-1] - size], dim=-1)
        if self.neox:
            x, y = turned.chunk(2, dim=-1)
        else:
            x, y = turned[..., ::2], turned[..., 1::2]
        pairs = x * cos + y * sin, y * cos - x * sin
        join = torch.cat if self.neox else torch.stack
        return torch.cat([join(pairs, dim=-1).flatten(2), rest], dim=-1)


def num_features(head_size: int, head_size_v: int) -> int:
    """How many numbers the expectation is linear in, of a token and KV head."""
    return head_size + head_size_v + 4


def features(
    key: torch.Tensor, value: torch.Tensor, ages: torch.Tensor
) -> torch.Tensor:
    """What the expectation is linear in.

    Args:
        key: `[n, num_kv_heads, head_size]` float32 before RoPE.
        value: `[n, num_kv_heads, head_size_v]` float32.
        ages: `[n]` int64 tokens from each one to the end of the prompt, at least 1.

    Returns:
        `[num_kv_heads, n, num_features(head_size, head_size_v)]`.
    """
    norms = [x.norm(dim=-1, keepdim=True).clamp(min=LEAST_NORM) for x in (key, value)]
    units = [
        x / y * math.sqrt(x.shape[-1]) for x, y in zip((key, value), norms, strict=True)
    ]
    age = ages.float().log()[:, None, None].expand_as(norms[0])
    parts = [*units, *(norm.log() for norm in norms), age, torch.ones_like(age)]
    return torch.cat(parts, dim=-1).transpose(0, 1)


@dataclass(frozen=True)
class Examples:
    """Tokens with the attention that they got, summed up in normal equations.

    Attributes:
        products: `[num_kv_heads, F, F]` float32.
        targets: `[num_kv_heads, F]` float32, features times the root of the attention.
        squares: `[num_kv_heads]` float64 sum of the squared roots.
        sums: `[num_kv_heads]` float64, their sum.
        count: How many tokens.
    """

    products: torch.Tensor
    targets: torch.Tensor
    squares: torch.Tensor
    sums: torch.Tensor
    count: int

    @classmethod
    def of(cls, x: torch.Tensor, attention: torch.Tensor) -> Examples:
        """Sum up `[num_kv_heads, n, F]` features and `[num_kv_heads, n]` attention."""
        root = attention.clamp(min=0.0) ** (1 / POWER)
        transposed = x.transpose(1, 2)
        return cls(
            transposed @ x,
            (transposed @ root[..., None])[..., 0],
            root.double().square().sum(dim=1),
            root.double().sum(dim=1),
            x.shape[1],
        )

    def cpu(self) -> Examples:
        """In the host's memory."""
        return Examples(
            self.products.cpu(),
            self.targets.cpu(),
            self.squares.cpu(),
            self.sums.cpu(),
            self.count,
        )

    def __add__(self, other: Examples) -> Examples:
        """Those of both."""
        return Examples(
            self.products + other.products,
            self.targets + other.targets,
            self.squares + other.squares,
            self.sums + other.sums,
            self.count + other.count,
        )

    def weights(self) -> torch.Tensor:
        """`[num_kv_heads, F]` float32 that fit them best."""
        products = self.products.double()
        size = products.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        ridge = RIDGE * size * torch.eye(products.shape[1], dtype=torch.float64)
        found = torch.linalg.solve(products + ridge, self.targets.double()[..., None])
        return found[..., 0].float()

    def explained(self, weights: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads]` float32 R^2 of weights `[num_kv_heads, F]` on these tokens.

        From 0 to 1; 0 too where all tokens get the same.
        """
        w = weights.double()
        fit = torch.einsum("hf,hfg,hg->h", w, self.products.double(), w)
        cross = (w * self.targets.double()).sum(dim=1)
        error = self.squares - 2 * cross + fit
        spread = self.squares - self.sums.square() / self.count
        varies = spread > 1e-6 * self.squares
        share = 1 - error / torch.where(varies, spread, 1.0)
        return torch.where(varies, share, 0.0).clamp(0.0, 1.0).float()


class Lessons:
    """Examples of texts, of which the last is for the test."""

    def __init__(self) -> None:
        """Begin without any."""
        self._learned: list[Examples] = []
        self._last: list[Examples] = []

    @torch.inference_mode()
    def add(self, text: Sequence[Examples]) -> None:
        """Take in a text's examples, layer by layer."""
        if self._learned:
            for i, last in enumerate(self._last):
                # One by one, so that no second sum of all layers is ever held.
                self._learned[i] = self._learned[i] + last
        else:
            self._learned = self._last
        self._last = list(text)

    def result(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What was learned of all texts, and how well without the last one.

        Returns:
            `[num_layers, num_kv_heads, F]` weights, `[num_layers, num_kv_heads]` R^2 on
            the last text of weights learned from the others; None: that takes two.
        """
        if not self._learned:
            return None
        pairs = [*zip(self._learned, self._last, strict=True)]
        explained = [last.explained(learned.weights()) for learned, last in pairs]
        weights = [(learned + last).weights() for learned, last in pairs]
        return torch.stack(weights), torch.stack(explained)


def paid_later(scored: torch.Tensor, stride: int) -> list[torch.Tensor]:
    """What a text's tokens get of later queries, where a part of it is the prompt.

    Args:
        scored: `[group, queries, n]` attention of the queries at 0, `stride`, ..
        stride: In tokens.

    Returns:
        For each of `PROMPTS` `[tokens]` mean attention of a query head and a query.
    """
    queries, paid = scored.shape[1], []
    for share in PROMPTS:
        rows = slice(round(share * queries), round((share + LATER) * queries))
        tokens = rows.start * stride - NEWEST
        paid.append(scored[:, rows, :tokens].mean(dim=(0, 1)))
    return paid


def examples_of(
    key: torch.Tensor, value: torch.Tensor, paid: Sequence[Sequence[torch.Tensor]]
) -> Examples:
    """A text's examples for the KV heads of one layer.

    Args:
        key: `[n, num_kv_heads, head_size]` before RoPE.
        value: `[n, num_kv_heads, head_size_v]`.
        paid: `[num_kv_heads]` of what `paid_later` returns.
    """
    parts = []
    for attention in zip(*paid, strict=True):
        tokens = len(attention[0])
        ages = tokens + NEWEST - torch.arange(tokens, device=key.device)
        x = features(key[:tokens].float(), value[:tokens].float(), ages)
        parts.append(Examples.of(x, torch.stack(attention)))
    first, second = parts
    return first + second


def expected(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, n]` attention that tokens of features `[num_kv_heads, n, F]` are
    expected to get of a query head and a query."""
    return (x @ weights[..., None])[..., 0].clamp(min=0.0) ** POWER
