"""How a gate is learned: examples of texts, a ridge regression, and a test.

`vllm_h2o.policy.gate` has the formula; its weights are fitted here, while texts are
read to measure the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.policy.gate import POWER, features

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
