"""What requests held when they, or their prompts, ended, for others to go on from.

The blocks are free and have hashes, as those of vLLM's prefix cache: what has been free
the longest is given away first, and the hash is taken off a block that is given away.
So what has gone is known by that, and no request waits for what is kept.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

    from vllm_h2o.policy.ladder import Climb

_Kind = TypeVar("_Kind", bound="KeyedSnapshot")
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


class KeptLimits(NamedTuple):
    """How long what is kept can be gone on from, and of how many sessions.

    Attributes:
        seconds: Since it was kept or last used.
        sessions: The most sessions of which something is kept in the pool; 0: any.
    """

    seconds: float = math.inf
    sessions: int = 0


@dataclass(eq=False)
class KeyedSnapshot:
    """A snapshot that is found by its tokens, in the pool or in files.

    Attributes:
        snapshot: What a request held.
        tail: Its tokens behind the last whole block of them.
        session: The name that the request had; in files, its hash.
    """

    snapshot: Snapshot
    tail: list[int]
    session: str | None

    def ends_as(self, request: Request, whole: int) -> bool:
        """Whether a request goes on with these tokens behind its whole blocks."""
        return self.tail == request.all_token_ids[whole : self.snapshot.num_tokens]


def suiting(
    entries: Mapping[Any, Sequence[_Kind]],
    request: Request,
    block_size: int,
    most: int,
    climb: Climb,
    session: str | None,
) -> Iterator[_Kind]:
    """What a request may go on from, that of the most tokens first.

    Args:
        entries: By vLLM's hash of whole blocks of tokens, and of all before.
        request: The request.
        block_size: Tokens of a block as vLLM hashes them.
        most: Tokens that the request may leave unread.
        climb: The budget that it asks for, which must be the same share, or number.
        session: Whose it has to be; None: anybody's.
    """
    if not entries:
        return
    for whole in range(most // block_size * block_size, 0, -block_size):
        found = [
            entry
            for entry in entries.get(request.block_hashes[whole // block_size - 1], ())
            if entry.snapshot.num_tokens <= most
            and session in (None, entry.session)
            and entry.snapshot.climb.suits(climb)
            and entry.ends_as(request, whole)
        ]
        yield from sorted(found, key=lambda entry: -entry.snapshot.num_tokens)


@dataclass(eq=False)
class Entry(KeyedSnapshot):
    """What is kept of a request in the pool.

    Attributes:
        hashes: Of the blocks, while they have not been given away.
        used: When it was kept or last used, by `time.monotonic`.
        before: What it has itself gone on from, of the same session.
        followers: Entries that came of this one.
    """

    hashes: list[BlockHashWithGroupId]
    used: float
    before: Entry | None = None
    followers: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether no block has been given away."""
        blocks = self.snapshot.blocks
        pairs = zip(blocks, self.hashes, strict=True)
        return all(block.block_hash == mine for block, mine in pairs)

    def forget(self) -> None:
        """Let nobody go on from it; blocks that have been given away are others'."""
        for block, mine in zip(self.snapshot.blocks, self.hashes, strict=True):
            if block.block_hash == mine:
                block.reset_hash()

    def is_same(self, other: Entry) -> bool:
        """Whether the other, with the same whole blocks, is of the same use."""
        mine, others = self.snapshot.climb, other.snapshot.climb
        same = (self.tail, self.session) == (other.tail, other.session)
        return same and mine.suits(others)


def is_known_by_tokens(request: Request) -> bool:
    """Whether a request is known by its tokens, adapter and salt: it has no images and
    no embeddings."""
    return not request.mm_features and request.prompt_embeds is None


