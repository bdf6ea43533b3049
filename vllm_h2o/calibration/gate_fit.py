"""How a gate is learned: examples of texts, and a ridge regression to them.

`vllm_h2o.policy.gate` has the formula; its weights are fitted here, while texts are
read to measure the heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_h2o.policy.gate import POWER, features

RIDGE = 0.1
"""The penalty of a weight, in variances of its feature: as over standardized features,
so that where keys have a large mean (biases) what varies about it still tells."""
_LEAST_RIDGE = 1e-5
"""Of the mean square of all features, beside it, for a feature that never varies."""
NEWEST = 32
"""Tokens at the end of a prompt that are no examples: they are kept anyway."""
PROMPTS = 0.375, 0.75
"""Prompt lengths used as examples, as shares of the text."""
LATER = 0.25
"""Share of the text after a prompt whose queries are its later queries."""


@dataclass(frozen=True)
class Examples:
    """Tokens with the attention that they got, summed up in normal equations.

    Attributes:
        products: `[num_kv_heads, F, F]` float32.
        targets: `[num_kv_heads, F]` float32, features times the root of the attention.
        squares: `[num_kv_heads]` float32 sum of the squared roots.
        sums: `[num_kv_heads]` float32, their sum.
        count: How many tokens.
    """

    products: torch.Tensor
    targets: torch.Tensor
    squares: torch.Tensor
    sums: torch.Tensor
    count: int

    ARRAYS: ClassVar[tuple[str, ...]] = ("products", "targets", "squares", "sums")
    """The fields that are tensors, in this order."""

    @classmethod
    def of(cls, x: torch.Tensor, attention: torch.Tensor) -> Examples:
        """Sum up `[num_kv_heads, n, F]` features and `[num_kv_heads, n]` attention."""
        x, root = x.double(), attention.double().clamp(min=0.0) ** (1 / POWER)
        transposed = x.transpose(1, 2)
        # Summed in float64: a feature's variance may be a millionth of its square.
        return cls(
            (transposed @ x).float(),
            (transposed @ root[..., None])[..., 0].float(),
            root.square().sum(dim=1).float(),
            root.sum(dim=1).float(),
            x.shape[1],
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
        """`[num_kv_heads, F]` float32 that fit them best, where

            mean (w . x - root)^2  +  RIDGE * sum_j variance(x_j) w_j^2

        is the least; the constant, which comes last, has no variance.
        """
        products = self.products.double() / self.count
        squares = products.diagonal(dim1=1, dim2=2)
        means = products[:, :, -1]
        variances = (squares - means.square()).clamp(min=0.0)
        least = _LEAST_RIDGE * squares.mean(dim=1, keepdim=True)
        ridge = RIDGE * variances + least
        ridge[:, -1] = 0.0
        ridge = torch.diag_embed(ridge)
        targets = self.targets.double()[..., None] / self.count
        return torch.linalg.solve(products + ridge, targets)[..., 0].float()

    def explained(self, weights: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads]` float32 R^2 of weights `[num_kv_heads, F]` on these tokens.

        From 0 to 1; 0 too where all tokens get the same.
        """
        w = weights.double()
        fit = torch.einsum("hf,hfg,hg->h", w, self.products.double(), w)
        cross = (w * self.targets.double()).sum(dim=1)
        squares = self.squares.double()
        error = squares - 2 * cross + fit
        spread = squares - self.sums.double().square() / self.count
        varies = spread > 1e-6 * squares
        share = 1 - error / torch.where(varies, spread, 1.0)
        return torch.where(varies, share, 0.0).clamp(0.0, 1.0).float()


def total(examples: Sequence[Examples]) -> Examples:
    """All of these as one."""
    return functools.reduce(Examples.__add__, examples)


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
    return total(parts)
