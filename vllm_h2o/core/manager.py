"""The block manager: dense blocks while a request prefills, then a fixed few.

Everything here follows from token counts (`policy/life.py`); no score reaches the
scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)

from vllm_h2o.core.connectors import Released
from vllm_h2o.core.plan import Load
from vllm_h2o.core.snapshots import Snapshot
from vllm_h2o.policy.life import Blocks, Life, Terms

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

    from vllm_h2o.core.spec import H2OAttentionSpec


class H2OManager(FullAttentionManager):
    """Blocks of the requests in one group of H2O layers.

    `req_to_blocks[request]` mirrors the worker's append-only row:

        [0, cdiv(n, block_size))       dense, while the prompt is read
        [.., dense_columns)            null blocks, from the transition step on
        [dense_columns, ..)            resident blocks, private, at most its budget

    A dense block has `block_size` tokens, a resident one as many slots as the spec says
    (`block_slots`).

    Once the transition step has been processed, the dense blocks are released
    and their columns become null blocks too.

    A prompt longer than a chunk is read in chunks, where prompts are: it has blocks for
    one, which its dense columns name in turn, and its resident blocks from the first
    chunk's last step on. These dense blocks are its own, and nothing is published.

    One that goes on from what another has held has resident blocks from its first step
    on, for a copy of that, and null blocks in the columns of what it does not read.

    A request that can not outgrow its budget, that ends with its first token, or that
    asks for it, stays dense: its row is stock vLLM's to its end, its blocks are shared
    and published as stock's are. A request with `policy: full` counts as a prompt for
    its whole life, so that stock's attention handles all of it.
    """

    # A hit that ends inside a block would make its tail private by a copy.
    supports_fine_grained_hash_lookup = False

    _lookup: ClassVar[threading.local] = threading.local()
    """`must_run`: first prompt query that has to run. vLLM calls
    `find_longest_cache_hit` on the class and does not say for which request.
    `begin`, called just before in the same thread, leaves the limit here."""

    def __init__(self, kv_cache_spec: H2OAttentionSpec, **kwargs: Any) -> None:
        """Count for a KV cache group; see the base class for the arguments."""
        super().__init__(kv_cache_spec, **kwargs)
        layout = kv_cache_spec.layout
        self.terms = Terms(
            kv_cache_spec.h2o, self.block_size, layout, kv_cache_spec.reach
        )
        self.budget, self._block_slots = layout.budget, layout.block_size
        self.dense_columns = kv_cache_spec.dense_columns
        self.blocks_freed = 0
        self.resident_blocks = 0
        self.continued_requests = self.continued_tokens = self.loaded_requests = 0
        self.lives: dict[str, Life] = {}
        self._num_resident = self._num_dense = 0
        self._sources: dict[str, Snapshot] = {}
        self._copies: list[tuple[int, int]] = []
        self._loads: list[Load] = []
        self.released: list[Released] | None = None
        """Dense blocks that running requests have given back; None: nobody asks."""
        # What the methods that run for every request in every step look at:
        # tokens that the blocks held are known to be enough for, and resident
        # requests that still hold their dense blocks.
        self.served: dict[str, int] = {}
        self.releasing: set[str] = set()

    # ---------------------------------------------------------------- counting

    def begin(self, request_id: str, life: Life) -> None:
        """Note the life of a request before its hits are looked up.

        Args:
            request_id: A request that holds no blocks here.
            life: One for the managers of all H2O layers.
        """
        assert not self.req_to_blocks.get(request_id)
        self._sources.pop(request_id, None)
        self.lives[request_id] = life
        self._lookup.must_run = life.must_run

    def go_on(self, request_id: str, snapshot: Snapshot) -> None:
        """Let a request go on from what another has held, that has just begun so.

        Args:
            request_id: It holds no blocks here; see `begin`.
            snapshot: Of its first tokens, with a budget that suits its own.
        """
        life = self.lives[request_id]
        life.go_on(snapshot.num_tokens, snapshot.climb, snapshot.scored_from)
        self._sources[request_id] = snapshot

    def snapshot(self, request_id: str, num_tokens: int) -> Snapshot | None:
        """What a request holds that another can go on from, or nothing.

        Args:
            request_id: A request.
            num_tokens: Tokens that it has computed.
        """
        if not self.is_resident(request_id):
            return None
        life = self.lives[request_id]
        if not life.can_be_kept(num_tokens):
            return None
        blocks = self.req_to_blocks[request_id][self.dense_columns :]
        return Snapshot(blocks, num_tokens, life.climb, life.all_scored_from())

    def copy_of(self, held: Snapshot) -> Snapshot | None:
        """A copy of what a request holds, in blocks that the caller frees; nothing
        where too few are free.

        The step that is scheduled makes it, before anything is written.
        """
        pool, blocks = self.block_pool, self.filled(held).blocks
        if len(blocks) > pool.get_num_free_blocks():
            return None
        copy = pool.get_new_blocks(len(blocks))
        self._note_copies(blocks, copy)
        return held._replace(blocks=copy)

    def filled(self, held: Snapshot) -> Snapshot:
        """What a request holds, without blocks that nothing is in yet."""
        climb, budget = held.climb, held.climb.budget
        if climb.grown_at == held.num_tokens:  # What it grows by is empty until then.
            budget = climb.grown_from
        return held._replace(blocks=held.blocks[: budget // self._block_slots])

    def _note_copies(self, old: list[KVCacheBlock], new: list[KVCacheBlock]) -> None:
        pairs = zip(old, new, strict=True)
        self._copies.extend((a.block_id, b.block_id) for a, b in pairs)

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied before the step that is scheduled, from and to."""
        copies, self._copies = self._copies, []
        return copies

    def take_loads(self) -> list[Load]:
        """Files to be read before the step that is scheduled."""
        loads, self._loads = self._loads, []
        return loads

    def _missing(
        self, request_id: str, num_tokens: int, num_hit_blocks: int = 0
    ) -> Blocks:
        """Blocks still to allocate for `num_tokens`."""
        dense, resident = self.lives[request_id].needs(num_tokens)
        held = len(self.req_to_blocks.get(request_id, ())) + num_hit_blocks
        if held > self.dense_columns:
            return Blocks(0, max(resident - (held - self.dense_columns), 0))
        return Blocks(max(dense - held, 0), resident)

    def tokens_served(self, request_id: str) -> int:
        """Tokens that the blocks held are enough for."""
        life, columns = self.lives[request_id], len(self.req_to_blocks[request_id])
        resident = 0 if life.stays_dense else columns - self.dense_columns
        return life.serves(Blocks(columns, max(resident, 0)))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """See the base class.

        At admission this counts dense plus resident blocks of the full sequence, so
        that an admitted request can transition.
        """
        if num_tokens <= self.served.get(request_id, 0):
            return 0
        life = self.lives[request_id]
        if apply_admission_cap and life.stays_dense:
            # Beside loads vLLM reserves blocks for drafts behind the last token too.
            num_tokens = min(num_tokens, max(life.prefill_end, life.budget))
        missing = self._missing(request_id, num_tokens, len(new_computed_blocks))
        return sum(missing) + self._get_num_evictable_blocks(new_computed_blocks)

    # -------------------------------------------------------------- allocating

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Append what `num_tokens` need; in the transition step pad and go on."""
        if num_tokens <= self.served.get(request_id, 0):
            return []
        dense, resident = self._missing(request_id, num_tokens)
        life, blocks = self.lives[request_id], self.req_to_blocks[request_id]
        life.grow(num_tokens)
        start, first = len(blocks), life.first_column
        if request_id not in self.served:
            self._num_dense += life.stays_dense
            blocks.extend([self._null_block] * first)
        blocks.extend(dense_blocks := self._new_blocks(dense))
        # vLLM clears these; kernels read no slot of a resident block before it is
        # written.
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in dense_blocks)
        if resident:
            self.resident_blocks += resident
            if len(blocks) <= self.dense_columns:
                self._num_resident += 1
                self.releasing.add(request_id)
            padding = max(self.dense_columns - len(blocks), 0)
            named = blocks[first:] if life.chunk and padding else [self._null_block]
            blocks.extend(islice(cycle(named), padding))
            blocks.extend(residents := self._new_blocks(resident))
            if request_id in self._sources:
                self._copy(request_id, self._sources.pop(request_id), residents)
                self.continued_requests += 1
                self.continued_tokens += life.start
        self.served[request_id] = self.tokens_served(request_id)
        return blocks[start:]

    def _copy(
        self, request_id: str, snapshot: Snapshot, mine: list[KVCacheBlock]
    ) -> None:
        """Let the step that is scheduled begin with a copy of what is kept.

        It may have just been given away: nothing is written to it before that.
        """
        if snapshot.paths:
            ids = [block.block_id for block in mine]
            self._loads.append(Load(request_id, snapshot.paths, ids))
            self.loaded_requests += 1
            return
        # If the budget is larger than the snapshot's, the other blocks get no copy.
        held = snapshot.blocks
        self._note_copies(held, mine[: len(held)])
        if all(block.block_hash is not None for block in held):
            # As after a hit of vLLM's, the last to be given away.
            self.block_pool.touch(held)
            self.block_pool.free_blocks(reversed(held))

    def _new_blocks(self, count: int) -> list[KVCacheBlock]:
        if not count:
            return []
        return self.block_pool.get_new_blocks(count)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release the dense blocks once no step in flight can read them."""
        if request_id not in self.releasing:
            return
        life = self.lives[request_id]
        if processed_computed_tokens < life.prefill_end:
            return
        self.releasing.remove(request_id)
        self._name_once(request_id)
        first, count = life.first_column, life.dense_blocks
        self._remove_blocks_in_range(request_id, first, first + count)
        if self.released is not None:
            self.released.append(Released(request_id, first, first + count))
        self.blocks_freed += count

    def _name_once(self, request_id: str) -> None:
        """Name each dense block of a chunk in one column, before they are freed."""
        life = self.lives.get(request_id)
        if life is None or not life.chunk or not self.is_resident(request_id):
            return
        first = life.first_column + life.dense_blocks
        padding = [self._null_block] * (self.dense_columns - first)
        self.req_to_blocks[request_id][first : self.dense_columns] = padding

    def is_resident(self, request_id: str) -> bool:
        """Whether the request's transition step has been scheduled."""
        return len(self.req_to_blocks.get(request_id, ())) > self.dense_columns

    def requests_by_state(self) -> tuple[int, int, int]:
        """Requests that hold blocks: resident, still reading, staying dense."""
        in_chunks = sum(self.lives[name].chunk > 0 for name in self.releasing)
        resident, dense = self._num_resident - in_chunks, self._num_dense
        return resident, len(self.served) - resident - dense, dense

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Drop the request's state with its blocks."""
        self._name_once(request_id)
        life = self.lives.pop(request_id, None)
        if self.is_resident(request_id):
            self._num_resident -= 1
            held = len(self.req_to_blocks[request_id])
            self.resident_blocks -= held - self.dense_columns
        elif life is not None and request_id in self.served:
            self._num_dense -= life.stays_dense
        self._sources.pop(request_id, None)
        self.served.pop(request_id, None)
        self.releasing.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    # ---------------------------------------------------------- prefix caching

    def cache_blocks(self, request: Request, num_tokens: int, *args, **kwargs) -> None:
        """Publish prompt blocks only, where what comes later saw a compressed past."""
        name = request.request_id
        num_tokens = self.lives[name].tokens_to_publish(num_tokens)
        cached = self.num_cached_block.get(name, 0)
        if cached < num_tokens // self.block_size:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Hits that leave the observation window, if it scores, to be computed.

        So which tokens survive never depends on what the cache happened to hold.
        """
        return super().find_longest_cache_hit(
            block_hashes,
            min(max_length, getattr(cls._lookup, "must_run", 0)),
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            dcp_world_size,
            pcp_world_size,
        )


def publish_alike(manager: SingleTypeKVCacheManager, h2o: H2OManager) -> None:
    """Let the blocks of layers with a window or a state be published as H2O's are.

    From a compressed past on they take in what differs as well. And they keep only what
    a repeat of the prompt can resume at, which is earlier with H2O.
    """
    stock = manager.cache_blocks

    def cache_blocks(
        request: Request, num_tokens: int, *args: Any, replay_boundaries: Sequence[int],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        name = request.request_id
        life = h2o.lives[name]
        num_tokens = life.tokens_to_publish(num_tokens)
        boundaries = [*replay_boundaries, life.resumes_at()]
        stock(request, num_tokens, *args, replay_boundaries=boundaries, **kwargs)

    manager.cache_blocks = cache_blocks  # type: ignore[method-assign]