class Snapshots:
    """Those that are kept, by the tokens that their requests had.

    Whole blocks of tokens are known by vLLM's hash of them and of all before, in which
    an adapter and a salt count; the tokens behind them by themselves.
    """

    def __init__(
        self, hash_block_size: int, pool: BlockPool, limits: KeptLimits
    ) -> None:
        """Begin with none.

        Args:
            hash_block_size: Tokens of a block as vLLM hashes them.
            pool: Whose blocks they are.
            limits: How long they are of use, and how many.
        """
        self._size, self._pool, self._limits = hash_block_size, pool, limits
        self._sessions: OrderedDict[str, list[Entry]] = OrderedDict()
        self._entries: dict[BlockHash, list[Entry]] = {}
        self._serial = itertools.count()
        self._count, self._most = 0, _FEWEST

    def keep(
        self, request: Request, snapshot: Snapshot, before: Snapshot | None = None
    ) -> Entry:
        """Keep what a request holds, or a copy, in blocks that are about to be freed.

        Args:
            request: The request; the tokens that it has computed are known.
            snapshot: What it holds, of a block of tokens at least.
            before: What it has gone on from.
        """
        end = snapshot.num_tokens
        whole = end // self._size * self._size
        hashes = [self._new_hash() for _ in snapshot.blocks]
        for block, block_hash in zip(snapshot.blocks, hashes, strict=True):
            block.set_block_hash(block_hash)
        entry = Entry(
            snapshot, request.all_token_ids[whole:end], request.session_id, hashes,
            time.monotonic(),
        )  # fmt: skip
        if before is not None and entry.session is not None:
            entry.before = self._of(request, before)
        # The same once more takes the place of what was there.
        beside = self._entries.get(key := self._key(request, whole), [])
        for other in (x for x in beside if x.is_same(entry)):
            self._give_away(other)
        others = [x for x in beside if x.is_whole]
        self._entries[key] = [*others, entry]
        self._count += 1 + len(others) - len(beside)
        if entry.session is not None:
            self._note_session(entry.session, entry)
        if max(self._count, len(self._sessions)) > self._most:
            self._drop_gone()
        return entry

    def _of(self, request: Request, snapshot: Snapshot) -> Entry | None:
        """The entry of what a request has gone on from, if it is its own session's."""
        whole = snapshot.num_tokens // self._size * self._size
        entries = self._entries.get(self._key(request, whole), ())
        mine = (x for x in entries if x.session == request.session_id)
        return next((x for x in mine if x.snapshot is snapshot), None)

    def _note_session(self, session: str, entry: Entry) -> None:
        """Give away first what no turn of a session is going to need, and what is of
        the session that was used least recently, if there are too many.

        The next turn goes on from the newest entry, the last one once more from the
        entry before it. What several turns have gone on from stays.
        """
        mine = self._sessions.setdefault(session, [])
        mine.append(entry)
        if (last := entry.before) is not None:
            last.followers += 1
            if last.before is not None and last.before.followers == 1:
                self._give_away(last.before)
            last.before = None
        self._sessions.move_to_end(session)
        if 0 < self._limits.sessions < len(self._sessions):
            _, oldest = self._sessions.popitem(last=False)
            for other in oldest:
                self._give_away(other)
        mine[:] = [x for x in mine if x.is_whole]

    def _give_away(self, entry: Entry) -> None:
        """Have the blocks of an entry, which is then gone, given away before others."""
        for block, mine in zip(entry.snapshot.blocks, entry.hashes, strict=True):
            if block.block_hash != mine:
                continue  # It is another's.
            free = block.ref_cnt == 0  # Else somebody is about to free it.
            if free:
                self._pool.touch([block])
            block.reset_hash()
            if free:
                self._pool.free_blocks([block])

    def longest(
        self, request: Request, most: int, climb: Climb, session: str | None = None
    ) -> Snapshot | None:
        """What is kept of the most tokens that a request begins with.

        Args:
            request: The request.
            most: Tokens that it may leave unread.
            climb: The budget that it asks for, which must be the same share, or number.
            session: Whose it has to be; None: anybody's.
        """
        now = time.monotonic()
        found = suiting(self._entries, request, self._size, most, climb, session)
        for entry in found:
            if now - entry.used > self._limits.seconds or not entry.is_whole:
                continue
            entry.used = now
            if entry.session is not None and entry.session in self._sessions:
                self._sessions.move_to_end(entry.session)
            return entry.snapshot
        return None

    def same(self, request: Request, num_tokens: int, climb: Climb) -> Snapshot | None:
        """What is kept of just so many tokens, for whom this budget suits."""
        whole = num_tokens // self._size * self._size
        for entry in self._entries.get(self._key(request, whole), ()):
            mine = entry.snapshot
            alike = mine.num_tokens == num_tokens and mine.climb.suits(climb)
            same = alike and entry.session == request.session_id
            if same and entry.ends_as(request, whole) and entry.is_whole:
                entry.used = time.monotonic()
                return mine
        return None

    def held(self) -> tuple[int, int, float]:
        """Snapshots that can be gone on from, their blocks, and the seconds since the
        one that has not been used for longest was."""
        now, count, blocks, oldest = time.monotonic(), 0, 0, 0.0
        for entry in itertools.chain.from_iterable(self._entries.values()):
            if (age := now - entry.used) <= self._limits.seconds and entry.is_whole:
                count, oldest = count + 1, max(oldest, age)
                blocks += len(entry.snapshot.blocks)
        return count, blocks, oldest

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
        there = {x.session for mine in entries.values() for x in mine}
        for session in self._sessions.keys() - there:
            del self._sessions[session]
        self._most = max(_FEWEST, 2 * self._count)
