"""The gate of one layer: fills in a prompt's attention when it is compressed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.gate import expected, features
from vllm_h2o.policy.rotation import Rotation

TOKENS_AT_ONCE = 1024
"""So that what is read of a long prompt takes little memory, and stays in caches."""


@dataclass(frozen=True, eq=False)
class LayerGate:
    """Of this rank's KV heads.

    Attributes:
        weights: `[num_kv_heads, F]` float32, see `vllm_h2o.policy.gate`.
        rotation: How the layer rotates its keys; None: it does not.
        group: Query heads of a KV head.
    """

    weights: torch.Tensor
    rotation: Rotation | None
    group: int

    def fill(
        self,
        attention: torch.Tensor,
        pages: Pages,
        blocks: torch.Tensor,
        first_query: int,
        start: int = 0,
    ) -> None:
        """Write the attention that the window's queries are expected to pay.

            attention[t] = group * expected[t] * (n - max(t, first_query))

        Args:
            attention: `[num_kv_heads, n - start]` float32 of tokens of a prompt that
                ends at n, written.
            pages: The layer's pages.
            blocks: `[>= cdiv(n, block_size)]` int32 dense blocks of the prompt.
            first_query: Position of the first query that the expectation stands for.
            start: Position of the first of the tokens.
        """
        n = start + attention.shape[1]
        size = pages.block_size * max(1, TOKENS_AT_ONCE // pages.block_size)
        for first in range(start, n, size):
            last = min(first + size, n)
            held = blocks[first // pages.block_size : -(-last // pages.block_size)]
            x = self._features(pages, held.long(), first, last, n)
            at = torch.arange(first, last, device=attention.device)
            queries = n - at.clamp(min=first_query)
            gets = expected(x, self.weights)
            attention[:, first - start : last - start] = self.group * gets * queries

    def _features(
        self, pages: Pages, held: torch.Tensor, first: int, last: int, n: int
    ) -> torch.Tensor:
        """Of the tokens of these blocks, those at `first` to `last` of `n`."""
        # keys: [blocks, heads, head_size, block_size], values: [.., block_size, ..].
        keys = pages.keys[held].permute(0, 3, 1, 2).flatten(0, 1)
        values = pages.values[held].transpose(1, 2).flatten(0, 1)
        before = first % pages.block_size
        mine = slice(before, before + last - first)
        keys, values = (x[mine].float() for x in (keys, values))
        if self.rotation is not None:
            keys = self.rotation.undone(keys, first)
        ages = n - torch.arange(first, last, device=keys.device)
        return features(keys, values, ages)
