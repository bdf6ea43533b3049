"""Budgets that follow the request: which budget serves how many tokens.

A budget that is a number stays; what follows the request is how heads split it.

A budget in per cent is a share of what a request has: of its memory, so of its tokens.
Lengths come in classes, each an eighth longer than the one before, or a block; a class
has its budget, and a request that outgrows its class goes on with the next one's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

_STEP = 1 + 1 / 8
_ROOM = 1.25
"""A request whose end is further off than so many times its prompt begins with the
budget of that, and grows."""


_SHORTER = 2**0.5


def lengths_of(budget: int, longest: int) -> tuple[int, ...]:
    """Lengths of requests that a number of tokens is split over heads for.

    Args:
        budget: Slots of a KV head on average.
        longest: Tokens of the longest request.

    Returns:
        That first, each of the others shorter by a factor of `_SHORTER`, the last at
        least twice the budget.
    """
    lengths = [longest]
    while (shorter := round(longest / _SHORTER ** len(lengths))) >= 2 * budget:
        lengths.append(shorter)
    return tuple(lengths)


def length_class(budget: int, longest: int, num_tokens: int, most_tokens: int) -> int:
    """Index of the shortest of `lengths_of` that is long enough for a request.

    Args:
        budget: See `lengths_of`.
        longest: Likewise.
        num_tokens: Of what the request reads.
        most_tokens: That it can have at its end.
    """
    aim = min(most_tokens, int(num_tokens * _ROOM))
    lengths = lengths_of(budget, longest)
    return sum(length >= aim for length in lengths[1:])


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
        blocks, budgets, lengths = -(-least_tokens // block_size), [], []
        while blocks < most_blocks:
            # A request fills its budget, and heads part, before it grows.
            length = max(int(blocks / share), blocks + 1) * block_size
            # Between two classes lie more tokens than what a head gains on average.
            if length + (most_blocks - blocks) * block_size > max_model_len:
                break
            budgets.append(blocks)
            lengths.append(length)
            # What a budget holds the one before serves: see `enters`.
            blocks = max(int(blocks * min(_STEP, 1 / share)), blocks + 1)
        while lengths and lengths[-1] < most_blocks * block_size:
            budgets.pop()
            lengths.pop()
        budgets.append(most_blocks)
        lengths.append(max_model_len)
        return cls(block_size, tuple(budgets), tuple(lengths), share)

    @classmethod
    def of_number(cls, blocks: int, block_size: int, max_model_len: int) -> Ladder:
        """One class, whose budget all requests have."""
        return cls(block_size, (blocks,), (max_model_len,))

    @property
    def num_classes(self) -> int:
        """Length classes of the engine's budget, see `lengths_of`; 1: it is a share."""
        if self.share is not None:
            return 1
        return len(lengths_of(self.budgets[0] * self.block_size, self.lengths[0]))

    def up_to(self, blocks: int) -> tuple[int, ...]:
        """The budgets that grow to one of `blocks`, and that one; else that alone."""
        if blocks not in self.budgets:
            return (blocks,)
        return self.budgets[: self.budgets.index(blocks) + 1]

    def serves(self, step: int, share: float | None = None) -> int:
        """Tokens of the longest request that a budget serves.

        Args:
            step: Index of the budget.
            share: The request's own, at most the engine's; None: the engine's.
        """
        if step == len(self.budgets) - 1 or share is None or self.share is None:
            return self.lengths[step]
        return int(self.lengths[step] * self.share / share)

    def between(self, step: int, share: float | None = None) -> int:
        """Tokens that fill each head of a budget, of one that has grown to it.

        Args:
            step: Index of the budget, not the first.
            share: See `serves`.
        """
        return self.serves(step, share) - self.serves(step - 1, share)

    def enters(
        self, num_tokens: int, most_tokens: int, share: float | None = None
    ) -> int:
        """Index of the budget that a request begins with.

        Args:
            num_tokens: Of what it reads.
            most_tokens: That it can have at its end.
            share: See `serves`.
        """
        aim, step = min(most_tokens, int(num_tokens * _ROOM)), 0
        last = len(self.budgets) - 1
        while step < last and self.serves(step, share) < max(aim, num_tokens):
            step += 1
        # Until the switch a head's tokens must lie in its own pages, which only the
        # smallest budget guarantees. So step down until the prompt overfills it.
        while step and num_tokens <= self.budgets[step] * self.block_size:
            step -= 1
        return step


@dataclass(frozen=True)
class Climb:
    """Where a request stands on a ladder.

    Attributes:
        ladder: The ladder.
        step: Index of its budget.
        share: The request's own, see `Ladder.serves`.
        grown_at: Tokens that the request had when it came to this step; 0: it has begun
            with it.
        grown_before: The same of the step before; 0: it had begun with that.
        is_fixed: Whether the request has asked for this budget: in tokens, or as a
            share of its own where the engine's has one budget.
        length_class: Index of the length that the budget is split over heads for, if it
            is a number: see `lengths_of`.
    """

    ladder: Ladder
    step: int = 0
    share: float | None = None
    grown_at: int = 0
    grown_before: int = 0
    is_fixed: bool = False
    length_class: int = 0

    @property
    def budget(self) -> int:
        """Slots of a KV head on average."""
        return self.ladder.budgets[self.step] * self.ladder.block_size

    @property
    def grown_from(self) -> int:
        """The budget before it grew; 0: it has not."""
        if not self.grown_at:
            return 0
        return self.ladder.budgets[self.step - 1] * self.ladder.block_size

    @property
    def is_last(self) -> bool:
        """Whether the budget grows no more."""
        return self.step == len(self.ladder.budgets) - 1

    @property
    def serves(self) -> int:
        """Tokens of the longest request that the budget serves."""
        if self.is_last:
            return sys.maxsize
        return self.ladder.serves(self.step, self.share)

    def at(self, num_tokens: int) -> Climb:
        """Where the request stands that has so many tokens, by then."""
        climb = self
        while num_tokens > climb.serves:
            climb = climb.grown(climb.serves)
        return climb

    def ahead_of(self, num_tokens: int, more_tokens: int) -> Climb:
        """Where a request stands that has some tokens and is about to read more.

        One that will outgrow its budget does so at once where each head is full, or has
        lost nothing. That is so if no budget has grown yet, or once as many tokens have
        come since as fill each head.

        Args:
            num_tokens: That it has.
            more_tokens: That it will have.
        """
        if more_tokens <= self.serves:
            return self
        between = self.ladder.between(self.step, self.share) if self.grown_at else 0
        full = num_tokens - self.grown_at >= between
        return self.grown(num_tokens) if full else self

    def grown(self, num_tokens: int) -> Climb:
        """The step that the request goes on with once it has so many tokens."""
        return replace(
            self, step=self.step + 1, grown_at=num_tokens, grown_before=self.grown_at
        )

    def suits(self, other: Climb) -> bool:
        """Whether the other goes on from where a request is that stands here: the heads
        of both have their slots in the same places."""
        alike = (self.share, self.is_fixed) == (other.share, other.is_fixed)
        return alike and (not self.is_fixed or self.budget == other.budget)
