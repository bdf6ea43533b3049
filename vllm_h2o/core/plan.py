"""What the scheduler tells the workers about a step, beside the block ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from vllm_h2o.policy.life import RowPlan

NUM_COUNTS = len(RowPlan._fields)


def _column(name: str) -> property:
    index = RowPlan._fields.index(name)
    return property(
        lambda plan: plan.counts[index],
        doc=f"`[num_requests]` int64, `RowPlan.{name}` of each.",
    )


class Save(NamedTuple):
    """What a request holds, to be written to a file before the step.

    Attributes:
        request_id: Of the request.
        stem: Of the file's path; each rank adds its own part.
        blocks: Their ids.
        about: What they are of, as text.
    """

    request_id: str
    stem: str
    blocks: list[int]
    about: str


class Load(NamedTuple):
    """What a request goes on from, to be read from a file before the step.

    Attributes:
        request_id: Of the request.
        paths: The file of each tensor-parallel rank.
        blocks: Ids of blocks that get it, as many as the file has or more.
    """

    request_id: str
    paths: tuple[str, ...]
    blocks: list[int]


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
        saves: Blocks that go to files before anything is copied or written.
        loads: Files that go to blocks before the step.
    """

    request_ids: list[str] = field(default_factory=list)
    counts: np.ndarray = field(
        default_factory=lambda: np.empty((NUM_COUNTS, 0), np.int64)
    )
    stats: dict[str, int] = field(default_factory=dict)
    restarted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: what pickle needs to make an array takes longer than the rest.
        counts = bytearray(self.counts)
        others = self.stats, self.restarted, self.kept, self.copies
        files = self.saves, self.loads
        return _unpickled, (self.request_ids, counts, *others, *files)

    num_computed_tokens = _column("num_computed_tokens")
    num_scheduled_tokens = _column("num_scheduled_tokens")
    chunk_ends = _column("chunk_end")
    first_queries = _column("first_query")
    budgets = _column("budget")
    grown_at = _column("grown_at")
    grown_from = _column("grown_from")
    is_fixed = _column("is_fixed")
    length_classes = _column("length_class")
    chunk_starts = _column("chunk_start")
    scored_from = _column("scored_from")

    @property
    def decodes(self) -> np.ndarray:
        """`[num_requests]` bool, see `RowPlan`."""
        return self.num_computed_tokens >= self.chunk_ends

    @property
    def stay_dense(self) -> np.ndarray:
        """`[num_requests]` bool, of those that decode: no query has scored."""
        return self.decodes & (self.num_computed_tokens < self.first_queries)

    @classmethod
    def of_rows(
        cls,
        request_ids: list[str],
        rows: Iterable[RowPlan],
        computed: Sequence[int],
        scheduled: Iterable[int],
    ) -> ResidencyPlan:
        """The plan of rows that lack their computed and scheduled tokens."""
        count = len(request_ids)
        flat = np.fromiter(chain.from_iterable(rows), np.int64, count * NUM_COUNTS)
        plan = cls(request_ids, flat.reshape(count, NUM_COUNTS).T.copy())
        plan.num_computed_tokens[:] = computed
        plan.num_scheduled_tokens[:] = [*scheduled]
        return plan

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
    request_ids: list[str], counts: bytearray, *others: Any
) -> ResidencyPlan:
    array = np.frombuffer(counts, np.int64).reshape(NUM_COUNTS, -1)
    return ResidencyPlan(request_ids, array, *others)


PLAN_ATTRIBUTE = "h2o_plan"
"""Where the plan hangs on vLLM's `SchedulerOutput`."""
