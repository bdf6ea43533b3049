"""Snapshots in files: a second place for what is kept, which outlives the pool.

A snapshot has a file per tensor-parallel rank,
`KEY-DETAIL-TOKEN-RANKofRANKS-DIGEST.safetensors`, whose digest is that of all its
bytes: what is damaged is found out before it is used. The key is vLLM's hash of the
request's whole blocks of tokens, in which an adapter and a salt count; the detail a
hash of the tokens behind them and of the budget; the token is what the files of one
saving have in common. A folder of its own has what gives a byte its meaning
(`plugin/fingerprint.py`) as its name: of another model nothing is found.

What the folder has is the index. So engines may share one, and a file that could not be
written, or that somebody has removed, is just not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from safetensors import SafetensorError, safe_open
from vllm.logger import init_logger

from vllm_h2o.core.plan import Save
from vllm_h2o.core.snapshots import KeyedSnapshot, Snapshot, suiting
from vllm_h2o.policy.ladder import Climb, Ladder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_h2o.core.spec import H2OAttentionSpec

logger = init_logger(f"vllm.{__name__}")

FORMAT = 1
"""Of a file; part of its folder's name."""
METADATA = "h2o"
"""Where a file says what it is of."""
_NAME = re.compile(
    r"([0-9a-f]+-[0-9a-f]{16})-([0-9a-f]{8})-(\d+)of(\d+)-[0-9a-f]{64}\.safetensors"
)
PARTIAL = ".partial"
"""What the name of a file ends in until it is whole."""
_UNFINISHED = 3600.0
"""Seconds after which nobody writes to a partial file any more."""
_SECONDS_BETWEEN_COUNTS = 10.0
_MOST_ASKED = 256
_ASKED = 60.0
"""Seconds in which a file that was asked for should be there."""
_SETTLED = 0.1
"""Seconds after which another file has another time."""
_ROOM = 0.1
"""Share of the folder that is freed when it is full."""


