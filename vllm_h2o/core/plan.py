"""What the scheduler tells the workers about a step, beside the block ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class RowPlan(NamedTuple):
    """One scheduled request in one step; all counts in tokens.

    The step's plan alone determines the state: nothing is remembered.
    """

    num_computed_tokens: int
    num_scheduled_tokens: int
    prefill_end: int

    @property
    def is_resident(self) -> bool:
        """Decodes over its resident blocks."""
        return self.num_computed_tokens >= self.prefill_end

    @property
    def is_transition(self) -> bool:
        """Computes the last token of its prompt in this step."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return not self.is_resident and end >= self.prefill_end


@dataclass
class ResidencyPlan:
    """The rows of a step by request id, and the counters up to this step."""

    rows: dict[str, RowPlan] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)


PLAN_ATTRIBUTE = "h2o_plan"
"""Where the plan hangs on vLLM's `SchedulerOutput`."""
