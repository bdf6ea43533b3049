"""What requests held when they, or their prompts, ended, for others to go on from.

The blocks are free and have hashes, as those of vLLM's prefix cache: what has been free
the longest is given away first, and the hash is taken off a block that is given away.
So what has gone is known by that, and no request waits for what is kept.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

    from vllm_h2o.policy.ladder import Climb

_FEWEST = 64
"""Entries whose blocks are gone are dropped only where there are more than these."""


class Snapshot(NamedTuple):
    """What a resident request held at some time, for others to go on from.

    Attributes:
        blocks: Its resident blocks; none where it is in files.
        num_tokens: Tokens that it has computed.
        climb: Its budget, and how that has grown.
        scored_from: Position of the first query that has scored what is held.
        paths: The file of each tensor-parallel rank; none where it is in the pool.
    """

    blocks: list[KVCacheBlock]
    num_tokens: int
    climb: Climb
    scored_from: int
    paths: tuple[str, ...] = ()


class _Entry(NamedTuple):
    """What is kept of a request, with the tokens behind its last whole block."""

    snapshot: Snapshot
    tail: list[int]
    hashes: list[BlockHashWithGroupId]

    @property
    def is_whole(self) -> bool:
        """Whether no block has been given away."""
        blocks = self.snapshot.blocks
        pairs = zip(blocks, self.hashes, strict=True)
        return all(block.block_hash == mine for block, mine in pairs)

    def ends_as(self, request: Request, whole: int) -> bool:
        """Whether a request goes on with these tokens behind its whole blocks."""
        return self.tail == request.all_token_ids[whole : self.snapshot.num_tokens]

    def is_same(self, other: _Entry) -> bool:
        """Whether the other, with the same whole blocks, is of the same use."""
        mine, others = self.snapshot.climb, other.snapshot.climb
        return self.tail == other.tail and mine.suits(others)


def is_known_by_tokens(request: Request) -> bool:
    """Whether a request is known by its tokens, adapter and salt: it has no images and
    no embeddings."""
    return not request.mm_features and request.prompt_embeds is None


class Snapshots:
    """Those that are kept, by the tokens that their requests had.

    Whole blocks of tokens are known by vLLM's hash of them and of all before, in which
    an adapter and a salt count; the tokens behind them by themselves.
    """

    def __init__(self, hash_block_size: int) -> None:
        """Begin with none.

        Args:
            hash_block_size: Tokens of a block as vLLM hashes them.
        """
        self._size = hash_block_size
        self._entries: dict[BlockHash, list[_Entry]] = {}
        self._serial = itertools.count()
        self._count, self._most = 0, _FEWEST

    def keep(self, request: Request, snapshot: Snapshot) -> None:
        """Keep what a request holds, or a copy, in blocks that are about to be freed.

        Args:
            request: The request; the tokens that it has computed are known.
            snapshot: What it holds, of a block of tokens at least.
        """
        end = snapshot.num_tokens
        whole = end // self._size * self._size
        hashes = [self._new_hash() for _ in snapshot.blocks]
        for block, block_hash in zip(snapshot.blocks, hashes, strict=True):
            block.set_block_hash(block_hash)
        entry = _Entry(snapshot, request.all_token_ids[whole:end], hashes)
        # The same once more takes the place of what was there.
        beside = self._entries.get(key := self._key(request, whole), [])
        others = [x for x in beside if not x.is_same(entry) and x.is_whole]
        self._entries[key] = [*others, entry]
        self._count += 1 + len(others) - len(beside)
        if self._count > self._most:
            self._drop_gone()

    def longest(self, request: Request, most: int, climb: Climb) -> Snapshot | None:
        """What is kept of the most tokens that a request begins with.

        Args:
            request: The request.
            most: Tokens that it may leave unread.
            climb: The budget that it asks for, which must be the same share, or number.
        """
        for whole in range(most // self._size * self._size, 0, -self._size):
            suiting = [
                entry.snapshot
                for entry in self._entries.get(self._key(request, whole), ())
                if entry.snapshot.num_tokens <= most
                and entry.snapshot.climb.suits(climb)
                and entry.ends_as(request, whole)
                and entry.is_whole
            ]
            if suiting:
                return max(suiting, key=lambda mine: mine.num_tokens)
        return None

    def same(self, request: Request, num_tokens: int, climb: Climb) -> Snapshot | None:
        """What is kept of just so many tokens, for whom this budget suits."""
        whole = num_tokens // self._size * self._size
        for entry in self._entries.get(self._key(request, whole), ()):
            mine = entry.snapshot
            alike = mine.num_tokens == num_tokens and mine.climb.suits(climb)
            if alike and entry.ends_as(request, whole) and entry.is_whole:
                return mine
        return None

    def _key(self, request: Request, whole: int) -> BlockHash:
        return request.block_hashes[whole // self._size - 1]

    def _new_hash(self) -> BlockHashWithGroupId:
        """One that no tokens have: vLLM's are longer."""
        return BlockHashWithGroupId(b"h2o" + next(self._serial).to_bytes(8, "big"))

    def _drop_gone(self) -> None:
        entries = {
            key: left
            for key, mine in self._entries.items()
            if (left := [entry for entry in mine if entry.is_whole])
        }
        self._entries, self._count = entries, sum(map(len, entries.values()))
        self._most = max(_FEWEST, 2 * self._count)
