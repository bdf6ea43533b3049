"""The step that a worker executes: its plan, its rows, and what was put off before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_h2o.attention.drafts import Drafted
from vllm_h2o.attention.prompts import Transitions
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.core.plan import ResidencyPlan


class StepRows:
    """The step that the worker executes: hands the plan to the builders."""

    def __init__(self) -> None:
        self.request_ids: Callable[[], Sequence[str]] = tuple
        """Returns the request ids in the row order of the batch."""
        self.transitions = Transitions()
        self.groups: list[RowPlacements] = []
        """The placements of each KV cache group that is compressed."""
        self.watchers: list[Callable[[Any, torch.Tensor, ResidencyPlan], None]] = []
        """Told of each step by each builder, with its block table; see watch.py."""
        self.drafted: list[Drafted] = []
        """What takes back drafts of the last step, of each group that has some."""
        self.settle_watchers: list[Callable[[dict[str, int]], None]] = []
        """Told how many tokens of the last step were taken back, by request."""
        self._plan: ResidencyPlan | None = None

    def begin(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """Start a step.

        Args:
            plan: The scheduler's plan.
            gone: Requests that have finished, or whose prompt is read again, since the
                last step.
        """
        self._plan = plan
        self.drafted.clear()
        self._forget(name for name in gone if name not in plan.kept)
        self.transitions.run()
        self._forget(plan.kept)  # another may go on from what was due of these

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.transitions.forget(request_id)
            for group in self.groups:
                group.forget(request_id)

    def settle(self, num_sampled: torch.Tensor) -> None:
        """Take back the drafts that were refused, before anything else is run.

        Args:
            num_sampled: `[num_reqs]` tokens that each row of the last step has given:
                one more than it has accepted.
        """
        drafted, self.drafted = self.drafted, []
        by_name: dict[str, int] = {}
        for rows in drafted:
            refused = rows.take_back(num_sampled)
            if self.settle_watchers:
                names = self.request_ids()
                taken_back = zip(rows.index.tolist(), refused.tolist(), strict=True)
                by_name |= {names[i]: count for i, count in taken_back}
        for watcher in self.settle_watchers:
            watcher(by_name)

    def end(self) -> None:
        """Forget the plan: what runs now is a dummy run."""
        self._plan = None

    def clear(self) -> None:
        """Forget all requests: the KV cache goes."""
        self.transitions.clear()
        self.groups.clear()
        self.watchers.clear()
        self.settle_watchers.clear()
        self.drafted.clear()

    @property
    def all_decode(self) -> bool:
        """Whether every row decodes, or is a dummy."""
        return not self._plan or bool(self._plan.decodes.all())

    def rows(self, num_reqs: int) -> ResidencyPlan | None:
        """The plan in the order of the batch's rows, or None in a dummy run."""
        if self._plan is None:
            return None
        return self._plan.ordered(list(self.request_ids()[:num_reqs]))
