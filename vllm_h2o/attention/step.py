"""The step that a worker executes: its plan, its rows, and what was put off before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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
        self._plan: ResidencyPlan | None = None

    def begin(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """Start a step.

        Args:
            plan: The scheduler's plan.
            gone: Requests that have finished, or whose prompt is read again, since the
                last step.
        """
        self._plan = plan
        self._forget(name for name in gone if name not in plan.kept)
        self.transitions.run()
        self._forget(plan.kept)  # another may go on from what was due of these

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.transitions.forget(request_id)
            for group in self.groups:
                group.forget(request_id)

    def end(self) -> None:
        """Forget the plan: what runs now is a dummy run."""
        self._plan = None

    def clear(self) -> None:
        """Forget all requests: the KV cache goes."""
        self.transitions.clear()
        self.groups.clear()
        self.watchers.clear()

    @property
    def all_decode(self) -> bool:
        """Whether every row decodes, or is a dummy."""
        return not self._plan or bool(self._plan.decodes.all())

    def rows(self, num_reqs: int) -> ResidencyPlan | None:
        """The plan in the order of the batch's rows, or None in a dummy run."""
        if self._plan is None:
            return None
        return self._plan.ordered(list(self.request_ids()[:num_reqs]))
