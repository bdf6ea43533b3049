"""What the scheduler reports of each step, on its way to the front end's loggers.

It rides in vLLM's `SchedulerStats`, of which only declared fields survive the trip
between processes: in `num_kv_fetch_reqs_by_stage`, a dictionary of counts by name. A
front end that lacks our logger ignores names there that it does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_h2o.core.manager import H2OManager
    from vllm_h2o.core.stats import H2OStats

_PREFIX = "h2o:"
_FINISHED = f"{_PREFIX}finished:"
"""Then the tokens evicted, `:` and those of the context; the value counts requests."""


@dataclass
class StepReport:
    """Increments since the last report, and what is held now.

    Increments, because vLLM gives each report to one front end of possibly several.

    Attributes:
        transitions: Prompts compressed.
        evicted_tokens: Tokens evicted, per layer and head.
        freed_dense_blocks: Dense blocks released by transitions.
        dense_blocks: Blocks of the pool in use that are not resident ones, now.
        resident_blocks: Blocks of requests that are resident, now.
        resident: Requests that are, now.
        prefilling: Requests that hold blocks and will be resident, now.
        kept_whole: Requests that can not outgrow their budget, or keep all, now.
        finished: How many requests have finished, by `(evicted, context)` tokens.
    """

    transitions: int = 0
    evicted_tokens: int = 0
    freed_dense_blocks: int = 0
    dense_blocks: int = 0
    resident_blocks: int = 0
    resident: int = 0
    prefilling: int = 0
    kept_whole: int = 0
    finished: Counter[tuple[int, int]] = field(default_factory=Counter)

    def pack(self) -> dict[str, int]:
        """As counts by name."""
        packed = {_PREFIX + name: getattr(self, name) for name in _COUNTS}
        for (evicted, context), count in self.finished.items():
            packed[f"{_FINISHED}{evicted}:{context}"] = count
        return packed

    @classmethod
    def take(cls, counts: dict[str, int]) -> StepReport | None:
        """Take a report out of counts by name; None: there is none."""
        names = [name for name in counts if name.startswith(_PREFIX)]
        if not names:
            return None
        report = cls()
        for name in names:
            count = counts.pop(name)
            if name.startswith(_FINISHED):
                evicted, context = name.removeprefix(_FINISHED).split(":")
                report.finished[int(evicted), int(context)] = count
            else:
                setattr(report, name.removeprefix(_PREFIX), count)
        return report


_COUNTS = [name for name, value in vars(StepReport()).items() if isinstance(value, int)]


class Reporter:
    """Makes the reports of one scheduler."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._reported = (0, 0, 0)
        self._finished: Counter[tuple[int, int]] = Counter()

    def finish(self, evicted: int, context: int) -> None:
        """Note a request that has finished, in tokens."""
        self._finished[evicted, context] += 1

    def report(self, stats: H2OStats, managers: Sequence[H2OManager]) -> StepReport:
        """What has happened since the last report, and what is held now."""
        pool = managers[0].block_pool
        in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        resident_blocks = sum([manager.resident_blocks for manager in managers])
        resident, prefilling, kept_whole = managers[0].requests_by_state()
        transitions, evicted, freed = self._reported
        report = StepReport(
            transitions=stats.transitions - transitions,
            evicted_tokens=stats.tokens_evicted - evicted,
            freed_dense_blocks=stats.blocks_freed - freed,
            dense_blocks=in_use - resident_blocks,
            resident_blocks=resident_blocks,
            resident=resident,
            prefilling=prefilling,
            kept_whole=kept_whole,
            finished=self._finished,
        )
        self._reported = stats.transitions, stats.tokens_evicted, stats.blocks_freed
        self._finished = Counter()
        return report
