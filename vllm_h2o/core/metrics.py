"""What the scheduler reports of each step, on its way to the front end's loggers.

It rides in vLLM's `SchedulerStats`, of which only declared fields survive the trip
between processes: in `num_kv_fetch_reqs_by_stage`, a dictionary of counts by name. All
of it is in one name, whose count is 0: so a front end without our logger, which adds
those counts up for its log, says nothing that it would not say without us.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_h2o.core.stats import H2OStats

if TYPE_CHECKING:
    from vllm_h2o.core.manager import H2OManager

_PREFIX = "h2o:"


class Kept(NamedTuple):
    """What requests can go on from.

    Attributes:
        kept_snapshots: In the pool.
        kept_blocks: Blocks of these, which are free.
        kept_seconds: Since that of these was used that has not been for longest.
        kept_files: Snapshots in files.
        kept_file_bytes: Of all files of the folder, about.
    """

    kept_snapshots: int = 0
    kept_blocks: int = 0
    kept_seconds: float = 0.0
    kept_files: int = 0
    kept_file_bytes: int = 0


NOTHING_KEPT = Kept()


@dataclass
class StepReport:
    """Increments since the last report, and what is held now.

    Increments, because vLLM gives each report to one front end of possibly several.

    Attributes:
        transitions: Prompts compressed, or chunks of them.
        evicted_tokens: Tokens evicted, per layer and head.
        freed_dense_blocks: Dense blocks released by transitions.
        kept_requests: Requests of which what they held at their end was kept.
        continued_requests: Requests that went on from that.
        continued_tokens: Tokens that these have not read.
        saved_requests: Of the requests of which something was kept those that were to
            be written to a file.
        loaded_requests: Requests that went on from a file.
        failed_loads: Files that were not what they should be.
        kept_snapshots, kept_blocks, kept_seconds, kept_files, kept_file_bytes: What
            requests can go on from, now: see `Kept`.
        dense_blocks: Blocks of the pool in use that are not resident ones, now.
        resident_blocks: Blocks of requests that are resident, now.
        resident: Requests that are, now.
        prefilling: Requests that hold blocks and will be resident, now.
        dense: Requests that stay dense: can not outgrow their budget, or keep all.
        finished: How many requests have finished, by `(evicted, context)` tokens.
        took: How many transitions have taken so many microseconds.
    """

    transitions: int = 0
    evicted_tokens: int = 0
    freed_dense_blocks: int = 0
    kept_requests: int = 0
    continued_requests: int = 0
    continued_tokens: int = 0
    saved_requests: int = 0
    loaded_requests: int = 0
    failed_loads: int = 0
    kept_snapshots: int = 0
    kept_blocks: int = 0
    kept_seconds: float = 0.0
    kept_files: int = 0
    kept_file_bytes: int = 0
    dense_blocks: int = 0
    resident_blocks: int = 0
    resident: int = 0
    prefilling: int = 0
    dense: int = 0
    finished: Counter[tuple[int, int]] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)

    def pack(self) -> dict[str, int]:
        """The report as a name with a count of 0."""
        finished = [[*tokens, count] for tokens, count in self.finished.items()]
        values = vars(self) | {"finished": finished, "took": [*self.took.items()]}
        return {_PREFIX + json.dumps(values): 0}

    @classmethod
    def take(cls, counts: dict[str, int]) -> StepReport | None:
        """Take a report out of counts by name; None: there is none."""
        packed = next((name for name in counts if name.startswith(_PREFIX)), None)
        if packed is None:
            return None
        del counts[packed]
        values = json.loads(packed.removeprefix(_PREFIX))
        finished = {(evicted, all_): n for evicted, all_, n in values.pop("finished")}
        took = Counter(dict(values.pop("took")))
        return cls(**values, finished=Counter(finished), took=took)


SECONDS_ATTRIBUTE = "h2o_transition_seconds"
"""Where what transitions took hangs, a list of seconds."""
FAILED_ATTRIBUTE = "h2o_failed_loads"
"""Where the loads of a step that failed hang, a list of `plan.Load`."""


def attach(output: Any, attribute: str, values: list[Any]) -> Any:
    """Hang something on what a worker returns of a step, now or later.

    Args:
        output: vLLM's `ModelRunnerOutput`, or what that is asked of when it is there.
        attribute: One of the above.
        values: What hangs there then.

    Returns:
        The output to return: another one where it stands for any step's.
    """
    if hasattr(output, "get_output"):
        wait = output.get_output
        output.get_output = lambda: attach(wait(), attribute, values)
        return output
    output = copy.copy(output)
    setattr(output, attribute, values)
    return output


class Reporter:
    """Makes the reports of one scheduler."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._reported = H2OStats()
        self._finished: Counter[tuple[int, int]] = Counter()
        self._took: Counter[int] = Counter()

    def time(self, output: Any) -> None:
        """Note what transitions took, if that hangs on what a worker has returned."""
        for seconds in getattr(output, SECONDS_ATTRIBUTE, ()):
            self._took[round(1e6 * seconds)] += 1

    def finish(self, evicted: int, context: int) -> None:
        """Note a request that has finished, in tokens."""
        self._finished[evicted, context] += 1

    def report(
        self,
        stats: H2OStats,
        managers: Sequence[H2OManager],
        kept: Kept = NOTHING_KEPT,
    ) -> StepReport:
        """What has happened since the last report, and what is held now.

        Args:
            stats: The counters.
            managers: Of the compressed layers.
            kept: What requests can go on from now.
        """
        pool = managers[0].block_pool
        in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        resident_blocks = sum([manager.resident_blocks for manager in managers])
        resident, prefilling, dense = managers[0].requests_by_state()
        before = self._reported
        report = StepReport(
            transitions=stats.transitions - before.transitions,
            evicted_tokens=stats.tokens_evicted - before.tokens_evicted,
            freed_dense_blocks=stats.blocks_freed - before.blocks_freed,
            kept_requests=stats.kept_requests - before.kept_requests,
            continued_requests=stats.continued_requests - before.continued_requests,
            continued_tokens=stats.continued_tokens - before.continued_tokens,
            saved_requests=stats.saved_requests - before.saved_requests,
            loaded_requests=stats.loaded_requests - before.loaded_requests,
            failed_loads=stats.failed_loads - before.failed_loads,
            **kept._asdict(),
            dense_blocks=in_use - resident_blocks,
            resident_blocks=resident_blocks,
            resident=resident,
            prefilling=prefilling,
            dense=dense,
            finished=self._finished,
            took=self._took,
        )
        self._reported = copy.copy(stats)
        self._finished, self._took = Counter(), Counter()
        return report
