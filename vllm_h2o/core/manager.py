"""The block manager: dense blocks while a request prefills, then a fixed few.

Everything here follows from token counts; no score reaches the scheduler.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)

from vllm_h2o.core.kept import Residents
from vllm_h2o.policy.chunks import ChunkSpan, chunk_at, chunk_tokens
from vllm_h2o.policy.ladder import Climb, Ladder
from vllm_h2o.policy.layout import first_observer, place_of
from vllm_h2o.policy.request import DEFAULTS, RequestOptions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

    from vllm_h2o.core.plan import ResidencyPlan
    from vllm_h2o.core.spec import H2OAttentionSpec

_NEVER_GROWN = 0, 0, 0, 0, 0


class _Reading(NamedTuple):
    """How a request reads on.

    Attributes:
        chunk: Tokens of a chunk, whole blocks.
        window: Its observation window.
        start: Tokens before the first chunk: those of what it goes on from.
        scored_from: Position of the first query that has scored that.
    """

    chunk: int
    window: int | str | None
    start: int = 0
    scored_from: int = 0

    def span(self, position: int, prompt_end: int) -> ChunkSpan:
        """The chunk that a position is in; of what comes later, the last."""
        return chunk_at(position, self.chunk, prompt_end, self.start)


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
    and published as stock's are. To one that asks for it all of its life
    is a prompt, which stock's attention reads.
    """

    # A hit that ends inside a block would make its tail private by a copy.
    supports_fine_grained_hash_lookup = False

    _lookup: ClassVar[threading.local] = threading.local()
    """`must_run`: first prompt query that has to run. vLLM calls
    `find_longest_cache_hit` on the class and does not say for which request.
    `begin_prefill`, called just before in the same thread, leaves the limit here."""

    def __init__(self, kv_cache_spec: H2OAttentionSpec, **kwargs: Any) -> None:
        """Count for a KV cache group; see the base class for the arguments."""
        super().__init__(kv_cache_spec, **kwargs)
        self.policy = kv_cache_spec.h2o
        self._layout = kv_cache_spec.layout
        self.budget, self._block_slots = self._layout.budget, self._layout.block_size
        longest = kv_cache_spec.max_model_len
        self._engines = Climb(
            Ladder.of_number(self._layout.budget_blocks, self._block_slots, longest)
        )
        self.dense_columns = kv_cache_spec.dense_columns
        self.blocks_freed = 0
        self.resident_blocks = 0
        self._num_resident = self._num_dense = 0
        self._prefill_end: dict[str, int] = {}
        self._first_query: dict[str, int] = {}
        self._budget: dict[str, int] = {}
        self._climb: dict[str, Climb] = {}
        self._growth: dict[str, tuple[int, int, int, int, int]] = {}
        self._reading: dict[str, _Reading] = {}
        self._readers: set[str] = set()
        self._sources: dict[str, list[KVCacheBlock]] = {}
        self._copies: list[tuple[int, int]] = []
        self.continued_tokens = 0
        # What the methods that run for every request in every step look at:
        # tokens that the blocks held are known to be enough for, and resident
        # requests that still hold their dense blocks.
        self._served: dict[str, int] = {}
        self._releasing: set[str] = set()

    # ---------------------------------------------------------------- counting

    def begin_prefill(
        self,
        request_id: str,
        prefill_end: int,
        most_tokens: int,
        options: RequestOptions = DEFAULTS,
        climb: Climb | None = None,
    ) -> None:
        """Note where the prompt ends, before its hits are looked up.

        Args:
            request_id: A request that holds no blocks here.
            prefill_end: Tokens known now: the prompt, and after a preemption
                what was generated before it.
            most_tokens: Tokens that steps compute of the request at most, with those
                that were in flight when it ended. Within the budget nothing will
                compete, and what ends with its first token will not be decoded: no
                query has to score.
            options: What the request asks for.
            climb: The budget that it begins with, and what next; None: the engine's,
                for good.
        """
        assert not self.req_to_blocks.get(request_id)
        self._forget_reading(request_id)
        if options.is_full:
            prefill_end = most_tokens
        self._stand(request_id, climb or self._engines)
        budget = self._budget[request_id]
        assert budget <= self.budget and not budget % self._block_slots
        first_query, window = max(budget, prefill_end), options.observation_window
        chunk = self._chunk(options, budget)
        reads_on = 0 < chunk < prefill_end and not options.is_full
        if reads_on:
            self._reading[request_id] = _Reading(chunk, window)
            self._readers.add(request_id)
            first_query = first_observer(self.policy, chunk, window)
        elif most_tokens > max(budget, prefill_end + (not options.asks_to_be_kept)):
            first_query = first_observer(self.policy, prefill_end, window)
        self._prefill_end[request_id] = prefill_end
        self._first_query[request_id] = first_query
        # By the gate no query has to run for the scores.
        must_run = prefill_end if self.policy.gated else first_query
        self._lookup.must_run = 0 if reads_on else must_run

    def go_on(
        self, request_id: str, residents: Residents, options: RequestOptions
    ) -> None:
        """Let a request go on from what another has held, that has just begun so.

        Args:
            request_id: It holds no blocks here; see `begin_prefill`.
            residents: Of its first tokens, with a budget that suits its own.
            options: What the request asks for.
        """
        end, start = self._prefill_end[request_id], residents.num_tokens
        self._stand(request_id, residents.climb.ahead_of(start, end))
        budget, window = self._budget[request_id], options.observation_window
        assert start < end
        rest = cdiv(end - start, self.block_size) * self.block_size
        chunk = min(self._chunk(options, budget) or rest, rest)
        reading = _Reading(chunk, window, start, residents.scored_from)
        self._reading[request_id] = reading
        self._readers.add(request_id)
        self._sources[request_id] = residents.blocks
        first_end = self._span(request_id, start).end
        self._first_query[request_id] = first_observer(self.policy, first_end, window)

    def _chunk(self, options: RequestOptions, budget: int) -> int:
        """Tokens that a request with such a budget reads at once; 0: all."""
        asked, held = options.chunk(self.policy), self.policy.slots_per_token
        return chunk_tokens(asked, budget, self.block_size, held)

    def residents(self, request_id: str, num_tokens: int) -> Residents | None:
        """What a request holds that another can go on from, or nothing.

        Heads have parted when a first budget is filled.

        Args:
            request_id: A request.
            num_tokens: Tokens that it has computed.
        """
        if not self.is_resident(request_id):
            return None
        end, climb = self._prefill_end[request_id], self._climb[request_id]
        has_parted = climb.grown_at or num_tokens > climb.budget
        if num_tokens < end or not has_parted:
            return None
        scored_from = self._first_query[request_id]
        if reading := self._reading.get(request_id):
            scored_from = first_observer(self.policy, end, reading.window)
        blocks = self.req_to_blocks[request_id][self.dense_columns :]
        return Residents(blocks, num_tokens, climb, scored_from)

    def copy_of(self, held: Residents) -> Residents | None:
        """A copy of what a request holds, in blocks that the caller frees; nothing
        where too few are free.

        The step that is scheduled makes it, before anything is written.
        """
        climb, pool, budget = held.climb, self.block_pool, held.climb.budget
        if climb.grown_at == held.num_tokens:  # What it grows by is empty until then.
            budget = climb.grown_from
        blocks = held.blocks[: budget // self._block_slots]
        if len(blocks) > pool.get_num_free_blocks():
            return None
        copy = pool.get_new_blocks(len(blocks))
        pairs = zip(blocks, copy, strict=True)
        self._copies.extend((old.block_id, new.block_id) for old, new in pairs)
        return held._replace(blocks=copy)

    def tokens_continued(self, request_id: str) -> int:
        """Tokens that the request has not read, as another had."""
        reading = self._reading.get(request_id)
        return reading.start if reading else 0

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied before the step that is scheduled, from and to."""
        copies, self._copies = self._copies, []
        return copies

    def prefill_end(self, request_id: str) -> int:
        """Tokens that the request computes densely."""
        return self._prefill_end[request_id]

    def prefill_ends(self, request_ids: Iterable[str]) -> list[int]:
        """`prefill_end` of each."""
        return [*map(self._prefill_end.__getitem__, request_ids)]

    def first_queries(self, request_ids: Iterable[str]) -> list[int]:
        """Position of the first query that scores, of each; see `RowPlan`."""
        return [*map(self._first_query.__getitem__, request_ids)]

    def chunk_end(self, request_id: str, num_computed: int) -> int:
        """Where a step has to end at the latest that begins at a position."""
        end = self._prefill_end[request_id]
        if request_id not in self._readers or num_computed >= end:
            return sys.maxsize
        return self._span(request_id, num_computed).end

    def _span(self, request_id: str, position: int) -> ChunkSpan:
        """The chunk that a position is in; of what comes later, the prompt's last.

        One ends where the budget grows, too: what is held then is laid out anew.
        """
        end = self._prefill_end[request_id]
        position = min(position, end - 1)
        chunk = self._reading[request_id].span(position, end)
        climb = self._climb[request_id].at(position + 1)
        # That which decodes may have grown since.
        grown_at = climb.grown_at if climb.grown_at <= position else climb.grown_before
        return ChunkSpan(max(chunk.start, grown_at), min(chunk.end, climb.serves))

    def put_chunks(self, plan: ResidencyPlan, request_ids: Sequence[str]) -> None:
        """Write into a step's plan which chunk of its prompt each request is in."""
        if not self._readers:
            return
        for i, request_id in enumerate(request_ids):
            if request_id not in self._readers:
                continue
            reading, end = self._reading[request_id], self._prefill_end[request_id]
            computed = int(plan.num_computed_tokens[i])
            span = self._span(request_id, computed)
            scored = [first_observer(self.policy, n, reading.window) for n in span]
            if span.start == reading.start:
                scored[0] = reading.scored_from
            plan.prefill_ends[i], plan.chunk_starts[i] = span.end, span.start
            plan.scored_from[i], plan.first_queries[i] = scored
            if computed >= end:  # It decodes: its last chunk's numbers are its own.
                self._first_query[request_id] = scored[1]
                self._readers.remove(request_id)

    def budgets(self, request_ids: Iterable[str]) -> list[int]:
        """Slots of a KV head on average, of each."""
        return [*map(self._budget.__getitem__, request_ids)]

    def growths(self, request_ids: Sequence[str]) -> list[list[int]]:
        """`RowPlan`'s `grown_at` to `length_class`, of each.

        Nothing where all would be 0.
        """
        if not self._growth:
            return []
        grown = [self._growth.get(name, _NEVER_GROWN) for name in request_ids]
        return [*map(list, zip(*grown, strict=True))]

    def stays_dense(self, request_id: str) -> bool:
        """Whether the request keeps its dense blocks.

        It does if it can not outgrow its budget, is never decoded, or asks for it.
        """
        return self._first_query[request_id] >= self._prefill_end[request_id]

    def tokens_held(self, request_id: str, num_tokens: int) -> int:
        """Tokens of a sequence of `num_tokens` that a KV head holds on average."""
        end = self._prefill_end[request_id]
        if num_tokens < end and request_id in self._reading:
            start = self._span(request_id, num_tokens).start
            return self._held(request_id, start) + num_tokens - start
        if num_tokens < end or self.stays_dense(request_id):
            return num_tokens
        if self._layout.whole_blocks:
            return self._layout.resident_tokens(num_tokens)
        return self._held(request_id, num_tokens)

    def _held(self, request_id: str, num_tokens: int) -> int:
        """The same of a resident request that has been compressed to its budget."""
        climb = self._climb[request_id]
        # A step in flight may let it grow behind these tokens.
        end = max(num_tokens, climb.grown_at)
        return min(place_of(end, climb.grown_at, climb.grown_from), climb.budget)

    def replay_boundary(self, request_id: str) -> int:
        """Tokens from which a repeat of the prompt can resume; 0: where stock's can."""
        reads_on = request_id in self._reading
        if self.stays_dense(request_id) or self.policy.gated or reads_on:
            return 0
        return self._first_query[request_id] // self.block_size * self.block_size

    def _required(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """Dense and resident blocks that `num_tokens` tokens need."""
        end = self._prefill_end[request_id]
        if self.stays_dense(request_id):
            assert num_tokens <= max(self._budget[request_id], end)
            return cdiv(num_tokens, self.block_size), 0
        if reading := self._reading.get(request_id):
            end = reading.chunk
        dense = cdiv(min(num_tokens, end), self.block_size)
        resident = 0
        if reading and reading.start:
            dense, end = self._dense_blocks(request_id), 0
        if num_tokens >= end:
            climb = self._climb[request_id].at(num_tokens)
            held = climb.budget if climb.grown_at else min(num_tokens, climb.budget)
            resident = cdiv(held, self._block_slots)
        return dense, resident

    def _missing(
        self, request_id: str, num_tokens: int, num_hit_blocks: int = 0
    ) -> tuple[int, int]:
        """Dense and resident blocks still to allocate for `num_tokens`."""
        dense, resident = self._required(request_id, num_tokens)
        held = len(self.req_to_blocks.get(request_id, ())) + num_hit_blocks
        if held > self.dense_columns:
            return 0, max(resident - (held - self.dense_columns), 0)
        return max(dense - held, 0), resident

    def _tokens_served(self, request_id: str) -> int:
        """Tokens that the blocks held are enough for."""
        held = len(self.req_to_blocks[request_id])
        resident = held - self.dense_columns
        if self.stays_dense(request_id):
            return held * self.block_size
        if resident <= 0:
            reading = self._reading.get(request_id)
            end = reading.chunk if reading else self._prefill_end[request_id]
            return min(held * self.block_size, end - 1)
        tokens = resident * self._block_slots
        climb = self._climb[request_id]
        return tokens if tokens < climb.budget else climb.serves

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
        if num_tokens <= self._served.get(request_id, 0):
            return 0
        missing = self._missing(request_id, num_tokens, len(new_computed_blocks))
        return sum(missing) + self._get_num_evictable_blocks(new_computed_blocks)

    # -------------------------------------------------------------- allocating

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Append what `num_tokens` need; in the transition step pad and go on."""
        if num_tokens <= self._served.get(request_id, 0):
            return []
        dense, resident = self._missing(request_id, num_tokens)
        self._grow(request_id, num_tokens)
        blocks = self.req_to_blocks[request_id]
        start, first = len(blocks), self._first_column(request_id)
        if request_id not in self._served:
            self._num_dense += self.stays_dense(request_id)
            blocks.extend([self._null_block] * first)
        blocks.extend(dense_blocks := self._new_blocks(dense))
        if self._record_new_block_ids:  # to be cleared; of residents no kernel reads
            self.new_block_ids.extend(block.block_id for block in dense_blocks)
        if resident:
            self.resident_blocks += resident
            if len(blocks) <= self.dense_columns:
                self._num_resident += 1
                self._releasing.add(request_id)
            padding = max(self.dense_columns - len(blocks), 0)
            in_turn = request_id in self._reading
            named = blocks[first:] if in_turn and padding else [self._null_block]
            blocks.extend(islice(cycle(named), padding))
            blocks.extend(residents := self._new_blocks(resident))
            if request_id in self._sources:
                self._copy(self._sources.pop(request_id), residents)
                self.continued_tokens += self.tokens_continued(request_id)
        self._served[request_id] = self._tokens_served(request_id)
        return blocks[start:]

    def _copy(self, held: list[KVCacheBlock], mine: list[KVCacheBlock]) -> None:
        """Let the step that is scheduled begin with a copy of what is kept.

        It may have just been given away: nothing is written to it before that.
        """
        # Where the budget grows, there are more of its own.
        pairs = zip(held, mine[: len(held)], strict=True)
        self._copies.extend((old.block_id, new.block_id) for old, new in pairs)
        if all(block.block_hash is not None for block in held):
            # As after a hit of vLLM's, the last to be given away.
            self.block_pool.touch(held)
            self.block_pool.free_blocks(reversed(held))

    def _grow(self, request_id: str, num_tokens: int) -> None:
        """Note it where a request outgrows its budget.

        It gets all blocks of the next one at once.
        """
        if self.stays_dense(request_id):
            return
        climb = self._climb[request_id].at(num_tokens)
        if climb is not self._climb[request_id]:
            reads, grown_at = request_id in self._readers, climb.grown_at
            assert reads or num_tokens == grown_at + 1, "a request grows token by token"
            self._stand(request_id, climb)

    def _stand(self, request_id: str, climb: Climb) -> None:
        """Note which budget a request has from now on."""
        self._climb[request_id], self._budget[request_id] = climb, climb.budget
        self._growth.pop(request_id, None)
        if climb.grown_at or climb.is_fixed or climb.length_class:
            self._growth[request_id] = (
                climb.grown_at, climb.grown_from, climb.grown_before, climb.is_fixed,
                climb.length_class,
            )  # fmt: skip

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
        if request_id not in self._releasing:
            return
        end = self._prefill_end[request_id]
        if processed_computed_tokens < end:
            return
        self._releasing.remove(request_id)
        self._name_once(request_id)
        first, count = self._first_column(request_id), self._dense_blocks(request_id)
        self._remove_blocks_in_range(request_id, first, first + count)
        self.blocks_freed += count

    def _first_column(self, request_id: str) -> int:
        """Column of the first token that the request reads."""
        return self.tokens_continued(request_id) // self.block_size

    def _dense_blocks(self, request_id: str) -> int:
        """Dense blocks of a request that is resident, or becomes so: from the column of
        the first token that it reads on."""
        end, reading = self._prefill_end[request_id], self._reading.get(request_id)
        if reading:
            end = min(reading.start + reading.chunk, end)
        return cdiv(end, self.block_size) - self._first_column(request_id)

    def _name_once(self, request_id: str) -> None:
        """Name each dense block in one column, before they are freed."""
        if request_id not in self._reading or not self.is_resident(request_id):
            return
        blocks, first = self.req_to_blocks[request_id], self._first_column(request_id)
        first += self._dense_blocks(request_id)
        count = self.dense_columns - first
        blocks[first : self.dense_columns] = [self._null_block] * count

    def is_resident(self, request_id: str) -> bool:
        """Whether the request's transition step has been scheduled."""
        return len(self.req_to_blocks.get(request_id, ())) > self.dense_columns

    def requests_by_state(self) -> tuple[int, int, int]:
        """Requests that hold blocks: resident, still reading, staying dense."""
        in_chunks = sum(name in self._releasing for name in self._reading)
        resident, dense = self._num_resident - in_chunks, self._num_dense
        return resident, len(self._served) - resident - dense, dense

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Drop the request's state with its blocks."""
        self._name_once(request_id)
        if self.is_resident(request_id):
            self._num_resident -= 1
            held = len(self.req_to_blocks[request_id])
            self.resident_blocks -= held - self.dense_columns
        elif request_id in self._served:
            self._num_dense -= self.stays_dense(request_id)
        self._prefill_end.pop(request_id, None)
        self._first_query.pop(request_id, None)
        self._budget.pop(request_id, None)
        self._climb.pop(request_id, None)
        self._growth.pop(request_id, None)
        self._forget_reading(request_id)
        self._served.pop(request_id, None)
        self._releasing.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def _forget_reading(self, request_id: str) -> None:
        self._reading.pop(request_id, None)
        self._sources.pop(request_id, None)
        self._readers.discard(request_id)

    # ---------------------------------------------------------- prefix caching

    def tokens_to_publish(self, request_id: str, num_tokens: int) -> int:
        """How many of `num_tokens` tokens have seen all tokens before them."""
        if self.stays_dense(request_id):
            return num_tokens
        if request_id in self._reading:
            return 0
        return min(num_tokens, self._prefill_end[request_id])

    def cache_blocks(self, request: Request, num_tokens: int, *args, **kwargs) -> None:
        """Publish prompt blocks only, where what comes later saw a compressed past."""
        request_id = request.request_id
        num_tokens = self.tokens_to_publish(request_id, num_tokens)
        cached = self.num_cached_block.get(request_id, 0)
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

    # --------------------------------------------------------------- integrity

    def owned(self, request_id: str) -> list[KVCacheBlock]:
        """A request's blocks, each once."""
        blocks = self.req_to_blocks[request_id]
        if request_id not in self._reading or not self.is_resident(request_id):
            return blocks
        last = self._first_column(request_id) + self._dense_blocks(request_id)
        return blocks[:last] + blocks[self.dense_columns :]

    def check_counts(self) -> None:
        """Assert that what is counted step by step is what the rows say."""
        held = [name for name, blocks in self.req_to_blocks.items() if blocks]
        assert set(held) == set(self._served)
        resident = [name for name in held if self.is_resident(name)]
        dense, null = sum(map(self.stays_dense, held)), self._null_block
        in_chunks = [
            name
            for name in resident
            if name in self._reading
            and self.req_to_blocks[name][self._first_column(name)] is not null
        ]
        count = len(resident) - len(in_chunks)
        reading = len(held) - count - dense
        assert self.requests_by_state() == (count, reading, dense)
        rows = [self.req_to_blocks[name][self.dense_columns :] for name in resident]
        assert self.resident_blocks == sum(map(len, rows))

    def check_request(self, request_id: str) -> None:
        """Assert that a request's row has the shape that its counts imply."""
        blocks = self.req_to_blocks[request_id]
        end, budget = self._prefill_end[request_id], self._budget[request_id]
        dense, null = self._dense_blocks(request_id), self._null_block
        assert self._served.get(request_id, 0) <= self._tokens_served(request_id)
        first = self._first_column(request_id)
        assert blocks[:first] == [null] * first
        blocks = blocks[first:]
        holds_dense = self.is_resident(request_id) and blocks[0] is not null
        assert (request_id in self._releasing) == holds_dense
        if not self.is_resident(request_id):
            if self.stays_dense(request_id):
                dense = cdiv(max(budget, end), self.block_size)
            assert len(blocks) <= dense
            assert null not in blocks
            return
        columns = self.dense_columns - first
        prompt, padding, resident = (
            blocks[:dense],
            blocks[dense:columns],
            blocks[columns:],
        )
        assert all(b is null for b in prompt) or null not in prompt
        named = [null]
        if holds_dense and request_id in self._reading:
            named = prompt
            assert all(b.ref_cnt == 1 and b.block_hash is None for b in prompt)
        assert padding == [*islice(cycle(named), len(padding))]
        assert 0 < len(resident) <= budget // self._block_slots
        for block in resident:
            assert block.ref_cnt == 1, f"resident block {block} is shared"
            assert block.block_hash is None, f"resident block {block} is published"


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
        num_tokens = h2o.tokens_to_publish(name, num_tokens)
        boundaries = [*replay_boundaries, h2o.replay_boundary(name)]
        stock(request, num_tokens, *args, replay_boundaries=boundaries, **kwargs)

    manager.cache_blocks = cache_blocks  # type: ignore[method-assign]


def check_integrity(managers: Iterable[SingleTypeKVCacheManager]) -> None:
    """Assert that every block of a pool is free, null, or owned as counted.

    Args:
        managers: All managers of one block pool.
    """
    managers = tuple(managers)
    pool, null = managers[0].block_pool, managers[0].block_pool.null_block
    owners: Counter[int] = Counter()
    for manager in managers:
        if isinstance(manager, H2OManager):
            manager.check_counts()
        for request_id, blocks in manager.req_to_blocks.items():
            owned = blocks
            if isinstance(manager, H2OManager):
                owned = manager.owned(request_id)
            owners.update(b.block_id for b in owned if b is not null)
            if isinstance(manager, H2OManager) and blocks:
                manager.check_request(request_id)
    free = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()}
    assert len(free) == pool.get_num_free_blocks()
    for block in pool.blocks:
        if block is null:
            continue
        count = owners.get(block.block_id, 0)
        assert block.ref_cnt == count, f"{block} has {count} owners"
        assert (block.block_id in free) == (count == 0), f"{block} is lost or reused"
