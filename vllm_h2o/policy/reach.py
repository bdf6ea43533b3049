"""Texts longer than a model was trained for: keys move up before they are too far back.

Only the distance between a query and a key matters to RoPE, so a key that is rotated
further is nearer. A key's position is that in the text as long as it is within reach;
at each multiple of `step` those farther back than `limit` move up by `step`:

    moved(b, n) = step * max(0, (n - 1) // step - (b + limit) // step)

for the token at position b when n tokens have been read. So no query is farther from
a key than `limit + step`, and in a chunk of a prompt than the model was trained for.

Source: positions within the cache rather than the text are StreamingLLM's (arXiv
2309.17453), for sinks beside recent tokens. This does the same for whatever is held,
by counts alone; that what is far is as good as at a fixed distance is LM-Infinite's
finding (arXiv 2308.16137).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.options import CACHE
from vllm_h2o.policy.rotation import Rotation, rotated

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Reach:
    """How far back keys may be.

    Attributes:
        limit: Tokens that a key may be back at a multiple of `step`.
        step: Tokens by which those farther back move up.
        chunk: Tokens of a prompt that are read at once at most.
    """

    limit: int
    step: int
    chunk: int

    @classmethod
    def of_config(cls, config: H2OConfig, budget: int, block_size: int) -> Self | None:
        """That of an engine; None: no key moves.

        Args:
            config: The policy.
            budget: Slots of a KV head of the longest request on average.
            block_size: Tokens of a dense block.

        Raises:
            ValueError: See `of`.
        """
        if not config.moves_keys:
            return None
        # Where keys move nothing is rounded: a slot is a token.
        chunk = chunk_tokens(config.prefill_chunk, budget, block_size)
        return cls.of(config.trained_length, chunk)

    @classmethod
    def of(cls, trained: int, chunk: int) -> Self:
        """That of a model.

        Args:
            trained: Tokens of the longest text that it is made for.
            chunk: Tokens of a prompt that are read at once at most.

        Raises:
            ValueError: A chunk is too long: what is within it would have to move.
        """
        step = (trained - chunk) // 4
        limit = trained - chunk - step
        if not 0 < chunk <= limit:
            most = 3 * trained // 7
            raise ValueError(
                f"h2o_positions={CACHE!r} (--h2o-positions): chunks of prompts have "
                f"{chunk} tokens, which is h2o_prefill_chunk or twice the budget, and "
                f"with a model that was trained for {trained} may have {most}: use "
                "smaller ones"
            )
        return cls(limit, step, chunk)

    def moved(self, births: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`[n]` int64 by how much tokens of these positions have moved up, when so many
        tokens of the sequence have been read."""
        steps = (num_tokens - 1) // self.step
        passed = (births + self.limit) // self.step
        return self.step * (steps - passed).clamp(min=0)

    def moves_at(self, num_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """`[n]` whether something moves before the token is read that so many precede,
        in a sequence that has been compressed."""
        return (num_tokens % self.step == 0) & (num_tokens > self.limit)

    def next_move(self, num_tokens: int) -> int:
        """Tokens of the sequence, above so many, at which something moves next."""
        return (max(num_tokens, self.limit) // self.step + 1) * self.step


@dataclass(frozen=True, eq=False)
class MovingKeys:
    """How the keys of a layer move.

    Attributes:
        reach: How far back they may be.
        frequencies: `[rotary_dim / 2]` float64, see `Rotation`, on their device.
        neox: See `Rotation`.
    """

    reach: Reach
    frequencies: torch.Tensor
    neox: bool

    @classmethod
    def of(cls, reach: Reach, rotation: Rotation, device: torch.device) -> Self:
        """Those of a layer; what never changes goes to the device."""
        return cls(reach, rotation.frequencies.to(device), rotation.neox)

    def moved(
        self, keys: torch.Tensor, births: torch.Tensor, before: int, after: int
    ) -> torch.Tensor:
        """Keys where they are when more tokens have been read.

        Args:
            keys: `[n, head_size]` after RoPE, where they were.
            births: `[n]` int64 positions of their tokens in the text.
            before: Tokens of the sequence read then.
            after: Tokens read now.

        Returns:
            `[n, head_size]` of the same dtype.
        """
        by = self.reach.moved(births, after) - self.reach.moved(births, before)
        angles = by[:, None] * self.frequencies  # of what stays 0: it is as it was
        cos, sin = angles.cos().float(), angles.sin().float()
        now = rotated(keys.float(), cos, sin, self.neox)
        if keys.dtype != torch.float32:
            moves = self.reach.moved(births, after) // self.reach.step
            numbers = births * keys.shape[1] + moves
            size = 2 * len(self.frequencies)
            shifted = dithered(now[:, :size], numbers, keys.dtype)
            now[:, :size] = torch.where(by[:, None] > 0, shifted, now[:, :size])
        return now.to(keys.dtype)


def dithered(
    content: torch.Tensor, numbers: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Shift numbers by less than half of what a dtype tells apart, so that rounding
    them is right on average.

    A key that moves is rounded each time. To the nearest, it would drift: what moves by
    less than half a step of its dtype would never move.

    Args:
        content: `[n, size]` float32.
        numbers: `[n]` int64, others each time: the same shifts follow from the same.
        dtype: What they are about to be rounded to.
    """
    at = numbers[:, None] + torch.arange(content.shape[1], device=content.device)
    # Multiples of the golden ratio are spread evenly.
    shift = torch.frac(at.double() * _GOLDEN) - 0.5
    _, exponent = content.frexp()
    step = torch.finfo(dtype).eps * (exponent - 1).float().exp2()
    return torch.where(content == 0.0, content, content + step * shift.float())
