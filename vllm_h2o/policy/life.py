"""A request's life as counts: what it reads densely, what it holds, and when.

Pure arithmetic on token counts; nobody here knows a block, a tensor or a score.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_h2o.policy.chunks import ChunkSpan, chunk_at, chunk_tokens
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Climb
from vllm_h2o.policy.layout import SlotLayout, first_observer, place_of
from vllm_h2o.policy.presets import FULL
from vllm_h2o.policy.reach import Reach
from vllm_h2o.policy.request import DEFAULTS, RequestOptions


class RowPlan(NamedTuple):
    """One scheduled request in one step; all counts in tokens.

    The step's plan alone says where a request is: no earlier step is remembered. A
    prompt that is read whole is one chunk.

    Attributes:
        num_computed_tokens: Tokens computed before this step.
        num_scheduled_tokens: Tokens of this step.
        chunk_end: Where the chunk ends, after which the request is compressed; all
            tokens, if the request asks for it.
        first_query: Position of the first query that scores; the budget or `chunk_end`
            if none has to, because the request ends within that.
        budget: Slots of a KV head on average.
        grown_at: Tokens of the sequence when its budget last grew, in the step that
            computes the next one; 0: it never has.
        grown_from: The budget that it then had.
        grown_before: Tokens of the sequence when that had grown; 0: it had not.
        is_fixed: Whether the request has asked for this budget, see `Climb`; else it
            is on the engine's ladder.
        length_class: See `Climb`.
        chunk_start: Tokens of the sequence when it was last compressed, where its
            prompt goes on beside what is held of them; 0: it is read densely.
        scored_from: Position of the first query that has scored what is then held.
    """

    num_computed_tokens: int
    num_scheduled_tokens: int
    chunk_end: int
    first_query: int
    budget: int
    grown_at: int = 0
    grown_from: int = 0
    grown_before: int = 0
    is_fixed: int = 0
    length_class: int = 0
    chunk_start: int = 0
    scored_from: int = 0

    @property
    def stays_dense(self) -> bool:
        """Can not outgrow its budget, or never decodes: its blocks stay as they are."""
        return self.first_query >= self.chunk_end

    @property
    def num_scoring(self) -> int:
        """How many of this step's queries score: the last ones."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return max(0, end - max(self.num_computed_tokens, self.first_query))

    @property
    def mostly_scores(self) -> bool:
        """Whether at least half of this step's queries score."""
        return 2 * self.num_scoring >= self.num_scheduled_tokens

    @property
    def decodes(self) -> bool:
        """Whether the prompt has been read: the decode kernels take the row."""
        return self.num_computed_tokens >= self.chunk_end

    @property
    def is_transition(self) -> bool:
        """Computes the last token of its chunk in this step, and is compressed."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        ends = not self.decodes and end >= self.chunk_end
        return ends and not self.stays_dense


class Blocks(NamedTuple):
    """How many blocks of each kind.

    Attributes:
        dense: Of a prompt's tokens, as stock vLLM's.
        resident: Of slots that tokens compete for.
    """

    dense: int
    resident: int


class Terms(NamedTuple):
    """What all lives of an engine share.

    Attributes:
        policy: The engine's.
        block_size: Tokens of a dense block.
        layout: The slots of the longest request, in resident blocks.
        reach: How far back keys may be, where they move; None: they do not.
        most_drafts: Tokens that a step may decode of a request beside the first.
    """

    policy: H2OConfig
    block_size: int
    layout: SlotLayout
    reach: Reach | None = None
    most_drafts: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """Where a request is between its admission and its end, or preemption.

    Attributes:
        terms: What it shares with others.
        options: What the request asks for.
        prefill_end: Tokens known at its admission, which are read as a prompt: after a
            preemption with what was generated before it; all that it can have, if it
            asks to keep all.
        most_tokens: Tokens that steps compute of it at most, and one more.
        first_query: Position of the first query that scores, see `RowPlan`.
        climb: Its budget, and how that has grown.
        chunk: Tokens of a chunk, whole blocks; 0: its prompt is read whole.
        start: Tokens before its first chunk: of a snapshot that it goes on from.
        scored_from: Position of the first query that has scored the snapshot.
        reads_on: Whether tokens of its prompt are still read beside what is held, or
            its first decode step has not been planned yet.
        row: The counts of a step in which it decodes, or reads a prompt whole, but for
            computed and scheduled tokens; see `next_row`.
    """

    terms: Terms
    options: RequestOptions
    prefill_end: int
    most_tokens: int
    first_query: int
    climb: Climb
    chunk: int = 0
    start: int = 0
    scored_from: int = 0
    reads_on: bool = False
    row: RowPlan = field(init=False)

    def __post_init__(self) -> None:
        self._note()

    @classmethod
    def begin(
        cls,
        terms: Terms,
        num_tokens: int,
        most_tokens: int,
        climb: Climb,
        options: RequestOptions = DEFAULTS,
    ) -> Life:
        """Return the life of a request that is about to be admitted.

        Args:
            terms: Of the engine.
            num_tokens: Tokens known now: the prompt, and after a preemption what was
                generated before it.
            most_tokens: Tokens that steps compute of the request at most, with those
                that are in flight when it ends. Within the budget nothing competes,
                and what ends with its first token is not decoded: no query has to
                score.
            climb: The budget that it begins with, and what next.
            options: What it asks for.
        """
        policy, window = terms.policy, options.observation_window
        end, budget = most_tokens if options.is_full else num_tokens, climb.budget
        assert budget <= terms.layout.budget and not budget % terms.layout.block_size
        first_query, chunk = max(budget, end), _chunk_of(terms, options, budget)
        reads_on = 0 < chunk < end and not options.is_full
        if reads_on:
            first_query = first_observer(policy, chunk, window)
        elif most_tokens > max(budget, end + (not options.asks_to_be_kept)):
            first_query = first_observer(policy, end, window)
        chunk *= reads_on
        return cls(
            terms, options, end, most_tokens, first_query, climb, chunk,
            reads_on=reads_on,
        )  # fmt: skip

    def go_on(self, start: int, climb: Climb, scored_from: int) -> None:
        """Go on from a snapshot of another request, in place of the first tokens.

        Args:
            start: Tokens of the snapshot.
            climb: Its budget, which suits this request's.
            scored_from: Position of the first query that has scored it.
        """
        assert start < self.prefill_end
        size = self.terms.block_size
        self.climb = climb.ahead_of(start, self.prefill_end)
        rest = -(-(self.prefill_end - start) // size) * size
        chunk = _chunk_of(self.terms, self.options, self.climb.budget)
        self.chunk, self.start = min(chunk or rest, rest), start
        self.scored_from, self.reads_on = scored_from, True
        self.first_query = self._first_observer(self.span(start).end)
        self._note()

    @property
    def must_run(self) -> int:
        """Position of the first prompt query that no prefix hit may cover."""
        if self.chunk:
            return 0
        # By the gate no query has to run for the scores.
        return self.prefill_end if self.terms.policy.gated else self.first_query

    @property
    def budget(self) -> int:
        """Slots of a KV head on average."""
        return self.row.budget

    @property
    def stays_dense(self) -> bool:
        """Whether the request keeps its dense blocks.

        It does if it can not outgrow its budget, is never decoded, or asks for it.
        """
        return self.first_query >= self.prefill_end

    @property
    def first_column(self) -> int:
        """Column of the dense block of the first token that the request reads."""
        return self.start // self.terms.block_size

    @property
    def dense_blocks(self) -> int:
        """Dense blocks from there on, of a request that is or becomes resident."""
        end = self.prefill_end
        if self.chunk:
            end = min(self.start + self.chunk, end)
        return -(-end // self.terms.block_size) - self.first_column

    def span(self, position: int) -> ChunkSpan:
        """The chunk that a position is in; of what comes later, the prompt's last.

        A chunk ends where the budget grows, too: what is held then is laid out anew.
        """
        end = self.prefill_end
        position = min(position, end - 1)
        chunk = chunk_at(position, self.chunk, end, self.start)
        climb = self.climb.at(position + 1)
        # A request that decodes may have grown after its last chunk.
        grown_at = climb.grown_at if climb.grown_at <= position else climb.grown_before
        return ChunkSpan(max(chunk.start, grown_at), min(chunk.end, climb.serves))

    def step_end(self, num_computed: int) -> int:
        """Where a step has to end at the latest that begins at a position.

        What is laid out anew is so between steps: one begins wherever that is due.
        """
        if num_computed < self.prefill_end:
            end = self.span(num_computed).end if self.reads_on else sys.maxsize
            return min(end, self.prefill_end) if self.terms.most_drafts else end
        if not self.terms.most_drafts:
            return sys.maxsize
        due = [max(self.most_tokens - 1, num_computed + 1)]
        due.append(num_computed + 1 + self.terms.most_drafts)
        if not self.stays_dense:
            # Heads part, the budget grows, keys move.
            climb = self.climb.at(num_computed + 1)
            due += [climb.serves] if climb.grown_at else [climb.budget, climb.serves]
            if (reach := self.terms.reach) is not None:
                due.append(reach.next_move(num_computed))
        return min(end for end in due if end > num_computed)

    def next_row(self, num_computed: int) -> RowPlan:
        """Return the row of the step that is being planned, and note if it decodes.

        Args:
            num_computed: Tokens computed before the step. These and those of the step
                are left 0 in the row.
        """
        if not self.reads_on:
            return self.row
        span = self.span(num_computed)
        scored_from, first_query = map(self._first_observer, span)
        if span.start == self.start:
            scored_from = self.scored_from
        row = self.row._replace(
            chunk_end=span.end,
            first_query=first_query,
            chunk_start=span.start,
            scored_from=scored_from,
        )
        if num_computed >= self.prefill_end:
            # It decodes: its last chunk's numbers are its own from now on.
            self.reads_on, self.first_query = False, first_query
            self._note()
        return row

    def needs(self, num_tokens: int) -> Blocks:
        """Blocks that so many tokens of the request need."""
        size, end = self.terms.block_size, self.prefill_end
        if self.stays_dense:
            assert num_tokens <= max(self.budget, end)
            return Blocks(-(-num_tokens // size), 0)
        if self.start:
            dense, end = self.dense_blocks, 0
        else:
            end = self.chunk or end
            dense = -(-min(num_tokens, end) // size)
        if num_tokens < end:
            return Blocks(dense, 0)
        climb = self.climb.at(num_tokens)
        held = climb.budget if climb.grown_at else min(num_tokens, climb.budget)
        return Blocks(dense, -(-held // self.terms.layout.block_size))

    def serves(self, held: Blocks) -> int:
        """Tokens of the request that some blocks are enough for.

        Args:
            held: Those that it has; the dense ones count while it is not resident.
        """
        size = self.terms.block_size
        if self.stays_dense:
            return held.dense * size
        if not held.resident:
            return min(held.dense * size, (self.chunk or self.prefill_end) - 1)
        tokens = held.resident * self.terms.layout.block_size
        return tokens if tokens < self.budget else self.climb.serves

    def grow(self, num_tokens: int) -> None:
        """Note the budget that the request has from so many tokens on."""
        if self.stays_dense:
            return
        climb = self.climb.at(num_tokens)
        if climb is not self.climb:
            alone = num_tokens == climb.grown_at + 1 or self.terms.most_drafts
            assert self.reads_on or alone, "a request grows where a step begins"
            self.climb = climb
            self._note()

    def tokens_held(self, num_tokens: int) -> int:
        """Tokens of a sequence of `num_tokens` that a KV head holds on average."""
        end = self.prefill_end
        if num_tokens < end and self.chunk:
            start = self.span(num_tokens).start
            return self._held(start) + num_tokens - start
        if num_tokens < end or self.stays_dense:
            return num_tokens
        if self.terms.layout.whole_blocks:
            return self.terms.layout.resident_tokens(num_tokens)
        return self._held(num_tokens)

    def report(self, num_tokens: int) -> dict[str, Any]:
        """What a request got that has come to so many tokens, for whoever asked."""
        held, full = self.tokens_held(num_tokens), self.options.is_full
        said = {
            "policy": FULL if full else self.terms.policy.policy,
            "budget": None if full else self.budget,
            "tokens_held": held,
            "tokens_evicted": num_tokens - held,
        }
        if self.options.continue_:
            said["tokens_continued"] = self.start
        return said

    def tokens_to_publish(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens have seen all tokens before them."""
        if self.stays_dense:
            return num_tokens
        return 0 if self.chunk else min(num_tokens, self.prefill_end)

    def resumes_at(self) -> int:
        """Tokens from which a repeat of the prompt can resume; 0: where stock's can."""
        if self.stays_dense or self.terms.policy.gated or self.chunk:
            return 0
        size = self.terms.block_size
        return self.first_query // size * size

    def can_be_kept(self, num_tokens: int) -> bool:
        """Whether another request can go on from what this one holds.

        Before a request has filled its first budget its heads still share one layout:
        nothing can go on from that.

        Args:
            num_tokens: Tokens that it has computed.
        """
        has_parted = self.climb.grown_at or num_tokens > self.climb.budget
        return num_tokens >= self.prefill_end and bool(has_parted)

    def all_scored_from(self) -> int:
        """Position of the first query that has scored what is held of the prompt."""
        if self.chunk:
            return self._first_observer(self.prefill_end)
        return self.first_query

    def _held(self, num_tokens: int) -> int:
        """The same of a resident request that has been compressed to its budget."""
        climb = self.climb
        # A step in flight may let it grow behind these tokens.
        end = max(num_tokens, climb.grown_at)
        return min(place_of(end, climb.grown_at, climb.grown_from), climb.budget)

    def _first_observer(self, end: int) -> int:
        return first_observer(self.terms.policy, end, self.options.observation_window)

    def _note(self) -> None:
        """Make the row anew."""
        climb = self.climb
        self.row = RowPlan(
            0, 0, self.prefill_end, self.first_query, climb.budget, climb.grown_at,
            climb.grown_from, climb.grown_before, climb.is_fixed, climb.length_class,
        )  # fmt: skip


def _chunk_of(terms: Terms, options: RequestOptions, budget: int) -> int:
    """Tokens that a request with such a budget reads at once; 0: all."""
    asked, held = options.chunk(terms.policy), terms.policy.slots_per_token
    return chunk_tokens(asked, budget, terms.block_size, held)
