"""What H2O did: counters of the scheduler, in requests, tokens and blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_h2o.core.plan import RowPlan
from vllm_h2o.policy.layout import SlotLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_h2o.core.manager import H2OManager


@dataclass
class H2OStats:
    """Counters since the engine started.

    Attributes:
        transitions: Prompts compressed (again after a preemption).
        tokens_evicted: Tokens of sequences no longer held, per layer and head.
        blocks_freed: Dense blocks released by transitions.
        blocks_in_use: Blocks of the pool held by requests, at the last step.
        peak_blocks_in_use: The highest of these.
        preemptions: Requests preempted.
    """

    transitions: int = 0
    tokens_evicted: int = 0
    blocks_freed: int = 0
    blocks_in_use: int = 0
    peak_blocks_in_use: int = 0
    preemptions: int = 0

    def count_step(
        self,
        rows: Iterable[RowPlan],
        managers: Sequence[H2OManager],
        layout: SlotLayout,
        output: SchedulerOutput,
    ) -> None:
        """Add what a scheduled step does."""
        for row in rows:
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if row.is_transition:
                self.transitions += 1
                self.tokens_evicted += end - layout.resident_tokens(end)
            elif row.is_resident and end > layout.budget:
                held = layout.resident_tokens(end)
                before = layout.resident_tokens(row.num_computed_tokens)
                self.tokens_evicted += row.num_scheduled_tokens - (held - before)
        pool = managers[0].block_pool
        self.blocks_freed = sum(manager.blocks_freed for manager in managers)
        self.blocks_in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, self.blocks_in_use)
        self.preemptions += len(output.preempted_req_ids or ())

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_dict().items())
