"""What the scheduler tells the workers about a step, beside the block ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class RowPlan(NamedTuple):
    """One scheduled request in one step; all counts in tokens.

    The step's plan alone determines the state: nothing is remembered.

    Attributes:
        num_computed_tokens: Tokens computed before this step.
        num_scheduled_tokens: Tokens of this step.
        prefill_end: Tokens that are computed densely.
        first_query: Position of the first query that scores; the budget or the end
            of the prompt if none has to, because the request ends within that.
    """

    num_computed_tokens: int
    num_scheduled_tokens: int
    prefill_end: int
    first_query: int

    @property
    def is_kept_whole(self) -> bool:
        """Can not outgrow its budget, or never decodes: its blocks stay as they are."""
        return self.first_query >= self.prefill_end

    @property
    def mostly_scores(self) -> bool:
        """Whether at least half of this step's queries score."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        scoring = end - max(self.num_computed_tokens, self.first_query)
        return 2 * scoring >= self.num_scheduled_tokens

    @property
    def decodes(self) -> bool:
        """Whether the prompt has been read: the decode kernels take the row."""
        return self.num_computed_tokens >= self.prefill_end

    @property
    def is_transition(self) -> bool:
        """Computes the last token of its prompt in this step, and is compressed."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        ends = not self.decodes and end >= self.prefill_end
        return ends and not self.is_kept_whole


@dataclass
class ResidencyPlan:
    """The scheduled requests of a step, and the counters up to this step.

    It travels in every step, hence lists of plain numbers: 256 `RowPlan` take ten
    times as long to pickle.

    Attributes:
        request_ids: The scheduled requests; the next four are in their order, see
            `RowPlan`.
        num_computed_tokens: By request.
        num_scheduled_tokens: By request.
        prefill_ends: By request.
        first_queries: By request.
        stats: The counters by name.
    """

    request_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    prefill_ends: list[int] = field(default_factory=list)
    first_queries: list[int] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, RowPlan]:
        """The same by request id."""
        counts = zip(
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            self.prefill_ends,
            self.first_queries,
            strict=True,
        )
        rows = map(RowPlan._make, counts)
        return dict(zip(self.request_ids, rows, strict=True))

    @property
    def all_decode(self) -> bool:
        """Whether every request decodes."""
        counts = zip(self.num_computed_tokens, self.prefill_ends, strict=True)
        return all(computed >= end for computed, end in counts)


PLAN_ATTRIBUTE = "h2o_plan"
"""Where the plan hangs on vLLM's `SchedulerOutput`."""