class KeptFiles:
    """The files of one engine's kind in a folder."""

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        num_ranks: int,
        most_bytes: int,
        block_bytes: int,
        hash_block_size: int,
        seconds: float,
    ) -> None:
        """Make the folder; what is in it may be used.

        Args:
            root: The user's folder, which other engines may use.
            fingerprint: Of what gives a byte its meaning.
            num_ranks: Tensor-parallel ranks, each of which has a file.
            most_bytes: Of all files below the root, about.
            block_bytes: Of a block of all layers and ranks.
            hash_block_size: Tokens of a block as vLLM hashes them.
            seconds: After which what has not been used is not any more.
        """
        self._seconds = seconds
        self._root, self._ranks, self._most = root, num_ranks, most_bytes
        self._block_bytes, self._size = block_bytes, hash_block_size
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
        private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not private or not stat.S_ISDIR(found.st_mode):
            raise ValueError(
                f"h2o_keep_folder (--h2o-keep-folder) is {str(root)!r}, which is not a "
                "folder that only the user of this process may use: use another"
            )
        self._own = root / f"{FORMAT}-{fingerprint}"
        self._said: set[str] = set()
        self._remove_unfinished()
        self._begin()
        self._counted = time.monotonic()
        self._used = sum(size for _, size, _ in self._all_files())

    @classmethod
    def of_engine(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        spec: H2OAttentionSpec,
        layers: int,
        size: int,
    ) -> Self | None:
        """Those of an engine; None: it has no folder for them.

        Args:
            vllm_config: The engine's.
            kv_cache_config: Its pool, whose layout is in the folder's name too.
            spec: Of the layers that evict.
            layers: How many these are.
            size: Tokens of a block as vLLM hashes them.
        """
        if not spec.h2o.keep_folder:
            return None
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return cls(
            Path(spec.h2o.keep_folder),
            f"{spec.fingerprint}-{kv_cache_config.kv_cache_layout}",
            ranks,
            most_bytes=int(spec.h2o.keep_size * 2**30),
            block_bytes=spec.page_size_bytes * layers * ranks,
            hash_block_size=size,
            seconds=spec.h2o.keep_seconds or math.inf,
        )

    def _begin(self) -> None:
        self._entries: dict[str, KeyedSnapshot] = {}
        self._by_key: dict[bytes, list[KeyedSnapshot]] = {}
        self._asked: dict[str, float] = {}
        self._dropped: set[tuple[str, str]] = set()
        self._seen, self._looked, self._retry_at = -1, 0.0, math.inf

    def _say(self, error: OSError) -> None:
        """Log once that the folder can not be used."""
        what = error.strerror or str(error)
        if what not in self._said:
            self._said.add(what)
            logger.warning("H2O can not use %s: %s", self._root, what)

    def forget(self) -> None:
        """Use nothing any more that is there now.

        What is saved from now on only this process finds.
        """
        with contextlib.suppress(OSError):  # It may be another engine's, or not there.
            self._own.rmdir()
        self._own = self._root / f"{FORMAT}-{uuid.uuid4().hex}"
        self._begin()

    # ---------------------------------------------------------------- finding

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
        try:
            self._look()
        except OSError as error:
            self._say(error)
            return None
        kept, size, whose = self._by_key, self._size, _hashed(session)
        for entry in suiting(kept, request, size, most, climb, whose):
            if self._is_of_use(entry.snapshot):
                _touch(entry.snapshot.paths)
                return entry.snapshot
        return None

    def _is_of_use(self, found: Snapshot) -> bool:
        """Whether a snapshot has been used lately enough; else it is removed."""
        try:
            age = time.time() - os.stat(found.paths[0]).st_mtime
        except OSError:
            return False
        if age > self._seconds:
            self.drop(found.paths)
        return age <= self._seconds

    def _look(self) -> None:
        """Take in which files there are, if that has changed."""
        try:
            changed = os.stat(self._own).st_mtime_ns
        except FileNotFoundError:  # It is made for the first file.
            self._begin()
            return
        is_due = time.monotonic() >= self._retry_at
        settled = self._looked - changed * 1e-9 > _SETTLED
        if changed == self._seen and settled and not is_due:
            return
        looked, self._retry_at = time.time(), math.inf
        there: dict[tuple[str, str], dict[int, str]] = {}
        for file in os.scandir(self._own):
            name = _NAME.fullmatch(file.name)
            if name and int(name[4]) == self._ranks:
                there.setdefault((name[1], name[2]), {})[int(name[3])] = file.path
        whole = {
            stem: tuple(path for _, path in sorted(by_rank.items()))
            for (stem, token), by_rank in sorted(there.items())
            if len(by_rank) == self._ranks and (stem, token) not in self._dropped
        }
        self._seen, self._looked = changed, looked
        for stem, entry in list(self._entries.items()):
            if whole.get(stem) != entry.snapshot.paths:
                self._remove(stem)
        for stem in whole.keys() - self._entries.keys():
            try:
                entry = _read(whole[stem])
            except FileNotFoundError:
                continue  # It has just been removed.
            except OSError as error:
                self._say(error)
                self._retry_at = time.monotonic() + _SECONDS_BETWEEN_COUNTS
                continue
            except _DAMAGED as error:
                logger.warning("H2O removes %s: %s", whole[stem][0], str(error))
                self.drop(whole[stem])
                continue
            self._entries[stem] = entry
            self._asked.pop(stem, None)
            self._by_key.setdefault(_key(stem), []).append(entry)

    def _remove(self, stem: str) -> None:
        entry, mine = self._entries.pop(stem), self._by_key[_key(stem)]
        mine.remove(entry)
        if not mine:
            del self._by_key[_key(stem)]

    # ----------------------------------------------------------------- saving

    def save(self, request: Request, held: Snapshot) -> Save | None:
        """What the workers have to write, or nothing: it is there, or has no place.

        Args:
            request: Of the snapshot; the tokens that it has computed are known.
            held: What it holds, of a block of tokens at least.
        """
        end = held.num_tokens
        whole = end // self._size * self._size
        about = {
            "tokens": end,
            "scored_from": held.scored_from,
            "tail": request.all_token_ids[whole:end],
            "climb": asdict(held.climb),
            "session": _hashed(request.session_id),
        }
        text = json.dumps(about)
        key = request.block_hashes[whole // self._size - 1].hex()
        stem = f"{key}-{_detail(text)}"
        num_bytes = len(held.blocks) * self._block_bytes
        try:
            self._look()
            if stem in self._entries:
                _touch(self._entries[stem].snapshot.paths)
                return None
            now = time.monotonic()
            if now - self._asked.get(stem, -math.inf) < _ASKED:
                return None
            if num_bytes > self._most or not self._make_room(num_bytes):
                return None
            self._own.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._say(error)
            return None
        if len(self._asked) > _MOST_ASKED:
            asked = self._asked.items()
            self._asked = {x: at for x, at in asked if now - at < _ASKED}
        self._asked[stem] = now
        self._used += num_bytes
        ids = [block.block_id for block in held.blocks]
        path = self._own / f"{stem}-{uuid.uuid4().hex[:8]}"
        return Save(request.request_id, str(path), ids, text)

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what has not been used for longest, where the folder is full."""
        now = time.monotonic()
        if now - self._counted > _SECONDS_BETWEEN_COUNTS:  # Others write too.
            self._counted = now
            self._used = sum(size for _, size, _ in self._all_files())
        if self._used + num_bytes <= self._most:
            return True
        files = sorted(self._all_files())
        self._used = sum(size for _, size, _ in files)
        aim = self._most * (1 - _ROOM) - num_bytes
        for _, size, path in files:
            if self._used <= max(aim, 0.0):
                break
            Path(path).unlink(missing_ok=True)
            self._used -= size
        return self._used + num_bytes <= self._most

    def drop(self, paths: tuple[str, ...]) -> None:
        """Remove a snapshot whose files are not what they should be."""
        name = _NAME.fullmatch(Path(paths[0]).name)
        assert name is not None
        entry = self._entries.get(name[1])
        if entry is not None and entry.snapshot.paths == paths:
            self._remove(name[1])
        try:
            for path in paths:
                Path(path).unlink(missing_ok=True)
        except OSError as error:
            self._say(error)
            self._dropped.add((name[1], name[2]))

    def count(self) -> tuple[int, int]:
        """Snapshots that can be found, and bytes of all files, about."""
        return len(self._entries), self._used

    def _all_files(self) -> Iterator[tuple[float, int, str]]:
        """When each was used last, its bytes, its path; of all engines' kinds."""
        for file in self._root.glob("*/*"):
            if _NAME.fullmatch(file.name) or file.name.endswith(PARTIAL):
                try:
                    found = file.lstat()
                except FileNotFoundError:
                    continue
                yield found.st_mtime, found.st_size, str(file)

    def _remove_unfinished(self) -> None:
        now = time.time()
        for used, _, path in list(self._all_files()):
            if path.endswith(PARTIAL) and now - used > _UNFINISHED:
                Path(path).unlink(missing_ok=True)


def _key(stem: str) -> bytes:
    """The hash of tokens in a file's name."""
    return bytes.fromhex(stem.partition("-")[0])


def _detail(text: str) -> str:
    """What a name has of what a file says of itself."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hashed(session: str | None) -> str | None:
    """The name of a session as files have it."""
    return session and hashlib.sha256(session.encode()).hexdigest()


def _touch(paths: tuple[str, ...]) -> None:
    """Note that files are used."""
    for path in paths:
        try:
            os.utime(path)
        except OSError:
            return  # Removed by another engine: the workers will say so.


_DAMAGED = (SafetensorError, KeyError, TypeError, ValueError, AttributeError)


def _read(paths: tuple[str, ...]) -> KeyedSnapshot:
    """What files are of, as the first of them says.

    Raises:
        OSError: It can not be read.
        Exception: One of `_DAMAGED`: it does not say, or is not whole.
    """
    with safe_open(paths[0], "pt") as file:
        text = file.metadata()[METADATA]
    name = _NAME.fullmatch(Path(paths[0]).name)
    if name is None or name[1].partition("-")[2] != _detail(text):
        raise ValueError("it is not what its name says")
    about = json.loads(text)
    climb = about["climb"]
    ladder = climb.pop("ladder")
    budgets, lengths = tuple(ladder.pop("budgets")), tuple(ladder.pop("lengths"))
    snapshot = Snapshot(
        [],
        about["tokens"],
        Climb(Ladder(**ladder, budgets=budgets, lengths=lengths), **climb),
        about["scored_from"],
        paths,
    )
    return KeyedSnapshot(snapshot, about["tail"], about["session"])
