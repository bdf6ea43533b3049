"""What H2O did: counters of the scheduler, in requests, tokens and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.policy.layout import SlotLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_h2o.core.manager import H2OManager


@dataclass
class H2OStats:
    """Counters since the engine started.

    Attributes:
        transitions: Prompts compressed (again after a preemption), or chunks of them.
        tokens_evicted: Tokens of sequences no longer held, per layer and head.
        blocks_freed: Dense blocks released by transitions.
        blocks_in_use: Blocks of the pool held by requests, when last counted.
        peak_blocks_in_use: The highest of these at a step.
        preemptions: Requests preempted.
        kept_requests: Requests, or turns of sessions, of which something was kept.
        continued_requests: Requests that went on from that (again after a preemption).
        continued_tokens: Tokens that these have not read.
        saved_requests: Of the former those that were to be written to a file.
        loaded_requests: Of the latter those that went on from a file.
        failed_loads: Files that were not what they should be.
    """

    transitions: int = 0
    tokens_evicted: int = 0
    blocks_freed: int = 0
    blocks_in_use: int = 0
    peak_blocks_in_use: int = 0
    preemptions: int = 0
    kept_requests: int = 0
    continued_requests: int = 0
    continued_tokens: int = 0
    saved_requests: int = 0
    loaded_requests: int = 0
    failed_loads: int = 0

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
            layout: The slots of a request that asks for no budget of its own.
            output: The scheduled step.
        """
        self._count_evictions(plan, layout)
        self.blocks_freed = sum(manager.blocks_freed for manager in managers)
        self.count_blocks(managers)
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, self.blocks_in_use)
        self.continued_requests = managers[0].continued_requests
        self.continued_tokens = managers[0].continued_tokens
        self.loaded_requests = managers[0].loaded_requests
        self.preemptions += len(output.preempted_req_ids or ())

    def count_blocks(self, managers: Sequence[H2OManager]) -> None:
        """Count the blocks that requests hold now."""
        pool = managers[0].block_pool
        self.blocks_in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def _count_evictions(self, plan: ResidencyPlan, layout: SlotLayout) -> None:
        tokens_held, ends = layout.resident_tokens, plan.chunk_ends
        budgets = plan.budgets
        computed, scheduled = plan.num_computed_tokens, plan.num_scheduled_tokens
        compressed = plan.first_queries < ends  # else it stays dense
        # See `policy.layout.place_of`.
        shifts = plan.grown_at - np.minimum(plan.grown_at, plan.grown_from)
        places = computed - shifts
        decodes = compressed & plan.decodes
        evicted = places + scheduled - np.maximum(places, budgets)
        self.tokens_evicted += int(np.maximum(evicted, 0)[decodes].sum())
        evicting = decodes & (places >= budgets)
        if layout.whole_blocks:
            for before in computed[evicting].tolist():
                self.tokens_evicted -= tokens_held(before + 1) - tokens_held(before)
        ending = compressed & ~plan.decodes & (computed + scheduled >= ends)
        self.transitions += int(np.count_nonzero(ending))
        held = np.minimum(plan.chunk_starts - shifts, budgets)
        new = ends - plan.chunk_starts
        self.tokens_evicted += int(np.maximum(held + new - budgets, 0)[ending].sum())
        if layout.whole_blocks:  # then every request has the engine's budget
            for end in ends[ending].tolist():
                self.tokens_evicted += min(end, layout.budget) - tokens_held(end)

    def take_back(
        self, plan: ResidencyPlan, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> None:
        """Count the drafts of a step that were refused as not computed.

        Args:
            plan: Of the step, which has been counted.
            output: The scheduled step.
            result: What it has given: of each request one token more than it accepted.
        """
        sampled = result.sampled_token_ids
        places = {name: i for i, name in enumerate(plan.request_ids)}
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            row = plan.row(places[name])
            if not row.decodes or row.stays_dense:
                continue
            refused = len(drafts) + 1 - len(sampled[result.req_id_to_index[name]])
            shift = row.grown_at - min(row.grown_at, row.grown_from)
            place = row.num_computed_tokens + row.num_scheduled_tokens - shift
            self.tokens_evicted -= max(0, place - max(place - refused, row.budget))

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return vars(self).copy()

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_dict().items())
