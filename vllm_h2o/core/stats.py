"""What H2O did: counters of the scheduler, in requests, tokens and blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_h2o.core.plan import ResidencyPlan
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
        plan: ResidencyPlan,
        managers: Sequence[H2OManager],
        layout: SlotLayout,
        output: SchedulerOutput,
    ) -> None:
        """Add what a scheduled step does.

        Args:
            plan: The step's plan; its counters may be those of the last step.
            managers: The managers of the compressed layers, one block pool.
            layout: The slots of a request.
            output: The scheduled step.
        """
        self._count_evictions(plan, layout)
        pool = managers[0].block_pool
        self.blocks_freed = sum(manager.blocks_freed for manager in managers)
        self.blocks_in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, self.blocks_in_use)
        self.preemptions += len(output.preempted_req_ids or ())

    def _count_evictions(self, plan: ResidencyPlan, layout: SlotLayout) -> None:
        held = layout.resident_tokens
        for computed, scheduled, end, first_query in zip(
            plan.num_computed_tokens,
            plan.num_scheduled_tokens,
            plan.prefill_ends,
            plan.first_queries,
            strict=True,
        ):
            if first_query >= end:
                continue  # kept whole
            if computed >= end:
                if computed >= layout.budget:
                    self.tokens_evicted += scheduled
                    if layout.whole_blocks:
                        grown = held(computed + scheduled) - held(computed)
                        self.tokens_evicted -= grown
            elif computed + scheduled >= end:
                self.transitions += 1
                self.tokens_evicted += end - held(end)

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_dict().items())
