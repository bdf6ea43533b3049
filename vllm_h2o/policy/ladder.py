"""Budgets that follow the request: which budget serves how many tokens.

A budget in per cent is a share of what a request has. Lengths come in classes, each an
eighth longer than the one before, or a block; a class has its budget, and a request
that outgrows its class goes on with the next one's.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEP = 1 + 1 / 8
_ROOM = 1.25
"""A request whose end is further off than so many times its prompt begins with the
budget of that, and grows."""


@dataclass(frozen=True)
class Ladder:
    """The budgets of an engine's requests, and what they serve.

    Attributes:
        block_size: Token slots of a block.
        budgets: Blocks of a KV head on average, ascending; the last is the engine's.
        lengths: Tokens of the longest request that each serves at the engine's share,
            whole blocks but for the last; the last is the longest request's.
        share: Of its tokens that a request keeps; None: all have the engine's budget.
    """

    block_size: int
    budgets: tuple[int, ...]
    lengths: tuple[int, ...]
    share: float | None = None

    @classmethod
    def of_share(
        cls,
        share: float,
        least_tokens: int,
        most_blocks: int,
        block_size: int,
        max_model_len: int,
    ) -> Ladder:
        """The classes of a share.

        Args:
            share: Above 0, at most 1.
            least_tokens: No budget is smaller, but for that of the longest request.
            most_blocks: The budget of the longest request.
            block_size: Token slots of a block.
            max_model_len: Tokens of the longest request.
        """
        blocks, budgets, lengths = max(-(-least_tokens // block_size), 2), [], []
        while blocks < most_blocks:
            # A request fills its budget, and heads part, before it grows.
            length = max(int(blocks / share), blocks + 1) * block_size
            if length >= max_model_len:
                break
            budgets.append(blocks)
            lengths.append(length)
            blocks = max(int(blocks * _STEP), blocks + 1)
        budgets.append(most_blocks)
        lengths.append(max_model_len)
        return cls(block_size, tuple(budgets), tuple(lengths), share)

    @classmethod
    def of_number(cls, blocks: int, block_size: int, max_model_len: int) -> Ladder:
        """One class, whose budget all requests have."""
        return cls(block_size, (blocks,), (max_model_len,))

    def serves(self, step: int, share: float | None = None) -> int:
        """Tokens of the longest request that a budget serves.

        Args:
            step: Index of the budget.
            share: The request's own, at most the engine's; None: the engine's.
        """
        if step == len(self.budgets) - 1 or share is None or self.share is None:
            return self.lengths[step]
        return int(self.lengths[step] * self.share / share)

    def enters(
        self, num_tokens: int, most_tokens: int, share: float | None = None
    ) -> int:
        """Index of the budget that a request begins with.

        Args:
            num_tokens: Of what it reads.
            most_tokens: That it can have at its end.
            share: See `serves`.
        """
        aim = min(most_tokens, max(int(num_tokens * _ROOM), num_tokens))
        step = 0
        while self.serves(step, share) < aim:
            step += 1
        return step
