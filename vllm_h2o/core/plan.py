"""What the scheduler tells the workers about a step, beside the block ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class RowPlan(NamedTuple):
    """One scheduled request in one step; all counts in tokens.

    The step's plan alone says where a request is: no earlier step is remembered.

    Attributes:
        num_computed_tokens: Tokens computed before this step.
        num_scheduled_tokens: Tokens of this step.
        prefill_end: Tokens that are computed densely: all, if the request asks for it.
            Of a prompt that is read in chunks, where the chunk ends.
        first_query: Position of the first query that scores; the budget or
            `prefill_end` if none has to, because the request ends within that.
        budget: Slots of a KV head on average.
        grown_at: Tokens of the sequence when its budget last grew, in the step that
            computes the next one; 0: it never has.
        grown_from: The budget that it then had.
        grown_before: Tokens of the sequence when that had grown; 0: it had not.
        is_fixed: Whether the request has asked for this budget, in tokens; else it
            is on the engine's ladder.
        length_class: See `Climb`.
        chunk_start: Tokens of the sequence when it was last compressed, where its
            prompt goes on beside what is held of them; 0: it is read densely.
        scored_from: Position of the first query that has scored what is then held.
    """

    num_computed_tokens: int
    num_scheduled_tokens: int
    prefill_end: int
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
        return self.first_query >= self.prefill_end

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
        return self.num_computed_tokens >= self.prefill_end

    @property
    def is_transition(self) -> bool:
        """Computes the last token of its prompt in this step, and is compressed."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        ends = not self.decodes and end >= self.prefill_end
        return ends and not self.stays_dense


NUM_COUNTS = len(RowPlan._fields)


@dataclass(eq=False)
class ResidencyPlan:
    """The scheduled requests of a step, and the counters up to this step.

    It travels in every step and is read by row, hence one array: 256 `RowPlan` take
    ten times as long to pickle, and lists would have to become arrays in every worker.

    Attributes:
        request_ids: The scheduled requests.
        counts: `[12, num_requests]` int64, the fields of `RowPlan` by request.
        stats: The counters by name.
        restarted: Requests whose prompt is going to be read again, though they neither
            finished nor were preempted: sessions that got their next turn.
        kept: Requests, or turns of sessions, that have ended since the last step, and
            that others may go on from.
        copies: Blocks to be copied before the step, from and to: what a request goes
            on from, or what stays of one whose prompt has been read.
    """

    request_ids: list[str] = field(default_factory=list)
    counts: np.ndarray = field(
        default_factory=lambda: np.empty((NUM_COUNTS, 0), np.int64)
    )
    stats: dict[str, int] = field(default_factory=dict)
    restarted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: what pickle needs to make an array takes longer than the rest.
        counts = bytearray(self.counts)
        others = self.stats, self.restarted, self.kept, self.copies
        return _unpickled, (self.request_ids, counts, *others)

    @property
    def num_computed_tokens(self) -> np.ndarray:
        """`[num_requests]` int64, as are the others; see `RowPlan`."""
        return self.counts[0]

    @property
    def num_scheduled_tokens(self) -> np.ndarray:
        """`[num_requests]` tokens of this step."""
        return self.counts[1]

    @property
    def prefill_ends(self) -> np.ndarray:
        """`[num_requests]` tokens that are computed densely."""
        return self.counts[2]

    @property
    def first_queries(self) -> np.ndarray:
        """`[num_requests]` position of the first query that scores."""
        return self.counts[3]

    @property
    def budgets(self) -> np.ndarray:
        """`[num_requests]` slots of a KV head on average."""
        return self.counts[4]

    @property
    def grown_at(self) -> np.ndarray:
        """`[num_requests]` tokens when the budget last grew."""
        return self.counts[5]

    @property
    def grown_from(self) -> np.ndarray:
        """`[num_requests]` the budgets that had grown then."""
        return self.counts[6]

    @property
    def is_fixed(self) -> np.ndarray:
        """`[num_requests]` 0 or 1, see `RowPlan`."""
        return self.counts[8]

    @property
    def length_classes(self) -> np.ndarray:
        """`[num_requests]` for which lengths budgets are split, see `Climb`."""
        return self.counts[9]

    @property
    def chunk_starts(self) -> np.ndarray:
        """`[num_requests]` tokens of each when last compressed, see `RowPlan`."""
        return self.counts[10]

    @property
    def scored_from(self) -> np.ndarray:
        """`[num_requests]` position of the first query that had scored it."""
        return self.counts[11]

    @property
    def decodes(self) -> np.ndarray:
        """`[num_requests]` bool, see `RowPlan`."""
        return self.num_computed_tokens >= self.prefill_ends

    @property
    def stay_dense(self) -> np.ndarray:
        """`[num_requests]` bool, of those that decode: no query has scored."""
        return self.decodes & (self.num_computed_tokens < self.first_queries)

    def row(self, i: int) -> RowPlan:
        """The counts of one request."""
        return RowPlan(*self.counts[:, i].tolist())

    @property
    def rows(self) -> dict[str, RowPlan]:
        """The same by request id."""
        return {name: self.row(i) for i, name in enumerate(self.request_ids)}

    def ordered(self, request_ids: list[str]) -> ResidencyPlan:
        """The plan of these requests, in this order."""
        if request_ids == self.request_ids:
            return self
        place = {name: i for i, name in enumerate(self.request_ids)}
        return self.select([place[name] for name in request_ids])

    def select(self, chosen: list[int]) -> ResidencyPlan:
        """The plan of the chosen requests, by their index."""
        request_ids = [self.request_ids[i] for i in chosen]
        return ResidencyPlan(request_ids, self.counts[:, chosen], self.stats)


def _unpickled(
    request_ids: list[str],
    counts: bytearray,
    stats: dict[str, int],
    restarted: list[str],
    kept: list[str],
    copies: list[tuple[int, int]],
) -> ResidencyPlan:
    array = np.frombuffer(counts, np.int64).reshape(NUM_COUNTS, -1)
    return ResidencyPlan(request_ids, array, stats, restarted, kept, copies)


PLAN_ATTRIBUTE = "h2o_plan"
"""Where the plan hangs on vLLM's `SchedulerOutput`."""
