"""Prompts that are read in chunks, each beside what is held of those before it."""

from __future__ import annotations

import math
from typing import NamedTuple

_LEAST = 9 / 8
"""Budgets that a chunk has at least, however little memory a slot takes."""


class ChunkSpan(NamedTuple):
    """Which tokens of a prompt a chunk has.

    Attributes:
        start: Position of the first.
        end: Behind the last.
    """

    start: int
    end: int


def chunk_tokens(
    asked: int, budget: int, block_size: int, slots_per_token: float = 1.0
) -> int:
    """Tokens of a chunk: whole blocks, and at least twice the memory of what is held.

    Args:
        asked: `H2OConfig.prefill_chunk`.
        budget: Slots of a KV head of the request on average.
        block_size: Tokens of a dense block.
        slots_per_token: See `H2OConfig`; a chunk has more tokens than the budget.

    Returns:
        0, if prompts are read whole.
    """
    if not asked:
        return 0
    least = math.ceil(budget * max(2 / slots_per_token, _LEAST))
    return -(-max(asked, least) // block_size) * block_size


def chunk_at(position: int, tokens: int, prompt_end: int, origin: int = 0) -> ChunkSpan:
    """The chunk that a position of a prompt is in; of what comes later, the last.

    Args:
        position: Of a token, not before `origin`.
        tokens: Of a chunk.
        prompt_end: Tokens of the prompt.
        origin: Where the first chunk begins.
    """
    passed = min(position, prompt_end - 1) - origin
    start = origin + passed // tokens * tokens
    return ChunkSpan(start, min(start + tokens, prompt_end))


def first_scoring(start: int, first_query: int, gated: bool) -> int:
    """Position of the first query that scores, of a chunk after a prompt's first.

    What the gate expects of a token is as much as few queries pay: all of a chunk's
    count too. Without a gate those of its window do.

    Args:
        start: Position of the chunk's first token.
        first_query: Of the first query of its observation window.
        gated: Whether prompts are scored by the gate.
    """
    return start if gated else max(start, first_query)
